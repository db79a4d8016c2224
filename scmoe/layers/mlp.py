"""The dense feed-forward network; its activations are those of the experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from scmoe.kernels.grouped_matmul import get_activation


def is_gated(activation: str) -> bool:
  """Whether this activation needs a second first-layer matrix."""
  return get_activation(activation).gated


def activate(activation: str, up: Array, gate: Array | None = None) -> Array:
  """act(up), or act(gate) · up for a gated activation; same shape and dtype as `up`."""
  kind = get_activation(activation)
  if not kind.gated:
    return kind.value(up)
  if gate is None:
    raise ValueError(f"activation {activation!r} is gated and needs a gate projection")
  return kind.value(gate) * up


class MLP(nnx.Module):
  """down(act(up(x))), the dense path of a block and the shared expert."""

  def __init__(
    self,
    width: int,
    hidden: int,
    *,
    activation: str,
    bias: bool,
    init_std: float,
    out_std: float,
    rngs: nnx.Rngs,
  ):
    def weight(shape, std, axes):
      return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)

    self.activation = activation
    self.up = weight((width, hidden), init_std, ("embed", "hidden"))
    gated = is_gated(activation)
    self.gate = weight((width, hidden), init_std, ("embed", "hidden")) if gated else None
    self.down = weight((hidden, width), out_std, ("hidden", "embed"))
    self.up_bias = nnx.Param(jnp.zeros((hidden,)), axes=("hidden",)) if bias else None
    self.down_bias = nnx.Param(jnp.zeros((width,)), axes=("embed",)) if bias else None

  def __call__(self, x_BSD: Array) -> Array:
    dtype = x_BSD.dtype
    up_BSF = x_BSD @ self.up[...].astype(dtype)
    if self.up_bias is not None:
      up_BSF += self.up_bias[...].astype(dtype)
    gate_BSF = None if self.gate is None else x_BSD @ self.gate[...].astype(dtype)
    y_BSD = activate(self.activation, up_BSF, gate_BSF) @ self.down[...].astype(dtype)
    return y_BSD if self.down_bias is None else y_BSD + self.down_bias[...].astype(dtype)
