"""The position of each choice in its expert's queue: the order in which a buffer is filled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from scmoe.base.errors import ConfigError
from scmoe.base.options import check_choice
from scmoe.kernels.permute import running_positions
from scmoe.moe.options import ORDERS


def queue_positions(
  expert_TK: Int[Array, "T K"],
  num_experts: int,
  groups: int = 1,
  taken_TK: Bool[Array, "T K"] | None = None,
  *,
  order: str = "choice",
  priority_T: Float[Array, " T"] | None = None,
) -> tuple[Int[Array, "T K"], Int[Array, "G E"]]:
  """Position of every choice in the queue of its (group, expert), from 0, and the queues' lengths.

  Tokens are divided into G capacity groups of T/G consecutive tokens; each (group, expert) has a
  queue. Lengths and positions come from the same count, so that they agree in every order. (In
  Tutel's batch-prioritised routing they need not agree.)

  Worked example: three tokens a, b, c with two choices over three experts, one group, order
  `choice`; a -> 1@2 says that a choice of a has position 2 in the queue of expert 1.

      expert_TK   = [[0, 1], [0, 1], [1, 0]]
      first choices take positions first:   a -> 0@0   b -> 0@1   c -> 1@0
      then the second ones:                 a -> 1@1   b -> 1@2   c -> 0@2
      position_TK = [[0, 1], [1, 2], [0, 2]]    count_GE = [[3, 3, 0]]

  Args:
    expert_TK: int32 in [0, E).
    num_experts: E.
    groups: G; divides T.
    taken_TK: bool, True for choices that take a position and are counted; the positions of the
      others are arbitrary. None: all choices do.
    order: `choice`: within a group all first choices take positions before all second ones, and so
      on, each in the order of the tokens (GShard, Tutel). `priority`: the same with the tokens by
      falling `priority_T`, ties by index (Tutel batch_prioritized_routing). `token`: all choices of
      a token before those of the next token (MegaBlocks).
    priority_T: float, the tokens' largest probabilities; needed for `priority`, unused otherwise.

  Returns:
    position_TK int32, the positions, and count_GE int32, the lengths of the queues.

  Raises:
    ConfigError: T is not a multiple of G, or `order` is unknown.
    ValueError: `expert_TK` is not an array of integers.
  """
  check_choice("router.compat.order", order, ORDERS)
  tokens, _ = expert_TK.shape
  if tokens % groups:
    raise ConfigError(f"dispatch.groups={groups} does not divide the {tokens} tokens of a device")
  size = tokens // groups  # tokens of one group
  token_T1 = jnp.arange(tokens, dtype=jnp.int32)[:, None]
  queue_TK = (token_T1 // max(size, 1)) * num_experts + expert_TK
  if taken_TK is not None:
    queue_TK = jnp.where(taken_TK, queue_TK, groups * num_experts)
  if order == "token":
    position_TK, count_Q = running_positions(queue_TK, groups * num_experts)
  else:
    rank_T = None
    if order == "priority":
      assert priority_T is not None
      order_T, rank_T = _by_priority(priority_T, groups)
      queue_TK = queue_TK[order_T]
    position_KT, count_Q = running_positions(queue_TK.T, groups * num_experts)
    position_TK = position_KT.T if rank_T is None else position_KT.T[rank_T]
  return position_TK, count_Q.reshape(groups, num_experts)


def _by_priority(priority_T: Array, groups: int) -> tuple[Array, Array]:
  """The order of tokens by falling priority within their group, and its inverse: both int32 [T].

  Equal priorities keep the order of the tokens, and NaN comes last.

  Worked example, one group: of priorities .2, .9, .5 the order is [1, 2, 0]. Its inverse [2, 0, 1]
  says that token 0 comes last.
  """
  size = priority_T.size // groups
  falling_GT = -jax.lax.stop_gradient(priority_T).reshape(groups, size)
  order_GT = jnp.argsort(falling_GT, axis=1, stable=True)
  first_G1 = jnp.arange(groups, dtype=jnp.int32)[:, None] * size
  both = (order_GT + first_G1, jnp.argsort(order_GT, axis=1) + first_G1)
  order_T, rank_T = (a.reshape(-1).astype(jnp.int32) for a in both)
  return order_T, rank_T
