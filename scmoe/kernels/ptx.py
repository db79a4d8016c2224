"""PTX, NVIDIA's assembly language, in steps: most functions here write one instruction each.

The programs that `scmoe.kernels.inline` embeds are lists of such steps. A *register* is named by a
string, and so is an operand of the inline code, `$0`. A *predicate* is a register of one bit;
`only_if="yes"` makes a step depend on the predicate `yes`, and `only_if="!yes"` on its opposite.
Numbers have 32 bits and a sign, except where a function says otherwise. Addresses in global memory
have 64 bits, and addresses in shared memory 32. A *word* has 32 bits, and an `offset` counts bytes.
(PTX ISA 8.x, NVIDIA; the section titles here name most of the instructions.)

Worked example: thread i of a block adds 1 to the i-th word of the array at address `$0`.

    program(
      registers("b32", "i, x"),
      registers("b64", "word"),
      thread_of_block("i"),
      element_address("word", "$0", "i", 4),
      load_global("x", "word"),
      add("x", "x", 1),
      store_global("word", "x"),
    )
"""

from collections.abc import Iterable

_COMPARISONS = {"<": "lt", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}


def program(*steps: str) -> str:
  """Puts the steps into a scope of their own, so that a kernel may contain several programs."""
  return f"{{\n{lines(steps)}\n}}"


def lines(steps: Iterable[str]) -> str:
  """Joins steps, to run one after the other, into one step."""
  return "\n".join(steps)


def registers(kind: str, names: str) -> str:
  """Declares registers.

  Args:
    kind: "b32" or "b64" for as many bits, or "pred" for predicates.
    names: the registers' names, separated by commas.
  """
  return f".reg .{kind} {names};"


def _step(instruction: str, only_if: str = "") -> str:
  return f"@{only_if} {instruction};" if only_if else f"{instruction};"


def _at(address: str, offset: int | None) -> str:
  return f"[{address}]" if offset is None else f"[{address}+{offset}]"


# -- which thread this is (special registers) ------------------------------------------------------


def thread_of_block(to: str) -> str:
  """to = the thread's number in its block (CTA); all blocks here have one dimension."""
  return f"mov.u32 {to}, %tid.x;"


def lane_of_warp(to: str) -> str:
  """to = the thread's number in its warp, 0 to 31."""
  return f"mov.u32 {to}, %laneid;"


def lower_lanes(to: str) -> str:
  """to = a mask with the bits of the warp's lanes before this one: 0b111 for lane 3."""
  return f"mov.u32 {to}, %lanemask_lt;"


def block_of_grid(to: str) -> str:
  """to = the block's number in a grid of one dimension."""
  return f"mov.u32 {to}, %ctaid.x;"


def block_of_cluster(to: str) -> str:
  """to = the block's number in its cluster."""
  return f"mov.u32 {to}, %cluster_ctarank;"


# -- arithmetic (mov, add, sub, mul, div, mad, min, max, cvt) --------------------------------------


def let(to: str, value: str | int, *, only_if: str = "") -> str:
  """to = value."""
  return _step(f"mov.b32 {to}, {value}", only_if)


def add(to: str, a: str, b: str | int, *, only_if: str = "") -> str:
  """to = a + b."""
  return _step(f"add.s32 {to}, {a}, {b}", only_if)


def subtract(to: str, a: str, b: str | int) -> str:
  """to = a - b."""
  return f"sub.s32 {to}, {a}, {b};"


def multiply(to: str, a: str, b: str | int) -> str:
  """to = a · b, the low 32 bits."""
  return f"mul.lo.s32 {to}, {a}, {b};"


def multiply_add(to: str, a: str | int, b: str | int, c: str, *, only_if: str = "") -> str:
  """to = a · b + c, the low 32 bits."""
  return _step(f"mad.lo.s32 {to}, {a}, {b}, {c}", only_if)


def divide(to: str, a: str, b: str | int) -> str:
  """to = a // b, of numbers without a sign."""
  return f"div.u32 {to}, {a}, {b};"


def at_most(to: str, a: str, limit: int, *, unsigned: bool = False) -> str:
  """to = min(a, limit). Unsigned, a negative number counts as a large one and becomes the limit."""
  return f"min.{'u32' if unsigned else 's32'} {to}, {a}, {limit};"


def at_least(to: str, a: str, limit: int) -> str:
  """to = max(a, limit)."""
  return f"max.s32 {to}, {a}, {limit};"


def widen(to: str, a: str) -> str:
  """to = a with 64 bits, its sign kept."""
  return f"cvt.s64.s32 {to}, {a};"


