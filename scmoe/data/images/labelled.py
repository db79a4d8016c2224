"""Labelled images in memory, and their division into training and validation."""

from __future__ import annotations

import dataclasses

import numpy as np

from scmoe.base.errors import DataError


@dataclasses.dataclass(frozen=True)
class Labelled:
  """N images of one size.

  Attributes:
    images: uint8 [N, S, S, C].
    labels: int32 [N].
  """

  images: np.ndarray
  labels: np.ndarray

  def __len__(self) -> int:
    return len(self.labels)

  def __getitem__(self, which: np.ndarray) -> Labelled:
    return Labelled(self.images[which], self.labels[which])


@dataclasses.dataclass(frozen=True)
class Images:
  """The images of one source, divided into training and validation.

  Attributes:
    train, validation: the two parts; either may be empty.
    names: of the classes, in the order of their labels; their numbers where the source names none.
    digest: of content and division.
    bad: number of images that could not be decoded and were left out.
  """

  train: Labelled
  validation: Labelled
  names: tuple[str, ...]
  digest: str
  bad: int = 0

  def check_labels(self, classes: int) -> None:
    """Checks that a model of so many classes has a score for every label.

    Raises:
      DataError: a label is not in 0 to `classes` - 1.
    """
    for part in (self.train, self.validation):
      for worst in (part.labels.min(initial=0), part.labels.max(initial=0)):
        if not 0 <= worst < classes:
          raise DataError(
            f"an image has label {worst}, which is none of the {classes} of model.vision.classes "
            f"(0 to {classes - 1}); raise model.vision.classes, or mend the labels"
          )
