"""The pages of `make docs`: links lead somewhere, and what leads nowhere fails."""

import importlib.util
import re
import types
from pathlib import Path

import pytest
from covering import night
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "site"


def load(name):
  spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


pages = load("pages")


def built(folder, monkeypatch, change=None):
  """Builds the pages with a single module's API; `change` edits every page's text."""
  monkeypatch.chdir(ROOT)  # as make does
  config = load_config(str(SITE / "mkdocs.yml"), site_dir=str(folder))
  hook = config.hooks["pages.py"]
  monkeypatch.setattr(hook, "modules", lambda: {"scmoe.moe.layer": "The MoE layer."})
  if change is not None:
    moved = hook.moved
    monkeypatch.setattr(hook, "moved", lambda path, text: moved(path, change(path, text)))
  config.plugins.on_startup(command="build", dirty=False)
  build(config)
  return folder


def test_every_link_leads_to_a_file(tmp_path, monkeypatch):
  site = built(tmp_path / "site", monkeypatch)
  html = list(site.rglob("*.html"))
  assert {"index.html", "training.html", "adding.html", "api/scmoe.moe.layer.html"} <= {
    path.relative_to(site).as_posix() for path in html
  }
  for path in html:
    text = path.read_text("utf-8")
    assert not re.findall(r'(?:src|<link[^>]* href)="https?:', text), path  # nothing from elsewhere
    for target in re.findall(r'(?:href|src)="([^"#:?]+)[^":]*"', text):
      if path.name != "404.html":
        assert (path.parent / target).exists(), (path.name, target)
  layer = (site / "api" / "scmoe.moe.layer.html").read_text("utf-8")
  assert "router,\N{NO-BREAK SPACE}dispatch" in layer  # one entry about two names
  start = (site / "index.html").read_text("utf-8")
  assert 'href="routing.html"' in start
  assert 'href="experiments/LOG.html"' in start


def test_make_does_not_silence_the_warnings_that_strict_counts():
  (command,) = re.findall(r"^\t.*mkdocs build.*$", (ROOT / "Makefile").read_text(), re.M)
  assert "--strict" in command
  assert "quiet" not in command


@pytest.mark.parametrize(
  # Each builds all pages.
  "link",
  ["nowhere.md", "training.md#no-such-heading", night("../scmoe/moe"), night("/absolute.md")],
)
def test_a_link_that_leads_nowhere_fails(tmp_path, monkeypatch, link):
  worse = lambda path, text: text + f"\n[a]({link})\n" if path == "docs/data.md" else text
  with pytest.raises(Abort):
    built(tmp_path / "site", monkeypatch, worse)


def test_every_page_of_docs_has_its_place():
  text = (SITE / "mkdocs.yml").read_text("utf-8")
  listed = re.findall(r"^ +- (?:Start: )?([\w/]+\.md)$", text, re.M)
  there = [path.name for path in (ROOT / "docs").glob("*.md")]
  assert len(listed) == len(set(listed))
  assert set(listed) <= {*there, "index.md", *pages.OUTSIDE}
  config = pages.on_config(types.SimpleNamespace(nav=[{"Using it": listed}]))
  assert set(there) <= set(re.findall(r"[\w/]+\.md", str(config.nav)))


def test_links_between_repository_and_pages():
  text = "[a](docs/data.md#rows) [b](experiments/LOG.md) [c](https://x.org/docs/d.md)"
  assert pages.moved("README.md", text) == (
    "[a](data.md#rows) [b](experiments/LOG.md) [c](https://x.org/docs/d.md)"
  )
  assert pages.moved("docs/data.md", "[a](../README.md#use-it)") == "[a](index.md#use-it)"
  assert pages.moved("experiments/README.md", "[a](../docs/data.md)") == "[a](../data.md)"
  fenced = "```python my.py\n[a](docs/data.md)\n```"
  assert pages.moved("README.md", fenced) == '```python title="my.py"\n[a](docs/data.md)\n```'


def test_every_module_has_a_page():
  found = pages.modules()
  assert {"scmoe", "scmoe.moe.layer", "scmoe.kernels.grouped_matmul.ffn"} <= set(found)
  assert not any("._" in name for name in found)
  assert found["scmoe.moe.layer"].startswith("The MoE layer")
