"""The experts' network for a single row, for decoding one sequence: nothing is sorted.

    C  choices of the row      P  parts of a sum      D  model width      F  expert width
    K, N  contracted and other width of a product     D'  width of the output

Each layer is a kernel that reads the matrices of each choice's expert once (`matrix_vector`).
The second layer's CTAs add up the first layer's partial sums and apply the activation; XLA adds up
the second layer's partial sums and its biases.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scmoe.kernels.grouped_matmul.activations import Activation, activate, kernel_form
from scmoe.kernels.grouped_matmul.weights import Execution, FFNWeights
from scmoe.kernels.launch import resolve_num_sms
from scmoe.kernels.one_row.matrix_vector import (
  WARPGROUP,
  WARPGROUPS,
  Split,
  added_up,
  begin_sums,
  everyone,
  kernel,
  one_of,
  place,
  split,
  store_sums,
)

_HELD = 4096  # most numbers of the activation that a warpgroup keeps in shared memory


def splits(widths: tuple[int, int, int], choices: int) -> tuple[Split, Split] | None:
  """How the products of the first and the second layer are divided among CTAs, or None.

  The widths are D, F and D'. None if `matrix_vector.split` finds no division for one of the two
  products.
  """
  width, hidden, out_width = widths
  sms = resolve_num_sms(None)
  first = split(width, hidden, choices, sms)
  second = split(hidden, out_width, choices, sms, WARPGROUP, _HELD)
  return None if first is None or second is None else (first, second)


@functools.partial(jax.jit, static_argnames="how")
def forward(
  x_1D: jax.Array,
  weights: FFNWeights,
  expert_C: jax.Array,
  weight_C: jax.Array | None,
  how: Execution,
) -> jax.Array:
  """Σ_c weight[c] · down(act(up(x))), or the gated form, over the choices' experts.

  With a gated activation act(gate(x)) · up(x) stands for act(up(x)); in `clamped_swiglu` a function
  of up(x) stands for up(x). Products, activation and sums are in float32; the result is [1, D'] in
  the dtype of x. Not differentiable: see `expert_ffn`.

  Args:
    x_1D: the row, bfloat16 or float16.
    weights: matrices and biases of G experts, in the row's dtype, with widths for which there are
      `splits`.
    expert_C: int32, the expert of each choice; an id outside [0, G) adds nothing.
    weight_C: float32, factor of each choice's result; None: all are 1.
    how: see `Execution`; only `activation` is read.
  """
  groups, choices = weights.up_GDF.shape[0], expert_C.shape[0]
  divided = splits(weights.widths, choices)
  assert divided is not None
  made_C = (expert_C >= 0) & (expert_C < groups)
  scale_C = jnp.ones((choices,), jnp.float32) if weight_C is None else weight_C.astype(jnp.float32)
  pre_CPIF = _first_layer(x_1D, weights, expert_C, divided[0])
  y_CPD = _second_layer(pre_CPIF, weights, expert_C, scale_C, how.activation, divided[1])
  y_D = added_up(y_CPD.reshape(-1, y_CPD.shape[2]))
  if weights.down_bias_GD is not None:
    bias_CD = weights.down_bias_GD[jnp.where(made_C, expert_C, 0)].astype(jnp.float32)
    y_D = y_D + jnp.sum(jnp.where(made_C[:, None], bias_CD * scale_C[:, None], 0.0), axis=0)
  return y_D[None].astype(x_1D.dtype)


def _first_layer(x_1D, weights: FFNWeights, expert_C, own: Split):
  """Each choice's partial sums of the first layer, before the biases, in float32.

  The result is [C, P, I, F]; I counts the layer's matrices: 2 with a gate (gate, up), else 1.
  """
  matrices = weights.up_weights
  _, width, hidden = matrices[0].shape
  rows = width // own.parts

  def body(expert, x, *rest):
    *matrices, out, shared, barrier = rest
    choice, column, part = place()
    row = lambda k: x[0, k].astype(jnp.float32)
    start = begin_sums(matrices, one_of(expert[choice], matrices[0]), own, rows, row, column)
    store_sums(start(), out.at[choice, part], shared, barrier, own, column)

  run = kernel(body, expert_C.shape[0], len(matrices), hidden, own)
  return run(expert_C, x_1D, *matrices)


def _second_layer(
  pre_CPIF, weights: FFNWeights, expert_C, scale_C, activation: Activation, own: Split
):
  """Finishes the first layer, and computes each choice's partial sums of the second in float32.

  The result is [C, P, D']. The kernel adds up the first layer's partial sums, adds the biases and
  applies the activation. The second layer's sums lack the bias. They are multiplied by the choice's
  scale, and are 0 for a choice without an expert.
  """
  groups, hidden, out_width = weights.down_GFD.shape
  given = [b for b in weights.up_biases if b is not None]
  biased = [b is not None for b in weights.up_biases]
  rows, kind = hidden // own.parts, kernel_form(activation)

  def body(expert, scale, pre, matrix, *rest):
    *bias, out, shared, barrier, a, is_made = rest
    choice, column, part = place()
    own_expert, own_scale = expert[choice], scale[choice]  # the scale is used at the end
    group, wg = one_of(own_expert, matrix), lax.axis_index("wg")
    row = lambda f: a[wg, f - part * rows]
    # The second layer's weights arrive while the kernel computes the activation.
    start = begin_sums([matrix], group, own, rows, row, column)
    mine, bias, hs = pl.ds(part * rows, rows), iter(bias), []
    for i, has_bias in enumerate(biased):
      h = pre[choice, 0, i, mine]
      for p in range(1, pre.shape[1]):
        h = h + pre[choice, p, i, mine]
      hs.append(h + next(bias)[group, mine].astype(jnp.float32) if has_bias else h)
    a[wg] = activate(kind, tuple(hs))
    plgpu.barrier_arrive(is_made)
    plgpu.barrier_wait(is_made)
    made = (own_expert >= 0) & (own_expert < groups)
    sums = [s * own_scale for s in start()]
    sums = [jnp.where(jnp.broadcast_to(made, s.shape), s, jnp.zeros_like(s)) for s in sums]
    store_sums(sums, out.at[choice, part], shared, barrier, own, column)

  scratch = [plgpu.SMEM((WARPGROUPS, rows), jnp.float32), everyone()]
  run = kernel(body, expert_C.shape[0], 1, out_width, own, *scratch)
  return run(expert_C, scale_C, pre_CPIF, weights.down_GFD, *given)[:, :, 0]
