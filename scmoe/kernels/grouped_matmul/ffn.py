"""The experts' feed-forward network: one function with one gradient for every layout of rows.

    M  rows at hand      K  copies of each      R  rows of the tiles      G  groups (experts)
    D  model width      F  expert width

The up-projection reads the rows in the experts' tiles: they lie there already, or are gathered or
copied there. The results go back to the rows' own order, where each row's copies are added up, with
weights if they have any. (A single row can do without tiles: see `_expert_ffn`.) The forward pass
keeps the rows, the weights, the pre-activations and the layout's arrays for the backward pass. That
pass does not need the experts' output: with da' = dy @ down.T, the gradient of a copy's weight is
⟨da', a⟩, plus ⟨dy, bias⟩ if the last layer has a bias (SonicMoE, arXiv 2512.14080).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from scmoe.base.options import check_array, check_type, option
from scmoe.kernels import launch
from scmoe.kernels.grouped_matmul import xla
from scmoe.kernels.grouped_matmul.activations import activation_names, get_activation
from scmoe.kernels.grouped_matmul.backend import implementation, resolve_backend
from scmoe.kernels.grouped_matmul.layout import RowLayout, TiledRows, make_equal_layout
from scmoe.kernels.grouped_matmul.options import FFNOptions
from scmoe.kernels.grouped_matmul.weights import Execution, FFNWeights
from scmoe.kernels.one_row import experts as one_row
from scmoe.kernels.permute import sum_copies, take_rows, zero_cotangents


@dataclasses.dataclass(frozen=True)
class FFNConfig(FFNOptions, path="FFNConfig"):
  """The static options of one call of the experts' network, beside those of `FFNOptions`.

  Attributes:
    activation: as in `FFNOptions`, but never empty, and may be given by position.
    precision: of float32 operands, as in `jax.lax.dot_general`.
    shared_sms: whether a collective may hold multiprocessors while padded experts run. If so, and
      if `impl` and `backend` are auto, padded experts take batched products. If they take kernels
      all the same, these launch 8 CTAs per multiprocessor, unless `num_sms` is given. Where CTAs
      work in pairs, `num_sms` of 1 counts as 2.
  """

  activation: str = option("swiglu", choices=activation_names())
  precision: str | None = "highest"
  shared_sms: bool = option(False)


# CTAs that padded experts' kernels launch per multiprocessor with `FFNConfig.shared_sms`, unless
# `num_sms` is given; one multiprocessor runs its CTAs one after the other. With one CTA per
# multiprocessor, the CTA meant for one that a collective holds would begin only when another CTA
# has ended, and the product could take twice as long. Without a collective, one CTA per
# multiprocessor is faster (experiments/kernels).
WAVES = 8


def expert_ffn(
  rows: Float[Array, "*M D"],
  weights: FFNWeights,
  layout: RowLayout,
  config: FFNConfig = FFNConfig(),
) -> Float[Array, "*M D_out"]:
  """out[m] = Σ_k weight[m, k] · down(act(up(rows[m]))), or the gated form, by each copy's expert.

  With a gated activation act(gate(rows)) · up(rows) stands for act(up(rows)); in `clamped_swiglu` a
  function of up(rows) stands for up(rows).

  Args:
    rows: [..., D]; M rows in the order that `layout` describes. Rows of no expert must be finite,
      except in tiles that are not in use (`RowLayout.tiles`).
    weights: matrices and biases of the experts at hand; all are cast to the type of the rows.
    layout: which experts each row is for.
    config: see `FFNConfig`.

  Returns:
    [..., D'] in the rows' order and type, D' the width of the last layer; products are accumulated
    in float32 (float64 for such rows; for fp8 kernels see `rows_product`). Rows without an expert
    are zero and get a zero gradient. Tiled rows (`RowLayout`) are the exception: the result may
    hold anything for those without an expert. In tiles in use the gradient of the result must be 0
    for them; in other tiles the gradient of the rows may hold anything. For tokens in
    place, XLA may fuse the loop that sums the rows' gradient with its reader. A reader that reduces
    over rows or columns would halve the loop's speed: put a barrier between the two
    (`parallel.barriers.barrier`, "backward").

  Raises:
    ConfigError: an argument is of another type.
    ValueError: shapes disagree; a gated activation lacks the gate's matrices, or another one has
      them or the gate's biases; `config.impl` is `block_sparse`, or is `batched` without padded
      experts; or `config.backend` cannot take the type or the widths.
  """
  check_type("weights", weights, FFNWeights)
  check_type("layout", layout, RowLayout)
  check_type("config", config, FFNConfig)
  for name, value in (("rows", rows), ("up_GDF", weights.up_GDF), ("down_GFD", weights.down_GFD)):
    check_array(name, value)
  rows_MD = rows.reshape(-1, rows.shape[-1])
  check_ffn(rows_MD, weights, layout, config.activation)
  weights = weights.cast(rows.dtype)
  static = _resolve(config, layout, rows.dtype, weights)
  if not layout.num_copies:
    width = weights.down_GFD.shape[-1]
    return launch.varying_as(rows, jnp.zeros((*rows.shape[:-1], width), rows.dtype))
  with jax.named_scope("plan"):
    tiles = _tiles(layout, static)
  choices = (layout.group_MK, layout.weight_MK)
  out: Any = _expert_ffn(rows_MD, weights, choices, tiles, static)
  return out.reshape(*rows.shape[:-1], out.shape[-1])


@dataclasses.dataclass(frozen=True)
class _Static:
  """A resolved `FFNConfig`: options, and facts of the layout, on which a traced program depends."""

  products: str  # the backend whose products run, a word of `backend.MODULES`
  how: Execution
  ranks: int  # W of padded experts whose rows `_by_expert` reorders; else 1
  padded: tuple[int, int, int] | None
  weighted: bool
  one_row: bool  # whether kernels for a single row run where no gradient is asked for


def _resolve(config: FFNConfig, layout: RowLayout, dtype: Any, weights: FFNWeights) -> _Static:
  """Decides which implementation runs, and how; ValueError for an unfit `impl` or `backend`."""
  padded = layout.padded
  if config.impl == "batched" and padded is None:
    raise ValueError(
      "impl='batched' needs padded experts, got rows with group sizes: use 'grouped'"
    )
  products = resolve_backend(config.backend, dtype, *weights.widths)
  if config.impl == "block_sparse":
    raise ValueError("impl='block_sparse' is another function, block_sparse_ffn: use 'auto'")
  batched = config.impl == "batched"
  if padded is not None and config.impl == "auto":
    tile = implementation(products).ROW_TILE
    whole = tile is not None and padded[2] > 0 and padded[2] % tile == 0
    taken = config.shared_sms and config.backend == "auto"
    batched = not whole or taken
  num_sms = config.num_sms or None
  if products == "mosaic_gpu" and padded is not None and config.shared_sms and num_sms is None:
    num_sms = WAVES * launch.resolve_num_sms(None)
  simulation = launch.interpretation() if products == "mosaic_gpu" else None
  activation = get_activation(config.activation)
  group_MK = layout.group_MK
  one = group_MK is not None and group_MK.shape[0] == 1 and products == "mosaic_gpu"
  one = one and not config.fp8  # the kernels for one row do not round weights to fp8
  return _Static(
    products="xla" if batched else products,
    how=Execution(activation, config.precision, num_sms, simulation, config.fp8),
    ranks=padded[0] if batched and padded is not None else 1,
    padded=padded if batched else None,
    weighted=layout.weight_MK is not None,
    one_row=one and one_row.splits(weights.widths, layout.num_copies) is not None,
  )


def _tiles(layout: RowLayout, static: _Static) -> TiledRows:
  if static.padded is not None:  # batched products: one tile for each expert
    ranks, groups, rows = static.padded
    return TiledRows(make_equal_layout(1, groups, ranks * rows, ranks * rows), None)
  arrived, tile = layout.tiles, implementation(static.products).ROW_TILE
  if arrived is not None and tile in (None, arrived.tile):
    return TiledRows(arrived, None)
  if tile is not None:
    if layout.padded is not None and layout.padded[2] % tile == 0:
      return layout.in_place(tile)
    return layout.sorted(tile)
  return layout.sorted(xla.choose_tile(layout.num_copies, layout.num_groups))


def _by_expert(rows_MN: jax.Array, static: _Static) -> jax.Array:
  """Reorders rows from [rank, expert, row] to [expert, rank, row]; not if `static.ranks` is 1."""
  if static.ranks == 1:
    return rows_MN
  assert static.padded is not None
  rows = rows_MN.reshape(*static.padded, rows_MN.shape[1])
  return jnp.swapaxes(rows, 0, 1).reshape(rows_MN.shape)


def _by_rank(rows_RN: jax.Array, static: _Static) -> jax.Array:
  """Reorders rows from [expert, rank, row] to [rank, expert, row]; not if `static.ranks` is 1."""
  if static.ranks == 1:
    return rows_RN
  assert static.padded is not None
  ranks, groups, size = static.padded
  rows = rows_RN.reshape(groups, ranks, size, rows_RN.shape[1])
  return jnp.swapaxes(rows, 0, 1).reshape(rows_RN.shape)


# -- value and gradient of the network ------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _expert_ffn(rows_MD, weights, choices, tiles, static):
  """The result of `expert_ffn` where no gradient is asked for; pre-activations are not stored.

  Kernels for a single row compute it if `static.one_row`.
  """
  group_MK, weight_MK = choices
  if static.one_row:
    weight_K = None if weight_MK is None else weight_MK[0]
    return one_row.forward(rows_MD, weights, group_MK[0], weight_K, static.how)
  y_RD, _ = implementation(static.products).forward(
    _by_expert(rows_MD, static),
    weights,
    tiles.groups,
    static.how,
    permutation=tiles.permutation,
    with_pre=False,
  )
  return _back(y_RD, weight_MK, tiles, static)


def _expert_ffn_fwd(rows_MD, weights, choices, tiles, static):
  _, weight_MK = choices
  y_RD, pre = implementation(static.products).forward(
    _by_expert(rows_MD, static),
    weights,
    tiles.groups,
    static.how,
    permutation=tiles.permutation,
    with_pre=True,
  )
  return _back(y_RD, weight_MK, tiles, static), (rows_MD, weights, choices, tiles, pre)


def _expert_ffn_bwd(static, residuals, dout_MD):
  rows_MD, weights, (group_MK, weight_MK), tiles, pre = residuals
  dx_RD, dweights, ds_R = implementation(static.products).backward(
    _by_expert(rows_MD, static),
    _by_expert(dout_MD, static),
    weights,
    pre,
    _row_weights(weight_MK, tiles, xla.accumulation_type(rows_MD.dtype)),
    tiles.groups,
    static.how,
    permutation=tiles.permutation,
  )
  # For tokens in place, XLA may fuse the loop that adds up their copies' gradients (`joined`) with
  # the one that adds the gradient from the router.
  drows_MD = _back(dx_RD, None, tiles, static, joined=static.weighted)
  dweight_MK = None
  if weight_MK is not None:
    assert tiles.permutation is not None
    dweight_MK = take_rows(ds_R, tiles.permutation.row_TK).astype(weight_MK.dtype)
  dchoices = zero_cotangents(group_MK), dweight_MK
  return drows_MD, dweights, dchoices, zero_cotangents(tiles)


_expert_ffn.defvjp(_expert_ffn_fwd, _expert_ffn_bwd)


def _back(y_RD, weight_MK, tiles: TiledRows, static: _Static, joined: bool = False):
  """Moves results from the tiles to the rows' order, and adds up each row's copies.

  A copy is first multiplied by its weight in weight_MK, if that is given. Without a permutation a
  row has one copy, and only `_by_rank` is needed. `joined` is that of `sum_copies`.
  """
  if tiles.permutation is None:
    return _by_rank(y_RD, static)
  with jax.named_scope("combine" if static.weighted else "unpermute"):
    return sum_copies(y_RD, tiles.permutation.row_TK, weight_MK, joined=joined)


def _row_weights(weight_MK, tiles: TiledRows, dtype) -> jax.Array:
  """The factor of each row of the tiles: its copy's weight, 1 without weights, 0 on padding.

  Where the rows lie in tiles already (no permutation), it is 1 on padding, too.
  """
  if tiles.permutation is None:
    return jnp.ones((tiles.groups.num_rows,), dtype)
  copy_R = tiles.permutation.copy_R
  if weight_MK is None:
    return (copy_R >= 0).astype(dtype)
  return take_rows(weight_MK.reshape(-1).astype(dtype), copy_R)


def check_ffn(rows_MD: jax.Array, weights: FFNWeights, layout: RowLayout, activation: str) -> None:
  """Raises ValueError unless the activation is known, shapes agree, and the gate fits.

  A gated activation must have gate weights; no other may have any, or a gate's bias.
  """
  kind = get_activation(activation)
  if weights.up_GDF.ndim != 3:
    raise ValueError(f"up must be [G, D, F], got shape {weights.up_GDF.shape}")
  groups, width, hidden = weights.up_GDF.shape
  out_width = weights.down_GFD.shape[-1]
  if kind.gated != (weights.gate_GDF is not None):
    has = "has" if weights.gate_GDF is not None else "lacks"
    raise ValueError(
      f"activation {activation!r} is {'gated' if kind.gated else 'not gated'} but the FFN {has}"
      f" gate weights: {'pass gate_GDF' if kind.gated else 'pass gate_GDF=None'}"
    )
  if not kind.gated and weights.gate_bias_GF is not None:
    raise ValueError(f"activation {activation!r} is not gated: pass gate_bias_GF=None")
  expected = {
    "gate_GDF": (groups, width, hidden),
    "down_GFD": (groups, hidden, out_width),
    "gate_bias_GF": (groups, hidden),
    "up_bias_GF": (groups, hidden),
    "down_bias_GD": (groups, out_width),
  }
  for name, shape in expected.items():
    value = getattr(weights, name)
    if value is not None and value.shape != shape:
      raise ValueError(
        f"{name} has shape {value.shape}, but up has {weights.up_GDF.shape}: expected {shape}"
      )
  if rows_MD.shape[1] != width:
    raise ValueError(f"rows have width {rows_MD.shape[1]}, but up takes {width}: they must agree")
  if layout.num_groups != groups:
    raise ValueError(f"the layout has {layout.num_groups} experts, the weights {groups}")
  rows = layout.num_copies if layout.group_MK is None else layout.group_MK.shape[0]
  if rows_MD.shape[0] != rows:
    raise ValueError(f"there are {rows_MD.shape[0]} rows, the layout describes {rows}")
