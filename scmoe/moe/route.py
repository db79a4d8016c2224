"""Computes the `Routing` of tokens: their scores, the experts they choose, and the weights."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from scmoe.base.errors import ConfigError
from scmoe.base.options import check_type
from scmoe.kernels.top_k import GateOutput, gate_product
from scmoe.moe.gates import check_logits, compute_dtype
from scmoe.moe.options import RouterConfig
from scmoe.moe.types import Routing

Gate = Callable[[Array], Array] | Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
  """The gate's random noise and jitter in training, for the tokens of this device.

  `MoE` draws them for the global batch, so that they do not depend on the mesh.

  Attributes:
    noise_TE: float32, standard normal; None without `router.noise`.
    jitter_TD: float32 factors that multiply the gate's input elementwise; None without
      `router.compat.jitter`.
  """

  noise_TE: Float[Array, "T E"] | None = None
  jitter_TD: Float[Array, "T D"] | None = None


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

  The choice and the weights are those of paper Eq. 1-4 (see `choice_weights`). In the paper the
  softmax comes after the choice; here, as in Tutel, the scores come before it.

  NaN or infinite logits raise no error: the token's experts stay valid indices, and
  `RouterSums.nonfinite` counts the token. A NaN logit, or one of +inf under a softmax, makes the
  token's weights and so the loss NaN; the training step then skips its update.

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
    The routing, with K = k, or more with token rounding.

  Raises:
    ConfigError: an argument has the wrong type or shape; k is below 1, or larger than the number
      of experts or of those in open groups; the gate returns the wrong shape or type; or, in
      training, the rounding tile is larger than T.
  """
  scores = _score(x_TD, gate, config, k, num_experts, mask_T, training)
  chosen_TK = scores.best(k, bias_E)
  compat, made_TK = config.compat, None
  if compat.round_to and training is not None:
    _warn_rounding()
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

  A token takes its best expert, or the second best if the best is `previous_T`, the expert that the
  token chose in the preceding representation. The weight is that of `route` with k = 1: the score
  of the expert taken, not divided by a sum. Token rounding and `router.compat.uniform` do not
  apply: they would break the constraint. Other arguments, result and errors are those of `route`
  with K = 1, but the gate has to score two experts at least, and open groups to hold as many.
  """
  scores = _score(x_TD, gate, config, 2, num_experts, mask_T, training)
  best_T2 = scores.best(2, bias_E)
  taken_T1 = (best_T2[:, :1] == previous_T[:, None]).astype(jnp.int32)
  chosen_T1 = jnp.take_along_axis(best_T2, taken_T1, 1)
  weight_T1 = choice_weights(scores, chosen_T1, config, normalise=False)
  routing = _routing(scores, chosen_T1, weight_T1, config, 1, None)
  return dataclasses.replace(routing, zero_experts=zero_experts)


# -- the gate's scores ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scores:
  """A gate's logits for every token, and the scores and choices that follow from them.

  Attributes:
    logits_TE: the gate's logits, at least float32; in training `router.noise` is added.
    clean_TE: the logits without noise.
    mask_T: bool, False for tokens that take no part; None: all take part.
    config: options of the router: how scores are made of logits, and how experts form groups.
    best_TK: int32, the experts with the largest logits, if the gate's `top_k` has found them; None
      otherwise.
    share_TK: the softmax probabilities of `best_TK`, if `top_k` has computed them too, or None.
  """

  logits_TE: Array
  clean_TE: Array
  mask_T: Array | None
  config: RouterConfig
  best_TK: Array | None = None
  share_TK: Array | None = None

  @property
  def num_experts(self) -> int:
    """E, the number of experts that the gate scores, zero experts included."""
    return self.logits_TE.shape[1]

  @property
  def independent(self) -> bool:
    """Whether a score is the sigmoid of the expert's own logit; then scores do not add up to 1."""
    return self.config.scoring_func == "sigmoid"

  @functools.cached_property
  def scores_TE(self) -> Array:
    """The experts' scores: the softmax of each token's logits, or the sigmoid of each logit.

    The weights of choices are taken from these scores.
    """
    return jax.nn.sigmoid(self.logits_TE) if self.independent else jax.nn.softmax(self.logits_TE)

  @functools.cached_property
  def probs_TE(self) -> Array:
    """Each token's scores, divided by their sum where they are sigmoids (DeepSeek-V3, Eq. 19).

    Losses, statistics, token rounding and the order `priority` read these probabilities.
    """
    scores_TE = self.scores_TE
    return scaled_weights(scores_TE, True) if self.independent else scores_TE

  def best(self, k: int, bias_E: Array | None = None) -> Array:
    """Each token's k best experts by logit, score or score + bias, best first: int32 [T, K].

    They are ordered by the logits, which have the order of the scores; with a balancing bias by
    score + bias; with groups of experts and no bias by the score. If these values are equal, the
    expert with the smaller index comes first. `jax.lax.top_k` takes NaN for the largest value, so
    the experts are valid indices whatever the logits are. With groups (`router.n_group` > 1) only
    experts of a token's `router.topk_group` best groups are chosen; these groups are called open.

    Raises:
      ConfigError: the bias has the wrong shape, or the open groups hold fewer than k experts.
    """
    if bias_E is None and self.config.n_group == 1:
      if self.best_TK is not None:
        return self.best_TK
      score_TE = jax.lax.stop_gradient(self.logits_TE)
    else:
      if bias_E is not None and bias_E.shape != (self.num_experts,):
        raise ConfigError(
          f"the balancing bias has shape {list(bias_E.shape)}, the router chooses from "
          f"{self.num_experts} experts: it needs [{self.num_experts}]"
        )
      score_TE = jax.lax.stop_gradient(self.scores_TE)
      score_TE = score_TE if bias_E is None else score_TE + jax.lax.stop_gradient(bias_E)
      score_TE = _closed_groups_masked(score_TE, self.config, k)
    return jax.lax.top_k(score_TE, k)[1].astype(jnp.int32)


