"""The moving average of the weights: its values, its checkpoints, its evaluation and its export."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from leaving import write_run
from training_fakes import OPTIMIZER, Poisoned, Setup, Source, bits

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError, Preempted
from scmoe.evaluate import evaluate_run
from scmoe.inference.offload.plan import OffloadRequest, Workload
from scmoe.run.build import vocab_size
from scmoe.run.config import RunConfig
from scmoe.run.config_files import find_config, load_config
from scmoe.run.exported import export_inference
from scmoe.run.opened import open_model, open_run
from scmoe.train import train
from scmoe.training.masters import readable
from scmoe.training.metrics import read_metrics

DECAY = 0.5


def averaging():
  return dataclasses.replace(OPTIMIZER, ema=DECAY)


def leaves(tree):
  return [np.asarray(x, np.float64) for x in jax.tree.leaves(jax.device_get(tree))]


def steps_of(setup, count, **source):
  """The states after 0, 1, ... steps, on the host."""
  state, data = setup.state(), Source(8, **source)
  states = [jax.device_get(state)]
  for i in range(count):
    state, _, _ = setup.step(state, Batch.stack([data.batch(i)]))
    states.append(jax.device_get(state))
  return states


def test_the_average_is_that_of_the_weights(mesh8):
  """Against the sum that the recursion unrolls to, in float64; decays 1/10, 2/11, ... up to 1/2."""
  states = steps_of(Setup(mesh8, optimizer=averaging()), 12)
  decays = [min(DECAY, (1 + n) / (10 + n)) for n in range(12)]
  assert decays[0] < decays[1] < decays[-1] == DECAY
  shares = [(1 - d) * np.prod(decays[i + 1 :]) for i, d in enumerate(decays)]
  for leaf in range(len(leaves(states[0].params))):
    wanted = np.prod(decays) * leaves(states[0].params)[leaf]
    wanted = wanted + sum(s * leaves(x.params)[leaf] for s, x in zip(shares, states[1:]))
    np.testing.assert_allclose(leaves(states[-1].average)[leaf], wanted, rtol=2e-6, atol=1e-7)


def test_the_weights_are_those_without_an_average(mesh8):
  plain, averaged = (steps_of(Setup(mesh8, optimizer=o), 3)[-1] for o in (OPTIMIZER, averaging()))
  assert plain.average is None
  assert bits(plain) == bits(dataclasses.replace(averaged, average=None))


def test_a_skipped_step_changes_no_bit_of_it(mesh8):
  states = steps_of(Setup(mesh8, Poisoned(), averaging()), 3, bad=(1,))
  assert states[2].skipped == 1
  assert bits(states[2].average) == bits(states[1].average)
  assert bits(states[3].average) != bits(states[2].average)


def run_of(**fields) -> RunConfig:
  run = load_config(find_config("quickstart"), "smoke")
  options = {"steps": 4, "eval_every": 2, "eval_batches": 0, "tensorboard": False, **fields}
  return dataclasses.replace(
    run,
    model=dataclasses.replace(run.model, dtype="float32", num_layers=2),
    data=dataclasses.replace(run.data, limit_bytes=30_000),  # all validation text is evaluated
    train=dataclasses.replace(run.train, **options, sample_tokens=0),
    optimizer=dataclasses.replace(run.optimizer, learning_rate=1e-2, ema=0.9),
    dispatch=dataclasses.replace(run.dispatch, groups=2),  # as two data ranks have
    mesh=dataclasses.replace(run.mesh, data=1, expert=1, tensor=1),
  )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """(workdir, final state) of a run that was not cut."""
  workdir = tmp_path_factory.mktemp("averaged") / "whole"
  return workdir, train(run_of(), workdir)


def test_a_resumed_run_has_the_same_average(whole, tmp_path):
  with pytest.raises(Preempted, match="stopped at step 2"):
    train(run_of(stop_after=2), tmp_path / "cut")
  resumed = train(run_of(), tmp_path / "cut")
  assert bits(resumed) == bits(whole[1])
  assert read_metrics(tmp_path / "cut", "eval") == read_metrics(whole[0], "eval")


@pytest.mark.nightly  # by day each is shown alone: here, and in test_state_shares.py
@pytest.mark.parametrize("mode", ["moments", "parameters"])
def test_data_ranks_share_it(mode, whole, tmp_path):
  run = run_of()
  run = dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, data=2, shard_state=mode))
  state = train(run, tmp_path / mode)
  for a, b in zip(jax.tree.leaves(state.average), jax.tree.leaves(whole[1].average), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  specs = {str(x.sharding.spec) for x in jax.tree.leaves(state.average)}
  assert any("data" in spec for spec in specs)
  found, wanted = (read_metrics(folder, "eval")[-1] for folder in (tmp_path / mode, whole[0]))
  assert found["ema_loss"] == pytest.approx(wanted["ema_loss"], abs=1e-4)


def test_it_is_evaluated_beside_the_weights_and_exported(whole, tmp_path):
  workdir, _ = whole
  last = read_metrics(workdir, "eval")[-1]
  assert abs(last["ema_loss"] - last["loss"]) > 1e-4
  names = {name.removeprefix("ema_") for name in last if name.startswith("ema_")}
  assert names == {n for n in last if not n.startswith("ema_")} - {"step", "kind"}
  raw, averaged = (evaluate_run(str(workdir), ema=ema) for ema in (False, True))
  assert raw["loss"] == pytest.approx(last["loss"], rel=1e-6)
  assert averaged["loss"] == pytest.approx(last["ema_loss"], rel=1e-6)
  export_inference(workdir, tmp_path / "averaged", ema=True)
  exported = evaluate_run(model=str(tmp_path / "averaged"))
  assert exported["loss"] == pytest.approx(last["ema_loss"], rel=1e-6)


def test_it_is_read_with_experts_in_the_hosts_memory(whole):
  workdir, state = whole
  stored = open_run(str(workdir), None)
  opened = open_model(
    stored.run,
    str(workdir),
    stored.step,
    request=OffloadRequest(offload="blocking"),
    load=Workload(rows=1, prompt=8, new=4),
    ema=True,
  )
  assert opened.model.taken_apart
  total = lambda tree: sum(np.square(x).sum() for x in leaves(tree))
  assert total(nnx.state(opened.model)) == pytest.approx(total(state.average), rel=1e-9)
  assert total(state.average) != pytest.approx(total(readable(state.params)), rel=1e-6)


def test_a_run_without_an_average_says_so(tmp_path):
  run = run_of()
  plain = dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, ema=0.0))
  write_run(plain.resolve(num_devices=1, vocab_size=vocab_size(run.data)), tmp_path / "plain")
  said = r"was trained with optimizer\.ema=0 and has no average of its weights"
  with pytest.raises(ConfigError, match=said):
    evaluate_run(str(tmp_path / "plain"), ema=True)
  with pytest.raises(ConfigError, match=said):
    export_inference(tmp_path / "plain", tmp_path / "out", ema=True)


@pytest.mark.nightly  # two runs, to begin an average with the first one's weights
def test_an_average_begins_with_the_weights_that_a_run_begins_with(tmp_path):
  run = run_of(steps=1, eval_every=0, eval_batches=1)
  plain = dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, ema=0.0))
  train(plain, tmp_path / "plain")
  begun = dataclasses.replace(
    run,
    train=dataclasses.replace(run.train, init_from=str(tmp_path / "plain")),
    optimizer=dataclasses.replace(run.optimizer, learning_rate=0.0),
  )
  state = train(begun, tmp_path / "begun")
  for a, b in zip(jax.tree.leaves(state.average), jax.tree.leaves(state.params), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)
