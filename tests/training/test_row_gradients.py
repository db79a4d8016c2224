"""The gradient of an embedding table is the same whether it travels as rows or as a table."""

import dataclasses
import functools

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
  tied=False,
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
  ("mesh", "microbatches", "flight"),
  [
    (MeshConfig(2, 2, 1), 1, 1),
    (MeshConfig(2, 2, 1, shard_state="moments"), 1, 1),
    (MeshConfig(1, 2, 2), 2, 2),
    (MeshConfig(2, 1, 1, sequence=2), 1, 1),
  ],
  ids=["one microbatch", "moments", "tensor, two in turns", "sequence"],
)
def test_rows_add_up_to_the_table(mesh, microbatches, flight):
  (got, text), (want, whole) = (
    step(mesh, microbatches, rows=rows, flight=flight) for rows in (True, False)
  )
  assert text.count("stablehlo.all_gather") == whole.count("stablehlo.all_gather") + 2 * flight
  assert_same(got, want)


@pytest.mark.parametrize("unroll", [0, 1], ids=["written out", "a scan"])
def test_the_table_is_not_summed(unroll):
  """The model has pairs, written out or in a scan."""
  summed = f"tensor<{VOCAB}x{POS2.width}xf32>) -> tensor<{VOCAB}x{POS2.width}xf32>"
  mesh, model = MeshConfig(1, 2, 1), dataclasses.replace(POS2, num_layers=4)
  (got, text), (want, whole) = (
    step(mesh, rows=rows, model=model, unroll=unroll) for rows in (True, False)
  )
  assert (text.count(summed), whole.count(summed)) == (0, 1)
  assert_same(got, want)


@pytest.mark.parametrize(
  ("microbatches", "tied"), [(2, False), (1, True)], ids=["two microbatches", "a tied head"]
)
def test_a_table_with_other_gradients_travels_as_a_table(microbatches, tied):
  """An earlier microbatch, or a tied head, adds to all rows of it."""
  mesh = MeshConfig(2, 2, 1)
  (_, text), (_, whole) = (step(mesh, microbatches, tied, rows=rows) for rows in (True, False))
  assert text == whole


@pytest.mark.parametrize("vocab", [night(VOCAB), VOCAB + 1])
def test_a_rank_keeps_its_share_of_rows_or_of_columns(vocab):
  """Four ranks divide a vocabulary of 512; they divide the width if the vocabulary is 513."""
  mesh = MeshConfig(2, 2, 1, shard_state="moments")
  got, want = (step(mesh, rows=rows, vocab=vocab)[0] for rows in (True, False))
  assert_same(got, want)


@pytest.mark.parametrize(
  ("data", "vocab"), [(2, VOCAB), night(2, VOCAB + 2)], ids=["by all", "by two of six"]
)
def test_shared_parameters_travel_as_before(data, vocab):
  """Each group scatters the gradient of a shared table, so no total is left for its rows."""
  expert = 2 if vocab == VOCAB else 3
  mesh = MeshConfig(data, expert, 1, shard_state="parameters")
  (got, text), (want, whole) = (step(mesh, rows=rows, vocab=vocab) for rows in (True, False))
  assert text == whole
  assert_same(got, want, 0)


def test_many_tokens_travel_as_a_table():
  """Eight devices would receive more bytes of rows than of the table."""
  mesh = MeshConfig(4, 2, 1)
  sizes = {"itemsize": 4, "table_itemsize": 4, "scattered": False}
  assert not rows_are_fewer(LENGTH * ROWS, 64, **sizes)
  assert rows_are_fewer(LENGTH * ROWS, VOCAB, **sizes)
  assert step(mesh, rows=True)[1] != step(mesh, rows=False)[1]


@pytest.mark.parametrize("travels", ["bfloat16", night("float32")])
def test_bfloat16_rows_are_as_near_as_a_bfloat16_table(travels):
  """The rows' gradients are added in float32; a model in bfloat16 rounds them before that."""
  mesh = MeshConfig(2, 2, 1)
  exact = step(mesh)[0][1]["embedding"]["tokens"]
  found = [
    step(mesh, dtype="bfloat16", rows=rows, travels=travels)[0][1]["embedding"]["tokens"]
    for rows in (True, False)
  ]
  by_rows, by_table = (np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in found)
  assert found[0].dtype == jnp.float32
  assert by_rows <= 1.02 * by_table
