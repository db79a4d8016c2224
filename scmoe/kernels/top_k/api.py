"""Logits of a linear gate, each token's K best experts, and perhaps their probabilities.

    T  tokens      D  model width      E  experts      K  experts per token

A float32 gate on bfloat16 tokens needs no float32 product, which on Hopper takes 15 times as long
as a bfloat16 product. For the kernel for many tokens, unless weights are to be rounded, each
float32 weight is written as the sum of three bfloat16 numbers, its *terms* (8 bits of significand
each, 24 in all). The tokens are bfloat16 already. The matrix unit forms the products of two
bfloat16 numbers exactly, and adds them up in float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.kernels import launch
from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.kernels.one_row import gate as under_norm
from scmoe.kernels.one_row import top_k as one_row
from scmoe.kernels.one_row.linear import narrow_product, narrow_sums, parts_of
from scmoe.kernels.one_row.norm import Normalised
from scmoe.kernels.one_row.without_gradient import without_gradient

EXACT = 3  # Number of bfloat16 terms that hold the 24 bits of a float32 number's significand.
_MOST_CHOSEN = 32  # The most K of the kernel for many tokens: the ids fit into shared memory.


class GateOutput(NamedTuple):
  """A gate's logits, the experts with the largest logits, and perhaps these experts' probabilities.

  Attributes:
    logits_TE: float32 (float64 for float64 tokens).
    expert_TK: int32, the experts with the largest logits, best first.
    share_TK: the probabilities of the experts in `expert_TK` (softmax over all E logits), in the
      logits' type. None unless the kernel for a single token takes the token and runs here; if a
      gradient is asked for, XLA computes them in its place.
  """

  logits_TE: Array
  expert_TK: Array
  share_TK: Array | None = None


class PartialLogits(NamedTuple):
  """A single normalised token and its gate's logits as partial sums, both by `gate_under_norm`.

  Attributes:
    x_TD: the normalised token, [1, D].
    sums_PE: float32, partial sums: their sum over P is the logits.
  """

  x_TD: Array
  sums_PE: Array

  def top_k(self, k: int) -> GateOutput:
    """The token's logits, the k experts with the largest ones, and these experts' probabilities.

    Where a gradient is asked for, XLA computes the result and the gradient.
    """
    ways = (functools.partial(way, k=k) for way in (_top_k_of_sums, _top_k_of_sums_by_xla))
    return without_gradient(*ways, self.sums_PE)


def gate_under_norm(
  row: Normalised, gate_DE: Array, *, fp32: bool = True, backend: str = "auto"
) -> PartialLogits | None:
  """A normalised token and its product with a gate, by one kernel; None if it does not run.

  Where a gradient is asked for, XLA computes the result and the gradient.

  Args:
    row: the token with its norm.
    gate_DE: weights.
    fp32: whether to take the weights in float32; if not, they are rounded to the token's type.
    backend: "auto" (the kernel where it runs), "mosaic_gpu" or "xla" (the result is None).

  Returns:
    The normalised token and the logits' partial sums; None if the kernel does not take the token or
    the gate, or does not run here.

  Raises:
    ValueError: for sizes that the kernel takes, the backend is unknown or "mosaic_gpu" cannot take
      the token's type.
  """
  width, num_experts = gate_DE.shape
  fits = under_norm.shares(width, num_experts) > 0 and row.takes(width, backend)
  if not fits or not one_row.takes(under_norm.SUMS, num_experts):
    return None
  dtype = jnp.float32 if fp32 else row.dtype

  def plain(row, gate_DE):
    y_1D = row().reshape(1, -1)
    logits_1E = gate_product(y_1D, gate_DE, fp32=fp32)
    return y_1D, jnp.pad(logits_1E, ((0, under_norm.SUMS - 1), (0, 0)))

  found: Any = without_gradient(under_norm.sums_under_norm, plain, row, gate_DE.astype(dtype))
  return PartialLogits(*found)


def gate_product(x_TD: Array, gate_DE: Array, *, fp32: bool) -> Array:
  """x · W, added up and returned in float32 (float64 for float64 tokens): [T, E]; differentiable.

  Args:
    x_TD: tokens.
    gate_DE: weights.
    fp32: whether to take the weights in float32 if the tokens have a narrower type. If not, they
      are rounded to the tokens' type.
  """
  wide = jnp.promote_types(x_TD.dtype, jnp.float32)
  dtype = wide if fp32 else x_TD.dtype
  if x_TD.shape[0] == 1 and jax.default_backend() == "gpu":
    return narrow_product(x_TD.astype(dtype), gate_DE.astype(dtype))
  return jnp.einsum(
    "td,de->te",
    x_TD.astype(dtype),
    gate_DE.astype(dtype),
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=wide,
  )


def gate_top_k(
  x_TD: Array, gate_DE: Array, k: int, *, fp32: bool = True, backend: str = "auto"
) -> GateOutput:
  """Logits of a linear gate, each token's k best experts, and perhaps these experts' probabilities.

  The best experts are those with the largest logits. Their probabilities, by the softmax over all E
  logits, are given only where the kernel for a single token takes the token and runs here, also if
  a gradient is asked for and XLA computes in its place. In a tie the expert with the smaller index
  comes first, but for XLA 0.0 may count as larger than -0.0. For XLA, NaN counts as the largest
  logit, or as the smallest if its sign bit is set. The kernels may choose any experts for a token
  with a NaN logit; the experts' ids are valid.

  Args:
    x_TD: tokens.
    gate_DE: weights.
    k: K, at most E.
    fp32: whether to take the weights in float32 if the tokens have a narrower type. If not, they
      are rounded to the tokens' type.
    backend: "auto" (a kernel where it runs), "mosaic_gpu" or "xla". There is a kernel for multiples
      of 128 tokens, up to 192 experts and k up to 32, and one for a single token and a multiple of
      8 experts up to 256. Both need D to be a multiple of 64 and tokens in bfloat16, or in float16
      (many tokens: only without `fp32`). XLA computes all others, also with "mosaic_gpu", unless
      that raises.

  Returns:
    Logits and experts, and `share_TK`, or None in its place (see above).

  Raises:
    ValueError: k is not in [1, E]; or, for sizes that a kernel takes (for many tokens: and types),
      the backend is unknown or "mosaic_gpu" cannot take the type of a single token.
  """
  num_experts = gate_DE.shape[1]
  if not 1 <= k <= num_experts:
    raise ValueError(f"k={k} must be at least 1 and at most {num_experts}, the number of experts")
  if _is_row_with_kernel(x_TD, num_experts, backend):
    ways = (functools.partial(way, k=k, fp32=fp32) for way in (_top_k_of_row, _by_xla))
    return without_gradient(*ways, x_TD, gate_DE)
  if not has_kernel(x_TD, num_experts, k, fp32, backend):
    return _by_xla(x_TD, gate_DE, k=k, fp32=fp32)._replace(share_TK=None)
  terms = EXACT if fp32 and gate_DE.dtype != x_TD.dtype else 1
  found: Any = _gate_top_k(x_TD, gate_DE, (k, terms, launch.interpretation()))
  return GateOutput(*found)


def _by_xla(x_TD: Array, gate_DE: Array, *, k: int, fp32: bool) -> GateOutput:
  return _top_k_of_logits(gate_product(x_TD, gate_DE, fp32=fp32), k)


def _top_k_of_sums_by_xla(sums_PE: Array, *, k: int) -> GateOutput:
  return _top_k_of_logits(sums_PE.sum(0)[None], k)


def _top_k_of_logits(logits_TE: Array, k: int) -> GateOutput:
  expert_TK = jax.lax.top_k(logits_TE, k)[1].astype(jnp.int32)
  share_TE = jax.nn.softmax(logits_TE)
  return GateOutput(logits_TE, expert_TK, jnp.take_along_axis(share_TE, expert_TK, 1))


def _top_k_of_row(x_1D: Array, gate_DE: Array, *, k: int, fp32: bool) -> GateOutput:
  dtype = jnp.float32 if fp32 else x_1D.dtype
  return _top_k_of_sums(narrow_sums(x_1D.astype(dtype), gate_DE.astype(dtype)), k=k)


def _top_k_of_sums(sums_PE: Array, *, k: int) -> GateOutput:
  return GateOutput(*(found[None] for found in one_row.top_k_of_sums(sums_PE, k)))


def _is_row_with_kernel(x_TD: Array, num_experts: int, backend: str) -> bool:
  tokens, width = x_TD.shape
  fits = tokens == 1 and one_row.takes(parts_of(width), num_experts)
  return fits and resolve_backend(backend, x_TD.dtype, width) == "mosaic_gpu"


def has_kernel(x_TD: Array, num_experts: int, k: int, fp32: bool, backend: str) -> bool:
  """Whether the kernel for many tokens takes these sizes and types and runs here.

  Raises:
    ValueError: the backend is unknown, for sizes and types that the kernel takes.
  """
  tokens, width = x_TD.shape
  whole = tokens > 0 and tokens % 128 == 0 and width % 64 == 0
  whole = whole and num_experts <= 192 and k <= _MOST_CHOSEN
  # Terms represent a float32 gate in bfloat16; float16's range of exponents is too small for them.
  exact = x_TD.dtype == jnp.bfloat16 or (x_TD.dtype == jnp.float16 and not fp32)
  return whole and exact and resolve_backend(backend, x_TD.dtype, width) == "mosaic_gpu"


def split_terms(w: Array, terms: int, dtype: Any) -> Array:
  """[terms, ...] of type `dtype`, whose sum approximates w; each rounds what earlier ones leave."""
  parts, rest = [], w.astype(jnp.float32)
  for _ in range(terms):
    parts.append(rest.astype(dtype))
    rest = rest - parts[-1].astype(jnp.float32)
  return jnp.stack(parts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gate_top_k(x_TD: Array, gate_DE: Array, static: tuple[int, int, Any]) -> tuple[Array, Array]:
  from scmoe.kernels.top_k.mosaic_gpu import gate_top_k_kernel

  k, terms, _ = static
  return gate_top_k_kernel(x_TD, split_terms(gate_DE, terms, x_TD.dtype), k)


def _gate_top_k_fwd(x_TD, gate_DE, static):
  return _gate_top_k(x_TD, gate_DE, static), (x_TD, gate_DE)


def _gate_top_k_bwd(static, residuals, cotangents):
  """Gradients of tokens and weights, by products of 16-bit terms (see the top of this file).

  With `fp32` a float32 gate has three bfloat16 terms, since a float32 product takes 15 times as
  long. The gradient of its weights is float32, so it takes all three terms of dlogits. The gradient
  of the tokens is rounded to bfloat16's 8 bits: two terms of dlogits and two of the weights are
  enough, and of the four products of these the three largest. Where the gate has one term, in the
  tokens' type, dlogits is rounded to one term, too.
  """
  (x_TD, gate_DE), dlogits_TE, terms = residuals, cotangents[0], static[1]
  dlogits = split_terms(dlogits_TE, terms, x_TD.dtype)
  dgate_DnE = jnp.matmul(x_TD.T, jnp.concatenate(dlogits, 1), preferred_element_type=jnp.float32)
  dgate_DE = dgate_DnE.reshape(-1, terms, gate_DE.shape[1]).sum(1)
  gate = split_terms(gate_DE, min(terms, 2), x_TD.dtype)
  pairs = [(0, 0), (0, 1), (1, 0)] if terms > 1 else [(0, 0)]
  left = jnp.concatenate([dlogits[i] for i, _ in pairs], 1)
  right = jnp.concatenate([gate[i] for _, i in pairs], 1)
  # One product over all pairs adds up in float32 and rounds once.
  return left @ right.T, dgate_DE.astype(gate_DE.dtype)


_gate_top_k.defvjp(_gate_top_k_fwd, _gate_top_k_bwd)
