"""TrivialAugment Wide (Müller & Hutter, arXiv 2103.10158): one random operation on an image.

An operation changes the image's shape or its colours, with one of 31 strengths. Operations and
strengths are those of the paper's wide space as torchvision's `TrivialAugmentWide` has them, and an
operation does what Pillow's does. Three things differ: results are not rounded to bytes, a
translation has at most the image's side (32 pixels for images of 32 x 32), and places that the
image leaves become grey, as those of `augment.crop` do.

An image in a vectorised program cannot skip work: the affine map and all colour operations are
computed for each image, and the drawn operation selects one result.

    S  pixels on a side    C  channels, 1 or 3
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

SHAPES = ("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate")
COLOURS = (
  "brightness",
  "color",
  "contrast",
  "sharpness",
  "posterize",
  "solarize",
  "autocontrast",
  "equalize",
)
OPERATIONS = SHAPES + COLOURS
STRENGTHS = 31
_LAST = STRENGTHS - 1
_SHEAR, _DEGREES, _FACTOR = 0.99, 135.0, 0.99  # at the largest strength
_FINE = 16  # binary digits behind the point of a source pixel's place
_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, of red, green and blue


class Operation(NamedTuple):
  """An operation, its strength and its sign."""

  index: Array  # int32 [], of `OPERATIONS`
  strength: Array  # int32 [], 0 to 30; identity, autocontrast and equalize have one strength only
  negative: Array  # bool [], the sign of shifts, turns and factors


def drawn(key: Array, share: float) -> Operation:
  """A random operation: with the probability 1 - `share` the identity, else any of `OPERATIONS`."""
  use, index, strength, sign = jax.random.uniform(key, (4,))
  one_of = lambda uniform, count: (uniform * count).astype(jnp.int32)
  index = jnp.where(use < share, one_of(index, len(OPERATIONS)), 0)
  return Operation(index, one_of(strength, STRENGTHS), sign < 0.5)


def changed(image: Float[Array, "S S C"], operation: Operation) -> Float[Array, "S S C"]:
  """The image after an operation; float32 from -1 to 1 with grey at 0, as the image is.

  With i the strength, 0 to 30, and ± the sign:

  | operation                              | what it does                                         |
  |----------------------------------------|------------------------------------------------------|
  | identity                               | nothing                                              |
  | shear_x, shear_y                       | shifts row (column) number n by ±0.99 n i/30 pixels  |
  | translate_x, translate_y               | shifts by ±i/30 of the side, rounded down to pixels  |
  | rotate                                 | turns the image by ±135 i/30 degrees                 |
  | brightness, color, contrast, sharpness | multiplies by 1 ± 0.99 i/30 the difference from      |
  |                                        | black, the grey image, its mean, the smoothed image  |
  | posterize                              | keeps the upper 8 - round(i/5) bits of a byte        |
  | solarize                               | inverts bytes from 255 - 8.5 i on                    |
  | autocontrast                           | stretches the bytes of each channel to 0 to 255      |
  | equalize                               | makes the histogram of each channel flat             |
  """
  return jax.lax.select_n(
    operation.index, *[_resampled(image, operation)] * len(SHAPES), *_coloured(image, operation)
  )


def _resampled(image: Float[Array, "S S C"], operation: Operation) -> Float[Array, "S S C"]:
  """The image after an operation of `SHAPES`: each pixel is that of its source's place, or grey."""
  shape = jnp.where(operation.index < len(SHAPES), operation.index, 0)
  maps = jnp.asarray(_maps(image.shape[0]))
  (a, b, c), (d, e, f) = maps[shape, operation.strength, operation.negative.astype(jnp.int32)]
  place = jnp.arange(image.shape[0])
  column, row = place[None, :], place[:, None]
  # Whole numbers: where a place falls between two pixels, every program takes the same one.
  x, y = ((a * column + b * row + c) >> _FINE, (d * column + e * row + f) >> _FINE)
  inside = (x >= 0) & (x < len(place)) & (y >= 0) & (y < len(place))
  return jnp.where(inside[..., None], image.at[y, x].get(mode="clip"), 0.0)


