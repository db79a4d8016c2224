"""The transport without an exchange: it leaves tokens on their device, for all experts.

It serves where the expert axis has one device, or where each device gathers all experts' matrices
(`dispatch.adaptive_r=0`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from scmoe.base.options import check_type
from scmoe.kernels.grouped_matmul import RowLayout, choices_layout, sorted_layout
from scmoe.kernels.permute import (
  Permutation,
  gather_rows,
  make_permutation,
  running_positions,
  sum_chunks,
  weigh_rows,
)
from scmoe.moe.types import Dispatched, Routing


@dataclasses.dataclass(frozen=True)
class Local:
  """The transport that leaves tokens on their device: it exchanges nothing and drops nothing.

  The experts themselves gather rows, and add up each token's outputs, so this class keeps no array
  with a row of width D for each choice. The exception is `input_weight_TK`: weights that multiply
  the experts' input need a row for each choice, which `dispatch` gathers; `combine` then adds up
  the outputs.
  """

  def dispatch(
    self, x_TD: Float[Array, "T D"], routing: Routing, experts: Any = None
  ) -> Dispatched:
    """The tokens themselves, or weighted rows sorted by expert; see `Transport.dispatch`.

    With the tokens, the layout names the experts of each token's taken choices, and their weights.
    If weights multiply the experts' input, the result has a weighted row for each taken choice
    instead, these rows are sorted by expert, and zeros fill the rest.
    """
    del experts
    check_type("routing", routing, Routing)
    one, none = jnp.ones((), jnp.int32), jnp.zeros((), jnp.int32)
    expert_TK = jnp.where(routing.taken_TK, routing.expert_TK, routing.num_experts)
    if routing.input_weight_TK is None:
      layout = choices_layout(expert_TK, routing.weight_TK, routing.num_experts)
      return Dispatched((x_TD,), (layout,), none, one)
    rows_RD, layout, permutation = weighted_rows(
      x_TD, expert_TK, routing.input_weight_TK, routing.num_experts
    )
    return Dispatched((rows_RD,), (layout,), none, one, (permutation,), routing.weight_TK)

  def combine(self, sent: Dispatched) -> Float[Array, "T D"]:
    """For each token, the sum of its experts' outputs: [T, D].

    The experts have computed it already, with the choices' weights, unless weights multiply their
    input.
    """
    check_type("sent", sent, Dispatched)
    if not sent.permutations:
      return sent.rows[0]
    return sum_chunks(sent.rows, sent.weight_TK, sent.permutations)


def weighted_rows(
  x_TD: Array, expert_TK: Array, weight_TK: Array, num_experts: int
) -> tuple[Array, RowLayout, Permutation]:
  """A weighted row for each choice, sorted by expert, where weights multiply the experts' input.

  Args:
    x_TD: the tokens.
    expert_TK: int32, their choices; `num_experts` for none.
    weight_TK: the factor of each choice's row.
    num_experts: E.

  Returns:
    The rows [T·K, D], with zeros behind those of all choices; their layout; and which choice fills
    which row.
  """
  position_TK, count_E = running_positions(expert_TK, num_experts)
  # A choice that is none gets a row number past the last row, so the permutation gives it no row.
  start_E1 = jnp.append(jnp.cumsum(count_E) - count_E, expert_TK.size)
  permutation = make_permutation(start_E1[expert_TK] + position_TK, expert_TK.size)
  rows_RD = weigh_rows(gather_rows(x_TD, permutation), weight_TK, permutation)
  return rows_RD, sorted_layout(count_E, expert_TK.size), permutation
