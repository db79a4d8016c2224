"""Gates: modules that compute logits from tokens, one per token and expert.

A gate of your own is a class with the protocol `Gate` below; a run names it by its import path,
`router.gate=my_package.module:Name`. It must be an `nnx.Module`, so that its parameters are
trained, stacked over layers and saved with all others. `docs/extending.md` has an example. (Within
one program, an entry in `GATES` works too.)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from scmoe.base.errors import ConfigError
from scmoe.base.extensions import load, made_by
from scmoe.base.options import check_whole
from scmoe.kernels.grouped_matmul.activations import clamped
from scmoe.kernels.top_k import GateOutput, gate_product, gate_top_k
from scmoe.moe.options import GATES, RouterConfig, check_top_k

LOG_SCALE_MAX = math.log(100.0)
COSINE_EPS = 1e-12


class Gate(Protocol):
  """A module that scores every expert for every token.

  It returns plain logits; the router adds noise, takes the softmax or sigmoid, chooses experts and
  normalises weights. Each device runs the gate on its own tokens, with replicated parameters, so
  the gate must treat tokens independently. A gate may have a method `top_k(x_TD, k)` like that of
  `LinearGate`, if it finds a token's k best experts faster than `jax.lax.top_k` of its logits does.
  The router then calls this method instead of the gate, unless noise is added or the gate is one of
  `GatesOfRows`.

  The class of a gate in `GATES` may have a tuple `OF_EXPERTS`: the names of its arrays whose last
  dimension is the experts. `arrays_of_experts` reads it.
  """

  def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T E"]:
    """The tokens' logits, of any floating type; the router goes on in float32 at least."""
    ...


# A class or function that makes a gate: (width, num_experts, config, *, init_std, rngs) -> Gate.
GateMaker = Callable[..., Any]


def compute_dtype(x: Array, fp32: bool) -> Any:
  """The type of x, promoted to float32 at least if `fp32`."""
  return jnp.promote_types(x.dtype, jnp.float32) if fp32 else x.dtype


def cosine_logits(
  x_TD: Array,
  projection_DP: Array,
  bias_P: Array,
  directions_PE: Array,
  log_scale: Array,
  *,
  fp32: bool = True,
) -> Array:
  """Logits of a cosine gate (Tutel `cosine_top`): [T, E], float32 (float64 for float64 tokens).

    unit_P(x · projection + bias) · unit_P(directions) · exp(min(log_scale, ln 100))

  with unit_P(a) = a / max(|a|, 1e-12), |a| the norm over P. A log_scale above ln 100 gets no
  gradient.

  Args:
    x_TD: tokens.
    projection_DP, bias_P: affine map to the P dimensions in which angles are measured.
    directions_PE: one direction per expert.
    log_scale: scalar or [1], the natural logarithm of the scale.
    fp32: whether to compute in float32 even if the tokens are of lower precision. If not,
      parameters and intermediate results are rounded to the tokens' type, except within unit_P;
      with float16, 2^-14 takes the place of 1e-12, which float16 does not have.
  """
  dtype = compute_dtype(x_TD, fp32)
  x_TD, projection_DP, bias_P, directions_PE, log_scale = (
    a.astype(dtype) for a in (x_TD, projection_DP, bias_P, directions_PE, log_scale)
  )
  with jax.default_matmul_precision("highest"):
    point_TP = _unit(x_TD @ projection_DP + bias_P, axis=1)
    cosine_TE = point_TP @ _unit(directions_PE, axis=0)
  logits_TE = cosine_TE * jnp.exp(clamped(log_scale, None, LOG_SCALE_MAX))
  return logits_TE.astype(jnp.promote_types(dtype, jnp.float32))


def _unit(a: Array, axis: int) -> Array:
  # The squares are summed in float32 at least: those of float16 below 3e-8 would be 0, and above
  # 65,504 infinite. The floor is at least the smallest normal number of a's own type.
  dtype, floor = a.dtype, max(COSINE_EPS, float(jnp.finfo(a.dtype).tiny))
  a = a.astype(compute_dtype(a, True))
  square = jnp.square(a).sum(axis, keepdims=True)
  # The square root has no finite gradient at zero. The norm of a zero vector takes the other
  # branch: it is 0 and gets a zero gradient instead of NaN.
  norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
  return (a / jnp.maximum(norm, floor)).astype(dtype)


