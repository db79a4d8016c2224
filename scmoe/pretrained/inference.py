"""Reads inference folders (`scmoe.pretrained.inference_files`) and checks them for damage."""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scmoe.base.errors import ConfigError, DataError
from scmoe.base.extensions import check_allowed
from scmoe.base.paths import expanded
from scmoe.base.stored import parse_json
from scmoe.data import Tokenizer
from scmoe.data.conventions import FILE as CONVENTIONS
from scmoe.data.conventions import conventions_from_json
from scmoe.data.tokenizers import TOKENIZER, ByteTokenizer, JsonTokenizer
from scmoe.pretrained.expert_files import SCALE, Layers, Place
from scmoe.pretrained.folder import CONFIG, WRITTEN
from scmoe.pretrained.header import LIMITS, read_object
from scmoe.pretrained.inference_files import DTYPES, FORMAT, MANIFEST, VERSION, parts
from scmoe.pretrained.names import Tensor
from scmoe.pretrained.stream import leaves_of, load, nested
from scmoe.run import build
from scmoe.run.config import RunConfig, from_dict, imports_of
from scmoe.training.schema import upgraded_config

_PIECE = 2**22  # bytes that a thread reads at once
_LAYERS = 2**14  # layers; a larger number would make a list of tensors that exhausts the memory


