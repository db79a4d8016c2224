"""A ring of layers: the experts of K layers are on the device, the others in the host's memory.

When a layer has computed, the ring releases its experts and starts to copy those of the next layer
that is not on the device, while the layers between compute (SE-MoE's ring memory offload:
calculate, release, load). With K = 2, layer 2's experts are copied while layer 1 computes. A ring
copies all experts of a layer, which pays if tokens choose nearly all of them, as in long prompts
and large batches. The copy costs no time if it takes less than a layer's computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from scmoe.offload.memory import Int8, OnDisk, is_away, on_device
from scmoe.parallel.barriers import barrier


class Ring:
  """`LayerParams` (`scmoe.moe.experts`) that keep the experts of K layers on the device.

  Args:
    params: the parameters of every layer; those in the host's memory or on disk are copied.
    sections: K. With 1, a layer's copy starts when the layer before it has computed, so that no
      computation hides it.
  """

  def __init__(self, params: Sequence[Any], sections: int):
    self._params, self._sections = list(params), sections
    for i in range(min(sections, len(self._params))):
      self._params[i] = _copied(self._params[i])

  def take(self, pair: int) -> Any:
    """A layer's parameters, on the device; see `LayerParams`."""
    return self._params[pair]

  def advance(self, pair: int, after: Any) -> Any:
    """Releases a layer's experts and starts the next copy, if a layer is left to copy.

    Args:
      pair: the layer that has computed.
      after: its results.

    Returns:
      `after`, behind a barrier if a copy starts. The next layer must read this value, so that XLA
      keeps the order.
    """
    following = pair + self._sections
    self._params[pair] = None
    if following < len(self._params):
      tied, after = barrier((self._params[following], after))
      self._params[following] = _copied(tied)
    return after


def _copied(params: Any) -> Any:
  """The parameters with the leaves that are elsewhere copied to the device's memory."""
  packed = lambda x: isinstance(x, Int8 | OnDisk)
  return jax.tree.map(lambda x: on_device(x) if is_away(x) else x, params, is_leaf=packed)
