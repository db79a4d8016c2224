"""Checkpoints: written, kept, and restored from the newest good step, also on another mesh.

Orbax or `scmoe.training.pieces` writes the arrays; a step appears when its directory is renamed to
its number. Orbax does not fall back to an older step when one is damaged, so this module tries the
steps, newest first.
`scmoe.training.restore` reads a step, `scmoe.training.description` the JSON beside its arrays.

    WORKDIR/checkpoints/N/params    weights            N/data/metadata   data position (JSON)
                          N/state   everything else    N/meta/metadata   configuration ... (JSON)

A step whose arrays came in pieces (`Checkpointer.save_pieces`) has all of them in N/params, and its
meta names each array's folder: earlier versions wrote large ones to N/params_1, N/params_2 and so
on.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from scmoe.base.errors import CheckpointError, ConfigError, ScmoeError, StorageError
from scmoe.base.output import warn
from scmoe.training.description import (
  PIECES,
  WEIGHTS_ONLY,
  Damaged,
  describe,
  description_of,
  flatten,
  held_part,
  item_of,
  read_description,
  records,
  refuse_non_finite,
)
from scmoe.training.distributed import all_agree, barrier, is_first
from scmoe.training.options import CheckpointConfig
from scmoe.training.pieced import in_pieces, is_pieced
from scmoe.training.pieces import Piece, PiecedArray, write_pieces
from scmoe.training.quiet import in_one_line, quiet_libraries
from scmoe.training.restore import FOLDER, STEP, is_step, list_steps, load

PyTree = Any
_LEFT_OVER = re.compile(r"\d+\.orbax-checkpoint-tmp.*|\d+\.trash")
_BAD = re.compile(r"\d+\.bad-.*")


class Restored(NamedTuple):
  """A checkpoint that was read: its step, arrays, this process's position in the data, and meta."""

  step: int
  state: PyTree
  data_state: dict[str, Any]
  meta: dict[str, Any]


