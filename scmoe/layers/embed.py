"""Token and position embeddings, and the logits read back from them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


class Embedding(nnx.Module):
  """Token embeddings, learned positions where `context` > 0, and the output projection.

  With `tied` the logits are products with the token embeddings.
  """

  def __init__(
    self,
    vocab_size: int,
    width: int,
    *,
    context: int,
    tied: bool,
    init_std: float,
    rngs: nnx.Rngs,
  ):
    def weight(shape, axes):
      return nnx.Param(init_std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)

    self.tokens = weight((vocab_size, width), ("vocab", "embed"))
    self.positions = weight((context, width), (None, "embed")) if context else None
    self.head = None if tied else weight((width, vocab_size), ("embed", "vocab"))

  def __call__(self, tokens_BS: Array, positions_BS: Array, dtype: jnp.dtype) -> Array:
    """[B, S] -> [B, S, D] in the compute dtype."""
    h_BSD = self.tokens[...].astype(dtype)[tokens_BS]
    if self.positions is not None:
      h_BSD += self.positions[...].astype(dtype)[positions_BS]
    return h_BSD

  def logits(self, h_BSD: Array) -> Array:
    """Scores of the next token: float32 [B, S, V], from products in the compute dtype."""
    if self.head is None:
      weight, equation = self.tokens, "bsd,vd->bsv"
    else:
      weight, equation = self.head, "bsd,dv->bsv"
    return jnp.einsum(
      equation, h_BSD, weight[...].astype(h_BSD.dtype), preferred_element_type=jnp.float32
    )
