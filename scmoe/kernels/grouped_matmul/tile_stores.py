"""The end of an epilogue: tiles from registers, through shared memory, to global memory."""

from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels.grouped_matmul.pipeline import CONSUMERS, Tiling, tiled_smem

CHUNK = 64  # columns of one store; 64 elements of 2 bytes are one swizzle row


def store_buffers(tiling: Tiling, dtype: Any) -> Any:
  """Declares the shared memory through which a CTA's consumers store their tiles."""
  return tiled_smem((CONSUMERS, tiling.store_buffers, tiling.consumer_rows, CHUNK), dtype)


def store_tiles(
  values: Any, outs: Any, first_cols: Any, first_row: Any, buffers: Any, consumer: Any
) -> None:
  """Stores a consumer's part of a tile, which is in registers, chunk by chunk.

  Args:
    values: for each output a pair: a function from a slice of 64 columns to their values
      [rows, CHUNK], and the number of columns.
    outs: output references, one for each pair.
    first_cols: first column of the tile in each output.
    first_row: first row of this consumer.
    buffers: what `store_buffers` declares.
    consumer: number of this consumer.
  """
  count, rows = buffers.shape[1], buffers.shape[2]
  # A tile's chunks use the buffers in turn, from buffer 0 on: with two buffers, three chunks use 0,
  # 1, 0. Then the newest store of the tile before is from buffer 0, where this tile begins, so that
  # this tile first waits for all stores. After four chunks (0, 1, 0, 1) it waits for all but the
  # newest.
  begins_free = sum(width // CHUNK for _, width in values) % count == 0
  used = 0
  for (value, width), out, col in zip(values, outs, first_cols):
    for chunk in range(width // CHUNK):
      index = used % count
      # The store that used this buffer before must have read it.
      plgpu.wait_smem_to_gmem(count - 1 if used or begins_free else 0, wait_read_only=True)
      used += 1
      buffers[consumer, index] = value(slice(chunk * CHUNK, (chunk + 1) * CHUNK))
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(
        buffers.at[consumer, index],
        out.at[pl.ds(first_row, rows), pl.ds(col + chunk * CHUNK, CHUNK)],
      )
