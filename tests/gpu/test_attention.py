"""cuDNN's attention, with and without documents, against float32 scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.layers import dot_product

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fused():
  """By the device: one that is not recognised fails."""
  capability = float(jax.devices()[0].compute_capability)
  if capability < 8:
    pytest.skip("cuDNN's fused attention needs compute capability 8.0")


def oracle(q, k, v, segments, window):
  """Scores in float32, every head by itself."""
  q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
  scores = jnp.einsum("bshn,bthn->bhst", q, k, precision="highest") / np.sqrt(q.shape[-1])
  s, t = jnp.meshgrid(jnp.arange(q.shape[1]), jnp.arange(q.shape[1]), indexing="ij")
  seen = (t <= s) & ((t > s - window) if window else True)
  seen = jnp.broadcast_to(seen, scores.shape)
  if segments is not None:
    seen &= segments[:, None, :, None] == segments[:, None, None, :]
  scores = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
  return jnp.einsum("bhst,bthm->bshm", scores, v, precision="highest")


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
  ("heads", "kv_heads", "width", "value", "window"),
  [(4, 4, 64, 64, 0), (8, 2, 128, 128, 0), (4, 4, 128, 128, 100), (4, 4, 128, 64, 0)],
  ids=["heads of 64", "shared keys", "window", "narrow values"],
)
def test_attention_and_its_gradients(documents, heads, kv_heads, width, value, window):
  keys = jax.random.split(jax.random.key(0), 4)
  batch, length = 2, 512
  normal = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
  q = normal(keys[0], batch, length, heads, width)
  k = normal(keys[1], batch, length, kv_heads, width)
  v = normal(keys[2], batch, length, kv_heads, value)
  dy = normal(keys[3], batch, length, heads, value)
  ends = jnp.asarray([[7, 200, 201], [0, 300, 511]])
  segments = (jnp.arange(length)[None, :, None] >= ends[:, None]).sum(-1) if documents else None
  fused = dot_product._implementation(q, masked=documents, window=window) == "cudnn"
  assert fused == (not (documents and window))

  def both(function):
    y, vjp = jax.vjp(function, q, k, v)
    return y, *vjp(dy.astype(y.dtype))

  got = jax.jit(lambda: both(lambda *a: dot_product.attend(*a, segments, window=window)))()
  want = jax.jit(lambda: both(lambda *a: oracle(*a, segments, window)))()
  for a, b in zip(got, want):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    assert np.linalg.norm(a - b) < 1.5e-2 * np.linalg.norm(b)
