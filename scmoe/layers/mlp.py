"""The dense feed-forward network; its activations are those of the experts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scmoe.kernels.grouped_matmul import equal_ffn, get_activation, rows_have_kernels
from scmoe.parallel.mesh import BATCH_AXES, batch_parts, inside_shard_map


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
    mesh: Mesh | None = None,
    backend: str = "auto",
    rngs: nnx.Rngs,
  ):
    """Makes the weights.

    Args:
      width, hidden: D and F.
      activation: one of `activation_names()`.
      bias: whether both layers have one.
      init_std, out_std: standard deviations of the first and the last layer.
      mesh: over whose batch axes the rows are spread; None: one device.
      backend: of `equal_ffn`.
      rngs: stream `params`.
    """

    def weight(shape, std, axes):
      return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)

    self.activation, self.mesh, self.backend = activation, mesh, backend
    self.up = weight((width, hidden), init_std, ("embed", "hidden"))
    gated = is_gated(activation)
    self.gate = weight((width, hidden), init_std, ("embed", "hidden")) if gated else None
    self.down = weight((hidden, width), out_std, ("hidden", "embed"))
    self.up_bias = nnx.Param(jnp.zeros((hidden,)), axes=("hidden",)) if bias else None
    self.down_bias = nnx.Param(jnp.zeros((width,)), axes=("embed",)) if bias else None

  def __call__(self, x_BSD: Array) -> Array:
    """[B, S, D] -> [B, S, D] in the type of x."""
    if self._has_kernels(x_BSD):
      return self._on_kernels(x_BSD)
    dtype = x_BSD.dtype

    def project(y, weight, bias):
      y = y @ weight[...].astype(dtype)
      return y if bias is None else y + bias[...].astype(dtype)

    gate_BSF = None if self.gate is None else project(x_BSD, self.gate, None)
    a_BSF = activate(self.activation, project(x_BSD, self.up, self.up_bias), gate_BSF)
    return project(a_BSF, self.down, self.down_bias)

  def _shares(self) -> int:
    """Parts that the batch has to be cut into for the kernels; 1 where it is cut already."""
    return 1 if inside_shard_map() else batch_parts(self.mesh)

  def _has_kernels(self, x_BSD: Array) -> bool:
    """Whether each device has whole weights and a part of the batch that the kernels take."""
    shares = self._shares()
    if x_BSD.shape[0] % shares or (self.mesh is not None and self.mesh.shape["tensor"] > 1):
      return False
    rows = math.prod(x_BSD.shape[:-1]) // shares
    return rows_have_kernels(rows, self.backend, x_BSD.dtype, *self.up.shape)

  def _on_kernels(self, x_BSD: Array) -> Array:
    alone = lambda w: None if w is None else w[...][None]
    shares, rows = self._shares(), P(None, BATCH_AXES)
    spread = None
    if shares > 1:
      spread = lambda local: jax.shard_map(
        local, mesh=self.mesh, in_specs=(rows, P()), out_specs=rows, check_vma=False
      )
    y_1RD = equal_ffn(
      x_BSD.reshape(1, -1, x_BSD.shape[-1]),
      alone(self.gate),
      self.up[...][None],
      self.down[...][None],
      activation=self.activation,
      up_bias_GF=alone(self.up_bias),
      down_bias_GD=alone(self.down_bias),
      backend=self.backend,
      shares=shares,
      on_shares=spread,
    )
    return y_1RD.reshape(x_BSD.shape)
