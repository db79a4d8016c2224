"""Reads experts from the files of an inference folder, as late as a program needs them."""

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

SCALE = ".scale"  # suffix of the tensor that holds the scales of an int8 tensor
_READERS = 8  # threads that read experts


class Place(NamedTuple):
  """The bytes of a tensor: `size` bytes from byte `start` of `file`."""

  file: Path
  start: int
  size: int
  shape: tuple[int, ...]
  dtype: str


class Tensors(Protocol):
  """The part of `InferenceFolder` that this module uses."""

  @property
  def places(self) -> Mapping[str, Place]:
    """The place of each tensor, by name."""
    ...

  def read(self, name: str) -> np.ndarray:
    """Maps a tensor into memory."""
    ...


@dataclasses.dataclass(frozen=True)
class Layers:
  """One parameter of the experts of all L layers; `layers[i]` maps the tensor of layer i.

  Attributes:
    folder: the inference folder.
    names: the tensors' names, one for each layer.
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
    """Number of dimensions, including the one over layers."""
    return len(self.shape)

  def __getitem__(self, layer: int) -> Any:
    """One layer's experts [E, ...], mapped: an array, or an `Int8` with values and scales."""
    name = self.names[layer]
    value = self.folder.read(name)
    if self.folder.places[name].dtype != "I8":
      return value
    return Int8(value, self.folder.read(name + SCALE), self.dtype)

  def on_disk(self, layer: int) -> Any:
    """One layer's experts as values that a program reads from disk when it needs them.

    Returns:
      an `OnDisk`, or an `Int8` whose values and scales are each an `OnDisk`.
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
  """Reads experts of one layer's tensor, several at a time by a pool of threads.

  Only `scmoe.offload.ring` asks for all experts of a layer at once, and it asks for those of the
  next layer after that. So such a call also tells the operating system to read the next tensor
  ahead.

  Args:
    folder: the inference folder.
    name: the tensor's name.
    following: the name of the next layer's tensor, or "".
  """

  def __init__(self, folder: Tensors, name: str, following: str):
    self._folder, self._name, self._following = folder, name, following

  def __call__(self, number: Any) -> np.ndarray:
    """The matrices [n, M, N] of n experts.

    Args:
      number: int [n], the indices of the experts.

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
