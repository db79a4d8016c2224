"""Inference checkpoints: the same tokens as the run, one tensor for every layer's experts, and
every way to be damaged."""

import dataclasses
import json
import shutil
import zlib
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from covering import night
from drawn import drawn_init
from safetensors.numpy import load_file

from scmoe import convert, evaluate
from scmoe.base.errors import ConfigError, DataError, ScmoeError, StorageError
from scmoe.generate import main as generate
from scmoe.inference.sampling import Sampling
from scmoe.pretrained import folder as files
from scmoe.pretrained import inference_files
from scmoe.pretrained.folder import CONFIG
from scmoe.pretrained.inference import InferenceFolder
from scmoe.pretrained.inference_files import MANIFEST
from scmoe.pretrained.stream import flat
from scmoe.run import exported
from scmoe.run.build import build, vocab_size
from scmoe.run.config_files import find_config, load_config
from scmoe.run.opened import open_model, open_run
from scmoe.run.placement import on_mesh, single_device
from scmoe.run.session import Session
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.description import WEIGHTS_ONLY
from scmoe.training.options import CheckpointConfig
from scmoe.training.restore import restore_part

GREEDY, PROMPTS = Sampling(temperature=0), ["def ", "import os"]


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """A run with random weights for each compute type; both have balancing biases."""
  root = tmp_path_factory.mktemp("runs")
  for dtype in ("float32", "bfloat16"):
    run = load_config(find_config("quickstart"), "smoke")
    model = dataclasses.replace(run.model, dtype=dtype, context=64, init_std=0.3)
    router = dataclasses.replace(run.router, bias="sign")
    run = dataclasses.replace(run, model=model, router=router)
    built = build(single_device(run.resolve(num_devices=1, vocab_size=vocab_size(run.data))))
    params, state = jax.device_put(drawn_init(built, 0.3)(None), built.shardings)
    state["bias"] = 0.01 * jax.random.normal(jax.random.key(1), state["bias"].shape)
    meta = {"config": built.config, "data_fingerprint": {}, "mesh": dict(built.mesh.shape),
            "processes": 1, "tokens": 0, WEIGHTS_ONLY: True}  # fmt: skip
    keeper = Checkpointer(root / dtype, CheckpointConfig(async_save=False))
    keeper.save_now(3, {"params": params, "router": state}, {}, meta)
    keeper.close()
  return root


