"""Runs of earlier versions go on: names are translated, numbers are those of then."""

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from covering import night
from training_fakes import Setup, bits

from scmoe.base.errors import CheckpointError, ConfigError
from scmoe.blocks.schedule import make_schedule
from scmoe.run import build
from scmoe.run.config import from_dict, from_json, to_dict
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.train import train
from scmoe.training import description
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.metrics import read_metrics
from scmoe.training.options import CheckpointConfig
from scmoe.training.restore import read_meta, restore_part
from scmoe.training.schema import SCHEMA, upgraded, upgraded_config

OLD = Path(__file__).parents[1] / "golden" / "schema1"
EXPECTED = json.loads((OLD / "expected.json").read_text())


@pytest.fixture
def workdir(tmp_path):
  """A copy of the old run."""
  shutil.copytree(OLD / "checkpoints", tmp_path / "run" / "checkpoints")
  shutil.copy(OLD / "config.json", tmp_path / "run")
  return tmp_path / "run"


def old_run(**fields):
  """The old run's configuration by the names of today."""
  run = from_json((OLD / "config.json").read_text())
  for name, value in fields.items():
    run = with_field(run, name.replace("__", "."), str(value))
  return run


def assert_lines(got, want):
  """Every number that was recorded."""
  assert [line["step"] for line in got] == [line["step"] for line in want]
  for line, expected in zip(got, want):
    for name, value in expected.items():
      assert line[name] == pytest.approx(value, rel=2e-5, abs=1e-6), (line["step"], name)


# -- a whole run ----------------------------------------------------------------------------------


def test_the_fixture_is_small_and_names_no_machine():
  files = [f for f in OLD.rglob("*") if f.is_file()]
  assert sum(f.stat().st_size for f in files) < 300 * 1024
  assert json.loads((OLD / "checkpoints/2/meta/metadata").read_text())["schema"] == 1
  for path in (b"/tmp/", b"/home/", b"/root/"):
    assert not [f for f in files if path in f.read_bytes()]


@pytest.mark.parametrize("expert", [1, night(4)])  # by day test_checkpoint.py changes meshes
def test_a_run_of_schema_1_goes_on_as_it_would_have(workdir, capsys, expert):
  """The same loss, gradients and routing in every step, on one device or on four."""
  train(old_run(mesh__expert=expert), workdir)
  shown = capsys.readouterr()
  assert "resuming from step 2" in shown.out
  assert_lines(read_metrics(workdir), EXPECTED["train"])
  assert_lines(read_metrics(workdir, "eval"), EXPECTED["eval"])
  # Only what was asked for differs from the stored configuration.
  changed = re.findall(r"^ *(\S+: .* -> .*)$", shown.out, re.MULTILINE)
  assert changed == ["mesh.expert: 1 -> 4"] * (expert > 1)
  # What is saved from here on has the names of today.
  meta = read_meta(workdir, 5)
  assert meta["schema"] == SCHEMA
  assert "params.stages.moe.experts.up" in meta["leaves"]
  assert not any("stored_as" in leaf for leaf in meta["leaves"].values())
  assert meta["config"]["router"]["compat"]["order"] == "priority"
  # And is resumed from: nothing is left to do, nothing written twice.
  train(old_run(mesh__expert=expert), workdir)
  assert len(read_metrics(workdir)) == len(EXPECTED["train"])


def test_weights_can_be_read_alone(workdir):
  """Evaluation and generation read weights alone."""
  run = old_run().resolve(num_devices=1, vocab_size=320)
  built = build.build(run, jax.devices()[:1])
  abstract = built.abstract_state()
  whole = Checkpointer(workdir, CheckpointConfig()).restore_latest_valid(abstract)
  assert whole is not None
  part = restore_part(workdir, {"params": abstract.params, "router": abstract.router})
  assert bits(part) == bits({"params": whole.state.params, "router": whole.state.router})
  assert set(whole.state.router) == {"bias"}  # `skewed` is gone
  assert np.abs(whole.state.router["bias"]).max() == pytest.approx(0.1)  # two steps of 0.05


def test_another_setting_under_a_new_name_is_refused(workdir):
  with pytest.raises(ConfigError, match=r"router\.compat\.order: priority -> choice"):
    train(old_run(router__compat__order="choice"), workdir)


