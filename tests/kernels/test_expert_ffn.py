"""The experts' network: every layout of rows and every implementation against one dense oracle."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import by_day_and_night, night

from scmoe.base.errors import ConfigError
from scmoe.kernels.block_sparse import block_sparse_ffn
from scmoe.kernels.grouped_matmul import (
  FFNConfig,
  FFNWeights,
  activation_names,
  arrived_layout,
  choices_layout,
  expert_ffn,
  expert_ffn_reference,
  get_activation,
  padded_layout,
  sorted_layout,
)
from scmoe.kernels.grouped_matmul.activations import kernel_form
from scmoe.kernels.top_k import gate_top_k
from scmoe.kernels.top_k.api import split_terms

T, K, D, F, G = 40, 2, 16, 24, 5


def normal(seed, *shape, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def weights_of(activation, dtype=jnp.float32):
  gated = get_activation(activation).gated
  wide = lambda seed, *shape: normal(seed, *shape, dtype=dtype)
  return FFNWeights(
    up_GDF=wide(0, G, D, F),
    down_GFD=wide(1, G, F, D),
    gate_GDF=wide(2, G, D, F) if gated else None,
    up_bias_GF=wide(3, G, F),
    down_bias_GD=wide(4, G, D),
    gate_bias_GF=wide(5, G, F) if gated else None,
  )


def choices():
  """Distinct experts in a row; G is no expert."""
  rng = np.random.default_rng(6)
  return jnp.asarray(np.stack([rng.permutation(G + 1)[:K] for _ in range(T)]), jnp.int32)


def arrived():
  """Rows in any order, some of no expert."""
  group = np.asarray(choices()[:, 0])
  position = [(group[:t] == group[t]).sum() for t in range(T)]
  sizes = [(group == g).sum() for g in range(G)]
  return arrived_layout(*(jnp.asarray(a, jnp.int32) for a in (group, position, sizes)))


LAYOUTS = {
  "choices": (lambda: choices_layout(choices(), normal(7, T, K), G), (T, D)),
  "arrived": (arrived, (T, D)),
  "sorted": (lambda: sorted_layout(jnp.asarray([3, 0, 20, 9, 1]), T), (T, D)),
  "padded": (lambda: padded_layout(3, G, 6), (3, G, 6, D)),
  "padded, one rank": (lambda: padded_layout(1, G, 6), (1, G, 6, D)),
}


def run(ffn, name, activation="swiglu"):
  """Value, and the gradients of rows, weights and combine weights."""
  make, shape = LAYOUTS[name]
  layout, x, c = make(), normal(8, *shape), normal(9, *shape)

  def loss(x, weights, weight_MK):
    y = ffn(x, weights, dataclasses.replace(layout, weight_MK=weight_MK))
    return (y * c).sum(), y

  both = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
  arguments = (x, weights_of(activation), layout.weight_MK)
  if layout.weight_MK is None:
    both = jax.jit(jax.value_and_grad(lambda x, w: loss(x, w, None), (0, 1), has_aux=True))
    arguments = arguments[:2]
  (_, y), gradients = both(*arguments)
  return y, gradients, jax.jit(lambda x, weights: ffn(x, weights, layout))(x, arguments[1])


def implementation(word, activation="swiglu"):
  if word == "block_sparse":
    return lambda *a: block_sparse_ffn(*a, FFNConfig(activation=activation))
  return lambda *a: expert_ffn(*a, FFNConfig(activation=activation, impl=word))


def assert_same(got, want):
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
  jax.tree.map(close, got, want)


# By day each layout on its own choice, and each implementation.
EACH = [("auto", name) for name in LAYOUTS]
EACH += [("grouped", "padded"), ("batched", "padded"), ("block_sparse", "choices")]
EACH += [("batched", "choices")]  # which it refuses
WORDS = ("auto", "grouped", "batched", "block_sparse")


@pytest.mark.parametrize(
  ("word", "name"),
  [c if c in EACH else night(*c) for c in itertools.product(WORDS, LAYOUTS)],
)
def test_every_layout_and_implementation_is_the_dense_oracle(word, name):
  if word == "batched" and "padded" not in name:
    with pytest.raises(ValueError, match=r"impl='batched' needs padded experts"):
      run(implementation(word), name)
    return
  want = run(lambda *a: expert_ffn_reference(*a, "swiglu"), name)
  assert_same(run(implementation(word), name), want)


@pytest.mark.parametrize(
  ("activation", "name"), by_day_and_night(activation_names(), ["choices", "padded"])
)
def test_every_activation(activation, name):
  want = run(lambda *a: expert_ffn_reference(*a, activation), name, activation)
  assert_same(run(implementation("auto", activation), name, activation), want)


def kept(name, dtype=jnp.bfloat16):
  """Shapes that a backward pass keeps, the weights' own left out."""
  make, shape = LAYOUTS[name]
  layout, weights = make(), weights_of("swiglu", dtype)
  x = normal(8, *shape, dtype=dtype)
  pull = jax.eval_shape(
    lambda x, w: jax.vjp(lambda *a: expert_ffn(*a, layout), x, w)[1], x, weights
  )
  own = {a.shape for a in jax.tree.leaves(weights)}
  return [a.shape for a in jax.tree.leaves(pull) if a.dtype == dtype and a.shape not in own]


