"""One contract for every transport: y[t] = Σ_k weight[t,k] · expert(expert_id[t,k])(x[t]), exactly.

Values and gradients against a plain dense sum over experts, for balanced, Zipf and all-to-one
routings, on 1, 2, 4 and 8 devices, with every kind of exchange.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import by_day_and_night, night
from flax import nnx
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from scmoe.kernels.grouped_matmul import FFNWeights
from scmoe.kernels.grouped_matmul.fp8 import E4M3, rounded_rows
from scmoe.moe.dispatch import (
  Capacity,
  DispatchConfig,
  Dropless,
  Local,
  Packed,
  PerRank,
  Put,
  dropless,
  make_transport,
)
from scmoe.moe.dispatch.fp8_rows import Fp8Exchange, read_rows, row_bytes
from scmoe.moe.dispatch.options import DispatchAblation
from scmoe.moe.experts import FFNExperts, FFNExpertsConfig
from scmoe.moe.route import make_routing
from scmoe.parallel.collectives import Exchange, waiting
from scmoe.parallel.mesh import AXES, BATCH_AXES, MeshConfig, make_mesh, manual, parameter_specs
from scmoe.profiling.exchanges import collectives

T, D, F, K = 64, 8, 16, 2  # T is global


def choices(kind: str, E: int) -> np.ndarray:
  """int32 [T, K] with different experts in a row."""
  rng = np.random.default_rng(3)
  if kind == "balanced":
    first = np.arange(T) % E
    return np.stack([first, (first + 3) % E], 1).astype(np.int32)
  if kind == "one":  # every first choice is expert 5, every second expert 2
    return np.tile(np.array([5, 2], np.int32), (T, 1))
  share = 1 / np.arange(1, E + 1)
  draw = lambda: rng.choice(E, K, replace=False, p=share / share.sum())
  return np.stack([draw() for _ in range(T)]).astype(np.int32)


def problem(kind: str, E: int):
  rng = np.random.default_rng(7)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  weights = FFNWeights(
    up_GDF=normal(E, D, F),
    gate_GDF=normal(E, D, F),
    down_GFD=normal(E, F, D),
    up_bias_GF=normal(E, F),
    down_bias_GD=normal(E, D),
  )
  weight_TK = jnp.asarray(rng.uniform(0.1, 1, (T, K)), jnp.float32)
  return normal(T, D), weight_TK, weights, jnp.asarray(choices(kind, E)), normal(T, D)


def dense_oracle(x_TD, weight_TK, weights, expert_TK):
  """Every expert on every token; the choices are picked and weighted afterwards. float64."""
  up = jnp.einsum("td,edf->tef", x_TD, weights.up_GDF) + weights.up_bias_GF
  gate = jnp.einsum("td,edf->tef", x_TD, weights.gate_GDF)
  out = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, weights.down_GFD) + weights.down_bias_GD
  picked = jnp.take_along_axis(out, expert_TK[..., None], 1)
  return (weight_TK[..., None] * picked).sum(1)


@functools.cache
def oracle(kind: str, E: int):
  with jax.enable_x64(True):
    x, w, weights, expert, cotangent = problem(kind, E)
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), (x, w, weights))
    y, pull = jax.vjp(lambda *a: dense_oracle(*a, expert), *wide)
    return jax.tree.map(np.asarray, (y, pull(cotangent.astype(jnp.float64))))


def experts_of(E, replicas):
  """Graph of the layer's own experts, and their parameters as `weights` hold them."""
  config = FFNExpertsConfig(D, F, E, activation="swiglu", bias=True)
  make = lambda: FFNExperts(config, adaptive_r=replicas, rngs=nnx.Rngs(0))
  graph, state = nnx.split(nnx.eval_shape(make))

  def with_weights(w):
    values = {"up": w.up_GDF, "gate": w.gate_GDF, "down": w.down_GFD}
    values |= {"up_bias": w.up_bias_GF, "down_bias": w.down_bias_GD}
    return nnx.merge(graph, values)

  names = {"up": "up_GDF", "gate": "gate_GDF", "down": "down_GFD"}
  names |= {"up_bias": "up_bias_GF", "down_bias": "down_bias_GD"}
  specs = nnx.to_pure_dict(parameter_specs(state))
  return with_weights, FFNWeights(**{names[name]: spec for name, spec in specs.items()})


