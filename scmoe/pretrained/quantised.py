"""Weights that a folder holds in eight bits with a scale for each block (DeepSeek-V3's fp8).

A matrix `X` [M, N] is F8_E4M3, and `X_scale_inv` [ceil(M / A), ceil(N / B)] holds one factor for
each block of A x B elements, `weight_block_size` in config.json. The weight is the product of the
two. Example with blocks of 128 x 128: a matrix [200, 300] has scales [2, 3], and the last block of
a row covers 44 columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from scmoe.base.errors import DataError

FP8 = "F8_E4M3"  # in the spelling of safetensors
ELEMENT = np.dtype(ml_dtypes.float8_e4m3fn)
SCALES = "_scale_inv"  # suffix of the tensor with a matrix's scales
READ_AS = "BF16"  # the type of the product, as in DeepSeek's own conversion
# Types of scales; powers of two may be stored as bare exponents.
SCALE_TYPES = {
  "F32": np.dtype(np.float32),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_KNOWN = "known: mxfp4, and fp8 with weight_block_size of two sizes, as DeepSeek-V3 is released"


class Blocks(NamedTuple):
  """Rows and columns of a block that has one scale."""

  rows: int
  columns: int

  def scales_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a matrix of this shape."""
    return -(-shape[0] // self.rows), -(-shape[1] // self.columns)


class Described(Protocol):
  """A tensor of a file, as far as this module reads it (`scmoe.pretrained.folder.Entry`)."""

  @property
  def file(self) -> Any:
    """The file that holds it."""
    ...

  @property
  def shape(self) -> tuple[int, ...]:
    """Its shape."""
    ...

  @property
  def dtype(self) -> str:
    """Its type, in the spelling of safetensors."""
    ...


def blocks_of(config: Mapping[str, Any], name: str) -> Blocks | None:
  """The blocks that a config.json's `quantization_config` states; None if there is none.

  None also for MXFP4, whose tensors say themselves how they are packed (`scmoe.pretrained.mxfp4`).
  How activations are to be rounded (`activation_scheme`) is not followed: weights become bfloat16
  and products are computed as those of any other model.

  Raises:
    DataError: the weights are quantised in another way; `name` is the file's name in the message.
  """
  said = config.get("quantization_config")
  if said is None or (isinstance(said, dict) and said.get("quant_method") == "mxfp4"):
    return None
  if not isinstance(said, dict) or said.get("quant_method") != "fp8":
    method = said.get("quant_method") if isinstance(said, dict) else said
    raise DataError(
      f"{name}: quantization_config has quant_method={str(method)[:40]!r}, which is not supported; "
      f"{_KNOWN}"
    )
  size: Any = said.get("weight_block_size")
  size = size if isinstance(size, list) and all(type(n) is int for n in size) else [size]
  if len(size) != 2 or min(size) < 1 or max(size) > 2**31:
    raise DataError(
      f"{name}: quantization_config has weight_block_size={str(said.get('weight_block_size'))[:40]}"
      f", which is not supported; {_KNOWN}"
    )
  if said.get("fmt") not in (None, "e4m3"):
    raise DataError(
      f"{name}: quantization_config has fmt={str(said['fmt'])[:40]!r}, which is not supported; "
      "known: 'e4m3'"
    )
  return Blocks(*size)


def check_scales(matrix: str, entries: Mapping[str, Described], blocks: Blocks | None) -> None:
  """Checks that a matrix in fp8 has scales that fit it.

  Raises:
    DataError: config.json states no blocks; the matrix has no scales, or not two dimensions; or the
      scales have another shape or type.
  """
  entry, name = entries[matrix], matrix + SCALES
  if blocks is None:
    raise DataError(
      f"{entry.file}: tensor {matrix} is of type {FP8}, and config.json has no quantization_config "
      "that says how it is scaled"
    )
  scale = entries.get(name)
  if scale is None:
    raise DataError(f"{entry.file}: tensor {matrix} is of type {FP8}, and {name} is missing")
  if len(entry.shape) != 2:
    raise DataError(f"{entry.file}: tensor {matrix} is of type {FP8} and no matrix")
  if scale.dtype not in SCALE_TYPES:
    raise DataError(
      f"{scale.file}: tensor {name} is of type {scale.dtype}; known: {', '.join(SCALE_TYPES)}"
    )
  if scale.shape != (wanted := blocks.scales_of(entry.shape)):
    raise DataError(
      f"{scale.file}: tensor {name} has shape {list(scale.shape)}; for {list(entry.shape)} in "
      f"blocks of {list(blocks)} it has {list(wanted)}"
    )


def dequantised(values: np.ndarray, scales: np.ndarray, blocks: Blocks) -> np.ndarray:
  """values · scales as bfloat16 [M, N]; the products are computed in float32, one row of blocks
  after the other.

  Args:
    values: float8_e4m3fn [M, N].
    scales: [ceil(M / rows), ceil(N / columns)], of a type of `SCALE_TYPES`.
    blocks: the size of a block.
  """
  found = np.empty(values.shape, ml_dtypes.bfloat16)
  width = values.shape[1]
  for i, scale in enumerate(scales.astype(np.float32)):
    rows = slice(i * blocks.rows, (i + 1) * blocks.rows)
    found[rows] = values[rows].astype(np.float32) * np.repeat(scale, blocks.columns)[:width]
  return found
