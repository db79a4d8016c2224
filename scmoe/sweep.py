"""python -m scmoe.sweep: trains variants of a configuration with several seeds and compares them.

  python -m scmoe.sweep --config quickstart --grid model.wiring=top2,scmoe_pos2 --seeds 3
  python -m scmoe.sweep --grid router.bias=none,sign --grid model.top_k=2,4 --jobs 2 \\
      --config.model.wiring=topk

Each run is a process of its own, python -m scmoe.train, in a folder of its own below --workdir. The
same command again continues: finished runs are kept, a stopped run resumes, a failed run is tried
again. --jobs divides the GPUs of this machine among runs that train at the same time, which slows
each of them; with more jobs than GPUs, several share a GPU and its memory, which pays for models so
small that they leave most of a GPU idle. --together trains the seeds of a combination in one
process, by one compiled program: on a CPU it saves starts and compilations, on a GPU measure first
(docs/comparing.md). Values of a grid are separated by commas, or by semicolons if they contain
commas.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scmoe.base.errors import ConfigError, Preempted, ScmoeError, StorageError, run_main
from scmoe.base.output import say, warn
from scmoe.base.sizes import elapsed
from scmoe.base.stored import read_bytes, write_json, write_whole
from scmoe.reports.comparison import compare
from scmoe.reports.records import ASKED, EXIT, Record, printable, read_run
from scmoe.reports.written import write_comparison, write_figures
from scmoe.run import build
from scmoe.run.command_line import TRAIN_FLAGS, Flag, help_text, parse, run_config
from scmoe.run.config import RunConfig, from_json, imports_of, to_dict, to_json
from scmoe.run.effects import check_typed
from scmoe.run.fields import with_field
from scmoe.run.names import check_workdir
from scmoe.training.restore import FOLDER, list_steps
from scmoe.training.resume import check_config
from scmoe.training.signals import hangups
from scmoe.training.workdir import LOCK, RunLock, owner_lives, prepare_workdir

OWN = (
  Flag("grid", str, "", "FIELD=VALUE,VALUE,...: trains all combinations", repeat=True),
  Flag("seeds", int, 1, "runs per combination: train.seed, train.seed + 1, ..."),
  Flag("jobs", int, 1, "runs at the same time, which divide the GPUs, or share them if more"),
  Flag("together", bool, False, "train the seeds of a combination side by side in one program"),
  Flag("dry_run", bool, False, "print the runs, then stop"),
  Flag("json", str, "", "also write the figures of the comparison to this file"),
)
SHARED = ("config", "config_json", "smoke", "workdir", "allow_import", "simulate", "help")
FLAGS = tuple(f for f in TRAIN_FLAGS if f.name in SHARED) + OWN
LOG = "log.txt"
# The share of a GPU's memory that jax allocates, by its two names; jax refuses both at once.
MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_LOG_END = 2**16  # the last line of a log is searched in so many bytes at its end
SWEEP_LOCK = "sweep.lock"
POLL_SECONDS = 0.5
TRAIN = (sys.executable, "-m", "scmoe.train")


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of a sweep: its folder and its configuration.

  Attributes:
    beside: runs with other seeds that the same process trains, by the same program.
    title: its name on the console; empty: that of its folder.
  """

  folder: Path
  config: RunConfig
  beside: tuple[Run, ...] = ()
  title: str = ""

  @property
  def all(self) -> tuple[Run, ...]:
    """This run and those beside it."""
    return self, *self.beside


