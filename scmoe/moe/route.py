"""Computes the `Routing` of tokens: their scores, the experts they choose, and the weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from scmoe.moe.options import RouterConfig
from scmoe.moe.rounding import rounded_choice, warn_not_causal
from scmoe.moe.scores import Draws, Gate, Scores, score
from scmoe.moe.types import Routing
from scmoe.moe.weights import choice_weights


def route(
  x_TD: Float[Array, "T D"],
  gate: Gate,
  config: RouterConfig = RouterConfig(),
  *,
  k: int,
  num_experts: int | None = None,
  mask_T: Bool[Array, " T"] | None = None,
  bias_E: Float[Array, " E"] | None = None,
  training: Draws | None = None,
  zero_experts: int = 0,
) -> Routing:
  """Chooses k experts for every token (token rounding: more or fewer), and their weights.

  With the default options and k > 1, choice and weights are those of paper Eq. 1-4. In the paper
  the softmax comes after the choice; here, as in Tutel, the scores come before it, so that the gate
  can get a gradient for k = 1 too (see `choice_weights`).

  With `router.compat.uniform` the experts come in turn, whatever their scores are; the weights are
  those of the k experts that the gate would choose.

  NaN or infinite logits raise no error: the token's experts stay valid indices, and
  `RouterSums.nonfinite` counts the token if it is not masked. For such a token, a NaN logit, or one
  of +inf under a softmax, makes all probabilities NaN (`probs_TE`). Weights of taken choices
  become NaN too, unless they come from the chosen experts' logits or sigmoids alone
  (`choice_weights`) and the choice passes over the expert with that logit (`Scores.best` and
  `gate_top_k` say which experts are chosen). With sigmoids that are divided by no sum or norm, only
  that expert's weight does. NaN weights, or NaN probabilities in a balancing loss, can make the
  loss NaN; the training step then skips its update.

  Args:
    x_TD: the tokens of this device. T = 0 gives empty arrays and counts of 0.
    gate: a `scmoe.moe.gates.Gate`, or the weights [D, E] of a linear one.
    config: the router's options.
    k: experts per token.
    num_experts: E, the number of scores that the gate must return; None: any number.
    mask_T: False for tokens that take no part; all do if None.
    bias_E: balancing bias, added for the choice only (`config.bias`).
    training: random draws in training; None otherwise. In training, scores, choice and weights
      follow the noisy logits, and token rounding (`config.compat.round_to`) applies: K grows to
      hold the experts that a token gains, and choices that are not made have weight 0.
    zero_experts: number of zero experts, the last ones of the E, which return their input.

  Returns:
    The routing, with K = k; where token rounding applies, with K = k + min(k, E - k).

  Raises:
    ConfigError: the tokens, the gate, the mask, k or `config` have the wrong type, or the tokens,
      the gate's weights, the mask or the bias the wrong shape; k is below 1, or larger than the
      number of experts or of those in open groups; the gate returns the wrong shape or type; or, in
      training, the rounding tile is larger than T and T is not 0.
  """
  scores = score(x_TD, gate, config, k, num_experts, mask_T, training)
  chosen_TK = scores.best(k, bias_E)
  compat, made_TK = config.compat, None
  if compat.round_to and training is not None:
    warn_not_causal()
    chosen_TK, made_TK = rounded_choice(scores.probs_TE, chosen_TK, compat.round_to, mask_T)
  weight_TK = choice_weights(scores, chosen_TK, config, normalise=config.normalise and k > 1,
                             made_TK=made_TK)  # fmt: skip
  if compat.uniform:
    # The weights stay those of the gate's own choice, so that the gate gets its gradient.
    turn = jnp.arange(chosen_TK.size, dtype=jnp.int32) % scores.num_experts
    chosen_TK = turn.reshape(chosen_TK.shape)
  routing = _routing(scores, chosen_TK, weight_TK, config, k, made_TK)
  return dataclasses.replace(routing, zero_experts=zero_experts)


def route_distinct(
  x_TD: Float[Array, "T D"],
  gate: Gate,
  config: RouterConfig,
  previous_T: Int[Array, " T"],
  *,
  num_experts: int | None = None,
  mask_T: Bool[Array, " T"] | None = None,
  bias_E: Float[Array, " E"] | None = None,
  training: Draws | None = None,
  zero_experts: int = 0,
) -> Routing:
  """Top-1 routing that avoids each token's previous expert (DGMoE's distinctness constraint, A.2).

  A token takes its best expert, or the second best if the best is `previous_T`, the expert that its
  preceding representation has chosen. The weight is that of `route` with k = 1: the score of the
  expert taken, not divided by a sum; `router.compat.weight_norm` and `router.routed_scaling_factor`
  apply. Token rounding and `router.compat.uniform` do not: they would break the constraint. Other
  arguments, result and errors are those of `route` with K = 1, but the gate has to score two
  experts at least, and open groups to hold as many.
  """
  scores = score(x_TD, gate, config, 2, num_experts, mask_T, training)
  best_T2 = scores.best(2, bias_E)
  taken_T1 = (best_T2[:, :1] == previous_T[:, None]).astype(jnp.int32)
  chosen_T1 = jnp.take_along_axis(best_T2, taken_T1, 1)
  weight_T1 = choice_weights(scores, chosen_T1, config, normalise=False)
  routing = _routing(scores, chosen_T1, weight_T1, config, 1, None)
  return dataclasses.replace(routing, zero_experts=zero_experts)


# -- the `Routing` of a choice --------------------------------------------------------------------


def _routing(
  scores: Scores,
  chosen_TK: Array,
  weight_TK: Array,
  config: RouterConfig,
  k: int,
  made_TK: Array | None,
) -> Routing:
  extra: dict[str, Any] = {}
  if config.balance == "load_importance":
    extra = soft_load(scores.clean_TE, scores.logits_TE, k, config.noise, scores.mask_T)
  options = {"mask_T": scores.mask_T, "made_TK": made_TK, "weights": config.compat.weights}
  return make_routing(chosen_TK, weight_TK, scores.probs_TE, scores.logits_TE, **options, **extra)


def make_routing(
  expert_TK: Array,
  weight_TK: Array,
  probs_TE: Array,
  logits_TE: Array,
  *,
  mask_T: Array | None = None,
  made_TK: Array | None = None,
  weights: str = "after",
  **sums: Any,
) -> Routing:
  """The `Routing` of chosen experts: weights of masked tokens become 0, taken choices are counted.

  Args:
    expert_TK, weight_TK, probs_TE, logits_TE: see `Routing`.
    mask_T, made_TK: see `Routing`; None: all tokens take part, all choices are made.
    weights: `after`: weights multiply the experts' output; `before`: they multiply the experts'
      input, become `input_weight_TK`, and `weight_TK` is 1.
    **sums: `importance_E` and `soft_load_E` of `Routing`.
  """
  tokens, num_experts = probs_TE.shape
  if mask_T is not None:
    weight_TK = jnp.where(mask_T[:, None], weight_TK, 0)
  input_weight_TK = None
  if weights == "before":
    input_weight_TK, weight_TK = weight_TK, jnp.ones_like(weight_TK)
  routing = Routing(
    expert_TK=expert_TK,
    weight_TK=weight_TK,
    count_E=jnp.zeros(num_experts, jnp.int32),
    probs_TE=probs_TE,
    logits_TE=logits_TE,
    mask_T=jnp.ones(tokens, bool) if mask_T is None else mask_T,
    input_weight_TK=input_weight_TK,
    made_TK=made_TK,
    **sums,
  )
  # Choices are counted by comparing each with all E ids, [T, K, E]: XLA fuses that into one
  # reduction. In a scatter-add all tokens would wait for the same few counters.
  chose_TKE = expert_TK[:, :, None] == jnp.arange(num_experts, dtype=expert_TK.dtype)
  count_E = (chose_TKE & routing.taken_TK[:, :, None]).sum((0, 1), dtype=jnp.int32)
  return dataclasses.replace(routing, count_E=count_E)


def soft_load(
  clean_TE: Array, logits_TE: Array, k: int, noise: float, mask_T: Array | None = None
) -> dict[str, Array]:
  """The experts' importance and soft load, from which the load-importance loss is computed.

  importance_E = Σ_t p_t and soft_load_E = Σ_t Φ((p_t − θ_t) / (noise / E)), where p is the softmax
  of the logits without noise, θ_t the token's k-th largest logit *with* noise and Φ the standard
  normal distribution function. The published definition does compare a probability with a logit
  (Tutel load_importance_loss, the Swin-MoE design). Gradients flow through p and θ.

  Args:
    clean_TE: logits without noise.
    logits_TE: logits with noise; without it outside training.
    k: experts per token.
    noise: `router.noise`; must not be 0.
    mask_T: False for tokens that do not count; None: all count.

  Returns:
    `importance_E` and `soft_load_E`, as `Routing` names them.
  """
  probs_TE = jax.nn.softmax(clean_TE)
  threshold_T1 = jax.lax.top_k(logits_TE, k)[0][:, -1:]
  soft_TE = jax.scipy.stats.norm.cdf((probs_TE - threshold_T1) * (logits_TE.shape[1] / noise))
  if mask_T is not None:
    probs_TE, soft_TE = (jnp.where(mask_T[:, None], a, 0) for a in (probs_TE, soft_TE))
  return {"importance_E": probs_TE.sum(0), "soft_load_E": soft_TE.sum(0)}
