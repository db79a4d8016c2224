"""Reads experts' matrices in MXFP4 (OCP Microscaling Formats 1.0), the format of GPT-OSS's folders.

A tensor `X` [E, K, N] (E experts, K inputs, N outputs) is stored as two tensors of bytes.
`X_blocks` [E, N, K / 32, 16] holds blocks of 32 values: 4 bits each, so 16 bytes, with the
even-numbered value in a byte's low half. `X_scales` [E, N, K / 32] holds a number s for each block,
whose values are multiplied by 2^(s - 127). A value is a sign, two bits of exponent and one of
fraction. Example: the byte 0x25 in a block with s = 128 stands for 3 · 2 (from its low half, 5) and
1 · 2 (from its high half, 2).
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from scmoe.base.errors import DataError
from scmoe.pretrained.quantised import Described

BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the two tensors
STORED = "U8"  # the type of both, in the spelling of safetensors
_IN_BYTES = 16  # bytes of one block
_VALUES = 2 * _IN_BYTES
# The value of each code from 0 to 15; the codes from 8 on are those from 0 to 7 with a minus sign.
_TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_TABLE = np.concatenate([_TABLE, -_TABLE])


def packed(entries: Mapping[str, Described]) -> dict[str, tuple[int, ...]]:
  """The shapes [E, K, N] of a folder's tensors in MXFP4, by name without `_blocks` and `_scales`.

  Args:
    entries: the tensors of the folder's files, by name.

  Raises:
    DataError: a tensor of blocks has another type or number of dimensions, or blocks of another
      size; its scales are missing or have another shape or type; scales have no blocks; or the
      tensor is there without MXFP4, too.
  """
  for name, entry in entries.items():
    blocks = name.removesuffix(SCALES) + BLOCKS
    if name.endswith(SCALES) and entry.dtype == STORED and blocks not in entries:
      raise DataError(f"{entry.file}: tensor {name} has scales in MXFP4, and {blocks} is missing")
  named = (name for name in entries if name.endswith(BLOCKS))
  return {name.removesuffix(BLOCKS): _checked(name, entries) for name in named}


def _checked(blocks: str, entries: Mapping[str, Described]) -> tuple[int, ...]:
  """The shape [E, K, N] of the tensor whose blocks are named `blocks`; errors as in `packed`."""
  entry, name = entries[blocks], blocks.removesuffix(BLOCKS) + SCALES
  if entry.dtype != STORED:
    raise DataError(f"{entry.file}: tensor {blocks} is {entry.dtype}; blocks in MXFP4 are {STORED}")
  if (plain := name.removesuffix(SCALES)) in entries:
    raise DataError(
      f"{entry.file}: tensor {plain} is given twice: as {blocks} in MXFP4, and in "
      f"{entries[plain].file.name} as it is; leave one out"
    )
  if len(entry.shape) != 4 or entry.shape[3] != _IN_BYTES:
    raise DataError(
      f"{entry.file}: tensor {blocks} has shape {list(entry.shape)}; in MXFP4 it is [experts, "
      f"outputs, inputs / {_VALUES}, {_IN_BYTES}]"
    )
  scale = entries.get(name)
  if scale is None:
    raise DataError(f"{entry.file}: tensor {blocks} is in MXFP4, and {name} is missing")
  if (scale.shape, scale.dtype) != (entry.shape[:3], STORED):
    raise DataError(
      f"{scale.file}: tensor {name} is {scale.dtype}{list(scale.shape)}; for blocks of shape "
      f"{list(entry.shape)} it is {STORED}{list(entry.shape[:3])}"
    )
  experts, outputs, count, _ = entry.shape
  return experts, count * _VALUES, outputs


def dequantised(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """The tensor as bfloat16 [E, K, N], which holds each product of a value and its scale exactly.

  Products of 2^128 and more become infinite. A scale of 255 stands for NaN, as the format says.

  Args:
    blocks: uint8 [E, N, K / 32, 16].
    scales: uint8 [E, N, K / 32].
  """
  experts, outputs, count, _ = blocks.shape
  found = np.empty((experts, count * _VALUES, outputs), ml_dtypes.bfloat16)
  value = np.empty((outputs, count, _VALUES), np.float32)
  for expert in range(experts):  # one at a time, since float32 takes eight times as many bytes
    value[..., 0::2] = _TABLE[blocks[expert] & 15]
    value[..., 1::2] = _TABLE[blocks[expert] >> 4]
    value *= scales[expert].view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
    found[expert] = value.reshape(outputs, -1).T
  return found
