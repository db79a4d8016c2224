"""Random changes of images and labels for training, made on the device inside the step.

Every random number follows from the run's seed, the epoch and the image's index alone, so an image
is changed in the same way on every mesh, in every split into microbatches and after every restart.
An image's partner for mixup and cutmix is another image of the data set, which the pipeline draws
by the same three numbers and sends along: no image depends on its neighbours in the batch.

    B  images    S  pixels on a side    C  channels
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from scmoe.base.batch import ImageBatch
from scmoe.base.options import Options, option
from scmoe.models.vision import trivial
from scmoe.models.vision.model import pixels


@dataclasses.dataclass(frozen=True)
class AugmentConfig(Options, path="augment"):
  """How training changes images and labels. The defaults change nothing."""

  flip: float = option(0.0, "share of images that are mirrored left to right", minimum=0, maximum=1)
  crop: int = option(
    0,
    "pixels of grey that surround an image before a random piece of its own size is cut out of it; "
    "4 is usual for 32 x 32",
    minimum=0,
  )
  trivial: float = option(
    0.0,
    "share of images for which one operation on shape or colours and its strength are drawn "
    "(TrivialAugment Wide, arXiv 2103.10158); 1 is usual",
    minimum=0,
    maximum=1,
  )
  erase: float = option(
    0.0,
    "share of images in which a random rectangle becomes grey (random erasing, arXiv 1708.04896; "
    "timm reprob)",
    minimum=0,
    maximum=1,
  )
  erase_least: float = option(
    0.02, "erase: smallest rectangle, as a share of the image", above=0, maximum=1
  )
  erase_most: float = option(
    1 / 3, "erase: largest rectangle, as a share of the image", above=0, maximum=1
  )
  mixup: float = option(
    0.0,
    "alpha of the Beta(alpha, alpha) from which the share of an image in its mixture with another "
    "one is drawn (mixup, arXiv 1710.09412); 0: off",
    minimum=0,
  )
  cutmix: float = option(
    0.0,
    "alpha of the Beta(alpha, alpha) from which the area that a rectangle of another image leaves "
    "is drawn (cutmix, arXiv 1905.04899); 0: off; with mixup each image has one of both",
    minimum=0,
  )
  mix_share: float = option(
    1.0,
    "mixup and cutmix: share of the images that are mixed (timm mixup_prob)",
    minimum=0,
    maximum=1,
  )
  label_smoothing: float = option(
    0.0,
    "share of the label that is spread over all classes; evaluation has none",
    minimum=0,
    maximum=1,
  )

  @property
  def mixes(self) -> bool:
    """Whether images need partners: mixup or cutmix is on, and `mix_share` is not 0."""
    return bool((self.mixup or self.cutmix) and self.mix_share)


def augmented(
  batch: ImageBatch, config: AugmentConfig, seed: int | Array
) -> Float[Array, "B S S C"]:
  """The images of a training batch, changed: float32 around 0.

  Images and partners are flipped, cropped and changed by `trivial`, then mixed; rectangles are
  erased last.

  Args:
    batch: a training batch with `draws`, and with `partners` if `config.mixes`.
    config: what is changed.
    seed: the run's seed.
  """

  def changed(images: Array, whose: str) -> Float[Array, "B S S C"]:
    move = lambda key, image: _moved(key, image, config)
    images_BSSC = jax.vmap(move)(_keys(batch, seed, whose), pixels(images))
    if not config.trivial:
      return images_BSSC
    change = lambda key, image: trivial.changed(image, trivial.drawn(key, config.trivial))
    return jax.vmap(change)(_keys(batch, seed, f"{whose}_trivial"), images_BSSC)

  own_BSSC = changed(batch.images, "own")
  if config.mixes:
    other_BSSC = changed(batch.partners, "partner")
    part_BSS1 = partner_part(batch, config, seed)[..., None]
    own_BSSC = (1 - part_BSS1) * own_BSSC + part_BSS1 * other_BSSC
  if config.erase:
    erase = lambda key, image: _erased(key, image, config)
    own_BSSC = jax.vmap(erase)(_keys(batch, seed, "erase"), own_BSSC)
  return own_BSSC


def partner_part(
  batch: ImageBatch, config: AugmentConfig, seed: int | Array
) -> Float[Array, "B S S"]:
  """The partner's part in each pixel of the images, float32 from 0 to 1.

  It is 1 - λ everywhere in an image (mixup), or 1 in a rectangle and 0 around it (cutmix), or 0
  everywhere if the image is not mixed (`mix_share`). Arguments as of `augmented`.
  """
  size = batch.images.shape[1:3]
  return jax.vmap(lambda key: _part(key, size, config))(_keys(batch, seed, "mix"))


def soft_labels(
  batch: ImageBatch, part_BSS: Float[Array, "B S S"] | None, classes: int, smoothing: float
) -> Float[Array, "B V"]:
  """The labels as distributions over the classes, float32.

  (1 - ε) (λ · label + (1 - λ) · partner's label) + ε / V, with 1 - λ the mean of the partner's part
  and ε the smoothing.

  Args:
    batch: a training batch.
    part_BSS: `partner_part`; None: nothing is mixed.
    classes: V.
    smoothing: ε.
  """
  label_BV = jax.nn.one_hot(batch.labels, classes)
  if part_BSS is not None:
    part_B1 = part_BSS.mean((1, 2))[:, None]
    other_BV = jax.nn.one_hot(batch.partner_labels, classes)
    label_BV = (1 - part_B1) * label_BV + part_B1 * other_BV
  return (1 - smoothing) * label_BV + smoothing / classes


# Uses of an image's random numbers. The key of a use follows from its place here: new uses go last.
PURPOSES = ("own", "partner", "mix", "erase", "own_trivial", "partner_trivial")


def _keys(batch: ImageBatch, seed: int | Array, purpose: str) -> Array:
  """Keys [B], one for each image, that follow from seed, epoch, index of the image and purpose."""
  base = jax.random.fold_in(jax.random.key(seed), PURPOSES.index(purpose))
  of_image = lambda draw: jax.random.fold_in(jax.random.fold_in(base, draw[0]), draw[1])
  return jax.vmap(of_image)(batch.draws)


def _moved(key: Array, image: Float[Array, "S S C"], config: AugmentConfig) -> Array:
  """The image, mirrored with the probability `flip`, then shifted at random by up to `crop` pixels.

  Grey pixels fill the sides from which the image has moved away.
  """
  of_flip, of_crop = jax.random.split(key)
  if config.flip:
    mirrored = jax.random.uniform(of_flip) < config.flip
    image = jnp.where(mirrored, image[:, ::-1], image)
  if config.crop:
    wide = jnp.pad(image, ((config.crop, config.crop), (config.crop, config.crop), (0, 0)))
    row, column = jax.random.randint(of_crop, (2,), 0, 2 * config.crop + 1)
    image = jax.lax.dynamic_slice(wide, (row, column, 0), image.shape)
  return image


def _part(key: Array, size: tuple[int, ...], config: AugmentConfig) -> Float[Array, "S S"]:
  """`partner_part` of one image."""
  of_use, of_kind, of_share, of_box = jax.random.split(key, 4)
  used = jax.random.uniform(of_use) < config.mix_share
  uniform, parts = jax.random.uniform(of_share), []
  if config.mixup:
    parts.append(jnp.full(size, _beta(uniform, config.mixup)))
  if config.cutmix:
    side = jnp.sqrt(_beta(uniform, config.cutmix))
    # The rectangle is cut at the image's edges: the part inside the image is the partner's.
    parts.append(_box(of_box, size, side, side).astype(jnp.float32))
  part = parts[0] if len(parts) == 1 else jnp.where(jax.random.bernoulli(of_kind), *parts)
  return jnp.where(used, part, 0.0)


def _beta(uniform: Array, alpha: float) -> Array:
  """The Beta(alpha, alpha) quantile of a number in [0, 1), interpolated in a table.

  `jax.random.beta` rejects draws in loops, which cost more than the rest of this file.
  """
  import scipy.special  # here: it takes 0.1 to 0.5 s, which every run of text would pay

  places = np.linspace(0, 1, 4097)
  table = scipy.special.betaincinv(alpha, alpha, places)
  return jnp.interp(uniform, jnp.asarray(places, jnp.float32), jnp.asarray(table, jnp.float32))


def _erased(key: Array, image: Float[Array, "S S C"], config: AugmentConfig) -> Array:
  """The image; with the probability `erase`, a random rectangle of it is set to grey.

  The rectangle's height is 0.3 to 1 / 0.3 times its width; the image's edges may cut it.
  """
  of_use, of_area, of_shape, of_box = jax.random.split(key, 4)
  used = jax.random.uniform(of_use) < config.erase
  area = jax.random.uniform(of_area, minval=config.erase_least, maxval=config.erase_most)
  ratio = jnp.exp(jax.random.uniform(of_shape, minval=jnp.log(0.3), maxval=-jnp.log(0.3)))
  inside = _box(of_box, image.shape[:2], jnp.sqrt(area * ratio), jnp.sqrt(area / ratio))
  return jnp.where(used & inside[..., None], 0.0, image)


def _box(key: Array, size: tuple[int, ...], height: Array, width: Array) -> Array:
  """bool [S, S], True inside a rectangle with its centre anywhere in the image, cut at the edges.

  Args:
    key: random key of the rectangle's centre.
    size: height and width of the image, in pixels.
    height, width: those of the rectangle before it is cut, as shares of the image's.
  """
  centre = jax.random.uniform(key, (2,))
  within = [
    jnp.abs((jnp.arange(pixels) + 0.5) / pixels - middle) < extent / 2
    for pixels, middle, extent in zip(size, centre, (height, width))
  ]
  return within[0][:, None] & within[1][None, :]
