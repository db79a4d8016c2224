"""Balancing biases of a real model, from the loads of all microbatches to a resumed run.

And two gates, which share its experts and train by turns.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_fakes import bits

from scmoe.base.batch import Batch
from scmoe.parallel.mesh import shardings_of
from scmoe.run import build
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.options import CheckpointConfig
from scmoe.training.step import make_train_step

RATE, BATCH, SEQ = 0.25, 8, 8  # a rate that moves choices from one step to the next
FIELDS = {
  "model.style": "llama",  # fewer leaves to compile
  "model.wiring": "topk",
  "model.moe_every": "1",
  "model.num_layers": "2",
  "overlap.unroll": "1",
  "dispatch.capacity_factor": "4",  # room for all: what is dropped follows the microbatch
  "router.balance_loss": "0",
  "router.bias_rate": str(RATE),
}


@functools.cache
def setup(rule):
  """(step, fresh state on the host, abstract state) of a tiny model with balancing biases."""
  run = load_config(find_config("quickstart"), "smoke")
  gates = "2" if rule == "sign" else "1"
  for path, text in (FIELDS | {"router.bias": rule, "router.compat.gates": gates}).items():
    run = with_field(run, path, text)
  run = run.resolve(num_devices=1, vocab_size=build.vocab_size(run.data))
  built = build.build(run, jax.devices()[:1])
  abstract = built.abstract_state()
  step = make_train_step(built.objective, built.optimizer, abstract)
  # Drawn here: the model's own initialisation would have to be compiled.
  numbers = np.random.default_rng(0)
  fresh = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), abstract)
  draw = lambda s: numbers.normal(0, 0.3, s.shape).astype(s.dtype)
  return step, dataclasses.replace(fresh, params=jax.tree.map(draw, fresh.params)), abstract


def batches(index, parts=2):
  """The same B sequences in two microbatches [2, B, S], or all in the first; the rest is padding.

  With padding the shapes agree, and one compiled step takes both.
  """
  tokens = np.random.default_rng(index).integers(0, 40, (BATCH, SEQ + 1), np.int32)
  tokens = np.stack([tokens, tokens])
  live = np.zeros((2, BATCH, 1), np.int32)
  if parts == 1:
    live[0] = 1
  else:
    live[0, : BATCH // 2] = live[1, BATCH // 2 :] = 1
  live = np.broadcast_to(live, (2, BATCH, SEQ))
  return Batch(
    inputs=tokens[..., :-1] * live,
    targets=tokens[..., 1:] * live,
    weights=live.astype(np.float32),
    segment_ids=live,
    positions=np.arange(SEQ, dtype=np.int32) * live,
  )


def train(rule, first, last, state=None, parts=2):
  """State after optimizer steps [first, last), the biases before each, and the loads in each."""
  step, fresh, abstract = setup(rule)
  state = jax.device_put(fresh if state is None else state, shardings_of(abstract))
  biases, loads = [np.asarray(state.router["bias"])], []
  for index in range(first, last):
    state, scalars, arrays = step(state, batches(index, parts))
    assert scalars["finite"]
    biases.append(np.asarray(state.router["bias"]))
    loads.append(np.asarray(arrays["load"]))
  return state, biases, loads


@pytest.mark.parametrize("rule", ["sign", "pid"])
def test_biases_of_an_accumulated_run(rule, tmp_path):
  state, biases, loads = train(rule, 0, 4)
  for before, after, load in zip(biases, biases[1:], loads):
    missing = 1 / load.shape[1] - load
    missing = np.sign(missing) if rule == "sign" else missing
    np.testing.assert_allclose(after - before, RATE * missing, atol=1e-6)  # once, not twice
    assert (np.abs(missing).max(1) > 0.01).all(), "every layer is out of balance"
  assert np.abs(loads[1] - loads[0]).max() > 0.1, "the biases move the choice"

  _, whole_biases, whole_loads = train(rule, 0, 1, parts=1)
  np.testing.assert_array_equal(whole_loads[0], loads[0])
  np.testing.assert_array_equal(whole_biases[1], biases[1])

  halfway, _, _ = train(rule, 0, 2)
  kept = bits(halfway)
  checkpointer = Checkpointer(tmp_path, CheckpointConfig())
  checkpointer.save(2, halfway, {}, {})
  checkpointer.close()
  restored = Checkpointer(tmp_path, CheckpointConfig()).restore_latest_valid(setup(rule)[2])
  assert restored is not None
  assert bits(restored.state) == kept
  np.testing.assert_array_equal(restored.state.router["bias"], biases[2])
  assert restored.state.router["bias"].dtype == jnp.float32
  resumed, resumed_biases, _ = train(rule, 2, 4, restored.state)
  assert bits(resumed) == bits(state)
  np.testing.assert_array_equal(resumed_biases, biases[2:])


def test_gates_train_by_turns_and_the_turn_is_resumed():
  def moments(state):
    """Largest first moment of each gate."""
    gates = state.opt_state[1].mu["stages"]["moe"]["router_gate"]
    return [float(np.abs(gates[i]["weight"]).max()) for i in (0, 1)]

  one, _, _ = train("sign", 0, 1)
  assert int(one.router["turn"]) == 1
  first, second = moments(one)
  assert first > 0
  assert second == 0, "the second gate waits for its turn"
  two, _, _ = train("sign", 1, 2, one)
  assert int(two.router["turn"]) == 0
  assert moments(two)[1] > 0
  np.testing.assert_allclose(
    moments(two)[0], 0.9 * first, rtol=1e-5
  )  # beta1: no gradient of its own
  assert "turn" not in setup("pid")[2].router
