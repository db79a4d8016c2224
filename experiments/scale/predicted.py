"""Measured steps beside the predictions of the schedule's model, for every mesh that was measured.

  python experiments/scale/predicted.py

Needs no GPU: it reads the results files of other experiments, and predicts each of their steps as
`--dry_run` does, from sizes and rates alone. The rates of the links are those that all-to-alls
alone reached (`scmoe.profiling.roofline.MACHINES`); no rate comes from the steps that are compared.
Rows that say forward are block pairs without embedding, head and update.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

import speed  # noqa: E402

from scmoe.blocks.timeline import best_slot, makespan, sequential_makespan  # noqa: E402
from scmoe.profiling.roofline import MACHINES  # noqa: E402
from scmoe.run.cluster import machine_of  # noqa: E402
from scmoe.run.config import RunConfig  # noqa: E402
from scmoe.run.config_files import load_config  # noqa: E402
from scmoe.run.dry_run import step_work  # noqa: E402
from scmoe.run.estimates import DEVICES, HOST_DEVICES  # noqa: E402
from scmoe.run.fields import with_field  # noqa: E402
from scmoe.run.links import Links  # noqa: E402
from scmoe.run.prediction import pair_times, predicted  # noqa: E402

H200 = next(device for device in DEVICES if device.name == "H200")
OLMOE = {"data.tokenizer": "bytes", "train.tokens_per_step": "0"}
MEDIUM = {"train.batch_size": "16", "train.tokens_per_step": "131072", "model.num_layers": "8"}
MEDIUM |= {"mesh.expert": "2", "mesh.data": "1", "dispatch.transport": "packed"}
ALTERNATE = {"model.moe_every": "1", "model.num_layers": "10", "model.num_experts": "8"}
ALTERNATE |= {"mesh.expert": "2", "mesh.data": "1", "model.wiring": "scmoe_pos2"}
ALTERNATE |= {"train.batch_size": "8", "train.tokens_per_step": "32768"}


@dataclasses.dataclass(frozen=True)
class Measured:
  """One step that was measured.

  Attributes:
    name: row of the table.
    link: "nvlink", "slow", or "" for one GPU.
    results: path under `experiments/`, and the keys that lead to the milliseconds.
    config: name of a file in `configs/`, or of a shape of `experiments/speed.py`.
    fields: changed fields of the configuration.
    job: of a shape: the devices, the microbatches, and the arm of `experiments/speed.py`.
    forward: whether only the pairs' forward pass was measured.
  """

  name: str
  link: str
  results: tuple[Any, ...]
  config: str
  fields: dict[str, str] = dataclasses.field(default_factory=dict)
  job: tuple[int, int, str] | None = None
  forward: bool = False

  @property
  def milliseconds(self) -> float:
    """The measured time, from the results file."""
    path, *keys = self.results
    return functools.reduce(
      lambda found, key: found[key], keys, json.loads((ROOT / "experiments" / path).read_text())
    )

  @property
  def run(self) -> RunConfig:
    """The resolved configuration of the step."""
    if self.job is None:
      run = load_config(ROOT / "configs" / f"{self.config}.py")
      devices, fields = 1, self.fields
    else:
      devices, micro, arm = self.job
      run, fields = speed.SHAPES[self.config], {}
      run = _pairs(run, devices, micro)
      wiring, *words = arm.split(".")
      fields = {"model.wiring": speed.WIRINGS[wiring]}
      fields["model.top_k"] = str(run.model.top_k - (wiring not in ("dense", "top")))
      for word in words:
        fields |= speed.WORDS[word]
    for name, value in fields.items():
      run = with_field(run, name, value)
    if self.job is None:
      devices = max(run.mesh.data, 1) * run.mesh.expert
    return run.resolve(num_devices=devices, vocab_size=run.model.vocab_size or 320)

  @property
  def links(self) -> Links:
    """The rates of the link: all devices are in one host."""
    link = MACHINES[f"h200-{self.link or 'nvlink'}"]
    return Links(link.link, link.link, link.latency, HOST_DEVICES)


def _pairs(model: Any, devices: int, micro: int) -> RunConfig:
  """`speed.Job.run` for a number of devices that this machine need not have."""
  job = speed.Job("nvlink", "", "train", (), micro)
  sequences = job.batch * devices
  return RunConfig(
    model=model,
    dispatch=speed.DispatchConfig(capacity_factor=1.0),
    mesh=speed.MeshConfig(data=1, expert=devices),
    data=speed.DataConfig(seq_len=model.context, document_mask=False),
    train=speed.TrainConfig(
      batch_size=sequences, tokens_per_step=micro * sequences * model.context
    ),
  )


STEP, SCALE = "step/results/results.json", "scale/results/olmoe.json"
WIDE = MEDIUM | {"model.width": "1280", "model.num_heads": "20", "model.num_experts": "16"}
WIDE |= {"train.batch_size": "8", "model.vocab_size": "50304"}
PAIRS = "exchange_cost/results/default-slow-pairs-h200-2026-11-30.json"
COST = "exchange_cost/results/nvlink-2026-11-27.json"
FIGURE8, TABLE2 = "figure8_overlap/results/results.json", "table2_speed/results/results.json"
TWO = OLMOE | {"mesh.data": "2", "model.num_layers": "15"}
SHARED = {"mesh.shard_state": "parameters"}


def _forward(name: str, link: str, place: int, shape: str, arm: str) -> Measured:
  results = (FIGURE8, place, "arms", arm, "ms")
  return Measured(f"{name}, forward", link, results, shape, {}, (4, 1, arm), True)


MEASURED = (
  Measured(
    "1 GPU, OLMoE, 4 layers",
    "",
    (STEP, "arms", "olmoe4.gate", "step_ms"),
    "olmoe",
    OLMOE | {"model.num_layers": "4", "train.batch_size": "4"},
  ),
  Measured("1 GPU, OLMoE", "", (STEP, "arms", "olmoe16.spread", "step_ms"), "olmoe", OLMOE),
  Measured(
    "1 GPU, `gpt2_moe_medium`", "", (STEP, "arms", "medium.gate", "step_ms"), "gpt2_moe_medium"
  ),
  Measured(
    "data=2, OLMoE, 15 layers, `none`", "nvlink", (SCALE, "arms", "none", "ms"), "olmoe", TWO
  ),
  Measured(
    "data=2, the same, `moments`",
    "nvlink",
    (SCALE, "arms", "moments", "ms"),
    "olmoe",
    TWO | {"mesh.shard_state": "moments"},
  ),
  Measured(
    "data=2, the same, `parameters`",
    "nvlink",
    (SCALE, "arms", "parameters", "ms"),
    "olmoe",
    TWO | SHARED,
  ),
  Measured(
    "data=2, the same, kept",
    "nvlink",
    (SCALE, "arms", "kept", "ms"),
    "olmoe",
    TWO | SHARED | {"mesh.gather_again": "false"},
  ),
  Measured(
    "expert=2, `gpt2_moe_medium`, 8 layers, top-2",
    "nvlink",
    (COST, "arms", "top-2", "ms"),
    "gpt2_moe_medium",
    MEDIUM | {"model.wiring": "top2"},
  ),
  Measured(
    "expert=2, the same, Pos-2",
    "nvlink",
    (COST, "arms", "Pos-2", "ms"),
    "gpt2_moe_medium",
    MEDIUM | {"model.wiring": "scmoe_pos2"},
  ),
  Measured(
    "expert=2, the same, Pos-2, two chunks",
    "slow",
    ("step/results/overlap-2026-11-25.json", "arms", "pos2", "wall", "ms"),
    "gpt2_moe_medium",
    MEDIUM | {"model.wiring": "scmoe_pos2"},
  ),
  Measured(
    "expert=2, width 1,280, 16 experts, top-2",
    "slow",
    (PAIRS, 0, "arms", "top2", "ms"),
    "gpt2_moe_medium",
    WIDE | {"model.wiring": "top2"},
  ),
  Measured(
    "expert=2, the same, Pos-2",
    "slow",
    (PAIRS, 0, "arms", "scmoe_pos2", "ms"),
    "gpt2_moe_medium",
    WIDE | {"model.wiring": "scmoe_pos2"},
  ),
  Measured(
    "expert=2, a MoE in every block, 10 layers, Pos-2",
    "slow",
    ("step/results/ahead-slow-pos2-2026-11-27.json", "arms", "off", "wall", "ms"),
    "gpt2_moe_medium",
    ALTERNATE,
  ),
  Measured(
    "expert=4, GPT3-XL pairs, top-2",
    "slow",
    (TABLE2, 0, "arms", "top.once16", "ms"),
    "gpt3_xl",
    job=(4, 8, "top.bf16"),
  ),
  Measured(
    "expert=4, the same, Pos-2",
    "slow",
    (TABLE2, 0, "arms", "pos2.once16", "ms"),
    "gpt3_xl",
    job=(4, 8, "pos2.bf16"),
  ),
  Measured(
    "expert=4, 64 fine experts, top-8",
    "nvlink",
    (TABLE2, 1, "arms", "top.once16", "ms"),
    "fine",
    job=(4, 4, "top.bf16"),
  ),
  Measured(
    "expert=4, the same, Pos-2",
    "nvlink",
    (TABLE2, 1, "arms", "pos2.once16", "ms"),
    "fine",
    job=(4, 4, "pos2.bf16"),
  ),
  _forward("expert=4, GPT3-XL pairs, top-2", "slow", 0, "gpt3_xl", "top"),
  _forward("expert=4, the same, Pos-2", "slow", 0, "gpt3_xl", "pos2"),
  _forward("expert=4, the same, nothing beside", "slow", 0, "gpt3_xl", "pos2.seq"),
  _forward("expert=4, half as wide, top-2", "slow", 1, "narrow", "top"),
  _forward("expert=4, the same, Pos-3", "slow", 1, "narrow", "pos3"),
  _forward("expert=4, 64 fine experts, top-8", "nvlink", 2, "fine", "top"),
  _forward("expert=4, the same, Pos-2", "nvlink", 2, "fine", "pos2"),
)


def prediction(case: Measured) -> float:
  """Predicted milliseconds."""
  work, machine = step_work(case.run), machine_of(H200)
  if not case.forward:
    return 1e3 * predicted(work, machine, case.links).step
  times = pair_times(work, machine, case.links)
  if work.run.overlap.schedule == "off":
    return 1e3 * work.run.model.num_pairs * sequential_makespan(times)
  return 1e3 * work.run.model.num_pairs * makespan(times, best_slot(times))


def lines(cases: Sequence[Measured] = MEASURED) -> list[str]:
  """The table of docs/scale.md, or only the rows of some of its steps."""
  found = ["| mesh, step | link | predicted, ms | measured, ms | error |", "|---|---|---|---|---|"]
  for case in cases:
    said, was = prediction(case), case.milliseconds
    times = f"{said:.1f} | {was:.1f} | {said / was - 1:+.0%}"
    found.append(f"| {case.name} | {case.link or '–'} | {times} |")
  return found


if __name__ == "__main__":
  print(*lines(), sep="\n")
