"""A small model with OLMoE's architecture, from which an upcycling makes a shortcut model.

command   python -m scmoe.train --config upcycle_small
          python -m scmoe.convert --workdir runs/upcycle_small --to runs/released
          python -m scmoe.convert --from runs/released --workdir runs/up --upcycle wiring=scmoe_pos2
          python -m scmoe.train --config_json runs/up/config.json --workdir runs/up, with
          train.steps=100, train.batch_size=16, data.seq_len=128, train.eval_every=25,
          optimizer.learning_rate=1e-3 and optimizer.warmup_steps=10
hardware  2 CPU cores, no GPU
time      on cores shared with other work: 2 minutes for this model, 2 to 4 for the 100 steps
expect    validation loss of this model 1.680 (ten batches); of the shortcut model made from it
          2.043 at the start and 1.720 after 100 steps (Python 3.11)
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
  name="upcycle_small",
  model=ModelConfig(
    style="llama",
    wiring="topk",
    mix="direct",
    num_experts=8,
    top_k=2,
    moe_every=1,
    num_layers=4,
    width=128,
    num_heads=4,
    qk_norm="all",
    mlp_hidden=128,
    context=256,
    tie_embeddings=False,
    dtype="float32",
  ),
  router=RouterConfig(normalise=False, balance="megablocks", balance_loss=0.02),
  dispatch=DispatchConfig(transport="dropless"),
  data=DataConfig(seq_len=128, document_mask=False),
  train=TrainConfig(
    steps=400, batch_size=16, log_every=20, eval_every=200, eval_batches=20, sample_tokens=160
  ),
  optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=40),
  checkpoint=CheckpointConfig(every=200, keep=2),
)


def get_config() -> Any:
  """The configuration of the run."""
  return as_config_dict(RUN)


def smoke() -> Any:
  """The reduced configuration, which the tests run: seconds instead of minutes."""
  return as_config_dict(smoke_run(RUN))
