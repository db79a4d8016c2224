"""Malformed files of strangers: refused by one line, before anything is as large as they say."""

import json
import os
import resource
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scmoe import convert
from scmoe.base.errors import ConfigError, DataError
from scmoe.pretrained import folder as files
from scmoe.pretrained import header
from scmoe.pretrained.families import read_config
from scmoe.pretrained.folder import Folder
from scmoe.pretrained.header import read_header, read_object
from scmoe.pretrained.imported import SOURCE, import_model
from scmoe.pretrained.inference import InferenceFolder
from scmoe.run import opened as opening
from scmoe.run.exported import export_inference, export_model
from scmoe.training.restore import StepGone

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]}


def written(path, tensors, data=16, length=None):
  text = (tensors if isinstance(tensors, str) else json.dumps(tensors)).encode()
  start = (len(text) if length is None else length).to_bytes(8, "little")
  path.write_bytes(start + text + b"\0" * data)
  return path


def test_what_the_library_writes_is_read(tmp_path):
  tensors = {"a": np.ones((2, 3), np.float32), "b": np.zeros((0, 4), np.float16)}
  save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
  at = 8 + int.from_bytes((tmp_path / "x").read_bytes()[:8], "little")
  assert read_header(tmp_path / "x") == {"a": ((2, 3), "F32", at), "b": ((0, 4), "F16", at + 24)}
  assert read_header(written(tmp_path / "y", {"b": B, "a": A}))["b"][:2] == ((2, 2), "BF16")


