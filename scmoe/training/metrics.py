"""Writes a run's figures to metrics.jsonl, TensorBoard, trackers and router files.

The record of a run is metrics.jsonl (`MetricsFile`): a line that cannot be written is kept and
tried again with the next. Any other output that fails may lack figures from then on; the run goes
on.
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
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from scmoe.base.errors import StorageError
from scmoe.base.output import warn
from scmoe.base.stored import (
  Maybe,
  StoredError,
  ends_a_line,
  parse_json,
  read_bytes,
  write_whole,
)

METRICS = "metrics.jsonl"
MOST_METRICS = 2**33  # bytes; a larger metrics.jsonl is not read
ROUTER = "router"
_LINE = {"step": int, "kind": Maybe(str), "layers": Maybe({"*": list})}
_ROUTER_FILE = re.compile(r"step_([0-9]{1,18})\.npz")
_LONGEST_LIST = 1024  # per-layer arrays of at most so many numbers also go into metrics.jsonl


class Sink(Protocol):
  """A place for scalars besides metrics.jsonl, e.g. `TensorBoard`."""

  def write(self, step: int, scalars: dict[str, Any]) -> None:
    """Stores those values of a step that are finite `int`s or `float`s; a bool is an int here.

    Args:
      step: its number.
      scalars: values of any type by name, such as `train/loss`. Others are left out, among them
        numpy's numbers, except float64.
    """
    ...

  def close(self) -> None:
    """Closes the file or connection that `write` uses; nothing is written afterwards."""
    ...


class MetricsFile:
  """WORKDIR/metrics.jsonl, to which lines are appended: JSON objects with at least `step`, `kind`.

  Args:
    workdir: of the run.
    resumed_step: lines of later steps and broken lines are removed at once.

  A line that cannot be written (full disk) is kept in memory and tried again with the next.

  Raises:
    StoredError: the file is there and cannot be read.
    StorageError: lines have to be removed, and the file cannot be written.
  """

  def __init__(self, workdir: Path, resumed_step: int):
    self.path = workdir / METRICS
    self._waiting: list[str] = []
    self._warned = False
    self._torn = False  # whether the last write failed, perhaps in the middle of a line
    lines = _repair(self.path, resumed_step)
    # Size of the file at the end of the last line that was written whole; if somebody has cut the
    # file since, the size that was left.
    self._size = self.path.stat().st_size if self.path.exists() else 0
    self._evaluated = {line["step"] for line in lines if line.get("kind") == "eval"}

  def has_eval(self, step: int) -> bool:
    """True if an evaluation of that step was recorded."""
    return step in self._evaluated

  def write(self, step: int, values: dict[str, Any], kind: str = "train") -> None:
    """Appends a line, or keeps it for the next call if the file cannot be written.

    Numbers that are not finite become null, so that every line is JSON.
    """
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
    """Removes what a failed write left in the file; ends a line that somebody else has cut.

    If somebody has removed or cut the file meanwhile, nothing is removed: truncating it to the size
    that it had would fill it up with zero bytes. From then on the size that it has now counts, also
    if the write that follows fails.
    """
    size = file.seek(0, os.SEEK_END)
    if size < self._size:
      warn(f"{self.path} was removed or cut by somebody else: lines before this one are lost")
      self._size = size
    elif self._torn:
      file.truncate(self._size)
    if self._size and not ends_a_line(file):
      file.write(b"\n")


def read_metrics(workdir: str | os.PathLike[str], kind: str = "train") -> list[dict[str, Any]]:
  """Lines of one kind (train, eval, hosts, start or end) of a run's metrics.jsonl, oldest first.

  Raises:
    FileNotFoundError: there is no such file.
    StoredError: it cannot be read.
  """
  return metrics_by_kind(workdir).get(kind, [])


def metrics_by_kind(
  workdir: str | os.PathLike[str], *, warns: bool = False
) -> dict[str, list[dict[str, Any]]]:
  """All lines of a run's metrics.jsonl by their kind, oldest first; broken lines are left out.

  A line without a kind is one of `train`.

  Args:
    workdir: of the run.
    warns: whether to print a warning if broken lines are left out. It does not count a last line
      that begins with a brace and has no end: a run may be writing it.

  Raises:
    FileNotFoundError: there is no such file.
    StoredError: it cannot be read.
  """
  path = Path(workdir) / METRICS
  data = read_bytes(path, MOST_METRICS)
  lines, broken = _parse(data)
  broken -= data.rpartition(b"\n")[2].startswith(b"{")
  if warns and broken:
    warn(f"{path}: {broken} of its lines cannot be read and are left out; a run's are JSON objects")
  found: dict[str, list[dict[str, Any]]] = {}
  for line in lines:
    found.setdefault(line.get("kind", "train"), []).append(line)
  return found


def _tensorboardx() -> Any:
  """The package tensorboardX; imported here, since that takes a second and is optional.

  tensorboardX imports torch where it is installed, to accept its tensors. That takes 4 to 10 s, and
  this package writes plain numbers, so torch is hidden from the import unless it is loaded already.
  """
  hidden = "torch" not in sys.modules
  if hidden:
    sys.modules["torch"] = None  # pyright: ignore  # an import now raises ImportError
  try:
    return importlib.import_module("tensorboardX")
  finally:
    if hidden:
      del sys.modules["torch"]


class TensorBoard:
  """Scalars for TensorBoard in WORKDIR/tensorboard; view with `tensorboard --logdir WORKDIR`.

  The caller's thread writes the file. tensorboardX's `SummaryWriter` has a thread of its own, which
  ends at the first error: on a full disk the training loop would then wait for ever for room in
  that thread's queue.

  Args:
    workdir: of the run.
    resumed_step: TensorBoard drops the figures that earlier starts wrote for later steps; 0: none.

  Raises:
    ImportError: tensorboardX is not installed.
    OSError: the folder or file cannot be made or written.
  """

  def __init__(self, workdir: Path, resumed_step: int):
    package = _tensorboardx()
    self._protos = package.proto.event_pb2
    self._scalar = package.summary.scalar
    folder = workdir / "tensorboard"
    folder.mkdir(exist_ok=True)
    # TensorBoard reads a folder's files in the order of their names.
    name = f"events.out.tfevents.{time.time():.3f}.{socket.gethostname()}.{os.getpid()}"
    self._file = package.RecordWriter(str(folder / name))
    self._append(file_version="brain.Event:2")
    if resumed_step:
      start = self._protos.SessionLog(status=self._protos.SessionLog.START)
      self._append(step=resumed_step + 1, session_log=start)
    self._file.flush()

  def write(self, step: int, scalars: dict[str, Any]) -> None:
    """Stores the finite `int`s and `float`s among the scalars of a step; leaves out all others.

    Raises:
      OSError: the file cannot be written.
    """
    event = self._protos.Event(step=step, wall_time=time.time())
    for name, value in scalars.items():
      if isinstance(value, int | float) and math.isfinite(value):
        event.summary.MergeFrom(self._scalar(name, value))
    self._file.write(event.SerializeToString())
    self._file.flush()

  def close(self) -> None:
    """Closes the file.

    Raises:
      OSError: the disk has no room for what `write` could not store.
    """
    self._file.close()

  def _append(self, **fields: Any) -> None:
    event = self._protos.Event(wall_time=time.time(), **fields)
    self._file.write(event.SerializeToString())


class Tracker:
  """Sends scalars to `wandb` or `trackio`, which have one interface: `init`, `log`, `finish`.

  The package decides who is logged in, and whether anything leaves the machine
  (WANDB_MODE=offline). A resumed run goes on under its own name.

  Args:
    package: `wandb` or `trackio`.
    workdir: of the run; its last part is the run's name there.
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
    """Stores the finite `int`s and `float`s among the scalars of a step; leaves out all others."""
    numbers = {name: value for name, value in scalars.items()
               if isinstance(value, int | float) and math.isfinite(value)}  # fmt: skip
    self._library.log(numbers, step=step)

  def close(self) -> None:
    """Ends the tracker's run."""
    self._library.finish()


