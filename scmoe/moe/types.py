"""The values that pass between the four stages: route -> dispatch -> experts -> combine."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from scmoe.kernels.grouped_matmul import RowLayout
from scmoe.kernels.permute import Permutation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
  """Which experts every token of this device visits, and with which weight.

  Nothing here depends on buffers: where a choice's row stands, and whether it finds room, is the
  transport's business.

  Attributes:
    expert_TK: int32, the chosen experts, best first.
    weight_TK: float32, the combine weight of each choice.
    count_E: int32, choices of each expert, before anything is dropped.
    probs_TE: float32, softmax over all experts (of noisy logits where there is noise).
    logits_TE: float32, the gate's scores before the softmax.
    mask_T: bool, False for masked tokens: they choose nothing and count nowhere.
    input_weight_TK: float32, multiplies the rows before the experts, instead of `weight_TK`, which
      is then 1; None where weights come after the experts.
    made_TK: bool, choices that are made; None where all are (no token rounding).
    importance_E, soft_load_E: sums of the load-importance loss; None unless it is asked for.
    zero_experts: how many of the E, the last ones, return their input; they have no rows.
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
    """Experts that compute."""
    return self.probs_TE.shape[1] - self.zero_experts

  @property
  def zero_TK(self) -> Bool[Array, "T K"]:
    """Choices of zero experts."""
    return self.expert_TK >= self.num_experts

  @property
  def zero_weight_T(self) -> Float[Array, " T"]:
    """The share of a token's own value in its output: its zero experts' weights, float32."""
    weight_TK = self.weight_TK if self.input_weight_TK is None else self.input_weight_TK
    return jnp.where(self.zero_TK & self.taken_TK, weight_TK, 0).sum(1)

  @property
  def computed(self) -> Routing:
    """This routing as a transport reads it: choices of zero experts count as not made."""
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
    """Choices that count: made, and not of a masked token."""
    if self.made_TK is None:
      return self.mask_T[:, None].repeat(self.expert_TK.shape[1], 1)
    return self.mask_T[:, None] & self.made_TK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatched:
  """Rows at their experts, and what combine needs to bring them back.

  Attributes:
    rows: the rows, in as many chunks as the exchange has parts.
    layouts: for each chunk, which experts its rows are for.
    dropped: int32 scalar, number of choices that found no room.
    rounds: int32 scalar, exchanges that the dropless transport needs; 1 for the others.
    permutations: for each chunk, which choice of this device fills which row of its send buffer.
      Empty where tokens stay in place (`Local`) and the experts add up each token's choices.
    weight_TK: combine weights that `combine` applies; None where the experts have applied them.
    overflow_TD: the overflow rounds' part of the output; None without such rounds.
  """

  rows: tuple[Array, ...]
  layouts: tuple[RowLayout, ...]
  dropped: Array
  rounds: Array
  permutations: tuple[Permutation, ...] = ()
  weight_TK: Array | None = None
  overflow_TD: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterSums:
  """Sums over tokens from which every routing loss and statistic follows.

  All are additive over devices and microbatches, so that one reduction serves all layers and all
  microbatches that run side by side. float32 throughout.

  Attributes:
    tokens: number of tokens that are not masked.
    choices: number of choices that are made, tokens · K.
    dropped: choices that found no room.
    rounds: exchanges of the transport, the most of any device; shards: number of addends, so that
      rounds / shards is their mean.
    load_E: choices per expert, before dropping.
    first_E: first choices per expert.
    probs_E: Σ_t probs.
    z_square: Σ_t logsumexp(logits)².
    entropy: Σ_t H(probs_t), nats.
    confidence: Σ_t max probs.
    logit_square: Σ_t mean_e logits².
    importance_E: Σ_t probs without noise; zero unless asked for.
    soft_load_E: Σ_t Φ((probs - logit of the K-th choice) / (noise / E)); zero unless asked for.
    nonfinite: tokens with a logit that is NaN or infinite.
    shortcut_square, main_square: Σ_t |routed output|² and Σ_t |main path|², for their ratio.
    zero_experts: how many of the E, the last ones, return their input.
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
