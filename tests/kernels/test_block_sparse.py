"""MegaBlocks' view: topology exactly as specified, products and gradients against dense ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.kernels.block_sparse import (
  BlockSparse,
  block_sparse_ffn,
  dds,
  dsd,
  from_dense,
  moe_topology,
  random_mask,
  sdd,
  to_dense,
  topology_from_mask,
)
from scmoe.kernels.grouped_matmul import FFNConfig, FFNWeights, backend, sorted_layout
from scmoe.kernels.grouped_matmul.layout import make_layout


def normal(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def moe_case():
  return moe_topology(make_layout(jnp.asarray([5, 0, 20, 7]), 32, 8), hidden=16)


def random_case():
  return topology_from_mask(random_mask(32, 48, 8, 0.7, seed=1), 8)


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (2, 2)])
def test_a_matrix_without_blocks_is_zero(shape):
  rows, cols = (8 * side for side in shape)
  sparse = from_dense(jnp.zeros((rows, cols)), topology_from_mask(np.zeros(shape, bool), 8))
  for found, size in (
    (dsd(sparse, jnp.ones((cols, 3))), (rows, 3)),
    (dsd(sparse.T, jnp.ones((rows, 3))), (cols, 3)),
    (dds(jnp.ones((3, rows)), sparse), (3, cols)),
  ):
    np.testing.assert_array_equal(found, np.zeros(size))


# (rows, hidden, experts) of MegaBlocks' topology test, block 128.
@pytest.mark.parametrize(
  ("rows", "hidden", "experts"), [(1024, 1536, 2), (1024, 1536, 8), (16384, 768, 64)]
)
def test_moe_topology_is_the_reference_one(rows, hidden, experts):
  rng = np.random.default_rng(rows + experts)
  sizes = rng.multinomial(rows, rng.dirichlet(np.ones(experts)))
  topology = moe_topology(make_layout(jnp.asarray(sizes), rows, 128), hidden)
  per_row, blocks = hidden // 128, -(-sizes // 128)
  columns = [
    e * per_row + c for e, n in enumerate(blocks) for _ in range(n) for c in range(per_row)
  ]
  np.testing.assert_array_equal(topology.column_indices[: len(columns)], columns)
  np.testing.assert_array_equal(topology.offsets, np.arange(topology.rows // 128 + 1) * per_row)


@pytest.mark.parametrize("case", [moe_case, random_case])
def test_transpose_indices_walk_the_blocks_by_column(case):
  t = case()
  columns = np.asarray(t.column_indices)[np.asarray(t.block_offsets_t)]
  assert np.all(np.diff(columns) >= 0)
  np.testing.assert_array_equal(
    t.column_indices_t, np.asarray(t.row_indices)[np.asarray(t.block_offsets_t)]
  )
  np.testing.assert_array_equal(
    np.diff(t.offsets_t), np.bincount(columns, minlength=t.cols // t.block)
  )


def masked_zero_rows(t, x):
  """Zeros in the row blocks that belong to no expert, as the layout's contract says."""
  if t.layout is None:
    return x
  used = jnp.arange(t.rows) < t.layout.num_tiles[0] * t.block
  return jnp.where(used[:, None], x, 0)


@pytest.mark.parametrize("case", [moe_case, random_case])
def test_products_and_gradients_match_dense(case):
  t = case()
  there = to_dense(BlockSparse(jnp.ones((t.num_blocks, t.block, t.block)), t))
  there = masked_zero_rows(t, there)
  a, b = normal(1, t.rows, 12), normal(2, 12, t.cols)
  dense = normal(3, t.rows, t.cols) * there
  right, left = normal(4, t.cols, 10), normal(5, 10, t.rows)
  tall = normal(6, t.rows, 10)
  sparse = from_dense(dense, t)
  np.testing.assert_array_equal(to_dense(sparse), dense)
  wrap = lambda data: BlockSparse(data, t)
  pairs = [
    (lambda a, b: to_dense(sdd(a, b, t, backend="xla")), lambda a, b: (a @ b) * there, (a, b)),
    (
      lambda s, r: dsd(wrap(s), r, backend="xla"),
      lambda s, r: to_dense(wrap(s)) @ r,
      (sparse.data, right),
    ),
    (
      lambda s, r: dsd(wrap(s).T, r, backend="xla"),
      lambda s, r: to_dense(wrap(s)).T @ r,
      (sparse.data, tall),
    ),
    (
      lambda x, s: dds(x, wrap(s), backend="xla"),
      lambda x, s: x @ to_dense(wrap(s)),
      (left, sparse.data),
    ),
    (
      lambda x, s: dds(x, wrap(s).T, backend="xla"),
      lambda x, s: x @ to_dense(wrap(s)).T,
      (right.T, sparse.data),
    ),
  ]
  for i, (fast, plain, arguments) in enumerate(pairs):

    @jax.jit
    def both(dout, *arguments, fast=fast, plain=plain):
      got, vjp = jax.vjp(fast, *arguments)
      want, plain_vjp = jax.vjp(plain, *arguments)
      return got, want, vjp(dout), plain_vjp(dout)

    shape = jax.eval_shape(plain, *arguments).shape
    dout = normal(7 + i, *shape)
    dout = masked_zero_rows(t, dout) if shape[0] == t.rows else dout
    got, want, gradients, plain_gradients = both(dout, *arguments)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    for got_gradient, want_gradient in zip(gradients, plain_gradients):
      if got_gradient.shape == sparse.data.shape:  # only blocks of used rows carry a gradient
        used = from_dense(there, t).data
        got_gradient, want_gradient = got_gradient * used, want_gradient * used
      np.testing.assert_allclose(got_gradient, want_gradient, rtol=1e-3, atol=1e-3)


def test_errors_name_both_sides():
  t = random_case()
  with pytest.raises(ValueError, match=r"contracted sizes are 12 and 13"):
    sdd(normal(0, 32, 12), normal(0, 13, 48), t)
  with pytest.raises(ValueError, match=r"shape \(32, 40\) but the topology \(32, 48\)"):
    sdd(normal(0, 32, 12), normal(0, 12, 40), t)
  with pytest.raises(ValueError, match=r"F=20 must be a multiple of the block 8"):
    moe_topology(make_layout(jnp.asarray([8]), 8, 8), hidden=20)


def test_the_automatic_backend_sees_the_results_width(monkeypatch):
  """On Hopper, too, XLA computes an output of 72 columns, which the kernels do not take."""
  monkeypatch.setattr(backend, "has_kernels", lambda device: True)
  weights = FFNWeights(*(jnp.ones((2, 128, n), jnp.bfloat16) for n in (128, 72)))
  layout = sorted_layout(jnp.asarray([3, 2]), 5)
  y = block_sparse_ffn(jnp.ones((5, 128), jnp.bfloat16), weights, layout, FFNConfig("relu"))
  np.testing.assert_array_equal(y, jnp.full((5, 72), 128 * 128))
