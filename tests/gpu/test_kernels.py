"""The Hopper kernels on a GPU, against float32, on fresh random inputs and poisoned memory."""

import dataclasses
import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.bench import tune
from scmoe.bench.layer import Shape, check_layer, relative_error
from scmoe.inference.token import TokenNorm, normalisation_of
from scmoe.kernels.block_sparse import dsd, moe_topology, sdd, to_dense
from scmoe.kernels.grouped_matmul import (
  FFNConfig,
  FFNWeights,
  activation_names,
  choices_layout,
  copy_to_tiles,
  expert_ffn,
  expert_ffn_reference,
  fp8,
  get_activation,
  grouped_matmul,
  grouped_matmul_reference,
  padded_layout,
  resolve_backend,
  tiles,
  tuned,
)
from scmoe.kernels.grouped_matmul.layout import make_layout
from scmoe.kernels.one_row import linear
from scmoe.kernels.one_row import norm as norm_kernels
from scmoe.kernels.one_row.attention import (
  PartialAttention,
  PartialProjections,
  attend_cache,
  attend_pages,
  attend_partial,
)
from scmoe.kernels.permute import take_rows
from scmoe.kernels.top_k import gate_product, gate_top_k, gate_under_norm
from scmoe.layers.norm import Norm

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


def check_ffn(x, dy, weights, layout, activation):
  """Value (alone and with its residuals) and all gradients of the kernels against float32.

  The gradient of a choice's weight is one dot product, of the choice's result and `dy`. If its
  terms cancel, its error is large beside it, but not beside other such products. So the error is
  compared with the mean size that it has over other `dy`, here `dy` with its columns moved.
  """

  def run(ffn, x, dy, weights, weight_MK):
    of = lambda *a: ffn(a[0], a[1], dataclasses.replace(layout, weight_MK=a[2]))
    y, vjp = jax.vjp(of, x, weights, weight_MK)
    return y, of(x, weights, weight_MK), vjp(dy)

  poison()
  config = FFNConfig(activation=activation, backend="mosaic_gpu")
  kernel = jax.jit(functools.partial(run, functools.partial(expert_ffn, config=config)))
  oracle = functools.partial(expert_ffn_reference, activation=activation)
  reference = jax.jit(functools.partial(run, oracle))
  given = x, dy, weights, layout.weight_MK
  got = kernel(*given)
  x, dy, *rest = jax.tree.map(lambda a: a.astype(jnp.float32), given)
  want = reference(x, dy, *rest)
  # ReLU's derivative jumps, so a pre-activation rounded across zero changes a whole entry.
  limit = 3e-2 if "relu" in activation or "reglu" in activation else 1e-2
  (*got, (*got_gradients, got_weight)), (*want, (*want_gradients, want_weight)) = got, want
  found, exact = jax.tree.leaves((got, got_gradients)), jax.tree.leaves((want, want_gradients))
  for a, b in zip(found, exact, strict=True):
    assert relative_error(a, b) < limit
  if want_weight is None:
    return
  others = [reference(x, jnp.roll(dy, n, -1), *rest)[2][2] for n in range(1, 9)]
  size = np.sqrt(np.mean([np.sum(np.square(other)) for other in others]))
  assert np.linalg.norm(got_weight - want_weight) < limit * size


def ffn_weights(normal, activation, width, hidden, groups, with_bias):
  gated = get_activation(activation).gated
  matrix = lambda *shape: normal(*shape) * jnp.bfloat16(shape[1] ** -0.5)
  bias = lambda *shape: normal(*shape) if with_bias else None
  return FFNWeights(
    up_GDF=matrix(groups, width, hidden),
    down_GFD=matrix(groups, hidden, width),
    gate_GDF=matrix(groups, width, hidden) if gated else None,
    up_bias_GF=bias(groups, hidden),
    down_bias_GD=bias(groups, width),
    gate_bias_GF=bias(groups, hidden) if gated else None,
  )


def check_tokens_in_place(normal, activation, width, hidden, with_bias):
  """Choices of expert 4 are not made; expert 1 has no token."""
  rng = np.random.default_rng(0)
  expert = np.stack([rng.permutation([0, 2, 3, 4])[:2] for _ in range(700)])
  layout = choices_layout(
    jnp.asarray(expert, jnp.int32), jnp.abs(normal(700, 2)).astype(jnp.float32), 4
  )
  weights = ffn_weights(normal, activation, width, hidden, 4, with_bias)
  check_ffn(normal(700, width), normal(700, width), weights, layout, activation)


