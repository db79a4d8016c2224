"""Opens a released model's folder and checks its headers, before any tensor is read."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from scmoe.data.config import DataConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.parallel.mesh import MeshConfig
from scmoe.pretrained.families import read_config
from scmoe.pretrained.folder import CONFIG, Folder
from scmoe.pretrained.names import Tensor
from scmoe.pretrained.stream import check_tensors, leaves_of, load, pieced, pieces, stored_types
from scmoe.run import build, placement
from scmoe.run.config import RunConfig
from scmoe.training.pieces import Piece, PiecedArray


class Released(NamedTuple):
  """A released model whose headers are checked and whose tensors are not yet read.

  Attributes:
    folder: its files.
    family: a key of `FAMILIES`.
    tensors: the tensors of its architecture.
    skipped: names of other tensors in the files, which scmoe ignores.
    built: its model on a mesh.
  """

  folder: Folder
  family: str
  tensors: list[Tensor]
  skipped: list[str]
  built: build.Built

  def leaves(self) -> Iterator[tuple[str, Array]]:
    """Yields (dotted name, array) of parameters and router state, on the mesh, in the files' types.

    Threads read the following ones while the caller works on one.
    """
    types = stored_types(self.folder, self.tensors)
    held = load(self.folder.read, types, self.tensors, leaves_of(self.built))
    begun = ((n, jnp.zeros(x.shape, x.dtype, device=x.sharding)) for n, x in self._begun.items())
    return itertools.chain(held, begun)

  def pieces(self) -> tuple[list[PiecedArray], Iterator[Callable[[], list[Piece]]]]:
    """Descriptions of parameters and router state for a checkpoint, and readers of their pieces.

    The readers are in the order of the files, so that the disk reads sequentially.
    """
    types, entries = stored_types(self.folder, self.tensors), self.folder.entries
    lies = lambda tensor: (str(entries[tensor.name].file), entries[tensor.name].start)
    ordered = sorted(self.tensors, key=lies)
    arrays = pieced(types, ordered, leaves_of(self.built))
    arrays += [PiecedArray(n, tuple(x.shape), x.dtype, 0) for n, x in self._begun.items()]
    zeros = lambda n, x: [Piece(n, (), np.zeros(x.shape, x.dtype))]
    begun = (functools.partial(zeros, *named) for named in self._begun.items())
    return arrays, itertools.chain(pieces(self.folder.read, types, ordered), begun)

  @property
  def _begun(self) -> dict[str, Any]:
    """Router state that no tensor holds, by name; in a fresh run all of it is zero.

    A folder has the balancing bias, not the state of the controller that moves it, nor the turn of
    several gates.
    """
    held = {tensor.leaf for tensor in self.tensors}
    state = leaves_of(self.built).items()
    return {n: x for n, x in state if n.startswith("router.") and n not in held}


def open_released(
  path: str, *, mesh: str = "", dtype: str = "", data: DataConfig | None = None
) -> Released:
  """Opens a folder and compares it with the architecture that its config.json asks for.

  Args:
    path: the folder.
    mesh: see `--mesh`.
    dtype: type to compute in; by default float32 for a folder in float32, else bfloat16.
    data: the run's `data` section; by default rows are at most as long as the model's context.

  Raises:
    DataError: a file or a tensor cannot be used.
    ConfigError: the mesh does not fit.
  """
  folder = Folder(path)
  family, model, router = read_config(folder.config, str(folder.path / CONFIG))
  listed, skipped = check_tensors(folder, family, model, router)
  folder.read_ahead()
  if not dtype:
    wide = all(folder.entries[t.name].dtype == "F32" for t in listed)
    dtype = "float32" if wide else "bfloat16"
  model = dataclasses.replace(model, dtype=dtype)
  data = data or DataConfig(seq_len=min(DataConfig.seq_len, model.context))
  name = "".join(c if c.isalnum() or c in "._-" else "-" for c in folder.path.resolve().name)
  run = RunConfig(
    name=name.strip("._-")[:64] or family,
    model=model,
    router=router,
    dispatch=DispatchConfig(transport="dropless"),  # released models drop no tokens
    data=data,
  )
  devices = jax.device_count()
  run = dataclasses.replace(run, mesh=_mesh(run, devices))
  run = placement.on_mesh(run, mesh) if mesh else run
  shards = run.mesh.batch_shards
  batch = -(-run.train.batch_size // shards) * shards
  run = dataclasses.replace(run, train=dataclasses.replace(run.train, batch_size=batch))
  run = run.resolve(num_devices=devices, vocab_size=0)
  return Released(folder, family, listed, skipped, build.build(run))


def _mesh(run: RunConfig, devices: int) -> MeshConfig:
  """Puts all devices on the expert axis, or uses one device if experts do not divide evenly."""
  fits = bool(run.model.wiring_rule.taps) and run.model.num_experts % devices == 0
  return MeshConfig(data=1, expert=devices if fits else 1)
