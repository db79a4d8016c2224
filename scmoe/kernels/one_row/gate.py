"""One kernel for a token's norm and for partial sums of the normalised token's gate product.

    D  width      E  experts      P  CTAs, each with D / P of the row's numbers

Two kernels would run one after the other, and the second would wait for the first. For one row the
norm costs less than that wait. So every CTA computes the norm's sums over the whole row itself,
while its part of the gate's weights arrives, and normalises its own part of the row.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.base.compat import load_as, store_into
from scmoe.kernels.launch import compiled, interpretation
from scmoe.kernels.one_row.norm import Normalised, of_part

SUMS = 64  # Rows of the array of partial sums: P rows get the CTAs' sums, the others zeros.
_ROWS = 64  # Rows of the gate's weights in a tile.
_UNIT = 128  # Threads of a CTA; its part of the row is a multiple of this number.
_HELD = 128  # The most weights that a thread holds.


def shares(width: int, num_experts: int) -> int:
  """P, the number of CTAs that share the row; 0 if the kernel does not take these sizes.

  P is the largest power of 2 up to 64 for which D / P is a multiple of 128. The kernel needs D to
  be a multiple of 128, E a multiple of 8 up to 256, and at most 128 weights for each of a CTA's 128
  threads. For example D = 2048 and E = 64: P = 16, and a thread holds 128 · 64 / 128 = 64 weights.
  """
  for parts in (64, 32, 16, 8, 4, 2, 1):
    rows = width // parts
    if width % (parts * _UNIT) == 0:
      held = rows * num_experts // _UNIT
      return parts if num_experts % 8 == 0 and num_experts <= 256 and held <= _HELD else 0
  return 0


def sums_under_norm(row: Normalised, gate_DE: Array) -> tuple[Array, Array]:
  """The normalised row y, [1, D] in the dtype of the row given, and partial sums of y · gate.

  The partial sums are float32 [64, E]; their sum over the first axis is the product. `shares` must
  not be 0 for the sizes, and the norm's kernel must take the row. Not differentiable.
  """
  return _sums(row, gate_DE, simulation=interpretation())


@functools.partial(jax.jit, static_argnames="simulation")
def _sums(row: Normalised, gate_DE: Array, *, simulation: Any) -> tuple[Array, Array]:
  del simulation  # only makes jit compile anew for each simulation
  width, experts = gate_DE.shape
  parts = shares(width, experts)
  rows, dtype = width // parts, row.dtype
  tile = plgpu.Layout.WGMMA
  down = tile.reduce(1)  # layout of one number for each row of a tile

  def body(x, *rest):
    *arrays, gate, y, sums, made = rest
    part = lax.axis_index("part")
    mine = pl.ds(part * rows, rows)
    firsts = range(0, rows, _ROWS)
    weights = [load_as(gate.at[pl.ds(part * rows + f, _ROWS)], tile) for f in firsts]
    x_N = of_part(row.norm, x, arrays, mine).astype(dtype)
    y[0, mine] = x_N
    made[...] = x_N.astype(jnp.float32)
    plgpu.commit_smem()
    terms_ME = jnp.float32(0)
    for first, w_ME in zip(firsts, weights):
      x_M = load_as(made.at[first : first + _ROWS], down)
      x_ME = lax.broadcast_in_dim(x_M, w_ME.shape, (0,))
      terms_ME = terms_ME + x_ME * w_ME.astype(jnp.float32)
    store_into(sums.at[part], jnp.sum(terms_ME, axis=0))
    zero_E = plgpu.layout_cast(jnp.zeros((experts,), jnp.float32), tile.reduce(0))
    for other in range(parts, SUMS, parts):
      store_into(sums.at[part + other], zero_E)

  run = compiled(
    body,
    out_type=(
      jax.ShapeDtypeStruct((1, width), dtype),
      jax.ShapeDtypeStruct((SUMS, experts), jnp.float32),
    ),
    grid=(parts,),
    grid_names=("part",),
    scratch_types=[plgpu.SMEM((rows,), jnp.float32)],
  )
  return run(*row.arrays, gate_DE)
