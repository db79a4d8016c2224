"""`dispatch.further=retry`: a microbatch without further rounds, repeated where one was missing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_local_gradients import CONFIG, batch_of

from scmoe.build import Built, build, make_objective
from scmoe.config import RunConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.route import RouterConfig
from scmoe.parallel.mesh import MeshConfig
from scmoe.training.step import accumulate, accumulate_locally


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
def built(further: str, uniform: bool) -> Built:
  model = dataclasses.replace(
    CONFIG, style="llama", wiring="topk", num_layers=1, moe_every=1, num_kv_heads=0, head_dim=0
  )
  run = RunConfig(
    name="retry",
    model=model.resolve(),
    router=RouterConfig(uniform=uniform),
    dispatch=DispatchConfig(transport="dropless", slack=1.0, further=further),
    mesh=MeshConfig(expert=2),
  )
  return build(run, jax.devices()[:2])


def gradients(further: str, uniform: bool, local: bool):
  """Loss, gradients and sums of a microbatch, and the router state after it."""
  parts = built(further, uniform)
  draw = np.random.default_rng(0)
  params = jax.tree.map(lambda s: draw.normal(0, 0.3, s.shape).astype(s.dtype), parts.shapes)
  router = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), parts.router_shapes)
  add_up = functools.partial(accumulate, parts.objective)
  if local:
    specs = jax.tree.map(lambda s: s.sharding.spec, parts.shapes)
    options = {"mesh": parts.mesh, "specs": specs, "dtype": "float32"}
    add_up = functools.partial(accumulate_locally, parts.objective, **options)
  compiled = jax.jit(add_up)
  loss, grads, aux = compiled(params, router, batch_of(1, 4), jax.random.key(0))
  return loss, grads, aux, parts.objective.update_router(router, aux)


@pytest.mark.parametrize(("uniform", "local"), [(False, True), (True, False)])
def test_a_step_with_attempts_is_the_step_without(uniform, local):
  """Where rounds are missing, and where the attempt stands."""
  loss, grads, aux, router = gradients("retry", uniform, local)
  want_loss, want_grads, want_aux, want_router = gradients("layer", uniform, local)
  assert bool(router["skewed"]) == bool(want_router["skewed"]) == (not uniform)
  assert aux.router.dropped.sum() == 0
  for got, want in zip(
    jax.tree.leaves((loss, grads, aux)),
    jax.tree.leaves((want_loss, want_grads, want_aux)),
    strict=True,
  ):
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


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


@pytest.mark.parametrize(
  ("further", "platform", "retries"),
  [
    ("auto", "gpu", True),
    ("auto", "cpu", False),
    ("auto", "tpu", False),
    ("retry", "cpu", True),
    ("layer", "gpu", False),
  ],
)
def test_left_to_itself_a_gpu_tries_first(further, platform, retries):
  assert DispatchConfig(transport="dropless", further=further).retries(platform) == retries
  assert not DispatchConfig(transport="capacity", further=further).retries(platform)


def test_the_objective_takes_the_default(monkeypatch):
  parts = built("auto", True)
  skewed = {"skewed": jnp.array(0)}
  assert parts.objective.retry(skewed) is None
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert make_objective(parts.run, parts.mesh, parts.graph).retry(skewed) is not None
