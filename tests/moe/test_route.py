"""Choice of experts, weights and positions: small enough to check on paper, and properties."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scmoe.base.errors import ConfigError
from scmoe.kernels.permute import gather_rows, sum_rows
from scmoe.kernels.top_k import GateOutput
from scmoe.moe.dispatch import Capacity, queue_positions
from scmoe.moe.options import RouterConfig
from scmoe.moe.route import make_routing, route, route_distinct
from scmoe.moe.scores import Draws

NO_NOISE = RouterConfig()


def chosen(probs, k, normalise=True):
  """The experts and weights of tokens with these probabilities."""
  logits = jnp.log(jnp.asarray(probs, jnp.float32))
  config = RouterConfig(normalise=normalise)
  gated = jax.jit(lambda x: route(x, lambda x: logits, config, k=k))
  routing = gated(jnp.zeros((len(probs), 1)))
  return routing.expert_TK, routing.weight_TK


def routed(choices, num_experts, mask=None):
  """A Routing with these choices and equal weights."""
  choices = jnp.asarray(choices, jnp.int32)
  flat = jnp.full((len(choices), num_experts), 1 / num_experts, jnp.float32)
  weights = jnp.ones(choices.shape, jnp.float32)
  mask = None if mask is None else jnp.asarray(mask, bool)
  return make_routing(choices, weights, flat, flat, mask_T=mask)


@functools.partial(jax.jit, static_argnums=1)
def positions(routing, groups=1):
  return queue_positions(routing.expert_TK, routing.num_experts, groups, routing.taken_TK)


@functools.partial(jax.jit, static_argnums=(1, 2))
def plan(routing, rows, groups=1):
  return Capacity(rows, groups=groups).plan(routing)


def kept_choices(routing, rows, groups=1):
  permutation, dropped = plan(routing, rows, groups)
  return np.asarray(permutation.row_TK) < permutation.copy_R.size, int(dropped)


def test_three_tokens_three_experts_on_paper():
  # Tokens a, b, c choose, best first:      a: 0, 1    b: 0, 1    c: 1, 0
  # First choices take positions first:     a -> 0@0   b -> 0@1   c -> 1@0
  # Then the second ones:                   a -> 1@1   b -> 1@2   c -> 0@2
  # With room for 2, the second choices of b and c find none. Token by token it would have been
  # otherwise: c's first choice would stand behind b's second.
  routing = routed([[0, 1], [0, 1], [1, 0]], 3)
  position_TK, count_GE = positions(routing)
  np.testing.assert_array_equal(position_TK, [[0, 1], [1, 2], [0, 2]])
  np.testing.assert_array_equal(count_GE, [[3, 3, 0]])
  np.testing.assert_array_equal(routing.count_E, [3, 3, 0])
  kept, dropped = kept_choices(routing, 2)
  np.testing.assert_array_equal(kept, [[True, True], [True, False], [True, False]])
  assert dropped == 2
  permutation, _ = plan(routing, 2)
  # 3 experts x 2 rows; 6: dropped. Flat choices are a1 a2 b1 b2 c1 c2 = 0 ... 5; -1: nobody.
  np.testing.assert_array_equal(permutation.row_TK, [[0, 3], [1, 6], [2, 6]])
  np.testing.assert_array_equal(permutation.copy_R, [0, 2, 4, 1, -1, -1])


def test_every_group_has_its_own_queue():
  # Tokens a, b | c, d all choose expert 1: two queues of two, not one of four.
  routing = routed([[1], [1], [1], [1]], 2)
  position_TK, count_GE = positions(routing, groups=2)
  np.testing.assert_array_equal(position_TK[:, 0], [0, 1, 0, 1])
  np.testing.assert_array_equal(count_GE, [[0, 2], [0, 2]])
  kept, dropped = kept_choices(routing, 1, groups=2)
  np.testing.assert_array_equal(kept[:, 0], [True, False, True, False])
  assert dropped == 2
  permutation, _ = plan(routing, 1, 2)
  np.testing.assert_array_equal(permutation.row_TK[:, 0], [2, 4, 3, 4])  # [expert, group, row]
  np.testing.assert_array_equal(permutation.copy_R, [-1, -1, 0, 2])


def test_masked_tokens_take_no_position():
  routing = routed([[0], [0], [0]], 2, mask=[True, False, True])
  position_TK, _ = positions(routing)
  assert position_TK[0, 0] == 0
  assert position_TK[2, 0] == 1
  np.testing.assert_array_equal(routing.count_E, [2, 0])
  np.testing.assert_array_equal(routing.weight_TK[:, 0], [1, 0, 1])
  kept, dropped = kept_choices(routing, 3)
  np.testing.assert_array_equal(kept[:, 0], [True, False, True])
  assert dropped == 0


def test_equal_probabilities_go_to_the_smaller_number():
  expert_TK, weight_TK = chosen([[0.25, 0.25, 0.25, 0.25]], 2)
  np.testing.assert_array_equal(expert_TK, [[0, 1]])
  np.testing.assert_array_equal(weight_TK, [[0.5, 0.5]])
  expert_TK, _ = chosen([[0.2, 0.4, 0.4]], 3)
  np.testing.assert_array_equal(expert_TK, [[1, 2, 0]])


def test_a_single_weight_is_never_normalised():
  probs = [[0.1, 0.6, 0.3]]
  np.testing.assert_allclose(chosen(probs, 1)[1], [[0.6]], rtol=1e-6)
  np.testing.assert_allclose(chosen(probs, 2)[1], [[2 / 3, 1 / 3]], rtol=1e-6)
  np.testing.assert_allclose(chosen(probs, 2, normalise=False)[1], [[0.6, 0.3]], rtol=1e-6)


def test_all_experts_and_one_token():
  rng = np.random.default_rng(0)
  x, gate = rng.normal(size=(1, 5)), rng.normal(size=(5, 3))
  gated = jax.jit(lambda x, gate: route(x, gate, NO_NOISE, k=3))
  routing = gated(x.astype(np.float32), gate.astype(np.float32))
  expected = oracles.gate(oracles.lift(x[0]), gate, 3)
  np.testing.assert_array_equal(routing.expert_TK[0], expected.experts)
  np.testing.assert_allclose(routing.weight_TK[0], oracles.values(expected.weights), rtol=1e-6)
  np.testing.assert_allclose(routing.weight_TK.sum(), 1, rtol=1e-6)
  np.testing.assert_array_equal(positions(routing)[0], [[0, 0, 0]])


@pytest.mark.parametrize("k", [1, 2, 4])
def test_route_equals_the_gate_token_by_token_with_noise(k):
  rng = np.random.default_rng(k)
  x, gate = rng.normal(size=(7, 5)), rng.normal(size=(5, 4))
  noise = rng.normal(size=(7, 4))
  x_TD, gate_DE = (jnp.asarray(a, jnp.float32) for a in (x, gate))
  draws = Draws(noise_TE=jnp.asarray(noise, jnp.float32))
  config = RouterConfig(noise=2.0)
  routing = jax.jit(lambda x, gate: route(x, gate, config, k=k, training=draws))(x_TD, gate_DE)
  for t in range(7):
    expected = oracles.gate(oracles.lift(x[t]), gate, k, noise=2.0 / 4 * noise[t])
    np.testing.assert_array_equal(routing.expert_TK[t], expected.experts)
    np.testing.assert_allclose(routing.weight_TK[t], oracles.values(expected.weights), rtol=1e-5)
    np.testing.assert_allclose(routing.probs_TE[t], expected.probs.value, rtol=1e-5)
    np.testing.assert_allclose(routing.logits_TE[t], expected.logits.value, rtol=1e-4, atol=1e-6)


def test_noise_without_a_size_is_no_noise():
  x, gate = jnp.ones((2, 3)), jnp.eye(3)
  quiet = route(x, gate, NO_NOISE, k=1)
  loud = route(x, gate, NO_NOISE, k=1, training=Draws(noise_TE=1e3 * jnp.ones((2, 3))))
  np.testing.assert_array_equal(loud.logits_TE, quiet.logits_TE)


def test_distinct_takes_the_second_best_with_its_own_probability():
  # Both tokens like expert 2 best, expert 0 next. The first has visited 2 before, the second 0.
  gate = jnp.asarray([[2.0, 0.0, 3.0]])
  routing = route_distinct(jnp.ones((2, 1)), gate, NO_NOISE, jnp.asarray([2, 0]))
  probs = np.exp([2.0, 0.0, 3.0]) / np.exp([2.0, 0.0, 3.0]).sum()
  np.testing.assert_array_equal(routing.expert_TK[:, 0], [0, 2])
  np.testing.assert_allclose(routing.weight_TK[:, 0], probs[[0, 2]], rtol=1e-6)


@pytest.mark.parametrize("k", [1, 2])
def test_the_gate_learns(k):
  # Softmax after top-k would give a top-1 gate the constant weight 1, and no gradient.
  rng = np.random.default_rng(0)
  x, gate, c = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((6, 5), (5, 4), (6, k)))
  weigh = lambda g: (route(x, g, NO_NOISE, k=k).weight_TK * c).sum()
  gradient = jax.jit(jax.grad(weigh))(gate)
  assert np.abs(gradient).min() > 1e-4


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_weights_of_shares_that_the_gate_has_made(scores, normalise):
  """The same as of logits; where no softmax is asked for, or other experts, shares are not read."""
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 6)), jnp.float32)
  best = jax.lax.top_k(logits, 2)[1].astype(jnp.int32)
  share = jnp.take_along_axis(jax.nn.softmax(logits), best, 1)

  class Gate:
    def __call__(self, x):
      return logits

  class Knowing(Gate):
    def top_k(self, x, k):
      return GateOutput(logits, best, share)

  config = RouterConfig(normalise=normalise, scoring_func=scores)
  for bias in (None, jnp.asarray([0.0, 3, 0, 0, -3, 0])):
    found = [route(jnp.zeros((5, 1)), gate(), config, k=2, bias_E=bias) for gate in (Gate, Knowing)]
    plain, knowing = found
    np.testing.assert_array_equal(plain.expert_TK, knowing.expert_TK)
    np.testing.assert_allclose(plain.weight_TK, knowing.weight_TK, rtol=1e-6)


def test_more_choices_than_experts():
  with pytest.raises(ConfigError, match=r"top_k=4 is larger than model\.num_experts=3"):
    route(jnp.ones((2, 3)), jnp.ones((3, 3)), NO_NOISE, k=4)


def test_groups_that_do_not_divide():
  with pytest.raises(ConfigError, match=r"dispatch\.groups=2 does not divide the 3 tokens"):
    queue_positions(jnp.zeros((3, 1), jnp.int32), 2, groups=2)


# (T, K, E, groups, capacity): few, so that few programs are compiled; hypothesis fills them.
SHAPES = [(1, 1, 1, 1, 1), (6, 1, 3, 2, 1), (6, 2, 3, 1, 2), (6, 3, 3, 3, 1), (8, 2, 5, 2, 8)]


@st.composite
def routings(draw):
  tokens, k, num_experts, groups, capacity = draw(st.sampled_from(SHAPES))
  orders = [draw(st.permutations(range(num_experts)))[:k] for _ in range(tokens)]
  mask = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
  return np.asarray(orders, np.int32), num_experts, groups, np.asarray(mask), capacity


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def planned(choices, mask, num_experts, groups, rows):
  """A routing, its positions and buffer, and rows sent there and back."""
  routing = routed(choices, num_experts, mask)
  permutation, dropped = Capacity(rows, groups=groups).plan(routing)
  sent = gather_rows(numbered(len(choices)), permutation)
  back = sum_rows(sent, jnp.ones(choices.shape, jnp.float32), permutation)
  return routing, positions(routing, groups), permutation, dropped, sent, back


def numbered(tokens):
  return jnp.arange(1.0, 1 + 2 * tokens, dtype=jnp.float32).reshape(-1, 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(routings())
def test_positions_are_those_of_counting(case):
  choices, num_experts, groups, mask, rows = case
  routing, (position_TK, count_GE), permutation, dropped, *_ = planned(
    choices, mask, num_experts, groups, rows
  )
  places, lengths = oracles.queue_places(choices, num_experts, groups, mask)
  np.testing.assert_array_equal(np.asarray(position_TK)[mask], np.asarray(places)[mask])
  np.testing.assert_array_equal(count_GE, lengths)
  np.testing.assert_array_equal(routing.count_E, np.sum(lengths, 0))
  kept = np.asarray(permutation.row_TK) < permutation.copy_R.size
  assert kept.sum() + dropped == mask.sum() * choices.shape[1]
  np.testing.assert_array_equal(kept, (np.asarray(places) < rows) & mask[:, None])
  # What is kept keeps its weight; what is masked has none.
  np.testing.assert_array_equal(routing.weight_TK, np.broadcast_to(mask[:, None], choices.shape))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(routings())
def test_there_and_back_is_the_identity_on_what_is_kept(case):
  choices, num_experts, groups, mask, capacity = case
  *_, permutation, _, rows, back = planned(choices, mask, num_experts, groups, capacity)
  row_TK, copy_R, rows, back = map(np.asarray, (permutation.row_TK, permutation.copy_R, rows, back))
  kept = row_TK < copy_R.size
  np.testing.assert_array_equal(back, numbered(len(choices)) * kept.sum(1, keepdims=True))
  for choice in np.flatnonzero(kept.reshape(-1)):
    assert copy_R[row_TK.reshape(-1)[choice]] == choice
  assert (copy_R >= 0).sum() == kept.sum()  # and every other row is empty
  assert not rows[copy_R < 0].any()
