"""python -m scmoe.profile: where the time of a step goes, and which communication is hidden.

  python -m scmoe.profile --config gpt2_moe_medium --workdir runs/profile
  python -m scmoe.profile --config quickstart --smoke --compare top2,scmoe_pos2 --json overlap.json

Runs the step of every wiring in turns on synthetic tokens, takes the wall clock of plain runs, then
a profiler trace of two steps. The wall clock decides, the trace explains. Without a GPU it runs on
the simulated devices: what it prints then are not GPU times.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from scmoe import build
from scmoe.blocks.schedule import (
  COMPUTE,
  LINK,
  Span,
  Times,
  best_chunks,
  describe,
  make_schedule,
)
from scmoe.command_line import TRAIN_FLAGS, Flag, compared, help_text, parse, run_config, simulate
from scmoe.config import RunConfig
from scmoe.errors import run_main
from scmoe.parallel.collectives import request_copy_engines
from scmoe.parallel.mesh import batch_sharding
from scmoe.profiling.advice import advice
from scmoe.profiling.overlap import (
  StageTime,
  measure_overlap,
  stage_of,
  stage_table,
  stage_times,
)
from scmoe.profiling.picture import Bar, draw_png, write_page
from scmoe.profiling.program import Program, traced
from scmoe.profiling.roofline import MACHINES
from scmoe.profiling.timer import NO_GPU, Timing, interleave, speed_up
from scmoe.profiling.trace import Event
from scmoe.profiling.windows import program_windows, summary
from scmoe.training.guided import GuidedStep
from scmoe.training.search import Search, fastest_step
from scmoe.training.step import init_state
from scmoe.training.variants import Variant
from scmoe.training.workdir import write_json

OWN = (
  Flag("compare", str, "", "wirings to run in turns, separated by commas; the first is the base"),
  Flag("rounds", int, 5, "turns of every wiring"),
  Flag("calls", int, 2, "steps of every turn"),
  Flag("machine", str, "h200-nvlink", f"of the modelled schedule: {', '.join(MACHINES)}"),
  Flag("json", str, "", "also write the figures to this file"),
)
SHARED = ("config", "config_json", "smoke", "workdir", "allow_config_change", "allow_import",
          "simulate", "help")  # fmt: skip
FLAGS = tuple(f for f in TRAIN_FLAGS if f.name in SHARED) + OWN
TRACED = 2  # steps in the trace


def main(argv: list[str]) -> None:
  """Profiles what the command line asks for and prints the report."""
  values, given = parse(argv, FLAGS, with_fields=True)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"], with_fields=True))
  simulate(values["simulate"])
  run = run_config(values, given)
  names = compared(values["compare"], run)
  if run.overlap.copy_engines:
    request_copy_engines()
  workdir = Path(values["workdir"] or "runs/profile")
  workdir.mkdir(parents=True, exist_ok=True)
  report = profile(run, names, workdir, rounds=values["rounds"], calls=values["calls"],
                   modelled_on=values["machine"])  # fmt: skip
  print(report.text)
  if values["json"]:
    write_json(Path(values["json"]), report.figures)


@dataclasses.dataclass(frozen=True)
class Report:
  """The text that is printed and the figures behind it."""

  text: str
  figures: dict[str, Any]


def profile(
  run: RunConfig, names: Sequence[str], workdir: Path, *, rounds: int, calls: int, modelled_on: str
) -> Report:
  """Times and traces the training step of every wiring; writes the picture and the page."""
  arms = {name: Arm(build.with_wiring(run, name), workdir / name) for name in names}
  for arm in arms.values():
    arm.warm_up()
  timings = interleave(arms, rounds=rounds, calls=calls)
  gpu = jax.default_backend() == "gpu"
  device = f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}"
  lines = [f"training step of {run.name}, {device}, {time.strftime('%Y-%m-%d')}"]
  if not gpu:
    lines.append(NO_GPU)
  figures: dict[str, Any] = {"device": device, "gpu": gpu, "date": time.strftime("%Y-%m-%d")}
  figures["arms"], rows = {}, {}
  base = timings[names[0]]
  for name, arm in arms.items():
    text, found, bars = _arm_report(arm, timings[name], base, modelled_on)
    lines += ["", f"== {name}", text]
    figures["arms"][name] = found
    # What was not measured here says whose machine it is of; a wiring without experts has no bar.
    if any(bars.values()):
      rows[name if found["measured"] else f"{name}, modelled for {modelled_on}"] = bars
  text = "\n".join(lines)
  measured = all(arm["measured"] for arm in figures["arms"].values())
  where = device if measured else f"modelled for {modelled_on}, not measured on {device}"
  png = draw_png(rows, f"one block pair, {where}")
  (workdir / "overlap.png").write_bytes(png)
  write_page(workdir / "overlap.html", png, lines[0], text)
  return Report(
    f"{text}\n\npicture: {workdir / 'overlap.png'}, {workdir / 'overlap.html'}", figures
  )


class Arm:
  """One wiring: its step, called in turns."""

  def __init__(self, run: RunConfig, directory: Path):
    vocabulary = build.vocab_size(run.data)
    self.run = run.resolve(num_devices=jax.device_count(), vocab_size=vocabulary)
    self.built = build.build(self.run)
    abstract = self.built.abstract_state()
    self.directory = directory
    self.step = fastest_step(self.built, abstract, directory)
    self.state = init_state(self.built.init, self.built.optimizer, 0, abstract)
    batch = self.built.random_batch()
    self.batch = jax.device_put(batch, batch_sharding(self.built.mesh, leading=1))

  def warm_up(self) -> None:
    """Past compilation, profile and search: what a user's run comes to."""
    self(1)
    while not self.step.settled:
      self(1)
    self(1)

  def __call__(self, calls: int) -> None:
    scalars: Any = None
    for _ in range(calls):
      self.state, scalars, _ = self.step(self.state, self.batch)
    jax.block_until_ready((self.state, scalars))

  def trace(self) -> tuple[list[Event], str, Program]:
    """Events of two steps, the folder of the trace for XProf or Perfetto, and what was traced."""
    folder, program = str(self.directory / "trace"), self.best.named_program()

    def steps(calls: int) -> None:
      for _ in range(calls):
        self.state, _, _ = program(self.state, self.batch)
      jax.block_until_ready(self.state)

    steps(1)  # the first call of a program loads its kernels
    return traced(lambda: steps(TRACED), folder), folder, program

  @property
  def best(self) -> GuidedStep:
    """The step as it runs."""
    return self.step.best if isinstance(self.step, Search) else self.step

  @property
  def variant(self) -> Variant:
    """Which way of running it that is."""
    return self.best.variant or Variant()

  @property
  def compiled(self) -> Program:
    """Its program."""
    assert self.best.program is not None, "called after `warm_up`"
    return self.best.program


