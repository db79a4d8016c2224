"""Gates, weights and forced choices against float64 loops over tokens and experts."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import by_day_and_night
from drawn import drawn_model
from flax import nnx
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.gates import (
  GATES,
  LOG_SCALE_MAX,
  AffineGate,
  CosineGate,
  LinearGate,
  cosine_logits,
  make_gates,
)
from scmoe.moe.layer import MoE, MoECall, MoEConfig
from scmoe.moe.options import CompatConfig, RouterConfig
from scmoe.moe.route import route
from scmoe.moe.scores import scaled_weights
from scmoe.parallel.gradients import reduce_gradients
from scmoe.parallel.mesh import BATCH_AXES, manual, parameter_specs

T, D, E, PROJECTED = 6, 4, 5, 3


def draw(*shape, seed=0, std=1.0):
  return np.random.default_rng(seed).normal(size=shape) * std


def f32(*arrays):
  return [jnp.asarray(a, jnp.float32) for a in arrays]


# -- the affine gate ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_an_affine_gate_chooses_and_weighs_with_its_bias(dtype):
  gate = AffineGate(D, E, RouterConfig(), init_std=1.0, rngs=nnx.Rngs(0))
  bias = draw(E, seed=1, std=3.0)
  gate.bias[...] = jnp.asarray(bias, jnp.float32)
  x = jnp.asarray(draw(T, D), dtype)
  logits = np.asarray(x, np.float64) @ np.asarray(gate.weight[...], np.float64) + bias
  np.testing.assert_allclose(gate(x), logits, rtol=1e-5, atol=1e-5)
  routing = jax.jit(lambda x: route(x, gate, RouterConfig(gate="affine"), k=2))(x)
  for t in range(T):
    best = np.argsort(-logits[t])[:2]
    shares = np.exp(logits[t, best]) / np.exp(logits[t, best]).sum()
    np.testing.assert_array_equal(routing.expert_TK[t], best)
    np.testing.assert_allclose(routing.weight_TK[t], shares, rtol=1e-4)


# -- the cosine gate ------------------------------------------------------------------------------


def cosine_loop(x, projection, bias, directions, log_scale):
  out = np.zeros((len(x), directions.shape[1]))
  for t in range(len(x)):
    point = x[t] @ projection + bias
    for e in range(directions.shape[1]):
      direction = directions[:, e]
      lengths = max(np.sqrt(point @ point), 1e-12) * max(np.sqrt(direction @ direction), 1e-12)
      out[t, e] = point @ direction / lengths * np.exp(min(log_scale[0], np.log(100)))
  return out


def cosine_problem(log_scale):
  x, projection, bias = draw(T, D), draw(D, PROJECTED, seed=1), draw(PROJECTED, seed=2)
  return x, projection, bias, draw(PROJECTED, E, seed=3), np.array([log_scale])


def test_the_scale_at_its_bound_still_learns():
  """torch.clamp has slope 1 there, and jax.numpy.minimum 1/2."""
  arguments = f32(*cosine_problem(0.0)[:4])
  slope = jax.jit(jax.grad(lambda s: cosine_logits(*arguments, s).sum()))
  at, below, above = (slope(jnp.float32(LOG_SCALE_MAX + step)) for step in (0, -1e-5, 1e-5))
  np.testing.assert_allclose(at, below, rtol=1e-4)
  assert at != 0
  assert above == 0


@pytest.mark.parametrize("log_scale", [0.7, 5.0])
def test_cosine_gate_equals_the_loop_and_its_finite_differences(log_scale):
  arguments = cosine_problem(log_scale)
  cotangent = draw(T, E, seed=4)
  with jax.enable_x64(True):
    value = lambda *a: (cosine_logits(*a) * cotangent).sum()
    arrays = [jnp.asarray(a) for a in arguments]
    logits = cosine_logits(*arrays)
    gradients = jax.jit(jax.grad(value, argnums=(0, 1, 2, 3, 4)))(*arrays)
    logits, gradients = np.asarray(logits), [np.asarray(g) for g in gradients]
  np.testing.assert_allclose(logits, cosine_loop(*arguments), rtol=1e-12)
  for index, gradient in enumerate(gradients):
    for where in np.ndindex(arguments[index].shape):
      step = np.zeros_like(arguments[index])
      step[where] = 1e-6
      moved = [
        cosine_loop(*arguments[:index], arguments[index] + s, *arguments[index + 1 :])
        for s in (step, -step)
      ]
      slope = ((moved[0] - moved[1]) * cotangent).sum() / 2e-6
      np.testing.assert_allclose(gradient[where], slope, rtol=1e-5, atol=1e-6)
  if log_scale > np.log(100):
    assert gradients[4][0] == 0  # above the cap the scale is not trained


def test_a_zero_token_has_finite_cosine_gradients():
  x, projection, _, directions, log_scale = cosine_problem(1.0)
  arrays = f32(np.zeros_like(x), projection, np.zeros(PROJECTED), directions, log_scale)
  gradient = jax.grad(lambda *a: cosine_logits(*a).sum(), argnums=(0, 1, 2, 3, 4))
  gradients = jax.jit(gradient)(*arrays)
  assert all(bool(jnp.isfinite(g).all()) for g in gradients)


def test_gate_modules_hold_what_they_say():
  config = RouterConfig(gate="cosine", cosine_dim=7, compat=CompatConfig(gates=2))
  first, second = make_gates(D, E, config, init_std=0.02, rngs=nnx.Rngs(0))
  assert isinstance(first, CosineGate)
  assert first.projection.shape == (D, 7)
  assert first.directions.shape == (7, E)
  np.testing.assert_allclose(first.log_scale[...], np.log(2), rtol=1e-6)
  assert np.abs(first.projection[...]).max() <= D**-0.5
  assert not np.array_equal(first.directions[...], second.directions[...])
  (linear,) = make_gates(D, E, RouterConfig(), init_std=0.02, rngs=nnx.Rngs(0))
  assert isinstance(linear, LinearGate)
  assert linear.weight.shape == (D, E)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [0.0, 1e-4, 400.0])
def test_unit_vectors_of_sixteen_bits(dtype, size):
  """In float16 the squares of the second size are 0, and those of the third infinite."""
  point = jnp.asarray([[size] * 4], dtype)
  logits = cosine_logits(
    point, jnp.eye(4, dtype=dtype), jnp.zeros(4), jnp.ones((4, 3)), jnp.zeros(1), fp32=False
  )
  np.testing.assert_allclose(logits, np.full((1, 3), float(size > 0)), rtol=1e-2)


def test_a_zero_vector_of_sixteen_bits_has_a_finite_gradient():
  given = (jnp.eye(4), jnp.zeros(4), jnp.ones((4, 3)), jnp.zeros(1))
  value = lambda *given: cosine_logits(*given, fp32=False).sum()
  for bar in jax.grad(value, range(5))(jnp.zeros((1, 4), jnp.float16), *given):
    assert np.isfinite(bar.astype(jnp.float32)).all()


# -- precision, noise, jitter ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_low_precision_model_chooses_by_float32_logits(kind):
  # Two experts whose scores differ by less than bfloat16 can tell.
  gate = make_gates(D, E, RouterConfig(gate=kind), init_std=1, rngs=nnx.Rngs(1))[0]
  x = jnp.asarray(draw(64, D), jnp.bfloat16)
  wide = gate(x.astype(jnp.float32))
  assert gate(x).dtype == jnp.float32
  np.testing.assert_array_equal(gate(x), wide)
  narrow = make_gates(
    D,
    E,
    RouterConfig(gate=kind, compat=CompatConfig(fp32_gate=False)),
    init_std=1,
    rngs=nnx.Rngs(1),
  )
  assert narrow[0](x).dtype == jnp.float32
  assert not np.array_equal(narrow[0](x), wide)


def layer(router, k=2, width=4, experts=4, dispatch=None, seed=0):
  config = MoEConfig(
    width,
    8,
    experts,
    k,
    init_std=0.5,
    out_std=0.5,
    router=router,
    dispatch=dispatch or DispatchConfig(capacity_factor=4.0, groups=2),
  )
  return drawn_model(lambda: MoE(config, rngs=nnx.Rngs(0)), 0.5, seed)


def run(moe, x, mesh=None, **call):
  """A layer's output and its routing sums over all devices."""
  graph, params = nnx.split(moe)
  function = lambda params, x: nnx.merge(graph, params)(x, MoECall(**call))
  if mesh is not None:
    alone, batch = function, P(BATCH_AXES)

    def local(params, x):
      y, sums = alone(params, x)
      return y, jax.lax.psum(sums, BATCH_AXES)

    function = manual(local, mesh, (parameter_specs(params), batch), (batch, P()))
  return jax.jit(function)(params, x)


