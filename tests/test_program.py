"""The program that a user's command traces and compiles: how deep its code is, what it sends."""

import re
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from covering import night

from scmoe import train
from scmoe.base.batch import Batch
from scmoe.kernels.grouped_matmul import down_backward, rows_product, weights_product
from scmoe.kernels.top_k import mosaic_gpu as top_k
from scmoe.parallel.collectives import NAMES
from scmoe.parallel.mesh import batch_sharding
from scmoe.profiling.program import Program
from scmoe.run import build
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.training.step import make_train_step

PACKAGE = str(Path(train.__file__).parent)
TO_THE_EXCHANGE, TO_THE_KERNEL = 12, 15


def smoke(**values):
  run = load_config(find_config("quickstart"), "smoke")
  for name, value in values.items():
    run = with_field(run, name.replace("__", "."), str(value))
  return run


# --- how deep a token's way is --------------------------------------------------------------------


class Traced(Exception):
  """Ends a run between tracing and compiling."""


def project_frames():
  """Functions of this project on the stack, the outermost first, from `scmoe.train.train` on."""
  frame, names = sys._getframe(2), []
  while frame is not None:
    if frame.f_code.co_filename.startswith(PACKAGE):
      names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
    frame = frame.f_back
  names.reverse()
  return names[names.index("train.train") :]


@pytest.fixture
def trace(monkeypatch, tmp_path):
  """Traces the step of a run, and nothing more."""

  def stop(*_, **__):
    raise Traced

  def trace(run):
    monkeypatch.setattr(Program, "compile", stop)
    with pytest.raises(Traced):
      train.train(run, tmp_path)

  return trace


@pytest.mark.parametrize("transport", ["capacity", night("dropless")])
def test_frames_from_train_to_the_exchange(transport, monkeypatch, trace):
  run = smoke(
    mesh__data=4,
    mesh__expert=2,
    dispatch__transport=transport,
    train__tokens_per_step=2 * 8 * 16,  # microbatches are one more loop on the way
  )
  assert run.train.microbatches(run.data.seq_len) > 1
  found, exchange = [], jax.lax.all_to_all

  def recorded(*args, **kwargs):
    found.append(project_frames())
    return exchange(*args, **kwargs)

  monkeypatch.setattr(jax.lax, "all_to_all", recorded)
  trace(run)
  # Overflow rounds are the dropless transport's own loop, which balanced routing never enters.
  found = [frames for frames in found if "dropless._sum_of_rounds" not in frames]
  deepest = max(found, key=len)
  assert deepest[-1] == "collectives.all_to_all"
  assert "gradient_sums.add_group" in deepest
  assert len(deepest) <= TO_THE_EXCHANGE, " > ".join(deepest)


def test_frames_from_train_to_the_kernel(monkeypatch, trace):
  run = smoke(
    mesh__data=1,
    model__dtype="bfloat16",
    model__ffn__backend="mosaic_gpu",
    dispatch__transport="dropless",
    model__width=64,
    model__mlp_hidden=64,
  )
  found = []

  def launch(body, operands, out_type, tiling, num_sms):
    def kernel(*arrays):
      found.append(project_frames())
      return [jnp.zeros(out.shape, out.dtype) for out in jax.tree.leaves(out_type)]

    return kernel

  for module in (rows_product, weights_product, down_backward, top_k):
    monkeypatch.setattr(module, "launch", launch)  # what it gives is the kernel
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  trace(run)
  deepest = max((frames for frames in found if "experts.__call__" in frames), key=len)
  assert deepest[-1] == "rows_product.rows_product"
  assert len(deepest) <= TO_THE_KERNEL, " > ".join(deepest)


# --- what it sends --------------------------------------------------------------------------------

SENDS = ("all-to-all", "all-reduce", "all-gather", "reduce-scatter", "collective-permute")
_SENDS = re.compile(rf" ({'|'.join(SENDS)})(-start)?\(")
# A collective's line of the program, and where the code that asked for it stands.
_LINE = re.compile(rf" ({'|'.join(SENDS)})(?:-start)?\(.*?op_name=\"([^\"]*)\"")


def collectives(text):
  """(kind, name in the code or None) -> how often, of a compiled program."""
  found = Counter()
  for line in filter(_SENDS.search, text.splitlines()):
    match = _LINE.search(line)
    assert match, f"a collective that no line of the code asked for: {line[:300]}"
    scopes = re.split(r"[/()]", match[2])
    found[match[1], next((s for s in reversed(scopes) if s in NAMES), None)] += 1
  return found


def compiled_step(run):
  run = run.resolve(num_devices=8, vocab_size=build.vocab_size(run.data))
  built = build.build(run)
  state = built.abstract_state()
  micro = run.train.microbatches(run.data.seq_len)
  shape = (micro, run.train.batch_size, run.data.seq_len)
  sharding = batch_sharding(built.mesh, leading=1)
  ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
  weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
  step = make_train_step(built.objective, built.optimizer, state)
  return built, step.lower(state, Batch(ids, ids, weights, ids, ids)).compile().as_text()


@pytest.mark.parametrize(
  ("fields", "names"),
  [
    night({"mesh__data": 8}, {"gradients", "statistics"}),
    night(
      {"mesh__data": 4, "mesh__expert": 2, "dispatch__transport": "capacity"},
      {"dispatch", "combine", "gradients", "statistics"},
    ),
    (
      {"mesh__data": 2, "mesh__expert": 2, "mesh__tensor": 2, "dispatch__transport": "dropless"},
      {"dispatch", "combine", "counts", "tensor", "gradients", "statistics"},
    ),
  ],
  ids=["data", "data-expert", "data-expert-tensor"],
)
def test_a_compiled_step_sends_what_the_code_names(fields, names):
  _, text = compiled_step(smoke(**fields))
  found = collectives(text)
  assert {name for _, name in found} == names, found
  # Rows move by all-to-alls only, and nothing else does.
  assert {name for kind, name in found if kind == "all-to-all"} == names & {"dispatch", "combine"}
