"""python -m scmoe.profile: shows where a step's time goes, and which communication is hidden.

  python -m scmoe.profile --config gpt2_moe_medium --workdir runs/profile
  python -m scmoe.profile --config quickstart --smoke --compare top2,scmoe_pos2 --json overlap.json

Runs the step of every wiring in turns on synthetic tokens, all with the transport that the first
one's search has chosen. It measures wall-clock time without the profiler, to compare the wirings,
then traces two steps of each, to explain the times. In the same turns it times each step without
its exchanges, and the exchanges alone: from these follows what exchanges cost (docs/overlap.md).
WORKDIR/overlap.html draws one block pair of each (the pointer shows a bar's time), and links the
traces, which ui.perfetto.dev opens. Without a GPU it prints and draws the times of simulated
devices, beside the schedule as modelled for --machine; neither is a GPU's time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from scmoe.base.errors import ConfigError, run_main
from scmoe.base.sizes import duration
from scmoe.base.stored import write_json
from scmoe.blocks.schedule import make_schedule
from scmoe.blocks.timeline import COMPUTE, LINK, Span, Times, best_chunks, describe
from scmoe.profiling import timer
from scmoe.profiling.advice import advice
from scmoe.profiling.clock import Paid, percent
from scmoe.profiling.overlap import (
  StageTime,
  measure_overlap,
  stage_table,
  stage_times,
)
from scmoe.profiling.pair import pair_bars
from scmoe.profiling.perfetto import TRACKS, write_perfetto
from scmoe.profiling.picture import Bar, Timeline, draw_png, draw_svg
from scmoe.profiling.program import Program, traced
from scmoe.profiling.roofline import MACHINES, machine
from scmoe.profiling.timer import NO_GPU, Timing, interleave, speed_up
from scmoe.profiling.trace import Event, find_trace, read_simulated
from scmoe.profiling.windows import program_windows, summary
from scmoe.reports import page
from scmoe.reports.tables import Table
from scmoe.run import build
from scmoe.run.command_line import (
  TRAIN_FLAGS,
  Flag,
  at_least,
  compared,
  help_text,
  json_file,
  parse,
  run_config,
  simulate,
)
from scmoe.run.config import RunConfig
from scmoe.run.controls import exchanges_alone, exchanges_in, without_exchanges
from scmoe.run.modelled import modelled_times
from scmoe.run.names import check_workdir
from scmoe.run.start import set_up_jax
from scmoe.training.card import environment, origin
from scmoe.training.compiled import PROGRAMS, kept_programs
from scmoe.training.fastest import Steps, fastest_step
from scmoe.training.guided import GuidedStep
from scmoe.training.measured import MeasuredState
from scmoe.training.search import Search
from scmoe.training.variants import Variant

OWN = (
  Flag("compare", str, "", "wirings to time, separated by commas; speed-ups are over the first"),
  Flag("rounds", int, 5, "how often each wiring is timed"),
  Flag("calls", int, 2, "steps that are timed together"),
  Flag("clock", bool, True, "also time the step without its exchanges, and the exchanges alone"),
  Flag("machine", str, "h200-nvlink", f"machine of the modelled schedule: {', '.join(MACHINES)}"),
  Flag("json", str, "", "also write the figures to this file"),
)
SHARED = ("config", "config_json", "smoke", "workdir", "allow_config_change", "allow_import",
          "simulate", "help")  # fmt: skip
FLAGS = tuple(f for f in TRAIN_FLAGS if f.name in SHARED) + OWN
TRACED = 2  # steps in the trace


def main(argv: list[str]) -> None:
  """Profiles the wirings of the command line and prints the report."""
  values, given = parse(argv, FLAGS, with_fields=True)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"], with_fields=True))
  variables = environment()
  simulate(values["simulate"])
  at_least(values, 1, "rounds", "calls")
  machine(values["machine"])
  out = json_file(values["json"])
  run = run_config(values, given)
  set_up_jax(run)
  names = compared(values["compare"], run)
  workdir = check_workdir(values["workdir"] or "runs/profile")
  workdir.mkdir(parents=True, exist_ok=True)
  options = {name: values[name] for name in ("rounds", "calls", "clock")}
  with kept_programs(workdir / PROGRAMS):
    report = profile(run, names, workdir, modelled_on=values["machine"], **options)
  print(report.text)
  if out is not None:
    write_json(out, report.figures | origin("scmoe.profile", argv, variables))


@dataclasses.dataclass(frozen=True)
class Report:
  """The text that is printed, and its figures for --json."""

  text: str
  figures: dict[str, Any]


def profile(
  run: RunConfig,
  names: Sequence[str],
  workdir: Path,
  *,
  rounds: int,
  calls: int,
  modelled_on: str,
  clock: bool = True,
) -> Report:
  """Times and traces the training step of every wiring; writes the picture and the page.

  Args:
    run: configuration, not resolved.
    names: wirings; speed-ups are over the first.
    workdir: where everything is written.
    rounds, calls: see `interleave`.
    modelled_on: machine of the modelled schedule.
    clock: whether to time the controls of the exchanges too (`scmoe.profiling.clock`).

  Raises:
    ConfigError: the run trains adapters, or its moments are updated on the host.
  """
  if run.mesh.moments_update == "host":
    raise ConfigError(
      "mesh.moments_update='host': a profile traces steps that are one program on the device; set "
      "mesh.moments_update=device and mesh.moments_in=host or device"
    )
  if run.lora.rank:
    raise ConfigError(
      f"lora.rank={run.lora.rank}: a profile has no base whose adapters it could train, and its "
      "steps train all parameters; set lora.rank=0"
    )
  took = Stopwatch()
  arms: dict[str, Arm] = {}
  timed: dict[str, timer.Arm] = {}
  transport = ""  # the one that the first arm with exchanges has chosen serves the others too
  for name in names:
    with took.part(f"{name}: compilation and search"):
      arms[name] = Arm(build.with_wiring(run, name), workdir / name, transport)
      arms[name].warm_up()
    timed[name] = arms[name]
    exchanges = exchanges_in(arms[name].jaxpr)
    if exchanges and not transport:
      transport = arms[name].built.varied(arms[name].variant).dispatch.transport
    if clock and exchanges:
      with took.part(f"{name}: the step without exchanges"):
        timed |= arms[name].controls()
  with took.part(f"{rounds} rounds of {calls} steps"):
    timings = interleave(timed, rounds=rounds, calls=calls)
  gpu = jax.default_backend() == "gpu"
  device = f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}"
  lines = [f"training step of {run.name}, {device}, {time.strftime('%Y-%m-%d')}"]
  if not gpu:
    lines.append(NO_GPU)
  figures: dict[str, Any] = {"device": device, "gpu": gpu}
  base, figures["arms"] = timings[names[0]], {}
  pictures: dict[str, dict[str, dict[str, list[Bar]]]] = {}  # kind of bar -> arm -> stream -> bars
  for name, arm in arms.items():
    with took.part(f"{name}: trace"):
      found = _arm_report(arm, timings[name], base, modelled_on, _paid(timings, name))
    lines += ["", f"== {name}", found.text]
    figures["arms"][name] = found.figures
    for kind, bars in found.bars.items():
      if any(bars.values()):  # a wiring without experts has no pair to draw
        pictures.setdefault(kind, {})[name] = bars
  titles = {
    MEASURED: f"measured on {device}",
    SIMULATED: f"simulated: {device}; collectives are copies in this computer's memory",
    MODELLED: f"modelled for {modelled_on}, from sizes and rates: not measured",
  }
  drawn = [Timeline(titles[kind], pictures[kind]) for kind in titles if kind in pictures]
  with took.part("picture"):
    page.write(workdir / "overlap.png", draw_png(drawn, f"one block pair, {lines[0]}"))
  lines += ["", str(took)]
  figures["seconds"] = took.seconds
  text = "\n".join(lines)
  page.write(workdir / "overlap.html", _page(lines[0], timings, drawn, figures, text))
  written = f"{workdir / 'overlap.html'} (and overlap.png)"
  return Report(f"{text}\n\npage: {written}", figures)


WITHOUT, ALONE = " without exchanges", " exchanges alone"  # the names of an arm's controls
MEASURED, SIMULATED, MODELLED = "measured", "simulated", "modelled"  # kinds of bars
PERFETTO = (
  "Open a trace at <a href='https://ui.perfetto.dev'>ui.perfetto.dev</a> with <i>Open trace "
  "file</i>, or drop it on that page: the browser reads it and sends it nowhere. Without a "
  "network, Chromium's own <code>chrome://tracing</code> loads the same file. At the top are three "
  f"tracks for each device: {'; '.join(TRACKS)}. A click on an operation shows its stage."
)


def _page(
  title: str,
  timings: Mapping[str, Timing],
  drawn: Sequence[Timeline],
  figures: dict[str, Any],
  text: str,
) -> str:
  """The HTML page: a warning without a GPU, the table, pictures, traces and the printed report."""
  not_gpu = [] if figures["gpu"] else [
    "There is no GPU here. Step times, stages and bars named simulated are those of devices that "
    "this CPU simulates; bars named modelled are computed. None of them is a GPU's time.",
  ]  # fmt: skip
  rows, links = [], []
  for name, arm in figures["arms"].items():
    trace = arm.get("trace", {})
    hidden = f"{100 * trace['share_hidden']:.1f} %" if trace.get("communication") else "–"
    busy = [f"{trace[key]:.3f}" if trace else "–" for key in ("computation", "communication")]
    wall = (f"{arm['wall']['ms']:.3f}", _spread(timings[name]), f"{arm['speed_up']:.2f}×")
    cost = arm.get("exchanges")
    alone = f"{cost['alone']['ms']:.3f}" if cost else "–"
    paid = percent(cost["share_paid"], cost["interval"]) if cost else "–"
    rows.append((name, *wall, *busy, hidden, alone, paid))
    file = Path(arm["perfetto"])
    links.append(f"<li><a href='{file.name}' download>{file.name}</a></li>")
  heads = ("wiring", "step ms", "spread", "speed-up", "compute ms", "communication ms", "hidden",
           "exchanges alone ms", "paid")  # fmt: skip
  pictures = [part for t in drawn for part in (f"<h2>One block pair, {t.title}</h2>", draw_svg(t))]
  return page.page(
    title,
    [
      page.warning(not_gpu),
      Table("A training step", heads, tuple(rows)),
      *pictures,
      "<p><small>Hidden: in the trace, the share of all communication beside which a kernel "
      "computed. Paid: by the clock, (step − step without exchanges) / exchanges alone."
      "</small></p>",
      "<p><small>Hold the pointer over a bar to see its time.</small></p>",
      f"<h2>Traces</h2><p>{PERFETTO}</p><ul>{''.join(links)}</ul>",
      f"<h2>Report</h2><pre>{html.escape(text)}</pre>",
    ],
    "python -m scmoe.profile",
  )


def _paid(timings: Mapping[str, Timing], name: str) -> Paid | None:
  """The cost of an arm's exchanges by the clock; None if its controls were not timed."""
  if name + WITHOUT not in timings:
    return None
  return Paid(timings[name], timings[name + WITHOUT], timings[name + ALONE])


