"""Embeddings that data ranks partition: values and gradients of a whole one; what travels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from scmoe.layers import cross_entropy, partitioned
from scmoe.layers.embed import Embedding, EmbeddingConfig
from scmoe.layers.partitioned import Travels, rows_travel
from scmoe.parallel.collectives import total
from scmoe.parallel.gradients import reduce_gradients
from scmoe.parallel.mesh import manual, parameter_specs

B, S, D, V = 4, 5, 12, 24
ROWS, TABLES = Travels(True, True), Travels(False, False)


def embedding(tied, **fields):
  return Embedding(EmbeddingConfig(V, D, context=S, tied=tied, **fields), rngs=nnx.Rngs(0))


def drawn(tied, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda a: jnp.asarray(0.5 * rng.normal(size=a.shape), jnp.float32)
  return jax.tree.map(draw, nnx.to_pure_dict(nnx.state(embedding(tied))))


def batch():
  """Tokens and targets that are not spread evenly: one rank's rows need few rows of the table."""
  rng = np.random.default_rng(3)
  ids_BS, targets_BS = rng.integers(0, V, (2, B, S))
  ids_BS[0] = 7
  weights_BS = rng.integers(0, 2, (B, S)) * rng.uniform(0.5, 2, (B, S))
  hidden_BSD = rng.normal(size=(B, S, D))
  wide = lambda x: jnp.asarray(x, jnp.float32)
  return jnp.asarray(ids_BS), jnp.asarray(targets_BS), wide(weights_BS), wide(hidden_BSD)


def found(graph, params, teacher, ids_BS, targets_BS, weights_BS, taught_BSD):
  """A sum of all losses over the ranks, the gradients, and each token's values."""

  def value(params):
    model = nnx.merge(graph, params).ready_for(ids_BS.size, jnp.float32)
    h_BSD = model(ids_BS, jnp.broadcast_to(jnp.arange(S), ids_BS.shape), jnp.float32)
    read_BSD = jnp.sin(h_BSD)
    nats_BS, correct_BS = model.token_losses(read_BSD, targets_BS)
    *sums, each_BS = model.summed_and_each(read_BSD, targets_BS, weights_BS)
    how = {"share": 0.3, "temperature": 2.0}
    taught = model.taught_losses(read_BSD, teacher, taught_BSD, targets_BS, weights_BS, **how)
    loss = (jnp.cos(nats_BS) * weights_BS).sum() + sums[0] + taught[0]
    loss, sums, taught = total((loss, sums, taught), ("data",), "statistics")
    return loss, (sums, taught, (h_BSD, nats_BS, correct_BS, each_BS, model.logits(read_BSD)))

  (loss, (*sums, each)), bars = jax.value_and_grad(value, has_aux=True)(params)
  return (loss, sums), each, bars


@functools.cache
def whole(tied):
  graph = nnx.split(embedding(tied))[0]
  run = lambda params: found(graph, params, nnx.merge(graph, drawn(tied, 1)), *batch())
  return jax.device_get(jax.jit(run)(drawn(tied)))


@pytest.mark.parametrize("travels", [ROWS, TABLES], ids=["rows", "tables"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_values_and_gradients_are_those_of_a_whole_table(mesh_of, monkeypatch, tied, travels):
  """On data=2 x tensor=2, by chunks of one token; a teacher, whose head is whole, among them."""
  monkeypatch.setattr(partitioned, "rows_travel", lambda **_: travels)
  monkeypatch.setattr(cross_entropy, "CHUNK_SCORES", 4 * V)
  monkeypatch.setattr(cross_entropy, "CHUNK_TOKENS", 1)
  graph, params = nnx.split(embedding(tied, partitioned=True))
  own_graph, taught = nnx.split(embedding(tied))
  specs, plain = (nnx.to_pure_dict(parameter_specs(state)) for state in (params, taught))
  rows = P("data")

  def local(params, teacher, *arrays):
    sums, each, bars = found(graph, params, nnx.merge(own_graph, teacher), *arrays)
    return sums, each, reduce_gradients(bars, specs)

  program = manual(
    local, mesh_of(data=2, tensor=2), (specs, plain, *[rows] * 4), (P(), rows, specs)
  )
  got = jax.device_get(jax.jit(program)(drawn(tied), drawn(tied, 1), *batch()))
  wanted = whole(tied)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * np.abs(b).max())
  jax.tree.map(close, got[:2], wanted[:2])
  for a, b in zip(jax.tree.leaves(got[2]), jax.tree.leaves(wanted[2]), strict=True):
    close(a, b)


@pytest.mark.parametrize(
  ("tokens", "ranks", "tied", "travels"),
  [
    # OLMoE: V = 50,304 in bfloat16. A table costs 301,824, a token 4 for a lookup, 4 N for a head.
    (16384, 2, False, (True, True)),  # 65,536 and 131,072
    (40000, 2, False, (True, False)),  # 160,000 and 320,000
    (80000, 2, False, (False, False)),
    (16384, 2, True, (True, True)),  # 65,536 + 131,072 + 100,608 for the table, turned
    (17200, 2, True, (False, False)),  # 68,800 + 137,600 + 100,608
    (8192, 8, True, (False, False)),  # 32,768 + 262,144 + 25,152 for eight ranks' tokens
  ],
)
def test_fewer_bytes_travel(tokens, ranks, tied, travels):
  got = rows_travel(tokens=tokens, vocab=50304, ranks=ranks, itemsize=2, tied=tied)
  assert got == travels
