"""The layer as a whole: batches without tokens, other kinds of experts, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import pairs_by_day_and_night
from drawn import drawn_model
from flax import nnx
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.moe.dispatch import DispatchConfig, make_transport
from scmoe.moe.experts import Experts
from scmoe.moe.layer import MoE, MoECall, MoEConfig
from scmoe.parallel.gradients import reduce_gradients
from scmoe.parallel.mesh import BATCH_AXES, manual, parameter_specs

D, F, E = 4, 6, 4
DISPATCH = {
  "capacity": DispatchConfig(capacity_factor=1.0, groups=8),
  "dropless": DispatchConfig("dropless"),
  "per_rank": DispatchConfig("per_rank"),
}


def gradients_of(graph, mesh=None):
  """(params, x, mask) -> y, routing sums, and gradients of Σ cos · y for the parameters and x."""

  def local(params, x, mask, c):
    def value(params, x):
      y, sums = nnx.merge(graph, params)(x, MoECall(mask=mask))
      return (y * c).sum(), (y, sums)

    (_, (y, sums)), bars = jax.value_and_grad(value, (0, 1), has_aux=True)(params, x)
    return y, sums, bars

  def on_mesh(params, x, mask, c):
    specs, batch = parameter_specs(params), P(BATCH_AXES)

    def share(*given):
      y, sums, (dparams, dx) = local(*given)
      return y, jax.lax.psum(sums, BATCH_AXES), (reduce_gradients(dparams, specs), dx)

    out = (batch, P(), (specs, batch))
    return manual(share, mesh, (specs, batch, batch, batch), out)(params, x, mask, c)

  step = jax.jit(local if mesh is None else on_mesh)

  def run(params, x, mask=None):
    mask = np.ones(x.shape[:2], bool) if mask is None else mask
    c = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
    return jax.tree.map(np.asarray, step(params, jnp.asarray(x, jnp.float32), mask, c))

  return run


@functools.cache
def layer(dispatch, mesh=None):
  config = MoEConfig(D, F, E, 2, bias=True, init_std=1.0, out_std=1.0, dispatch=DISPATCH[dispatch])
  graph, params = nnx.split(drawn_model(lambda: MoE(config, rngs=nnx.Rngs(0)), 1.0))
  return functools.partial(gradients_of(graph, mesh), params)


def assert_nothing(y, sums, bars):
  """Zeros everywhere, and finite: an empty batch teaches nothing."""
  for leaf in jax.tree.leaves((y, bars)):
    np.testing.assert_array_equal(leaf, 0)
  for leaf in (sums.tokens, sums.choices, sums.dropped, sums.load_E, sums.probs_E, sums.z_square):
    np.testing.assert_array_equal(leaf, 0)


# Shapes: no sequences, no positions.
@pytest.mark.parametrize(
  ("dispatch", "devices", "shape"), pairs_by_day_and_night(DISPATCH, [1, 8], [(0, 3), (8, 0)])
)
def test_a_batch_without_tokens(dispatch, devices, shape, mesh8):
  y, sums, bars = layer(dispatch, mesh8 if devices == 8 else None)(np.zeros((*shape, D)))
  assert y.shape == bars[1].shape == (*shape, D)
  assert_nothing(y, sums, bars)


@pytest.mark.parametrize("dispatch", DISPATCH)
def test_devices_without_tokens_that_take_part(dispatch, mesh8):
  """Eight sequences on eight devices; only some of them have tokens that are not masked."""
  for live in ([], [5], [0, 1, 6]):
    here = np.isin(np.arange(8), live)
    x = np.random.default_rng(1).normal(size=(8, 4, D))
    mask = np.repeat(here[:, None], 4, 1)
    y, sums, bars = layer(dispatch, mesh8)(x, mask)
    if not live:
      assert_nothing(y, sums, bars)
    alone, counted, alone_bars = layer(dispatch)(x, mask)
    np.testing.assert_array_equal(y[~here], 0)
    np.testing.assert_array_equal(bars[1][~here], 0)
    assert all(a.any() == bool(live) for a in (y, *jax.tree.leaves(bars)))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, (y, bars), (alone, alone_bars))
    for name in ("tokens", "choices", "dropped", "load_E"):
      got, want = getattr(sums, name), getattr(counted, name)
      np.testing.assert_array_equal(got, want, err_msg=name)


class Scaled(Experts):
  """A user's own experts: a bottleneck with a residual and a scale of each expert's own."""

  def __init__(self, rngs):
    normal = lambda *shape: jax.random.normal(rngs.params(), shape)
    self.into = nnx.Param(normal(E, D, 2), axes=("expert", "embed", None))
    self.out = nnx.Param(normal(E, 2, D), axes=("expert", None, "embed"))

  def compute(self, rows_RD, experts):
    hidden_RN = jnp.tanh(experts.matmul(rows_RD, self.into[...]))
    return rows_RD + experts.matmul(hidden_RN, self.out[...])


def scaled_layer(dispatch):
  config = MoEConfig(D, F, E, 2, init_std=1.0, dispatch=dispatch)
  return MoE(config, experts=Scaled(nnx.Rngs(1)), rngs=nnx.Rngs(0))


def test_experts_of_ones_own_gather_no_weights_of_other_devices(mesh_of):
  """Alone there is nothing to gather; on a mesh they would see rows of experts they lack."""
  graph, params = nnx.split(scaled_layer(DispatchConfig(adaptive_r=0)))
  x = np.ones((4, 3, D), np.float32)
  assert np.isfinite(gradients_of(graph)(params, x)[0]).all()
  with pytest.raises(ConfigError, match=r"got Scaled; use dispatch\.adaptive_r=1"):
    gradients_of(graph, mesh_of(2, 2))(params, x)


@pytest.mark.parametrize(
  "dispatch",
  [DispatchConfig(capacity_factor=E), DISPATCH["dropless"], DISPATCH["per_rank"]],
  ids=DISPATCH,
)
def test_experts_of_ones_own_on_every_transport_and_mesh(dispatch, mesh_of):
  """Against every expert on every token, in values and gradients; alone and on four devices."""
  graph, params = nnx.split(scaled_layer(dispatch))
  x = np.random.default_rng(2).normal(size=(8, 3, D)).astype(np.float32)

  def dense(params, x):
    moe = nnx.merge(graph, params)
    routing = moe.route(x).routing
    x_TD, into, out = x.reshape(-1, D), moe.experts.into[...], moe.experts.out[...]
    y_TED = jnp.einsum("ten,end->ted", jnp.tanh(jnp.einsum("td,edn->ten", x_TD, into)), out)
    picked = jnp.take_along_axis(x_TD[:, None] + y_TED, routing.expert_TK[:, :, None], 1)
    return (routing.weight_TK[:, :, None] * picked).sum(1).reshape(x.shape)

  c = np.cos(np.arange(x.size)).reshape(x.shape)

  @jax.jit
  def with_bars(params, x):
    y, pull = jax.vjp(dense, params, x)
    return y, pull(jnp.asarray(c, jnp.float32))

  want, want_bars = with_bars(params, x)
  for mesh in (None, mesh_of(2, 2)):
    y, _, bars = gradients_of(graph, mesh)(params, x)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, (y, bars), (want, want_bars))


def test_gradients_of_gate_and_experts_are_added_before_the_barrier():
  """One loop then writes their sum; the barrier keeps what reads that out of it."""
  moe = MoE(MoEConfig(D, F, E, 2, dispatch=DISPATCH["dropless"]), rngs=nnx.Rngs(0))
  graph, params = nnx.split(moe)
  value = lambda x: nnx.merge(graph, params)(x)[0].sum()
  equations = jax.make_jaxpr(jax.grad(value))(jnp.ones((1, 8, D))).jaxpr.eqns
  maker = {id(out): e for e in equations for out in e.outvars}
  barriers = [e for e in equations if e.primitive.name == "optimization_barrier"]
  assert maker[id(barriers[-1].invars[0])].primitive.name == "add_any"


def test_experts_without_the_one_method_say_so():
  config = MoEConfig(D, F, E, 2, dispatch=DISPATCH["dropless"])
  moe = MoE(config, experts=Experts(), rngs=nnx.Rngs(0))
  with pytest.raises(NotImplementedError, match=r"Experts has no method compute"):
    moe(jnp.zeros((1, 2, D)))


def test_tokens_of_another_width_are_refused():
  moe = MoE(MoEConfig(D, F, E), rngs=nnx.Rngs(0))
  with pytest.raises(ConfigError, match=r"has width 4, got tokens of shape \[1, 2, 5\]"):
    moe(jnp.zeros((1, 2, 5)))


def output(moe, x, call=MoECall()):
  """The layer's rows, by one program."""
  return jax.jit(lambda x: moe(x, call)[0])(x)


