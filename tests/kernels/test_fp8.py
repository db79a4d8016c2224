"""fp8 operands: what is rounded, that no more is, and the network of rounded operands."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from covering import by_day_and_night

from scmoe.base.compat import gpu_interpret_params, jax_version
from scmoe.base.errors import ConfigError
from scmoe.kernels.grouped_matmul import (
  FFNConfig,
  FFNOptions,
  FFNWeights,
  choices_layout,
  expert_ffn,
  padded_layout,
  xla,
)
from scmoe.kernels.grouped_matmul.activations import activate, get_activation
from scmoe.kernels.grouped_matmul.fp8 import (
  E4M3,
  quantised_matrices,
  quantised_rows,
  rounded_matrices,
  rounded_rows,
)
from scmoe.kernels.grouped_matmul.layout import make_layout
from scmoe.kernels.grouped_matmul.pipeline import Tiling
from scmoe.kernels.grouped_matmul.rows_product import rows_product
from scmoe.kernels.launch import interpreted
from scmoe.models.config import ModelConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig

T, D, F, G, K = 9, 256, 192, 3, 2
needs_new_simulation = pytest.mark.skipif(
  jax_version() < (0, 11), reason="GPU interpret mode of jax 0.10 lacks the rules"
)


def normal(seed, *shape, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def of_blocks(x, *axes):
  """By NumPy, in float64: each block of 128 along these axes over a power of two, in e4m3."""
  x = np.asarray(x, np.float64)
  found = np.zeros_like(x)
  counts = [-(-x.shape[axis] // 128) for axis in axes]
  for places in np.ndindex(*x.shape[: min(axes)], *counts):
    where = [slice(None)] * x.ndim
    where[: min(axes)] = list(places[: min(axes)])
    for axis, place in zip(axes, places[min(axes) :]):
      where[axis] = slice(128 * place, 128 * place + 128)
    block = x[tuple(where)]
    largest = np.abs(block).max()
    scale = 2.0 ** np.ceil(np.log2(largest / 448)) if largest else 1.0
    found[tuple(where)] = (block / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
  return found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [128, 200, 64])
def test_rounding_is_numpys(width, dtype):
  spread = 2.0 ** np.random.default_rng(1).integers(-20, 20, (5, width))
  x = normal(2, 5, width, dtype=dtype) * jnp.asarray(spread, dtype)
  np.testing.assert_array_equal(np.asarray(rounded_rows(x), np.float64), of_blocks(x, 1))
  w = normal(3, 2, width, 130, dtype=dtype)
  np.testing.assert_array_equal(np.asarray(rounded_matrices(w), np.float64), of_blocks(w, 1, 2))


def test_every_element_is_a_bfloat16_number_and_rounding_twice_is_rounding_once():
  """So a product of fp8 numbers is one of bfloat16 numbers, and weights may be rounded before."""
  for x, rounded in ((normal(4, 7, 300), rounded_rows), (normal(5, 3, 150, 260), rounded_matrices)):
    once = rounded(x * 1e-3)
    np.testing.assert_array_equal(once, once.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(once, rounded(once))
    error = jnp.abs(once - x * 1e-3) / jnp.abs(x * 1e-3)
    assert float(jnp.median(error)) < 2**-5
    assert float(jnp.abs(once - x * 1e-3).max()) > 0


def test_scales_are_powers_of_two_that_use_the_range():
  x = jnp.concatenate([jnp.full((1, 128), 448.0), jnp.full((1, 128), 449.0), jnp.zeros((1, 128))])
  q, scale = quantised_rows(x)
  assert q.dtype == E4M3
  assert scale[:, 0].tolist() == [1, 2, 1]
  assert q[:, 0].astype(jnp.float32).tolist() == [448, 224, 0]
  q, scale = quantised_matrices(normal(6, 2, 256, 384))
  assert (q.shape, scale.shape) == ((2, 256, 384), (2, 2, 3))
  assert (jnp.frexp(scale)[0] == 0.5).all()


@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 100), (3, 0)])
def test_no_rows_have_no_scales(shape):
  q, scale = quantised_rows(jnp.zeros(shape))
  assert (q.shape, scale.shape) == (shape, (*shape[:-1], -(-shape[-1] // 128)))
  assert rounded_rows(jnp.zeros(shape)).shape == shape


def test_what_is_not_finite_is_seen():
  for wrong in (jnp.nan, jnp.inf, -jnp.inf):
    x = normal(7, 2, 256).at[0, 3].set(wrong)
    y = rounded_rows(x)
    assert not jnp.isfinite(y[0, 3])
    assert jnp.isfinite(y[1]).all()


def weights_of(activation, dtype):
  gated = get_activation(activation).gated
  small = lambda seed, *shape: 0.1 * normal(seed, *shape, dtype=dtype)
  gate = small(10, G, D, F) if gated else None
  bias = lambda seed, n: small(seed, G, n)
  gate_bias = bias(13, F) if gated else None
  return FFNWeights(
    small(11, G, D, F), small(12, G, F, D), gate, bias(14, F), bias(15, D), gate_bias
  )


@functools.partial(jax.custom_vjp)
def _rounded_product(x, w):
  return jnp.asarray(of_rounded(x, w))


def of_rounded(x, w):
  rounded = rounded_rows(x), rounded_matrices(w[None])[0]
  return jnp.dot(*rounded, precision="highest")


_rounded_product.defvjp(
  lambda x, w: (of_rounded(x, w), (x, w)),
  lambda kept, d: (
    jnp.dot(d, kept[1].T, precision="highest"),
    jnp.dot(kept[0].T, d, precision="highest"),
  ),
)


def oracle(x, weights, group_MK, weight_MK, activation):
  """Every expert on every row, products of rounded operands with the gradient of the others."""
  kind, found = get_activation(activation), 0
  for g in range(G):
    pairs = zip(weights.up_weights, weights.up_biases)
    pre = tuple(_rounded_product(x, w[g]) + b[g] for w, b in pairs)
    y = _rounded_product(activate(kind, pre), weights.down_GFD[g]) + weights.down_bias_GD[g]
    found = found + y * jnp.where(group_MK == g, weight_MK, 0).sum(1)[:, None]
  return found


@pytest.mark.parametrize(
  ("activation", "impl"), by_day_and_night(["gelu", "swiglu"], ["grouped", "batched"])
)
def test_the_network_of_rounded_operands_and_its_gradient(impl, activation):
  x, weights, c = normal(8, T, D), weights_of(activation, jnp.float32), normal(9, T, D)
  rng = np.random.default_rng(3)
  group_MK = jnp.asarray(np.stack([rng.permutation(G)[:K] for _ in range(T)]), jnp.int32)
  weight_MK = jnp.abs(normal(16, T, K))
  config = FFNConfig(activation, impl=impl, fp8=True)

  def ours(x, weights):
    if impl == "grouped":
      return expert_ffn(x, weights, choices_layout(group_MK, weight_MK, G), config)
    padded = jnp.broadcast_to(x, (1, G, T, D))
    each_GTD = expert_ffn(padded, weights, padded_layout(1, G, T), config)[0]
    return sum(
      each_GTD[g] * jnp.where(group_MK == g, weight_MK, 0).sum(1)[:, None] for g in range(G)
    )

  theirs = lambda x, weights: oracle(x, weights, group_MK, weight_MK, activation)
  got, want = (
    jax.jit(jax.value_and_grad(lambda *a, f=f: ((y := f(*a)) * c).sum() + 0 * y.sum(), (0, 1)))(
      x, weights
    )
    for f in (ours, theirs)
  )
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
  jax.tree.map(close, got, want)
  layout = choices_layout(group_MK, weight_MK, G)
  unrounded = jax.jit(lambda x, weights: expert_ffn(x, weights, layout, FFNConfig(activation)))
  plain = unrounded(x, weights)
  gap = float(jnp.linalg.norm(jax.jit(theirs)(x, weights) - plain) / jnp.linalg.norm(plain))
  assert 0.01 < gap < 0.1  # rounding is seen, and is rounding


def test_the_option_reaches_the_experts():
  moe = ModelConfig(ffn=FFNOptions(fp8=True)).moe(RouterConfig(), DispatchConfig())
  assert moe.fp8
  with pytest.raises(ConfigError, match=r"model.ffn.fp8=True goes with grouped and batched"):
    ModelConfig(ffn=FFNOptions(fp8=True, impl="block_sparse")).resolve(vocab_size=64).check()


def relative_error(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@pytest.mark.parametrize(
  "tiling",
  [
    Tiling(rows=128, cols=128, depth=128, stages=3),
    Tiling(rows=128, cols=128, depth=128, stages=3, pair="rows", band=4),
  ],
  ids=["one", "pairs"],
)
@needs_new_simulation
def test_the_kernel_simulated(tiling, activation):
  """fp8 operands against the bfloat16 kernel's oracle of what they stand for."""
  kind = activation and get_activation(activation)
  parts = 1 + bool(kind and kind.gated)
  layout = make_layout(jnp.asarray([130, 0, 170]), 300, 128)  # an even number of tiles
  x = normal(20, layout.num_rows, 256, dtype=jnp.bfloat16)
  weights = tuple(normal(21 + p, 3, 256, 256, dtype=jnp.bfloat16) for p in range(parts))
  biases = tuple(normal(23 + p, 3, 256) for p in range(parts))
  (q, scale), matrices = quantised_rows(x), tuple(map(quantised_matrices, weights))
  run = functools.partial(
    rows_product,
    tiling=tiling,
    transpose_rhs=True,
    biases=biases,
    activation=kind,
    with_results=True,
    scales=(scale, tuple(s for _, s in matrices)),
    out_dtype=jnp.bfloat16,
  )
  with interpreted(gpu_interpret_params(detect_races=True)):
    got = run((q,), (tuple(w.swapaxes(1, 2) for w, _ in matrices),), layout)
  used = int(layout.num_tiles[0]) * layout.tile
  pre = [
    xla.grouped_rows(rounded_rows(x), rounded_matrices(w), layout, bias_GN=b.astype(jnp.bfloat16))
    for w, b in zip(weights, biases)
  ]
  want = [p.astype(jnp.bfloat16) for p in pre]
  if kind:
    want.append(activate(kind, tuple(want)))
  for ours, theirs in zip(got, want, strict=True):
    assert relative_error(ours[:used], theirs[:used]) < 3e-3