def _closed_groups_masked(score_TE: Array, config: RouterConfig, k: int) -> Array:
  """Scores with -inf for experts outside each token's open groups (DeepSeek-V2, -V3).

  With one group the scores stay as they are. Worked example, four experts in two groups of which
  one is open, `group_score="max"`: the biased scores -1.2 -1.4 | -1.1 -1.5 open the second group
  and become -inf -inf | -1.1 -1.5. A finite fill such as 0 would win against every negative score.

  Raises:
    ConfigError: k is larger than the number of experts in the open groups.
  """
  groups, size = config.n_group, score_TE.shape[1] // config.n_group
  if groups == 1:
    return score_TE
  if k > size * config.topk_group:
    raise ConfigError(
      f"{k} experts per token are more than the {size * config.topk_group} of the open groups: "
      f"router.topk_group={config.topk_group} of router.n_group={groups}, {size} experts each; "
      "raise router.topk_group, or choose fewer experts"
    )
  score_TGE = score_TE.reshape(score_TE.shape[0], groups, size)
  best = jax.lax.top_k(score_TGE, {"top2": 2, "max": 1}[config.group_score])[0]
  open_TK = jax.lax.top_k(best.sum(-1), config.topk_group)[1]
  open_TG = (open_TK[:, :, None] == jnp.arange(groups)).any(1)
  return jnp.where(open_TG[:, :, None], score_TGE, -jnp.inf).reshape(score_TE.shape)


