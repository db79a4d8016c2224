"""Weights of the chosen experts, from their scores."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from scmoe.moe.options import RouterConfig
from scmoe.moe.scores import Scores, scaled_weights


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


@jax.custom_vjp
def softmax_of_choices(value_TK: Float[Array, "T K"]) -> Float[Array, "T K"]:
  """The softmax of each token's K values, written column by column so that XLA can fuse it.

  For the backward pass the softmax's result is kept, not the values.
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
  """value[t, expert[t, k]] for each choice (t, k).

  The gradient of `value_TE` is a sum over k, computed without a scatter.
  """
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
