"""x -> Routing: scores, choice of experts, combine weights, places in the experts' queues."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.errors import ConfigError
from scmoe.moe.types import Routing
from scmoe.options import option


@dataclasses.dataclass(frozen=True)
class RouterConfig:
  """How experts are chosen and kept in balance."""

  normalise: bool = option(
    True,
    "divide the weights of the chosen experts by their sum; only for k > 1 (Tutel normalize_gate)",
  )
  noise: float = option(
    0.0, "training: Gaussian noise of this size / E on the logits (Tutel gate_noise)", minimum=0
  )
  balance_loss: float = option(0.01, "coefficient of the GShard balancing loss", minimum=0)
  z_loss: float = option(0.0, "coefficient of the router z-loss, mean of logsumexp²", minimum=0)


def top_k_weights(probs_TE: Array, k: int, normalise: bool) -> tuple[Array, Array]:
  """The k most probable experts and their combine weights.

  The softmax runs over all experts *before* the choice. Taken literally, the paper's Eq. 2-3
  (softmax after top-k) gives a top-1 gate the constant weight 1 and hence no gradient; for k > 1,
  normalising by the sum gives the same weights as Eq. 2. A single weight is never normalised.

  Args:
    probs_TE: float32, softmax over all experts.
    k: experts per token, at most E.
    normalise: divide by the sum over the k choices, if k > 1.

  Returns:
    expert_TK int32 (best first) and weight_TK float32.
  """
  weight_TK, expert_TK = jax.lax.top_k(probs_TE, k)
  if normalise and k > 1:
    total = weight_TK.sum(-1, keepdims=True)
    weight_TK = weight_TK / jnp.maximum(total, jnp.finfo(weight_TK.dtype).eps)
  return expert_TK.astype(jnp.int32), weight_TK


def queue_places(
  expert_TK: Array, num_experts: int, groups: int = 1, live_T: Array | None = None
) -> tuple[Array, Array, Array]:
  """Places of all choices in the queues of their (group, expert), choice-major.

  Within a group every first choice takes its place before any second choice (GShard, Tutel);
  among equal choices tokens stand in order. One sort of a packed integer key, no [T, E] array.

  Args:
    expert_TK: int32 in [0, E).
    num_experts: E.
    groups: G, number of capacity groups; divides T.
    live_T: bool; masked tokens take no place and stand at the end of `order_R`.

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
    queue_TK = jnp.where(live_T[:, None], queue_TK, groups * num_experts)
  rank_TK = jnp.arange(k, dtype=jnp.int32)[None, :] * size + token % max(size, 1)
  # Equal queues sort by choice, then token: the key is unique, so the sort need not be stable.
  if groups * num_experts * size * k < 2**31:
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


def linear_logits(x_TD: Array, gate_DE: Array) -> Array:
  """Scores of a linear gate, in float32 whatever the model's dtype: float32 [T, E]."""
  return jnp.einsum(
    "td,de->te",
    x_TD.astype(jnp.float32),
    gate_DE.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,
  )


def route(
  x_TD: Array,
  gate_DE: Array,
  config: RouterConfig,
  *,
  k: int,
  groups: int = 1,
  noise_TE: Array | None = None,
  live_T: Array | None = None,
) -> Routing:
  """Chooses k experts for every token (paper Eq. 1-4, with Tutel's order of softmax and top-k).

  Args:
    x_TD: the tokens of this device.
    gate_DE: weights of the gate.
    config: the router's options.
    k: experts per token.
    groups: capacity groups of this device.
    noise_TE: standard normal draws in training with `config.noise` > 0. Scores, choice and weights
      all follow the noisy logits. It comes from outside, so that it does not depend on the mesh.
    live_T: bool, tokens that take part; all if None.

  Raises:
    ConfigError: k is larger than the number of experts, or T is not a multiple of `groups`.
  """
  num_experts = gate_DE.shape[-1]
  if k > num_experts:
    raise ConfigError(f"model.top_k={k} is larger than model.num_experts={num_experts}")
  logits_TE = linear_logits(x_TD, gate_DE)
  if noise_TE is not None and config.noise:
    logits_TE = logits_TE + config.noise / num_experts * noise_TE
  probs_TE = jax.nn.softmax(logits_TE)
  expert_TK, weight_TK = top_k_weights(probs_TE, k, config.normalise)
  return make_routing(expert_TK, weight_TK, probs_TE, logits_TE, groups=groups, live_T=live_T)


def make_routing(
  expert_TK: Array,
  weight_TK: Array,
  probs_TE: Array,
  logits_TE: Array,
  *,
  groups: int = 1,
  live_T: Array | None = None,
) -> Routing:
  """Completes a choice of experts to a Routing: places, order and counts."""
  live = jnp.ones(expert_TK.shape[0], bool) if live_T is None else live_T
  place_TK, order_R, count_GE = queue_places(expert_TK, probs_TE.shape[-1], groups, live_T)
  if live_T is not None:
    weight_TK = jnp.where(live[:, None], weight_TK, 0)
  return Routing(expert_TK, weight_TK, place_TK, order_R, count_GE, probs_TE, logits_TE, live)


def route_distinct(
  x_TD: Array,
  gate_DE: Array,
  config: RouterConfig,
  previous_expert_T: Array,
  *,
  groups: int = 1,
  noise_TE: Array | None = None,
  live_T: Array | None = None,
) -> Routing:
  """Top-1 routing that avoids each token's previous expert (DGMoE's distinctness constraint, A.2).

  If the best expert is the one that the preceding representation chose, the second best is taken,
  weighted by its own probability.
  """
  logits_TE = linear_logits(x_TD, gate_DE)
  if noise_TE is not None and config.noise:
    logits_TE = logits_TE + config.noise / gate_DE.shape[-1] * noise_TE
  probs_TE = jax.nn.softmax(logits_TE)
  two_T2, expert_T2 = jax.lax.top_k(probs_TE, 2)
  taken_T1 = (expert_T2[:, :1] == previous_expert_T[:, None]).astype(jnp.int32)
  expert_T1 = jnp.take_along_axis(expert_T2, taken_T1, 1).astype(jnp.int32)
  weight_T1 = jnp.take_along_axis(two_T2, taken_T1, 1)
  return make_routing(expert_T1, weight_T1, probs_TE, logits_TE, groups=groups, live_T=live_T)