@pytest.mark.parametrize("activation", activation_names())
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_tokens_in_place(normal, activation, with_bias):
  check_tokens_in_place(normal, activation, 256, 192, with_bias)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_wide_experts_whose_rows_are_spread_before(normal, activation):
  check_tokens_in_place(normal, activation, 320, 2048, True)


@pytest.mark.parametrize(
  ("rows", "width", "copies", "groups"),
  [(700, 64, 2, 4), (1, 2880, 32, 40), (8192, 7168, 8, 32), (5000, 192, 1, 3), (33, 8192, 1, 1)],
)
def test_rows_at_all_their_places(normal, rows, width, copies, groups):
  x = normal(rows, width)
  rng = np.random.default_rng(time.time_ns() % 2**31)
  expert_TK = jnp.asarray(rng.integers(0, groups + 1, (rows, copies)), jnp.int32)
  tiles = choices_layout(expert_TK, jnp.ones(expert_TK.shape), groups).sorted(128)
  layout = tiles.groups
  assert copy_to_tiles.takes(x, copies)
  poison()
  places = layout.group_sizes_G, layout.tile_starts_G, layout.tiles_G
  got = copy_to_tiles.copy_rows_to_tiles(
    x, tiles.permutation.row_TK, *places, num_rows=layout.num_rows, tile=128
  )
  used = int(layout.num_tiles[0]) * 128  # behind them nothing is written
  want = take_rows(x, tiles.permutation.token_R)[:used]
  np.testing.assert_array_equal(got[:used].astype(jnp.float32), want.astype(jnp.float32))


@pytest.mark.parametrize("shape", [(256, 512), (2048, 1024), (1024, 4096), (4096, 768)])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_one_row(normal, activation, shape):
  """The products that decoding asks for, and those of their gradients; one choice is not made."""
  weights = ffn_weights(normal, activation, *shape, 8, activation == "gelu")
  expert, weight = jnp.asarray([[3, 8, 0, 7]], jnp.int32), jnp.asarray([[0.4, 0.3, 0.2, 0.1]])
  layout = choices_layout(expert, weight, 8)
  check_ffn(normal(1, shape[0]), normal(1, shape[0]), weights, layout, activation)


@pytest.mark.parametrize("padded", [(1, 2, 1024), (3, 2, 384)], ids=["one rank", "ranks"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_padded_experts(normal, activation, padded):
  """The first layer's epilogue, rows in the order of their source ranks."""
  weights = ffn_weights(normal, activation, 512, 1536, 2, True)
  x, dy = normal(*padded, 512), normal(*padded, 512)
  check_ffn(x, dy, weights, padded_layout(*padded), activation)


@pytest.mark.parametrize(
  "shape",
  [Shape(3000, 512, 256, 16, 4), Shape(2048, 320, 192, 8, 2), Shape(1024, 1024, 640, 128, 8)],
)
def test_layer_against_float32(shape):
  poison()
  errors = check_layer(shape, time.time_ns() % 2**31, "mosaic_gpu")
  assert max(errors.values()) < 1e-2, errors


def test_layer_is_deterministic_with_any_number_of_sms(normal):
  x, gate = normal(1024, 256), normal(256, 16) / 16
  weights = ffn_weights(normal, "swiglu", 256, 128, 16, False)

  def run(num_sms):
    def layer(x, gate, weights):
      logits, expert, _ = gate_top_k(x, gate, 4, backend="mosaic_gpu")
      weight = jax.nn.softmax(jnp.take_along_axis(logits, expert, 1))
      config = FFNConfig(backend="mosaic_gpu", num_sms=num_sms)
      return expert_ffn(x, weights, choices_layout(expert, weight, 16), config)

    y, vjp = jax.vjp(layer, x, gate, weights)
    return jax.block_until_ready((y, *vjp(x)))

  first = run(0)
  for num_sms in (0, 100, 7):
    poison()
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(run(num_sms)), strict=True):
      np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("fp32", [True, False], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (40, 8), (128, 8), (192, 3)])
