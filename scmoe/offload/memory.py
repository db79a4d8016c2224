"""Experts' matrices outside the device's memory: in pinned host memory, 8-bit, or on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
  """Matrices of experts in eight bits: value = int8 · scale of the expert's output channel.

  Attributes:
    value: int8 [..., M, N].
    scale: float32 [..., 1, N].
    dtype: static, the type of the matrices after multiplication.
  """

  value: Any
  scale: Any
  dtype: str = dataclasses.field(default="float32", metadata={"static": True})

  @property
  def whole(self) -> Array:
    """The matrices, [..., M, N]."""
    return (self.value.astype(jnp.float32) * self.scale).astype(self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnDisk:
  """Matrices of experts in a file, of which a program reads those that it needs.

  Attributes:
    number: int32 [e, 1, 1], the numbers of this device's experts in the file.
    read: static, hashable, runs on the host: int32 [n] -> [n, M, N], the experts of these numbers.
    matrix: static, M and N.
    dtype: static, of the file.
  """

  number: Any
  read: Callable[[Any], np.ndarray] = dataclasses.field(metadata={"static": True})
  matrix: tuple[int, int] = dataclasses.field(metadata={"static": True})
  dtype: str = dataclasses.field(metadata={"static": True})

  @property
  def ndim(self) -> int:
    """Dimensions of the matrices of all experts together: 3."""
    return 1 + len(self.matrix)

  @property
  def whole(self) -> Array:
    """The matrices of all e experts, read by a call to the host: [e, M, N] on the device."""
    shape = jax.ShapeDtypeStruct((self.number.shape[0], *self.matrix), self.dtype)
    return jax.pure_callback(self.read, shape, self.number.reshape(-1))


def is_on_disk(x: Any) -> bool:
  """Whether a leaf of a tree of parameters is an `OnDisk`; for `is_leaf`."""
  return isinstance(x, OnDisk)


def quantised(matrix: Any, dtype: Any) -> Int8:
  """Rounds to the nearest of 255 steps of each expert's output channel, 127 for its largest value.

  Args:
    matrix: float [..., M, N].
    dtype: the type of the matrices after multiplication.
  """
  matrix = jnp.asarray(matrix, jnp.float32)
  largest = jnp.abs(matrix).max(-2, keepdims=True)
  scale = jnp.where(largest > 0, largest / 127, 1)
  value = jnp.round(matrix / scale).astype(jnp.int8)
  return Int8(value, scale, jnp.dtype(dtype).name)


def on_device(params: Any) -> Any:
  """A copy of parameters in the device's memory, with eight bits multiplied out."""
  there = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), params)
  return multiplied_out(there)


def multiplied_out(params: Any) -> Any:
  """`OnDisk` and `Int8` leaves as matrices; all other leaves as they are."""
  read = lambda x: x.whole if is_on_disk(x) else x
  params = jax.tree.map(read, params, is_leaf=is_on_disk)
  packed = lambda x: isinstance(x, Int8)
  return jax.tree.map(lambda x: x.whole if packed(x) else x, params, is_leaf=packed)


def is_away(params: Any) -> bool:
  """Whether any of these parameters is outside the device's memory."""
  leaves = jax.tree.leaves(params, is_leaf=is_on_disk)
  return any(is_on_disk(x) or is_on_host(x) for x in leaves)


def is_on_host(x: Any) -> bool:
  """Whether an array is in the host's memory."""
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def empty_places(params: Any, count: int) -> Any:
  """Zeros for `count` experts on the device, in the types in which they compute.

  Args:
    params: leaves [e, ...] of the experts, wherever they are.
    count: first dimension of the result's leaves.
  """
  shapes = jax.eval_shape(multiplied_out, params)
  return jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), shapes)