def test_jitter_moves_the_router_and_not_the_experts():
  x = jnp.asarray(draw(2, 3, 4), jnp.float32)
  moe = layer(RouterConfig(compat=CompatConfig(jitter=0.5)), k=1)

  class Echo(nnx.Module):
    """Its scores are what it reads."""

    def __call__(self, x_TD):
      return x_TD

  moe.router_gate[0] = Echo()

  @jax.jit
  def start(x, key):
    flight = moe.route(x, MoECall(key=key))
    sent = flight.transport.dispatch(flight.x_TD, flight.routing, moe.experts)
    return flight.routing.logits_TE, sent.rows[0]

  read, sent = start(x, jax.random.key(3))
  tokens = np.asarray(x).reshape(-1, 4)
  ratio = np.asarray(read).reshape(-1, 4) / tokens
  assert (ratio >= 0.5).all()
  assert (ratio <= 1.5).all()
  assert len(np.unique(ratio)) > 20  # elementwise
  sent = np.asarray(sent).reshape(-1, 4)
  sent = sent[np.abs(sent).sum(1) > 0]
  assert {tuple(row) for row in sent} == {tuple(row) for row in tokens}
  still, _ = start(x, None)  # no key: not training
  np.testing.assert_array_equal(np.asarray(still).reshape(-1, 4), tokens)


