"""Upper bounds of the configuration's numbers, which catch typing errors before anything is built.

Without them jax would trace `model.num_layers=1000000000` for hours, and a `model.context` of 10^18
would end in an OverflowError, since jax counts in int32. The bounds lie far above every model that
has been trained. Other limits follow from the run, such as that of its layers (`check_excess`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scmoe.base.errors import ConfigError

INT32 = 2**31 - 1  # largest dimension of an array in jax
COUNT = 2**53  # bound of steps, bytes and tokens: float64 and JSON hold smaller ones exactly

# Field -> upper bound. The bound of all other whole numbers is INT32.
MOST = {
  "model.num_layers": 10_000,
  "model.num_experts": 2**16,
  "model.zero_experts": 2**16,
  "model.width": 2**20,
  "model.num_heads": 2**16,
  "model.num_kv_heads": 2**16,
  "model.mlp_hidden": 2**24,
  "model.expert_hidden": 2**24,
  "model.shared_hidden": 2**24,
  "model.vocab_size": 2**24,
  "model.context": 2**28,
  "model.head_dim": 2**16,
  "model.kv_lora_rank": 2**20,
  "model.q_lora_rank": 2**20,
  "model.qk_nope_head_dim": 2**16,
  "model.qk_rope_head_dim": 2**16,
  "model.v_head_dim": 2**16,
  "router.compat.gates": 64,
  "router.tasks": 64,
  "router.cosine_dim": 2**20,
  "router.n_group": 2**16,
  "router.topk_group": 2**16,
  "dispatch.groups": 2**20,
  "dispatch.nodes": 2**20,
  "data.vocab_size": 2**24,
  "data.seq_len": 2**28,
  "data.limit_bytes": COUNT,
  "data.document_bytes": COUNT,
  "data.prefetch": 2**16,
  "data.read_threads": 2**10,
  "mesh.data": 2**20,
  "mesh.expert": 2**20,
  "mesh.tensor": 2**20,
  "mesh.sequence": 2**20,
  "mesh.bucket_bytes": COUNT,
  "overlap.flight": 2**10,
  "train.batch_size": 2**24,
  "train.steps": COUNT,
  "train.tokens_per_step": COUNT,
  "train.seed": 2**63 - 1,
  "train.stop_after": COUNT,
  "train.eval_every": COUNT,
  "train.eval_batches": COUNT,
  "train.sample_every": COUNT,
  "train.router_every": COUNT,
  "train.log_every": COUNT,
  "train.profile_step": COUNT,
  "train.collapse_steps": COUNT,
  "checkpoint.every": COUNT,
  "checkpoint.keep": COUNT,
  "checkpoint.keep_every": COUNT,
  "optimizer.warmup_steps": COUNT,
}


def _layers(run: Any) -> int:
  swin = run.model.architecture == "swin"
  return sum(run.model.vision.stage_depths) if swin else run.model.num_layers


def _microbatches(run: Any) -> int:
  images = run.model.reads_images
  return run.train.microbatches(run.model.vision.side**2 if images else run.data.seq_len)


# Field of the command line -> the number of things that it is about in a run, and what they are.
_IN_A_RUN: dict[str, tuple[Callable[[Any], int], str]] = {
  "mesh.moments_ahead": (_layers, "layers of the model"),
  "mesh.moments_kept": (_layers, "layers of the model"),
  "overlap.flight": (_microbatches, "microbatches of a step"),
  "train.profile_step": (lambda run: run.train.steps, "steps of train.steps"),
  "train.stop_after": (lambda run: run.train.steps, "steps of train.steps"),
  "train.collapse_steps": (lambda run: run.train.steps, "steps of train.steps"),
  "model.vision.moe_stages": (
    lambda run: len(run.model.vision.stage_depths),
    "stages of the model",
  ),
}


def check_excess(name: str, value: Any, run: Any) -> None:
  """Checks a number of the command line against the number of things that it is about.

  A larger number would mean no more than that number. Fields of a config file are not checked: a
  smoke run of it has fewer layers and steps.

  Args:
    name: dotted name of the field.
    value: its value.
    run: a `RunConfig`.

  Raises:
    ConfigError: the value is larger, e.g. `mesh.moments_ahead` than the number of layers.
  """
  if name not in _IN_A_RUN:
    return
  count, what = _IN_A_RUN[name]
  if value > (most := count(run)):
    raise ConfigError(f"{name}={value} is more than the {most} {what}; use at most {most}")


def check_bound(path: str, value: Any) -> None:
  """Checks a whole number of the configuration against its bound.

  Raises:
    ConfigError: the value exceeds its bound.
  """
  most = MOST.get(path, INT32)
  if type(value) is int and value > most:
    raise ConfigError(f"{path}={value} is too large; the most is {most}")