class LinearGate(nnx.Module):
  """The logits are x · W, without bias; W starts as N(0, init_std²).

  It is Tutel's gate `{'type': 'top'}`, and MegaBlocks' router.
  """

  OF_EXPERTS = ("weight",)

  def __init__(
    self, width: int, num_experts: int, config: RouterConfig, *, init_std: float, rngs: nnx.Rngs
  ):
    value = init_std * jax.random.normal(rngs.params(), (width, num_experts), jnp.float32)
    self.weight = nnx.Param(value, axes=("embed", None))
    self.fp32 = config.compat.fp32_gate

  def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T E"]:
    return gate_product(x_TD, self.weight[...], fp32=self.fp32)

  def top_k(self, x_TD: Float[Array, "T D"], k: int) -> GateOutput:
    """The logits, each token's k best experts, and perhaps these experts' probabilities.

    `gate_top_k` computes them, and says when the result has probabilities.

    Raises:
      ConfigError: k is larger than E.
      ValueError: k is below 1.
    """
    check_top_k(k, self.weight.shape[-1])
    return gate_top_k(x_TD, self.weight[...], k, fp32=self.fp32)


class AffineGate(nnx.Module):
  """The logits are x · W + b (GPT-OSS); W starts as N(0, init_std²), b as 0.

  It has no method `top_k`, since `gate_top_k` adds no bias.
  """

  OF_EXPERTS = ("weight", "bias")

  def __init__(
    self, width: int, num_experts: int, config: RouterConfig, *, init_std: float, rngs: nnx.Rngs
  ):
    value = init_std * jax.random.normal(rngs.params(), (width, num_experts), jnp.float32)
    self.weight = nnx.Param(value, axes=("embed", None))
    self.bias = nnx.Param(jnp.zeros((num_experts,)), axes=(None,))
    self.fp32 = config.compat.fp32_gate

  def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T E"]:
    """The tokens' logits, in float32 at least."""
    logits_TE = gate_product(x_TD, self.weight[...], fp32=self.fp32)
    return logits_TE + self.bias[...].astype(logits_TE.dtype)


class CosineGate(nnx.Module):
  """Logits are a scale times the cosine of the projected token and each expert's direction.

  It is Tutel's gate `cosine_top`; see `cosine_logits`. Projection and bias start uniform in ±1/√D,
  with D the tokens' width, and directions as N(0, 0.01²). The scale, at most 100, starts at 2; its
  parameter is the logarithm.
  """

  OF_EXPERTS = ("directions",)

  def __init__(
    self, width: int, num_experts: int, config: RouterConfig, *, init_std: float, rngs: nnx.Rngs
  ):
    del init_std  # the published gate fixes its own initial scales
    dim, bound = config.cosine_dim, width**-0.5
    uniform = lambda *shape: jax.random.uniform(
      rngs.params(), shape, jnp.float32, minval=-bound, maxval=bound
    )
    directions = 0.01 * jax.random.normal(rngs.params(), (dim, num_experts), jnp.float32)
    self.projection = nnx.Param(uniform(width, dim), axes=("embed", None))
    self.projection_bias = nnx.Param(uniform(dim), axes=(None,))
    self.directions = nnx.Param(directions, axes=(None, None))
    # The optimizer decays no parameter with "scale" in its name.
    self.log_scale = nnx.Param(jnp.full((1,), math.log(2.0)), axes=(None,))
    self.fp32 = config.compat.fp32_gate

  def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T E"]:
    parameters = (self.projection, self.projection_bias, self.directions, self.log_scale)
    return cosine_logits(x_TD, *(p[...] for p in parameters), fp32=self.fp32)


