"""Runs a study in pieces: variants x seeds, each a process of `python -m scmoe.train`.

  python experiments/quality/TABLE/run.py --scale cpu
  python experiments/quality/TABLE/run.py --scale cpu --afresh --out FOLDER
  python experiments/quality/TABLE/run.py --scale gpu --limit_seconds 570 --out FOLDER
  python experiments/quality/TABLE/run.py --scale gpu --only top2 --config.data.path=FOLDER
  python experiments/quality/TABLE/run.py --scale gpu --table

A GPU trains one run at a time, and all GPUs of the machine train side by side; --jobs=12 on four
GPUs trains three runs at a time on each. A CPU trains one run after the other. --together trains
the seeds of a variant in one process, by one compiled program: it saves starts and compilations,
and on a GPU it can be slower (experiments/seeds).

Runs whose result lies in results/runs/ are not trained again, unless --afresh leaves aside all
results but those of --out. A run begins if, at the pace of the
run of its size that ended last, it ends before the limit; it is asked for again whenever another
ends. What the limit cuts off saves, and goes on from there if the same command finds its folder
again. The first call at a scale registers the plan, with the fields of the configuration that it
was given, in results/plan-SCALE.json; later calls follow that file, wherever their data lie. With
--register a call does only that, so that the plan can be committed before the first run.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scmoe import sweep  # noqa: E402
from scmoe.base.errors import ConfigError, StorageError, run_main  # noqa: E402
from scmoe.base.output import say  # noqa: E402
from scmoe.data.config import DataConfig  # noqa: E402
from scmoe.models.config import ModelConfig  # noqa: E402
from scmoe.reports.records import Record, read_run  # noqa: E402
from scmoe.reports.speedups import read_speedups, speedups_table  # noqa: E402
from scmoe.reports.studies import (  # noqa: E402
  Contrast,
  Plan,
  Result,
  Study,
  collected,
  complaints,
  findings_table,
  read_plan,
  read_results,
  result_line,
  runs_of_all,
  text_of,
  variants_table,
  write_results,
)
from scmoe.run import build  # noqa: E402
from scmoe.run.command_line import HELP, SIMULATE, Flag, help_text, parse  # noqa: E402
from scmoe.run.config import RunConfig, from_dict, smoke_run, to_dict  # noqa: E402
from scmoe.run.config_files import find_config, load_config  # noqa: E402
from scmoe.run.fields import with_field  # noqa: E402
from scmoe.run.modality import modality_of  # noqa: E402
from scmoe.training.checkpoint import FOLDER  # noqa: E402
from scmoe.training.options import CheckpointConfig, OptimizerConfig, TrainConfig  # noqa: E402
from scmoe.training.workdir import LOCK, owner_lives, prepare_workdir  # noqa: E402

SCALES = ("smoke", "cpu", "gpu")
# Seconds that a run which is cut off has for its checkpoint.
GRACE = {"smoke": 5.0, "cpu": 10.0, "gpu": 60.0}
CPU_LIMIT = 840.0  # of a whole study on a CPU, unless --limit_seconds says otherwise
_CUT = (75, 130, -15, -2)  # exit codes of a run that was told to stop

FLAGS = (
  Flag("scale", str, "", "smoke, cpu or gpu: the sizes of the runs", required=True),
  Flag("only", str, "", "variants to train in this call, joined by commas; all if not given"),
  Flag(
    "limit_seconds", float, -1.0, "time of the call; 0: none; if not set 840 on a CPU, else none"
  ),
  Flag("jobs", int, 0, "runs side by side, also several on a GPU; 0: one a GPU or CPU"),
  Flag("together", bool, False, "train the seeds of a variant side by side in one program"),
  Flag(
    "out",
    str,
    "",
    "folder for plan and results; if not set the study's results/ (smoke: WORKDIR/results)",
  ),
  Flag("workdir", str, "", "folder of the runs' folders; runs/quality/TABLE/SCALE if not set"),
  Flag("commit", str, "", "commit to note where the code is no checkout, e.g. on a GPU machine"),
  Flag("register", bool, False, "write the plan, then stop"),
  Flag("afresh", bool, False, "leave aside results that are there, except in --out"),
  Flag("keep", bool, False, "keep the checkpoints of runs that are done"),
  Flag("dry_run", bool, False, "print the runs, then stop"),
  Flag("table", bool, False, "print the table of the results that are there, train nothing"),
  SIMULATE,
  HELP,
)


Variants = Mapping[str, Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Design:
  """A study: what its run.py says once for all scales.

  Attributes:
    folder: of the study.
    title: the question.
    variants: name -> fields that it changes, with values as text; or a function of the scale that
      gives them.
    contrasts: see `Plan.contrasts`.
    seeds: scale -> seeds of every variant, or of each by name.
    configs: scale -> the configuration that variants change; `language` where a scale is missing.
    metric: see `Plan.metric`.
  """

  folder: Path
  title: str
  variants: Variants | Callable[[str], Variants]
  contrasts: tuple[Contrast, ...]
  seeds: Mapping[str, int | Mapping[str, int]]
  configs: Mapping[str, Callable[[], RunConfig]] = dataclasses.field(default_factory=dict)
  metric: str = "loss"

  def plan(self, scale: str, given: list[tuple[str, str]]) -> Plan:
    """The plan at a scale, with the fields that the command line gives all runs.

    Raises:
      ConfigError: there is no such scale, or a variant cannot be configured.
    """
    if scale not in self.seeds:
      raise ConfigError(f"--scale={scale!r} is unknown; one of: {', '.join(self.seeds)}")
    base = self.configs.get(scale, functools.partial(language, scale))()
    base = functools.reduce(lambda run, pair: with_field(run, *pair), given, base)
    asked = self.seeds[scale]
    given_variants = self.variants(scale) if callable(self.variants) else self.variants
    variants = {name: dict(fields) for name, fields in given_variants.items()}
    seeds = dict(asked) if isinstance(asked, Mapping) else dict.fromkeys(variants, asked)
    plan = Plan(self.folder.name, scale, self.title, to_dict(base), variants, seeds,
                self.contrasts, self.metric)  # fmt: skip
    for name in variants:
      variant_run(plan, name, 0)
    return plan


def language(scale: str) -> RunConfig:
  """The language model of a scale.

  gpu: the paper's GPT2-MoE-Small, 105 million tokens; cpu: 0.08 million tokens of this Python's own
  sources; smoke: three steps.
  """
  run = load_config(find_config("gpt2_moe_small"))
  if scale == "smoke":
    run = smoke_run(run)
    return dataclasses.replace(run, train=_quiet(run.train, sample_tokens=0))
  if scale == "gpu":
    train = _quiet(
      TrainConfig(steps=1600, batch_size=32, tokens_per_step=65536, log_every=8, eval_every=200,
                  eval_batches=64)
    )  # fmt: skip
    return dataclasses.replace(
      run,
      model=dataclasses.replace(run.model, vocab_size=0),
      train=train,
      optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=160),
      checkpoint=CheckpointConfig(every=0, keep=1),
    )
  return dataclasses.replace(
    run,
    model=ModelConfig(
      num_experts=8, num_layers=4, width=64, num_heads=4, mlp_hidden=128, context=128,
      dtype="float32",
    ),
    data=DataConfig(source="stdlib", seq_len=128, limit_bytes=4 << 20, document_mask=False),
    train=_quiet(
      TrainConfig(steps=80, batch_size=8, log_every=10, eval_every=80, eval_batches=32)
    ),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=8),
    checkpoint=CheckpointConfig(every=0, keep=1),
  )  # fmt: skip


def of_small_studies(scale: str) -> RunConfig:
  """The configuration of a scale that the studies of the smaller model share."""
  return small_language() if scale == "gpu" else language(scale)


def small_language() -> RunConfig:
  """The smaller language model of `--scale gpu`, and why some studies have it: README.md."""
  run = language("gpu")
  return dataclasses.replace(
    run,
    model=dataclasses.replace(run.model, num_layers=8, width=512, num_heads=8),
    train=dataclasses.replace(run.train, batch_size=16, tokens_per_step=16384, eval_every=800),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=160),
  )


def with_share(run: RunConfig, share: float) -> dict[str, str]:
  """Fields that give a run a share of its steps, a tenth of them warm-up."""
  steps = max(1, round(share * run.train.steps))
  warmup = max(1, steps // 10) if steps > 1 else 0
  return {"train.steps": str(steps), "optimizer.warmup_steps": str(warmup)}


def _quiet(train: TrainConfig, **changed: int) -> TrainConfig:
  """Without outputs that a study does not read."""
  options = {"sample_tokens": 0, "router_every": 0, "tensorboard": False, **changed}
  return dataclasses.replace(train, **options)


def variant_run(plan: Plan, variant: str, seed: int) -> RunConfig:
  """The configuration of one run.

  Raises:
    ConfigError: the variant's fields cannot be used.
  """
  run = from_dict(plan.config, f"the plan of {plan.study}")
  for field in plan.variants[variant].items():
    run = with_field(run, *field)
  name = f"{variant}_seed-{seed}"
  return dataclasses.replace(run, name=name, train=dataclasses.replace(run.train, seed=seed))


def with_data_at(run: RunConfig, path: str) -> RunConfig:
  """The run with its data in the folder `path`; in the plan's if `path` is empty."""
  return dataclasses.replace(run, data=dataclasses.replace(run.data, path=path or run.data.path))


