"""`dispatch.further=retry`: a microbatch without further rounds, repeated where one was missing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_local_gradients import CONFIG, QUICK, batch_of

from scmoe.blocks.schedule import OverlapConfig
from scmoe.build import Built, build
from scmoe.config import RunConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.route import RouterConfig
from scmoe.parallel.mesh import MeshConfig
from scmoe.training.step import accumulate, init_state, make_train_step


class Attempts:
  """An objective that notes in its gradient whether it was tried in one round."""

  metrics = update_router = None  # not asked for here

  def loss(self, params, router, batch, rng, *, one_round=False):
    factor = 1.0 if one_round else 10.0
    return factor * params.sum(), {"rounds": batch.sum()}

  def retry(self, router, aux=None):
    if "skewed" not in router:
      return None
    return router["skewed"] > 0 if aux is None else aux["rounds"] > 1


@pytest.mark.parametrize(
  ("router", "rounds", "factors"),
  [
    ({}, [1, 1], [10, 10]),  # no attempts
    ({"skewed": jnp.array(0)}, [1, 1], [1, 1]),
    ({"skewed": jnp.array(0)}, [1, 4], [1, 10]),  # the second microbatch is repeated
    ({"skewed": jnp.array(1)}, [1, 4], [10, 10]),  # the last step needed more
  ],
)
def test_a_microbatch_is_repeated_where_something_is_missing(router, rounds, factors):
  batch = jnp.array(rounds, jnp.float32)[:, None]
  params = jnp.ones(3)
  loss, grads, aux = jax.jit(functools.partial(accumulate, Attempts()))(
    params, router, batch, jax.random.key(0)
  )
  np.testing.assert_array_equal(grads, np.full(3, np.mean(factors)))
  assert loss == 3 * np.mean(factors)
  assert aux["rounds"] == sum(rounds)


@functools.cache
def built(further: str, uniform: bool, gradients: str = "microbatch") -> Built:
  run = RunConfig(
    name="retry",
    model=dataclasses.replace(CONFIG, wiring="top2", num_layers=1, moe_every=1).resolve(),
    router=RouterConfig(uniform=uniform, bias="sign"),
    dispatch=DispatchConfig(transport="dropless", slack=1.0, further=further),
    mesh=MeshConfig(expert=2),
    overlap=OverlapConfig(gradients=gradients),
  )
  return build(run, jax.devices()[:2])


def stepped(further: str, uniform: bool, gradients: str = "microbatch"):
  parts = built(further, uniform, gradients)
  abstract = parts.abstract_state()
  state = init_state(parts.init, parts.optimizer, 0, abstract)
  shardings = jax.tree.map(lambda a: a.sharding, abstract)
  options = {"gradients": gradients, "compiler_options": QUICK}
  step = make_train_step(parts.objective, parts.optimizer, parts.mesh, shardings, **options)
  state, scalars, arrays = step(state, batch_of(1, 4))
  return jax.device_get((state, scalars, arrays))


@pytest.mark.parametrize(("uniform", "gradients"), [(False, "step"), (True, "microbatch")])
def test_a_step_with_attempts_is_the_step_without(uniform, gradients):
  """Where rounds are missing, and where the attempt stands."""
  got, got_scalars, arrays = stepped("retry", uniform, gradients)
  want, want_scalars, _ = stepped("layer", uniform, gradients)
  assert got.router["skewed"] == (not uniform) == (arrays["rounds"].max() > 1)
  np.testing.assert_array_equal(got.router["bias"], want.router["bias"])
  assert got_scalars["drop"] == 0
  np.testing.assert_allclose(got_scalars["loss"], want_scalars["loss"], rtol=1e-6)
  for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_an_attempt_has_no_loop_that_the_host_must_read():
  parts = built("retry", True)
  shapes = (parts.shapes, parts.router_shapes, jax.tree.map(lambda x: x[0], batch_of(1, 4)))

  def loops(one_round: bool) -> int:
    loss = lambda p, r, b: parts.objective.loss(p, r, b, None, one_round=one_round)[0]
    text = str(jax.make_jaxpr(jax.grad(loss))(*shapes))
    return text.count("while[")

  assert loops(one_round=True) == 0 < loops(one_round=False)


def test_one_device_needs_no_attempt():
  run = dataclasses.replace(built("retry", True).run, mesh=MeshConfig())
  parts = build(run, jax.devices()[:1])
  assert parts.objective.retry({"skewed": jnp.array(0)}) is None
