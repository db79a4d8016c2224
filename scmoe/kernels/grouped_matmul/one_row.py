"""The experts' network of a single row, as decoding one sequence asks for: nothing is sorted.

    C  choices of the row      P  parts of a sum      D  model width      F  expert width
    K, N  contracted and other width of a product

A tensor core wants 64 rows. With one there is nothing to compute beside reading the weights, so
these kernels read as fast as memory gives: every CTA takes some rows of a choice's matrix, in
pieces of a few hundred columns, and every thread multiplies its columns with the row's numbers and
adds up, nothing of which goes through shared memory. The CTAs' sums are added up by whoever reads
them: those of the first layer by the second layer's CTAs, which make the activation of them, those
of the second by XLA. Tiles, plan and gather of `rows_product` are not needed at all.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels.grouped_matmul.activations import Activation, activate, kernel_form
from scmoe.kernels.grouped_matmul.pipeline import compiled, resolve_num_sms
from scmoe.kernels.grouped_matmul.weights import Execution, FFNWeights

_WARPGROUP = 128  # threads
_WARPGROUPS = 4  # of a CTA, each with a quarter of its rows
_UNROLL = 8  # rows whose weights a thread has under way
_ROWS = _WARPGROUPS * _UNROLL  # a CTA takes a multiple of them
_HELD = 4096  # numbers of the activation that a warpgroup keeps in shared memory, at most
# Columns that a CTA takes: a thread reads 16, 8 or 4 bytes of a row at once.
_COLUMNS = (1024, 512, 256)


@dataclasses.dataclass(frozen=True)
class Split:
  """How a product of one row is shared out.

  Attributes:
    columns: that a CTA takes.
    parts: into which the contracted width is cut.
  """

  columns: int
  parts: int


def split(
  width: int, out_width: int, choices: int, num_sms: int, multiple: int, most: int = 0
) -> Split | None:
  """The division that leaves the fewest multiprocessors idle; None: there is none.

  Args:
    width, out_width: K and N.
    choices: C.
    num_sms: multiprocessors.
    multiple: of what the rows of a part are a multiple.
    most: rows of a part at most; 0: any.
  """
  found: list[tuple[float, Split]] = []
  for columns in _COLUMNS:
    if out_width % columns:
      continue
    parts = [p for p in range(1, width // multiple + 1) if width % (p * multiple) == 0]
    parts = [p for p in parts if not most or width // p <= most]
    for part in parts:
      ctas = choices * (out_width // columns) * part
      waves = -(-ctas // num_sms)
      found.append((ctas / (waves * num_sms) / waves**0.5, Split(columns, part)))
  # Of equals the first: wide columns, few parts.
  return max(found, key=lambda own: own[0])[1] if found else None


def splits(weights: FFNWeights, choices: int, num_sms: int | None) -> tuple[Split, Split] | None:
  """Of the two layers; None where a width is not a multiple of what threads read at once."""
  _, width, hidden = weights.up_GDF.shape
  sms = resolve_num_sms(num_sms)
  first = split(width, hidden, choices, sms, _ROWS)
  second = split(hidden, weights.down_GFD.shape[2], choices, sms, _WARPGROUP, _HELD)
  return None if first is None or second is None else (first, second)


@functools.partial(jax.jit, static_argnames="how")
def forward(
  x_1D: jax.Array,
  weights: FFNWeights,
  expert_C: jax.Array,
  weight_C: jax.Array | None,
  how: Execution,
) -> jax.Array:
  """Σ_c weight[c] · down(act(up(x))), by the expert of each choice: [1, D'] in the type of x.

  Products, activation and sums are in float32. Not differentiable: see `expert_ffn`.

  Args:
    x_1D: the row, bfloat16 or float16.
    weights: of the experts, in the row's type, for which there are `splits`.
    expert_C: int32; an id outside [0, G) is no choice and adds nothing.
    weight_C: float32, of each choice; None: 1.
    how: see `Execution`.
  """
  groups, choices = weights.up_GDF.shape[0], expert_C.shape[0]
  divided = splits(weights, choices, how.num_sms)
  assert divided is not None
  made_C = (expert_C >= 0) & (expert_C < groups)
  scale_C = jnp.ones((choices,), jnp.float32) if weight_C is None else weight_C.astype(jnp.float32)
  pre_CPIF = _first_layer(x_1D, weights, expert_C, divided[0])
  y_CPD = _second_layer(pre_CPIF, weights, expert_C, scale_C, how.activation, divided[1])
  y_D = jnp.sum(y_CPD, axis=(0, 1))
  if weights.down_bias_GD is not None:
    bias_CD = weights.down_bias_GD[jnp.where(made_C, expert_C, 0)].astype(jnp.float32)
    y_D = y_D + jnp.sum(jnp.where(made_C[:, None], bias_CD * scale_C[:, None], 0.0), axis=0)
  return y_D[None].astype(x_1D.dtype)


def _first_layer(x_1D, weights: FFNWeights, expert_C, own: Split):
  """Sums before the biases, float32 [C, P, I, F]; I is 2 with a gate, else 1."""
  matrices = weights.up_weights
  _, width, hidden = matrices[0].shape
  rows = width // own.parts

  def body(expert, x, *rest):
    *matrices, out, shared, barrier = rest
    choice, column, part = _place()
    row = lambda k: x[0, k].astype(jnp.float32)
    start = _sums(matrices, _one_of(expert[choice], matrices[0]), own, rows, row)
    _store(start(), out.at[choice, part], shared, barrier, own, column)

  kernel = _kernel(body, expert_C.shape[0], len(matrices), hidden, own)
  return kernel(expert_C, x_1D, *matrices)


def _second_layer(
  pre_CPIF, weights: FFNWeights, expert_C, scale_C, activation: Activation, own: Split
):
  """Sums before the bias, float32 [C, P, D'], times the choice's scale; 0 of no choice."""
  groups, hidden, out_width = weights.down_GFD.shape
  given = [b for b in weights.up_biases if b is not None]
  biased = [b is not None for b in weights.up_biases]
  rows, kind = hidden // own.parts, kernel_form(activation)

  def body(expert, scale, pre, matrix, *rest):
    *bias, out, shared, barrier, a, is_made = rest
    choice, column, part = _place()
    group, wg = _one_of(expert[choice], matrix), lax.axis_index("wg")
    row = lambda f: a[wg, f - part * rows]
    # The weights are on their way while the activation is made.
    start = _sums([matrix], group, own, rows, row)
    mine, bias, hs = pl.ds(part * rows, rows), iter(bias), []
    for i, has_bias in enumerate(biased):
      h = pre[choice, 0, i, mine]
      for p in range(1, pre.shape[1]):
        h = h + pre[choice, p, i, mine]
      hs.append(h + next(bias)[group, mine].astype(jnp.float32) if has_bias else h)
    a[wg] = activate(kind, tuple(hs))
    plgpu.barrier_arrive(is_made)
    plgpu.barrier_wait(is_made)
    made = (expert[choice] >= 0) & (expert[choice] < groups)
    sums = [s * scale[choice] for s in start()]
    sums = [jnp.where(jnp.broadcast_to(made, s.shape), s, jnp.zeros_like(s)) for s in sums]
    _store(sums, out.at[choice, part], shared, barrier, own, column)

  scratch = [plgpu.SMEM((_WARPGROUPS, rows), jnp.float32), _barrier()]
  kernel = _kernel(body, expert_C.shape[0], 1, out_width, own, *scratch)
  return kernel(expert_C, scale_C, pre_CPIF, weights.down_GFD, *given)[:, :, 0]


# -- what the two have in common ------------------------------------------------------------------


def _kernel(body, choices: int, matrices: int, out_width: int, own: Split, *scratch: Any):
  """A CTA for each choice, piece of columns and part of the rows; writes [C, P, I, N]."""
  return compiled(
    body,
    out_type=jax.ShapeDtypeStruct((choices, own.parts, matrices, out_width), jnp.float32),
    grid=(choices, out_width // own.columns, own.parts),
    grid_names=("choice", "column", "part"),
    num_threads=_WARPGROUPS,
    thread_name="wg",
    scratch_types=[
      plgpu.SMEM((_WARPGROUPS, matrices, own.columns), jnp.float32),
      _barrier(),
      *scratch,
    ],
  )


def _barrier():
  return plgpu.Barrier(num_arrivals=_WARPGROUPS)


def _place():
  return tuple(lax.axis_index(name) for name in ("choice", "column", "part"))


def _one_of(expert, matrices):
  """The expert, or any in the place of none: what comes of it is left out of the sum."""
  return jnp.clip(expert, 0, matrices.shape[0] - 1)


def _sums(matrices, group, own: Split, rows: int, row):
  """Σ_k row(k) · matrix[group, k] over this warpgroup's share of the CTA's rows, for each matrix.

  The first weights are asked for at once; the function that is returned waits for them, asks for
  the next before it uses them, and gives the sums.
  """
  share = rows // _WARPGROUPS
  first = lax.axis_index("part") * rows + lax.axis_index("wg") * share
  at = pl.ds(lax.axis_index("column") * own.columns, own.columns)
  unroll = _UNROLL // len(matrices)
  layout = plgpu.Layout.WG_STRIDED((own.columns,), vec_size=own.columns // _WARPGROUP)

  def load(k):
    return tuple(tuple(m[group, k + j, at] for m in matrices) for j in range(unroll))

  def add(k, loaded, sums):
    for j, of_row in enumerate(loaded):
      x = row(k + j)
      sums = tuple(s + x * w.astype(jnp.float32) for s, w in zip(sums, of_row))
    return sums

  begun = load(first)

  def finish():
    def step(i, carry):
      loaded, sums = carry
      k = first + i * unroll
      return load(k + unroll), add(k, loaded, sums)

    zero = plgpu.layout_cast(jnp.zeros((own.columns,), jnp.float32), layout)
    steps = share // unroll
    loaded, sums = lax.fori_loop(0, steps - 1, step, (begun, (zero,) * len(matrices)))
    return add(first + (steps - 1) * unroll, loaded, sums)

  return finish


def _store(sums, out, shared, barrier, own: Split, column):
  """The warpgroups' sums added up, each warpgroup some of the columns, and written."""
  wg, piece = lax.axis_index("wg"), max(own.columns // _WARPGROUPS, _WARPGROUP)
  for i, s in enumerate(sums):
    shared[wg, i] = s
  plgpu.barrier_arrive(barrier)
  plgpu.barrier_wait(barrier)

  @pl.when(wg * piece < own.columns)
  def _():
    mine = pl.ds(wg * piece, piece)
    for i in range(len(sums)):
      total = shared[0, i, mine]
      for other in range(1, _WARPGROUPS):
        total = total + shared[other, i, mine]
      out[i, pl.ds(column * own.columns + wg * piece, piece)] = total