def test_damage_is_found_under_the_old_names_too(workdir, capsys):
  largest = max((workdir / "checkpoints/2/state").rglob("d/*"), key=lambda f: f.stat().st_size)
  data = bytearray(largest.read_bytes())
  data[len(data) // 2] ^= 1
  largest.write_bytes(data)
  with pytest.raises(CheckpointError, match=r"2\.bad-.* are damaged"):
    train(old_run(), workdir)
  assert "is damaged" in capsys.readouterr().err


def test_a_later_schema_is_one_clear_error(mesh1, tmp_path, monkeypatch):
  setup = Setup(mesh1)
  monkeypatch.setattr(description, "SCHEMA", SCHEMA + 1)
  saver = Checkpointer(tmp_path, CheckpointConfig(async_save=False))
  saver.save_now(7, setup.state(), {}, {"config": {}})
  message = rf"step 7 has schema {SCHEMA + 1}, this version of scmoe reads 1 to {SCHEMA}; use"
  for read in (lambda: saver.restore_latest_valid(setup.abstract), lambda: read_meta(tmp_path)):
    with pytest.raises(CheckpointError, match=message) as caught:
      read()
    assert "\n" not in str(caught.value)
  assert saver.steps() == [7], "a checkpoint that cannot be read is not a damaged one"


# -- names ----------------------------------------------------------------------------------------


def test_leaves_of_every_kind_of_expert():
  names = [f"{part}.stages.moe.{name}" for part in ("params", "opt_state.1.mu", "opt_state.1.nu")
           for name in ("up", "gate", "down", "up_bias", "down_bias")]  # fmt: skip
  others = ["step", "router.bias", "params.stages.moe.router_gate.0.weight"]
  others += [
    "params.stages.units.0.blocks.0.mlp.up",
    "params.stages.units.0.blocks.0.mlp.down_bias",
  ]
  leaves = {name: {"shape": [index]} for index, name in enumerate([*names, *others])}
  meta = {"schema": 1, "config": {}, "leaves": leaves | {"router.skewed": {"shape": []}}}
  got = upgraded(copy.deepcopy(meta))["leaves"]
  assert set(got) == {n.replace("moe.", "moe.experts.") for n in names} | set(others)
  assert [leaf["stored_as"] for leaf in got.values()] == list(leaves), "in the order of the state"
  assert all(leaf["shape"] == leaves[leaf["stored_as"]]["shape"] for leaf in got.values())
  now = meta | {"schema": SCHEMA}
  assert upgraded(copy.deepcopy(now)) == now


@pytest.mark.parametrize(
  ("old", "new"),
  [
    ({"router": {"order": "priority"}}, {"router": {"compat": {"order": "priority"}}}),
    ({"router": {"weights": "before"}}, {"router": {"compat": {"weights": "before"}}}),
    ({"router": {"weight_norm": 2.0}}, {"router": {"compat": {"weight_norm": 2.0}}}),
    ({"router": {"jitter": 0.1}}, {"router": {"compat": {"jitter": 0.1}}}),
    ({"router": {"uniform": True}}, {"router": {"compat": {"uniform": True}}}),
    ({"router": {"round_to": 8}}, {"router": {"compat": {"round_to": 8}}}),
    ({"router": {"gate": "cosine", "noise": 1.0}}, {"router": {"gate": "cosine", "noise": 1.0}}),
    ({"dispatch": {"further": "retry", "chunks": 2}}, {"dispatch": {"chunks": 2}}),
    ({"overlap": {"gradients": "step"}}, {"overlap": {}}),
    ({"overlap": {"barriers": True}}, {"overlap": {"order": "barriers"}}),
    ({"overlap": {"barriers": False}}, {"overlap": {"order": "xla"}}),
    ({"overlap": {"sequential": True, "slot": 1.0}}, {"overlap": {"schedule": "off"}}),
    ({"overlap": {"sequential": False, "slot": -1.0}}, {"overlap": {"schedule": "auto"}}),
    ({"overlap": {"backward_slot": -1.0}}, {"overlap": {"ablation": {"backward": "mirror"}}}),
    ({"overlap": {"backward_slot": -2.0}}, {"overlap": {"ablation": {"backward": "free"}}}),
    ({"overlap": {"backward_slot": 2.0}}, {"overlap": {"ablation": {"backward": "attention 1"}}}),
    ({"overlap": {"unroll": 0}}, {"overlap": {"unroll": 0}}),
    ({"overlap": {"command_buffers": False}}, {"overlap": {"command_buffers": "auto"}}),
    ({"overlap": {"command_buffers": True}}, {"overlap": {"command_buffers": "on"}}),
  ],
  ids=lambda value: "-".join(f"{k}.{n}" for k, part in value.items() for n in part),
)
def test_fields_that_moved(old, new):
  before = copy.deepcopy(old)
  assert upgraded_config(old) == new
  assert old == before, "the stored one is left alone"
  assert upgraded_config(new) == new, "once is enough"
  from_dict(new)  # all of them are fields


def test_every_field_of_then_has_a_place():
  run = old_run()
  compat, overlap = run.router.compat, run.overlap
  assert (compat.order, compat.weights, compat.weight_norm) == ("priority", "before", 2.0)
  assert (compat.jitter, run.router.bias) == (0.1, "sign")
  assert (overlap.schedule, overlap.ablation.backward) == (
    "attention 1: projections",
    "attention 1",
  )
  assert overlap.order == "barriers"
  assert from_dict(to_dict(run)) == run


def test_a_field_that_a_group_has_got_since_is_completed():
  """Runs of images were stored before a stem had a number of convolutions."""
  stored = {"schema": 2, "config": {"model": {"vision": {"size": 16}}}}
  model = upgraded(stored)["config"]["model"]
  assert (model["vision"]["size"], model["vision"]["stem_convolutions"]) == (16, 1)


@pytest.mark.parametrize(
  ("wiring", "blocks", "names"),
  [
    ("scmoe_pos1", 2, {0: "dispatch", 0.5: "attention 1: projections", 1: "attention 1",
                       2: "shared expert"}),
    ("scmoe_pos2", 2, {0: "dispatch", 1: "mlp 0", 1.5: "attention 1: projections",
                       2: "attention 1", 3: "shared expert", 9: "shared expert"}),
    ("scmoe_pos3", 2, {0: "dispatch", 0.5: "attention 0: projections", 1: "attention 0",
                       2: "mlp 0", 2.5: "attention 1: projections", 4: "shared expert"}),
    ("scmoe_pos2", 1, {0: "dispatch", 0.5: "attention 0: projections", 1: "attention 0"}),
    ("scmoe_pos2", 3, {1: "mlp 1", 1.5: "attention 2: projections", 3: "shared expert"}),
    ("dgmoe", 2, {0: "dispatch", 1: "mlp 0", 2: "attention 1"}),
    ("shared_expert", 2, {0: "dispatch", 1: "shared expert"}),
    ("topk", 2, {0: "dispatch"}),
    ("dense", 2, {1: "auto"}),
  ],
  ids=lambda value: "" if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_slots_were_numbers_of_operations(wiring, blocks, names):
  """After so many dense operations since the shortcut; a half: inside the next attention."""
  for slot, name in names.items():
    old = {"model": {"wiring": wiring, "moe_every": blocks}, "overlap": {"slot": float(slot)}}
    run = from_dict(upgraded_config(old))
    assert run.overlap.schedule == name, slot
    make_schedule(run.model.wiring_rule, blocks, run.overlap)  # a step of that list


@pytest.mark.parametrize(
  "text",
  [
    '{"router": 3}',
    '{"overlap": [1]}',
    '{"overlap": {"slot": null}}',
    '{"overlap": {"backward_slot": []}}',
    '{"model": null, "overlap": {"slot": 1}}',
    '{"router": {"order": "priority", "compat": 3}}',
  ],
)
def test_what_is_no_configuration_is_still_one_error(text):
  with pytest.raises(ConfigError, match="config JSON: "):
    from_json(text)


def test_a_stems_kernels_that_adamw_updated_go_on_with_muon():
  """Runs with Muon until 2026-11-28: AdamW's first moment is read as momentum, not the second."""
  run = load_config(find_config("shapes_vit"), "smoke")
  vision = dataclasses.replace(run.model.vision, stem="conv")
  run = dataclasses.replace(
    run,
    model=dataclasses.replace(run.model, vision=vision),
    optimizer=dataclasses.replace(run.optimizer, name="muon"),
  )
  built = build.build(run.resolve(num_devices=1, vocab_size=0), jax.devices()[:1])
  state = jax.eval_shape(built.optimizer.tx.init, built.shapes)
  names = set(description.flatten({"opt_state": state}))
  place = ".matrix.inner_state.mu.embedding.convolutions."
  kernels = {name for name in names if place in name}
  assert len(kernels) == 2
  moved = {name.replace(".matrix.", ".other."): name for name in kernels}
  stay = {name.replace(".embedding.", ".mine."): {"shape": [3, 3, 1, 8]} for name in moved}
  older = {name: {"shape": [2]} for name in names - kernels} | stay
  older |= {name: {"shape": [3, 3, 1, 8]} for name in moved}
  older |= {name.replace(".mu.", ".nu."): {"shape": [3, 3, 1, 8]} for name in moved}
  leaves = upgraded({"schema": 2, "leaves": older})["leaves"]
  assert set(leaves) == names | set(stay)
  assert {leaves[name]["stored_as"]: name for name in kernels} == moved