class Metrics:
  """Writes a run's figures to metrics.jsonl, to the sinks and to router files.

  A sink that cannot be made or written is dropped with one warning. Router files of steps after
  `resumed_step` are removed at once, where that is possible.

  Args:
    workdir: of the run.
    resumed_step: see `MetricsFile`.
    tensorboard: also write TensorBoard files.
    trackers: any of `wandb` and `trackio`, joined by commas; "": none.
    config: the run's configuration, for trackers.

  Raises:
    StoredError, StorageError: as `MetricsFile`.
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
    except Exception as error:  # an optional package may raise anything and must not end the run
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
      with contextlib.suppress(Exception):  # a sink that cannot be closed must not end the run
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


def _repair(path: Path, last_step: int) -> list[dict[str, Any]]:
  """Removes broken lines, and lines after step `last_step`, from metrics.jsonl; returns the rest.

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
  """(lines that can be read, number of broken lines); a last line without its end is broken."""
  *ended, rest = data.split(b"\n")
  lines, broken = [], int(bool(rest))
  for text in ended:
    try:
      lines.append(parse_json(text, METRICS, _LINE))
    except StoredError:
      broken += 1
  return lines, broken


def _plain(value: Any) -> Any:
  """The value as JSON can hold it: Python's lists and numbers for numpy's, None for NaN and ±∞."""
  if isinstance(value, dict):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(v) for v in value]
  if isinstance(value, np.ndarray | np.generic):
    return _plain(value.tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
