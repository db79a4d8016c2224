"""The dense feed-forward network; its activations are those of the experts."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from scmoe.base.options import option
from scmoe.kernels.grouped_matmul import (
  FFNConfig,
  FFNOptions,
  FFNWeights,
  activations,
  arrived_layout,
  expert_ffn,
  get_activation,
  padded_layout,
  resolve_backend,
  splits_of_one_row,
)
from scmoe.kernels.grouped_matmul.activations import Activation
from scmoe.kernels.grouped_matmul.layout import KERNEL_ROW_TILE
from scmoe.kernels.one_row.without_gradient import without_gradient
from scmoe.kernels.wide_sums import plus_bias
from scmoe.parallel.collectives import repeat, total
from scmoe.parallel.mesh import AXES, axis_size


def is_gated(activation: str) -> bool:
  """Whether this activation needs two matrices in the first layer: for the gate and for up.

  Raises:
    ValueError: the activation is unknown.
  """
  return get_activation(activation).gated


def activate(activation: str, up: Array, gate: Array | None = None) -> Array:
  """act(up), or act(gate) · up for a gated activation; same shape and dtype as `up`.

  In `clamped_swiglu` a function of up stands for up. Computed in float32 (or wider). The backward
  pass computes it again from up and gate.

  Raises:
    ValueError: the activation is unknown, or is gated and gets no gate.
  """
  kind = get_activation(activation)
  if not kind.gated:
    return _activated(kind, (up,))
  if gate is None:
    raise ValueError(f"activation {activation!r} is gated and needs a gate projection")
  return _activated(kind, (gate, up))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activated(kind: Activation, pre: tuple[Array, ...]) -> Array:
  return activations.activate(kind, pre).astype(pre[-1].dtype)


def _activated_bwd(kind: Activation, pre: tuple[Array, ...], bar: Array) -> Any:
  _, grads = activations.activation_vjp(kind, pre, bar)
  return (tuple(grad.astype(h.dtype) for grad, h in zip(grads, pre)),)


_activated.defvjp(lambda kind, pre: (_activated(kind, pre), pre), _activated_bwd)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FFNLayerOptions(FFNOptions, path="FFNLayerOptions"):
  """Options of the parameters of a feed-forward layer, whether dense or of experts.

  Attributes:
    bias: whether both layers have a bias.
    init_std, out_std: standard deviations of the first and the last layer's initial weights.
  """

  bias: bool = option(False)
  init_std: float = option(0.02, minimum=0)
  out_std: float = option(0.02, minimum=0)


@dataclasses.dataclass(frozen=True)
class MLPConfig(FFNLayerOptions, path="MLPConfig"):
  """Options of a dense feed-forward network; `fp8` and `impl` are for experts, and ignored here.

  Attributes:
    width, hidden: D and F.
  """

  width: int = option(minimum=1)
  hidden: int = option(minimum=1)


class MLP(nnx.Module):
  """down(act(up(x))), or the gated form: the dense MLP of a block, and the shared expert.

  Under tensor parallelism each device has a part of the hidden width, and the results are added up.

  Args:
    config: options of the network.
    rngs: stream `params` for the initial weights.
  """

  def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs):
    c = self.config = config.filled()

    def weight(shape, std, axes):
      return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)

    self.up = weight((c.width, c.hidden), c.init_std, ("embed", "hidden"))
    into = lambda: weight((c.width, c.hidden), c.init_std, ("embed", "hidden"))
    self.gate = into() if is_gated(c.activation) else None
    self.down = weight((c.hidden, c.width), c.out_std, ("hidden", "embed"))
    self.up_bias = nnx.Param(jnp.zeros((c.hidden,)), axes=("hidden",)) if c.bias else None
    self.down_bias = nnx.Param(jnp.zeros((c.width,)), axes=("embed",)) if c.bias else None

  def __call__(self, x_BSD: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """The network's output for every token: [..., D] -> [..., D] in the type of x."""
    cast = lambda param: None if param is None else param[...].astype(x_BSD.dtype)
    up_bias_F = None if self.up_bias is None else self.up_bias[...]
    weights = (cast(self.up), cast(self.gate), cast(self.down), up_bias_F)
    x_BSD = repeat(x_BSD, ("tensor",), "tensor")
    plain = functools.partial(_on_xla, activation=self.config.activation)
    if self._has_kernels(x_BSD):
      kernels = functools.partial(_on_kernels, config=self.config)
      # The plain form keeps batch and sequence apart: XLA's gradients are faster that way.
      y_BSD = without_gradient(kernels, plain, x_BSD, *weights)
    else:
      y_BSD = plain(x_BSD, *weights)
    y_BSD = total(y_BSD, ("tensor",), "tensor")
    return plus_bias(y_BSD, self.down_bias)

  def _has_kernels(self, x_BSD: Array) -> bool:
    """Whether our kernels compute a forward pass without gradients.

    They take whole row tiles, or a single row. On several devices XLA computes: there the kernels
    would share multiprocessors with NCCL's exchanges, which cost more than they gained
    (experiments/kernels).

    Raises:
      ValueError: on one device, `backend` is mosaic_gpu and cannot take the type or the widths.
    """
    if axis_size(*AXES) > 1:
      return False
    rows = math.prod(x_BSD.shape[:-1])
    widths = self.up.shape
    backend = resolve_backend(self.config.backend, x_BSD.dtype, *widths)
    if backend != "mosaic_gpu" or rows == 0:
      return False
    if rows == 1:
      return splits_of_one_row((widths[0], widths[1], widths[0]), 1) is not None
    return rows % KERNEL_ROW_TILE == 0


def _on_xla(x_BSD, up_DF, gate_DF, down_FD, up_bias_F, *, activation: str) -> Array:
  h_BSF = plus_bias(x_BSD @ up_DF, up_bias_F)
  return activate(activation, h_BSF, None if gate_DF is None else x_BSD @ gate_DF) @ down_FD


def _on_kernels(x_BSD, up_DF, gate_DF, down_FD, up_bias_F, *, config: MLPConfig) -> Array:
  """The MLP as a single expert that all rows visit, by the experts' kernels."""
  one = lambda w: None if w is None else w[None].astype(x_BSD.dtype)
  weights = FFNWeights(up_DF[None], down_FD[None], one(gate_DF), one(up_bias_F))
  rows = math.prod(x_BSD.shape[:-1])
  if rows == 1:
    first = jnp.zeros((1,), jnp.int32)
    layout = arrived_layout(first, first, first + 1)
  else:
    layout = padded_layout(1, 1, rows)
  static = FFNConfig(activation=config.activation, impl="grouped", backend=config.backend)
  return expert_ffn(x_BSD, weights, layout, static)
