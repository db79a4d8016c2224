"""The batches of token sequences and of images: pipelines make them; step and loss read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """B sequences of S tokens: numpy arrays on the host, jax arrays on devices.

  The A microbatches of a step are one `Batch` with leaves [A, B, S].

  Attributes:
    inputs: int32 [B, S], token ids.
    targets: int32 [B, S], the token that follows each.
    weights: float32 [B, S], weight of each token's loss; 0 leaves the token out of the loss.
    segment_ids: int32 [B, S], the document of each token: 1, 2, ... within a row; 0 is padding.
    positions: int32 [B, S], position of each token in its document.
    domain: int32 [B], index of each row's domain, the kind of text it comes from; None where the
      data have no domains.
  """

  inputs: Any
  targets: Any
  weights: Any
  segment_ids: Any
  positions: Any
  domain: Any = None

  @classmethod
  def of_tokens(cls, tokens: Any, targets: Any = None) -> Batch:
    """Makes a batch in which each row is one document and every token has weight 1.

    Args:
      tokens: int [..., B, S].
      targets: the next tokens. By default the row rolled by one, so that the last token's target
        is the row's first token.
    """
    tokens = np.asarray(tokens, np.int32)
    shifted = np.roll(tokens, -1, -1) if targets is None else np.asarray(targets, np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[-1], dtype=np.int32), tokens.shape)
    ones = np.ones(tokens.shape, np.int32)
    return cls(tokens, shifted, ones.astype(np.float32), ones, np.ascontiguousarray(positions))

  @classmethod
  def stack(cls, microbatches: Sequence[Batch]) -> Batch:
    """Stacks A microbatches of numpy arrays into one batch with leaves [A, ...]."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *microbatches)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ImageBatch:
  """B images: numpy arrays on the host, jax arrays on devices; a step's have leaves [A, B, ...].

  Pixels travel as bytes; the step changes them (`scmoe.models.vision.augment`).

  Attributes:
    images: uint8 [B, S, S, C].
    labels: int32 [B], class of each.
    weights: float32 [B], weight of each image's loss; 0: padding of a last batch.
    draws: uint32 [B, 2], epoch and index of each image, from which training draws its changes.
    partners: uint8 [B, S, S, C], the image with which each may be mixed; None without mixing.
    partner_labels: int32 [B], or None.
  """

  images: Any
  labels: Any
  weights: Any
  draws: Any
  partners: Any = None
  partner_labels: Any = None
