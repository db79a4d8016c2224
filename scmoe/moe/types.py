"""The values that a MoE layer's stages (route, dispatch, experts, combine) pass on or return."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from scmoe.kernels.grouped_matmul import RowLayout
from scmoe.kernels.permute import Permutation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
  """Which experts each token of this device visits, with which weights, and all experts' scores.

  A *choice* (t, k) is one expert of token t. `route` knows no buffers: the transport decides which
  row of a buffer a choice gets, and what becomes of a choice without room. Floats are float32, or
  float64 if the logits are.

  Attributes:
    expert_TK: int32, the chosen experts, best first. Three exceptions: `router.compat.uniform`
      takes the experts in turn; token rounding puts the experts that it adds behind the others; and
      `computed` puts expert 0 in place of a zero expert.
    weight_TK: the weight of each choice, which multiplies its expert's output; 0 for masked tokens.
      If `input_weight_TK` holds the weights, `route` sets all of these to 1.
    count_E: int32, number of choices of each expert that are taken (`taken_TK`).
    probs_TE: each token's scores of all experts, divided by their sum; of the noisy logits where
      there is noise.
    logits_TE: the gate's scores before softmax or sigmoid, noise included.
    mask_T: bool, False for masked tokens: none of their choices is taken or counted.
    input_weight_TK: the weight of each choice where weights multiply the experts' input rows. None:
      `weight_TK` multiplies the experts' output.
    made_TK: bool, False for a choice that was taken out: token rounding or `Packed` has dropped it,
      token rounding has added no expert in this column, or `computed` has taken out the choice of a
      zero expert. Token rounding and `Packed` also set it to False for masked tokens. None: all
      choices are made.
    importance_E, soft_load_E: sums of the load-importance loss (`scmoe.moe.route.soft_load`); None
      with other losses.
    zero_experts: number of zero experts, which return their input and get no rows. They have the
      last ids, E - zero_experts to E - 1.
  """

  expert_TK: Int[Array, "T K"]
  weight_TK: Float[Array, "T K"]
  count_E: Int[Array, " E"]
  probs_TE: Float[Array, "T E"]
  logits_TE: Float[Array, "T E"]
  mask_T: Bool[Array, " T"]
  input_weight_TK: Float[Array, "T K"] | None = None
  made_TK: Bool[Array, "T K"] | None = None
  importance_E: Float[Array, " E"] | None = None
  soft_load_E: Float[Array, " E"] | None = None
  zero_experts: int = dataclasses.field(default=0, metadata={"static": True})

  @property
  def num_experts(self) -> int:
    """Number of experts that compute: all but the zero experts."""
    return self.probs_TE.shape[1] - self.zero_experts

  @property
  def zero_TK(self) -> Bool[Array, "T K"]:
    """True for choices of zero experts."""
    return self.expert_TK >= self.num_experts

  @property
  def zero_weight_T(self) -> Float[Array, " T"]:
    """For each token, the sum of the weights of its taken choices of zero experts.

    The layer adds the token, times this sum, to the layer's output.
    """
    weight_TK = self.weight_TK if self.input_weight_TK is None else self.input_weight_TK
    return jnp.where(self.zero_TK & self.taken_TK, weight_TK, 0).sum(1)

  @property
  def computed(self) -> Routing:
    """The routing that a transport reads, without the zero experts; `self` if it has none.

    A choice of a zero expert becomes a choice of expert 0 that is not made and has weight 0;
    `count_E` then has an entry for each of the `num_experts` computing experts only; `probs_TE` and
    `logits_TE` keep all E.
    """
    if not self.zero_experts:
      return self
    zero_TK, weight_TK = self.zero_TK, self.input_weight_TK
    return dataclasses.replace(
      self,
      expert_TK=jnp.where(zero_TK, 0, self.expert_TK),
      weight_TK=jnp.where(zero_TK, 0, self.weight_TK),
      input_weight_TK=None if weight_TK is None else jnp.where(zero_TK, 0, weight_TK),
      made_TK=~zero_TK if self.made_TK is None else self.made_TK & ~zero_TK,
      count_E=self.count_E[: self.num_experts],
    )

  @property
  def taken_TK(self) -> Bool[Array, "T K"]:
    """True for choices that are made and whose token is not masked."""
    if self.made_TK is None:
      return self.mask_T[:, None].repeat(self.expert_TK.shape[1], 1)
    return self.mask_T[:, None] & self.made_TK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatched:
  """The rows that this device's experts compute, what `combine` needs beside them, and two counts.

  Attributes:
    rows: the rows, one array for each chunk (`dispatch.chunks`), from `Local` one array in all; for
      `combine` the experts' outputs in their place.
    layouts: for each chunk, the expert of each row. If tokens stay in place (`Local`) or travel
      once to each rank (`PerRank`), and weights multiply the experts' output, a row is a token, and
      the layout names the experts it chose.
    dropped: int32 scalar, how many choices of this device the transport dropped; those that
      `dispatch.ablation.first_round` leaves out do not count.
    rounds: int32 scalar, 1 + the number of overflow rounds; if `dispatch.ablation.first_round`
      leaves them out, 1 + the number that would be needed. Of the transports here, `Dropless` has
      such rounds, and `PerRank`, `Put` and `Packed`, which are built on it.
    permutations: for each chunk, which choice of this device fills which row of its send buffer, or
      with `Local` of its rows sorted by expert. `PerRank` counts a token as a choice of each rank.
      Empty where tokens stay in place (`Local`) and the experts add up each token's choices.
    weight_TK: combine weights that `combine` applies; None where the experts apply them.
    overflow_TD: the overflow rounds' part of the output, in the tokens' type, 0 if no round was
      needed. None if the program has no overflow rounds, because none can be needed or because
      `dispatch.ablation.first_round` leaves them out; and None while `queues` still waits.
    queues: the queues (such as `dropless.Queues`) from which overflow rounds have yet to send; None
      if the program has no such rounds, or they have run.
    plans: from `Put`, for each chunk what `combine` needs beside rows and permutation; from
      `PerRank`, if weights multiply the experts' input, which choice fills which of the rows; from
      `PerRank` otherwise and from `Dropless`, also within `Packed`, None for each chunk; else
      empty.
  """

  rows: tuple[Array, ...]
  layouts: tuple[RowLayout, ...]
  dropped: Array
  rounds: Array
  permutations: tuple[Permutation, ...] = ()
  weight_TK: Array | None = None
  overflow_TD: Array | None = None
  queues: Any = None
  plans: tuple[Any, ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterSums:
  """Sums, most of them over tokens, that give routing losses, statistics and balancing biases.

  The arrays are additive over devices, microbatches and the gatings of a block pair, so that one
  reduction serves all layers and all microbatches that run side by side. (A *gating* is one choice
  of experts for all tokens; DGMoE makes two in a unit.) The arrays have the shape [] or [E], with
  the layers in front where the model has stacked them. They are float32; sums of float64 logits or
  probabilities are float64. A token counts once for each gating, and a masked token not at all.
  `shortcut_square` and `main_square` differ: they count every token, masked or not, once for each
  unit of the pair, however many gatings the unit has.

  Attributes:
    tokens: number of tokens.
    choices: Σ_e load_e: tokens · K, unless token rounding, or `losses.computing`, changes the
      number.
    dropped: number of choices that the transport dropped (`Dispatched.dropped`).
    rounds, shards: Σ of `Dispatched.rounds` over devices, microbatches and gatings, and the number
      of addends in this sum, so that rounds / shards is their mean.
    load_E: number of taken choices of each expert, before the transport drops any.
    first_E: for each expert, the number of tokens whose first choice it is, made or not.
    probs_E: Σ_t probs_te, for each expert e.
    z_square: Σ_t logsumexp(logits_t)².
    entropy: Σ_t H(probs_t), nats.
    confidence: Σ_t max_e probs_te.
    logit_square: Σ_t mean_e logits_te².
    importance_E, soft_load_E: the sums of `scmoe.moe.route.soft_load`; zero unless `router.balance`
      is load_importance.
    nonfinite: number of tokens with a logit that is NaN or infinite.
    shortcut_square, main_square: Σ_t |routed output|², of all gatings of a unit together, and
      Σ_t |main path|², for their ratio; the block pair sets them, a layer alone leaves 0.
    zero_experts: number of zero experts, which have the last of the E ids; not a sum.
  """

  tokens: Array
  choices: Array
  dropped: Array
  rounds: Array
  shards: Array
  load_E: Array
  first_E: Array
  probs_E: Array
  z_square: Array
  entropy: Array
  confidence: Array
  logit_square: Array
  importance_E: Array
  soft_load_E: Array
  nonfinite: Array
  shortcut_square: Array
  main_square: Array
  zero_experts: int = dataclasses.field(default=0, metadata={"static": True})
