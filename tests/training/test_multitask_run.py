"""A run of two tasks through the commands: trained, stopped, planned anew, evaluated, generated."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from scmoe import convert, evaluate
from scmoe.base.errors import ConfigError, Preempted
from scmoe.data import DataConfig
from scmoe.data.multitask.config import MultitaskConfig
from scmoe.inference.sampling import Sampling
from scmoe.inspect import inspect_run
from scmoe.models.config import ModelConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.parallel.mesh import MeshConfig
from scmoe.run.config import RunConfig
from scmoe.run.multitask import loaded_as, of_task, stored_as, stored_name
from scmoe.run.opened import open_run
from scmoe.run.session import Session
from scmoe.train import beginning, train
from scmoe.training.metrics import read_metrics
from scmoe.training.options import CheckpointConfig, OptimizerConfig, TrainConfig

RUN = RunConfig(
  name="tasks",
  model=ModelConfig(
    wiring="top2",
    num_experts=4,
    num_layers=2,
    width=16,
    num_heads=2,
    mlp_hidden=24,
    context=32,
    document_mask=True,
    dtype="float32",
  ),
  dispatch=DispatchConfig(transport="dropless"),
  mesh=MeshConfig(data=2),
  data=DataConfig(
    source="mixture",
    mixture="procedural:markov:3,procedural:recall:1",
    seq_len=16,
    limit_bytes=20000,
    validation_fraction=0.1,
  ),
  multitask=MultitaskConfig(names="chains,recall", lengths="16,8"),
  train=TrainConfig(steps=4, batch_size=8, log_every=1, eval_batches=2, stop_after=2),
  optimizer=OptimizerConfig(warmup_steps=1, learning_rate=1e-2),
  checkpoint=CheckpointConfig(every=2, keep=3),
)
GREEDY = Sampling(temperature=0.0)


def changed(section, run=RUN, **fields):
  return dataclasses.replace(run, **{section: dataclasses.replace(getattr(run, section), **fields)})


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run that was stopped after two steps and went on with other loads."""
  folder = tmp_path_factory.mktemp("tasks") / "run"
  with pytest.raises(Preempted, match="stopped at step 2 of 4"):
    train(RUN, folder)
  on = changed("train", stop_after=0)
  with pytest.raises(ConfigError, match=r"multitask.lengths: 16,8 -> 16,4"):
    train(changed("multitask", on, lengths="16,4"), folder)
  train(changed("multitask", on, loads="1,1"), folder)
  return folder


@pytest.fixture(scope="module")
def figures(workdir):
  return evaluate.evaluate_run(str(workdir))


def test_loads_may_change_when_a_run_goes_on(workdir):
  """Rows of a step: 6 and 2 of the 8, then 4 and 4; of a task's 16 tokens a row all count."""
  steps = {line["step"]: line for line in read_metrics(workdir, "train")}
  for step, rows in ((1, (6, 2)), (2, (6, 2)), (3, (4, 4)), (4, (4, 4))):
    for name, count in zip(("chains", "recall"), rows):
      assert steps[step][f"counted_tokens/{name}"] == 16 * count
    both = [steps[step][f"cross_entropy/{name}"] for name in ("chains", "recall")]
    assert steps[step]["cross_entropy"] == pytest.approx(np.average(both, weights=rows), rel=1e-5)


def test_evaluation_tells_the_tasks_apart(workdir, figures, capsys):
  assert set(figures["domains"]) == {"chains", "recall"}
  for name, own in figures["domains"].items():
    alone = evaluate.evaluate_run(str(workdir), task=name)
    assert alone["tokens"] == own["tokens"]
    assert alone["loss"] == pytest.approx(own["loss"], rel=1e-5)
    assert own["bigram_bits_per_byte"] > 0
  assert "task recall" in evaluate.table(alone)
  line = read_metrics(workdir, "eval")[-1]
  assert {"bits_per_byte/chains", "bits_per_byte/recall"} <= set(line)


def test_a_task_of_less_than_a_batch_is_evaluated(workdir, figures):
  """A run trains on tasks whose text fills no batch of their own; evaluation reads other text."""
  large = {"train.batch_size": "4096"}
  alone = evaluate.evaluate_run(str(workdir), task="recall", changed=large)
  assert alone["loss"] == pytest.approx(figures["domains"]["recall"]["loss"], rel=1e-5)
  assert alone["bigram_bits_per_byte"] > 0