@pytest.mark.parametrize("make", [lambda unit: unit, kernel_form], ids=["plain", "kernel"])
def test_the_clamp_of_gpt_oss_has_slope_one_at_its_bounds(make):
  """torch.clamp, which transformers calls, has slope 1 there; jax.numpy.minimum has 1/2."""
  bounds, beyond = jnp.array([-7.0, 7.0]), jnp.array([-7.25, 7.25])
  form = make(get_activation("clamped_swiglu"))
  of_up = lambda up: form.of((jnp.ones_like(up), up)).sum()
  of_gate = lambda gate: form.of((gate, jnp.zeros_like(gate))).sum()
  _, gradients = form.pullback((jnp.ones(2), bounds))
  value = form.value(jnp.ones(2))
  np.testing.assert_array_equal(gradients(jnp.ones(2))[1], value)
  np.testing.assert_allclose(jax.grad(of_up)(bounds), value, rtol=1e-6)
  np.testing.assert_array_equal(jax.grad(of_up)(beyond), 0)
  # At a gate of 7 the slope is that of h · sigmoid(1.702 h).
  smooth = jax.grad(lambda h: h * jax.nn.sigmoid(1.702 * h))(7.0)
  np.testing.assert_allclose(form.value_and_derivative(bounds)[1][1], smooth, rtol=1e-6)
  np.testing.assert_allclose(jax.grad(of_gate)(bounds)[1], smooth, rtol=1e-6)
  assert jax.grad(of_gate)(beyond)[1] == form.value_and_derivative(beyond)[1][1] == 0


def test_the_backward_keeps_rows_and_pre_activations_only():
  for name, (make, shape) in LAYOUTS.items():
    rows = int(np.prod(shape[:-1]))
    tall = [s for s in kept(name) if len(s) == 2]
    assert [s for s in tall if s[1] == D] == [(rows, D)], name
    assert len([s for s in tall if s[1] == F]) == 2, name
    assert len(tall) == 3, (name, make)


def test_choices_of_no_expert_add_nothing():
  x, weights = normal(0, T, D), weights_of("swiglu")
  expert = jnp.tile(jnp.asarray([[1, G]]), (T, 1))
  half = jnp.full((T, 2), 0.5)
  got = expert_ffn(x, weights, choices_layout(expert, half, G))
  want = expert_ffn(x, weights, choices_layout(expert[:, :1], half[:, :1], G))
  np.testing.assert_array_equal(got, want)


