"""The router in one kernel on Hopper: logits, the K largest, softmax over them.

    T  tokens      D  model width      E  experts      K  experts per token

XLA needs a product, 2·K reductions and as many selections, whose launches cost more than their work
when experts are small. Here the logits never leave the registers they are accumulated in.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels.grouped_matmul.pipeline import (
  CONSUMERS,
  Tiling,
  Work,
  barriers,
  launch,
  resolve_num_sms,
  run_tiles,
  smem,
)

_ROWS = 128
_LARGE = 1e9  # beyond every expert id


def fits(tokens: int, width: int, experts: int) -> bool:
  """Whether the kernel takes these sizes: whole tiles, and logits that fit a thread's registers."""
  return tokens % _ROWS == 0 and width % 64 == 0 and experts <= 192


def route_top_k_gpu(
  x_TD: jax.Array, router_DE: jax.Array, top_k: int, num_sms: int | None = None
) -> tuple[jax.Array, jax.Array]:
  """expert_TK (int32) and weight_TK (float32) of the K largest logits; see `route_top_k`."""
  tokens, width = x_TD.shape
  experts = router_DE.shape[1]
  padded = -(-experts // 64) * 64
  router_DE = jnp.pad(router_DE.astype(x_TD.dtype), ((0, 0), (0, padded - experts)))
  tiling = Tiling(rows=_ROWS, cols=padded, stages=6 if padded <= 128 else 5)
  consumer_rows = tiling.consumer_rows
  steps = width // tiling.depth
  num_sms = resolve_num_sms(num_sms)

  def body(x_gmem, router_gmem, weight_gmem, expert_gmem):
    def with_memory(x_smem, router_smem, weight_smem, expert_smem, full, empty):
      def load(tile, step, slot, barrier):
        k_slice = pl.ds(step * tiling.depth, tiling.depth)
        plgpu.copy_gmem_to_smem(
          x_gmem.at[pl.ds(tile * _ROWS, _ROWS), k_slice], x_smem.at[slot], barrier
        )
        plgpu.copy_gmem_to_smem(router_gmem.at[k_slice, :], router_smem.at[slot], barrier)

      def multiply(accumulators, slot, my_rows):
        plgpu.wgmma(accumulators[0], x_smem.at[slot, my_rows], router_smem.at[slot])

      def finish(tile, accumulators, consumer, first_row):
        logits = accumulators[0][...]
        shape = logits.shape
        ids = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        ids = ids.astype(jnp.float32)
        lowest = jnp.full_like(logits, -jnp.inf)
        if padded != experts:
          logits = jnp.where(ids < experts, logits, lowest)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        values: list[Any] = []
        for k in range(top_k):
          value = jnp.max(logits, axis=1)
          is_largest = logits == lax.broadcast_in_dim(value, shape, (0,))
          # The smallest id among equals, as `lax.top_k` chooses.
          chosen = -jnp.max(jnp.where(is_largest, -ids, jnp.full_like(ids, -_LARGE)), axis=1)
          logits = jnp.where(ids == lax.broadcast_in_dim(chosen, shape, (0,)), lowest, logits)
          expert_smem[consumer, k] = chosen.astype(jnp.int32)
          values.append(value)
        powers = [jnp.exp(value - values[0]) for value in values]
        total = powers[0]
        for power in powers[1:]:
          total = total + power
        for k, power in enumerate(powers):
          weight_smem[consumer, k] = power / total
        plgpu.commit_smem()
        rows = pl.ds(tile * _ROWS + first_row, consumer_rows)
        plgpu.copy_smem_to_gmem(weight_smem.at[consumer], weight_gmem.at[:, rows])
        plgpu.copy_smem_to_gmem(expert_smem.at[consumer], expert_gmem.at[:, rows])

      run_tiles(
        tiling,
        Work(
          num_tiles=jnp.int32(tokens // _ROWS),
          locate=lambda tile: tile,
          steps=lambda _: jnp.int32(steps),
          load=load,
          multiply=multiply,
          accumulators=[(consumer_rows, padded)],
          finish=finish,
        ),
        full,
        empty,
        num_sms,
      )

    full, empty = barriers(tiling, 2)
    pl.run_scoped(
      with_memory,
      smem((tiling.stages, _ROWS, tiling.depth), x_TD.dtype),
      smem((tiling.stages, tiling.depth, padded), x_TD.dtype),
      plgpu.SMEM((CONSUMERS, top_k, consumer_rows), jnp.float32),
      plgpu.SMEM((CONSUMERS, top_k, consumer_rows), jnp.int32),
      full,
      empty,
      collective_axes="wg",
    )

  out_type = [
    jax.ShapeDtypeStruct((top_k, tokens), jnp.float32),
    jax.ShapeDtypeStruct((top_k, tokens), jnp.int32),
  ]
  weight_KT, expert_KT = launch(body, out_type, tiling, num_sms)(x_TD, router_DE)
  return expert_KT.T, weight_KT.T