class Wrapped:
  """A transport of one's own that contains the capacity transport."""

  def __init__(self, config, *, exchange, **given):
    plain = dataclasses.replace(config, transport="capacity")
    inner = make_transport(plain, buffers=True, **given)
    self.dispatch, self.combine = inner.dispatch, inner.combine


def test_batched_experts_take_the_buffers_of_a_transport_of_ones_own():
  x = np.random.default_rng(3).normal(size=(2, 3, D)).astype(np.float32)
  outs = []
  for impl in ("batched", "grouped"):
    dispatch = DispatchConfig(transport=f"{__name__}:Wrapped")
    config = MoEConfig(D, F, E, 2, init_std=1.0, out_std=1.0, impl=impl, dispatch=dispatch)
    outs.append(output(MoE(config, rngs=nnx.Rngs(0)), x))
  np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-6)
  assert np.abs(outs[0]).max() > 0.1


def test_batched_experts_in_a_call_that_drops_nothing():
  x = np.random.default_rng(3).normal(size=(2, 3, D)).astype(np.float32)
  found = []
  for impl in ("batched", "grouped"):
    moe = MoE(MoEConfig(D, F, E, 2, init_std=1.0, out_std=1.0, impl=impl), rngs=nnx.Rngs(0))
    found.append([output(moe, call, MoECall(no_drop=True)) for call in (x, x[:0])])
  np.testing.assert_allclose(*(whole for whole, _ in found), rtol=1e-5, atol=1e-6)
  assert all(none.shape == (0, 3, D) for _, none in found)
  others = (
    DispatchConfig(transport="packed"),
    DISPATCH["per_rank"],
    DispatchConfig(capacity_factor=0),
  )
  for other in others:
    with pytest.raises(ConfigError, match=r"only dispatch\.transport=capacity makes"):
      MoEConfig(D, F, E, 2, impl="batched", dispatch=other)


