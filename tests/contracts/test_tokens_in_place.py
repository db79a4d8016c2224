"""Experts that read tokens where they are: the same function as rows that are gathered first.

The MoE layer against the dense sum over experts (float64) and against its own other form, in values
and all gradients, for every routing that the router can make; and what it keeps for the backward.
"""

import dataclasses
import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import assert_close

from scmoe.blocks.schedule import OverlapConfig
from scmoe.errors import ConfigError
from scmoe.layers.mlp import activate
from scmoe.moe import experts
from scmoe.moe.dispatch import DispatchConfig, dropless
from scmoe.moe.layer import MoE
from scmoe.moe.route import RouterConfig, route
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh

B, S, D, F = 4, 8, 6, 12
DROPLESS = DispatchConfig(transport="dropless")


def layer(E, *, activation="swiglu", bias=True, router=None, transport=DROPLESS, mesh=None):
  """Graph and parameters, none of them 0, of a layer whose gate tells tokens apart."""
  make = lambda: MoE(
    D, F, E, activation=activation, bias=bias, init_std=0.02, out_std=0.02,
    router=router or RouterConfig(), transport=transport, mesh=mesh, rngs=nnx.Rngs(0),
  )  # fmt: skip
  graph, state = nnx.split(nnx.eval_shape(make))
  rng = np.random.default_rng(E)
  return graph, jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), state)


def inputs():
  rng = np.random.default_rng(1)
  normal = lambda: rng.normal(size=(B, S, D)).astype(np.float32)
  live = rng.random((B, S)) < 0.7
  return normal(), normal(), live


def run(graph, params, *, k, live=None, **call):
  """y and the gradients of Σ c · y by name, of the parameters and of x."""
  x, c, _ = inputs()

  def function(params, x):
    y, sums = nnx.merge(graph, params)(x, k=k, live_BS=live, **call)
    return (c * y).sum(), (y, sums)

  both = jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))
  (_, (y, sums)), (dparams, dx) = both(params, x)
  return np.asarray(y), harness.named(dparams) | {"x": np.asarray(dx)}, sums


def dense(graph, params, *, k, live=None, activation="swiglu"):
  """The same from every expert on every token, in float64."""
  x, c, _ = inputs()
  live_T = None if live is None else live.reshape(-1)
  gate_graph, _ = nnx.split(nnx.merge(graph, params).router_gate[0])

  def function(params, x):
    moe = nnx.merge(graph, params)
    gate = nnx.merge(gate_graph, nnx.split(moe.router_gate[0])[1])
    x_TD = x.reshape(-1, D)
    routing = route(x_TD, gate, moe.router, k=k, live_T=live_T)
    up = jnp.einsum("td,edf->tef", x_TD, moe.up[...])
    up = up if moe.up_bias is None else up + moe.up_bias[...]
    wide = None if moe.gate is None else jnp.einsum("td,edf->tef", x_TD, moe.gate[...])
    out = jnp.einsum("tef,efd->ted", activate(activation, up, wide), moe.down[...])
    out = out if moe.down_bias is None else out + moe.down_bias[...]
    weight_TE = jnp.zeros(out.shape[:2])
    token = jnp.arange(x_TD.shape[0])[:, None]
    weight_TE = weight_TE.at[token, routing.expert_TK].add(routing.weight_TK)
    y = (weight_TE[..., None] * out).sum(1).reshape(x.shape)
    return (c * y).sum(), y

  with jax.enable_x64(True):
    widen = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), tree)
    both = jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))
    (_, y), (dparams, dx) = both(widen(params), widen(x))
    return np.asarray(y), harness.named(dparams) | {"x": np.asarray(dx)}


def assert_same(got, expected, rtol=1e-5):
  assert_close(got[0], expected[0], rtol, "y")
  assert got[1].keys() == expected[1].keys()
  for name, gradient in expected[1].items():
    if np.abs(gradient).max() == 0:
      np.testing.assert_array_equal(got[1][name], 0, err_msg=name)
    else:
      assert_close(got[1][name], gradient, rtol, f"d {name}")


def gathered(monkeypatch):
  """From here on the layer gathers T·K rows, as it must where weights come before the experts."""
  monkeypatch.setattr(dropless, "tokens_here", dropless.rows_here)


@pytest.mark.parametrize(
  ("E", "k", "activation", "masked"),
  [
    (4, 2, "swiglu", False),
    (4, 2, "gelu", True),
    (4, 1, "swiglu", True),
    (3, 3, "relu2", False),  # K = E
    (64, 2, "swiglu", False),  # most experts are empty: 32 tokens
  ],
)
def test_equals_the_dense_sum_and_gathered_rows(E, k, activation, masked, monkeypatch):
  graph, params = layer(E, activation=activation)
  live = inputs()[2] if masked else None
  got = run(graph, params, k=k, live=live)
  assert_same(got, dense(graph, params, k=k, live=live, activation=activation))
  assert masked == bool((got[0][~inputs()[2]] == 0).all())
  if E == 64:
    assert (np.asarray(got[2].load_E) == 0).any()
  gathered(monkeypatch)
  rows = run(graph, params, k=k, live=live)
  assert_same(got, rows)
  jax.tree.map(np.testing.assert_array_equal, got[2], rows[2])


