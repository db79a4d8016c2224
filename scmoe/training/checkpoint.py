"""Checkpoints: written by all processes, verified bit by bit, restored on any mesh.

The only file that imports orbax, beside `scmoe.training.pieces`. Orbax writes and reads arrays
and commits a step by renaming its directory; it neither notices a flipped bit nor falls back to
an older step, and it casts silently. So this file keeps its own list of steps, fingerprints,
shapes and types.

    WORKDIR/checkpoints/N/params    weights            N/data/metadata   data position (JSON)
                          N/state   everything else    N/meta/metadata   configuration ... (JSON)

A step whose arrays came in pieces (`Checkpointer.save_pieces`) has all of them in N/params. Meta
says in which folder an array lies: earlier versions wrote large ones to N/params_1, N/params_2
and so on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from scmoe.base.errors import (
  CheckpointError,
  ConfigError,
  NonFiniteError,
  ScmoeError,
  StorageError,
)
from scmoe.base.output import warn
from scmoe.base.stored import Maybe, StoredError, read_json
from scmoe.training.distributed import all_agree, barrier, from_all_processes, is_first
from scmoe.training.fingerprint import survey
from scmoe.training.options import CheckpointConfig
from scmoe.training.pieces import Piece, PiecedArray, write_pieces
from scmoe.training.schema import SCHEMA, upgraded

PyTree = Any
FOLDER = "checkpoints"
WEIGHTS_ONLY = "weights_only"  # in meta: a step that was not trained, without an optimizer's state
_STEP = re.compile(r"0|[1-9][0-9]{0,17}")
_LEFT_OVER = re.compile(r"\d+\.orbax-checkpoint-tmp.*|\d+\.trash")
_NARROW = ("bfloat16", "float16")  # types of released models: read into float32 without loss
_BAD = re.compile(r"\d+\.bad-.*")
_PIECES = "params"  # for a step saved in pieces: the item that holds all its arrays
_ITEM = re.compile(r"params(_\d+)?|state")
_LEAF = {
  "shape": [int],
  "dtype": str,
  "fingerprint": str,
  "stored_as": Maybe(str),
  "item": Maybe(str),
}
_META = {"digest": str, "step": int, "leaves": {"*": _LEAF}, "config": Maybe({"*": object}),
         "data_fingerprint": Maybe(dict)}  # fmt: skip
_DATA = {"processes": [dict]}
ATTEMPTS = 10  # attempts to read the newest step while a run removes old steps
T = TypeVar("T")


class Restored(NamedTuple):
  """The contents of a checkpoint."""

  step: int
  state: PyTree
  data_state: dict[str, Any]
  meta: dict[str, Any]


class Damaged(Exception):
  """The files of one step differ from those that were written."""


class StepGone(CheckpointError):
  """The requested step does not exist (a run removes its old steps)."""


class Checkpointer:
  """Writes, keeps and restores the checkpoints of one run.

  Args:
    workdir: folder of the run; steps are directories of WORKDIR/checkpoints.
    cfg: says how many steps to keep, and what to do when writing fails.

  With several processes all of them make every call.
  """

  def __init__(self, workdir: str | os.PathLike[str], cfg: CheckpointConfig):
    quiet_libraries()
    self.directory = Path(workdir).absolute() / FOLDER
    self.last_saved: int | None = None  # newest step known to be complete
    self.last_seconds = 0.0  # from the start of that save to its completion
    self._cfg = cfg
    self._failures = 0
    self._pending: tuple[int, float] | None = None
    handlers: dict[str, Any] = {"params": _arrays(), "state": _arrays()}
    handlers |= {"data": ocp.JsonCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
    self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))
    if is_first():
      self._prepare_directory()
    barrier("checkpoint-directory")

  def save(self, step: int, state: PyTree, data_state: dict, meta: dict) -> bool:
    """Starts writing a step; True if it was started (or, without async_save, is complete).

    A step counts as saved only when it is complete, see `wait`. The arrays may be donated as soon
    as this returns.

    Args:
      step: optimizer steps done.
      state: pytree of jax arrays; leaves below `params` can be restored alone.
      data_state: JSON-able position of this process in the data.
      meta: JSON-able: configuration, data fingerprint, mesh, versions, tokens.

    Raises:
      NonFiniteError: the state is not finite; nothing is written.
      StorageError: writing failed `checkpoint.max_failures` times in a row.
    """
    self.wait()
    leaves = _flatten(state)
    data, meta = _records(step, _describe(leaves), data_state, meta)
    started = time.monotonic()
    try:
      self._clear_destination(step)
      self._writer.save(self.directory / str(step), args=_items(leaves, data, meta))
    except Exception as error:  # orbax raises whatever the file system or tensorstore raised
      self._failed(step, error)
      return False
    self._pending = (step, started)
    return self._cfg.async_save or self.wait()

  def wait(self) -> bool:
    """Waits until the started save is complete; False if it failed.

    Raises:
      StorageError: writing failed `checkpoint.max_failures` times in a row.
    """
    if self._pending is None:
      return True
    (step, started), self._pending = self._pending, None
    try:
      self._writer.wait_until_finished()
      if not (self.directory / str(step)).is_dir():
        raise OSError("the step directory did not appear")
    except Exception as error:
      self._failed(step, error)
      return False
    self._failures, self.last_saved = 0, step
    self.last_seconds = time.monotonic() - started
    if is_first():
      self._drop_old()
    return True

  def save_now(self, step: int, state: PyTree, data_state: dict, meta: dict) -> None:
    """Saves and waits; tries again up to `checkpoint.max_failures` times.

    Raises:
      StorageError: every attempt failed.
    """
    while not (self.save(step, state, data_state, meta) and self.wait()):
      time.sleep(0.5)

  def save_pieces(
    self,
    step: int,
    arrays: Sequence[PiecedArray],
    pieces: Iterable[Callable[[], Piece]],
    data_state: dict,
    meta: dict,
    ready: Callable[[], None] = lambda: None,
  ) -> None:
    """Saves a step whose arrays come in pieces; the host holds few pieces at a time.

    For one process; the step appears when all of it is written. Its files are not synchronised, see
    `scmoe.training.pieces`.

    Args:
      step: optimizer steps done.
      arrays: those of the state; the names of weights begin with `params.`.
      pieces: gives all pieces of the arrays, in any order; several threads call it at once.
      data_state, meta: as for `save`.
      ready: called after everything is written and before the step appears.

    Raises:
      NonFiniteError: an array is not finite; the step does not appear.
      StorageError: writing failed. An exception that a piece raises is passed on. In every case
        nothing of the step is left.
    """
    place = self.directory / f"{step}.orbax-checkpoint-tmp-pieces"
    failed = f"saving step {step} to {self.directory} failed"
    try:
      with _storage(failed):
        self._clear_destination(step)
        place.mkdir()
        found = write_pieces(place / _PIECES, arrays, pieces)
      _refuse_non_finite({name: own.finite for name, own in found.items()})
      ready()
      described = {
        array.name: _description(array, found[array.name].fingerprint) | {"item": _PIECES}
        for array in arrays
      }
      data, meta = _records(step, described, data_state, meta)
      with _storage(failed):
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as writer:
          writer.save(place / "data", args=ocp.args.JsonSave(data))
          writer.save(place / "meta", args=ocp.args.JsonSave(meta))
        os.rename(place, self.directory / str(step))
    finally:
      shutil.rmtree(place, ignore_errors=True)
    self.last_saved = step

  def close(self) -> None:
    """Waits for a save under way and ends the writer's threads."""
    self.wait()
    self._writer.close()

  def steps(self) -> list[int]:
    """Steps that look complete, oldest first."""
    return list_steps(self.directory)

  def restore_latest_valid(
    self, abstract: PyTree, check: Callable[[dict], None] | None = None
  ) -> Restored | None:
    """Restores the newest undamaged step; None if there never was a checkpoint.

    A damaged step is renamed to `N.bad-<time>` with a warning, and the one before it is tried.

    Args:
      abstract: pytree of ShapeDtypeStruct with the shardings to restore to. If the step holds
        weights only (`WEIGHTS_ONLY` in its meta), the result is a dictionary of them.
      check: called with the stored meta before arrays are read; may raise to refuse.

    Raises:
      CheckpointError: there are or were checkpoints, but none is valid.
      ConfigError: a stored shape or type is not that of `abstract`.
    """
    _warn_of_junk(self.directory)
    for step in reversed(self.steps()):
      restored = self._try(step, abstract, check)
      if restored is not None:
        self.last_saved = step
        return restored
    bad = sorted(p.name for p in self.directory.iterdir() if _BAD.fullmatch(p.name))
    if bad:
      raise CheckpointError(
        f"no valid checkpoint in {self.directory}: {', '.join(bad)} are damaged; restore one from "
        "a backup, or start anew in another workdir"
      )
    return None

  def read_meta(self, step: int | None = None) -> dict[str, Any]:
    """See `read_meta`."""
    return read_meta(self.directory.parent, step)

  def _try(
    self, step: int, abstract: PyTree, check: Callable[[dict], None] | None
  ) -> Restored | None:
    """Restores one step; None, the same on all processes, if it was damaged and set aside."""
    place, problem, restored = self.directory / str(step), "", None
    try:
      meta, data = _read_description(place)
      if meta["step"] != step:  # without this, a run would continue with the data of another step
        raise Damaged(f"it is a copy of step {meta['step']}")
      if check is not None:
        check(meta)
      state = load(place, _weights(abstract, meta), meta, partial=bool(meta.get(WEIGHTS_ONLY)))
      restored = Restored(step, state, _own(data["processes"]), meta)
    except Damaged as error:
      problem = str(error)
    if not all_agree(restored is not None):
      self._set_aside(place, "bad", problem or "another process found it damaged")
      return None
    return restored

  def _prepare_directory(self) -> None:
    """Creates the directory and removes what killed runs left half-written."""
    try:
      self.directory.mkdir(parents=True, exist_ok=True)
      for path in self.directory.iterdir():
        if _LEFT_OVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
          shutil.rmtree(path)
    except OSError as error:
      raise StorageError(f"{self.directory} cannot be written: {error.strerror}") from None

  def _clear_destination(self, step: int) -> None:
    """Renames leftover files that have the step's name."""
    place = self.directory / str(step)
    if is_first() and (place.is_symlink() or place.exists()):
      self._rename(place, "ignored")
    barrier(f"destination-{step}")

  def _set_aside(self, place: Path, label: str, reason: str) -> None:
    if is_first():
      name = self._rename(place, label)
      warn(f"checkpoint {place} is damaged ({reason}); kept as {name}, trying the one before it")
    barrier(f"aside-{place.name}")

  def _rename(self, place: Path, label: str) -> str:
    stem = f"{place.name}.{label}-{time.strftime('%Y%m%d-%H%M%S')}"
    name, count = stem, 1
    while os.path.lexists(place.with_name(name)):
      name, count = f"{stem}-{count}", count + 1
    os.rename(place, place.with_name(name))
    return name

  def _failed(self, step: int, error: Exception) -> None:
    self._failures += 1
    free = 0.0
    with contextlib.suppress(OSError):  # the folder may be gone
      free = shutil.disk_usage(self.directory).free / 2**30
    text = f"saving step {step} to {self.directory} failed ({free:.1f} GiB free): {_line(error)}"
    if self._failures >= self._cfg.max_failures:
      raise StorageError(f"{text}; gave up after {self._failures} failures in a row") from None
    warn(f"{text}; training goes on, older checkpoints stay, the next save tries again")

  def _drop_old(self) -> None:
    """Removes all but the newest steps, each by a rename first so that no half step is seen."""
    for step in self.steps()[: -self._cfg.keep]:
      if self._cfg.keep_every and step % self._cfg.keep_every == 0:
        continue
      trash = self.directory / f"{step}.trash"
      try:
        os.rename(self.directory / str(step), trash)
        shutil.rmtree(trash)
      except OSError as error:
        warn(f"old checkpoint {step} could not be removed: {error}")


