"""Low-rank adapters beside a plain float64 computation of W + alpha/rank · A · B, and on meshes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from drawn import drawn

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError
from scmoe.models.config import ModelConfig
from scmoe.models.low_rank import TARGETS, Adapters, LoraConfig, LowRank
from scmoe.models.matrices import HOLDERS
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.parallel.mesh import MeshConfig, batch_sharding
from scmoe.run import build
from scmoe.run.adapters import build_training
from scmoe.run.config import RunConfig, from_dict, to_dict
from scmoe.training.step import init_state, make_train_step

pytestmark = pytest.mark.usefixtures("quickly")


VOCAB, RANK, ALPHA = 32, 3, 7.0
EVERY = ",".join(TARGETS)
ONE = MeshConfig(1, 1, 1)
# For each adapted parameter of a pair: W + scale · (this product of A and B), written by hand.
PRODUCTS = {
  "query": "...dr,...rhn->...dhn",
  "key": "...dr,...rhn->...dhn",
  "value": "...dr,...rhn->...dhn",
  "out": "...hnr,...rd->...hnd",
  "up": "...dr,...rf->...df",
  "gate": "...dr,...rf->...df",
  "down": "...fr,...rd->...fd",
  "head": "...dr,...rv->...dv",
}


def run_of(mesh=ONE, targets=EVERY, overlap=None, **train):
  base = RunConfig()
  run = RunConfig(
    model=ModelConfig(
      style="llama", wiring="scmoe_pos2", width=16, num_experts=2, num_heads=2, num_layers=2,
      context=8, dtype="float32", init_std=0.3, tie_embeddings=False,
    ),
    router=RouterConfig(noise=0.0, balance_loss=0.01, balance_over="step", bias="sign"),
    dispatch=DispatchConfig(transport="dropless"),
    overlap=dataclasses.replace(base.overlap, **(overlap or {})),
    mesh=mesh,
    data=dataclasses.replace(base.data, seq_len=8),
    train=dataclasses.replace(
      base.train, **({"batch_size": 8, "tokens_per_step": 64, "init_from": "base"} | train)
    ),
    lora=LoraConfig(rank=RANK, alpha=ALPHA, targets=targets),
  )  # fmt: skip
  return run.resolve(num_devices=mesh.size, vocab_size=VOCAB)


def batch(rows=4):
  """64 tokens in microbatches of `rows` sequences."""
  rng = np.random.default_rng(3)
  ids = rng.integers(0, VOCAB, (2, 4, 9)).astype(np.int32)
  places = np.broadcast_to(np.arange(8, dtype=np.int32), (2, 4, 8)).copy()
  ones = np.ones((2, 4, 8))
  made = Batch(ids[..., :-1], ids[..., 1:], ones.astype(np.float32), ones.astype(np.int32), places,
               np.zeros((2, 4), np.int32))  # fmt: skip
  return jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[2:]), made)


def arrays(built):
  """Random adapters, of which B is not 0, and the base, each on the run's mesh."""
  own = drawn(built.adapters.shapes, 0.3, seed=2)
  given = drawn(built.shapes_given, 0.3, seed=5)
  given["base"]["router"] = jax.tree.map(np.zeros_like, given["base"]["router"])
  place = lambda x, s: jax.device_put(x, s.sharding)
  given = jax.tree.map(place, given, built.shapes_given)
  return jax.tree.map(place, own, built.adapters.shapes), given


def step_on(mesh, **options):
  built = build_training(run_of(mesh, **options))
  own, given = arrays(built)
  abstract = built.abstract_state()
  state = init_state(built.init, built.optimizer, 0, abstract)
  state = dataclasses.replace(state, params=own, teacher=given).like(abstract)
  before = jax.device_get(state)
  step = make_train_step(built.objective, built.optimizer, abstract)
  put = lambda x: jax.device_put(x, batch_sharding(built.mesh, leading=1))
  state, scalars, _ = step(state, jax.tree.map(put, batch(built.train.batch_size)))
  return built, before, jax.device_get(state), jax.device_get(scalars)


@pytest.fixture(scope="module")
def alone():
  return step_on(ONE)


def plain_whole(base, own, name=""):
  """The parameters of the whole model, by the table above."""
  if "lora_a" in own:
    product = jnp.einsum(PRODUCTS[name], own["lora_a"], own["lora_b"])
    return base + ALPHA / RANK * product
  return {k: plain_whole(x, own[k], k) if k in own else x for k, x in base.items()}


def test_losses_and_gradients_are_those_of_the_plain_sum(alone):
  built, before, _, scalars = alone
  objective = build.make_objective(built.run, built.graph)
  batches = [jax.tree.map(lambda x: x[0], batch(8))]

  def ours(own):
    given = {"base": before.teacher["base"]}
    over = built.objective.taught(given)
    terms, _ = over.losses([own], router=before.router, batches=batches, rngs=[None])
    return sum(t["tokens"] for t in terms) / 64

  with jax.enable_x64(True):
    wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)
    base = wide(before.teacher["base"]["params"])

    def plain(own):
      whole = plain_whole(base, own)
      terms, _ = objective.losses([whole], router=before.router, batches=batches, rngs=[None])
      return sum(t["tokens"] for t in terms) / 64

    loss, grads = jax.jit(jax.value_and_grad(plain))(wide(before.params))
    loss, grads = jax.device_get((loss, grads))
  found, found_grads = jax.jit(jax.value_and_grad(ours))(before.params)
  np.testing.assert_allclose(found, loss, rtol=1e-5)
  np.testing.assert_allclose(scalars["cross_entropy"], loss, rtol=1e-5)
  for path, want in jax.tree_util.tree_leaves_with_path(grads):
    got = found_grads
    for key in path:
      got = got[key.key]
    largest = np.abs(want).max()
    assert largest > 1e-4, path  # every A and B learns
    np.testing.assert_allclose(got, want, atol=2e-5 * largest, rtol=2e-4, err_msg=str(path))


