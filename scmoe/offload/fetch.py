"""Copies experts from the host's memory into places on the device, by a kernel on its own stream.

XLA too could slice pinned memory at an index that the device computes. But its kernel has thousands
of thread blocks, which occupy the device while they wait for the link to the host, so that no other
kernel runs. This kernel has `BLOCKS` thread blocks, which read nearly as many bytes a second. The
device decides how many experts are copied (possibly none), and into which places.

    E  experts     C  places     N  most experts of a call
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
# Bytes that a block reads at once. All blocks together read 128 KiB, which keeps PCIe 5 busy. With
# 2 MiB every other kernel on the device waited 40 us.
_BYTES = 4_096
_MOST = 65_536  # bytes that a block reads at once if a matrix has no smaller piece
_THREADS = 128
_STREAM = "gpu_stream:1"  # not stream 0, on which the other kernels run


def has_kernel(stacks: Sequence[Array]) -> bool:
  """Whether `fetch` runs here, on a Hopper GPU, and supports these arrays.

  It supports arrays [E, M, N] whose matrices `_piece` can divide.
  """
  return has_kernels(jax.devices()[0]) and all(x.ndim == 3 and _piece(x)[0] for x in stacks)


def fetch(
  stacks: Sequence[Array],
  id_N: Int[Array, " N"],
  place_N: Int[Array, " N"],
  copies: Int[Array, ""] | int,
  held: Sequence[Array] | None = None,
) -> list[Array]:
  """Copies experts to their places; meanwhile the device runs kernels that do not read the places.

  Args:
    stacks: the experts' matrices, each [E, M, N], in pinned host memory.
    id_N: int32, the ids of experts, of which the first `copies` are copied.
    place_N: int32, the place of each of them.
    copies: int32 scalar, the number of experts to copy.
    held: the places, [C, M, N] for every matrix, to be written in place. None: N new places; those
      without a copy have undefined contents.

  Returns:
    The places, one array for each matrix.
  """
  order = jnp.concatenate([id_N, place_N, jnp.reshape(jnp.asarray(copies, jnp.int32), (1,))])
  places = [None] * len(stacks) if held is None else held
  # One call for each matrix: XLA waits for a call with several results right after starting it.
  return [_on_stream(order, stack, own) for stack, own in zip(stacks, places)]


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
  """The kernel: block b copies the pieces b, b + BLOCKS, ... of each expert's matrix.

  Args:
    count: N.
    order: int32 [2 N + 1]: the experts, their places, and the number of copies.
    stack: [E, M, N] in the host's memory.
    out: [C, M, N] on the device.
  """
  block, (rows, columns) = lax.axis_index("block"), _piece(stack)
  across = stack.shape[2] // columns
  pieces = stack.shape[1] // rows * across

  def one(i: Any, _: Any) -> None:
    expert, place = order[i], order[count + i]

    def piece(turn: Any, _: Any) -> None:
      index = block + turn * BLOCKS
      row, column = lax.div(index, across), lax.rem(index, across)
      # If a piece is a part of one row, `row` is an integer, so that Pallas knows it is contiguous.
      at = row if across > 1 else pl.ds(row * rows, rows)
      at = (at, pl.ds(column * columns, columns))
      out[(place, *at)] = stack[(expert, *at)]

    lax.fori_loop(0, lax.div(pieces - block + BLOCKS - 1, BLOCKS), piece, None)

  lax.fori_loop(0, order[2 * count], one, None)


def _piece(x: Any) -> tuple[int, int]:
  """Rows and columns of the piece that a block copies at once; (0, 0) if there is none.

  A piece is contiguous, and every thread copies the same number of 16-byte vectors. Of these the
  function takes the largest one up to `_BYTES`, or else the smallest one up to `_MOST`.
  """
  size, (rows, columns) = jnp.dtype(x.dtype).itemsize, x.shape[1:]
  divisors = lambda n: [d for d in range(1, min(n, _MOST) + 1) if n % d == 0]
  parts = [(r, columns) for r in divisors(rows)] + [(1, c) for c in divisors(columns)]
  nbytes = lambda piece: piece[0] * piece[1] * size
  fitting = [p for p in parts if nbytes(p) <= _MOST and nbytes(p) % (16 * _THREADS) == 0]
  few = [p for p in fitting if nbytes(p) <= _BYTES]
  return max(few, key=nbytes) if few else min(fitting, key=nbytes, default=(0, 0))


# Pallas refuses arrays in the host's memory, although the device can read pinned memory like its
# own. This primitive changes only the memory space in the array's type.
_seen_from_device = Primitive("seen_from_device")
_seen_from_device.def_abstract_eval(lambda x: x.update(memory_space=jax.memory.Space.Device))
mlir.register_lowering(_seen_from_device, lambda _, x: [x])