class InferenceFolder:
  """An inference folder on disk. Opening it reads only descriptions; `verify` reads all tensors.

  Args:
    path: the folder.
    allow_import: import paths that the user allows (`scmoe.base.extensions.check_allowed`).

  Attributes:
    run: the resolved configuration.
    dtype: type of the experts' matrices: bfloat16, float32 or int8.
    step: step of the checkpoint from which the folder was made.
    parts: the tensors by name.
    places: the file and bytes of each tensor, by name.

  Raises:
    DataError: a file is missing, truncated or malformed; one line names it.
    ConfigError: the configuration names code that the user has not allowed.
  """

  def __init__(self, path: str | os.PathLike[str], allow_import: Sequence[str] = ()):
    self.path = expanded(os.fspath(path), "model")
    if not self.path.is_dir():
      raise DataError(
        f"model={str(path)!r} is not a folder; make one with python -m scmoe.convert --workdir "
        "RUN --inference FOLDER"
      )
    if not (self.path / MANIFEST).exists():
      raise DataError(
        f"{self.path / MANIFEST} is missing: python -m scmoe.convert --workdir RUN --inference "
        "FOLDER writes such a folder from a run, and --from makes a run of a released model"
      )
    self._manifest = _manifest(self.path / MANIFEST)
    self.dtype, self.step = self._manifest["dtype"], self._manifest["step"]
    self._texts = {name: self._text(name, crc) for name, crc in self._manifest["files"].items()}
    where = str(self.path / CONFIG)
    if CONFIG not in self._texts:
      raise DataError(f"{self.path / MANIFEST} does not name {CONFIG}")
    run = _stored_run(self._texts[CONFIG], where)
    check_allowed(imports_of(run), allow_import, where)
    self.places = self._placed()
    self.run = _checked(run, where)
    self.parts = {part.name: part for part in parts(self.run, self.dtype)}
    self._check_tensors()
    self._maps: dict[Path, np.ndarray] = {}
    self._lock = threading.Lock()

  @property
  def size(self) -> int:
    """Bytes of all tensors."""
    return sum(place.size for place in self.places.values())

  @property
  def checksums(self) -> dict[str, int]:
    """CRC-32 of every tensor, by name."""
    return {name: tensor["crc32"] for name, tensor in self._manifest["tensors"].items()}

  @property
  def tokenizer(self) -> Tokenizer:
    """The tokenizer with which the run was trained.

    Raises:
      DataError: the tokenizer.json is missing or damaged.
    """
    data = self.run.data
    if data.tokenizer == "bytes":
      return ByteTokenizer()
    if TOKENIZER not in self._texts:
      raise DataError(f"{self.path} has no {TOKENIZER}, which data.tokenizer names")
    content, name = self._texts[TOKENIZER], str(self.path / TOKENIZER)
    conventions = None
    if CONVENTIONS in self._texts:
      conventions = conventions_from_json(self._texts[CONVENTIONS], str(self.path / CONVENTIONS))
      conventions.check(self.run.model.vocab_size, str(self.path / CONVENTIONS))
    options: dict[str, Any] = {"eos_token": data.eos_token, "conventions": conventions}
    return JsonTokenizer(content, name=name, **options)

  def verify(self, threads: int = 0) -> None:
    """Compares every tensor with its checksum; reads all files once, by several threads.

    Args:
      threads: number of threads; 0: one for each core.

    Raises:
      DataError: a tensor differs from its checksum; the line names it and its file.
    """
    by_size = sorted(self.places, key=lambda name: -self.places[name].size)
    pool = ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="verify")
    try:
      for _ in pool.map(self._verify, by_size):
        pass
    finally:
      pool.shutdown(cancel_futures=True)

  def read(self, name: str) -> np.ndarray:
    """Maps a tensor of the file into memory; the operating system reads each page at its first use.

    Args:
      name: a key of `parts`.

    Returns:
      a read-only array; bfloat16 is the type of `ml_dtypes`.
    """
    file, start, size, shape, dtype = self.places[name]
    with self._lock:
      if file not in self._maps:
        self._maps[file] = np.memmap(file, np.uint8, "r")
      mapped = self._maps[file]
    return np.asarray(mapped[start : start + size]).view(WRITTEN[dtype]).reshape(shape)

  def read_expert(self, layer: int, name: str, index: int) -> np.ndarray:
    """Maps one expert's part of a parameter.

    Args:
      layer: index of the MoE layer, counted among MoE layers from 0.
      name: the parameter's name below `experts`, e.g. "up"; "up.scale" for the scales of int8.
      index: the expert's index.
    """
    return self.read(f"stages.{layer}.moe.experts.{name}")[index]

  def whole(self, name: str) -> np.ndarray:
    """Reads a tensor; multiplies int8 by its scales and returns the type the model computes in."""
    part, value = self.parts[name], self.read(name)
    if part.dtype != "I8":
      return value
    scale, dtype = self.read(name + SCALE), np.dtype(self.run.model.dtype)
    out = np.empty(value.shape, dtype)
    for e in range(len(value)):  # one expert at a time, since float32 needs four times the bytes
      out[e] = (value[e].astype(np.float32) * scale[e]).astype(dtype)
    return out

  def load(self, built: build.Built) -> tuple[Any, Any]:
    """Loads parameters and router state onto a mesh, in the types of the folder.

    Args:
      built: the model of `run` on that mesh.
    """
    wanted, types = [], {}
    for part in self.parts.values():
      if part.scale:
        continue
      order, index = tuple(range(len(part.shape))), () if part.layer is None else (part.layer,)
      wanted.append(Tensor(part.name, part.shape, part.leaf, index, part.shape, order))
      computed = self.run.model.dtype if part.dtype == "I8" else WRITTEN[part.dtype]
      types[part.leaf] = np.dtype(computed)
    leaves = dict(load(self.whole, types, wanted, leaves_of(built)))
    state = nested(leaves, {"params": built.shapes, "router": built.router_shapes})
    return state["params"], state["router"]

  def mapped(self, built: build.Built) -> tuple[Any, Any]:
    """Parameters as mapped NumPy arrays, experts as `Layers`, and router state on the device.

    Args:
      built: the model of `run`.
    """
    leaves: dict[str, Any] = {}
    for part in self.parts.values():
      if part.scale:
        continue
      if part.layer is None:
        leaves[part.leaf] = self.read(part.name)
      else:
        leaves.setdefault(part.leaf, Layers(self, [], self.run.model.dtype)).names.append(part.name)
    state = nested(leaves, {"params": built.shapes, "router": built.router_shapes})
    return state["params"], jax.tree.map(jnp.asarray, state["router"])

  def _text(self, name: str, crc: int) -> str:
    path = self.path / name
    try:
      content = path.read_bytes()
    except FileNotFoundError:
      raise DataError(f"{path} is missing; {MANIFEST} names it") from None
    except OSError as error:
      raise DataError(f"{path} cannot be read: {error}") from None
    if zlib.crc32(content) != crc:
      raise DataError(f"{path} is damaged: its checksum differs; copy it again")
    try:
      return content.decode("utf-8")
    except UnicodeDecodeError as error:
      raise DataError(f"{path} cannot be read: {error}") from None

  def _placed(self) -> dict[str, Place]:
    files = sorted(self.path.glob("*.safetensors"))
    found: dict[str, Place] = {}
    for file in files:
      for name, place in _header(file).items():
        if name in found:
          raise DataError(f"{file} and {found[name].file} both have a tensor {name}")
        found[name] = place
    return found

  def _check_tensors(self) -> None:
    """Compares the model's tensors with those of the manifest and of the files.

    Raises:
      DataError: a tensor is missing or unknown, or has another shape or type.
    """
    stated = self._manifest["tensors"]
    for name, part in self.parts.items():
      place, said = self.places.get(name), stated.get(name)
      if place is None:
        raise DataError(f"{self.path}: tensor {name} is missing; copy all files of the folder")
      if said is None:
        raise DataError(f"{self.path / MANIFEST} has no checksum of {name}")
      there = (place.shape, place.dtype)
      if there != (part.shape, part.dtype):
        raise DataError(
          f"{place.file}: tensor {name} is {place.dtype}{list(place.shape)}; by {CONFIG} it is "
          f"{part.dtype}{list(part.shape)}"
        )
    if extra := sorted(set(self.places) - set(self.parts)):
      raise DataError(f"{self.places[extra[0]].file}: tensor {extra[0]} is not part of this model")

  def _verify(self, name: str) -> None:
    file, start, size, _, _ = self.places[name]
    crc, piece = 0, bytearray(min(_PIECE, max(size, 1)))
    try:
      with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        while size:
          count = opened.readinto(memoryview(piece)[: min(size, len(piece))])
          if not count:
            raise DataError(f"{file} is truncated: {name} is not complete")
          crc, size = zlib.crc32(memoryview(piece)[:count], crc), size - count
    except OSError as error:
      raise DataError(f"{file}: {name} cannot be read: {error}") from None
    if crc != self._manifest["tensors"][name]["crc32"]:
      raise DataError(f"{file} is damaged: the checksum of {name} differs; copy it again")


