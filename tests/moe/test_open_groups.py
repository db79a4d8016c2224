"""Group-limited routing (DeepSeek-V2, -V3) against plain numpy in float64."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import scmoe
from scmoe.base.errors import ConfigError
from scmoe.moe.options import GROUP_SCORES, SCORES, RouterConfig
from scmoe.moe.route import route, route_distinct

T, E, K = 16, 8, 3
# (groups, open groups) of eight experts; three experts a token.
GROUPS = ((4, 2), (2, 1), (2, 2))
BIASES = {
  "none": None,
  "negative": np.linspace(-1.3, -1.7, E),
  "mixed": np.linspace(-0.8, 0.6, E),
  "positive": np.linspace(1.7, 1.2, E),
}


def scored(logits, scoring):
  """Scores of one token's logits, in their own precision."""
  if scoring == "sigmoid":
    return 1 / (1 + np.exp(-logits))
  powers = np.exp(logits - logits.max())
  return powers / powers.sum()


def first_of(values, k):
  """The k largest of them; equal ones by their place."""
  return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def chosen(choice, groups, open_groups, group_score, k):
  """Experts of one token, best first: only those of its best groups are candidates."""
  members = np.arange(len(choice)).reshape(groups, -1)
  count = 2 if group_score == "top2" else 1
  worth = [sum(sorted(choice[group])[::-1][:count]) for group in members]
  candidates = sorted(int(e) for g in first_of(worth, open_groups) for e in members[g])
  return [candidates[i] for i in first_of([choice[e] for e in candidates], k)]


def weighed(logits, experts, scoring):
  """Weights of one token's experts, which add up to 1."""
  weights = scored(logits, scoring)[experts]
  return weights / weights.sum()


def run(logits, config, k=K, bias=None):
  """`route` of tokens with these logits."""
  bias = None if bias is None else jnp.asarray(bias, jnp.float32)
  x_TD = jnp.zeros((len(logits), 1))
  return route(x_TD, lambda x: jnp.asarray(logits, jnp.float32), config, k=k, bias_E=bias)


@pytest.mark.parametrize("scoring", SCORES)
@pytest.mark.parametrize("group_score", GROUP_SCORES)
@pytest.mark.parametrize("bias", BIASES)
def test_choice_and_weights_are_those_of_plain_numpy(scoring, group_score, bias):
  logits = np.random.default_rng(0).normal(size=(T, E)).astype(np.float32).astype(np.float64)
  added = 0 if BIASES[bias] is None else BIASES[bias].astype(np.float32)
  for groups, open_groups in GROUPS:
    config = RouterConfig(
      scoring_func=scoring, n_group=groups, topk_group=open_groups, group_score=group_score
    )
    got = run(logits, config, bias=BIASES[bias])
    for t in range(T):
      choice = scored(logits[t], scoring) + added
      want = chosen(choice, groups, open_groups, group_score, K)
      np.testing.assert_array_equal(got.expert_TK[t], want)
      np.testing.assert_allclose(got.weight_TK[t], weighed(logits[t], want, scoring), rtol=2e-6)


@pytest.mark.parametrize("scoring", SCORES)
def test_gradients_are_those_of_differences(scoring):
  logits = np.random.default_rng(1).normal(size=(T, E)).astype(np.float32).astype(np.float64)
  bar = np.random.default_rng(2).normal(size=(T, K))
  config = RouterConfig(scoring_func=scoring, n_group=4, topk_group=2)
  bias = BIASES["negative"]

  def loss(logits_TE, bias_E):
    routing = route(jnp.zeros((T, 1)), lambda x: logits_TE, config, k=K, bias_E=bias_E)
    return (routing.weight_TK * bar).sum()

  given = jnp.asarray(logits, jnp.float32), jnp.asarray(bias, jnp.float32)
  got, of_bias = jax.grad(loss, (0, 1))(*given)
  np.testing.assert_array_equal(of_bias, np.zeros(E))
  step = 1e-6
  for t, e in itertools.product(range(T), range(E)):
    choice = scored(logits[t], scoring) + bias.astype(np.float32)
    experts = chosen(choice, 4, 2, "top2", K)
    sides = []
    for sign in (1, -1):
      moved = logits[t].copy()
      moved[e] += sign * step
      sides.append(weighed(moved, experts, scoring) @ bar[t])
    np.testing.assert_allclose(got[t, e], (sides[0] - sides[1]) / (2 * step), atol=2e-6)


@pytest.mark.parametrize("scoring", SCORES)
def test_ties_go_to_the_smaller_number_inside_open_groups(scoring):
  # All scores alike: groups 0 and 1 of four are open, and of their experts 0, 1, 2 are chosen.
  config = RouterConfig(scoring_func=scoring, n_group=4, topk_group=2)
  for bias in (None, np.full(E, -1.5), np.full(E, 1.5)):
    routing = run(np.zeros((2, E)), config, bias=bias)
    np.testing.assert_array_equal(routing.expert_TK, [[0, 1, 2]] * 2)


def test_a_score_that_is_zero_in_float32_still_beats_a_closed_group():
  # exp(-300) is 0 in float32: the open group's second expert scores exactly 0, no more than a fill
  # of 0 would give the experts 0 and 1 of the closed group.
  logits = np.array([[-300.0, -300.0, 0.0, -300.0]])
  config = RouterConfig(n_group=2, topk_group=1)
  np.testing.assert_array_equal(run(logits, config, k=2).expert_TK, [[2, 3]])


def test_logits_that_are_not_finite_give_valid_experts():
  logits = np.array([[np.nan] * E, [np.inf] * E, [-np.inf] * E])
  config = RouterConfig(scoring_func="sigmoid", n_group=4, topk_group=2)
  expert_TK = np.asarray(run(logits, config, bias=BIASES["negative"]).expert_TK)
  assert ((expert_TK >= 0) & (expert_TK < E)).all()
  assert all(len(set(row)) == K for row in expert_TK.tolist())


def test_more_experts_than_the_open_groups_hold_are_refused():
  config = RouterConfig(n_group=4, topk_group=1)
  match = r"3 experts per token are more than the 2 of the open groups: router\.topk_group=1"
  with pytest.raises(ConfigError, match=match):
    run(np.zeros((2, E)), config)
  moe = scmoe.MoE(
    scmoe.MoEConfig(width=8, hidden=8, num_experts=E, top_k=2, router=config),
    rngs=nnx.Rngs(0),
  )
  with pytest.raises(ConfigError, match=match):  # a call may ask for another k than the layer's
    moe(jnp.ones((4, 8)), scmoe.MoECall(k=3))
  one = dataclasses.replace(config, n_group=8, group_score="max")
  with pytest.raises(ConfigError, match="2 experts per token are more than the 1"):
    route_distinct(jnp.zeros((2, 1)), lambda x: jnp.zeros((2, E)), one, jnp.zeros(2, jnp.int32))