@pytest.mark.parametrize(
  "router",
  [
    RouterConfig(round_to=4),  # choices that are not made, and ids that come twice
    RouterConfig(normalise=False, uniform=True),
    RouterConfig(weights="before"),
  ],
  ids=["rounded", "uniform", "before"],
)
def test_every_kind_of_routing(router, monkeypatch):
  graph, params = layer(4, router=router)
  call = {"k": 2, "live": inputs()[2], "key": jax.random.key(0)}
  got = run(graph, params, **call)
  gathered(monkeypatch)
  assert_same(got, run(graph, params, **call))


def test_what_masked_tokens_hold_does_not_come_through():
  graph, params = layer(4)
  x, _, live = inputs()

  @jax.jit
  def both(x):
    y, pull = jax.vjp(lambda x: nnx.merge(graph, params)(x, k=2, live_BS=live)[0], x)
    return y, pull(jnp.ones_like(y))[0]

  got, expected = both(jnp.where(live[..., None], x, jnp.nan)), both(x)
  np.testing.assert_array_equal(got[0], expected[0])
  np.testing.assert_array_equal(got[1][live], expected[1][live])


@pytest.mark.parametrize(
  ("mesh", "E", "k", "transport"),
  [
    (MeshConfig(2, 1, 2), 4, 2, DROPLESS),  # partial sums over the hidden width
    (MeshConfig(1, 2, 2), 4, 2, dataclasses.replace(DROPLESS, adaptive_r=0)),  # gathered weights
    (MeshConfig(1, 4, 1), 1, 1, dataclasses.replace(DROPLESS, adaptive_r=2)),  # tokens sent twice
  ],
  ids=["tensor", "r0", "r2"],
)
def test_a_mesh_without_an_exchange_changes_nothing(mesh, E, k, transport):
  single, params = layer(E, activation="geglu")
  devices = make_mesh(mesh, num_experts=E)
  graph, _ = layer(E, activation="geglu", transport=transport, mesh=devices)
  expected = run(single, params, k=k)
  place = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec(BATCH_AXES))
  call = {"k": k, "live": jax.device_put(np.ones((B, S), bool), place)}
  assert_same(run(graph, harness.sharded(params, devices), **call), expected)


def test_nothing_of_the_width_of_a_row_is_kept_per_choice():
  """A layer without biases keeps tokens, pre-activations and integers; and the caller's weights."""
  E, k = 4, 3
  graph, params = layer(E, bias=False)
  x, _, live = inputs()
  function = lambda params, x: nnx.merge(graph, params)(x, k=k, live_BS=live)[0]
  pull = jax.eval_shape(lambda params, x: jax.vjp(function, params, x)[1], params, jnp.asarray(x))
  kept = [a for a in jax.tree.leaves(pull) if jnp.issubdtype(a.dtype, jnp.floating)]
  assert [a.shape[-1] for a in kept if a.ndim > 1 and a.shape[-2] > B * S] == [F, F]
  assert {a.shape for a in kept if a.shape[-1:] == (D,)} <= {(B, S, D), (B * S, D), (E, F, D)}


@functools.cache
def executed(remat="none", overlap=None):
  config = harness.tiny(wiring="scmoe_pos2", top_k=2)
  graph, params = harness.parts(config, transport=DROPLESS, overlap=overlap)
  return harness.run(graph, params, remat=remat)


@pytest.mark.parametrize("remat", ["dots", "moe", "full"])
def test_what_is_recomputed_changes_no_gradient(remat):
  harness.assert_same(executed(remat), executed(), rtol=1e-6)


@pytest.mark.parametrize("overlap", [{"slot": 1}, {"sequential": True}], ids=["slot", "sequential"])
def test_the_schedule_changes_no_gradient(overlap):
  tied = OverlapConfig(barriers=True, **overlap)
  harness.assert_same(executed(overlap=tied), executed(), rtol=1e-6)


@pytest.mark.parametrize("wiring", ["scmoe_pos2", "dgmoe"])
def test_models_equal_the_oracle(wiring):
  config = harness.tiny(wiring=wiring, top_k=1 if wiring == "dgmoe" else 2)
  graph, params = harness.parts(config, transport=DROPLESS)
  got = harness.run(graph, params)
  expected = harness.oracle_run(config, params, None)
  harness.assert_same(got, expected)
  harness.assert_counts(got, expected.aux["sums"])


def test_the_backend_is_handed_down(monkeypatch):
  asked = []
  for name in ("moe_ffn", "grouped_ffn"):
    real = getattr(experts, name)
    note = lambda *a, name=name, real=real, **kw: (
      asked.append((name, kw["backend"])) or real(*a, **kw)
    )
    monkeypatch.setattr(experts, name, note)
  for weights in ("after", "before"):
    config = harness.tiny(wiring="topk", expert_backend="xla")
    router = RouterConfig(weights=weights)
    graph, params = harness.parts(config, transport=DROPLESS, router=router)
    jax.eval_shape(lambda p, g=graph: nnx.merge(g, p)(jnp.asarray(harness.tokens())).h_BSD, params)
  assert asked == [("moe_ffn", "xla"), ("grouped_ffn", "xla")]


def test_a_backend_that_cannot_run_says_so():
  with pytest.raises(
    ConfigError, match=r"expert_backend='mosaic_gpu' takes bfloat16 .* use 'auto'"
  ):
    harness.tiny(wiring="topk", expert_backend="mosaic_gpu")
