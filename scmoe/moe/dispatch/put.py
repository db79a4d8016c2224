"""The put transport: a kernel writes rows into their experts' tiles, on the GPUs that have these.

With `Dropless`, rows are packed into a buffer, the buffers are exchanged, and the experts sort what
arrives. Here one kernel does the three (`scmoe.kernels.put`): it reads a token and writes it to its
place in the tiles of each of its experts, over NVLink where these are on another GPU. Combine is
the same kernel the other way: it writes each output into the row of its choice on the token's
device. The backward pass of dispatch moves rows as combine does, and that of combine as dispatch.
(Where weights multiply the experts' input, dispatch first packs the weighted rows.)

To know a row's place, its sender needs the counts of all ranks, which one small all-gather
collects, as for `Dropless`. The rounds are those of `Dropless` too: the first, or each of its
chunks, moves at most P rows of every queue (each rank has a queue for every rank), so that the
tiles have a fixed size. Overflow rounds, if any, move the rest by all-to-all.

The kernel runs on the Hopper GPUs of one host, driven by one process (`check_put`). On a CPU
collectives stand for it.

Worked example: two ranks with one expert each, tiles of two rows, P = 3. Rank 0 sends two rows to
expert 0 and one to expert 1, rank 1 one row to each. Expert 0's tiles on rank 0 then hold rank 0's
two rows, rank 1's row and a row of zeros; expert 1's on rank 1 hold one row of each rank. So rank 1
writes its row for expert 0 to row 2 on rank 0: behind the rows of lower ranks, whose number the
counts tell.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from scmoe.base.errors import ConfigError
from scmoe.kernels.grouped_matmul import (
  KERNEL_ROW_TILE,
  GroupLayout,
  RowLayout,
  make_layout,
  tiled_layout,
)
from scmoe.kernels.grouped_matmul.xla import choose_tile
from scmoe.kernels.launch import runs_ptx
from scmoe.kernels.permute import (
  Permutation,
  gather_rows,
  sum_copies,
  weigh_rows,
  zero_cotangents,
)
from scmoe.kernels.put import apart, put_rows, takes, with_room_for_tags
from scmoe.moe.dispatch.dropless import Chunk, Dropless, Queues, in_window, make_window
from scmoe.moe.dispatch.options import check_one_host
from scmoe.moe.types import Dispatched, Routing
from scmoe.parallel.barriers import barrier
from scmoe.parallel.collectives import Exchange, wait


@dataclasses.dataclass(frozen=True)
class Put(Dropless):
  """The transport that writes rows straight into the experts' tiles, in the memory of their GPUs.

  Methods, rounds and arguments are those of `Dropless`. Only the first round differs: the rows that
  dispatch returns lie in the experts' tiles already. Where the kernel runs (`runs_ptx`), `dispatch`
  raises a ConfigError if the kernel does not take the rows, the number of choices or that of
  devices (`_check_rows`).

  Attributes:
    blocks: thread blocks of a kernel on a stream of its own, beside which XLA may compute. 0: as
      many as are fastest alone, and the kernel takes its turn among the others.
  """

  blocks: int = 0
  delivers: ClassVar[bool] = True

  def _send(
    self, x_TD: Array, routing: Routing, queues: Queues, chunk: int, size: int, before: Array | None
  ) -> tuple[Chunk, Queues, Array | None]:
    """Puts the rows of one chunk of every queue into the experts' tiles; see `Dropless._send`.

    Without `before` the queues have no barrier. With it, one barrier ties tokens, queues and
    `before`.
    """
    row_bytes = x_TD.shape[1] * x_TD.dtype.itemsize
    plan = _make_plan(routing.expert_TK, queues, self, chunk * size, size, row_bytes)
    _check_rows(row_bytes, plan)
    if before is not None:
      x_TD, queues, before = barrier((x_TD, queues, before), "forward")
    x_TD = wait(x_TD, chunk)
    if routing.input_weight_TK is None:
      rows_RD, origin_R = _put_tokens(x_TD, plan)
    else:
      slots_SD = gather_rows(x_TD, plan.window, sent=True)
      slots_SD = weigh_rows(slots_SD, routing.input_weight_TK, plan.window)
      rows_RD, origin_R = _put_slots(slots_SD, plan)
    # With `train.remat` dots or full, `jax.checkpoint` keeps values named "moe_rows". `dispatch`
    # gives the rows this name. If the rows' origins are kept too, the backward pass puts no row
    # again.
    origin_R = checkpoint_name(origin_R, "moe_rows")
    return Chunk(rows_RD, plan.window, _Delivered(plan, origin_R)), queues, before

  def _arrived(self, sent: Chunk, queues: Queues, low: Any, size: int) -> tuple[Chunk, RowLayout]:
    """The rows, with the layout of the experts' tiles in which `_send` has put them.

    Rows of overflow rounds come by all-to-all, without a plan; see `Dropless._arrived`.
    """
    if sent.plan is None:
      return super()._arrived(sent, queues, low, size)
    return sent, tiled_layout(sent.plan.places.groups)

  def combine(self, sent: Dispatched) -> Float[Array, "T D"]:
    """Puts the outputs back into their choices' slots, and adds them up; see `Dropless.combine`."""
    put_back = lambda rows_RD, plan: _put_back(rows_RD, plan.origin_R, plan.places)
    back = [
      self.exchange.arrived(checkpoint_name(put_back(rows_RD, plan), "moe_rows"))
      for rows_RD, plan in zip(sent.rows, sent.plans, strict=True)
    ]
    return self._added_up(sent, back)


