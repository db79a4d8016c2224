"""Batches of images, the same on every machine and after every restart.

Pixels are gathered from memory and sent as bytes: 1.5 MB for 512 images of CIFAR-10, well under a
millisecond. The random changes of an image are computed on the device, from the run's seed and the
epoch and index that travel with the image (`scmoe.models.vision.augment`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from scmoe.base.batch import ImageBatch
from scmoe.base.errors import ConfigError, DataError
from scmoe.data.config import DataConfig
from scmoe.data.images.files import from_files
from scmoe.data.images.labelled import Images, Labelled
from scmoe.data.images.made import digits, shapes

MADE = {"shapes": shapes, "digits": digits}
NAME = "images"  # name of the only domain that images have


def open_images(
  cfg: DataConfig,
  *,
  size: int,
  channels: int,
  classes: int,
  batch_size: int,
  seed: int,
  partners: bool = False,
  process_index: int = 0,
  process_count: int = 1,
  evaluated: bool = False,
  trained: bool = True,
) -> ImageData:
  """Reads, decodes and divides the images of a run.

  Args:
    cfg: the `data` section of the run's configuration.
    size, channels, classes: of the model.
    batch_size: images of the global batch; each process gets batch_size / process_count of them.
    seed: of the order, and of the partners.
    partners: whether each image is sent with another one, to be mixed with it.
    process_index, process_count: this process among those that read together.
    evaluated: whether nothing is trained. If no image is for validation, all images then are, and
      there may be fewer than one batch.
    trained: whether the caller reads training batches, so that there must be one at least.

  Raises:
    ConfigError: a field cannot be used.
    DataError: images are missing, damaged, of unknown classes or, to train, fewer than one batch.
  """
  cfg.check()
  if batch_size < 1 or batch_size % process_count:
    raise ConfigError(
      f"train.batch_size={batch_size} is not divisible by the {process_count} processes; "
      f"use a multiple of {process_count}"
    )
  if cfg.source in MADE:
    found = MADE[cfg.source](size, channels, cfg.validation_fraction)
  else:
    found = from_files(cfg, size, channels)
  found.check_labels(classes)
  if evaluated and not len(found.validation):
    found = Images(found.validation, found.train, found.names, found.digest, found.bad)
  data = ImageData(cfg, found, batch_size, seed, partners, process_index, process_count)
  if trained and not evaluated:
    data.check_size()
  return data


class ImageData:
  """The images of a run; `open_images` makes it. It has the interface of `scmoe.data.Data`.

  Args:
    config, images, batch_size, seed, partners, process_index, process_count: as of `open_images`.
  """

  domains = (NAME,)

  def __init__(
    self,
    config: DataConfig,
    images: Images,
    batch_size: int,
    seed: int,
    partners: bool = False,
    process_index: int = 0,
    process_count: int = 1,
  ):
    self.config, self.images = config, images
    self.batch_size, self.seed, self.partners = batch_size, seed, partners
    self.process_index, self.process_count = process_index, process_count

  @property
  def validation_domains(self) -> tuple[str, ...]:
    """The domains with validation images: `images`, or none."""
    return self.domains if len(self.images.validation) else ()

  @property
  def share(self) -> int:
    """The number of images of a global batch that this process reads."""
    return self.batch_size // self.process_count

  def train(self) -> ImageIterator:
    """An endless iterator over training batches; every epoch has every training image once."""
    return ImageIterator(self)

  def validation(self, domain: str | None = None, max_batches: int | None = None) -> Held:
    """Validation batches, the same in every call; the last one is filled up with weight 0.

    Args:
      domain: `images` or None.
      max_batches: at most so many; None: all.

    Raises:
      DataError: there is no such domain, or there are no validation images.
    """
    if domain not in (None, NAME):
      raise DataError(f"no domain {domain!r} in the data; one of: {NAME}")
    if not len(self.images.validation):
      raise DataError(
        "the data have no validation images; raise data.validation_fraction="
        f"{self.config.validation_fraction}"
      )
    return Held(self, max_batches)

  def passes(self, rows: int) -> dict[str, float]:
    """{}, so that nobody warns of repeated data: images are meant to be read in many epochs."""
    del rows
    return {}

  def epochs(self, rows: int) -> float:
    """How many times a run that reads `rows` images passes over the training images."""
    return rows / max(len(self.images.train), 1)

  def check_size(self) -> None:
    """Checks that the training images fill at least one batch.

    Raises:
      DataError: they do not.
    """
    if len(self.images.train) < self.batch_size:
      raise DataError(
        f"there are {len(self.images.train)} training images, fewer than train.batch_size="
        f"{self.batch_size}; use a smaller batch or more images"
      )

  def fingerprint(self) -> dict[str, Any]:
    """JSON-able identity of the training batches: it changes if their order or content would.

    Source, digest and number of images, classes, seed, batch size, partners, number of processes.
    """
    return {
      "source": self.config.source,
      "digest": self.images.digest,
      "rows": [len(self.images.train)],
      "classes": len(self.images.names),
      "seed": self.seed,
      "batch_size": self.batch_size,
      "partners": self.partners,
      "process_count": self.process_count,
    }

  def summary(self) -> str:
    """One line for the run's header: source, numbers of images and classes, and size."""
    found, where = self.images, self.config.path or self.config.source
    skipped = f", {found.bad} bad ones skipped" if found.bad else ""
    side = found.train.images.shape[1]
    return (
      f"data {where}: {len(found.train):,} training images, {len(found.validation):,} for "
      f"validation, {len(found.names)} classes, {side} pixels a side{skipped}"
    )

  def order(self, epoch: int, purpose: str = "order") -> np.ndarray:
    """int64 [N], the indices of the training images in the random order of an epoch.

    Args:
      epoch: from 0.
      purpose: "order", or "partner" for the order of the images' partners.
    """
    name = f"{self.seed}/{epoch}/{purpose}".encode()
    bits = np.random.PCG64(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big"))
    return np.argsort(bits.random_raw(len(self.images.train)), kind="stable")


class ImageIterator:
  """Training batches without end; its position can be stored and restored.

  Image number n of the run is place n % N of epoch n // N: a batch may end one epoch and begin the
  next. Each process reads a contiguous part of every global batch, as jax divides it.
  """

  def __init__(self, data: ImageData):
    self._data, self._next = data, 0
    self._orders: dict[tuple[int, str], np.ndarray] = {}

  def __iter__(self) -> ImageIterator:
    return self

  def __next__(self) -> ImageBatch:
    data, train = self._data, self._data.images.train
    start = self._next * data.batch_size + data.process_index * data.share
    epoch, place = np.divmod(np.arange(start, start + data.share), len(train))
    index = self._placed(epoch, place, "order")
    self._next += 1
    own, weights = train[index], np.ones(data.share, np.float32)
    draws = np.stack([epoch, index], 1).astype(np.uint32)
    if not data.partners:
      return ImageBatch(own.images, own.labels, weights, draws)
    other = train[self._placed(epoch, index, "partner")]
    return ImageBatch(own.images, own.labels, weights, draws, other.images, other.labels)

  def _placed(self, epoch: np.ndarray, place: np.ndarray, purpose: str) -> np.ndarray:
    """The indices of the images at these places of these epochs' orders."""
    found = np.empty_like(place)
    for number in np.unique(epoch):
      key = int(number), purpose
      if key not in self._orders:
        old = [k for k in self._orders if k[1] == purpose and k[0] < number - 1]
        for k in old:
          del self._orders[k]
        self._orders[key] = self._data.order(*key)
      here = epoch == number
      found[here] = self._orders[key][place[here]]
    return found

  def state(self) -> dict[str, Any]:
    """The position after the last batch given out, JSON-able: the number of batches so far."""
    return {"next_index": self._next}

  def restore(self, state: dict[str, Any]) -> None:
    """Goes to a position that `state` returned: the next batch is the one that followed then.

    Raises:
      DataError: not a state of this iterator.
    """
    position = state.get("next_index") if isinstance(state, dict) else None
    if isinstance(position, bool) or not isinstance(position, int) or position < 0:
      raise DataError(f"data position {state!r} is not one of this version: needs next_index >= 0")
    self._next = position


class Held:
  """A finite, repeatable sequence of validation batches, the last one filled up with weight 0.

  Args:
    data: the images.
    max_batches: at most so many batches; None: all.
  """

  def __init__(self, data: ImageData, max_batches: int | None):
    self._data = data
    batches = -(-len(data.images.validation) // data.batch_size)
    self._batches = batches if max_batches is None else min(batches, max_batches)
    # The order is random, the same in every run: a few batches are a fair sample even of files that
    # are sorted by class.
    bits = np.random.PCG64(1)
    count = len(data.images.validation)
    self._order = np.argsort(bits.random_raw(count), kind="stable")

  def __len__(self) -> int:
    return self._batches

  def __iter__(self) -> Iterator[ImageBatch]:
    data, held, count = self._data, self._data.images.validation, len(self._order)
    for batch in range(self._batches):
      start = batch * data.batch_size + data.process_index * data.share
      place = np.arange(start, start + data.share)
      index = self._order[np.minimum(place, count - 1)]
      own: Labelled = held[index]
      weights = (place < count).astype(np.float32)
      draws = np.stack([np.zeros_like(index), index], 1).astype(np.uint32)
      yield ImageBatch(own.images, own.labels, weights, draws)
