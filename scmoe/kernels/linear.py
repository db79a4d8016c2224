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
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.kernels.grouped_matmul.pipeline import interpretation, resolve_num_sms
from scmoe.kernels.grouped_matmul.reading import (
  Split,
  added_up,
  begin_sums,
  everyone,
  kernel,
  place,
  split,
  store_sums,
)
from scmoe.kernels.norm import Normalisation, of_part
from scmoe.kernels.norm import takes as norm_takes
from scmoe.kernels.without_gradient import without_gradient


def products(
  x_BD: Array, matrices: Sequence[Array], *, backend: str = "auto"
) -> list[Array] | None:
  """x · W for several W at once, by a kernel; None where it does not take them.

  It takes a single row of 16-bit floats, D a multiple of 32 and each N of 256. The gradient is that
  of plain products.

  Args:
    x_BD: [..., D].
    matrices: each [D, N], in the type of x.
    backend: see `resolve_backend`.

  Returns:
    for each of them [..., N] in the type of x, added up in float32.
  """
  sums_PN = sums(x_BD, matrices, backend=backend)
  if sums_PN is None:
    return None
  y_N = added_up(sums_PN).astype(x_BD.dtype)
  ends = list(itertools.accumulate(w.shape[1] for w in matrices))[:-1]
  return [y.reshape(*x_BD.shape[:-1], y.size) for y in jnp.split(y_N, ends)]


def sums(
  x_BD: Array,
  matrices: Sequence[Array],
  norm: Normalisation | None = None,
  *,
  backend: str = "auto",
) -> Array | None:
  """What `products` adds up: parts of its sums, float32 [P, N + N' + ...]; None likewise.

  Args:
    x_BD, matrices, backend: see there.
    norm: what x goes through first, in the same kernel; rounded to the type of x.
  """
  if x_BD.size != x_BD.shape[-1] or any(w.dtype != x_BD.dtype for w in matrices):
    return None
  own = _shared_out(x_BD, matrices)
  widths = [w.shape[1] for w in matrices]
  if own is None or resolve_backend(backend, x_BD.dtype, *widths) != "mosaic_gpu":
    return None
  if norm is not None and not norm_takes(x_BD, backend):
    return sums(norm(x_BD), matrices, backend=backend)
  fast = functools.partial(_read, own=own, simulation=interpretation())
  plain = functools.partial(_plain_sums, parts=own.parts)
  found: Any = without_gradient(fast, plain, x_BD.reshape(1, -1), norm, *matrices)
  return found


def _plain_sums(x_1D: Array, norm: Normalisation | None, *matrices: Array, parts: int) -> Array:
  x_1D = x_1D if norm is None else norm(x_1D)
  y_1N = jnp.concatenate([x_1D @ w for w in matrices], 1).astype(jnp.float32)
  return jnp.pad(y_1N, ((0, parts - 1), (0, 0)))


def _shared_out(x_BD: Array, matrices: Sequence[Array]) -> Split | None:
  widths = [w.shape[1] for w in matrices]
  sms, unit = resolve_num_sms(None), math.gcd(*widths)
  return split(x_BD.shape[-1], sum(widths), 1, sms, unit=unit)


@functools.partial(jax.jit, static_argnames=("own", "simulation"))
def _read(
  x_1D: Array, norm: Normalisation | None, *matrices: Array, own: Split, simulation: Any
) -> Array:
  """The sums, side by side in one kernel: each CTA has columns of one matrix."""
  del simulation  # the program depends on it
  width, widths = x_1D.shape[1], [w.shape[1] for w in matrices]
  rows, more = width // own.parts, () if norm is None else norm.arrays

  def body(x, *rest):
    arrays, rest = rest[: len(more)], rest[len(more) :]
    matrices, (out, shared, barrier, *made) = rest[: len(widths)], rest[len(widths) :]
    column, part = place()[1:]
    wg, mine = lax.axis_index("wg"), pl.ds(part * rows, rows)

    def row(k):
      return made[0][k - part * rows] if norm is not None else x[0, k].astype(jnp.float32)

    def normalise(norm: Normalisation):
      @pl.when(wg == 0)
      def _():
        made[0][...] = of_part(norm, x, arrays, mine).astype(x.dtype).astype(jnp.float32)

      plgpu.barrier_arrive(made[1])
      plgpu.barrier_wait(made[1])

    first = 0
    for matrix in matrices:
      last = first + matrix.shape[2] // own.columns

      @pl.when((column >= first) & (column < last))
      def _(matrix=matrix, first=first):
        start = begin_sums([matrix], 0, own, rows, row, column - first)
        if norm is not None:  # the weights are on their way meanwhile
          normalise(norm)
        store_sums(start(), out.at[0, part], shared, barrier, own, column)

      first = last

  scratch = () if norm is None else (plgpu.SMEM((rows,), jnp.float32), everyone())
  run = kernel(body, 1, 1, sum(widths), own, *scratch)
  return run(x_1D, *more, *[w[None] for w in matrices])[0, :, 0]


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
