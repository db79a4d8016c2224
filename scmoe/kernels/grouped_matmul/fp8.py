"""fp8 operands: e4m3 numbers with a scale for each block, as DeepSeek-V3 trains with.

    R  rows      K, N  widths      B  blocks of 128 along K      C  blocks along N      G  groups

A row has a scale for each 128 of its elements, a matrix one for each 128 x 128 (arXiv 2412.19437,
section 3.3). Scales are powers of two, the smallest that keep a block within e4m3 (448), so nothing
is rounded but the elements: an element times its scale is a bfloat16 number, and the product of two
fp8 operands is exactly that of two of bfloat16, up to the order of sums. What has no kernel for fp8
so computes the same from `rounded_rows` and `rounded_matrices`. Not the eight bits of `migration`,
which are integers that only keep weights small.
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
# What a scale may be: its inverse, and a block's numbers times it, stay normal float32 numbers.
_EXPONENTS = (-100, 100)


def quantised_rows(x_RK: Float[Array, "*R K"]) -> tuple[Array, Array]:
  """Rows in fp8.

  Returns:
    e4m3 [..., K], and float32 scales [..., B]; the last block may be shorter.
  """
  *rows, width = x_RK.shape
  x = _filled_up(x_RK.astype(jnp.float32), -1).reshape(*rows, -1, BLOCK)
  scale_RB = _scale(jnp.abs(x).max(-1))
  q = (x / scale_RB[..., None]).astype(E4M3)
  return q.reshape(*rows, -1)[..., :width], scale_RB


def quantised_matrices(w_GKN: Float[Array, "G K N"]) -> tuple[Array, Array]:
  """Matrices in fp8: e4m3 [G, K, N], and float32 scales [G, B, C]."""
  groups, *widths = w_GKN.shape
  w = _filled_up(_filled_up(w_GKN.astype(jnp.float32), 1), 2)
  w = w.reshape(groups, w.shape[1] // BLOCK, BLOCK, w.shape[2] // BLOCK, BLOCK)
  scale_GBC = _scale(jnp.abs(w).max((2, 4)))
  q = (w / scale_GBC[:, :, None, :, None]).astype(E4M3)
  q = q.reshape(groups, q.shape[1] * BLOCK, q.shape[3] * BLOCK)
  return q[:, : widths[0], : widths[1]], scale_GBC


def rounded_rows(x_RK: Float[Array, "*R K"]) -> Float[Array, "*R K"]:
  """Every row rounded to fp8 and back, in its type; twice is once."""
  q_RK, scale_RB = _kept(quantised_rows(x_RK))
  scale_RK = jnp.repeat(scale_RB, BLOCK, axis=-1)[..., : x_RK.shape[-1]]
  return (q_RK.astype(jnp.float32) * scale_RK).astype(x_RK.dtype)


def rounded_matrices(w_GKN: Float[Array, "G K N"]) -> Float[Array, "G K N"]:
  """Every matrix rounded to fp8 and back, in its type; twice is once."""
  q_GKN, scale_GBC = _kept(quantised_matrices(w_GKN))
  spread = lambda s, axis: jnp.repeat(s, BLOCK, axis=axis)
  scale_GKN = spread(spread(scale_GBC, 1), 2)[:, : w_GKN.shape[1], : w_GKN.shape[2]]
  return (q_GKN.astype(jnp.float32) * scale_GKN).astype(w_GKN.dtype)


def rounded_weights(weights: FFNWeights) -> FFNWeights:
  """The network's matrices rounded to fp8 and back; biases stay."""
  up, down = rounded_matrices(weights.up_GDF), rounded_matrices(weights.down_GFD)
  gate = None if weights.gate_GDF is None else rounded_matrices(weights.gate_GDF)
  biases = weights.up_bias_GF, weights.down_bias_GD, weights.gate_bias_GF
  return FFNWeights(up, down, gate, *biases)


def _kept(quantised: tuple[Array, Array]) -> tuple[Array, Array]:
  """The same, rounded in any program: XLA may leave out a conversion and its way back."""
  return jax.lax.optimization_barrier(quantised)


def _scale(largest: Array) -> Array:
  """The smallest power of two that brings what is at most so large within e4m3; 1 for a zero.

  What is not finite keeps a finite scale, and is not a number in e4m3, so that it is seen.
  """
  part, exponent = jnp.frexp(largest / _LARGEST)
  exponent = jnp.clip(exponent - (part == 0.5), *_EXPONENTS)
  usual = (largest > 0) & jnp.isfinite(largest)
  return jnp.ldexp(jnp.float32(1), jnp.where(usual, exponent, 0))


def _filled_up(x: Array, axis: int) -> Array:
  """Zeros at the end of an axis, up to a multiple of the block."""
  axis %= x.ndim
  missing = -x.shape[axis] % BLOCK
  return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
