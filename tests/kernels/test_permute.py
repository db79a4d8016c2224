"""The permutation to the order of the experts: exactly as counted, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.kernels.grouped_matmul import choices_layout
from scmoe.kernels.permute import (
  gather_rows,
  running_positions,
  sum_copies,
  sum_rows,
  take_rows,
  take_words,
)
from scmoe.kernels.permute.reference import combine_reference, tile_rows_reference


def routing(rng, tokens, choices, experts):
  return np.argsort(rng.random((tokens, experts)), axis=1)[:, :choices].astype(np.int32)


def tiled(expert_TK, experts, tile):
  expert_TK = jnp.asarray(expert_TK)
  layout = choices_layout(expert_TK, jnp.ones(expert_TK.shape), experts)
  return layout.sorted(tile)


@pytest.mark.parametrize(
  ("tokens", "choices", "experts", "tile"),
  [(1, 1, 1, 8), (7, 2, 4, 8), (128, 1, 3, 16), (300, 4, 16, 128), (257, 8, 8, 8)],
)
def test_rows_of_tiles_are_what_counting_gives(tokens, choices, experts, tile):
  rng = np.random.default_rng(tokens)
  expert_TK = routing(rng, tokens, choices, experts)
  tiles = jax.jit(tiled, static_argnums=(1, 2))(expert_TK, experts, tile)
  row_TK, sizes_E, used = tile_rows_reference(expert_TK, experts, tile)
  np.testing.assert_array_equal(tiles.permutation.row_TK, row_TK)
  np.testing.assert_array_equal(tiles.groups.group_sizes_G, sizes_E)
  assert int(tiles.groups.num_tiles[0]) * tile == used <= tiles.groups.num_rows
  copy_R = np.full(tiles.groups.num_rows, -1)
  copy_R[row_TK.reshape(-1)] = np.arange(tokens * choices)
  np.testing.assert_array_equal(tiles.permutation.copy_R, copy_R)
  token_R = np.where(copy_R < 0, -1, copy_R // choices)
  np.testing.assert_array_equal(tiles.permutation.token_R, token_R)


def test_choices_of_no_expert_go_nowhere():
  tiles = tiled([[0, -1], [2, 0], [7, 1]], 3, 8)
  rows, permutation = tiles.groups.num_rows, tiles.permutation
  np.testing.assert_array_equal(tiles.groups.group_sizes_G, [2, 1, 1])
  assert int(permutation.row_TK[0, 1]) == int(permutation.row_TK[2, 0]) == rows
  y_RD = jnp.full((rows, 4), jnp.nan).at[np.asarray([0, 1, 8, 16])].set(1.0)
  out = sum_rows(y_RD, jnp.full((3, 2), 2.0), permutation)
  np.testing.assert_array_equal(out[:, 0], [2.0, 4.0, 2.0])


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("weighted", [True, False])
def test_gather_and_sum_match_loops_with_gradients(weighted, sent):
  rng = np.random.default_rng(1)
  tokens, choices, experts, width = 37, 3, 5, 6
  permutation = tiled(routing(rng, tokens, choices, experts), experts, 8).permutation
  x = jnp.asarray(rng.normal(size=(tokens, width)), jnp.float32)
  weight = jnp.asarray(rng.normal(size=(tokens, choices)), jnp.float32)
  given = weight if weighted else None
  x_RD = jax.jit(lambda x: gather_rows(x, permutation, sent=sent))(x)
  rows = np.asarray(permutation.row_TK)
  np.testing.assert_array_equal(np.asarray(x_RD)[rows], np.repeat(x[:, None], choices, axis=1))
  assert not np.any(np.asarray(x_RD)[np.asarray(permutation.copy_R) < 0])
  y = jax.jit(lambda x_RD: sum_rows(x_RD, given, permutation))(x_RD)
  ones = weight if weighted else np.ones((tokens, choices))
  np.testing.assert_allclose(y, combine_reference(np.asarray(x_RD), ones, rows), rtol=1e-5)
  # Plain autodiff of the dense expression is the oracle of both custom gradients.
  scale = jnp.asarray(rng.normal(size=x_RD.shape), jnp.float32)
  fast = lambda x, w: sum_rows(
    jnp.sin(gather_rows(x, permutation, sent=sent)) * scale, w, permutation
  )
  dense = lambda x, w: jnp.einsum("tk,tkd->td", w, jnp.sin(x)[:, None] * scale[rows])
  plain = lambda x, w: dense(x, jnp.ones((tokens, choices)) if w is None else w)
  dout = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
  bars = lambda f: jax.jit(lambda x, w: jax.vjp(f, x, w)[1](dout))(x, given)
  got, want = bars(fast), bars(plain)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("shape", [(1, 1), (127, 2), (300, 3), (9000, 2)])
def test_positions_are_counted_in_row_major_order(shape):
  """One block, a few, and so many that their counts are added up in blocks too."""
  ids = np.random.default_rng(0).integers(-1, 6, shape)  # 5 experts; -1 and 5 are none
  position, count = jax.jit(running_positions, static_argnums=1)(ids, 5)
  places, seen = np.asarray(position), np.zeros(5, int)
  for index in np.ndindex(*shape):
    if 0 <= ids[index] < 5:
      assert places[index] == seen[ids[index]]
      seen[ids[index]] += 1
  np.testing.assert_array_equal(count, seen)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rows_taken_by_words_are_those_taken_by_elements(dtype):
  """Bit by bit, whatever they hold; none for an index outside."""
  bits = np.random.default_rng(0).integers(0, 2**16, (37, 6)).astype(np.uint16)
  x, index = jax.lax.bitcast_convert_type(bits, dtype), jnp.asarray([36, -1, 0, 5, 5, 37, 1])
  bits_of = lambda rows: jax.lax.bitcast_convert_type(rows, jnp.uint16)
  got, want = take_words(x, index), take_rows(x, index)
  assert got.dtype == dtype
  np.testing.assert_array_equal(bits_of(got), bits_of(want))


def test_words_taken_from_no_rows_are_zeros():
  """A device without tokens still fills the one tile that a layout has at least."""
  got = take_words(jnp.zeros((0, 6), jnp.bfloat16), jnp.asarray([-1, 0]))
  np.testing.assert_array_equal(got, np.zeros((2, 6)))


def test_the_gradient_of_rows_to_send_shares_no_operand_with_other_operations():
  """XLA computes operations that share an operand in one kernel, which waits for all operands."""
  permutation = tiled(routing(np.random.default_rng(1), 7, 2, 3), 3, 8).permutation
  x, bar = jnp.ones((7, 4)), jnp.ones((permutation.copy_R.shape[0], 4))
  rows = lambda x: gather_rows(x, permutation, sent=True)
  gradient = jax.make_jaxpr(jax.vjp(rows, x)[1])(bar).jaxpr
  given = {*map(id, gradient.invars), *map(id, gradient.constvars)}
  readers = [eqn for eqn in gradient.eqns if given & set(map(id, eqn.invars))]
  assert [eqn.primitive.name for eqn in readers] == ["optimization_barrier"]
  assert [v.aval.shape for v in readers[0].invars] == [bar.shape, permutation.row_TK.shape]


def test_sums_of_copies_are_kept_apart_unless_they_may_be_joined():
  rows, row = jnp.ones((4, 3)), jnp.asarray([[0, 2], [1, 3]])
  last = lambda joined: (
    jax.make_jaxpr(lambda r: sum_copies(r, row, joined=joined))(rows).jaxpr.eqns[-1].primitive.name
  )
  assert last(False) == "optimization_barrier"
  assert last(True) != "optimization_barrier"
  np.testing.assert_array_equal(sum_copies(rows, row, joined=True), sum_copies(rows, row))


def test_errors():
  with pytest.raises(ValueError, match=r"must be integers, got float32"):
    running_positions(jnp.ones((3, 2)), 4)
  with pytest.raises(ValueError, match=r"shape \(3, 2\) and weight \(3, 1\): expected \[T, K\]"):
    choices_layout(jnp.ones((3, 2), jnp.int32), jnp.ones((3, 1)), 4)
