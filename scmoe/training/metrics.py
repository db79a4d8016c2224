"""Outputs of a run: metrics.jsonl, the console line, TensorBoard, trackers, router files.

The record of a run is metrics.jsonl (`MetricsFile`): a line that cannot be written is kept and
written later. Any other output that fails may lack figures from then on; the run goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from scmoe.base.errors import StorageError
from scmoe.base.output import warn
from scmoe.base.stored import Maybe, StoredError, parse_json, read_bytes, write_whole

METRICS = "metrics.jsonl"
MOST_METRICS = 2**33  # most bytes that are read: a million lines with the numbers of 32 layers
ROUTER = "router"
_LINE = {"step": int, "kind": Maybe(str), "layers": Maybe({"*": list})}
_ROUTER_FILE = re.compile(r"step_([0-9]{1,18})\.npz")
_LONGEST_LIST = 1024  # per-layer arrays of at most so many numbers also go into metrics.jsonl


class Sink(Protocol):
  """A place for scalars besides metrics.jsonl, e.g. `TensorBoard`."""

  def write(self, step: int, scalars: dict[str, Any]) -> None:
    """Stores the scalars of a step."""
    ...

  def close(self) -> None:
    """Closes the file or connection that `write` uses; nothing is written afterwards."""
    ...


class MetricsFile:
  """Append-only WORKDIR/metrics.jsonl: one JSON object per logged step, with at least `step`.

  Args:
    workdir: of the run.
    resumed_step: lines of later steps, which are about to be done again, and broken lines are
      removed at once.

  A line that cannot be written (full disk) is kept in memory and written with the next.

  Raises:
    StoredError: the file is there and cannot be read.
    StorageError: lines have to be removed, and the file cannot be written.
  """

  def __init__(self, workdir: Path, resumed_step: int):
    self.path = workdir / METRICS
    self._waiting: list[str] = []
    self._warned = False
    self._torn = False  # the last write failed, perhaps in the middle of a line
    lines = _repair(self.path, resumed_step)
    self._size = self.path.stat().st_size if self.path.exists() else 0  # bytes of whole lines
    self._evaluated = {line["step"] for line in lines if line.get("kind") == "eval"}

  def has_eval(self, step: int) -> bool:
    """True if an evaluation of that step was recorded."""
    return step in self._evaluated

  def write(self, step: int, values: dict[str, Any], kind: str = "train") -> None:
    """Appends a line; numbers that are not finite become null, so that every line is JSON."""
    self._waiting.append(json.dumps({"step": step, "kind": kind} | _plain(values)) + "\n")
    if kind == "eval":
      self._evaluated.add(step)
    data = "".join(self._waiting).encode()
    try:
      with open(self.path, "a+b") as file:
        self._begin_line(file)
        file.write(data)
        file.flush()
        self._size = file.tell()
    except OSError as error:
      self._torn = True
      if not self._warned:
        warn(f"{self.path} cannot be written ({error.strerror}); lines are kept and retried")
      self._warned = True
      return
    self._torn = False
    self._waiting.clear()

  def _begin_line(self, file: BinaryIO) -> None:
    """Removes the part of a line that a failed write left; ends a line that somebody else has cut.

    Somebody may have removed or cut the file meanwhile: truncating it to the size that it had would
    fill it up with zero bytes.
    """
    size = file.seek(0, os.SEEK_END)
    if size < self._size:
      warn(f"{self.path} was removed or cut by somebody else: lines before this one are lost")
      if size and not _ends_a_line(file):
        file.write(b"\n")
    elif self._torn:
      file.truncate(self._size)


def _ends_a_line(file: BinaryIO) -> bool:
  file.seek(-1, os.SEEK_END)
  return file.read(1) == b"\n"


def read_metrics(workdir: str | os.PathLike[str], kind: str = "train") -> list[dict[str, Any]]:
  """Lines of one kind (train, eval, hosts or end) of a run's metrics.jsonl, oldest first.

  Raises:
    FileNotFoundError: there is no such file.
    StoredError: it cannot be read.
  """
  return metrics_by_kind(workdir).get(kind, [])


def metrics_by_kind(workdir: str | os.PathLike[str]) -> dict[str, list[dict[str, Any]]]:
  """All lines of a run's metrics.jsonl by their kind, oldest first; broken lines are left out.

  A line without a kind is one of `train`.

  Raises:
    FileNotFoundError: there is no such file.
    StoredError: it cannot be read.
  """
  lines, _ = _parse(read_bytes(Path(workdir) / METRICS, MOST_METRICS))
  found: dict[str, list[dict[str, Any]]] = {}
  for line in lines:
    found.setdefault(line.get("kind", "train"), []).append(line)
  return found


def _summary_writer() -> Any:
  """tensorboardX's `SummaryWriter`; imported here, since that takes a second and is optional.

  tensorboardX imports torch where it is installed, to accept its tensors. That takes 4 to 10 s, and
  this package writes plain numbers, so torch is hidden from the import unless it is loaded already.
  """
  hidden = "torch" not in sys.modules
  if hidden:
    sys.modules["torch"] = None  # pyright: ignore  # an import now raises ImportError
  try:
    from tensorboardX import SummaryWriter
  finally:
    if hidden:
      del sys.modules["torch"]
  return SummaryWriter


class TensorBoard:
  """Scalars for TensorBoard in WORKDIR/tensorboard; view with `tensorboard --logdir WORKDIR`."""

  def __init__(self, workdir: Path, resumed_step: int):
    writer = _summary_writer()
    # TensorBoard then drops the figures of later steps, which are about to be done again.
    purge = resumed_step + 1 if resumed_step else None
    self._writer = writer(str(workdir / "tensorboard"), purge_step=purge)

  def write(self, step: int, scalars: dict[str, Any]) -> None:
    """Stores the finite numbers among the scalars of a step; all other values are left out."""
    for name, value in scalars.items():
      if isinstance(value, int | float) and math.isfinite(value):
        self._writer.add_scalar(name, value, step)
    self._writer.flush()

  def close(self) -> None:
    """Ends the writer's process, which Python 3.12 could not do at exit."""
    self._writer.close()


