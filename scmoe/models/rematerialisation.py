"""Presets of `train.remat`: which values of a pair the backward pass recomputes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scmoe.base.errors import ConfigError
from scmoe.parallel.shares import GATHERED

REMATS = ("none", "dots", "moe", "full")


def rematerialised(
  body: Callable[..., Any], remat: str, kept: tuple[str, ...] = (), *, gathers: bool = False
) -> Callable[..., Any]:
  """`body` under the preset `remat`, which says what its backward pass recomputes.

  Args:
    body: runs one pair.
    remat: see `Pass.remat`. With none and moe only gathers are recomputed here; with moe the
      experts recompute their activations themselves (`OnDevice.recompute`).
    kept: names of values (`jax.ad_checkpoint.checkpoint_name`) that the forward pass keeps under
      any preset.
    gathers: whether the body gathers its parameters from the ranks' shares, or fetches them
      from the host's memory. The backward pass does so again unless `kept` contains `GATHERED`.

  Raises:
    ConfigError: the preset is unknown.
  """
  policies = jax.checkpoint_policies
  if remat in ("none", "moe"):
    if not gathers or GATHERED in kept:
      return body
    return jax.checkpoint(body, policy=_all_but_gathers)
  named = policies.save_only_these_names("moe_rows", *kept)
  if remat == "dots":
    dots = policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(body, policy=policies.save_from_both_policies(dots, named))
  if remat == "full":
    return jax.checkpoint(body, policy=named)
  raise ConfigError(f"train.remat={remat!r} is unknown; one of: {', '.join(REMATS)}")


# Operations that only move data, such as those that split a gathered array. If a result of one of
# them were saved, it would keep a gathered parameter in memory after all.
_MOVES = (
  "all_gather",
  "device_put",
  "name",
  "slice",
  "reshape",
  "transpose",
  "squeeze",
  "dynamic_slice",
  "split",
)


def _all_but_gathers(operation: Any, *inputs: Any, **_: Any) -> bool:
  """A policy of rematerialisation: True, to save a result, unless one of `_MOVES` moves floats.

  The backward pass gathers parameters again, and moves other values again from saved ones, each at
  the cost of a copy.
  """
  moved = operation.name in _MOVES
  return not (moved and all(jnp.issubdtype(x.dtype, jnp.floating) for x in inputs))