@dataclasses.dataclass(frozen=True)
class GatesOfRows:
  """A `Gate` made of several gates over one set of experts; each row of tokens is scored by one.

  Tasks that share experts differ by their gates (`router.tasks`). A row's gate reads this row
  alone, so a gate gets gradients from its own rows only. It has no `top_k`, since `gate_top_k`
  reads the weights of one gate.

  Attributes:
    graph: the gates' graph definition, which all share.
    params: their parameters, each with a leading dimension of gates.
    gate_B: int32 [B], index of each row's gate; its range is not checked.
  """

  graph: Any
  params: Any
  gate_B: Array

  def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T E"]:
    """The tokens' logits, each by the gate of its row. T is B times the tokens of a row.

    Raises:
      ConfigError: T is no multiple of B, or B is 0.
    """
    rows, tokens = self.gate_B.shape[0], x_TD.shape[0]
    if not rows or tokens % rows:
      raise ConfigError(
        f"gate names a gate for each of {rows} rows, into which {tokens} tokens cannot be divided; "
        "give one index per row"
      )

    def of_row(index: Array, x_SD: Array) -> Array:
      gate: Any = nnx.merge(self.graph, jax.tree.map(lambda each: each[index], self.params))
      return gate(x_SD)

    logits_BSE = jax.vmap(of_row)(self.gate_B, x_TD.reshape(rows, tokens // rows, -1))
    return logits_BSE.reshape(tokens, -1)


def chosen_gate(gates: Sequence[Any], index: int | Array) -> Any:
  """The gate with this index; with an array [B] of indices, a gate for each row (`GatesOfRows`).

  Args:
    gates: of one layer.
    index: a whole number; or a jax array, traced or not, of shape [] or [B], whose range is not
      checked.

  Raises:
    ConfigError: the index is neither a whole number nor a jax array; a whole number is the index of
      no gate; or the index is a jax array, and the gates differ in class or size.
  """
  if not isinstance(index, Array):
    check_whole("gate", index)
    if not 0 <= index < len(gates):
      raise ConfigError(
        f"gate={index} is none of the {len(gates)} gates; raise router.compat.gates or use 0 to "
        f"{len(gates) - 1}"
      )
    return gates[index]
  apart = [nnx.split(gate) for gate in gates]
  kinds = [(graph, jax.tree.map(jnp.shape, nnx.to_pure_dict(params))) for graph, params in apart]
  if any(kind != kinds[0] for kind in kinds):
    raise ConfigError("gates that take turns must be of one class and size; pass an int as gate")
  graph, params = apart[0][0], jax.tree.map(lambda *each: jnp.stack(each), *(p for _, p in apart))
  if index.ndim:
    return GatesOfRows(graph, params, index)
  return nnx.merge(graph, jax.tree.map(lambda each: each[index], params))


def make_gates(
  width: int, num_experts: int, config: RouterConfig, *, init_std: float, rngs: nnx.Rngs
) -> list[Any]:
  """Makes `config.num_gates` gates over one set of experts, each with its own initial weights.

  Raises:
    ConfigError: the gate's class or function cannot be imported, its call fails, or the call
      returns an object without a method `__call__`.
  """
  made = functools.partial(
    made_by, _maker(config.gate), f"router.gate={config.gate!r}", needs=("__call__",)
  )
  return [
    made(width, num_experts, config, init_std=init_std, rngs=rngs) for _ in range(config.num_gates)
  ]


def arrays_of_experts(gate: str) -> tuple[str, ...]:
  """The names of a gate's arrays whose last dimension is the experts, e.g. ("weight", "bias").

  Columns of these arrays move when experts change places, or go when experts go.

  Args:
    gate: a word of `GATES`.

  Returns:
    `OF_EXPERTS` of the gate's class; () if the class has none.

  Raises:
    ConfigError: the class cannot be imported.
  """
  return tuple(getattr(_maker(gate), "OF_EXPERTS", ()))


def _maker(gate: str) -> GateMaker:
  """The class or function of a word of `GATES` or of an import path; ConfigError as `load`."""
  make: Any = GATES.get(gate, gate)  # a class, or where to import it from
  return load(make, "router.gate") if isinstance(make, str) else make


def check_logits(logits_TE: Array, tokens: int, num_experts: int | None) -> None:
  """Checks that a gate returned logits [T, E] of a floating type.

  Args:
    logits_TE: what the gate returned.
    tokens: T.
    num_experts: E; None: any number.

  Raises:
    ConfigError: shape or type is another; names what was returned and what routing needs.
  """
  want = (tokens, "E" if num_experts is None else num_experts)
  shape = tuple(logits_TE.shape)
  wrong = len(shape) != 2 or shape[0] != tokens
  if wrong or (num_experts is not None and shape[1] != num_experts):
    raise ConfigError(
      f"router.gate returned logits of shape {list(shape)}, routing needs "
      f"[tokens, experts] = [{want[0]}, {want[1]}]; return one score per token and expert"
    )
  if not jnp.issubdtype(logits_TE.dtype, jnp.floating):
    raise ConfigError(
      f"router.gate returned logits of type {logits_TE.dtype}, routing needs floating point"
    )
