"""Steps whose data ranks partition the embedding are those of ranks that each read all of it."""

import dataclasses
import functools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night, pairwise
from drawn import drawn_init
from jax.sharding import PartitionSpec as P
from tiny_models import DENSE, LONGCAT, POS2, ROUTER, SMALL

from scmoe.base.errors import ConfigError, Preempted
from scmoe.layers.partitioned import rows_travel
from scmoe.models.gradient_sums import accumulate
from scmoe.moe.dispatch import DispatchConfig
from scmoe.parallel.gradients import global_norm
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, batch_sharding, manual
from scmoe.run.build import build
from scmoe.run.config import RunConfig
from scmoe.run.config_files import find_config, load_config
from scmoe.run.dry_run import dry_run
from scmoe.run.fields import with_field
from scmoe.run.host_memory import planned_away
from scmoe.run.placement import on_mesh
from scmoe.train import train
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.host_arrays import lies_on_host
from scmoe.training.kept import Groups
from scmoe.training.metrics import read_metrics
from scmoe.training.options import (
  CheckpointConfig,
  OptimizerAblation,
  OptimizerConfig,
  TrainConfig,
)
from scmoe.training.step import init_state, make_train_step

MODELS = {
  "dense": dataclasses.replace(DENSE, num_layers=2),
  "top2": SMALL,
  "pos2": POS2,
  "longcat": LONGCAT,
}
LENGTH, ROWS = 8, 16


def built(
  mesh, name="pos2", microbatches=1, remat="none", model=None, rows=ROWS, teacher=None, **changed
):
  """A run of so many rows a step, on simulated devices; with the model of a name as teacher."""
  train = {"batch_size": rows // microbatches, "tokens_per_step": rows * LENGTH, "remat": remat}
  run = RunConfig(
    model=model or MODELS[name],
    router=ROUTER,
    dispatch=DispatchConfig(transport="dropless"),
    mesh=mesh,
    train=TrainConfig(**train, steps=8),
    **changed,
  )
  run = dataclasses.replace(run, data=dataclasses.replace(run.data, seq_len=LENGTH)).resolve(
    num_devices=mesh.size, vocab_size=64
  )
  if teacher is not None:
    teacher = dataclasses.replace(run, model=MODELS[teacher].resolve(vocab_size=64))
  return build(run, jax.devices()[: mesh.size], teacher)


# -- gradients -------------------------------------------------------------------------------------


@functools.cache
def gradients(embedding, mode, model, microbatches, remat, axes=(4, 2, 1), teacher=None, flight=1):
  """Loss, gradients and their norm of one step, as whole arrays."""
  mesh = MeshConfig(*axes, shard_state=mode, embedding=embedding)
  own = built(mesh, model, microbatches, remat, teacher=teacher)
  shares, given = own.optimizer.shares, own.shapes_given
  out = own.specs if shares is None else shares.share_specs

  def local(params, given, batch):
    read = params if shares is None else shares.to_read(params)
    objective = own.objective if given is None else own.objective.taught(given)
    key = jax.random.key(3)
    loss, grads, aux = accumulate(
      objective, read, {}, batch, key, own.specs, flight=flight, shares=shares
    )
    return loss, global_norm(grads, out), grads, aux.nats, aux.correct

  stored = out if mode == "parameters" else own.specs
  taught = jax.tree.map(lambda s: s.sharding.spec, given)
  specs = (stored, taught, P(None, BATCH_AXES))
  program = manual(local, own.mesh, specs, (P(), P(), out, P(), P()))
  numbers = np.random.default_rng(0)
  draw = lambda s: jnp.asarray(numbers.normal(0, 0.3, s.shape), s.dtype)
  drawn = jax.tree.map(draw, (own.shapes, given))
  return jax.device_get(jax.jit(program)(*drawn, own.random_batch()))


def assert_same(got, want):
  for a, b in zip((*got[:2], *got[3:]), (*want[:2], *want[3:]), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)
  leaves = jax.tree_util.tree_leaves_with_path(got[2])
  for (path, a), b in zip(leaves, jax.tree.leaves(want[2]), strict=True):
    room = 1e-6 * (np.abs(b).max() + 0.1 * want[1])
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=room, err_msg=jax.tree_util.keystr(path))


CASES = pairwise(MODELS, ("none", "moments", "parameters"), (1, 2), ("none", "full"))
# By day a table that travels, and rows that do; untied tables by day: tests/layers.
BY_DAY = [("dense", "none", 1, "none"), ("dense", "parameters", 1, "full")]


