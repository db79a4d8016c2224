"""Draws the next token from logits: greedy, or by temperature, top-k and top-p."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from scmoe.base.options import Options, check_whole, option
from scmoe.parallel.mesh import TOKEN_AXES, axis_size, own_share


@dataclasses.dataclass(frozen=True)
class Sampling(Options):
  """How the next token is drawn.

  Tokens that tie with the least probable one that `top_k` or `top_p` keeps are kept too.

  Attributes:
    temperature: divides the logits; 0 takes the most probable token.
    top_k: draws among the k most probable tokens; 0: among all.
    top_p: draws among the most probable tokens, as few as reach this probability together, by the
      probabilities that temperature and `top_k` leave; 1: among all that `top_k` leaves.
  """

  temperature: float = option(1.0, minimum=0)
  top_k: int = option(0, minimum=0)
  top_p: float = option(1.0, above=0, maximum=1)


def end_tokens(eos_id: Any) -> frozenset[int]:
  """The end tokens that an argument `eos_id` stands for: none, one or several.

  Args:
    eos_id: None, a token id, or a collection of them.

  Raises:
    ConfigError: it is of another type, or an element is no whole number.
  """
  if eos_id is None:
    return frozenset()
  # numpy.asarray(2) is a collection by its class, but cannot be iterated.
  several = isinstance(eos_id, Collection) and not isinstance(eos_id, (str, bytes))
  several = several and getattr(eos_id, "ndim", 1) > 0
  ends: list[Any] = list(eos_id) if several else [eos_id]
  for end in ends:
    check_whole("eos_id", end)
  return frozenset(map(int, ends))


def keep_top_k(logits_BV: Array, k: int) -> Array:
  """Sets all but the k largest logits of each row to -inf; keeps ties with the k-th."""
  k = min(k, logits_BV.shape[-1])
  least_B1 = jax.lax.top_k(logits_BV, k)[0][:, -1:]
  return jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)


def keep_top_p(logits_BV: Array, p: float) -> Array:
  """Keeps the most probable tokens, as few as reach probability p together; sets others to -inf.

  It also keeps tokens that tie with the least probable one that is kept.
  """
  sorted_BV = jnp.sort(logits_BV, axis=-1)[:, ::-1]
  probs_BV = jax.nn.softmax(sorted_BV, -1)
  # For each token the total probability of the tokens that are sorted before it.
  before_BV = jnp.cumsum(probs_BV, -1) - probs_BV
  least_B1 = jnp.where(before_BV < p, sorted_BV, jnp.inf).min(-1, keepdims=True)
  return jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)


def sample(logits_BV: Float[Array, "B V"], sampling: Sampling, key: Array) -> Int[Array, " B"]:
  """Draws one token for each row, or takes the most probable one at temperature 0: int32 [B].

  Temperature, top_k and top_p change the logits in this order before the draw. A row's noise is the
  same on every mesh: each device computes the noise of the global batch and takes that of its own
  rows.
  """
  if sampling.temperature == 0:
    return logits_BV.argmax(-1).astype(jnp.int32)
  logits_BV = logits_BV / sampling.temperature
  if sampling.top_k:
    logits_BV = keep_top_k(logits_BV, sampling.top_k)
  if sampling.top_p < 1:
    logits_BV = keep_top_p(logits_BV, sampling.top_p)
  rows = logits_BV.shape[0] * axis_size(*TOKEN_AXES)
  gumbel = jax.random.gumbel(key, (rows, logits_BV.shape[1]), logits_BV.dtype)
  return (own_share(gumbel, 0, *TOKEN_AXES) + logits_BV).argmax(-1).astype(jnp.int32)
