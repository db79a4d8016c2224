"""Names that options had in earlier versions: each way to set one still works, and says the new."""

import dataclasses
import json
import textwrap

import pytest

from scmoe.base import renamed
from scmoe.base.renamed import RENAMED, with_present_names
from scmoe.run.command_line import TRAIN_FLAGS, parse, run_config
from scmoe.run.config import RunConfig, as_config_dict, from_dict, from_json, to_dict
from scmoe.run.config_files import load_config
from scmoe.run.fields import fields, with_field
from scmoe.training.resume import check_config
from scmoe.training.schema import upgraded, upgraded_config

DECLARED = {field.path: field for field in fields(RunConfig())}
OLD = sorted(RENAMED)


@pytest.fixture(autouse=True)
def nothing_noted(monkeypatch):
  monkeypatch.setattr(renamed, "_noted", set())


def other_value(old):
  """A value of the option that is not its default."""
  field = DECLARED[RENAMED[old]]
  if choices := [word for word in field.metadata["choices"] if word != field.default]:
    return choices[0]
  values = {bool: not field.default, str: "free"}  # the only text without choices is a slot
  return values[field.type] if field.type in values else field.default + 1


def changed(old):
  """The default run with that value under today's name."""
  return with_field(RunConfig(), RENAMED[old], str(other_value(old)))


def nested(path, value):
  for name in reversed(path.split(".")):
    value = {name: value}
  return value


def noted(capsys, old):
  """Standard error is one line, with the new name."""
  (line,) = capsys.readouterr().err.splitlines()
  assert f"{old} is now {RENAMED[old]}" in line


def test_the_list_leads_from_names_that_are_gone_to_names_that_are_there():
  assert not set(RENAMED) & set(DECLARED)
  assert set(RENAMED.values()) <= set(DECLARED)
  assert len(set(RENAMED.values())) == len(RENAMED)


@pytest.mark.parametrize("old", OLD)
def test_a_flag(old, capsys):
  values, given = parse([f"--config.{old}={other_value(old)}"], TRAIN_FLAGS, with_fields=True)
  plain = run_config(parse([], TRAIN_FLAGS)[0], [])
  run = run_config(values, given)
  assert run == with_field(plain, RENAMED[old], str(other_value(old))) != plain
  noted(capsys, old)


@pytest.mark.parametrize("old", OLD)
def test_an_argument_and_an_attribute(old, capsys):
  section, _, name = old.rpartition(".")
  want = getattr(changed(old), section)
  part = getattr(RunConfig(), section)
  assert type(part)(**{name: other_value(old)}) == want
  assert dataclasses.replace(part, **{name: other_value(old)}) == want
  assert getattr(want, name) == other_value(old)
  noted(capsys, old)


@pytest.mark.parametrize("old", OLD)
def test_a_config_dict_and_plain_data(old, capsys):
  config, group = as_config_dict(RunConfig()), old.split(".")
  for name in group[:-1]:
    config = config[name]
  whole = as_config_dict(RunConfig())
  setattr(whole[group[0]], group[-1], other_value(old))
  assert getattr(whole[group[0]], group[-1]) == other_value(old)
  assert from_dict(whole.to_dict()) == changed(old)
  assert from_dict(nested(old, other_value(old))) == changed(old)
  noted(capsys, old)


@pytest.mark.parametrize("old", OLD)
def test_json_and_what_a_checkpoint_stores(old, capsys):
  stored = to_dict(RunConfig()) | nested(old, other_value(old))
  section = old.split(".")[0]
  stored[section] = to_dict(RunConfig())[section] | nested(old, other_value(old))[section]
  group = stored
  for name in RENAMED[old].split(".")[:-1]:
    group = group[name]
  del group[RENAMED[old].split(".")[-1]]  # an earlier version knew only the old name
  assert from_json(json.dumps(stored)) == changed(old)
  noted(capsys, old)
  assert from_dict(upgraded_config(stored)) == changed(old)
  assert not capsys.readouterr().err  # nobody can change what is stored


def test_a_checkpoint_of_before_resumes_without_a_change_of_its_configuration():
  now = json.loads(json.dumps(to_dict(RunConfig())))
  before = json.loads(json.dumps(now))
  del before["model"]["ablation"]["norm_after"], before["model"]["ffn"]["num_sms"]  # younger
  for old, new in RENAMED.items():
    *groups, name = new.split(".")
    places = [before]
    for group in groups:
      places.append(places[-1][group])
    before[old.split(".")[0]][old.split(".")[1]] = places[-1].pop(name)
    if not places[-1]:
      del places[-2][groups[-1]]
  assert not {"ffn", "ablation"} & set(before["model"])
  stored = upgraded({"schema": 2, "config": before})["config"]
  assert stored == now
  assert check_config(stored, now) == []


def test_a_config_file_that_says_it_in_both_ways(tmp_path, capsys):
  path = tmp_path / "old.py"
  path.write_text(
    textwrap.dedent("""
      from scmoe.models.config import ModelConfig
      from scmoe.run.config import RunConfig, as_config_dict

      def get_config():
        config = as_config_dict(RunConfig(model=ModelConfig(activation="relu2")))
        config.model.expert_impl = "grouped"
        config.model["expert_backend"] = "xla"
        return config
    """)
  )
  ffn = load_config(path).model.ffn
  assert (ffn.activation, ffn.impl, ffn.backend) == ("relu2", "grouped", "xla")
  assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_new_name_counts_more_than_an_old_one_and_nonsense_stays():
  both = {"model": {"activation": "gelu", "ffn": {"activation": "swiglu"}}}
  assert with_present_names(both) == (
    {"model": {"ffn": {"activation": "swiglu"}}},
    ["model.activation"],
  )
  for values in ({}, {"model": 3}, {"model": {"activation": "gelu", "ffn": 4}}):
    assert with_present_names(values) == (values, [])


def test_an_unknown_attribute_is_one():
  with pytest.raises(AttributeError, match="'ModelConfig' object has no attribute 'colour'"):
    _ = RunConfig().model.colour