HEADERS = {
  "overlap": ({"a": A, "b": B | {"data_offsets": [0, 8]}}, "begins at byte 0, overlaps"),
  "gap": ({"a": A, "b": B | {"data_offsets": [12, 20]}}, "byte 12, leaves a gap"),
  "beyond the end": (
    {"a": A, "b": B | {"shape": [2, 4], "data_offsets": [8, 24]}}, "24 bytes; the file has 16"),
  "bytes of nobody": ({"a": A}, "its tensors need 8 bytes; the file has 16"),
  "size": ({"a": A | {"shape": [3]}}, r"a has 8 bytes, which do not fit shape \[3\] of F32"),
  "overflow": ({"a": A | {"shape": [2**62, 4]}}, "do not fit shape"),
  "enormous": ({"a": A | {"shape": [10**30]}}, "has a shape that is not"),
  "negative": ({"a": A | {"shape": [-2]}}, "has a shape that is not"),
  "a flag for a size": ({"a": A | {"shape": [True, 2]}}, "has a shape that is not"),
  "rank": ({"a": A | {"shape": [1] * 9 + [2]}}, "at most 8"),
  "backwards": ({"a": A | {"data_offsets": [8, 0]}}, "has -8 bytes"),
  "offsets": ({"a": A | {"data_offsets": [0]}}, "not two whole numbers"),
  "type": ({"a": A | {"dtype": "PICKLE"}}, "type 'PICKLE', which the format does not have"),
  "fields": ({"a": A | {"code": "x"}}, "lacks one of the fields"),
  "no object": ("[1, 2]", "its header cannot be used: it is .*, not an object"),
  "not a tensor": ({"a": 3}, "lacks one of the fields"),
  "twice": ('{"a": 1, "a": 2}', "'a' is given twice"),
  "deep": ('{"a":' + "[" * 200_000, "its header cannot be used"),
  "digits": ('{"a": ' + "9" * 5000 + "}", "cannot be used"),
  "bytes": ('{"a": \x01', "its header cannot be used"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_malformed_header_is_one_line(tmp_path, name):
  tensors, message = HEADERS[name]
  with pytest.raises(DataError, match=message) as caught:
    read_header(written(tmp_path / "x", tensors))
  assert "\n" not in str(caught.value)
  assert len(str(caught.value)) < 600


@pytest.mark.parametrize("length", [17, 2**40, 2**63, 2**64 - 1])
def test_a_header_longer_than_its_file_is_not_read(tmp_path, length):
  with pytest.raises(DataError, match=f"a header of {length} bytes in a file of"):
    read_header(written(tmp_path / "x", "{}", data=8, length=length))


def test_a_long_header_is_not_read_either(tmp_path):
  """In a file that has it: with a hole, so that the disk does not."""
  path = written(tmp_path / "x", "", data=0, length=2**33)
  os.truncate(path, 2**34)
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  with pytest.raises(DataError, match=r"a header of 8589934592 bytes; at most"):
    read_header(path)
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_numbers_of_tensors_and_sizes_of_json_are_limited(tmp_path, monkeypatch):
  monkeypatch.setattr(header, "TENSORS", 1)
  with pytest.raises(DataError, match="2 tensors; at most 1 are read"):
    read_header(written(tmp_path / "x", {"a": A, "b": B}))
  (tmp_path / "big").write_text('{"a": "' + "x" * 100 + '"}')
  with pytest.raises(DataError, match="is larger than 50 bytes"):
    read_object(tmp_path / "big", 50)
  assert read_object(tmp_path / "big", 109)


def test_pipes_and_devices_are_no_files(tmp_path):
  """Opening one would wait for ever, or read for ever; links to files are how a hub's cache is."""
  os.mkfifo(tmp_path / "pipe")
  (tmp_path / "config.json").symlink_to("/dev/zero")
  for read in (lambda: read_header(tmp_path / "pipe"), lambda: Folder(tmp_path)):
    with pytest.raises(DataError, match="is not a regular file"):
      read()
  (tmp_path / "config.json").unlink()
  (tmp_path / "blob").write_text("{}")
  (tmp_path / "config.json").symlink_to(tmp_path / "blob")
  save_file({"a": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
  assert list(Folder(tmp_path).entries) == ["a"]
  assert load_file(tmp_path / "model.safetensors")["a"].sum() == 2


GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "released" / "olmoe_a"


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("model_type", [], r"model_type=\[\] is not a known family"),
    ("hidden_act", [], r"hidden_act=\[\] is not supported"),
    ("hidden_act", "", r"hidden_act='' is not supported"),
    ("layer_types", 5, r"layer_types='5' is not a list"),
    ("rope_scaling", {"rope_type": []}, r"rope_type=\[\], which is not supported"),
    ("rms_norm_eps", float("nan"), r"rms_norm_eps='nan' is not a number"),
    ("rope_theta", float("inf"), r"rope_theta='inf' is not a number"),
    ("router_aux_loss_coef", 10**400, r"router_aux_loss_coef='1000.*' is not a number"),
  ],
)
def test_fields_of_other_kinds_are_one_line(field, value, message):
  values = json.loads((GOLDEN / "config.json").read_text()) | {field: value}
  with pytest.raises(DataError, match=message) as caught:
    read_config(values)
  assert len(str(caught.value)) < 300


def test_what_is_no_folder_of_safetensors_says_how_to_get_one(tmp_path):
  with pytest.raises(DataError, match=r"hf download allenai/OLMoE-1B-7B --local-dir"):
    Folder("allenai/OLMoE-1B-7B")
  for path, message in (
    ("~nosuchuser/x", "--from='~nosuchuser/x' names a user that this machine does not have"),
    ("a\0b", "--from='a.x00b' holds a NUL byte"),
    ("x" * 5000, "File name too long"),
  ):
    with pytest.raises(ConfigError, match=message) as caught:
      Folder(path)
    assert len(str(caught.value)) < 300
  shutil.copyfile(GOLDEN / "config.json", tmp_path / "config.json")
  (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 99)
  with pytest.raises(DataError, match=r"has pytorch_model.bin and no .safetensors file; .*pretrai"):
    Folder(tmp_path)
  (tmp_path / files.INDEX).write_text('{"weight_map": {"a": "pytorch_model.bin"}}')
  with pytest.raises(DataError, match=r"a is in 'pytorch_model.bin', not a .safetensors"):
    Folder(tmp_path)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
  """A run, and its inference folder."""
  root = tmp_path_factory.mktemp("exported")
  import_model(str(GOLDEN), root / "run")
  export_inference(root / "run", root / "inference")
  return root


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("dtype", "F99", "source.json: type 'F99' is unknown; one of: F32, BF16, F16"),
    ("other_dtypes", {"lm_head.weight": []}, r"source.json: type '\[\]' is unknown"),
    ("family", "nope", "source.json: family 'nope' is unknown; one of: olmoe, mixtral"),
    (
      "files",
      {"../../x": "y"},
      "source.json: `files` must map names to texts; known names: generation_config",
    ),
    ("files", {"generation_config.json": 3}, "source.json: `files` must map names to texts"),
  ],
)
def test_a_strangers_source_json_is_one_line(field, value, message, exported, tmp_path):
  run = shutil.copytree(exported / "run", tmp_path / "run")
  path = run / SOURCE
  path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
  with pytest.raises(DataError, match=message):
    export_model(run, tmp_path / "out")
  assert not (tmp_path / "out").exists()


