"""Goodput: which seconds of a run count as trained."""

import pytest
from training_fakes import trainer

from scmoe.base.errors import Preempted
from scmoe.training.goodput import Goodput, goodput
from scmoe.training.metrics import read_metrics


def start(step, time):
  return {"step": step, "time": time}


def line(step, seconds):
  return {"step": step, "seconds_per_step": seconds}


@pytest.mark.parametrize(
  ("starts", "lines", "trained", "wall"),
  [
    ([start(0, 100.0)], [], 0.0, 100.0),
    ([start(0, 100.0)], [line(10, 2.0), line(20, 3.0)], 50.0, 100.0),
    # Died after step 15, went on from 10: the second start did steps 11 to 20 of the second line.
    ([start(0, 100.0), start(10, 160.0)], [line(10, 2.0), line(20, 3.0)], 50.0, 100.0),
    # Two lines without a time count with the median of 1, 2 and 9.
    ([start(0, 100.0)], [line(1, None), line(2, 1.0), line(3, 2.0), line(4, 9.0), line(6, None)],
     2.0 + 1.0 + 2.0 + 9.0 + 4.0, 100.0),
    # A record that an earlier version began counts from the first start that is known.
    ([start(20, 150.0)], [line(10, 2.0), line(20, 3.0), line(25, 4.0)], 20.0, 50.0),
    ([{"step": 0}, start(20, 150.0)], [line(25, 4.0)], 20.0, 50.0),
  ],
)  # fmt: skip
def test_kept_steps_count_once(starts, lines, trained, wall):
  found = goodput(starts, lines, 200.0)
  assert (found.trained, found.wall) == (trained, wall)
  assert found.share == pytest.approx(trained / wall)


def test_a_record_without_starts_has_none():
  assert goodput([], [line(1, 2.0)], 9.0) is None
  assert goodput([{"step": 0, "time": None}], [line(1, 2.0)], 9.0) is None


def test_its_line():
  text = "goodput 83.5 %: 50.1 of 60.0 s trained since the run began, in "
  assert Goodput(50.1, 60.0, 2).words == text + "2 starts"
  assert Goodput(50.1, 60.0, 1).words == text + "one start"
  assert Goodput(0.0, 0.0, 1).share == 0.0


def test_a_run_prints_and_records_it(mesh8, tmp_path, capsys):
  with pytest.raises(Preempted):
    trainer(mesh8, tmp_path, steps=6, stop_after=4).run()
  assert "goodput" not in capsys.readouterr().out
  trainer(mesh8, tmp_path, steps=6).run()
  said = [text for text in capsys.readouterr().out.splitlines() if text.startswith("goodput ")]
  assert len(said) == 2, "when it resumes, and at its end"
  assert said[1].endswith("in 2 starts")
  assert [(s["step"], s["devices"]) for s in read_metrics(tmp_path, "start")] == [(0, 8), (4, 8)]
  (end,) = read_metrics(tmp_path, "end")
  assert 0 < end["goodput"] < 1
  assert end["goodput"] == pytest.approx(end["trained_seconds"] / end["wall_seconds"])