class Stopwatch:
  """Durations of a command's parts; each is also printed on stderr at its end.

  Attributes:
    seconds: seconds of each part, in order.
  """

  def __init__(self) -> None:
    self.seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def part(self, name: str) -> Iterator[None]:
    """Measures the block."""
    begin = time.perf_counter()
    yield
    self.seconds[name] = round(time.perf_counter() - begin, 2)
    print(f"profile: {name}, {duration(self.seconds[name])}", file=sys.stderr)

  def __str__(self) -> str:
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.seconds.items())
    return (
      f"this profile took {duration(sum(self.seconds.values()))}: {parts}. A second one in this "
      "--workdir loads its programs and schedules; --config.overlap.search_seconds=0 skips the "
      "search"
    )


def _spread(timing: Timing) -> str:
  """The spread over rounds, or, with fewer than three, their number."""
  enough = len(timing.seconds) >= 3
  return f"± {100 * timing.spread:.1f} %" if enough else f"{len(timing.seconds)} rounds"


@dataclasses.dataclass(frozen=True)
class Traced:
  """The trace of `TRACED` steps of an arm.

  Attributes:
    kind: MEASURED or SIMULATED.
    events: the operations that the devices ran.
    program: the traced program.
    folder: the profiler's folder, for XProf.
    file: trace file, for ui.perfetto.dev.
  """

  kind: str
  events: list[Event]
  program: Program
  folder: str
  file: Path


