"""Experts' matrices outside the device's memory: in pinned memory of the host, or on disk.

In pinned memory they may have 8 bits an element.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

HOST = "pinned_host"  # jax's name of this kind of memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
  """Experts' matrices in eight bits, with one scale for each output channel of each expert.

  Attributes:
    value: int8 [..., M, N].
    scale: float32 [..., 1, N]; a matrix is value · scale.
    dtype: static, the type of that product.
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
  """Experts' matrices in a file; a program reads only those that it needs.

  Attributes:
    number: int32 [e, 1, 1], the indices of this device's experts in the file.
    read: static and hashable; a function that reads experts on the host, int32 [n] -> [n, M, N].
    matrix: static, M and N.
    dtype: static, the file's type.
  """

  number: Any
  read: Callable[[Any], np.ndarray] = dataclasses.field(metadata={"static": True})
  matrix: tuple[int, int] = dataclasses.field(metadata={"static": True})
  dtype: str = dataclasses.field(metadata={"static": True})

  @property
  def ndim(self) -> int:
    """Number of dimensions of [e, M, N]: 3."""
    return 1 + len(self.matrix)

  @property
  def whole(self) -> Array:
    """The matrices of all e experts, [e, M, N] on the device, which calls the host to read them."""
    shape = jax.ShapeDtypeStruct((self.number.shape[0], *self.matrix), self.dtype)
    return jax.pure_callback(self.read, shape, self.number.reshape(-1))


def is_on_disk(x: Any) -> bool:
  """Whether a node of a tree is an `OnDisk`. Serves as `is_leaf` of `jax.tree.map`."""
  return isinstance(x, OnDisk)


def quantised(matrix: Any, dtype: Any) -> Int8:
  """Rounds matrices to int8 from -127 to 127; each output channel's largest |value| becomes 127.

  A channel of zeros stays 0, with the scale 1.

  Args:
    matrix: float [..., M, N].
    dtype: the type of the matrices when they are converted back.
  """
  matrix = jnp.asarray(matrix, jnp.float32)
  largest = jnp.abs(matrix).max(-2, keepdims=True)
  scale = jnp.where(largest > 0, largest / 127, 1)
  value = jnp.round(matrix / scale).astype(jnp.int8)
  return Int8(value, scale, jnp.dtype(dtype).name)


def on_device(params: Any) -> Any:
  """Copies parameters to the device's memory, and makes matrices of 8-bit ones and those on disk.

  The matrices have the types in which they compute.
  """
  there = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), params)
  return multiplied_out(there)


def multiplied_out(params: Any) -> Any:
  """Converts `OnDisk` and `Int8` leaves of a tree to matrices; leaves the others unchanged."""
  read = lambda x: x.whole if is_on_disk(x) else x
  params = jax.tree.map(read, params, is_leaf=is_on_disk)
  packed = lambda x: isinstance(x, Int8)
  return jax.tree.map(lambda x: x.whole if packed(x) else x, params, is_leaf=packed)


def is_away(params: Any) -> bool:
  """Whether any of these parameters is outside the device's memory."""
  leaves = jax.tree.leaves(params, is_leaf=is_on_disk)
  return any(is_on_disk(x) or is_on_host(x) for x in leaves)


def is_on_host(x: Any) -> bool:
  """Whether a traced value, or an array with a NamedSharding, is in the host's memory."""
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def empty_places(params: Any, count: int) -> Any:
  """Zeros [count, ...] for the parameters of `count` experts, in the types in which they compute.

  Args:
    params: the experts' parameters [e, ...], in any memory.
    count: number of experts.
  """
  shapes = jax.eval_shape(multiplied_out, params)
  return jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), shapes)


def allow_pinned_memory() -> None:
  """Sets jax's limit on pinned memory, 64 GB by default, to the size of the host's memory.

  It does nothing if the environment sets XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB already. Call it before
  jax initialises its devices.
  """
  size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(size // 10**9))