def test_gate(normal, experts, top_k, fp32):
  x, gate = normal(2048, 512), normal(512, experts).astype(jnp.float32) * 1.01
  dlogits = normal(2048, experts).astype(jnp.float32)
  poison()
  kernel = lambda x, gate: gate_top_k(x, gate, top_k, fp32=fp32, backend="mosaic_gpu")[:2]
  (logits, expert), vjp = jax.vjp(kernel, x, gate)
  want, plain_vjp = jax.vjp(lambda x, gate: gate_product(x, gate, fp32=fp32), x, gate)
  assert relative_error(logits, want) < 1e-6
  # The two products sum in different orders, so near-ties may fall either way.
  assert np.mean(np.asarray(expert) == np.asarray(jax.lax.top_k(want, top_k)[1])) > 0.999
  nothing = np.zeros(expert.shape, jax.dtypes.float0)
  for got, plain in zip(vjp((dlogits, nothing)), plain_vjp(dlogits)):
    assert relative_error(got, plain) < 3e-3


@pytest.mark.parametrize(
  ("tokens", "experts", "top_k"),
  [(1, 64, 8), (37, 1000, 3), (5000, 8, 1), (4096, 384, 8), (32_768, 64, 8), (100_000, 1, 1)],
)
def test_places_of_choices(tokens, experts, top_k):
  seed = time.time_ns() % 2**31
  print("seed", seed)
  expert_TK = np.random.default_rng(seed).integers(-1, experts + 1, (tokens, top_k))
  poison()
  layout = choices_layout(jnp.asarray(expert_TK, jnp.int32), jnp.ones(expert_TK.shape), experts)
  tiles = layout.sorted(128)
  # First choices, then second ones, stand in the order of their expert.
  flat = expert_TK.T.reshape(-1)
  made = (flat >= 0) & (flat < experts)
  order = np.argsort(np.where(made, flat, experts), kind="stable")[: made.sum()]
  count_E = np.bincount(flat[made], minlength=experts)
  position = np.zeros_like(flat)
  position[order] = np.concatenate([np.arange(count) for count in count_E])
  np.testing.assert_array_equal(layout.sizes_G, count_E)
  np.testing.assert_array_equal(layout.position_MK.T.reshape(-1)[made], position[made])
  groups = make_layout(jnp.asarray(count_E), flat.size, 128)
  for got, want in zip(jax.tree.leaves(tiles.groups), jax.tree.leaves(groups), strict=True):
    np.testing.assert_array_equal(got, want)
  starts = 128 * np.asarray(groups.tile_starts_G)
  row = np.full_like(flat, groups.num_rows)
  row[made] = starts[flat[made]] + position[made]
  np.testing.assert_array_equal(tiles.permutation.row_TK.T.reshape(-1), row)
  token_R, copy_R = np.full((2, groups.num_rows), -1)
  choice, token = np.divmod(np.flatnonzero(made), tokens)
  token_R[row[made]], copy_R[row[made]] = token, token * top_k + choice
  np.testing.assert_array_equal(tiles.permutation.copy_R, copy_R)
  np.testing.assert_array_equal(tiles.permutation.token_R, token_R)


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


TUNED = ("up", "rows", "down_backward", "weights", "weights_pair", "dx")


# Each kind of product is a test of its own, so that processes beside each other share them.
@pytest.mark.parametrize("kind", TUNED)
def test_what_tune_measures_is_right_and_kept(kind, tmp_path, monkeypatch, capsys):
  """Every tiling that it offers computes what the rule's does; wrong ones would be left out."""
  shape = Shape(1024, 512, 256, 8, 2)
  asked = tune.asked_by_layer(shape)
  assert {key[0] for key in asked} == set(TUNED)
  keys = [key for key in asked if key[0] == kind]
  monkeypatch.setattr(tune, "asked_by_layer", lambda _: keys)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  monkeypatch.setattr(tuned, "_tables", {})
  tune.main(["--shape", "1024,512,256,8,2", "--rounds", "3"])
  said = capsys.readouterr().out
  assert "left out" not in said
  assert set(tuned.stored(jax.devices()[0].device_kind)) == set(keys)
  for key in keys:
    run, arguments = tune.product(key, shape, 1)
    _, width, n, gathered = key
    want, *others = (
      jax.jit(lambda *a, r=run, t=tiling: r(*a, t))(*arguments)
      for tiling in tiles.variants(kind, width, n, gathered=gathered)[:12]
    )
    for got in others:
      assert tune.error_of(got, want, arguments) < 5e-3