def main(argv: list[str]) -> None:
  """Trains the runs that are not finished, and compares all; raises `Failed` if some failed."""
  values, given = parse(argv, FLAGS, with_fields=True)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"], with_fields=True))
  if values["seeds"] < 1 or values["jobs"] < 1:
    raise ConfigError(f"--seeds={values['seeds']} and --jobs={values['jobs']} must be at least 1")
  base = run_config({**values, "allow_config_change": False}, given)
  workdir = check_workdir(values["workdir"] or f"runs/sweep-{base.name}")
  runs = planned(base, values["grid"], values["seeds"], workdir, values["simulate"])
  waiting = [run for run in runs if not is_done(run)]
  if values["dry_run"]:
    return print("\n".join([f"{len(runs)} runs in {workdir}:", *(r.folder.name for r in runs)]))
  processes = together(waiting) if values["together"] else waiting
  environments = shared_out(values["jobs"], len(processes))
  prepare_workdir(workdir)
  began, extra = time.monotonic(), [f"--simulate={n}"] if (n := values["simulate"]) else []
  with RunLock(workdir, SWEEP_LOCK):
    if len(waiting) < len(runs):
      say(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already")
    train_all(processes, environments, extra)
  comparison = compare([read_run(run.folder) for run in runs])
  command = shlex.join(["python", "-m", "scmoe.sweep", *argv])
  print("\n" + write_comparison(comparison, workdir / "compare", command))
  if values["json"]:
    write_figures(Path(values["json"]), comparison)
  print(f"{len(runs)} runs, {elapsed(time.monotonic() - began)}")
  failed = [record for record in comparison.unfinished if record.ended.get("code")]
  if failed:
    raise Failed(failed)


class Failed(ScmoeError):
  """Some runs of a sweep failed; its exit code is the first one's."""

  def __init__(self, records: Sequence[Record]):
    names = ", ".join(record.name for record in records)
    super().__init__(
      f"{len(records)} runs failed: {names}; their {LOG} says why, and the same command tries "
      "them again"
    )
    code = records[0].ended["code"]
    self.code = 128 - code if code < 0 else code  # signal N ended it: 128 + N, as in a shell


# --- what is run ----------------------------------------------------------------------------------


def planned(
  base: RunConfig, grid: Sequence[str], seeds: int, workdir: Path, devices: int = 0
) -> list[Run]:
  """The runs of every combination of the grid with every seed, each configuration checked.

  Args:
    base: the configuration that the combinations change.
    grid: FIELD=VALUE,VALUE,... of each axis.
    seeds: runs of a combination.
    workdir: folder of the runs' folders.
    devices: simulated ones that a run will have; 0: as many as its mesh asks for.

  Raises:
    ConfigError: a field or value cannot be used; nothing was written.
  """
  axes = [_axis(text) for text in grid]
  names = [name for name, _ in axes]
  if twice := next((name for name in names if names.count(name) > 1), None):
    raise ConfigError(f"--grid: {twice} is given twice; write all its values in one --grid")
  runs = []
  for choice in itertools.product(*(texts for _, texts in axes)):
    run = base
    for name, text in zip(names, choice):
      run = with_field(run, name, text)
    check_typed(run, names)
    vocabulary = build.vocab_size(run.data)
    run.resolve(num_devices=devices or run.mesh.planned_size, vocab_size=vocabulary)
    for seed in range(base.train.seed, base.train.seed + seeds):
      name = _folder_name([*zip(names, choice), ("seed", str(seed))])
      train = dataclasses.replace(run.train, seed=seed)
      runs.append(Run(workdir / name, dataclasses.replace(run, name=name, train=train)))
  return runs


def together(runs: Sequence[Run]) -> list[Run]:
  """The same runs, with those that one program can train beside the first of them.

  They differ in name and seed only, and their newest checkpoints are of the same step.
  """
  groups: dict[tuple[RunConfig, int], list[Run]] = {}
  for run in runs:
    train = dataclasses.replace(run.config.train, seed=0)
    config = dataclasses.replace(run.config, name="", train=train)
    step = max(list_steps(run.folder / FOLDER), default=0)
    groups.setdefault((config, step), []).append(run)
  return [dataclasses.replace(one, beside=tuple(rest)) for one, *rest in groups.values()]


def _axis(text: str) -> tuple[str, list[str]]:
  name, equals, values = text.partition("=")
  name = name.removeprefix("--").removeprefix("config.")
  texts = [v.strip() for v in values.split(";" if ";" in values else ",")]
  if not equals or not name or "" in texts:
    raise ConfigError(
      f"--grid={text!r} is not FIELD=VALUE,VALUE; e.g. model.wiring=top2,scmoe_pos2"
    )
  if name == "train.seed":
    raise ConfigError(f"--grid={text!r}: seeds are given by --seeds={len(texts)}")
  if len(set(texts)) < len(texts):
    raise ConfigError(f"--grid={text!r} has a value twice; name each once")
  return name, texts


def _folder_name(choices: Sequence[tuple[str, str]]) -> str:
  """A run's name such as `wiring-top2_seed-0`; shortened with a digest if it would be too long."""
  words = [f"{name.rpartition('.')[2]}-{text}" for name, text in choices]
  name = re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(words)).strip("-.")
  plain = all(re.fullmatch(r"[A-Za-z0-9._-]+", text) for _, text in choices)
  if plain and len(name) <= 64:
    return name
  digest = hashlib.blake2b(repr(choices).encode(), digest_size=4).hexdigest()
  return f"{name[:40]}-{digest}_{words[-1]}"


