"""A pool of pages holds what each row's own cache would hold, and rows do not see each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scmoe.layers.attention import Attention, AttentionConfig
from scmoe.layers.latent_attention import LatentAttention, LatentAttentionConfig
from scmoe.layers.pages import NO_PAGE, PageTable, PageTables, read, with_table, written

# Three rows of a pool of six pages of four tokens; the second one is idle, page 3 is nobody's.
TABLE = PageTable(
  jnp.array([[4, 0, NO_PAGE], [NO_PAGE] * 3, [5, 1, 2]], jnp.int32), jnp.array([5, -1, 9])
)


def test_pages_hold_what_rows_hold_and_drop_what_is_past_the_last_token():
  """New tokens at positions 4 and 5 of the first row, 9 of the last; the rest is padding."""
  rng = np.random.default_rng(0)
  pool = rng.normal(size=(6, 4, 2)).astype(np.float32)
  new = rng.normal(size=(3, 2, 2)).astype(np.float32)
  positions = jnp.array([[4, 5], [0, 1], [9, 10]])
  got = written(jnp.asarray(pool), jnp.asarray(new), positions, TABLE)
  want = pool.copy()
  want[0, 0], want[0, 1], want[2, 1] = new[0, 0], new[0, 1], new[2, 0]
  np.testing.assert_array_equal(got, want)
  rows = np.asarray(read(got, TABLE))
  np.testing.assert_array_equal(rows[0, :6], np.concatenate([want[4], want[0, :2]]))
  np.testing.assert_array_equal(rows[2, :10], np.concatenate([want[5], want[1], want[2, :2]]))
  assert not rows[0, 6:].any()
  assert not rows[1].any()
  assert not rows[2, 10:].any()


ATTENTIONS = {
  "grouped, window": lambda: Attention(
    AttentionConfig(16, 4, 2, 4, rope_theta=100.0, window=3), rngs=nnx.Rngs(0)
  ),
  "latent": lambda: LatentAttention(LatentAttentionConfig(16, 2, 4, 4, 4, 4), rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_what_an_earlier_request_left_reaches_no_row(name):
  """Two tokens in rows whose pages hold infinities; the same tokens in empty caches of rows."""
  attention = ATTENTIONS[name]()
  x_BSD = jnp.asarray(np.random.default_rng(1).normal(size=(2, 2, 16)), jnp.float32)
  positions = jnp.broadcast_to(jnp.arange(2), (2, 2))
  table = PageTable(jnp.array([[3, 1], [0, NO_PAGE]]), jnp.array([1, 1]))

  @jax.jit
  def both(x_BSD, rows, pool):
    projected = attention.project(x_BSD, positions)
    mix = lambda cache: attention.mix(projected, positions, None, cache)
    return mix(rows)[0], mix(with_table(pool, table))

  rows, pool = (attention.empty_cache(*size, jnp.float32) for size in ((2, 8), (5, 4)))
  want, (got, cache) = both(x_BSD, rows, jax.tree.map(lambda x: np.full(x.shape, np.inf), pool))
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  assert with_table(cache, None).table is None


@pytest.mark.parametrize("name", ATTENTIONS)
def test_groups_of_rows_in_one_pass_are_what_each_is_alone(name):
  """Two rows of one token and one of three, the last of which is padding."""
  attention, rng = ATTENTIONS[name](), np.random.default_rng(2)
  pool = attention.empty_cache(6, 4, jnp.float32)
  pool = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), pool)
  ones = PageTable(jnp.array([[3, 1], [0, NO_PAGE]]), jnp.array([5, 2]))
  prompt = PageTable(jnp.array([[5, 4]]), jnp.array([4]))
  positions = jnp.array([[5, 2, 3, 4, 5]])
  x_BSD = jnp.asarray(rng.normal(size=(1, 5, 16)), jnp.float32)

  @jax.jit
  def mixed(x_BSD, positions, caches):
    return attention.mix(attention.project(x_BSD, positions), positions, None, caches)

  got, cache = mixed(x_BSD, positions, with_table(pool, PageTables((ones, prompt), (1, 3))))
  rows, last = (x[:, :2].reshape(2, 1, *x.shape[2:]) for x in (x_BSD, positions))
  want_ones, pool = mixed(rows, last, with_table(pool, ones))
  want_prompt, pool = mixed(x_BSD[:, 2:], positions[:, 2:], with_table(pool, prompt))
  np.testing.assert_allclose(got[0, :2], want_ones[:, 0], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(got[0, 2:4], want_prompt[0, :2], rtol=1e-5, atol=1e-6)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, with_table(cache, None), with_table(pool, None))
