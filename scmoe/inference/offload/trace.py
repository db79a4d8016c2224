"""What a cache of experts would have hit on a recorded trace, under several policies. Pure NumPy.

Belady's rule, to replace what is asked for again the latest, needs the future and is the bound that
a policy is measured against.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

from scmoe.offload.experts import Migration

POLICIES = ("belady", "lfu", "lru")


def hits(
  trace_LSE: Bool[np.ndarray, "L S E"],
  slots: int,
  policy: str,
  *,
  decay: float = Migration.decay,
  held_LC: Int[np.ndarray, "L C"] | None = None,
  worth_LE: Float[np.ndarray, "L E"] | None = None,
) -> int:
  """Requests that find their expert in a cache.

  Args:
    trace_LSE: the experts that each of L layers needed in each of S steps, each layer with a cache
      of its own.
    slots: C of every layer; no step asks for more.
    policy: of `POLICIES`; lfu and lru as in `scmoe.offload.experts.Migration`.
    decay: of lfu.
    held_LC: the expert in each slot before the first step, -1 for none; None: all are empty.
    worth_LE: what lfu or lru knew of each expert by then; None: nothing.

  Raises:
    ValueError: the policy is unknown, or a step asks for more experts than there are slots.
  """
  if policy not in POLICIES:
    raise ValueError(f"policy={policy!r} is none of {', '.join(POLICIES)}")
  if trace_LSE.size and trace_LSE.sum(-1).max() > slots:
    raise ValueError(f"a step asks for {trace_LSE.sum(-1).max()} experts, slots={slots}")
  if held_LC is None:
    held_LC = np.full((len(trace_LSE), slots), -1)
  if worth_LE is None:
    worth_LE = np.zeros((len(trace_LSE), trace_LSE.shape[-1]), np.float32)
  layers = zip(trace_LSE, held_LC, worth_LE)
  return sum(_hits_of_layer(*layer, policy, decay) for layer in layers)


def _hits_of_layer(
  asked_SE: np.ndarray, held_C: np.ndarray, worth_E: np.ndarray, policy: str, decay: float
) -> int:
  next_SE = _next_uses(asked_SE) if policy == "belady" else None
  held = {int(e): slot for slot, e in enumerate(held_C) if e >= 0}  # expert: slot
  free = [slot for slot, e in enumerate(held_C) if e < 0]
  found = 0
  for step, asked_E in enumerate(asked_SE):
    wanted = np.flatnonzero(asked_E).tolist()
    if policy == "lfu":
      worth_E = worth_E * np.float32(decay) + asked_E
    elif policy == "lru":
      worth_E = np.where(asked_E, np.float32(step + 1), worth_E)
    else:
      assert next_SE is not None
      worth_E = -next_SE[step]
    missing = [e for e in wanted if e not in held]
    found += len(wanted) - len(missing)
    for expert in missing:
      if free:
        held[expert] = free.pop(0)
        continue
      others = (e for e in held if not asked_E[e])
      gone = min(others, key=lambda e: (worth_E[e], held[e]))
      held[expert] = held.pop(gone)
  return found


def _next_uses(asked_SE: np.ndarray) -> np.ndarray:
  """float64 [S, E]: the next step after each that asks for each expert; infinite if none does."""
  steps, count = asked_SE.shape
  next_SE = np.full((steps, count), np.inf)
  following = np.full(count, np.inf)
  for step in reversed(range(steps)):
    next_SE[step] = following
    following = np.where(asked_SE[step], step, following)
  return next_SE
