"""Recorded layers, `../shared/conformance/tutel` or the copy in `tests/golden`: all of them."""

import json
from pathlib import Path

import conformance
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "conformance" / "tutel"
FOLDER = SHARED if SHARED.is_dir() else ROOT / "tests" / "golden" / "tutel"
SETTINGS = json.loads((FOLDER / "settings.json").read_text())


@pytest.mark.parametrize("name", SETTINGS)
def test_recorded_layer(name):
  report = conformance.check_case(FOLDER, SETTINGS, name)
  assert not report.failures, str(report)
  gradients = sum(array.startswith("grad_") for array in report.errors)
  assert {"output", "auxiliary_loss", "combine_weights"} <= set(report.errors)
  assert gradients >= 5  # the input's, the gate's, the experts'


def test_defects_are_not_copied_but_corrected():
  skipped = {name: case for name, case in SETTINGS.items() if case["do_not_match"]}
  assert len(skipped) == 3
  assert all(case["correct"]["tokens_per_expert"] for case in skipped.values())


def test_a_wrong_number_is_found():
  want = {"expert_ids": np.array([[0, 1]]), "output": np.ones(3), "grad_gate_weight": np.ones(3)}
  got = want | {"output": np.array([1, 1, 1 + 2e-6]), "grad_gate_weight": np.full(3, 1 + 2e-6)}
  assert conformance.compare("case", want, want).failures == []
  assert len(conformance.compare("case", got, want).failures) == 1  # a weight's may be 3e-6 off
  nothing = want | {"output": np.full(3, np.nan), "expert_ids": np.array([[1, 0]])}
  assert len(conformance.compare("case", nothing, want).failures) == 2


def test_the_command_fails_without_a_folder(tmp_path, capsys):
  assert conformance.main([str(tmp_path)]) == 2
  assert "settings.json" in capsys.readouterr().err


def test_the_command_reports_and_fails(tmp_path, capsys, monkeypatch):
  (tmp_path / "settings.json").write_text("{}")
  reports = [conformance.Report("good", [], {"output": 1e-7}), conformance.Report("bad", ["x"], {})]
  monkeypatch.setattr(conformance, "check_folder", lambda folder: reports)
  assert conformance.main([str(tmp_path)]) == 1
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 3
  assert lines[1].endswith("FAIL x")
