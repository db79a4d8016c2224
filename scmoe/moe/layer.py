"""The MoE layer: the four stages in a row, or one at a time around other work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scmoe.errors import ConfigError
from scmoe.layers.mlp import is_gated
from scmoe.moe.dispatch import DispatchConfig, capacity, dropless
from scmoe.moe.experts import ExpertWeights, expert_stage
from scmoe.moe.gates import make_gates
from scmoe.moe.losses import router_sums
from scmoe.moe.route import RouterConfig, route, route_distinct
from scmoe.moe.types import Dispatched, RouterSums, Routing, Rows, Tokens
from scmoe.parallel.collectives import Exchange
from scmoe.parallel.mesh import AXES, BATCH_AXES, batch_sharding, inside_shard_map

DEVICES = P(AXES)  # one slice of the leading dimension per device
BATCH = P(BATCH_AXES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InFlight:
  """Tokens between two stages. Every array has a leading dimension of one slice per device.

  Attributes:
    dispatched: rows and the way back; see `Dispatched`.
    routing: the choices behind them.
    sums: what the losses and statistics need; one slice per batch shard.
    more_BSD: what the dropless transport's further rounds add to the output; None without any.
    shape: B, S of the tokens' array, for the way back.
  """

  dispatched: Dispatched
  routing: Routing
  sums: RouterSums
  more_BSD: Array | None
  shape: tuple[int, int] = dataclasses.field(metadata={"static": True})

  @property
  def empty(self) -> bool:
    """No tokens: what flies is one masked token per device."""
    return not math.prod(self.shape)


class MoE(nnx.Module):
  """Sparse feed-forward layer: each token visits k of E experts (paper Eq. 1-4).

  `start` routes and dispatches, `compute` runs the experts, `finish` combines. They are separate
  so that a schedule can place dense work between them; calling the layer runs them in a row.

  Args:
    width: D.
    hidden: F, of one expert.
    num_experts: E; a multiple of the mesh's expert axis.
    activation, bias, init_std, out_std: of the experts.
    router, transport: options of routing and dispatch.
    mesh: the device mesh, or None for one device.
    backend: of the dropless experts' products; see `scmoe.kernels.grouped_matmul.backend`.
    equal_backend: of experts with equal room; see `grouped_matmul.equal_ffn`.
  """

  def __init__(
    self,
    width: int,
    hidden: int,
    num_experts: int,
    *,
    activation: str,
    bias: bool,
    init_std: float,
    out_std: float,
    router: RouterConfig,
    transport: DispatchConfig,
    mesh: Mesh | None,
    backend: str = "auto",
    equal_backend: str = "auto",
    rngs: nnx.Rngs,
  ):
    def weight(shape, std, axes):
      return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)

    def zeros(shape, axes):
      return nnx.Param(jnp.zeros(shape), axes=axes) if bias else None

    into, out = (num_experts, width, hidden), (num_experts, hidden, width)
    into_axes, out_axes = ("expert", "embed", "expert_hidden"), ("expert", "expert_hidden", "embed")
    self.num_experts, self.activation = num_experts, activation
    self.router, self.transport, self.mesh = router, transport, mesh
    self.backend, self.equal_backend = backend, equal_backend
    router.check()
    gates = make_gates(width, num_experts, router, init_std=init_std, rngs=rngs)
    self.router_gate = nnx.List(gates)
    self.up = weight(into, init_std, into_axes)
    self.gate = weight(into, init_std, into_axes) if is_gated(activation) else None
    self.down = weight(out, out_std, out_axes)
    self.up_bias = zeros((num_experts, hidden), ("expert", "expert_hidden"))
    self.down_bias = zeros((num_experts, width), ("expert", "embed"))

  def __call__(self, x_BSD: Array, *, k: int, **options: Any) -> tuple[Array, RouterSums]:
    """route -> dispatch -> experts -> combine; see `start` for the options."""
    flight = self.start(x_BSD, k=k, **options)
    return self.finish(self.compute(flight))

  def start(
    self,
    x_BSD: Array,
    *,
    k: int,
    key: Array | None = None,
    no_drop: bool = False,
    live_BS: Array | None = None,
    avoid: InFlight | None = None,
    gate: int = 0,
    bias_E: Array | None = None,
    capacity_factor: float | None = None,
    one_round: bool = False,
  ) -> InFlight:
    """Routes the tokens and sends them to their experts.

    Args:
      x_BSD: normalised inputs; B or S may be 0.
      k: experts per token.
      key: random key of gate noise and jitter; None outside training.
      no_drop: give every queue room for all tokens (decoding, exact evaluation).
      live_BS: bool, tokens that take part; all if None.
      avoid: an earlier flight of the same tokens with k = 1; each token's expert there is avoided
        (DGMoE).
      gate: index of the gate that chooses (`router.gates`).
      bias_E: balancing bias (`router.bias`), added for the choice only.
      capacity_factor: buffers of this size whatever is configured; 0 drops nothing.
      one_round: the dropless transport makes its first round only. What a longer queue holds is
        then missing from the output, and `RouterSums.rounds` says so.

    Raises:
      ConfigError: shapes do not divide, the capacity rounds to zero, k > E, or no such gate.
    """
    shards = self._batch_parts()
    if x_BSD.shape[0] % shards:
      raise ConfigError(
        f"a batch of {x_BSD.shape[0]} sequences does not divide over mesh.data x mesh.expert = "
        f"{shards} devices; use a multiple of {shards}"
      )
    self.transport.check_shards(self._axis_size("shard"))
    factor = self.transport.capacity_factor if capacity_factor is None else capacity_factor
    lossless = no_drop or factor == 0
    lossless |= capacity_factor is None and self.transport.transport == "dropless"
    shape = x_BSD.shape[0], x_BSD.shape[1]
    if not math.prod(shape):
      # Arrays without rows cannot be indexed: one masked token on each device stands for none.
      x_BSD = jnp.zeros((shards, 1, x_BSD.shape[2]), x_BSD.dtype)
      live_BS, key, lossless = jnp.zeros((shards, 1), bool), None, True
    groups = 1 if lossless else self._local_groups()
    noise_BSE, jitter_BSD = self._noise(x_BSD.shape, key), self._jitter(x_BSD.shape, key)
    gate_graph, gate_params = nnx.split(self._gate(gate))
    avoid_expert = None if avoid is None else avoid.routing.expert_TK
    loops = lossless and self._exchange().size > 1 and not one_round
    weights, weight_specs = self._weights() if loops else (None, None)

    def local(x, gate_params, noise, jitter, live, avoid, bias, weights):
      x_TD = x.reshape(-1, x.shape[-1])
      flat = lambda a: None if a is None else a.reshape(x_TD.shape[0], *a.shape[2:])
      with jax.named_scope("route"):
        gate = nnx.merge(gate_graph, gate_params)
        options = {"groups": groups, "num_experts": self.num_experts, "bias_E": bias}
        options |= {"noise_TE": flat(noise), "jitter_TD": flat(jitter), "live_T": flat(live)}
        if avoid is None:
          routing = route(x_TD, gate, self.router, k=k, train=key is not None, **options)
        else:
          routing = route_distinct(x_TD, gate, self.router, avoid[0, :, 0], **options)
      with jax.named_scope("dispatch"):
        if lossless:
          sent = self._dispatch_lossless(x_TD, routing)
        else:
          sent = self._dispatch(x_TD, routing, k, factor)
        more = None
        if weights is not None:
          sent, more_TD = self._further_rounds(sent, x_TD, routing, weights)
          # Named as what travelled: rematerialisation sends nothing twice.
          more = checkpoint_name(more_TD, "moe_rows").reshape(x.shape)
        sent = dataclasses.replace(sent, chunks=tuple(map(_keep_travelled, sent.chunks)))
      sums = router_sums(routing, sent.dropped, sent.rounds)
      return _stack(sent), _stack(routing), _stack(sums), more

    specs = (BATCH, P(), BATCH, BATCH, BATCH, DEVICES, P(), weight_specs)
    stage = self._per_device(local, specs, (DEVICES, DEVICES, BATCH, BATCH))
    arguments = (gate_params, noise_BSE, jitter_BSD, live_BS, avoid_expert, bias_E, weights)
    return InFlight(*stage(x_BSD, *arguments), shape=shape)

  def compute(self, flight: InFlight, *, recompute: bool = False) -> InFlight:
    """Runs the experts on the rows that arrived.

    Args:
      flight: from `start`.
      recompute: keep the rows and what is gathered only; the backward pass computes the experts'
        activations again.
    """
    weights, specs = self._weights()
    experts = self._experts
    if recompute:
      experts = jax.checkpoint(experts, policy=_travelled)

    def local(chunks, weights):
      with jax.named_scope("experts"):
        return _stack(tuple(experts(part, weights) for part in _slice(chunks)))

    stage = self._per_device(local, (DEVICES, specs), DEVICES)
    chunks = stage(flight.dispatched.chunks, weights)
    sent = dataclasses.replace(flight.dispatched, chunks=chunks)
    return dataclasses.replace(flight, dispatched=sent)

  def finish(self, flight: InFlight) -> tuple[Array, RouterSums]:
    """Brings the rows back and adds them up, weighted.

    Returns:
      y_BSD, and the sums with one leading slice per batch shard.
    """
    local_batch = 1 if flight.empty else flight.shape[0] // self._batch_parts()
    exchange = self._exchange()

    def local(sent, routing, more):
      sent, routing = _slice(sent), _slice(routing)
      with jax.named_scope("combine"):
        transport = capacity if _has_places(sent.chunks[0]) else dropless
        y_TD = transport.combine(sent, routing.weight_TK, exchange=exchange)
        if more is not None:
          y_TD = y_TD + more.reshape(y_TD.shape)
        if self._axis_size("tensor") > 1:
          y_TD = jax.lax.psum(y_TD, "tensor")
      return y_TD.reshape(local_batch, -1, y_TD.shape[-1])

    stage = self._per_device(local, (DEVICES, DEVICES, BATCH), BATCH)
    y_BSD = stage(flight.dispatched, flight.routing, flight.more_BSD)
    if flight.empty:
      y_BSD = jnp.zeros((*flight.shape, y_BSD.shape[2]), y_BSD.dtype)
    return y_BSD, flight.sums

  # -- what a stage does on one device ------------------------------------------------------------

  def _dispatch(self, x_TD: Array, routing: Routing, k: int, factor: float) -> Dispatched:
    """The capacity transport."""
    groups, tokens = routing.count_GE.shape[0], routing.expert_TK.shape[0]
    size, config = tokens // groups, self.transport
    rows = capacity.capacity(factor, tokens=size, num_experts=self.num_experts, k=k)
    rows = min(size, rows)  # a queue never holds more than the tokens of its group
    rows += -rows % config.chunks
    return capacity.dispatch(
      x_TD, routing, rows_per_expert=rows, exchange=self._exchange(), chunks=config.chunks
    )

  def _dispatch_lossless(self, x_TD: Array, routing: Routing) -> Dispatched:
    config = self.transport
    return dropless.dispatch(
      x_TD, routing, slack=config.slack, exchange=self._exchange(), chunks=config.chunks
    )

  def _further_rounds(
    self, sent: Dispatched, x_TD: Array, routing: Routing, weights: ExpertWeights
  ) -> tuple[Dispatched, Array]:
    return dropless.further_rounds(
      sent,
      x_TD,
      routing,
      weights,
      slack=self.transport.slack,
      exchange=self._exchange(),
      experts=self._experts,
    )

  def _experts(self, part: Any, weights: ExpertWeights) -> Any:
    """The expert stage on one chunk, whichever way the weights are spread."""
    shards = self._axis_size("shard")
    equal = isinstance(part, Rows) and part.group_sizes_e is None
    return expert_stage(
      part,
      weights,
      self.activation,
      shards=shards,
      replicas=self.transport.adaptive_r,
      gather_experts=self.transport.adaptive_r == 0 and self._axis_size("expert") > 1,
      tensor=self._axis_size("tensor"),
      backend=self.equal_backend if equal else self.backend,
    )

  def _weights(self) -> tuple[ExpertWeights, Any]:
    """The experts' weights, and how they lie on the mesh."""
    weights = ExpertWeights(
      up_eDF=self.up[...],
      gate_eDF=_read(self.gate),
      down_eFD=self.down[...],
      up_bias_eF=_read(self.up_bias),
      down_bias_eD=_read(self.down_bias),
    )
    hidden = ("shard", "tensor")
    into, out = P("expert", None, hidden), P("expert", hidden, None)
    specs: Any = (into, into, out, P("expert", hidden), P("expert"))
    return weights, ExpertWeights(*specs)

  def _exchange(self) -> Exchange:
    """Who exchanges rows: the expert axis, unless the weights are gathered instead."""
    size = self._axis_size("expert")
    if size == 1 or self.transport.adaptive_r == 0:
      return Exchange()
    return Exchange("expert", size, self.transport.nodes)

  def _per_device(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`function` on each device's share; as it is where there is one, or the arrays are shares."""
    if self._axis_size(*AXES) == 1 or inside_shard_map():
      return function
    return jax.shard_map(
      function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

  def _axis_size(self, *axes: str) -> int:
    return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)

  def _batch_parts(self) -> int:
    """Parts into which the batch dimension of the arrays at hand is still to be divided."""
    return 1 if inside_shard_map() else self._axis_size(*BATCH_AXES)

  def _local_groups(self) -> int:
    """Capacity groups of one device: the configured number over the batch shards."""
    shards = self._axis_size(*BATCH_AXES)
    groups = self.transport.groups or shards
    if groups % shards:
      raise ConfigError(
        f"dispatch.groups={groups} is not a multiple of mesh.data x mesh.expert = {shards}; "
        f"use 0 (one per device) or a multiple of {shards}"
      )
    return groups // shards

  def _gate(self, index: int) -> nnx.Module:
    if not 0 <= index < len(self.router_gate):
      raise ConfigError(
        f"gate={index} is none of the {len(self.router_gate)} gates; raise router.gates or use "
        f"0 to {len(self.router_gate) - 1}"
      )
    return self.router_gate[index]

  def _noise(self, shape: tuple[int, ...], key: Array | None) -> Array | None:
    """Standard normal draws [B, S, E], drawn for the global batch: the same on every mesh."""
    if key is None or not self.router.noise:
      return None
    draw = lambda b: jax.random.normal(key, (b, *shape[1:-1], self.num_experts), jnp.float32)
    return self._on_batch(draw, shape[0])

  def _jitter(self, shape: tuple[int, ...], key: Array | None) -> Array | None:
    """Factors [B, S, D] on the gate's input, drawn like the noise."""
    jitter = self.router.jitter
    if key is None or not jitter:
      return None
    key = jax.random.fold_in(key, 1)  # the noise has used the key itself
    low, high = 1 - jitter, 1 + jitter
    draw = lambda b: jax.random.uniform(key, (b, *shape[1:]), jnp.float32, minval=low, maxval=high)
    return self._on_batch(draw, shape[0])

  def _on_batch(self, draw: Callable[[int], Array], batch: int) -> Array:
    """What `draw` gives for the global batch, where its rows belong; `batch` rows are at hand."""
    if self.mesh is None:
      return draw(batch)
    if inside_shard_map():
      first = jax.lax.axis_index(BATCH_AXES) * batch
      return jax.lax.dynamic_slice_in_dim(draw(batch * self._axis_size(*BATCH_AXES)), first, batch)
    return jax.lax.with_sharding_constraint(draw(batch), batch_sharding(self.mesh))


def _travelled(primitive: Any, *_: Any, **__: Any) -> bool:
  """A rematerialisation policy: what came from other devices is kept."""
  return primitive.name.startswith("all_gather")


def _keep_travelled(part: Rows | Tokens) -> Rows | Tokens:
  """Names rows for rematerialisation, which sends nothing twice. Tokens have not travelled."""
  if isinstance(part, Tokens):
    return part
  return dataclasses.replace(part, rows=checkpoint_name(part.rows, "moe_rows"))


def _has_places(part: Rows | Tokens) -> bool:
  """Whether every expert has equal room: the capacity transport's form."""
  return isinstance(part, Rows) and part.group_sizes_e is None


def _read(param: nnx.Param | None) -> Array | None:
  return None if param is None else param[...]


def _stack(tree: Any) -> Any:
  """Adds the leading dimension under which `shard_map` lines up the devices' slices."""
  return jax.tree.map(lambda a: a[None], tree)


def _slice(tree: Any) -> Any:
  """Takes that dimension off again, inside `shard_map`."""
  return jax.tree.map(lambda a: a[0], tree)