def main(design: Design) -> None:
  """The command of a study's run.py: trains what is missing, and prints the study's tables."""

  def command(argv: list[str]) -> None:
    found = call(design, argv)
    if speedups := read_speedups(design.folder, found.plan.scale):
      print("\n" + speedups_table(speedups, found.plan.scale).text(140))

  run_main(command)


def call(design: Design, argv: list[str]) -> Study:
  """Trains what is missing and prints the table.

  Args:
    design: of the study.
    argv: the command's arguments.

  Raises:
    ConfigError: a flag, a field or a variant cannot be used, or the plan is registered otherwise.
    sweep.Failed: some runs failed; the table is printed before.
    Preempted: a signal stopped the call; its runs have saved.
  """
  values, given = parse(argv, FLAGS, with_fields=True)
  if values["help"]:
    print(help_text(__doc__ or "", FLAGS, values["help"], with_fields=True))
    raise SystemExit(0)
  command = shlex.join(["python", f"experiments/quality/{design.folder.name}/run.py", *argv])
  one = asked(design, values, given)
  if values["dry_run"]:
    print("\n".join(f"{variant} seed {seed}" for variant, seed in one.runs.values()))
    return one.study
  if values["register"]:
    one.register()
    say(f"registered: {one.out / one.plan.file}")
    return one.study
  try:
    train([one], values, command)
  finally:
    print(("\n" if one.runs else "") + shown(one.study))
  return one.study


