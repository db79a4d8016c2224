"""The fingerprint of an array: the same over blocks, over shards and in plain arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import by_day_and_night
from jax.sharding import NamedSharding, PartitionSpec

from scmoe.training import fingerprint
from scmoe.training.fingerprint import survey

SHAPES = [(8, 6, 2048), (16, 2560), (4096,), (8, 3, 1), (2, 4, 50)]
SPECS = [(), ("data",), (None, "data"), ("expert", None, "data"), (("data", "expert"),)]


def plain(array):
  """By the definition, in Python's integers: `mixed` of each element's bits and position, added."""
  words = np.asarray(array).view(f"u{array.dtype.itemsize}").reshape(-1).astype(np.uint64)

  def mixed(x):
    low = np.uint64(0xFFFFFFFF)
    x = (x ^ (x >> np.uint64(16))) * np.uint64(0x85EBCA6B) & low
    x = (x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35) & low
    return x ^ (x >> np.uint64(16))

  return f"{int(mixed(words ^ mixed(np.arange(words.size, dtype=np.uint64))).sum()) % 2**32:08x}"


@pytest.mark.parametrize(
  ("shape", "dtype"),
  by_day_and_night(SHAPES, ["float32", "bfloat16", "float16", "int32", "uint8"]),
  ids=str,
)
def test_blocks_of_a_cpu_give_the_same(monkeypatch, mesh8, shape, dtype):
  values = 100 * jax.random.normal(jax.random.key(0), shape)
  array = jnp.abs(values).astype(dtype)
  expected = [plain(array)], [True]
  for spec in SPECS:
    fits = len(spec) <= len(shape) and all(n % 8 == 0 for n, axis in zip(shape, spec) if axis)
    if not fits:
      continue
    placed = jax.device_put(array, NamedSharding(mesh8, PartitionSpec(*spec)))
    for least in (0, 2**30):
      monkeypatch.setattr(fingerprint, "_WALKED", least)
      assert survey([placed]) == expected, (spec, least)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_blocks_of_a_cpu_see_what_is_not_finite(monkeypatch, mesh8, value, dtype):
  array = np.zeros((8, 2048), dtype)
  array[-1, -1] = value
  placed = jax.device_put(array, NamedSharding(mesh8, PartitionSpec("data")))
  monkeypatch.setattr(fingerprint, "_WALKED", 0)
  assert survey([placed, jnp.ones(3)])[1] == [False, True]


def test_every_element_counts(monkeypatch):
  monkeypatch.setattr(fingerprint, "_WALKED", 0)
  array = np.zeros((3, 1200), np.float32)
  seen = {survey([jnp.asarray(array)])[0][0]}
  for place in ((0, 0), (0, 1), (1, 0), (2, 1199)):
    changed = array.copy()
    changed[place] = 1
    seen.add(survey([jnp.asarray(changed)])[0][0])
  assert len(seen) == 5
