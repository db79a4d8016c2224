"""Reads checkpoints: the steps of a directory, and the arrays of a step, checked by fingerprints.

Orbax reads the arrays. It does not notice a flipped bit, and it casts and pads silently. So `load`
compares names, shapes and types before it reads, and every read of arrays ends with a comparison of
the fingerprints.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from scmoe.base.errors import CheckpointError, ConfigError
from scmoe.base.output import warn
from scmoe.training.description import (
  Damaged,
  check_access,
  flatten,
  item_of,
  misfit,
  read_description,
)
from scmoe.training.filed import is_in_file
from scmoe.training.fingerprint import survey
from scmoe.training.kept import filed
from scmoe.training.quiet import in_one_line, quiet_libraries

PyTree = Any
FOLDER = "checkpoints"
STEP = re.compile(r"0|[1-9][0-9]{0,17}")
ATTEMPTS = 10  # most attempts to read the newest step while a run removes old steps
T = TypeVar("T")


class StepGone(CheckpointError):
  """The requested step does not exist (a run removes its old steps)."""


def list_steps(directory: Path) -> list[int]:
  """Steps of a checkpoint directory, oldest first.

  A step is a real directory with a plain number as its name and something in it; symlinks, files,
  empty directories and other names are ignored.
  """
  if not directory.is_dir():
    return []
  return sorted(int(p.name) for p in directory.iterdir() if STEP.fullmatch(p.name) and is_step(p))


def is_step(path: Path) -> bool:
  """True if `path` is a directory with something in it, and no symlink."""
  return path.is_dir() and not path.is_symlink() and any(path.iterdir())


def read_meta(workdir: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
  """Stored configuration and description of a step (None: the newest readable); reads JSON only.

  Raises:
    StepGone: there is no such step.
    CheckpointError: it is damaged, there is no readable one, or a later version of scmoe wrote it.
    PermissionError: this process may not read a file of the step.
  """
  return _of_step(workdir, step, lambda place: read_description(place)[0])


def _of_step(workdir: str | os.PathLike[str], step: int | None, read: Callable[[Path], T]) -> T:
  """`read(place)` of a step; with `step` None, of the newest step where that raises no `Damaged`.

  Raises:
    StepGone: `step` is not there.
    CheckpointError: it is damaged, or there is none that can be read.
    Exception: everything but `Damaged` that `read` raises.
  """
  directory, tried = Path(workdir).absolute() / FOLDER, set()
  while True:
    # Steps are listed anew each time, since a run may remove some meanwhile.
    steps = list_steps(directory) if step is None else [step]
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
  """Calls `attempt()`, which reads a step; again if a run has removed the newest step meanwhile.

  A run that trains meanwhile keeps few steps (`checkpoint.keep`). It may remove the chosen step
  during a slow read; a newer one then exists.

  Args:
    attempt: reads a step.
    step: the step that the user named, tried once; None: the newest.

  Raises:
    StepGone: the step that the user named is not there, or the newest was removed in each of
      `ATTEMPTS` attempts.
    Exception: what else `attempt` raises.
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
  """Reads and verifies the parameters only, on the mesh of `abstract_params`. Changes no file.

  Args:
    workdir: of the run.
    abstract_params: pytree of ShapeDtypeStruct with shardings, like the `params` of the state.
    step: which one; None: the newest undamaged one.

  Raises:
    CheckpointError: no such step, no valid one, or a later version of scmoe wrote it.
    ConfigError: a name of `abstract_params` is not stored, or a stored shape or type does not fit
      (`misfit`).
    Exception: those that `load` passes on.
  """
  return restore_part(workdir, {"params": abstract_params}, step)["params"]


def restore_part(
  workdir: str | os.PathLike[str], abstract: dict[str, PyTree], step: int | None = None
) -> dict[str, PyTree]:
  """Reads and verifies some fields of the state, e.g. `{"params": ..., "router": ...}`.

  Args:
    workdir: of the run.
    abstract: pytrees of ShapeDtypeStruct with shardings, by field.
    step: which one; None: the newest undamaged one.

  Raises:
    CheckpointError, ConfigError, Exception: as `restore_params`.
  """
  read = lambda place: load(place, abstract, read_description(place)[0], partial=True)
  return _of_step(workdir, step, read)


