"""The expert FFN on the padded layout, forward and backward, shared by the public entry points.

    D  model width      F  expert width      R  rows of the layout      G  groups (experts)

Only the input and the pre-activations are kept for the backward.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from scmoe.kernels.grouped_matmul import xla
from scmoe.kernels.grouped_matmul.activations import get_activation
from scmoe.kernels.grouped_matmul.backend import implementation
from scmoe.kernels.grouped_matmul.layout import GroupLayout, take_rows


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["gate_GDF", "up_GDF", "down_GFD", "gate_bias_GF", "up_bias_GF", "down_bias_GD"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class FFNWeights:
  """Weights of G experts; `gate_GDF` is None unless the activation is gated."""

  gate_GDF: jax.Array | None
  up_GDF: jax.Array
  down_GFD: jax.Array
  gate_bias_GF: jax.Array | None = None
  up_bias_GF: jax.Array | None = None
  down_bias_GD: jax.Array | None = None

  @property
  def up_weights(self) -> tuple[jax.Array, ...]:
    """(gate, up), or (up,)."""
    return (self.up_GDF,) if self.gate_GDF is None else (self.gate_GDF, self.up_GDF)

  @property
  def up_biases(self) -> tuple[jax.Array | None, ...]:
    """The biases in the order of `up_weights`."""
    return (self.up_bias_GF,) if self.gate_GDF is None else (self.gate_bias_GF, self.up_bias_GF)


@dataclasses.dataclass(frozen=True)
class FFNConfig:
  """What is static about an FFN: activation, resolved backend, precision, SMs to use."""

  activation: str
  backend: str
  precision: str | None = None
  num_sms: int | None = None


def check_ffn(
  rows: jax.Array | jax.ShapeDtypeStruct,
  weights: FFNWeights,
  num_groups: int,
  activation: str,
  *,
  out_width: int | None = None,
) -> None:
  """Raises ValueError, naming both sides, unless all shapes agree.

  Args:
    rows: [rows, D].
    weights: of `num_groups` experts.
    num_groups: G.
    activation: its name.
    out_width: width of the result, D unless it is given.
  """
  kind = get_activation(activation)
  if rows.ndim != 2:
    raise ValueError(f"rows must be [rows, D], got shape {rows.shape}")
  if weights.up_GDF.ndim != 3:
    raise ValueError(f"up must be [G, D, F], got shape {weights.up_GDF.shape}")
  groups, width, hidden = weights.up_GDF.shape
  out_width = width if out_width is None else out_width
  if kind.gated != (weights.gate_GDF is not None):
    has = "has" if weights.gate_GDF is not None else "lacks"
    raise ValueError(
      f"activation {activation!r} is {'gated' if kind.gated else 'not gated'} but the FFN {has}"
      f" gate weights: {'pass gate' if kind.gated else 'pass gate=None'}"
    )
  expected = {
    "gate_GDF": (groups, width, hidden),
    "down_GFD": (groups, hidden, out_width),
    "gate_bias_GF": (groups, hidden),
    "up_bias_GF": (groups, hidden),
    "down_bias_GD": (groups, out_width),
  }
  for name, shape in expected.items():
    value = getattr(weights, name)
    if value is not None and value.shape != shape:
      raise ValueError(
        f"{name} has shape {value.shape}, but up has {weights.up_GDF.shape}: expected {shape}"
      )
  if rows.shape[1] != width:
    raise ValueError(f"rows have width {rows.shape[1]}, but up takes {width}: they must agree")
  if num_groups != groups:
    raise ValueError(f"there are {num_groups} group sizes but {groups} experts: they must agree")


def ffn_forward(
  x_XD: jax.Array,
  index_R: jax.Array | None,
  weights: FFNWeights,
  layout: GroupLayout,
  config: FFNConfig,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """Rows x[index], or x where the index is None, through their experts.

  Returns:
    y_RD in the type of x (padding rows unspecified) and the pre-activations.
  """
  ops = implementation(config.backend)
  kind = get_activation(config.activation)
  options = {"precision": config.precision, "num_sms": config.num_sms}
  pre, a_RF = ops.up_activate(
    x_XD, weights.up_weights, weights.up_biases, layout, kind, index_R=index_R, **options
  )
  bias_GD = weights.down_bias_GD
  y_RD = ops.grouped_rows(
    a_RF, weights.down_GFD, layout, bias_GN=bias_GD, out_dtype=x_XD.dtype, **options
  )
  return y_RD, pre


def ffn_backward(
  x_XD: jax.Array,
  index_R: jax.Array | None,
  dy_XD: jax.Array,
  row_weight_R: jax.Array,
  pre: tuple[jax.Array, ...],
  weights: FFNWeights,
  layout: GroupLayout,
  config: FFNConfig,
) -> tuple[jax.Array, FFNWeights, jax.Array]:
  """Gradients of Σ dy · (s * y).

  Args:
    x_XD: the input of the forward.
    index_R: row of x, and of dy, behind each row of the layout, negative for padding; None where
      they are in the layout.
    dy_XD: gradient of the weighted output, before the weight.
    row_weight_R: s, zero on padding.
    pre: what the forward kept.
    weights: the experts.
    layout: the tiles of R.
    config: the static part.

  Returns:
    dx_RD in the layout (padding rows unspecified), the weights' gradients, ds_R in float32.
  """
  ops = implementation(config.backend)
  kind = get_activation(config.activation)
  options = {"precision": config.precision, "num_sms": config.num_sms}
  scaled_a_RF, dpre, ds_R = ops.down_backward(
    dy_XD, weights.down_GFD, pre, row_weight_R, layout, kind, index_R=index_R, **options
  )
  ddown_GFD = ops.grouped_weights(
    scaled_a_RF, dy_XD, layout, rhs_index_R=index_R, out_dtype=weights.down_GFD.dtype, **options
  )
  # The scaled activation is as large as a pre-activation: let it go before dx is made.
  dpre, ddown_GFD = jax.lax.optimization_barrier((dpre, ddown_GFD))
  dups = ops.up_weight_gradients(
    x_XD, dpre, layout, index_R=index_R, out_dtype=weights.up_GDF.dtype, **options
  )
  dx_RD = ops.up_input_gradient(dpre, weights.up_weights, layout, out_dtype=x_XD.dtype, **options)

  def bias_gradient(bias, d_RN):
    return None if bias is None else xla.group_sums(d_RN, layout).astype(bias.dtype)

  dbiases = [bias_gradient(bias, d_RF) for bias, d_RF in zip(weights.up_biases, dpre)]
  ddown_bias = None
  if weights.down_bias_GD is not None:
    dy_RD = dy_XD if index_R is None else take_rows(dy_XD, index_R)
    dy_RD = dy_RD.astype(jnp.float32)
    ds_R = ds_R + jnp.sum(dy_RD * xla.per_row(weights.down_bias_GD, layout), axis=1)
    ddown_bias = bias_gradient(weights.down_bias_GD, dy_RD * row_weight_R[:, None])
  gradients = FFNWeights(
    gate_GDF=None if weights.gate_GDF is None else dups[0],
    up_GDF=dups[-1],
    down_GFD=ddown_GFD,
    gate_bias_GF=None if weights.gate_GDF is None else dbiases[0],
    up_bias_GF=dbiases[-1],
    down_bias_GD=ddown_bias,
  )
  return dx_RD, gradients, ds_R