class Asked:
  """The runs of one study that a call trains.

  Args:
    plan: of the study.
    known: results of earlier calls, of this study and of others.
    wanted: the variants that this call trains.
    workdir: folder of the runs' folders.
    out: folder for plan and results.
    data_path: folder of the data on this machine; "": the plan's.

  Attributes:
    runs: folder -> (variant, seed) of the runs to train, by seed.
    results: those of this call.
  """

  def __init__(
    self,
    plan: Plan,
    known: list[Result],
    wanted: set[str],
    workdir: Path,
    out: Path,
    data_path: str = "",
  ):
    self.plan, self.known, self.out, self.data_path = plan, known, out, data_path
    self.results: list[Result] = []
    done = self.study.done
    missing = [key for key in plan.runs if key not in done and key[0] in wanted]
    self.runs = {workdir / f"{variant}_seed-{seed}": (variant, seed) for variant, seed in missing}

  def register(self) -> None:
    """Writes the plan into the folder of the results.

    Raises:
      StorageError: the folder cannot be written.
    """
    prepare_workdir(self.out, "out")
    prepare_workdir(self.out / "runs", "out")
    self.plan.write(self.out)

  @property
  def study(self) -> Study:
    """The study with all results that there are by now."""
    return collected(self.plan, [*self.known, *self.results])


