"""The Hopper kernels on a GPU, against float32, on fresh random inputs and poisoned memory."""

import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.kernels.bench import Shape, check_layer, relative_error
from scmoe.kernels.block_sparse import dsd, moe_topology, sdd, to_dense
from scmoe.kernels.grouped_matmul import (
  activation_names,
  equal_ffn,
  get_activation,
  grouped_ffn,
  grouped_ffn_reference,
  grouped_matmul,
  grouped_matmul_reference,
  resolve_backend,
)
from scmoe.kernels.grouped_matmul.layout import make_layout
from scmoe.kernels.moe_layer import moe_layer, route_top_k

pytestmark = pytest.mark.gpu
kernels = functools.partial(grouped_matmul, backend="mosaic_gpu")


@pytest.fixture(autouse=True)
def _hopper():
  """The kernels' matrix instructions exist on Hopper only; elsewhere products run on XLA.

  By the device, not by what the backend makes of it: a Hopper that is not recognised fails.
  """
  if getattr(jax.devices()[0], "compute_capability", None) != "9.0":
    pytest.skip("needs a GPU of compute capability 9.0")
  assert resolve_backend("auto", jnp.bfloat16, 64) == "mosaic_gpu"


@pytest.fixture
def normal():
  """Fresh random arrays: the seed is the clock, printed for repetition."""
  seed = time.time_ns() % 2**31
  print("seed", seed)
  keys = iter(jax.random.split(jax.random.key(seed), 100))
  return lambda *shape, dtype=jnp.bfloat16: jax.random.normal(next(keys), shape, dtype)


def poison(gigabytes=2):
  """Leaves NaN in the memory that the next outputs will be given."""
  jax.block_until_ready([jnp.full((2**28,), jnp.nan, jnp.float32) for _ in range(gigabytes)])


def wide(*arrays):
  return [None if a is None else a.astype(jnp.float32) for a in arrays]


SIZES = {
  "balanced": [128, 128, 128, 128],
  "unaligned": [1, 200, 127, 184],
  "skewed": [0, 500, 5, 7],
  "tail": [100, 0, 129, 3],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("k", "n"), [(256, 512), (64, 192), (320, 128)])
def test_values_and_gradients(normal, sizes, dtype, k, n):
  lhs, rhs, bias = normal(512, k, dtype=dtype), normal(4, k, n, dtype=dtype), normal(4, n)
  dout, sizes = normal(512, n, dtype=dtype), jnp.asarray(sizes)
  poison()

  @jax.jit
  def run(lhs, rhs, bias):
    out, vjp = jax.vjp(lambda *a: kernels(a[0], a[1], sizes, bias_GN=a[2]), lhs, rhs, bias)
    return out, *vjp(dout)

  want, vjp = jax.vjp(
    lambda *a: grouped_matmul_reference(a[0], a[1], sizes, a[2]), *wide(lhs, rhs, bias)
  )
  got = run(lhs, rhs, bias)
  for a, b in zip(got, (want, *vjp(dout.astype(jnp.float32)))):
    assert relative_error(a, b) < 5e-3
  assert not np.any(got[0][int(sizes.sum()) :])
  assert not np.any(np.asarray(got[2], np.float32)[np.asarray(sizes) == 0])
  exact = kernels(lhs, rhs, sizes, preferred_element_type=jnp.float32)
  assert relative_error(exact, grouped_matmul_reference(*wide(lhs, rhs), sizes)) < 1e-5


def test_all_empty_patterns_of_eight_groups(normal):
  lhs, rhs, dout = normal(520, 128), normal(8, 128, 192), normal(520, 192)
  full = np.asarray([65, 1, 128, 3, 130, 64, 127, 2])

  @jax.jit
  def run(sizes):
    out, vjp = jax.vjp(lambda *a: kernels(*a, sizes), lhs, rhs)
    return out, *vjp(dout)

  @jax.jit
  def reference(sizes):
    out, vjp = jax.vjp(lambda *a: grouped_matmul_reference(*a, sizes), *wide(lhs, rhs))
    return out, *vjp(dout.astype(jnp.float32))

  poison()
  for pattern in itertools.product([0, 1], repeat=8):
    sizes = jnp.asarray(full * np.asarray(pattern), jnp.int32)
    got, want = run(sizes), reference(sizes)
    for a, b in zip(got, want):
      if any(pattern):
        assert relative_error(a, b) < 5e-3, pattern
      else:
        assert not np.any(a), pattern
    assert not np.any(np.asarray(got[2], np.float32)[np.asarray(pattern) == 0]), pattern


@pytest.mark.parametrize("activation", activation_names())
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_ffn(normal, activation, with_bias):
  m, d, f, groups = 700, 256, 192, 4
  gated = get_activation(activation).gated
  bias = lambda *shape: normal(*shape) if with_bias else None
  arguments = {
    "rows_MD": normal(m, d),
    "gate_GDF": normal(groups, d, f) / 16 if gated else None,
    "up_GDF": normal(groups, d, f) / 16,
    "down_GFD": normal(groups, f, d) / 16,
    "row_weight_M": normal(m).astype(jnp.float32),
    "gate_bias_GF": bias(groups, f) if gated else None,
    "up_bias_GF": bias(groups, f),
    "down_bias_GD": bias(groups, d),
  }
  sizes, dout = jnp.asarray([13, 0, 400, 280]), normal(m, d)
  poison()
  options = {"group_sizes_G": sizes, "activation": activation}
  run = lambda a: grouped_ffn(**a, **options, backend="mosaic_gpu")
  got, vjp = jax.vjp(jax.jit(run), arguments)
  want, plain_vjp = jax.vjp(
    lambda a: grouped_ffn_reference(**a, **options),
    jax.tree.map(lambda a: a.astype(jnp.float32), arguments),
  )
  assert relative_error(got, want) < 1e-2
  gradients, plain = vjp(dout)[0], plain_vjp(dout.astype(jnp.float32))[0]
  for name, gradient in gradients.items():
    if gradient is not None:
      # ReLU's derivative jumps, so a pre-activation rounded across zero changes a whole entry.
      limit = 3e-2 if "relu" in activation or "reglu" in activation else 1e-2
      assert relative_error(gradient, plain[name]) < limit, name