@pytest.mark.parametrize(
  ("model", "mode", "microbatches", "remat"),
  BY_DAY + [night(*case) for case in CASES if case not in BY_DAY],
)
def test_gradients_are_those_of_a_whole_embedding(model, mode, microbatches, remat):
  got = gradients("partitioned", mode, model, microbatches, remat)
  assert_same(got, gradients("whole", "none", model, microbatches, "none"))


@pytest.mark.nightly
@pytest.mark.parametrize(
  ("model", "fields"),
  [
    ("dense", {"axes": (2, 1, 2, 2)}),  # devices of a sequence axis have other tokens, too
    ("longcat", {"axes": (2, 1, 1, 2)}),
    ("dense", {"teacher": "longcat"}),  # its embedding is whole
    ("longcat", {"teacher": "dense"}),
    ("dense", {"flight": 2}),  # two microbatches side by side
  ],
)
def test_other_axes_teachers_and_microbatches_side_by_side(model, fields):
  got = gradients("partitioned", "parameters", model, 2, "none", **fields)
  assert_same(got, gradients("whole", "none", model, 2, "none", **fields))


# -- whole steps -----------------------------------------------------------------------------------

SMOOTH = OptimizerConfig(eps=1e-3, clip_norm=0.1)  # Adam's own eps makes signs of rounding errors
STEPS = {  # compute type, optimizer, mesh.shard_state, tied
  "clipped": ("float32", SMOOTH, "parameters", True),
  "muon": ("float32", dataclasses.replace(SMOOTH, name="muon"), "parameters", False),
  "halves": (
    "bfloat16",
    dataclasses.replace(SMOOTH, ablation=OptimizerAblation("halves")),
    "moments",
    True,
  ),
  "loss scale": ("float16", SMOOTH, "none", False),
}
NAMES = ["clipped", *map(night, ("muon", "halves", "loss scale"))]


def run_of(name, mesh):
  dtype, optimizer, mode, tied = STEPS[name]
  model = dataclasses.replace(MODELS["dense"], dtype=dtype, tie_embeddings=tied, vocab_size=256)
  mesh = dataclasses.replace(mesh, shard_state=mode)
  return built(mesh, model=model, rows=8, optimizer=optimizer)


@functools.cache
def stepped(name, embedding):
  """(run, state, scalars of each step, text of the compiled step) after three steps."""
  own = run_of(name, MeshConfig(4, 1, 2, embedding=embedding, bucket_bytes=0))
  abstract = own.abstract_state()
  state, found = init_state(drawn_init(own), own.optimizer, 0, abstract), []
  place = batch_sharding(own.mesh, leading=1)
  batch = jax.device_put(own.random_batch(), place)
  step = make_train_step(own.objective, own.optimizer, abstract).lower(abstract, batch).compile()
  for _ in range(3):
    state, scalars, _ = step(state, batch)
    found.append(jax.device_get(scalars))
  return own, state, found, step.as_text()


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_a_whole_embedding(name):
  """On data=4 x tensor=2: clipping, Muon, halves, and a loss scale that overflows at first."""
  _, want, wanted, _ = stepped(name, "whole")
  _, got, found, _ = stepped(name, "partitioned")
  rtol = 1e-5 if STEPS[name][0] == "float32" else 3e-2
  for a, b in zip(found, wanted, strict=True):
    assert a["skipped"] == b["skipped"]
    for key in ("loss", "grad_norm", "accuracy"):
      np.testing.assert_allclose(a[key], b[key], rtol=rtol, err_msg=key)
  moved = SMOOTH.learning_rate * len(found)
  for a, b in zip(
    jax.tree.leaves(got.for_checkpoint().params), jax.tree.leaves(want.for_checkpoint().params)
  ):
    np.testing.assert_allclose(a, b, rtol=0, atol=moved * 10 * rtol)