class Checkpointer:
  """Writes, keeps and restores the checkpoints of one run.

  Args:
    workdir: folder of the run; steps are directories of WORKDIR/checkpoints.
    cfg: says which steps to keep, whether training goes on while one is written, and how many
      failures in a row end the run.

  With several processes all of them make the same calls, in the same order.

  Raises:
    StorageError: on process 0, if the folder of the steps cannot be made or listed, or a step there
      that is not whole cannot be removed.
  """

  def __init__(self, workdir: str | os.PathLike[str], cfg: CheckpointConfig):
    quiet_libraries()
    self.directory = Path(workdir).absolute() / FOLDER
    # The step that was last saved completely or restored; None: there is none yet, or the loop
    # restored weights alone.
    self.last_saved: int | None = None
    self._cfg = cfg
    self._failures = 0
    self._pending: int | None = None
    handlers: dict[str, Any] = {"params": _arrays(), "state": _arrays()}
    handlers |= {"data": ocp.JsonCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
    self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))
    if is_first():
      self._prepare_directory()
    barrier("checkpoint-directory")

  def save(self, step: int, state: PyTree, data_state: dict, meta: dict) -> bool:
    """Starts writing a step, after the save under way if there is one; False if writing failed.

    True means that the save was started or, without async_save, that it is complete; it says
    nothing of the save under way before. A step counts as saved only when it is complete (`wait`).
    The arrays may be donated as soon as this returns. A state with arrays in files (`Pieced`) is
    written piece by piece, and complete on return.

    Args:
      step: optimizer steps done.
      state: pytree of jax arrays and `Pieced` objects; leaves below `params` can be restored alone.
      data_state: JSON-able position of this process in the data.
      meta: JSON-able, e.g. configuration, data fingerprint, mesh, versions, tokens.

    Raises:
      NonFiniteError: the state is not finite; the step does not appear.
      StorageError: writing failed `checkpoint.max_failures` times in a row; or, if there are
        `Pieced` objects, their file cannot be read or written, or what has the step's name already
        cannot be renamed.
    """
    self.wait()
    if is_first():
      # What a failed save left takes room that this one may need. It cannot be removed at once:
      # tensorstore's threads write on for a moment after the error.
      with contextlib.suppress(OSError):  # the checkpoints' folder may have been removed
        for path in self._left_over():
          shutil.rmtree(path, ignore_errors=True)
    leaves = flatten(state)
    if any(map(is_pieced, leaves.values())):
      return self._save_filed(step, leaves, data_state, meta)
    data, meta = records(step, describe(leaves), data_state, meta)
    try:
      self._clear_destination(step)
      self._writer.save(self.directory / str(step), args=_items(leaves, data, meta))
    except Exception as error:  # orbax raises any exception of the file system or tensorstore
      self._failed(step, error)
      return False
    self._pending = step
    return self._cfg.async_save or self.wait()

  def _save_filed(self, step: int, leaves: dict[str, Any], data_state: dict, meta: dict) -> bool:
    try:
      self.save_pieces(step, *in_pieces(leaves), data_state, meta, sync=True)
    except StorageError as error:
      if not str(error).startswith(self._begins(step)):
        raise  # the moments' file fails, or what has the step's name cannot be renamed
      cause = error.__context__  # the exception whose text ends that of `error`
      self._failed(step, cause if isinstance(cause, Exception) else error)
      return False
    self._failures = 0
    self._drop_old()
    return True

  def wait(self) -> bool:
    """Waits until the started save, if there is one, is complete; then removes old steps.

    Returns:
      False if the save failed.

    Raises:
      StorageError: writing failed `checkpoint.max_failures` times in a row.
    """
    if self._pending is None:
      return True
    step, self._pending = self._pending, None
    try:
      self._writer.wait_until_finished()
      if not (self.directory / str(step)).is_dir():
        raise OSError("the step directory did not appear")
    except Exception as error:
      self._failed(step, error)
      return False
    self._failures, self.last_saved = 0, step
    if is_first():
      self._drop_old()
    return True

  def save_now(self, step: int, state: PyTree, data_state: dict, meta: dict) -> None:
    """Saves a step and waits, again and again until it is saved; arguments as of `save`.

    Raises:
      NonFiniteError, StorageError: as `save`.
    """
    while not (self.save(step, state, data_state, meta) and self.wait()):
      time.sleep(0.5)

  def save_pieces(
    self,
    step: int,
    arrays: Sequence[PiecedArray],
    pieces: Iterable[Callable[[], Sequence[Piece]]],
    data_state: dict,
    meta: dict,
    ready: Callable[[], None] = lambda: None,
    *,
    sync: bool = False,
  ) -> None:
    """Saves a step whose arrays come in pieces; the host holds few pieces at a time.

    For one process; the step appears when all of it is written.

    Args:
      step: optimizer steps done.
      arrays: those of the state; the names of weights begin with `params.`.
      pieces: functions that make one or several pieces each, and together all pieces of the
        arrays, in any order; several threads call them at once.
      data_state, meta: as for `save`.
      ready: called when all arrays are written and finite, before the step's description is
        written and the step appears.
      sync: whether arrays are written with fsync (`scmoe.training.pieces`).

    Raises:
      NonFiniteError: an array is not finite; the step does not appear.
      StorageError: writing failed, an array got too few or too many pieces, or a function of
        `pieces` raised an exception that is no `ScmoeError`. A `ScmoeError` of such a function, and
        every exception of `ready`, is passed on. In all these cases the step does not appear.
    """
    place = self.directory / f"{step}.orbax-checkpoint-tmp-pieces"
    failed = self._begins(step)
    try:
      with _storage(failed):
        self._clear_destination(step)
        place.mkdir()
        found = write_pieces(place / PIECES, arrays, pieces, sync=sync)
      refuse_non_finite({name: own.finite for name, own in found.items()})
      ready()
      described = {
        array.name: description_of(array, found[array.name].fingerprint) | {"item": PIECES}
        for array in arrays
      }
      data, meta = records(step, described, data_state, meta)
      with _storage(failed):
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as writer:
          writer.save(place / "data", args=ocp.args.JsonSave(data))
          writer.save(place / "meta", args=ocp.args.JsonSave(meta))
        os.rename(place, self.directory / str(step))
    finally:
      shutil.rmtree(place, ignore_errors=True)
    self.last_saved = step

  def close(self) -> None:
    """Waits for a save under way and ends the writer's threads.

    Raises:
      StorageError: as `wait`.
    """
    try:
      self.wait()
    finally:
      # orbax raises again what failed in a save, and `wait` or `save` have said that already.
      with contextlib.suppress(Exception):
        self._writer.close()

  def steps(self) -> list[int]:
    """Numbers of the steps that look complete, oldest first; nothing in them is read."""
    return list_steps(self.directory)

  def restore_latest_valid(
    self,
    abstract: PyTree,
    check: Callable[[dict], None] | None = None,
    meanwhile: Callable[[dict], None] | None = None,
  ) -> Restored | None:
    """Restores the newest undamaged step; None if there is no step, not even a damaged one.

    A damaged step is renamed to `N.bad-<time>` with a warning, and the one before it is tried.

    Args:
      abstract: pytree as of `scmoe.training.restore.load`, with the shardings to restore to. If the
        step holds weights only (`WEIGHTS_ONLY` in its meta), `Restored.state` is a dictionary
        instead: `params`, and the part of `router` that is stored.
      check: called with the stored meta before a step's arrays are read; may raise to refuse.
      meanwhile: called with the stored meta in this thread while another reads the arrays. Not
        called with several processes: both threads may send messages to the others, which must have
        the same order on all processes.

    Raises:
      CheckpointError: all checkpoints are damaged, or a later version of scmoe wrote one that is
        tried.
      ConfigError: a stored name, shape or type does not fit `abstract` (`misfit`), or another
        number of processes wrote the step and their positions in the data differ.
      StorageError: the file of an `InFile` in `abstract` cannot be made or written, or a damaged
        step cannot be renamed.
      Exception: those of `check` and `meanwhile`, and errors of too little memory and of missing
        permission.
    """
    _warn_of_junk(self.directory)
    for step in reversed(self.steps()):
      restored = self._try(step, abstract, check, meanwhile)
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

  def _try(
    self,
    step: int,
    abstract: PyTree,
    check: Callable[[dict], None] | None,
    meanwhile: Callable[[dict], None] | None,
  ) -> Restored | None:
    """Restores one step; None, the same on all processes, if it was damaged and set aside."""
    place, problem, restored = self.directory / str(step), "", None
    try:
      meta, data = read_description(place)
      # Without this test a copy of step 100's folder with the name 200 would pass for step 200.
      if meta["step"] != step:
        raise Damaged(f"it is a copy of step {meta['step']}")
      if check is not None:
        check(meta)
      partial = bool(meta.get(WEIGHTS_ONLY))
      with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(load, place, held_part(abstract, meta), meta, partial=partial)
        if meanwhile is not None and jax.process_count() == 1:
          meanwhile(meta)
        state = reading.result()
      restored = Restored(step, state, _own(data["processes"]), meta)
    except Damaged as error:
      problem = str(error)
    if not all_agree(restored is not None):
      self._set_aside(place, "bad", problem or "another process found it damaged")
      return None
    return restored

  def _prepare_directory(self) -> None:
    """Creates the directory and removes the half-written or half-removed steps of killed runs.

    Raises:
      StorageError: it cannot be made or listed, or such a step cannot be removed.
    """
    try:
      self.directory.mkdir(parents=True, exist_ok=True)
      for path in self._left_over():
        shutil.rmtree(path)
    except OSError as error:
      raise StorageError(f"{self.directory} cannot be written: {error.strerror}") from None

  def _left_over(self) -> list[Path]:
    """The folders of steps that are half written or half removed."""
    found = (path for path in self.directory.iterdir() if _LEFT_OVER.fullmatch(path.name))
    return [path for path in found if path.is_dir() and not path.is_symlink()]

  def _clear_destination(self, step: int) -> None:
    """Renames a file, folder or link that has the step's name to `N.ignored-<time>`.

    All processes call it, and process 0 renames.
    """
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
    try:
      os.rename(place, place.with_name(name))
    except OSError as error:
      raise StorageError(
        f"checkpoint {place} cannot be renamed ({error.strerror}); make its folder writable"
      ) from None
    return name

  def _begins(self, step: int) -> str:
    """How a line about a failed save begins."""
    return f"saving step {step} to {self.directory} failed"

  def _failed(self, step: int, error: Exception) -> None:
    self._failures += 1
    free = 0.0
    with contextlib.suppress(OSError):  # the checkpoints' folder may have been removed
      free = shutil.disk_usage(self.directory).free / 2**30
    text = f"{self._begins(step)} ({free:.1f} GiB free): {in_one_line(error)}"
    if self._failures >= self._cfg.max_failures:
      raise StorageError(f"{text}; gave up after {self._failures} failures in a row") from None
    warn(f"{text}; training goes on, older checkpoints stay, the next save tries again")

  def _drop_old(self) -> None:
    """Removes all steps but the newest `checkpoint.keep` and the multiples of `keep_every`.

    A step is renamed before its files are removed, so that nobody sees half a step. `keep_every` 0:
    only the newest stay.
    """
    for step in self.steps()[: -self._cfg.keep]:
      if self._cfg.keep_every and step % self._cfg.keep_every == 0:
        continue
      trash = self.directory / f"{step}.trash"
      try:
        os.rename(self.directory / str(step), trash)
        shutil.rmtree(trash)
      except OSError as error:
        warn(f"old checkpoint {step} could not be removed: {error}")


