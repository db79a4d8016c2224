"""The dense feed-forward network; its activations are those of the experts."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scmoe.kernels.grouped_matmul import (
  equal_ffn,
  get_activation,
  rows_have_kernels,
  without_gradient,
)
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
    cast = lambda param: param[...].astype(x_BSD.dtype)
    weights = _Weights(
      up_DF=cast(self.up),
      down_FD=cast(self.down),
      gate_DF=None if self.gate is None else cast(self.gate),
      up_bias_F=None if self.up_bias is None else cast(self.up_bias),
      down_bias_D=None if self.down_bias is None else cast(self.down_bias),
    )
    plain = functools.partial(_on_xla, activation=self.activation)
    if not self._has_kernels(x_BSD):
      return plain(x_BSD, weights)
    kernels = functools.partial(
      _on_kernels,
      activation=self.activation,
      backend=self.backend,
      mesh=self.mesh,
      shares=self._shares(),
    )
    # Not left to `equal_ffn`: XLA lays out gradients of batch and sequence in one dimension worse.
    return without_gradient(kernels, plain, x_BSD, weights)

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


class _Weights(NamedTuple):
  """Weights in the type of the rows."""

  up_DF: Array
  down_FD: Array
  gate_DF: Array | None
  up_bias_F: Array | None
  down_bias_D: Array | None


def _on_xla(x_BSD: Array, weights: _Weights, *, activation: str) -> Array:
  def project(y: Array, w: Array, b: Array | None) -> Array:
    return y @ w if b is None else y @ w + b

  gate_BSF = None if weights.gate_DF is None else project(x_BSD, weights.gate_DF, None)
  a_BSF = activate(activation, project(x_BSD, weights.up_DF, weights.up_bias_F), gate_BSF)
  return project(a_BSF, weights.down_FD, weights.down_bias_D)


def _on_kernels(
  x_BSD: Array,
  weights: _Weights,
  *,
  activation: str,
  backend: str,
  mesh: Mesh | None,
  shares: int,
) -> Array:
  """One group of rows, each device's on its own."""
  group: _Weights = jax.tree.map(lambda w: w[None], weights)
  spread, rows = None, P(None, BATCH_AXES)
  if shares > 1:
    spread = lambda local: jax.shard_map(
      local, mesh=mesh, in_specs=(rows, P()), out_specs=rows, check_vma=False
    )
  y_1RD = equal_ffn(
    x_BSD.reshape(1, -1, x_BSD.shape[-1]),
    group.gate_DF,
    group.up_DF,
    group.down_FD,
    activation=activation,
    up_bias_GF=group.up_bias_F,
    down_bias_GD=group.down_bias_D,
    backend=backend,
    shares=shares,
    on_shares=spread,
  )
  return y_1RD.reshape(x_BSD.shape)
