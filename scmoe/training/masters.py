"""Float32 parameters stored in two halves: the bfloat16 that the model reads, and the rest.

A step that computes in bfloat16 needs most of its float32 parameters in bfloat16 too. A separate
copy takes 2 bytes a parameter more, and every step reads 4 bytes a parameter to write it. Stored in
halves, the bfloat16 is a part of the parameter: no step casts it, nothing is stored twice, and both
halves together give the float32 number to the last bit (NVIDIA Apex, `DistributedFusedAdam`,
`store_param_remainders`).

Example: 1.0039 has the bits 3F80 7FCC (hexadecimal). Its upper half is 3F80, the nearest bfloat16,
1.0; its lower half is 7FCC. With lower bits of 8000 or more the upper half's bits are one more, and
the lower half, as int16, is negative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from scmoe.models.stacked import is_apart
from scmoe.training.filed import is_in_file
from scmoe.training.host_arrays import is_made, lies_on_host, made_on_host, shard_of
from scmoe.training.pieced import Pieced, is_pieced

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Halves:
  """One float32 array, stored as two arrays of 16 bits an element.

  Attributes:
    high: bfloat16, the nearest to the float32; of two equally near, the one farther from zero.
    low: int16; the float32's bits, as an integer, are bits(high) · 2^16 + low.
  """

  high: Array
  low: Array

  @staticmethod
  def of(x: Array) -> Halves:
    """The halves of a float32 array without NaN."""
    return _halved(x)

  def to_float32(self) -> Array:
    """The float32 array; a `jax.ShapeDtypeStruct` if the halves belong to an abstract state."""
    if is_in_file(self.low):
      return jax.ShapeDtypeStruct(self.low.shape, jnp.float32, sharding=self.low.sharding)  # pyright: ignore
    if isinstance(self.low, jax.ShapeDtypeStruct):
      # The float32 array has the sharding of `low`: more ranks may divide `low` than `high`.
      return self.low.update(dtype=jnp.dtype(jnp.float32))  # pyright: ignore
    return _joined(self.high, self.low)


def halves_of(params: PyTree, read: PyTree, low: PyTree) -> PyTree:
  """`jax.ShapeDtypeStruct`s of parameters, in `Halves` if float32 and read in bfloat16.

  Args:
    params: `jax.ShapeDtypeStruct`s of the parameters, with shardings.
    read: their `jax.ShapeDtypeStruct`s in the types in which the model reads them.
    low: shardings for `Halves.low`, in the same structure as `params`.
  """

  def lay(param: Any, read: Any, place: Any) -> Any:
    if (param.dtype, read.dtype) != (jnp.float32, jnp.bfloat16):
      return param
    high = param.update(dtype=jnp.dtype(jnp.bfloat16))
    return Halves(high, param.update(dtype=jnp.dtype("int16"), sharding=place))

  return jax.tree.map(lay, params, read, low)


def to_float32(params: PyTree) -> PyTree:
  """Parameters with one float32 array in place of each `Halves`.

  It is a `jax.ShapeDtypeStruct` for an abstract `Halves`, and a `Pieced` if `low` is one.
  """
  return _changed(Halves.to_float32, params, _where_halves(params))


def readable(params: PyTree) -> PyTree:
  """Parameters with the bfloat16 `high` in place of each `Halves`; all others as they are.

  Works on any tree with `Halves` in it, e.g. of shardings.
  """
  return jax.tree.map(lambda x: x.high if is_halves(x) else x, params, is_leaf=is_halves)


def like(params: PyTree, wanted: PyTree) -> PyTree:
  """Parameters with `Halves` in place of the float32 array wherever `wanted` has `Halves`.

  The lower half of an array in the host's memory stays there, even if `wanted` has it in a file;
  the upper half goes to the memory where `wanted` has it. Stacks stay whole.
  """
  found, structure = jax.tree.flatten(
    _changed(Halves.of, params, _where_halves(wanted)), is_leaf=is_halves
  )
  return structure.unflatten(map(_placed, found, _leaves(wanted)))


def _placed(found: Any, wanted: Any) -> Any:
  if not (is_halves(found) and lies_on_host(found.high)):
    return found
  high = wanted.high.parts[0] if is_apart(wanted.high) else wanted.high
  if lies_on_host(high):
    return found
  return Halves(jax.device_put(found.high, jax.memory.Space.Device), found.low)


def _changed(change: Callable[[Any], Any], params: PyTree, where: list[bool]) -> PyTree:
  """Parameters with `change` applied to the leaves for which `where` is True.

  Arrays are changed in one program, since a program for each shape takes longer to compile. Traced
  values, which belong to a program already, and `jax.ShapeDtypeStruct`s need none of their own.
  Leaves in the host's memory or in files are changed by the host, one after the other
  (`_changed_on_host`).
  """
  leaves, structure = jax.tree.flatten(params, is_leaf=is_halves)
  given = [leaf for leaf, yes in zip(leaves, where, strict=True) if yes]
  away = [i for i, leaf in enumerate(given) if _is_away(leaf)]
  for i in away:
    given[i] = _changed_on_host(given[i])
  rest = [i for i in range(len(given)) if i not in away]
  arrays = bool(rest) and all(is_made(x) for i in rest for x in jax.tree.leaves(given[i]))
  for i, leaf in zip(rest, (_jitted if arrays else _mapped)(change, [given[i] for i in rest])):
    given[i] = leaf
  made = iter(given)
  return structure.unflatten(next(made) if yes else leaf for leaf, yes in zip(leaves, where))


def _mapped(change: Callable[[Any], Any], leaves: list[Any]) -> list[Any]:
  return [change(leaf) for leaf in leaves]


_jitted = jax.jit(_mapped, static_argnums=0)


def _where_halves(params: PyTree) -> list[bool]:
  return [is_halves(x) for x in _leaves(params)]


def _leaves(params: PyTree) -> list[Any]:
  return jax.tree.leaves(params, is_leaf=lambda x: is_halves(x) or is_apart(x))


def is_halves(x: Any) -> bool:
  """Whether a leaf of parameters is a `Halves`."""
  return isinstance(x, Halves)


def _halved(x: Array) -> Halves:
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  high = ((bits + 0x8000) >> 16).astype(jnp.uint16)
  low = (bits & 0xFFFF).astype(jnp.uint16)
  to = jax.lax.bitcast_convert_type
  return Halves(to(high, jnp.bfloat16), to(low, jnp.int16))


def _joined(high: Array, low: Array) -> Array:
  upper = jax.lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << 16
  return jax.lax.bitcast_convert_type(upper + low.astype(jnp.uint32), jnp.float32)


# -- halves and float32 arrays in the host's memory, and halves in files ---------------------------


def _is_away(leaf: Any) -> bool:
  x = leaf.low if is_halves(leaf) else leaf
  return is_pieced(x) or (is_made(x) and lies_on_host(x))


def _changed_on_host(leaf: Any) -> Any:
  """Joins `Halves` whose `low` is in the host's memory or a file, or halves a float32 array.

  The float32 array is in the host's memory. Both its halves get the same sharding there. Joined
  `Halves` give an array with the sharding of `low`, or a `Pieced` if `low` is in a file.
  """
  if is_halves(leaf) and is_pieced(leaf.low):
    return _pieced(leaf.high, leaf.low)
  if is_halves(leaf):
    return made_on_host(
      leaf.low.shape,
      leaf.low.sharding,
      lambda index, device: _numpy_joined(
        shard_of(leaf.high, device, index), shard_of(leaf.low, device)
      ),
    )
  part = lambda upper: lambda index, device: _numpy_half(shard_of(leaf, device), upper)
  high, low = (made_on_host(leaf.shape, leaf.sharding, part(upper)) for upper in (True, False))
  return Halves(high, low)


def _pieced(high: Array, low: Pieced) -> Pieced:
  layer = lambda place: np.asarray(high[place[0] : place[0] + 1] if place else high)
  read = lambda place: _numpy_joined(layer(place), low.read(place))
  like = jax.ShapeDtypeStruct(low.shape, jnp.float32, sharding=low.sharding)
  return Pieced(like, low.leading, read)


def _numpy_joined(high: np.ndarray, low: np.ndarray) -> np.ndarray:
  upper = high.view(np.uint16).astype(np.uint32) << 16
  return (upper + low.astype(np.uint32)).view(np.float32)


def _numpy_half(x: np.ndarray, upper: bool) -> np.ndarray:
  bits = x.view(np.uint32)
  if upper:
    return ((bits + np.uint32(0x8000)) >> 16).astype(np.uint16).view(jnp.bfloat16)
  return bits.astype(np.uint16).view(np.int16)
