"""The profile command: what it models, what it draws, what it refuses."""

import dataclasses
import gzip
import json
import re

import jax
import pytest

from scmoe import profile
from scmoe.base.errors import ConfigError
from scmoe.blocks.schedule import joined
from scmoe.blocks.timeline import best_slot, split_window
from scmoe.blocks.wiring import WIRINGS
from scmoe.models.config import ModelConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.parallel.mesh import MeshConfig
from scmoe.run.config import RunConfig
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.run.modelled import modelled_times
from scmoe.training import fastest
from scmoe.training.variants import Variant


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
  times = modelled_times(run, "h200-slow")
  dense = joined(name for name, _ in times.dense)
  assert dense == ["mlp 0", "attention 1", "shared expert"]
  assert times.dispatch > 0
  assert best_slot(times) in ("mlp 0", "attention 1: projections", "attention 1")
  fast = modelled_times(run, "h200-nvlink")
  assert fast.dispatch < times.dispatch / 5
  rows = lambda **how: modelled_times(
    dataclasses.replace(run, dispatch=DispatchConfig(**how)), "h200-slow"
  )
  no_capacity = rows(transport="capacity", capacity_factor=0.0)
  assert dataclasses.asdict(no_capacity) == dataclasses.asdict(rows(transport="dropless"))
  without = dataclasses.replace(run, model=dataclasses.replace(model, wiring="dense"))
  assert modelled_times(without, "h200-slow") is None


def test_unknown_wiring(tmp_path):
  with pytest.raises(ConfigError, match=r"--compare='top9' is no wiring; one of: dense"):
    profile.main(["--compare", "top9", "--workdir", str(tmp_path)])
  with pytest.raises(ConfigError, match="--compare='' is no wiring"):
    profile.main(["--compare", "top2,", "--workdir", str(tmp_path)])
  with pytest.raises(ConfigError, match="--compare='top2,top2' names a wiring twice"):
    profile.main(["--compare", "top2,top2", "--workdir", str(tmp_path)])


def test_steps_that_train_adapters_are_not_profiled_as_steps_of_all_parameters(tmp_path):
  words = "--config quickstart --smoke --config.lora.rank=2 --config.train.init_from=base"
  fields = "--rounds 1 --calls 1 --clock=false --config.overlap.search_seconds=0"
  with pytest.raises(ConfigError, match=r"lora\.rank=2: a profile has no base"):
    profile.main([*words.split(), *fields.split(), "--workdir", str(tmp_path)])


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
  """The command's folder and its figures, of one ScMoE on simulated devices."""
  folder = tmp_path_factory.mktemp("profile")
  words = "--config quickstart --smoke --compare scmoe_pos2,dense --rounds 3 --calls 1"
  fields = ("mesh.expert=8", "model.num_experts=8", "model.num_layers=4")
  profile.main([*words.split(), "--workdir", str(folder), "--json", str(folder / "figures.json"),
                *(f"--config.{field}" for field in fields)])  # fmt: skip
  return folder, json.loads((folder / "figures.json").read_text())


def test_it_says_what_took_how_long(profiled):
  _, figures = profiled
  assert figures["command"].startswith("python -m scmoe.profile --config quickstart --smoke")
  assert figures["date"]
  parts = ("scmoe_pos2: compilation and search", "dense: compilation and search",
           "scmoe_pos2: the step without exchanges",
           "3 rounds of 1 steps", "scmoe_pos2: trace", "dense: trace", "picture")  # fmt: skip
  assert set(figures["seconds"]) == set(parts)
  assert all(seconds > 0 for seconds in figures["seconds"].values())


