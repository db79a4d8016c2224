"""The permutation to expert order: metadata exactly as counted, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.kernels.permute import combine_rows, gather_rows, make_plan
from scmoe.kernels.permute.reference import combine_reference, plan_reference


def routing(rng, tokens, choices, experts):
  return np.argsort(rng.random((tokens, experts)), axis=1)[:, :choices].astype(np.int32)


@pytest.mark.parametrize(
  ("tokens", "choices", "experts", "tile"),
  [(1, 1, 1, 8), (7, 2, 4, 8), (128, 1, 3, 16), (300, 4, 16, 128), (257, 8, 8, 8)],
)
def test_the_plan_is_what_counting_gives(tokens, choices, experts, tile):
  rng = np.random.default_rng(tokens)
  expert_TK = routing(rng, tokens, choices, experts)
  plan = jax.jit(make_plan, static_argnums=(1, 2))(jnp.asarray(expert_TK), experts, tile)
  row_TK, sizes_E, used = plan_reference(expert_TK, experts, tile)
  np.testing.assert_array_equal(plan.row_TK, row_TK)
  np.testing.assert_array_equal(plan.layout.group_sizes_G, sizes_E)
  assert int(plan.layout.num_tiles[0]) * tile == used <= plan.layout.num_rows
  slot_R = np.full(plan.layout.num_rows, -1)
  slot_R[row_TK.reshape(-1)] = np.arange(tokens * choices)
  np.testing.assert_array_equal(plan.slot_R, slot_R)


def test_choices_of_no_expert_go_nowhere():
  expert_TK = jnp.asarray([[0, -1], [2, 0], [7, 1]])
  plan = make_plan(expert_TK, 3, 8)
  np.testing.assert_array_equal(plan.layout.group_sizes_G, [2, 1, 1])
  assert int(plan.row_TK[0, 1]) == int(plan.row_TK[2, 0]) == plan.layout.num_rows
  y_RD = jnp.full((plan.layout.num_rows, 4), jnp.nan).at[np.asarray([0, 1, 8, 16])].set(1.0)
  out = combine_rows(y_RD, jnp.full((3, 2), 2.0), plan)
  np.testing.assert_array_equal(out[:, 0], [2.0, 4.0, 2.0])


def test_gather_and_combine_match_loops_with_gradients():
  rng = np.random.default_rng(1)
  tokens, choices, experts, width = 37, 3, 5, 6
  expert_TK = routing(rng, tokens, choices, experts)
  plan = make_plan(jnp.asarray(expert_TK), experts, 8)
  x = jnp.asarray(rng.normal(size=(tokens, width)), jnp.float32)
  weight = jnp.asarray(rng.normal(size=(tokens, choices)), jnp.float32)
  x_RD = gather_rows(x, plan)
  rows = np.asarray(plan.row_TK)
  np.testing.assert_array_equal(np.asarray(x_RD)[rows], np.repeat(x[:, None], choices, axis=1))
  assert not np.any(np.asarray(x_RD)[np.asarray(plan.slot_R) < 0])
  y = combine_rows(x_RD, weight, plan)
  np.testing.assert_allclose(y, combine_reference(np.asarray(x_RD), weight, rows), rtol=1e-5)
  # Plain autodiff of the dense expression is the oracle of both custom gradients.
  scale = jnp.asarray(rng.normal(size=x_RD.shape), jnp.float32)
  fast = lambda x, w: combine_rows(jnp.sin(gather_rows(x, plan)) * scale, w, plan)
  plain = lambda x, w: jnp.einsum("tk,tkd->td", w, jnp.sin(x)[:, None] * scale[rows])
  dout = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
  for got, want in zip(jax.vjp(fast, x, weight)[1](dout), jax.vjp(plain, x, weight)[1](dout)):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_errors():
  with pytest.raises(ValueError, match=r"must be integers \[T, K\], got float32"):
    make_plan(jnp.ones((3, 2)), 4, 8)
