"""The page of all studies: every number leads to its source, and no failure is hidden."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from scmoe import report
from scmoe.base.errors import ConfigError, DataError
from scmoe.reports import studies
from scmoe.reports.studies import Contrast, Plan

ROOT = Path(__file__).resolve().parents[2]
PLAN = Plan("positions", "gpu", "Which <b>position</b>?", {}, {"top2": {"w": "2"}, "pos2": {}},
            {"top2": 2, "pos2": 3}, (Contrast("pos2", "top2", 0.01),))  # fmt: skip


@pytest.fixture
def folder(tmp_path):
  """Two studies: one with results and a failure, one that is only registered in its README."""
  for name in ("positions", "later"):
    (tmp_path / name / "results/runs").mkdir(parents=True)
    (tmp_path / name / "run.py").touch()
    (tmp_path / name / "README.md").write_text(f"# {name} <registered>\n")
  PLAN.write(tmp_path / "positions/results")
  line = lambda variant, seed, loss, status="done": {
    "study": "positions", "scale": "gpu", "variant": variant, "seed": seed, "data": {},
    "plan": PLAN.digest(variant), "status": status, "date": "2026-01-02T03:04:05", "tokens": 2e6,
    "final": {"loss": loss} if loss else {}, "train": {}, "hardware": "1 x gpu",
    "evals": {"step": [1, 2], "tokens": [1e6, 2e6], "loss": [5.0, loss]}, "parameters": {},
    "git": {"commit": "0123456789abc"}, "command": "python run.py --only '<x>'",
  }  # fmt: skip
  studies.write_results(
    tmp_path / "positions/results/runs/gpu-1.jsonl",
    [line("top2", 0, 3.0), line("top2", 1, 3.1), line("pos2", 0, 3.002), line("pos2", 1, 3.101),
     line("pos2", 2, None, "failed at step 7 of 9, exit 4: NonFiniteError")],
  )  # fmt: skip
  return tmp_path


def test_the_page(folder, capsys):
  report.main([str(folder)])
  text = (folder / "report-gpu.html").read_text()
  assert "report-gpu.html" in capsys.readouterr().out
  assert "Which &lt;b&gt;position&lt;/b&gt;?" in text
  assert "pos2, seed 2: failed at step 7 of 9, exit 4" in text
  assert "equivalent within" in text or "not settled" in text
  assert "Registered, without a plan at this scale" in text
  first = text[text.index("What was found") : text.index("<h1 id='positions'>")]
  assert "<td>loss: pos2 − top2</td>" in first
  assert "+0.0015" in first
  assert "&lt;registered&gt;" in text
  assert "python run.py --only &#x27;&lt;x&gt;&#x27;" in text
  assert "<script" not in text
  assert not re.search(r"(src|href)='?\"?https?:", text)
  # Each number of a variant leads to a row, and each row to a file that is there.
  for target in re.findall(r"href='#([^']+)'", text):
    assert f"id='{target}'" in text
  links = re.findall(r"href='([^#'][^']*)'", text)
  assert links
  for link in links:
    assert (folder / link).is_file()
  plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
  assert len(plots) == 2
  for plot in plots:
    ElementTree.fromstring(plot)
  assert plots[0].count("<circle") == 1
  assert plots[1].count("<polyline") == 2


def test_plots_become_files_of_their_studies(folder, capsys):
  report.main([str(folder), "--plots"])
  file = folder / "positions/results/differences-gpu.svg"
  assert capsys.readouterr().out.split() == ["plot:", str(file)]
  assert ElementTree.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"
  assert file.read_text().count("<circle") == 1
  assert not list(folder.glob("*.html"))
  with pytest.raises(ConfigError, match="leave out --out"):
    report.main([str(folder), "--plots", "--out=a.html"])


def test_the_plots_beside_the_results_show_the_results():
  drawn = report.pictures(ROOT / "experiments/quality", "gpu")
  assert len(drawn) == len(list((ROOT / "experiments/quality").glob("*/run.py")))
  for path, text in drawn.items():
    assert path.read_text() == text, "python -m scmoe.report experiments/quality --plots"
    assert "(results/differences-gpu.svg)" in (path.parents[1] / "README.md").read_text()


def test_links_hold_from_another_folder(folder):
  report.main([str(folder), f"--out={folder / 'build/page.html'}"])
  text = (folder / "build/page.html").read_text()
  assert "href='../positions/results/runs/gpu-1.jsonl'" in text


def test_a_point_of_a_curve_that_is_no_number_is_left_out(folder):
  piece = folder / "positions/results/runs/gpu-1.jsonl"
  lines = [json.loads(line) for line in piece.read_text().splitlines()]
  lines[0]["evals"] = {"tokens": [1e6, None, 2e6], "loss": [5.0, 4.0, "nan"]}
  studies.write_results(piece, lines)
  report.main([str(folder)])
  assert "polyline" in (folder / "report-gpu.html").read_text()


def test_a_readme_that_is_no_text_is_no_traceback(folder):
  (folder / "positions/README.md").write_bytes(b"\xff\xfe what")
  report.main([str(folder)])
  assert "\ufffd\ufffd what" in (folder / "report-gpu.html").read_text()


def test_a_folder_without_studies(tmp_path):
  with pytest.raises(ConfigError, match="holds no study"):
    report.main([str(tmp_path)])
  with pytest.raises(ConfigError, match="got 0 folders"):
    report.main([])


def test_a_misspelt_scale_is_no_empty_page(folder):
  with pytest.raises(ConfigError, match=r"--scale='gpuu' is unknown; did you mean 'gpu'\?"):
    report.main([str(folder), "--scale=gpuu"])
  assert not list(folder.glob("*.html"))


def analysis(name, **curves):
  return {
    "run": name, "wiring": "dgmoe", "step": 9, "tokens": 1000, "command": f"inspect <{name}>",
    "date": "2026-01-02", "commit": "fedcba9876543", "hardware": "1 x cpu",
    "curves": {"similarity": [0.9, 0.95, None, 1.0], "repeated": [None, 0.5], **curves},
  }  # fmt: skip


def test_analyses_are_drawn_side_by_side(folder):
  place = folder / "analyses/results"
  place.mkdir(parents=True)
  written = {
    "gpu-a": analysis("a", steps=[10, 20, 40], shortcut_ratio_by_step=[0.5, 0.4, 0.2]),
    "gpu-<b>": analysis("b", confidence="no list"),
  }
  for name, content in written.items():
    (place / f"{name}.json").write_text(json.dumps(content))
  report.main([str(folder)])
  text = (folder / "report-gpu.html").read_text()
  part = text[text.index("<h1 id='analyses'>") :]
  assert "href='#analyses'" in text
  plots = re.findall(r"<svg.*?</svg>", part, re.DOTALL)
  similarity, ratio = (ElementTree.fromstring(plot) for plot in plots)
  lines = lambda plot: [e.get("points").split() for e in plot.iter() if e.tag.endswith("polyline")]
  assert [len(points) for points in lines(similarity)] == [3, 3]  # None is left out
  ((*_, last),) = lines(ratio)
  assert last.startswith("710.0,")  # the last step lies at the right edge
  assert "Figures 10, 14 and 15" in part
  assert "<td>0.950</td>" in part  # the mean of 0.9, 0.95 and 1
  assert "<td>0.500</td>" in part
  assert "gpu-&lt;b&gt;" in part
  assert "inspect &lt;b&gt;" in part
  assert "href='analyses/results/gpu-a.json'" in part


def test_an_analysis_of_another_form_is_one_line(folder):
  place = folder / "analyses/results"
  place.mkdir(parents=True)
  (place / "x.json").write_text(json.dumps(analysis("x") | {"tokens": "many"}))
  with pytest.raises(DataError, match="'tokens'"):
    report.main([str(folder)])