class Tracker:
  """Scalars to `wandb` or `trackio`, which have one interface: `init`, `log`, `finish`.

  The package decides who is logged in, and whether anything leaves the machine
  (WANDB_MODE=offline). A resumed run goes on under its own name.

  Args:
    package: `wandb` or `trackio`.
    workdir: of the run, which gives its name.
    config: of the run, JSON-able.
  """

  def __init__(self, package: str, workdir: Path, config: dict[str, Any]):
    self._library = importlib.import_module(package)
    options: dict[str, Any] = {"project": "scmoe", "name": workdir.name, "config": config}
    if package == "wandb":
      name = hashlib.blake2b(str(workdir).encode(), digest_size=6).hexdigest()
      options |= {"id": name, "dir": str(workdir)}
    self._library.init(resume="allow", **options)

  def write(self, step: int, scalars: dict[str, Any]) -> None:
    """Stores the finite numbers among the scalars of a step; all other values are left out."""
    numbers = {name: value for name, value in scalars.items()
               if isinstance(value, int | float) and math.isfinite(value)}  # fmt: skip
    self._library.log(numbers, step=step)

  def close(self) -> None:
    """Ends the tracker's run."""
    self._library.finish()


class Metrics:
  """Writes to metrics.jsonl and to the sinks; a sink that fails is dropped with one warning.

  Router files of steps after `resumed_step` are removed at once.

  Args:
    workdir: of the run.
    resumed_step: see `MetricsFile`.
    tensorboard: also write TensorBoard files.
    trackers: any of `wandb` and `trackio`, joined by commas; "": none.
    config: the run's configuration, for trackers.
  """

  def __init__(
    self,
    workdir: Path,
    resumed_step: int,
    *,
    tensorboard: bool = True,
    trackers: str = "",
    config: dict[str, Any] | None = None,
  ):
    self.file = MetricsFile(workdir, resumed_step)
    self.sinks: list[Sink] = []
    self._router = workdir / ROUTER
    for step, path in router_files(workdir):
      if step > resumed_step:
        with contextlib.suppress(OSError):
          path.unlink()
    if tensorboard:
      self._add("TensorBoard files", lambda: TensorBoard(workdir, resumed_step))
    for name in filter(None, trackers.split(",")):
      self._add(name, lambda name=name: Tracker(name, workdir, config or {}))

  def _add(self, name: str, make: Callable[[], Sink]) -> None:
    try:
      self.sinks.append(make())
    except Exception as error:  # whatever an optional package raises
      warn(f"no {name}: {type(error).__name__}: {error}")

  def write(self, step: int, values: dict[str, Any], kind: str = "train") -> None:
    """Writes a line to metrics.jsonl, and its values to every sink under the names `kind/name`."""
    self.file.write(step, values, kind)
    for sink in list(self.sinks):
      try:
        sink.write(step, {f"{kind}/{name}": value for name, value in values.items()})
      except Exception as error:  # a sink may raise anything and must not end the run
        self.sinks.remove(sink)
        with contextlib.suppress(Exception):
          sink.close()
        warn(f"{type(sink).__name__} failed and is dropped: {type(error).__name__}: {error}")

  def close(self) -> None:
    """Closes the sinks."""
    for sink in self.sinks:
      with contextlib.suppress(Exception):  # a sink may raise anything
        sink.close()
    self.sinks.clear()

  def write_router(self, step: int, arrays: dict[str, np.ndarray]) -> None:
    """Writes per-layer arrays to WORKDIR/router/step_N.npz (float32), whole or not at all.

    A file that cannot be written causes a warning.
    """
    path = self._router / f"step_{step:08d}.npz"
    values: dict[str, Any] = {name: x.astype(np.float32) for name, x in arrays.items()}
    content = io.BytesIO()
    np.savez_compressed(content, **values)
    try:
      self._router.mkdir(exist_ok=True)
      write_whole(path, content.getvalue())
    except OSError as error:
      warn(f"{path} cannot be written: {error.strerror}")


