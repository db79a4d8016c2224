"""Muon against the iteration written out for one matrix at a time, in float64."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import night
from drawn import drawn
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError, Preempted
from scmoe.models.matrices import MATRICES
from scmoe.parallel.mesh import MeshConfig, manual
from scmoe.run import build, summary
from scmoe.run.config_files import find_config, load_config
from scmoe.train import train
from scmoe.training import muon
from scmoe.training.optimizer import decay_mask
from scmoe.training.options import OptimizerAblation

DECAY, BETA, RMS = 0.1, 0.9, 0.3
SCALAR = ("embedding", "router_gate", "mix", "norm", "bias")


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
  """Programs run once or twice here."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def smoke(mesh=MeshConfig(), *, masters="cast", dtype="float32", config="quickstart", **training):
  run = load_config(find_config(config), "smoke")
  model = dataclasses.replace(run.model, dtype=dtype)
  optimizer = dataclasses.replace(
    run.optimizer, name="muon", muon_beta=BETA, muon_rms=RMS, warmup_steps=0,
    ablation=OptimizerAblation(masters), weight_decay=DECAY, schedule="constant",
  )  # fmt: skip
  options = {"sample_tokens": 0, "tensorboard": False, **training}
  own = dataclasses.replace(run.train, **options)
  return dataclasses.replace(run, model=model, optimizer=optimizer, train=own, mesh=mesh)


@functools.cache
def built_on(mesh, **options):
  run = smoke(mesh, **options).resolve(num_devices=mesh.size, vocab_size=257)
  return build.build(run, jax.devices()[: mesh.size])