class OtherText(ConfigError):
  """The data here are not those that a study's finished runs read: its runs could not be paired."""


def asked(
  design: Design,
  values: Mapping[str, Any],
  given: list[tuple[str, str]],
  beside: Sequence[Path] = (),
) -> Asked:
  """Finds the runs of a study that have no result yet. It writes nothing.

  Args:
    design: of the study.
    values: of the flags `FLAGS`.
    given: fields of the configuration that the command line gives.
    beside: folders with results of other studies, in addition to those of this repository.

  Raises:
    ConfigError: a field or a variant cannot be used, the plan is registered otherwise, or
      --afresh has no --out.
    OtherText: finished runs of this study read other data than these.
    DataError: the data cannot be read.
  """
  scale, results, afresh = values["scale"], design.folder / "results", values["afresh"]
  if afresh and not values["out"]:
    raise ConfigError("--afresh needs a folder for the new results; give --out=FOLDER")
  kind = f"{scale}-afresh" if afresh else scale
  workdir = Path(values["workdir"] or f"runs/quality/{design.folder.name}/{kind}")
  # Nothing that a smoke run finds belongs among the results.
  out = Path(values["out"] or (workdir / "results" if scale == "smoke" else results))
  plan = registered(design, scale, given, [out, results])
  folders = [*([] if afresh else runs_of_all(design.folder.parent)), *beside, out / "runs"]
  known = read_results(dict.fromkeys(folders), scale)
  wanted = _variants(plan, values["only"])
  path = dict(given).get("data.path", "")
  one = Asked(plan, known, wanted, workdir, out, path)
  if not one.runs or values["dry_run"] or values["table"]:
    return one
  alike = of_one_text(plan, known, *next(iter(one.runs.values())), path)
  return Asked(plan, alike, wanted, workdir, out, path)


def queue_of(many: Sequence[Asked]) -> list[tuple[sweep.Run, Asked]]:
  """The missing runs of several studies by seed, each with the study that trains it.

  Where two studies miss the same run, the first trains it.
  """
  queue: dict[tuple[str, int], tuple[sweep.Run, Asked]] = {}
  for one in many:
    for folder, (variant, seed) in one.runs.items():
      title = f"{one.plan.study}: {folder.name}" if len(many) > 1 else ""
      config = with_data_at(variant_run(one.plan, variant, seed), one.data_path)
      run = sweep.Run(folder, config, title=title)
      queue.setdefault((one.plan.digest(variant), seed), (run, one))
  return [item for _, item in sorted(queue.items(), key=lambda entry: entry[0][1])]


def train(many: Sequence[Asked], values: Mapping[str, Any], command: str) -> None:
  """Registers the plans of studies that miss runs, and trains these in one queue.

  A free GPU takes the next run, whichever study it is of, so that none waits for a study to end.

  Args:
    many: from `asked`; each result is appended to its study's `results`.
    values: of the flags `FLAGS`.
    command: noted with every result.

  Raises:
    ConfigError: --jobs is below 0.
    sweep.Failed: some runs failed; the others were trained, and all are filed.
    Preempted: a signal stopped the call; its runs have saved.
  """
  if values["jobs"] < 0:
    raise ConfigError(
      f"--jobs={values['jobs']} is below 0; give a number of runs, or 0 for one a GPU"
    )
  queue = [] if values["table"] else queue_of(many)
  if not queue:
    return
  scale, limit = values["scale"], values["limit_seconds"]
  limit = (CPU_LIMIT if scale == "cpu" else 0.0) if limit < 0 else limit
  watches: dict[str, Pieces] = {}
  pace: dict[Any, float] = {}
  for one in many:
    if one.runs:
      one.register()
    watches[one.plan.study] = Pieces(
      one, limit, command, values["commit"], keep=values["keep"], pace=pace
    )
  todo = [run for run, _ in queue]
  # On a CPU a process starts and compiles about as long as it trains.
  together = values["together"] or scale == "cpu"
  todo = sweep.together(todo) if together else todo
  jobs = values["jobs"] or max(1, len(sweep.visible_gpus()))
  extra = [f"--simulate={n}"] if (n := values["simulate"]) else []
  watch = _Watches({run.folder: watches[one.plan.study] for run, one in queue})
  sweep.train_all(todo, sweep.shared_out(jobs, len(todo)), extra, watch)
  if failed := [record for pieces in watches.values() for record in pieces.failed]:
    raise sweep.Failed(failed)