def quiet_libraries() -> None:
  """Keeps the tracebacks of orbax and tensorstore off standard error: ours are one-line warnings.

  orbax logs tracebacks. When one of its reads or writes fails, it closes its event loop. Every
  other read or write then raises in a tensorstore thread, and tensorstore passes the exception to
  `sys.unraisablehook`: over a hundred tracebacks for one full disk.
  """
  for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  if not isinstance(sys.unraisablehook, _WithoutClosedLoops):
    sys.unraisablehook = _WithoutClosedLoops(sys.unraisablehook)


class _WithoutClosedLoops:
  """A `sys.unraisablehook` that passes on every exception but that of a closed event loop."""

  def __init__(self, hook: Callable[..., Any]):
    self._hook = hook

  def __call__(self, unraisable: Any) -> None:
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
      self._hook(unraisable)


def list_steps(directory: Path) -> list[int]:
  """Steps of a checkpoint directory, oldest first.

  A step is a real directory with a plain number as its name and something in it; symlinks, files,
  empty directories and other names are ignored.
  """
  if not directory.is_dir():
    return []
  return sorted(int(p.name) for p in directory.iterdir() if _STEP.fullmatch(p.name) and _is_step(p))


def read_meta(workdir: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
  """Stored configuration and description of a step (the newest readable one); reads JSON only.

  Raises:
    CheckpointError: no such step, or no readable one.
  """
  return _of_step(workdir, step, lambda place: _read_description(place)[0])


def _of_step(workdir: str | os.PathLike[str], step: int | None, read: Callable[[Path], T]) -> T:
  """`read(place)` of a step, or of the newest step where that does not raise `Damaged`.

  Raises:
    StepGone: `step` is not there.
    CheckpointError: it is damaged, or there is none that can be read.
  """
  directory, tried = Path(workdir).absolute() / FOLDER, set()
  while True:
    steps = list_steps(directory) if step is None else [step]  # a run may remove some
    left = [candidate for candidate in steps if candidate not in tried]
    if not left:
      raise CheckpointError(_nothing_there(directory, step))
    place = directory / str(left[-1])
    try:
      return read(place)
    except Damaged as error:
      if place.is_dir():
        warn(f"checkpoint {place} cannot be used: {error}")
      elif step is not None:
        raise StepGone(_nothing_there(directory, step)) from None
    tried.add(left[-1])


def with_newest(attempt: Callable[[], T], step: int | None = None) -> T:
  """Calls `attempt()`, which reads the newest step, and again if that step was removed.

  A run that trains meanwhile keeps few steps (`checkpoint.keep`). It may remove the chosen step
  during a slow read; a newer one then exists.

  Args:
    attempt: reads a step.
    step: the step that the user named, tried once; None: the newest.

  Raises:
    StepGone: the step that the user named is not there.
  """
  for _ in range(ATTEMPTS - 1):
    try:
      return attempt()
    except StepGone as error:
      if step is not None:
        raise
      warn(f"{error}; the run has removed it meanwhile, taking the newest")
  return attempt()


def restore_params(
  workdir: str | os.PathLike[str], abstract_params: PyTree, step: int | None = None
) -> PyTree:
  """Reads and verifies the weights only, on the mesh of `abstract_params`. Changes no file.

  Args:
    workdir: of the run.
    abstract_params: pytree of ShapeDtypeStruct with shardings, like the `params` of the state.
    step: which one; the newest valid one if None.

  Raises:
    CheckpointError: no such step, or no valid one.
    ConfigError: a stored shape or type is another.
  """
  return restore_part(workdir, {"params": abstract_params}, step)["params"]


def restore_part(
  workdir: str | os.PathLike[str], abstract: dict[str, PyTree], step: int | None = None
) -> dict[str, PyTree]:
  """Some fields of the state, e.g. `{"params": ..., "router": ...}`; see `restore_params`."""
  read = lambda place: load(place, abstract, _read_description(place)[0], partial=True)
  return _of_step(workdir, step, read)


def restore_on_host(
  workdir: str | os.PathLike[str], abstract: PyTree, step: int | None = None
) -> PyTree:
  """Parameters as NumPy arrays, read one leaf at a time: a device holds at most one of them.

  Args:
    workdir: of the run.
    abstract: of the parameters, dictionaries of `jax.ShapeDtypeStruct` with shardings.
    step: which one; None: the newest.

  Raises:
    CheckpointError: as `restore_part`.
  """

  def read(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
    alone: Any = leaf
    for key in reversed(path):
      alone = {key.key: alone}
    found = restore_part(workdir, {"params": alone}, step)["params"]
    return np.asarray(jax.tree.leaves(found)[0])

  return jax.tree_util.tree_map_with_path(read, abstract)


def restore_stored(
  workdir: str | os.PathLike[str], abstract: dict[str, Any], step: int
) -> dict[str, jax.Array]:
  """Reads leaves by dotted name, each in the type it was written in; see `restore_part`.

  Args:
    workdir: of the run.
    abstract: ShapeDtypeStruct with shardings by dotted name; their types are ignored.
    step: which one.
  """

  def read(place: Path) -> dict[str, jax.Array]:
    meta = _read_description(place)[0]
    there = {name: leaf for name, leaf in abstract.items() if name in meta["leaves"]}
    return _read_verified(place, there, meta)

  return _of_step(workdir, step, read)


def _nothing_there(directory: Path, step: int | None) -> str:
  wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
  have = ", ".join(map(str, list_steps(directory))) or "none"
  return f"no valid {wanted} in {directory}; steps there: {have}"


def load(place: Path, abstract: PyTree, meta: dict, *, partial: bool = False) -> PyTree:
  """Reads and verifies the arrays of one step.

  Args:
    place: directory of the step.
    abstract: pytree of ShapeDtypeStruct with shardings.
    meta: of the step.
    partial: `abstract` may leave out leaves.

  Raises:
    Damaged: a file cannot be read, or a leaf differs from what was written.
    ConfigError: a leaf should have another shape or type, or is missing.
  """
  wanted = _flatten(abstract)
  # Before anything is read: orbax would cast or pad.
  if problem := misfit(abstract, meta["leaves"], partial=partial):
    raise ConfigError(
      f"checkpoint {place} {problem}; resume with the configuration it was written with"
    )
  leaves = _read_verified(place, wanted, meta)
  # One leaf at a time: a parameter of a released model is kept in its own type.
  typed = [_typed(leaves.pop(name), leaf.dtype) for name, leaf in wanted.items()]
  return jax.tree.unflatten(jax.tree.structure(abstract), typed)


def _read_verified(place: Path, wanted: dict[str, Any], meta: dict) -> dict[str, jax.Array]:
  """Arrays by name in the types in which they were written; raises `Damaged`."""
  known = meta["leaves"]
  stored = {name: known[name].get("stored_as", name) for name in wanted}
  typed = {
    stored[name]: jax.ShapeDtypeStruct(x.shape, known[name]["dtype"], sharding=x.sharding)
    for name, x in wanted.items()
  }
  items = {stored[name]: known[name].get("item", _item(name)) for name in wanted}
  arrays = _read_arrays(place, typed, items)
  leaves = {name: arrays[stored[name]] for name in wanted}
  prints, _ = survey(list(leaves.values()))
  for name, found in zip(leaves, prints):
    if found != known[name]["fingerprint"]:
      raise Damaged(f"{name} has fingerprint {found}, written was {known[name]['fingerprint']}")
  return leaves


def _typed(leaf: jax.Array, dtype: Any) -> jax.Array:
  return leaf if leaf.dtype == dtype else jax.jit(lambda x: x.astype(dtype), donate_argnums=0)(leaf)


def _weights(abstract: PyTree, meta: dict) -> PyTree:
  """The arrays to read: all of `abstract`; only weights if the step has no optimizer state."""
  if not meta.get(WEIGHTS_ONLY):
    return abstract
  router = {n: x for n, x in abstract.router.items() if f"router.{n}" in meta["leaves"]}
  return {"params": abstract.params, "router": router}


def _read_arrays(
  place: Path, wanted: dict[str, Any], items: dict[str, str]
) -> dict[str, jax.Array]:
  """Reads leaves by name, in the order, types and shardings of `wanted`.

  Args:
    place: directory of the step.
    wanted: ShapeDtypeStruct with shardings.
    items: name of the step's directory that holds each leaf.
  """
  quiet_libraries()
  groups: dict[str, dict[str, Any]] = {}
  for name, x in wanted.items():
    groups.setdefault(items[name], {})[name] = x

  def read(item: str) -> dict[str, jax.Array]:
    how = {
      name: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype, global_shape=x.shape)
      for name, x in groups[item].items()
    }
    args = ocp.args.PyTreeRestore(item=groups[item], restore_args=how, partial_restore=True)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
      return reader.restore(place, args=ocp.args.Composite(**{item: args}))[item]

  leaves: dict[str, jax.Array] = {}
  at_once = len(groups) if jax.process_count() == 1 else 1  # processes read in one order
  try:
    with ThreadPoolExecutor(max(at_once, 1)) as pool:
      for found in pool.map(read, sorted(groups)):
        leaves |= found
  except (MemoryError, PermissionError):
    raise
  except Exception as error:
    if "RESOURCE_EXHAUSTED" in str(error):  # too little memory; the files may be undamaged
      raise
    raise Damaged(_line(error)) from None
  return {name: leaves[name] for name in wanted}


def misfit(abstract: PyTree, stored: dict[str, dict], *, partial: bool = False) -> str:
  """Says how stored names, shapes and types differ from the requested ones; "" if they agree.

  Args:
    abstract: pytree of ShapeDtypeStruct.
    stored: `leaves` of a checkpoint's meta.
    partial: `abstract` may leave out leaves.
  """
  wanted = _flatten(abstract)
  missing = sorted(set(wanted) - set(stored))
  extra = [] if partial else sorted(set(stored) - set(wanted))
  if missing or extra:
    return f"lacks {missing[0]!r}" if missing else f"also holds {extra[0]!r}"
  for name, leaf in wanted.items():
    have = (tuple(stored[name]["shape"]), stored[name]["dtype"])
    want = (tuple(leaf.shape), str(leaf.dtype))
    exact = have[1] in _NARROW and want[1] == "float32"
    moments = name.startswith("opt_state.") and (have[1], want[1]) == ("float32", "bfloat16")
    if have[0] != want[0] or (have[1] != want[1] and not exact and not moments):
      return (
        f"holds {name} as {have[1]}{list(have[0])}, the configuration asks for "
        f"{want[1]}{list(want[0])}"
      )
  return ""


def _describe(leaves: dict[str, jax.Array]) -> dict[str, dict]:
  """Shape, type and fingerprint per leaf.

  Raises:
    NonFiniteError: a leaf holds NaN or infinity.
  """
  prints, finite = survey(list(leaves.values()))
  _refuse_non_finite(dict(zip(leaves, finite)))
  return {name: _description(x, own) for (name, x), own in zip(leaves.items(), prints)}


def _description(x: Any, fingerprint: str) -> dict[str, Any]:
  return {"shape": list(x.shape), "dtype": str(x.dtype), "fingerprint": fingerprint}


def _refuse_non_finite(finite: Mapping[str, bool]) -> None:
  if bad := next((name for name, good in finite.items() if not good), None):
    raise NonFiniteError(f"{bad} is not finite and is not saved; resume from an older checkpoint")


def _flatten(tree: PyTree) -> dict[str, Any]:
  """Leaves by dotted name, in tree order; independent of the containers' types."""
  pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
  leaves = {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in pairs}
  if len(leaves) != len(pairs):
    raise ValueError("two leaves of the state have the same dotted name")
  return leaves


def _item(name: str) -> str:
  """The folder of an array: weights have their own, so that they can be read alone."""
  return "params" if name.partition(".")[0] == "params" else "state"


def _split(leaves: dict[str, Any]) -> dict[str, dict[str, Any]]:
  own = lambda item: {name: x for name, x in leaves.items() if _item(name) == item}
  return {item: own(item) for item in ("params", "state")}


def _arrays() -> ocp.PyTreeCheckpointHandler:
  # No compression: floats hardly shrink, and compressing them takes longer than writing them.
  return ocp.PyTreeCheckpointHandler(use_compression=False)


@contextlib.contextmanager
def _storage(what: str) -> Iterator[None]:
  """Turns exceptions of the file system or tensorstore into a `StorageError`."""
  try:
    yield
  except ScmoeError:
    raise
  except Exception as error:
    raise StorageError(f"{what}: {_line(error)}") from None


def _line(error: Exception) -> str:
  return " ".join(str(error).split())[:300]


def _items(leaves: dict[str, Any], data: dict, meta: dict) -> Any:
  arrays = {k: ocp.args.PyTreeSave(v) for k, v in _split(leaves).items() if v}
  return ocp.args.Composite(**arrays, data=ocp.args.JsonSave(data), meta=ocp.args.JsonSave(meta))


def _records(
  step: int, described: dict[str, dict], data_state: dict, meta: dict
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The two JSON descriptions of a step, data and meta, which are written beside its arrays."""
  data = {"processes": from_all_processes(data_state)}
  return data, _sealed(meta | {"schema": SCHEMA, "step": step, "leaves": described}, data)


def _sealed(meta: dict, data: dict) -> dict:
  """Adds a digest over meta and data in the form that JSON reads back."""
  meta = json.loads(json.dumps(meta))
  return meta | {"digest": _digest(meta, data)}


def _digest(meta: dict, data: dict) -> str:
  rest = {k: v for k, v in meta.items() if k != "digest"}
  return hashlib.sha256(json.dumps([rest, data], sort_keys=True).encode()).hexdigest()


def _read_description(place: Path) -> tuple[dict, dict]:
  """(meta, data) of a step, verified, with current field names (`scmoe.training.schema`).

  Raises:
    Damaged: missing, of another form, or changed since it was written.
    CheckpointError: a later version of scmoe wrote it.
  """
  try:
    meta = read_json(place / "meta" / "metadata", _META)
    data = read_json(place / "data" / "metadata", _DATA)
    for leaf in meta["leaves"].values():
      jnp.dtype(leaf["dtype"])
  except (FileNotFoundError, StoredError, TypeError) as error:
    raise Damaged(f"its description cannot be read: {error}") from None
  if meta["digest"] != _digest(meta, data):
    raise Damaged("its description was changed after it was written")
  if odd := [
    leaf for leaf in meta["leaves"].values() if not _ITEM.fullmatch(leaf.get("item", _PIECES))
  ]:
    raise Damaged(f"an array lies in {odd[0]['item']!r}, which is no folder of a step")
  return upgraded(meta), data


def _is_step(path: Path) -> bool:
  return path.is_dir() and not path.is_symlink() and any(path.iterdir())


def _warn_of_junk(directory: Path) -> None:
  known = lambda p: _BAD.fullmatch(p.name) or ".ignored-" in p.name or ".orbax" in p.name
  for path in sorted(directory.iterdir()):
    if not (known(path) or (_STEP.fullmatch(path.name) and _is_step(path))) and is_first():
      warn(f"{path} is not a checkpoint (empty, a file, a link or an odd name); ignored")


def _own(states: list[dict]) -> dict:
  """This process's data position.

  Raises:
    ConfigError: another number of processes wrote it, and their positions differ.
  """
  if len(states) == jax.process_count():
    return states[jax.process_index()]
  if states and all(state == states[0] for state in states):
    return states[0]
  raise ConfigError(
    f"the checkpoint's data positions are those of {len(states)} processes, this run has "
    f"{jax.process_count()}; start as many"
  )
