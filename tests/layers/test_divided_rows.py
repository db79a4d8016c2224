"""Attention over rows that devices divide is attention over whole rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.layers import attention_blocks, divided_rows, dot_product
from scmoe.layers.attention_blocks import Block, Places, any_visible, joined, visible
from scmoe.layers.divided_rows import attend, check_heads
from scmoe.parallel.collectives import total
from scmoe.parallel.mesh import SEQUENCE_AXES, MeshConfig, make_mesh, manual
from scmoe.parallel.sequence import own_places, own_positions, own_tokens, parts, whole_rows

B, S, H, K, N, M = 2, 32, 4, 2, 8, 6
RNG = np.random.default_rng(0)
Q, KEYS, VALUES, WEIGHTS = (
  jnp.asarray(RNG.normal(size=(B, S, *shape)), jnp.float32)
  for shape in ((H, N), (K, N), (K, M), (H, M))
)
SINKS = jnp.asarray(RNG.normal(size=H), jnp.float32)
# Documents with borders inside of chunks and at them, and padding behind the last.
SEGMENTS = jnp.asarray([[1] * 8 + [2] * 11 + [3] * 13, [1] * 27 + [0] * 5], jnp.int32)


def on(way, devices, function, *args):
  mesh = MeshConfig(data=1, sequence=devices, sequence_attention=way)
  program = manual(function, make_mesh(mesh, jax.devices()[:devices]), P(), P())
  return jax.jit(program)(*args)


def value_and_gradients(way, devices, q, k, v, segments, window, sinks=None, full=None):
  """Σ weight · result, and the gradients for whole rows, each device giving its own tokens'."""

  def local(q, k, v, segments, sinks, full):
    own = lambda x: own_places(x, 1)

    def loss(q, k, v, sinks):
      found = attend(own(q), own(k), own(v), segments if segments is None else own(segments),
                     window=window, sinks_H=sinks, full=full)  # fmt: skip
      return total((found * own(WEIGHTS)).sum(), SEQUENCE_AXES, "statistics")

    value, gradients = jax.value_and_grad(loss, (0, 1, 2, 3))(q, k, v, sinks)
    return value, jax.tree.map(lambda x: jax.lax.psum(x, SEQUENCE_AXES), gradients)

  return on(way, devices, local, q, k, v, segments, sinks, full)