def router_files(workdir: Path) -> list[tuple[int, Path]]:
  """(step, file) of the router arrays of a run, oldest first; files of other names are left out."""
  found = [(_ROUTER_FILE.fullmatch(p.name), p) for p in (workdir / ROUTER).glob("step_*.npz")]
  return sorted((int(match[1]), path) for match, path in found if match)


def short_lists(arrays: dict[str, np.ndarray]) -> dict[str, list]:
  """Per-layer arrays [L] and [L, E] as lists of numbers with four significant digits.

  Arrays of more than 1024 numbers are left out: they are too long for a line of metrics.jsonl. So
  are arrays of no dimension, or of more than two.
  """

  def short(value: Any) -> Any:
    return list(map(short, value)) if isinstance(value, list) else float(f"{value:.4g}")

  return {
    name: short(np.asarray(value).tolist())
    for name, value in arrays.items()
    if 0 < value.ndim <= 2 and value.size <= _LONGEST_LIST
  }


class Means:
  """Means of the scalars `NAMES` over the steps since the last line that was logged.

  Values that are not finite and skipped steps are left out, with one exception. If a step was
  skipped because its gradients overflowed, and the overflow lowered the loss scale, the step counts
  unless the step before it failed: its loss is finite.
  """

  NAMES = ("loss", "cross_entropy", "accuracy", "drop")

  def __init__(self) -> None:
    self._values: dict[str, list[float]] = {}

  def add(self, values: dict[str, Any]) -> None:
    """Notes the values of one step."""
    if values.get("skipped_in_row"):
      return
    for name in self.NAMES:
      if name in values and math.isfinite(values[name]):
        self._values.setdefault(name, []).append(values[name])

  def take(self) -> dict[str, float]:
    """Returns the means and starts anew; {} if no step since the last call counted."""
    means = {name: float(np.mean(values)) for name, values in self._values.items()}
    self._values.clear()
    return means