def let_wide(to: str, value: str) -> str:
  """to = value, of 64 bits."""
  return f"mov.b64 {to}, {value};"


# -- bits (and, xor, not, shl, shr, popc) and choices (setp, selp) ---------------------------------


def bit_and(to: str, a: str, b: str | int) -> str:
  """to = a & b."""
  return f"and.b32 {to}, {a}, {b};"


def bit_xor(to: str, a: str, b: str | int, *, only_if: str = "") -> str:
  """to = a ^ b."""
  return _step(f"xor.b32 {to}, {a}, {b}", only_if)


def bit_not(to: str, a: str, *, only_if: str = "") -> str:
  """to = ~a."""
  return _step(f"not.b32 {to}, {a}", only_if)


def shift_left(to: str, a: str, bits: int) -> str:
  """to = a · 2^bits, the low 32 bits."""
  return f"shl.b32 {to}, {a}, {bits};"


def shift_right(to: str, a: str, bits: int) -> str:
  """to = a // 2^bits, of a number without a sign."""
  return f"shr.u32 {to}, {a}, {bits};"


def count_bits(to: str, a: str) -> str:
  """to = how many bits of a are set."""
  return f"popc.b32 {to}, {a};"


def compare(
  to: str,
  a: str,
  comparison: str,
  b: str | int,
  *,
  and_: str = "",
  or_: str = "",
  unsigned: bool = False,
) -> str:
  """Sets a predicate: to = (a < b), or another comparison, joined with `and_` or `or_` if given.

  Args:
    to: the predicate.
    a: left operand.
    comparison: "<", ">", ">=", "==" or "!=".
    b: right operand.
    and_: a predicate that must hold too.
    or_: a predicate that makes `to` true by itself; not together with `and_`.
    unsigned: compare numbers without a sign, so that a negative one counts as a large one.
  """
  also = f".{'and' if and_ else 'or'}" if and_ or or_ else ""
  kind = "u32" if unsigned else "s32"
  last = f", {and_ or or_}" if also else ""
  return f"setp.{_COMPARISONS[comparison]}{also}.{kind} {to}, {a}, {b}{last};"


def compare_wide(to: str, a: str, comparison: str, b: str) -> str:
  """Sets a predicate: to = (a == b), or another comparison, of numbers with 64 bits and no sign."""
  return f"setp.{_COMPARISONS[comparison]}.u64 {to}, {a}, {b};"


def select(to: str, a: int, b: int, condition: str) -> str:
  """to = a if the predicate `condition` holds, else b."""
  return f"selp.b32 {to}, {a}, {b}, {condition};"


# -- loops (bra) -----------------------------------------------------------------------------------


def label(name: str) -> str:
  """Marks a place that `jump` can go to."""
  return f"{name}:"


def jump(name: str, *, only_if: str = "") -> str:
  """Goes on at the `label` of this name, if the predicate `only_if` holds or is not given."""
  return _step(f"bra {name}", only_if)


def while_less(name: str, index: str, end: str | int, *work: str) -> str:
  """Runs the work while index < end, perhaps never; the work advances the index.

  Args:
    name: the label of the loop, and the first part of the label of its test.
    index: register.
    end: register or number.
    *work: steps. They may change the predicate `more`, which the loop sets and the
      program declares.
  """
  head = [jump(f"{name}_TEST"), label(name)]
  test = [label(f"{name}_TEST"), compare("more", index, "<", end), jump(name, only_if="more")]
  return lines([*head, *work, *test])


def for_each(
  name: str, index: str, first: str | int, end: str | int, stride: int, *work: str
) -> str:
  """Runs the work for index in range(first, end, stride), perhaps never; advances the index."""
  loop = while_less(name, index, end, *work, add(index, index, stride))
  return lines([let(index, first), loop])


def at_least_once(name: str, index: str, end: int, condition: str, *work: str) -> str:
  """Runs the work once, and again while index < end; the work advances the index.

  Args:
    name: the loop's label.
    index: register.
    end: number.
    condition: predicate that the loop sets.
    *work: steps.
  """
  test = [compare(condition, index, "<", end), jump(name, only_if=condition)]
  return lines([label(name), *work, *test])


# -- addresses (mul.wide, mad.wide, add.s64) -------------------------------------------------------


def byte_distance(to: str, index: str, size: int, *, unsigned: bool = False) -> str:
  """to = index · size, with 64 bits: the bytes before element `index` of an array."""
  return f"mul.wide.{'u32' if unsigned else 's32'} {to}, {index}, {size};"


