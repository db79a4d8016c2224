"""ScMoE language models in the style of GPT-2 and of LLaMA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.core import Tracer
from jaxtyping import Float, Int

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError
from scmoe.base.options import check_array, check_type
from scmoe.blocks.options import OverlapConfig
from scmoe.blocks.unit import times
from scmoe.kernels.wide_sums import looked_up
from scmoe.layers.embed import Embedding, EmbeddingConfig
from scmoe.models.config import ModelConfig
from scmoe.models.row_gradients import looked_up_apart
from scmoe.models.trunk import Leg, Output, Pass, Route, Trunk, context_of, run_trunks
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.parallel.sequence import own_positions

__all__ = ["GPT", "Output", "Pass", "route", "run_batches_in_turns"]


class GPT(Trunk):
  """A decoder-only language model whose blocks follow one wiring.

  It is a trunk with an embedding before it, and a norm and the output projection (`logits`) behind
  it. The model computes in `config.dtype`; its parameters are made in float32. It runs on one
  device as it is, and in the manual region (`scmoe.manual`) on this device's share of batch and
  parameters.

  Args:
    config: architecture.
    router, dispatch, overlap: options of routing, transport and schedule.
    partitioned: whether data ranks partition the embedding and the head (`mesh.embedding`).
    rngs: stream `params` for the initial weights.

  Raises:
    ConfigError: an argument is of another type, the architecture is one of images, or options do
      not fit each other.
  """

  def __init__(
    self,
    config: ModelConfig,
    *,
    router: RouterConfig = RouterConfig(),
    dispatch: DispatchConfig = DispatchConfig(),
    overlap: OverlapConfig = OverlapConfig(),
    partitioned: bool = False,
    rngs: nnx.Rngs,
  ):
    check_type("config", config, ModelConfig)
    check_type("rngs", rngs, nnx.Rngs)
    if config.reads_images:
      raise ConfigError(
        f"model.architecture={config.architecture!r} reads images, got GPT; use VisionModel, or "
        "model.architecture=gpt"
      )
    config = config.resolve()
    self.embedding = Embedding(
      EmbeddingConfig(
        config.vocab_size,
        config.width,
        context=config.context if config.style == "gpt2" else 0,
        tied=config.tie_embeddings,
        init_std=config.init_std,
        partitioned=partitioned,
      ),
      rngs=rngs,
    )
    super().__init__(config, router=router, dispatch=dispatch, overlap=overlap, rngs=rngs)
    self.norm = config.norm()

  def __call__(self, tokens_BS: Int[Array, "B S"], given: Pass = Pass()) -> Output:
    """Runs the model up to its last norm; `logits` makes scores of the result's `h_BSD`.

    Args:
      tokens_BS: int32 token ids.
      given: see `Pass`.

    Raises:
      ConfigError: `given.remat` is unknown, or see `check_tokens`.
    """
    return run_batches_in_turns([self], [tokens_BS], [given])[0]

  def check_tokens(self, tokens_BS: Int[Array, "B S"], given: Pass = Pass()) -> None:
    """Checks the shape and dtype of token ids, and their values if this process knows them all.

    It knows them if the array is neither traced nor partly on another process's devices. With
    caches a row may be longer than the context: prompts may be padded beyond it, and no result of
    the padding is read; and a server's row holds the tokens of many texts (`PageTables`).

    Raises:
      ConfigError: `given` is no `Pass`, or `tokens_BS` is no array; the array is empty, not [batch,
        sequence] or not of integers, the rows are longer than the context, an id is outside the
        vocabulary, or positions, segments or mask are no array of the tokens' shape, or of one row
        of it.
    """
    if not isinstance(tokens_BS, (Array, np.ndarray)):
      raise ConfigError(
        f"the model reads an array of token ids, got {type(tokens_BS).__name__}; use "
        "jnp.asarray(tokens)"
      )
    check_type("given", given, Pass)
    config, shape = self.config, tuple(tokens_BS.shape)
    if len(shape) != 2:
      raise ConfigError(f"the model reads token ids [batch, sequence], got {list(shape)}")
    for name in ("positions_BS", "segments_BS", "mask_BS"):
      if (value := getattr(given, name)) is None:
        continue
      check_array(name, value)
      if tuple(value.shape) not in (shape, (1, shape[1])):
        raise ConfigError(
          f"{name} has shape {list(value.shape)}; token ids {list(shape)} need the same"
        )
    if not jnp.issubdtype(tokens_BS.dtype, jnp.integer):
      raise ConfigError(f"the model reads token ids of an integer type, got {tokens_BS.dtype}")
    if not all(shape):
      raise ConfigError(f"the model reads at least one row of one token, got {list(shape)}")
    if shape[1] > config.context and given.caches is None:
      raise ConfigError(
        f"model.context={config.context}, got rows of {shape[1]} tokens; use at most "
        f"{config.context}, or a larger model.context"
      )
    is_known = not isinstance(tokens_BS, Tracer) and getattr(
      tokens_BS, "is_fully_addressable", True
    )
    if not is_known:
      return
    # By NumPy: inside a traced function jnp would trace even the minimum of a known array.
    ids = np.asarray(tokens_BS)
    for worst in (int(ids.min()), int(ids.max())):
      if not 0 <= worst < config.vocab_size:
        raise ConfigError(
          f"model.vocab_size={config.vocab_size}, got token id {worst}; use ids from 0 to "
          f"{config.vocab_size - 1}"
        )

  def ready_for(self, tokens: int) -> GPT:
    """This model for a microbatch of so many tokens on each data rank; `Embedding.ready_for`.

    Its embedding may be replaced, so call it in the trace that made the model, before it is run.
    """
    self.embedding = self.embedding.ready_for(tokens, jnp.dtype(self.config.dtype))
    return self

  def embedded(
    self, tokens_BS: Int[Array, "B S"], positions_BS: Array, total_of_rows: Any = None
  ) -> Float[Array, "B S D"]:
    """The residual stream in front of the first pair, in `model.dtype`.

    Args:
      tokens_BS, positions_BS: token ids, and their places in their rows.
      total_of_rows: see `Pass.total_of_rows`.
    """
    config = self.config
    apart = total_of_rows is not None
    look_up = functools.partial(looked_up_apart, total_of_rows) if apart else looked_up
    h_BSD = self.embedding(tokens_BS, positions_BS, jnp.dtype(config.dtype), look_up)
    return times(h_BSD, config.embedding_multiplier)

  def gates_of(self, batch: Batch, turn: int | Array = 0) -> int | Array:
    """`Pass.gate` for a batch: with `router.tasks` the task of each row, else `turn`.

    Args:
      batch: its `domain` is the index of each row's task.
      turn: index of the gate whose turn it is (`router.compat.gates`).

    Raises:
      ConfigError: the model has tasks, and the batch does not say which.
    """
    if not self.router.tasks:
      return turn
    if batch.domain is None:
      raise ConfigError(
        f"the batch has no domain, got router.tasks={self.router.tasks}; give the index of each "
        "row's task as Batch.domain"
      )
    return jnp.asarray(batch.domain)

  def logits(self, h_BSD: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
    """Logits of the next token at every position: float32 [B, S, V].

    Example: `gpt.logits(gpt(tokens_BS).h_BSD)`. The model's call returns hidden states instead, so
    that training need not hold all logits at once.

    Args:
      h_BSD: `Output.h_BSD` of a call.

    Raises:
      ConfigError: `h_BSD` is no array.
    """
    check_array("h_BSD", h_BSD)
    return self.embedding.logits(h_BSD)


def run_batches_in_turns(
  models: Sequence[GPT], streams: Sequence[Int[Array, "B S"]], given: Sequence[Pass]
) -> list[Output]:
  """Runs several batches through the model in turns (`run_trunks`); arguments as for `route`."""
  return run_trunks(route(models, streams, given))


def route(
  models: Sequence[GPT], streams: Sequence[Int[Array, "B S"]], given: Sequence[Pass]
) -> Route:
  """The way of several batches through a language model: embedding, trunk, norm.

  Args:
    models: one per batch, with the same parameters, so that each batch has gradients of its own.
    streams: int32 token ids of each batch.
    given: one per batch. Positions, segments, mask, key, gate, caches and pairs are each batch's
      own; all other fields of the first one hold for all batches.
  """
  config, shared = models[0].config, given[0]
  contexts, starts = [], []
  for own, tokens_BS, one in zip(models, streams, given):
    own.check_tokens(tokens_BS, one)
    positions_BS = one.positions_BS
    if positions_BS is None:
      positions_BS = jnp.broadcast_to(own_positions(tokens_BS.shape[1]), tokens_BS.shape)
    segments_BS = one.segments_BS if config.document_mask else None
    contexts.append(context_of(shared, one, positions_BS, segments_BS))
    with jax.named_scope("embedding"):
      starts.append(own.embedded(tokens_BS, positions_BS, shared.total_of_rows))
  outs = yield Leg(models, starts, contexts, given)
  return [
    dataclasses.replace(out, h_BSD=times(own.norm(out.h_BSD), 1 / config.logits_scaling))
    for own, out in zip(models, outs)
  ]
