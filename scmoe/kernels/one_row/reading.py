"""What kernels of a single row have in common: matrices that are only read.

    P  parts of a sum      K, N  contracted and other width of a product

A tensor core wants 64 rows. With one there is nothing to compute beside reading the weights, so
these kernels read as fast as memory gives: every CTA takes some rows of a matrix, in pieces of a
few hundred columns, and every thread multiplies its columns with the row's numbers and adds up,
nothing of which goes through shared memory. The CTAs' sums are added up by whoever reads them: the
narrower the pieces, the fewer sums a column has, and the more rows a thread has under way.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels.running import compiled

WARPGROUP = 128  # threads
WARPGROUPS = 4  # of a CTA, each with a quarter of its rows
_UNDER_WAY = 64  # numbers of the weights that a thread has asked for and not yet used
# Columns that a CTA takes: a thread reads 4, 8 or 16 bytes of a row at once.
_COLUMNS = (256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class Split:
  """How a product of one row is shared out.

  Attributes:
    columns: that a CTA takes.
    parts: into which the contracted width is cut.
  """

  columns: int
  parts: int

  @property
  def unroll(self) -> int:
    """Rows that a thread has under way."""
    return _UNDER_WAY * WARPGROUP // self.columns


def split(
  width: int,
  out_width: int,
  choices: int,
  num_sms: int,
  multiple: int = 1,
  most: int = 0,
  unit: int = 0,
) -> Split | None:
  """The division that leaves the fewest multiprocessors idle; None: there is none.

  Args:
    width, out_width: K and N.
    choices: C.
    num_sms: multiprocessors.
    multiple: of what the rows of a part are a multiple.
    most: rows of a part at most; 0: any.
    unit: what a piece of columns divides; 0: N.
  """
  found: list[tuple[float, Split]] = []
  for columns in _COLUMNS:
    if (unit or out_width) % columns:
      continue
    least = math.lcm(multiple, WARPGROUPS * Split(columns, 1).unroll)
    divisors = [p for p in range(1, width // least + 1) if width % (p * least) == 0]
    for part in divisors:
      if most and width // part > most:
        continue
      ctas = choices * (out_width // columns) * part
      waves = -(-ctas // num_sms)
      found.append((ctas / (waves * num_sms) / waves**0.5, Split(columns, part)))
  # Of equals the first: narrow columns, few parts.
  return max(found, key=lambda own: own[0])[1] if found else None


def kernel(
  body: Callable[..., None], choices: int, matrices: int, out_width: int, own: Split, *scratch: Any
):
  """A CTA for each choice, piece of columns and part of the rows; writes [C, P, I, N]."""
  return compiled(
    body,
    out_type=jax.ShapeDtypeStruct((choices, own.parts, matrices, out_width), jnp.float32),
    grid=(choices, out_width // own.columns, own.parts),
    grid_names=("choice", "column", "part"),
    num_threads=WARPGROUPS,
    thread_name="wg",
    scratch_types=[
      plgpu.SMEM((WARPGROUPS, matrices, own.columns), jnp.float32),
      everyone(),
      *scratch,
    ],
  )


def everyone():
  """A barrier of all warpgroups."""
  return plgpu.Barrier(num_arrivals=WARPGROUPS)


def place():
  """Which choice, piece of columns and part of the rows this CTA has."""
  return tuple(lax.axis_index(name) for name in ("choice", "column", "part"))


def one_of(expert, matrices):
  """The expert, or any in the place of none: what comes of it is left out of the sum."""
  return jnp.clip(expert, 0, matrices.shape[0] - 1)


def begin_sums(matrices, group, own: Split, rows: int, row, column):
  """Σ_k row(k) · matrix[group, k] over this warpgroup's share of the CTA's rows, for each matrix.

  The first weights are asked for at once; the function that is returned waits for them, asks for
  the next before it uses them, and gives the sums.

  Args:
    matrices: each [groups, K, N].
    group: which of them.
    own: see `Split`.
    rows: of a CTA.
    row: gives the row's k-th number in float32.
    column: number of the piece of columns.
  """
  share = rows // WARPGROUPS
  first = lax.axis_index("part") * rows + lax.axis_index("wg") * share
  at = pl.ds(column * own.columns, own.columns)
  unroll = own.unroll // len(matrices)
  layout = plgpu.Layout.WG_STRIDED((own.columns,), vec_size=own.columns // WARPGROUP)

  def load(k):
    return tuple(tuple(m[group, k + j, at] for m in matrices) for j in range(unroll))

  def add(k, loaded, sums):
    for j, of_row in enumerate(loaded):
      x = row(k + j)
      sums = tuple(s + x * w.astype(jnp.float32) for s, w in zip(sums, of_row))
    return sums

  begun = load(first)

  def finish():
    def step(i, carry):
      loaded, sums = carry
      k = first + i * unroll
      return load(k + unroll), add(k, loaded, sums)

    zero = plgpu.layout_cast(jnp.zeros((own.columns,), jnp.float32), layout)
    steps = share // unroll
    loaded, sums = lax.fori_loop(0, steps - 1, step, (begun, (zero,) * len(matrices)))
    return add(first + (steps - 1) * unroll, loaded, sums)

  return finish


def store_sums(sums, out, shared, barrier, own: Split, column):
  """The warpgroups' sums added up, each warpgroup some of the columns, and written."""
  wg, piece = lax.axis_index("wg"), max(own.columns // WARPGROUPS, WARPGROUP)
  for i, s in enumerate(sums):
    shared[wg, i] = s
  plgpu.barrier_arrive(barrier)
  plgpu.barrier_wait(barrier)

  @pl.when(wg * piece < own.columns)
  def _():
    mine = pl.ds(wg * piece, piece)
    for i in range(len(sums)):
      total = shared[0, i, mine]
      for other in range(1, WARPGROUPS):
        total = total + shared[other, i, mine]
      out[i, pl.ds(column * own.columns + wg * piece, piece)] = total


_CHAIN = 64  # terms


def added_up(sums_PN: jax.Array) -> jax.Array:
  """Σ_p sums[p], as a chain of additions: XLA makes them part of what reads the result, where a sum
  over a dimension is a kernel of its own."""
  if sums_PN.shape[0] > _CHAIN:
    return jnp.sum(sums_PN, axis=0)
  return functools.reduce(operator.add, list(sums_PN))
