"""Small arrays by which devices wait for each other in a kernel, and tell each other addresses.

    W  ranks: the devices of one mesh axis

Pallas can ask XLA's runtime for the addresses of the other devices' results (`remote_ref`). Before
each such kernel the runtime then lets all devices' streams meet, zeroes the kernel's semaphores and
copies a table of addresses. Here the kernels do that themselves, which saves 11 us of a call
(experiments/dispatch/README.md). A program opens a mailbox on every device, and one all-gather
tells all devices the addresses of all mailboxes. A kernel writes the address of its own result
into the mailboxes of the others, and reads theirs from its own. Several kernels may use one
mailbox, one after the other: XLA may open it before a loop, since opening reads nothing.

A mailbox has 512 bytes for each thread block, which only the blocks of that number use, so that no
block waits for another of its device:

    bytes        0 - 3     calls: how many kernels have ended here; its own block alone writes it
                 128 - 131 done: the sum of all ranks' signals, W for each call
                 256 + 32r rank r's post: an address of 8 bytes, and the call that it is for

Numbers only grow, so nothing is zeroed between calls. A rank that posts call n + 1 has ended
call n, for which it needed this block's signal; and the block signalled after it had read the post
of call n. So no post is overwritten unread. A post of call n tells two things: where that rank's
result lies, and that its stream has reached the kernel, so that nothing there still needs what the
memory held before. On a stream of its own the kernel waits for all that its device's stream of
computation had begun before it (XLA makes the one stream wait for the other at the call's start).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scmoe.kernels import inline, ptx
from scmoe.kernels.launch import compiled

BYTES = 512  # of a block's part
DONE, POSTS, POST = 128, 256, 32  # where `done` and the posts are, and the size of a post
MOST_RANKS = (BYTES - POSTS) // POST
ADDRESS = 8  # Bytes of an address in global memory.
_WORD = 4


class Mailboxes(NamedTuple):
  """A device's own mailbox, and where those of all ranks are.

  The mailbox must stay where it is: a kernel that gets a copy of it stops with an error of the GPU.
  XLA may copy what a step of a scan hands to the next one, and what a forward pass keeps for the
  backward pass. So neither may hand on mailboxes: open new ones.

  Attributes:
    own: int32 [blocks · 128], this device's mailbox.
    address_W2: int32 [W, 2], each rank's address, its lower half first.
    rank: int32 [1], this device's number on the axis.
  """

  own: jax.Array
  address_W2: jax.Array
  rank: jax.Array

  @property
  def blocks(self) -> int:
    """The most thread blocks of a kernel that meets by these mailboxes."""
    return self.own.shape[0] * _WORD // BYTES


def open_mailboxes(axis: str | None, blocks: int) -> Mailboxes:
  """Opens a mailbox on every device of a mesh axis, inside `jax.shard_map`; on Hopper GPUs alone.

  Args:
    axis: the mesh axis; all its devices belong to this process. None: this device meets nobody.
    blocks: the most thread blocks of a kernel that meets by them.
  """
  own, address = _opened(blocks)
  if axis is None:
    return Mailboxes(own, address[None], jnp.zeros((1,), jnp.int32))
  with jax.named_scope("counts"):
    address_W2 = lax.all_gather(address, axis)
  return Mailboxes(own, address_W2, lax.axis_index(axis).astype(jnp.int32)[None])


def _opened(blocks: int) -> tuple[jax.Array, jax.Array]:
  """A mailbox of zeros, and its address, int32 [2]."""
  text = ptx.program(
    ptx.registers("pred", "yes"),
    ptx.registers("b32", "thread, block, i, nothing"),
    ptx.registers("b64", "word, address"),
    ptx.thread_of_block("thread"),
    ptx.block_of_grid("block"),
    ptx.let("nothing", 0),
    ptx.multiply_add("i", "block", BYTES // _WORD, "thread"),
    ptx.element_address("word", "$0", "i", _WORD),
    ptx.store_global("word", "nothing"),
    ptx.compare("yes", "i", "==", 0, unsigned=True),
    ptx.let_wide("address", "$0"),
    ptx.store_global_wide("$1", "address", only_if="yes"),
  )

  def open_mailbox(*outs):  # a trace shows this name
    inline.run(text, outs)

  own, address = compiled(
    open_mailbox,
    out_type=[
      jax.ShapeDtypeStruct((blocks * BYTES // _WORD,), jnp.int32),
      jax.ShapeDtypeStruct((2,), jnp.int32),
    ],
    grid=(blocks,),
    grid_names=("block",),
    num_threads=1,  # warpgroup of 128 threads, one for each word of a block's part
    thread_name="wg",
  )()
  return own, address