def test_the_exchanges_cost_is_told_beside_what_a_trace_shows(profiled):
  folder, figures = profiled
  arms, page = figures["arms"], (folder / "overlap.html").read_text()
  found = arms["scmoe_pos2"]["exchanges"]
  assert found["alone"]["ms"] > 0
  times = [
    each["rounds_ms"] for each in (arms["scmoe_pos2"]["wall"], found["without"], found["alone"])
  ]
  shares = sorted((step - without) / alone for step, without, alone in zip(*times, strict=True))
  assert len(shares) == 3
  assert found["share_paid"] == pytest.approx(shares[1], rel=1e-2, abs=1e-2)
  assert "exchanges" not in arms["dense"], "no rows travel"
  # The page and the JSON round the same number, the JSON to more digits. So the two may differ by
  # half a unit of the page's last digit and half a unit of the JSON's.
  share = re.search(r"step [\d.]+ ms \(± [\d.]+ %\), 1.00x, (-?\d+) % of the exchanges paid", page)
  assert share
  assert abs(int(share[1]) - 100 * found["share_paid"]) <= 0.5 + 0.5e-2 + 1e-9
  paid = re.search(rf"([\d.]+) ms are paid, {share[1]} % \(-?\d+ to -?\d+\)", page)
  assert paid
  assert abs(float(paid[1]) - found["alone"]["ms"]) <= 0.5e-3 + 0.5e-4 + 1e-9
  assert f"<td>{share[1]} % (" in page


def test_neither_an_asked_for_nor_a_kept_schedule_is_searched_for(tmp_path, monkeypatch):
  """On GPUs that exchange rows, where a first profile searches."""
  run = load_config(find_config("quickstart"), "smoke")
  run = with_field(with_field(run, "mesh.expert", "4"), "mesh.data", "2")
  searched = []

  def on_a_cut(make, candidates, keep):
    searched.append(make.folder)
    make.folder.mkdir()
    keep({"chosen": {"chunks": 2}})
    return Variant(chunks=2)

  monkeypatch.setattr(fastest, "_on_a_cut", on_a_cut)
  monkeypatch.setattr(fastest, "_on_whole_steps", lambda make, steps, proposed, found: proposed)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(profile, "MeasuredState", lambda *_: None)
  off = with_field(run, "overlap.search_seconds", "0")
  assert profile.Arm(off, tmp_path / "off").step.variant == Variant()
  assert not searched
  for _ in range(2):
    assert profile.Arm(run, tmp_path / "on").step.variant == Variant(chunks=2)
  assert searched == [tmp_path / "on"]


def test_on_a_cpu_the_page_says_what_is_simulated_and_what_is_modelled(profiled):
  folder, figures = profiled
  assert figures["gpu"] is False
  assert figures["arms"]["scmoe_pos2"]["measured"] is False
  page = (folder / "overlap.html").read_text()
  assert "There is no GPU here" in page
  assert "One block pair, simulated: 8 x cpu" in page
  assert "One block pair, modelled for h200-nvlink, from sizes and rates: not measured" in page
  assert "One block pair, measured" not in page
  assert "<script" not in page
  assert set(re.findall(r"(?:src|href)='([^']*)'", page)) == {
    "https://ui.perfetto.dev",
    "scmoe_pos2.trace.json.gz",
    "dense.trace.json.gz",
  }


def test_the_simulated_pair_has_its_exchanges_and_every_bar_its_times(profiled):
  folder, _ = profiled
  simulated, modelled = re.findall(r"<svg.*?</svg>", (folder / "overlap.html").read_text(), re.S)
  for svg in (simulated, modelled):
    bars = re.findall(r'<g class="bar"><title>(.*?)</title>', svg, re.S)
    assert len(bars) == svg.count('<g class="bar">') > 4
    assert all(re.search(r"\n[\d.e-]+ to [\d.e-]+ ms: [\d.e-]+ ms", bar) for bar in bars)
  for stage in ("dispatch", "combine"):
    assert f"{stage} (scmoe_pos2 · link)" in simulated
  assert "experts (scmoe_pos2 · compute)" in simulated
  assert "(dense ·" not in simulated + modelled  # no experts, no pair


def test_the_linked_trace_has_the_stages_of_every_device(profiled):
  folder, _ = profiled
  trace = json.loads(gzip.decompress((folder / "scmoe_pos2.trace.json.gz").read_bytes()))
  names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
  assert {f"scmoe: stages of simulated device {i}" for i in range(8)} <= set(names)
  stages = {e["name"] for e in trace["traceEvents"]}
  assert {"dispatch, forward", "combine, backward", "experts, forward"} <= stages
  tagged = [e for e in trace["traceEvents"] if e.get("args", {}).get("stage") == "experts"]
  assert any("/experts" in e["args"]["op_name"] for e in tagged)