def _score(
  x_TD: Array,
  gate: Gate,
  config: RouterConfig,
  k: int,
  num_experts: int | None,
  mask_T: Array | None,
  training: Draws | None,
) -> Scores:
  """Runs the gate on the tokens, with jitter and noise if both `config` and `training` have them.

  Jitter multiplies the tokens that the gate reads; noise is added to its logits. A gate with a
  method `top_k` also finds the k best experts, unless noise changes their order. Arguments and
  errors are those of `route`.
  """
  draws = training or Draws()
  _check_arguments(x_TD, gate, config, k, num_experts, mask_T)
  if mask_T is not None:
    # Masked tokens may hold anything. The gate's gradient multiplies them by zero, and zero times
    # NaN is NaN, so they are set to zero here.
    x_TD = jnp.where(mask_T[:, None], x_TD, 0)
  if draws.jitter_TD is not None and config.compat.jitter:
    dtype = compute_dtype(x_TD, config.compat.fp32_gate)
    x_TD = x_TD.astype(dtype) * draws.jitter_TD.astype(dtype)
  noise_TE = draws.noise_TE if config.noise else None
  best_TK = share_TK = None
  if noise_TE is None and hasattr(gate, "top_k"):
    found: Any = gate.top_k(x_TD, k)  # pyright: ignore[reportAttributeAccessIssue]
    clean_TE, best_TK, share_TK = GateOutput(*found)
  elif callable(gate):
    clean_TE = gate(x_TD)
  else:
    clean_TE = gate_product(x_TD, gate, fp32=config.compat.fp32_gate)
  check_logits(clean_TE, x_TD.shape[0], num_experts)
  if k > clean_TE.shape[1]:
    raise ConfigError(f"model.top_k={k} is larger than model.num_experts={clean_TE.shape[1]}")
  clean_TE = clean_TE.astype(jnp.promote_types(clean_TE.dtype, jnp.float32))
  logits_TE = clean_TE
  if noise_TE is not None:
    size = config.noise / clean_TE.shape[1]
    logits_TE = clean_TE + size * noise_TE.astype(clean_TE.dtype)
  return Scores(logits_TE, clean_TE, mask_T, config, best_TK, share_TK)


def _check_arguments(
  x_TD: Array, gate: Gate, config: RouterConfig, k: int, num_experts: int | None, mask_T: Any
) -> None:
  """Checks the arguments of `_score`; a ConfigError names the wrong type, shape or k."""
  check_type("config", config, RouterConfig)
  if x_TD.ndim != 2:
    raise ConfigError(f"routing reads tokens [tokens, width], got shape {list(x_TD.shape)}")
  tokens, width = x_TD.shape
  if not callable(gate) and (gate.ndim != 2 or gate.shape[0] != width):
    raise ConfigError(
      f"the gate's weights have shape {list(gate.shape)}, tokens of width {width} need "
      f"[{width}, experts]"
    )
  if mask_T is not None and (mask_T.shape != (tokens,) or mask_T.dtype != bool):
    raise ConfigError(
      f"the mask has shape {list(mask_T.shape)} and type {mask_T.dtype}; {tokens} tokens need "
      f"[{tokens}] and bool"
    )
  if k < 1:
    raise ConfigError(f"model.top_k={k} is too small; the least is 1")
  if num_experts is not None and k > num_experts:
    raise ConfigError(f"model.top_k={k} is larger than model.num_experts={num_experts}")


# -- weights of the chosen experts ----------------------------------------------------------------


def choice_weights(
  scores: Scores,
  chosen_TK: Int[Array, "T K"],
  config: RouterConfig,
  *,
  normalise: bool,
  made_TK: Bool[Array, "T K"] | None = None,
) -> Float[Array, "T K"]:
  """Weights of the chosen experts: their scores, scaled as `config` and `normalise` say.

  Scores come *before* the choice: a softmax over all experts, or sigmoids. Taken literally, the
  paper's Eq. 2-3 (softmax after top-k) gives a top-1 gate the constant weight 1 and hence no
  gradient. For k > 1, softmax probabilities divided by their sum are the weights of Eq. 2.

  Args:
    scores: the gate's scores.
    chosen_TK: int32, the chosen experts.
    config: `compat.weight_norm` = p > 0 divides the weights by their p-norm instead of their sum
      (MegaBlocks moe_normalize_expert_weights); `routed_scaling_factor` multiplies the result.
    normalise: whether to divide the weights by their sum, if there is no `compat.weight_norm`
      (Tutel normalize_gate).
    made_TK: choices that are made; the others have weight 0. None: all are.
  """
  plain = made_TK is None and not config.compat.weight_norm and not scores.independent
  if plain and scores.share_TK is not None and chosen_TK is scores.best_TK:
    weight_TK = scaled_weights(scores.share_TK, normalise)
  elif normalise and plain:
    weight_TK = softmax_of_choices(pick(scores.logits_TE, chosen_TK))
  else:
    weight_TK = pick(scores.scores_TE, chosen_TK)
    if made_TK is not None:
      weight_TK = jnp.where(made_TK, weight_TK, 0)
    weight_TK = scaled_weights(weight_TK, normalise, config.compat.weight_norm)
  factor = config.routed_scaling_factor
  return weight_TK if factor == 1 else weight_TK * factor