@functools.cache
def compiled(
  *, devices, transport, chunks=1, nodes=1, slack=1.25, replicas=1, E=8, room=0, fp8=False
):
  """(x, weight, weights, expert, cotangent) -> y, gradients, rounds [W], drops [W]; any routing.

  Rounds and drops are those of each device: a sum over them out here would be an all-reduce that
  XLA's partitioner adds. XLA's CPU runtime of jax 0.12 may run it before or after an exchange, on
  one device so and on another so, and then all wait for each other for ever.

  Capacity has `room` rows for each expert and device; 0: for all that there can be.
  """
  mesh = make_mesh(MeshConfig(data=1, expert=devices), num_experts=E)
  size = mesh.shape["expert"]
  kind = Fp8Exchange if fp8 else Exchange
  exchange = kind("expert", size, nodes) if size > 1 and replicas else Exchange()
  with_weights, specs = experts_of(E, replicas)

  def local(x, weight, weights, expert):
    probs = jnp.zeros((x.shape[0], E))
    routing = make_routing(expert, weight, probs, probs)
    rows = room or x.shape[0] + -x.shape[0] % chunks
    way = Dropless(exchange, slack, chunks) if exchange.size > 1 else Local()
    if transport == "capacity":
      way = Capacity(rows, exchange, chunks=chunks)
    if transport == "packed":
      way = Packed(rows, way)
    if transport == "put":
      way = Put(exchange, slack, chunks)
    if transport == "per_rank" and exchange.size > 1:
      way = PerRank(exchange, slack, chunks)
    experts = with_weights(weights)
    sent = way.dispatch(x, routing, experts)
    rows = tuple(experts(rows, layout) for rows, layout in zip(sent.rows, sent.layouts))
    y = way.combine(dataclasses.replace(sent, rows=rows))
    return y, (sent.rounds[None], sent.dropped[None])

  batch = P(BATCH_AXES)
  function = manual(local, mesh, (batch, batch, specs, batch), (batch, (P(AXES), P(AXES))))

  @jax.jit
  def both(x, weight, weights, expert, cotangent):
    y, pull, (rounds, drops) = jax.vjp(
      lambda *a: function(*a, expert), x, weight, weights, has_aux=True
    )
    return y, pull(cotangent), rounds, drops

  return both


def run(kind, *, E=8, **options):
  """y and gradients, and the number of rounds."""
  y, gradients, rounds, _ = compiled(E=E, **options)(*problem(kind, E))
  return jax.tree.map(np.asarray, (y, gradients)), int(np.asarray(rounds)[0])


def assert_equals_oracle(kind, got, E=8):
  for path, want in jax.tree_util.tree_leaves_with_path(oracle(kind, E)):
    value = functools.reduce(_child, path, got)
    error = np.abs(value - want).max() / np.abs(want).max()
    assert error < 1e-5, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def _child(tree, key):
  return getattr(tree, key.name) if hasattr(key, "name") else tree[key.idx]


@pytest.mark.parametrize("kind", ["balanced", "zipf", "one"])
@pytest.mark.parametrize(
  ("transport", "devices"),
  [("capacity", 1), ("capacity", 8), ("packed", 1), ("packed", 4),
   ("dropless", 1), night("dropless", 2), night("dropless", 4), ("dropless", 8),
   night("per_rank", 2), ("per_rank", 4), ("per_rank", 8),
   night("put", 2), ("put", 4), night("put", 8)],
)  # fmt: skip
def test_equals_the_dense_sum(kind, transport, devices):
  got, rounds = run(kind, devices=devices, transport=transport)
  assert_equals_oracle(kind, got)
  if kind == "balanced" or transport == "capacity" or devices == 1:
    assert rounds == 1