# How a checkpoint is written -> the meshes on which it is read.
READERS = {
  "whole": [MeshConfig(2, 1, 1, embedding="partitioned")],
  "partitioned": [MeshConfig(1, 1, 2)],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("written", READERS)
def test_a_checkpoint_loads_partitioned_or_not_bit_for_bit(tmp_path, name, written):
  want = stepped(name, written)[1].for_checkpoint()
  Checkpointer(tmp_path, CheckpointConfig()).save_now(3, want, {}, {})
  for mesh in READERS[written]:
    abstract = run_of(name, mesh).abstract_state()
    reader = Checkpointer(tmp_path, CheckpointConfig())
    read = reader.restore_latest_valid(abstract.for_checkpoint())
    got = read.state.like(abstract).placed(abstract)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(abstract), strict=True):
      assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    for a, b in zip(jax.tree.leaves(got.for_checkpoint()), jax.tree.leaves(want), strict=True):
      np.testing.assert_array_equal(a, b)


# -- what is held, and what travels ----------------------------------------------------------------


def held(tree):
  """Bytes of arrays on the first device."""
  return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", NAMES)
def test_each_row_and_its_moments_live_once(name):
  own, state, _, _ = stepped(name, "partitioned")
  table = state.params["embedding"]["tokens"]
  part = jax.tree.leaves(table)[0].addressable_shards[0].data
  assert part.size * 8 == 256 * SMALL.width  # 4 data ranks x 2 tensor ranks
  planned = dry_run(own.run).memory
  assert planned.parameters == held(state.params)
  assert planned.optimizer == held(state.opt_state)


def moved(text):
  """(operation, elements of its result) of each collective in a compiled program."""
  kinds = "all-gather|all-to-all|reduce-scatter|all-reduce|collective-permute"
  found = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text)
  sizes = lambda types: [
    math.prod(map(int, filter(None, dims.split(","))))
    for dims in re.findall(r"\[([\d,]*)\]", types)
  ]
  return [(kind, size) for types, kind in found for size in sizes(types)]