@pytest.mark.parametrize(
  "shape", [(2048, (2048,) * 3), (4096, (4096, 1024, 1024)), (1024, (4096,))]
)
def test_products_of_a_token(normal, shape):
  width, widths = shape
  x, matrices = normal(1, 1, width), [normal(width, n) / width**0.5 for n in widths]
  found = jax.jit(linear.products)(x, matrices)
  assert found is not None
  for y, w in zip(found, matrices):
    want = np.asarray(x[0], np.float64) @ np.asarray(w, np.float64)
    error = np.linalg.norm(np.asarray(y[0], np.float64) - want) / np.linalg.norm(want)
    assert error < 3e-3, error


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("width", [768, 2048, 8192])
def test_products_of_a_token_under_a_norm(normal, width, kind):
  """The same as of the row that the norm's own kernel makes, whose sums other warps add up."""
  own = normalisation_of(Norm(width, kind, 1e-5))
  x, matrices = normal(1, width) * 3 + 1, [normal(width, n) / width**0.5 for n in (2048, 1024)]
  got = jax.jit(linear.sums)(norm_kernels.Normalised(x, own), matrices)
  want = jax.jit(linear.sums)(norm_kernels.normalised(x, own), matrices)
  assert got.shape == want.shape
  assert relative_error(got.sum(0), want.sum(0)) < 2e-3


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("width", [768, 2048, 8192])
def test_norm_of_a_token(normal, width, kind):
  """The kernel beside what XLA makes of two rows."""
  own = TokenNorm(width, kind, 1e-5)
  x = normal(1, 1, width) * 3 + 1
  one, two = own(x), own(jnp.repeat(x, 2, 0))
  assert norm_kernels.takes(x)
  error = jnp.abs(one.astype(jnp.float32) - two[:1].astype(jnp.float32))
  assert float(error.max()) <= 2**-6  # a bit of bfloat16 between 2 and 4
  assert float((error > 0).mean()) < 0.05


@pytest.mark.parametrize(("width", "experts"), [(2048, 64), (4096, 8), (1024, 128)])
def test_gate_of_a_token_under_its_norm(normal, width, experts):
  own = TokenNorm(width, "rmsnorm", 1e-5)
  x, gate = normal(1, 1, width) * 3, normal(width, experts).astype(jnp.float32)
  norm = normalisation_of(own)
  found = jax.jit(lambda x: gate_under_norm(norm_kernels.Normalised(x, norm), gate))(x)
  np.testing.assert_array_equal(found.x_TD.astype(jnp.float32), own(x)[0].astype(jnp.float32))
  with jax.default_matmul_precision("highest"):
    want = found.x_TD.astype(jnp.float32) @ gate
  got = found.top_k(4)
  assert relative_error(got.logits_TE, want) < 1e-5
  np.testing.assert_array_equal(got.expert_TK, jax.lax.top_k(want, 4)[1])


