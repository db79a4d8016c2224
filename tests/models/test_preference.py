"""The preference loss beside a plain float64 computation, on one device and on meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from drawn import drawn_init
from one_step import one_step, second_arrays

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import Pass
from scmoe.models.preference import Preference
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.parallel.mesh import MeshConfig
from scmoe.run.build import build
from scmoe.run.config import RunConfig
from scmoe.training.options import TrainConfig
from scmoe.training.step import init_state, make_train_step

VOCAB, BETA = 64, 0.7
ONE = MeshConfig(1, 1, 1)
# Rows of 16 tokens: (prompt, chosen, rejected) lengths of each pair; prompts begin both texts.
ROWS = ([(1, 2, 3), (2, 1, 1)], [(2, 4, 5)], [(1, 1, 2)], [(3, 2, 2), (1, 1, 1)])


def run_of(mesh=ONE, **train):
  data = dataclasses.replace(
    RunConfig().data, source="preference", seq_len=16, packing="pack", document_mask=True
  )
  model = ModelConfig(
    wiring="scmoe_pos2", width=16, num_experts=4, num_heads=2, num_layers=2, context=16,
    dtype="float32", init_std=0.3, document_mask=True,
  )  # fmt: skip
  given = {"batch_size": 4, "teacher": "t", "preference_beta": BETA} | train
  run = RunConfig(
    model=model,
    router=RouterConfig(noise=0.0, balance_loss=0.01),
    dispatch=DispatchConfig(transport="dropless"),
    mesh=mesh,
    data=data,
    train=TrainConfig(**given),
  )
  return run.resolve(num_devices=mesh.size, vocab_size=VOCAB)


def batch_of(count):
  """`count` microbatches of the four rows, with other tokens and another order of rows in each."""
  rng = np.random.default_rng(3)
  made = []
  for number in range(count):
    rows = {name: np.zeros((4, 16), np.int32) for name in ("inputs", "targets", "segment", "place")}
    weights = np.zeros((4, 16), np.float32)
    for r, pairs in enumerate(np.roll(np.arange(4), number)):
      at, segment = 0, 0
      for prompt, *answers in ROWS[pairs]:
        begin = rng.integers(0, VOCAB, prompt)
        for answer in answers:
          ids, segment = np.append(begin, rng.integers(0, VOCAB, answer)), segment + 1
          here = slice(at, at + len(ids))
          rows["inputs"][r, here], rows["segment"][r, here] = ids, segment
          rows["targets"][r, here] = np.append(ids[1:], 0)
          rows["place"][r, here] = np.arange(len(ids))
          weights[r, at + prompt - 1 : at + len(ids) - 1] = 1
          at += len(ids)
    fields = rows["inputs"], rows["targets"], weights, rows["segment"], rows["place"]
    made.append(Batch(*fields, np.zeros(4, np.int32)))
  return Batch.stack(made)


def step_on(mesh, count, reference=True, **options):
  """(built, state before, state after, scalars) of a step of `count` microbatches."""
  free = {} if reference else {"teacher": "", "reference_free": True}
  run = run_of(mesh, tokens_per_step=count * 4 * 16, **free, **options)
  built = build(run, teacher=run if reference else None)
  assert isinstance(built.objective, Preference)
  given = second_arrays(built.teacher) if reference else None  # not the model that learns
  return built, *one_step(built, batch_of(count), given)


@functools.cache
def alone(count):
  """A step of `count` microbatches on one device."""
  return step_on(ONE, count)


def answers_of(batch):
  """[row, pair, (chosen, rejected)] -> mask [B, S] of the answer's targets, written by hand."""
  for row in range(4):
    for pair in range(int(batch.segment_ids[row].max()) // 2):
      masks = []
      for segment in (2 * pair + 1, 2 * pair + 2):
        mask = np.zeros((4, 16))
        mask[row] = (batch.segment_ids[row] == segment) * batch.weights[row]
        masks.append(mask)
      yield masks


def plain(built, before, reference=True, count=1):
  """Loss, gradients and the rewards of each pair, in float64 from the scores of all tokens."""
  batches = [jax.tree.map(lambda x, i=i: x[i], batch_of(count)) for i in range(count)]
  pairs = sum(len(list(answers_of(batch))) for batch in batches)

  def logprobs(model, batch, **options):
    mask_BS = batch.segment_ids > 0
    out = model(batch.inputs, Pass(batch.positions, batch.segment_ids, mask_BS=mask_BS, **options))
    scores_BSV = model.logits(out.h_BSD).astype(jnp.float64)
    logs_BSV = scores_BSV - jax.scipy.special.logsumexp(scores_BSV, axis=-1, keepdims=True)
    return jnp.take_along_axis(logs_BSV, batch.targets[..., None], -1)[..., 0]

  def loss_of(params, batch, answers):
    own_BS = logprobs(built.model(params), batch)
    other_BS = 0.0
    if reference:
      taught = built.teacher.model(jax.tree.map(jnp.asarray, before.teacher["params"]))
      other_BS = logprobs(taught, batch, no_drop=True)
    losses, rewards = [], []
    for chosen, rejected in answers:
      reward = [BETA * ((own_BS - other_BS) * mask).sum() for mask in (chosen, rejected)]
      losses.append(jnp.log1p(jnp.exp(-(reward[0] - reward[1]))))
      rewards.append(jnp.stack(reward))
    return sum(losses) / pairs, jnp.stack(rewards)

  found = []
  for batch in batches:
    own = functools.partial(loss_of, answers=list(answers_of(batch)))
    found.append(jax.jit(jax.value_and_grad(own, has_aux=True))(before.params, batch))
  grads = jax.tree.map(lambda *g: np.sum(np.asarray(g, np.float64), 0), *[g for _, g in found])
  rewards = np.concatenate([rewards for (_, rewards), _ in found])
  return sum(float(loss) for (loss, _), _ in found), grads, rewards


@pytest.mark.parametrize(("reference", "count"), [(True, 1), night(True, 2), night(False, 2)])
def test_the_plain_loss_of_every_pair(reference, count):
  """Without the routers' losses, so that gradients are those of the pairs alone."""
  run = run_of(tokens_per_step=count * 64)
  quiet = dataclasses.replace(run.router, balance_loss=0.0, z_loss=0.0)
  free = {} if reference else {"teacher": "", "reference_free": True}
  run = dataclasses.replace(run, router=quiet, train=dataclasses.replace(run.train, **free))
  built = build(run, teacher=run if reference else None)
  state = init_state(drawn_init(built, 0.3), built.optimizer, 0, built.abstract_state())
  objective = built.objective
  if reference:
    state = dataclasses.replace(state, teacher=second_arrays(built.teacher))
    objective = objective.taught(state.teacher)
  with jax.enable_x64(True):
    loss, grads, rewards = plain(built, jax.device_get(state), reference, count)

  def ours(params):
    batches = [jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), batch_of(count))
               for i in range(count)]  # fmt: skip
    given = {"batches": batches, "rngs": [None] * count}
    terms, sums = objective.losses([params] * count, router={}, **given)
    pairs = sum(s.preference["pairs"] for s in sums)
    return sum(t["pairs"] for t in terms) / pairs, jax.tree.map(lambda *s: sum(s), *sums)

  (found, aux), found_grads = jax.jit(jax.value_and_grad(ours, has_aux=True))(state.params)
  np.testing.assert_allclose(found, loss, rtol=1e-5)
  largest = max(np.abs(g).max() for g in jax.tree.leaves(grads))
  assert largest > 1e-3
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * largest, rtol=2e-4)
  jax.tree.map(close, jax.device_get(found_grads), grads)
  scalars = jax.device_get(objective.metrics(aux)[0])
  margins = rewards[:, 0] - rewards[:, 1]
  want = {
    "reward_chosen": rewards[:, 0].mean(),
    "reward_rejected": rewards[:, 1].mean(),
    "reward_margin": margins.mean(),
    "reward_accuracy": (margins > 0).mean(),
  }
  for name, value in want.items():
    np.testing.assert_allclose(scalars[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_model_that_is_its_reference_has_no_margin():
  run = run_of()
  built = build(run, teacher=run)
  abstract = built.abstract_state()
  state = init_state(drawn_init(built, 0.3), built.optimizer, 0, abstract)
  same = {"params": jax.tree.map(jnp.copy, state.params), "router": state.router}
  state = dataclasses.replace(state, teacher=same)
  step = make_train_step(built.objective, built.optimizer, abstract)
  _, scalars, _ = step(state, jax.tree.map(jnp.asarray, batch_of(1)))
  np.testing.assert_allclose(scalars["reward_margin"], 0, atol=1e-5)
  balance = scalars["objective"] - np.log(2)
  assert 0 < balance < 0.05  # a pair's loss is ln 2; the rest are the routers' losses


@pytest.mark.parametrize(
  ("sizes", "shared", "count"),
  [night((2, 2, 1), "none", 2), night((1, 2, 2), "none", 2), night((2, 2, 1), "moments", 2),
   night((2, 2, 1), "parameters", 2), ((2, 2, 1), "parameters", 1)],
)  # fmt: skip
def test_a_mesh_learns_the_same(sizes, shared, count):
  """Also where ranks share the state; the reference is whole on each of them."""
  _, _, state, scalars = step_on(MeshConfig(*sizes, shard_state=shared), count)
  _, _, want, wanted = alone(count)
  for name in ("objective", "cross_entropy", "reward_margin", "reward_accuracy", "grad_norm"):
    np.testing.assert_allclose(scalars[name], wanted[name], rtol=5e-5, err_msg=name)
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5)
  jax.tree.map(close, state.params, want.params)


@pytest.mark.parametrize(
  ("train", "message"),
  [
    ({"teacher": ""}, "data.source='preference' needs a reference: set train.teacher"),
    ({"reference_free": True}, "leaves out the reference train.teacher='t'; set one of them"),
  ],
)
def test_a_reference_is_named_or_left_out(train, message):
  with pytest.raises(ConfigError, match=message):
    run_of(**train)