def test_jitter_and_noise_do_not_depend_on_the_mesh(mesh_of):
  jitter = CompatConfig(jitter=0.3)
  router = RouterConfig(noise=2.0, gate="cosine", cosine_dim=4, compat=jitter)
  x, key = jnp.asarray(draw(2, 3, 4), jnp.float32), jax.random.key(5)
  alone, sums = run(layer(router), x, key=key)
  together, spread = run(layer(router), x, mesh_of(1, 2, 1), key=key)
  np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(spread.load_E, sums.load_E)


# -- several gates, and a gate of one's own -------------------------------------------------------


def test_gates_share_the_experts_and_are_chosen_per_call():
  x = jnp.asarray(draw(2, 3, 4), jnp.float32)
  moe = layer(RouterConfig(compat=CompatConfig(gates=2)))
  first, second = run(moe, x)[0], run(moe, x, gate=1)[0]
  assert not np.allclose(first, second)
  for index, want in ((0, first), (1, second)):  # traced, as training takes turns
    np.testing.assert_array_equal(run(moe, x, gate=jnp.asarray(index))[0], want)
  moe.router_gate[0] = moe.router_gate[1]
  np.testing.assert_array_equal(run(moe, x)[0], second)
  with pytest.raises(ConfigError, match="gate=2 is none of the 2 gates"):
    moe.route(x, MoECall(gate=2))
  moe.router_gate[1] = LinearGate(4, 2, RouterConfig(), init_std=1, rngs=nnx.Rngs(0))
  with pytest.raises(ConfigError, match="one class and size"):
    moe.route(x, MoECall(gate=jnp.asarray(1)))


class ConstantGate(nnx.Module):
  """The example of docs/routing.md: a learned preference, the same for every token."""

  def __init__(self, width, num_experts, config, *, init_std, rngs):
    del width, config, init_std, rngs
    self.preference = nnx.Param(jnp.arange(num_experts, dtype=jnp.float32), axes=(None,))

  def __call__(self, x_TD):
    return jnp.broadcast_to(self.preference[...], (x_TD.shape[0], self.preference.shape[0]))


def test_a_gate_of_ones_own(monkeypatch):
  monkeypatch.setitem(GATES, "constant", ConstantGate)
  moe = layer(RouterConfig(gate="constant"), k=1)
  x = jnp.asarray(draw(2, 3, 4), jnp.float32)
  _, sums = run(moe, x)
  np.testing.assert_array_equal(sums.load_E, [0, 0, 0, 6])
  graph, params = nnx.split(moe)
  loss = lambda params: (nnx.merge(graph, params)(x)[0] ** 2).sum()
  gradient = nnx.to_pure_dict(jax.jit(jax.grad(loss))(params))["router_gate"][0]["preference"]
  assert np.abs(gradient).max() > 0


