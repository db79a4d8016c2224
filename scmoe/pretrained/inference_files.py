"""Inference folders: a run's weights without optimizer, with a checksum for each tensor.

  config.json         the resolved configuration of the run, with the type that it computes in
  inference.json      format and version, and for each tensor its shape, type and CRC-32
  *.safetensors       the tensors
  tokenizer.json      unless the tokenizer is `bytes`
  conventions.json    for a released model: how texts begin and end (`scmoe.data.conventions`)

A tensor has the dotted name of its parameter without `params.`. Routed experts have one tensor for
each MoE layer, `stages.3.moe.experts.up` [E, D, F], whose bytes are contiguous for each expert, so
that a program can map and read one expert of one layer by itself. All other parameters are stacked
over layers, as in checkpoints. In a folder of type int8, `stages.3.moe.experts.up` is int8, and
`stages.3.moe.experts.up.scale` [E, 1, F] holds its scales in float32
(`scmoe.offload.memory.Int8`). Norms, gates and mixing coefficients are float32 in every folder,
because the model uses them in float32.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from scmoe.base.errors import ConfigError
from scmoe.models.low_rank import LoraConfig
from scmoe.models.objective import cast_params
from scmoe.offload.memory import quantised
from scmoe.pretrained.expert_files import SCALE
from scmoe.pretrained.folder import CONFIG, WRITTEN, Planned, atomic_folder, write_weights
from scmoe.pretrained.stream import flat, slice_of
from scmoe.run.config import RunConfig, to_dict
from scmoe.run.model import build_model, router_shapes

MANIFEST = "inference.json"
FORMAT, VERSION = "scmoe-inference", 1
DTYPES = ("bfloat16", "float32", "int8")
_EXPERTS = re.compile(r"params\.stages\.(?P<rest>.*\bexperts\..*)")


class Part(NamedTuple):
  """A tensor of the folder, and the parameter of which it is a part.

  Attributes:
    name, shape, dtype: those in the files; the type is in the format's spelling, e.g. "BF16".
    leaf: dotted name of the parameter, beginning with `params` or `router`.
    layer: index of this slice in the parameter's leading dimension; None: the whole parameter.
    scale: whether the tensor holds the scales of the int8 tensor named `name` without ".scale".
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  leaf: str
  layer: int | None = None
  scale: bool = False


def parts(run: RunConfig, dtype: str) -> list[Part]:
  """All tensors of a run's inference folder, in the order of the files: experts last, by layer.

  Args:
    run: the resolved configuration.
    dtype: one of `DTYPES`.
  """
  graph, params = build_model(run, None)
  router = router_shapes(graph, params)
  if dtype != "float32":
    params = jax.eval_shape(lambda tree: cast_params(tree, "bfloat16"), params)
  words = {kind: word for word, kind in WRITTEN.items()}
  found, layers = [], {}
  for leaf, x in flat({"params": params, "router": router}).items():
    kind, expert = words[np.dtype(x.dtype)], _EXPERTS.fullmatch(leaf)
    if not expert:
      found.append(Part(leaf.removeprefix("params."), x.shape, kind, leaf))
      continue
    small = dtype == "int8" and len(x.shape) == 4
    for layer in range(x.shape[0]):
      own, name = layers.setdefault(layer, []), f"stages.{layer}.{expert['rest']}"
      own.append(Part(name, x.shape[1:], "I8" if small else kind, leaf, layer))
      if small:
        shape = (x.shape[1], 1, x.shape[3])
        own.append(Part(name + SCALE, shape, "F32", leaf, layer, scale=True))
  return [*found, *(part for layer in sorted(layers) for part in layers[layer])]


def inference_run(run: RunConfig, dtype: str) -> RunConfig:
  """The configuration that a folder of this type stores: without adapters, which are merged before.

  `model.dtype` becomes bfloat16; for a float32 folder it stays as it is.
  """
  run = dataclasses.replace(run, lora=LoraConfig())
  if dtype == "float32":
    return run
  return dataclasses.replace(run, model=dataclasses.replace(run.model, dtype="bfloat16"))


def check_dtype(dtype: str, run: RunConfig) -> str:
  """The inference folder's type: `dtype`; "" means bfloat16 for a bfloat16 run, else float32.

  Raises:
    ConfigError: `dtype` is not one of `DTYPES`.
  """
  if dtype and dtype not in DTYPES:
    raise ConfigError(f"--dtype={dtype!r} is unknown; with --inference one of: {', '.join(DTYPES)}")
  return dtype or ("bfloat16" if run.model.dtype == "bfloat16" else "float32")


def values_of(leaves: Mapping[str, Array], planned: Iterable[Part]) -> Iterator[np.ndarray]:
  """Yields the tensors' values in order; copies each from the devices only when it is requested.

  Args:
    leaves: parameters and router state by dotted name, in any type.
    planned: tensors of `parts`, in their order.
  """
  scale: Any = None
  for part in planned:
    if part.scale:  # comes after its matrices, whose quantisation computed it
      yield np.asarray(scale)
      continue
    leaf = leaves[part.leaf]
    value = leaf if part.layer is None else slice_of(leaf, (part.layer,))
    if part.dtype == "I8":
      packed = quantised(value, np.float32)
      value, scale = packed.value, packed.scale
    yield np.asarray(value).astype(WRITTEN[part.dtype], copy=False)


def write_folder(
  folder: Path,
  run: RunConfig,
  values: Iterable[np.ndarray],
  *,
  dtype: str,
  step: int = 0,
  tokenizer: Mapping[str, str] | None = None,
) -> list[Part]:
  """Writes an inference folder tensor by tensor, and gives it its name when it is complete.

  Args:
    folder: a path that does not exist, or an empty folder.
    run: the resolved result of `inference_run`.
    values: the values of the tensors of `parts(run, dtype)`, in that order.
    dtype: one of `DTYPES`.
    step: the checkpoint's step.
    tokenizer: the result of `JsonTokenizer.files`; None for the tokenizer `bytes`.

  Returns:
    the tensors.

  Raises:
    StorageError: the folder has files already, or cannot be written.
  """
  found, sums = parts(run, dtype), []

  def summed() -> Iterator[np.ndarray]:
    for value in values:
      value = np.ascontiguousarray(value).reshape(value.shape)
      sums.append(zlib.crc32(value.reshape(-1).view(np.uint8).data))
      yield value

  with atomic_folder(folder, "inference") as partial:
    planned = [Planned(part.name, part.shape, part.dtype) for part in found]
    write_weights(partial, planned, summed())
    texts = {CONFIG: json.dumps(to_dict(run), indent=2) + "\n"}
    texts |= tokenizer or {}
    for name, text in texts.items():
      (partial / name).write_bytes(text.encode("utf-8"))
    tensors = {
      part.name: {"shape": list(part.shape), "dtype": part.dtype, "crc32": crc}
      for part, crc in zip(found, sums, strict=True)
    }
    manifest = {
      "format": FORMAT, "version": VERSION, "dtype": dtype, "step": step,
      "files": {name: zlib.crc32(text.encode("utf-8")) for name, text in texts.items()},
      "tensors": tensors,
    }  # fmt: skip
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
  return found
