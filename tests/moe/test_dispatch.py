"""The capacity rule, the permutation's gradients, and the layer against its oracle."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.sharding import PartitionSpec as P
from test_route import routed

import scmoe
from scmoe.base.errors import ConfigError
from scmoe.kernels.permute import gather_rows, sum_rows
from scmoe.moe.dispatch import Capacity, capacity
from scmoe.moe.dispatch.per_rank import reached_share
from scmoe.moe.route import make_routing


@pytest.mark.parametrize(
  ("factor", "tokens", "experts", "k", "rows"),
  [
    (1.0, 8, 4, 1, 2),
    (1.25, 8, 4, 1, 2),  # ⌊2.5⌋
    (1.25, 8, 4, 2, 4),  # 2 · ⌊2.5⌋, not ⌊5⌋
    (1.0, 9, 4, 1, 3),  # ⌈9 / 4⌉
    (2.0, 1, 8, 1, 2),
    (0.5, 2, 1, 3, 3),
  ],
)
def test_capacity_is_tutels(factor, tokens, experts, k, rows):
  assert capacity(factor, tokens=tokens, num_experts=experts, k=k) == rows
  assert oracles.capacity(factor, tokens, experts, k) == rows


@pytest.mark.parametrize("rule", ["tutel", "megablocks"])
@pytest.mark.parametrize("tokens", [5, 9, 21, 24, 51])
def test_a_capacity_of_zero_says_what_would_do(tokens, rule):
  options = {"tokens": tokens, "num_experts": 3, "k": 2, "rule": rule}
  with pytest.raises(ConfigError, match=r"capacity_factor=0\.01 .* a capacity of 0; use at") as e:
    capacity(0.01, **options)
  remedy = float(re.search(r"at least ([0-9.]+)", str(e.value))[1])
  assert capacity(remedy, **options) > 0


def test_a_factor_of_zero_drops_nothing_and_a_negative_one_is_a_bound():
  options = {"tokens": 8, "num_experts": 4, "k": 1}
  assert capacity(0.0, **options) == 8
  assert capacity(0.0, **options, need=3) == 3
  assert capacity(-1.0, **options, need=3) == 2
  assert capacity(-2.0, **options, need=3) == 3


@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize("k", [1, 3])
def test_gradients_of_the_permutation(k, rows):
  rng = np.random.default_rng(10 * k + rows)
  tokens, experts, groups, width = 6, 4, 2, 3
  choices = np.argsort(rng.random((tokens, experts)), 1)[:, :k]
  routing = routed(choices, experts, mask=[1, 1, 0, 1, 1, 1])
  permutation, _ = Capacity(rows, groups=groups).plan(routing)
  size = experts * groups * rows
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  x, weight, c, scale = (
    normal(tokens, width),
    normal(tokens, k),
    normal(tokens, width),
    normal(size),
  )
  # One-hot matrices say the same with products only: 1 at [t, k, r] where the choice fills row r.
  one_hot = jax.nn.one_hot(permutation.row_TK, size)

  def gathered(x, weight):
    rows = jnp.sin(gather_rows(x, permutation)) * scale[:, None]
    return (sum_rows(rows, weight, permutation) * c).sum()

  def multiplied(x, weight):
    rows = jnp.sin(jnp.einsum("tkr,td->rd", one_hot, x)) * scale[:, None]
    return (jnp.einsum("tkr,tk,rd->td", one_hot, weight, rows) * c).sum()

  both = jax.jit(lambda *a: [jax.value_and_grad(f, (0, 1))(*a) for f in (gathered, multiplied)])
  got, expected = both(x, weight)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


def test_the_sum_of_rows_accumulates_in_float32():
  # 256 + 1 + 1 in bfloat16, one after the other, would stay 256.
  routing = routed([[0, 1, 2]], 3)
  permutation, _ = Capacity(1).plan(routing)
  rows = jnp.asarray([[256.0], [1.0], [1.0]], jnp.bfloat16)
  y = sum_rows(rows, jnp.ones((1, 3), jnp.float32), permutation)
  assert y.dtype == jnp.bfloat16
  assert float(y[0, 0]) == 258


def test_no_scatter_where_rows_travel():
  routing = routed([[0, 1], [1, 0]], 2)
  permutation, _ = Capacity(2).plan(routing)

  def function(x, weight):
    return sum_rows(gather_rows(x, permutation), weight, permutation).sum()

  program = str(jax.make_jaxpr(jax.grad(function, (0, 1)))(jnp.ones((2, 3)), jnp.ones((2, 2))))
  assert "gather" in program
  assert "scatter" not in program


# The example of docs/routing.md: token t holds the number t + 1, so that 0 is a row of zeros, and
# the choices of six tokens on two ranks.
EXAMPLE_EXPERTS = [[2, 0], [2, 3], [2, 1], [0, 1], [2, 0], [3, 2]]
EXAMPLE_WEIGHTS = [[0.6, 0.4], [0.7, 0.3], [0.5, 0.5], [0.8, 0.2], [0.9, 0.1], [0.6, 0.4]]
ARRIVED = {
  "capacity": ([1, 0, 3, 0, 4, 5, 4, 0], [1, 2, 2, 0, 5, 6, 6, 0]),
  "dropless": ([1, 3, 0, 0, 4, 5, 4, 0], [1, 2, 3, 2, 5, 6, 6, 0]),
  "packed": ([1, 3, 0, 0, 4, 5, 4, 0], [1, 2, 2, 0, 5, 6, 6, 0]),
}


@pytest.mark.parametrize("transport", ARRIVED)
def test_the_example_of_the_page(transport):
  config = scmoe.DispatchConfig(transport, capacity_factor=1.0)
  mesh = scmoe.make_mesh(scmoe.MeshConfig(expert=2), jax.devices()[:2], num_experts=4)

  def there_and_back(x_TD, expert_TK, weight_TK):
    flat_TE = jnp.full((3, 4), 0.25)
    routing = make_routing(expert_TK, weight_TK, flat_TE, flat_TE)
    moved = scmoe.make_transport(config, tokens=3, num_experts=4, k=2)
    sent = moved.dispatch(x_TD, routing, lambda rows, layout: 10 * rows)
    done = dataclasses.replace(sent, rows=tuple(10 * rows for rows in sent.rows))
    return sent.rows[0].reshape(1, -1), sent.dropped[None], moved.combine(done)

  spread = scmoe.manual(there_and_back, mesh, (P("expert"),) * 3, (P("expert"),) * 3)
  given = jnp.arange(1.0, 7)[:, None], jnp.asarray(EXAMPLE_EXPERTS), jnp.asarray(EXAMPLE_WEIGHTS)
  rows, dropped, y_TD = jax.jit(spread)(*given)
  np.testing.assert_array_equal(rows, ARRIVED[transport])
  drops = transport != "dropless"
  np.testing.assert_array_equal(dropped, [int(drops), 0])
  # Each expert multiplies by ten; token 2 has lost half of its weight where choices are dropped.
  np.testing.assert_allclose(y_TD[:, 0], [10, 20, 15 if drops else 30, 40, 50, 60], rtol=1e-6)


def test_the_example_of_the_page_with_a_row_for_each_rank():
  config = scmoe.DispatchConfig("per_rank")
  mesh = scmoe.make_mesh(scmoe.MeshConfig(expert=2), jax.devices()[:2], num_experts=4)

  def experts(rows, layout):
    weight_MK = jnp.where(layout.group_MK < 2, layout.weight_MK, 0)
    return 10 * weight_MK.sum(1, keepdims=True) * rows

  def there_and_back(x_TD, expert_TK, weight_TK):
    flat_TE = jnp.full((3, 4), 0.25)
    routing = make_routing(expert_TK, weight_TK, flat_TE, flat_TE)
    moved = scmoe.make_transport(config, tokens=3, num_experts=4, k=2)
    sent = moved.dispatch(x_TD, routing, experts)
    done = dataclasses.replace(sent, rows=(experts(sent.rows[0], sent.layouts[0]),))
    return sent.rows[0], sent.layouts[0].group_MK, done.rows[0], moved.combine(done)

  spread = scmoe.manual(there_and_back, mesh, (P("expert"),) * 3, (P("expert"),) * 4)
  given = jnp.arange(1.0, 7)[:, None], jnp.asarray(EXAMPLE_EXPERTS), jnp.asarray(EXAMPLE_WEIGHTS)
  rows, chosen, back, y_TD = jax.jit(spread)(*given)
  np.testing.assert_array_equal(rows[:, 0], [1, 2, 3, 4, 5, 6] * 2)
  np.testing.assert_array_equal(chosen[:6], [[2, 0], [2, 2], [2, 1], [0, 1], [2, 0], [2, 2]])
  np.testing.assert_array_equal(chosen[6:], [[0, 2], [0, 1], [0, 2], [2, 2], [0, 2], [1, 0]])
  np.testing.assert_allclose(back[:, 0], [4, 0, 15, 40, 5, 0, 6, 20, 15, 0, 45, 60], rtol=1e-6)
  np.testing.assert_allclose(y_TD[:, 0], [10, 20, 30, 40, 50, 60], rtol=1e-6)


@pytest.mark.parametrize(
  ("ranks", "experts", "choices"),
  [(8, 8, 2), (4, 4, 3), (2, 4, 2), (2, 8, 5), (3, 9, 1), (4, 8, 8)],
)
def test_a_balanced_router_reaches_a_rank_with_this_share_of_its_tokens(ranks, experts, choices):
  """It is the share of all sets of K experts that hold one of the first rank's."""
  chosen = list(itertools.combinations(range(experts), choices))
  there = sum(min(one) < experts // ranks for one in chosen)
  assert reached_share(ranks, experts, choices) == pytest.approx(there / len(chosen))
