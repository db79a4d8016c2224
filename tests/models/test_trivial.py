"""TrivialAugment's operations against plain float64 NumPy, one image at a time."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from scmoe.base.batch import ImageBatch
from scmoe.models.vision import trivial
from scmoe.models.vision.augment import PURPOSES, AugmentConfig, augmented, partner_part
from scmoe.training.schema import upgraded

SIZE = 24  # 576 pixels: a step of equalize is 1 or 2
GREY = 127.5


# -- oracles --------------------------------------------------------------------------------------


def moved(image, name, strength, sign):
  """(float64 bytes of the image after an operation on its shape, pixels that rounding may decide).

  Each pixel's centre is looked up in the plane; outside the image it is grey.
  """
  size, share = len(image), sign * strength / 30
  result = np.full(image.shape, GREY)
  unsure = np.zeros((size, size), bool)
  for row in range(size):
    for column in range(size):
      x, y = column + 0.5, row + 0.5
      if name == "shear_x":
        x += 0.99 * share * y
      elif name == "shear_y":
        y += 0.99 * share * x
      elif name == "translate_x":
        x += math.trunc(round(size * share, 9))
      elif name == "translate_y":
        y += math.trunc(round(size * share, 9))
      elif name == "rotate":
        turn, right, down = math.radians(135 * share), x - size / 2, y - size / 2
        x = size / 2 + math.cos(turn) * right - math.sin(turn) * down
        y = size / 2 + math.sin(turn) * right + math.cos(turn) * down
      unsure[row, column] = min(abs(x - round(x)), abs(y - round(y))) < 1e-3
      if 0 <= x < size and 0 <= y < size:
        result[row, column] = image[math.floor(y), math.floor(x)]
  return result, unsure


def coloured(image, name, strength, sign):
  """float64 bytes of the image after an operation on its colours, in Pillow's definition."""
  image, factor = image.astype(np.float64), 1 + 0.99 * sign * strength / 30
  grey = image @ [[0.299], [0.587], [0.114]] if image.shape[-1] == 3 else image
  if name == "brightness":
    return np.clip(factor * image, 0, 255)
  if name == "color":
    return np.clip((1 - factor) * grey + factor * image, 0, 255)
  if name == "contrast":
    return np.clip((1 - factor) * grey.mean() + factor * image, 0, 255)
  if name == "sharpness":
    smooth = image.copy()
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    for row in range(1, len(image) - 1):
      for column in range(1, len(image) - 1):
        square = image[row - 1 : row + 2, column - 1 : column + 2]
        smooth[row, column] = np.tensordot(kernel, square)
    return np.clip((1 - factor) * smooth + factor * image, 0, 255)
  if name == "posterize":
    lost = 2 ** round(strength / 5)
    return np.floor(image / lost) * lost
  if name == "solarize":
    return np.where(image < 255 * (30 - strength) / 30, image, 255 - image)
  tables = {"autocontrast": stretched, "equalize": flat}
  return np.stack([tables[name](channel) for channel in np.moveaxis(image, -1, 0)], -1)


def stretched(channel):
  low, high = channel.min(), channel.max()
  return channel if low == high else (channel - low) * 255 / (high - low)