def test_gate_of_a_token(normal):
  x, gate = normal(2, 2048), normal(2048, 64).astype(jnp.float32)
  one, two = gate_product(x[:1], gate, fp32=True), gate_product(x, gate, fp32=True)
  np.testing.assert_allclose(one, two[:1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_experts", "k"), [(8, 1), (64, 8), (120, 120), (256, 70)])
def test_experts_of_a_token(normal, num_experts, k):
  """Chosen by the kernel as by XLA, of equal logits too."""
  x, gate = normal(1, 2048), normal(2048, num_experts).astype(jnp.float32)
  gate = gate.at[:, num_experts // 2 :].set(gate[:, : num_experts // 2])
  logits, expert, share = jax.jit(functools.partial(gate_top_k, k=k, fp32=True))(x, gate)
  np.testing.assert_allclose(logits, gate_product(x, gate, fp32=True), rtol=1e-4, atol=1e-3)
  np.testing.assert_array_equal(expert[0], jax.lax.top_k(logits, k)[1][0])
  softmax = jax.nn.softmax(logits)
  # Below the smallest normal number the kernel has 0.
  np.testing.assert_allclose(share, np.take_along_axis(softmax, expert, 1), rtol=1e-5, atol=2e-38)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(
  ("heads", "kv_heads", "width", "length", "window"),
  [(16, 16, 128, 256, 0), (16, 16, 64, 256, 0), (32, 8, 128, 8320, 0), (16, 4, 64, 4096, 1000)],
)
def test_attention_of_a_token(normal, heads, kv_heads, width, length, window, rows):
  q = 3 * normal(rows, heads, width)
  k, v = (normal(rows, length, kv_heads, width) for _ in range(2))
  run = jax.jit(functools.partial(attend_cache, scale=width**-0.5, window=window))
  positions = (0, 63, 64, length // 2 + 5, length - 1)
  for first in positions if rows == 1 else (0,):
    here = [first] if rows == 1 else [positions[r % len(positions)] for r in range(rows)]
    got = run(q, k, v, jnp.asarray(here, jnp.int32))
    for r, position in enumerate(here):
      seen = slice(max(0, position - window + 1) if window else 0, position + 1)
      wide = lambda x, r=r, seen=seen: jnp.repeat(
        x[r, seen].astype(jnp.float32), heads // kv_heads, 1
      )
      with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("hn,thn->ht", q[r].astype(jnp.float32), wide(k)) * width**-0.5
        want = jnp.einsum("ht,thn->hn", jax.nn.softmax(scores), wide(v))
      assert relative_error(got[r], want) < 3e-3, (r, position)


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize(
  ("heads", "kv_heads", "width", "page", "window"),
  [(16, 16, 128, 64, 0), (32, 8, 128, 128, 0), (16, 4, 64, 64, 100)],
)
def test_attention_over_pages(normal, heads, kv_heads, width, page, window, rows):
  """Equal to rows' own caches of the same positions; what no row sees is infinite."""
  length = 768
  lasts = [(-1, 389, 63, 64, 0, length - 1)[(r + rows) % 6] for r in range(rows)]
  count = length // page
  table = jax.random.permutation(jax.random.key(0), rows * count).reshape(rows, count)
  last, q = jnp.asarray(lasts, jnp.int32), 3 * normal(rows, heads, width)
  k, v = (normal(rows, length, kv_heads, width) for _ in range(2))
  seen = (jnp.arange(length) <= last[:, None])[..., None, None]
  pools = []
  for cache in (k, v):
    own = jnp.where(seen, cache, jnp.inf).reshape(rows * count, page, kv_heads, width)
    pools.append(jnp.zeros_like(own).at[table.reshape(-1)].set(own))
  options = {"scale": width**-0.5, "window": window}
  run, plain = (jax.jit(functools.partial(f, **options)) for f in (attend_pages, attend_cache))
  table = jnp.where(jnp.arange(count) * page <= last[:, None], table, 2**30)
  got, want = run(q, *pools, table, last), plain(q, k, v, jnp.maximum(last, 0))
  assert relative_error(got, jnp.where(last[:, None, None] >= 0, want, 0)) < 1e-3
  assert not jnp.isnan(got).any()


@pytest.mark.parametrize(
  ("heads", "kv_heads", "width", "length", "window"),
  [(16, 16, 128, 256, 0), (32, 8, 128, 8320, 0), (16, 4, 64, 4096, 1000), (16, 2, 64, 192, 1)],
)
def test_attention_that_finishes_a_token(normal, heads, kv_heads, width, length, window):
  """The result is that of finished queries over a cache that has the token."""
  angle = 0.1 * jnp.arange(width // 2)
  sums = normal(4, (heads + 2 * kv_heads) * width).astype(jnp.float32)
  turn = jnp.stack([jnp.sin(angle), jnp.cos(angle)])
  own = PartialProjections(sums, turn, heads, kv_heads, jnp.dtype(jnp.bfloat16))
  q, own_k, own_v = jax.jit(PartialProjections.finished)(own)
  options = {"scale": width**-0.5, "window": window}
  run = jax.jit(functools.partial(attend_partial, **options))
  plain = jax.jit(functools.partial(attend_cache, **options))
  product = jax.jit(
    lambda y, w: linear.products(y if isinstance(y, PartialAttention) else y.reshape(1, -1), w)
  )
  matrix = normal(heads * width, 2048) * jnp.bfloat16((heads * width) ** -0.5)
  for position in (0, 63, 64, length // 2 + 5, length - 1):
    k, v = (normal(length, kv_heads, width).at[position:].set(1e4) for _ in range(2))
    wanted = k.at[position].set(own_k), v.at[position].set(own_v)
    here = jnp.asarray([position], jnp.int32)
    got, *cache = run(own, k, v, here)
    y = got.joined() if isinstance(got, PartialAttention) else got
    want = plain(q[None], wanted[0][None], wanted[1][None], here)[0]
    assert relative_error(y, want) < 3e-3, position
    found = product(got, [matrix])[0].reshape(-1)
    want = y.reshape(-1).astype(jnp.float32) @ matrix.astype(jnp.float32)
    assert relative_error(found, want) < 5e-3, position
    for one, other in zip(cache, wanted):
      # Of the token a bit, where one of the two multiplies and adds at once.
      np.testing.assert_allclose(
        *(x[position].astype(jnp.float32) for x in (one, other)), rtol=2**-7
      )
      np.testing.assert_array_equal(*(x.at[position].set(0) for x in (one, other)))


def network64(x, weights, group, row_weight, activation, *, rounded):
  """The network in float64.

  Args:
    rounded: it rounds where the fp8 kernels do: x, the matrices and the activations to fp8, the
      activations to bfloat16 before.
  """
  wide = lambda a: np.asarray(a.astype(jnp.float32), np.float64)
  if rounded:
    weights, x = fp8.rounded_weights(weights), fp8.rounded_rows(x)
  x, y = wide(x), np.zeros((len(x), weights.down_GFD.shape[-1]))
  for expert in range(weights.up_GDF.shape[0]):
    rows, choice = np.nonzero(np.asarray(group) == expert)
    first = zip(weights.up_weights, weights.up_biases)
    h = [jnp.asarray(x[rows] @ wide(w)[expert] + wide(b)[expert], jnp.float32) for w, b in first]
    a = get_activation(activation).of(h)
    a = fp8.rounded_rows(a.astype(jnp.bfloat16)) if rounded else a
    out = wide(a) @ wide(weights.down_GFD)[expert] + wide(weights.down_bias_GD)[expert]
    np.add.at(y, rows, out * wide(row_weight)[rows, choice][:, None])
  return y


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("rows", [77, 1000])
def test_fp8_operands(normal, rows, activation):
  """Rounded operands take the kernel as far from the exact network as they take float64 products.

  The kernel's sums keep some 14 bits. So of 128 activations one or two, which lie halfway between
  two fp8 numbers, become the other one: that moves the result by 0.01 to 0.018, and no farther from
  the exact network (simulated: at most 0.7 %). An error of another kind adds to that distance: one
  of 0.013 adds 2 %. A kernel that does not round is much nearer. Biases, padding, choices of no
  expert.
  """
  experts, width, hidden, k = 8, 512, 384, 2
  gated = get_activation(activation).gated
  small = lambda *shape: 0.05 * normal(*shape)
  gate = (small(experts, width, hidden), small(experts, hidden)) if gated else (None, None)
  up, down = small(experts, width, hidden), small(experts, hidden, width)
  weights = FFNWeights(up, down, gate[0], small(experts, hidden), small(experts, width), gate[1])
  scores = normal(rows, experts + 1, dtype=jnp.float32)
  group = jax.lax.top_k(scores, k)[1].astype(jnp.int32)  # the last is no expert
  row_weight = jax.nn.softmax(normal(rows, k, dtype=jnp.float32))
  layout = choices_layout(group, row_weight, experts)
  x = normal(rows, width)
  config = FFNConfig(activation, backend="mosaic_gpu", fp8=True)
  got = jax.jit(lambda x, w: expert_ffn(x, w, layout, config))(x, weights)
  given = x, weights, group, row_weight, activation
  exact, rounded = (network64(*given, rounded=rounded) for rounded in (False, True))
  error, least = relative_error(got, exact), relative_error(rounded, exact)
  print("error", error, "with rounded operands at least", least)
  assert 0.98 * least < error < 1.02 * least
