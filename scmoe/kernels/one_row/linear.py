"""Products of a single token with dense matrices, for decoding one sequence.

    D  width      N  outputs of a matrix      P  parts of a sum      E  outputs of a narrow matrix

Such a product takes as long as reading the matrix from memory and launching the product's kernels.
cuBLAS is made for many rows: for one row it may read at half of the memory's speed, and for a
narrow matrix launch several kernels.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.kernels.launch import interpretation, resolve_num_sms
from scmoe.kernels.one_row.matrix_vector import (
  Split,
  added_up,
  begin_sums,
  everyone,
  kernel,
  place,
  split,
  store_sums,
)
from scmoe.kernels.one_row.without_gradient import without_gradient


class ComputedRow(Protocol):
  """A row that the products' kernel computes from other arrays before it multiplies; a pytree.

  For example a row under a norm (`norm.Normalised`): each CTA normalises its part of the row, and
  no kernel has to write the normalised row first.

  Attributes:
    width: D.
    size: numbers in all; D for a single row.
    dtype: the type that the row is rounded to.
  """

  @property
  def width(self) -> int: ...

  @property
  def size(self) -> int: ...

  @property
  def dtype(self) -> Any: ...

  @property
  def arrays(self) -> tuple[Array, ...]:
    """The kernel's inputs for this row."""
    ...

  def takes(self, rows: int, backend: str) -> bool:
    """Whether a CTA can compute a part of `rows` numbers of the row; `backend` as in `products`."""
    ...

  def write(self, arrays: Sequence[Any], part: Any, to: Any) -> None:
    """Writes a part of the row; one warpgroup of a kernel calls this.

    Args:
      arrays: references to the inputs that the property `arrays` lists.
      part: slice of the row.
      to: float32 reference in shared memory, as long as the part. Values are rounded to `dtype`.
    """
    ...

  def __call__(self) -> Array:
    """The row, computed without a kernel: [..., D]."""
    ...


def products(
  row: Array | ComputedRow, matrices: Sequence[Array], *, backend: str = "auto"
) -> list[Array] | None:
  """x · W for one W or more by one kernel; None where it does not take them or does not run.

  XLA adds up the kernel's partial sums. The kernel takes a single row of 16-bit floats. D must be a
  multiple of 128 and each N of 256, or D of 64 and each N of 512, or D of 32 and each N of 1024
  (`matrix_vector.split`). XLA first computes a `ComputedRow` that the CTAs cannot compute. Where a
  gradient is asked for, XLA's products compute both the result and the gradient.

  Args:
    row: x, [..., D], or a row that the kernel computes.
    matrices: each [D, N], in the dtype of x.
    backend: "auto" (the kernel where it runs), "mosaic_gpu", or "xla" or "reference" (the result is
      None).

  Returns:
    For each matrix [..., N] in the dtype of x, added up in float32; [1, N] for a computed row.

  Raises:
    ValueError: the backend is unknown, or "mosaic_gpu" cannot take the type of x. Not raised if the
      shapes do not fit the kernel, or a matrix has another type than x: the result is then None.
  """
  sums_PN = sums(row, matrices, backend=backend)
  if sums_PN is None:
    return None
  y_N = added_up(sums_PN).astype(row.dtype)
  ends = list(itertools.accumulate(w.shape[1] for w in matrices))[:-1]
  shape = row.shape[:-1] if isinstance(row, Array) else (1,)
  return [y.reshape(*shape, y.size) for y in jnp.split(y_N, ends)]


