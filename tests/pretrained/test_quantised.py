"""Folders in fp8 with a scale for each block of a matrix, as DeepSeek-V3 is released."""

import json
import math
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from scmoe.base.errors import DataError
from scmoe.pretrained.folder import CONFIG, WEIGHTS, Folder
from scmoe.pretrained.imported import import_model
from scmoe.pretrained.quantised import Blocks, dequantised
from scmoe.run.exported import export_model

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "released"
BLOCK = (16, 24)  # no divisor of the matrices' sizes
SAID = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK)}  # fmt: skip
NAMES = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "int8": "I8",
         "float8_e8m0fnu": "F8_E8M0"}  # fmt: skip
MATRIX = "model.layers.1.self_attn.o_proj.weight"


def write(path, tensors):
  """A safetensors file; the library's NumPy writer has no type of eight bits."""
  header, data = {}, b""
  for name, value in tensors.items():
    offsets = [len(data), len(data) + value.nbytes]
    header[name] = {"dtype": NAMES[value.dtype.name], "shape": list(value.shape),
                    "data_offsets": offsets}  # fmt: skip
    data += np.ascontiguousarray(value).tobytes()
  text = json.dumps(header).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def quantised(matrix):
  """A matrix in fp8, its scales, and what they stand for, element by element."""
  (rows, columns), (high, wide) = matrix.shape, BLOCK
  scales = np.empty((math.ceil(rows / high), math.ceil(columns / wide)), np.float32)
  values = np.empty(matrix.shape, ml_dtypes.float8_e4m3fn)
  for i in range(scales.shape[0]):
    for j in range(scales.shape[1]):
      place = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
      scales[i, j] = np.abs(matrix[place]).max() / 448
      values[place] = (matrix[place] / scales[i, j]).astype(values.dtype)
  meant = np.empty(matrix.shape, ml_dtypes.bfloat16)
  for i in range(rows):
    for j in range(columns):
      meant[i, j] = np.float32(values[i, j]) * scales[i // high, j // wide]
  return values, scales, meant


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """A small DeepSeek-V3 in fp8, and the same one with the weights that its blocks stand for."""
  scratch = tmp_path_factory.mktemp("fp8")
  packed, plain = {}, {}
  for name, value in load_file(GOLDEN / "deepseek_v3_a" / WEIGHTS).items():
    is_packed = value.ndim == 2 and name.endswith("_proj.weight")
    if is_packed:
      packed[name], packed[name + "_scale_inv"], plain[name] = quantised(value)
    else:
      packed[name] = plain[name] = value.astype(ml_dtypes.bfloat16)
  config = json.loads((GOLDEN / "deepseek_v3_a" / CONFIG).read_text())
  for name, tensors, fields in (
    ("fp8", packed, {"quantization_config": SAID}),
    ("bf16", plain, {}),
  ):
    (scratch / name).mkdir()
    write(scratch / name / WEIGHTS, tensors)
    (scratch / name / CONFIG).write_text(json.dumps({**config, **fields}))
  return scratch


def test_weights_are_the_products_of_values_and_scales(folders):
  packed, plain = Folder(folders / "fp8"), Folder(folders / "bf16")
  assert packed.entries[MATRIX].dtype == "BF16"
  assert set(packed.entries) == set(plain.entries)
  for name in plain.entries:
    np.testing.assert_array_equal(packed.read(name), plain.read(name), name)


def test_it_comes_in_as_bfloat16_and_leaves_so(folders, tmp_path):
  for kind in ("fp8", "bf16"):
    import_model(str(folders / kind), tmp_path / f"run {kind}", mesh="data=1")
    export_model(tmp_path / f"run {kind}", tmp_path / kind, mesh="data=1")
  assert "quantization_config" not in json.loads((tmp_path / "fp8" / CONFIG).read_text())
  for file in (CONFIG, WEIGHTS):
    assert (tmp_path / "fp8" / file).read_bytes() == (tmp_path / "bf16" / file).read_bytes()


def test_scales_that_are_bare_exponents():
  values = np.array([[1.5, -2.0, 3.0]]).astype(ml_dtypes.float8_e4m3fn)
  scales = np.array([[0.25, 8.0]]).astype(ml_dtypes.float8_e8m0fnu)
  found = dequantised(values, scales, Blocks(4, 2))
  assert found.astype(np.float32).tolist() == [[0.375, -0.5, 24.0]]


def _tensors(folder, change):
  packed = {}
  for name, entry in Folder(folder)._stored.items():
    kind = next(getattr(np, n, None) or getattr(ml_dtypes, n)
                for n, word in NAMES.items() if word == entry.dtype)  # fmt: skip
    data = (folder / WEIGHTS).read_bytes()[entry.start :]
    count = math.prod(entry.shape)
    packed[name] = np.frombuffer(data, kind, count).reshape(entry.shape)
  change(packed)
  write(folder / WEIGHTS, packed)


def _said(folder, **fields):
  config = json.loads((folder / CONFIG).read_text())
  config["quantization_config"] |= fields
  (folder / CONFIG).write_text(json.dumps(config))


def _unsaid(folder):
  config = json.loads((folder / CONFIG).read_text())
  del config["quantization_config"]
  (folder / CONFIG).write_text(json.dumps(config))


def _cut(folder):
  data = (folder / WEIGHTS).read_bytes()
  (folder / WEIGHTS).write_bytes(data[:-7])


SCALES = MATRIX + "_scale_inv"
BROKEN = {
  "another method": (lambda f: _said(f, quant_method="awq"), "quant_method='awq', which is not s"),
  "one scale": (lambda f: _said(f, weight_block_size=None), "weight_block_size=None, which is not"),
  "no sizes": (lambda f: _said(f, weight_block_size=[0, 8]), r"weight_block_size=\[0, 8\], which"),
  "other numbers": (lambda f: _said(f, fmt="e5m2"), "fmt='e5m2', which is not supported"),
  "other blocks": (
    lambda f: _said(f, weight_block_size=[8, 8]), r"_scale_inv has shape \[.*\]; for \["),
  "unsaid": (_unsaid, "is of type F8_E4M3, and config.json has no quantization_config"),
  "no scales": (
    lambda f: _tensors(f, lambda t: t.pop(SCALES)), f"F8_E4M3, and {SCALES} is missing"),
  "scales of another shape": (
    lambda f: _tensors(f, lambda t: t.update({SCALES: t[SCALES][:-1]})),
    rf"tensor {SCALES} has shape \[\d, \d\]; for \[64, \d+\] in blocks of \[16, 24\] it has \[4,"),
  "scales of another type": (
    lambda f: _tensors(f, lambda t: t.update({SCALES: t[SCALES].astype(np.int8)})),
    f"tensor {SCALES} is of type I8; known: F32, BF16, F8_E8M0"),
  "a norm in fp8": (
    lambda f: _tensors(f, lambda t: t.update(
      {"model.norm.weight": t["model.norm.weight"].astype(ml_dtypes.float8_e4m3fn),
       "model.norm.weight_scale_inv": np.ones((1, 1), np.float32)})),
    "model.norm.weight is of type F8_E4M3 and no matrix"),
  "cut": (_cut, "is damaged or incomplete"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_fit_is_one_line_and_writes_nothing(name, folders, tmp_path):
  folder, (damage, message) = tmp_path / "folder", BROKEN[name]
  shutil.copytree(folders / "fp8", folder)
  damage(folder)
  with pytest.raises(DataError, match=message) as caught:
    import_model(str(folder), tmp_path / "run")
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "run").exists()
