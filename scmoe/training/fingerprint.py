"""A 32-bit fingerprint of an array that does not depend on how it is sharded.

Every element's raw bits are mixed with its global position, and the results are added modulo 2^32.
For a given position the mixing is one to one, so any change of a single element changes the sum;
swapped elements, experts or layers change it too. (A plain position-weighted sum would miss two
flipped sign bits: both contribute 2^31.) It guards against accidents, not against an adversary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.jit
def _survey(leaves: list[Array]) -> tuple[Array, Array]:
  """Fingerprints uint32 [n] and finiteness bool [n] of n leaves."""
  finite = [
    jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.array(True)
    for x in leaves
  ]
  return jnp.stack([_fingerprint(x) for x in leaves]), jnp.stack(finite)


def survey(leaves: list[Array]) -> tuple[list[str], list[bool]]:
  """Fingerprints (8 hexadecimal digits) of arrays, and whether each is finite throughout.

  Computed on the devices that hold the arrays; with several processes all must call it.
  """
  if not leaves:
    return [], []
  prints, finite = _survey(leaves)
  return [f"{p:08x}" for p in np.asarray(prints)], [bool(f) for f in np.asarray(finite)]


def _fingerprint(x: Array) -> Array:
  words = _words(x)
  return mixed(words ^ mixed(positions(words.shape))).sum(dtype=jnp.uint32)


def positions(shape: tuple[int, ...]) -> Array:
  """Row-major position of every element of an array, uint32, modulo 2^32."""
  position, stride = jnp.zeros(shape, jnp.uint32), 1
  for axis in reversed(range(len(shape))):  # iota per axis stays sharded; a flat one would not
    axis_position = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    position += axis_position * jnp.uint32(stride % 2**32)
    stride *= shape[axis]
  return position


def _words(x: Array) -> Array:
  """The bits of `x` as uint32; 8-byte types get a last dimension of two words."""
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
  """The 32-bit finaliser of MurmurHash3: one to one, and every bit reaches every other."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
