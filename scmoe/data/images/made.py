"""Images without files: shapes that this module draws, and scikit-learn's digits.

Shapes are drawn from the raw 64-bit stream of PCG64, which numpy keeps stable for ever, by integer
arithmetic: they are the same on every platform.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from scmoe.data.images.labelled import Images, Labelled
from scmoe.data.packages import need

# A shape is a condition on x and y, a pixel's place relative to the shape's centre in 16ths of the
# shape's radius. It holds within |x|, |y| <= 16 only; no pixel outside belongs to a shape.
SHAPES = (
  ("disc", lambda x, y: x * x + y * y <= 256),
  ("ring", lambda x, y: (x * x + y * y <= 256) & (x * x + y * y >= 100)),
  ("square", lambda x, y: abs(x) <= 14),
  ("frame", lambda x, y: (abs(x) >= 8) | (abs(y) >= 8)),
  ("diamond", lambda x, y: abs(x) + abs(y) <= 16),
  ("triangle", lambda x, y: 2 * abs(x) <= y + 16),
  ("cross", lambda x, y: (abs(x) <= 5) | (abs(y) <= 5)),
  ("saltire", lambda x, y: abs(abs(x) - abs(y)) <= 6),
  ("rows", lambda x, y: (y + 16) // 8 % 2 == 0),
  ("columns", lambda x, y: (x + 16) // 8 % 2 == 0),
)
DRAWN = 20_000  # images, training and validation together
_AT_ONCE = 2_000  # images that are drawn in one call


def shapes(size: int, channels: int, fraction: float) -> Images:
  """20,000 images, each of one of ten shapes, with random place, size and colours, and noise.

  Args:
    size, channels: of an image.
    fraction: share of the images that is for validation.
  """
  bits = np.random.PCG64(2024)
  parts = [_drawn(bits, _AT_ONCE, size, channels) for _ in range(DRAWN // _AT_ONCE)]
  every = Labelled(*(np.concatenate(arrays) for arrays in zip(*parts)))
  return _divided(every, fraction, tuple(name for name, _ in SHAPES), "shapes")


def digits(size: int, channels: int, fraction: float) -> Images:
  """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, enlarged without smoothing.

  Args:
    size: of an image; a multiple of 8 makes squares of equal size.
    channels: copies of the grey image.
    fraction: share of the images that is for validation.

  Raises:
    ConfigError: scikit-learn is not installed.
  """
  package: Any = need("sklearn.datasets", "data.source='digits'")
  found = package.load_digits()
  grey = (np.asarray(found.images) * 255 / 16).astype(np.uint8)
  at = np.arange(size) * 8 // size
  images = np.repeat(grey[:, at][:, :, at][..., None], channels, -1)
  labels = np.asarray(found.target, np.int32)
  return _divided(Labelled(images, labels), fraction, tuple(map(str, range(10))), "digits")


def _drawn(bits: np.random.PCG64, count: int, size: int, channels: int) -> tuple[Any, Any]:
  """(images, labels) of `count` shapes: uint8 [count, size, size, channels] and int32 [count].

  Args:
    bits: random numbers; the next ones are used.
    count, size, channels: as in the shape of the images.
  """
  draw = lambda shape, below: (bits.random_raw(int(np.prod(shape))) % below).reshape(shape)
  labels = draw((count,), len(SHAPES)).astype(np.int32)
  # Radius, centre and pixel places are in 16ths of a pixel.
  radius = (16 * size // 5 + draw((count,), 16 * size // 5 + 1)).astype(np.int64)
  centre = [radius + draw((count,), 1 << 30).astype(np.int64) % (16 * size - 2 * radius + 1)
            for _ in range(2)]  # fmt: skip
  pixel = 16 * np.arange(size) + 8
  y, x = (16 * (pixel[None] - c[:, None]) // radius[:, None] for c in centre)
  y, x = np.broadcast_arrays(y[:, :, None], x[:, None, :])
  inside = np.zeros((count, size, size), bool)
  for number, (_, condition) in enumerate(SHAPES):
    own = labels == number
    within = (abs(x[own]) <= 16) & (abs(y[own]) <= 16)
    inside[own] = within & condition(x[own], y[own])
  # Either the shape or its ground is light: dark 0 to 95, light 128 to 223, and noise up to 31.
  ground = draw((count, 1, 1, channels), 96).astype(np.int64)
  figure = 128 + draw((count, 1, 1, channels), 96).astype(np.int64)
  swapped = draw((count, 1, 1, 1), 2).astype(bool)
  ground, figure = np.where(swapped, figure, ground), np.where(swapped, ground, figure)
  noise = draw((count, size, size, channels), 32).astype(np.int64)
  return (np.where(inside[..., None], figure, ground) + noise).astype(np.uint8), labels


def _divided(every: Labelled, fraction: float, names: tuple[str, ...], name: str) -> Images:
  """The images, divided: the last ones, a share of `fraction`, are for validation.

  The order of the images mixes the classes. At least one image is for training.
  """
  held = min(round(fraction * len(every)), len(every) - 1)
  order, count = np.arange(len(every)), len(every) - held
  digest = hashlib.blake2b(f"{name} {fraction}".encode(), digest_size=16)
  digest.update(every.images.tobytes() + every.labels.tobytes())
  return Images(every[order[:count]], every[order[count:]], names, digest.hexdigest())
