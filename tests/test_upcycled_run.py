"""A trained run as the start of a run with another wiring, which learns from it."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from covering import night

from scmoe import convert, evaluate, train
from scmoe.base.errors import CheckpointError, ConfigError, DataError, Preempted
from scmoe.pretrained.stream import leaves_of
from scmoe.pretrained.upcycle import plan
from scmoe.run import build, placement
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.run.opened import open_run
from scmoe.run.upcycled import check_fit
from scmoe.training.metrics import read_metrics
from scmoe.training.restore import restore_stored

QUICK = ("--config.train.tensorboard=false", "--config.checkpoint.keep=9",
         "--config.train.sample_tokens=0")  # fmt: skip
UNIT = "params.stages.units.0."


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """A top-k run of GPT-2's style with a MoE in every second block, after steps 2 and 3."""
  jax.config.update("jax_disable_most_optimizations", True)
  root = tmp_path_factory.mktemp("upcycled")
  words = np.random.default_rng(0).choice(["one", "two", "three", "and"], 4000)
  (root / "text.txt").write_text(" ".join(words))
  sizes = ("wiring=topk", "top_k=2", "num_layers=2")
  train.main([
    "--config=distillation", "--smoke", *QUICK, f"--workdir={root / 'teacher'}",
    "--config.mesh.data=1", *(f"--config.model.{size}" for size in sizes),
    "--config.router.bias=sign", "--config.checkpoint.every=2",
    "--config.data.tokenizer=bpe", "--config.data.vocab_size=264",
    "--config.data.source=auto", f"--config.data.path={root / 'text.txt'}",
  ])  # fmt: skip
  yield root
  jax.config.update("jax_disable_most_optimizations", False)


def made(root, name, text, *argv):
  """Converts the teacher to the run root / name."""
  flags = [f"--from={root / 'teacher'}", f"--workdir={root / name}", f"--upcycle={text}"]
  convert.main([*flags, "--mesh=data=1", *argv])


def leaves(workdir, step):
  stored = open_run(str(workdir), step)
  built = build.build(placement.on_mesh(stored.run, "data=1"))
  return jax.device_get(restore_stored(workdir, leaves_of(built), step))


def test_a_run_of_the_same_wiring_is_a_copy(root, capsys):
  made(root, "same", "wiring=topk", "--step=2")
  out = capsys.readouterr().out
  assert "topk, upcycled: every parameter is a copy" in out
  found, source = leaves(root / "same", 0), leaves(root / "teacher", 2)
  assert found.keys() == source.keys()
  assert "router.bias" in found
  jax.tree.map(np.testing.assert_array_equal, found, source)
  assert (root / "same" / "tokenizer.json").read_text() == (
    root / "teacher" / "tokenizer.json"
  ).read_text()


def test_another_wiring_keeps_what_the_map_says(root, capsys):
  """Block 0's MLP and all MoEs stay; the shortcut's norm copies the one before the experts."""
  made(root, "pos2", "wiring=scmoe_pos2")
  said = capsys.readouterr().out
  found, source = leaves(root / "pos2", 0), leaves(root / "teacher", 3)
  for name, value in source.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
  new = found.keys() - source.keys()
  mlp = {f"{UNIT}blocks.1.mlp.{n}" for n in ("up", "down", "up_bias", "down_bias")}
  assert new == mlp | {f"{UNIT}own_norm.scale", f"{UNIT}own_norm.bias"}
  for part in ("scale", "bias"):
    wanted = source[f"{UNIT}blocks.1.norm_mlp.{part}"]
    np.testing.assert_array_equal(found[f"{UNIT}own_norm.{part}"], wanted)
  assert not found[f"{UNIT}blocks.1.mlp.down"].any()
  assert not found[f"{UNIT}blocks.1.mlp.down_bias"].any()
  assert found[f"{UNIT}blocks.1.mlp.up"].any()
  assert "stages.units.0.blocks.1.mlp.up: random" in said
  assert f"--config.train.teacher={root / 'teacher'}" in said
  model = open_run(str(root / "pos2"), 0).run.model
  assert (model.mix, model.shortcut_norm, model.top_k) == ("direct", "own", 2)


