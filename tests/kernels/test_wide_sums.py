"""Gradients of tables, biases and coefficients: float32 sums whatever type a model computes in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.kernels.wide_sums import for_heads, looked_up, plus_bias, weighed
from scmoe.profiling.exchanges import collectives
from scmoe.run import build
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.training.step import make_train_step


def narrow_sums(jaxpr):
  """The sums of bfloat16 numbers in a program; not those of one number each."""
  sums = [eqn for eqn, _ in collectives(jaxpr.jaxpr, ("reduce_sum", "scatter-add"))]
  adds = lambda eqn: (
    str(eqn.primitive) != "reduce_sum" or (eqn.invars[0].aval.size > eqn.outvars[0].aval.size)
  )
  return [str(eqn) for eqn in filter(adds, sums) if eqn.outvars[0].aval.dtype == jnp.bfloat16]


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_and_gradients_are_those_of_a_sum(shape, dtype):
  rng = np.random.default_rng(0)
  y = jnp.asarray(rng.normal(size=(7, 64, *shape)), dtype)
  bias = jnp.asarray(rng.normal(size=shape), jnp.float32)
  value, pull = jax.vjp(plus_bias, y, bias)
  np.testing.assert_array_equal(value, y + bias.astype(dtype))
  assert value.dtype == dtype
  bar = jnp.asarray(rng.normal(size=y.shape), dtype)
  y_bar, bias_bar = pull(bar)
  np.testing.assert_array_equal(y_bar, bar)
  assert bias_bar.dtype == jnp.float32
  np.testing.assert_allclose(
    bias_bar, np.asarray(bar, np.float64).sum((0, 1)), rtol=1e-5, atol=1e-5
  )


def test_every_bfloat16_number_is_widened_as_by_a_cast():
  """Infinities, subnormals and both zeros too; the signs of NaNs are not compared."""
  bar = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), jnp.bfloat16)
  (_, got) = jax.vjp(plus_bias, bar[None], jnp.zeros(2**16))[1](bar[None])
  want = np.asarray(bar).astype(np.float32)
  np.testing.assert_array_equal(got, want)
  finite = np.isfinite(want) & (want != 0)
  np.testing.assert_array_equal(np.signbit(got)[finite], np.signbit(want)[finite])


def test_xla_cannot_leave_out_the_rounding_before_a_bias_s_sum():
  """A cast to float32 of a number just rounded would be dropped, and two kernels be needed."""
  y, bias = jnp.zeros((4, 8), jnp.bfloat16), jnp.zeros(8)
  pull = jax.vjp(plus_bias, y, bias)[1]
  names = [str(eqn.primitive) for eqn in jax.make_jaxpr(pull)(y).eqns]
  assert "bitcast_convert_type" in names
  casts = [
    eqn for eqn in jax.make_jaxpr(pull)(y).eqns if str(eqn.primitive) == "convert_element_type"
  ]
  assert not [eqn for eqn in casts if eqn.invars[0].aval.dtype == jnp.bfloat16]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_coefficient_s_gradient_is_the_sum_over_its_row(dtype):
  rng = np.random.default_rng(0)
  coefficient = jnp.asarray(rng.random((4, 6, 1)), jnp.float32)
  y, bar = (jnp.asarray(rng.normal(size=(4, 6, 512)), dtype) for _ in range(2))
  value, pull = jax.vjp(weighed, coefficient, y)
  np.testing.assert_array_equal(value, coefficient.astype(dtype) * y)
  got, y_bar = pull(bar)
  want = (np.asarray(bar, np.float64) * np.asarray(y, np.float64)).sum(-1, keepdims=True)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
  np.testing.assert_array_equal(y_bar, coefficient.astype(dtype) * bar)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_that_heads_share_gets_the_sum_of_their_gradients(dtype):
  """A bfloat16 sum over 300 heads with gradients of 1 would stop at 256."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(2, 3, 4)), dtype)
  value, pull = jax.vjp(lambda x: for_heads(x, 300), x)
  np.testing.assert_array_equal(value, np.broadcast_to(np.asarray(x)[:, :, None], (2, 3, 300, 4)))
  (got,) = pull(jnp.ones_like(value))
  assert got.dtype == dtype
  np.testing.assert_array_equal(got, np.full((2, 3, 4), 300))
  bar = jnp.asarray(rng.normal(size=value.shape), dtype)
  (got,) = pull(bar)
  want = np.asarray(bar, np.float64).sum(2)
  np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2 ** (-8), atol=1e-4)


def test_without_a_bias_nothing_is_added():
  y = jnp.ones((2, 3))
  assert plus_bias(y, None) is y


def test_a_frequent_token_s_gradient_keeps_growing():
  """512 gradients of 1 for one row: a bfloat16 sum would stop at 256."""
  table = jnp.zeros((4, 2), jnp.bfloat16)
  index = jnp.ones((512,), jnp.int32)
  bars = jax.grad(lambda x: looked_up(x, index).astype(jnp.float32).sum())(table)
  np.testing.assert_array_equal(bars, [[0, 0], [512, 512], [0, 0], [0, 0]])


STEPS = [
  ("gpt2_moe_medium", {}),
  ("gpt2_moe_medium", {"model.wiring": "dgmoe", "model.mix": "cg2"}),
  ("quickstart", {"model.zero_experts": "2"}),
  ("olmoe", {}),
  ("longcat_flash_small", {}),
  ("cifar10_vit", {}),
  ("cifar10_swin", {}),
]


@pytest.mark.parametrize(("config", "fields"), STEPS)
def test_a_training_step_in_bfloat16_adds_up_nothing_in_it(config, fields):
  """On a CPU XLA adds bfloat16 numbers in float32, so the program says more than its results."""
  run = load_config(find_config(config), "smoke")
  for field in ({"model.dtype": "bfloat16"} | fields).items():
    run = with_field(run, *field)
  built = build.build(run.resolve(num_devices=1, vocab_size=256), jax.devices()[:1])
  state = built.abstract_state()
  step = make_train_step(built.objective, built.optimizer, state)
  assert not narrow_sums(step.trace(state, built.batch_shapes).jaxpr)