@pytest.mark.parametrize("experts_in_fp8", [True, False])
def test_fp8_rows_add_nothing_to_fp8_experts(experts_in_fp8, mesh8):
  """Experts that round their input get the same numbers; others do not."""
  x = np.random.default_rng(3).normal(size=(8, 3, D)).astype(np.float32)
  results = []
  for rows_in_fp8 in (False, True):
    dispatch = DispatchConfig("dropless", fp8=rows_in_fp8)
    config = MoEConfig(D, F, E, 2, init_std=1.0, out_std=1.0, fp8=experts_in_fp8, dispatch=dispatch)
    graph, params = nnx.split(drawn_model(lambda c=config: MoE(c, rngs=nnx.Rngs(0)), 1.0))
    results.append(gradients_of(graph, mesh8)(params, x)[0])
  plain, rounded = results
  assert np.array_equal(plain, rounded) == experts_in_fp8
  np.testing.assert_allclose(plain, rounded, atol=0.2 * np.abs(plain).max())


@pytest.mark.parametrize("impl", ["auto", "grouped", "batched", "block_sparse"])
def test_every_implementation_of_the_experts_is_the_same_layer(impl):
  """`batched` needs padded experts: it is asked of the capacity transport only."""
  x = np.random.default_rng(3).normal(size=(2, 3, D)).astype(np.float32)
  results = []
  for name in ("auto", impl):
    config = MoEConfig(D, F, E, 2, init_std=1.0, out_std=1.0, impl=name, dispatch=DispatchConfig())
    graph, params = nnx.split(drawn_model(lambda c=config: MoE(c, rngs=nnx.Rngs(0)), 1.0))
    results.append(gradients_of(graph)(params, x))
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, *results)
