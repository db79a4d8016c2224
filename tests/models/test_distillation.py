"""A student with a teacher: the plain loss of both models' scores, on one device and on eight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from one_step import one_step, second_arrays

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError
from scmoe.models.config import ModelConfig
from scmoe.models.distillation import Distillation
from scmoe.models.gpt import Pass
from scmoe.models.objective import LanguageModelObjective
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.parallel.mesh import MeshConfig
from scmoe.run.build import build
from scmoe.run.config import RunConfig
from scmoe.training.options import TrainConfig

VOCAB, SHARE, HEAT = 64, 0.25, 3.0
SIZES = {"num_heads": 2, "num_layers": 2, "context": 16, "dtype": "float32", "init_std": 0.3}


def student(mesh=MeshConfig(1, 1, 1), **train):
  model = ModelConfig(wiring="scmoe_pos2", width=16, num_experts=2, **SIZES)
  run = RunConfig(
    model=model,
    router=RouterConfig(noise=0.0, balance_loss=0.01),
    dispatch=DispatchConfig(transport="dropless"),
    mesh=mesh,
    data=dataclasses.replace(RunConfig().data, seq_len=16),
    train=TrainConfig(
      batch_size=4, teacher="t", teacher_share=SHARE, teacher_temperature=HEAT, **train
    ),
  )
  return run.resolve(num_devices=mesh.size, vocab_size=VOCAB)


def teacher(**changed):
  """Wider, with four times the experts, balancing biases and a head of its own."""
  sizes = {"wiring": "topk", "top_k": 2, "width": 24, "num_experts": 8, "tie_embeddings": False}
  model = ModelConfig(**{**SIZES, **sizes, **changed})
  run = RunConfig(model=model, router=RouterConfig(bias="sign", noise=0.0))
  run = dataclasses.replace(run, data=dataclasses.replace(run.data, seq_len=16))
  return run.resolve(num_devices=1, vocab_size=VOCAB)


def batch_of(count):
  rng = np.random.default_rng(3)
  tokens = rng.integers(0, VOCAB, (count, 4, 17)).astype(np.int32)
  batch = Batch.of_tokens(tokens[..., :16])
  return dataclasses.replace(
    batch, targets=tokens[..., 1:], weights=rng.uniform(0, 1, tokens[..., 1:].shape).astype("f")
  )


def given_of(built):
  """The teacher's random parameters and its biases, which decide its experts."""
  shape = built.router_shapes["bias"].shape
  return second_arrays(built, bias=jax.random.normal(jax.random.key(6), shape))


def step_on(mesh, count, **options):
  """(state before, state after, scalars) of a step of `count` microbatches."""
  tokens = count * 4 * 16
  built = build(student(mesh, tokens_per_step=tokens, **options), teacher=teacher())
  assert isinstance(built.objective, Distillation)
  return built, *one_step(built, batch_of(count), given_of(built.teacher))


@pytest.fixture(scope="module")
def alone():
  return step_on(MeshConfig(1, 1, 1), 2)


def test_the_plain_loss_of_both_models_scores(alone):
  """From all scores at once, by jax.nn and automatic differentiation."""
  built, before, _, scalars = alone
  taught = built.teacher.model(jax.tree.map(jnp.asarray, before.teacher["params"]))
  batches = [jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), batch_of(2)) for i in range(2)]

  def plain(params, batch):
    model = built.model(params)
    mask_BS = batch.segment_ids > 0
    out = model(batch.inputs, Pass(batch.positions, batch.segment_ids, mask_BS=mask_BS))
    given = Pass(router=before.teacher["router"], mask_BS=mask_BS, no_drop=True)
    wanted_BSV = taught.logits(taught(batch.inputs, given).h_BSD)
    logits_BSV = model.logits(out.h_BSD)
    nats_BS = -jnp.take_along_axis(jax.nn.log_softmax(logits_BSV), batch.targets[..., None], -1)[
      ..., 0
    ]
    q_BSV, t_BSV = (jax.nn.log_softmax(x / HEAT) for x in (logits_BSV, wanted_BSV))
    apart_BS = (jnp.exp(t_BSV) * (t_BSV - q_BSV)).sum(-1)
    mean = lambda x: (x * batch.weights).sum() / batch.weights.sum()
    loss = (1 - SHARE) * mean(nats_BS) + SHARE * HEAT**2 * mean(apart_BS)
    text = LanguageModelObjective(built.graph, built.run.router)
    rest = text.loss(params, {}, batch, None)[0] - mean(nats_BS)  # the router's losses
    # The mean over microbatches of this is the loss over all tokens of the step.
    part = batch.weights.sum() / weights.mean()
    return part * loss + rest, (mean(nats_BS), mean(apart_BS))

  weights = np.array([batch.weights.sum() for batch in batches])
  run = jax.jit(jax.value_and_grad(plain, has_aux=True))
  found = [run(before.params, batch) for batch in batches]
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5)
  close(scalars["objective"], np.mean([loss for (loss, _), _ in found]))
  at = lambda i: np.average([float(rest[i]) for (_, rest), _ in found], weights=weights)
  close(scalars["cross_entropy"], at(0))
  close(scalars["divergence"], at(1))
  grads = jax.tree.map(lambda a, b: (a + b) / 2, *[grad for _, grad in found])
  close(scalars["grad_norm"], np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(grads))))