def shared_out(jobs: int, processes: int) -> list[dict[str, str]]:
  """Environment variables that give each job its part of the GPUs; none on a CPU.

  With more jobs than GPUs, several jobs share a GPU, as evenly as it goes, and each of them may
  allocate an equal part of 90 % of its memory. Example: five jobs on two GPUs are three on the
  first, which may allocate 30 % each, and two on the second, with the same 30 %. A share that the
  user has set by one of the variables `MEMORY` stays as it is. With fewer jobs than GPUs each gets
  as many whole GPUs as all jobs can have, and the rest stay idle.

  Args:
    jobs: processes at the same time.
    processes: all that are to run. With fewer of them than jobs, no more share a GPU than must.
  """
  gpus = visible_gpus()
  jobs = min(jobs, max(processes, len(gpus), 1))
  if not gpus or jobs == 1:
    return [{} for _ in range(jobs)]
  if jobs > len(gpus):
    part = f"{0.9 / -(-jobs // len(gpus)):.3f}"
    memory = {} if any(os.environ.get(name) for name in MEMORY) else {MEMORY[0]: part}
    return [{"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)], **memory} for i in range(jobs)]
  share = len(gpus) // jobs
  return [
    {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * share : (i + 1) * share])} for i in range(jobs)
  ]


def visible_gpus() -> list[str]:
  """The GPUs that a process here would use, found without jax, which would allocate on them."""
  if os.environ.get("JAX_PLATFORMS", "").startswith("cpu") or not shutil.which("nvidia-smi"):
    return []
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  if visible is not None:
    return [word for word in visible.split(",") if word]
  listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
  return [str(i) for i, line in enumerate(listed.splitlines()) if line.startswith("GPU")]


# --- running --------------------------------------------------------------------------------------


def is_done(run: Run) -> bool:
  """True if the run's folder holds a finished run of exactly this configuration.

  The folder's name has only the grid's values and the seed, so it may hold the run of a sweep with
  other options. Such a run is resumed if only options such as its length have changed.

  Raises:
    ConfigError: the folder holds a run that cannot resume with this configuration.
    DataError: its files are damaged.
  """
  path = run.folder / ASKED
  try:
    stored = to_dict(from_json(read_bytes(path).decode("utf-8", "replace"), str(path)))
  except FileNotFoundError:
    return False
  wanted = to_dict(run.config)
  try:
    changed = check_config(stored, wanted, allow_change=run.config.checkpoint.allow_config_change)
  except ConfigError as error:
    raise ConfigError(
      f"{run.folder} holds a run of another sweep ({str(error).partition(': ')[2]})"
    ) from None
  return not changed and read_run(run.folder).done


class Watch:
  """Says which runs of `train_all` begin, and when all have to end; is told how each ended.

  This one begins every run and sets no time; a caller with a time limit has one of its own.

  Attributes:
    until: `time.monotonic()` at which runs that still train are told to save and end, and after
      which none begins.
  """

  until = math.inf

  def may_begin(self, run: Run) -> bool:
    """Whether a run is to begin now; one that may not is asked for again when another has ended."""
    del run
    return True

  def left(self, runs: Sequence[Run]) -> None:
    """Called at the end with the runs that never began, if any; they are left for another call."""

  def ended(self, run: Run, seconds: float) -> None:
    """Called when the process of a run, and of those beside it, has ended.

    Args:
      run: the first of them.
      seconds: wall time of the process.
    """

  def found(self, run: Run) -> None:
    """Called instead of `ended` for a run that another process has finished since the call began.

    Args:
      run: this one alone, without runs beside it.
    """


