"""Compares a run's configuration and data with those stored by the run that it resumes or reads."""

from __future__ import annotations

from typing import Any

from scmoe.base.errors import ConfigError, DataError
from scmoe.data.pipeline import INFORMATIVE

# Fields and sections that a resumed run may change. Most do not change what a step computes, but
# for rounding. These may: `train.steps` stretches the schedule of the learning rate; with `overlap`
# or `train.tune` a search may choose other chunks (see `Variant`); after a change of
# `multitask.loads` or `multitask.plan` the run plans anew what its next steps compute; and on
# another `mesh` experts of limited capacity may drop other choices, if `dispatch.groups` is 0,
# tokens may get other experts, with `router.compat.round_to` or `router.compat.uniform`, and with
# `multitask` other rows may share a microbatch.
SAFE = (
  "name",
  "model.ffn.impl",
  "model.ffn.backend",
  "model.ffn.num_sms",
  "optimizer.ablation.masters",
  "dispatch.nodes",
  "dispatch.overflow",
  "dispatch.adaptive_r",
  "overlap",
  "multitask.loads",
  "multitask.plan",
  "train.steps",
  "train.stop_after",
  "train.log_every",
  "train.eval_every",
  "train.eval_batches",
  "train.sample_every",
  "train.sample_tokens",
  "train.router_every",
  "train.remat",
  "train.tune",
  "train.tune_rounds",
  "train.max_skipped_in_row",
  "train.collapse_steps",
  "train.spike_action",
  "train.watchdog_seconds",
  "train.first_step_seconds",
  "train.tensorboard",
  "train.trackers",
  "train.profile_step",
  "train.profile_steps",
  "mesh",
  "checkpoint",
  "distributed",
)
# Fields of `model` and `router` that may differ where only parameters are read: outside training
# they do not decide which function of a single document the parameters compute, but for rounding
# and for which choices are dropped where experts have a capacity.
_CHOSEN = {
  "model": ("dtype", "document_mask", "init_std"),
  "router": ("noise", "balance", "balance_over", "balance_loss", "z_loss", "bias_rate",
             "bias_proportional", "bias_derivative", "real_experts"),
}  # fmt: skip
_ABSENT = "(not set)"


def architecture(config: dict[str, Any]) -> dict[str, Any]:
  """The fields of `model` and `router`, without those in `_CHOSEN`."""
  parts = {part: config.get(part) for part in _CHOSEN}
  return {
    part: {name: value for name, value in fields.items() if name not in _CHOSEN[part]}
    for part, fields in parts.items()
    if isinstance(fields, dict)
  }


def other_architecture(stored: dict[str, Any], current: dict[str, Any]) -> str:
  """Says which fields of `model` and `router`, neither in `_CHOSEN` nor in `SAFE`, differ.

  It names the first three fields, and the number of further ones; "" if there are none: then
  parameters of the one can be used with the other.

  Args:
    stored, current: nested dicts of whole configurations.
  """
  return _some(_compare(architecture(stored), architecture(current))[1])


def check_config(
  stored: dict[str, Any],
  current: dict[str, Any],
  *,
  allow_change: bool = False,
  fits: bool = True,
) -> list[str]:
  """Checks a resumed run's configuration; returns lines `field: stored -> current` of what differs.

  Args:
    stored: nested dict of the stored configuration, or of sections of it.
    current: the same of this run's configuration.
    allow_change: accept any difference, if the stored arrays fit.
    fits: whether the stored arrays have the names, shapes and types that this run asks for. If not,
      the error does not suggest `checkpoint.allow_config_change`, which would not help.

  Raises:
    ConfigError: a field outside `SAFE` differs, and not both `allow_change` and `fits` are true.
  """
  lines, refused = _compare(stored, current)
  if refused and not (allow_change and fits):
    changed = f"the checkpoint was written with another configuration: {_some(refused)}"
    remedy = "undo the change, use another workdir, or set checkpoint.allow_config_change=True"
    if not fits:
      remedy = "its arrays do not fit this one; undo the change, or use another workdir"
    raise ConfigError(f"{changed}; {remedy}")
  return lines


def check_data(
  stored: dict[str, Any], current: dict[str, Any], *, allow_change: bool = False
) -> list[str]:
  """Checks a resumed run's data; returns lines `field: stored -> current` of what differs.

  The number of processes may differ: any number reads the same batches in the same order.

  Args:
    stored, current: fingerprints of the checkpoint's and of this run's data.
    allow_change: accept any difference.

  Raises:
    DataError: a field differs that has to be the same, and `allow_change` is False.
  """
  lines, _ = _compare(stored, current)
  refused = [line for line in lines if line.partition(":")[0] not in INFORMATIVE]
  if refused and not allow_change:
    raise DataError(
      f"the data are not those of the checkpoint: {_some(refused)}; its position in them would "
      "mean nothing. Restore the data, use another workdir, or set "
      "checkpoint.allow_config_change=True"
    )
  return lines


def _compare(stored: dict[str, Any], current: dict[str, Any]) -> tuple[list[str], list[str]]:
  """(lines `field: stored -> current` of all fields that differ, those of fields not in `SAFE`)."""
  before, after = _leaves(stored), _leaves(current)
  names = [n for n in {**before, **after} if before.get(n, _ABSENT) != after.get(n, _ABSENT)]
  lines = {n: f"{n}: {before.get(n, _ABSENT)} -> {after.get(n, _ABSENT)}" for n in names}
  safe = lambda n: any(n == s or n.startswith(f"{s}.") for s in SAFE)
  return list(lines.values()), [line for n, line in lines.items() if not safe(n)]


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
  """Dotted name -> value, of nested dictionaries; lists stay whole, and tuples become lists."""
  if not isinstance(tree, dict):
    return {prefix: list(tree) if isinstance(tree, tuple) else tree}
  out: dict[str, Any] = {}
  for key, value in tree.items():
    out |= _leaves(value, f"{prefix}.{key}" if prefix else str(key))
  return out


def _some(lines: list[str], count: int = 3) -> str:
  more = f" and {len(lines) - count} more" if len(lines) > count else ""
  return "; ".join(lines[:count]) + more
