"""x -> Routing: scores, choice of experts, combine weights, places in the experts' queues."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.errors import ConfigError
from scmoe.moe.gates import check_logits, compute_dtype, linear_logits
from scmoe.moe.options import RouterConfig
from scmoe.moe.types import ABSENT, Routing

__all__ = [
  "RouterConfig",
  "combine_weights",
  "linear_logits",
  "make_routing",
  "queue_places",
  "round_counts",
  "rounded_choice",
  "route",
  "route_distinct",
  "top_k_weights",
]


# -- which experts, with which weights ------------------------------------------------------------


def top_k_weights(
  probs_TE: Array,
  k: int,
  normalise: bool,
  *,
  weight_norm: float = 0.0,
  bias_E: Array | None = None,
) -> tuple[Array, Array]:
  """The k most probable experts and their combine weights.

  The softmax runs over all experts *before* the choice. Taken literally, the paper's Eq. 2-3
  (softmax after top-k) gives a top-1 gate the constant weight 1 and hence no gradient; for k > 1,
  normalising by the sum gives the same weights as Eq. 2. A single weight is never normalised.
  Of equal probabilities the expert with the smaller index comes first. NaN counts as the largest
  value, so that the experts are valid indices whatever the logits are.

  Args:
    probs_TE: float32, softmax over all experts.
    k: experts per token, at most E.
    normalise, weight_norm: see `combine_weights`.
    bias_E: balancing bias; it is added for the choice and does not enter the weights.

  Returns:
    expert_TK int32 (best first) and weight_TK float32.
  """
  if bias_E is None:
    weight_TK, expert_TK = jax.lax.top_k(probs_TE, k)
  else:
    select_TE = jax.lax.stop_gradient(probs_TE) + jax.lax.stop_gradient(bias_E)
    expert_TK = jax.lax.top_k(select_TE, k)[1]
    weight_TK = jnp.take_along_axis(probs_TE, expert_TK, 1)
  return expert_TK.astype(jnp.int32), combine_weights(weight_TK, normalise and k > 1, weight_norm)


def combine_weights(weight_TK: Array, normalise: bool, weight_norm: float = 0.0) -> Array:
  """Normalised weights of one token's choices.

  Args:
    weight_TK: float32, probabilities of the chosen experts.
    normalise: divide by max(their sum, machine epsilon) (Tutel normalize_gate).
    weight_norm: p > 0 divides by their p-norm instead (MegaBlocks moe_normalize_expert_weights).
  """
  eps = jnp.finfo(weight_TK.dtype).eps
  if weight_norm:
    power = (weight_TK**weight_norm).sum(-1, keepdims=True)
    return weight_TK / jnp.maximum(power, jnp.finfo(weight_TK.dtype).tiny) ** (1 / weight_norm)
  if normalise:
    return weight_TK / jnp.maximum(weight_TK.sum(-1, keepdims=True), eps)
  return weight_TK


def round_counts(count_E: Array, tile: int, tokens: int | Array) -> Array:
  """Counts rounded to the nearest multiple of `tile` that is at most `tokens`; halves go up."""
  nearest_E = (count_E + tile // 2) // tile * tile
  return jnp.where(nearest_E > tokens, tokens // tile * tile, nearest_E)


def rounded_choice(
  probs_TE: Array, expert_TK: Array, tile: int, live_T: Array | None = None
) -> tuple[Array, Array]:
  """Token rounding (SonicMoE): choices such that every expert has a multiple of `tile` tokens.

  Starting from the top-k choice, an expert that is short of its rounded count takes the tokens
  that like it best among those that did not choose it; one that has too many gives up those that
  like it least. Less than one tile changes per expert.

  A token gains at most X = min(K, E − K) experts, so that shapes stay small: where more would take
  it, the experts that it likes least among them round down instead.

  NOT CAUSAL: which experts a token visits then depends on all other tokens of the device. Use it
  in training only; evaluate and generate with plain top-k.

  Args:
    probs_TE: float32, probabilities.
    expert_TK: int32, the top-k choice.
    tile: rows of a tile of the expert kernels, usually 128.
    live_T: bool; masked tokens choose nothing.

  Returns:
    expert int32 and present bool [T, K + X]: the top-k choice, then the gained experts. Only the
    present ones are visited.

  Raises:
    ConfigError: the tile is larger than the number of tokens, so that every count would be zero.
  """
  (tokens, num_experts), k = probs_TE.shape, expert_TK.shape[1]
  if tile > tokens and tokens:
    raise ConfigError(
      f"router.round_to={tile} is larger than the {tokens} tokens of a device: no expert would get "
      f"any; use at most {tokens}"
    )
  probs_TE = jax.lax.stop_gradient(probs_TE)
  live_T = jnp.ones(tokens, bool) if live_T is None else live_T
  chosen_TE = (expert_TK[:, :, None] == jnp.arange(num_experts)).any(1) & live_T[:, None]
  count_E = chosen_TE.sum(0)
  # By expert: those that chose it, then the others, each by falling probability; masked ones last.
  class_TE = jnp.where(live_T[:, None], jnp.where(chosen_TE, 0, 1), 2)
  rank_TE = jnp.argsort(jnp.lexsort((-probs_TE, class_TE), axis=0), axis=0)
  target_E = round_counts(count_E, tile, live_T.sum())
  extra = min(k, num_experts - k)
  gained_TE = (rank_TE < target_E) & ~chosen_TE
  liking_TE = jnp.where(gained_TE, probs_TE, -1)
  standing_TE = jnp.argsort(jnp.argsort(-liking_TE, axis=1), axis=1)
  over_E = (gained_TE & (standing_TE >= extra)).any(0)
  target_E = jnp.where(over_E, count_E // tile * tile, target_E)
  visits_TE = rank_TE < target_E
  gained_TE = visits_TE & ~chosen_TE
  gained_TX = jax.lax.top_k(jnp.where(gained_TE, probs_TE, -1), extra)[1]
  expert = jnp.concatenate([expert_TK, gained_TX.astype(jnp.int32)], 1)
  made = jnp.take_along_axis(visits_TE, expert_TK, 1)
  gained = jnp.take_along_axis(gained_TE, gained_TX, 1)
  return expert, jnp.concatenate([made, gained], 1)


def _rounded(
  probs_TE: Array, expert_TK: Array, config: RouterConfig, live_T: Array | None
) -> tuple[Array, Array, Array]:
  """Token rounding: experts, weights over the choices that are made, and which those are."""
  _warn_rounding()
  expert, present = rounded_choice(probs_TE, expert_TK, config.round_to, live_T)
  weight = jnp.where(present, jnp.take_along_axis(probs_TE, expert, 1), 0)
  normalise = config.normalise and expert_TK.shape[1] > 1
  return expert, combine_weights(weight, normalise, config.weight_norm), present


@functools.cache
def _warn_rounding() -> None:
  logging.getLogger("scmoe").warning(
    "router.round_to: token rounding is not causal, a token's experts depend on later tokens of "
    "the batch; evaluation and generation use plain top-k"
  )


# -- places in the queues -------------------------------------------------------------------------


def queue_places(
  expert_TK: Array,
  num_experts: int,
  groups: int = 1,
  live_T: Array | None = None,
  *,
  order: str = "choice",
  priority_T: Array | None = None,
) -> tuple[Array, Array, Array]:
  """Places of all choices in the queues of their (group, expert).

  One sort of a packed integer key, no [T, E] array. Counts and places follow from the same sort,
  so that they agree in every order (Tutel's batch-prioritised counts do not).

  Args:
    expert_TK: int32 in [0, E).
    num_experts: E.
    groups: G, number of capacity groups; divides T.
    live_T: bool [T] or [T, K]; masked tokens or choices take no place and stand at the end of
      `order_R`.
    order: `choice`: within a group every first choice takes its place before any second choice
      (GShard, Tutel), among equal choices tokens stand in order. `priority`: the same with tokens
      by falling `priority_T`, ties by index (Tutel batch_prioritized_routing). `token`: by token,
      then choice (MegaBlocks).
    priority_T: float, the tokens' largest probabilities; only for `priority`.

  Returns:
    place_TK int32 (arbitrary for masked tokens), order_R int32 [T·K], count_GE int32.

  Raises:
    ConfigError: T is not a multiple of G.
  """
  tokens, k = expert_TK.shape
  if tokens % groups:
    raise ConfigError(f"dispatch.groups={groups} does not divide the {tokens} tokens of a device")
  size = tokens // groups  # tokens of one group
  token = jnp.arange(tokens, dtype=jnp.int32)[:, None]
  queue_TK = (token // max(size, 1)) * num_experts + expert_TK
  if live_T is not None:
    live_TK = live_T[:, None] if live_T.ndim == 1 else live_T
    queue_TK = jnp.where(live_TK, queue_TK, groups * num_experts)
  choice = jnp.arange(k, dtype=jnp.int32)[None, :]
  visit_T1 = token % max(size, 1)
  if order == "priority":
    assert priority_T is not None
    visit_T1 = _visits(priority_T, groups)[:, None]
  rank_TK = visit_T1 * k + choice if order == "token" else choice * size + visit_T1
  # Equal queues sort by choice, then token: the key is unique, so the sort need not be stable.
  if (groups * num_experts + 1) * size * k < 2**31:  # masked choices have a queue of their own
    key_R = (queue_TK * (size * k) + rank_TK).reshape(-1)
    order_R = jnp.argsort(key_R).astype(jnp.int32)
  else:
    order_R = jnp.lexsort((rank_TK.reshape(-1), queue_TK.reshape(-1))).astype(jnp.int32)
  count_Q = jnp.zeros(groups * num_experts + 1, jnp.int32).at[queue_TK.reshape(-1)].add(1)
  start_Q = jnp.cumsum(count_Q) - count_Q
  position_R = (
    jnp.zeros(tokens * k, jnp.int32)
    .at[order_R]
    .set(jnp.arange(tokens * k, dtype=jnp.int32), unique_indices=True)
  )
  place_TK = position_R.reshape(tokens, k) - start_Q[queue_TK]
  return place_TK, order_R, count_Q[:-1].reshape(groups, num_experts)


def _visits(priority_T: Array, groups: int) -> Array:
  """When each token of a group is visited, by falling priority; ties by index, NaN last: int32."""
  falling_GT = -jax.lax.stop_gradient(priority_T).reshape(groups, priority_T.size // groups)
  order_GT = jnp.argsort(falling_GT, axis=1, stable=True)
  return jnp.argsort(order_GT, axis=1).reshape(-1).astype(jnp.int32)


# -- the stage ------------------------------------------------------------------------------------


def route(
  x_TD: Array,
  gate: Callable[[Array], Array] | Array,
  config: RouterConfig,
  *,
  k: int,
  num_experts: int | None = None,
  groups: int = 1,
  noise_TE: Array | None = None,
  jitter_TD: Array | None = None,
  live_T: Array | None = None,
  bias_E: Array | None = None,
  train: bool = False,
) -> Routing:
  """Chooses k experts for every token (paper Eq. 1-4, with Tutel's order of softmax and top-k).

  Logits that are not finite do not stop it: experts and places stay valid and the same in every
  run, the weights of that token become NaN and with them the loss, which makes the training step
  skip its update; `RouterSums.nonfinite` counts such tokens.

  Args:
    x_TD: the tokens of this device. None (T = 0) gives empty arrays and counts of 0.
    gate: a `scmoe.moe.gates.Gate`, or the weights [D, E] of a linear one.
    config: the router's options.
    k: experts per token.
    num_experts: E; what the gate returns is checked against it.
    groups: capacity groups of this device.
    noise_TE: standard normal draws in training with `config.noise` > 0. Scores, choice and weights
      all follow the noisy logits. It comes from outside, so that it does not depend on the mesh.
    jitter_TD: factors on the gate's input in training with `config.jitter` > 0, from outside too;
      the experts read the tokens as they are.
    live_T: bool, tokens that take part; all if None.
    bias_E: balancing bias, added for the choice only (`config.bias`).
    train: token rounding (`config.round_to`) applies. Then K grows to hold the gained experts, and
      choices that are not made have weight 0 and the place `ABSENT`.

  Raises:
    ConfigError: k is larger than the number of experts, T is not a multiple of `groups`, the gate
      returns the wrong shape, or the rounding tile is larger than T.
  """
  logits_TE, clean_TE = _scores(x_TD, gate, config, num_experts, noise_TE, jitter_TD, live_T)
  num_experts = logits_TE.shape[1]
  if k > num_experts:
    raise ConfigError(f"model.top_k={k} is larger than model.num_experts={num_experts}")
  probs_TE = jax.nn.softmax(logits_TE)
  expert_TK, weight_TK = top_k_weights(
    probs_TE, k, config.normalise, weight_norm=config.weight_norm, bias_E=bias_E
  )
  present_TK = None
  if config.round_to and train:
    expert_TK, weight_TK, present_TK = _rounded(probs_TE, expert_TK, config, live_T)
  if config.uniform:
    # The weights stay those of the real choice, so that the gate gets its gradient.
    turn = jnp.arange(expert_TK.size, dtype=jnp.int32) % num_experts
    expert_TK = turn.reshape(expert_TK.shape)
  extra: dict[str, Any] = {}
  if config.balance == "load_importance":
    extra = soft_load(clean_TE, logits_TE, k, config.noise, live_T)
  return make_routing(
    expert_TK,
    weight_TK,
    probs_TE,
    logits_TE,
    groups=groups,
    live_T=live_T,
    present_TK=present_TK,
    order=config.order,
    weights=config.weights,
    **extra,
  )


def soft_load(
  clean_TE: Array, logits_TE: Array, k: int, noise: float, live_T: Array | None = None
) -> dict[str, Array]:
  """Importance and soft load of the experts, what the load-importance loss is made of.

  importance_E = Σ_t p_t and soft_load_E = Σ_t Φ((p_t − θ_t) / (noise / E)), where p is the softmax
  of the logits without noise, θ_t the k-th largest logit *with* noise and Φ the normal
  distribution function. That a probability is compared with a logit is the published definition
  (Tutel load_importance_loss, the Swin-MoE design). Gradients flow through p and θ.

  Returns:
    `importance_E` and `soft_load_E`, as `Routing` names them.
  """
  probs_TE = jax.nn.softmax(clean_TE)
  threshold_T1 = jax.lax.top_k(logits_TE, k)[0][:, -1:]
  soft_TE = jax.scipy.stats.norm.cdf((probs_TE - threshold_T1) * (logits_TE.shape[1] / noise))
  if live_T is not None:
    probs_TE, soft_TE = (jnp.where(live_T[:, None], a, 0) for a in (probs_TE, soft_TE))
  return {"importance_E": probs_TE.sum(0), "soft_load_E": soft_TE.sum(0)}


def make_routing(
  expert_TK: Array,
  weight_TK: Array,
  probs_TE: Array,
  logits_TE: Array,
  *,
  groups: int = 1,
  live_T: Array | None = None,
  present_TK: Array | None = None,
  order: str = "choice",
  weights: str = "after",
  importance_E: Array | None = None,
  soft_load_E: Array | None = None,
) -> Routing:
  """Completes a choice of experts to a Routing: places, order and counts.

  Args:
    expert_TK, weight_TK, probs_TE, logits_TE, live_T, importance_E, soft_load_E: see `Routing`.
    groups: capacity groups of this device.
    present_TK: bool, choices that are made; all if None. The others get the place `ABSENT`.
    order: see `queue_places`.
    weights: `after` or `before` the experts.
  """
  live = jnp.ones(expert_TK.shape[0], bool) if live_T is None else live_T
  taking_part = live_T if present_TK is None else present_TK & live[:, None]
  priority_T = probs_TE.max(-1) if order == "priority" else None
  place_TK, order_R, count_GE = queue_places(
    expert_TK, probs_TE.shape[-1], groups, taking_part, order=order, priority_T=priority_T
  )
  if present_TK is not None:
    place_TK = jnp.where(present_TK, place_TK, ABSENT)
  if live_T is not None:
    weight_TK = jnp.where(live[:, None], weight_TK, 0)
  input_weight_TK = None
  if weights == "before":
    input_weight_TK, weight_TK = weight_TK, jnp.ones_like(weight_TK)
  return Routing(
    expert_TK,
    weight_TK,
    place_TK,
    order_R,
    count_GE,
    probs_TE,
    logits_TE,
    live,
    input_weight_TK=input_weight_TK,
    present_TK=present_TK,
    importance_E=importance_E,
    soft_load_E=soft_load_E,
  )


def route_distinct(
  x_TD: Array,
  gate: Callable[[Array], Array] | Array,
  config: RouterConfig,
  previous_expert_T: Array,
  *,
  num_experts: int | None = None,
  groups: int = 1,
  noise_TE: Array | None = None,
  jitter_TD: Array | None = None,
  live_T: Array | None = None,
  bias_E: Array | None = None,
) -> Routing:
  """Top-1 routing that avoids each token's previous expert (DGMoE's distinctness constraint, A.2).

  If the best expert is the one that the preceding representation chose, the second best is taken,
  weighted by its own probability. Arguments as in `route`; token rounding and forced assignment do
  not apply, they would break the constraint.
  """
  logits_TE, clean_TE = _scores(x_TD, gate, config, num_experts, noise_TE, jitter_TD, live_T)
  probs_TE = jax.nn.softmax(logits_TE)
  expert_T2, two_T2 = top_k_weights(probs_TE, 2, False, bias_E=bias_E)
  taken_T1 = (expert_T2[:, :1] == previous_expert_T[:, None]).astype(jnp.int32)
  expert_T1 = jnp.take_along_axis(expert_T2, taken_T1, 1)
  weight_T1 = jnp.take_along_axis(two_T2, taken_T1, 1)
  extra: dict[str, Any] = {}
  if config.balance == "load_importance":
    extra = soft_load(clean_TE, logits_TE, 1, config.noise, live_T)
  return make_routing(
    expert_T1,
    combine_weights(weight_T1, False, config.weight_norm),
    probs_TE,
    logits_TE,
    groups=groups,
    live_T=live_T,
    order=config.order,
    weights=config.weights,
    **extra,
  )


def _scores(
  x_TD: Array,
  gate: Callable[[Array], Array] | Array,
  config: RouterConfig,
  num_experts: int | None,
  noise_TE: Array | None,
  jitter_TD: Array | None,
  live_T: Array | None,
) -> tuple[Array, Array]:
  """Logits with noise and without: float32 [T, E]; the same array where there is no noise."""
  if live_T is not None:
    # Whatever padding holds, the gate's gradient multiplies it by zero: NaN would stay NaN.
    x_TD = jnp.where(live_T[:, None], x_TD, 0)
  if jitter_TD is not None and config.jitter:
    dtype = compute_dtype(x_TD, config.fp32_gate)
    x_TD = x_TD.astype(dtype) * jitter_TD.astype(dtype)
  if callable(gate):
    clean_TE = gate(x_TD)
  else:
    clean_TE = linear_logits(x_TD, gate, fp32=config.fp32_gate)
  check_logits(clean_TE, x_TD.shape[0], num_experts)
  clean_TE = clean_TE.astype(jnp.promote_types(clean_TE.dtype, jnp.float32))
  if noise_TE is None or not config.noise:
    return clean_TE, clean_TE
  return clean_TE + config.noise / clean_TE.shape[1] * noise_TE.astype(clean_TE.dtype), clean_TE