def of_one_text(
  plan: Plan, known: list[Result], variant: str, seed: int, data_path: str = ""
) -> list[Result]:
  """The results that read the text which is here; those of other studies that did not are left out.

  Args:
    plan: of the study.
    known: results, of this study and of others.
    variant, seed: the run that is to be trained.
    data_path: see `Asked`.

  Raises:
    OtherText: a finished run of this study read other data.
    DataError: the data cannot be read.
  """
  if not any(result.get("data") for result in known):
    return known
  run = with_data_at(variant_run(plan, variant, seed), data_path)
  here = _text_here(run)
  own = (result for result in collected(plan, known).done.values() if result["study"] == plan.study)
  theirs = next((text_of(result.get("data", {})) for result in own), {})
  if (name := next((n for n in theirs if here.get(n) != theirs[n]), None)) is not None:
    raise OtherText(
      f"{run.data.path or run.data.source} has {name} {here.get(name)}, and the finished runs read "
      f"data with {name} {theirs[name]}: they could not be paired; give what these read, or "
      f"move results/runs/{plan.scale}-*.jsonl away to begin anew"
    )
  return [r for r in known if r["study"] == plan.study or text_of(r.get("data", {})) == here]


_TEXTS: dict[Any, dict[str, Any]] = {}


def _text_here(run: RunConfig) -> dict[str, Any]:
  """The part of the data's fingerprint that runs must share, read once for all studies."""
  known_by = (run.data, run.train.batch_size, run.train.tokens_per_step)
  if known_by not in _TEXTS:
    run = run.resolve(num_devices=1, vocab_size=build.vocab_size(run.data))
    _TEXTS[known_by] = text_of(modality_of(run).open_data(run).fingerprint())
  return _TEXTS[known_by]


def registered(
  design: Design, scale: str, given: list[tuple[str, str]], places: list[Path]
) -> Plan:
  """The registered plan of a scale, or where there is none the design's.

  Raises:
    ConfigError: what is registered is not what the design and the command line say.
  """
  plan = design.plan(scale, given)
  found = next((p for x in places if (p := x / f"plan-{scale}.json").is_file()), None)
  if found is None:
    return dataclasses.replace(plan, config=as_written(design.folder.parent, scale, plan.config))
  stored = read_plan(found)
  same = not given or _wherever(stored.config) == _wherever(plan.config)
  if not same or dataclasses.replace(plan, config=stored.config) != stored:
    raise ConfigError(
      f"{found} registers another plan; give the options that it was registered with, or make a "
      "folder for another study"
    )
  return stored


def as_written(folder: Path, scale: str, config: dict[str, Any]) -> dict[str, Any]:
  """The same configuration as another study's plan writes it, or as it is.

  Studies share runs by a digest of the written configuration. An option that was added to scmoe
  between two registrations stands in the later one only, with its default: it changes no run, and
  must not change the digest.
  """
  run = _wherever(config)
  plans = (read_plan(path) for path in sorted(folder.glob(f"*/results/plan-{scale}.json")))
  return next((plan.config for plan in plans if _wherever(plan.config) == run), config)


