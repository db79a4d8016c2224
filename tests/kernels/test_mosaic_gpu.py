"""The Hopper kernels without a GPU: every shipped tiling lowers, and small cases are simulated.

The simulation runs shared memory, barriers, TMA and wgmma on the CPU and looks for races. On jax
0.10 it has no rule for transposed operands and layout casts, so the kernels that use them are
simulated on jax 0.11 and later only; they are lowered on both.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night, pairs_by_day_and_night
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scmoe.base.compat import KERNELS_WRITE_IN_PLACE, gpu_interpret_params, jax_version
from scmoe.kernels.grouped_matmul import (
  FFNConfig,
  FFNWeights,
  activation_names,
  choices_layout,
  expert_ffn,
  expert_ffn_reference,
  get_activation,
  grouped_matmul,
  padded_layout,
  tiles,
  xla,
)
from scmoe.kernels.grouped_matmul.activations import activate, activation_vjp
from scmoe.kernels.grouped_matmul.copy_to_tiles import copy_rows_to_tiles
from scmoe.kernels.grouped_matmul.down_backward import down_backward_product
from scmoe.kernels.grouped_matmul.ffn import _resolve
from scmoe.kernels.grouped_matmul.layout import (
  make_equal_layout,
  make_layout,
  max_tiles,
  source_rows_of,
)
from scmoe.kernels.grouped_matmul.pipeline import Tiling
from scmoe.kernels.grouped_matmul.rows_product import rows_product
from scmoe.kernels.grouped_matmul.sorting import sorted_rows_kernel
from scmoe.kernels.grouped_matmul.tile_order import banded
from scmoe.kernels.grouped_matmul.weights_product import weights_product
from scmoe.kernels.launch import interpreted
from scmoe.kernels.one_row import attention as decode_attention
from scmoe.kernels.one_row import experts as one_row
from scmoe.kernels.one_row import linear, norm
from scmoe.kernels.one_row.attention import (
  PartialAttention,
  PartialProjections,
  attend_cache,
  attend_pages,
  attend_partial,
)
from scmoe.kernels.permute.positions import running_positions_kernel
from scmoe.kernels.top_k import GateOutput, gate_product, gate_top_k, gate_under_norm
from scmoe.layers import pages
from scmoe.layers.pages import PageTable, attend_over

SIZES = [60, 0, 70]
# A tiling for each way in which two CTAs share an operand, cooperative and ping-pong.
PAIRED = [
  pytest.param(Tiling(cols=64, stages=3, pair=pair, pingpong=pingpong, band=4), id=f"{pair}-{name}")
  for pair in ("rows", "cols")
  for pingpong, name in ((False, "cooperative"), (True, "ping-pong"))
]
needs_new_simulation = pytest.mark.skipif(
  jax_version() < (0, 11), reason="GPU interpret mode of jax 0.10 lacks the rules (see above)"
)


def relative_error(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / np.linalg.norm(want)


def layout_of(sizes=SIZES):
  return make_layout(jnp.asarray(sizes), sum(sizes), 128)


def normal(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def padded(seed, layout, width):
  """Random rows, zero where they are nobody's."""
  return normal(seed, layout.num_rows, width) * (source_rows_of(layout) >= 0)[:, None]


def used_rows(layout):
  return int(layout.num_tiles[0]) * layout.tile


def simulate(function, *arguments):
  with interpreted(gpu_interpret_params(detect_races=True)):
    return function(*arguments)


def product(transpose, tiling, activation=None):
  return functools.partial(
    rows_product,
    tiling=tiling,
    transpose_rhs=transpose,
    activation=activation,
    out_dtype=jnp.bfloat16,
  )


# With an odd number of stores a tile, and an even one.
@pytest.mark.parametrize(
  ("pingpong", "buffers", "cols"),
  [(False, 2, 64), night(False, 2, 128), (True, 2, 128), night(True, 2, 64),
   (True, 1, 64), night(True, 1, 128)],
)  # fmt: skip
def test_rows_product_simulated(pingpong, buffers, cols):
  tiling = Tiling(cols=cols, stages=3, pingpong=pingpong, store_buffers=buffers)
  layout = layout_of()
  x, w = normal(0, layout.num_rows, 128), normal(1, 3, 128, 128)
  (got,) = simulate(product(False, tiling), (x,), ((w,),), layout)
  n = used_rows(layout)
  assert relative_error(got[:n], xla.grouped_rows(x, w, layout)[:n]) < 3e-3


@pytest.mark.parametrize(
  ("activation", "with_results", "pingpong"),
  pairs_by_day_and_night(["gelu", "swiglu"], [True, False], [False, True]),
)
@needs_new_simulation
def test_bias_and_activation_simulated(activation, with_results, pingpong):
  """One chunk a tile without results: the ring of store buffers has two (a race, before)."""
  layout, tiling = layout_of(), Tiling(cols=128, stages=3, pingpong=pingpong)
  kind = get_activation(activation)
  x = normal(0, layout.num_rows, 128)
  weights = tuple(normal(seed, 3, 128, 128) for seed in range(1, 2 + kind.gated))
  biases = (None, normal(3, 3, 128)) if kind.gated else (normal(3, 3, 128),)
  run = functools.partial(product(False, tiling, kind), biases=biases, with_results=with_results)
  got = simulate(run, (x,), (weights,), layout)
  pre = [
    xla.grouped_rows(x, w, layout, bias_GN=b, out_dtype=x.dtype) for w, b in zip(weights, biases)
  ]
  a, n = activate(kind, tuple(pre)), used_rows(layout)
  wanted = (*pre, a) if with_results else (a,)
  assert len(got) == len(wanted)
  for one, want in zip(got, wanted):
    assert relative_error(one[:n], want[:n]) < 3e-3


def test_who_computes_padded_experts():
  """The kernels where they run and nothing takes their multiprocessors; else XLA's products."""
  on_hopper = FFNConfig(backend="mosaic_gpu")
  weights = FFNWeights(jnp.zeros((4, 128, 64)), jnp.zeros((4, 64, 128)))
  resolved = lambda config, rows, ranks=2: _resolve(
    config, padded_layout(ranks, 4, rows), jnp.bfloat16, weights
  )
  kernels = resolved(on_hopper, 256)
  assert (kernels.products, kernels.ranks, kernels.how.num_sms) == ("mosaic_gpu", 1, None)
  batched = resolved(on_hopper, 100)  # no whole row tiles
  assert (batched.products, batched.ranks) == ("xla", 2)
  assert resolved(dataclasses.replace(on_hopper, impl="grouped"), 100).products == "mosaic_gpu"
  # Asked for beside collectives, each product has several CTAs per multiprocessor.
  shared = resolved(dataclasses.replace(on_hopper, shared_sms=True), 256)
  assert (shared.products, shared.how.num_sms) == ("mosaic_gpu", 8 * 132)
  assert resolved(FFNConfig(), 256).products == "xla"  # no GPU here