@pytest.mark.parametrize("own", ["entry", "path"])
@pytest.mark.parametrize(
  ("make", "problem"), [("divides", "could not be made: ZeroDiv"), ("dict", "without the method")]
)
def test_a_gate_that_cannot_be_made_is_one_line(monkeypatch, own, make, problem):
  """A class that stands in `GATES` itself, and one that is imported."""
  made = {"divides": lambda *_, **__: 1 / 0, "dict": lambda *_, **__: {}}[make]
  gate = f"constant_{make}"
  if own == "path":
    module = types.ModuleType("gates_of_a_test")
    setattr(module, gate, made)
    monkeypatch.setitem(sys.modules, "gates_of_a_test", module)
    gate = f"gates_of_a_test:{gate}"
  else:
    monkeypatch.setitem(GATES, gate, made)
  with pytest.raises(ConfigError, match=problem) as said:
    layer(RouterConfig(gate=gate), k=1)
  assert str(said.value).startswith(f"router.gate={gate!r} ")
  assert "\n" not in str(said.value)


def test_an_unknown_gate_names_the_known_ones():
  with pytest.raises(ConfigError, match="'cosin' is unknown; did you mean 'cosine'"):
    layer(RouterConfig(gate="cosin"))


@pytest.mark.parametrize("shape", [(T, E + 1), (T,), (T + 1, E)])
def test_a_gate_of_the_wrong_shape_names_both(shape):
  gate = lambda x_TD: jnp.zeros(shape)
  with pytest.raises(ConfigError, match=rf"\[tokens, experts\] = \[{T}, {E}\]"):
    route(jnp.zeros((T, D)), gate, RouterConfig(), k=1, num_experts=E)


def test_a_gate_of_whole_numbers_is_refused():
  with pytest.raises(ConfigError, match="int32"):
    route(jnp.zeros((T, D)), lambda x: jnp.zeros((T, E), jnp.int32), RouterConfig(), k=1)


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("k", [1, 2, E])
def test_p_norm_of_the_weights_is_one(p, k):
  probs = jax.nn.softmax(jnp.asarray(draw(T, E), jnp.float32))
  choose = lambda config: route(jnp.zeros((T, 1)), lambda x: jnp.log(probs), config, k=k)
  normed = choose(RouterConfig(compat=CompatConfig(weight_norm=p)))
  for t in range(T):
    raw = np.sort(np.asarray(probs[t], np.float64))[::-1][:k]
    np.testing.assert_allclose(normed.weight_TK[t], raw / (raw**p).sum() ** (1 / p), rtol=1e-5)
  if p == 1 and k > 1:
    np.testing.assert_allclose(normed.weight_TK, choose(RouterConfig()).weight_TK, rtol=1e-6)
  expert = np.sort(normed.expert_TK, 1)
  assert (expert[:, :-1] < expert[:, 1:]).all()


def test_one_weight_is_normalised_by_the_p_norm_only():
  logits = jnp.log(jnp.asarray([[0.3, 0.2, 0.1, 0.4]]))
  plain = route(jnp.zeros((1, 1)), lambda x: logits, RouterConfig(), k=1)
  np.testing.assert_allclose(plain.weight_TK, [[0.4]], rtol=1e-6)
  weight = jnp.asarray([[0.3]])
  gradient = jax.grad(lambda w: scaled_weights(w, False, 1.0).sum())(weight)
  np.testing.assert_allclose(scaled_weights(weight, False, 1.0), 1, rtol=1e-6)
  np.testing.assert_allclose(gradient, 0, atol=1e-6)  # the price of it


@pytest.mark.parametrize("weights", ["after", "before"])
@pytest.mark.parametrize("transport", ["capacity", "dropless"])
def test_weights_after_or_before_the_experts(weights, transport):
  x = draw(1, 5, 4)
  router = RouterConfig(compat=CompatConfig(weights=weights))
  moe = layer(router, dispatch=DispatchConfig(transport, 4.0))
  parameters = moe.router_gate[0].weight, moe.experts.up, moe.experts.down
  gate, up, down = (np.asarray(p[...], np.float64) for p in parameters)
  gelu = lambda a: 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))
  want = np.zeros((5, 4))
  for t, token in enumerate(x[0]):
    probs = np.exp(token @ gate) / np.exp(token @ gate).sum()
    best = np.argsort(-probs)[:2]
    for e in best:
      w = probs[e] / probs[best].sum()
      want[t] += (
        gelu(w * token @ up[e]) @ down[e]
        if weights == "before"
        else (w * (gelu(token @ up[e]) @ down[e]))
      )
  got, _ = run(moe, jnp.asarray(x, jnp.float32))
  np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("weights", "transport"), by_day_and_night(["after", "before"], ["dropless", "per_rank", "put"])
)
def test_weights_and_their_gradients_in_rounds(weights, transport, mesh_of):
  # Every token likes expert 0 best, so that one round is not enough.
  x, key = np.abs(draw(4, 8, 4)), draw(4, 8, 4, seed=9)
  router = RouterConfig(compat=CompatConfig(weights=weights))
  moe = layer(router, dispatch=DispatchConfig(transport, slack=1.0))
  moe.router_gate[0].weight[...] = jnp.zeros((4, 4)).at[:, :2].set(jnp.asarray([[0.6, 0.4]]))
  graph, params = nnx.split(moe)
  specs, batch = parameter_specs(params), P(BATCH_AXES)

  def local(params, x, c):
    def value(params, x):
      y, sums = nnx.merge(graph, params)(x)
      return (y * c).sum(), (y, sums.rounds[None])

    bars, (y, rounds) = jax.grad(value, argnums=(0, 1), has_aux=True)(params, x)
    return y, rounds, reduce_gradients(bars[0], specs), bars[1]

  given = params, jnp.asarray(x, jnp.float32), jnp.asarray(key, jnp.float32)
  alone = jax.jit(local)(*given)
  spread = manual(local, mesh_of(1, 2, 1), (specs, batch, batch), (batch, batch, specs, batch))
  together = jax.jit(spread)(*given)
  assert together[1].max() > 1
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, together[::2], alone[::2])
  jax.tree.map(close, together[3], alone[3])


