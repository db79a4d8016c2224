"""The gradient of an embedding table is the same whether it travels as rows or as a table."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from drawn import drawn
from jax.sharding import PartitionSpec as P
from tiny_models import DENSE, POS2, ROUTER

from scmoe.blocks.options import OverlapConfig
from scmoe.models.gradient_sums import accumulate
from scmoe.models.row_gradients import rows_are_fewer
from scmoe.moe.dispatch import DispatchConfig
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, manual
from scmoe.run.build import build
from scmoe.run.config import RunConfig
from scmoe.training.options import TrainConfig

LENGTH, ROWS, VOCAB = 8, 16, 512


@functools.cache
def step(
  mesh,
  microbatches=1,
  tied=True,
  dtype="float32",
  rows=False,
  flight=1,
  travels="float32",
  vocab=VOCAB,
  model=DENSE,
  unroll=0,
):
  """(loss, whole gradients) of a step, and the program."""
  train = {"batch_size": ROWS // microbatches, "tokens_per_step": ROWS * LENGTH, "steps": 8}
  run = RunConfig(
    model=dataclasses.replace(model, tie_embeddings=tied, vocab_size=vocab),
    router=ROUTER,
    overlap=OverlapConfig(unroll=unroll),
    dispatch=DispatchConfig(transport="dropless"),
    mesh=mesh,
    train=TrainConfig(**train),
  )
  run = dataclasses.replace(run, data=dataclasses.replace(run.data, seq_len=LENGTH))
  run = run.resolve(num_devices=mesh.size, vocab_size=vocab)
  own = build(run, jax.devices()[: mesh.size])
  shares = own.optimizer.shares
  out = own.specs if shares is None else shares.share_specs

  def local(params, batch):
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    read = params if shares is None else shares.to_read(params)
    loss, grads, _ = accumulate(
      own.objective,
      read,
      {},
      batch,
      jax.random.key(3),
      own.specs,
      travels,
      flight,
      shares=shares,
      embedding_rows=rows,
    )
    return loss, grads

  stored = out if mesh.shard_state == "parameters" else own.specs
  program = jax.jit(manual(local, own.mesh, (stored, P(None, BATCH_AXES)), (P(), out)))
  given = drawn(own.shapes, 0.3), own.random_batch()
  return jax.device_get(program(*given)), program.lower(*given).as_text()


def assert_same(got, want, room=1e-6):
  np.testing.assert_allclose(got[0], want[0], rtol=room)
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(got[1]), jax.tree.leaves(want[1]), strict=True
  ):
    np.testing.assert_allclose(
      a, b, rtol=room, atol=room * np.abs(b).max(), err_msg=jax.tree_util.keystr(path)
    )


@pytest.mark.parametrize(
  ("mesh", "microbatches", "tied", "flight"),
  [
    (MeshConfig(2, 2, 1), 2, True, 1),
    (MeshConfig(2, 2, 1, shard_state="moments"), 1, True, 1),
    (MeshConfig(2, 2, 1, shard_state="moments"), 2, False, 1),
    (MeshConfig(1, 2, 2), 2, True, 2),
    (MeshConfig(2, 1, 1, sequence=2), 1, False, 1),
  ],
  ids=["two microbatches", "moments", "moments, a head of its own", "tensor, in turns", "sequence"],
)
def test_rows_add_up_to_the_table(mesh, microbatches, tied, flight):
  (got, text), (want, whole) = (
    step(mesh, microbatches, tied, rows=rows, flight=flight) for rows in (True, False)
  )
  assert text.count("stablehlo.all_gather") == whole.count("stablehlo.all_gather") + 2 * flight
  assert_same(got, want)


@pytest.mark.parametrize(
  ("tied", "microbatches", "every"), [(True, 2, 2), night(False, 2, 2), night(True, 1, 1)]
)
def test_pairs_that_are_written_out_wait_for_the_table(tied, microbatches, every):
  """In the middle of the backward pass; with a MoE in every block pairs begin one ahead."""
  model = dataclasses.replace(POS2, moe_every=every, num_layers=4)
  (got, text), (want, whole) = (
    step(MeshConfig(1, 2, 1), microbatches, tied, rows=rows, model=model) for rows in (True, False)
  )
  assert_same(got, want)
  assert text.count("stablehlo.all_gather") == whole.count("stablehlo.all_gather") + 2


@pytest.mark.parametrize("microbatches", [1, night(2)])
def test_a_scan_over_pairs_sums_the_table_if_there_is_one(microbatches):
  """XLA would put that sum behind the scan, so rows would travel for nothing."""
  (_, text), (_, whole) = (step(MeshConfig(2, 2, 1), microbatches, rows=rows, unroll=1)
                           for rows in (True, False))  # fmt: skip
  assert text == whole


def test_a_table_that_is_only_looked_up_once_travels_as_rows_alone():
  """In a step of one microbatch nothing was added to the table before; also in a scan."""
  summed = f"tensor<{VOCAB}x{DENSE.width}xf32>) -> tensor<{VOCAB}x{DENSE.width}xf32>"
  mesh = MeshConfig(2, 2, 1)
  rows, table, head = (
    step(mesh, 1, tied, rows=rows, unroll=0 if tied else 1)[1].count(summed)
    for tied, rows in ((False, True), (False, False), (True, True))
  )
  assert (rows, table, head) == (0, 1, 1)


@pytest.mark.parametrize("vocab", [night(VOCAB), VOCAB + 1])
def test_a_rank_keeps_its_share_of_rows_or_of_columns(vocab):
  """Four ranks divide a vocabulary of 512; they divide the width if the vocabulary is 513."""
  mesh = MeshConfig(2, 2, 1, shard_state="moments")
  got, want = (step(mesh, 2, rows=rows, vocab=vocab)[0] for rows in (True, False))
  assert_same(got, want)


@pytest.mark.parametrize(
  ("data", "vocab"), [(2, VOCAB), night(2, VOCAB + 2)], ids=["by all", "by two of six"]
)
def test_shared_parameters_travel_as_before(data, vocab):
  """Each group scatters the gradient of a shared table, so no total is left for its rows."""
  expert = 2 if vocab == VOCAB else 3
  mesh = MeshConfig(data, expert, 1, shard_state="parameters")
  (got, text), (want, whole) = (step(mesh, 2, rows=rows, vocab=vocab) for rows in (True, False))
  assert text == whole
  assert_same(got, want, 0)


def test_many_tokens_travel_as_a_table():
  """Eight devices would receive more bytes of rows than of the table."""
  mesh = MeshConfig(4, 2, 1)
  assert not rows_are_fewer(
    LENGTH * ROWS // 8, 64, 8, itemsize=4, table_itemsize=4, scattered=False
  )
  assert rows_are_fewer(LENGTH * ROWS // 8, VOCAB, 8, itemsize=4, table_itemsize=4, scattered=False)
  assert step(mesh, rows=True)[1] != step(mesh, rows=False)[1]


@pytest.mark.parametrize("travels", ["bfloat16", night("float32")])
def test_bfloat16_rows_are_as_near_as_a_bfloat16_table(travels):
  """The rows' gradients are added in float32; a model in bfloat16 rounds them before that."""
  mesh = MeshConfig(2, 2, 1)
  exact = step(mesh, 2)[0][1]["embedding"]["tokens"]
  found = [
    step(mesh, 2, dtype="bfloat16", rows=rows, travels=travels)[0][1]["embedding"]["tokens"]
    for rows in (True, False)
  ]
  by_rows, by_table = (np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in found)
  assert found[0].dtype == jnp.float32
  assert by_rows <= 1.02 * by_table


def test_the_head_does_not_wait_for_the_rows():
  """The sum of a tied table reads nothing that the lookups' gradients are made of."""
  _, text = step(MeshConfig(2, 2, 1), 1, rows=True)
  _, whole = step(MeshConfig(2, 2, 1), 1, rows=False)
  assert sums_of_scattered(whole)
  assert not sums_of_scattered(text)


def sums_of_scattered(text):
  """Sums over devices of a float32 table whose operand depends on a scatter into such a table."""
  depends, found, opened = set(), [], None
  for line in text.splitlines():
    line = line.strip()
    if line.startswith("})") and opened:  # the type of an operation with a body
      kind, name, read = opened
      opened = None
      if f"tensor<{VOCAB}x{DENSE.width}xf32>" in line.partition("->")[2]:
        if kind == "scatter":
          depends.add(name)
        elif read & depends:
          found.append(name)
    name, _, rest = line.partition(" = ")
    if not name.startswith("%") or not rest:
      continue
    read = set(re.findall(r"%\w+", rest))
    name = name.partition(":")[0]
    if read & depends:
      depends.add(name)
    for kind in ("scatter", "all_reduce"):
      if f'"stablehlo.{kind}"' in rest:
        opened = kind, name, read
  return found
