"""Reads a folder of low-rank adapters in PEFT's layout (`scmoe.pretrained.adapter_names`).

Everything that PEFT can add to an adapter and scmoe cannot compute is refused by name, and so is an
adapter of another model: its names or shapes are others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scmoe.base.errors import DataError
from scmoe.base.paths import expanded
from scmoe.models.config import ModelConfig
from scmoe.models.low_rank import A, B, LoraConfig
from scmoe.pretrained.adapter_names import (
  DOWN,
  ENDS,
  GATE_UP,
  HEAD,
  OTHER_EXPERTS,
  PREFIX,
  Place,
  places,
  single,
)
from scmoe.pretrained.folder import TYPES, read_into
from scmoe.pretrained.header import LIMITS, Described, read_header, read_object
from scmoe.pretrained.names import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DOTTED = re.compile(r"[\w.]+")
# Fields that change what an adapter computes, and their values that change nothing.
_PLAIN: dict[str, tuple[Any, ...]] = {
  "use_dora": (None, False),
  "use_qalora": (None, False),
  "fan_in_fan_out": (None, False),
  "lora_bias": (None, False),
  "bias": (None, "none"),
  "modules_to_save": (None, []),
  "layer_replication": (None, []),
  "trainable_token_indices": (None, [], {}),
  "alora_invocation_tokens": (None, []),
  # Other beginnings change the model's own matrices, too.
  "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}


class AdapterFolder:
  """Adapters on disk whose headers are checked and whose tensors are not yet read.

  Beside the layout that `described` and `Place` give, it reads adapters of single experts
  (`...experts.5.gate_proj.lora_A.weight`), as PEFT writes them with transformers 4.

  Attributes:
    path: the folder.
    held: the places of its adapters.
    lora: options whose adapters hold all of these: the largest rank, and alpha equal to it.

  Raises:
    DataError: a file is missing or damaged, the adapters are of a kind that is not read here, or
      not of this model; one line names the file and the field or tensor.
  """

  def __init__(self, path: str, family: str, model: ModelConfig, tensors: Sequence[Tensor]):
    self.path = expanded(path, "--adapter")
    if not self.path.is_dir():
      raise DataError(f"--adapter={path!r} is not a folder; give one with {CONFIG} and {WEIGHTS}")
    self._config = self._checked_config()
    self._file = self.path / WEIGHTS
    if not self._file.is_file():
      raise DataError(
        f"{self._file} is missing; only safetensors are read, which save_pretrained of PEFT writes"
      )
    self._entries = read_header(self._file)
    known = {place.module: place for place in self._known(family, model, tensors)}
    modules = dict.fromkeys(self._module(name) for name in self._entries)
    for module in modules:
      if family in OTHER_EXPERTS and ".experts" in module:
        raise DataError(
          f"{self._file} adapts {module}: PEFT has no settled layout for the experts of {family}; "
          "merge it with PEFT's merge_and_unload, and give the merged folder to --from"
        )
      if module not in known:
        raise self._other(f"it adapts {module}, which this {family} does not have")
    if not modules:
      raise DataError(f"{self._file} holds no adapter; give another folder")
    self.held = [known[module] for module in modules]
    experts = {bool(place.experts) for place in self.held if ".experts." in place.key}
    if len(experts) == 2:
      raise DataError(
        f"{self._file} adapts experts one by one and a layer's together; give one of the two"
      )
    self._scales = {place.module: self._scale(place) for place in self.held}
    rank = max(rank for rank, _ in self._scales.values())
    leaves = [leaf for place in self.held for leaf, _ in place.parts]
    words = ("head" if leaf == HEAD else leaf.split(".")[-2] for leaf in leaves)
    self.lora = LoraConfig(rank=rank, alpha=rank, targets=",".join(dict.fromkeys(words)))

  def factors(self, shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A and B of our parameters by dotted name, as float32; zeros where there is no adapter.

    Args:
      shapes: those of the `Adapters` of `lora`, by dotted name. B holds each adapter's alpha/r.

    Raises:
      DataError: the file cannot be read, or an adapter is not finite.
    """
    found = {name: np.zeros(x.shape, np.float32) for name, x in shapes.items()}
    with self._file.open("rb", buffering=0) as file:
      for place in self.held:
        rank, scale = self._scales[place.module]
        tensors = [self._read(file, name) for name in place.names]
        for (leaf, index), (a, b) in zip(place.parts, place.unpacked(*tensors)):
          whole_a, whole_b = found[f"{leaf}.{A}"][index], found[f"{leaf}.{B}"][index]
          whole_a[..., :rank] = a.reshape(*whole_a.shape[:-1], rank)
          # The rank comes before the dimensions of `out`, and after that of experts.
          experts = whole_b.shape[: bool(place.experts)]
          rows = (slice(None),) * len(experts) + (slice(rank),)
          outs = whole_b.shape[len(experts) + 1 :]
          with np.errstate(over="ignore"):  # who adds them to the model's weights finds infinity
            whole_b[rows] = scale * b.reshape(*experts, rank, *outs)
    return found

  def _known(self, family: str, model: ModelConfig, tensors: Sequence[Tensor]) -> Iterator[Place]:
    """All places where this folder can have an adapter."""
    wanted = self._config.get("target_parameters")
    words = [word for word in wanted if isinstance(word, str)] if isinstance(wanted, list) else []
    last = {word.rpartition(".")[2] for word in words}
    nested = [name for name in (GATE_UP, DOWN) if name in last]
    yield from places(family, model, tensors, nested)
    yield from (single(tensor) for tensor in tensors if len(tensor.index) == 2)

  def _checked_config(self) -> dict[str, Any]:
    """adapter_config.json, if all that it asks for is computed here.

    Raises:
      DataError: it cannot be read, or a field has another value.
    """
    path = self.path / CONFIG
    if not path.is_file():
      raise DataError(f"{path} is missing; a folder of adapters in PEFT's layout has one")
    found = read_object(path, LIMITS["config.json"])
    if (kind := found.get("peft_type")) != "LORA":
      raise DataError(f"{path}: peft_type={kind!r} is not read; give adapters of the type LORA")
    for name, values in _PLAIN.items():
      value = found.get(name)
      if not any(value is plain or (value == plain and type(value) is type(plain))
                 for plain in values):  # fmt: skip
        raise DataError(
          f"{path}: {name}={str(value)[:60]} asks for what adapters here do not have; merge these "
          "with PEFT's merge_and_unload, and give the merged folder to --from"
        )
    return found

  def _module(self, name: str) -> str:
    """The module of a tensor.

    Raises:
      DataError: the name is not that of an adapter, or its other half is missing.
    """
    end = next((end for end in ENDS if name.endswith(end)), "")
    if not end or not name.startswith(PREFIX):
      raise DataError(
        f"{self._file}: tensor {name[:200]} is neither A nor B of a low-rank adapter; merge it "
        "with PEFT's merge_and_unload, and give the merged folder to --from"
      )
    stem = name.removesuffix(end)
    if lost := next((stem + other for other in ENDS if stem + other not in self._entries), None):
      raise DataError(f"{self._file} is incomplete: it has {name[:200]} and no {lost[:200]}")
    return stem.removeprefix(PREFIX)

  def _scale(self, place: Place) -> tuple[int, float]:
    """Rank and alpha/r of an adapter, after checking the shapes of its tensors.

    Raises:
      DataError: a shape or type is another one, or rank or alpha are no numbers above 0.
    """
    rank = self._field("r", "rank_pattern", place)
    alpha = self._field("lora_alpha", "alpha_pattern", place)
    if type(rank) is not int or rank < 1:
      raise DataError(f"{self.path / CONFIG}: r={str(rank)[:40]} of {place.key} is no rank")
    if type(alpha) not in (int, float) or not 0 < alpha < 2.0**128:  # float32's largest number
      raise DataError(
        f"{self.path / CONFIG}: lora_alpha={str(alpha)[:40]} of {place.key} is no float32 above 0"
      )
    for name, shape in zip(place.names, place.shapes(rank)):
      entry = self._entries[name]
      if entry.shape != shape:
        raise self._other(
          f"{name} has shape {list(entry.shape)}; rank {rank} of this model has {list(shape)}"
          + ("; PEFT before 0.19.1 wrote A and B of experts the other way" if place.experts else "")
        )
      if entry.dtype not in TYPES:
        raise DataError(f"{self._file}: {name} is of type {entry.dtype}; known: {', '.join(TYPES)}")
    flag = self._config.get("use_rslora")
    if flag not in (None, True, False):
      raise DataError(
        f"{self.path / CONFIG}: use_rslora={str(flag)[:40]} is neither true nor false"
      )
    return rank, alpha / (math.sqrt(rank) if flag else rank)

  def _field(self, name: str, pattern: str, place: Place) -> Any:
    """A field, or what the first pattern that fits the place says instead.

    PEFT takes a pattern for a regular expression. Read here are the names of modules, whole or
    from a dot on, however they are escaped; they all mean that the place's name ends so.

    Raises:
      DataError: a pattern is another expression.
    """
    patterns = self._config.get(pattern) or {}
    if not isinstance(patterns, dict):
      raise DataError(f"{self.path / CONFIG}: {pattern} is no object of names and numbers")
    for key, value in patterns.items():
      plain = key.removeprefix("^").removeprefix(".*").removesuffix("$").replace("\\.", ".")
      plain = plain.removeprefix(".")
      if not _DOTTED.fullmatch(plain):
        raise DataError(
          f"{self.path / CONFIG}: {pattern} has {key[:80]!r}, a regular expression; give the names "
          "of modules"
        )
      if f".{place.key}".endswith(f".{plain}"):
        return value
    return self._config.get(name)

  def _read(self, file: Any, name: str) -> np.ndarray:
    entry: Described = self._entries[name]
    found = np.empty(entry.shape, TYPES[entry.dtype])
    try:
      read_into(found, file, entry.start)
    except OSError as error:
      raise DataError(f"{self._file}: {name} cannot be read: {error}") from None
    found = found.astype(np.float32)
    if not np.isfinite(found).all():
      raise DataError(f"{self._file}: {name} holds NaN or infinity; give adapters that are finite")
    return found

  def _other(self, why: str) -> DataError:
    return DataError(f"{self._file} is an adapter of another model: {why}")