def _wherever(config: dict[str, Any]) -> RunConfig:
  """A plan's configuration without the folder of its data, which is each machine's own.

  That two machines have the same data, `of_one_text` checks.
  """
  run = from_dict(config)
  return dataclasses.replace(run, data=dataclasses.replace(run.data, path=""))


def _variants(plan: Plan, text: str) -> set[str]:
  asked = {word.strip() for word in text.split(",") if word.strip()} or set(plan.variants)
  if unknown := sorted(asked - set(plan.variants)):
    raise ConfigError(f"--only={unknown[0]!r} is no variant; one of: {', '.join(plan.variants)}")
  return asked


def shown(study: Study) -> str:
  """The study's tables and what is wrong with it, as text."""
  lines = [variants_table(study).text(), findings_table(study).text(140)]
  return "\n\n".join([*lines, "\n".join(f"note: {line}" for line in complaints(study))]).rstrip()


class Pieces(sweep.Watch):
  """Begins runs of one study that can end in time, and keeps the result of each.

  Args:
    one: the study, to which it adds the results.
    limit: seconds of the call; 0: none.
    command, commit: noted with every result.
    keep: checkpoints of runs that are done stay.
    pace: size of a run (`_size`) -> seconds of an optimizer step in the run of this call that ended
      last, its start included; the studies of a call share it.
  """

  def __init__(
    self,
    one: Asked,
    limit: float,
    command: str,
    commit: str,
    *,
    keep: bool,
    pace: dict[Any, float],
  ):
    self.one, self.keep, self.pace = one, keep, pace
    self.command, self.commit = command, commit
    scale, steps = one.plan.scale, one.plan.config["train"]["steps"]
    self._folder = one.out / "runs"
    self._named = f"{scale}-{time.strftime('%Y%m%dT%H%M%S')}"
    self._file: Path | None = None  # made with the first result
    self.failed: list[Record] = []
    self.whole = limit - GRACE[scale]
    if limit:
      self.until = time.monotonic() + self.whole
    alike = (r.get("seconds", 0.0) / steps for r in one.known if r.get("steps") == steps)
    self._earlier = max(alike, default=0.0)

  def may_begin(self, run: sweep.Run) -> bool:
    """Whether the run ends before the limit at the pace of the run of its size that ended last.

    While none of this call has ended, the slowest of earlier calls gives the pace. A run that is
    too long for any call begins while more than half of the call is left.
    """
    remaining, expected = self.until - time.monotonic(), self._expected(run)
    return expected <= remaining or (expected > self.whole and remaining > self.whole / 2)

  def _expected(self, run: sweep.Run) -> float:
    """Seconds until the run, and the other seeds of its process, would end if they began now."""
    step = self.pace.get(_size(run)) or self._earlier
    expected = step * run.config.train.steps * len(run.all)
    record = read_run(run.folder)
    if record.step and record.steps:  # goes on from a checkpoint
      expected *= 1 - record.step / record.steps
    return expected

  def left(self, runs: Sequence[sweep.Run]) -> None:
    """Says which runs did not begin, and how long the first of them would have taken."""
    names = [one.folder.name for run in runs for one in run.all]
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    remaining = max(self.until - time.monotonic(), 0)
    say(
      f"{self.one.plan.study}: not begun: {some}; {remaining:.0f} s are left and "
      f"{names[0]} takes about {self._expected(runs[0]):.0f} s"
    )

  def ended(self, run: sweep.Run, seconds: float) -> None:
    """Writes the results of a process, unless it was only cut off."""
    for one in run.all:
      self._ended(one, seconds / len(run.all))

  def found(self, run: sweep.Run) -> None:
    """Writes the result of a run that another call has trained, unless it lies in --out already.

    The other call may have had another --out. It keeps or removes the run's checkpoints, and its
    command, commit and time are not known here.
    """
    record, (variant, seed) = read_run(run.folder), self.one.runs[run.folder]
    result = result_line(self.one.plan, variant, seed, record)
    same = lambda other: all(other[name] == result[name] for name in ("plan", "seed", "date"))
    filed = next(filter(same, read_results([self._folder], self.one.plan.scale)), None)
    if filed is None:
      self._write(result)
    else:
      self.one.known.append(filed)

  def _ended(self, run: sweep.Run, seconds: float) -> None:
    """Writes a run's result, unless it was only cut off.

    Args:
      run: one run of a process.
      seconds: its share of the process's wall time.
    """
    record = read_run(run.folder)
    code = record.ended.get("code", 0)
    if code in _CUT or (code and owner_lives(run.folder / LOCK)):  # another call trains the run
      return
    if code and record.done:  # what lies there is an earlier run, maybe of another plan
      steps = {"train.steps": run.config.train.steps}
      record = dataclasses.replace(record, config=steps, card={}, train=[], evals=[], end=[])
    variant, seed = self.one.runs[run.folder]
    said = {"seconds": round(seconds, 1), "command": self.command}
    result = result_line(self.one.plan, variant, seed, record, **said)
    if self.commit and not result["git"].get("commit"):
      result["git"] = {"commit": self.commit}
    if code:
      self.failed.append(record)
    self._write(result)
    if record.done:
      if len(record.card.get("starts", [])) <= 1:  # a run that went on made only some of its steps
        self.pace[_size(run)] = seconds / run.config.train.steps
      if not self.keep:
        shutil.rmtree(run.folder / FOLDER, ignore_errors=True)

  def _write(self, result: Result) -> None:
    """Adds a result to the study and to this call's file."""
    self.one.results.append(result)
    try:
      if self._file is None:
        self._file = new_file(self._folder, self._named)
      write_results(self._file, self.one.results)
    except OSError as error:
      if self._file is not None and not self._file.stat().st_size:
        self._file.unlink()
      raise StorageError(
        f"{error.filename or self._folder} cannot be written: {error.strerror}"
      ) from None


