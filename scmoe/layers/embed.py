"""Token and position embeddings, and the logits read back from them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from scmoe.parallel.collectives import largest, repeat, total, whole
from scmoe.parallel.mesh import axis_index


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
  """Token embeddings.

  Attributes:
    vocab_size, width: V and D.
    context: learned positions; 0: none.
    tied: whether logits are products with the token embeddings.
    init_std: standard deviation of the initial weights.
  """

  vocab_size: int
  width: int
  context: int = 0
  tied: bool = True
  init_std: float = 0.02


class Embedding(nnx.Module):
  """Token embeddings, learned positions where there are any, and the output projection.

  Under tensor parallelism each device has a part of the vocabulary: it looks up the tokens that are
  its own, and has the scores of its own.
  """

  def __init__(self, config: EmbeddingConfig, *, rngs: nnx.Rngs):
    c = self.config = config

    def weight(shape, axes):
      return nnx.Param(c.init_std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)

    self.tokens = weight((c.vocab_size, c.width), ("vocab", "embed"))
    self.positions = weight((c.context, c.width), (None, "embed")) if c.context else None
    self.head = None if c.tied else weight((c.width, c.vocab_size), ("embed", "vocab"))

  def __call__(
    self, tokens_BS: Int[Array, "B S"], positions_BS: Int[Array, "B S"], dtype: jnp.dtype
  ) -> Float[Array, "B S D"]:
    """[B, S] -> [B, S, D] in the compute dtype."""
    table_VD = self.tokens[...].astype(dtype)
    own = table_VD.shape[0]
    if own == self.config.vocab_size:
      h_BSD = table_VD[tokens_BS]
    else:
      index_BS = tokens_BS - axis_index("tensor") * own
      here_BS1 = ((index_BS >= 0) & (index_BS < own))[..., None]
      h_BSD = jnp.where(here_BS1, table_VD[jnp.clip(index_BS, 0, own - 1)], 0)
      h_BSD = total(h_BSD, ("tensor",), "tensor")
    if self.positions is not None:
      h_BSD += self.positions[...].astype(dtype)[positions_BS]
    return h_BSD

  def logits(self, h_BSD: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
    """Scores of the next token: float32 [B, S, V], from products in the compute dtype."""
    return whole(self.own_logits(h_BSD), 2, "tensor", "tensor")

  def own_logits(self, h_BSD: Float[Array, "B S D"]) -> Float[Array, "B S v"]:
    """The scores of this device's part of the vocabulary."""
    h_BSD = repeat(h_BSD, ("tensor",), "tensor")
    if self.head is None:
      weight, equation = self.tokens, "bsd,vd->bsv"
    else:
      weight, equation = self.head, "bsd,dv->bsv"
    return jnp.einsum(
      equation, h_BSD, weight[...].astype(h_BSD.dtype), preferred_element_type=jnp.float32
    )

  def token_losses(
    self, h_BSD: Float[Array, "B S D"], targets_BS: Int[Array, "B S"]
  ) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """Cross-entropy in nats, and 1 where the best guess is right: float32 [B, S] each.

    With a vocabulary in parts (Megatron-LM's vocabulary-parallel cross-entropy), three small
    collectives take the place of gathering the scores.
    """
    logits_BSV = self.own_logits(h_BSD)
    own = logits_BSV.shape[-1]
    if own == self.config.vocab_size:
      chosen_BS = jnp.take_along_axis(logits_BSV, targets_BS[..., None], -1)[..., 0]
      correct_BS = logits_BSV.argmax(-1) == targets_BS
      return jax.nn.logsumexp(logits_BSV, -1) - chosen_BS, correct_BS.astype(jnp.float32)
    axes, first = ("tensor",), axis_index("tensor") * own
    best_BS = logits_BSV.max(-1)
    top_BS = largest(best_BS, axes, "tensor")
    index_BS = targets_BS - first
    here_BS = (index_BS >= 0) & (index_BS < own)
    picked_BS = jnp.take_along_axis(logits_BSV, jnp.clip(index_BS, 0, own - 1)[..., None], -1)
    chosen_BS = jnp.where(here_BS, picked_BS[..., 0], 0)
    power_BS = jnp.exp(logits_BSV - top_BS[..., None]).sum(-1)
    power_BS, chosen_BS = total((power_BS, chosen_BS), axes, "tensor")
    # Of equal scores the smallest index counts, as arg-max takes it.
    guess_BS = jnp.where(best_BS == top_BS, first + logits_BSV.argmax(-1), self.config.vocab_size)
    guess_BS = -largest(-guess_BS, axes, "tensor")
    return jnp.log(power_BS) + top_BS - chosen_BS, (guess_BS == targets_BS).astype(jnp.float32)