def _split(leaves: dict[str, Any]) -> dict[str, dict[str, Any]]:
  own = lambda item: {name: x for name, x in leaves.items() if item_of(name) == item}
  return {item: own(item) for item in ("params", "state")}


def _arrays() -> ocp.PyTreeCheckpointHandler:
  # No compression: floats hardly shrink, and compressing them takes time.
  return ocp.PyTreeCheckpointHandler(use_compression=False)


@contextlib.contextmanager
def _storage(what: str) -> Iterator[None]:
  """Turns every `Exception` but a `ScmoeError` into a `StorageError` that begins with `what`."""
  try:
    yield
  except ScmoeError:
    raise
  except Exception as error:
    raise StorageError(f"{what}: {in_one_line(error)}") from None


def _items(leaves: dict[str, Any], data: dict, meta: dict) -> Any:
  arrays = {k: ocp.args.PyTreeSave(v) for k, v in _split(leaves).items() if v}
  return ocp.args.Composite(**arrays, data=ocp.args.JsonSave(data), meta=ocp.args.JsonSave(meta))


def _warn_of_junk(directory: Path) -> None:
  known = lambda p: _BAD.fullmatch(p.name) or ".ignored-" in p.name or ".orbax" in p.name
  for path in sorted(directory.iterdir()):
    if not (known(path) or (STEP.fullmatch(path.name) and is_step(path))) and is_first():
      warn(f"{path} is not a checkpoint (empty, a file, a link or an odd name); ignored")


def _own(states: list[dict]) -> dict:
  """This process's position in the data, from those of all processes that wrote the step.

  Raises:
    ConfigError: their number is not this run's, and their positions differ.
  """
  if len(states) == jax.process_count():
    return states[jax.process_index()]
  if states and all(state == states[0] for state in states):
    return states[0]
  raise ConfigError(
    f"the checkpoint's data positions are those of {len(states)} processes, this run has "
    f"{jax.process_count()}; start as many"
  )