def memory_in_use() -> dict[str, int]:
  """Peak memory in bytes, of this process and of the fullest of its devices.

  Returns:
    `device_memory_bytes`, where jax counts it, and `host_memory_bytes`, where the system tells it.
  """
  import jax

  found = {}
  if peak := max((d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in jax.local_devices()):
    found["device_memory_bytes"] = peak
  try:
    import resource
  except ImportError:  # Windows has no `resource`
    return found
  unit = 1 if sys.platform == "darwin" else 1024
  found["host_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
  return found


class Meter:
  """Time per step, without compilation, evaluation and saving.

  The loop calls `begin` when it has dispatched a step, `tick` when it has read a step's results,
  and `pause` when the following time belongs to no step. It reads the results of step n after it
  has dispatched step n + 1, and the dispatch may last until step n + 1 is almost done. When the
  loop ends or pauses, it then reads the results of step n + 1 at once. So the time between two
  ticks without a `begin` is no step's.
  """

  def __init__(self) -> None:
    self._last: float | None = None
    self._begun = False
    self._mean = math.nan  # what the last `take` with timed steps returned
    self._interval: list[float] = []
    self._recent: deque[float] = deque(maxlen=4096)

  def begin(self) -> None:
    """Notes that a step was dispatched."""
    self._begun = True

  def tick(self) -> None:
    """Notes that a step's results were read, and how long it took since the last `tick`.

    No time is noted after `pause`, or without a `begin` since the last `tick`.
    """
    now = time.perf_counter()
    if self._last is not None and self._begun:
      self._interval.append(now - self._last)
      self._recent.append(now - self._last)
    self._last, self._begun = now, False

  def pause(self) -> None:
    """Leaves out the time from here to the next `tick`: it belongs to no step."""
    self._last = None

  def take(self) -> float:
    """Mean seconds per step since the last call.

    If no step was timed since then, the mean of the call before: the last step of a run has no next
    dispatch, so it is not timed. NaN if no step was timed at all.
    """
    if self._interval:
      self._mean = float(np.mean(self._interval))
    self._interval.clear()
    return self._mean

  def percentiles(self) -> tuple[float, float]:
    """Median and 99th percentile of the seconds per step, over the last 4096; NaN without any."""
    if not self._recent:
      return math.nan, math.nan
    return float(np.percentile(self._recent, 50)), float(np.percentile(self._recent, 99))


def console_line(step: int, steps: int, values: dict[str, Any]) -> str:
  """One line for people; figures that are missing, infinite or NaN are left out.

  But a loss or gradient norm is shown even if it is infinite or NaN.

  Reads `loss`, `lr`, `grad_norm`, `tokens_per_second`, `mfu` (0 to 1), `eta_seconds`, `drop` (share
  of choices), `imbalance` (busiest expert over the mean) and `skipped`.
  """
  width = len(str(steps))
  parts = [f"step {step:{width}d}/{steps} ({100 * step // steps}%)"]
  formats = {
    "loss": lambda v: f"loss {v:.4f}",
    "lr": lambda v: f"lr {v:.2e}",
    "grad_norm": lambda v: f"grad {v:.3g}",
    "tokens_per_second": lambda v: f"{_thousands(v)} tok/s",
    "mfu": lambda v: f"MFU {100 * v:.1f}%",
    "eta_seconds": lambda v: f"ETA {duration(v)}",
    "drop": lambda v: f"drop {100 * v:.1f}%",
    "imbalance": lambda v: f"imbalance {v:.2f}",
    "skipped": lambda v: f"skipped {v}" if v else "",
  }
  for name, form in formats.items():
    value = values.get(name)
    if value is not None and (name in ("loss", "grad_norm") or math.isfinite(value)):
      parts.append(form(value))
  return " | ".join(part for part in parts if part)


def duration(seconds: float) -> str:
  """Seconds as text: `47s`, `3m05s`, `2h03m`, `4d07h`."""
  rounded = round(seconds)
  if rounded < 60:
    return f"{rounded}s"
  if rounded < 3600:
    return f"{rounded // 60}m{rounded % 60:02d}s"
  if rounded < 86400:
    return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"
  return f"{rounded // 86400}d{rounded % 86400 // 3600:02d}h"


class Bar:
  """A progress bar on a terminal; elsewhere, or for 0 steps, it prints lines alone.

  Args:
    start: steps done before.
    steps: steps of the whole run.
    shown: False (on all processes but the first): there is no bar, and no line is printed.
  """

  def __init__(self, start: int, steps: int, *, shown: bool = True):
    self._shown, self._bar = shown, None
    if shown and steps and _is_terminal():
      from tqdm import tqdm

      self._bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True, leave=False)

  def advance(self) -> None:
    """Moves the bar on by one step."""
    if self._bar is not None:
      self._bar.update()

  def print(self, text: str) -> None:
    """Prints a line, above the bar if there is one; nothing unless `shown`."""
    if self._bar is not None:
      self._bar.write(text)
    elif self._shown:
      print(text, flush=True)

  def close(self) -> None:
    """Removes the bar."""
    if self._bar is not None:
      self._bar.close()


def _is_terminal() -> bool:
  with contextlib.suppress(AttributeError, ValueError):  # no standard output, or a closed one
    return sys.stdout.isatty()
  return False


def _repair(path: Path, last_step: int) -> list[dict[str, Any]]:
  """Rewrites the file without broken lines and lines after `last_step`; returns those that stay.

  Raises:
    StoredError: it is there and cannot be read.
    StorageError: it has to be rewritten and cannot be written.
  """
  try:
    lines, broken = _parse(read_bytes(path, MOST_METRICS))
    kept = [line for line in lines if line["step"] <= last_step]
    if broken or len(kept) < len(lines):
      write_whole(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
  except FileNotFoundError:
    return []
  except OSError as error:
    raise StorageError(f"{path} cannot be written: {error.strerror}") from None
  return kept


def _parse(data: bytes) -> tuple[list[dict[str, Any]], int]:
  """(lines, number of broken ones); a last line without its end counts as broken."""
  *ended, rest = data.split(b"\n")
  lines, broken = [], int(bool(rest))
  for text in ended:
    try:
      lines.append(parse_json(text, METRICS, _LINE))
    except StoredError:
      broken += 1
  return lines, broken


def _plain(value: Any) -> Any:
  """The value as JSON can hold it: lists for arrays, None for NaN and infinities."""
  if isinstance(value, dict):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(v) for v in value]
  if isinstance(value, np.ndarray | np.generic):
    return _plain(value.tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def _thousands(value: float) -> str:
  for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
    if value >= size:
      return f"{value / size:.1f}{letter}"
  return f"{value:.0f}"
