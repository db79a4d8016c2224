"""The MoE layer: the four stages in a row, or one at a time around other work."""

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
from scmoe.kernels.one_row.norm import Normalised
from scmoe.moe.dispatch import DispatchConfig, Transport, make_transport
from scmoe.moe.experts import Experts, FFNExperts, FFNExpertsConfig
from scmoe.moe.gates import make_gates
from scmoe.moe.losses import router_sums
from scmoe.moe.options import RouterConfig
from scmoe.moe.route import Draws, route, route_distinct
from scmoe.moe.types import Dispatched, RouterSums, Routing
from scmoe.parallel.barriers import barrier
from scmoe.parallel.collectives import repeat, total
from scmoe.parallel.mesh import BATCH_AXES, axis_size, own_share


@dataclasses.dataclass(frozen=True)
class MoEConfig:
  """A MoE layer.

  Attributes:
    width, hidden: D, and F of one expert.
    num_experts, top_k: E and K.
    zero_experts: experts behind the E that return their input; no parameters, no rows.
    activation, bias, init_std, out_std: of the experts, as of `MLPConfig`.
    impl, backend: what computes them; see `FFNExpertsConfig`.
    copy_engines: whether copy engines exchange rows.
    fp8: whether experts' products have fp8 operands; see `FFNConfig`.
    kind: ffn, or the import path of a subclass of `Experts`, called with this and `rngs`.
    router, dispatch: options of routing and of the transport.
  """

  width: int
  hidden: int
  num_experts: int
  top_k: int = 1
  zero_experts: int = 0
  activation: str = "gelu"
  bias: bool = False
  init_std: float = 0.02
  out_std: float = 0.02
  impl: str = "auto"
  backend: str = "auto"
  copy_engines: bool = False
  fp8: bool = False
  kind: str = "ffn"
  router: RouterConfig = RouterConfig()
  dispatch: DispatchConfig = DispatchConfig()

  @property
  def choices(self) -> int:
    """Experts that the router chooses from."""
    return self.num_experts + self.zero_experts

  @property
  def experts(self) -> FFNExpertsConfig:
    """Of the feed-forward experts."""
    names = ("width", "hidden", "num_experts", "activation", "bias", "init_std", "out_std", "impl",
             "backend", "copy_engines", "fp8")  # fmt: skip
    return FFNExpertsConfig(
      **{name: getattr(self, name) for name in names}, adaptive_r=self.dispatch.adaptive_r
    )


@dataclasses.dataclass(frozen=True)
class MoECall:
  """What one call of the layer is given beside its tokens.

  Attributes:
    mask: bool, in the shape of the tokens: those that take part; all if None.
    key: random key of gate noise and jitter in training; None outside.
    bias_E: balancing bias of the choice (`router.bias`), or None.
    avoid_T: int32, an expert that each token must not visit (DGMoE), or None.
    k: experts per token; None: the layer's.
    gate: index of the gate that chooses, where there are several (Tutel gate_index); may be traced.
    capacity_factor: for this call, instead of the configured one (Tutel's runtime capacity); 0
      drops nothing.
    no_drop: give every queue room for all tokens (decoding, exact evaluation).
  """

  mask: Bool[Array, ...] | None = None
  key: Array | None = None
  bias_E: Float[Array, " E"] | None = None
  avoid_T: Int[Array, " T"] | None = None
  k: int | None = None
  gate: int | Array = 0
  capacity_factor: float | None = None
  no_drop: bool = False


@dataclasses.dataclass(frozen=True)
class Flight:
  """Tokens on their way through the layer, from `MoE.route` to `MoE.completed`.

  Attributes:
    x_TD: the tokens.
    routing: their choices.
    transport: how they get to the experts.
    sent: rows at their experts; None before dispatch.
    kept_TD: what zero experts add to the output; None where there are none.
  """

  x_TD: Array
  routing: Routing
  transport: Transport
  sent: Dispatched | None = None
  kept_TD: Array | None = None

  @property
  def arrived(self) -> Dispatched:
    """`sent`, once there is something."""
    assert self.sent is not None, "not dispatched yet"
    return self.sent

  def with_rows(self, rows: tuple[Array, ...]) -> Flight:
    """The same flight with other rows, e.g. what the experts made of them."""
    return dataclasses.replace(self, sent=dataclasses.replace(self.arrived, rows=rows))


