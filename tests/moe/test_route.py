"""Choice of experts, weights and places: small enough to check on paper, and properties."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scmoe.errors import ConfigError
from scmoe.moe.dispatch import local
from scmoe.moe.route import (
  RouterConfig,
  make_routing,
  queue_places,
  route,
  route_distinct,
  top_k_weights,
)

NO_NOISE = RouterConfig()


def probabilities(rows):
  return jnp.asarray(rows, jnp.float32)


def routed(choices, num_experts, groups=1, live=None):
  """A Routing with these choices and equal weights."""
  choices = jnp.asarray(choices, jnp.int32)
  flat = jnp.full((len(choices), num_experts), 1 / num_experts, jnp.float32)
  weights = jnp.ones(choices.shape, jnp.float32)
  live = None if live is None else jnp.asarray(live)
  return make_routing(choices, weights, flat, flat, groups=groups, live_T=live)


def kept_choices(routing, capacity):
  slot_TK, _, dropped = local.buffer_plan(routing, capacity)
  groups, num_experts = routing.count_GE.shape
  return np.asarray(slot_TK) < groups * num_experts * capacity, int(dropped)


def test_three_tokens_three_experts_on_paper():
  # Tokens a, b, c choose, best first:   a: 0, 1    b: 0, 1    c: 1, 0
  # First choices take places first:     a -> 0@0   b -> 0@1   c -> 1@0
  # Then the second ones:                a -> 1@1   b -> 1@2   c -> 0@2
  # With room for 2, the second choices of b and c find none. Token by token it would have been
  # otherwise: c's first choice would stand behind b's second.
  routing = routed([[0, 1], [0, 1], [1, 0]], 3)
  np.testing.assert_array_equal(routing.place_TK, [[0, 1], [1, 2], [0, 2]])
  np.testing.assert_array_equal(routing.count_GE, [[3, 3, 0]])
  # Flat choices are a1 a2 b1 b2 c1 c2 = 0 ... 5; expert 0 holds a1 b1 c2, expert 1 c1 a2 b2.
  np.testing.assert_array_equal(routing.order_R, [0, 2, 5, 4, 1, 3])
  kept, dropped = kept_choices(routing, 2)
  np.testing.assert_array_equal(kept, [[True, True], [True, False], [True, False]])
  assert dropped == 2
  slot_TK, source_R, _ = local.buffer_plan(routing, 2)
  np.testing.assert_array_equal(slot_TK, [[0, 3], [1, 6], [2, 6]])  # 3 experts x 2 rows; 6: dropped
  np.testing.assert_array_equal(source_R, [0, 2, 4, 1, 6, 6])  # 6: nobody


def test_every_group_has_its_own_queue():
  # Tokens a, b | c, d all choose expert 1: two queues of two, not one of four.
  routing = routed([[1], [1], [1], [1]], 2, groups=2)
  np.testing.assert_array_equal(routing.place_TK[:, 0], [0, 1, 0, 1])
  np.testing.assert_array_equal(routing.count_GE, [[0, 2], [0, 2]])
  kept, dropped = kept_choices(routing, 1)
  np.testing.assert_array_equal(kept[:, 0], [True, False, True, False])
  assert dropped == 2
  slot_TK, source_R, _ = local.buffer_plan(routing, 1)
  np.testing.assert_array_equal(slot_TK[:, 0], [2, 4, 3, 4])  # [expert, group, row]
  np.testing.assert_array_equal(source_R, [4, 4, 0, 2])


def test_masked_tokens_take_no_place():
  routing = routed([[0], [0], [0]], 2, live=[True, False, True])
  assert routing.place_TK[0, 0] == 0
  assert routing.place_TK[2, 0] == 1
  np.testing.assert_array_equal(routing.count_GE, [[2, 0]])
  np.testing.assert_array_equal(routing.weight_TK[:, 0], [1, 0, 1])
  kept, dropped = kept_choices(routing, 3)
  np.testing.assert_array_equal(kept[:, 0], [True, False, True])
  assert dropped == 0


def test_equal_probabilities_go_to_the_smaller_number():
  expert_TK, weight_TK = top_k_weights(probabilities([[0.25, 0.25, 0.25, 0.25]]), 2, True)
  np.testing.assert_array_equal(expert_TK, [[0, 1]])
  np.testing.assert_array_equal(weight_TK, [[0.5, 0.5]])
  expert_TK, _ = top_k_weights(probabilities([[0.2, 0.4, 0.4]]), 3, True)
  np.testing.assert_array_equal(expert_TK, [[1, 2, 0]])


def test_a_single_weight_is_never_normalised():
  probs = probabilities([[0.1, 0.6, 0.3]])
  np.testing.assert_allclose(top_k_weights(probs, 1, True)[1], [[0.6]])
  np.testing.assert_allclose(top_k_weights(probs, 2, True)[1], [[2 / 3, 1 / 3]], rtol=1e-6)
  np.testing.assert_allclose(top_k_weights(probs, 2, False)[1], [[0.6, 0.3]])


def test_all_experts_and_one_token():
  rng = np.random.default_rng(0)
  x, gate = rng.normal(size=(1, 5)), rng.normal(size=(5, 3))
  routing = route(jnp.asarray(x, jnp.float32), jnp.asarray(gate, jnp.float32), NO_NOISE, k=3)
  expected = oracles.gate(oracles.lift(x[0]), gate, 3)
  np.testing.assert_array_equal(routing.expert_TK[0], expected.experts)
  np.testing.assert_allclose(routing.weight_TK[0], oracles.values(expected.weights), rtol=1e-6)
  np.testing.assert_allclose(routing.weight_TK.sum(), 1, rtol=1e-6)
  np.testing.assert_array_equal(routing.place_TK, [[0, 0, 0]])


@pytest.mark.parametrize("k", [1, 2, 4])
def test_route_equals_the_gate_token_by_token_with_noise(k):
  rng = np.random.default_rng(k)
  x, gate = rng.normal(size=(7, 5)), rng.normal(size=(5, 4))
  noise = rng.normal(size=(7, 4))
  args = (jnp.asarray(a, jnp.float32) for a in (x, gate))
  routing = route(*args, RouterConfig(noise=2.0), k=k, noise_TE=jnp.asarray(noise, jnp.float32))
  for t in range(7):
    expected = oracles.gate(oracles.lift(x[t]), gate, k, noise=2.0 / 4 * noise[t])
    np.testing.assert_array_equal(routing.expert_TK[t], expected.experts)
    np.testing.assert_allclose(routing.weight_TK[t], oracles.values(expected.weights), rtol=1e-5)
    np.testing.assert_allclose(routing.probs_TE[t], expected.probs.value, rtol=1e-5)
    np.testing.assert_allclose(routing.logits_TE[t], expected.logits.value, rtol=1e-4, atol=1e-6)


def test_noise_without_a_size_is_no_noise():
  x, gate = jnp.ones((2, 3)), jnp.eye(3)
  quiet = route(x, gate, NO_NOISE, k=1)
  np.testing.assert_array_equal(
    route(x, gate, NO_NOISE, k=1, noise_TE=1e3 * jnp.ones((2, 3))).logits_TE, quiet.logits_TE
  )


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


def test_more_choices_than_experts():
  with pytest.raises(ConfigError, match=r"top_k=4 is larger than model\.num_experts=3"):
    route(jnp.ones((2, 3)), jnp.ones((3, 3)), NO_NOISE, k=4)


def test_groups_that_do_not_divide():
  with pytest.raises(ConfigError, match=r"dispatch\.groups=2 does not divide the 3 tokens"):
    queue_places(jnp.zeros((3, 1), jnp.int32), 2, groups=2)


# (T, K, E, groups, capacity): few, so that few programs are compiled; hypothesis fills them.
SHAPES = [(1, 1, 1, 1, 1), (6, 1, 3, 2, 1), (6, 2, 3, 1, 2), (6, 3, 3, 3, 1), (8, 2, 5, 2, 8)]


@st.composite
def routings(draw):
  tokens, k, num_experts, groups, capacity = draw(st.sampled_from(SHAPES))
  orders = [draw(st.permutations(range(num_experts)))[:k] for _ in range(tokens)]
  live = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
  return np.asarray(orders, np.int32), num_experts, groups, np.asarray(live), capacity


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def planned(choices, live, num_experts, groups, capacity):
  """A routing, its buffer, and rows sent there and back."""
  routing = routed(choices, num_experts, groups, live)
  slot_TK, source_R, dropped = local.buffer_plan(routing, capacity)
  x = numbered(len(choices))
  rows = local.gather_rows(x, slot_TK, source_R)
  back = local.sum_rows(rows, jnp.ones(choices.shape, jnp.float32), slot_TK, source_R)
  return routing, slot_TK, source_R, dropped, rows, back


def numbered(tokens):
  return jnp.arange(1.0, 1 + 2 * tokens, dtype=jnp.float32).reshape(-1, 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(routings())
def test_places_are_those_of_counting(case):
  choices, num_experts, groups, live, capacity = case
  routing, slot_TK, _, dropped, *_ = planned(choices, live, num_experts, groups, capacity)
  places, lengths = oracles.queue_places(choices, num_experts, groups, live)
  np.testing.assert_array_equal(np.asarray(routing.place_TK)[live], np.asarray(places)[live])
  np.testing.assert_array_equal(routing.count_GE, lengths)
  assert int(routing.count_GE.sum()) == live.sum() * choices.shape[1]
  assert sorted(np.asarray(routing.order_R)) == list(range(choices.size))
  kept = np.asarray(slot_TK) < num_experts * groups * capacity
  assert kept.sum() + dropped == live.sum() * choices.shape[1]
  np.testing.assert_array_equal(kept, (np.asarray(places) < capacity) & live[:, None])
  # What is kept keeps its weight; what is masked has none.
  np.testing.assert_array_equal(routing.weight_TK, np.broadcast_to(live[:, None], choices.shape))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(routings())
def test_there_and_back_is_the_identity_on_what_is_kept(case):
  choices, num_experts, groups, live, capacity = case
  _, *plan = planned(choices, live, num_experts, groups, capacity)
  slot_TK, source_R, _, rows, back = map(np.asarray, plan)
  kept = slot_TK < num_experts * groups * capacity
  np.testing.assert_array_equal(back, numbered(len(choices)) * kept.sum(1, keepdims=True))
  for choice in np.flatnonzero(kept.reshape(-1)):
    assert source_R[slot_TK.reshape(-1)[choice]] == choice
  assert (source_R < choices.size).sum() == kept.sum()  # and every other row is empty
  assert not rows[source_R == choices.size].any()
