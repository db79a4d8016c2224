"""A whole MoE layer on one device: route, gather, experts, weighted sum.

    T  tokens      D  model width      F  expert width      E  experts      K  experts per token
    R  rows of the padded layout

Kept for the backward: x, the pre-activations (2·T·D + 4·T·K·F bytes in bfloat16 with a gated
activation), the K chosen experts and weights of each token, and the row plan. The gathered rows,
the experts' output and their gradients exist only in passing. The router weights' gradient is
⟨da', a⟩, which needs neither of them (SonicMoE, arXiv 2512.14080).
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scmoe.kernels.grouped_matmul import xla
from scmoe.kernels.grouped_matmul.api import cast_weights
from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.kernels.grouped_matmul.ffn import (
  FFNConfig,
  FFNWeights,
  check_ffn,
  ffn_backward,
  ffn_forward,
)
from scmoe.kernels.grouped_matmul.layout import KERNEL_ROW_TILE, take_rows
from scmoe.kernels.permute import route_gpu
from scmoe.kernels.permute.api import sum_rows
from scmoe.kernels.permute.plan import make_plan


def moe_ffn(
  x_TD: jax.Array,
  expert_TK: jax.Array,
  weight_TK: jax.Array,
  gate_EDF: jax.Array | None,
  up_EDF: jax.Array,
  down_EFD: jax.Array,
  *,
  activation: str = "swiglu",
  gate_bias_EF: jax.Array | None = None,
  up_bias_EF: jax.Array | None = None,
  down_bias_ED: jax.Array | None = None,
  precision: str | None = None,
  backend: str = "auto",
  num_sms: int | None = None,
) -> jax.Array:
  """y[t] = Σ_k weight[t, k] · FFN of expert[t, k] (x[t]), for a routing that is already decided.

  Args:
    x_TD: tokens.
    expert_TK: chosen experts, distinct within a token; an id outside [0, E) adds nothing.
    weight_TK: combine weights; differentiable.
    gate_EDF: gate weights, or None if the activation is not gated.
    up_EDF: up weights.
    down_EFD: down weights.
    activation: as in `grouped_ffn`.
    gate_bias_EF: optional bias.
    up_bias_EF: optional bias.
    down_bias_ED: optional bias.
    precision: as in `grouped_matmul`.
    backend: as in `grouped_matmul`.
    num_sms: as in `grouped_matmul`.

  Returns:
    y_TD in the type of x.

  Raises:
    ValueError: shapes disagree, or the activation or the backend is unknown or does not fit.
  """
  weights = FFNWeights(gate_EDF, up_EDF, down_EFD, gate_bias_EF, up_bias_EF, down_bias_ED)
  check_ffn(x_TD, weights, up_EDF.shape[0], activation)
  for name, array in (("expert", expert_TK), ("weight", weight_TK)):
    if array.ndim != 2 or array.shape[0] != x_TD.shape[0] or array.shape != expert_TK.shape:
      raise ValueError(
        f"{name} has shape {array.shape} but x has {x_TD.shape[0]} tokens and expert has shape"
        f" {expert_TK.shape}: expected [T, K] for both"
      )
  resolved = resolve_backend(backend, x_TD.dtype, *up_EDF.shape[1:])
  config = FFNConfig(activation, resolved, precision or "highest", num_sms)
  return _moe_ffn(x_TD, weight_TK, cast_weights(weights, x_TD.dtype), expert_TK, config)


def _plan_for(expert_TK, num_experts, config):
  if config.backend == "mosaic_gpu":
    tile = KERNEL_ROW_TILE
  else:
    tile = xla.choose_tile(expert_TK.size, num_experts)
  with jax.named_scope("plan"):
    return make_plan(expert_TK, num_experts, tile)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _moe_ffn(x_TD, weight_TK, weights, expert_TK, config):
  return _moe_ffn_fwd(x_TD, weight_TK, weights, expert_TK, config)[0]


def _moe_ffn_fwd(x_TD, weight_TK, weights, expert_TK, config):
  plan = _plan_for(expert_TK, weights.up_GDF.shape[0], config)
  with jax.named_scope("experts"):
    y_RD, pre = ffn_forward(x_TD, plan.token_R, weights, plan.layout, config)
  with jax.named_scope("combine"):
    y_TD = sum_rows(y_RD, plan.row_TK, weight_TK)
  return y_TD, (x_TD, weight_TK, weights, plan, pre)


def _moe_ffn_bwd(config, residuals, dy_TD):
  x_TD, weight_TK, weights, plan, pre = residuals
  row_weight_R = take_rows(
    weight_TK.reshape(-1).astype(xla.accumulation_type(x_TD.dtype)), plan.slot_R
  )
  with jax.named_scope("experts"):
    dx_RD, gradients, ds_R = ffn_backward(
      x_TD, plan.token_R, dy_TD, row_weight_R, pre, weights, plan.layout, config
    )
  with jax.named_scope("combine"):
    dx_TD = sum_rows(dx_RD, plan.row_TK)
  dweight_TK = take_rows(ds_R, plan.row_TK).astype(weight_TK.dtype)
  return dx_TD, dweight_TK, gradients, np.zeros(plan.row_TK.shape, jax.dtypes.float0)


_moe_ffn.defvjp(_moe_ffn_fwd, _moe_ffn_bwd)


def route_top_k(
  x_TD: jax.Array,
  router_DE: jax.Array,
  top_k: int,
  *,
  backend: str = "auto",
  num_sms: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Softmax over the K largest logits of each token: expert_TK and weight_TK (float32).

  Logits are accumulated in float32. Ties go to the smaller expert id. The backward keeps x and the
  two results only.

  Args:
    x_TD: tokens.
    router_DE: router weights.
    top_k: K.
    backend: as in `grouped_matmul`; the kernel takes whole row tiles and up to 192 experts.
    num_sms: as in `grouped_matmul`.

  Raises:
    ValueError: top_k is not in [1, E].
  """
  if not 1 <= top_k <= router_DE.shape[1]:
    raise ValueError(f"top_k={top_k} but there are {router_DE.shape[1]} experts: 1 <= top_k <= E")
  tokens, width = x_TD.shape
  fits = route_gpu.fits(tokens, width, router_DE.shape[1])
  if backend == "mosaic_gpu" and not fits:
    backend = "xla"  # the router is small: what the kernel cannot take is no reason to refuse
  kernel = resolve_backend(backend, x_TD.dtype, width) == "mosaic_gpu" and fits
  return cast(Any, _route_top_k)(x_TD, router_DE, top_k, kernel, num_sms)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _route_top_k(
  x_TD: jax.Array, router_DE: jax.Array, top_k: int, kernel: bool, num_sms: int | None
) -> tuple[jax.Array, jax.Array]:
  if kernel:
    return route_gpu.route_top_k_gpu(x_TD, router_DE, top_k, num_sms)
  logits_TE = jnp.dot(
    x_TD, router_DE.astype(x_TD.dtype), preferred_element_type=xla.accumulation_type(x_TD.dtype)
  )
  value_TK, expert_TK = _largest(logits_TE, top_k)
  return expert_TK, jax.nn.softmax(value_TK, axis=1)