@pytest.fixture(scope="module")
def folders(runs, tmp_path_factory):
  """bfloat16, float32 and int8, as the command line writes them."""
  root = tmp_path_factory.mktemp("folders")
  for dtype, run in (("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "bfloat16")):
    argv = ["--workdir", str(runs / run), "--inference", str(root / dtype)]
    convert.main([*argv, "--dtype=int8"] if dtype == "int8" else argv)
  return root


def parameters(workdir):
  """Parameters and router state of a run by dotted name."""
  stored = open_run(str(workdir), None)
  built = build(stored.run)
  wanted = {"params": built.shapes, "router": built.router_shapes}
  return flat(restore_part(workdir, wanted, stored.step))


# By day evaluation reads the folder of bfloat16.
@pytest.mark.parametrize("dtype", ["float32", night("bfloat16")])
def test_same_tokens_as_from_the_run(runs, folders, dtype):
  options = {"max_new_tokens": 12}
  want = Session(str(runs / dtype)).texts(PROMPTS, GREEDY, **options)
  session = Session(model=str(folders / dtype))
  assert session.texts(PROMPTS, GREEDY, **options) == want
  if dtype == "float32":  # sums over devices are another order of the same numbers
    spread = Session(model=str(folders / dtype), mesh="expert=2")
    assert spread.texts(PROMPTS, GREEDY, **options) == want


def test_every_value_is_the_runs(runs, folders):
  want = parameters(runs / "float32")
  folder = InferenceFolder(folders / "float32")
  folder.verify()
  params, router = folder.load(build(on_mesh(folder.run, "data=2,expert=2,tensor=2")))
  got = flat({"params": params, "router": router})
  assert "router.bias" in got
  assert set(got) == set(want)
  for name, value in want.items():
    np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(value), name)


def test_each_layers_experts_are_a_tensor_that_other_readers_open(runs, folders):
  want = parameters(runs / "bfloat16")
  folder = InferenceFolder(folders / "bfloat16")
  theirs = load_file(folders / "bfloat16" / "model.safetensors")
  assert set(theirs) == set(folder.places)
  for layer in range(folder.run.model.num_pairs):
    up = np.asarray(want["params.stages.moe.experts.up"][layer]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(theirs[f"stages.{layer}.moe.experts.up"], up)
    np.testing.assert_array_equal(folder.read_expert(layer, "up", 2), up[2])
  mapped = folder.read("stages.1.moe.experts.up")
  assert not mapped.flags.owndata
  assert not mapped.flags.writeable
  kept = {name for name, part in folder.parts.items() if part.dtype != "BF16"}
  assert {"norm.scale", "stages.moe.router_gate.0.weight", "router.bias"} <= kept
  assert not any("experts" in name or "attention.key" in name for name in kept)


def test_eight_bits_are_the_rule_of_the_page(runs, folders):
  """By hand in float64: 127 is the largest magnitude of an expert's output channel."""
  exact = np.asarray(parameters(runs / "bfloat16")["params.stages.moe.experts.up"][1], np.float64)
  folder = InferenceFolder(folders / "int8")
  folder.verify()
  value, scale = (folder.read(f"stages.1.moe.experts.up{end}") for end in ("", ".scale"))
  assert (value.dtype, scale.dtype) == (np.int8, np.float32)
  assert scale.shape == (exact.shape[0], 1, exact.shape[2])
  np.testing.assert_allclose(scale, np.abs(exact).max(1, keepdims=True) / 127, rtol=1e-6)
  assert (np.abs(value).max(1) == 127).all()
  assert (np.abs(value * scale - exact) <= scale * 0.5001).all()
  np.testing.assert_array_equal(
    folder.whole("stages.1.moe.experts.up"),
    (value.astype(np.float32) * scale).astype(ml_dtypes.bfloat16),
  )
  assert folder.read("stages.0.moe.experts.up_bias").dtype == ml_dtypes.bfloat16


def test_a_channel_of_zeros_has_scale_one(folders, tmp_path):
  folder = InferenceFolder(folders / "int8")
  leaves = {}
  for part in inference_files.parts(folder.run, "float32"):
    if part.layer in (None, 0):
      shape = part.shape if part.layer is None else (folder.run.model.num_pairs, *part.shape)
      leaves[part.leaf] = jax.numpy.zeros(shape, files.WRITTEN[part.dtype])
  planned = inference_files.parts(folder.run, "int8")
  found = dict(zip((p.name for p in planned), inference_files.values_of(leaves, planned)))
  assert (found["stages.0.moe.experts.up.scale"] == 1).all()
  assert not found["stages.0.moe.experts.up"].any()


def test_evaluation_reads_a_folder(runs, folders):
  want = evaluate.evaluate_run(str(runs / "bfloat16"), max_batches=2)
  got = evaluate.evaluate_run(model=str(folders / "bfloat16"), max_batches=2)
  assert (got["loss"], got["step"]) == (want["loss"], 3)
  small = evaluate.evaluate_run(model=str(folders / "int8"), max_batches=2)
  assert small["loss"] != want["loss"]
  assert abs(small["bits_per_byte"] - want["bits_per_byte"]) < 0.02


def test_in_several_files(runs, tmp_path, monkeypatch):
  monkeypatch.setattr(files, "SHARD_BYTES", 20_000)
  exported.export_inference(runs / "float32", tmp_path / "a")
  assert len(list((tmp_path / "a").glob("*.safetensors"))) > 3
  folder = InferenceFolder(tmp_path / "a")
  folder.verify()
  stored = open_run(str(runs / "float32"), None)
  opened = open_model(stored.run, str(runs / "float32"), stored.step)
  params, _ = folder.load(build(folder.run))
  assert jax.tree.all(jax.tree.map(np.array_equal, params, _plain(opened.model)))


def _plain(model):
  from flax import nnx

  return nnx.to_pure_dict(nnx.state(model))


# -- errors: one line with the file, before anything is produced ----------------------------------


def _cut(file, size):
  file.write_bytes(file.read_bytes()[:size])


def _flip(folder, name):
  place = InferenceFolder(folder).places[name]
  content = bytearray(place.file.read_bytes())
  content[place.start + place.size // 2] ^= 16
  place.file.write_bytes(content)


def _manifest(folder, **fields):
  path = folder / MANIFEST
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


WEIGHTS = "model.safetensors"
DAMAGE = {
  "no weights": (lambda f: (f / WEIGHTS).unlink(), "is missing"),
  "no manifest": (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST} is missing"),
  "no config": (lambda f: (f / CONFIG).unlink(), f"{CONFIG} is missing"),
  "truncated": (lambda f: _cut(f / WEIGHTS, -10), f"{WEIGHTS} is truncated"),
  "a stub": (lambda f: _cut(f / WEIGHTS, 100), f"{WEIGHTS} is damaged or incomplete"),
  "one bit": (lambda f: _flip(f, "stages.1.moe.experts.up"), "stages.1.moe.experts.up differs"),
  "of a norm": (lambda f: _flip(f, "norm.scale"), "checksum of .*norm.scale differs"),
  "version": (lambda f: _manifest(f, version=2), "version 2 is unknown, this scmoe reads 1"),
  "format": (lambda f: _manifest(f, format="x"), "format 'x' is not"),
  "no sums": (lambda f: _manifest(f, tensors={}), "has no checksum of"),
  "config": (lambda f: (f / CONFIG).write_text("{}"), f"{CONFIG} is damaged"),
  "manifest": (lambda f: (f / MANIFEST).write_text("{"), f"{MANIFEST} cannot be used"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_seen_before_a_token(folders, tmp_path, damage, capsys):
  folder = Path(shutil.copytree(folders / "float32", tmp_path / "a"))
  change, words = DAMAGE[damage]
  change(folder)
  with pytest.raises(DataError, match=words) as caught:
    generate(["--model", str(folder), "--prompt=a", "--max_new_tokens=2"])
  assert str(folder) in str(caught.value)
  assert "\n" not in str(caught.value)
  assert capsys.readouterr().out == ""


def test_of_another_configuration(folders, tmp_path):
  """Its checksums are right, and its tensors are not those that the configuration asks for."""
  folder = Path(shutil.copytree(folders / "float32", tmp_path / "a"))
  config = json.loads((folder / CONFIG).read_text())
  config["model"]["width"] *= 2
  text = json.dumps(config)
  (folder / CONFIG).write_text(text)
  _manifest(folder, files={CONFIG: zlib.crc32(text.encode())})
  with pytest.raises(DataError, match=r"model.safetensors: tensor .* by config.json it is"):
    InferenceFolder(folder)


@pytest.mark.parametrize(
  ("command", "argv", "words"),
  [
    (convert.main, ["--inference=a", "--to=b"], "give one of: --from FOLDER"),
    (
      convert.main,
      ["--inference=a", "--dtype=int4"],
      "--dtype='int4' is unknown; with --inference",
    ),
    (generate, ["--model=a", "--prompt=b"], "--workdir and --model exclude each other"),
    (evaluate.main, ["--model=a"], "--workdir and --model exclude each other"),
  ],
)
def test_flags_that_do_not_fit(runs, command, argv, words):
  with pytest.raises(ConfigError, match=words):
    command(["--workdir", str(runs / "float32"), *argv])


def test_no_folder_is_written_over_or_left_half(runs, tmp_path, monkeypatch):
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / "mine").write_text("x")
  with pytest.raises(StorageError, match=r"--inference=.* is there already"):
    exported.export_inference(runs / "float32", tmp_path / "a")

  def full(*_):
    raise OSError("no space left")

  monkeypatch.setattr(inference_files, "write_weights", full)
  with pytest.raises(ScmoeError, match=r"--inference=.*no space left"):
    exported.export_inference(runs / "float32", tmp_path / "b")
  assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
