"""Image classifiers of block pairs: ViT-MoE and Swin-MoE."""
