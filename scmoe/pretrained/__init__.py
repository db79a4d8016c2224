"""Released models, in and out: configurations, names of tensors, folders of safetensors."""