def test_a_step_changes_adapters_alone_and_has_no_other_moments(alone):
  built, before, after, _ = alone
  assert jax.tree.all(jax.tree.map(np.array_equal, before.teacher, after.teacher))
  assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, before.params, after.params)))
  trained = sum(x.size for x in jax.tree.leaves(built.adapters.shapes))
  moments = sum(x.size for x in jax.tree.leaves(after.opt_state) if np.ndim(x))
  assert moments == 2 * trained
  assert after.for_checkpoint().teacher is None


@pytest.mark.parametrize(
  ("mesh", "options"),
  [
    # Two devices share each expert, and two each matrix.
    night(MeshConfig(1, 4, 2), {"batch_size": 4}),
    (MeshConfig(1, 2, 1), {}),
    night(
      MeshConfig(2, 2, 1),
      {"batch_size": 4, "overlap": {"unroll": 0, "flight": 2}, "remat": "full"},
    ),
  ],
)
def test_a_mesh_learns_the_same(alone, mesh, options):
  _, _, state, scalars = step_on(mesh, **options)
  for name in ("objective", "cross_entropy", "grad_norm"):
    np.testing.assert_allclose(scalars[name], alone[3][name], rtol=5e-5, err_msg=name)
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5)
  jax.tree.map(close, state.params, alone[2].params)


def test_fresh_adapters_change_nothing():
  built = build_training(run_of())
  own, _ = jax.jit(built.init)(jax.random.key(1))
  _, given = arrays(built)
  whole = built.whole(own, given)
  assert jax.tree.all(jax.tree.map(np.array_equal, whole, given["base"]["params"]))
  query = own["stages"]["units"][0]["blocks"][0]["attention"]["query"]
  assert 0.9 / math.sqrt(16) < np.abs(query["lora_a"]).max() <= 1 / math.sqrt(16)


def test_bfloat16_is_summed_in_float32():
  base, a, b = (
    jnp.full(s, v, jnp.bfloat16) for s, v in (((4, 4), 1.0), ((4, 2), 0.01), ((2, 4), 0.3))
  )
  found = LowRank(base, a, b, 2.0, 1, 1).merged()
  wide = [np.asarray(x, np.float32) for x in (base, a, b)]
  want = jnp.asarray(wide[0] + 2.0 * wide[1] @ wide[2]).astype(jnp.bfloat16)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(found, want)


def test_targets_choose_the_matrices():
  shapes = build.build(run_of()).shapes
  names = lambda word: {
    jax.tree_util.keystr(path[:-1], simple=True, separator=".").rsplit(".", 2)[-2]
    for path, _ in jax.tree_util.tree_leaves_with_path(
      Adapters(LoraConfig(rank=2, targets=word), shapes).shapes
    )
  }
  found = {word: names(word) for word in TARGETS}
  assert found == {word: {word if word != "head" else "embedding"} for word in TARGETS}
  up = Adapters(LoraConfig(rank=2), shapes).shapes["stages"]["moe"]["experts"]["up"]
  layers, experts, width, hidden = 1, 2, 16, built_hidden(shapes)
  assert up["lora_a"].shape == (layers, experts, width, 2)
  assert up["lora_b"].shape == (layers, experts, 2, hidden)


def test_every_module_with_matrices_has_a_word_of_lora_targets():
  assert {*HOLDERS, "head"} == set(TARGETS)


def built_hidden(shapes):
  return shapes["stages"]["moe"]["experts"]["up"].shape[-1]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"lora": {"targets": "attention,gate"}}, "'gate' is unknown; use one or more of: attention"),
    ({"train": {"init_from": ""}}, "lora.rank=3 adapts a model that exists; set train.init_from"),
    ({"mesh": {"shard_state": "moments"}}, "lora.rank=3 .*mesh.shard_state='moments'"),
    ({"mesh": {"moments_in": "host"}}, "lora.rank=3 .*mesh.moments_in='host'"),
    ({"optimizer": {"name": "muon"}}, "lora.rank=3 .*optimizer.name='muon'"),
    ({"model": {"tie_embeddings": True}}, "no matrices of 'head'.*model.tie_embeddings=False"),
    ({"model": {"wiring": "dense"}}, "no matrices of 'experts'; leave it out"),
  ],
)
def test_what_does_not_combine_is_refused_with_both_names(change, message):
  values = to_dict(run_of())
  for part, fields in change.items():
    values[part] |= fields
  with pytest.raises(ConfigError, match=message) as caught:
    build_training(from_dict(values).resolve(num_devices=1, vocab_size=VOCAB))
  assert "\n" not in str(caught.value)
