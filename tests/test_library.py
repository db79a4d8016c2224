"""`import scmoe`: what it offers, what it costs, and that the page about it is true."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import scmoe
from scmoe.base import moved

ROOT = Path(__file__).resolve().parents[1]


def blocks(page):
  """(line, code) of the fenced Python of a page."""
  text = page.read_text("utf-8")
  for found in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
    yield text.count("\n", 0, found.start(1)) + 1, found.group(1)


def test_the_page_about_the_library_is_true():
  page, names = ROOT / "docs" / "library.md", {}
  code = list(blocks(page))
  assert len(code) > 5
  for line, block in code:
    # Its lines keep their numbers, so that a traceback points into the page.
    exec(compile("\n" * (line - 1) + block, str(page), "exec"), names)


def test_the_page_names_what_there_is():
  page = (ROOT / "docs" / "library.md").read_text("utf-8")
  words = set(re.findall(r"\w+", page))
  assert set(scmoe.__all__) <= words
  assert set(re.findall(r"scmoe\.([A-Za-z]\w*)", page)) - {"profile", "inference"} <= set(
    scmoe.__all__
  )


@pytest.mark.parametrize("name", scmoe.__all__)
def test_every_name_is_there(name):
  value = getattr(scmoe, name)
  assert value is getattr(importlib.import_module(scmoe._HOME[name]), name)
  assert name in dir(scmoe)


def test_type_checkers_see_the_same_names():
  (block,) = (n for n in ast.parse(Path(scmoe.__file__).read_text()).body if isinstance(n, ast.If))
  told = {alias.asname: node.module for node in block.body for alias in node.names}
  assert told == scmoe._HOME


def test_an_unknown_name():
  with pytest.raises(AttributeError, match="module 'scmoe' has no attribute 'moe_layer'"):
    _ = scmoe.moe_layer


def test_generate_is_the_command_alone():
  assert "generate" not in scmoe.__all__  # the function is `scmoe.inference.decode.generate`
  command = importlib.import_module("scmoe.generate")
  assert scmoe.generate is command
  assert callable(command.main)


@pytest.mark.parametrize("old", moved.MOVED)
def test_modules_of_version_02_are_found_at_their_old_address(old):
  sys.modules.pop(old, None)
  with pytest.warns(DeprecationWarning, match=f"{old} is now {moved.MOVED[old]}"):
    found = importlib.import_module(old)
  assert found is importlib.import_module(moved.MOVED[old])


def test_a_configuration_file_of_version_02_loads():
  text = (
    "from scmoe.config import RunConfig, as_config_dict\n"
    "from scmoe.errors import ConfigError\n"
    "from scmoe.options import option\n"
    "from scmoe.models.config import ModelConfig\n"
    "CONFIG = as_config_dict(RunConfig(model=ModelConfig(width=32)))\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", text + "print(CONFIG.model.width)"],
    cwd=ROOT, capture_output=True, text=True, check=True,
  )  # fmt: skip
  assert done.stdout == "32\n"


def test_the_version_is_the_one_that_is_built():
  assert re.fullmatch(r"\d+\.\d+\.\d+", scmoe.__version__)


def test_parameters_of_flax_layers_are_replicated_on_a_mesh():
  rngs, config = nnx.Rngs(0), scmoe.MoEConfig(width=2, hidden=4, num_experts=4)
  linear = scmoe.parameter_specs(nnx.Linear(2, 3, rngs=rngs))
  assert (linear.kernel.get_value(), linear.bias.get_value()) == (P(None, None), P(None))
  experts = scmoe.parameter_specs(scmoe.MoE(config, rngs=rngs)).experts
  assert experts.up.get_value() == P("expert", None, ("shard", "tensor"))


def test_importing_imports_nothing():
  code = """
import sys
import scmoe
dir(scmoe)
heavy = [name for name in sys.modules if name.split(".")[0] in ("jax", "flax", "numpy")]
own = {name for name in sys.modules if name.startswith("scmoe.")}
assert not heavy and own == {"scmoe.base", "scmoe.base.moved"}, (heavy, own)
from scmoe import WIRINGS
assert "jax" not in sys.modules
"""
  subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_an_installed_package_has_every_part():
  settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
  folders = {path.parent for path in (ROOT / "scmoe").rglob("*.py")}
  data = {ROOT / "scmoe" / "pretrained" / "remote"}  # leaves with a model, and is not imported
  folders -= data
  assert settings["package-data"]["scmoe.pretrained"] == ["remote/*.py"]
  parts = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
  assert set(settings["packages"]) == parts | {"scmoe.configs"}
  assert settings["package-dir"] == {"scmoe.configs": "configs"}


def test_an_installed_package_finds_its_configurations(tmp_path):
  # As `pip install .` lays it out.
  package = shutil.copytree(ROOT / "scmoe", tmp_path / "scmoe")
  shutil.copytree(ROOT / "configs", package / "configs")
  code = "from scmoe.run.config_files import find_config; print(find_config('quickstart'))"
  found = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
  assert Path(found.strip()) == package / "configs" / "quickstart.py"
