"""Runtime switching moves no parameter and changes no result; the tuner takes the fastest."""

import dataclasses

import jax
import numpy as np
import pytest

from scmoe import build
from scmoe.config import find_config, load_config
from scmoe.data import open_data
from scmoe.errors import ConfigError
from scmoe.moe.dispatch import DispatchConfig
from scmoe.parallel.mesh import MeshConfig, batch_sharding, shardings_of
from scmoe.training.step import make_train_step
from scmoe.training.variants import StepVariants, Tuner, Variant, parse_candidates


@pytest.fixture(scope="module")
def run():
  """Two experts on four devices: r is 0, 1 or 2."""
  run = load_config(find_config("quickstart"), "smoke")
  run = dataclasses.replace(
    run,
    mesh=MeshConfig(data=1, expert=4),
    model=dataclasses.replace(run.model, num_experts=2, num_layers=2),
    dispatch=DispatchConfig(capacity_factor=4.0),
  )
  return run.resolve(num_devices=4, vocab_size=build.vocab_size(run.data))


@pytest.fixture(scope="module")
def built(run):
  return build.build(run, jax.devices()[:4])


@pytest.fixture(scope="module")
def steps(built):
  abstract = built.abstract_state()
  return StepVariants(lambda v: make_train_step(built.variant(v), built.optimizer, abstract))


@pytest.fixture(scope="module")
def fresh(built):
  """() -> the state before step 0; kept on the host, since a step donates what it is given."""
  abstract = built.abstract_state()
  zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), abstract)
  params, _ = jax.device_get(jax.jit(built.init)(jax.random.key(0)))
  host = dataclasses.replace(zeros, params=params)
  return lambda: jax.device_put(host, shardings_of(abstract))


@pytest.fixture(scope="module")
def batch(run, built):
  data = open_data(run.data, batch_size=run.train.batch_size, seed=0)
  rows = next(iter(data.train()))
  sharding = batch_sharding(built.mesh, leading=1)
  return jax.tree.map(lambda a: jax.device_put(a[None], sharding), rows)


def test_results_do_not_depend_on_r_and_chunks(steps, fresh, batch):
  results = []
  for variant in (Variant(), Variant(adaptive_r=2, chunks=2)):
    state = fresh()
    for _ in range(2):
      state, scalars, _ = steps(state, batch, variant)
    results.append((float(scalars["loss"]), jax.tree.map(np.asarray, state.params)))
  for loss, params in results[1:]:
    assert loss == pytest.approx(results[0][0], rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), params, results[0][1])


def test_switching_in_one_run_compiles_each_variant_once(steps, fresh, batch):
  state = fresh()
  before = len(steps.variants)
  switched = [Variant(), Variant(top_k=2), Variant(), Variant(), Variant(top_k=2)]
  where = jax.tree.map(lambda a: a.sharding, state.params)
  for variant in switched:
    state, scalars, _ = steps(state, batch, variant)
    assert np.isfinite(float(scalars["loss"]))
  assert len(steps.variants) - before <= 2
  assert int(state.step) == 5
  assert jax.tree.map(lambda a: a.sharding, state.params) == where


class Clock:
  """Seconds that pass as the fake steps say."""

  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


def test_the_tuner_takes_the_fastest_and_stays_with_it():
  clock, calls = Clock(), []
  cost = {1: [9.0, 3.0, 3.1, 2.9], 2: [1.0, 2.0, 5.0, 2.1], 4: [2.0, 4.0, 4.0, 4.0]}

  def make(variant):
    def step(state, batch):
      calls.append(variant.chunks)
      clock.now += cost[variant.chunks].pop(0) if cost[variant.chunks] else 0
      return state + 1, {}, {}

    return step

  lines = []
  candidates = parse_candidates("chunks=1,2,4")
  tuner = Tuner(StepVariants(make), candidates, rounds=3, say=lines.append, clock=clock)
  state = 0
  for _ in range(14):
    state, _, _ = tuner(state, {})
  assert state == 14, "every measured step trains"
  assert calls[:3] == [1, 2, 4], "each compiles once before it is measured"
  assert calls[3:12] == [1, 2, 4] * 3
  assert calls[12:] == [2, 2]
  assert tuner.medians()[Variant(chunks=2)] == pytest.approx(2.1), "compile time does not count"
  assert "chunks=2 is the fastest" in lines[0]


def test_candidates():
  assert parse_candidates("") == (Variant(),)
  assert len(parse_candidates("adaptive_r=0,1 chunks=1,2,4")) == 6
  with pytest.raises(ConfigError, match="'top_k=1,2' is not of the form NAME=N,N with a NAME of"):
    parse_candidates("top_k=1,2")
  with pytest.raises(ConfigError, match=r"train.tune='chunks=a'"):
    parse_candidates("chunks=a")


def test_a_variant_that_does_not_fit_names_the_field(built):
  with pytest.raises(ConfigError, match=r"dispatch.adaptive_r=3 must be 0 or divide the 2 devices"):
    built.variant(Variant(adaptive_r=3))
  with pytest.raises(ConfigError, match=r"dispatch.chunks=0 is too small"):
    built.variant(Variant(chunks=0))
  with pytest.raises(ConfigError, match=r"model.top_k=3 needs 3 experts"):
    built.variant(Variant(top_k=3))
