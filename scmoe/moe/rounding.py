"""Token rounding: choices in training such that every expert has whole tiles of tokens."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
from jax import Array

from scmoe.base.errors import ConfigError


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
  take the token, only the X with the highest probabilities may; the counts of the others are
  rounded down instead, for all their tokens.

  Worked example, tile 2, five tokens that chose the experts 0 0 0 1 1 (three and two): 3 rounds up
  to 4, so expert 0 takes, of the tokens that chose 1, the one whose probability for 0 is largest,
  say token 3. Then expert 0 has the tokens 0 to 3, and expert 1 the tokens 3 and 4.

  NOT CAUSAL: which experts a token visits then depends on all other tokens of the device. Use it
  in training only; evaluate and generate with plain top-k.

  Args:
    probs_TE: probabilities; no gradient flows through them.
    expert_TK: int32, the top-k choice.
    tile: rows of a tile of the expert kernels, usually 128.
    mask_T: False for tokens that choose nothing; None: all choose.

  Returns:
    expert int32 and made bool, both [T, K + X]: the top-k choice, then the gained experts. A token
    visits only experts whose choice is made. A column of the X in which the token gains no expert
    holds some expert's id and is not made.

  Raises:
    ConfigError: T, masked tokens included, is not 0, but less than the tile, so that every count
      would be zero.
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
def warn_not_causal() -> None:
  logging.getLogger("scmoe").warning(
    "router.compat.round_to: token rounding is not causal, a token's experts depend on later "
    "tokens of the batch; evaluation and generation use plain top-k"
  )
