"""Rows written straight into the memory of every GPU of a mesh axis, by one kernel on Hopper.

    M  rows at hand      K  copies of each      D  width      R  rows of every device's result
    W  ranks: the devices of one mesh axis      G  groups of a tiled result

A warp copies a row to shared memory. Then, for each of the row's places, at most K, a different
lane of the warp sends the row there, on whichever device, by a bulk copy of PTX (`cp.async.bulk`).
No rank waits for a buffer to be packed. Devices wait for each other at two points only, both by
their mailboxes (`scmoe.kernels.put.mailboxes`). First block b posts to block b of every rank where
its own device's results lie, and waits for such a post from every rank. A post also says that the
rank's stream has reached the kernel: nothing there still reads what the memory held before. Last,
block b signals to block b of every rank that all rows that it sent have arrived, and waits for a
signal from block b of every rank. So once all blocks of a device have ended, the device's own
result is complete.

The numbers that arrive beside rows, the tags, lie in the last rows of the same result. XLA hides a
call on a stream of its own only if the call has one result; of a call with two, it hides the
reading of the results instead.

One process drives all devices, because an address means nothing in another process. The GPUs must
reach each other's memory, as those of one host do over NVLink; XLA then allows it. A device that
never reaches the kernel leaves the others waiting in it for ever (`train.watchdog_seconds`).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.base.compat import compute_on
from scmoe.kernels import inline, ptx
from scmoe.kernels.launch import compiled
from scmoe.kernels.put.mailboxes import (
  ADDRESS,
  BYTES,
  DONE,
  MOST_RANKS,
  POST,
  POSTS,
  Mailboxes,
)
from scmoe.kernels.row_copier import (
  ALIGNED,
  BARRIER,
  PLACES,
  STAGES,
  WARPS,
  WORD,
  RowCopier,
  fits,
  stages_of,
)

# Thread blocks by default. 48 to 132 take at most a tenth longer (experiments/dispatch/README.md).
BLOCKS = 64
# The stream of CUDA for calls that run beside the computation. XLA numbers streams; copies of
# experts from the host's memory have stream 1 (`scmoe.offload.fetch`).
_STREAM = "gpu_stream:2"
_SENDING = 4  # Of a warp's 8 stages, those that outgoing copies may read while the warp goes on.
_COPY_UNIT = 16  # A bulk copy moves a multiple of so many bytes.


def takes(row_bytes: int, num_copies: int, ranks: int) -> bool:
  """Whether the kernel moves rows of so many bytes, to so many places each, among so many ranks.

  A row has 16 to 22,222 bytes, a multiple of 16, and at most 32 places; there are at most 8 ranks.
  """
  return fits(row_bytes, num_copies) and row_bytes % _COPY_UNIT == 0 and ranks <= MOST_RANKS


def rows_of_tags(num_rows: int, row_bytes: int) -> int:
  """How many of a result's rows, its last ones, hold the tags of the others.

  With rows of 16 bytes, room for four tags, 1 of 5 rows holds the tags of the other four.
  """
  return -(-num_rows * WORD // (row_bytes + WORD))


@functools.partial(jax.jit, static_argnames=("num_rows", "tile", "blocks", "beside"))
def put_rows_kernel(
  x_MD: jax.Array,
  place_MK: jax.Array,
  tag_MK: jax.Array | None,
  count: jax.Array,
  groups: tuple[jax.Array, jax.Array, jax.Array] | None,
  mailboxes: Mailboxes,
  *,
  num_rows: int,
  tile: int,
  blocks: int,
  beside: bool = False,
) -> jax.Array:
  """Sends rows to their places on all ranks, and tags beside them if given; see `rows.put_rows`.

  Args:
    x_MD: rows that the kernel `takes`.
    place_MK: int32, rank · R + row of each copy; a number outside [0, W·R) is no place. No two
      copies have the same place, whichever ranks they come from. With tags, none of the last
      `rows_of_tags` rows is a place.
    tag_MK: int32, a number that arrives beside each copy; None: no numbers are sent.
    count: int32 scalar: only the first `count` rows are sent to their places; the kernel does not
      read the others.
    groups: three arrays, int32 [G]: number of rows, first tile and number of tiles of each group of
      this device's own result. Rows of a group's last tile at which no copy arrives become zero,
      and their tags -1. None: the result has no groups, and no row becomes zero.
    mailboxes: of the W ranks, opened for at least as many blocks.
    num_rows: R.
    tile: rows of a tile.
    blocks: thread blocks.
    beside: run the kernel on a stream of its own, so that XLA may compute beside it.

  Returns:
    The rows [R, D] that have arrived here. With `tag_MK` the last `rows_of_tags` hold the tags of
    the others (`tags_in`). The kernel writes no other rows, except the zeros that `groups` asks
    for.
  """
  (rows, width), copies, tagged = x_MD.shape, place_MK.shape[1], tag_MK is not None
  num_groups = 0 if groups is None else groups[0].shape[0]
  ranks = mailboxes.address_W2.shape[0]
  assert blocks <= mailboxes.blocks
  row_bytes = width * x_MD.dtype.itemsize
  stages = stages_of(row_bytes)
  sizes = (rows, copies, num_groups, row_bytes, num_rows, tile, stages, blocks)
  program = _Program(*sizes, tagged, ranks, max(1, stages * _SENDING // STAGES))
  text = program.text()

  def put_rows(*refs):  # a trace shows this name
    *arrays, shared = refs
    inline.run(text, arrays, [shared])

  kernel = compiled(
    put_rows,
    out_type=jax.ShapeDtypeStruct((num_rows, width), x_MD.dtype),
    grid=(blocks,),
    grid_names=("block",),
    num_threads=WARPS // 4,
    thread_name="wg",
    scratch_types=[plgpu.SMEM((-(-program.shared_bytes // 512) * 128,), jnp.int32)],
  )
  if beside:
    on_device = jax.memory.Space.Device
    kernel = compute_on(kernel, compute_type=_STREAM, out_memory_spaces=on_device)
  places = place_MK.reshape(-1)
  return kernel(
    x_MD,
    places,
    places if tag_MK is None else tag_MK.reshape(-1),
    count.reshape(1),
    *((places,) * 3 if groups is None else groups),
    *mailboxes,
  )


def tags_in(rows_RD: jax.Array) -> jax.Array:
  """The tags of all rows but the last `rows_of_tags`, int32, which these hold."""
  (num_rows, width), size = rows_RD.shape, rows_RD.dtype.itemsize
  first = num_rows - rows_of_tags(num_rows, width * size)
  # As integers of the same width first: XLA may change the bits of a NaN when it moves floats, and
  # half of a tag can look like one.
  bits_RD = jax.lax.bitcast_convert_type(rows_RD, jnp.dtype(f"uint{8 * size}"))
  words = bits_RD[first:].reshape(-1, *[WORD // size] * (size < WORD))
  return jax.lax.bitcast_convert_type(words, jnp.int32).reshape(-1)[:first]


# The inline code's operands after rows and places; the last is the block's shared memory.
_TAGS, _COUNT = "$2", "$3"
_SIZES, _TILE_STARTS, _TILES = "$4", "$5", "$6"
_MAILBOX, _MAILBOXES, _RANK = "$7", "$8", "$9"
_OUT, _SHARED = "$10", "$11"


@dataclasses.dataclass(frozen=True)
class _Program(RowCopier):
  """The kernel in PTX, step by step.

  Warp w, counted over all blocks, takes rows w, w + warps, w + 2 · warps and so on. With 8 stages,
  of which copies still read 4, a warp fetches the row that is 4 of its own rows after the one that
  it sends. Its first 4 rows, and the place of the first, are fetched before the devices meet, which
  takes some microseconds. Shared memory holds each warp's stages, a row of zeros, a barrier for
  each stage, and two addresses for each rank: of the rank's result, and of the part of its mailbox
  for blocks of the same number.

  Attributes:
    tagged: whether a tag arrives beside each row.
    ranks: W.
    sending: stages that the warp's outgoing copies may still read while the warp goes on.
  """

  group_words = (_SIZES, _TILE_STARTS, _TILES)

  tagged: bool
  ranks: int
  sending: int

  @property
  def limit(self) -> str:
    """The register with the number of rows to fetch."""
    return "rows"

  @property
  def zeros_at(self) -> int:
    """Bytes from the start of the stages to the row of zeros, a multiple of `ALIGNED`."""
    return -(-WARPS * self.stages * self.row_bytes // ALIGNED) * ALIGNED

  @property
  def barriers_at(self) -> int:
    """Bytes from the start of the stages to the barriers, a multiple of `ALIGNED`."""
    return self.zeros_at + -(-self.row_bytes // ALIGNED) * ALIGNED

  @property
  def addresses_at(self) -> int:
    """Bytes from the start of the stages to the addresses."""
    return self.barriers_at + BARRIER * WARPS * self.stages

  @property
  def shared_bytes(self) -> int:
    """Bytes of a block's shared memory, with room to align it."""
    return self.addresses_at + 2 * ADDRESS * self.ranks + ALIGNED

  @property
  def tags_at(self) -> int:
    """Bytes from the start of a result to its tags."""
    return (self.num_rows - rows_of_tags(self.num_rows, self.row_bytes)) * self.row_bytes

  def text(self) -> str:
    """The whole kernel as PTX."""
    return ptx.program(
      ptx.registers("pred", "yes, more"),
      ptx.registers(
        "b32", "thread, lane, warp, block, shared, mine, barriers, zeros, buffer, barrier"
      ),
      ptx.registers("b32", "row, ahead, coming, rows, stage, next, phase, i, t, rank, size, end"),
      ptx.registers("b32", "to, tag, next_to, next_tag"),
      ptx.registers("b32", "nothing, nobody, one, addresses, me, call"),
      ptx.registers("b64", "wide, place, far, own"),
      self.find_shared_memory(),
      self.init_barriers(),
      ptx.publish_barriers(),
      self.first_row(),
      *(self.fetch_row(stage) for stage in range(self.stages - self.sending)),
      self.load_place("row"),
      self.meet(),
      self.write_zeros(),
      ptx.publish_to_copies(own_block_only=True),
      ptx.wait_for_block(),
      self.send_zeros() if self.groups else "",
      ptx.let("stage", 0),
      ptx.let("next", self.stages - self.sending),
      ptx.let("phase", 0),
      ptx.while_less(
        "ROWS",
        "row",
        "rows",
        self.next_place(),
        self.find_stage("stage"),
        ptx.wait_for_barrier("barrier", "phase", "more"),
        self.send_row(),
        ptx.close_group(),
        ptx.wait_for_groups(self.sending, read_only=True),  # the stage `next` is free
        ptx.wait_for_warp(),
        self.fetch_row("next"),
        ptx.add("row", "row", self.warps),
        self.next_stage(),
      ),
      ptx.wait_for_groups(0),
      self.signal_and_wait(),
    )

  def with_tags(self, *steps: str) -> str:
    """The steps if tags arrive beside the rows, else no step."""
    return ptx.lines(steps) if self.tagged else ""

  def find_shared_memory(self) -> str:
    """Finds the numbers of thread, lane, warp and block, and the addresses in shared memory.

    mine, barriers = this warp's stages and their barriers; zeros = the row of zeros; addresses =
    the two addresses of every rank. Also sets constants: nothing = 0, nobody = -1, one = 1.
    """
    return ptx.lines(
      [
        ptx.thread_of_block("thread"),
        ptx.lane_of_warp("lane"),
        ptx.block_of_grid("block"),
        ptx.let("nothing", 0),
        ptx.let("nobody", -1),
        ptx.let("one", 1),
        ptx.shift_right("warp", "thread", 5),
        ptx.add("shared", _SHARED, ALIGNED - 1),
        ptx.bit_and("shared", "shared", -ALIGNED),
        ptx.multiply_add("mine", "warp", self.stages * self.row_bytes, "shared"),
        ptx.add("zeros", "shared", self.zeros_at),
        ptx.add("barriers", "shared", self.barriers_at),
        ptx.multiply_add("barriers", "warp", BARRIER * self.stages, "barriers"),
        ptx.add("addresses", "shared", self.addresses_at),
      ]
    )

  def meet(self) -> str:
    """Posts this device's addresses to every rank, and keeps those that all ranks have posted.

    Thread r deals with rank r. The thread of the device's own rank stops the kernel if the mailbox
    at hand is not the one whose address all ranks know. Of a thread's registers, `own` (the block's
    part of this device's mailbox) and `call` (the number of this call) are still needed at the end,
    by thread 0.
    """
    part_of = lambda to, box: ptx.element_address(to, box, "block", BYTES, distance="wide")
    post_of = lambda mailbox, rank: ptx.lines(
      [
        ptx.element_address("place", mailbox, rank, POST, distance="wide"),
        ptx.advance("place", "place", POSTS),
      ]
    )
    keep = lambda address, which: ptx.store_shared_wide("t", address, ADDRESS * self.ranks * which)
    return ptx.lines(
      [
        ptx.compare("yes", "thread", ">=", self.ranks, unsigned=True),
        ptx.jump("MET", only_if="yes"),
        ptx.load_read_only("me", _RANK),
        ptx.element_address("wide", _MAILBOXES, "thread", ADDRESS),
        ptx.load_global_wide("far", "wide"),
        part_of("own", _MAILBOX),
        ptx.load_global("call", "own"),
        ptx.compare_wide("more", "far", "!=", _MAILBOX),
        ptx.compare("yes", "thread", "==", "me", and_="more", unsigned=True),
        ptx.stop(only_if="yes"),
        part_of("far", "far"),
        ptx.add("call", "call", 1),
        post_of("far", "me"),
        ptx.store_global_wide("place", _OUT, 0),
        ptx.store_at_device("place", "call", ADDRESS),
        post_of("own", "thread"),
        ptx.label("POSTS"),
        ptx.load_from_devices("t", "place", ADDRESS),
        ptx.compare("more", "t", "<", "call"),
        ptx.jump("POSTS", only_if="more"),
        ptx.multiply_add("t", "thread", ADDRESS, "addresses"),
        keep("far", 1),
        ptx.load_global_wide("far", "place", 0),
        keep("far", 0),
        ptx.label("MET"),
        ptx.wait_for_warp(),
      ]
    )

  def far_address(self, to: str, which: int) -> str:
    """to = an address of rank `rank`: of its result (which = 0) or its part of a mailbox (1)."""
    return ptx.lines(
      [
        ptx.multiply_add("t", "rank", ADDRESS, "addresses"),
        ptx.load_shared_wide(to, "t", ADDRESS * self.ranks * which),
      ]
    )

  def first_row(self) -> str:
    """row = ahead = the warp's number in the grid; rows = how many rows at hand are fetched."""
    return ptx.lines(
      [
        ptx.multiply_add("row", "block", WARPS, "warp"),
        ptx.let("ahead", "row"),
        ptx.load_read_only("rows", _COUNT),
        ptx.at_most("rows", "rows", self.rows),
      ]
    )

  def load_place(self, row: str) -> str:
    """Starts to read the lane's place for a row: next_to; -1 if the row or the lane has none.

    Where tags go with the rows, also next_tag = the tag of this copy.
    """
    return ptx.lines(
      [
        ptx.multiply_add("i", row, self.copies, "lane"),
        ptx.byte_distance("wide", "i", WORD),
        ptx.compare("yes", row, "<", "rows"),
        ptx.compare("yes", "lane", "<", self.copies, and_="yes", unsigned=True),
        ptx.let("next_to", -1),
        ptx.advance("place", PLACES, "wide"),
        ptx.load_read_only("next_to", "place", only_if="yes"),
        self.with_tags(ptx.advance("place", _TAGS, "wide")),
        self.with_tags(ptx.load_read_only("next_tag", "place", only_if="yes")),
      ]
    )

  def next_place(self) -> str:
    """rank, to = the lane's place for row `row`: rank and row there; yes = there is one.

    Where tags go with the rows, also tag = the tag of this copy. The place and the tag were read
    before; those of the warp's next row are read meanwhile.
    """
    return ptx.lines(
      [
        ptx.let("to", "next_to"),
        self.with_tags(ptx.let("tag", "next_tag")),
        ptx.add("coming", "row", self.warps),
        self.load_place("coming"),
        ptx.compare("yes", "to", "<", self.ranks * self.num_rows, unsigned=True),
        ptx.divide("rank", "to", self.num_rows),
        ptx.multiply("t", "rank", self.num_rows),
        ptx.subtract("to", "to", "t"),
        ptx.at_most("rank", "rank", self.ranks - 1, unsigned=True),
      ]
    )

  def send_row(self) -> str:
    """Starts to copy the stage at `buffer` to the lane's place, if any, and writes the tag there.

    A lane without a place does neither. If no tags arrive beside the rows, none is written.
    """
    return ptx.lines(
      [
        self.far_address("far", 0),
        ptx.element_address("place", "far", "to", self.row_bytes, unsigned=True, distance="wide"),
        ptx.copy_to_global("place", "buffer", self.row_bytes, only_if="yes"),
        self.with_tags(
          ptx.advance("far", "far", self.tags_at),
          ptx.element_address("place", "far", "to", WORD, unsigned=True, distance="wide"),
          ptx.store_global("place", "tag", only_if="yes"),
        ),
      ]
    )

  def send_zero(self) -> str:
    """If `yes` holds, starts to copy zeros to row `to` of this device's result.

    Where tags go with the rows, the row's tag becomes -1.
    """
    return ptx.lines(
      [
        ptx.element_address("wide", _OUT, "to", self.row_bytes, unsigned=True),
        ptx.copy_to_global("wide", "zeros", self.row_bytes, only_if="yes"),
        self.with_tags(
          ptx.element_address("wide", _OUT, "to", WORD, unsigned=True),
          ptx.advance("wide", "wide", self.tags_at),
          ptx.store_global("wide", "nobody", only_if="yes"),
        ),
      ]
    )

  def next_stage(self) -> str:
    """Advances `stage` and `next` by one stage; the phase flips when `stage` returns to 0."""

    def advance(stage: str, *then: str) -> list[str]:
      last = ptx.compare("yes", stage, "==", self.stages)
      return [ptx.add(stage, stage, 1), last, ptx.let(stage, 0, only_if="yes"), *then]

    return ptx.lines(
      [*advance("stage", ptx.bit_xor("phase", "phase", 1, only_if="yes")), *advance("next")]
    )

  def signal_and_wait(self) -> str:
    """Signals to every rank that this block's rows are there; waits for a signal from every rank.

    A signal goes to the block of the same number. After all threads of the block are here, thread w
    signals to rank w. Last, thread 0 counts the call.
    """
    return ptx.lines(
      [
        ptx.publish_to_copies(),
        ptx.wait_for_block(),
        ptx.compare("yes", "thread", "<", self.ranks, unsigned=True),
        ptx.at_most("rank", "thread", self.ranks - 1, unsigned=True),
        self.far_address("far", 1),
        ptx.advance("far", "far", DONE),
        ptx.add_at_device("far", "one", only_if="yes"),
        ptx.compare("yes", "thread", "==", 0, unsigned=True),
        ptx.jump("DONE", only_if="!yes"),
        ptx.multiply("end", "call", self.ranks),
        ptx.label("SIGNALS"),
        ptx.load_from_devices("t", "own", DONE),
        ptx.compare("more", "t", "<", "end"),
        ptx.jump("SIGNALS", only_if="more"),
        ptx.store_global("own", "call"),
        ptx.label("DONE"),
        ptx.wait_for_block(),
      ]
    )