def sums(
  row: Array | ComputedRow, matrices: Sequence[Array], *, backend: str = "auto"
) -> Array | None:
  """The partial sums that `products` adds up: float32 [P, N + N' + ...]; None as from `products`.

  Arguments and errors are those of `products`. The columns of all matrices lie side by side.
  """
  width = row.shape[-1] if isinstance(row, Array) else row.width
  if row.size != width or any(w.dtype != row.dtype for w in matrices):
    return None
  widths = [w.shape[1] for w in matrices]
  own = split(width, sum(widths), 1, resolve_num_sms(None), unit=math.gcd(*widths))
  if own is None or resolve_backend(backend, row.dtype, *widths) != "mosaic_gpu":
    return None
  if isinstance(row, Array):
    row = row.reshape(1, -1)
  elif not row.takes(width // own.parts, backend):
    return sums(row(), matrices, backend=backend)
  fast = functools.partial(_read, own=own, simulation=interpretation())
  plain = functools.partial(_plain_sums, parts=own.parts)
  found: Any = without_gradient(fast, plain, row, *matrices)
  return found


def _plain_sums(row: Array | ComputedRow, *matrices: Array, parts: int) -> Array:
  x_1D = row if isinstance(row, Array) else row().reshape(1, -1)
  y_1N = jnp.concatenate([x_1D @ w for w in matrices], 1).astype(jnp.float32)
  return jnp.pad(y_1N, ((0, parts - 1), (0, 0)))


@functools.partial(jax.jit, static_argnames=("own", "simulation"))
def _read(row: Array | ComputedRow, *matrices: Array, own: Split, simulation: Any) -> Array:
  """The partial sums, in one kernel; each CTA takes some columns and rows of one matrix."""
  del simulation  # only makes jit compile anew for each simulation
  is_made = not isinstance(row, Array)
  given = cast(ComputedRow, row).arrays if is_made else (row,)
  widths = [w.shape[1] for w in matrices]
  rows = matrices[0].shape[0] // own.parts

  def body(*refs):
    arrays, rest = refs[: len(given)], refs[len(given) :]
    matrices, (out, shared, barrier, *made) = rest[: len(widths)], rest[len(widths) :]
    column, part = place()[1:]

    def number(k):
      return made[0][k - part * rows] if is_made else arrays[0][0, k].astype(jnp.float32)

    def make():
      @pl.when(lax.axis_index("wg") == 0)
      def _():
        cast(ComputedRow, row).write(arrays, pl.ds(part * rows, rows), made[0])

      plgpu.barrier_arrive(made[1])
      plgpu.barrier_wait(made[1])

    first = 0
    for matrix in matrices:
      last = first + matrix.shape[2] // own.columns

      @pl.when((column >= first) & (column < last))
      def _(matrix=matrix, first=first):
        start = begin_sums([matrix], 0, own, rows, number, column - first)
        if is_made:  # the first weights arrive while `make` computes the row
          make()
        store_sums(start(), out.at[0, part], shared, barrier, own, column)

      first = last

  scratch = (plgpu.SMEM((rows,), jnp.float32), everyone()) if is_made else ()
  run = kernel(body, 1, 1, sum(widths), own, *scratch)
  return run(*given, *[w[None] for w in matrices])[0, :, 0]


_PARTS = 64  # most parts of a narrow product's sum


def narrow_product(x_1D: Array, matrix_DE: Array) -> Array:
  """x · W of one row, in float32 or wider, [1, E], for a matrix of few columns.

  Written as sums, this is two kernels of XLA: the first computes the partial sum of every part at
  the same time, and the second adds up the parts. Written as a product it would be more kernels.
  """
  sums_PE = narrow_sums(x_1D, matrix_DE)
  # Without the barrier XLA merges both sums into one sum that only few multiprocessors compute.
  return jnp.sum(jax.lax.optimization_barrier(sums_PE), axis=0)[None]


def narrow_sums(x_1D: Array, matrix_DE: Array) -> Array:
  """The partial sums of `narrow_product`: [P, E], where P is `parts_of(D)`."""
  wide = jnp.promote_types(x_1D.dtype, jnp.float32)
  terms_DE = x_1D[0, :, None].astype(wide) * matrix_DE.astype(wide)
  parts = parts_of(x_1D.shape[1])
  return jnp.sum(terms_DE.reshape(parts, -1, matrix_DE.shape[1]), axis=1)


def parts_of(width: int) -> int:
  """P of a narrow product: the largest power of 2 up to 64 that divides the width."""
  return math.gcd(width, _PARTS)
