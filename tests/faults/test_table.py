"""The table of docs/reliability.md: every fault has tests that exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text()
ROWS = [
  [cell.strip() for cell in line.strip("|").split("|")]
  for line in PAGE.partition("## The faults")[2].splitlines()
  if re.match(r"\| \d+ \|", line)
]


def functions(path):
  return {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


def test_none_is_lost():
  assert [int(row[0]) for row in ROWS] == list(range(1, 65))
  assert len({row[1] for row in ROWS}) == 64


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_has_tests_that_exist(row):
  _, injected, promised, seen, tests = row
  assert injected
  assert promised
  assert seen
  named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
  assert named, "no test"
  for file, name in named:
    assert name in functions(TESTS / file), f"{file}::{name}"


def test_every_test_of_the_suite_is_in_the_table():
  """Every test of a fault stands in the table or on the page."""
  text = "".join(row[4] for row in ROWS) + PAGE
  for file in sorted(Path(__file__).parent.glob("test_*.py")):
    if file != Path(__file__):
      missing = [n for n in functions(file) if n.startswith("test_") and n not in text]
      assert not missing, f"{file.name}: {missing}"
