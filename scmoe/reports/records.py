"""Reads a run from its work directory: card, configuration and metrics.jsonl. Needs no device."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scmoe.base.errors import ConfigError
from scmoe.base.paths import at_home
from scmoe.base.renamed import with_present_names
from scmoe.base.stored import Maybe, StoredError, read_json
from scmoe.training.card import CARD, CARD_SHAPE
from scmoe.training.metrics import METRICS, metrics_by_kind
from scmoe.training.workdir import LOCK, owner_lives

ASKED = "asked.json"  # file with the configuration that a sweep gave to a run
EXIT = "exit.json"  # file in which a sweep stores how a run ended
_EXIT_SHAPE = {"code": int, "words": Maybe(str)}
_LARGEST = 1e100  # larger numbers are ignored: no figure is so large, and their sums could overflow
_MARKS = (METRICS, "config.json", ASKED)

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Record:
  """One run.

  Attributes:
    path: its work directory.
    config: dotted name -> value, as the user gave it; as resolved if only that is stored.
    devices: number and kind, e.g. "1 x cpu"; empty if unknown.
    card: its card (`scmoe.training.card`); {} without one.
    train, evals, end: lines of metrics.jsonl of these kinds, oldest first.
    ended: exit code and last log line, if a sweep started the run; else {}.
  """

  path: Path
  config: dict[str, Any]
  devices: str
  card: dict[str, Any]
  train: list[Line]
  evals: list[Line]
  end: list[Line]
  ended: dict[str, Any]

  @property
  def name(self) -> str:
    """The folder's name, with escapes for characters that cannot be printed."""
    return printable(self.path.name)

  @property
  def seed(self) -> int:
    """The seed of the initial weights and of the order of the data."""
    return _whole_number(self.config.get("train.seed"))

  @property
  def step(self) -> int:
    """The last step that was logged."""
    return max((line["step"] for line in (*self.train, *self.evals)), default=0)

  @property
  def steps(self) -> int:
    """The number of steps to train."""
    return _whole_number(self.config.get("train.steps"))

  @property
  def done(self) -> bool:
    """True if the run has finished training and its last evaluation."""
    return bool(self.end) and self.end[-1]["step"] >= self.steps

  @property
  def status(self) -> str:
    """`done`, or whether it failed, stopped or is running, and at which step."""
    if self.done:
      return "done"
    place = f"step {self.step} of {self.steps}"
    if self.ended.get("code", 0) not in (0, 75):
      words = printable(self.ended.get("words", ""))
      return f"failed at {place}, exit {self.ended['code']}: {words}"
    return f"{'running' if owner_lives(self.path / LOCK) else 'stopped'} at {place}"


def find_runs(words: Sequence[str]) -> list[Path]:
  """The runs in some folders; each is a run's own folder, or one that holds runs.

  Raises:
    ConfigError: a folder is neither, or no folder was given.
  """
  found: list[Path] = []
  for word in words:
    folder = at_home(word)
    if is_run(folder):
      inside = [folder]
    else:
      inside = sorted(p for p in folder.glob("*") if is_run(p)) if folder.is_dir() else []
    if not inside:
      raise ConfigError(
        f"{word!r} is not a run and holds none ({METRICS} is missing); give folders that "
        "python -m scmoe.train or python -m scmoe.sweep wrote"
      )
    found += [path for path in inside if path not in found]
  if not found:
    raise ConfigError("no run is given; name folders of runs, e.g. runs/a runs/b")
  return found


def is_run(folder: Path) -> bool:
  """True if a folder is a run's work directory."""
  return any((folder / name).is_file() for name in _MARKS)


def read_run(path: str | os.PathLike[str]) -> Record:
  """Reads a run's work directory; the run may be unfinished, and files may be missing.

  Raises:
    StoredError: its card, its configuration or `EXIT` is not JSON, or has fields of a wrong type.
  """
  folder = Path(path)
  card = _json(folder / CARD, CARD_SHAPE)
  config = card.get("config") or _json(folder / ASKED) or _json(folder / "config.json")
  config, _ = with_present_names(config)  # so that runs of two versions can be compared
  lines = metrics_by_kind(folder, warns=True) if (folder / METRICS).is_file() else {}
  at = card.get("devices", {})
  devices = f"{at['count']} x {printable(at['kind'])}" if at else ""
  train, evals, end = (lines.get(kind, []) for kind in ("train", "eval", "end"))
  ended = _json(folder / EXIT, _EXIT_SHAPE)
  return Record(folder, dict(flat(config)), devices, card, train, evals, end, ended)