def scaled_weights(weight_TK: Array, normalise: bool, weight_norm: float = 0.0) -> Array:
  """Each token's weights, divided by their p-norm, by their sum or not at all.

  With `weight_norm` = p > 0 they are divided by their p-norm; else, if `normalise`, by
  max(their sum, machine epsilon); else they are unchanged.
  """
  eps = jnp.finfo(weight_TK.dtype).eps
  if weight_norm:
    power = (weight_TK**weight_norm).sum(-1, keepdims=True)
    return weight_TK / jnp.maximum(power, jnp.finfo(weight_TK.dtype).tiny) ** (1 / weight_norm)
  if normalise:
    return weight_TK / jnp.maximum(weight_TK.sum(-1, keepdims=True), eps)
  return weight_TK


@jax.custom_vjp
def softmax_of_choices(value_TK: Float[Array, "T K"]) -> Float[Array, "T K"]:
  """The softmax of each token's K values, written column by column: XLA makes one kernel of it.

  The backward pass reads the softmax's result only, not the values.
  """
  columns = [value_TK[:, k] for k in range(value_TK.shape[1])]
  largest_T = functools.reduce(jnp.maximum, columns)
  powers = [jnp.exp(column_T - largest_T) for column_T in columns]
  total_T = functools.reduce(jnp.add, powers)
  return jnp.stack([power_T / total_T for power_T in powers], 1)


def _softmax_fwd(value_TK):
  weight_TK = softmax_of_choices(value_TK)
  return weight_TK, weight_TK


def _softmax_bwd(weight_TK, bar_TK):
  return (weight_TK * (bar_TK - (weight_TK * bar_TK).sum(1, keepdims=True)),)


softmax_of_choices.defvjp(_softmax_fwd, _softmax_bwd)


