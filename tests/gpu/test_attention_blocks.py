"""cuDNN's attention over blocks of keys, joined: results and gradients of XLA in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.layers.attention_blocks import Block, Places, joined

pytestmark = pytest.mark.gpu

ROWS, CHUNK, HEADS, KV_HEADS, WIDTH = 2, 256, 8, 2, 64


def found(fused, dtype):
  """Late queries see their own chunk, causally, and an earlier one; gradients of both chunks."""
  keys = jax.random.split(jax.random.key(0), 6)
  draw = lambda key, heads: jax.random.normal(key, (ROWS, CHUNK, heads, WIDTH)).astype(jnp.bfloat16)
  q, dy = (draw(key, HEADS).astype(dtype) for key in keys[:2])
  own, before = (
    tuple(draw(key, KV_HEADS).astype(dtype) for key in keys[i : i + 2]) for i in (2, 4)
  )
  place = Places(jnp.arange(CHUNK, dtype=jnp.int32))

  @jax.jit
  def run(q, dy, own, before):
    block, seen = Block(WIDTH**-0.5, fused), (place, place)
    y, logs = joined(block.attend(q, *own, seen), block.attend(q, *before, None))
    over_all = {"y_BSHM": y.astype(q.dtype), "logs_BHS": logs, "dy_BSHM": dy}
    return (
      y,
      logs,
      *(
        block.gradients(q, *pair, places, **over_all)
        for pair, places in ((own, seen), (before, None))
      ),
    )

  with jax.default_matmul_precision("highest"):
    return jax.device_get(run(q, dy, own, before))


def test_blocks_of_cudnn_are_joined_as_those_of_xla():
  got, want = found(True, jnp.bfloat16), found(False, jnp.float32)
  assert got[1].dtype == np.float32
  np.testing.assert_allclose(got[1], want[1], atol=2e-3)  # the logarithms are not rounded to 8 bits
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    off = np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
    assert off < 1e-2
