"""Experts from the host's memory: which are asked for, where they lie, what a cache keeps."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from flax import nnx

from scmoe.inference.offload import trace as expert_trace
from scmoe.kernels.grouped_matmul.layout import choices_layout, padded_layout
from scmoe.moe.experts import FFNExperts, FFNExpertsConfig
from scmoe.moe.route import route
from scmoe.offload.cache import CachePolicy, empty_cache, filled
from scmoe.offload.experts import request_experts
from scmoe.offload.memory import Int8, multiplied_out, quantised

E, D, F = 8, 4, 6


@pytest.fixture(scope="module")
def experts():
  """Eight of them, each with weights of its own."""
  return FFNExperts(FFNExpertsConfig(D, F, E, bias=True, init_std=1.0), rngs=nnx.Rngs(0))


def routed(experts_TK, num=E):
  """A routing with these choices."""
  expert_TK = jnp.asarray(experts_TK, jnp.int32)
  tokens, k = expert_TK.shape
  made = route(jnp.ones((tokens, D)), jnp.zeros((D, num)), k=k)
  count_E = jnp.zeros(num, jnp.int32).at[expert_TK.reshape(-1)].add(1)
  weight_TK = jnp.arange(1.0, tokens * k + 1).reshape(tokens, k)
  return dataclasses.replace(made, expert_TK=expert_TK, count_E=count_E, weight_TK=weight_TK)


def output(experts, routing, x_TD):
  return experts(x_TD, choices_layout(routing.expert_TK, routing.weight_TK, E))


CHOICES = {
  "one token": [[5, 2]],
  "one choice": [[3]],
  "three alike": [[1, 6], [6, 1], [1, 6]],
  "all of them": [[0, 1], [2, 3], [4, 5], [6, 7], [7, 0]],
}


FETCHED_BY_DAY = [(0, "one token"), (4, "three alike"), (0, "all of them")]


@pytest.mark.parametrize(
  ("size", "name"),
  [c if c in FETCHED_BY_DAY else night(*c) for c in itertools.product([0, 4], CHOICES)],
)
def test_fetched_experts_compute_what_resident_ones_compute(experts, size, name):
  routing = routed(CHOICES[name])
  x_TD = jax.random.normal(jax.random.key(1), (len(CHOICES[name]), D))
  cache = empty_cache(nnx.split(experts)[1], size) if size else None
  everything = []

  @jax.jit
  def computed(routing, x_TD):
    request = request_experts(experts, routing, cache=cache)
    everything.append(request.everything)
    fetched, _ = request.fetched()
    return output(fetched, routing, x_TD), request.needed_e, request.copies

  y_TD, needed_e, copies = computed(routing, x_TD)
  resident = jax.jit(lambda routing, x_TD: output(experts, routing, x_TD))
  np.testing.assert_array_equal(y_TD, resident(routing, x_TD))
  wanted = set(np.asarray(routing.expert_TK).ravel().tolist())
  assert set(np.flatnonzero(needed_e)) == wanted or everything == [True]
  if copies is not None:
    assert int(copies) == len(wanted)


def test_rows_keep_their_places_under_other_names():
  layout = choices_layout(jnp.array([[1, 0], [1, 2], [0, 3]]), jnp.ones((3, 2)), 3)
  renamed = layout.renamed(jnp.array([4, 0, 5]), 5)
  np.testing.assert_array_equal(renamed.sizes_G, [2, 0, 0, 0, 2])  # expert 2 is not there
  np.testing.assert_array_equal(renamed.group_MK, [[0, 4], [0, 5], [4, 5]])
  np.testing.assert_array_equal(renamed.position_MK, layout.position_MK)
  padded = padded_layout(1, 2, 1).renamed(jnp.array([2, 1]), 3)
  np.testing.assert_array_equal(padded.group_MK, [[2], [1]])


def test_masked_tokens_and_zero_experts_request_nothing(experts):
  routing = dataclasses.replace(routed([[1, 2], [3, 4]]), mask_T=jnp.array([True, False]))
  assert np.flatnonzero(request_experts(experts, routing).needed_e).tolist() == [1, 2]
  zeros = dataclasses.replace(routed([[1, 9]], num=E + 2), zero_experts=2)
  request = request_experts(experts, zeros)
  assert (np.flatnonzero(request.needed_e).tolist(), int(request.copies)) == ([1], 1)


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize(("size", "k"), [(2, 2), (3, 1), (8, 2)])
def test_a_cache_does_what_its_policy_says(experts, policy, size, k):
  rng = np.random.default_rng(size)
  skew = rng.dirichlet(np.full(E, 0.3))
  draws = [rng.choice(E, k, replace=False, p=skew * 0.9 + 0.1 / E) for _ in range(60)]
  how, params = CachePolicy(policy, decay=0.8), nnx.split(experts)[1]

  @jax.jit
  def step(cached, expert_TK, x_TD):
    request = request_experts(experts, routed(expert_TK), how, cached)
    fetched, _ = request.fetched()
    cached = dataclasses.replace(request.cache, params=fetched.params)
    return cached, output(fetched, routed(expert_TK), x_TD)

  @jax.jit
  def there(expert_TK, x_TD):
    return output(experts, routed(expert_TK), x_TD)

  cached = empty_cache(params, size)
  trace, missed = np.zeros((1, len(draws), E), bool), []
  for i, draw in enumerate(draws):
    x_TD = rng.normal(size=(1, D)).astype(np.float32)
    cached, y_TD = step(cached, draw[None], x_TD)
    np.testing.assert_allclose(y_TD, there(draw[None], x_TD), rtol=1e-6)
    trace[0, i, draw] = True
    missed.append(int(cached.misses[0]))
    np.testing.assert_array_equal(cached.requested_Ne[0], trace[0, i])
  for place, expert in enumerate(np.asarray(cached.expert_C)):  # what it says it holds, it holds
    if expert >= 0:
      np.testing.assert_array_equal(cached.params["up"][place], experts.up[expert])
  requests = int(cached.requests[0])
  assert requests == 60 * k
  assert requests - missed[-1] == expert_trace.hits(trace, size, policy, decay=0.8)
  best = expert_trace.hits(trace, size, "belady")
  assert requests - missed[-1] <= best
  if size == E:
    assert missed[-1] == trace[0].any(0).sum(), "nothing is ever replaced"


def test_what_lru_held_before_the_trace_is_older_than_its_requests():
  """Experts 0 and 1 are held since calls 10 and 9; then 2, 3 and 2 are requested."""
  trace = np.zeros((1, 3, 4), bool)
  trace[0, range(3), (2, 3, 2)] = True
  worth = np.array([[10.0, 9.0, 0.0, 0.0]])
  assert expert_trace.hits(trace, 2, "lru", held_LC=np.array([[0, 1]]), worth_LE=worth) == 1


def test_a_call_that_can_request_more_than_the_cache_holds_does_not_use_it(experts):
  cache = empty_cache(nnx.split(experts)[1], 3)
  request = request_experts(experts, routed([[0, 1], [2, 3]]), cache=cache)
  assert request.cache is None


def test_a_layer_that_was_there_leaves_its_favourites(experts):
  routing = routed([[5], [5], [1], [5], [1], [2]])
  cached = filled(empty_cache(nnx.split(experts)[1], 2), experts, routing, CachePolicy(decay=0.5))
  assert cached.expert_C.tolist() == [5, 1]
  np.testing.assert_array_equal(cached.params["down"], experts.down[jnp.array([5, 1])])
  np.testing.assert_allclose(cached.worth_e[jnp.array([5, 1, 2])], [1.0, 2 / 3, 1 / 3], rtol=1e-6)


def test_eight_bits():
  matrix = np.random.default_rng(0).normal(size=(3, 16, 5)).astype(np.float32)
  matrix[1, :, 2] = 0
  packed = quantised(matrix, "float32")
  assert isinstance(packed, Int8)
  assert (packed.value.dtype, packed.scale.shape) == (jnp.int8, (3, 1, 5))
  whole = np.asarray(multiplied_out({"up": packed})["up"])
  step = np.abs(matrix).max(1, keepdims=True) / 127
  assert (np.abs(whole - matrix) <= step / 2 * (1 + 1e-5)).all()
  assert not whole[1, :, 2].any()
  np.testing.assert_allclose(np.abs(whole).max(1), np.abs(matrix).max(1), rtol=1e-6)