def paths(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def newton_schulz(matrix):
  """Five steps of the quintic iteration on one matrix, float64 (K. Jordan's coefficients)."""
  a, b, c = 3.4445, -4.7750, 2.0315
  x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
  x = x / (np.sqrt((x**2).sum()) + 1e-8)
  for _ in range(5):
    s = x @ x.T
    x = a * x + (b * s + c * s @ s) @ x
  return x.T if matrix.shape[0] > matrix.shape[1] else x


def oracle(grads):
  """The update of one matrix after each of these gradients, before rate and decay: float64."""
  momentum, found = 0.0, []
  for step, g in enumerate(np.asarray(grads, np.float64), start=1):
    momentum = BETA * momentum + (1 - BETA) * g
    ahead = BETA * momentum / (1 - BETA ** (step + 1)) + (1 - BETA) * g / (1 - BETA**step)
    found.append(RMS * math.sqrt(max(g.shape)) * newton_schulz(ahead))
  return found


def as_matrices(name, array):
  """[number of matrices, rows, columns] of a stacked parameter."""
  last = name.split(".")[-1]
  if last in ("query", "key", "value", "kv_up"):
    return array.reshape(-1, array.shape[-3], array.shape[-2] * array.shape[-1])
  if last == "out":
    return array.reshape(-1, array.shape[-3] * array.shape[-2], array.shape[-1])
  return array.reshape(-1, *array.shape[-2:])


@pytest.mark.parametrize("small", [muon.SMALL, 0], ids=["batches", "one by one"])
def test_an_update_is_that_of_each_matrix_by_itself(small, monkeypatch):
  """Three steps of random gradients for a whole model, every layer's and expert's matrix alone."""
  monkeypatch.setattr(muon, "SMALL", small)
  built = built_on(MeshConfig(1, 1, 1))
  params, *grads = drawn(built.shapes), *(drawn(built.shapes, 1.0, seed) for seed in (1, 2, 3))
  tx, rate = built.optimizer.tx, float(built.optimizer.schedule(0))
  update = jax.jit(lambda g, s, step: tx.update(g, s, params, step=step, norm=jnp.float32(0.5)))
  state, found = tx.init(params), []
  for step, g in enumerate(grads):
    updates, state = update(g, state, step)
    found.append(paths(updates))
  given, mask, before = [paths(g) for g in grads], paths(decay_mask(params)), paths(params)
  matrices = {name for name in before if not any(word in name for word in SCALAR)}
  assert {name.split(".")[-1] for name in matrices} == set(MATRICES) - {
    "kv_up", "query_down", "kv_down", "gate"}  # fmt: skip
  for name in matrices:
    parts = [as_matrices(name, np.asarray(g[name])) for g in given]
    assert len(parts[0]) == (8 if "experts" in name else 2)
    for index in range(len(parts[0])):
      wanted = oracle([part[index] for part in parts])
      for step in range(3):
        got = as_matrices(name, np.asarray(found[step][name]))[index]
        own = as_matrices(name, np.asarray(before[name]))[index]
        np.testing.assert_allclose(got / -rate - DECAY * own, wanted[step], atol=2e-4, err_msg=name)
  for name in set(before) - matrices:  # Adam's first step is the sign
    sign = np.sign(given[0][name]) + DECAY * np.asarray(before[name]) * mask[name]
    np.testing.assert_allclose(np.asarray(found[0][name]) / -rate, sign, atol=1e-3, err_msg=name)


def test_a_convolution_is_one_matrix_from_all_that_it_sees():
  """A stem's kernel [3, 3, 4, 5] has 36 rows; experts of a user's own with that name are none."""
  tx = muon.muon_or(optax.scale(1.0), beta=BETA, rms=RMS)
  numbers = np.random.default_rng(0)
  shapes = {
    "embedding": {"convolutions": {0: {"kernel": (3, 3, 4, 5)}}},
    "experts": {"kernel": (2, 4, 8, 16), "convolutions": {0: {"kernel": (2, 4, 8, 16)}}},
  }
  draw = lambda: jax.tree.map(
    lambda shape: jnp.asarray(numbers.normal(size=shape), jnp.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )
  grads, state = [draw(), draw()], tx.init(draw())
  for g, wanted in zip(
    grads, oracle([g["embedding"]["convolutions"][0]["kernel"].reshape(36, 5) for g in grads])
  ):
    updates, state = tx.update(g, state)
    got = updates["embedding"]["convolutions"][0]["kernel"]
    np.testing.assert_allclose(got.reshape(36, 5), wanted, atol=2e-4)
    jax.tree.map(np.testing.assert_array_equal, updates["experts"], g["experts"])


@pytest.mark.parametrize("axes", [(2, 2, 2), night((1, 8, 1))], ids=str)
def test_several_devices_update_as_one(axes):
  """Experts spread, heads and widths split, one expert shared by two devices (four experts)."""
  alone, built = built_on(MeshConfig(1, 1, 1)), built_on(MeshConfig(*axes))
  if axes == (1, 8, 1):
    assert built.mesh.shape["shard"] == 2
  params, *grads = drawn(alone.shapes), *(drawn(alone.shapes, 1.0, seed) for seed in (1, 2))
  both = jax.tree.map(lambda *g: np.stack(g), *grads)

  def updates(tx, params, grads):

    def update(state, given):
      step, g = given
      found, state = tx.update(g, state, params, step=step, norm=jnp.float32(0.5))
      return state, found

    return jax.lax.scan(update, tx.init(params), (jnp.arange(2), grads))[1]

  one = jax.jit(functools.partial(updates, alone.optimizer.tx))(params, both)
  local = functools.partial(updates, built.optimizer.tx)
  stacked = jax.tree.map(lambda spec: P(None, *spec), built.specs)
  spread = manual(local, built.mesh, (built.specs, stacked), stacked)
  many = paths(jax.jit(spread)(params, both))
  for name, value in paths(one).items():
    np.testing.assert_allclose(many[name], value, atol=1e-6, err_msg=name)


def test_the_moments_lie_as_their_matrices_and_are_fewer():
  built = built_on(MeshConfig(2, 2, 2))
  own = {name: leaf.sharding for name, leaf in paths(built.shapes).items()}
  found = paths(built.abstract_state().opt_state)
  momenta = {name.partition(".mu.")[2]: leaf for name, leaf in found.items() if "matrix" in name}
  assert {name for name in momenta if name} >= {n for n in own if n.endswith(("experts.up", "out"))}
  for name, leaf in momenta.items():
    assert not name or leaf.sharding == own[name]
  adam = dataclasses.replace(built.run.optimizer, name="adamw")
  adam = build.build(dataclasses.replace(built.run, optimizer=adam))
  assert summary.state_bytes(built) < 0.85 * summary.state_bytes(adam)


@pytest.mark.nightly  # by day test_average.py resumes, and test_moments.py takes steps with Muon
def test_stopped_and_resumed_bitwise(tmp_path):
  run = smoke(MeshConfig(2, 2, 2), masters="halves", dtype="bfloat16", steps=4)
  run = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, every=2))
  whole = train(run, tmp_path / "whole")
  cut = dataclasses.replace(run, train=dataclasses.replace(run.train, stop_after=2))
  with pytest.raises(Preempted):
    train(cut, tmp_path / "parts")
  again = train(run, tmp_path / "parts")
  for name, value in paths(whole).items():
    np.testing.assert_array_equal(np.asarray(value), np.asarray(paths(again)[name]), err_msg=name)
  other = dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, name="adamw"))
  with pytest.raises(ConfigError, match=r"optimizer\.name"):
    train(other, tmp_path / "parts")
