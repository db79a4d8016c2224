"""Experts that read tokens where they are: the same function as rows that are gathered first.

The MoE layer against the dense sum over experts (float64) and against the capacity transport with
room for all, whose rows are gathered, in values and all gradients, for every routing that the
router can make; and what it keeps for the backward.
"""

import dataclasses
import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from flax import nnx
from harness import assert_close
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.blocks.options import OverlapConfig
from scmoe.kernels.grouped_matmul import FFNOptions
from scmoe.layers.mlp import activate
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.layer import MoE, MoECall, MoEConfig
from scmoe.moe.options import CompatConfig, RouterConfig
from scmoe.moe.route import route
from scmoe.parallel.gradients import reduce_gradients
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh, manual, parameter_specs

B, S, D, F = 4, 8, 6, 12
DROPLESS = DispatchConfig(transport="dropless")
GATHERED = DispatchConfig(capacity_factor=64.0)  # room for every token at every expert


def layer(E, k, *, activation="swiglu", bias=True, router=RouterConfig(), dispatch=DROPLESS):
  """Graph and parameters, none of them 0, of a layer whose gate tells tokens apart."""
  config = MoEConfig(D, F, E, k, activation=activation, bias=bias, router=router, dispatch=dispatch)
  graph, state = nnx.split(nnx.eval_shape(lambda: MoE(config, rngs=nnx.Rngs(0))))
  rng = np.random.default_rng(E)
  return graph, jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), state)


def inputs():
  rng = np.random.default_rng(1)
  normal = lambda: rng.normal(size=(B, S, D)).astype(np.float32)
  mask = rng.random((B, S)) < 0.7
  return normal(), normal(), mask


def gradients(graph, call, params, x, c):
  """y, sums and the gradients of Σ c · y."""

  def function(params, x):
    y, sums = nnx.merge(graph, params)(x, call)
    return (c * y).sum(), (y, sums)

  (_, (y, sums)), (dparams, dx) = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)(
    params, x
  )
  return y, sums, dparams, dx


def run(graph, params, call=MoECall(), mesh=None):
  """y and the gradients of Σ c · y by name, of the parameters and of x."""
  x, c, _ = inputs()
  function = functools.partial(gradients, graph, call)
  if mesh is not None:
    specs, batch = parameter_specs(params), P(BATCH_AXES)

    def local(params, x, c):
      y, sums, dparams, dx = gradients(graph, call, params, x, c)
      return y, jax.tree.map(lambda a: a[None], sums), reduce_gradients(dparams, specs), dx

    function = manual(local, mesh, (specs, batch, batch), (batch, batch, specs, batch))
  y, sums, dparams, dx = jax.jit(function)(params, x, c)
  return np.asarray(y), harness.named(dparams) | {"x": np.asarray(dx)}, sums


def dense(graph, params, *, k, mask=None, activation="swiglu"):
  """The same from every expert on every token, in float64."""
  x, c, _ = inputs()
  mask_T = None if mask is None else mask.reshape(-1)
  gate_graph, _ = nnx.split(nnx.merge(graph, params).router_gate[0])

  def function(params, x):
    moe = nnx.merge(graph, params)
    gate = nnx.merge(gate_graph, nnx.split(moe.router_gate[0])[1])
    x_TD = x.reshape(-1, D)
    routing = route(x_TD, gate, RouterConfig(), k=k, mask_T=mask_T)
    weights = moe.experts.weights()
    up = jnp.einsum("td,edf->tef", x_TD, weights.up_GDF)
    up = up if weights.up_bias_GF is None else up + weights.up_bias_GF
    wide = None if weights.gate_GDF is None else jnp.einsum("td,edf->tef", x_TD, weights.gate_GDF)
    out = jnp.einsum("tef,efd->ted", activate(activation, up, wide), weights.down_GFD)
    out = out if weights.down_bias_GD is None else out + weights.down_bias_GD
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
def test_equals_the_dense_sum_and_gathered_rows(E, k, activation, masked):
  graph, params = layer(E, k, activation=activation)
  mask = inputs()[2] if masked else None
  got = run(graph, params, MoECall(mask=mask))
  assert_same(got, dense(graph, params, k=k, mask=mask, activation=activation))
  assert masked == bool((got[0][~inputs()[2]] == 0).all())
  if E == 64:
    assert (np.asarray(got[2].load_E) == 0).any()
  gathered, _ = layer(E, k, activation=activation, dispatch=GATHERED)
  rows = run(gathered, params, MoECall(mask=mask))
  assert_same(got, rows)
  jax.tree.map(np.testing.assert_array_equal, got[2], rows[2])


