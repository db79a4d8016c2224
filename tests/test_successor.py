"""A run made of another run has its mesh, its capacity groups and its preferences' reference."""

import dataclasses

import pytest
from leaving import run_of, write_run

from scmoe import convert
from scmoe.base.errors import ConfigError
from scmoe.data.multitask.config import MultitaskConfig
from scmoe.models.low_rank import LoraConfig
from scmoe.parallel.mesh import MeshConfig
from scmoe.run.opened import open_run

REQUESTS = [
  "--upcycle=wiring=scmoe_pos1",
  "--place=devices=2,batches=2",
  "--prune=keep=4,by=random",
]


def preferences(run, **train):
  """The run on pairs of answers, which need masks between documents."""
  data = dataclasses.replace(run.data, source="preference", document_mask=True, packing="pad")
  model = dataclasses.replace(run.model, document_mask=True)
  train = dataclasses.replace(run.train, **train)
  return dataclasses.replace(run, data=data, model=model, train=train)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  root = tmp_path_factory.mktemp("sources")
  wide = run_of("affine gate", MeshConfig(data=2, expert=2))
  wide = dataclasses.replace(wide, dispatch=dataclasses.replace(wide.dispatch, groups=4))
  run = run_of("affine gate")
  write_run(wide, root / "wide")
  write_run(run_of("top1 gpt2", MeshConfig(data=1, expert=2)), root / "odd")
  write_run(preferences(run, teacher="reference"), root / "preferences")
  lora = dataclasses.replace(run, lora=LoraConfig(rank=2))
  write_run(preferences(lora), root / "adapters")
  tasks = dataclasses.replace(run, multitask=MultitaskConfig(names="a,b"))
  write_run(tasks, root / "tasks")
  words = b"several words of text " * 900
  (root / "t.txt").write_bytes(words)
  return root


def made(root, source, request):
  """The configuration of the run that a request makes of a source, on one device."""
  workdir = root / f"{source}-{request[2:7]}"
  text = [f"--text={root / 't.txt'}"] if "place" in request else []
  convert.main([f"--from={root / source}", f"--workdir={workdir}", "--mesh=data=1", request, *text])
  return open_run(str(workdir), 0).run


@pytest.mark.parametrize("request_", REQUESTS)
def test_the_new_run_has_the_mesh_and_capacity_groups_of_the_source(request_, root):
  run = made(root, "wide", request_)
  assert (run.mesh.data, run.mesh.expert) == (2, 2)
  assert run.dispatch.groups == 4


def test_a_mesh_that_fewer_experts_do_not_fit_gives_way_to_that_of_the_conversion(root):
  workdir = root / "three"
  convert.main([f"--from={root / 'odd'}", f"--workdir={workdir}", "--mesh=data=1",
                "--prune=keep=3,by=random"])  # fmt: skip
  assert open_run(str(workdir), 0).run.mesh.size == 1


@pytest.mark.parametrize("request_", [REQUESTS[0], REQUESTS[2]])
def test_a_run_of_preferences_keeps_its_reference(request_, root):
  run = made(root, "preferences", request_)
  assert run.train.teacher == "reference"
  assert run.data.reads_preferences


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize(
  ("source", "words"),
  [
    ("adapters", "merges the adapters into their base, which is the reference of this run's pref"),
    ("tasks", "has gates of its own for each task and cannot be a source; give a run without mult"),
  ],
)
def test_what_cannot_be_a_source_is_one_line(source, words, request_, root):
  with pytest.raises(ConfigError, match=words) as caught:
    convert.main([f"--from={root / source}", f"--workdir={root / 'new'}", request_])
  assert "\n" not in str(caught.value)
  assert not (root / "new").exists()
