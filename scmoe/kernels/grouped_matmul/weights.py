"""Two inputs of an implementation of the experts' network: the weights, and how to compute.

G  experts      D  model width      F  expert width
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from scmoe.kernels.grouped_matmul.activations import Activation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FFNWeights:
  """Matrices and biases of G experts, for the kernels and XLA alike; or the gradients of these.

  Attributes:
    up_GDF: the first layer's matrices, with a gated activation those of its up-projection.
    down_GFD: the last layer's matrices; the width of the result may be another than D.
    gate_GDF: the gate's matrices, beside `up_GDF`, for a gated activation; None otherwise.
    up_bias_GF, down_bias_GD, gate_bias_GF: biases, or None.
  """

  up_GDF: jax.Array
  down_GFD: jax.Array
  gate_GDF: jax.Array | None = None
  up_bias_GF: jax.Array | None = None
  down_bias_GD: jax.Array | None = None
  gate_bias_GF: jax.Array | None = None

  @property
  def widths(self) -> tuple[int, int, int]:
    """(D, F, D'): widths of the input, of the experts and of the result."""
    return self.up_GDF.shape[1], self.up_GDF.shape[2], self.down_GFD.shape[2]

  @property
  def up_weights(self) -> tuple[jax.Array, ...]:
    """The first layer's matrices: (gate, up), or (up,) without a gate."""
    return (self.up_GDF,) if self.gate_GDF is None else (self.gate_GDF, self.up_GDF)

  @property
  def up_biases(self) -> tuple[jax.Array | None, ...]:
    """The first layer's biases in the order of `up_weights`; None where there is none."""
    return (self.up_bias_GF,) if self.gate_GDF is None else (self.gate_bias_GF, self.up_bias_GF)

  @classmethod
  def of_layers(cls, ups, down_GFD, up_biases, down_bias_GD) -> FFNWeights:
    """The weights with these `up_weights` and `up_biases`; with one of each there is no gate."""
    gate_GDF, gate_bias_GF = (ups[0], up_biases[0]) if len(ups) == 2 else (None, None)
    return cls(ups[-1], down_GFD, gate_GDF, up_biases[-1], down_bias_GD, gate_bias_GF)

  def cast(self, dtype: Any) -> FFNWeights:
    """The same weights with all matrices and biases in this type."""
    return jax.tree.map(lambda w: w.astype(dtype), self)


@dataclasses.dataclass(frozen=True)
class Execution:
  """How an implementation of the experts' network computes; all fields are static.

  Attributes:
    activation: the activation between the layers.
    precision: of float32 operands, as in `jax.lax.dot_general`.
    num_sms: CTAs that a grouped product's kernel launches (`pipeline.launch`); None: one for each
      multiprocessor. The kernels for a single row do not read it.
    interpretation: the simulation of kernels in use, or None (`launch.interpretation`).
    fp8: whether a forward pass rounds its products' operands to fp8 (`fp8.py`).
  """

  activation: Activation
  precision: str | None = None
  num_sms: int | None = None
  interpretation: Any = None
  fp8: bool = False
