"""Products of a single token with dense matrices, as decoding one sequence asks for.

    D  width      N  outputs of a matrix      P  parts of a sum      E  outputs of a narrow one

What they cost is reading the matrices, and one kernel more or less: cuBLAS, made for many rows,
gets half of the memory's speed from a matrix that one token meets, and takes several kernels for a
narrow one.
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
from scmoe.kernels.one_row.reading import (
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
from scmoe.kernels.running import interpretation, resolve_num_sms


class Made(Protocol):
  """A row that the products' kernel makes of what it is given, instead of reading it; a pytree.

  Attributes:
    width: D.
    size: numbers, D of one row.
    dtype: what the row is rounded to.
  """

  @property
  def width(self) -> int: ...

  @property
  def size(self) -> int: ...

  @property
  def dtype(self) -> Any: ...

  @property
  def arrays(self) -> tuple[Array, ...]:
    """What the kernel is given."""
    ...

  def takes(self, rows: int, backend: str) -> bool:
    """Whether a kernel can make so many of the row's numbers at once."""
    ...

  def write(self, arrays: Sequence[Any], part: Any, to: Any) -> None:
    """In a kernel, by one warpgroup: writes a part of the row, in float32 but rounded.

    Args:
      arrays: refs of `arrays`.
      part: slice of the row.
      to: ref of as many numbers in shared memory.
    """
    ...

  def __call__(self) -> Array:
    """The row without a kernel, [..., D]."""
    ...


def products(
  row: Array | Made, matrices: Sequence[Array], *, backend: str = "auto"
) -> list[Array] | None:
  """x · W for several W at once, by a kernel; None where it does not take them.

  It takes a single row of 16-bit floats, D a multiple of 32 and each N of 256. The gradient is that
  of plain products.

  Args:
    row: x, [..., D], or what the kernel makes it of.
    matrices: each [D, N], in the type of x.
    backend: see `resolve_backend`.

  Returns:
    for each of them [..., N] in the type of x, added up in float32; [1, N] of a row that is made.
  """
  sums_PN = sums(row, matrices, backend=backend)
  if sums_PN is None:
    return None
  y_N = added_up(sums_PN).astype(row.dtype)
  ends = list(itertools.accumulate(w.shape[1] for w in matrices))[:-1]
  shape = row.shape[:-1] if isinstance(row, Array) else (1,)
  return [y.reshape(*shape, y.size) for y in jnp.split(y_N, ends)]


def sums(row: Array | Made, matrices: Sequence[Array], *, backend: str = "auto") -> Array | None:
  """What `products` adds up: parts of its sums, float32 [P, N + N' + ...]; None likewise.

  Args:
    row: x, or what the kernel makes it of.
    matrices, backend: see there.
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


def _plain_sums(row: Array | Made, *matrices: Array, parts: int) -> Array:
  x_1D = row if isinstance(row, Array) else row().reshape(1, -1)
  y_1N = jnp.concatenate([x_1D @ w for w in matrices], 1).astype(jnp.float32)
  return jnp.pad(y_1N, ((0, parts - 1), (0, 0)))


@functools.partial(jax.jit, static_argnames=("own", "simulation"))
def _read(row: Array | Made, *matrices: Array, own: Split, simulation: Any) -> Array:
  """The sums, side by side in one kernel: each CTA has columns of one matrix."""
  del simulation  # the program depends on it
  is_made = not isinstance(row, Array)
  given = cast(Made, row).arrays if is_made else (row,)
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
        cast(Made, row).write(arrays, pl.ds(part * rows, rows), made[0])

      plgpu.barrier_arrive(made[1])
      plgpu.barrier_wait(made[1])

    first = 0
    for matrix in matrices:
      last = first + matrix.shape[2] // own.columns

      @pl.when((column >= first) & (column < last))
      def _(matrix=matrix, first=first):
        start = begin_sums([matrix], 0, own, rows, number, column - first)
        if is_made:  # the weights are on their way meanwhile
          make()
        store_sums(start(), out.at[0, part], shared, barrier, own, column)

      first = last

  scratch = (plgpu.SMEM((rows,), jnp.float32), everyone()) if is_made else ()
  run = kernel(body, 1, 1, sum(widths), own, *scratch)
  return run(*given, *[w[None] for w in matrices])[0, :, 0]


_PARTS = 64  # of a narrow product's sum, at most


def narrow_product(x_1D: Array, matrix_DE: Array) -> Array:
  """x · W in float32 or wider, [1, E], for an E of some tens: XLA adds up many parts beside each
  other, then those. As a product it would be five kernels."""
  sums_PE = narrow_sums(x_1D, matrix_DE)
  # Else both sums become one again, which few multiprocessors would compute.
  return jnp.sum(jax.lax.optimization_barrier(sums_PE), axis=0)[None]


def narrow_sums(x_1D: Array, matrix_DE: Array) -> Array:
  """The parts whose sum is `narrow_product`: [P, E], of which there are `parts_of` D."""
  wide = jnp.promote_types(x_1D.dtype, jnp.float32)
  terms_DE = x_1D[0, :, None].astype(wide) * matrix_DE.astype(wide)
  parts = parts_of(x_1D.shape[1])
  return jnp.sum(terms_DE.reshape(parts, -1, matrix_DE.shape[1]), axis=1)


def parts_of(width: int) -> int:
  """Parts of a narrow product's sum: the largest power of 2 up to 64 that divides the width."""
  return math.gcd(width, _PARTS)