def _largest(logits_TE: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
  """Like `lax.top_k`, by K passes of arg-max: XLA sorts whole rows for the former on a GPU."""
  ids_E = lax.broadcasted_iota(jnp.int32, (1, logits_TE.shape[1]), 1)
  values, experts = [], []
  for _ in range(top_k):
    expert_T = jnp.argmax(logits_TE, axis=1).astype(jnp.int32)
    values.append(jnp.max(logits_TE, axis=1))
    experts.append(expert_T)
    logits_TE = jnp.where(ids_E == expert_T[:, None], -jnp.inf, logits_TE)
  return jnp.stack(values, axis=1), jnp.stack(experts, axis=1)


def _route_fwd(x_TD, router_DE, top_k, kernel, num_sms):
  expert_TK, weight_TK = cast(Any, _route_top_k)(x_TD, router_DE, top_k, kernel, num_sms)
  return (expert_TK, weight_TK), (x_TD, router_DE, expert_TK, weight_TK)


def _route_bwd(top_k, kernel, num_sms, residuals, cotangents):
  del top_k, kernel, num_sms
  x_TD, router_DE, expert_TK, weight_TK = residuals
  dweight_TK = cotangents[1]
  dvalue_TK = weight_TK * (dweight_TK - jnp.sum(weight_TK * dweight_TK, axis=1, keepdims=True))
  ids_E = jnp.arange(router_DE.shape[1], dtype=expert_TK.dtype)
  dlogits_TE = jnp.zeros((x_TD.shape[0], router_DE.shape[1]), dvalue_TK.dtype)
  for k in range(expert_TK.shape[1]):
    dlogits_TE += jnp.where(expert_TK[:, k : k + 1] == ids_E, dvalue_TK[:, k : k + 1], 0)
  dlogits_TE = dlogits_TE.astype(x_TD.dtype)
  wide = xla.accumulation_type(x_TD.dtype)
  dx_TD = jnp.einsum("te,de->td", dlogits_TE, router_DE.astype(x_TD.dtype))
  drouter_DE = jnp.einsum("td,te->de", x_TD, dlogits_TE, preferred_element_type=wide)
  return dx_TD.astype(x_TD.dtype), drouter_DE.astype(router_DE.dtype)


_route_top_k.defvjp(_route_fwd, _route_bwd)


def moe_layer(
  x_TD: jax.Array,
  router_DE: jax.Array,
  gate_EDF: jax.Array | None,
  up_EDF: jax.Array,
  down_EFD: jax.Array,
  *,
  top_k: int,
  activation: str = "swiglu",
  precision: str | None = None,
  backend: str = "auto",
  num_sms: int | None = None,
) -> jax.Array:
  """A whole MoE layer with a linear router and softmax over the K chosen logits.

  Args:
    x_TD: tokens.
    router_DE: router weights.
    gate_EDF: gate weights, or None if the activation is not gated.
    up_EDF: up weights.
    down_EFD: down weights.
    top_k: K.
    activation: as in `grouped_ffn`.
    precision: as in `grouped_matmul`.
    backend: as in `grouped_matmul`.
    num_sms: as in `grouped_matmul`.

  Returns:
    y_TD in the type of x.

  Raises:
    ValueError: shapes disagree, or an option is unknown or does not fit.
  """
  with jax.named_scope("route"):
    expert_TK, weight_TK = route_top_k(x_TD, router_DE, top_k, backend=backend, num_sms=num_sms)
  return moe_ffn(
    x_TD,
    expert_TK,
    weight_TK,
    gate_EDF,
    up_EDF,
    down_EFD,
    activation=activation,
    precision=precision,
    backend=backend,
    num_sms=num_sms,
  )
