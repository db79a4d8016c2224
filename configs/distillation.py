"""A student with few experts that learns from a teacher with many (SE-MoE's second step).

command   python -m scmoe.train --config distillation --workdir runs/teacher, with
          model.num_experts=16 and train.steps=1200
          python -m scmoe.train --config distillation --workdir runs/student, with
          train.teacher=runs/teacher
          python -m scmoe.train --config distillation --workdir runs/alone
hardware  2 CPU cores, no GPU
time      on cores shared with other work: 6 minutes for the teacher, 2 for the student, 1.5 for
          the student without a teacher
expect    validation bits per byte: teacher 2.072; student after 400 steps 2.893, 2.875 and 2.834
          (train.seed 0, 1, 2); the same without a teacher 2.972, 2.949 and 2.971 (Python 3.11)
data      stdlib: Python files of the running interpreter, and its language reference as prose
"""

from __future__ import annotations

from typing import Any

from scmoe.data.config import DataConfig
from scmoe.models.config import ModelConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.run.config import RunConfig, as_config_dict, smoke_run
from scmoe.training.options import CheckpointConfig, OptimizerConfig, TrainConfig

RUN = RunConfig(
  name="distillation",
  model=ModelConfig(
    wiring="scmoe_pos2",
    num_experts=2,
    num_layers=4,
    width=96,
    num_heads=4,
    context=128,
    dtype="float32",
  ),
  router=RouterConfig(balance_loss=0.01),
  dispatch=DispatchConfig(transport="dropless"),
  data=DataConfig(seq_len=128, document_mask=False),
  train=TrainConfig(
    steps=400,
    batch_size=16,
    teacher_share=0.5,
    teacher_temperature=2.0,
    log_every=20,
    eval_every=200,
    eval_batches=20,
    sample_tokens=0,
  ),
  optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=40),
  checkpoint=CheckpointConfig(every=200, keep=1),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """The reduced configuration, which the tests run: seconds instead of minutes."""
  return as_config_dict(smoke_run(RUN))