def check_put(exchange: Exchange) -> None:
  """Refuses the put transport where the kernel cannot write to other devices' memory.

  On a CPU collectives stand for the kernel, so that the transport can be tried there.

  Raises:
    ConfigError: the GPUs are not of the Hopper generation, several processes drive them, one of
      them does not reach another's memory, `NCCL_P2P_DISABLE` says that none should, or
      `dispatch.nodes` is larger than 1.
  """
  why = "" if jax.devices()[0].platform == "cpu" else _fault_of_gpus()
  if why:
    raise ConfigError(f"dispatch.transport=put {why}; use dispatch.transport=dropless")
  check_one_host(exchange.nodes)


def _fault_of_gpus() -> str:
  """The reason why the kernel cannot write to the other GPUs' memory; empty if it can."""
  if not runs_ptx():
    return f"is for Hopper GPUs (compute capability 9.0), got {jax.devices()[0].device_kind}"
  if jax.process_count() > 1:
    return f"is for GPUs that one process drives, got {jax.process_count()} processes"
  if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
    return "writes into the other GPUs' memory, which NCCL_P2P_DISABLE forbids"
  pair = apart(tuple(device.local_hardware_id for device in jax.local_devices()))
  if pair is not None:
    return f"writes into the other GPUs' memory, but GPU {pair[0]} does not reach that of {pair[1]}"
  return ""


# -- the plan of one chunk's places ---------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Plan:
  """The places to which a chunk's rows go, and the slots to which their outputs come back.

      S = W·P  slots of a device: it sends at most S rows, at most P to each of the W ranks
      R        rows of a device's tiles

  A *place* names a row of any rank's tiles: rank · R + row. An *origin* names a slot of any rank:
  rank · S + slot.

  Attributes:
    window: which choice of this device has which slot (`make_window`).
    place_TK: int32, the place of each choice; W·R for a choice that is not in the chunk.
    place_S: int32, the place of each slot; W·R for an empty slot.
    groups: the tiles of this device's experts.
    axis, ranks: the mesh axis, and W, the number of its ranks; static. In the ablation `silent`
      they are None and 1: this device puts all its rows into its own tiles, and its slots are the
      only ones.
    blocks: see `Put`; static.
    expected: how many of this device's choices are in the chunk in balanced routing; static.
  """

  window: Permutation
  place_TK: Array
  place_S: Array
  groups: GroupLayout
  axis: str | None = dataclasses.field(metadata={"static": True})
  ranks: int = dataclasses.field(metadata={"static": True})
  blocks: int = dataclasses.field(metadata={"static": True})
  expected: int = dataclasses.field(metadata={"static": True})

  @property
  def slots(self) -> int:
    """S, the number of slots of a device."""
    return self.place_S.shape[0]

  @property
  def first_origin(self) -> Any:
    """The origin of this device's first slot: rank · S."""
    return 0 if self.axis is None else jax.lax.axis_index(self.axis) * self.slots

  @property
  def origin_S(self) -> Array:
    """int32 [S], the number of each slot of this device among the slots of all: rank · S + slot."""
    return self.first_origin + jnp.arange(self.slots, dtype=jnp.int32)

  @property
  def origin_TK(self) -> Array:
    """int32, the origin of each choice; arbitrary for a choice that is not in the chunk."""
    return self.first_origin + self.window.row_TK


