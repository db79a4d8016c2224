"""A ring of layers: the experts of K of them on the device, the others in the host's memory.

After a layer has computed, its section is released and the next layer that has none is copied,
while the layers between compute (SE-MoE's ring memory offload: calculate, release, load). All
experts of a layer travel, so that this pays where tokens ask for nearly all of them: long prompts,
large batches. A copy costs nothing where it is shorter than the computation of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from scmoe.offload.experts import Int8, OnDisk, is_away, on_device
from scmoe.parallel.barriers import barrier


class Ring:
  """Layers whose experts come to the device K at a time, in order.

  Args:
    params: of every layer; what lies in the host's memory is copied, the rest is as it is.
    sections: K; no more are on the device at once. 1 copies a layer when the one before is done.
  """

  def __init__(self, params: Sequence[Any], sections: int):
    self._params, self._sections = list(params), sections
    for i in range(min(sections, len(self._params))):
      self._params[i] = _copied(self._params[i])

  def take(self, layer: int) -> Any:
    """A layer's parameters, on the device."""
    return self._params[layer]

  def advance(self, layer: int, after: Any) -> Any:
    """Begins the copy that a layer's section is free for.

    Args:
      layer: that has computed.
      after: what it has computed.

    Returns:
      `after`, which what comes next has to read.
    """
    following = layer + self._sections
    self._params[layer] = None
    if following < len(self._params):
      tied, after = barrier((self._params[following], after))
      self._params[following] = _copied(tied)
    return after


def _copied(params: Any) -> Any:
  """Leaves that lie elsewhere, in the device's memory."""
  packed = lambda x: isinstance(x, Int8 | OnDisk)
  return jax.tree.map(lambda x: on_device(x) if is_away(x) else x, params, is_leaf=packed)