def test_a_step_that_is_removed_meanwhile_is_chosen_again(exported, tmp_path, monkeypatch):
  real, failed = opening.restore_stored, []

  def restore(*args):
    if not failed:
      failed.append(args[-1])
      raise StepGone("no valid checkpoint of step 0")
    return real(*args)

  monkeypatch.setattr(opening, "restore_stored", restore)
  export_model(exported / "run", tmp_path / "out")
  assert failed == [0]
  assert Folder(tmp_path / "out").entries


def test_no_path_is_a_traceback(exported):
  for flag in ("to", "inference"):
    for path, message in (
      ("~nosuchuser/x", "names a user"),
      ("a\0", "holds a NUL byte"),
      ("a\udcff", "is not valid UTF-8"),
    ):
      with pytest.raises(ConfigError, match=f"--{flag}=.* {message}"):
        convert.main(["--workdir", str(exported / "run"), f"--{flag}", path])


INFERENCE = {
  "no json": (lambda c: b"{", "config.json cannot be used"),
  "no text": (lambda c: b"\xff", "config.json cannot be read: 'utf-8'"),
  "deep": (lambda c: b"[" * 10**5, "config.json cannot be used"),
  "twice": (lambda c: b'{"name": "a", "name": "b"}', "'name' is given twice"),
  "layers": (
    lambda c: json.dumps(c | {"model": c["model"] | {"num_layers": 10**7}}).encode(),
    "num_layers=10000000"),
  "no width": (
    lambda c: json.dumps(c | {"model": c["model"] | {"width": 0}}).encode(), "width=0 is too"),
  "no vocabulary": (
    lambda c: json.dumps(c | {"model": c["model"] | {"vocab_size": 0}}).encode(), "vocab_size=0"),
}  # fmt: skip


@pytest.mark.parametrize("name", INFERENCE)
def test_a_forged_inference_folder_is_one_line(name, exported, tmp_path):
  """With the checksums that belong to its content."""
  make, message = INFERENCE[name]
  folder = shutil.copytree(exported / "inference", tmp_path / "m")
  content = make(json.loads((folder / "config.json").read_text()))
  (folder / "config.json").write_bytes(content)
  manifest = json.loads((folder / "inference.json").read_text())
  manifest["files"]["config.json"] = zlib.crc32(content)
  (folder / "inference.json").write_text(json.dumps(manifest))
  with pytest.raises(DataError, match=message) as caught:
    InferenceFolder(folder)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["num_hidden_layers", "zero_expert_num", "hidden_size"])
def test_a_configuration_cannot_ask_for_lists_without_end(name):
  values = {"model_type": "qwen3_moe", name: 10**12}
  values |= {"model_type": "longcat_flash", "ffn_hidden_size": 8} if "zero" in name else {}
  base = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "num_hidden_layers": 2}
  base |= {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32, "num_layers": 2}
  base |= {"intermediate_size": 64, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "moe_topk": 2}
  base |= {"qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4}
  with pytest.raises(DataError, match=f"{name}=1000000000000 is more than"):
    read_config(base | {"expert_ffn_hidden_size": 8} | values)