# -- forced and biased choices --------------------------------------------------------------------


def test_uniform_assignment_takes_turns_and_keeps_the_real_weights():
  x, gate = f32(draw(T, D), draw(D, E, seed=1))
  real = route(x, gate, RouterConfig(), k=2)
  config = RouterConfig(compat=CompatConfig(uniform=True))
  forced = route(x, gate, config, k=2)
  np.testing.assert_array_equal(forced.expert_TK.reshape(-1), np.arange(2 * T) % E)
  np.testing.assert_array_equal(forced.weight_TK, real.weight_TK)
  assert np.ptp(forced.count_E) <= 1
  value = lambda gate: (
    route(x, gate, RouterConfig(compat=CompatConfig(uniform=True)), k=2).weight_TK[:, 0].sum()
  )
  assert np.abs(jax.grad(value)(gate)).max() > 0


def test_a_bias_moves_the_choice_and_not_the_weight():
  x, gate = f32(draw(T, D), draw(D, E, seed=1))
  bias = jnp.asarray([0, 0, 10, 0, 0], jnp.float32)
  plain = route(x, gate, RouterConfig(normalise=False), k=2)
  biased = route(x, gate, RouterConfig(normalise=False), k=2, bias_E=bias)
  np.testing.assert_array_equal(biased.expert_TK[:, 0], 2)
  np.testing.assert_array_equal(
    biased.expert_TK[:, 1],
    [next(e for e in np.argsort(-p) if e != 2) for p in np.asarray(plain.probs_TE)],
  )
  np.testing.assert_array_equal(
    biased.weight_TK, np.take_along_axis(plain.probs_TE, biased.expert_TK, 1)
  )
  value = lambda bias: route(x, gate, RouterConfig(), k=2, bias_E=bias).weight_TK.sum()
  np.testing.assert_array_equal(jax.grad(value)(bias), 0)
  same = route(x, gate, RouterConfig(), k=2, bias_E=jnp.zeros(E))
  np.testing.assert_array_equal(same.expert_TK, plain.expert_TK)


def test_capacity_of_a_call():
  x = jnp.asarray(draw(2, 4, 4), jnp.float32)
  moe = layer(RouterConfig(), dispatch=DispatchConfig(capacity_factor=0.5))
  assert run(moe, x)[1].dropped.sum() > 0
  exact, sums = run(moe, x, no_drop=True)
  assert sums.dropped.sum() == 0
  for factor in (0, 4.0):
    got, sums = run(moe, x, capacity_factor=factor)
    assert sums.dropped.sum() == 0
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)
  zero = layer(RouterConfig(), dispatch=DispatchConfig(capacity_factor=0.0))
  np.testing.assert_array_equal(run(zero, x)[0], run(moe, x, capacity_factor=0)[0])


@pytest.mark.parametrize("linear", [True, False])
def test_more_experts_than_there_are_cannot_be_chosen(linear):
  gate = (
    LinearGate(4, 3, RouterConfig(), init_std=1, rngs=nnx.Rngs(0)) if linear else jnp.ones((4, 3))
  )
  with pytest.raises(ConfigError, match=r"model.top_k=4 is larger than model.num_experts=3"):
    route(jnp.ones((2, 4)), gate, RouterConfig(), k=4)