def new_file(folder: Path, name: str) -> Path:
  """Makes an empty file NAME.jsonl, or NAME-2.jsonl and so on where another call made that.

  Calls that begin in the same second get the same name, and each writes its file whole.

  Raises:
    OSError: it cannot be made.
  """
  path, number = folder / f"{name}.jsonl", 1
  while True:
    try:
      path.touch(exist_ok=False)
    except FileExistsError:
      number += 1
      path = folder / f"{name}-{number}.jsonl"
    else:
      return path


def _size(run: sweep.Run) -> tuple[int, ...]:
  """Numbers in which runs that take about as long for a step agree."""
  model, train = run.config.model, run.config.train
  return model.width, model.num_layers, train.batch_size, train.tokens_per_step


class _Watches(sweep.Watch):
  """Hands each run to the watch of its study.

  Args:
    of: folder of a run -> watch of its study.
  """

  def __init__(self, of: Mapping[Path, Pieces]):
    self.of = of
    self.until = min(watch.until for watch in of.values())

  def may_begin(self, run: sweep.Run) -> bool:
    return self.of[run.folder].may_begin(run)

  def left(self, runs: Sequence[sweep.Run]) -> None:
    for watch in dict.fromkeys(self.of[run.folder] for run in runs):
      watch.left([run for run in runs if self.of[run.folder] is watch])

  def ended(self, run: sweep.Run, seconds: float) -> None:
    for watch in dict.fromkeys(self.of[one.folder] for one in run.all):
      own = [one for one in run.all if self.of[one.folder] is watch]
      watch.ended(
        dataclasses.replace(own[0], beside=tuple(own[1:])),
        seconds * len(own) / len(run.all),
      )

  def found(self, run: sweep.Run) -> None:
    self.of[run.folder].found(run)


def against(base: str, *variants: str, margins: Mapping[str, float] | None = None) -> tuple:
  """Contrasts of variants with one base; `margins` adds equivalence tests."""
  margins = margins or {}
  return tuple(Contrast(name, base, margins.get(name)) for name in variants)