class Arm:
  """One wiring's training step, as an arm of `scmoe.profiling.timer`.

  Args:
    run: configuration, not resolved.
    directory: where its programs, profiles and decision are kept.
    transport: `dispatch.transport` that it must have; "": the search may choose one.
  """

  def __init__(self, run: RunConfig, directory: Path, transport: str = ""):
    if transport:
      dispatch = dataclasses.replace(run.dispatch, transport=transport)
      run = dataclasses.replace(run, dispatch=dispatch)
    vocabulary = build.vocab_size(run.data)
    self.run = run.resolve(num_devices=jax.device_count(), vocab_size=vocabulary)
    self.built = build.build(self.run)
    abstract = self.built.abstract_state()
    self.directory = directory
    same = bool(transport)
    self.step = fastest_step(self.built, abstract, directory, same_transport=same)
    self.measured = MeasuredState(self.built, abstract)

  def warm_up(self) -> None:
    """Calls the step until compilation, profile and search are over, as in a user's long run."""
    self(1)
    while not self.step.settled:
      self(1)
    self(1)

  def __call__(self, calls: int) -> None:
    self._train(self.step, calls)

  def _train(self, step: GuidedStep | Search, calls: int) -> None:
    self.measured.train(step, calls)
    self.measured.wait()

  @functools.cached_property
  def jaxpr(self) -> Any:
    """The chosen step as jax traced it."""
    return self.best.step.trace(self.measured.state, self.measured.batch).jaxpr

  def controls(self) -> dict[str, timer.Arm]:
    """The step without its exchanges, and the exchanges alone, by the arm's name; both compiled.

    The step without exchanges has the schedule and the transport that the search has chosen for
    this one. It has this arm's state, so that both meet the same parameters, and memory holds one
    state.
    """
    silent = build.build(without_exchanges(self.built.varied(self.variant)))
    step = Steps(silent, silent.abstract_state(), self.directory)(Variant())

    def run(calls: int) -> None:
      self._train(step, calls)

    run(1)
    while not step.settled:
      run(1)
    run(1)
    alone = exchanges_alone(self.jaxpr, self.built.mesh, self.built.overlap)
    assert alone is not None, "called where rows travel"
    alone(1)
    name = self.run.model.wiring
    return {name + WITHOUT: run, name + ALONE: alone}

  def trace(self) -> Traced:
    """Runs `TRACED` steps under the profiler."""
    folder, program = str(self.directory / "trace"), self.best.named_program()

    def steps(calls: int) -> None:
      self.measured.train(program, calls)
      self.measured.wait()

    steps(1)  # the first call of a program loads its kernels
    events, kind = traced(lambda: steps(TRACED), folder), MEASURED
    if not events and jax.default_backend() == "cpu":
      events, kind = read_simulated(find_trace(folder)), SIMULATED
    target = self.directory.parent / f"{self.directory.name}.trace.json.gz"
    file = write_perfetto(Path(find_trace(folder, ".trace.json.gz")), target, program.names)
    return Traced(kind, events, program, folder, file)

  @property
  def best(self) -> GuidedStep:
    """The step that the search has chosen."""
    return self.step.best if isinstance(self.step, Search) else self.step

  @property
  def variant(self) -> Variant:
    """The options that the search has chosen."""
    return self.best.variant or Variant()

  @property
  def compiled(self) -> Program:
    """The compiled program of the chosen step."""
    assert self.best.program is not None, "called after `warm_up`"
    return self.best.program