def test_other_text_is_read_with_the_gates_of_a_task(workdir, tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
  other = {"data.path": str(text)}
  losses = [evaluate.evaluate_run(str(workdir), changed=other, task=name)["loss"]
            for name in ("chains", "recall")]  # fmt: skip
  assert losses[0] != losses[1]
  with pytest.raises(ConfigError, match="name one of: chains, recall"):
    evaluate.evaluate_run(str(workdir), changed=other)


def test_gates_go_to_tasks_of_the_same_names_alone(workdir, tmp_path):
  """Checkpoints number the gates, so that tasks in another order would get each other's."""
  begun = changed("train", stop_after=0, init_from=str(workdir))
  begun = changed("data", begun, mixture="procedural:recall:1,procedural:markov:3")
  begun = changed("multitask", begun, names="recall,chains", lengths="8,16")
  with pytest.raises(ConfigError, match="for the tasks chains,recall, this run for the tasks rec"):
    train(begun, tmp_path / "swapped")


@pytest.mark.parametrize(
  ("names", "words"),
  [("chains,recall", "has gates for no tasks, this run for the tasks chains,recall"),
   ("", "has gates for the tasks chains,recall, this run for no tasks")],
)  # fmt: skip
def test_gates_that_take_turns_are_not_those_of_tasks(names, words, monkeypatch, tmp_path):
  """Two gates of `router.compat.gates` have the shapes of two tasks' gates."""
  turns = changed("multitask", names="", lengths="")
  here, there = (RUN, turns) if names else (turns, RUN)
  monkeypatch.setattr("scmoe.train.open_named", lambda *_: SimpleNamespace(run=there))
  built = SimpleNamespace(run=changed("train", here, init_from="base"))
  with pytest.raises(ConfigError, match=words):
    beginning(built, tmp_path)


@pytest.mark.nightly
def test_a_converted_task_writes_what_the_run_writes(workdir, tmp_path):
  folder = tmp_path / "model"
  convert.main(["--workdir", str(workdir), "--inference", str(folder), "--task", "recall"])
  session = Session(model=str(folder))
  text = session.texts(["12"], GREEDY, max_new_tokens=6)
  assert text == Session(str(workdir), task="recall").texts(["12"], GREEDY, max_new_tokens=6)


def test_inspection_probes_each_row_with_its_gate(workdir):
  found = inspect_run(str(workdir), batches=2)
  assert found.domains == ("chains", "recall")
  load = np.asarray(found.probe.domain_load_GDE)
  np.testing.assert_allclose(load.sum(-1), 1, rtol=1e-5)
  assert not np.allclose(load[:, 0], load[:, 1])


@pytest.mark.parametrize(
  ("task", "words"), [("", "name one of: chains, recall"), ("sums", "--task='sums' is no task")]
)
def test_a_model_with_one_gate_needs_a_task(workdir, task, words):
  with pytest.raises(ConfigError, match=words):
    Session(str(workdir), task=task)
  with pytest.raises(ConfigError, match=words):
    convert.main(["--workdir", str(workdir), "--to", str(workdir / "no"), "--task", task])


def test_the_run_of_a_task_is_a_plain_run(workdir):
  stored = open_run(str(workdir), None).run
  run, gate = of_task(stored, "recall")
  assert gate == 1
  assert run.router.tasks == 0
  assert not run.multitask.names
  assert (run.data.source, run.data.path, run.data.seq_len) == ("procedural", "recall", 8)
  tree = {"moe": {"router_gate": {0: {"weight": 1}}, "experts": 2}}
  assert stored_as(tree, 1) == {"moe": {"router_gate": {1: {"weight": 1}}, "experts": 2}}
  assert loaded_as(stored_as(tree, 1), 1) == tree
  assert stored_as(tree, None) is tree
  assert stored_name("params.moe.router_gate.0.weight", 1) == "params.moe.router_gate.1.weight"
  with pytest.raises(ConfigError, match="names a task, the run 'run' has none"):
    of_task(RunConfig(), "recall")


@pytest.mark.parametrize(
  ("section", "fields", "words"),
  [
    ("model", {"wiring": "dense"}, "has no routed experts"),
    ("model", {"document_mask": False}, "set model.document_mask=True"),
    ("router", {"tasks": 3}, "router.tasks=3 does not fit multitask.names"),
    ("train", {"teacher": "runs/a"}, "does not go with train.teacher"),
    ("multitask", {"loads": "100,1"}, "gives task 'recall' none of the 8 rows"),
  ],
)
def test_what_tasks_do_not_go_with(section, fields, words):
  with pytest.raises(ConfigError, match=words):
    changed(section, **fields).resolve(num_devices=2, vocab_size=257)