class MoE(nnx.Module):
  """Sparse feed-forward layer: each token visits k of E experts (paper Eq. 1-4).

  Calling the layer runs its stages in a row. A schedule runs them one at a time, with other work
  between them:

      flight = moe.route(x)
      sent = flight.transport.dispatch(flight.x_TD, flight.routing, moe.experts)
      rows = tuple(map(moe.experts, sent.rows, sent.layouts))
      flight = dataclasses.replace(flight, sent=dataclasses.replace(sent, rows=rows))
      y, sums = moe.completed(flight, flight.transport.combine(flight.sent))

  On one device all experts are here. In the manual region (`scmoe.manual`) the expert axis spreads
  them, and dispatch and combine exchange rows.

  Args:
    config: see `MoEConfig`.
    experts: experts of one's own; by default feed-forward networks.
    gates: gates of one's own; by default those that `config.router` names.
    rngs: stream `params` for the initial weights.

  Raises:
    ConfigError: options of the router do not fit each other, or the gate is unknown.
  """

  def __init__(
    self,
    config: MoEConfig,
    *,
    experts: Experts | None = None,
    gates: list[Any] | None = None,
    rngs: nnx.Rngs,
  ):
    self.config = config
    config.router.check()
    config.router.check_experts(config.top_k, config.num_experts, config.zero_experts)
    make = lambda: make_gates(
      config.width, config.choices, config.router, init_std=config.init_std, rngs=rngs
    )
    self.router_gate = nnx.List(make() if gates is None else gates)
    self.experts = _make_experts(config, rngs) if experts is None else experts

  def __call__(
    self, x: Float[Array, "... D"], call: MoECall = MoECall()
  ) -> tuple[Float[Array, "... D"], RouterSums]:
    """route -> dispatch -> experts -> combine.

    Args:
      x: normalised inputs; any number of them, none included.
      call: see `MoECall`.

    Returns:
      y in the shape of x, and the sums of which losses and statistics are made
      (`scmoe.moe.losses`), over this device's tokens.

    Raises:
      ConfigError: x has another width than the layer, or see `route` and `make_transport`.
    """
    self._check_width(x)
    if not x.size:
      # Gathers and kernels need a row to read, so one masked token stands in for no token.
      one = dataclasses.replace(call, mask=jnp.zeros(1, bool), key=None, no_drop=True, avoid_T=None)
      y, sums = self(jnp.zeros((1, self.config.width), x.dtype), one)
      return jnp.zeros((*x.shape[:-1], y.shape[-1]), y.dtype), sums
    with jax.named_scope("route"):
      flight = self.route(x, call)
    with jax.named_scope("dispatch"):
      sent = flight.transport.dispatch(flight.x_TD, flight.routing, self.experts)
    with jax.named_scope("experts"):
      rows = tuple(self.experts(rows, layout) for rows, layout in zip(sent.rows, sent.layouts))
    with jax.named_scope("combine"):
      flight = dataclasses.replace(flight, sent=sent).with_rows(rows)
      y_TD, sums = self.completed(flight, flight.transport.combine(flight.arrived))
    return y_TD.reshape(*x.shape[:-1], y_TD.shape[-1]), sums

  def route(self, x: Float[Array, "... D"] | Normalised, call: MoECall = MoECall()) -> Flight:
    """Chooses experts and weights for all tokens, and the transport that takes them there.

    Args:
      x: normalised inputs; or a single token and its norm, which one kernel may read with the gate.
      call: see `MoECall`.
    """
    config, router = self.config, self.config.router
    self._check_width(x)
    options: dict[str, Any] = {"num_experts": config.choices, "zero_experts": config.zero_experts}
    options |= {"bias_E": call.bias_E}
    options |= {"mask_T": None if call.mask is None else call.mask.reshape(-1)}
    options |= {"training": None if call.key is None else self._draws(x.shape, call.key)}
    gate, k = self._gate(call.gate), config.top_k if call.k is None else call.k
    if isinstance(x, Normalised):
      plain = call.mask is None and call.key is None and call.avoid_T is None
      found = gate.begun(x) if plain and hasattr(gate, "begun") else None
      x_BD, gate = (x.alone(), gate) if found is None else found
    else:
      x_BD = x
    # What comes before reads the sum of the gate's gradient and the experts', which one loop makes.
    x_TD = barrier(x_BD.reshape(-1, config.width), "backward")
    if call.avoid_T is None:
      routing = route(x_TD, gate, router, k=k, **options)
    else:
      routing, k = route_distinct(x_TD, gate, router, call.avoid_T, **options), 1
    kept_TD = None
    if config.zero_experts:
      kept_TD = routing.zero_weight_T[:, None].astype(x_TD.dtype) * x_TD
    # Under tensor parallelism every device reads the same tokens and computes a part of every
    # result, so the gradients of what it reads are added up over devices.
    read = (x_TD, routing.weight_TK, routing.input_weight_TK)
    x_TD, weight_TK, input_TK = repeat(read, self.experts.partial, "tensor")
    routing = dataclasses.replace(routing, weight_TK=weight_TK, input_weight_TK=input_TK)
    transport = make_transport(
      config.dispatch,
      tokens=x_TD.shape[0],
      num_experts=config.num_experts,
      zero_experts=config.zero_experts,
      k=k,
      real_share=router.real_share(k, config.num_experts, config.zero_experts),
      order=router.compat.order,
      capacity_factor=call.capacity_factor,
      no_drop=call.no_drop,
      buffers=config.impl == "batched",
    )
    return Flight(x_TD, routing, transport, kept_TD=kept_TD)

  def completed(
    self, flight: Flight, y_TD: Float[Array, "T D"]
  ) -> tuple[Float[Array, "T D"], RouterSums]:
    """What came back, added up where devices computed parts of it; and what the router did."""
    y_TD = total(y_TD, self.experts.partial, "tensor")
    if flight.kept_TD is not None:
      y_TD = y_TD + flight.kept_TD
    return y_TD, router_sums(flight.routing, flight.arrived.dropped, flight.arrived.rounds)

  def _check_width(self, x: Array | Normalised) -> None:
    if not x.shape or x.shape[-1] != self.config.width:
      raise ConfigError(
        f"the MoE layer has width {self.config.width}, got tokens of shape {list(x.shape)}; the "
        "last dimension must be the width"
      )

  def _gate(self, index: int | Array) -> Any:
    """A gate by its index, which may be traced: then all of them are of one kind."""
    if isinstance(index, Array):
      apart = [nnx.split(gate) for gate in self.router_gate]
      kinds = [
        (graph, jax.tree.map(jnp.shape, nnx.to_pure_dict(params))) for graph, params in apart
      ]
      if any(kind != kinds[0] for kind in kinds):
        raise ConfigError(
          "gates that take turns must be of one class and size; pass an int as gate"
        )
      chosen = jax.tree.map(lambda *params: jnp.stack(params)[index], *(p for _, p in apart))
      return nnx.merge(apart[0][0], chosen)
    if not 0 <= index < len(self.router_gate):
      raise ConfigError(
        f"gate={index} is none of the {len(self.router_gate)} gates; raise router.gates or use "
        f"0 to {len(self.router_gate) - 1}"
      )
    return self.router_gate[index]

  def _draws(self, shape: tuple[int, ...], key: Array) -> Draws:
    """Noise and jitter of these tokens, drawn for the global batch: the same on every mesh."""
    router, (batch, *rest) = self.config.router, shape[:-1]
    shape = (batch * axis_size(*BATCH_AXES), *rest)
    noise = jitter = None
    if router.noise:
      drawn = jax.random.normal(key, (*shape, self.config.choices), jnp.float32)
      noise = own_share(drawn, 0, *BATCH_AXES).reshape(-1, self.config.choices)
    if router.compat.jitter:
      low, high = 1 - router.compat.jitter, 1 + router.compat.jitter
      key = jax.random.fold_in(key, 1)  # the noise has used the key itself
      drawn = jax.random.uniform(
        key, (*shape, self.config.width), jnp.float32, minval=low, maxval=high
      )
      jitter = own_share(drawn, 0, *BATCH_AXES).reshape(-1, self.config.width)
    return Draws(noise, jitter)


def _make_experts(config: MoEConfig, rngs: nnx.Rngs) -> Experts:
  """Feed-forward networks, or those that `model.experts` names."""
  if not is_import_path(config.kind):
    return FFNExperts(config.experts, rngs=rngs)
  made = construct(config.kind, "model.experts", config, rngs=rngs)
  if not isinstance(made, Experts):
    raise ConfigError(
      f"model.experts={config.kind!r} made a {type(made).__name__}; it needs a subclass of "
      "scmoe.Experts with a method compute"
    )
  return made
