"""The values that pass between the four stages: route -> dispatch -> experts -> combine."""

from __future__ import annotations

import dataclasses

import jax
from jax import Array

ABSENT = 2**30  # the place of a choice that is not made


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
  """Where every token of this device goes, and with which weight.

  Tokens are divided into G capacity groups of T/G consecutive tokens. Each (group, expert) has a
  queue; a choice's *place* is its position in that queue. Places take no account of capacity: a
  transport that bounds its buffers drops what stands behind the bound.

  Attributes:
    expert_TK: int32, the chosen experts, best first.
    weight_TK: float32, the combine weight of each choice.
    place_TK: int32, place of each choice in its queue, from 0; `ABSENT` for a choice that is not
      made (token rounding), which stands at the end of `order_R` and counts nowhere.
    order_R: int32 [T·K], flat choices t·K + k sorted by (group, expert, place).
    count_GE: int32, length of every queue, before anything is dropped.
    probs_TE: float32, softmax over all experts (of noisy logits where there is noise).
    logits_TE: float32, the gate's scores before the softmax.
    live_T: bool, False for masked tokens: they choose nothing and count nowhere.
    input_weight_TK: float32, multiplies the rows before the experts, instead of `weight_TK`, which
      is then 1; None where weights come after the experts.
    present_TK: bool, choices that are made; None where all are (no token rounding).
    importance_E, soft_load_E: sums of the load-importance loss; None unless it is asked for.
  """

  expert_TK: Array
  weight_TK: Array
  place_TK: Array
  order_R: Array
  count_GE: Array
  probs_TE: Array
  logits_TE: Array
  live_T: Array
  input_weight_TK: Array | None = None
  present_TK: Array | None = None
  importance_E: Array | None = None
  soft_load_E: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
  """Rows that this device's experts compute.

  Attributes:
    rows: [W, e, R, D] with equal room for every expert, in the order of the W devices that sent
      them, or [R, D] with group sizes. Rows that nobody sent are zero.
    group_sizes_e: int32, rows of each expert in the second form; None in the first.
    place_R: int32, of the second form after an exchange, whose rows stay in the order of their
      senders: where each stands in the order of the experts, R for a row that nobody sent. None
      where they lie in that order.
  """

  rows: Array
  group_sizes_e: Array | None = None
  place_R: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
  """Tokens that stay where they are, because all experts are here: no row is copied.

  The experts read each token through its choices, and leave Σ_k weight · expert(token) in its
  place.

  Attributes:
    rows: [T, D].
    expert_TK: int32, experts of each token; E for a choice that is not made, which adds nothing.
    weight_TK: float32, combine weights.
  """

  rows: Array
  expert_TK: Array
  weight_TK: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatched:
  """Rows at their experts, and what combine needs to bring them back.

  Attributes:
    chunks: the rows, in as many parts as the exchange is pipelined over.
    dropped: int32 scalar, number of choices that found no place.
    rounds: int32 scalar, exchanges that the dropless transport needs; 1 for `capacity`.
    slot_TK: int32, index of each choice's row in this device's send buffer; the length of the
      buffer marks a choice that is not in it. None for `Tokens`, which have no way back.
    source_R: int32, the flat choice t·K + k that fills each row of the send buffer; T·K where none.
      None for `Tokens`.
    received_We: int32, choices that each peer has for each local expert in all rounds; None where
      one round is all there is.
  """

  chunks: tuple[Rows | Tokens, ...]
  dropped: Array
  rounds: Array
  slot_TK: Array | None = None
  source_R: Array | None = None
  received_We: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterSums:
  """Sums over tokens from which every routing loss and statistic follows.

  All are additive over devices and microbatches, so that a loss over the global batch needs one
  reduction per step, not one per layer. float32 throughout.

  Attributes:
    tokens: number of live tokens.
    choices: number of live choices, tokens · K.
    dropped: choices that found no place.
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
