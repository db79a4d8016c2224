"""fp8 operands: e4m3 numbers with a scale for each block, in blocks of DeepSeek-V3's shapes.

    R  rows      K, N  widths      B  blocks of 128 along K      C  blocks along N      G  groups

A row has a scale for each 128 of its elements, and a matrix has one for each 128 x 128 of its
elements (arXiv 2412.19437, section 3.3). Here a scale is the smallest power of two by which a block
can be divided to stay within e4m3's largest number, 448, but at least 2^-100 and at most 2^100
(`_scale` lists exceptions). So only the elements are rounded: an element times its scale is a
bfloat16 number, and a product of fp8 operands equals that of the bfloat16 numbers, up to the order
and the precision of sums: Hopper keeps some 14 bits of the sums within a block (`rows_product`).
Where there is no kernel for fp8, the result therefore comes from `rounded_rows` and
`rounded_matrices`, where numbers can become infinite in float16 (`rounded_rows`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from scmoe.kernels.grouped_matmul.weights import FFNWeights

BLOCK = 128
E4M3 = jnp.float8_e4m3fn
_LARGEST = float(jnp.finfo(E4M3).max)
# Bounds of a scale's exponent: the scale's inverse, and e4m3 numbers but 0 times the scale, stay
# normal float32s.
_EXPONENTS = (-100, 100)


def quantised_rows(x_RK: Float[Array, "*R K"]) -> tuple[Array, Array]:
  """Rounds rows to fp8, with a scale for each 128 elements of a row.

  Returns:
    e4m3 [..., K], and float32 scales [..., B]; the last block may be shorter.
  """
  *rows, width = x_RK.shape
  x = _filled_up(x_RK.astype(jnp.float32), -1)
  filled = x.shape[-1]
  x = x.reshape(*rows, filled // BLOCK, BLOCK)
  scale_RB = _scale(jnp.abs(x).max(-1))
  q = (x / scale_RB[..., None]).astype(E4M3)
  return q.reshape(*rows, filled)[..., :width], scale_RB


def quantised_matrices(w_GKN: Float[Array, "G K N"]) -> tuple[Array, Array]:
  """Rounds matrices to fp8, with a scale for each 128 x 128 elements.

  Returns:
    e4m3 [G, K, N], and float32 scales [G, B, C]; the last blocks may be smaller.
  """
  groups, *widths = w_GKN.shape
  w = _filled_up(_filled_up(w_GKN.astype(jnp.float32), 1), 2)
  w = w.reshape(groups, w.shape[1] // BLOCK, BLOCK, w.shape[2] // BLOCK, BLOCK)
  scale_GBC = _scale(jnp.abs(w).max((2, 4)))
  q = (w / scale_GBC[:, :, None, :, None]).astype(E4M3)
  q = q.reshape(groups, q.shape[1] * BLOCK, q.shape[3] * BLOCK)
  return q[:, : widths[0], : widths[1]], scale_GBC


def rounded_rows(x_RK: Float[Array, "*R K"]) -> Float[Array, "*R K"]:
  """Rounds every row to fp8 and back to its type.

  A second rounding does not change a block whose results are all finite. In a finite block of
  float16, a magnitude of 63,488 or more becomes infinite: fp8 rounds it to 65,536, which float16
  cannot hold.
  """
  return dequantised_rows(*_kept(quantised_rows(x_RK)), x_RK.dtype)


def dequantised_rows(
  q_RK: Float[Array, "*R K"], scale_RB: Float[Array, "*R B"], dtype: jnp.dtype
) -> Float[Array, "*R K"]:
  """The rows, of type `dtype`, that `quantised_rows` gave as fp8 numbers and scales."""
  scale_RK = jnp.repeat(scale_RB, BLOCK, axis=-1)[..., : q_RK.shape[-1]]
  return (q_RK.astype(jnp.float32) * scale_RK).astype(dtype)


def rounded_matrices(w_GKN: Float[Array, "G K N"]) -> Float[Array, "G K N"]:
  """Does `rounded_rows` for matrices, with a scale for each 128 x 128 elements."""
  q_GKN, scale_GBC = _kept(quantised_matrices(w_GKN))
  repeat = lambda s, axis: jnp.repeat(s, BLOCK, axis=axis)
  scale_GKN = repeat(repeat(scale_GBC, 1), 2)[:, : w_GKN.shape[1], : w_GKN.shape[2]]
  return (q_GKN.astype(jnp.float32) * scale_GKN).astype(w_GKN.dtype)


def rounded_weights(weights: FFNWeights) -> FFNWeights:
  """Rounds the network's matrices to fp8 and back; biases stay as they are."""
  up, down = rounded_matrices(weights.up_GDF), rounded_matrices(weights.down_GFD)
  gate = None if weights.gate_GDF is None else rounded_matrices(weights.gate_GDF)
  biases = weights.up_bias_GF, weights.down_bias_GD, weights.gate_bias_GF
  return FFNWeights(up, down, gate, *biases)


def _kept(quantised: tuple[Array, Array]) -> tuple[Array, Array]:
  """The same arrays behind a barrier: XLA may otherwise drop a conversion to fp8 and back."""
  return jax.lax.optimization_barrier(quantised)


def _scale(largest: Array) -> Array:
  """The scale of a block with the largest magnitude `largest`; 1 if that is 0, infinite or NaN.

  It may be 1 below 6e-36, too, where division underflows: by any scale such elements become 0.
  In e4m3 an infinity becomes a NaN, and a NaN stays one.
  """
  part, exponent = jnp.frexp(largest / _LARGEST)
  exponent = jnp.clip(exponent - (part == 0.5), *_EXPONENTS)
  usual = (largest > 0) & jnp.isfinite(largest)
  return jnp.ldexp(jnp.float32(1), jnp.where(usual, exponent, 0))


def _filled_up(x: Array, axis: int) -> Array:
  """Appends zeros to an axis, up to a multiple of 128."""
  axis %= x.ndim
  missing = -x.shape[axis] % BLOCK
  return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
