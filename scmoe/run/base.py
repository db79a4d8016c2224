"""The base of a run that trains adapters (`lora.rank`): copied into the run's folder once.

The adapters mean nothing without the model that they adapt, and the folder in `train.init_from` may
move, or go on training and drop the step. So the first start writes that model's weights to
WORKDIR/base, as a checkpoint of weights alone, in the types in which they were stored. The run's
own checkpoints hold the adapters. `lora.base` of the stored configuration is the digest of these
weights: adapters of another model are refused.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from scmoe.base.errors import CheckpointError, ConfigError
from scmoe.base.paths import at_home
from scmoe.base.sizes import number
from scmoe.models.low_rank import LoraConfig
from scmoe.pretrained.stream import flat, leaves_of, nested
from scmoe.run import build
from scmoe.run.adapters import BASE, BuiltAdapters, base_of, digest_of_base, restore_weights
from scmoe.run.config import RunConfig, to_dict
from scmoe.run.opened import Stored, open_named
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.description import WEIGHTS_ONLY
from scmoe.training.distributed import OnFirst, all_agree, barrier, is_first
from scmoe.training.options import CheckpointConfig
from scmoe.training.restore import (
  FOLDER,
  list_steps,
  read_meta,
  restore_part,
  restore_stored,
  with_newest,
)
from scmoe.training.resume import other_architecture
from scmoe.training.step import TrainState
from scmoe.training.workdir import RunLock, prepare_workdir

PyTree = Any
_COPIED = "copied_for_adapters"  # true in the meta of a base's one step, which `_copy` writes
_UNFINISHED = "0.orbax-checkpoint-tmp"  # how the name of that step begins until it is complete


def with_base(run: RunConfig, workdir: Path) -> RunConfig:
  """The run with `lora.base` filled in; a new run's base is copied into its folder first.

  A run without adapters stays as it is.

  Args:
    run: resolved.
    workdir: its folder.

  Raises:
    ConfigError: `train.init_from` is the run itself or another architecture; the folder, or its
      subfolder `base`, holds something else; or `lora.base` is the digest of another model.
    CheckpointError: there is no checkpoint in `train.init_from`.
    StorageError: the folder cannot be written.
  """
  if not run.lora.rank:
    return run
  source = run.train.init_from
  if not list_steps(Path(workdir) / FOLDER) and Path(source).resolve() != Path(workdir).resolve():
    _opened(run)  # refused before a folder is made
  workdir = prepare_workdir(workdir)
  if resumed := bool(list_steps(workdir / FOLDER)):
    if not list_steps(workdir / BASE / FOLDER):
      raise ConfigError(
        f"lora.rank={run.lora.rank}: {workdir} holds checkpoints and no {BASE}: a run that trains "
        "all its parameters, or one whose base was removed; use another workdir"
      )
    found = digest_of_base(workdir)  # a resumed run compares it with its checkpoint's `lora.base`
    place = str(workdir / BASE)
  else:
    with OnFirst(RunLock(workdir)):
      _copy(run, workdir / BASE)
    found = digest_of_base(workdir)
    place = f"train.init_from={run.train.init_from!r}"
  if run.lora.base not in ("", found):
    if not resumed:
      _removed(workdir / BASE)
    raise ConfigError(
      f"lora.base={run.lora.base!r} is not the model in {place}, which is {found!r}; leave "
      "lora.base empty, or give the other model"
    )
  return dataclasses.replace(run, lora=dataclasses.replace(run.lora, base=found))


def _opened(run: RunConfig) -> Stored:
  """The run in `train.init_from`.

  Raises:
    CheckpointError: there is no checkpoint in it.
    ConfigError: it is a model of another architecture.
  """
  folder = run.train.init_from
  stored = open_named("train.init_from", folder)
  if other := other_architecture(to_dict(stored.run), to_dict(run)):
    raise ConfigError(
      f"train.init_from={folder!r} is another model than the one that lora.rank={run.lora.rank} "
      f"is to adapt: {other}; give the model and router sections of its config.json"
    )
  return stored


def _copy(run: RunConfig, place: Path) -> None:
  """Writes the model in `train.init_from` to `place`, as a checkpoint of weights alone.

  It replaces an earlier copy, which a start that ended before its first checkpoint may have left.

  Raises:
    ConfigError: `train.init_from` is the run itself, or a model of another architecture; or
      something that is no such copy lies in `place`.
  """
  folder, source = run.train.init_from, at_home(run.train.init_from).resolve()
  if source == place.parent.resolve():
    raise ConfigError(f"train.init_from={folder!r} is the run itself; give another run's folder")
  if source.is_relative_to(place.resolve()):
    raise ConfigError(
      f"train.init_from={folder!r} lies in {place}, where this run keeps its own copy of that "
      "model; use another workdir"
    )
  if not all_agree(_may_be_replaced(place)):
    raise ConfigError(
      f"{place} exists and is no copy that a run with adapters made; the run would replace it by a "
      f"copy of train.init_from={folder!r}: use another workdir, or move that folder away"
    )
  plain = build.build(run)

  def read() -> tuple[Stored, dict[str, PyTree]]:
    stored = _opened(run)
    return stored, _weights(folder, stored, plain)

  stored, state = with_newest(read)
  _removed(place)
  alone = dataclasses.replace(stored.run, lora=LoraConfig())
  meta = {
    "config": to_dict(alone),
    "data_fingerprint": dict(stored.data),
    "mesh": dict(plain.mesh.shape),
    "processes": jax.process_count(),
    "tokens": 0,
    WEIGHTS_ONLY: True,
    _COPIED: True,
  }
  keeper = Checkpointer(place, CheckpointConfig(async_save=False))
  try:
    keeper.save_now(0, state, {}, meta)
  finally:
    keeper.close()


def _may_be_replaced(place: Path) -> bool:
  """Whether nothing lies in `place`, or only what `_copy` wrote: a whole copy or a part of one."""
  if not os.path.lexists(place):
    return True
  real = lambda path: path.is_dir() and not path.is_symlink()
  if not real(place) or any(p.name != FOLDER or not real(p) for p in place.iterdir()):
    return False
  whole = list_steps(place / FOLDER)
  parts = [p.name for p in (place / FOLDER).glob("*") if p.name not in map(str, whole)]
  try:
    copied = all(read_meta(place, step).get(_COPIED) for step in whole)
  except CheckpointError:  # a description cannot be read
    return False
  return copied and all(name.startswith(_UNFINISHED) for name in parts)


def _removed(place: Path) -> None:
  if is_first():
    shutil.rmtree(place, ignore_errors=True)
  barrier(f"base-removed-{place.parent.name}")


def _weights(folder: str, stored: Stored, plain: build.Built) -> dict[str, PyTree]:
  """Parameters and router state of a stored run, on the mesh of `plain`.

  They have the stored types. If that run trained adapters itself, they are merged, in float32.
  """
  if stored.run.lora.rank:
    wanted = {"params": plain.shapes, "router": plain.router_shapes}
    return restore_weights(folder, stored.run, {k: x for k, x in wanted.items() if x}, stored.step)
  found = restore_stored(folder, leaves_of(plain), stored.step)
  if missing := sorted(set(flat({"params": plain.shapes})) - set(found)):
    raise CheckpointError(f"{folder} has no {missing[0]}; its checkpoint has another configuration")
  router = {name: found[f"router.{name}"] for name in _stored_router(plain, found)}
  state = {"params": nested(found, {"params": plain.shapes})["params"]}
  return state | ({"router": router} if router else {})


def _stored_router(built: build.Built, leaves: Any) -> list[str]:
  return [name for name in built.router_shapes if f"router.{name}" in leaves]


def load_base(built: build.Built, workdir: Path) -> dict[str, PyTree]:
  """`params` of a run's base in the compute type, and a `router` state.

  Parts of the router state that the base does not store are fresh.

  Raises:
    CheckpointError: the base is damaged.
    ConfigError: it is not the model that `lora.base` names, or a stored shape or type is not that
      of the model.
  """
  place = base_of(workdir, built.run)
  meta = read_meta(place)
  shapes = built.router_shapes
  wanted = {"params": built.shapes}
  if names := _stored_router(built, meta["leaves"]):
    wanted["router"] = {name: shapes[name] for name in names}
  state = restore_part(place, wanted)
  places = jax.tree.map(lambda s: s.sharding, (built.shapes, shapes))
  cast = jax.jit(built.objective.cast, out_shardings=places[0], donate_argnums=0)
  fresh = jax.jit(lambda: built.init(jax.random.key(0))[1], out_shardings=places[1])
  return {"params": cast(state["params"]), "router": fresh() | state.get("router", {})}


def arrays_given(
  built: build.Built, workdir: Path, teacher: Callable[[], PyTree] | None
) -> Callable[[], PyTree] | None:
  """A function that loads `TrainState.teacher` of a run: base, teacher, or both; None if neither.

  Args:
    built: the run.
    workdir: its folder.
    teacher: loads the teacher's arrays; None without one.
  """
  if not isinstance(built, BuiltAdapters):
    return teacher

  def load() -> PyTree:
    given = {"base": load_base(built, workdir)}
    return given if teacher is None else given | {"second": teacher()}

  return load


def router_of_base(built: BuiltAdapters, workdir: Path) -> Callable[[TrainState], TrainState]:
  """A function that gives a new run, whose adapters are fresh, the router state of its base."""

  def start(state: TrainState) -> TrainState:
    names = _stored_router(built, read_meta(workdir / BASE)["leaves"])
    if not names:
      return state
    wanted = {"router": {name: built.router_shapes[name] for name in names}}
    found = restore_part(workdir / BASE, wanted)["router"]
    return dataclasses.replace(state, router=state.router | found)

  return start


def header_line(built: BuiltAdapters) -> str:
  """The adapters' line in the header of a run."""
  lora = built.run.lora
  trained = sum(x.size for x in jax.tree.leaves(built.adapters.shapes))
  return (
    f"adapters     rank {lora.rank}, alpha {lora.alpha:g} on {', '.join(lora.wanted)}: "
    f"{number(trained)} parameters are trained; {built.run.train.init_from} stays as it is"
  )