@pytest.mark.parametrize("sizes", [night((2, 2, 2)), night((1, 4, 1)), night((1, 2, 1, 2))])
def test_a_mesh_learns_the_same(alone, sizes):
  _, _, state, scalars = step_on(MeshConfig(*sizes), 2)
  for name in ("objective", "cross_entropy", "divergence", "grad_norm"):
    np.testing.assert_allclose(scalars[name], alone[3][name], rtol=2e-5, err_msg=name)
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5)
  jax.tree.map(close, state.params, alone[2].params)


def test_the_teacher_stays_as_it_is(alone):
  _, before, after, _ = alone
  jax.tree.map(np.testing.assert_array_equal, before.teacher, after.teacher)
  assert after.for_checkpoint().teacher is None


@pytest.mark.parametrize(
  ("mesh", "changed", "words"),
  [
    (MeshConfig(1, 1, 1), {"vocab_size": 128}, "has a vocabulary of 128, model.vocab_size=64"),
    (MeshConfig(1, 1, 1), {"context": 8}, "has model.context=8, data.seq_len=16 is longer"),
    (MeshConfig(1, 2, 1), {"num_experts": 3}, "has 3 experts, which 2 devices of mesh.expert"),
    (MeshConfig(1, 1, 2), {"num_heads": 3}, "train.teacher='t': .*num_heads"),
  ],
)
def test_a_teacher_that_does_not_fit_is_one_line(mesh, changed, words):
  given = teacher() if "context" in changed else teacher(**changed)
  if "context" in changed:
    given = dataclasses.replace(given, model=dataclasses.replace(given.model, **changed))
  with pytest.raises(ConfigError, match=words) as caught:
    build(student(mesh), jax.devices()[: mesh.size], teacher=given)
  assert "\n" not in str(caught.value)


# -- hidden states --------------------------------------------------------------------------------

PAIRS = {"width": 16, "num_experts": 4, "top_k": 1, "num_layers": 4, "moe_every": 2}


def step_with_hidden(mesh):
  """A step of one microbatch of four layers, with a teacher of the same width, on a mesh."""
  run = student(mesh, teacher_hidden=1.5)
  run = dataclasses.replace(run, model=dataclasses.replace(run.model, num_layers=4))
  built = build(run, jax.devices()[: mesh.size], teacher=teacher(**PAIRS))
  return built, *one_step(built, batch_of(1), given_of(built.teacher))


@pytest.fixture(scope="module")
def with_hidden():
  return step_with_hidden(MeshConfig(1, 1, 1))


def test_hidden_states_are_compared_after_each_pair(with_hidden):
  """The oracle runs both models, slices their streams by hand and differentiates by itself."""
  built, before, _, scalars = with_hidden
  taught = built.teacher.model(jax.tree.map(jnp.asarray, before.teacher["params"]))
  batch = jax.tree.map(lambda x: jnp.asarray(x[0]), batch_of(1))
  # The same loss without hidden states, of which `test_the_plain_loss...` holds every term.
  plain = dataclasses.replace(built.run.train, teacher_hidden=0.0)
  scores = build(
    dataclasses.replace(built.run, train=plain), jax.devices()[:1], teacher=built.teacher.run
  ).objective
  assert isinstance(scores, Distillation)
  assert not scores.hidden

  def loss(params):
    given = Pass(batch.positions, batch.segment_ids, mask_BS=batch.segment_ids > 0, hidden=True)
    s = built.model(params)(batch.inputs, given).hidden_LBSD
    other = dataclasses.replace(given, router=before.teacher["router"], no_drop=True)
    t = taught(batch.inputs, other).hidden_LBSD
    assert s.shape == t.shape == (4, 4, 16, 16)
    apart = 0.0
    for layer in (1, 3):
      difference = jnp.linalg.norm(s[layer] - t[layer], axis=-1) / jnp.linalg.norm(
        t[layer], axis=-1
      )
      apart = apart + (difference**2 * batch.weights).sum() / batch.weights.sum() / 2
    rest = scores.taught(before.teacher).loss(params, {}, batch, None)[0]
    return rest + 1.5 * apart, apart

  (wanted, apart), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(before.params)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5)
  close(scalars["hidden_distance"], apart)
  close(scalars["objective"], wanted)
  close(scalars["grad_norm"], np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(grads))))
  assert apart > 0.1  # random models are apart: the term counts


def test_a_mesh_compares_the_same_hidden_states(with_hidden):
  _, _, state, scalars = step_with_hidden(MeshConfig(2, 2, 2))
  for name in ("objective", "cross_entropy", "divergence", "hidden_distance", "grad_norm"):
    np.testing.assert_allclose(scalars[name], with_hidden[3][name], rtol=2e-5, err_msg=name)
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5)
  jax.tree.map(close, state.params, with_hidden[2].params)


def test_hidden_states_of_other_sizes_are_refused():
  with pytest.raises(
    ConfigError, match=r"has model.width=24 and model.num_layers=2, this run"
  ) as e:
    build(student(teacher_hidden=1.0), jax.devices()[:1], teacher=teacher())
  assert "\n" not in str(e.value)
