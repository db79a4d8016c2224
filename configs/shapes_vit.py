"""A small ViT-MoE on shapes that this project draws: a laptop's CPU, nothing to download.

command   python -m scmoe.train --config shapes_vit
          (--config.data.source=digits for scikit-learn's digits: pip install scikit-learn)
hardware  2 CPU cores, no GPU
time      not measured yet
expect    not measured yet; a guess is right in 10 %
data      shapes: 20,000 drawn images of ten classes, 16 x 16 pixels
"""

from __future__ import annotations

from typing import Any

from scmoe.data.config import DataConfig
from scmoe.models.config import ModelConfig
from scmoe.models.vision.augment import AugmentConfig
from scmoe.models.vision.options import VisionConfig
from scmoe.run.config import RunConfig, as_config_dict, smoke_run
from scmoe.training.options import CheckpointConfig, OptimizerConfig, TrainConfig

RUN = RunConfig(
  name="shapes_vit",
  model=ModelConfig(
    architecture="vit",
    vision=VisionConfig(size=16, patch=4, channels=1),
    wiring="scmoe_pos2",
    num_experts=4,
    num_layers=4,
    width=64,
    num_heads=4,
    mlp_hidden=128,
    dtype="float32",
  ),
  data=DataConfig(source="shapes"),
  augment=AugmentConfig(crop=1),
  train=TrainConfig(steps=300, batch_size=64, log_every=20, eval_every=150, sample_tokens=0),
  optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=30),
  checkpoint=CheckpointConfig(every=150, keep=2),
)


def get_config() -> Any:
  """The run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """Seconds instead of minutes: what the tests run."""
  return as_config_dict(smoke_run(RUN))