def _json(path: Path, shape: Any = dict) -> dict[str, Any]:
  try:
    return read_json(path, shape)
  except FileNotFoundError:
    return {}
  except StoredError as error:
    raise StoredError(f"{error}; delete it or the run") from None


def printable(text: str) -> str:
  """A text on one line, with escapes for line ends and characters that control a terminal."""
  return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  """(dotted name, value) of every field of a nested configuration."""
  for name, value in config.items():
    if isinstance(value, dict):
      yield from flat(value, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", value


# --- figures --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measure:
  """One figure of a run.

  Attributes:
    name: name in JSON.
    title: title of its column.
    of: reads it from a record; None if the run does not have it.
    form: format of one value, e.g. "{:.4f}".
    better: "lower", "higher", or empty if neither is better.
  """

  name: str
  title: str
  of: Callable[[Record], float | None]
  form: str = "{:.4f}"
  better: str = ""

  def text(self, value: float | None) -> str:
    """The value as text; a dash for None."""
    return "–" if value is None else self.form.format(value)


def measures(records: Sequence[Record]) -> list[Measure]:
  """The figures that at least one of the runs has, including bits per byte of each domain."""
  domains = dict.fromkeys(
    name.partition("/")[2]
    for record in records
    for line in record.evals[-1:]
    for name in line
    if name.startswith("bits_per_byte/")
  )
  bits = "bits_per_byte"
  of_domains = [
    Measure(f"{bits}/{d}", f"bits/byte {d}", _last_eval(f"{bits}/{d}"), better="lower")
    for d in domains
  ]
  known = [
    Measure("loss", "loss", _last_eval("loss"), better="lower"),
    Measure("best_loss", "best loss", _best_loss, better="lower"),
    Measure("bits_per_byte", "bits/byte", _last_eval("bits_per_byte"), better="lower"),
    *of_domains,
    Measure("accuracy", "accuracy", _last_eval("accuracy"), better="higher"),
    Measure("ema_accuracy", "EMA's accuracy", _last_eval("ema_accuracy"), better="higher"),
    Measure("train_loss", "training loss", _last("loss"), better="lower"),
    Measure("tokens_per_second", "tokens/s", _median("tokens_per_second"), "{:,.0f}", "higher"),
    Measure("milliseconds_per_step", "step ms", _step_ms, "{:,.1f}", "lower"),
    Measure("mfu", "MFU", _median("mfu"), "{:.1%}", "higher"),
    Measure("memory_gib", "memory GiB", _memory, "{:.2f}", "lower"),
    Measure("parameters", "parameters", _parameters("total"), "{:,.0f}"),
    Measure("active_parameters", "active", _parameters("active"), "{:,.0f}"),
    Measure("drop", "drop", _last("drop"), "{:.2%}", "lower"),
    Measure("imbalance", "imbalance", _last("imbalance"), "{:.2f}", "lower"),
  ]
  return [m for m in known if any(m.of(record) is not None for record in records)]


def number(value: Any) -> float | None:
  """The value as a finite float; None if it is not a number, NaN, infinite or absurdly large."""
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  return float(value) if is_number and -_LARGEST < value < _LARGEST else None


def _whole_number(value: Any) -> int:
  return int(number(value) or 0)


def _last_eval(name: str) -> Callable[[Record], float | None]:
  """A function that reads a value from a run's last evaluation."""
  return lambda record: number(record.evals[-1].get(name)) if record.evals else None


def _best_loss(record: Record) -> float | None:
  """The smallest loss of all evaluations."""
  found = [v for line in record.evals if (v := number(line.get("loss"))) is not None]
  return min(found, default=None)


def _last(name: str) -> Callable[[Record], float | None]:
  """A function that reads a value from a run's last logged step."""
  return lambda record: number(record.train[-1].get(name)) if record.train else None


def _median(name: str) -> Callable[[Record], float | None]:
  """A function that gives a value's median over a run's logged steps."""

  def of(record: Record) -> float | None:
    found = [v for line in record.train if (v := number(line.get(name))) is not None]
    return statistics.median(found) if found else None

  return of


def _step_ms(record: Record) -> float | None:
  seconds = _median("seconds_per_step")(record)
  return None if seconds is None else 1e3 * seconds


def _memory(record: Record) -> float | None:
  """Peak memory in GiB of the device that used most; on a CPU that of the process."""
  last = (record.end or record.train or [{}])[-1]
  size = number(last.get("device_memory_bytes")) or number(last.get("host_memory_bytes"))
  return None if size is None else size / 2**30


def _parameters(kind: str) -> Callable[[Record], float | None]:
  return lambda record: number(record.card.get("parameters", {}).get(kind))