@dataclasses.dataclass(frozen=True)
class ArmReport:
  """The report on one arm: text, figures, and bars by kind (MEASURED, ...) and stream."""

  text: str
  figures: dict[str, Any]
  bars: dict[str, dict[str, list[Bar]]]


def _arm_report(
  arm: Arm, timing: Timing, base: Timing, modelled_on: str, paid: Paid | None
) -> ArmReport:
  """An arm's wall-clock times, cost of its exchanges, modelled schedule and trace."""
  lines = [f"step {1e3 * timing.median:.3f} ms ({_spread(timing)}), {speed_up(base, timing):.2f}x"]
  figures: dict[str, Any] = {"wall": timing.as_json(), "speed_up": speed_up(base, timing)}
  if paid is not None:
    lines[0] += f", {100 * paid.share:.0f} % of the exchanges paid"
    lines.append(str(paid))
    figures["exchanges"] = paid.as_json()
  if arm.best.repeats:
    figures["repeated"] = arm.best.repeated
    lines.append(f"rows were left over in {arm.best.repeated} steps so far, which ran twice")
  bars: dict[str, dict[str, list[Bar]]] = {}
  run = arm.built.varied(arm.variant)
  times = modelled_times(run, modelled_on)
  if times is not None:
    model = run.model
    rule, chunks = model.wiring_rule, run.dispatch.chunks
    schedule = make_schedule(rule, model.moe_every, run.overlap, chunks)
    lines += [f"runs: {arm.variant}", str(schedule)]
    lines += [f"as modelled for {modelled_on}, one pair, forward:", describe(times)]
    bars[MODELLED] = _bars(best_chunks(times)[1])
  trace = arm.trace()
  overlap = measure_overlap(trace.events, TRACED)
  if overlap is not None:
    names = trace.program.names
    stages = stage_times(trace.events, names, TRACED)
    lines += [
      f"trace, {trace.kind}: communication {overlap.communication:.3f} ms, "
      f"{100 * overlap.share_hidden:.1f} % hidden, {overlap.exposed:.3f} ms exposed; "
      f"computation {overlap.computation:.3f} ms",
      stage_table(stages),
    ]
    figures |= {"trace": overlap.as_json(), "stages": [dataclasses.asdict(s) for s in stages]}
    pair = pair_bars(trace.events, names)
    if trace.kind == MEASURED:
      lines += ["beside each exchange of the compiled program:",
                summary(program_windows(trace.program.text))]  # fmt: skip
      lines[:0] = _advice(run, stages, 1e3 * timing.median, times)
      if any(pair.values()):  # measured bars replace the modelled ones
        bars.clear()
    bars[trace.kind] = pair
  figures["measured"] = any(bars.get(MEASURED, {}).values())
  lines += [f"trace for ui.perfetto.dev: {trace.file}", f"trace for XProf: {trace.folder}"]
  figures |= {"perfetto": str(trace.file), "trace_folder": trace.folder}
  return ArmReport("\n".join(lines), figures, bars)


def _advice(
  run: RunConfig, stages: Sequence[StageTime], step: float, times: Times | None
) -> list[str]:
  """Advice on which options to change; the report begins with it."""
  dispatch, share = run.dispatch, 1.0
  if times is not None:
    share = times.window / (times.window + times.before)
  return advice(
    stages,
    step,
    shortcut=run.model.wiring_rule.is_shortcut,
    window_share=share,
    capacity_factor=dispatch.capacity_factor if dispatch.fixed_buffers else 0.0,
  )


def _bars(spans: Sequence[Span]) -> dict[str, list[Bar]]:
  return {
    stream: [Bar(s.name, s.start, s.end) for s in spans if s.stream == stream]
    for stream in (COMPUTE, LINK)
  }


if __name__ == "__main__":
  run_main(main)
