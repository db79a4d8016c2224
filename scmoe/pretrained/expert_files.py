"""Experts of an inference folder that stay in its files until a program needs them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from scmoe.base.errors import DataError
from scmoe.offload.memory import Int8, OnDisk
from scmoe.pretrained.folder import WRITTEN, read_into

SCALE = ".scale"  # ends the name of the tensor with an int8 tensor's scales
_READERS = 8  # threads that read experts


class Place(NamedTuple):
  """A tensor's place in the files: `size` bytes from byte `start` of `file`."""

  file: Path
  start: int
  size: int
  shape: tuple[int, ...]
  dtype: str


class Tensors(Protocol):
  """An inference folder as this module uses it."""

  @property
  def places(self) -> Mapping[str, Place]:
    """The place of each tensor, by name."""
    ...

  def read(self, name: str) -> np.ndarray:
    """Maps a tensor."""
    ...


@dataclasses.dataclass(frozen=True)
class Layers:
  """A parameter of the experts of all layers; indexing by layer maps that layer's tensor.

  Attributes:
    folder: of the tensors.
    names: of the tensors, layer by layer.
    dtype: the type that the model computes in.
  """

  folder: Tensors
  names: list[str]
  dtype: str

  @property
  def shape(self) -> tuple[int, ...]:
    """[L, E, ...]."""
    return (len(self.names), *self.folder.places[self.names[0]].shape)

  @property
  def ndim(self) -> int:
    """Number of dimensions, the layers' included."""
    return len(self.shape)

  def __getitem__(self, layer: int) -> Any:
    """One layer's experts, mapped: an array, or an `Int8` of two."""
    name = self.names[layer]
    value = self.folder.read(name)
    if self.folder.places[name].dtype != "I8":
      return value
    return Int8(value, self.folder.read(name + SCALE), self.dtype)

  def on_disk(self, layer: int) -> Any:
    """One layer's experts, which a program reads when it needs them.

    Returns:
      an `OnDisk`, or an `Int8` of two.
    """
    name = self.names[layer]
    following = self.names[layer + 1] if layer + 1 < len(self.names) else ""
    if self.folder.places[name].dtype != "I8":
      return self._read_by(name, following)
    scale = self._read_by(name + SCALE, "")
    return Int8(self._read_by(name, following), scale, self.dtype)

  def _read_by(self, name: str, following: str) -> OnDisk:
    _, _, _, (experts, *matrix), kind = self.folder.places[name]
    number = np.arange(experts, dtype=np.int32)[:, None, None]
    reader = ExpertReader(self.folder, name, following)
    return OnDisk(number, reader, tuple(matrix), WRITTEN[kind].name)  # pyright: ignore


class ExpertReader:
  """Reads experts of one layer's tensor, each by a thread of its own.

  Only a ring (`scmoe.offload.ring`) asks for all experts of a layer at once, and it asks for the
  next layer's after that. So the system is then told to read the next tensor ahead.

  Args:
    folder: of the tensor.
    name: of the tensor.
    following: name of the next layer's tensor, or "".
  """

  def __init__(self, folder: Tensors, name: str, following: str):
    self._folder, self._name, self._following = folder, name, following

  def __call__(self, number: Any) -> np.ndarray:
    """The matrices [n, M, N] of n experts.

    Args:
      number: int [n], their indices.

    Raises:
      DataError: the file cannot be read, or is too short.
    """
    wanted = np.asarray(number)
    file, start, size, (experts, *matrix), kind = self._folder.places[self._name]
    found, each = np.empty((len(wanted), *matrix), WRITTEN[kind]), size // experts
    with file.open("rb", buffering=0) as opened:

      def read(i: int) -> None:
        try:
          read_into(found[i], opened, start + int(wanted[i]) * each)
        except OSError as error:
          raise DataError(f"{file}: {self._name} cannot be read: {error}") from None

      if len(wanted) == 1:
        read(0)
        return found
      if len(wanted) == experts and self._following:
        self._announce()
      with ThreadPoolExecutor(min(_READERS, len(wanted)), "experts") as pool:
        list(pool.map(read, range(len(wanted))))
    return found

  def _announce(self) -> None:
    file, start, size, _, _ = self._folder.places[self._following]
    with file.open("rb", buffering=0) as opened:
      os.posix_fadvise(opened.fileno(), start, size, os.POSIX_FADV_WILLNEED)
