"""Orders of positions, capacity rules and token rounding: loops, properties, and by hand."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import by_day_and_night
from hypothesis import given, settings
from hypothesis import strategies as st

from scmoe.base.errors import ConfigError
from scmoe.kernels.permute import gather_rows, sum_rows
from scmoe.moe.dispatch import Capacity, Local, capacity, exact_capacity, queue_positions
from scmoe.moe.options import ORDERS, CompatConfig, RouterConfig
from scmoe.moe.rounding import rounded_choice, rounded_counts, warn_not_causal
from scmoe.moe.route import make_routing, route
from scmoe.moe.scores import Draws

T, E, K = 8, 4, 2  # one shape for all properties: compiled once


def positions_loop(experts, order, priority, mask, groups=1):
  """Serves choices one by one, as the order says."""
  tokens, k = experts.shape
  size = max(tokens // groups, 1)
  visits = {t: (t // size, t) for t in range(tokens)}
  if order == "priority":
    visits = {t: (t // size, -priority[t], t) for t in range(tokens)}
  if order == "token":
    turns = sorted((visits[t], j, t) for t in range(tokens) for j in range(k))
  else:
    turns = sorted((j, visits[t], t) for t in range(tokens) for j in range(k))
    turns = [(visit, j, t) for j, visit, t in turns]
  queues, positions = {}, np.full((tokens, k), -1)
  for _, j, t in turns:
    if mask[t]:
      queue = queues.setdefault((t // size, int(experts[t, j])), [])
      positions[t, j] = len(queue)
      queue.append(t)
  return positions


def routings(num_experts=E, tokens=T, k=K):
  row = st.permutations(range(num_experts)).map(lambda p: p[:k])
  return st.lists(row, min_size=tokens, max_size=tokens).map(lambda r: np.array(r, np.int32))


SKEWED = [
  np.tile([[0, 1]], (T, 1)),  # all to one expert
  np.tile([[3, 0], [0, 3]], (T // 2, 1)),  # experts without a token
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("groups", [1, 2])
def test_positions_are_those_of_serving_one_by_one(order, groups):
  @jax.jit
  def positions(experts, taken, priority):
    return queue_positions(experts, E, groups, taken, order=order, priority_T=priority)

  @settings(max_examples=25, deadline=None)
  @given(routings(), st.lists(st.integers(0, 3), min_size=T, max_size=T), st.integers(0, 2**T - 1))
  def check(experts, ranks, bits):
    mask = np.array([bool(bits >> t & 1) for t in range(T)])
    taken = np.repeat(mask[:, None], K, 1)
    priority = np.array(ranks, np.float32)  # with ties
    position, count = positions(experts, taken, priority)
    want = positions_loop(experts, order, priority, mask, groups)
    np.testing.assert_array_equal(np.where(taken, position, -1), want)
    assert count.sum() == mask.sum() * K

  check()
  for experts in SKEWED:
    position, count = positions(experts.astype(np.int32), None, np.ones(T, np.float32))
    want = positions_loop(experts, order, np.ones(T), np.ones(T, bool), groups)
    np.testing.assert_array_equal(position, want)
    assert count.sum() == T * K


def test_priority_serves_the_surest_token_first_and_loses_none_at_capacity_zero():
  logits = jnp.asarray([[1, 0], [3, 0], [2, 0], [0, 9]], jnp.float32)
  routing = route(jnp.zeros((4, 1)), lambda x: logits, RouterConfig(), k=1)
  surest = routing.probs_TE.max(-1)
  position, _ = queue_positions(routing.expert_TK, 2, order="priority", priority_T=surest)
  np.testing.assert_array_equal(position[:, 0], [2, 0, 1, 0])
  rows = capacity(0, tokens=4, num_experts=2, k=1, need=exact_capacity(routing.count_E))
  assert rows == 3
  assert Capacity(rows, order="priority").plan(routing)[1] == 0
  permutation, _ = Capacity(1, order="priority").plan(routing)
  kept = np.asarray(permutation.row_TK)[:, 0] < 2
  np.testing.assert_array_equal(kept, [False, True, False, True])  # the least sure ones are dropped


def test_devices_with_different_numbers_of_tokens():
  # Capacity from the largest device, the others padded and masked: as if each had its own tokens.
  rng = np.random.default_rng(0)
  experts = rng.permuted(np.tile(np.arange(E), (T, 1)), axis=1)[:, :K].astype(np.int32)
  rows = capacity(0.5, tokens=T, num_experts=E, k=K)
  for tokens in (2, 5, T):
    taken = np.repeat(np.arange(T)[:, None] < tokens, K, 1)
    position, _ = queue_positions(jnp.asarray(experts), E, taken_TK=jnp.asarray(taken))
    alone, _ = queue_positions(jnp.asarray(experts[:tokens]), E)
    np.testing.assert_array_equal(position[:tokens] < rows, alone < rows)


@settings(max_examples=25, deadline=None)
@given(routings(), st.sampled_from([1, 3]), st.sampled_from(ORDERS))
def test_what_is_kept_comes_back_with_its_weight(experts, rows, order):
  probs = jnp.full((T, E), 1 / E)
  weight = jnp.arange(1, T * K + 1, dtype=jnp.float32).reshape(T, K)
  routing = make_routing(jnp.asarray(experts), weight, probs, probs)
  np.testing.assert_array_equal(routing.weight_TK, weight)
  permutation, dropped = Capacity(rows, order=order).plan(routing)
  kept = np.asarray(permutation.row_TK) < E * rows
  assert dropped + kept.sum() == T * K
  x = jnp.arange(1, T + 1, dtype=jnp.float32)[:, None]
  y = sum_rows(gather_rows(x, permutation), routing.weight_TK, permutation)
  np.testing.assert_allclose(y, x * (np.asarray(weight) * kept).sum(1, keepdims=True), rtol=1e-6)


# -- capacity -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("factor", "options", "want"),
  [
    (2.0, {"tokens": 96, "num_experts": 6, "k": 6}, 192),  # not limited to the tokens
    (0.29, {"tokens": 100, "num_experts": 1, "k": 1}, 28),  # a double, truncated
    (1.0, {"tokens": 10, "num_experts": 4, "k": 2}, 6),
    (1.0, {"tokens": 10, "num_experts": 4, "k": 2, "rule": "megablocks"}, 5),
    (0, {"tokens": 96, "num_experts": 6, "k": 2, "need": 35}, 35),
    (0, {"tokens": 96, "num_experts": 6, "k": 2}, 96),  # under jit: nothing can be lost
    (-1.25, {"tokens": 96, "num_experts": 6, "k": 1, "need": 21}, 20),
    (-1.25, {"tokens": 96, "num_experts": 6, "k": 1, "need": 19}, 19),
    (-1.25, {"tokens": 96, "num_experts": 6, "k": 1}, 20),
    (1.0, {"tokens": 96, "num_experts": 6, "k": 2, "align": 3}, 33),
    (1.0, {"tokens": 96, "num_experts": 6, "k": 2, "align": 300}, 384),
    (0, {"tokens": 96, "num_experts": 6, "k": 2, "need": 35, "align": 4}, 36),
    (1.0, {"tokens": 0, "num_experts": 6, "k": 2}, 0),
  ],
)
def test_capacity_rules(factor, options, want):
  assert capacity(factor, **options) == want


@pytest.mark.parametrize("factor", [0.1, -0.1])
def test_a_capacity_of_zero_is_refused_and_never_dropless(factor):
  with pytest.raises(ConfigError, match=r"capacity of 0; use at least 0\.5"):
    capacity(factor, tokens=8, num_experts=4, k=2, need=8)


@pytest.mark.parametrize(
  ("rule", "tokens", "num_experts", "k"),
  [
    ("megablocks", 1, 1234, 1),
    ("megablocks", 3, 34567, 2),  # 5,761.1666...: six digits would round it down
    ("megablocks", 15, 27, 3),  # in floating point 0.6 gives a product below 1
    ("tutel", 29, 4, 1),
  ],
)
def test_the_factor_that_the_refusal_of_a_capacity_suggests_works(rule, tokens, num_experts, k):
  options = {"tokens": tokens, "num_experts": num_experts, "k": k, "rule": rule}
  with pytest.raises(ConfigError) as refused:
    capacity(1e-9, **options)
  found = re.search(r"at least ([0-9.]+) in size", str(refused.value))
  assert found is not None
  assert capacity(float(found[1]), **options) == (k if rule == "tutel" else 1)


def test_the_exact_need_is_not_known_under_jit():
  known = jnp.asarray([[1, 4], [2, 0]])
  assert exact_capacity(known) == 4
  sized = jax.jit(lambda: jnp.zeros(exact_capacity(known)))  # known counts inside a traced function
  assert sized().shape == (4,)
  with pytest.raises(ConfigError, match="traced"):
    jax.jit(exact_capacity)(jnp.ones((1, 2), jnp.int32))


# -- token rounding -------------------------------------------------------------------------------


def test_rounded_counts_by_hand():
  counts = jnp.asarray([0, 1, 2, 3, 5, 6, 7])
  np.testing.assert_array_equal(rounded_counts(counts, 4, 100), [0, 0, 4, 4, 4, 8, 8])
  np.testing.assert_array_equal(rounded_counts(counts, 4, 7), [0, 0, 4, 4, 4, 4, 4])


@pytest.mark.parametrize(("skew", "k"), by_day_and_night([0.0, 2.0, 8.0], [1, 2, 6]))
def test_every_expert_gets_whole_tiles(skew, k):
  tokens, experts, tile = 48, 6, 4
  rng = np.random.default_rng(k)
  logits = jnp.asarray(rng.normal(size=(tokens, experts)) + skew * np.eye(experts)[0], jnp.float32)
  mask = jnp.asarray(np.arange(tokens) % 8 != 3)
  config = RouterConfig(compat=CompatConfig(round_to=tile))
  choose = lambda logits, training: route(
    jnp.zeros((tokens, 1)), lambda x: logits, config, k=k, mask_T=mask, training=training
  )
  plain, routing = (jax.jit(choose)(logits, training) for training in (None, Draws()))
  before, after = np.asarray(plain.count_E), np.asarray(routing.count_E)
  assert (after % tile == 0).all()
  assert (np.abs(after - before) < tile).all()
  taken = np.asarray(routing.taken_TK)
  for e in range(experts):
    visitors = (taken & (np.asarray(routing.expert_TK) == e)).sum(1)
    assert visitors.max(initial=0) <= 1
    assert visitors.sum() == after[e]
  weight = np.asarray(routing.weight_TK)
  assert (weight[~taken] == 0).all()
  if k > 1:
    np.testing.assert_allclose(weight.sum(1)[taken.any(1)], 1, rtol=1e-5)
  # Every form that rows can have carries exactly the choices that are made.

  @jax.jit
  def carried(x, routing):
    sent = Capacity(tokens).dispatch(x, routing)
    stayed = Local().dispatch(x, routing).layouts[0]
    return sent.rows[0].sum(), sent.dropped, Capacity(tokens).combine(sent), stayed.group_MK

  sent, dropped, y, stayed = carried(jnp.ones((tokens, 1)), routing)
  assert sent == after.sum()
  assert dropped == 0
  np.testing.assert_allclose(y[:, 0], weight.sum(1), rtol=1e-6)
  np.testing.assert_array_equal(np.asarray(stayed) < experts, taken)


def test_rounding_takes_the_tokens_that_like_an_expert_best():
  probs = jnp.asarray([[0.9, 0.1], [0.8, 0.2], [0.55, 0.45], [0.6, 0.4], [0.3, 0.7], [0.7, 0.3]])
  expert = jnp.asarray([[0], [0], [0], [0], [1], [0]])
  # Expert 0 has 5 tokens, rounded to 4: it gives up token 2. Expert 1 has one, rounded to 2 (tile
  # 2): it takes token 2, which likes it best of the others.
  which, present = rounded_choice(probs, expert, 2)
  visits = [{int(e) for e, p in zip(*row) if p} for row in zip(which, present)]
  five = sum(0 in v for v in visits)
  assert five == 6  # 5 rounds up to 6: halves go up
  assert visits[2] == {0, 1}
  assert visits[4] == {0, 1}


def test_rounding_warns_once_and_refuses_a_tile_without_tokens(caplog):
  warn_not_causal.cache_clear()
  rounding = lambda tile: RouterConfig(compat=CompatConfig(round_to=tile))
  arguments = (jnp.zeros((4, 1)), jnp.zeros((1, 2)), rounding(2))
  with caplog.at_level(logging.WARNING, logger="scmoe"):
    route(*arguments, k=1)
    assert not caplog.records  # evaluation: plain top-k
    for _ in range(2):
      route(*arguments, k=1, training=Draws())
  assert len(caplog.records) == 1
  assert "not causal" in caplog.text
  with pytest.raises(ConfigError, match="round_to=8 is larger than the 4 tokens"):
    route(*arguments[:2], rounding(8), k=1, training=Draws())


# -- corners --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("order", "sizes"), by_day_and_night(ORDERS, [(0, 2), (1, 1), (1, E), (3, E)])
)
def test_few_tokens_and_all_experts(order, sizes):
  tokens, k = sizes
  rng = np.random.default_rng(0)
  x, gate = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((tokens, 3), (3, E)))
  rows = capacity(1.0, tokens=tokens, num_experts=E, k=k)

  @jax.jit
  def there_and_back(x, gate):
    routing = route(x, gate, RouterConfig(), k=k)
    transport = Capacity(rows, order=order)
    y = transport.combine(transport.dispatch(x, routing))
    surest = routing.probs_TE.max(-1)
    position, _ = queue_positions(routing.expert_TK, E, order=order, priority_T=surest)
    return routing, y, position

  routing, y, position = there_and_back(x, gate)
  assert routing.expert_TK.shape == (tokens, k)
  if k == E:
    np.testing.assert_array_equal(np.sort(routing.expert_TK, 1), np.tile(np.arange(E), (tokens, 1)))
  kept = np.asarray(position) < rows
  want = np.asarray(x) * (np.asarray(routing.weight_TK) * kept).sum(1, keepdims=True)
  np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-7)


def test_more_choices_than_experts_names_both():
  with pytest.raises(ConfigError, match=r"top_k=5 is larger than model\.num_experts=4"):
    route(jnp.zeros((2, 3)), jnp.zeros((3, 4)), RouterConfig(), k=5)


def test_equal_probabilities_go_to_the_smaller_index():
  routing = route(jnp.ones((3, 2)), jnp.zeros((2, E)), RouterConfig(), k=2)
  np.testing.assert_array_equal(routing.expert_TK, [[0, 1]] * 3)
  surest = routing.probs_TE.max(-1)
  position, _ = queue_positions(routing.expert_TK, E, order="priority", priority_T=surest)
  np.testing.assert_array_equal(position, [[0, 0], [1, 1], [2, 2]])