def flat(channel):
  """The words of `PIL.ImageOps.equalize`'s table, byte after byte."""
  counts = [int((channel == byte).sum()) for byte in range(256)]
  used = [count for count in counts if count]
  step = (sum(used) - used[-1]) // 255
  if len(used) < 2 or step == 0:
    return channel
  table, n = [], step // 2
  for count in counts:
    table.append(min(n // step, 255))
    n += count
  return np.array(table, np.float64)[channel.astype(int)]


def pictures(channels):
  """uint8 [4, S, S, C]: noise, few dark bytes, one colour, and a picture with a bright corner."""
  numbers = np.random.default_rng(0)
  shape = (SIZE, SIZE, channels)
  noise = numbers.integers(0, 256, shape)
  slope = np.clip(numbers.normal(90, 40, shape), 0, 255)
  slope[:10, :10] = 255
  dark, even = numbers.integers(30, 40, shape), np.full(shape, 77)
  return np.stack([noise, dark, even, slope]).astype(np.uint8)


CHANGES = [
  (strength, negative) for strength in (0, 1, 7, 10, 15, 20, 24, 30) for negative in (0, 1)
]


@pytest.fixture(scope="module", params=[3, 1])
def results(request):
  """(pictures, {(operation, strength, negative): float64 bytes [4, S, S, C] as computed})."""
  images = pictures(request.param)
  of_images = jax.vmap(trivial.changed, (0, None))
  changed = jax.jit(
    lambda images, operations: jax.lax.map(lambda o: of_images(images, o), operations)
  )
  cases = [(n, s, m) for n in range(len(trivial.OPERATIONS)) for s, m in CHANGES]
  index, strength, negative = np.array(cases, np.int32).T
  operations = trivial.Operation(index, strength, negative.astype(bool))
  found = np.asarray(changed(images.astype(np.float32) / 127.5 - 1, operations), np.float64)
  return images, dict(zip(cases, (found + 1) * 127.5, strict=True))


@pytest.mark.parametrize("name", trivial.SHAPES)
def test_an_operation_on_the_shape_is_the_oracle(results, name):
  images, found = results
  for strength, negative in CHANGES:
    for image, got in zip(images, found[trivial.OPERATIONS.index(name), strength, negative]):
      want, unsure = moved(image, name, strength, 1 - 2 * negative)
      assert unsure.mean() < 0.1
      np.testing.assert_allclose(got[~unsure], want[~unsure], atol=1e-4)


@pytest.mark.parametrize("name", trivial.COLOURS)
def test_an_operation_on_the_colours_is_the_oracle(results, name):
  images, found = results
  for strength, negative in CHANGES:
    for image, got in zip(images, found[trivial.OPERATIONS.index(name), strength, negative]):
      want = coloured(image, name, strength, 1 - 2 * negative)
      np.testing.assert_allclose(got, want, atol=2e-4)


# -- what is drawn --------------------------------------------------------------------------------


def test_operations_strengths_and_signs_are_equally_likely():
  keys = jax.random.split(jax.random.key(0), 14_000)
  got = jax.vmap(lambda key: trivial.drawn(key, 0.5))(keys)
  share = np.bincount(got.index, minlength=14) / len(keys)
  np.testing.assert_allclose(share[1:], 0.5 / 14, atol=0.01)
  np.testing.assert_allclose(share[0], 0.5 + 0.5 / 14, atol=0.02)
  np.testing.assert_allclose(np.bincount(got.strength) / len(keys), [1 / 31] * 31, atol=0.01)
  assert np.mean(got.negative) == pytest.approx(0.5, abs=0.02)
  all_of_them = jax.vmap(lambda key: trivial.drawn(key, 1.0))(keys).index
  np.testing.assert_allclose(np.bincount(all_of_them) / len(keys), [1 / 14] * 14, atol=0.01)


def batch_of(rows, flipped=False):
  """`rows` images of noise with draws of their own; each is its own partner."""
  numbers = np.random.default_rng(1)
  images = numbers.integers(0, 256, (rows, SIZE, SIZE, 3), dtype=np.uint8)
  images = images[:, :, ::-1] if flipped else images
  labels, draws = np.zeros(rows, np.int32), np.stack([np.zeros(rows), np.arange(rows)], 1)
  return ImageBatch(images, labels, labels, draws.astype(np.uint32), images, labels)


def test_images_change_after_the_flip_and_before_they_are_mixed_by_numbers_of_their_own():
  batch, config = batch_of(32), AugmentConfig(trivial=1.0)
  change = jax.jit(augmented, static_argnums=(1, 2))
  own = np.asarray(change(batch, config, 3))
  flip = dataclasses.replace(config, flip=1.0)
  np.testing.assert_array_equal(change(batch_of(32, flipped=True), flip, 3), own)
  cut = dataclasses.replace(config, cutmix=1.0)
  mixed, of_partner = np.asarray(change(batch, cut, 3)), partner_part(batch, cut, 3) > 0.5
  np.testing.assert_array_equal(mixed[~of_partner], own[~of_partner])
  both = [i for i in range(32) if of_partner[i].sum() > 50]
  other = [i for i in both if not np.array_equal(mixed[i][of_partner[i]], own[i][of_partner[i]])]
  assert len(both) > 10
  assert len(other) > 0.8 * len(both)


def test_the_numbers_of_earlier_uses_stay():
  """A use's key follows from its place: one more in front would change every earlier run."""
  assert PURPOSES[:4] == ("own", "partner", "mix", "erase")


def test_earlier_runs_had_none():
  stored = {"schema": 2, "config": {"augment": {"flip": 0.5}}}
  assert upgraded(stored)["config"]["augment"] == {"flip": 0.5, "trivial": 0.0}