def restore_on_host(
  workdir: str | os.PathLike[str],
  abstract: PyTree,
  step: int | None = None,
  *,
  part: str = "params",
) -> PyTree:
  """Parameters as NumPy arrays, read one leaf at a time: a device holds at most one of them.

  Args:
    workdir: of the run.
    abstract: of the parameters, dictionaries of `jax.ShapeDtypeStruct` with shardings.
    step: which one; None: for each leaf, the newest undamaged one.
    part: the field of the state: `params` (the weights) or `average` (their average).

  Raises:
    CheckpointError, ConfigError, Exception: as `restore_params`.
  """

  def read(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
    alone: Any = leaf
    for key in reversed(path):
      alone = {key.key: alone}
    found = restore_part(workdir, {part: alone}, step)[part]
    return np.asarray(jax.tree.leaves(found)[0])

  return jax.tree_util.tree_map_with_path(read, abstract)


def restore_stored(
  workdir: str | os.PathLike[str], abstract: dict[str, Any], step: int
) -> dict[str, jax.Array]:
  """Reads and verifies leaves by dotted name, each in the type in which it was written.

  Args:
    workdir: of the run.
    abstract: ShapeDtypeStruct with shardings by dotted name; their types are ignored. Names that
      the step does not hold are left out of the result.
    step: which one.

  Raises:
    CheckpointError: there is no such step, it is damaged, or a later version of scmoe wrote it.
    Exception: those that `load` passes on.
  """

  def read(place: Path) -> dict[str, jax.Array]:
    meta = read_description(place)[0]
    there = {name: leaf for name, leaf in abstract.items() if name in meta["leaves"]}
    return _read_verified(place, there, meta)

  return _of_step(workdir, step, read)


def _nothing_there(directory: Path, step: int | None) -> str:
  wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
  workdir = directory.parent
  if not workdir.is_dir():
    what = "is a file, not a folder" if workdir.exists() else "does not exist"
    return f"no valid {wanted} in {directory}: {workdir} {what}; give the folder of a run"
  have = ", ".join(map(str, list_steps(directory)))
  remedy = "" if have else "; give the folder of a run that has saved a step"
  return f"no valid {wanted} in {directory}; steps there: {have or 'none'}{remedy}"


def load(place: Path, abstract: PyTree, meta: dict, *, partial: bool = False) -> PyTree:
  """Reads and verifies the arrays of one step, and converts them to the types of `abstract`.

  Args:
    place: directory of the step.
    abstract: pytree of ShapeDtypeStruct with shardings. Where an `InFile` is in place of one, the
      array is written to that file and becomes a `Pieced`; such arrays are read one after the
      other.
    meta: of the step.
    partial: whether `abstract` may leave out leaves that the step holds.

  Raises:
    Damaged: a file cannot be read, or a leaf differs from what was written.
    PermissionError: this process may not open a file of the step, and a read failed.
    Exception: errors of too little memory, as XLA or Python raise them.
    ConfigError: the step's leaves do not fit the names, shapes and types of `abstract` (`misfit`).
    StorageError: the file of an `InFile` cannot be made or written.
  """
  wanted = flatten(abstract)
  # Shapes and types are compared before anything is read: orbax would cast or pad silently.
  if problem := misfit(abstract, meta["leaves"], partial=partial):
    raise ConfigError(
      f"checkpoint {place} {problem}; resume with the configuration it was written with"
    )
  away = {name: leaf for name, leaf in wanted.items() if is_in_file(leaf)}
  leaves: dict[str, Any] = _read_verified(
    place, {n: x for n, x in wanted.items() if n not in away}, meta
  )
  for name, leaf in away.items():
    (one,) = _read_verified(place, {name: leaf}, meta).values()
    leaves[name] = filed(_typed(one, leaf.dtype), leaf)
  # One leaf is cast at a time: it exists in both types meanwhile.
  typed = [_typed(leaves.pop(name), leaf.dtype) for name, leaf in wanted.items()]
  return jax.tree.unflatten(jax.tree.structure(abstract), typed)


def _read_verified(place: Path, wanted: dict[str, Any], meta: dict) -> dict[str, jax.Array]:
  """Reads the arrays of `wanted`, each in the type in which it was written, and verifies them.

  Raises:
    Damaged: a file cannot be read, or an array's fingerprint is not the one in `meta`.
    PermissionError, Exception: as `_read_arrays`.
  """
  known = meta["leaves"]
  stored = {name: known[name].get("stored_as", name) for name in wanted}
  typed = {
    stored[name]: jax.ShapeDtypeStruct(x.shape, known[name]["dtype"], sharding=x.sharding)
    for name, x in wanted.items()
  }
  items = {stored[name]: known[name].get("item", item_of(name)) for name in wanted}
  arrays = _read_arrays(place, typed, items)
  leaves = {name: arrays[stored[name]] for name in wanted}
  prints, _ = survey(list(leaves.values()))
  for name, found in zip(leaves, prints):
    if found != known[name]["fingerprint"]:
      raise Damaged(f"{name} has fingerprint {found}, written was {known[name]['fingerprint']}")
  return leaves


def _typed(leaf: jax.Array, dtype: Any) -> jax.Array:
  return leaf if leaf.dtype == dtype else jax.jit(lambda x: x.astype(dtype), donate_argnums=0)(leaf)


def _read_arrays(
  place: Path, wanted: dict[str, Any], items: dict[str, str]
) -> dict[str, jax.Array]:
  """Reads leaves by name, in the order, types and shardings of `wanted`.

  Args:
    place: directory of the step.
    wanted: ShapeDtypeStruct with shardings.
    items: for each leaf's name, the step's subfolder that holds it.

  Raises:
    Damaged: they cannot be read.
    PermissionError: they cannot be read, and this process may not open a file of the step.
    Exception: errors of too little memory. As with missing permission, the files may be undamaged.
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
  # Several processes read the directories one by one, all in the same order.
  at_once = len(groups) if jax.process_count() == 1 else 1
  try:
    with ThreadPoolExecutor(max(at_once, 1)) as pool:
      for found in pool.map(read, sorted(groups)):
        leaves |= found
  except (MemoryError, PermissionError):
    raise
  except Exception as error:
    if "RESOURCE_EXHAUSTED" in str(error):  # memory was too small; the files may be undamaged
      raise
    check_access(place)
    raise Damaged(in_one_line(error)) from None
  return {name: leaves[name] for name in wanted}
