"""The contract of the grouped products: every backend that runs here against the reference."""

import dataclasses
import itertools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.kernels.grouped_matmul import (
  activation_names,
  backend,
  device_has_kernels,
  get_activation,
  grouped_matmul,
  grouped_matmul_reference,
  grouped_outer,
  resolve_backend,
  xla,
)
from scmoe.kernels.grouped_matmul.activations import kernel_form
from scmoe.kernels.grouped_matmul.layout import (
  make_equal_layout,
  make_layout,
  max_tiles,
  pad_rows,
  padded_rows_of,
  source_rows_of,
  unpad_rows,
)
from scmoe.kernels.grouped_matmul.options import FFNOptions
from scmoe.kernels.grouped_matmul.tile_order import snake

SIZES = {
  "balanced": [16, 16, 16, 16],
  "unaligned": [5, 27, 1, 31],
  "empty groups": [0, 40, 0, 24],
  "one group has all": [0, 0, 64, 0],
  "tail": [9, 0, 20, 3],
  "nothing": [0, 0, 0, 0],
}


def relative_error(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def problem(seed, m=64, k=16, n=24, groups=4, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  return normal(m, k), normal(groups, k, n), normal(groups, n), normal(m, n)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_values_and_gradients_match_the_reference(sizes, with_bias):
  lhs, rhs, bias, dout = problem(0)
  bias = bias if with_bias else None
  sizes = jnp.asarray(sizes)

  @jax.jit
  def run(*arguments):
    product = lambda lhs, rhs, bias: grouped_matmul(lhs, rhs, sizes, bias_GN=bias, backend="xla")
    out, vjp = jax.vjp(product, *arguments)
    return *vjp(dout), out

  @jax.jit
  def plain(*arguments):
    product = lambda lhs, rhs, bias: grouped_matmul_reference(lhs, rhs, sizes, bias)
    out, vjp = jax.vjp(product, *arguments)
    return *vjp(dout), out

  for got, want in zip(run(lhs, rhs, bias), plain(lhs, rhs, bias)):
    if want is not None:
      np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_matches_ragged_dot_in_bfloat16():
  lhs, rhs, _, _ = problem(1, dtype=jnp.bfloat16)
  sizes = jnp.asarray([5, 27, 1, 20], jnp.int32)
  got = grouped_matmul(lhs, rhs, sizes, backend="xla")
  want = jax.lax.ragged_dot(lhs.astype(jnp.float32), rhs.astype(jnp.float32), sizes)
  assert got.dtype == jnp.bfloat16
  assert relative_error(got, want) < 4e-3
  wide = grouped_matmul(lhs, rhs, sizes, preferred_element_type=jnp.float32, backend="xla")
  assert wide.dtype == jnp.float32
  assert relative_error(wide, want) < 1e-5


def test_tail_rows_are_zero_and_get_no_gradient():
  lhs, rhs, _, dout = problem(2)
  lhs = lhs.at[40:].set(jnp.nan)  # whatever lies past the groups must not be read into the result
  dout = dout.at[40:].set(jnp.nan)
  sizes = jnp.asarray([10, 10, 0, 20])

  @jax.jit
  def run(lhs, rhs):
    out, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, backend="xla"), lhs, rhs)
    return out, *vjp(dout)

  out, dlhs, drhs = run(lhs, rhs)
  assert not np.any(out[40:])
  assert not np.any(dlhs[40:])
  assert np.all(np.isfinite(drhs))
  assert not np.any(drhs[2])


def test_all_empty_patterns_of_eight_groups():
  """Every subset of groups empty: values, and exactly zero weight gradients where empty."""
  lhs, rhs, _, dout = problem(3, m=40, k=8, n=8, groups=8)
  dout = dout[:, :8]

  @jax.jit
  @jax.vmap
  def got(sizes):
    out, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, backend="xla"), lhs, rhs)
    return out, *vjp(dout)

  @jax.jit
  @jax.vmap
  def want(sizes):
    out, vjp = jax.vjp(lambda x, w: grouped_matmul_reference(x, w, sizes), lhs, rhs)
    return out, *vjp(dout)

  patterns = np.asarray(list(itertools.product([0, 1], repeat=8)))
  sizes = jnp.asarray(patterns * np.asarray([5, 1, 3, 8, 2, 7, 4, 6]))
  actual = got(sizes)
  for a, b in zip(actual, want(sizes)):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
  assert not np.any(np.asarray(actual[2])[patterns == 0])


