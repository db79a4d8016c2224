"""Token and position embeddings, and the output projection to logits and losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from scmoe.base.options import Options, option
from scmoe.kernels.wide_sums import looked_up
from scmoe.layers import partitioned
from scmoe.layers.cross_entropy import (
  OVER,
  Axes,
  Teaching,
  scores,
  summed_and_each,
  taught_losses,
  token_losses,
)
from scmoe.parallel.collectives import gather_replicated, repeat, total
from scmoe.parallel.mesh import axis_index, axis_size

# (table [V, D], index [*n]) -> rows [*n, D].
LookUp = Callable[[Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig(Options):
  """Options of the embeddings and of the output projection.

  Attributes:
    vocab_size, width: V and D.
    context: number of learned positions; 0: none.
    tied: whether logits are products with the token embeddings.
    init_std: standard deviation of the initial weights.
    partitioned: whether data ranks partition the table and the head (`scmoe.layers.partitioned`).
  """

  vocab_size: int = option(minimum=1)
  width: int = option(minimum=1)
  context: int = option(0, minimum=0)
  tied: bool = option(True)
  init_std: float = option(0.02, minimum=0)
  partitioned: bool = option(False)


class Embedding(nnx.Module):
  """Token embeddings, learned positions where there are any, and the output projection.

  Under tensor parallelism each device has a part of the vocabulary: it looks up its own tokens, and
  computes the scores of its own tokens. With `EmbeddingConfig.partitioned` data ranks divide the
  parameters further; the positions stay whole.

  Args:
    config: options of embeddings and output projection.
    rngs: stream `params` for the initial weights.
  """

  def __init__(self, config: EmbeddingConfig, *, rngs: nnx.Rngs):
    c = self.config = config

    def weight(shape, axes):
      return nnx.Param(c.init_std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)

    vocab = "data_vocab" if c.partitioned else "vocab"
    looked_up = ("vocab", "data_embed") if c.partitioned else ("vocab", "embed")
    tokens = (vocab, "embed") if c.tied else looked_up
    self.tokens = weight((c.vocab_size, c.width), tokens)
    self.positions = weight((c.context, c.width), (None, "embed")) if c.context else None
    self.head = None if c.tied else weight((c.width, c.vocab_size), ("embed", vocab))

  def ready_for(self, tokens: int, dtype: jnp.dtype) -> Embedding:
    """This embedding for one microbatch, with whole tables where rows would be more bytes.

    Without it rows travel. It gathers a table that is both looked up and the head once.

    Args:
      tokens: number of this rank's tokens in the microbatch.
      dtype: compute dtype, in which tables travel.
    """
    c = self.config
    if not (c.partitioned and self._is_part(self.tokens)):
      return self
    travels = partitioned.rows_travel(
      tokens=tokens,
      vocab=c.vocab_size // axis_size("tensor"),
      ranks=axis_size(partitioned.AXIS),
      itemsize=jnp.dtype(dtype).itemsize,
      tied=c.tied,
    )
    graph, state = nnx.split(self)
    params = nnx.to_pure_dict(state)
    if not travels.lookup:
      params["tokens"] = partitioned.whole(params["tokens"].astype(dtype), 0 if c.tied else 1)
    if not c.tied and not travels.head:
      params["head"] = partitioned.whole(params["head"].astype(dtype), 1)
    return nnx.merge(graph, params)

  def __call__(
    self,
    tokens_BS: Int[Array, "B S"],
    positions_BS: Int[Array, "B S"],
    dtype: jnp.dtype,
    look_up: LookUp = looked_up,
  ) -> Float[Array, "B S D"]:
    """Each token's embedding, plus that of its position if positions are learned: [B, S, D].

    The result has the type `dtype`.

    Args:
      tokens_BS, positions_BS: token ids, and their places in their rows.
      dtype: compute dtype.
      look_up: (table [V, D], index [*n]) -> rows [*n, D], for a table that is not partitioned; its
        derivative says where the gradients of rows go.
    """
    table_VD = self.tokens[...]
    if self._is_part(self.tokens):
      table_VD = table_VD.astype(dtype)  # as it travels
      table_Vd = partitioned.columns_of(table_VD) if self.config.tied else table_VD
      everyones_NBS = partitioned.tokens_of_all_ranks(tokens_BS)
      h_BSD = partitioned.to_own_tokens(self._rows(table_Vd, everyones_NBS))
    else:
      h_BSD = self._rows(table_VD, tokens_BS, look_up).astype(dtype)
    h_BSD = total(h_BSD, ("tensor",), "tensor")
    if self.positions is not None:
      h_BSD += looked_up(self.positions[...], positions_BS).astype(dtype)
    return h_BSD

  def logits(self, h_BSD: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
    """Scores of the next token: float32 [B, S, V], from products that read operands in h's type."""
    h_TD, part, by_token, axes = self._read(h_BSD)
    weight: Any = part if axes == OVER else partitioned.whole(part, 0 if by_token else 1)
    own_BSv = scores(h_TD, weight, by_token).reshape(*h_BSD.shape[:2], -1)
    return gather_replicated(own_BSv, 2, "tensor", "tensor")

  def token_losses(
    self, h_BSD: Float[Array, "B S D"], targets_BS: Int[Array, "B S"]
  ) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """Cross-entropy in nats, and 1 where the best guess is right: float32 [B, S] each.

    By chunks of tokens (`scmoe.layers.cross_entropy`).
    """
    h_TD, weight, by_token, axes = self._read(h_BSD)
    found: Any = token_losses(h_TD, weight, targets_BS.reshape(-1), by_token, axes)
    nats_BS, correct_BS = (a.reshape(targets_BS.shape) for a in found)
    return nats_BS, correct_BS

  def summed_losses(
    self,
    h_BSD: Float[Array, "B S D"],
    targets_BS: Int[Array, "B S"],
    weights_BS: Float[Array, "B S"],
  ) -> tuple[Array, Array]:
    """The sums of a training loss: Σ weight · nats, and Σ weight · [the best guess is right].

    Each is float32 []. The forward pass goes by chunks of tokens and computes their gradient too.
    """
    return self.summed_and_each(h_BSD, targets_BS, weights_BS)[:2]

  def summed_and_each(
    self,
    h_BSD: Float[Array, "B S D"],
    targets_BS: Int[Array, "B S"],
    weights_BS: Float[Array, "B S"],
  ) -> tuple[Array, Array, Float[Array, "B S"]]:
    """The sums of `summed_losses`, and each token's cross-entropy without a gradient."""
    h_TD, weight, by_token, axes = self._read(h_BSD)
    targets_T, weights_T = targets_BS.reshape(-1), weights_BS.reshape(-1).astype(jnp.float32)
    found: Any = summed_and_each(h_TD, weight, targets_T, weights_T, by_token, axes)
    nats, correct, nats_T = found
    return nats, correct, nats_T.reshape(targets_BS.shape)

  def taught_losses(
    self,
    h_BSD: Float[Array, "B S D"],
    teacher: Embedding,
    taught_BSd: Float[Array, "B S d"],
    targets_BS: Int[Array, "B S"],
    weights_BS: Float[Array, "B S"],
    *,
    share: float,
    temperature: float,
  ) -> tuple[Array, Array, Array, Array]:
    """A student's loss, and three sums for metrics; see `scmoe.layers.cross_entropy.taught_losses`.

    Args:
      h_BSD: last hidden states.
      teacher, taught_BSd: the teacher's embedding, and its last hidden states.
      targets_BS, weights_BS: as for `summed_losses`.
      share, temperature: see `Teaching`.
    """
    *student, by_token, axes = self._read(h_BSD)
    *given, teacher_by_token, teacher_axes = teacher._read(taught_BSd)
    assert teacher_axes == OVER, "a teacher's head is whole on each data rank"
    how = Teaching(share, temperature, by_token, teacher_by_token, axes)
    targets_T, weights_T = targets_BS.reshape(-1), weights_BS.reshape(-1).astype(jnp.float32)
    found: Any = taught_losses(tuple(student), tuple(given), targets_T, weights_T, how)
    return found

  def _rows(self, table_VD: Array, index: Array, look_up: LookUp = looked_up) -> Array:
    """Rows of this device's part of the vocabulary, 0 for tokens of another tensor rank's."""
    own = table_VD.shape[0]
    if own == self.config.vocab_size:
      return look_up(table_VD, index)
    index = index - axis_index("tensor") * own
    here = ((index >= 0) & (index < own))[..., None]
    return jnp.where(here, look_up(table_VD, jnp.clip(index, 0, own - 1)), 0)

  def _read(self, h_BSD: Array) -> tuple[Array, Array, bool, Axes]:
    """h as [T, D], the output weight in h's type, its layout (`by_token` of `scores`), and the mesh
    axes that divide its vocabulary."""
    h_BSD = repeat(h_BSD, ("tensor",), "tensor")
    param = self.tokens if self.head is None else self.head
    axes = ("tensor", partitioned.AXIS) if self._is_part(param) else OVER
    weight = param[...].astype(h_BSD.dtype)
    return h_BSD.reshape(-1, h_BSD.shape[-1]), weight, self.head is None, axes

  def _is_part(self, param: Any) -> bool:
    """Whether this is a data rank's part of the table, or of the head."""
    c = self.config
    return c.partitioned and partitioned.is_part(param[...].size, c.vocab_size, c.width)