@pytest.mark.parametrize("rows", [(2, 1024), (3, 2, 384)], ids=["groups", "senders"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_groups_of_one_size(normal, activation, rows):
  """Against float32, all gradients: the first layer's epilogue, rows in their senders' order."""
  x, dy = normal(*rows, 512), normal(*rows, 512)
  weights = [normal(2, 512, 1536) * jnp.bfloat16(0.05) for _ in range(2)]
  weights.append(normal(2, 1536, 512) * jnp.bfloat16(0.03))
  if activation == "gelu":
    weights[0] = None
  biases = normal(2, 1536), normal(2, 512)

  def run(backend, x, dy, weights, biases):
    ffn = lambda x, weights, biases: equal_ffn(
      x,
      *weights,
      activation=activation,
      up_bias_GF=biases[0],
      down_bias_GD=biases[1],
      backend=backend,
    )
    y, vjp = jax.vjp(ffn, x, weights, biases)
    return y, ffn(x, weights, biases), vjp(dy)

  poison()
  got = jax.jit(functools.partial(run, "mosaic_gpu"))(x, dy, weights, biases)
  floats = jax.tree.map(lambda a: a.astype(jnp.float32), (x, dy, weights, biases))
  want = jax.jit(functools.partial(run, "xla"))(*floats)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert relative_error(a, b) < 1e-2


@pytest.mark.parametrize(
  "shape",
  [Shape(3000, 512, 256, 16, 4), Shape(2048, 320, 192, 8, 2), Shape(1024, 1024, 640, 128, 8)],
)
def test_layer_against_float32(shape):
  poison()
  errors = check_layer(shape, time.time_ns() % 2**31, "mosaic_gpu")
  assert max(errors.values()) < 1e-2, errors


def test_layer_is_deterministic_with_any_number_of_sms(normal):
  x, router = normal(1024, 256), normal(256, 16) / 16
  weights = normal(16, 256, 128) / 16, normal(16, 256, 128) / 16, normal(16, 128, 256) / 11

  def run(num_sms):
    layer = lambda *a: moe_layer(*a, top_k=4, backend="mosaic_gpu", num_sms=num_sms)
    y, vjp = jax.vjp(layer, x, router, *weights)
    return jax.block_until_ready((y, *vjp(x)))

  first = run(None)
  for num_sms in (None, 100, 7):
    poison()
    for a, b in zip(first, run(num_sms)):
      np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (40, 8), (128, 8), (192, 3)])
def test_router(normal, experts, top_k):
  x, router = normal(2048, 512), normal(512, experts)
  poison()
  expert, weight = route_top_k(x, router, top_k, backend="mosaic_gpu")
  logits = jnp.dot(x, router, preferred_element_type=jnp.float32)
  value, want = jax.lax.top_k(logits, top_k)
  # The two products sum in different orders, so near-ties may fall either way.
  assert np.mean(np.asarray(expert) == np.asarray(want)) > 0.999
  assert relative_error(weight, jax.nn.softmax(value, axis=1)) < 1e-3


def test_block_sparse(normal):
  layout = make_layout(jnp.asarray([100, 0, 300, 112]), 512, 128)
  topology = moe_topology(layout, 256)
  x, w1, w2 = normal(topology.rows, 192), normal(192, 4 * 256), normal(4 * 256, 128)
  used = (jnp.arange(topology.rows) < layout.num_tiles[0] * 128)[:, None]
  h = sdd(x, w1, topology, backend="mosaic_gpu")
  there = to_dense(type(h)(jnp.ones_like(h.data, jnp.float32), topology)) * used
  want = jnp.dot(*wide(x, w1), precision="highest") * there
  assert relative_error(to_dense(h), want) < 5e-3
  y = dsd(h, w2, backend="mosaic_gpu")
  assert relative_error(y, jnp.dot(want, *wide(w2), precision="highest")) < 1e-2
  g = dsd(h.T, y, backend="mosaic_gpu")
  exact = jnp.dot(to_dense(h).astype(jnp.float32).T, *wide(y), precision="highest")
  assert relative_error(g, exact) < 5e-3


def test_more_than_two_to_the_31_elements(normal):
  """Rows × width beyond int32, in both the gathered operand and the result."""
  m, k, n = 270_000, 8192, 8192
  assert m * k > 2**31
  lhs, rhs = normal(m, k), normal(3, k, n)
  sizes = jnp.asarray([100_001, 7, m - 100_008])
  poison()
  out = jax.jit(functools.partial(grouped_matmul, backend="mosaic_gpu"))(lhs, rhs, sizes)
  for rows, group in ((slice(0, 64), 0), (slice(100_001, 100_008), 1), (slice(m - 64, m), 2)):
    want = jnp.dot(*wide(lhs[rows], rhs[group]), precision="highest")
    assert relative_error(out[rows], want) < 5e-3