def pick(value_TE: Float[Array, "T E"], expert_TK: Int[Array, "T K"]) -> Float[Array, "T K"]:
  """value[t, expert[t, k]] for each choice; its gradient adds up over k, without a scatter."""
  return _pick(value_TE, expert_TK, value_TE.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _pick(value_TE, expert_TK, num_experts):
  return jnp.take_along_axis(value_TE, expert_TK, 1)


def _pick_fwd(value_TE, expert_TK, num_experts):
  return _pick(value_TE, expert_TK, num_experts), expert_TK


def _pick_bwd(num_experts, expert_TK, bar_TK):
  ids_E = jnp.arange(num_experts, dtype=expert_TK.dtype)
  bar_TE = jnp.zeros((expert_TK.shape[0], num_experts), bar_TK.dtype)
  for k in range(expert_TK.shape[1]):
    bar_TE += jnp.where(expert_TK[:, k : k + 1] == ids_E, bar_TK[:, k : k + 1], 0)
  return bar_TE, None


_pick.defvjp(_pick_fwd, _pick_bwd)


# -- token rounding -------------------------------------------------------------------------------


def rounded_counts(count_E: Array, tile: int, tokens: int | Array) -> Array:
  """Counts rounded to the nearest multiple of `tile` that is at most `tokens`; halves go up.

  Worked example, tile 2, five tokens: counts 3, 2, 5, 1 become 4, 2, 4 (6 would be too many), 2.
  """
  nearest_E = (count_E + tile // 2) // tile * tile
  return jnp.where(nearest_E > tokens, tokens // tile * tile, nearest_E)


def rounded_choice(
  probs_TE: Array, expert_TK: Array, tile: int, mask_T: Array | None = None
) -> tuple[Array, Array]:
  """Token rounding (SonicMoE): choices such that every expert has a multiple of `tile` tokens.

  The experts' counts of tokens in the top-k choice are rounded (`rounded_counts`). An expert with
  fewer tokens than its rounded count takes, of the tokens that did not choose it, those with the
  highest probability for it. An expert with more gives up, of the tokens that chose it, those with
  the lowest. Less than one tile of tokens changes per expert.

  A token gains at most X = min(K, E − K) experts, so that shapes stay small. If more experts would
  take the token, only the X with the highest probabilities do; the counts of the others are rounded
  down instead.

  Worked example, tile 2, five tokens that chose the experts 0 0 0 1 1 (three and two): 3 rounds up
  to 4, so expert 0 takes, of the tokens that chose 1, the one whose probability for 0 is largest,
  say token 3. Then expert 0 has the tokens 0 to 3, and expert 1 the tokens 3 and 4.

  NOT CAUSAL: which experts a token visits then depends on all other tokens of the device. Use it
  in training only; evaluate and generate with plain top-k.

  Args:
    probs_TE: probabilities; no gradient flows through them.
    expert_TK: int32, the top-k choice.
    tile: rows of a tile of the expert kernels, usually 128.
    mask_T: False for tokens that choose nothing.

  Returns:
    expert int32 and made bool, both [T, K + X]: the top-k choice, then the gained experts. A token
    visits only experts whose choice is made. A column of the X in which the token gains no expert
    holds some expert's id and is not made.

  Raises:
    ConfigError: the tile is larger than the number of tokens, so that every count would be zero.
  """
  (tokens, num_experts), k = probs_TE.shape, expert_TK.shape[1]
  if tile > tokens and tokens:
    raise ConfigError(
      f"router.compat.round_to={tile} is larger than the {tokens} tokens of a device: no expert "
      f"would get any; use at most {tokens}"
    )
  probs_TE = jax.lax.stop_gradient(probs_TE)
  mask_T = jnp.ones(tokens, bool) if mask_T is None else mask_T
  chosen_TE = (expert_TK[:, :, None] == jnp.arange(num_experts)).any(1) & mask_T[:, None]
  count_E = chosen_TE.sum(0)
  # Each expert's column ranks the tokens: first those that chose it, then the others, both by
  # falling probability, then masked tokens.
  class_TE = jnp.where(mask_T[:, None], jnp.where(chosen_TE, 0, 1), 2)
  rank_TE = jnp.argsort(jnp.lexsort((-probs_TE, class_TE), axis=0), axis=0)
  target_E = rounded_counts(count_E, tile, mask_T.sum())
  extra = min(k, num_experts - k)
  gained_TE = (rank_TE < target_E) & ~chosen_TE
  gained_probs_TE = jnp.where(gained_TE, probs_TE, -1)
  # Each token's row ranks the experts that would take it, by falling probability.
  order_TE = jnp.argsort(jnp.argsort(-gained_probs_TE, axis=1), axis=1)
  over_E = (gained_TE & (order_TE >= extra)).any(0)
  target_E = jnp.where(over_E, count_E // tile * tile, target_E)
  visits_TE = rank_TE < target_E
  gained_TE = visits_TE & ~chosen_TE
  gained_TX = jax.lax.top_k(jnp.where(gained_TE, probs_TE, -1), extra)[1]
  expert = jnp.concatenate([expert_TK, gained_TX.astype(jnp.int32)], 1)
  made = jnp.take_along_axis(visits_TE, expert_TK, 1)
  gained = jnp.take_along_axis(gained_TE, gained_TX, 1)
  return expert, jnp.concatenate([made, gained], 1)


@functools.cache
def _warn_rounding() -> None:
  logging.getLogger("scmoe").warning(
    "router.compat.round_to: token rounding is not causal, a token's experts depend on later "
    "tokens of the batch; evaluation and generation use plain top-k"
  )


# -- the `Routing` that `route` returns -----------------------------------------------------------


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
    logits_TE: logits with noise.
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