@pytest.mark.parametrize(
  ("devices", "kind", "room"), by_day_and_night([1, 4], ["zipf", "one"], [1, 3])
)
def test_packed_drops_what_capacity_drops(kind, devices, room):
  """Values, gradients and the number of drops; with overflow rounds and without."""
  given = problem(kind, 8)
  want = compiled(devices=devices, transport="capacity", room=room)(*given)
  for slack in (1.0, 4.0):
    got = compiled(devices=devices, transport="packed", room=room, slack=slack)(*given)
    assert np.asarray(got[3]).sum() == np.asarray(want[3]).sum() > 0
    for a, b in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
      np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def test_chunks_change_the_capacity_of_all_transports_alike():
  """12 tokens, 6 experts, k = 2, factor 1: C = 4, which three chunks round up to 6."""
  given = {"tokens": 12, "num_experts": 6, "k": 2, "buffers": True}
  rows = {
    (name, chunks): make_transport(
      DispatchConfig(transport=name, capacity_factor=1.0, chunks=chunks), **given
    ).rows
    for name in ("capacity", "packed")
    for chunks in (1, 3)
  }
  assert rows == {("capacity", 1): 4, ("packed", 1): 4, ("capacity", 3): 6, ("packed", 3): 6}


@pytest.mark.parametrize(("factor", "rounds"), [(1.0, 1), (2.0, 5)])
def test_packed_needs_no_overflow_where_capacity_bounds_its_queues(factor, rounds):
  """All choices go to rank 0's two experts: capacity leaves one balanced share of them, or two."""
  mesh = make_mesh(MeshConfig(data=1, expert=4), num_experts=8)
  config = DispatchConfig(transport="packed", capacity_factor=factor, slack=1.0)

  def local(x):
    expert = jnp.tile(jnp.asarray([[0, 1]], jnp.int32), (x.shape[0], 1))
    probs = jnp.zeros((x.shape[0], 8))
    way = make_transport(config, tokens=x.shape[0], num_experts=8, k=2)
    routing = make_routing(expert, jnp.ones(expert.shape), probs, probs)
    sent = way.dispatch(x, routing, lambda rows, layout: rows)
    return way.combine(sent), sent.rounds[None], sent.dropped[None]

  function = manual(local, mesh, P(BATCH_AXES), (P(BATCH_AXES), P(AXES), P(AXES)))
  x = jnp.arange(T * D, dtype=jnp.float32).reshape(T, D)
  y, seen, dropped = jax.jit(function)(x)
  rows = int(factor * 2 * 2)  # 16 tokens of a device over 8 experts, two choices each
  assert int(seen[0]) == rounds
  assert int(dropped[0]) == 2 * (16 - rows)
  kept = np.arange(16) < rows
  np.testing.assert_array_equal(y, 2 * np.asarray(x) * np.tile(kept, 4)[:, None])


def test_packed_loses_no_row_where_tokens_choose_more_computing_experts_than_expected():
  """Every token has four choices, of which two are expected to be of computing experts.

  All four are experts of rank 0: its queue has twice as many rows as the expected choices of all
  tokens, and a capacity factor of 4 keeps each of them.
  """
  mesh = make_mesh(MeshConfig(data=1, expert=2), num_experts=8)
  config = DispatchConfig(transport="packed", capacity_factor=4.0)

  def local(x):
    expert = jnp.tile(jnp.arange(4, dtype=jnp.int32), (x.shape[0], 1))
    probs = jnp.zeros((x.shape[0], 16))
    way = make_transport(
      config, tokens=x.shape[0], num_experts=8, zero_experts=8, k=4, real_share=0.5
    )
    routing = make_routing(expert, jnp.ones(expert.shape), probs, probs)
    routing = dataclasses.replace(routing, zero_experts=8)
    sent = way.dispatch(x, routing, lambda rows, layout: rows)
    return way.combine(sent), sent.dropped[None]

  function = manual(local, mesh, P(BATCH_AXES), (P(BATCH_AXES), P(AXES)))
  x = jnp.arange(32 * D, dtype=jnp.float32).reshape(32, D)
  y, dropped = jax.jit(function)(x)
  np.testing.assert_array_equal(dropped, [0, 0])
  np.testing.assert_array_equal(y, 4 * x)