NO_ROWS = {
  "padded": (lambda: padded_layout(2, G, 0), (2, G, 0, D)),
  "padded, no rank": (lambda: padded_layout(0, G, 4), (0, G, 4, D)),
  "choices": (lambda: choices_layout(jnp.zeros((0, K), jnp.int32), jnp.zeros((0, K)), G), (0, D)),
  "sorted": (lambda: sorted_layout(jnp.zeros(G, jnp.int32), 0), (0, D)),
}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("impl", ["auto", "grouped", "batched"])
@pytest.mark.parametrize("name", NO_ROWS)
def test_no_rows(name, impl, fp8):
  (make, shape), weights = NO_ROWS[name], weights_of("gelu")
  layout, rows = make(), jnp.zeros(shape)
  config = FFNConfig(activation="gelu", impl=impl, fp8=fp8)
  if impl == "batched" and layout.padded is None:
    with pytest.raises(ValueError, match="needs padded experts"):
      expert_ffn(rows, weights, layout, config)
    return
  total = lambda *given: expert_ffn(*given, layout, config).sum()
  bars = jax.grad(total, (0, 1))(rows, weights)
  assert jax.tree.map(jnp.shape, bars) == jax.tree.map(jnp.shape, (rows, weights))
  assert not any(bar.any() for bar in jax.tree.leaves(bars))
  assert expert_ffn(rows, weights, layout, config).shape == shape
  assert expert_ffn_reference(rows, weights, layout, "gelu").shape == shape


def test_the_result_may_have_another_width():
  weights = dataclasses.replace(
    weights_of("swiglu"), down_GFD=normal(1, G, F, 7), down_bias_GD=None
  )
  y = expert_ffn(normal(0, 3, G, 6, D), weights, padded_layout(3, G, 6))
  want = expert_ffn_reference(normal(0, 3, G, 6, D), weights, padded_layout(3, G, 6), "swiglu")
  assert y.shape == (3, G, 6, 7)
  np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def test_errors_name_both_sides():
  weights, layout = weights_of("swiglu"), padded_layout(1, G, 6)
  x = normal(0, 1, G, 6, D)
  cases = [
    (
      x,
      dataclasses.replace(weights, gate_GDF=None),
      layout,
      r"'swiglu' is gated but .* lacks gate",
    ),
    (x[..., :3], weights, layout, r"rows have width 3, but up takes 16"),
    (x, weights, padded_layout(1, 4, 6), r"the layout has 4 experts, the weights 5"),
    (x[:, :, :2], weights, layout, r"there are 10 rows, the layout describes 30"),
    (x, dataclasses.replace(weights, up_bias_GF=normal(0, G, 3)), layout, r"up_bias_GF has shape"),
  ]
  for rows, w, given, message in cases:
    with pytest.raises(ValueError, match=message):
      expert_ffn(rows, w, given)
  plain = dataclasses.replace(weights_of("gelu"), gate_bias_GF=normal(0, G, F))
  with pytest.raises(ValueError, match="'gelu' is not gated: pass gate_bias_GF=None"):
    expert_ffn(x, plain, layout, FFNConfig("gelu"))
  with pytest.raises(ConfigError, match=r"FFNConfig\.impl='sparse' is unknown; .*batched"):
    expert_ffn(x, weights, layout, FFNConfig(impl="sparse"))


# -- the gate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp32", [True, False])
def test_the_gate_takes_the_largest_logits(fp32):
  x, gate = normal(0, T, D), normal(1, D, 6)
  logits, expert, _ = gate_top_k(x, gate, 3, fp32=fp32)
  np.testing.assert_allclose(logits, x @ gate, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(expert, jax.lax.top_k(logits, 3)[1])
  with pytest.raises(ValueError, match="k=7 must be at least 1 and at most 6"):
    gate_top_k(x, gate, 7)


def test_three_terms_are_a_float32_number():
  w = normal(0, 64, 8) * jnp.exp(normal(1, 64, 8))
  terms = split_terms(w, 3, jnp.bfloat16).astype(jnp.float32)
  np.testing.assert_array_equal(terms[0] + (terms[1] + terms[2]), w)