@pytest.mark.parametrize("compared", [False, night(True)], ids=["whole", "resumed and compared"])
def test_the_new_run_learns_from_its_source_resumes_and_is_evaluated(root, compared, capsys):
  """By day test_teacher.py resumes a student, and compares it with one that was not stopped."""
  new = root / f"halves-{compared}"
  for name in [new.name, "whole"][: 1 + compared]:
    made(root, name, "wiring=farskip")
  taught = (f"--config.train.teacher={root / 'teacher'}", "--config.train.steps=2")

  def run(name, *argv):
    flags = [f"--config_json={root / name / 'config.json'}", f"--workdir={root / name}"]
    train.main([*flags, *taught, *QUICK, *argv])

  if compared:
    with pytest.raises(Preempted):
      run(new.name, "--config.train.stop_after=1")
  run(new.name, "--config.train.stop_after=0")
  if compared:
    run("whole")
    jax.tree.map(np.testing.assert_array_equal, leaves(root / "whole", 2), leaves(new, 2))
  lines = read_metrics(new)
  assert [line["step"] for line in lines] == [1, 2]
  assert all(line["divergence"] > 0 for line in lines)
  assert not np.array_equal(*(leaves(new, i)[f"{UNIT}own_norm.scale"] for i in (0, 2)))
  assert json.loads((new / "teacher.json").read_text())["step"] == 3
  figures = evaluate.evaluate_run(str(new), mesh="data=1", max_batches=1)
  assert np.isfinite(figures["loss"])
  # It is a source in its turn: its shared expert and its norm stay.
  pos1 = f"pos1-{compared}"
  flags = [f"--from={new}", f"--workdir={root / pos1}", "--upcycle=wiring=scmoe_pos1"]
  convert.main([*flags, "--mesh=data=1"])
  found, source = leaves(root / pos1, 0), leaves(new, 2)
  jax.tree.map(np.testing.assert_array_equal, found, source)
  assert open_run(str(root / pos1), 0).run.train.teacher == ""


