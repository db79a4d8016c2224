"""The end of an epilogue: register tiles to global memory, through a ring in shared memory."""

from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64  # columns of one store; 64 bf16 elements are one swizzle row


def store_tiles(
  values: Any, outs: Any, first_cols: Any, first_row: Any, buffers: Any, consumer: Any
) -> None:
  """Stores (rows, columns) register tiles.

  Args:
    values: for each output a function chunk slice -> (rows, CHUNK) values, and its width.
    outs: output refs, one for each.
    first_cols: first column of the tile in each output.
    first_row: first row of this consumer.
    buffers: SMEM ref [consumers, count, rows, CHUNK].
    consumer: which buffers to use.
  """
  count, rows = buffers.shape[1], buffers.shape[2]
  # With a number of chunks that the ring does not divide, a tile begins at the buffer that the one
  # before it used last.
  begins_free = sum(width // CHUNK for _, width in values) % count == 0
  used = 0
  for (value, width), out, col in zip(values, outs, first_cols):
    for chunk in range(width // CHUNK):
      index = used % count
      # The store that used this buffer before has left it.
      plgpu.wait_smem_to_gmem(count - 1 if used or begins_free else 0, wait_read_only=True)
      used += 1
      buffers[consumer, index] = value(slice(chunk * CHUNK, (chunk + 1) * CHUNK))
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(
        buffers.at[consumer, index],
        out.at[pl.ds(first_row, rows), pl.ds(col + chunk * CHUNK, CHUNK)],
      )
