"""Experts that stay in their files: the same tokens, one line where they cannot, nothing left."""

# Tests call with wrong types on purpose, and fakes stand for typed objects.

import dataclasses
import gc
import threading

import jax
import pytest
from covering import night
from drawn import drawn_init

from scmoe.base.errors import ConfigError
from scmoe.inference.offload.plan import OffloadRequest
from scmoe.inference.sampling import Sampling
from scmoe.offload.memory import is_on_disk
from scmoe.pretrained.inference import InferenceFolder
from scmoe.pretrained.inference_files import inference_run, parts, values_of, write_folder
from scmoe.pretrained.stream import flat
from scmoe.run.build import build, vocab_size
from scmoe.run.config_files import find_config, load_config
from scmoe.run.placement import single_device
from scmoe.run.session import Session

GREEDY, PROMPTS = Sampling(temperature=0), ["def ", "import os"]
LAYERS = 3  # with experts


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
  """A small model with random weights, in the type that a test names."""
  jax.config.update("jax_disable_most_optimizations", True)
  run = load_config(find_config("quickstart"), "smoke")
  options = {"context": 64, "init_std": 0.3, "num_layers": 2 * LAYERS, "moe_every": 2}
  options |= {"wiring": "scmoe_pos2", "num_experts": 8}
  run = dataclasses.replace(run, model=dataclasses.replace(run.model, **options))
  run = single_device(run.resolve(num_devices=1, vocab_size=vocab_size(run.data)))
  run = inference_run(run, request.param)
  params, router = drawn_init(build(run), 0.3)(None)
  leaves = flat({"params": params, "router": router})
  path = tmp_path_factory.mktemp("model") / request.param
  planned = parts(run, request.param)
  write_folder(path, run, values_of(leaves, planned), dtype=request.param)
  yield str(path)
  jax.config.update("jax_disable_most_optimizations", False)


def budget(folder, layers):
  """Bytes of so many layers' experts."""
  opened = InferenceFolder(folder)
  size = sum(p.size for n, p in opened.places.items() if ".experts." in n and len(p.shape) == 3)
  return size * layers // LAYERS


def on_disk(session):
  leaves = jax.tree.leaves(session.model, is_leaf=is_on_disk)
  return sum(map(is_on_disk, leaves))


float32 = pytest.mark.parametrize("folder", ["float32"], indirect=True)


@pytest.mark.parametrize(
  ("folder", "way", "slots", "layers"),
  [
    ("float32", "ring,early", 3, 1),
    night("bfloat16", "early", 0, 0),
    night("int8", "ring,blocking", 0, 2),  # by day from the host's memory: test_offload.py
    night("int8", "early", 3, 0),
  ],
  indirect=["folder"],
)
def test_the_same_tokens_as_with_all_in_memory(folder, way, slots, layers):
  expected = Session(model=folder).texts(PROMPTS, GREEDY, max_new_tokens=9)
  limit = budget(folder, layers) + 1
  session = Session(
    model=folder, request=OffloadRequest(way, host_memory=limit, expert_cache=slots)
  )
  assert on_disk(session) % (LAYERS - layers) == 0
  assert on_disk(session) >= LAYERS - layers
  assert f"disk         the experts of {LAYERS - layers} of {LAYERS} layers" in session.plan[-1]
  for prompt, text in zip(PROMPTS, expected):
    assert session.texts([prompt], GREEDY, max_new_tokens=9) == [text]
  assert session.texts(PROMPTS, GREEDY, max_new_tokens=9) == expected


@pytest.mark.nightly  # by day test_offload.py, of experts in the host's memory
@float32
def test_the_same_tokens_with_experts_over_devices(folder):
  expected = Session(model=folder).texts(PROMPTS, GREEDY, max_new_tokens=5)
  request = OffloadRequest("ring,early", host_memory=1)
  session = Session(model=folder, mesh="expert=2", request=request)
  assert session.texts(PROMPTS, GREEDY, max_new_tokens=5) == expected


@float32
def test_experts_that_are_split_do_not_stay_in_their_files(folder):
  with pytest.raises(ConfigError, match=r"^host_memory: .* only with mesh.tensor=1"):
    Session(model=folder, mesh="tensor=2", request=OffloadRequest("ring,early", host_memory=1))


@float32
def test_a_file_that_is_cut_while_it_is_read_ends_the_generation(folder, tmp_path):
  request = OffloadRequest("early", host_memory=1)
  copy = tmp_path / "copy"
  copy.mkdir()
  for file in InferenceFolder(folder).path.iterdir():
    (copy / file.name).write_bytes(file.read_bytes())
  session = Session(model=str(copy), request=request)
  (file,) = copy.glob("*.safetensors")
  content = file.read_bytes()
  file.unlink()  # mapped tensors keep the old one
  file.write_bytes(content[: len(content) // 2])
  with pytest.raises(jax.errors.JaxRuntimeError, match="is truncated"):
    session.texts(PROMPTS, GREEDY, max_new_tokens=5)


@float32
def test_an_interruption_leaves_no_thread(folder):
  # A thread of XLA's that has called Python stays known as a dummy; it is none of ours.
  ours = lambda: {t for t in threading.enumerate() if not t.name.startswith("Dummy")}
  threads = ours()
  session = Session(model=folder, request=OffloadRequest("ring,early", host_memory=1))
  tokens = session.tokens([session.encode("def ")], GREEDY, max_new_tokens=30, chunk=2)
  next(tokens), next(tokens)
  tokens.close()
  del session, tokens
  gc.collect()
  assert ours() <= threads


@pytest.mark.parametrize("folder", ["float32", "int8"], indirect=True)
def test_eight_bits_of_a_folder_that_has_more(folder):
  if InferenceFolder(folder).dtype == "int8":
    Session(model=folder, request=OffloadRequest("early", host_memory=1, int8_experts=True))
    return
  with pytest.raises(ConfigError, match=r"^int8_experts .* --dtype int8"):
    Session(model=folder, request=OffloadRequest("early", host_memory=1, int8_experts=True))