def _stored_run(text: str, where: str) -> RunConfig:
  """The run that a folder's config.json describes.

  Raises:
    DataError: the text is not a configuration of this version.
  """
  try:
    return from_dict(upgraded_config(parse_json(text, where)), where)
  except ConfigError as error:
    raise DataError(str(error)) from None


def _checked(run: RunConfig, where: str) -> RunConfig:
  """Checks the run's model and router, and returns the run.

  Raises:
    DataError: a field cannot be used. Folders that scmoe wrote do not have such fields.
  """
  try:
    run.model.resolve()
    run.router.check()
    if run.model.num_layers > _LAYERS:
      raise ConfigError(f"model.num_layers={run.model.num_layers} is too large; at most {_LAYERS}")
  except ConfigError as error:
    raise DataError(f"{where}: {error}") from None
  return run


def _manifest(path: Path) -> dict[str, Any]:
  found = read_object(path, LIMITS["index"])
  if found.get("format") != FORMAT:
    raise DataError(f"{path}: format {found.get('format')!r} is not {FORMAT!r}")
  if found.get("version") != VERSION:
    raise DataError(
      f"{path}: version {found.get('version')!r} is unknown, this scmoe reads {VERSION}; write the "
      "folder again with scmoe.convert"
    )
  kinds = {"dtype": str, "step": int, "files": dict, "tensors": dict}
  for name, kind in kinds.items():
    if not isinstance(found.get(name), kind):
      raise DataError(f"{path}: {name} is missing, or is not of type {kind.__name__}")
  if found["dtype"] not in DTYPES:
    raise DataError(f"{path}: dtype {found['dtype']!r} is unknown; one of: {', '.join(DTYPES)}")
  for name, tensor in found["tensors"].items():
    if not isinstance(tensor, dict) or not isinstance(tensor.get("crc32"), int):
      raise DataError(f"{path}: {name} has no crc32")
  if any(Path(name).name != name for name in found["files"]):
    raise DataError(f"{path}: `files` has a path with a folder; give names of files beside it")
  return found


def _header(file: Path) -> dict[str, Place]:
  """Reads a file's header; returns the place of each of its tensors.

  Raises:
    DataError: the header is damaged, or does not account for every byte of the file.
  """
  try:
    total = file.stat().st_size
    with file.open("rb") as opened:
      length = int.from_bytes(opened.read(8), "little")
      if not 0 < length <= min(total - 8, 2**28):
        raise ValueError("its header is cut off")
      header = parse_json(opened.read(length), "its header")
    header.pop("__metadata__", None)
    found, end = {}, 8 + length
    for name, tensor in header.items():
      shape, dtype = tuple(map(int, tensor["shape"])), tensor["dtype"]
      start, stop = (8 + length + int(offset) for offset in tensor["data_offsets"])
      size = math.prod(shape) * WRITTEN[dtype].itemsize
      if stop - start != size or start != end:
        raise ValueError(f"{name} has offsets that overlap, leave a gap or do not fit its shape")
      found[name], end = Place(file, start, size, shape, dtype), stop
  except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
          OverflowError) as error:  # fmt: skip
    raise DataError(f"{file} is damaged or incomplete: {error}") from None
  if end != total:
    raise DataError(f"{file} is truncated: it has {total} bytes of {end}" if end > total else
                    f"{file} has {total - end} bytes after its last tensor")  # fmt: skip
  return found
