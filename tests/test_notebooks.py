"""Every notebook runs from its first cell to its last."""

from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"


@pytest.mark.parametrize("name", sorted(p.name for p in FOLDER.glob("*.ipynb")))
def test_notebook_runs(name, monkeypatch):
  monkeypatch.setenv("SCMOE_NOTEBOOK_STEPS", "20")
  monkeypatch.setenv("XLA_FLAGS", "")  # one device, as on a reader's machine
  monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # few steps: compile them fast
  notebook = nbformat.read(FOLDER / name, as_version=4)
  client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
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
