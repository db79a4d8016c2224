"""The MoE layer: its four stages (route, dispatch, experts, combine) in a row, or one at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from scmoe.base.errors import ConfigError
from scmoe.base.extensions import construct, is_import_path
from scmoe.base.options import check_array, check_callable, check_type, option, section
from scmoe.kernels.wide_sums import weighed
from scmoe.moe.dispatch import DispatchConfig, Transport, make_transport, sends_ahead
from scmoe.moe.experts import Experts, FFNExperts, FFNExpertsConfig
from scmoe.moe.gates import Gate, chosen_gate, make_gates
from scmoe.moe.losses import router_sums
from scmoe.moe.options import RouterConfig
from scmoe.moe.route import route, route_distinct
from scmoe.moe.scores import Draws
from scmoe.moe.types import Dispatched, RouterSums, Routing
from scmoe.parallel.barriers import barrier
from scmoe.parallel.collectives import repeat, total
from scmoe.parallel.mesh import BATCH_AXES, axis_size, own_share
from scmoe.parallel.sequence import own_places, parts


@dataclasses.dataclass(frozen=True)
class MoEConfig(FFNExpertsConfig, path="MoEConfig"):
  """Options of a MoE layer: of its experts (`FFNExpertsConfig`, inherited), router and transport.

  Attributes:
    top_k: K, number of experts that a token chooses, zero experts included.
    zero_experts: number of further experts, with ids from E on, that return their input. They have
      no parameters and receive no rows.
    copy_engines: whether the GPUs' copy engines exchange rows, instead of kernels.
    kind: `ffn` for feed-forward experts, or the import path of a subclass of `Experts`. That class
      is called with this configuration and `rngs`.
    router, dispatch: options of routing and of the transport.

  Raises:
    ConfigError: a field has a wrong type or value, options of the router do not fit each other,
      `top_k` or options of the router do not fit the numbers of experts, or with kind `ffn`
      `impl=batched` has a transport without buffers of equal size.
  """

  top_k: int = option(1, minimum=1)
  zero_experts: int = option(0, minimum=0)
  copy_engines: bool = option(False)
  kind: str = option("ffn", choices=("ffn",), importable=True)
  router: RouterConfig = section(RouterConfig)
  dispatch: DispatchConfig = section(DispatchConfig)

  def __post_init__(self):
    super().__post_init__()
    self.router.check()
    self.router.check_experts(self.top_k, self.num_experts, self.zero_experts)
    if self.kind == "ffn" and self.impl == "batched":
      self.dispatch.check_buffers()

  @property
  def choices(self) -> int:
    """Number of experts that the router chooses from, zero experts included."""
    return self.num_experts + self.zero_experts


@dataclasses.dataclass(frozen=True)
class MoECall:
  """Arguments of one call of the layer, besides its tokens.

  Attributes:
    mask: bool, the tokens' shape without D: True for tokens that take part; None: all do.
    key: random key of gate noise and jitter in training; with a key, token rounding applies too
      (not with `avoid_T`), and the tokens must have a dimension before D. None outside training.
    bias_E: float32 bias of all experts, zero experts included, added to the scores for the choice
      only (`router.bias`), or None.
    avoid_T: int32, the one expert that each token must not visit (DGMoE); it then visits one other.
      None: no such rule.
    k: experts per token, unless `avoid_T` is given; None: the layer's `top_k`.
    gate: index of the gate that chooses, where there are several (Tutel gate_index); may be traced.
      An array [B] has an index for each row of tokens [B, ..., D] (`router.tasks`).
    capacity_factor: replaces `dispatch.capacity_factor` in this call (Tutel's runtime capacity); 0
      drops nothing, any other value may, even with a transport that drops nothing otherwise
      (`dropless`, `per_rank`, `put`). None: the configured factor, which these do not read.
    no_drop: whether every expert has room for all tokens, whatever the factor (decoding, exact
      evaluation).
  """

  mask: Bool[Array, ...] | None = None
  key: Array | None = None
  bias_E: Float[Array, " E"] | None = None
  avoid_T: Int[Array, " T"] | None = None
  k: int | None = None
  gate: int | Array = 0
  capacity_factor: float | None = None
  no_drop: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutedTokens:
  """Tokens between the layer's stages, from `MoE.route` to `MoE.completed`.

  Attributes:
    x_TD: the tokens that dispatch reads.
    routing: their choices.
    transport: brings rows to the experts and back.
    sent: the rows at their experts, or later the experts' outputs; None before dispatch.
    kept_TD: the weighted output of zero experts, which `MoE.completed` adds: each token times the
      sum of its weights of zero experts. None without zero experts.
  """

  x_TD: Array
  routing: Routing
  transport: Transport = dataclasses.field(metadata={"static": True})
  sent: Dispatched | None = None
  kept_TD: Array | None = None

  @property
  def arrived(self) -> Dispatched:
    """`sent`, for code that runs after dispatch; before dispatch it raises an AssertionError."""
    assert self.sent is not None, "not dispatched yet"
    return self.sent

  def with_rows(self, rows: tuple[Array, ...]) -> RoutedTokens:
    """The same tokens with other rows in `sent`, for instance the experts' outputs."""
    return dataclasses.replace(self, sent=dataclasses.replace(self.arrived, rows=rows))


class MoE(nnx.Module):
  """Sparse layer: each token visits a few of the experts (paper Eq. 1-4).

  A call of the layer runs its stages in a row. A schedule runs them one at a time, with other work
  between them:

      routed = moe.route(x)
      sent = routed.transport.dispatch(routed.x_TD, routed.routing, moe.experts)
      rows = tuple(map(moe.experts, sent.rows, sent.layouts))
      routed = dataclasses.replace(routed, sent=dataclasses.replace(sent, rows=rows))
      y_TD, sums = moe.completed(routed, routed.transport.combine(routed.sent))

  `y_TD` has one row for each token, [T, D]; a call of the layer gives it the shape of x.

  On one device, that device has all experts. In the manual region (`scmoe.manual`) the expert axis
  spreads them over devices, and dispatch and combine exchange rows, unless each device gathers all
  experts (`dispatch.adaptive_r` = 0) or `dispatch.ablation.silent` is on.

  Args:
    config: see `MoEConfig`.
    experts: the user's own experts; None: those that `config.kind` names, by default feed-forward
      networks.
    gates: the user's own gates; None: those that `config.router` names.
    rngs: stream `params` for the initial weights.

  Raises:
    ConfigError: an argument has the wrong type, `gates` is empty, or the gate or the experts
      that an option names cannot be made.
  """

  def __init__(
    self,
    config: MoEConfig,
    *,
    experts: Experts | None = None,
    gates: list[Any] | None = None,
    rngs: nnx.Rngs,
  ):
    check_type("config", config, MoEConfig)
    config = self.config = config.filled()
    check_type("rngs", rngs, nnx.Rngs)
    if gates is not None:
      check_type("gates", gates, list)
    if experts is not None:
      check_callable("experts", experts)
    if gates is not None and not gates:
      raise ConfigError("gates=[] is empty; give at least one gate, or None for router.gate")
    make = lambda: make_gates(
      config.width, config.choices, config.router, init_std=config.init_std, rngs=rngs
    )
    self.router_gate = nnx.List(make() if gates is None else gates)
    self.experts = _make_experts(config, rngs) if experts is None else experts

  def __call__(
    self, x: Float[Array, "... D"], call: MoECall = MoECall()
  ) -> tuple[Float[Array, "... D"], RouterSums]:
    """Runs the layer's four stages: route, dispatch, experts, combine.

    Args:
      x: normalised tokens of a floating type; with 0 tokens the result is empty.
      call: see `MoECall`.

    Returns:
      y in the shape of x, and sums over this device's tokens, from which `scmoe.moe.losses`
      computes losses and statistics.

    Raises:
      ConfigError: `call` is no `MoECall`, or its mask no array; x has another width than the layer
        or no floating type; or see, among others, `scmoe.moe.gates.chosen_gate`,
        `scmoe.moe.route.route`, `make_transport` and `DispatchConfig.check_gathers`.
      ValueError: the experts' network cannot compute these rows as `config.impl` and
        `config.backend` ask; see `expert_ffn`.
    """
    self._check(x, call)
    if not x.size:
      # Gathers and kernels need a row to read, so one masked token stands for no token.
      one = dataclasses.replace(call, mask=jnp.zeros(1, bool), key=None, no_drop=True, avoid_T=None)
      one = dataclasses.replace(one, gate=0)
      y, sums = self(jnp.zeros((1, self.config.width), x.dtype), one)
      return jnp.zeros((*x.shape[:-1], y.shape[-1]), y.dtype), sums
    with jax.named_scope("route"):
      routed = self.route(x, call)
    with jax.named_scope("dispatch"):
      sent = routed.transport.dispatch(routed.x_TD, routed.routing, self.experts)
    with jax.named_scope("experts"):
      rows = tuple(self.experts(rows, layout) for rows, layout in zip(sent.rows, sent.layouts))
    with jax.named_scope("combine"):
      routed = dataclasses.replace(routed, sent=sent).with_rows(rows)
      y_TD, sums = self.completed(routed, routed.transport.combine(routed.arrived))
    return y_TD.reshape(*x.shape[:-1], y_TD.shape[-1]), sums

  def route(
    self, x: Float[Array, "... D"], call: MoECall = MoECall(), gate: Gate | None = None
  ) -> RoutedTokens:
    """Chooses each token's experts and weights, and the transport that brings tokens to experts.

    Args:
      x: normalised tokens.
      call: see `MoECall`.
      gate: a gate to use instead of the one that `call.gate` names. `TokenMoE` gives one whose
        logits the kernel of the norm before the layer has computed already.

    Returns:
      The tokens with their routing and their transport, before dispatch.

    Raises:
      ConfigError: see `__call__`.
    """
    self._check(x, call)
    if self.config.dispatch.adaptive_r == 0 and axis_size("expert") > 1:
      own = type(self.experts).__call__ is Experts.__call__
      self.config.dispatch.check_gathers(type(self.experts).__name__, own=own)
    chosen: Any = self._gate(call.gate) if gate is None else gate
    # Where tokens stay in place (`Local`), one loop in the backward pass can add up the gradients
    # that the gate and the K experts give a token. The backward pass of the norm before this layer
    # reads the loop's result and sums it over rows and over columns. If XLA fused the two, the loop
    # would be slower: the barrier prevents that.
    x_TD = barrier(x.reshape(-1, self.config.width), "backward")
    routing, k = self._routing(x_TD, x.shape, chosen, call)
    kept_TD = None
    if self.config.zero_experts:
      kept_TD = weighed(routing.zero_weight_T[:, None], x_TD)
    # Under tensor parallelism all devices of the tensor axis read the same tokens and the same
    # weights of choices. If `Experts.partial` names this axis, each of them computes a partial sum
    # of every result, and `repeat` adds up the devices' gradients of tokens and weights.
    read = (x_TD, routing.weight_TK, routing.input_weight_TK)
    x_TD, weight_TK, input_TK = repeat(read, self.experts.partial, "tensor")
    routing = dataclasses.replace(routing, weight_TK=weight_TK, input_weight_TK=input_TK)
    return RoutedTokens(x_TD, routing, self._transport(x_TD.shape[0], k, call), kept_TD=kept_TD)

  def sends_ahead(self, tokens: int, *, no_drop: bool) -> bool:
    """Whether a call's rows travel between devices, and can be dispatched without the experts.

    Rows that the ablation `silent` keeps from travelling count as if they did.

    Args:
      tokens: T, the tokens of this device.
      no_drop: see `MoECall`.
    """
    return sends_ahead(self._transport(tokens, self.config.top_k, MoECall(no_drop=no_drop)))

  def _routing(
    self, x_TD: Array, shape: tuple[int, ...], gate: Gate, call: MoECall
  ) -> tuple[Routing, int]:
    """The choices of all tokens, and k, the experts per token: 1 where `call.avoid_T` is given.

    Args:
      x_TD: the tokens.
      shape: the tokens' shape before they were flattened to [T, D].
      gate, call: as for `route`.
    """
    config, router = self.config, self.config.router
    options: dict[str, Any] = {"num_experts": config.choices, "zero_experts": config.zero_experts}
    options |= {"bias_E": call.bias_E}
    options |= {"mask_T": None if call.mask is None else call.mask.reshape(-1)}
    options |= {"training": None if call.key is None else self._draws(shape, call.key)}
    if call.avoid_T is not None:
      return route_distinct(x_TD, gate, router, call.avoid_T, **options), 1
    k = config.top_k if call.k is None else call.k
    return route(x_TD, gate, router, k=k, **options), k

  def _transport(self, tokens: int, k: int, call: MoECall) -> Transport:
    """The transport for `tokens` tokens with k choices each."""
    config, router = self.config, self.config.router
    return make_transport(
      config.dispatch,
      tokens=tokens,
      num_experts=config.num_experts,
      zero_experts=config.zero_experts,
      k=k,
      real_share=router.real_share(k, config.num_experts, config.zero_experts),
      order=router.compat.order,
      capacity_factor=call.capacity_factor,
      no_drop=call.no_drop,
      buffers=config.impl == "batched",
    )

  def completed(
    self, routed: RoutedTokens, y_TD: Float[Array, "T D"]
  ) -> tuple[Float[Array, "T D"], RouterSums]:
    """The layer's output, zero experts included, and the sums for losses and statistics.

    Args:
      routed: the tokens, after dispatch.
      y_TD: the result of `combine`. If `Experts.partial` names the tensor axis, it is a partial
        sum; this method adds up those of all devices of that axis.
    """
    y_TD = total(y_TD, self.experts.partial, "tensor")
    if routed.kept_TD is not None:
      y_TD = y_TD + routed.kept_TD
    return y_TD, router_sums(routed.routing, routed.arrived.dropped, routed.arrived.rounds)

  def _check(self, x: Array, call: MoECall) -> None:
    check_type("call", call, MoECall)
    if call.mask is not None:
      check_array("mask", call.mask)
    if not jnp.issubdtype(getattr(x, "dtype", None) or object, jnp.floating):
      raise ConfigError(
        "the MoE layer reads an array of floating point, got "
        + str(getattr(x, "dtype", None) or type(x).__name__)
      )
    if not x.shape or x.shape[-1] != self.config.width:
      raise ConfigError(
        f"the MoE layer has width {self.config.width}, got tokens of shape {list(x.shape)}; the "
        "last dimension must be the width"
      )

  def _gate(self, index: int | Array) -> Any:
    """The gate that `MoECall.gate` names; see `scmoe.moe.gates.chosen_gate`."""
    return chosen_gate(self.router_gate, index)

  def _draws(self, shape: tuple[int, ...], key: Array) -> Draws:
    """The gate's noise and jitter for this device's tokens, as far as options ask for them.

    They are this device's share of the draws for the global batch, so that a token gets the same
    numbers on every mesh.

    Args:
      shape: the shape of this device's tokens, [batch, ..., D]; where devices divide rows, [batch,
        tokens, D] with the device's tokens of each row.
      key: random key.
    """
    router, (batch, *rest) = self.config.router, shape[:-1]
    if parts() > 1:
      rest[0] *= parts()
    shape = (batch * axis_size(*BATCH_AXES), *rest)

    def own(drawn: Array, width: int) -> Array:
      rows = own_share(drawn, 0, *BATCH_AXES)
      return own_places(rows, 1).reshape(-1, width)

    noise = jitter = None
    if router.noise:
      drawn = jax.random.normal(key, (*shape, self.config.choices), jnp.float32)
      noise = own(drawn, self.config.choices)
    if router.compat.jitter:
      low, high = 1 - router.compat.jitter, 1 + router.compat.jitter
      key = jax.random.fold_in(key, 1)  # the key itself is for the noise
      drawn = jax.random.uniform(
        key, (*shape, self.config.width), jnp.float32, minval=low, maxval=high
      )
      jitter = own(drawn, self.config.width)
    return Draws(noise, jitter)


def _make_experts(config: MoEConfig, rngs: nnx.Rngs) -> Experts:
  """Makes feed-forward experts, or those of the class that `model.experts` names.

  Raises:
    ConfigError: the class cannot be imported, making an object of it fails, or it is no subclass of
      `Experts`.
  """
  if not is_import_path(config.kind):
    together = {"adaptive_r": config.dispatch.adaptive_r, "copy_engines": config.copy_engines}
    return FFNExperts(config, **together, rngs=rngs)
  made = construct(config.kind, "model.experts", config, rngs=rngs)
  if not isinstance(made, Experts):
    raise ConfigError(
      f"model.experts={config.kind!r} made a {type(made).__name__}; it needs a subclass of "
      "scmoe.Experts with a method compute"
    )
  return made