@pytest.mark.parametrize(
  "router",
  [
    # Choices that are not made, and ids that come twice.
    RouterConfig(compat=CompatConfig(round_to=4)),
    RouterConfig(normalise=False, compat=CompatConfig(uniform=True)),
    RouterConfig(compat=CompatConfig(weights="before")),
  ],
  ids=["rounded", "uniform", "before"],
)
def test_every_kind_of_routing(router):
  graph, params = layer(4, 2, router=router)
  call = MoECall(mask=inputs()[2], key=jax.random.key(0))
  gathered, _ = layer(4, 2, router=router, dispatch=GATHERED)
  assert_same(run(graph, params, call), run(gathered, params, call))


def test_what_masked_tokens_hold_does_not_come_through():
  graph, params = layer(4, 2)
  x, _, mask = inputs()

  @jax.jit
  def both(x):
    y, pull = jax.vjp(lambda x: nnx.merge(graph, params)(x, MoECall(mask=mask))[0], x)
    return y, pull(jnp.ones_like(y))[0]

  got, expected = both(jnp.where(mask[..., None], x, jnp.nan)), both(x)
  np.testing.assert_array_equal(got[0], expected[0])
  np.testing.assert_array_equal(got[1][mask], expected[1][mask])


@pytest.mark.parametrize(
  ("mesh", "E", "k", "dispatch"),
  [
    (MeshConfig(2, 1, 2), 4, 2, DROPLESS),  # partial sums over the hidden width
    (MeshConfig(1, 2, 2), 4, 2, dataclasses.replace(DROPLESS, adaptive_r=0)),  # gathered weights
    (MeshConfig(1, 4, 1), 1, 1, dataclasses.replace(DROPLESS, adaptive_r=2)),  # tokens sent twice
  ],
  ids=["tensor", "r0", "r2"],
)
def test_a_mesh_without_an_exchange_changes_nothing(mesh, E, k, dispatch):
  single, params = layer(E, k, activation="geglu")
  graph, _ = layer(E, k, activation="geglu", dispatch=dispatch)
  devices = make_mesh(mesh, num_experts=E)
  assert_same(run(graph, params, mesh=devices), run(single, params))


def test_nothing_of_the_width_of_a_row_is_kept_per_choice():
  """A layer without biases keeps tokens, pre-activations and integers; and the caller's weights."""
  E, k = 4, 3
  graph, params = layer(E, k, bias=False)
  x, _, mask = inputs()
  function = lambda params, x: nnx.merge(graph, params)(x, MoECall(mask=mask))[0]
  pull = jax.eval_shape(lambda params, x: jax.vjp(function, params, x)[1], params, jnp.asarray(x))
  kept = [a for a in jax.tree.leaves(pull) if jnp.issubdtype(a.dtype, jnp.floating)]
  assert [a.shape[-1] for a in kept if a.ndim > 1 and a.shape[-2] > B * S] == [F, F]
  assert {a.shape for a in kept if a.shape[-1:] == (D,)} <= {(B, S, D), (B * S, D), (E, F, D)}


@functools.cache
def executed(remat="none", overlap=OverlapConfig()):
  config = harness.tiny(wiring="scmoe_pos2", top_k=2)
  graph, params = harness.parts(config, dispatch=DROPLESS, overlap=overlap)
  return harness.run(graph, params, remat=remat)


@pytest.mark.parametrize("remat", [night("dots"), "moe", night("full")])
def test_what_is_recomputed_changes_no_gradient(remat):
  harness.assert_same(executed(remat), executed(), rtol=1e-6)


@pytest.mark.parametrize("schedule", ["mlp 0", night("off")])
def test_the_schedule_changes_no_gradient(schedule):
  tied = OverlapConfig(order="barriers", schedule=schedule)
  harness.assert_same(executed(overlap=tied), executed(), rtol=1e-6)


@pytest.mark.parametrize("wiring", ["scmoe_pos2", "dgmoe"])
def test_models_equal_the_oracle(wiring):
  config = harness.tiny(wiring=wiring, top_k=1 if wiring == "dgmoe" else 2)
  graph, params = harness.parts(config, dispatch=DROPLESS)
  got = harness.run(graph, params)
  expected = harness.oracle_run(config, params, None)
  harness.assert_same(got, expected)
  harness.assert_counts(got, expected.aux["sums"])


def test_a_backend_that_cannot_run_says_so():
  with pytest.raises(ConfigError, match=r"ffn\.backend='mosaic_gpu' takes bfloat16 .* use 'auto'"):
    harness.tiny(wiring="topk", ffn=FFNOptions(backend="mosaic_gpu"))
