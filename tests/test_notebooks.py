"""Every notebook runs from its first cell to its last, and begins where nothing is installed."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from compiler import flags_of_one_device
from covering import night

FOLDER = Path(__file__).parents[1] / "notebooks"


def code_of(name):
  """Sources of a notebook's code cells."""
  cells = nbformat.read(FOLDER / name, as_version=4).cells
  return [cell.source for cell in cells if cell.cell_type == "code"]


NAMES = sorted(p.name for p in FOLDER.glob("*.ipynb"))
# By day without the last cell of overlap.ipynb, which trains six models. The others train, as
# test_cli.py does, or make the calls of docs/library.md, as test_library.py does.
BY_DAY = [("overlap.ipynb", -1), ("results.ipynb", None)]


@pytest.mark.parametrize(
  ("name", "until"), BY_DAY + [night(n, None) for n in NAMES if (n, None) not in BY_DAY]
)
def test_notebook_runs(name, until, monkeypatch):
  monkeypatch.setenv("SCMOE_NOTEBOOK_STEPS", "4" if (name, until) in BY_DAY else "20")
  monkeypatch.setenv("XLA_FLAGS", flags_of_one_device())  # as on a reader's machine
  monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # few steps: compile them fast
  notebook = nbformat.read(FOLDER / name, as_version=4)
  notebook.cells = notebook.cells[:until]
  client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3")
  client.execute(cwd=str(FOLDER))
  assert not any(
    output.get("output_type") == "error"
    for cell in notebook.cells
    for output in cell.get("outputs", [])
  )


def test_no_notebook_upgrades_jax():
  for path in FOLDER.glob("*.ipynb"):
    source = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
    assert "install -U jax" not in source, path
    assert "upgrade jax" not in source.replace("does not upgrade jax", ""), path


@pytest.mark.parametrize("name", NAMES)
def test_first_cell_clones_installs_what_is_missing_and_leaves_jax(name, tmp_path, monkeypatch):
  commands = []

  def version(package):
    if package == "jax":
      return "0.11.1"
    raise importlib.metadata.PackageNotFoundError(package)

  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("SCMOE_SOURCE", "/a/checkout")
  monkeypatch.setattr(importlib.metadata, "version", version)
  monkeypatch.setattr(sys, "path", list(sys.path))
  monkeypatch.setattr(subprocess, "run", lambda words, check: commands.append(words))
  exec(compile(code_of(name)[0], name, "exec"), {})
  clone, install = commands
  assert clone[:2] == ["git", "clone"]
  assert clone[-2:] == ["/a/checkout", "scmoe-checkout"]
  assert sys.path[0] == str(tmp_path / "scmoe-checkout")
  missing = install[install.index("install") + 1 :]
  assert [word for word in missing if word.startswith("jax=") or word == "jax"] == ["jax==0.11.1"]
  asked = {word for word in missing if ">" in word}
  known = {line.partition(",")[0] for line in (FOLDER.parent / "requirements.txt").open()}
  assert {"flax", "optax", "jaxtyping"} <= {word.partition(">")[0] for word in asked}
  assert asked <= {line.strip() for line in known}  # the same least versions
  assert not {"-U", "--upgrade"} & set(missing)


@pytest.mark.parametrize("name", NAMES)
def test_first_cell_replaces_what_is_too_old_and_refuses_an_old_jax(name, monkeypatch):
  commands, found = [], {"flax": "0.10.9", "optax": "0.3.dev1", "jax": "0.12.0"}
  installed = importlib.metadata.version
  monkeypatch.chdir(FOLDER)
  monkeypatch.setattr(sys, "path", list(sys.path))
  monkeypatch.setattr(importlib.metadata, "version", lambda p: found.get(p) or installed(p))
  monkeypatch.setattr(subprocess, "run", lambda words, check: commands.append(words))
  exec(compile(code_of(name)[0], name, "exec"), {})
  (words,) = commands
  asked = words[words.index("-q") + 1 :]
  assert [word.partition(">")[0] for word in asked] == ["flax", "jax==0.12.0"]
  found["jax"] = "0.4.35"
  with pytest.raises(RuntimeError, match=r"jax 0\.4\.35 is too old: this needs jax>=0\.10\.2"):
    exec(compile(code_of(name)[0], name, "exec"), {})


@pytest.mark.parametrize("name", NAMES)
def test_first_cell_in_a_checkout_installs_nothing(name, monkeypatch):
  monkeypatch.chdir(FOLDER)
  monkeypatch.setattr(sys, "path", list(sys.path))
  monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it installs something"))
  exec(compile(code_of(name)[0], name, "exec"), {})
  assert sys.path[0] == str(FOLDER.parent)


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_committed_with_what_they_printed(name):
  cells = nbformat.read(FOLDER / name, as_version=4).cells
  code = [cell for cell in cells if cell.cell_type == "code"]
  assert all(cell.execution_count for cell in code), "run it, and commit it with its outputs"
  assert not any(o.output_type == "error" for cell in code for o in cell.outputs)
  text = json.dumps([cell.outputs for cell in code])
  places = re.findall(r"/(?:tmp|home|root|Users|work|opt)/", text)
  assert not places, "a path of the machine that it was run on"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_ends_in_two_wirings_over_three_seeds_with_bands(name):
  cells = nbformat.read(FOLDER / name, as_version=4).cells
  code = [cell.source for cell in cells if cell.cell_type == "code"]
  assert "range(3)" in "".join(code[-2:]), "three seeds"
  assert any("fill_between" in part or "draw_curves" in part for part in code[-2:]), "bands"
  printed = "".join(str(o.get("text", "")) for cell in cells[-3:] for o in cell.get("outputs", []))
  assert "top2" in printed
  assert "scmoe_pos2" in printed
  assert re.search(r"\d ± \d", printed)
  pictures = [o for cell in cells[-3:] for o in cell.get("outputs", []) if "data" in o]
  assert any("image/png" in o["data"] for o in pictures)