@pytest.mark.parametrize("slack", [1.0, 3.0])
def test_all_to_one_expert_needs_the_rounds_that_its_queue_says(slack):
  """On 8 devices the queue to expert 5 holds 8 choices, that to expert 2 as many."""
  got, rounds = run("one", devices=8, transport="dropless", slack=slack)
  assert_equals_oracle("one", got)
  first = dropless.buffer_rows(16, slack=slack, peers=8)
  assert rounds == 1 + -(-(8 - first) // dropless.overflow_rows(first))


@pytest.mark.parametrize("slack", [1.0, 3.0])
def test_all_tokens_to_one_rank_need_the_rounds_that_its_queue_says(slack):
  """On 8 devices, each with 8 tokens, one of the 8 experts each: a rank gets 2/8 of them."""
  got, rounds = run("one", devices=8, transport="per_rank", slack=slack)
  assert_equals_oracle("one", got)
  # P = 2 leaves six tokens for rounds of one row, P = 6 two for one round of two.
  assert rounds == {1.0: 7, 3.0: 2}[slack]


@pytest.mark.parametrize(
  ("devices", "E", "chunks", "slack", "columns"),
  [(8, 8, 1, 1.0, 1), (8, 8, 2, 1.25, 1), (4, 8, 1, 1.25, 2), (2, 2, 2, 1.0, 1)],
)
def test_a_row_has_room_for_one_choice_of_each_expert_of_a_rank_at_most(
  devices, E, chunks, slack, columns
):
  """Values and gradients where a rank has one expert, or two, and a token two choices.

  With weights before the experts, each choice that there is room for has a row.
  """
  for kind in ("zipf", "one" if E == 8 else "balanced"):
    options = {"devices": devices, "transport": "per_rank", "chunks": chunks, "slack": slack}
    got, _ = run(kind, E=E, **options)
    assert_equals_oracle(kind, got, E)
  mesh = make_mesh(MeshConfig(data=1, expert=devices), num_experts=E)
  way = PerRank(Exchange("expert", devices), slack, chunks)

  def local(x, weight, expert):
    probs, found = jnp.zeros((x.shape[0], E)), []
    for weights in ("after", "before"):
      routing = make_routing(expert, weight, probs, probs, weights=weights)
      found.append(way.dispatch(x, routing, lambda rows, layout: rows))
    after, before = found
    return [layout.group_MK for layout in after.layouts], after.rows, before.rows

  function = manual(local, mesh, (P(BATCH_AXES),) * 3, P(BATCH_AXES))
  x, weight, _, expert, _ = problem("balanced", E)
  arrived, rows, weighted = jax.eval_shape(function, x, weight, expert)
  for chosen, tokens, copies in zip(arrived, rows, weighted, strict=True):
    assert chosen.shape == (tokens.shape[0], columns)
    assert copies.shape == (tokens.shape[0] * columns, D)


@pytest.mark.parametrize(
  ("transport", "chunks"), [("capacity", 2), ("dropless", 3), ("per_rank", 2), ("put", 2)]
)
def test_chunks_change_nothing(transport, chunks):
  got, _ = run("zipf", devices=4, transport=transport, chunks=chunks)
  assert_equals_oracle("zipf", got)


@pytest.mark.parametrize(
  ("transport", "nodes"), [("capacity", 4), ("dropless", 2), ("per_rank", 4)]
)
def test_two_step_exchange_is_the_linear_one_bit_for_bit(transport, nodes):
  linear, _ = run("zipf", devices=8, transport=transport)
  two_step, _ = run("zipf", devices=8, transport=transport, nodes=nodes)
  jax.tree.map(np.testing.assert_array_equal, two_step, linear)


@pytest.mark.parametrize(
  ("transport", "kind", "options"),
  [("capacity", "zipf", {"chunks": 2}), ("dropless", "one", {"slack": 1.0}),
   ("dropless", "zipf", {"chunks": 3, "nodes": 2}),
   ("per_rank", "one", {"slack": 1.0}),
   ("per_rank", "zipf", {"chunks": 3, "nodes": 2}),
   ("packed", "zipf", {"replicas": 2, "E": 2}),
   night("capacity", "balanced", {"nodes": 4})],
)  # fmt: skip
def test_rows_in_fp8_are_the_rounded_rows_bit_for_bit(transport, kind, options):
  """Values, and gradients as if nothing had been rounded; with overflow rounds, chunks, hosts."""
  x, *rest = problem(kind, options.get("E", 8))
  options = {"devices": 8, "transport": transport, **options}
  want = compiled(**options)(rounded_rows(x), *rest)
  got = compiled(**options, fp8=True)(x, *rest)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  plain = compiled(**options)(x, *rest)
  assert np.abs(got[0] - plain[0]).max() > 1e-3  # something was rounded


@pytest.mark.parametrize("silent", [False, True])
def test_bytes_are_made_before_what_a_chunk_waits_for_is_passed_on(silent):
  """In the program's order: rounding, the barrier with the other value, the exchange of bytes."""
  mesh = make_mesh(MeshConfig(data=1, expert=2), num_experts=2)
  exchange = Fp8Exchange("expert", 2, silent=silent)

  def local(x, other):
    waits = {1: other}
    with waiting(waits):
      arrived = exchange.to_experts(x.reshape(2, -1, D), chunk=1)
    return arrived.reshape(x.shape), waits[1]

  rows = P(BATCH_AXES)
  function = manual(local, mesh, (rows, rows), (rows, rows))
  x, other = jnp.ones((4, D)), jnp.full((4, 3), 2.0)
  jaxpr = jax.make_jaxpr(function)(x, other).jaxpr
  program = [(eqn.primitive.name, eqn.invars, eqn.outvars) for eqn in flat(jaxpr)]
  first = lambda found: next((i for i, eqn in enumerate(program) if found(*eqn)), None)
  rounded = first(lambda name, _, out: name == "convert_element_type" and out[0].aval.dtype == E4M3)
  passed_on = first(lambda name, _, out: "barrier" in name and out[-1].aval.shape == (2, 3))
  leaves = first(lambda name, given, _: name == "all_to_all" and given[0].aval.dtype == jnp.uint8)
  assert rounded < passed_on
  assert leaves is None if silent else passed_on < leaves


def flat(jaxpr):
  """The equations of a jaxpr, inner ones in the place of those that hold them."""
  for eqn in jaxpr.eqns:
    inner = [getattr(value, "jaxpr", value) for value in eqn.params.values()]
    inner = [part for part in inner if hasattr(part, "eqns")]
    yield from (e for part in inner for e in flat(part)) if inner else (eqn,)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", [8, 128, 200])
def test_bytes_of_rows_are_read_as_they_were_written(width, dtype):
  rng = np.random.default_rng(5)
  x = rng.normal(size=(2, 6, width)) * 10.0 ** rng.integers(-30, 30, (2, 6, 1))
  x[0, 0], x[1, 2, 3], x[1, 3, 0] = 0, np.nan, np.inf
  x = jnp.asarray(x, dtype)
  row = jax.jit(row_bytes)(x)
  assert row.dtype == jnp.uint8
  assert row.shape == (2, 6, -(-(width + -(-width // 128)) // 16) * 16)
  read = jax.jit(read_rows, static_argnums=(1, 2))(row, width, x.dtype)
  read, want = (np.asarray(a, np.float64) for a in (read, rounded_rows(x)))
  np.testing.assert_array_equal(read, want)
  assert np.isnan(read[[1, 1], [2, 3], [3, 0]]).all()
  assert (read[0, 0] == 0).all()


@pytest.mark.parametrize(
  ("transport", "replicas"),
  [("capacity", 2), night("capacity", 0), ("dropless", 0), night("dropless", 1),
   night("dropless", 2), ("dropless", 4), night("per_rank", 1), ("per_rank", 2)],
)  # fmt: skip
def test_every_way_to_share_an_expert_is_the_same_function(transport, replicas):
  """Two experts on eight devices: hidden width split in four; Tutel's r from 0 to 4."""
  got, _ = run("zipf", devices=8, transport=transport, replicas=replicas, E=2)
  assert_equals_oracle("zipf", got, E=2)


# -- choices of all kinds -------------------------------------------------------------------------

MANY = 4  # choices of a token; two of the ten experts are zero experts


@functools.cache
def mixed():
  """Tokens with choices of zero experts, some not made, some tokens masked; experts' weights."""
  rng = np.random.default_rng(11)
  x, _, weights, _, cotangent = problem("zipf", 8)
  share = 1 / np.arange(1, 11)
  draw = lambda: rng.choice(10, MANY, replace=False, p=share / share.sum())
  expert = jnp.asarray([draw() for _ in range(T)], jnp.int32)
  weight = jnp.asarray(rng.uniform(0.1, 1, (T, MANY)), jnp.float32)
  made = jnp.asarray(rng.random((T, MANY)) < 0.8)
  mask = jnp.asarray(np.arange(T) % 7 != 3)
  return (x, weight, weights), expert, made, mask, cotangent


def dense_mixed(x_TD, weight_TK, weights, taken_TK, expert_TK, weigh_input):
  """Every computing expert on a row for each choice; float64."""
  factor_TK = jnp.where(taken_TK, weight_TK, 0)
  row_TKD = x_TD[:, None] * (factor_TK[..., None] if weigh_input else 1)
  up = jnp.einsum("tkd,edf->tkef", row_TKD, weights.up_GDF) + weights.up_bias_GF
  gate = jnp.einsum("tkd,edf->tkef", row_TKD, weights.gate_GDF)
  out = jnp.einsum("tkef,efd->tked", jax.nn.silu(gate) * up, weights.down_GFD)
  out = out + weights.down_bias_GD
  chosen = taken_TK[..., None] & (expert_TK[..., None] == jnp.arange(8))
  factor = chosen * (1 if weigh_input else factor_TK[..., None])
  return (factor[..., None] * out).sum((1, 2))


@pytest.mark.parametrize(
  ("transport", "devices", "weights", "slack", "chunks"),
  [("per_rank", 1, "after", 1.0, 1), ("per_rank", 2, "before", 1.0, 1),
   ("per_rank", 2, "after", 1.25, 2), ("per_rank", 8, "before", 1.0, 2),
   ("per_rank", 8, "after", 1.0, 1), ("dropless", 4, "before", 1.0, 1),
   night("per_rank", 1, "before", 1.0, 1), night("per_rank", 2, "before", 1.25, 1),
   night("per_rank", 4, "after", 1.0, 1)],
)  # fmt: skip
def test_zero_experts_masks_choices_not_made_and_weights_of_the_input(
  transport, devices, weights, slack, chunks
):
  """Against a plain sum over all experts; on more than two devices it needs overflow rounds."""
  given, expert, made, mask, cotangent = mixed()
  taken, before = made & mask[:, None] & (expert < 8), weights == "before"
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), given)
    want, pull = jax.vjp(lambda *a: dense_mixed(*a, taken, expert, before), *wide)
    want = jax.tree.map(np.asarray, (want, pull(cotangent.astype(jnp.float64))))
  mesh = make_mesh(MeshConfig(data=1, expert=devices), num_experts=8)
  with_weights, specs = experts_of(8, 1)
  config = DispatchConfig(transport, slack=slack, chunks=chunks)

  def local(x, weight, experts, expert, made, mask):
    probs, experts = jnp.tile(jnp.abs(x[:, :5]), 2), with_weights(experts)
    options = {"made_TK": made, "mask_T": mask, "weights": weights}
    routing = make_routing(expert, weight, probs, probs, **options)
    routing = dataclasses.replace(routing, zero_experts=2)
    sizes = {"tokens": x.shape[0], "num_experts": 8, "k": MANY, "zero_experts": 2}
    way = make_transport(config, **sizes, order="priority")
    sent = way.dispatch(x, routing, experts)
    rows = tuple(experts(rows, layout) for rows, layout in zip(sent.rows, sent.layouts))
    y = way.combine(dataclasses.replace(sent, rows=rows))
    computed = sum(layout.sizes_G.sum() for layout in sent.layouts)
    return y, (sent.rounds[None], sent.dropped[None], computed[None])

  rows = P(BATCH_AXES)
  into = (rows, rows, specs, rows, rows, rows)
  function = manual(local, mesh, into, (rows, (P(AXES),) * 3))

  @jax.jit
  def both(*given):
    run = lambda *a: function(*a, expert, made, mask)
    y, pull, counts = jax.vjp(run, *given, has_aux=True)
    return (y, pull(cotangent)), counts

  got, (rounds, dropped, computed) = both(*given)
  assert not dropped.any()
  assert (rounds > 1).all() == (devices > 2)
  if devices <= 2:  # all in the first round, and nothing of empty rows
    assert computed.sum() == taken.sum()
  for value, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert np.abs(value - right).max() < 1e-5 * np.abs(right).max()


# -- what travels ---------------------------------------------------------------------------------


def program_of(transport, *, devices, k, experts, **options):
  """jaxpr of the gradients of 32 tokens a device; the backward pass needs rows and weights."""
  mesh = make_mesh(MeshConfig(data=1, expert=devices), num_experts=experts)
  config = DispatchConfig(transport, **options)

  def squares(rows, layout):
    if layout.weight_MK is None:
      return rows * rows
    here_MK = layout.group_MK < layout.num_groups
    return rows * rows * jnp.where(here_MK, layout.weight_MK, 0).sum(1, keepdims=True)

  def local(x, weight):
    expert = jnp.tile(jnp.arange(k, dtype=jnp.int32), (x.shape[0], 1))
    probs = jnp.zeros((x.shape[0], experts))
    way = make_transport(config, tokens=x.shape[0], num_experts=experts, k=k)
    routing = make_routing(expert, weight, probs, probs)

    @functools.partial(jax.checkpoint, policy=_keeps_rows)
    def layer(x, weight):
      used = dataclasses.replace(routing, weight_TK=weight)
      sent = way.dispatch(x, used, squares)
      return way.combine(
        dataclasses.replace(sent, rows=tuple(map(squares, sent.rows, sent.layouts)))
      )

    return layer(x, weight)

  function = manual(local, mesh, (P(BATCH_AXES),) * 2, P(BATCH_AXES))
  given = jnp.ones((32 * devices, D)), jnp.ones((32 * devices, k))
  return jax.make_jaxpr(jax.grad(lambda *a: function(*a).sum(), (0, 1)))(*given).jaxpr


_keeps_rows = jax.checkpoint_policies.save_only_these_names("moe_rows")


def sent_in(jaxpr):
  """Shapes of what each all-to-all of a program sends, [W · P, width], sorted; `while` loops."""
  found = [equation for equation, _ in collectives(jaxpr, ("all_to_all",))]
  shapes = sorted(equation.invars[0].aval.shape for equation in found)
  loops = sum(1 for _ in collectives(jaxpr, ("while",)))
  return [(ranks * rows, width) for ranks, rows, width in shapes], loops


def test_a_token_travels_once_to_each_rank_and_no_loop_waits_for_more():
  """32 tokens with 8 choices on 2 devices: 2 · 32 rows there and back; dropless has 1.25 · 8 · 32.

  With the rows travel the experts and weights of 8 choices, and one gradient of weights comes back.
  The backward pass exchanges nothing twice.
  """
  given = {"devices": 2, "k": 8, "experts": 16}
  sent, loops = sent_in(program_of("per_rank", **given))
  rows, choices = 2 * 32, [(64, 16), (64, 8)]
  assert sorted(sent) == sorted([(rows, D)] * 4 + choices)
  assert not loops
  sent, loops = sent_in(
    program_of("dropless", ablation=DispatchAblation(first_round=True), **given)
  )
  assert sent == [(320, D)] * 4
  assert not loops
  assert sent_in(program_of("dropless", **given))[1]


def read_by_exchanges(jaxpr, given, found):
  """Returns what each result of a program depends on, in words; behind a barrier, all its inputs.

  `given` has such a set for each input. For each all-to-all outside loops, `found` gets the type of
  what travels and what this depends on: inputs, "loop", and "choices" that have travelled before.
  """
  known = dict(zip(jaxpr.invars, given, strict=True))
  depends = lambda x: set() if isinstance(x, Literal) else known.get(x, set())
  for eqn in jaxpr.eqns:
    read = list(map(depends, eqn.invars))
    inner = [getattr(value, "jaxpr", value) for value in eqn.params.values()]
    inner = [part for part in inner if hasattr(part, "eqns")]
    every = set().union(*read)
    if eqn.primitive.name == "while":
      results = [every | {"loop"}] * len(eqn.outvars)
    elif inner:
      results = read_by_exchanges(inner[0], read, found)
    else:
      if eqn.primitive.name == "all_to_all":
        integers = jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.integer)
        found.append(("choices" if integers else "rows", every))
        every = every | ({"choices"} if integers else set())
      results = [every] * len(eqn.outvars)
    known.update(zip(eqn.outvars, results, strict=True))
  return list(map(depends, jaxpr.outvars))


@pytest.mark.parametrize("slack", [1.0, 9.0])
def test_the_choices_of_all_chunks_travel_before_the_first_rows(slack):
  """A later chunk's rows wait for its value, the choices for none, and all for the loop if any."""
  mesh = make_mesh(MeshConfig(data=1, expert=4), num_experts=8)
  way = PerRank(Exchange("expert", 4), slack, 3)

  def local(x, weight, expert, first, second):
    probs, waits = jnp.zeros((x.shape[0], 8)), {1: first, 2: second}
    routing = make_routing(expert, weight, probs, probs)
    with waiting(waits):
      sent = way.dispatch(x, routing, lambda rows, layout: rows)
    return sent.rows, waits

  rows = P(BATCH_AXES)
  x, weight, _, expert, other = problem("zipf", 8)
  given = x, weight, expert, other, other
  jaxpr = jax.make_jaxpr(manual(local, mesh, (rows,) * 5, rows))(*given).jaxpr
  found = []
  read_by_exchanges(jaxpr, [set(), set(), set(), {"first"}, {"second"}], found)
  before = {"loop"} if slack == 1.0 else set()
  assert found == [
    ("choices", before),
    ("rows", before | {"choices"}),
    ("rows", before | {"choices", "first"}),
    ("rows", before | {"choices", "second"}),
  ]
  sent, loops = sent_in(program_of("per_rank", devices=2, k=8, experts=16, chunks=2))
  assert sorted(sent) == sorted([(32, D)] * 8 + [(64, 16), (64, 8)])
  assert not loops


def test_a_rank_that_few_tokens_reach_has_room_for_few():
  """32 tokens with 2 choices on 8 devices: P = ⌈1.25 · 32 · 15/64⌉ = 10, and overflow rounds."""
  sent, loops = sent_in(program_of("per_rank", devices=8, k=2, experts=8))
  assert max(rows for rows, width in sent if width == D) == 8 * 10
  assert loops
  cut = {"devices": 8, "k": 2, "experts": 8, "ablation": DispatchAblation(first_round=True)}
  once, loops = sent_in(program_of("per_rank", **cut))
  # A rank has one expert, so a row has one choice there: an expert and a weight.
  assert once == [(80, 1), (80, 2), *[(80, D)] * 4]
  assert not loops
  silent = DispatchAblation(silent=True)
  assert sent_in(program_of("per_rank", **{**cut, "ablation": silent}))[0] == []


@pytest.mark.parametrize("chunks", [1, 3])
def test_silent_puts_bring_a_device_all_rows_that_it_would_send(chunks):
  """Four devices with two experts each; expert g of eight becomes the device's own expert g % 2."""
  mesh, choices_of_all = make_mesh(MeshConfig(data=1, expert=4)), choices("zipf", 8)

  def local(x, weight, expert):
    probs = jnp.zeros((x.shape[0], 8))
    exchange = Exchange("expert", 4, silent=True)
    way = Put(exchange, slack=4.0, chunks=chunks, longest=2 * x.shape[0])
    sent = way.dispatch(x, make_routing(expert, weight, probs, probs), None)
    # Row r of the tiles belongs to expert groups[r]: it adds 100 times that number to the row.
    rows = tuple(
      rows + 100.0 * jnp.repeat(layout.tiles.tile_group_I, layout.tiles.tile)[:, None]
      for rows, layout in zip(sent.rows, sent.layouts)
    )
    return way.combine(dataclasses.replace(sent, rows=rows))

  x, weight, _, expert, _ = problem("zipf", 8)
  rows = P(BATCH_AXES)
  y = jax.jit(manual(local, mesh, (rows,) * 3, rows))(x, weight, expert)
  own = 100.0 * (choices_of_all % 2)[:, :, None] + np.asarray(x)[:, None]
  want = (np.asarray(weight)[:, :, None] * own).sum(1)
  np.testing.assert_allclose(y, want, rtol=1e-5)


def test_one_device_exchanges_nothing_per_rank():
  config = DispatchConfig("per_rank")
  assert make_transport(config, tokens=16, num_experts=4, k=2) == Local()


@pytest.mark.parametrize("name", ["capacity", "packed"])
def test_nothing_is_padded_where_nothing_is_exchanged(name):
  """On one device both are the same; buffers of equal size only where the experts take such."""
  config = DispatchConfig(transport=name, capacity_factor=2.0)
  sizes = {"tokens": 16, "num_experts": 4, "k": 2}
  way = make_transport(config, **sizes)
  assert way == Packed(16, Local())
  buffers = make_transport(config, **sizes, buffers=True)
  assert buffers == (Capacity(16) if name == "capacity" else way)
