"""Float32 parameters in two halves: the same numbers, without cast and copy."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from drawn import drawn_init

from scmoe.base.errors import ConfigError, Preempted
from scmoe.parallel.mesh import MeshConfig
from scmoe.run import build
from scmoe.run.config_files import find_config, load_config
from scmoe.train import train
from scmoe.training.description import flatten
from scmoe.training.loop import Run
from scmoe.training.masters import Halves, readable, to_float32
from scmoe.training.options import CheckpointConfig, OptimizerAblation
from scmoe.training.step import init_state, make_train_step


def smoke(masters: str, mesh: MeshConfig = MeshConfig(), **training):
  run = load_config(find_config("quickstart"), "smoke")
  model = dataclasses.replace(run.model, dtype="bfloat16")
  optimizer = dataclasses.replace(run.optimizer, ablation=OptimizerAblation(masters))
  own = dataclasses.replace(run.train, **{"sample_tokens": 0, "tensorboard": False, **training})
  return dataclasses.replace(run, model=model, optimizer=optimizer, train=own, mesh=mesh)


def test_halves_are_the_number_to_the_last_bit():
  """All exponents, both signs, every way to round, zeros and infinities."""
  rng = np.random.default_rng(0)
  bits = rng.integers(0, 2**32, 200_000, np.uint32)
  edges = np.array([0x8000, 0x7FFF, 0x8001, 0, 0xFFFF, 0x18000, 0x17FFF], np.uint32)
  bits = np.concatenate([bits, edges, edges | 0x80000000, [0x7F800000, 0xFF800000]]).astype(
    np.uint32
  )
  x = bits.view(np.float32)
  x = x[~np.isnan(x)]
  halves = Halves.of(jnp.asarray(x))
  np.testing.assert_array_equal(np.asarray(halves.to_float32()).view(np.uint32), x.view(np.uint32))
  tie = (x.view(np.uint32) & 0xFFFF) == 0x8000
  nearest = np.asarray(jnp.asarray(x).astype(jnp.bfloat16))
  np.testing.assert_array_equal(np.asarray(halves.high)[~tie], nearest[~tie])


class Away:
  """An objective whose cast rounds what lies between two numbers away from zero, as halves do."""

  def __init__(self, objective):
    self.objective = objective

  def __getattr__(self, name):
    return getattr(self.objective, name)

  def cast(self, params):
    nearest = self.objective.cast(params)
    away = lambda p, n: n if p.dtype == n.dtype else Halves.of(p).high
    return jax.tree.map(away, params, nearest)


@pytest.mark.parametrize(
  ("tokens", "mesh"),
  [(0, MeshConfig(data=1)), night(4, MeshConfig(data=2, expert=2))],
  ids=["one microbatch", "four"],
)
def test_steps_are_those_of_cast_parameters(tokens, mesh):
  states = {}
  for masters in ("cast", "halves"):
    run = smoke(masters, mesh)
    per_step = tokens * run.train.batch_size * run.data.seq_len
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, tokens_per_step=per_step))
    built = build.build(
      run.resolve(num_devices=mesh.size, vocab_size=257), jax.devices()[: mesh.size]
    )
    abstract = built.abstract_state()
    state = init_state(drawn_init(built), built.optimizer, 0, abstract)
    step = make_train_step(Away(built.objective), built.optimizer, abstract)
    for _ in range(3):
      state, scalars, _ = step(state, built.random_batch())
    assert np.isfinite(scalars["loss"])
    states[masters] = state
  halves, cast = states["halves"], states["cast"]
  kinds = {leaf.dtype.name for leaf in jax.tree.leaves(halves.params)}
  assert kinds == {"bfloat16", "int16", "float32"}, "norms and gates stay whole"
  for a, b in zip(jax.tree.leaves(halves.for_checkpoint()), jax.tree.leaves(cast), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def test_a_permitted_change_is_taken_where_parameters_are_in_halves():
  """A checkpoint holds float32 arrays: with these, not with halves, its arrays are compared."""
  run = smoke("halves", MeshConfig(data=1)).resolve(num_devices=1, vocab_size=257)
  abstract = build.build(run, jax.devices()[:1]).abstract_state()
  leaves = flatten(abstract.for_checkpoint())
  stored = {name: {"shape": x.shape, "dtype": str(x.dtype)} for name, x in leaves.items()}
  meta = {"config": {"optimizer": {"beta1": 0.9}}, "data_fingerprint": {}, "leaves": stored}
  resumed = types.SimpleNamespace(
    built=types.SimpleNamespace(
      checkpoint=CheckpointConfig(allow_config_change=True), config={"optimizer": {"beta1": 0.8}}
    ),
    abstract=abstract,
    trainer=types.SimpleNamespace(data=types.SimpleNamespace(fingerprint=dict)),
    first=False,
  )
  Run._compare(resumed, meta)  # pyright: ignore[reportArgumentType]
  stored.popitem()
  with pytest.raises(ConfigError, match="do not fit"):
    Run._compare(resumed, meta)  # pyright: ignore[reportArgumentType]


@pytest.mark.nightly  # by day test_state_shares.py loads checkpoints of halves
def test_a_checkpoint_knows_nothing_of_halves(tmp_path):
  """Stopped with halves, resumed with a cast copy; what is evaluated is what the model reads."""
  with pytest.raises(Preempted):
    train(smoke("halves", MeshConfig(data=1), steps=4, stop_after=2), tmp_path)
  state = train(smoke("cast", MeshConfig(data=1), steps=4), tmp_path)
  assert int(state.step) == 4
  assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(state.params))


def test_what_is_read_of_a_state_needs_no_second_array():
  x = {"a": Halves.of(jnp.ones((4, 4))), "norm": jnp.ones(4)}
  assert readable(x)["a"] is x["a"].high
  assert to_float32(x)["norm"] is x["norm"]
