"""The profile command: what it models, what it draws, what it refuses."""

import dataclasses

import pytest

from scmoe import build, profile
from scmoe.blocks.schedule import COMPUTE, LINK, best_slot, joined, split_window
from scmoe.blocks.wiring import WIRINGS
from scmoe.config import RunConfig
from scmoe.errors import ConfigError
from scmoe.models.config import ModelConfig
from scmoe.parallel.mesh import MeshConfig
from scmoe.profiling.picture import draw_png, write_page
from scmoe.profiling.trace import Event


@pytest.mark.parametrize(
  ("wiring", "before", "window"),
  [
    ("top2", ["attention 0", "mlp 0", "attention 1"], []),
    ("shared_expert", ["attention 0", "mlp 0", "attention 1"], ["shared expert"]),
    ("scmoe_pos1", ["attention 0", "mlp 0"], ["attention 1", "shared expert"]),
    ("scmoe_pos2", ["attention 0"], ["mlp 0", "attention 1", "shared expert"]),
    ("scmoe_pos3", [], ["attention 0", "mlp 0", "attention 1", "shared expert"]),
  ],
)
def test_the_window_of_every_wiring(wiring, before, window):
  found = split_window(WIRINGS[wiring], 2)
  assert tuple(joined(step.name for step in steps) for steps in found) == (before, window)


def test_the_modelled_schedule_of_a_large_model():
  model = ModelConfig(wiring="scmoe_pos2", width=2048, num_heads=16, vocab_size=64)
  run = RunConfig(model=model, mesh=MeshConfig(data=1, expert=4))
  run = dataclasses.replace(
    run,
    data=dataclasses.replace(run.data, seq_len=2048),
    train=dataclasses.replace(run.train, batch_size=16),
    model=model.resolve(),
  )
  times = build.modelled_times(run, "h200-slow")
  dense = joined(name for name, _ in times.dense)
  assert dense == ["mlp 0", "attention 1", "shared expert"]
  assert times.dispatch > 0
  assert best_slot(times) in ("mlp 0", "attention 1: projections", "attention 1")
  fast = build.modelled_times(run, "h200-nvlink")
  assert fast.dispatch < times.dispatch / 5
  without = dataclasses.replace(run, model=dataclasses.replace(model, wiring="dense"))
  assert build.modelled_times(without, "h200-slow") is None


def test_a_pair_of_the_trace_is_cut_out_around_its_dispatch():
  event = lambda name, start, end, op: Event("gpu", "s", name, start * 1e6, end * 1e6, op)
  events = []
  for pair in (0, 10, 20):
    events += [
      event("ncclSend", pair + 4, pair + 6, "send.1"),
      event("gemm", pair + 3, pair + 7, "mlp.1"),
    ]
  names = {"send.1": "jit(f)/dispatch/all_to_all", "mlp.1": "jit(f)/mlp/dot_general"}
  bars = profile.measured_bars(events, names)
  assert bars[LINK] == [("dispatch", 3, 5)]
  assert bars[COMPUTE] == [("mlp", 2, 6)]


def test_the_picture_and_the_page(tmp_path):
  png = draw_png({"scmoe_pos2": {COMPUTE: [("mlp", 0, 2)], LINK: [("dispatch 1", 0, 1)]}}, "title")
  assert png.startswith(b"\x89PNG")
  write_page(tmp_path / "page.html", png, "a < b", "text & more")
  page = (tmp_path / "page.html").read_text()
  assert "a &lt; b" in page
  assert "text &amp; more" in page
  assert "src='data:image/png;base64," in page


def test_unknown_wiring(tmp_path):
  with pytest.raises(ConfigError, match=r"--compare='top9' is no wiring; one of: dense"):
    profile.main(["--compare", "top9", "--workdir", str(tmp_path)])


def test_stages_are_told_apart_by_their_colours():
  from scmoe.profiling.picture import COLOURS

  assert len(set(COLOURS.values())) == len(COLOURS)
  bars = {COMPUTE: [("attention 1: projections", 0, 2), ("shared expert", 2, 3)], LINK: []}
  plain = {COMPUTE: [("attention", 0, 2), ("shared expert", 2, 3)], LINK: []}
  assert draw_png({"a": bars}, "t") == draw_png({"a": plain}, "t")