@functools.cache
def oracle(documents, window, sinks):
  with jax.enable_x64():
    given = [x.astype(jnp.float64) for x in (Q, KEYS, VALUES, SINKS)]
    segments = SEGMENTS if documents else jnp.ones_like(SEGMENTS)

    def loss(q, k, v, sink_H):
      k, v = (jnp.repeat(x, H // K, 2) for x in (k, v))
      place = jnp.arange(S)
      distance = place[:, None] - place[None]
      seen = (distance >= 0) & (distance < (window or S))
      seen = seen & (segments[:, :, None] == segments[:, None])
      scores = jnp.where(seen[:, None], jnp.einsum("bshn,bthn->bhst", q, k) * N**-0.5, -jnp.inf)
      share = jnp.exp(scores)
      all_of_it = share.sum(-1, keepdims=True)
      if sinks:
        all_of_it += jnp.exp(sink_H)[:, None, None]
      y = jnp.einsum("bhst,bthm->bshm", share / all_of_it, v)
      return (y * WEIGHTS.astype(jnp.float64)).sum()

    return jax.device_get(jax.value_and_grad(loss, (0, 1, 2, 3))(*given))


PLAIN = {"documents": False, "window": 0, "sinks": False, "full": None}
CASES = [
  PLAIN,
  PLAIN | {"documents": True},
  PLAIN | {"window": 5, "sinks": True},
  {"documents": True, "window": 11, "sinks": True, "full": False},
  PLAIN | {"window": 11, "full": True},
]


@pytest.mark.parametrize(
  ("way", "devices", "case"),
  [("heads", 4, case) for case in (CASES[0], *CASES[3:])]
  + [("ring", 4 if case in CASES[::3] else 2, case) for case in CASES],
)
def test_results_and_gradients_are_those_of_a_plain_softmax(way, devices, case):
  """With four devices and two heads of keys, `heads` repeats each of them."""
  segments, sinks = (SEGMENTS if case["documents"] else None), (SINKS if case["sinks"] else None)
  full = None if case["full"] is None else jnp.asarray(case["full"])
  got = value_and_gradients(way, devices, Q, KEYS, VALUES, segments, case["window"], sinks, full)
  value, gradients = oracle(case["documents"], 0 if case["full"] else case["window"], case["sinks"])
  for a, b in zip(jax.tree.leaves(got), (value, *gradients)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


def fake_attention(q, k, v, *, scale, causal):
  """Computes by XLA what cuDNN would: the result in the queries' type, float32 logarithms."""
  place = Places(jnp.arange(q.shape[1], dtype=jnp.int32))
  y, logs = Block(scale).attend(q, k, v, (place, place) if causal else None)
  return y.astype(q.dtype).astype(jnp.float32), logs


def fake_gradients(q, k, v, y, logs, dy, *, scale, causal):
  assert {x.dtype for x in (q, k, v, y, dy)} == {jnp.dtype(jnp.bfloat16)}
  assert logs.dtype == jnp.float32
  place = Places(jnp.arange(q.shape[1], dtype=jnp.int32))
  seen = (place, place) if causal else None
  found = Block(scale).gradients(q, k, v, seen, y_BSHM=y, logs_BHS=logs, dy_BSHM=dy)
  return tuple(x.astype(q.dtype) for x in found)


def test_the_ring_gives_a_fused_kernel_blocks_without_masks(monkeypatch):
  """A CPU has no cuDNN; functions with its arguments and types stand for it."""
  monkeypatch.setattr(attention_blocks, "cudnn_attention", fake_attention)
  monkeypatch.setattr(attention_blocks, "cudnn_attention_gradients", fake_gradients)
  monkeypatch.setattr(divided_rows, "runs_fused", lambda q, masked: q.dtype == jnp.bfloat16)
  values = jnp.pad(VALUES, [(0, 0)] * 3 + [(0, N - M)])  # cuDNN's values are as wide as its keys
  monkeypatch.setitem(globals(), "WEIGHTS", jnp.pad(WEIGHTS, [(0, 0)] * 3 + [(0, N - M)]))
  given = [x.astype(jnp.bfloat16) for x in (Q, KEYS, values)]
  got = value_and_gradients("ring", 2, *given, None, 0)
  want = value_and_gradients("ring", 2, *(x.astype(jnp.float32) for x in given), None, 0)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=3e-2, atol=2e-2 * np.abs(b).max())


def test_long_rows_are_computed_in_parts(monkeypatch):
  place = Places(jnp.arange(S, dtype=jnp.int32), SEGMENTS, jnp.int32(7))
  block, seen = Block(N**-0.5), (place, place)

  def both():
    y, logs = block.attend(Q, KEYS, VALUES, seen)
    over_all = {"y_BSHM": y, "logs_BHS": logs, "dy_BSHM": WEIGHTS}
    return y, logs, block.gradients(Q, KEYS, VALUES, seen, **over_all)

  want = jax.jit(both)()
  monkeypatch.setattr(attention_blocks, "SCORES", B * H * S * S // 8)
  traced = jax.jit(lambda: both()).trace()
  assert f"f32[{B},{K},{H // K},{S // 8},{S}]" in str(traced.jaxpr)
  assert f"f32[{B},{K},{H // K},{S},{S}]" not in str(traced.jaxpr)
  got = traced.lower().compile()()
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_blocks_are_joined_by_their_logarithms():
  @jax.jit
  def found():
    of = lambda at: Block(0.3).attend(Q, KEYS[:, at], VALUES[:, at], None)
    whole, left, right = of(slice(0, S)), of(slice(0, 20)), of(slice(20, S))
    nothing = jnp.zeros_like(left[0]), jnp.full_like(left[1], -jnp.inf)
    return (whole, joined(left, right)), (left, joined(left, nothing))

  for a, b in found():
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.parametrize(("window", "documents"), [(3, False), (0, True), (9, True)])
def test_a_block_is_skipped_only_if_nothing_of_it_is_seen(window, documents):
  segments = [SEGMENTS[:1, at : at + 4] if documents else None for at in range(0, S, 4)]
  within = jnp.int32(window) if window else None
  chunks = [
    Places(jnp.arange(at, at + 4), own, within) for at, own in zip(range(0, S, 4), segments)
  ]
  skipped = 0
  for late in range(1, 8):
    for early in range(late):
      some = bool(any_visible(chunks[late], chunks[early]))
      skipped += not some
      assert some or not visible(chunks[late], chunks[early]).any()
  assert skipped >= 5


def test_a_device_of_the_ring_has_an_early_and_a_late_chunk():
  row = jnp.arange(16)[None]

  def local(row):
    own = own_places(row, 1)
    return jax.lax.all_gather(jnp.stack([own[0], own_positions(8)]), SEQUENCE_AXES)

  ring, heads = (on(way, 2, local, row) for way in ("ring", "heads"))
  chunks = [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
  np.testing.assert_array_equal(ring, [[own, own] for own in chunks])
  np.testing.assert_array_equal(heads, np.arange(16).reshape(2, 1, 8).repeat(2, 1))


@pytest.mark.parametrize(("way", "length", "near"), [("ring", 20, 24), ("heads", 18, 20)])
def test_no_token_of_a_row_is_left_out(way, length, near):
  """A ring of four cuts a row into eight chunks; of 20 tokens they would hold 16."""
  with pytest.raises(
    ConfigError, match=rf"mesh.sequence=4 .*rows of {length} tokens; use .*{near}"
  ):
    on(way, 4, lambda row: own_places(row, 1), jnp.zeros((1, length)))


def test_rows_are_whole_where_a_program_says_so():
  def local(row):
    with whole_rows():
      assert parts() == 1
      assert own_tokens(row) is row
      return own_places(row, 1)

  assert on("ring", 2, local, jnp.zeros((1, 16))).shape == (1, 16)


def test_attention_to_later_tokens_needs_whole_rows():
  local = lambda q, k, v: attend(q, k, v, causal=False)
  with pytest.raises(ConfigError, match=r"causal=False .*mesh.sequence=1"):
    on("ring", 2, local, Q, KEYS, KEYS)
  np.testing.assert_array_equal(
    attend(Q, KEYS, KEYS, causal=False), dot_product.attend(Q, KEYS, KEYS, causal=False)
  )


@pytest.mark.parametrize(
  ("heads", "kv_heads", "devices", "refused"),
  [(8, 2, 4, None), (8, 8, 4, None), (8, 1, 2, None), (6, 6, 4, "num_heads=6"),
   (12, 3, 4, "num_kv_heads=3")],
)  # fmt: skip
def test_devices_divide_heads_or_say_why_not(heads, kv_heads, devices, refused):
  if refused is None:
    return check_heads(heads, kv_heads, devices)
  with pytest.raises(ConfigError, match=rf"{refused}.*mesh.sequence=4.*use .*=ring"):
    check_heads(heads, kv_heads, devices)
