"""Each choice's position among those of its expert, and each expert's count, by one Hopper kernel.

    N  choices      E  experts      L  E + 1 rounded up to a multiple of 32

1. Every warp walks its own run of the choices and counts them by expert, 32 at a time: one for
   each lane. All runs are equally long; the last ones may reach past the last choice. Lanes with
   equal experts find each other by a vote on every bit of the expert's number (`match.any` is two
   to four times slower). One of these lanes advances the warp's count of the expert. The positions
   written here are preliminary: each counts the earlier choices of the same expert in the warp's
   own run.
2. Each block replaces the counts of each of its warps by the sum of the counts of the block's warps
   before that one, and keeps the sum over all its warps.
3. Each block adds up the sums of the blocks before it. The first block also writes the sums over
   all blocks: the counts of the experts.
4. Every warp walks its run once more and adds to each position the counts of the warps and blocks
   before it.

Choices with an id outside [0, E) are counted too, in entry E of a row of counts.

Up to eight blocks form one cluster: they can wait for each other and read each other's shared
memory. So one launch is enough, and there is no atomic whose order could differ between runs.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels import inline, ptx
from scmoe.kernels.launch import compiled, varying_as

_LANES = 32
_WARPS = 32  # warps of a block
_THREADS = _WARPS * _LANES
_BLOCKS = 8  # The most blocks of a cluster: every GPU with clusters allows 8.
_AHEAD = 8  # The most choices that a lane reads at once.
_MOST = 1024  # The most experts: 32 warps' rows of counts and two more fit into shared memory.
_WORD = 4  # Bytes of an int32.


def takes(num_choices: int, num_experts: int) -> bool:
  """Whether the kernel takes these sizes: 1 to 2²⁸ - 1 choices, and up to 1024 experts."""
  return 0 < num_choices < 2**28 and num_experts <= _MOST


def running_positions_kernel(expert_N: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
  """Each choice's position among those of its expert, and each expert's count, by the kernel.

  Arguments and results are those of `running_positions`, for a flat int32 array of a size that the
  kernel `takes`.
  """
  return varying_as(expert_N, _positions(expert_N, num_experts=num_experts))


@functools.partial(jax.jit, static_argnames=("num_experts",))
def _positions(expert_N: jax.Array, *, num_experts: int) -> tuple[jax.Array, jax.Array]:
  (choices,) = expert_N.shape
  blocks = min(_BLOCKS, -(-choices // _THREADS))
  program = _Program(choices, num_experts, blocks)

  def body(expert, position, count, shared):
    inline.run(program.text(), [expert, position, count], [shared])

  options = {} if blocks == 1 else {"cluster": (blocks,), "cluster_names": ("block",)}
  return compiled(
    body,
    out_type=(
      jax.ShapeDtypeStruct((choices,), jnp.int32),
      jax.ShapeDtypeStruct((num_experts,), jnp.int32),
    ),
    grid=(1,),
    grid_names=("cluster",),
    num_threads=_WARPS // 4,
    thread_name="wg",
    scratch_types=[plgpu.SMEM(((_WARPS + 2) * program.padded,), jnp.int32)],
    **options,
  )(expert_N)


_EXPERT, _POSITION, _COUNT, _SHARED = "$0", "$1", "$2", "$3"  # the inline code's operands


@dataclasses.dataclass(frozen=True)
class _Program:
  """The kernel in PTX, step by step.

  Shared memory holds rows of L counts. First comes one row for each warp, with the warp's own
  counts until step 2 replaces them by those of the warps before it. The next row has the counts of
  the whole block, and the last row those of the blocks before this one. The register `mine` is the
  address of the warp's row. A lane reads `ahead` choices at once: the register `id{j}` is the
  expert of the j-th of them, and the predicate `is{j}` says whether there is a j-th.

  Attributes:
    choices: N.
    num_experts: E.
    blocks: blocks of the cluster.
  """

  choices: int
  num_experts: int
  blocks: int

  @property
  def padded(self) -> int:
    """L, the number of counts in a row: E + 1, rounded up to a multiple of 32."""
    return (self.num_experts // _LANES + 1) * _LANES

  @property
  def row_bytes(self) -> int:
    """Bytes of a row of counts."""
    return _WORD * self.padded

  @property
  def block_at(self) -> int:
    """Bytes from the first warp's counts to those of the whole block."""
    return _WARPS * self.row_bytes

  @property
  def blocks_before_at(self) -> int:
    """Bytes from the first warp's counts to the sums over the blocks before this one."""
    return self.block_at + self.row_bytes

  @property
  def steps(self) -> int:
    """Choices that a lane must take so that all lanes together take all."""
    return -(-self.choices // (self.blocks * _THREADS))

  @property
  def ahead(self) -> int:
    """Choices that a lane reads at once: 8, or all of its choices if it has fewer."""
    return min(_AHEAD, self.steps)

  @property
  def loops(self) -> int:
    """How many times a lane reads `ahead` choices in one walk over its run."""
    return -(-self.steps // self.ahead)

  @property
  def turn(self) -> int:
    """Choices that a warp reads at once: `ahead` for each lane."""
    return self.ahead * _LANES

  def text(self) -> str:
    """The whole kernel as PTX."""
    ahead = range(self.ahead)
    return ptx.program(
      ptx.registers("pred", f"first, more, {', '.join(f'is{j}' for j in ahead)}"),
      ptx.registers("b32", ", ".join(f"id{j}" for j in ahead)),
      ptx.registers(
        "b32", "thread, lane, lower, block, warp, shared, mine, slot, nothing, e, at, t"
      ),
      ptx.registers("b32", "start, index, loop, same, earlier, before, sum"),
      ptx.registers("b64", "wide, ids, places"),
      self.begin(),
      self.clear_counts(),
      self.first_choice(),
      ptx.wait_for_warp(),
      self.walk("COUNT", *(self.count(j) for j in ahead)),
      ptx.wait_for_block(),
      self.for_each_count("WARPS", self.add_up_warps()),
      ptx.wait_for_cluster(),
      self.for_each_count("BLOCKS", self.add_up_blocks()),
      ptx.wait_for_block(),
      self.walk("PLACE", *(self.add_before(j) for j in ahead)),
      ptx.wait_for_cluster(),  # a block ends once no other reads its shared memory
    )

  def begin(self) -> str:
    """Finds the numbers of thread, lane, warp and block, and the addresses of the warp's counts.

    mine = the address of the warp's row of counts; slot = the address of count `lane` in this row,
    the first that the lane clears; lower = a mask of the lanes before this one; nothing = 0.
    """
    return ptx.lines(
      [
        ptx.thread_of_block("thread"),
        ptx.lane_of_warp("lane"),
        ptx.lower_lanes("lower"),
        ptx.block_of_cluster("block"),
        ptx.let("shared", _SHARED),
        ptx.let("nothing", 0),
        ptx.shift_right("warp", "thread", 5),
        ptx.multiply_add("mine", "warp", self.row_bytes, "shared"),
        ptx.multiply_add("slot", "lane", _WORD, "mine"),
      ]
    )

  def clear_counts(self) -> str:
    """Sets the warp's counts to 0."""
    each = range(0, self.padded, _LANES)
    return ptx.lines(ptx.store_shared("slot", "nothing", _WORD * e) for e in each)

  def first_choice(self) -> str:
    """start = the lane's first choice: (block · 32 + warp) · length of a warp's run + lane."""
    return ptx.lines(
      [
        ptx.multiply_add("start", "block", _WARPS, "warp"),
        ptx.multiply_add("start", "start", self.loops * self.turn, "lane"),
      ]
    )

  def walk(self, label: str, *work: str) -> str:
    """Reads all of the lane's choices, `ahead` at a time, and runs the work after every read."""
    return ptx.lines(
      [
        ptx.let("loop", 0),
        ptx.let("index", "start"),
        ptx.byte_distance("wide", "start", _WORD),
        ptx.advance("ids", _EXPERT, "wide"),
        ptx.advance("places", _POSITION, "wide"),
        ptx.at_least_once(
          label,
          "loop",
          self.loops,
          "more",
          *(self.read(j) for j in range(self.ahead)),
          *work,
          ptx.add("index", "index", self.turn),
          ptx.advance("ids", "ids", _WORD * self.turn),
          ptx.advance("places", "places", _WORD * self.turn),
          ptx.add("loop", "loop", 1),
        ),
      ]
    )

  def read(self, j: int) -> str:
    """is{j} = whether the lane now reads a j-th choice; id{j} = its expert, E without a choice."""
    return ptx.lines(
      [
        ptx.add("t", "index", _LANES * j),
        ptx.compare(f"is{j}", "t", "<", self.choices),
        ptx.let(f"id{j}", self.num_experts),
        ptx.load_read_only(f"id{j}", "ids", _WORD * _LANES * j, only_if=f"is{j}"),
      ]
    )

  def agree(self, j: int, bit: int) -> str:
    """Removes from `same` the lanes whose id{j} differs from this lane's in `bit`, a power of 2."""
    return ptx.lines(
      [
        ptx.bit_and("t", f"id{j}", bit),
        ptx.compare("first", "t", "!=", 0, unsigned=True),
        ptx.ballot("t", "first"),
        ptx.bit_not("t", "t", only_if="!first"),
        ptx.bit_and("same", "same", "t"),
      ]
    )

  def count(self, j: int) -> str:
    """Writes the preliminary position of each lane's choice j, and advances the warp's counts.

    This position is the number of earlier choices in the warp's run that have the same expert.

    Worked example: lanes 2, 5 and 6 hold expert 9, of which the warp has counted 4. Their positions
    are 4, 5 and 6, and lane 2, the first, writes the count 7.
    """
    return ptx.lines(
      [
        ptx.at_most(f"id{j}", f"id{j}", self.num_experts, unsigned=True),
        ptx.let("same", -1),
        *(self.agree(j, 1 << bit) for bit in range(self.num_experts.bit_length())),
        ptx.bit_and("earlier", "same", "lower"),
        ptx.count_bits("earlier", "earlier"),
        ptx.count_bits("same", "same"),
        ptx.multiply_add("slot", f"id{j}", _WORD, "mine"),
        ptx.load_shared("before", "slot"),
        ptx.compare("first", "earlier", "==", 0),
        ptx.add("earlier", "earlier", "before"),
        ptx.add("same", "same", "before"),
        ptx.wait_for_warp(),
        ptx.store_shared("slot", "same", only_if="first"),
        ptx.wait_for_warp(),
        ptx.store_global("places", "earlier", _WORD * _LANES * j, only_if=f"is{j}"),
      ]
    )

  def for_each_count(self, label: str, work: str) -> str:
    """Runs the work once for every entry e of a row of counts, in thread e % 1024.

    at = the address of entry e in the first warp's row.
    """
    return ptx.lines(
      ptx.lines(
        [
          ptx.add("e", "thread", first),
          ptx.compare("more", "e", ">=", self.padded),
          ptx.multiply_add("at", "e", _WORD, "shared"),
          ptx.jump(f"{label}{first}", only_if="more"),
          work,
          ptx.label(f"{label}{first}"),
        ]
      )
      for first in range(0, self.padded, _THREADS)
    )

  def add_up_warps(self) -> str:
    """Replaces entry e of each warp by the sum over the block's earlier warps; writes the total."""
    one = lambda warp: ptx.lines(
      [
        ptx.load_shared("t", "at", self.row_bytes * warp),
        ptx.store_shared("at", "sum", self.row_bytes * warp),
        ptx.add("sum", "sum", "t"),
      ]
    )
    return ptx.lines(
      [
        ptx.let("sum", 0),
        *map(one, range(_WARPS)),
        ptx.store_shared("at", "sum", self.block_at),
      ]
    )

  def add_up_blocks(self) -> str:
    """Writes the sum of entry e over earlier blocks; the first block also writes the whole total.

    The sum goes to shared memory. The total over all blocks is the count of expert e, and goes to
    the result; entries from E on are of no expert, and no total of them is written.
    """
    one = lambda rank: ptx.lines(
      [
        ptx.address_in_block("slot", "at", rank),
        ptx.load_from_block("t", "slot", self.block_at),
        ptx.add("sum", "sum", "t"),
        ptx.compare("first", "block", ">", rank, unsigned=True),
        ptx.add("before", "before", "t", only_if="first"),
      ]
    )
    return ptx.lines(
      [
        ptx.let("sum", 0),
        ptx.let("before", 0),
        *map(one, range(self.blocks)),
        ptx.store_shared("at", "before", self.blocks_before_at),
        ptx.compare("first", "e", "<", self.num_experts),
        ptx.compare("first", "block", "==", 0, and_="first"),
        ptx.element_address("wide", _COUNT, "e", _WORD),
        ptx.store_global("wide", "sum", only_if="first"),
      ]
    )

  def add_before(self, j: int) -> str:
    """Adds to choice j's position the expert's counts in the warps and blocks before this warp."""
    at = _WORD * _LANES * j
    return ptx.lines(
      [
        ptx.at_most(f"id{j}", f"id{j}", self.num_experts, unsigned=True),
        ptx.multiply_add("slot", f"id{j}", _WORD, "mine"),
        ptx.load_shared("before", "slot"),
        ptx.multiply_add("slot", f"id{j}", _WORD, "shared"),
        ptx.load_shared("earlier", "slot", self.blocks_before_at),
        ptx.add("before", "before", "earlier"),
        ptx.load_global("earlier", "places", at, only_if=f"is{j}"),
        ptx.add("before", "before", "earlier"),
        ptx.store_global("places", "before", at, only_if=f"is{j}"),
      ]
    )
