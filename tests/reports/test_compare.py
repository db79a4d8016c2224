"""Tables and curves against figures worked out by hand from the lines of metrics.jsonl."""

import json
import math
import statistics

import pytest
from runs_by_hand import write_run

from scmoe import compare as command
from scmoe.base.errors import ConfigError, DataError
from scmoe.base.stored import StoredError
from scmoe.reports.comparison import compare
from scmoe.reports.curves import curve, draw_curves
from scmoe.reports.records import find_runs, read_run
from scmoe.reports.tables import differences_table, paired_table, result_table, runs_table
from scmoe.training.card import CARD_SHAPE, read_card

TOP2 = (("model.wiring", "top2"),)
POS2 = (("model.wiring", "scmoe_pos2"),)


@pytest.fixture
def runs(tmp_path):
  """Two wirings of three and two seeds, and one run that failed before its first step."""
  speed = {"tokens_per_second": 100.0, "seconds_per_step": 0.5, "drop": 0.25, "imbalance": 1.5}
  for seed, (a, b) in enumerate([(3.0, 2.0), (3.5, 2.25), (4.0, 3.0)]):
    write_run(tmp_path / f"a{seed}", losses=[5.0, 4.0 + seed], seed=seed, fields=TOP2,
              evals={10: a, 20: a + 0.5}, **speed)  # fmt: skip
    if seed < 2:
      write_run(tmp_path / f"b{seed}", losses=[5.0, 3.0], seed=seed, fields=POS2,
                evals={10: b + 1, 20: b}, **speed)  # fmt: skip
  failed = write_run(tmp_path / "b2", losses=[5.0, 3.0], seed=2, fields=POS2, done=False)
  (failed / "metrics.jsonl").write_text("")
  (failed / "exit.json").write_text(json.dumps({"code": 3, "words": "DataError: no text"}))
  return tmp_path


def compared(folder):
  return compare([read_run(path) for path in find_runs([str(folder)])])


def test_means_and_spreads_are_those_of_the_lines(runs):
  comparison = compared(runs)
  assert [group.label for group in comparison.groups] == ["top2", "scmoe_pos2"]
  assert [len(group.records) for group in comparison.groups] == [3, 3]
  known = {m.name: m for m in comparison.measures}
  top2, pos2 = comparison.groups
  final = top2.statistic(known["loss"])
  assert final.values == (3.5, 4.0, 4.5)
  assert (final.mean, final.std) == (4.0, 0.5)
  assert top2.statistic(known["best_loss"]).values == (3.0, 3.5, 4.0)
  assert pos2.statistic(known["loss"]).values == (2.0, 2.25)
  assert pos2.statistic(known["bits_per_byte/code"]).mean == pytest.approx(2.125)
  assert top2.statistic(known["train_loss"]).values == (4.0, 5.0, 6.0)
  assert top2.statistic(known["tokens_per_second"]).mean == 100
  assert top2.statistic(known["milliseconds_per_step"]).mean == 500
  assert top2.statistic(known["memory_gib"]).mean == 1
  assert top2.statistic(known["active_parameters"]).mean == 400
  assert "mfu" not in known  # no run has it


def test_pairs_are_of_one_seed(runs):
  comparison = compared(runs)
  known = {m.name: m for m in comparison.measures}
  top2, pos2 = comparison.groups
  paired = pos2.paired(top2, known["loss"])
  assert paired.difference.values == (2.0 - 3.5, 2.25 - 4.0)
  assert paired.difference.std == pytest.approx(statistics.stdev([-1.5, -1.75]))
  assert paired.better == 2
  assert top2.paired(top2, known["loss"]) is None


def test_a_failed_run_is_shown(runs):
  comparison = compared(runs)
  (failed,) = comparison.unfinished
  assert failed.status == "failed at step 0 of 20, exit 3: DataError: no text"
  heads = result_table(comparison).heads
  assert heads == ("", "top2 (3 runs)", "scmoe_pos2 (2 of 3 runs done)")
  rows = {row[0]: row for row in runs_table(comparison).rows}
  assert rows["b2"][2].startswith("failed")
  assert rows["b2"][3] == "–"
  assert rows["a0"][2] == "done"


def test_the_cells(runs):
  comparison = compared(runs)
  rows = {row[0]: row[1:] for row in result_table(comparison).rows}
  assert rows["loss"] == ("4.0000 ± 0.5000", "2.1250 ± 0.1768")
  assert rows["drop"] == ("25.00%", "25.00%")
  assert rows["parameters"] == ("1,000", "1,000")
  (row,) = [row for row in paired_table(comparison).rows if row[0] == "loss"]
  assert row[1] == "−1.6250 ± 0.1768, better in 2 of 2"
  assert differences_table(comparison).rows == (("model.wiring", "top2", "scmoe_pos2"),)


def test_curves_are_means_over_seeds(runs):
  top2 = compared(runs).groups[0]
  points = curve(top2, lambda r: r.train, "loss", "step")
  assert points == [(10, 5.0, 0.0), (20, 5.0, 1.0)]
  by_tokens = curve(top2, lambda r: r.evals, "loss", "tokens")
  assert [x for x, _, _ in by_tokens] == [640, 1280]
  assert by_tokens[1][1:] == (4.0, 0.5)
  assert draw_curves(compared(runs)).startswith(b"\x89PNG")