@pytest.mark.parametrize("hidden", [128, 192], ids=["fp8", "rounded"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@needs_new_simulation
def test_the_network_on_kernels_is_xlas_simulated(activation, hidden):
  """With widths that are multiples of the block by its kernel, with others by bfloat16's."""
  rng = np.random.default_rng(30)
  group_MK = jnp.asarray(np.stack([rng.permutation(G)[:K] for _ in range(40)]), jnp.int32)
  layout = choices_layout(group_MK, jnp.abs(normal(31, 40, K)), G)
  x = normal(32, 40, D, dtype=jnp.bfloat16)
  weights = weights_of(activation, jnp.bfloat16)
  cut = lambda w, axis: None if w is None else jax.lax.slice_in_dim(w, 0, hidden, axis=axis)
  weights = FFNWeights(
    cut(weights.up_GDF, 2),
    cut(weights.down_GFD, 1),
    cut(weights.gate_GDF, 2),
    cut(weights.up_bias_GF, 1),
    weights.down_bias_GD,
    cut(weights.gate_bias_GF, 1),
  )
  run = lambda backend: expert_ffn(
    x, weights, layout, FFNConfig(activation, impl="grouped", backend=backend, fp8=True)
  )
  # Not for races: of an odd number of tiles the last is stored by both of a pair, alike.
  with interpreted(gpu_interpret_params(detect_races=False), num_sms=4):
    got = run("mosaic_gpu")
  # A sum's order can round an activation to another fp8 number, 6 % away.
  assert relative_error(got, run("xla")) < 6e-3