def test_rows_travel_in_the_compiled_step_and_no_table_does():
  """16 tokens a data rank; each tensor rank has 128 of the vocabulary's 256."""
  found = moved(stepped("clipped", "partitioned")[-1])
  table, rows = 128 * SMALL.width, 16 * SMALL.width
  sizes = lambda kind: [size for other, size in found if other == kind]
  assert table not in sizes("all-gather") + sizes("all-reduce")
  assert sizes("all-gather").count(4 * rows) == 1  # hidden states of all ranks' tokens
  assert rows in sizes("reduce-scatter")  # their gradients
  # The part of the table, turned, and rows; and the gradients of both.
  sent = sum(sizes("all-to-all"))
  assert sent == 2 * (table // 4 + rows)
  whole = moved(stepped("clipped", "whole")[-1])
  assert ("all-gather", table) in whole
  assert not [kind for kind, _ in whole if kind == "all-to-all"]


@pytest.mark.parametrize(("embedding", "copies"), [("whole", 1), ("partitioned", 4)])
def test_the_plan_counts_the_copies_that_the_host_keeps(embedding, copies):
  """Ranks with other parts of the embedding are groups of their own: the host has all for each."""
  mesh = MeshConfig(4, 1, 1, embedding=embedding, moments_in="host", moments_update="host")
  own = built(mesh, "dense", rows=8)
  state = own.abstract_state()
  kept = [x for x in jax.tree.leaves((state.params, state.opt_state)) if lies_on_host(x)]
  plan = planned_away(own.run, state)
  assert plan.together == len(Groups(kept).members) == copies


def traffic(tied, rows, embedding="partitioned"):
  model = dataclasses.replace(MODELS["dense"], tie_embeddings=tied)
  own = built(
    MeshConfig(4, 1, 1, shard_state="moments", embedding=embedding), model=model, rows=rows
  )
  return dry_run(own.run)


@pytest.mark.parametrize("tied", [True, night(False)])  # untied heads by day: tests/layers
def test_the_dry_run_says_bytes_by_hand(tied):
  """float32: a table is 64 x 16, of which a rank has a quarter; rows of 8 tokens."""
  table = 4 * 64 * 16
  rows = traffic(tied, 4)  # 8 tokens on each rank
  row, ids = 4 * 8 * 16, 4 * 8
  head = 2 * 3 * row + 3 * 2 * ids  # hidden states, their gradients; targets and weights
  lookup = 2 * row * 3 // 4 + 3 * ids
  turned = 2 * (table // 4) * 3 // 4 if tied else 0
  # `rows_travel` decides: a tied table costs 8 V, rows 8 T + 8 T N + 8 V / N.
  assert rows_travel(tokens=8, vocab=64, ranks=4, itemsize=4, tied=tied) == (True, True)
  assert rows.traffic.embedding == head + lookup + turned
  assert rows.memory.gathered == 0
  tables = traffic(tied, 64)  # 128 tokens on each rank
  count = 1 if tied else 2
  assert rows_travel(tokens=128, vocab=64, ranks=4, itemsize=4, tied=tied) == (False, False)
  assert tables.traffic.embedding == count * 2 * table * 3 // 4
  assert tables.memory.gathered == count * table
  whole = traffic(tied, 4, "whole")
  assert whole.traffic.embedding == 0
  assert whole.traffic.gradients - rows.traffic.gradients == count * table * 3 // 4


# -- commands --------------------------------------------------------------------------------------


def of_command(embedding, data, mode, **training):
  """A run as the command makes it, with evaluations and samples."""
  smoke = load_config(find_config("quickstart"), "smoke")
  train = dataclasses.replace(smoke.train, steps=4, eval_every=2, sample_every=2, **training)
  return dataclasses.replace(
    smoke, mesh=MeshConfig(data, 1, 1, shard_state=mode, embedding=embedding), train=train
  )


@pytest.mark.nightly
def test_a_run_evaluates_samples_and_goes_on_without_the_partition(tmp_path, capsys):
  with pytest.raises(Preempted):
    train(of_command("partitioned", 2, "parameters", stop_after=2), tmp_path)
  assert "sample at step 2" in capsys.readouterr().out
  assert int(train(of_command("whole", 1, "none"), tmp_path).step) == 4
  losses = {line["step"]: line["loss"] for line in read_metrics(tmp_path, "eval")}
  assert losses.keys() == {2, 4}
  assert losses[4] < losses[2]


def test_other_commands_read_whole_embeddings():
  run = of_command("partitioned", 2, "none").resolve(num_devices=2, vocab_size=257)
  assert run.mesh.embedding_ranks == 2
  for text in ("", "data=2", "data=1"):
    assert on_mesh(run, text).mesh.embedding_ranks == 1


@pytest.mark.parametrize(
  ("config", "fields", "message"),
  [
    ("quickstart", {"model.vocab_size": "322", "mesh.data": "4"},
     r"mesh.embedding='partitioned' cuts the vocabulary into mesh.data=4 equal parts, got "
     r"model.vocab_size=322; use 324, or mesh.embedding=whole"),
    ("quickstart", {"model.vocab_size": "322", "mesh.data": "4", "mesh.tensor": "2"},
     r"into mesh.data=4 x mesh.tensor=2 equal parts, got model.vocab_size=322; use 328"),
    ("quickstart", {"model.vocab_size": "333", "mesh.data": "3", "train.batch_size": "3",
                    "train.tokens_per_step": "0"},
     r"cuts rows of the table into mesh.data=3 equal slices, got model.width=\d+; use a mul"),
    ("shapes_vit", {"mesh.data": "2"}, r"cuts a vocabulary, got model.architecture='\w+', which"),
    ("quickstart", {"mesh.data": "2", "lora.rank": "2", "train.init_from": "x"},
     r"lora.rank=2 trains few parameters, got mesh.embedding='partitioned', which"),
  ],
)  # fmt: skip
def test_what_cannot_be_partitioned_is_refused_in_a_line(config, fields, message):
  run = load_config(find_config(config), "smoke")
  for field, value in ({"mesh.embedding": "partitioned"} | fields).items():
    run = with_field(run, field, value)
  with pytest.raises(ConfigError, match=message) as caught:
    run.resolve(num_devices=8, vocab_size=257)
  assert "\n" not in str(caught.value)


@pytest.mark.nightly
def test_the_experiment_runs_with_whole_and_partitioned_embeddings(tmp_path):
  """`experiments/scale/run.py` on two simulated devices."""
  script = Path(__file__).parents[2] / "experiments" / "scale" / "run.py"
  words = ["--smoke", "--rounds=1", "--arms=parameters,partitioned,partitioned_moments"]
  command = [sys.executable, str(script), *words, f"--json={tmp_path / 'found.json'}"]
  subprocess.run(command, check=True, capture_output=True, timeout=600)
  arms = json.loads((tmp_path / "found.json").read_text())["arms"]
  whole = arms["parameters"]
  for name in ("partitioned", "partitioned_moments"):
    assert arms[name]["loss"] == pytest.approx(whole["loss"], rel=1e-3)
  assert arms["partitioned"]["state_bytes"] == whole["state_bytes"]
