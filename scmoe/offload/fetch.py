"""Copies experts from the host's memory into slots on the device, by a kernel on its own stream.

XLA's kernel for a slice of pinned memory, at an index that the device computes, has thousands of
thread blocks. They all wait for the link, and other kernels find no room on the device. This kernel
has `BLOCKS` thread blocks, which read nearly as many bytes a second. The device decides how many
experts it copies, which can be none, and into which slots.

    E  experts     C  slots     N  most experts of a call
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Int

from scmoe.base.compat import compute_on
from scmoe.kernels.launch import has_kernels

BLOCKS = 32
# Bytes that a block reads at once. All blocks' 128 KiB keep PCIe 5 busy. With 2 MiB every other
# kernel on the device waited 40 us.
_BYTES = 4_096
_MOST = 65_536  # bytes at once, for matrices that do not divide into parts of `_BYTES`
_THREADS = 128
_STREAM = "gpu_stream:1"  # any but stream 0, on which other kernels run


def has_kernel(stacks: Sequence[Array]) -> bool:
  """Whether `fetch` takes these arrays: on a Hopper GPU, matrices that `_piece` can divide."""
  return has_kernels(jax.devices()[0]) and all(x.ndim == 3 and _piece(x)[0] for x in stacks)


def fetch(
  stacks: Sequence[Array],
  id_N: Int[Array, " N"],
  place_N: Int[Array, " N"],
  copies: Int[Array, ""] | int,
  held: Sequence[Array] | None = None,
) -> list[Array]:
  """Copies experts to their slots, while the device computes what does not read the slots.

  Args:
    stacks: the experts' matrices, each [E, M, N], in pinned host memory.
    id_N: int32, experts; the first `copies` of them are copied.
    place_N: int32, the slot of each expert.
    copies: int32 scalar, how many are copied.
    held: the slots, [C, M, N] of every matrix, written in place. None: N new slots, whose contents
      are undefined where nothing is copied.

  Returns:
    The slots, one array for each matrix.
  """
  order = jnp.concatenate([id_N, place_N, jnp.reshape(jnp.asarray(copies, jnp.int32), (1,))])
  slots = [None] * len(stacks) if held is None else held
  # One call for each matrix: XLA would begin a call with several results and wait for it at once.
  return [_on_stream(order, stack, own) for stack, own in zip(stacks, slots)]


def _on_stream(order: Array, stack: Array, held: Array | None) -> Array:
  count = order.shape[0] // 2
  body = functools.partial(_body, count)

  def copied(order: Array, stack: Array, held: Array | None) -> Array:
    stack = _seen_from_device.bind(stack)
    options: dict[str, Any] = {
      "grid": (BLOCKS,),
      "grid_names": ("block",),
      "compiler_params": plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    }
    if held is None:
      shape = jax.ShapeDtypeStruct((count, *stack.shape[1:]), stack.dtype)
      return plgpu.kernel(body, out_type=shape, **options)(order, stack)
    in_place = lambda ref: plgpu.kernel(body, **options)(order, stack, ref)
    return pl.run_state(in_place)(held)

  where = jax.memory.Space.Device
  return compute_on(copied, compute_type=_STREAM, out_memory_spaces=where)(order, stack, held)


def _body(count: int, order: Any, stack: Any, out: Any) -> None:
  """Copies every expert of the order. A block takes every `BLOCKS`-th piece of a matrix."""
  block, (rows, columns) = lax.axis_index("block"), _piece(stack)
  across = stack.shape[2] // columns
  pieces = stack.shape[1] // rows * across

  def one(i: Any, _: Any) -> None:
    expert, place = order[i], order[count + i]

    def piece(turn: Any, _: Any) -> None:
      index = block + turn * BLOCKS
      row, column = lax.div(index, across), lax.rem(index, across)
      # Part of a row is indexed along one axis: only then does Pallas know it is contiguous.
      at = row if across > 1 else pl.ds(row * rows, rows)
      at = (at, pl.ds(column * columns, columns))
      out[(place, *at)] = stack[(expert, *at)]

    lax.fori_loop(0, lax.div(pieces - block + BLOCKS - 1, BLOCKS), piece, None)

  lax.fori_loop(0, order[2 * count], one, None)


def _piece(x: Any) -> tuple[int, int]:
  """Rows and columns of the piece that a block copies at once; (0, 0) if no piece fits.

  A piece is contiguous, and every thread copies the same number of 16-byte vectors. It is the
  largest within `_BYTES`, or else the smallest within `_MOST`.
  """
  size, (rows, columns) = jnp.dtype(x.dtype).itemsize, x.shape[1:]
  divisors = lambda n: [d for d in range(1, min(n, _MOST) + 1) if n % d == 0]
  parts = [(r, columns) for r in divisors(rows)] + [(1, c) for c in divisors(columns)]
  nbytes = lambda piece: piece[0] * piece[1] * size
  fitting = [p for p in parts if nbytes(p) <= _MOST and nbytes(p) % (16 * _THREADS) == 0]
  few = [p for p in fitting if nbytes(p) <= _BYTES]
  return max(few, key=nbytes) if few else min(fitting, key=nbytes, default=(0, 0))


# Pallas takes no array in the host's memory, though the device can read pinned memory as its own.
# This primitive changes the memory space in the type and nothing else.
_seen_from_device = Primitive("seen_from_device")
_seen_from_device.def_abstract_eval(lambda x: x.update(memory_space=jax.memory.Space.Device))
mlir.register_lowering(_seen_from_device, lambda _, x: [x])