class _Delivered(NamedTuple):
  """Plan and origins of a chunk whose rows lie in the experts' tiles; `combine` needs them.

  Attributes:
    places: the chunk's plan.
    origin_R: the origin of each row of this device's tiles, int32; see `_put_slots`.
  """

  places: _Plan
  origin_R: Array


def _make_plan(
  expert_TK: Array, queues: Queues, way: Put, low: int, size: int, row_bytes: int
) -> _Plan:
  """The plan for positions [low, low + size) of every queue, from the counts of all ranks.

  The tiles have room for the origins of the rows, which arrive beside rows of `row_bytes` bytes.

  In the ablation `silent` this device is the only receiver, and its own queues stand for those
  that all ranks have for it: as many rows go into the tiles as in a balanced exchange.
  """
  exchange = way.exchange
  assert exchange.axis is not None
  me, (ranks, _, experts) = jax.lax.axis_index(exchange.axis), queues.counts_WWe.shape
  window = make_window(queues, low, size)
  tile = KERNEL_ROW_TILE if runs_ptx() else choose_tile(ranks * size, experts)
  # Dimensions: source rank (W), receiver (V: W ranks, or this device alone), the receiver's expert.
  counts_WVe, receiver = queues.counts_WWe, me
  if exchange.silent:
    counts_WVe, receiver = counts_WVe[me][:, None], 0
  start_WVe, inside_WVe = in_window(counts_WVe, low, size)
  sizes_Ve = inside_WVe.sum(0, dtype=jnp.int32)
  tiles_Ve = -(-sizes_Ve // tile)
  # The first row of each expert in its receiver's tiles.
  first_Ve = (jnp.cumsum(tiles_Ve, 1) - tiles_Ve) * tile
  groups = with_room_for_tags(make_layout(sizes_Ve[receiver], ranks * size, tile), row_bytes)
  # An expert's tiles hold the rows of lower source ranks first, and each source's rows in the order
  # of its queue.
  behind_WVe = jnp.cumsum(inside_WVe, 0) - inside_WVe - start_WVe
  receivers = counts_WVe.shape[1]
  # This device's rows for each expert of the model: of the receiver's, or of each of its queues.
  behind_We = behind_WVe[:, 0] if exchange.silent else behind_WVe[me]
  receiver_V1 = jnp.arange(receivers, dtype=jnp.int32)[:, None]
  base_We = receiver_V1 * groups.num_rows + first_Ve + behind_We
  nowhere = receivers * groups.num_rows
  place_TK = base_We.reshape(-1)[expert_TK] + queues.rank_TK - low
  place_TK = jnp.where(window.row_TK < ranks * size, place_TK, nowhere)
  place_S = place_TK.reshape(-1)[jnp.maximum(window.copy_R, 0)]
  place_S = jnp.where(window.copy_R < 0, nowhere, place_S)
  axis = None if exchange.silent else exchange.axis
  expected = -(-expert_TK.size // way.chunks)
  return _Plan(window, place_TK, place_S, groups, axis, receivers, way.blocks, expected)


def _check_rows(row_bytes: int, plan: _Plan) -> None:
  """Raises ConfigError if the kernel runs here but does not take these rows, choices or devices."""
  if runs_ptx() and not takes(row_bytes, plan.place_TK.shape[1], plan.ranks):
    raise ConfigError(
      f"dispatch.transport=put got rows of {row_bytes} bytes, {plan.place_TK.shape[1]} choices and "
      f"{plan.ranks} devices; it moves rows of a multiple of 16 bytes up to 22,222, with up to 32 "
      "choices, among up to 8 devices: use dispatch.transport=dropless"
    )


# -- rows there and back, each the other's gradient -----------------------------------------------


def _put(x_MD: Array, place_MK: Array, plan: _Plan, **to: Any) -> tuple[Array, Array | None]:
  if plan.blocks:
    to |= {"blocks": plan.blocks, "beside": True}
  return put_rows(x_MD, place_MK, axis=plan.axis, expected=plan.expected, **to)


def _to_tiles(
  x_MD: Array, place_MK: Array, tag_MK: Array | None, plan: _Plan
) -> tuple[Array, Array | None]:
  to = {"num_rows": plan.groups.num_rows, "groups": plan.groups}
  return _put(x_MD, place_MK, plan, tag_MK=tag_MK, **to)


def _tiles_to_slots(rows_RD: Array, origin_R: Array, plan: _Plan) -> Array:
  # `origin_R` may hold anything in the rows after the used tiles.
  used = plan.groups.num_tiles[0] * plan.groups.tile
  return _put(rows_RD, origin_R[:, None], plan, num_rows=plan.slots, count=used)[0]


@jax.custom_vjp
def _put_tokens(x_TD: Array, plan: _Plan) -> tuple[Array, Array]:
  """Puts each token to the places of its choices in this chunk; returns what `_put_slots` does."""
  rows_RD, origin_R = _to_tiles(x_TD, plan.place_TK, plan.origin_TK, plan)
  assert origin_R is not None
  return rows_RD, origin_R


def _put_tokens_fwd(x_TD, plan):
  rows_RD, origin_R = _put_tokens(x_TD, plan)
  return (rows_RD, origin_R), (origin_R, plan)


def _put_tokens_bwd(residuals, bars):
  origin_R, plan = residuals
  slots_SD = _tiles_to_slots(bars[0], origin_R, plan)
  return sum_copies(slots_SD, plan.window.row_TK, arrived=True), zero_cotangents(plan)


_put_tokens.defvjp(_put_tokens_fwd, _put_tokens_bwd)


@jax.custom_vjp
def _put_slots(slots_SD: Array, plan: _Plan) -> tuple[Array, Array]:
  """Puts each filled slot into its expert's tiles.

  Returns this device's tiles [R, D], with the rows that all ranks have put there, and for each row
  the slot that it comes from, as an *origin* of `_Plan`, int32 [R]; -1 for a row of zeros. In tiles
  that hold no expert's rows, rows and origins may be anything.
  """
  rows_RD, origin_R = _to_tiles(slots_SD, plan.place_S[:, None], plan.origin_S[:, None], plan)
  assert origin_R is not None
  return rows_RD, origin_R


def _put_slots_fwd(slots_SD, plan):
  rows_RD, origin_R = _put_slots(slots_SD, plan)
  return (rows_RD, origin_R), (origin_R, plan)


def _put_slots_bwd(residuals, bars):
  origin_R, plan = residuals
  bar_SD = _tiles_to_slots(bars[0], origin_R, plan)
  filled_S1 = (plan.window.copy_R >= 0)[:, None]
  return jnp.where(filled_S1, bar_SD, 0), zero_cotangents(plan)


_put_slots.defvjp(_put_slots_fwd, _put_slots_bwd)


@jax.custom_vjp
def _put_back(rows_RD: Array, origin_R: Array, plan: _Plan) -> Array:
  """Puts each row that was put into this device's tiles back into its slot, on its token's device.

  Returns this device's slots [S, D], with the rows that all ranks have put there; empty slots may
  hold anything.
  """
  return _tiles_to_slots(rows_RD, origin_R, plan)


def _put_back_fwd(rows_RD, origin_R, plan):
  return _put_back(rows_RD, origin_R, plan), (origin_R, plan)


def _put_back_bwd(residuals, bar_SD):
  origin_R, plan = residuals
  bar_RD, _ = _to_tiles(bar_SD, plan.place_S[:, None], None, plan)
  return bar_RD, zero_cotangents(origin_R), zero_cotangents(plan)


_put_back.defvjp(_put_back_fwd, _put_back_bwd)
