"""Draws the next token of each row by the row's own temperature, top-k, top-p and random key.

A row's draw is that of `scmoe.inference.sampling.sample` for a batch of this row alone: the noise
comes from the row's key and the number of new tokens that the row has already, so it does not
depend on the other rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

# Largest `Request.logprobs`. A program with `Needs.logprobs` finds this many tokens for every row,
# or the whole vocabulary if that is smaller.
MOST_LOGPROBS = 20


class Needs(NamedTuple):
  """The optional parts of drawing that a program contains; its rows can use no other part.

  A program with all parts would sort the vocabulary even if every row takes the most probable
  token. A branch inside the program does not decide, since on a GPU the host may have to wait for
  its condition.

  Attributes:
    noise: draws at temperatures above 0.
    filters: top-k and top-p; they need `noise`.
    logprobs: log-probabilities of the drawn and of the most probable tokens.
  """

  noise: bool = False
  filters: bool = False
  logprobs: bool = False

  def __or__(self, other: Any) -> Needs:
    """The parts that at least one of the two `Needs` has."""
    return Needs(*(one or two for one, two in zip(self, other)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
  """Each row's sampling options, random key and number of new tokens, for `draw`; see `Sampling`.

  Attributes:
    temperature_B: float32; 0: the most probable token.
    top_k_B: int32; 0: among all tokens.
    top_p_B: float32; 1: among all that `top_k_B` leaves.
    key_BW: uint32, the data of each row's random key.
    made_B: int32, number of new tokens before this one.
  """

  temperature_B: Any
  top_k_B: Any
  top_p_B: Any
  key_BW: Any
  made_B: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawn:
  """The drawn token of each row, and with `Needs.logprobs` log-probabilities.

  These are natural logarithms of the model's softmax, before temperature, top-k and top-p.

  Attributes:
    token_B: int32, the drawn tokens, or the most probable ones at temperature 0.
    logprob_B: float32, their log-probabilities; None without `Needs.logprobs`.
    top_logprob_BN, top_token_BN: float32 and int32, log-probabilities and ids of the most probable
      tokens, the likeliest first; None without `Needs.logprobs`. N is `MOST_LOGPROBS`, or the
      vocabulary's size if that is smaller.
  """

  token_B: Array
  logprob_B: Array | None = None
  top_logprob_BN: Array | None = None
  top_token_BN: Array | None = None


def draw(logits_BV: Float[Array, "B V"], rows: Draws, needs: Needs) -> Drawn:
  """Draws one token for each row, or takes the most probable one; see `Drawn` for all results.

  Args:
    logits_BV: float32.
    rows: how each row draws.
    needs: the parts to compute; static.
  """
  token_B = logits_BV.argmax(-1).astype(jnp.int32)
  if needs.noise:
    is_drawn_B = rows.temperature_B > 0
    token_B = jnp.where(is_drawn_B, _with_noise(logits_BV, rows, needs), token_B)
  if not needs.logprobs:
    return Drawn(token_B)
  logprob_BV = jax.nn.log_softmax(logits_BV, -1)
  own_B = jnp.take_along_axis(logprob_BV, token_B[:, None], 1)[:, 0]
  top_BN, at_BN = jax.lax.top_k(logprob_BV, min(MOST_LOGPROBS, logits_BV.shape[1]))
  return Drawn(token_B, own_B, top_BN, at_BN.astype(jnp.int32))


def _with_noise(logits_BV: Array, rows: Draws, needs: Needs) -> Int[Array, " B"]:
  """A token for each row, drawn with noise; the caller replaces those of rows at temperature 0."""
  heat_B = jnp.where(rows.temperature_B > 0, rows.temperature_B, 1)
  logits_BV = logits_BV / heat_B[:, None]
  if needs.filters:
    logits_BV = _filtered(logits_BV, rows)
  keys_B = jax.random.wrap_key_data(rows.key_BW)

  def noise(key: Array, made: Array) -> Array:
    return jax.random.gumbel(jax.random.fold_in(key, made), logits_BV.shape[1:], logits_BV.dtype)

  return (jax.vmap(noise)(keys_B, rows.made_B) + logits_BV).argmax(-1).astype(jnp.int32)


def _filtered(logits_BV: Array, rows: Draws) -> Array:
  """The logits of the tokens that each row's top-k, then its top-p, keeps; -inf for the others.

  Tokens that tie with the least probable one that is kept are kept too, as by `keep_top_k` and
  `keep_top_p`.
  """
  size = logits_BV.shape[1]
  sorted_BV = jnp.sort(logits_BV, axis=-1)[:, ::-1]
  last_B = jnp.where(rows.top_k_B > 0, jnp.minimum(rows.top_k_B, size), size) - 1
  least_B1 = jnp.take_along_axis(sorted_BV, last_B[:, None], 1)
  sorted_BV = jnp.where(sorted_BV < least_B1, -jnp.inf, sorted_BV)
  probs_BV = jax.nn.softmax(sorted_BV, -1)
  # For each token the total probability of the tokens that are sorted before it.
  before_BV = jnp.cumsum(probs_BV, -1) - probs_BV
  nucleus_B1 = jnp.where(before_BV < rows.top_p_B[:, None], sorted_BV, jnp.inf)
  nucleus_B1 = nucleus_B1.min(-1, keepdims=True)
  least_B1 = jnp.where(rows.top_p_B[:, None] < 1, jnp.maximum(nucleus_B1, least_B1), least_B1)
  return jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