@pytest.mark.parametrize(
  ("source", "argv", "error", "words"),
  [
    ("teacher", ["--upcycle="], ConfigError, "is a run of this project.*add --upcycle"),
    ("teacher", ["--upcycle=wiring=dense"], ConfigError, "wiring='dense' is not supported"),
    ("teacher", ["--upcycle=experts=4"], ConfigError, "has experts already: leave experts"),
    ("teacher", ["--upcycle=wiring=top1", "--ema"], ConfigError, "no average of its weights"),
    ("teacher", ["--upcycle=wiring=top1", "--step=1"], CheckpointError, "checkpoint of step 1"),
    ("teacher", ["--upcycle=wiring=top1", "--workdir={root}/teacher"], ConfigError, "run already"),
    ("nothing", ["--upcycle=wiring=top1"], DataError, "nothing"),
  ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(root, source, argv, error, words):
  flags = [f"--from={root / source}", f"--workdir={root / 'new'}", "--mesh=data=1"]
  with pytest.raises(error, match=words) as caught:
    convert.main([*flags, *(word.format(root=root) for word in argv)])
  assert "\n" not in str(caught.value)
  assert not (root / "new").exists()


def test_an_inference_checkpoint_begins_no_run(root):
  folder = root / "folder"
  convert.main([f"--workdir={root / 'teacher'}", f"--inference={folder}", "--mesh=data=1"])
  with pytest.raises(ConfigError, match="is an inference checkpoint; give the folder of the run"):
    convert.main([f"--from={folder}", f"--workdir={root / 'new'}", "--upcycle=wiring=top1"])


@pytest.mark.parametrize(
  ("source", "text", "words"),
  [
    ({"wiring": "dgmoe"}, "wiring=scmoe_pos2", "model.wiring='dgmoe', whose experts serve several"),
    ({"wiring": "scmoe_pos2"}, "wiring=topk", "has no place for the shared expert of the source"),
    ({"wiring": "dense"}, "wiring=farskip", "the source has no experts: add experts=N"),
    ({"wiring": "dense", "zero_experts": 2}, "experts=4", "model.zero_experts=2, which would"),
    ({"wiring": "scmoe_pos2", "shortcut_norm": "megatron"}, "wiring=farskip", "use 'shared' or"),
  ],
)
def test_maps_that_cannot_be(root, source, text, words):
  run = open_run(str(root / "teacher"), 3).run
  model = dataclasses.replace(run.model, **source).resolve()
  with pytest.raises(ConfigError, match=words) as caught:
    plan(text, model, run.router)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("source", "norm"),
  [
    ({"wiring": "top2", "top_k": 1}, ("blocks.1.norm_mlp", False, "")),
    ({"wiring": "scmoe_pos1"}, ("blocks.1.norm_attention", False, "")),
    ({"wiring": "scmoe_pos2"}, ("blocks.0.norm_mlp", False, "")),
    ({"wiring": "scmoe_pos3"}, ("blocks.0.norm_attention", False, "")),
    (
      {"wiring": "scmoe_pos2", "moe_every": 1},
      ("blocks.0.norm_mlp", True, "blocks.0.norm_attention"),
    ),
    (
      {"wiring": "scmoe_pos2_l0", "num_layers": 4},
      ("blocks.0.norm_mlp", False, "blocks.1.norm_attention"),
    ),
    ({"wiring": "scmoe_pos3", "moe_every": 1}, ("blocks.0.norm_attention", True, "")),
    ({"wiring": "farskip"}, ("blocks.1.norm_mlp", False, "")),
  ],
)
def test_the_shortcut_begins_with_the_norm_of_the_experts(root, source, norm):
  """It copies the norm through which the source's experts read, whatever value they read."""
  run = open_run(str(root / "teacher"), 3).run
  model = dataclasses.replace(run.model, **source).resolve()
  text = "wiring=scmoe_pos1" if source["wiring"] == "farskip" else "wiring=farskip"
  found = plan(text, model, run.router)
  assert (found.norm, found.norm_of_layer_before, found.first_norm) == norm
  assert found.model.top_k == 2  # top2 has two experts a token whatever model.top_k says
  assert found.model.shortcut_norm == "own"


@pytest.mark.parametrize(
  ("wiring", "norm"), [("farskip", "own_norm"), ("farskip_routed", "blocks.1.norm_mlp")]
)
def test_the_norm_is_fitted_to_text(root, wiring, norm, capsys):
  new = f"fitted-{wiring}"
  made(root, new, f"wiring={wiring}", "--fit=20", f"--text={root / 'text.txt'}")
  said = capsys.readouterr().out
  assert f"stages.units.0.{norm}.scale: fitted to what the experts read in the source" in said
  copied, fitted = re.findall(r"(?:copied|fitted) (\d+\.\d+)", said)
  assert float(fitted) < float(copied)
  found, source = leaves(root / new, 0), leaves(root / "teacher", 3)
  assert not np.array_equal(found[f"{UNIT}{norm}.scale"], source[f"{UNIT}blocks.1.norm_mlp.scale"])
  others = {n for n in found.keys() & source.keys() if norm not in n}
  jax.tree.map(np.testing.assert_array_equal, *({n: x[n] for n in others} for x in (found, source)))


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (["--upcycle=wiring=top2", "--fit=5"], "norm of a shortcut, which wiring='top2' lacks"),
    (["--upcycle=wiring=farskip", "--fit=-1"], "--fit=-1 is no number of sequences"),
    (
      ["--upcycle=wiring=farskip", "--text=x"],
      "--text goes with --place or --prune, or with --fit",
    ),
    (["--upcycle=wiring=farskip", "--fit=5", "--mesh=data=2"], "one device, got a mesh of 2"),
  ],
)
def test_what_cannot_be_fitted(root, argv, words):
  flags = [f"--from={root / 'teacher'}", f"--workdir={root / 'new'}", "--mesh=data=1"]
  with pytest.raises(ConfigError, match=words) as caught:
    convert.main([*flags, *argv])
  assert "\n" not in str(caught.value)
  assert not (root / "new").exists()


def test_a_moe_with_zero_experts_stays_in_its_layer(root):
  """Zero experts return their input, so the first layer's copy would not be silent."""
  run = open_run(str(root / "teacher"), 3).run
  model = dataclasses.replace(run.model, moe_every=1, zero_experts=2).resolve()
  planned = plan("wiring=scmoe_pos2", model, run.router)
  assert not planned.moves
  assert not planned.norm_of_layer_before


def test_experts_that_move_read_what_they_read_before(root):
  run = open_run(str(root / "teacher"), 3).run
  model = dataclasses.replace(run.model, moe_every=1).resolve()
  planned = plan("wiring=scmoe_pos2", model, run.router)
  with pytest.raises(ConfigError, match="--fit has nothing to fit: under wiring='scmoe_pos2'"):
    check_fit(run, planned, 1)


def test_a_run_is_compared_with_a_wiring_that_has_no_norm_of_its_own():
  """With the student's `shortcut_norm` that wiring would be refused."""
  run = load_config(find_config("upcycle_small"))
  run = with_field(with_field(run, "model.wiring", "scmoe_pos2"), "model.shortcut_norm", "own")
  found = build.with_wiring(run, "farskip_routed").resolve(num_devices=1, vocab_size=64)
  assert found.model.shortcut_norm == "shared"
  assert build.with_wiring(run, "farskip").model.shortcut_norm == "own"
