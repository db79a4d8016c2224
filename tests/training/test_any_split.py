"""A step's loss, gradients and statistics do not depend on how its rows are split.

Eight rows with unequal numbers of tokens, as `packing=pad` makes them, some with a weight of their
own, are split over microbatches and over devices in every way that fits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from flax import nnx
from jax.sharding import PartitionSpec as P

from scmoe.base.batch import Batch
from scmoe.models.config import ModelConfig
from scmoe.models.distillation import Distillation
from scmoe.models.gpt import GPT
from scmoe.models.gradient_sums import accumulate
from scmoe.models.objective import LanguageModelObjective
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.parallel.gradients import global_norm
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh, manual, parameter_specs

ROWS, LENGTH, VOCAB = 8, 8, 64
CONFIG = ModelConfig(
  wiring="scmoe_pos2",
  num_layers=2,
  width=8,
  num_heads=2,
  num_experts=8,
  top_k=1,
  vocab_size=VOCAB,
  context=LENGTH,
  dtype="float32",
)
DROPLESS = DispatchConfig(transport="dropless")
WHOLE_STEP = RouterConfig(balance_loss=0.5, balance_over="step", z_loss=0.1)
PER_MICROBATCH = RouterConfig(balance_loss=0.5, z_loss=0.1)
NOT_OF_TOKENS = {"rounds"}  # the exchanges of a microbatch

# (microbatches, devices on the data axis, devices on the expert axis)
SPLITS = [(8, 1, 1), (1, 2, 4)]
BY_NIGHT = [(2, 1, 1), (2, 4, 1), (4, 1, 1), (1, 8, 1), (4, 2, 1), (2, 1, 4)]


def rows() -> Batch:
  """[ROWS, LENGTH]: 1 to LENGTH tokens, the rest padding; weights from 0 to 2."""
  numbers = np.random.default_rng(0)
  batch = Batch.of_tokens(numbers.integers(0, VOCAB, (ROWS, LENGTH)))
  there = np.arange(LENGTH) < np.array([1, 8, 2, 3, 8, 5, 1, 7])[:, None]
  weights = there * numbers.choice([0.0, 0.5, 1.0, 2.0], there.shape)
  return dataclasses.replace(
    batch, weights=weights.astype(np.float32), segment_ids=there.astype(np.int32)
  )


def drawn(seed: int, router: RouterConfig):
  """(graph, parameters, PartitionSpecs) of a model in which no parameter is 0 or 1."""
  make = lambda: GPT(CONFIG.resolve(), router=router, dispatch=DROPLESS, rngs=nnx.Rngs(params=0))
  graph, state = nnx.split(nnx.eval_shape(make))
  numbers = np.random.default_rng(seed)
  draw = lambda s: jnp.asarray(numbers.normal(0, 0.3, s.shape), s.dtype)
  params = jax.tree.map(draw, nnx.to_pure_dict(state))
  return graph, params, nnx.to_pure_dict(parameter_specs(state))


@functools.cache
def step(microbatches, data, expert, router=WHOLE_STEP, taught=False):
  """A step of all rows: loss, gradients, their norm, scalars and arrays."""
  graph, params, specs = drawn(1, router)
  objective = LanguageModelObjective(graph, router)
  teacher = ({"params": drawn(2, router)[1], "router": {}}, {"params": specs, "router": {}})
  if taught:
    objective = Distillation(graph, router, graph, share=0.5, temperature=2.0)

  def local(params, batch, given):
    own = objective.taught(given) if taught else objective
    loss, grads, aux = accumulate(own, params, {}, batch, jax.random.key(3), specs)
    return {
      "loss": loss,
      "grads": grads,
      "norm": global_norm(grads, specs),
      "metrics": own.metrics(aux),
    }

  mesh = make_mesh(MeshConfig(data, expert), jax.devices()[: data * expert], num_experts=8)
  out = {"loss": P(), "grads": specs, "norm": P(), "metrics": P()}
  program = manual(local, mesh, (specs, P(None, BATCH_AXES), teacher[1]), out)
  batch = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), rows())
  return jax.device_get(jax.jit(program)(params, batch, teacher[0]))


def assert_same(got, want):
  for name in ("loss", "norm"):
    np.testing.assert_allclose(got[name], want[name], rtol=1e-6, err_msg=name)
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(got["grads"]), jax.tree.leaves(want["grads"]), strict=True
  ):
    name = jax.tree_util.keystr(path)
    # Some leaves, as a query's bias, are small sums of large terms that cancel.
    room = 1e-6 * np.abs(b).max() + 1e-7 * want["norm"]
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=room, err_msg=name)
  for own, other in zip(got["metrics"], want["metrics"], strict=True):
    assert own.keys() == other.keys()
    for name in own.keys() - NOT_OF_TOKENS:
      np.testing.assert_allclose(own[name], other[name], rtol=2e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("split", [*SPLITS, *map(night, BY_NIGHT)], ids=str)
def test_any_split_of_the_rows_gives_the_same_step(split):
  assert_same(step(*split), step(1, 1, 1))


@pytest.mark.nightly  # by day models/test_distillation.py
@pytest.mark.parametrize("split", [(4, 1, 1), (2, 2, 2)], ids=str)
def test_any_split_gives_the_same_step_with_a_teacher(split):
  assert_same(step(*split, taught=True), step(1, 1, 1, taught=True))


def test_a_balancing_loss_per_microbatch_follows_the_split_over_microbatches_only():
  """GShard, Tutel and MegaBlocks define it so; over devices it is the microbatch's own."""
  want = step(2, 1, 1, PER_MICROBATCH)
  assert_same(step(2, 4, 1, PER_MICROBATCH), want)
  # Of one microbatch it is the loss over the whole step.
  assert abs(want["loss"] - step(1, 1, 1)["loss"]) > 1e-4
