"""Experts from the host's memory into slots on the device, by a kernel on a stream of its own.

XLA copies a slice of pinned memory, at an index that the device computes, by a kernel of thousands
of thread blocks. They all wait for the link and leave no other kernel a place on the device. This
kernel has `BLOCKS`, which read nearly as many bytes a second; it copies as many experts as the
device says, none for instance, and writes into the slots where they are to lie.

    E  experts     C  slots     N  experts that a call can ask for
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
from scmoe.kernels.running import has_kernels

BLOCKS = 32
# That a block has under way. 128 KiB of all blocks fill PCIe 5; behind 2 MiB every other kernel on
# the device waited 40 us.
_BYTES = 4_096
_MOST = 65_536  # where no part is as small
_THREADS = 128
_STREAM = "gpu_stream:1"  # any but 0, which computes


def has_kernel(stacks: Sequence[Array]) -> bool:
  """Whether `fetch` takes these arrays: a Hopper GPU, and matrices that `_piece` cuts."""
  return has_kernels(jax.devices()[0]) and all(x.ndim == 3 and _piece(x)[0] for x in stacks)


def fetch(
  stacks: Sequence[Array],
  id_N: Int[Array, " N"],
  place_N: Int[Array, " N"],
  copies: Int[Array, ""] | int,
  held: Sequence[Array] | None = None,
) -> list[Array]:
  """Copies experts to their slots, beside whatever does not read the result.

  Args:
    stacks: [E, M, N] of every matrix of the experts, in pinned host memory.
    id_N: int32, the experts, of which the first `copies` are copied.
    place_N: int32, the slot of each.
    copies: how many.
    held: [C, M, N] of every matrix, what the slots hold; written in place. None: N new slots, which
      hold anything where nothing was copied.

  Returns:
    the slots.
  """
  order = jnp.concatenate([id_N, place_N, jnp.reshape(jnp.asarray(copies, jnp.int32), (1,))])
  slots = [None] * len(stacks) if held is None else held
  # A call for each matrix: XLA waits for one with several results as soon as it has begun.
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
  """Every block takes every `BLOCKS`th piece."""
  block, (rows, columns) = lax.axis_index("block"), _piece(stack)
  across = stack.shape[2] // columns
  pieces = stack.shape[1] // rows * across

  def one(i: Any, _: Any) -> None:
    expert, place = order[i], order[count + i]

    def piece(turn: Any, _: Any) -> None:
      index = block + turn * BLOCKS
      row, column = lax.div(index, across), lax.rem(index, across)
      # A row's part has one axis: only so is it seen to be contiguous.
      at = row if across > 1 else pl.ds(row * rows, rows)
      at = (at, pl.ds(column * columns, columns))
      out[(place, *at)] = stack[(expert, *at)]

    lax.fori_loop(0, lax.div(pieces - block + BLOCKS - 1, BLOCKS), piece, None)

  lax.fori_loop(0, order[2 * count], one, None)


def _piece(x: Any) -> tuple[int, int]:
  """Rows and columns of a part that a block copies at once, contiguous and of as many vectors of 16
  bytes for every thread: the largest within `_BYTES`, else the smallest; (0, 0): none."""
  size, (rows, columns) = jnp.dtype(x.dtype).itemsize, x.shape[1:]
  divisors = lambda n: [d for d in range(1, min(n, _MOST) + 1) if n % d == 0]
  parts = [(r, columns) for r in divisors(rows)] + [(1, c) for c in divisors(columns)]
  nbytes = lambda piece: piece[0] * piece[1] * size
  fitting = [p for p in parts if nbytes(p) <= _MOST and nbytes(p) % (16 * _THREADS) == 0]
  few = [p for p in fitting if nbytes(p) <= _BYTES]
  return max(few, key=nbytes) if few else min(fitting, key=nbytes, default=(0, 0))


# Pallas takes no array in the host's memory; the device reads pinned memory as it reads its own.
_seen_from_device = Primitive("seen_from_device")
_seen_from_device.def_abstract_eval(lambda x: x.update(memory_space=jax.memory.Space.Device))
mlir.register_lowering(_seen_from_device, lambda _, x: [x])