def test_other_steps_per_token_are_drawn_over_tokens(tmp_path):
  write_run(tmp_path / "a", losses=[2.0, 1.0])
  write_run(tmp_path / "b", losses=[2.0, 1.0], fields=[("train.batch_size", "16")])
  lines = (tmp_path / "b" / "metrics.jsonl").read_text().replace("640", "1280")
  (tmp_path / "b" / "metrics.jsonl").write_text(lines.replace('"tokens": 1280}', '"tokens": 9}'))
  from scmoe.reports.curves import _axis

  assert _axis(compared(tmp_path)) == "tokens"


def test_what_makes_a_group(tmp_path):
  write_run(tmp_path / "a", losses=[1.0], seed=0, fields=[("name", "x")])
  write_run(tmp_path / "b", losses=[2.0], seed=1, fields=[("checkpoint.every", "7")])
  write_run(tmp_path / "c", losses=[2.0], seed=1, fields=[("optimizer.learning_rate", "0.1")])
  other = write_run(tmp_path / "d", losses=[2.0], seed=3)
  card = json.loads((other / "card.json").read_text())
  card["devices"]["kind"] = "NVIDIA H200"  # the same, elsewhere: its speed is another
  (other / "card.json").write_text(json.dumps(card))
  groups = compared(tmp_path).groups
  assert [[r.name for r in group.records] for group in groups] == [["a", "b"], ["c"], ["d"]]
  assert groups[1].label == "learning_rate=0.1, devices=1 x cpu"


def test_a_group_of_seeds_beside_very_different_runs_is_not_called_by_one_seed(tmp_path):
  many = [("train.batch_size", "16"), ("train.steps", "7"), ("model.width", "64"),
          ("optimizer.learning_rate", "0.1"), ("data.seq_len", "32")]  # fmt: skip
  write_run(tmp_path / "a", losses=[1.0])
  for seed in range(2):
    write_run(tmp_path / f"wiring-top2_seed-{seed}", losses=[2.0], seed=seed, fields=many)
  assert [group.label for group in compared(tmp_path).groups] == ["a", "wiring-top2"]


def test_runs_without_evaluation_compare_by_training_loss(tmp_path):
  write_run(tmp_path / "a", losses=[3.0, 2.0], fields=TOP2)
  write_run(tmp_path / "b", losses=[3.0, math.nan], fields=POS2)
  text = (tmp_path / "b" / "metrics.jsonl").read_text().replace("NaN", "null")
  (tmp_path / "b" / "metrics.jsonl").write_text(text)
  rows = {row[0]: row[1:] for row in result_table(compared(tmp_path)).rows}
  assert rows["training loss"] == ("2.0000", "–")
  assert "loss" not in rows


def test_the_command_writes_a_page_that_needs_nothing(runs, tmp_path, capsys):
  out = tmp_path / "report"
  argv = [str(runs), "--out", str(out), "--json", str(tmp_path / "c.json")]
  command.main(argv)
  printed = capsys.readouterr().out
  assert "4.0000 ± 0.5000" in printed
  assert "not finished: b2: failed at step 0 of 20, exit 3" in printed
  html = (out / "compare.html").read_text()
  for words in ("2.1250 ± 0.1768", "failed at step 0", "data:image/png;base64,", "model.wiring"):
    assert words in html
  assert "http" not in html
  assert "<script" not in html
  assert "| loss | 4.0000 ± 0.5000 | 2.1250 ± 0.1768 |" in (out / "compare.md").read_text()
  figures = json.loads((tmp_path / "c.json").read_text())
  assert figures["groups"][0]["figures"]["loss"]["mean"] == 4.0
  assert figures["groups"][1]["paired"]["loss"]["better"] == 2


def test_mistakes_are_one_line(tmp_path):
  (tmp_path / "empty").mkdir()
  with pytest.raises(ConfigError, match="'none' is not a run and holds none"):
    command.main(["none"])
  for name in (str(tmp_path / "empty"), "~no-such-user/a"):
    with pytest.raises(ConfigError, match="is not a run and holds none"):
      command.main([name])
  with pytest.raises(ConfigError, match="no run is given"):
    command.main([])
  run = write_run(tmp_path / "a", losses=[1.0])
  (run / "card.json").write_text("[]")
  with pytest.raises(DataError, match=r"card\.json cannot be used: it is \[\], not an object"):
    read_run(run)


DAMAGED = {
  "time": 7, "git": "abc", "versions": ["0.10"], "host": "a", "devices": {"count": 1, "kind": 9},
  "config": [], "data": "text", "parameters": 7, "flops_per_token": "1e9", "starts": [7],
}  # fmt: skip


@pytest.mark.parametrize("field", CARD_SHAPE)
def test_a_damaged_field_of_a_card_is_one_line(tmp_path, field):
  run = write_run(tmp_path / "a", losses=[1.0])
  card = json.loads((run / "card.json").read_text()) | {field: DAMAGED[field]}
  (run / "card.json").write_text(json.dumps(card))
  with pytest.raises(StoredError, match=r"card\.json cannot be used: .* is .*, not ") as said:
    read_run(run)
  assert "\n" not in str(said.value)
  assert read_card(run) == {}


def test_a_commit_that_is_no_text_is_one_line(tmp_path):
  run = write_run(tmp_path / "a", losses=[1.0])
  card = json.loads((run / "card.json").read_text()) | {"git": {"commit": 7}}
  (run / "card.json").write_text(json.dumps(card))
  with pytest.raises(StoredError, match="'commit' is 7, not a text"):
    read_run(run)