@needs_new_simulation
@pytest.mark.parametrize("name", ["choices", "one rank", "ranks"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_experts_simulated(activation, name):
  """`expert_ffn` on the kernels against XLA's products: value alone, value and all gradients."""
  gated, scale = get_activation(activation).gated, jnp.bfloat16(0.125)
  weights = FFNWeights(
    up_GDF=normal(3, 2, 64, 128) * scale,
    down_GFD=normal(4, 2, 128, 64) * scale,
    gate_GDF=normal(2, 2, 64, 128) * scale if gated else None,
    up_bias_GF=normal(5, 2, 128),
    down_bias_GD=normal(6, 2, 64),
  )
  shape = {"choices": (40,), "one rank": (1, 2, 128), "ranks": (2, 2, 128)}[name]
  if name == "choices":
    expert = jnp.asarray(np.random.default_rng(7).integers(0, 3, (40, 1)), jnp.int32)
    layout = choices_layout(expert, jnp.abs(normal(8, 40, 1)).astype(jnp.float32), 2)
  else:
    layout = padded_layout(*shape)
  x, dy = normal(0, *shape, 64), normal(1, *shape, 64)

  def run(backend):
    config = FFNConfig(activation=activation, backend=backend)
    ffn = lambda x, weights: expert_ffn(x, weights, layout, config)
    y, vjp = jax.vjp(ffn, x, weights)
    return ffn(x, weights), y, vjp(dy)

  got, want = simulate(run, "mosaic_gpu"), run("xla")
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert relative_error(a, b) < 1e-2


@needs_new_simulation
def test_transposed_two_part_product_simulated():
  layout, tiling = layout_of(), Tiling(cols=128, stages=3)
  xs, ws = (
    (normal(0, layout.num_rows, 64), normal(1, layout.num_rows, 64)),
    normal(2, 2, 3, 128, 64),
  )
  (got,) = simulate(product(True, tiling), xs, ((ws[0],), (ws[1],)), layout)
  first, second = (xla.grouped_rows(x, w, layout, transpose_rhs=True) for x, w in zip(xs, ws))
  want = first + second
  n = used_rows(layout)
  assert relative_error(got[:n], want[:n]) < 3e-3


@needs_new_simulation
@pytest.mark.parametrize("pingpong", [False, True], ids=["cooperative", "ping-pong"])
def test_weights_product_simulated(pingpong):
  layout, tiling = layout_of(), Tiling(cols=128, stages=3, pingpong=pingpong)
  x, d = padded(0, layout, 128), padded(1, layout, 128)
  run = functools.partial(weights_product, tiling=tiling, out_dtype=jnp.bfloat16)
  (got,) = simulate(run, x, (d,), layout)
  assert relative_error(got, xla.grouped_weights(x, d, layout)) < 3e-3
  assert not np.any(got[1])


@needs_new_simulation
@pytest.mark.parametrize("name", ["swiglu", "clamped_swiglu", "relu2"])
def test_down_backward_simulated(name):
  layout, kind = layout_of(), get_activation(name)
  dy, down = normal(0, layout.num_rows, 64), normal(1, 3, 128, 64)
  pre = tuple(normal(2 + i, layout.num_rows, 128) for i in range(1 + kind.gated))
  s = normal(5, layout.num_rows).astype(jnp.float32)
  tiling = Tiling(cols=128, stages=3, pingpong=True)
  got = simulate(down_backward_product, dy, down, pre, s, layout, kind, tiling)
  da = xla.grouped_rows(dy, down, layout, transpose_rhs=True)
  a, dpre = activation_vjp(kind, pre, da * s[:, None])
  want = a * s[:, None], dpre, jnp.sum(da * a, axis=1)
  n = used_rows(layout)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    assert relative_error(a[:n], b[:n]) < 3e-3


@needs_new_simulation
@pytest.mark.parametrize("tiling", PAIRED)
@pytest.mark.parametrize("sizes", [[60, 0, 200, 300], [60, 0, 200]], ids=["even", "odd"])
def test_pairs_of_ctas_simulated(tiling, sizes):
  """Waiting and arriving across a pair; the simulation loads a shared block whole in each CTA."""
  layout, groups = layout_of(sizes), len(sizes)
  # Both CTAs of a pair of rows store the last of an odd number of row tiles: a race, of equals.
  params = gpu_interpret_params(detect_races=tiling.pair == "cols" or sizes[-1] == 300)
  x, d = padded(0, layout, 128), padded(2, layout, 128)
  w = normal(1, groups, 128, 128)
  n = used_rows(layout)
  with interpreted(params, num_sms=4):
    (out,) = product(False, tiling)((x,), ((w,),), layout)
    (transposed,) = product(True, tiling)((x,), ((w,),), layout)
    if tiling.pingpong or tiling.pair == "cols":  # there must be two row tiles to a pair of rows
      of_weights = dataclasses.replace(tiling, rows=64 if tiling.pingpong else 128)
      run = functools.partial(weights_product, tiling=of_weights)
      (dw,) = run(x, (d,), layout, out_dtype=jnp.bfloat16)
      assert relative_error(dw, xla.grouped_weights(x, d, layout)) < 3e-3
  assert relative_error(out[:n], xla.grouped_rows(x, w, layout)[:n]) < 3e-3
  want = xla.grouped_rows(x, w, layout, transpose_rhs=True)
  assert relative_error(transposed[:n], want[:n]) < 3e-3


@needs_new_simulation
def test_pairs_that_divide_a_row_tile_simulated():
  """Two halves of a tile of the layout lie in one group, so that rhs is always shared."""
  tiling = Tiling(rows=64, cols=64, stages=3, pair="rows", pingpong=True, band=4)
  layout = layout_of([60, 0, 200])
  x, w, n = normal(0, layout.num_rows, 128), normal(1, 3, 128, 128), used_rows(layout)
  with interpreted(gpu_interpret_params(detect_races=True), num_sms=4):
    (out,) = product(False, tiling)((x,), ((w,),), layout)
    (transposed,) = product(True, tiling)((x,), ((w,),), layout)
  assert relative_error(out[:n], xla.grouped_rows(x, w, layout)[:n]) < 3e-3
  want = xla.grouped_rows(x, w, layout, transpose_rhs=True)
  assert relative_error(transposed[:n], want[:n]) < 3e-3


@needs_new_simulation
@pytest.mark.parametrize("pair", ["", "cols"])
def test_tiles_that_do_not_divide_a_width_simulated(pair):
  """The last one ends with the width; the columns that two compute are stored twice: equals."""
  kind, layout = get_activation("swiglu"), layout_of([60, 0, 200])
  tiling = Tiling(cols=128, stages=3, pair=pair, pingpong=True, band=4)
  x, w, n = padded(0, layout, 192), normal(1, 3, 192, 192), used_rows(layout)
  bias, s = normal(3, 3, 192), normal(5, layout.num_rows).astype(jnp.float32)
  with interpreted(gpu_interpret_params(detect_races=False), num_sms=4):
    rows = product(False, tiling)((x,), ((w,),), layout, biases=(bias,))
    weights = weights_product(x, (x,), layout, tiling, out_dtype=jnp.bfloat16)
    if not pair:
      alone = dataclasses.replace(tiling, cols=128)
      got = down_backward_product(x, w, (x, x), s, layout, kind, alone)
  want = xla.grouped_rows(x, w, layout, bias_GN=bias)
  assert relative_error(rows[0][:n], want[:n]) < 3e-3
  assert relative_error(weights[0], xla.grouped_weights(x, x, layout)) < 3e-3
  if not pair:
    da = xla.grouped_rows(x, w, layout, transpose_rhs=True)
    a, dpre = activation_vjp(kind, (x, x), da * s[:, None])
    wanted = a * s[:, None], dpre, jnp.sum(da * a, axis=1)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
      assert relative_error(one[:n], other[:n]) < 3e-3


@needs_new_simulation
def test_no_rows_at_all_simulated():
  layout, tiling = layout_of([0, 0]), Tiling(cols=64, stages=3, pair="rows", pingpong=True)
  x, w = normal(0, layout.num_rows, 64), normal(1, 2, 64, 64)
  simulate(product(False, tiling), (x,), ((w,),), layout)
  weights = functools.partial(weights_product, out_dtype=jnp.bfloat16)
  (dw,) = simulate(functools.partial(weights, tiling=Tiling(rows=64, cols=64)), x, (x,), layout)
  assert not np.any(dw)


@pytest.mark.parametrize("tiling", PAIRED)
def test_pairs_of_ctas_lower_for_cuda(tiling):
  layout, swiglu = layout_of(), get_activation("swiglu")
  rows, bf16 = layout.num_rows, jnp.bfloat16
  array = lambda *shape: jax.ShapeDtypeStruct(shape, bf16)
  tiling = dataclasses.replace(tiling, cols=128)
  w, x = array(3, 256, 256), array(rows, 256)
  index = jax.ShapeDtypeStruct((rows,), jnp.int32)
  lower(lambda x, w: product(False, tiling)((x,), ((w,),), layout), x, w)
  lower(lambda x, w: product(True, tiling)((x, x), ((w,), (w,)), layout), x, w)
  if tiling.pair == "rows" and tiling.pingpong:
    halved = dataclasses.replace(tiling, rows=64, cols=256, stages=5, store_buffers=1)
    lower(lambda x, w: product(False, halved)((x,), ((w,),), layout), x, w)
  weights = functools.partial(weights_product, tiling=tiling, out_dtype=bf16)
  lower(lambda x: weights(x, (x,), layout), x)
  lower(lambda x, i: weights(x, (x,), layout, lhs_index_R=i), x, index)
  in_runs = make_equal_layout(rows // 384, 3, 128, layout.tile)
  lower(lambda x: weights(x, (x,), in_runs), array(in_runs.num_rows, 256))
  lower(lambda x, i: weights(x, (x,), layout, rhs_index_R=i), x, index)
  if tiling.pair == "rows":
    up = lambda x, w, i: product(False, tiling, swiglu)((x,), ((w, w),), layout, index_R=i)
    lower(up, x, w, index)
  if tiling.pingpong:
    run = lambda dy, w, s, i: down_backward_product(
      dy, w, (dy, dy), s, layout, swiglu, tiling, index_R=i if tiling.pair == "rows" else None
    )
    lower(run, x, w, jax.ShapeDtypeStruct((rows,), jnp.float32), index)


@needs_new_simulation
@pytest.mark.parametrize("tokens", [256, 384, 128], ids=["whole tiles", "odd tiles", "halves"])
@pytest.mark.parametrize("fp32", [True, False], ids=["float32", "bfloat16"])
def test_gate_simulated(fp32, tokens):
  """In float32 by three terms: exact, where the rounded weights would be 1e-3 off."""
  x, gate = normal(0, tokens, 64), normal(1, 64, 40).astype(jnp.float32) * 1.01
  # Both CTAs of a pair compute the last of an odd number of tiles: a race, of equals.
  with interpreted(gpu_interpret_params(detect_races=tokens != 384)):
    logits, expert, _ = gate_top_k(x, gate, 3, fp32=fp32, backend="mosaic_gpu")
  want = gate_product(x, gate, fp32=fp32)
  np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(expert, jax.lax.top_k(want, 3)[1])


@needs_new_simulation
@pytest.mark.parametrize("num_experts", [40, 64], ids=["padded", "whole"])
def test_gate_of_infinite_logits_simulated(num_experts):
  """An expert whose logit is -inf is chosen once at most, after all others, as by XLA.

  Products overflow to -inf: of all experts but number 5 for every second token, of all experts for
  every third.
  """
  x = jnp.abs(normal(0, 256, 64)).at[:, :2].set(0)
  x = x.at[::2, 0].set(4).at[::3, 1].set(4)
  gate = normal(1, 64, num_experts).at[0].set(-3e38).at[0, 5].set(0).at[1].set(-3e38)
  with interpreted(gpu_interpret_params(detect_races=False)):
    logits, expert, _ = gate_top_k(x, gate, 3, backend="mosaic_gpu")
  want = gate_product(x, gate, fp32=True)
  assert np.isneginf(want[2]).sum() == num_experts - 1
  assert np.isneginf(want[3]).all()
  np.testing.assert_array_equal(np.isneginf(logits), np.isneginf(want))
  np.testing.assert_array_equal(expert, jax.lax.top_k(want, 3)[1])


@needs_new_simulation
def test_gate_of_a_token_of_infinite_logits_simulated():
  x = jnp.zeros((1, 128), jnp.bfloat16).at[0, 0].set(4).at[0, 1].set(1)
  gate = jnp.zeros((128, 8)).at[0].set(-3e38).at[0, 5].set(0).at[1].set(1)
  with interpreted(gpu_interpret_params(detect_races=False)):
    logits, expert, share = gate_top_k(x, gate, 3, backend="mosaic_gpu")
  assert np.isneginf(logits).sum() == 7
  np.testing.assert_array_equal(expert, [[5, 0, 1]])
  np.testing.assert_array_equal(share, [[1, 0, 0]])


@needs_new_simulation
@pytest.mark.parametrize("fp32", [True, False], ids=["float32", "bfloat16"])
def test_gate_gradients_simulated(fp32):
  x, gate = normal(0, 256, 64), normal(1, 64, 40).astype(jnp.float32) * 1.01
  dlogits = normal(2, 256, 40).astype(jnp.float32) * 1.003
  kernel = lambda x, gate: gate_top_k(x, gate, 3, fp32=fp32, backend="mosaic_gpu")[0]
  got = simulate(lambda: jax.vjp(kernel, x, gate)[1](dlogits))
  want = jax.vjp(lambda x, gate: gate_product(x, gate, fp32=fp32), x, gate)[1](dlogits)
  for one, other in zip(got, want):
    assert one.dtype == other.dtype
  # In float32 dx may differ where it is rounded; a gate in bfloat16 rounds dlogits too.
  assert relative_error(got[0], want[0]) < (1e-3 if fp32 else 5e-3)
  assert relative_error(got[1], want[1]) < (1e-6 if fp32 else 5e-3)


@needs_new_simulation
def test_public_product_and_gradients_simulated():
  """The contract of `grouped_matmul` on the kernels: unaligned, empty and tail rows included."""
  lhs, rhs, dout = normal(0, 40, 64), normal(1, 3, 64, 128), normal(2, 40, 128)
  sizes = jnp.asarray([5, 0, 27])
  results = []
  for backend in ("mosaic_gpu", "reference"):

    def run(lhs, rhs, backend=backend):
      out, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, backend=backend), lhs, rhs)
      return out, *vjp(dout)

    results.append(simulate(run, lhs, rhs))
  for got, want in zip(*results):
    assert relative_error(got, want) < 5e-3
  out, dlhs, drhs = results[0]
  assert not np.any(out[32:])
  assert not np.any(dlhs[32:])
  assert not np.any(drhs[1])


def lower(function, *arguments):
  jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


def shipped():
  """Every distinct (kind, tiling) that the rule offers for odd and usual widths, and the table."""
  found = dict.fromkeys(
    (key[0], tiling, *key[1:3]) for table in tiles.TABLE.values() for key, tiling in table.items()
  )
  seen = {(kind, tiling, False) for kind, tiling, *_ in found}
  for kind in tiles.KINDS:
    for width, n in ((1024, 2048), (256, 1536), (192, 320), (2880, 2880)):
      for tiling in tiles.candidates(kind, width, n):
        # Columns that two tiles compute take code of their own.
        twice = any(size % 128 == 64 for size in (width, n))
        if (kind, tiling, twice) not in seen:
          seen.add((kind, tiling, twice))
          found[kind, tiling, width, n] = None
  return list(found)


def shipped_by_day():
  """`shipped`, of which the day lowers each way to share a tile out once, for each kind."""
  seen = set()
  for case in shipped():
    kind, tiling, width, n = case
    how = kind, tiling.pair, tiling.pingpong, tiling.rows, any(s % 128 == 64 for s in (width, n))
    yield night(*case) if how in seen else case
    seen.add(how)


@pytest.mark.parametrize(("kind", "tiling", "width", "n"), shipped_by_day())
def test_shipped_tilings_lower_for_cuda(kind, tiling, width, n):
  layout = layout_of()
  rows, bf16 = layout.num_rows, jnp.bfloat16
  array = lambda *shape: jax.ShapeDtypeStruct(shape, bf16)
  index = jax.ShapeDtypeStruct((rows,), jnp.int32)
  # The gathering forms hold more registers and barriers: where there is one, it is what is lowered.
  # A pair that shares the rows of two column tiles cannot gather them, and halves of row tiles are
  # only offered without a gather.
  if kind == "rows" and (tiling.pair == "cols" or tiling.rows == 64):
    for transpose, weight in ((False, array(3, width, n)), (True, array(3, n, width))):
      run = lambda x, w, t=transpose: product(t, tiling)((x,), ((w,),), layout)
      lower(run, array(rows, width), weight)
  elif kind == "rows":
    run = lambda x, w, i: product(False, tiling)((x,), ((w,),), layout, index_R=i)
    lower(run, array(500, width), array(3, width, n), index)
  elif kind == "activated":
    gelu = get_activation("gelu")
    biased = lambda x, w, b: product(False, tiling, gelu)((x,), ((w,),), layout, biases=(b,))
    lower(biased, array(rows, width), array(3, width, n), array(3, n))
  elif kind == "up":
    run = lambda x, g, u, b, i: product(False, tiling, get_activation("swiglu"))(
      (x,), ((g, u),), layout, biases=(b, b), index_R=i
    )
    weights = array(3, width, n), array(3, width, n)
    lower(run, array(500, width), *weights, array(3, n), index)
  elif kind == "dx":
    run = lambda a, b, g, u: product(True, tiling)((a, b), ((g,), (u,)), layout)
    weights = array(3, n, width)
    lower(run, array(rows, width), array(rows, width), weights, weights)
  elif kind == "down_backward":
    swiglu, s = get_activation("swiglu"), jax.ShapeDtypeStruct((rows,), jnp.float32)
    run = lambda dy, w, g, u, s, i: down_backward_product(
      dy, w, (g, u), s, layout, swiglu, tiling, index_R=i
    )
    h = array(rows, n)
    lower(run, array(500, width), array(3, n, width), h, h, s, index)
  else:
    parts = 2 if kind == "weights_pair" else 1
    side, lengths = "lhs_index_R", (500, rows)
    if tiling.pair == "cols":
      side, lengths = "rhs_index_R", (rows, 500)
    run = lambda x, d, i: weights_product(
      x, (d,) * parts, layout, tiling, **{side: i}, out_dtype=bf16
    )
    lower(run, array(lengths[0], width), array(lengths[1], n), index)


def test_a_measured_tiling_is_for_its_device_and_form_only(monkeypatch):
  other = Tiling(cols=64, stages=2, pingpong=True)
  monkeypatch.setattr(
    tiles, "TABLE", {jax.devices()[0].device_kind: {("up", 64, 128, True): other}}
  )
  assert tiles.choose("up", 64, 128, gathered=True) == other
  assert tiles.choose("up", 64, 128) != other
  assert tiles.choose("up", 64, 128, 4, gathered=True) != other
  monkeypatch.setattr(tiles, "TABLE", {"another": {("up", 64, 128, True): other}})
  assert tiles.choose("up", 64, 128, gathered=True) != other


# Plain, gated, and with limits; the others are other arithmetic in the same kernels.
LOWERED_BY_DAY = ("gelu", "swiglu", "clamped_swiglu")


@pytest.mark.parametrize(
  "name", [n if n in LOWERED_BY_DAY else night(n) for n in activation_names()]
)
def test_every_activation_lowers_for_cuda(name):
  layout, kind = layout_of(), get_activation(name)
  rows, tiling = layout.num_rows, Tiling(cols=128, stages=3, pingpong=True)
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  parts = 1 + kind.gated
  run = lambda x, *w: product(False, Tiling(cols=128, stages=3), kind)((x,), (w,), layout)
  lower(run, array(rows, 64), *[array(3, 64, 128)] * parts)
  run = lambda dy, w, s, *pre: down_backward_product(dy, w, pre, s, layout, kind, tiling)
  s = jax.ShapeDtypeStruct((rows,), jnp.float32)
  lower(run, array(rows, 64), array(3, 128, 64), s, *[array(rows, 128)] * parts)


def test_experts_gate_and_their_gradients_lower_for_cuda():
  tokens, width, hidden, experts, top_k = 256, 320, 192, 8, 2
  array = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
  config = FFNConfig(backend="mosaic_gpu")

  def layer(x, gate, up, gate_up, down):
    logits, expert, _ = gate_top_k(x, gate, top_k, backend="mosaic_gpu")
    weight = jnp.take_along_axis(jax.nn.softmax(logits), expert, 1)
    layout = choices_layout(expert, weight, experts)
    return expert_ffn(x, FFNWeights(up, down, gate_up), layout, config)

  lower(
    lambda *a: jax.vjp(layer, *a)[1](a[0]),
    array(tokens, width),
    jax.ShapeDtypeStruct((width, experts), jnp.float32),
    array(experts, width, hidden),
    array(experts, width, hidden),
    array(experts, hidden, width),
  )


@pytest.mark.parametrize(
  ("tokens", "num_experts", "fp32"),
  [
    (2**16, 192, True),
    night(2**16, 128, True),
    night(256, 192, True),
    night(2**16, 192, False),
    night(256, 128, False),
  ],
)
def test_chosen_experts_fit_into_shared_memory(tokens, num_experts, fp32):
  """The kernel takes up to 32 of them; XLA chooses more. 256 tokens make tiles of 64 rows."""
  x = jax.ShapeDtypeStruct((tokens, 64), jnp.bfloat16)
  gate = jax.ShapeDtypeStruct((64, num_experts), jnp.float32)
  for k, kernels in ((32, 1), (33, 0)):
    run = functools.partial(gate_top_k, k=k, fp32=fp32, backend="mosaic_gpu")
    traced = jax.jit(lambda x, gate, run=run: run(x, gate)[:2]).trace(x, gate)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels


def test_every_tile_is_visited_once():
  for row_tiles, col_tiles, band in ((7, 3, 4), (16, 2, 16), (1, 5, 8)):
    visited = {
      tuple(int(i) for i in banded(jnp.int32(t), jnp.int32(row_tiles), col_tiles, band))
      for t in range(row_tiles * col_tiles)
    }
    assert visited == {(r, c) for r in range(row_tiles) for c in range(col_tiles)}


def test_tilings_fit_shared_memory_for_any_widths():
  for kind in tiles.KINDS:
    for width in range(64, 1024, 192):
      for n in range(64, 1024, 192):
        for itemsize in (2, 4):
          for tiling in tiles.candidates(kind, width, n, itemsize):
            if kind != "down_backward":
              assert tiles.smem_bytes(tiling, itemsize) <= tiles.SMEM_LIMIT
  with pytest.raises(ValueError, match="widths 100 and 64 must both be multiples of 64"):
    tiles.candidates("rows", 100, 64)


@needs_new_simulation
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_one_row_simulated(activation):
  """Decoding's network: two warpgroups or four with columns of their own, one and several parts of
  a sum, an expert that is none; and it is these kernels that run."""
  gated = get_activation(activation).gated
  width, hidden = (256, 512) if gated else (512, 256)
  matrix = lambda seed, *shape: normal(seed, *shape) * jnp.bfloat16(shape[1] ** -0.5)
  weights = FFNWeights(
    up_GDF=matrix(1, 4, width, hidden),
    down_GFD=matrix(2, 4, hidden, width),
    gate_GDF=matrix(3, 4, width, hidden) if gated else None,
    up_bias_GF=None if gated else normal(4, 4, hidden),
    down_bias_GD=None if gated else normal(5, 4, width),
  )
  # What is no choice adds nothing, even where the expert that stands in for it is not finite.
  weights = dataclasses.replace(weights, down_GFD=weights.down_GFD.at[3].set(jnp.inf))
  layout = choices_layout(jnp.asarray([[2, 4, 0]]), jnp.asarray([[0.5, 0.3, 0.2]]), 4)
  config, x = FFNConfig(activation, backend="mosaic_gpu"), normal(0, 1, width)
  with interpreted(gpu_interpret_params(detect_races=True), num_sms=16 if gated else 3):
    static = _resolve(config, layout, x.dtype, weights)
    assert static.one_row
    assert [own.parts > 1 for own in one_row.splits(weights.widths, 3) or ()] == [gated, gated]
    got = expert_ffn(x, weights, layout, config)
  want = expert_ffn_reference(x, weights, layout, activation)
  assert relative_error(got, want) < 3e-3


ROWS = [(2048, 1024, 8), (1024, 4096, 1), (4096, 14336, 2), (8192, 28672, 8)]


@pytest.mark.parametrize(
  ("activation", "shape"),
  # Shapes decide how a row is shared out, for one matrix or two; the activation is beside that.
  [("gelu", ROWS[0]), ("swiglu", ROWS[1]), night("reglu", ROWS[2]), night("gelu", ROWS[3])],
)
def test_one_row_lowers(activation, shape):
  """For CUDA, at the sizes of OLMoE, `gpt2_moe_medium`, Mixtral 8x7B and larger ones."""
  width, hidden, choices = shape
  gated = get_activation(activation).gated
  of: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  into = of(8, width, hidden)
  weights = FFNWeights(into, of(8, hidden, width), into if gated else None)
  layout = choices_layout(jnp.arange(choices)[None], jnp.ones((1, choices)), 8)
  run = lambda x, w: expert_ffn(x, w, layout, FFNConfig(activation, backend="mosaic_gpu"))
  text = jax.jit(run).trace(of(1, width), weights).lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu") == 2


def test_how_a_row_is_shared_out():
  """Most of the multiprocessors in one wave where the widths allow it; else another path."""
  split = one_row.split
  assert split(2048, 1024, 8, 132) == one_row.Split(256, 4)
  assert split(1024, 2048, 8, 132, 128) == one_row.Split(256, 2)
  assert split(4096, 1024, 1, 132, 128) == one_row.Split(256, 32)
  assert split(2048, 1408, 6, 132) is None  # 1408 is 11 times 128
  # The second layer holds its part of the activation: two parts would be one wave, but too long.
  assert split(28672, 8192, 8, 132, 128) == one_row.Split(512, 1)
  assert split(28672, 8192, 8, 132, 128, 4096) == one_row.Split(1024, 8)
  for width, out_width, choices in ((7168, 2048, 8), (4096, 1536, 8), (6144, 9216, 2)):
    own = split(width, out_width, choices, 132)
    assert own is not None
    ctas = choices * (out_width // own.columns) * own.parts
    assert 0.7 * 132 <= ctas <= 132, own
    assert width % (4 * own.unroll * own.parts) == 0


@needs_new_simulation
@pytest.mark.parametrize("widths", [(512,), (512, 256, 256)], ids=str)
def test_products_of_a_token_simulated(widths):
  """Decoding's dense products: matrices of one width and of several, sums in one part and many."""
  x = normal(0, 1, 1, 512)
  matrices = [normal(i + 1, 512, n) * jnp.bfloat16(512**-0.5) for i, n in enumerate(widths)]
  for num_sms in (3, 16):
    with interpreted(gpu_interpret_params(detect_races=True), num_sms=num_sms):
      found = linear.products(x, matrices, backend="mosaic_gpu")
    assert found is not None
    for y, w in zip(found, matrices):
      assert y.dtype == x.dtype
      want = x.astype(jnp.float32) @ w.astype(jnp.float32)
      assert relative_error(y, want) < 3e-3


@needs_new_simulation
@pytest.mark.parametrize("centred", [False, True], ids=["rmsnorm", "layernorm"])
def test_products_of_a_token_under_a_norm_simulated(centred):
  """The same as of the row that the norm's own kernel makes; without a kernel, its formula."""
  x, scale, bias = _norm_operands(512, centred)
  matrices = [normal(i + 1, 512, n) * jnp.bfloat16(512**-0.5) for i, n in enumerate((512, 256))]
  own = norm.Normalisation(scale, bias, centred, 1e-5)
  for num_sms in (3, 16):
    with interpreted(gpu_interpret_params(detect_races=True), num_sms=num_sms):
      got = linear.sums(norm.Normalised(x, own), matrices, backend="mosaic_gpu")
      want = linear.sums(norm.normalised(x, own), matrices, backend="mosaic_gpu")
    assert got is not None
    assert want is not None
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  # Rounded to the row's type: one in so many numbers falls to the other side.
  np.testing.assert_allclose(own(x).astype(jnp.float32), norm_of(x, own), rtol=1e-2, atol=1e-3)


def norm_of(x, own):
  x = np.asarray(x, np.float64)
  x = x - x.mean() if own.centred else x
  y = x / np.sqrt(np.square(x).mean() + own.eps) * np.asarray(own.scale_D)
  return y if own.bias_D is None else y + np.asarray(own.bias_D)


def test_products_of_a_token_that_kernels_leave():
  of = lambda *shape, dtype=jnp.bfloat16: jnp.zeros(shape, dtype)
  take = lambda x, *ws: linear.products(x, ws, backend="mosaic_gpu")
  assert take(of(2, 512), of(512, 256)) is None  # two rows
  assert take(of(1, 512), of(512, 256), of(512, 64)) is None  # narrow
  assert take(of(1, 512), of(512, 256, dtype=jnp.float32)) is None
  assert take(of(1, 511), of(511, 256)) is None
  assert linear.products(of(1, 512), [of(512, 256)]) is None  # on a CPU


@pytest.mark.parametrize(
  ("width", "widths"),
  [
    (1024, (1024,)),
    (1024, (1024,) * 3),
    night(4096, (4096, 1024, 1024)),
    night(2048, (2048,) * 3),
  ],
  ids=str,
)
def test_products_of_a_token_lower(width, widths):
  """For CUDA, and, by night, with few heads of keys and at OLMoE's sizes; the gradient is XLA's."""
  of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)

  def run(x, *ws):
    found = linear.products(x, ws, backend="mosaic_gpu")
    assert found is not None
    return sum(y.sum() for y in found)

  args = of(1, width), *[of(width, n) for n in widths]
  text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu") == 1
  text = jax.jit(jax.grad(run)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
  assert "mosaic_gpu" not in text


@pytest.mark.parametrize("shape", [(2048, 64), (100, 6), (7, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_product_of_a_token(shape, dtype):
  x, w = (
    jnp.asarray(np.random.default_rng(i).standard_normal(s), dtype)
    for i, s in enumerate(((1, shape[0]), shape))
  )
  got = linear.narrow_product(x, w)
  assert got.dtype == jnp.promote_types(x.dtype, jnp.float32)
  want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  gradient = jax.grad(lambda x: linear.narrow_product(x, w).sum())(x)
  np.testing.assert_allclose(
    np.asarray(gradient, np.float64)[0], np.asarray(w, np.float64).sum(1), rtol=2e-2, atol=1e-2
  )


@needs_new_simulation
@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize(("width", "experts"), [(256, 8), (512, 64), (256, 120)])
def test_gate_of_a_token_under_its_norm_simulated(width, experts, fp32):
  """The token as the norm's kernel makes it, and the choice of a gate that reads it."""
  x, scale, _ = _norm_operands(width, centred=False)
  row = norm.Normalised(x, norm.Normalisation(scale, None, False, 1e-5))
  gate = normal(5, width, experts).astype(jnp.float32)
  with interpreted(gpu_interpret_params(detect_races=True)):
    found = gate_under_norm(row, gate, fp32=fp32, backend="mosaic_gpu")
    assert found is not None
    got = found.top_k(4)
    y = norm.normalised(x, row.norm)
  y_TD = y.reshape(1, -1)
  np.testing.assert_array_equal(found.x_TD.astype(jnp.float32), y_TD.astype(jnp.float32))
  want = gate_top_k(y.reshape(1, -1), gate, 4, fp32=fp32, backend="xla")
  assert relative_error(got.logits_TE, want.logits_TE) < 1e-5
  np.testing.assert_array_equal(got.expert_TK, want.expert_TK)
  share_TE = jax.nn.softmax(want.logits_TE)
  assert got.share_TK is not None
  np.testing.assert_allclose(
    got.share_TK, jnp.take_along_axis(share_TE, want.expert_TK, 1), rtol=1e-4
  )


@pytest.mark.parametrize("width", [512, 4096])
@pytest.mark.parametrize("experts", [8, 24, 64])
def test_gate_of_a_token_under_its_norm_lowers(width, experts):
  """For CUDA, with rows of sums that are less than a cache line too: 8 experts have 32 bytes."""

  def begun(x, scale, gate):
    row = norm.Normalised(x, norm.Normalisation(scale, None, False, 1e-5))
    found = gate_under_norm(row, gate, backend="mosaic_gpu")
    assert found is not None
    return found.x_TD, found.top_k(4)

  of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  given = of(1, 1, width), jax.ShapeDtypeStruct((width,), jnp.float32), of(width, experts)
  lowered = jax.jit(begun).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
  assert lowered.count("custom_call @mosaic_gpu") == 2


@needs_new_simulation
def test_the_gradient_of_a_gate_under_its_norm_is_that_of_plain_products():
  x, scale, _ = _norm_operands(256, centred=False)
  gate = normal(5, 256, 8).astype(jnp.float32)

  def value(x, scale, gate, choose):
    row = norm.Normalised(x, norm.Normalisation(scale, None, False, 1e-5))
    y, found = choose(row, gate)
    return (y.astype(jnp.float32) ** 2).sum() + (found.share_TK * jnp.arange(1.0, 5.0)).sum()

  def fused(row, gate):
    found = gate_under_norm(row, gate, backend="mosaic_gpu")
    assert found is not None
    return found.x_TD, found.top_k(4)

  def plain(row, gate):
    y = row().reshape(1, -1)
    logits = y.astype(jnp.float32) @ gate
    share, expert = jax.lax.top_k(jax.nn.softmax(logits), 4)
    return y, GateOutput(logits, expert, share)

  gradient = jax.grad(value, (0, 1, 2))
  with interpreted(gpu_interpret_params(detect_races=False)):
    got = gradient(x, scale, gate, fused)
  for one, other in zip(got, gradient(x, scale, gate, plain)):
    assert relative_error(one, other) < 1e-2


def test_gates_that_the_norms_kernel_does_not_take():
  def take(*shape, experts=64, backend="mosaic_gpu"):
    scale = jnp.ones(shape[-1])
    row = norm.Normalised(
      jnp.zeros(shape, jnp.bfloat16), norm.Normalisation(scale, None, False, 1e-5)
    )
    gate = jnp.zeros((shape[-1], experts))
    run = functools.partial(gate_under_norm, backend=backend)
    return jax.eval_shape(run, row, gate) is not None

  assert take(1, 1, 2048)
  assert not take(2, 2048)
  assert not take(1, 2048, experts=100)
  assert not take(1, 384, experts=120)  # 384 numbers a CTA
  assert not take(1, 7168)  # 896
  assert not take(1, 2048, backend="auto")  # on a CPU


@needs_new_simulation
@pytest.mark.parametrize(("num_experts", "k"), [(8, 1), (64, 8), (120, 120), (256, 70)], ids=str)
def test_gate_of_a_token_simulated(num_experts, k):
  """Logits and experts as XLA's, of equal logits too: the smaller index comes first."""
  x, gate = normal(0, 1, 128), normal(1, 128, num_experts).astype(jnp.float32)
  gate = gate.at[:, num_experts // 2 :].set(gate[:, : num_experts // 2])
  with interpreted(gpu_interpret_params(detect_races=True)):
    logits, expert, share = gate_top_k(x, gate, k, fp32=True, backend="mosaic_gpu")
  want, order, _ = gate_top_k(x, gate, k, fp32=True, backend="xla")
  np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-4)
  np.testing.assert_array_equal(expert, jax.lax.top_k(logits, k)[1])
  np.testing.assert_array_equal(expert, order)
  softmax = jax.nn.softmax(np.asarray(logits, np.float64))
  assert share is not None
  want = np.take_along_axis(np.asarray(softmax), np.asarray(expert), 1)
  np.testing.assert_allclose(share, want, rtol=1e-5)
  assert expert.dtype == jnp.int32


def test_gate_of_a_token_lowers():
  """For CUDA, and which numbers of experts; the gradient is that of products."""
  of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  run = lambda x, gate, k: gate_top_k(x, gate, k, fp32=True, backend="mosaic_gpu")[0].sum()
  for num_experts, k, kernels in ((8, 2, 1), (64, 8, 1), (256, 8, 1), (264, 8, 0), (60, 4, 0)):
    given = of(1, 2048), of(2048, num_experts)
    lower = lambda f, given=given, k=k: (
      jax.jit(functools.partial(f, k=k)).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    )
    assert lower(run).count("custom_call @mosaic_gpu") == kernels
    assert "mosaic_gpu" not in lower(jax.grad(run))


def _norm_operands(width, centred):
  rng = np.random.default_rng(0)
  numbers = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.float32)
  return normal(0, 1, 1, width) * 3, 1 + 0.1 * numbers(width), numbers(width) if centred else None


@pytest.mark.parametrize("centred", [False, True], ids=["rmsnorm", "layernorm"])
def test_norm_of_a_token_simulated(centred):
  x, scale, bias = _norm_operands(512, centred)
  with interpreted(gpu_interpret_params(detect_races=True)):
    assert norm.takes(x, "mosaic_gpu")
    got = norm.normalised(x, norm.Normalisation(scale, bias, centred, 1e-5))
  wide = np.asarray(x, np.float64)
  wide = wide - wide.mean() if centred else wide
  want = wide / np.sqrt((wide**2).mean() + 1e-5) * np.asarray(scale)
  want = want if bias is None else want + np.asarray(bias)
  assert got.shape == x.shape
  assert got.dtype == x.dtype
  assert relative_error(got, want) < 3e-3


def _kernels_of_ptx():
  """Each as a function of ids [K, M] and rows [M, D]."""
  groups, tile = 40, 128

  def sorted_rows(ids_KM):
    position_N, sizes_G = running_positions_kernel(ids_KM.reshape(-1), groups)
    bound = max_tiles(ids_KM.size, groups, tile)
    return sorted_rows_kernel(sizes_G, ids_KM, position_N.reshape(ids_KM.shape), bound, tile)

  def copied(ids_KM, x_MD):
    starts, tiles_G, *_, row_KM, copy_R, _ = sorted_rows(ids_KM)
    places = row_KM.T, tiles_G, starts, tiles_G
    return copy_rows_to_tiles(x_MD, *places, num_rows=copy_R.size, tile=tile)

  return {
    "positions": lambda ids, x: running_positions_kernel(ids.reshape(-1), groups),
    "sorted": lambda ids, x: sorted_rows(ids),
    "copied": copied,
  }


@pytest.mark.parametrize(("name", "kernels"), [("positions", 1), ("sorted", 2), ("copied", 3)])
def test_kernels_of_ptx_lower(name, kernels):
  run = jax.jit(_kernels_of_ptx()[name])
  for tokens in (1, 8192):
    ids = jax.ShapeDtypeStruct((8, tokens), jnp.int32)
    x = jax.ShapeDtypeStruct((tokens, 2880), jnp.bfloat16)
    text = run.trace(ids, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels


@pytest.mark.parametrize("name", ["positions", "sorted", "copied"])
def test_what_kernels_of_ptx_make_differs_between_devices(name):
  """`jax.shard_map` checks what is returned, so it must know that ids and rows differ."""

  def region(ids, x):
    made = _kernels_of_ptx()[name](ids, x)
    for array in jax.tree.leaves(made):
      assert jax.typeof(array).manual_axis_type.varying == {"d"}
    return x

  mesh = Mesh(np.asarray(jax.devices()[:2]), ("d",))
  whole = jax.shard_map(region, mesh=mesh, in_specs=(P(None, "d"), P("d")), out_specs=P("d"))
  ids, x = jax.ShapeDtypeStruct((2, 256), jnp.int32), jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)
  jax.eval_shape(whole, ids, x)


def test_norm_of_a_token_lowers():
  for width in (768, 2048, 8192):
    for centred in (False, True):
      x, scale, bias = _norm_operands(width, centred)
      run = lambda x, scale, bias, centred=centred: norm.normalised(
        x, norm.Normalisation(scale, bias, centred, 1e-6)
      )
      text = jax.jit(run).trace(x, scale, bias).lower(lowering_platforms=("cuda",)).as_text()
      assert text.count("custom_call @mosaic_gpu") == 1
  take = lambda *shape, dtype=jnp.bfloat16: norm.takes(jnp.zeros(shape, dtype), "mosaic_gpu")
  assert take(1, 1, 768)
  assert not take(2, 768)
  assert not take(1, 1000)
  assert not take(1, 8192 + 256)
  assert not norm.takes(jnp.zeros((1, 768), jnp.bfloat16))  # on a CPU


@needs_new_simulation
@pytest.mark.parametrize("rows", ["one row", "rows"])
@pytest.mark.parametrize(
  ("heads", "kv_heads", "width", "length", "window", "num_sms"),
  [(2, 2, 64, 128, 0, 2), (4, 2, 64, 192, 100, 2), (1, 1, 128, 1024, 0, 24)],
  ids=["one CTA", "shared keys, window", "several CTAs"],
)
def test_attention_of_a_token_simulated(heads, kv_heads, width, length, window, num_sms, rows):
  """Against softmax in float64; keys behind the position are not finite, values are huge."""
  scale = width**-0.5
  positions = sorted({0, 63, 64, length // 2, length - 1})
  for here in [[p] for p in positions] if rows == "one row" else [positions]:
    q = 3 * normal(0, len(here), heads, width)
    k, v = (normal(i, len(here), length, kv_heads, width) for i in (1, 2))
    for r, position in enumerate(here):
      k, v = k.at[r, position + 1 :].set(jnp.nan), v.at[r, position + 1 :].set(1e4)
    with interpreted(gpu_interpret_params(detect_races=True), num_sms=num_sms):
      assert decode_attention.takes(q[:, None], k, v, "mosaic_gpu")
      got = attend_cache(q, k, v, jnp.asarray(here, jnp.int32), scale=scale, window=window)
    assert got.dtype == q.dtype
    for r, position in enumerate(here):
      seen = slice(max(0, position - window + 1) if window else 0, position + 1)
      keys, values = (
        np.repeat(np.asarray(x[r], np.float64)[seen], heads // kv_heads, 1) for x in (k, v)
      )
      scores = np.einsum("hn,thn->ht", np.asarray(q[r], np.float64), keys) * scale
      weights = np.exp(scores - scores.max(1, keepdims=True))
      weights /= weights.sum(1, keepdims=True)
      want = np.einsum("ht,thn->hn", weights, values)
      assert relative_error(got[r], want) < 3e-3, position


@needs_new_simulation
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # of infinite keys
@pytest.mark.parametrize(
  ("heads", "kv_heads", "width", "page", "window", "lasts", "num_sms"),
  [
    (4, 2, 64, 64, 0, (-1, 63, 64, 150), 2),
    (2, 1, 64, 128, 100, (200, -1, 30), 2),
    (1, 1, 128, 64, 0, (-1,), 8),
    (1, 1, 128, 64, 0, (320,), 8),
  ],
  ids=["shared keys", "pages of two blocks, window", "a row without a token", "several CTAs"],
)
def test_attention_over_pages_simulated(
  monkeypatch, heads, kv_heads, width, page, window, lasts, num_sms
):
  """Equal to rows' own caches; what no row sees is infinite, and rows without a token get zeros."""
  take = functools.partial(decode_attention.takes, backend="mosaic_gpu")
  monkeypatch.setattr(decode_attention, "takes", take)
  monkeypatch.setattr(pages, "IN_PLACE", True)
  rows, columns = len(lasts), 384 // page
  order = np.random.default_rng(0).permutation(rows * columns + 1)
  table = np.full((rows, columns), 2**30, np.int32)
  pools = [np.full((len(order), page, kv_heads, width), np.inf, np.float32) for _ in range(2)]
  caches = [np.array(normal(i, rows, 384, kv_heads, width), np.float32) for i in (1, 2)]
  for r, last in enumerate(lasts):
    for column in range(-(-(last + 1) // page)):
      table[r, column] = own = order[r * columns + column]
      count = min(page, last + 1 - column * page)
      for pool, cache in zip(pools, caches):
        pool[own, :count] = cache[r, column * page : column * page + count]
  q = 3 * normal(0, rows, heads, width)
  (k, v), caches = ([jnp.asarray(x, q.dtype) for x in both] for both in (pools, caches))
  options = {"scale": width**-0.5, "window": window}
  with interpreted(gpu_interpret_params(detect_races=True), num_sms=num_sms):
    last = jnp.asarray(lasts, jnp.int32)
    at = jnp.maximum(last, 0)
    own = k, v, at[:, None], PageTable(jnp.asarray(table), last)
    got = attend_over(q[:, None], *own, **options)[:, 0]
    want = attend_cache(q, *caches, at, **options)
  for r, last in enumerate(lasts):
    np.testing.assert_array_equal(got[r], want[r] if last >= 0 else jnp.zeros_like(want[r]))


def _unfinished(heads, kv_heads, width, turned=True):
  angle = 0.1 * np.arange(width // 2)
  turn = jnp.asarray([np.sin(angle), np.cos(angle)], jnp.float32) if turned else None
  sums = normal(3, 4, (heads + 2 * kv_heads) * width).astype(jnp.float32)
  return PartialProjections(sums, turn, heads, kv_heads, jnp.dtype(jnp.bfloat16))


def _joined(y):
  return y.joined() if isinstance(y, PartialAttention) else y


@needs_new_simulation
@pytest.mark.parametrize(
  ("heads", "kv_heads", "width", "length", "window", "num_sms"),
  [
    (2, 2, 64, 128, 0, 2),
    (4, 2, 64, 192, 100, 2),
    (1, 1, 128, 384, 0, 4),
    (2, 1, 64, 384, 100, 4),
    (2, 1, 64, 128, 1, 2),
  ],
  ids=["one CTA", "shared keys, window", "several CTAs", "of a window", "the token alone"],
)
def test_attention_that_finishes_a_token_simulated(heads, kv_heads, width, length, window, num_sms):
  """The same as of finished queries over a cache that has the token; no other row is touched."""
  own = _unfinished(heads, kv_heads, width, turned=window != 100)
  options = {"scale": width**-0.5, "window": window}
  for position in sorted({0, 63, 64, length - 1}):
    # What is at the token's place and behind it does not count.
    k, v = (normal(i, length, kv_heads, width).at[position:].set(1e4) for i in (1, 2))
    q, own_k, own_v = own.finished()
    wanted = k.at[position].set(own_k), v.at[position].set(own_v)
    here = jnp.asarray([position], jnp.int32)
    with interpreted(gpu_interpret_params(detect_races=True), num_sms=num_sms):
      assert decode_attention.takes_partial(own, k[None], v[None], "mosaic_gpu")
      got, *cache = attend_partial(own, k, v, here, **options)
      k, v = (x[None] for x in wanted)
      (want,) = attend_cache(q[None], k, v, here, **options)
    assert isinstance(got, PartialAttention) == (length > 128 and num_sms > kv_heads)
    assert relative_error(_joined(got), want) < 3e-3, position
    for one, other in zip(cache, wanted):
      np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))


@needs_new_simulation
@pytest.mark.parametrize(("heads", "width"), [(4, 64), (4, 128)])
def test_products_of_a_token_that_is_not_joined_simulated(heads, width):
  """The same as of the row that XLA joins; several heads of a part of the sums."""
  parts = 3
  y = normal(1, parts, heads, width).astype(jnp.float32)
  most, weight = (normal(i, parts, heads).astype(jnp.float32) for i in (2, 3))
  row = PartialAttention(y, 3 * most, jnp.exp(weight), jnp.dtype(jnp.bfloat16))
  matrices = [normal(7, heads * width, 256) * jnp.bfloat16((heads * width) ** -0.5)]
  for num_sms in (1, 4):
    with interpreted(gpu_interpret_params(detect_races=True), num_sms=num_sms):
      got = linear.sums(row, matrices, backend="mosaic_gpu")
      want = linear.sums(row(), matrices, backend="mosaic_gpu")
    assert got is not None
    assert want is not None
    assert got.shape == want.shape
    assert relative_error(got.sum(0), want.sum(0)) < 3e-3


def test_attention_of_a_token_lowers():
  of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
  run, over_pages = (functools.partial(f, scale=0.1) for f in (attend_cache, attend_pages))
  for heads, kv_heads, width, length in ((16, 16, 128, 256), (16, 16, 64, 256), (32, 8, 128, 4096)):
    for rows in (1, 64):
      caches = of(rows, length, kv_heads, width)
      args = of(rows, heads, width), caches, caches, of(rows, dtype=jnp.int32)
      text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
      assert text.count("custom_call @mosaic_gpu") == 1
      pool, table = of(100, 64, kv_heads, width), of(rows, length // 64, dtype=jnp.int32)
      args = args[0], pool, pool, table, args[3]
      text = jax.jit(over_pages).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
      assert text.count("custom_call @mosaic_gpu") == 1
    cache, here = of(length, kv_heads, width), of(1, dtype=jnp.int32)
    if not KERNELS_WRITE_IN_PLACE:
      continue
    run_unfinished = jax.jit(functools.partial(attend_partial, scale=0.1))
    args = _unfinished(heads, kv_heads, width), cache, cache, here
    text = run_unfinished.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def test_unfinished_attention_that_the_kernel_leaves():
  def take(heads, kv_heads, batch=1, backend="mosaic_gpu"):
    cache = jnp.zeros((batch, 128, kv_heads, 64), jnp.bfloat16)
    own = _unfinished(heads, kv_heads, 64)
    return decode_attention.takes_partial(own, cache, cache, backend)

  assert take(16, 2) == KERNELS_WRITE_IN_PLACE
  assert not take(32, 2)  # 16 heads share keys
  assert not take(2, 2, batch=2)
  assert not take(2, 2, backend="auto")  # on a CPU


def test_attention_that_the_kernel_leaves():
  def take(heads, length, kv_heads, width, batch=1, backend="mosaic_gpu"):
    q = jnp.zeros((batch, 1, heads, width), jnp.bfloat16)
    cache = jnp.zeros((batch, length, kv_heads, width), jnp.bfloat16)
    return decode_attention.takes(q, cache, cache, backend)

  assert take(2, 192, 2, 64)
  assert not take(2, 193, 2, 64)  # 64 does not divide the length
  assert take(128, 128, 2, 64)
  assert not take(256, 128, 2, 64)  # 128 heads share keys
  assert not take(2, 128, 2, 96)
  assert take(2, 128, 2, 64, batch=2)
  assert not take(2, 128, 2, 64, backend="auto")  # on a CPU
