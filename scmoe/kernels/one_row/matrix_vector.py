"""The product of one row and a matrix, as the kernels of `experts` and `linear` compute it.

    P  parts of a sum      K, N  contracted and other width of a product

With a single row a product takes as long as reading the weights, so these kernels are made to read
at the memory's full speed. They do not use tensor cores, which multiply 64 rows at once. Every CTA
takes some rows of the matrix and a piece of 256, 512 or 1024 columns. Every thread multiplies its
columns by the row's numbers and adds up in registers; of the sums only the warpgroups' totals go
through shared memory.

Whatever reads the product adds up the CTAs' partial sums. For example K = 2048 in P = 4
parts and pieces of 256 columns: each CTA reads 512 rows of its piece, each of its 4 warpgroups 128
rows, and each thread 2 columns, with loads of 32 rows in flight. The narrower the pieces, the more
pieces there are: fewer parts then suffice to use all multiprocessors, so a column has fewer partial
sums, and more rows are in flight.
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

from scmoe.kernels.launch import compiled

WARPGROUP = 128  # Threads of a warpgroup.
WARPGROUPS = 4  # Warpgroups of a CTA; each takes a quarter of the CTA's rows.
_IN_FLIGHT = 64  # Weights that a thread loads ahead, while it multiplies those loaded before.
# Columns of a piece: a thread loads 4, 8 or 16 bytes of a row of 16-bit floats at once.
_COLUMNS = (256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class Split:
  """How a product of one row is divided among CTAs.

  Attributes:
    columns: width of a CTA's piece.
    parts: P, into which the contracted width is cut.
  """

  columns: int
  parts: int

  @property
  def unroll(self) -> int:
    """Rows that a thread loads ahead, of all matrices together: with two, half of them of each."""
    return _IN_FLIGHT * WARPGROUP // self.columns


def split(
  width: int,
  out_width: int,
  choices: int,
  num_sms: int,
  multiple: int = 1,
  most: int = 0,
  unit: int = 0,
) -> Split | None:
  """The division among CTAs that uses the multiprocessors best; None if no division fits.

  The CTAs run in waves of at most `num_sms`. The best division has the largest share of busy
  multiprocessors; so that fewer waves are preferred, this share is divided by the square root of
  the number of waves. Example: 198 CTAs on 132 multiprocessors are two waves, which are 75 % full,
  and count as 0.75 / √2 = 0.53.

  Args:
    width, out_width: K and N.
    choices: C, choices of an expert whose products run at once; 1 for a dense matrix.
    num_sms: multiprocessors.
    multiple: the rows of a part are a multiple of this, and of the rows that the CTA's four
      warpgroups load ahead.
    most: most rows of a part; 0: any number.
    unit: a number that the columns of a piece must divide; 0: N.
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
  # Of equally good divisions `max` returns the first: the narrowest pieces, then the fewest parts.
  return max(found, key=lambda own: own[0])[1] if found else None


def kernel(
  body: Callable[..., None], choices: int, matrices: int, out_width: int, own: Split, *scratch: Any
):
  """Builds a kernel with a CTA for each choice, piece of columns and part of the rows.

  Its result is float32 [C, P, I, N], for C `choices` and the I `matrices` of which each CTA takes a
  piece; N is `out_width`. The body gets references to the inputs, the result, shared memory for
  `store_sums`, a barrier of all warpgroups, and the `scratch`.
  """
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
  """A barrier that completes when all four warpgroups of a CTA have arrived."""
  return plgpu.Barrier(num_arrivals=WARPGROUPS)


def place():
  """The indices of this CTA's choice, piece of columns and part of the rows."""
  return tuple(lax.axis_index(name) for name in ("choice", "column", "part"))


def one_of(expert, matrices):
  """An expert's index, clipped to those of `matrices`; `experts` drops what a clipped one gives."""
  return jnp.clip(expert, 0, matrices.shape[0] - 1)


def begin_sums(matrices, group, own: Split, rows: int, row, column):
  """Begins Σ_k row(k) · matrix[group, k, piece] over this warpgroup's rows k, for each matrix.

  Args:
    matrices: each [groups, K, N].
    group: the index of the group.
    own: how the product is divided.
    rows: how many rows the CTA takes.
    row: k -> the row's k-th number in float32.
    column: index of the piece of columns.

  Returns:
    A function without arguments that returns the sums. The first loads have begun by now, so the
    kernel can compute the row before it calls the function. Before the function uses the weights
    of one load, it begins the next load, if there is one.
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
  """Adds up the sums of the CTA's warpgroups, and writes the totals to `out`.

  `out` is [I, N]; this piece's columns of it are written. A warpgroup adds up a quarter of the
  piece's columns, or 128 if that is more: in a piece of 256 columns the first two warpgroups add up
  128 each, and the others none.
  """
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


_CHAIN = 64  # most terms of a chain of additions


def added_up(sums_PN: jax.Array) -> jax.Array:
  """Σ_p sums[p]: a chain of additions if P is at most 64, else `jnp.sum`.

  XLA can fuse the chain into a kernel of XLA that reads the result. `jnp.sum` is one kernel more.
  """
  if sums_PN.shape[0] > _CHAIN:
    return jnp.sum(sums_PN, axis=0)
  return functools.reduce(operator.add, list(sums_PN))