def _arm_report(
  arm: Arm, timing: Timing, base: Timing, modelled_on: str
) -> tuple[str, dict[str, Any], dict[str, list[Bar]]]:
  """Text, figures and the bars of one block pair."""
  lines = [f"step {1e3 * timing.median:.3f} ms (± {100 * timing.spread:.1f} %), "
           f"{speed_up(base, timing):.2f}x"]  # fmt: skip
  figures: dict[str, Any] = {"wall": timing.as_json(), "speed_up": speed_up(base, timing)}
  figures["measured"] = False
  run = arm.built.varied(arm.variant)
  times = build.modelled_times(run, modelled_on)
  bars: dict[str, list[Bar]] = {COMPUTE: [], LINK: []}
  if times is not None:
    model = run.model
    rule, chunks = model.wiring_rule, run.dispatch.chunks
    schedule = make_schedule(rule, model.moe_every, run.overlap, chunks)
    lines += [f"runs: {arm.variant}", str(schedule)]
    lines += [f"as modelled for {modelled_on}, one pair, forward:", describe(times)]
    bars = _bars(best_chunks(times)[1])
  events, folder, program = arm.trace()
  overlap = measure_overlap(events, TRACED)
  if overlap is not None:
    names = program.names
    stages = stage_times(events, names, TRACED)
    lines += [
      f"trace: communication {overlap.communication:.3f} ms, {100 * overlap.share_hidden:.1f} % "
      f"hidden, {overlap.exposed:.3f} ms exposed; computation {overlap.computation:.3f} ms",
      stage_table(stages),
      "beside each exchange of the compiled program:",
      summary(program_windows(program.text)),
    ]
    lines[:0] = _advice(run, stages, 1e3 * timing.median, times)
    figures |= {"trace": overlap.as_json(), "stages": [dataclasses.asdict(s) for s in stages]}
    if any((measured := measured_bars(events, names)).values()):
      bars, figures["measured"] = measured, True
  lines.append(f"trace for XProf or Perfetto: {folder}")
  return "\n".join(lines), figures | {"trace_folder": folder}, bars


def _advice(
  run: RunConfig, stages: Sequence[StageTime], step: float, times: Times | None
) -> list[str]:
  """What to change, for the first lines of the report."""
  dispatch, share = run.dispatch, 1.0
  if times is not None:
    share = times.window / (times.window + times.before)
  return advice(
    stages,
    step,
    shortcut=run.model.wiring_rule.is_shortcut,
    window_share=share,
    capacity_factor=dispatch.capacity_factor if dispatch.transport == "capacity" else 0.0,
  )


def _bars(spans: Sequence[Span]) -> dict[str, list[Bar]]:
  return {
    stream: [(s.name, s.start, s.end) for s in spans if s.stream == stream]
    for stream in (COMPUTE, LINK)
  }


def measured_bars(events: Sequence[Event], names: Mapping[str, str]) -> dict[str, list[Bar]]:
  """One block pair of the traced forward pass, around its dispatch; ms."""
  device = min(e.device for e in events)
  own = [e for e in events if e.device == device]
  stage = lambda e: stage_of(names.get(e.op) or e.op)
  sent = [e for e in own if e.is_communication and stage(e) == "dispatch"]
  if len(sent) < 2:
    return {COMPUTE: [], LINK: []}
  # What comes before the dispatch is the shorter part of a pair.
  period = sent[1].start - sent[0].start
  first = sent[0].start - 0.3 * period
  bars: dict[str, list[Bar]] = {COMPUTE: [], LINK: []}
  for event in own:
    if first <= event.start < first + period:
      lane = LINK if event.is_communication else COMPUTE
      bars[lane].append((stage(event), (event.start - first) / 1e6, (event.end - first) / 1e6))
  return bars


if __name__ == "__main__":
  run_main(main)
