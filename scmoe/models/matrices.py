"""Which parameters of a block are matrices, and which of their dimensions are input and output.

The name of a parameter and that of its module say so: `experts.up` [L, E, D, F] is one matrix
[D, F] for each of L layers and E experts. Muon's update (`scmoe.training.muon`) and low-rank
adapters (`scmoe.models.low_rank`) treat such matrices one by one.
"""

from __future__ import annotations

import re
from typing import Any

import jax

# (input dimensions, output dimensions) of a matrix, counted from the end of its array's dimensions:
# -1 is the last. Those before them are layers and experts. `query` [L, D, H, N] has D as input,
# (-3,), and H and N as output, (-2, -1).
Sides = tuple[tuple[int, ...], tuple[int, ...]]
_HEADS_OUT, _HEADS_IN, _PLAIN = ((-3,), (-2, -1)), ((-3, -2), (-1,)), ((-2,), (-1,))
# Name of a parameter -> its sides, if one of `HOLDERS` has it.
MATRICES: dict[str, Sides] = {
  "query": _HEADS_OUT,
  "key": _HEADS_OUT,
  "value": _HEADS_OUT,
  "kv_up": _HEADS_OUT,
  "out": _HEADS_IN,
  "query_down": _PLAIN,
  "kv_down": _PLAIN,
  "up": _PLAIN,
  "gate": _PLAIN,
  "down": _PLAIN,
}
HOLDERS = ("attention", "mlp", "experts")  # modules with matrices
# The kernel [rows, columns, in, out] of a stem's convolution is one matrix with rows · columns · in
# rows: the numbers that one output reads.
_KERNEL = re.compile(r"(^|/)embedding/convolutions/\d+/kernel$")
_KERNEL_SIDES: Sides = ((-4, -3, -2), (-1,))


def holder_and_sides(path: tuple[Any, ...], ndim: int) -> tuple[str, Sides] | None:
  """(name of the module that holds a parameter, the parameter's sides); None if it is no matrix.

  Args:
    path: of the parameter, as `jax.tree_util` gives it.
    ndim: number of its dimensions.
  """
  names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
  if len(names) < 2 or names[-2] not in HOLDERS or names[-1] not in MATRICES:
    return None
  reads, writes = MATRICES[names[-1]]
  return None if ndim < len(reads) + len(writes) else (names[-2], (reads, writes))


def kernel_sides(path: tuple[Any, ...], ndim: int) -> Sides | None:
  """The sides of a kernel of a vision model's stem; None for any other parameter.

  Args:
    path: of the parameter, as `jax.tree_util` gives it.
    ndim: number of its dimensions.
  """
  name = jax.tree_util.keystr(path, simple=True, separator="/")
  return _KERNEL_SIDES if ndim == 4 and _KERNEL.search(name) else None
