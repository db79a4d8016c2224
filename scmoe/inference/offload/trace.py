"""Counts the hits that a cache of experts would have on recorded requests, under a given policy.

Belady's rule replaces the expert whose next request is the latest. It needs to know the future
requests, so it cannot run while tokens are decoded; but no policy has more hits, so its number of
hits is an upper bound. NumPy computes on the host.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

from scmoe.offload.cache import CachePolicy

POLICIES = ("belady", "lfu", "lru")


def hits(
  trace_LSE: Bool[np.ndarray, "L S E"],
  size: int,
  policy: str,
  *,
  decay: float = CachePolicy().decay,
  held_LC: Int[np.ndarray, "L C"] | None = None,
  worth_LE: Float[np.ndarray, "L E"] | None = None,
) -> int:
  """Number of requests, over all layers and steps, that find their expert in their layer's cache.

  Args:
    trace_LSE: the experts that each of L layers requested in each of S steps. Each layer has a
      cache of its own.
    size: C, the number of places of each layer's cache; in a step a layer requests at most C
      experts.
    policy: one of `POLICIES`; for lfu and lru see `CachePolicy`.
    decay: see `CachePolicy`; only for lfu.
    held_LC: the expert in each place of the cache before the first step, -1 for none; None: all
      places are empty.
    worth_LE: every expert's worth by this policy (`CachePolicy`) before the first step; None: 0.
      belady does not read it; for lru only its order counts.

  Raises:
    ValueError: the policy is unknown, or a layer requests more than C experts in a step.
  """
  if policy not in POLICIES:
    raise ValueError(f"policy={policy!r} is unknown; one of: {', '.join(POLICIES)}")
  if trace_LSE.size and trace_LSE.sum(-1).max() > size:
    raise ValueError(f"size={size} is too small: a step requests {trace_LSE.sum(-1).max()} experts")
  if held_LC is None:
    held_LC = np.full((len(trace_LSE), size), -1)
  if worth_LE is None:
    worth_LE = np.zeros((len(trace_LSE), trace_LSE.shape[-1]), np.float32)
  layers = zip(trace_LSE, held_LC, worth_LE)
  return sum(_hits_of_layer(*layer, policy, decay) for layer in layers)


def _hits_of_layer(
  needed_SE: np.ndarray, held_C: np.ndarray, worth_E: np.ndarray, policy: str, decay: float
) -> int:
  """Number of one layer's requests that find their expert in its cache; see `hits`."""
  next_SE = _next_uses(needed_SE) if policy == "belady" else None
  # For each expert in the cache, its place there.
  held = {int(e): place for place, e in enumerate(held_C) if e >= 0}
  free = [place for place, e in enumerate(held_C) if e < 0]
  if policy == "lru":  # a request of any step is newer than those before the first step
    worth_E = worth_E - worth_E.max()
  found = 0
  for step, needed_E in enumerate(needed_SE):
    wanted = np.flatnonzero(needed_E).tolist()
    if policy == "lfu":
      worth_E = worth_E * np.float32(decay) + needed_E
    elif policy == "lru":
      worth_E = np.where(needed_E, np.float32(step + 1), worth_E)
    else:
      assert next_SE is not None
      worth_E = -next_SE[step]
    missing = [e for e in wanted if e not in held]
    found += len(wanted) - len(missing)
    for expert in missing:
      if free:
        held[expert] = free.pop(0)
        continue
      others = (e for e in held if not needed_E[e])
      gone = min(others, key=lambda e: (worth_E[e], held[e]))
      held[expert] = held.pop(gone)
  return found


def _next_uses(needed_SE: np.ndarray) -> np.ndarray:
  """For each step and expert, the next later step that requests the expert: float64 [S, E].

  It is infinite if there is none.
  """
  steps, count = needed_SE.shape
  next_SE = np.full((steps, count), np.inf)
  following = np.full(count, np.inf)
  for step in reversed(range(steps)):
    next_SE[step] = following
    following = np.where(needed_SE[step], step, following)
  return next_SE
