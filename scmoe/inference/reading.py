"""How `probe` and `record` embed a batch of text or images, with each token's domain and class."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from scmoe.base.batch import Batch, ImageBatch
from scmoe.models.gpt import GPT
from scmoe.models.trunk import Trunk
from scmoe.models.vision.model import VisionModel, pixels


class Reading(Protocol):
  """The methods by which `probe` and `record` read a kind of model, of text or of images.

  They give the model's trunks, the input of the first layer with each token's domain and class, and
  the step from one trunk to the next.
  """

  def trunks(self, model: Any) -> Sequence[Trunk]:
    """The model's trunks, in order."""
    ...

  def begin(self, model: Any, batch: Any) -> Begun:
    """Embeds a batch; returns this input of the first layer with the other fields of `Begun`."""
    ...

  def between(self, model: Any, number: int, h_BSD: Array) -> Array:
    """The input of trunk `number`, from h_BSD, the residual stream at the end of the trunk before.

    Only for `number` >= 1: the first trunk, number 0, has its input from `begin`.
    """
    ...


class Begun(NamedTuple):
  """The input of a model's first layer, with what layers and statistics read beside it.

  An array [B, 1] has one value for all tokens of a row.

  Attributes:
    h_BSD: the residual stream.
    positions_BS, segments_BS: see `Context`.
    mask_BS: bool [B, S] or [B, 1], True for tokens that count.
    domain_B: int [B], domain of each row.
    class_BS: int [B, S] or [B, 1], class of each token.
    router: router state of each trunk.
    gate: index of the gate that chooses, or of each row's gate (`Pass.gate`).
  """

  h_BSD: Array
  positions_BS: Array | None
  segments_BS: Array | None
  mask_BS: Array
  domain_B: Array
  class_BS: Array
  router: Sequence[Any]
  gate: int | Array = 0


@dataclasses.dataclass(frozen=True)
class ReadText:
  """A `Reading` of text by a language model; a table gives the class of each token id.

  Attributes:
    classes_V: int [V], class of each token id of the vocabulary.
    router: router state of the run; None or {} if it has none.
  """

  classes_V: Any
  router: Any = None

  def trunks(self, model: GPT) -> Sequence[Trunk]:
    """The language model itself, which is its only trunk."""
    return [model]

  def begin(self, model: GPT, batch: Batch) -> Begun:
    """Embeds tokens; padding (segment 0) does not count. A batch without domains has domain 0.

    Raises:
      ConfigError: the model has a gate for each task, and the batch has no domains.
    """
    rows = batch.inputs.shape[0]
    return Begun(
      model.embedded(batch.inputs, batch.positions),
      batch.positions,
      batch.segment_ids if model.config.document_mask else None,
      batch.segment_ids > 0,
      jnp.zeros(rows, jnp.int32) if batch.domain is None else batch.domain,
      jnp.asarray(self.classes_V, jnp.int32)[batch.inputs],
      [self.router or {}],
      model.gates_of(batch),
    )

  def between(self, model: GPT, number: int, h_BSD: Array) -> Array:
    """Raises NotImplementedError: a language model has one trunk, so nothing lies between two."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ReadImages:
  """A `Reading` of images by a classifier: each token has its image's label as class, and domain 0.

  Attributes:
    router: router state of the run; None or {} if it has none.
  """

  router: Any = None

  def trunks(self, model: VisionModel) -> Sequence[Trunk]:
    """The model's trunks in order: one of a ViT, one for each stage of a Swin."""
    return list(model.trunks)

  def begin(self, model: VisionModel, batch: ImageBatch) -> Begun:
    """Embeds the images; tokens of padding images (weight 0) do not count. See `Reading.begin`."""
    h_BSD = model.embedding(pixels(batch.images).astype(jnp.dtype(model.config.dtype)))
    labels_B = jnp.asarray(batch.labels)
    of_rows = batch.weights[:, None] > 0, jnp.zeros_like(labels_B), labels_B[:, None]
    return Begun(h_BSD, None, None, *of_rows, model.router_of(self.router))

  def between(self, model: VisionModel, number: int, h_BSD: Array) -> Array:
    """The residual stream after the merger in front of trunk `number`; see `Reading.between`."""
    return model.mergers[number - 1](h_BSD)