def advance(to: str, base: str, distance: str | int) -> str:
  """to = base + distance: the address `distance` bytes after `base`, in global memory."""
  return f"add.s64 {to}, {base}, {distance};"


def element_address(
  to: str, base: str, index: str, size: int, *, unsigned: bool = False, distance: str = ""
) -> str:
  """to = the address of element `index` of the array at `base` in global memory.

  Args:
    to: register of 64 bits.
    base: the array's address.
    index: of 32 bits.
    size: bytes of an element.
    unsigned: the index has no sign.
    distance: a register of 64 bits for the bytes before the element; by default `to`.
  """
  distance = distance or to
  before = byte_distance(distance, index, size, unsigned=unsigned)
  return lines([before, advance(to, base, distance)])


def row_address(to: str, base: str, index: str, size: int) -> str:
  """Does `element_address` in one instruction: to = base + index · size, the index with a sign."""
  return f"mad.wide.s32 {to}, {index}, {size}, {base};"


# -- reading and writing (ld, st, prefetch, mapa) --------------------------------------------------


def load_global(to: str, address: str, offset: int | None = None, *, only_if: str = "") -> str:
  """Reads a word of global memory that this kernel may have written."""
  return _step(f"ld.global.s32 {to}, {_at(address, offset)}", only_if)


def load_read_only(to: str, address: str, offset: int | None = None, *, only_if: str = "") -> str:
  """Reads a word that nothing writes while the kernel runs, through the read-only cache."""
  return _step(f"ld.global.nc.s32 {to}, {_at(address, offset)}", only_if)


def store_global(address: str, value: str, offset: int | None = None, *, only_if: str = "") -> str:
  """Writes a word of global memory."""
  return _step(f"st.global.s32 {_at(address, offset)}, {value}", only_if)


def load_global_wide(to: str, address: str, offset: int | None = None) -> str:
  """Reads 64 bits of global memory, for example an address."""
  return f"ld.global.b64 {to}, {_at(address, offset)};"


def store_global_wide(
  address: str, value: str, offset: int | None = None, *, only_if: str = ""
) -> str:
  """Writes 64 bits of global memory, perhaps another device's."""
  return _step(f"st.global.b64 {_at(address, offset)}, {value}", only_if)


def load_shared(to: str, address: str, offset: int | None = None, *, only_if: str = "") -> str:
  """Reads a word of the block's shared memory."""
  return _step(f"ld.shared.s32 {to}, {_at(address, offset)}", only_if)


def store_shared(
  address: str, value: str, offset: int | None = None, *, kind: str = "s32", only_if: str = ""
) -> str:
  """Writes a word of the block's shared memory; `kind` is the word's PTX type."""
  return _step(f"st.shared.{kind} {_at(address, offset)}, {value}", only_if)


def load_shared_wide(to: str, address: str, offset: int) -> str:
  """Reads 64 bits of the block's shared memory, for example an address in global memory."""
  return f"ld.shared.b64 {to}, {_at(address, offset)};"


def store_shared_wide(address: str, value: str, offset: int, *, only_if: str = "") -> str:
  """Writes 64 bits of the block's shared memory."""
  return _step(f"st.shared.b64 {_at(address, offset)}, {value}", only_if)


def address_in_block(to: str, address: str, block: int) -> str:
  """to = the address that matches `address` in the shared memory of the cluster's block `block`."""
  return f"mapa.shared::cluster.u32 {to}, {address}, {block};"


def load_from_block(to: str, address: str, offset: int) -> str:
  """Reads a word of a cluster block's shared memory, at an address from `address_in_block`."""
  return f"ld.shared::cluster.s32 {to}, {_at(address, offset)};"


def prefetch(address: str, offset: int) -> str:
  """Starts to bring a line of global memory into the L1 cache; the thread does not wait for it."""
  return f"prefetch.global.L1 {_at(address, offset)};"


# -- threads waiting for each other (bar, barrier.cluster, vote) -----------------------------------


def wait_for_block() -> str:
  """Waits until all threads of the block are here; what they wrote is visible then."""
  return "bar.sync 0;"


def wait_for_warp() -> str:
  """Waits until all lanes of the warp are here; what they wrote is visible then."""
  return "bar.warp.sync -1;"


def wait_for_cluster() -> str:
  """Waits until all threads of the cluster are here; what they wrote is visible then."""
  return lines(["barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"])


def ballot(to: str, condition: str) -> str:
  """to = a mask with the bits of the warp's lanes whose predicate holds."""
  return f"vote.sync.ballot.b32 {to}, {condition}, -1;"