# M rows, K and N widths, G groups: at least one of them is 0.
EMPTY = [size for size in itertools.product((0, 6), (0, 4), (0, 5), (0, 2)) if not all(size)]


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("size", EMPTY, ids=str)
def test_products_of_empty_arrays_and_their_gradients_are_the_references(size, with_bias):
  m, k, n, groups = size
  lhs, rhs, bias, dout = problem(4, *size)
  sizes = jnp.full((groups,), m // max(groups, 1), jnp.int32)

  def run(backend):
    product = lambda *a: grouped_matmul(*a[:2], sizes, bias_GN=(*a, None)[2], backend=backend)
    out, vjp = jax.vjp(product, *((lhs, rhs, bias) if with_bias else (lhs, rhs)))
    return out, *vjp(dout)

  for got, want in zip(run("xla"), run("reference"), strict=True):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
  out, vjp = jax.vjp(lambda *a: grouped_outer(*a, sizes, backend="xla"), lhs, dout)
  np.testing.assert_array_equal(out, np.zeros((groups, k, n)))
  for bar, like in zip(vjp(jnp.ones(out.shape)), (lhs, dout), strict=True):
    np.testing.assert_array_equal(bar, np.zeros(like.shape))


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize(
  "layout", [(1, 3, 0, 8), (2, 3, 0, 8), (0, 3, 8, 8), (1, 0, 8, 8)], ids=str
)
def test_an_equal_layout_without_rows(layout, indexed):
  groups = layout[1]
  layout = make_equal_layout(*layout)
  assert layout.num_rows == 0
  x, index = (jnp.ones((7, 4)), jnp.zeros(0, jnp.int32)) if indexed else (jnp.ones((0, 4)), None)
  w, bias = jnp.ones((groups, 4, 5), jnp.bfloat16), jnp.ones((groups, 5))
  rows = xla.grouped_rows(x, w, layout, index_R=index, bias_GN=bias)
  assert (rows.shape, rows.dtype) == ((0, 5), jnp.float32)
  back = xla.grouped_rows(jnp.ones((0, 5)), w, layout, transpose_rhs=True, out_dtype=jnp.bfloat16)
  assert (back.shape, back.dtype) == ((0, 4), jnp.bfloat16)
  sums = xla.grouped_weights(x, jnp.ones((0, 5)), layout, lhs_index_R=index)
  np.testing.assert_array_equal(sums, np.zeros((groups, 4, 5)))
  np.testing.assert_array_equal(xla.group_sums(back, layout), np.zeros((groups, 4)))


@pytest.mark.parametrize("activation", activation_names())
def test_an_epilogue_computes_the_same_activation_with_its_derivative(activation):
  kind = get_activation(activation)
  h = jnp.concatenate([jnp.linspace(-9, 9, 3001), jnp.asarray([0.0, -40.0, 40.0])])
  form = kernel_form(kind)
  epilogue = lambda h: (form.value(h), *form.value_and_derivative(h))
  plain = lambda h: (kind.value(h), kind.value(h), jax.vmap(jax.grad(kind.value))(h))
  with jax.enable_x64(True):
    wide = h.astype(jnp.float64)
    wanted, exact = plain(wide), epilogue(wide)
  scale = np.maximum(np.maximum(1, np.abs(wide)), np.abs(wanted[0]))
  error = lambda have, want: np.max(np.abs(have - want) / scale)
  for have, want in zip(exact, wanted):
    assert error(have, want) < 1e-6
  # In float32 nothing is lost that the activation itself does not lose with the platform's tanh.
  by_tanh = {"gelu": jax.nn.gelu, "geglu": jax.nn.gelu}.get(activation, kind.value)
  directly = by_tanh(h), by_tanh(h), jax.vmap(jax.grad(by_tanh))(h)
  for have, direct, want in zip(epilogue(h), directly, wanted):
    assert error(have, want) <= max(1e-6, error(direct, want))


def test_float64_under_x64():
  with jax.enable_x64(True):
    rng = np.random.default_rng(6)
    lhs, rhs = jnp.asarray(rng.normal(size=(20, 8))), jnp.asarray(rng.normal(size=(2, 8, 8)))
    sizes = jnp.asarray([12, 8])
    got = grouped_matmul(lhs, rhs, sizes, backend="xla")
    want = np.concatenate([np.asarray(lhs[:12]) @ rhs[0], np.asarray(lhs[12:]) @ rhs[1]])
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_layout_pads_each_group_to_whole_tiles():
  sizes = jnp.asarray([5, 0, 9, 8])
  layout = make_layout(sizes, num_rows=24, tile=8)
  assert layout.num_rows == max_tiles(24, 4, 8) * 8
  np.testing.assert_array_equal(layout.tiles_G, [1, 0, 2, 1])
  np.testing.assert_array_equal(layout.tile_starts_G, [0, 1, 1, 3])
  np.testing.assert_array_equal(layout.num_tiles, [4])
  np.testing.assert_array_equal(layout.by_size_G, [2, 0, 3, 1])
  np.testing.assert_array_equal(layout.tile_group_I[:4], [0, 2, 2, 3])
  source = np.asarray(source_rows_of(layout))
  position = np.asarray(padded_rows_of(layout, 24))
  np.testing.assert_array_equal(source[position[:22]], np.arange(22))
  assert np.all(position[22:] == layout.num_rows)
  assert (source >= 0).sum() == 22
  x = jnp.asarray(np.random.default_rng(0).normal(size=(24, 3)))
  np.testing.assert_array_equal(unpad_rows(pad_rows(x, layout), layout, 24)[:22], x[:22])


@pytest.mark.parametrize(("tiles", "sms"), [(1, 4), (7, 4), (8, 4), (13, 4), (1536, 132)])
def test_every_tile_has_one_place_when_waves_go_back_and_forth(tiles, sms):
  places = [int(snake(jnp.int32(t), tiles, sms)) for t in (range(tiles) if tiles < 99 else ())]
  assert sorted(places) == list(range(len(places)))
  # Work that falls with the tile's number: the first SM's share is close to the last one's.
  if tiles >= 3 * sms:
    every = np.asarray(jax.vmap(lambda t: snake(t, tiles, sms))(jnp.arange(tiles)))
    work = [sum(tiles - every[sm::sms]) for sm in range(sms)]
    assert max(work) - min(work) <= 2 * tiles


def test_the_backend_is_chosen_by_device_and_operands():
  assert device_has_kernels("gpu", "9.0")
  for platform, capability in (("gpu", "8.0"), ("gpu", "8.9"), ("gpu", "10.0"), ("cpu", None)):
    assert not device_has_kernels(platform, capability)
  assert resolve_backend("xla", jnp.float32, 3, 5) == "xla"
  assert resolve_backend("mosaic_gpu", jnp.bfloat16, 128, 64) == "mosaic_gpu"
  with pytest.raises(ValueError, match=r"unknown backend 'cuda': use one of auto, mosaic_gpu"):
    resolve_backend("cuda", jnp.bfloat16)
  with pytest.raises(ValueError, match="multiples of 64, got float32"):
    resolve_backend("mosaic_gpu", jnp.float32, 128)


def test_another_implementation_is_a_module_and_a_line(monkeypatch):
  """It gets tiles of the size that it asks for, forward and backward."""
  mine, taken, tile = types.ModuleType("mine_of_a_test"), [], 24
  vars(mine).update({k: v for k, v in vars(xla).items() if not k.startswith("__")}, ROW_TILE=tile)

  def counted(name):
    def product(lhs, rhs, layout, **options):
      taken.append(layout.tile)
      return getattr(xla, name)(lhs, rhs, layout, **options)

    return product

  for name in ("grouped_rows", "grouped_weights"):
    setattr(mine, name, counted(name))
  monkeypatch.setitem(sys.modules, mine.__name__, mine)
  monkeypatch.setitem(backend.MODULES, "mine", mine.__name__)
  monkeypatch.setattr(backend, "BACKENDS", (*backend.BACKENDS, "mine"))
  lhs, rhs, _, dout = problem(3)
  sizes = jnp.asarray(SIZES["unaligned"])
  out, vjp = jax.vjp(lambda *a: grouped_matmul(*a, sizes, backend="mine"), lhs, rhs)
  want, want_vjp = jax.vjp(lambda *a: grouped_matmul_reference(*a, sizes), lhs, rhs)
  for got, right in zip((out, *vjp(dout)), (want, *want_vjp(dout))):
    np.testing.assert_allclose(got, right, rtol=2e-5, atol=2e-5)
  assert taken == [tile] * 3


def test_the_table_of_implementations_is_what_the_option_takes():
  (field,) = (f for f in dataclasses.fields(FFNOptions) if f.name == "backend")
  assert tuple(field.metadata["choices"]) == backend.EXPERT_BACKENDS == ("auto", *backend.MODULES)
  for word in backend.MODULES:
    module = backend.implementation(word)
    assert all(callable(getattr(module, name)) for name in
               ("forward", "backward", "grouped_rows", "grouped_weights"))  # fmt: skip
    assert module.ROW_TILE is None or module.ROW_TILE % 8 == 0


def test_errors_name_both_sides():
  lhs, rhs, bias, _ = problem(7)
  with pytest.raises(ValueError, match=r"lhs has K=15 but rhs has K=16"):
    grouped_matmul(lhs[:, :15], rhs, jnp.asarray([1, 1, 1, 1]))
  with pytest.raises(ValueError, match=r"group_sizes has shape \(3,\) but rhs has 4 groups"):
    grouped_matmul(lhs, rhs, jnp.asarray([1, 1, 1]))
  with pytest.raises(ValueError, match=r"integers, got float32"):
    grouped_matmul(lhs, rhs, jnp.ones(4))
  with pytest.raises(ValueError, match=r"bias has shape"):
    grouped_matmul(lhs, rhs, jnp.asarray([1, 1, 1, 1]), bias_GN=bias[:, :3])