def train_all(
  runs: Sequence[Run],
  environments: list[dict[str, str]],
  extra: list[str],
  watch: Watch | None = None,
) -> None:
  """Trains runs, one at a time in each environment.

  A run that another process has finished since this call began is not trained: `watch.found` is
  told of it.

  Args:
    runs, environments: each run, with those beside it, is a process with one of the environments
      to itself.
    extra: further words of every command.
    watch: decides which runs begin; None begins all.

  Raises:
    Preempted: a signal told the sweep to stop; the runs in training got it too, and have saved.
  """
  watch = watch or Watch()
  waiting, free, training = list(runs), list(environments), []
  put_off: list[Run] = []  # in the order of `runs`, before those that wait
  announced: set[Path] = set()
  earlier = {one.folder: _finished(one.folder) for run in runs for one in run.all}
  total = len(runs)
  with _Stop() as stop:
    try:
      while (waiting and not stop.requested) or training:
        late = time.monotonic() >= watch.until
        if late:
          waiting, put_off = [], [*put_off, *waiting]
          stop.end_all()
        while free and not stop.requested and (run := _next(waiting, announced)) is not None:
          waiting.remove(run)
          place = f"[{total - len(waiting) - len(put_off)}/{total}]"
          place = f"{place} {run.title or run.folder.name}"
          apart = [dataclasses.replace(one, beside=()) for one in run.all]
          found = [one for one in apart if _finished_since(one, earlier[one.folder])]
          if found:
            for one in found:
              say(f"{one.title or one.folder.name}: another process has trained it")
              watch.found(one)
            # Its other seeds may be at different steps now, so that they share no process.
            rest = together([one for one in apart if one not in found])
            waiting, total = [*rest, *waiting], total + len(rest) - 1
            continue
          if not watch.may_begin(run):
            put_off.append(run)
            continue
          training.append(_Training(run, free.pop(0), extra, place))
          stop.processes = [one.process for one in training]
          if stop.requested:  # before `stop` knew the process
            stop.end_all()
        for ended in [one for one in training if one.process.poll() is not None]:
          ended.note_end()
          training.remove(ended)
          free.append(ended.environment)
          watch.ended(ended.run, time.monotonic() - ended.began)
          if not late:
            # With fewer runs on a GPU each is faster: what was put off may end in time now.
            waiting, put_off = [*put_off, *waiting], []
        time.sleep(POLL_SECONDS)
    except BaseException:
      # For example a full disk. No process may train on without a sweep that knows of it.
      stop.processes = [one.process for one in training]
      stop.end_all()
      for one in training:
        one.process.wait()
        one.log.close()
      raise
  if stop.requested:
    raise Preempted("the sweep was stopped; run the same command again to go on")
  if put_off:
    watch.left(put_off)


def _next(waiting: Sequence[Run], announced: set[Path]) -> Run | None:
  """The first run in whose folders no other process trains; None if there is none.

  Another process is, for example, a run of a sweep that was killed. For each run that waits for one
  a line is printed, once: `announced` has their folders.
  """
  for run in waiting:
    if not any(owner_lives(one.folder / LOCK) for one in run.all):
      return run
    if run.folder not in announced:
      say(f"{run.title or run.folder.name}: is being trained by another process; waiting for it")
    announced.add(run.folder)
  return None


