"""Folders whose experts are in MXFP4, as GPT-OSS is released."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scmoe.base.errors import DataError
from scmoe.pretrained.folder import CONFIG, WEIGHTS, Folder
from scmoe.pretrained.imported import import_model
from scmoe.pretrained.mxfp4 import dequantised
from scmoe.pretrained.released import open_released
from scmoe.run.exported import export_model

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "released" / "gpt_oss_a"
SAID = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
UP, DOWN = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
# The magnitudes of the eight codes, written from the format: 2 bits of exponent, 1 of fraction.
CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def meant(blocks, scales):
  """The values of blocks and scales, one after the other: float64 [E, K, N]."""
  experts, outputs, count, size = blocks.shape
  found = np.empty((experts, count * 2 * size, outputs))
  for e, n, b, i in np.ndindex(blocks.shape):
    for half, code in enumerate((blocks[e, n, b, i] % 16, blocks[e, n, b, i] // 16)):
      sign = -1.0 if code >= 8 else 1.0
      exponent = int(scales[e, n, b]) - 127
      found[e, b * 2 * size + 2 * i + half, n] = sign * CODES[code % 8] * 2.0**exponent
  return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """A small GPT-OSS in MXFP4, and the same one with the weights that its blocks stand for."""
  scratch = tmp_path_factory.mktemp("mxfp4")
  config = json.loads((GOLDEN / CONFIG).read_text()) | {"intermediate_size": 32}
  draw, packed, plain = np.random.default_rng(0), {}, {}
  for name, value in load_file(GOLDEN / WEIGHTS).items():
    if not name.endswith(("gate_up_proj", "down_proj")):
      if name.endswith("gate_up_proj_bias"):  # the width of experts has to be a multiple of 32
        value = np.concatenate([value, -value], 1)
      packed[name] = plain[name] = value.astype(ml_dtypes.bfloat16)
      continue
    shape = (8, 64, 1) if name.endswith("gate_up_proj") else (8, 32, 1)
    blocks = draw.integers(0, 256, (*shape, 16), np.uint8)
    scales = draw.integers(118, 126, shape, np.uint8)
    packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
    plain[name] = meant(blocks, scales).astype(ml_dtypes.bfloat16)
  for kind, tensors, fields in (
    ("mxfp4", packed, {"quantization_config": SAID}),
    ("bf16", plain, {}),
  ):
    (scratch / kind).mkdir()
    save_file(tensors, scratch / kind / WEIGHTS)
    (scratch / kind / CONFIG).write_text(json.dumps({**config, **fields}))
  return scratch


def test_every_code_and_every_scale_stands_for_its_value():
  """256 bytes and the exponents from -127 to 127, each product exact; 255 is NaN."""
  blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
  for scale in (0, 1, 126, 127, 128, 252):
    scales = np.full((1, 1, 16), scale, np.uint8)
    np.testing.assert_array_equal(dequantised(blocks, scales), meant(blocks, scales))
  assert np.isnan(dequantised(blocks, np.full((1, 1, 16), 255, np.uint8)).astype(float)).all()


def test_it_comes_in_as_bfloat16_and_leaves_so(folders, tmp_path):
  packed, plain = Folder(folders / "mxfp4"), Folder(folders / "bf16")
  assert {n: e[1:3] for n, e in packed.entries.items()} == (
    {n: e[1:3] for n, e in plain.entries.items()})  # fmt: skip
  for name in plain.entries:
    np.testing.assert_array_equal(packed.read(name), plain.read(name), name)
  import_model(str(folders / "mxfp4"), tmp_path / "run", mesh="data=1")
  export_model(tmp_path / "run", tmp_path / "out", mesh="data=1")
  written = json.loads((tmp_path / "out" / CONFIG).read_text())
  wanted = json.loads((folders / "bf16" / CONFIG).read_text()) | {"dtype": "bfloat16"}
  assert {name: written[name] for name in wanted} == wanted
  assert "quantization_config" not in written
  again = Folder(tmp_path / "out")
  assert set(again.entries) == set(plain.entries)
  for name in plain.entries:
    np.testing.assert_array_equal(again.read(name), plain.read(name), name)


def _edit(change):
  def apply(folder):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)

  return apply


def _cut(folder):
  (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-7])


_TO = lambda name, change: _edit(lambda t: t.update({name: change(t[name])}))
_WITHOUT = lambda name: _edit(lambda t: t.pop(name))
BROKEN = {
  "cut": (_cut, f"{WEIGHTS} is damaged or incomplete"),
  "a block cut short": (
    _TO(f"{UP}_blocks", lambda x: x[..., :15].copy()),
    rf"{WEIGHTS}: tensor {UP}_blocks has shape \[8, 64, 1, 15\]; in MXFP4 it is \[experts, outpu"),
  "blocks of a matrix": (
    _TO(f"{UP}_blocks", lambda x: x[0]), rf"{UP}_blocks has shape \[64, 1, 16\]; in MXFP4 it is"),
  "blocks of fewer outputs": (
    _edit(lambda t: t.update({f"{UP}_{n}": t[f"{UP}_{n}"][:, :-2].copy() for n in (
      "blocks", "scales")})),
    rf"tensor {UP} has shape \[8, 32, 62\]; by config.json it has \[8, 32, 64\]"),
  "scales of another shape": (
    _TO(f"{DOWN}_scales", lambda x: x[:-1].copy()),
    rf"{WEIGHTS}: tensor {DOWN}_scales is U8\[7, 32, 1\]; for blocks of shape \[8, 32, 1, 16\] it "
    r"is U8\[8, 32, 1\]"),
  "scales of another type": (
    _TO(f"{DOWN}_scales", lambda x: x.astype(np.float32)), rf"{DOWN}_scales is F32\[8, 32, 1\]"),
  "no scales": (
    _WITHOUT(f"{UP}_scales"), rf"tensor {UP}_blocks is in MXFP4, and {UP}_scales is missing"),
  "no blocks": (
    _WITHOUT(f"{UP}_blocks"),
    rf"tensor {UP}_scales has scales in MXFP4, and {UP}_blocks is missing"),
  "blocks of another type": (
    _TO(f"{UP}_blocks", lambda x: x.view(np.int8)),
    rf"tensor {UP}_blocks is I8; blocks in MXFP4 are U8"),
  "given twice": (
    _edit(lambda t: t.update({UP: np.zeros((8, 32, 64), np.float32)})),
    rf"tensor {UP} is given twice: as {UP}_blocks in MXFP4, and in {WEIGHTS} as it is; leave one"),
  "a scale that stands for NaN": (
    _TO(f"{UP}_scales", lambda x: np.full_like(x, 255)),
    rf"{WEIGHTS}: tensor {UP} holds NaN or infinity; give a folder whose weights are all finite"),
  "no bias": (_WITHOUT(f"{UP}_bias"), rf"tensor {UP}_bias is missing"),
  "no sinks": (
    _WITHOUT("model.layers.0.self_attn.sinks"), r"tensor model.layers.0.self_attn.sinks is missi"),
  "no bias of the router": (
    _WITHOUT("model.layers.0.mlp.router.bias"), r"tensor model.layers.0.mlp.router.bias is missi"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_fit_is_one_line_and_writes_nothing(name, folders, tmp_path):
  folder, (damage, message) = tmp_path / "folder", BROKEN[name]
  shutil.copytree(folders / "mxfp4", folder)
  damage(folder)
  with pytest.raises(DataError, match=message) as caught:
    import_model(str(folder), tmp_path / "run")
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("way", ["devices", "checkpoint"])
def test_a_tensor_of_gate_and_up_is_read_once(way, folders, monkeypatch):
  released = open_released(str(folders / "mxfp4"))
  names, read = [], Folder.read
  monkeypatch.setattr(Folder, "read", lambda self, name: names.append(name) or read(self, name))
  if way == "checkpoint":
    found = {piece.name for make in released.pieces()[1] for piece in make()}
    assert found == {tensor.leaf for tensor in released.tensors}
  else:
    plain = dict(open_released(str(folders / "bf16")).leaves())
    names.clear()
    for name, leaf in released.leaves():
      np.testing.assert_array_equal(np.asarray(leaf), np.asarray(plain[name]), err_msg=name)
  assert sorted(names) == sorted({tensor.name for tensor in released.tensors})