# -- devices waiting for each other (red, st, ld at system scope; trap) ----------------------------


def add_at_device(address: str, value: str, *, only_if: str = "") -> str:
  """Adds to a word of global memory, perhaps another device's, after the thread's own writes.

  A device that reads the sum by `load_from_devices` sees these writes, too, and those of the
  block's other threads before a `wait_for_block`.
  """
  return _step(f"red.release.sys.global.add.u32 [{address}], {value}", only_if)


def store_at_device(address: str, value: str, offset: int) -> str:
  """Writes a word of global memory, perhaps another device's, after the thread's own writes.

  A device that reads the word by `load_from_devices` sees these writes, too.
  """
  return f"st.release.sys.global.u32 {_at(address, offset)}, {value};"


def load_from_devices(to: str, address: str, offset: int | None = None) -> str:
  """Reads a word that other devices write; what they wrote before it is visible then."""
  return f"ld.acquire.sys.global.u32 {to}, {_at(address, offset)};"


def stop(only_if: str) -> str:
  """Ends the kernel with an error, for the program too, if the predicate holds."""
  return _step("trap", only_if)


# -- barriers in shared memory (mbarrier), 8 bytes each --------------------------------------------


def init_barrier(address: str, offset: int, arrivals: int, *, only_if: str = "") -> str:
  """Makes a barrier; a phase completes after `arrivals` arrivals and all bytes they expect."""
  return _step(f"mbarrier.init.shared::cta.b64 {_at(address, offset)}, {arrivals}", only_if)


def publish_barriers() -> str:
  """Makes new barriers visible to the other threads and to bulk copies."""
  return "fence.mbarrier_init.release.cluster;"


def arrive_and_expect(barrier: str, size: int, *, only_if: str = "") -> str:
  """Arrives, and lets the barrier's phase complete only once `size` more bytes have been copied."""
  return _step(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {size}", only_if)


def wait_for_barrier(barrier: str, parity: str, condition: str) -> str:
  """Waits until a barrier's phase is complete: the first has parity 0, the second 1, the third 0.

  A program may have one such wait, because its label has a fixed name.

  Args:
    barrier: register with the barrier's address.
    parity: register with the parity of the phase.
    condition: predicate that the wait sets.
  """
  test = f"mbarrier.try_wait.parity.shared::cta.b64 {condition}, [{barrier}], {parity};"
  return lines([label("WAIT"), test, jump("WAIT", only_if=f"!{condition}")])


# -- asynchronous copies (cp.async, cp.async.bulk) -------------------------------------------------


def publish_to_copies(*, own_block_only: bool = False) -> str:
  """Makes the thread's writes visible to the hardware that copies and multiplies asynchronously.

  Args:
    own_block_only: whether only the thread's writes to its own block's shared memory are made
      visible.
  """
  return f"fence.proxy.async{'.shared::cta' if own_block_only else ''};"


def copy_piece(target: str, target_offset: int, source: str, offset: int, size: str) -> str:
  """Starts to fill 16 bytes of shared memory: `size` bytes of global memory, then zeros."""
  to, from_ = _at(target, target_offset), _at(source, offset)
  return f"cp.async.cg.shared.global.L2::128B {to}, {from_}, 16, {size};"


def arrive_after_pieces(barrier: str) -> str:
  """Lets the thread arrive at a barrier once all its copies by `copy_piece` so far are done."""
  return f"cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{barrier}];"


def copy_to_shared(target: str, source: str, size: int, barrier: str, *, only_if: str = "") -> str:
  """Starts to copy `size` bytes from global to shared memory; the barrier counts arriving bytes."""
  copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
  return _step(f"{copy}\n  [{target}], [{source}], {size}, [{barrier}]", only_if)


def copy_to_global(target: str, source: str, size: int, *, only_if: str = "") -> str:
  """Starts to copy `size` bytes from shared to global memory, in the thread's open group."""
  return _step(
    f"cp.async.bulk.global.shared::cta.bulk_group [{target}], [{source}], {size}", only_if
  )


def close_group() -> str:
  """Closes the thread's group of copies to global memory, so that it can be waited for."""
  return "cp.async.bulk.commit_group;"


def wait_for_groups(open_ones: int, *, read_only: bool = False) -> str:
  """Waits until at most `open_ones` of the thread's groups are unfinished.

  Args:
    open_ones: how many groups, the newest ones, may be unfinished.
    read_only: whether a group counts as finished once its shared memory has been read, even if
      global memory has not been written yet.
  """
  return f"cp.async.bulk.wait_group{'.read' if read_only else ''} {open_ones};"