@functools.cache
def _maps(size: int) -> Int[np.ndarray, "shapes strengths signs 2 3"]:
  """int32: the maps (a, b, c), (d, e, f) from a pixel (x, y) to its source, in units of 2**-16.

  The source is pixel (a x + b y + c, d x + e y + f), rounded down. The maps are those of Pillow's
  `Image.transform` and `Image.rotate`, which shear about the image's upper left corner and rotate
  about its centre.
  """
  maps = np.zeros((len(SHAPES), STRENGTHS, 2, 2, 3))
  maps[..., 0, 0] = maps[..., 1, 1] = 1
  for strength in range(STRENGTHS):
    for negative, sign in enumerate((1, -1)):
      at = lambda name: maps[SHAPES.index(name), strength, negative]  # noqa: B023
      shear, shift = sign * _SHEAR * strength / _LAST, sign * (size * strength // _LAST)
      at("shear_x")[0, 1] = at("shear_y")[1, 0] = shear
      at("translate_x")[0, 2] = at("translate_y")[1, 2] = shift
      turn = math.radians(sign * _DEGREES * strength / _LAST)
      cosine, sine = round(math.cos(turn), 15), round(math.sin(turn), 15)
      along, across = (1 - cosine + sine) * size / 2, (1 - cosine - sine) * size / 2
      at("rotate")[:] = (cosine, -sine, along), (sine, cosine, across)
  maps[..., 2] += maps[..., :2].sum(-1) / 2  # a pixel's centre is half a pixel from its corner
  return np.floor(maps * 2**_FINE + 0.5).astype(np.int32)


def _coloured(image: Float[Array, "S S C"], operation: Operation) -> list[Array]:
  """The image after each operation of `COLOURS`, in their order."""
  level = jnp.round(jnp.clip((image + 1) * 127.5, 0, 255))  # bytes; 0, grey, becomes 128
  byte, strength = level.astype(jnp.int32), operation.strength
  grey = level
  if image.shape[-1] == len(_LUMA):
    grey = (level * jnp.asarray(_LUMA)).sum(-1, keepdims=True)
  factor = 1 + jnp.where(operation.negative, -_FACTOR, _FACTOR) * strength / _LAST
  blended = lambda ground: jnp.clip(ground + factor * (level - ground), 0, 255)
  cut = (strength + 2) // 5  # strength / 5, rounded
  low, high = level.min((0, 1)), level.max((0, 1))
  results = [
    blended(0.0),
    blended(grey),
    blended(grey.mean()),
    blended(_smoothed(level)),
    ((byte >> cut) << cut).astype(jnp.float32),
    jnp.where(level < 255 - 8.5 * strength, level, 255 - level),
    jnp.where(high > low, (level - low) * (255 / jnp.maximum(high - low, 1)), level),
    _equalized(byte).astype(jnp.float32),
  ]
  return [result / 127.5 - 1 for result in results]


def _smoothed(level: Float[Array, "S S C"]) -> Float[Array, "S S C"]:
  """The mean over 3 x 3 pixels in which the middle one counts 5 times; the border stays as it is.

  This is the smooth image of Pillow's `ImageEnhance.Sharpness`.
  """
  wide = jnp.pad(level, ((1, 1), (1, 1), (0, 0)))
  rows = wide[:-2] + wide[1:-1] + wide[2:]
  square = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]
  place = jnp.arange(level.shape[0])
  inner = (place > 0) & (place < len(place) - 1)
  return jnp.where((inner[:, None] & inner)[..., None], (square + 4 * level) / 13, level)


def _equalized(byte: Int[Array, "S S C"]) -> Int[Array, "S S C"]:
  """The bytes of each channel, by the table of Pillow's `ImageOps.equalize`.

  A byte becomes (step // 2 + n) // step, at most 255, with n pixels below it and step a 255th of
  the pixels that are below the largest byte. A step of 0 changes nothing.
  """
  channel = jnp.arange(byte.shape[-1])
  count = jnp.zeros((len(channel), 256), jnp.int32).at[channel, byte].add(1)
  # One product sums the counts below each byte, where a cumulative sum takes eight passes. Counts
  # are exact in float32 up to 2**24 pixels.
  before = jnp.triu(jnp.ones((256, 256), jnp.float32), 1)
  below = jnp.matmul(count.astype(jnp.float32), before, precision="highest").astype(jnp.int32)
  largest = byte.max((0, 1))
  step = (below[channel, largest] // 255)[:, None]
  table = jnp.minimum((step // 2 + below) // jnp.maximum(step, 1), 255)
  return jnp.where(step > 0, table, jnp.arange(256))[channel, byte]
