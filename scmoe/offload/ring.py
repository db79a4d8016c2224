"""A ring of layers: the experts of K layers are on the device, the others in the host's memory.

When a layer has computed, its experts are released and the copy of the next missing layer begins,
beside the computation of the layers between (SE-MoE's ring memory offload: calculate, release,
load). All experts of a layer are copied. That pays where tokens choose nearly all of them: long
prompts and large batches. The copy costs no time if it is shorter than a layer's computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from scmoe.offload.memory import Int8, OnDisk, is_away, on_device
from scmoe.parallel.barriers import barrier


class Ring:
  """Layers whose experts come to the device K at a time; a `scmoe.moe.experts.LayerParams`.

  Args:
    params: of every layer; leaves in the host's memory are copied.
    sections: K, the most layers on the device at once. 1 begins a copy when the layer before it has
      computed.
  """

  def __init__(self, params: Sequence[Any], sections: int):
    self._params, self._sections = list(params), sections
    for i in range(min(sections, len(self._params))):
      self._params[i] = _copied(self._params[i])

  def take(self, pair: int) -> Any:
    """A layer's parameters, on the device; see `LayerParams`."""
    return self._params[pair]

  def advance(self, pair: int, after: Any) -> Any:
    """Releases a layer's experts and begins the next copy.

    Args:
      pair: the layer that has computed.
      after: its results.

    Returns:
      `after`; the next layer must read this value.
    """
    following = pair + self._sections
    self._params[pair] = None
    if following < len(self._params):
      tied, after = barrier((self._params[following], after))
      self._params[following] = _copied(tied)
    return after


def _copied(params: Any) -> Any:
  """Parameters with all leaves in the device's memory."""
  packed = lambda x: isinstance(x, Int8 | OnDisk)
  return jax.tree.map(lambda x: on_device(x) if is_away(x) else x, params, is_leaf=packed)
