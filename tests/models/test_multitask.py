"""Tasks with a gate each: the plain models of single tasks, whatever the plan puts where."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError
from scmoe.data.multitask.plan import EMPTY, make_plan
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import GPT
from scmoe.models.gradient_sums import accumulate
from scmoe.models.multitask import Multitask
from scmoe.models.objective import LanguageModelObjective
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.gates import GatesOfRows, chosen_gate, make_gates
from scmoe.moe.options import RouterConfig
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh, manual, parameter_specs

NAMES, LOADS = ("a", "b", "c"), (5, 2, 1)
CONFIG = ModelConfig(
  wiring="scmoe_pos2",
  num_layers=2,
  width=16,
  num_heads=2,
  mlp_hidden=24,
  num_experts=4,
  vocab_size=32,
  context=8,
  dtype="float32",
).resolve()
DROPLESS = DispatchConfig(transport="dropless")
BALANCED = RouterConfig(tasks=3, balance_over="step", balance_loss=0.5, z_loss=0.1)
PLAIN = RouterConfig(balance="none", balance_loss=0.0)
PLANS = [
  # plan, devices on the data and on the expert axis, places of a device, microbatches
  ("elastic", 2, 2, 4, 1),
  pytest.param("equal", 3, 1, 10, 1, marks=pytest.mark.nightly),
  pytest.param("elastic", 4, 2, 4, 2, marks=pytest.mark.nightly),
  pytest.param("elastic", 4, 1, 8, 2, marks=pytest.mark.nightly),
]


@functools.cache
def drawn(router):
  """(graph, parameters, PartitionSpecs) of a model in which no parameter is 0 or 1."""
  make = lambda: GPT(CONFIG, router=router, dispatch=DROPLESS, rngs=nnx.Rngs(params=0))
  graph, state = nnx.split(nnx.eval_shape(make))
  numbers = np.random.default_rng(1)
  draw = lambda s: jnp.asarray(numbers.normal(0, 0.3, s.shape), s.dtype)
  params = jax.tree.map(draw, nnx.to_pure_dict(state))
  return graph, params, nnx.to_pure_dict(parameter_specs(state))


def rows_of(task, count):
  """The first rows of a task, of random tokens; the last tokens of each row do not count."""
  numbers = np.random.default_rng(task)
  batch = Batch.of_tokens(numbers.integers(0, 32, (count, 8), dtype=np.int32))
  batch.weights[:, 6 + task % 2 :] = 0
  return dataclasses.replace(batch, domain=np.full(count, task, np.int32))


def laid_out(layout):
  """The rows of a step where a layout [A, B] puts them, leaves [A, B, ...]; padding elsewhere."""
  flat = layout.ravel()
  padding = jax.tree.map(np.zeros_like, rows_of(0, len(flat)))
  for task in range(len(NAMES)):
    own = rows_of(task, 99)
    here = np.flatnonzero(flat == task)
    for into, values in zip(jax.tree.leaves(padding), jax.tree.leaves(own)):
      into[here] = values[: len(here)]
  return jax.tree.map(lambda x: x.reshape(*layout.shape, *x.shape[1:]), padding)


@functools.cache
def step(layout, data=1, expert=1, router=BALANCED):
  """Loss, gradients and metrics of a step; `layout` is a nested tuple of tasks [A][B]."""
  graph, params, specs = drawn(router)
  objective = Multitask(graph, router, NAMES)

  def local(params, batch):
    loss, grads, aux = accumulate(objective, params, {}, batch, jax.random.key(3), specs)
    return loss, grads, objective.metrics(aux)[0]

  mesh = make_mesh(MeshConfig(data, expert), jax.devices()[: data * expert], num_experts=4)
  program = manual(local, mesh, (specs, P(None, BATCH_AXES)), (P(), specs, P()))
  return jax.device_get(jax.jit(program)(params, laid_out(np.array(layout))))


def of_plan(kind, devices, places, microbatches=1):
  """(layout of the plan, the same rows without padding in one microbatch, task after task)."""
  plan = make_plan(kind, NAMES, LOADS, devices=devices, places=places)
  together = np.sort(plan.layout(1).ravel())
  together = together[together != EMPTY][None]
  as_tuple = lambda layout: tuple(map(tuple, layout.tolist()))
  return as_tuple(plan.layout(microbatches)), as_tuple(together)


def assert_same_gradients(got, want):
  largest = max(np.abs(x).max() for x in jax.tree.leaves(want))
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
  ):
    name = jax.tree_util.keystr(path)
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * largest, err_msg=name)


@pytest.mark.parametrize(("kind", "data", "expert", "places", "microbatches"), PLANS)
def test_a_plan_changes_neither_losses_nor_gradients(kind, data, expert, places, microbatches):
  layout, together = of_plan(kind, data * expert, places, microbatches)
  loss, grads, scalars = step(layout, data, expert)
  want_loss, want_grads, want_scalars = step(together)
  np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
  assert_same_gradients(grads, want_grads)
  for name in NAMES:
    for metric in ("cross_entropy", "counted_tokens"):
      metric = f"{metric}/{name}"
      np.testing.assert_allclose(scalars[metric], want_scalars[metric], rtol=1e-6)


def test_each_task_is_the_plain_model_with_its_gate():
  """Without losses of the routers the tasks' sums add up, so plain models are an oracle."""
  router = dataclasses.replace(PLAIN, tasks=3)
  (layout,) = of_plan("elastic", 4, 4)[1]
  loss, grads, scalars = step((layout,), router=router)
  graph, _, _ = drawn(PLAIN)
  plain = LanguageModelObjective(graph, PLAIN)
  params = drawn(router)[1]
  gates = params["stages"]["moe"]["router_gate"]

  @jax.jit
  def of_task(params, batch):
    def nats(params):
      value, sums = plain.loss(params, {}, batch, None)
      return value * sums.weight, sums.weight

    return jax.value_and_grad(nats, has_aux=True)(params)

  with_gates = lambda tree, own: (
    tree | {"stages": tree["stages"] | {"moe": tree["stages"]["moe"] | {"router_gate": own}}}
  )
  found, size = {}, len(layout)
  for task in range(3):
    batch = rows_of(task, size)
    batch.weights[layout.count(task) :] = 0
    batch.segment_ids[layout.count(task) :] = 0
    found[task] = of_task(with_gates(params, {0: gates[task]}), batch)
  weight = sum(float(value[1]) for value, _ in found.values())
  total = lambda *each: sum(np.asarray(x, np.float64) for x in each) / weight
  np.testing.assert_allclose(loss, total(*(value[0] for value, _ in found.values())), rtol=1e-6)
  own = {task: g["stages"]["moe"]["router_gate"][0] for task, (_, g) in found.items()}
  own = jax.tree.map(lambda x: total(x), own)
  shared = jax.tree.map(total, *(with_gates(g, {}) for _, g in found.values()))
  assert_same_gradients(grads, with_gates(shared, own))
  for task, name in enumerate(NAMES):
    nats, counted = found[task][0]
    np.testing.assert_allclose(scalars[f"cross_entropy/{name}"], nats / counted, rtol=1e-6)
    assert scalars[f"counted_tokens/{name}"] == counted


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_each_row_is_scored_by_its_own_gate(kind):
  index = np.array([2, 0, 1, 0, 2], np.int32)

  @jax.jit  # one program, made in less time than those of its operations
  def both(x_BSD):
    config = RouterConfig(gate=kind, tasks=3, cosine_dim=4)
    gates = make_gates(8, 4, config, init_std=0.5, rngs=nnx.Rngs(params=1))
    found = chosen_gate(gates, jnp.asarray(index))(x_BSD.reshape(-1, 8))
    return found, jnp.concatenate([gates[i](x_SD) for i, x_SD in zip(index, x_BSD)])

  found, want = both(np.random.default_rng(0).normal(size=(5, 3, 8)).astype(np.float32))
  assert np.ptp(want) > 0.1
  np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6)


def test_a_batch_without_tasks_is_refused():
  graph, params, _ = drawn(BALANCED)
  with pytest.raises(ConfigError, match=r"the batch has no domain, got router.tasks=3"):
    nnx.merge(graph, params).gates_of(Batch.of_tokens(np.zeros((2, 4), np.int32)))
  with pytest.raises(ConfigError, match="2 rows, into which 5 tokens cannot be divided"):
    GatesOfRows(None, None, np.zeros(2, np.int32))(np.zeros((5, 8)))
  turns = dataclasses.replace(BALANCED, compat=dataclasses.replace(BALANCED.compat, gates=2))
  with pytest.raises(ConfigError, match=r"router.compat.gates=2 take turns, got router.tasks=3"):
    turns.check()