class _Training:
  """The process that trains a run."""

  def __init__(self, run: Run, environment: dict[str, str], extra: list[str], place: str):
    self.run, self.environment, self.place = run, environment, place
    self.began = time.monotonic()
    self.earlier = {one.folder: _finished(one.folder) for one in run.all}
    for one in run.all:
      folder = prepare_workdir(one.folder)
      (folder / EXIT).unlink(missing_ok=True)
      try:
        write_whole(folder / ASKED, to_json(one.config).encode())
      except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}") from None
    folder = run.folder
    try:
      self.log = open(folder / LOG, "a", encoding="utf-8")  # noqa: SIM115 - closed by `note_end`
    except OSError as error:
      raise StorageError(f"{folder} cannot be written: {error.strerror}") from None
    command = [*TRAIN, "--config_json", str(folder / ASKED)]
    command += [f"--allow_import={path}" for path in imports_of(run.config).values()]
    for one in run.beside:
      command += ["--beside", f"{one.config.train.seed}={one.folder}"]
    # Runs that differ only in the seed have the same program: the first compiles it for all.
    cache = {
      "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    self.process = subprocess.Popen(
      [*command, "--workdir", str(folder), *extra],
      stdout=self.log,
      stderr=subprocess.STDOUT,
      stdin=subprocess.DEVNULL,
      env={**cache, **os.environ, **environment, "PYTHONPATH": _import_path()},
    )
    more = f" with {len(run.beside)} more seeds" if run.beside else ""
    say(f"{place}: training{more}")

  def note_end(self) -> None:
    """Writes how the process ended to the folder of each of its runs, and prints it.

    A run that this process has finished ended well, also where one beside it failed. The folder may
    hold a finished run of before, which a process that fails at its start leaves as it is.
    """
    self.log.close()
    words, code = _last_words(self.run.folder / LOG), self.process.returncode
    if code < 0:  # the log ends with whatever the process said before
      words = f"ended by {signal.Signals(-code).name}"
    for run in self.run.all:
      place = self.place if run is self.run else run.folder.name
      code = self.process.returncode
      code = 0 if _finished(run.folder) not in (None, self.earlier[run.folder]) else code
      self._note_end_of(run, place, code, words)

  def _note_end_of(self, run: Run, place: str, code: int, words: str) -> None:
    path = run.folder / EXIT
    try:
      write_json(path, {"code": code, "words": "" if code == 0 else words})
    except OSError as error:
      warn(f"{path} cannot be written ({error.strerror})")
    record, took = read_run(run.folder), elapsed(time.monotonic() - self.began)
    if code == 0:
      last: dict[str, Any] = (record.evals or record.train or [{}])[-1]
      loss = last.get("loss")
      result = f"loss {loss:.4f}, " if isinstance(loss, float) else ""
      say(f"{place}: done, {result}{took}")
    else:
      # A finished run of before says nothing about this process.
      status = f"failed, exit {code}: {printable(words)}" if record.done else record.status
      say(f"{place}: {status} ({took})")


def _finished_since(run: Run, earlier: tuple[Any, Any] | None) -> bool:
  """Whether a run was finished after `_finished` had found `earlier` in its folder.

  Raises:
    DataError: its files are damaged.
  """
  if _finished(run.folder) in (None, earlier):
    return False
  try:
    return is_done(run)
  except ConfigError:  # a run of another sweep: training says what is wrong
    return False


def _finished(folder: Path) -> tuple[Any, Any] | None:
  """Card and end of the finished run in a folder, which differ from those of another; or None."""
  record = read_run(folder)
  return (record.card, record.end) if record.done else None


class _Stop:
  """A context manager that passes SIGINT, SIGTERM and SIGHUP on to the runs, which save and end."""

  def __init__(self) -> None:
    self.requested = False
    self.processes: list[subprocess.Popen] = []
    self._before: dict[int, Any] = {}

  def __enter__(self) -> _Stop:
    for number in (signal.SIGINT, signal.SIGTERM, *hangups()):
      self._before[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def end_all(self) -> None:
    """Tells each process that still runs, once, to save and end."""
    for process in self.processes:
      if process.poll() is None:
        process.terminate()
    self.processes = []

  def _handle(self, number: int, frame: Any) -> None:
    del number, frame
    self.requested = True
    for process in self.processes:
      # SIGTERM also for Ctrl-C, which the terminal sends to the runs too: it asks them to save,
      # however often it comes. A second SIGINT would end them without saving.
      if process.poll() is None:
        process.terminate()


def _last_words(log: Path) -> str:
  """The last line of a log that is not blank, shortened; empty if there is no log."""
  try:
    with open(log, "rb") as file:
      file.seek(max(file.seek(0, os.SEEK_END) - _LOG_END, 0))
      text = file.read().decode("utf-8", errors="replace")
  except OSError:
    return ""
  lines = [line.strip() for line in text.splitlines()]
  return next((line[:300] for line in reversed(lines) if line), "")


def _import_path() -> str:
  """A PYTHONPATH with which the runs import this installation of scmoe."""
  here = str(Path(__file__).resolve().parent.parent)
  return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


if __name__ == "__main__":
  run_main(main)
