"""A 32-bit fingerprint of an array that does not depend on how it is sharded.

Each element's raw bits are mixed with its global position, modulo 2^32; the results are added
modulo 2^32. For a given position the mixing of 32 bits is one to one, so any change of a single
element of at most 4 bytes changes the sum. Different elements, experts or layers that are swapped
change it too, but for one chance in 2^32, unless their distance is a multiple of 2^32 elements. (A
plain position-weighted sum would miss two flipped sign bits at odd positions: each contributes
2^31.) The fingerprint guards against accidents, not against an adversary.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from scmoe.parallel.mesh import host_device
from scmoe.training.distributed import from_all_processes
from scmoe.training.host_arrays import lies_on_host, to_device


@jax.jit
def _survey(leaves: list[Array]) -> tuple[Array, Array]:
  """Fingerprints, uint32 [n], and whether all elements are finite, bool [n], of n arrays."""
  finite = [
    jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.array(True)
    for x in leaves
  ]
  return jnp.stack([_fingerprint(x) for x in leaves]), jnp.stack(finite)


def survey(leaves: list[Array]) -> tuple[list[str], list[bool]]:
  """Fingerprints (8 hexadecimal digits) of arrays, and whether each is finite throughout.

  The devices that hold an array compute both. For an array in the host's memory the host does
  (its devices if JAX has no CPU), one array after the other; but if it is a scalar, or of a type
  outside `_EXPONENTS` and `_INTEGERS` (such as bool or complex64), its devices get a copy of it.
  Processes that divide an array in the host's memory read shards of their own, each shard once.
  With several processes all must call this.
  """
  found = {i: _walked(leaf) for i, leaf in enumerate(leaves) if _is_walked(leaf)}
  if parted := [i for i in found if not leaves[i].is_fully_addressable]:
    rows = from_all_processes({"found": [found[i] for i in parted]})
    for i, *parts in zip(parted, *(row["found"] for row in rows)):
      found[i] = sum(number for number, _ in parts) % 2**32, all(good for _, good in parts)
  if rest := [i for i in range(len(leaves)) if i not in found]:
    prints, finite = _survey([to_device(leaves[i]) for i in rest])
    found |= {i: (int(p), bool(f)) for i, p, f in zip(rest, np.asarray(prints), np.asarray(finite))}
  ordered = [found[i] for i in range(len(leaves))]
  return [f"{number:08x}" for number, _ in ordered], [good for _, good in ordered]


def compile_survey(leaves: list[Any]) -> None:
  """Compiles the program of `survey` for arrays that it does not read in blocks, for jax's cache.

  Args:
    leaves: `jax.ShapeDtypeStruct`s with shardings, of the arrays of one call of `survey`, in order.
  """
  if rest := [_on_device(x) for x in leaves if not _is_walked(x)]:
    _survey.lower(rest).compile()


def _on_device(x: Any) -> Any:
  """The same `jax.ShapeDtypeStruct`, in the memory in which `to_device` returns the array."""
  if not lies_on_host(x):
    return x
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind("device"))


# -- large arrays on a CPU, and arrays in the host's memory ----------------------------------------
# On a CPU, XLA writes the mixed words to memory before it adds them: twice the size of a bfloat16
# array. That takes much longer than a loop over blocks that stay in registers, so large arrays
# there are read in such blocks if one process has all of their devices. So are arrays of any size,
# except scalars, in the host's memory (`scmoe.training.host_arrays`). Both hold for the types of
# `_EXPONENTS` and `_INTEGERS` only.

# The least number of elements of an array on a CPU that is read in blocks.
_WALKED = 2**20
# A block's number of elements is the largest one from 129 to 1,024 (`_BLOCK`) that divides the
# length of the last dimension; if there is none, it is that length.
_BLOCK = 1024
_EXPONENTS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
_INTEGERS = {"int8", "uint8", "int16", "uint16", "int32", "uint32"}


def survey_piece(
  value: np.ndarray, shape: tuple[int, ...], place: tuple[int, ...]
) -> tuple[int, bool]:
  """A piece's summand in its array's fingerprint, and whether all the piece's elements are finite.

  The summands of all pieces add up, modulo 2^32, to the array's fingerprint. It runs on jax's CPU,
  or on jax's default device if JAX_PLATFORMS leaves the CPU out.

  Args:
    value: array[place], of a type in `_EXPONENTS` or `_INTEGERS`. A scalar counts as a vector of
      one element.
    shape: shape of the whole array.
    place: indices into the array's leading dimensions.
  """
  strides = _strides(shape or (1,))
  start = sum(i * stride for i, stride in zip(place, strides))
  own = jax.device_put(value.reshape(value.shape or (1,)), host_device())
  part, good = _walk(own, strides[len(place) :], jnp.uint32(start % 2**32))
  return int(part), bool(good)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
  return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _is_walked(leaf: Any) -> bool:
  """Whether an array is read in blocks; `leaf` is one, or its `jax.ShapeDtypeStruct`."""
  kind = str(leaf.dtype)
  away = lies_on_host(leaf) and leaf.ndim > 0
  if (leaf.size < _WALKED and not away) or not (kind in _EXPONENTS or kind in _INTEGERS):
    return False
  on_cpu = {d.platform for d in leaf.sharding.device_set} == {"cpu"}
  return away or (on_cpu and leaf.sharding.is_fully_addressable)


def _walked(leaf: Array) -> tuple[int, bool]:
  """(fingerprint as a number, whether all elements are finite) of an array, read in blocks.

  If several processes divide the array, each gets a summand of the fingerprint, and learns whether
  the shards that it reads are finite. If several devices hold the same shard, only one of them, and
  so only one process, reads it.
  """
  strides = _strides(leaf.shape)
  total, finite = 0, True
  for shard in leaf.addressable_shards:
    if shard.replica_id == 0:
      start = sum((own.start or 0) * stride for own, stride in zip(shard.index, strides))
      part, good = _walk(_on_cpu(shard.data), strides, jnp.uint32(start % 2**32))
      total, finite = (total + int(part)) % 2**32, finite and bool(good)
  return total, finite


def _on_cpu(x: Array) -> Array:
  """A shard, copied if it must be, in a memory where JAX can compute with it.

  If it lies in the host's memory, that is a copy on JAX's CPU, or on the shard's own device if JAX
  has no CPU. Else the shard is returned as it is.
  """
  if not lies_on_host(x):
    return x
  if (host := host_device()) is None:
    return jax.device_put(x, jax.memory.Space.Device)
  return jax.device_put(np.asarray(x), host)


@functools.partial(jax.jit, static_argnums=1)
def _walk(x: Array, strides: tuple[int, ...], start: Array) -> tuple[Array, Array]:
  """A part's summand in its array's fingerprint, uint32 [], and whether it is finite, bool [].

  Args:
    x: the part, of one dimension at least.
    strides: of the whole array, in elements, for the dimensions that `x` has.
    start: position of the part's first element in the whole array, modulo 2^32.
  """
  last = x.shape[-1]
  size = next((n for n in range(_BLOCK, _BLOCK // 8, -1) if last % n == 0), last)
  dims, steps = (*x.shape[:-1], last // size), (*strides[:-1], size)
  blocks = x.reshape(-1, size)
  lane = jnp.arange(size, dtype=jnp.uint32)
  exponent = _EXPONENTS.get(str(x.dtype), 0)  # bits that are all 1 in NaN and infinity only

  def add(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
    place = start
    rest = i
    for count, step in zip(reversed(dims), reversed(steps)):
      place += (rest % count).astype(jnp.uint32) * jnp.uint32(step % 2**32)
      rest //= count
    block = jax.lax.dynamic_index_in_dim(blocks, i, keepdims=False)
    words = _words(block)
    bad = (words & exponent) == exponent if exponent else sums[1]
    return sums[0] + mixed(words ^ mixed(place + lane)), sums[1] | bad

  none = jnp.zeros(size, jnp.uint32), jnp.zeros(size, bool)
  sums, bad = jax.lax.fori_loop(0, blocks.shape[0], add, none)
  return sums.sum(dtype=jnp.uint32), ~bad.any()


def _fingerprint(x: Array) -> Array:
  words = _words(x)
  return mixed(words ^ mixed(positions(words.shape))).sum(dtype=jnp.uint32)


def positions(shape: tuple[int, ...]) -> Array:
  """Row-major position of every element of an array, uint32, modulo 2^32."""
  position, stride = jnp.zeros(shape, jnp.uint32), 1
  # One iota for each axis, because XLA keeps those sharded, but not one iota over all elements.
  for axis in reversed(range(len(shape))):
    axis_position = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    position += axis_position * jnp.uint32(stride % 2**32)
    stride *= shape[axis]
  return position


def _words(x: Array) -> Array:
  """The bits of `x` as uint32, one word an element, or several in new last dimensions.

  An element of 8 bytes becomes two words [..., 2]; complex numbers become the words of the real and
  of the imaginary part: complex64 [..., 2], complex128 [..., 2, 2].
  """
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    return jnp.stack([_words(x.real), _words(x.imag)], -1)
  size = x.dtype.itemsize
  if size == 8:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)
  unsigned: Any = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]
  return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def mixed(x: Array) -> Array:
  """MurmurHash3's finaliser of uint32: one to one; every input bit affects every output bit."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
