"""State that data ranks share: which rank holds which part of a parameter, and how parts travel.

Every rank of the data axis computes with the same parameters, so without `mesh.shard_state` each
holds all of them, and all moments of the optimizer. With it a rank holds a *share* of the moments,
and with `parameters` also of the parameters (ZeRO: Rajbhandari et al., arXiv 1910.02054; FSDP: Zhao
et al., arXiv 2304.11277).

Example: `up` of the experts, [16 layers, 64 experts, 2048, 1024], on a mesh of data=2 x expert=4.
The expert axis gives each device 16 of the 64 experts, with or without shares. The two ranks of the
data axis then divide the first dimension of a layer's [16, 2048, 1024] whose size is a multiple of
2, here the 16 experts: rank 0 holds the first 8 of them in each layer, rank 1 the last 8. The
PartitionSpec is `P(None, ("expert", "data"))`.

Why the first dimension: the shares of all ranks, one after the other, are then the whole array, so
that no collective has to transpose. Why never the dimension of the layers: each layer is gathered
by itself. An array without a dimension that the ranks can divide evenly stays whole on every rank:
nothing is padded, so parameters keep their logical shape on every mesh, and checkpoints move
between meshes.

`StateShares` is the only description of these shares. The step, the checkpoint and the dry run read
it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from scmoe.parallel.gradients import axes_of
from scmoe.parallel.mesh import axis_size, own_share, parameter_specs

PyTree = Any

# The mesh axis whose ranks share state.
AXIS = "data"
# Stands where else the number of the divided dimension stands (-1 is the last): every rank holds
# the whole array.
WHOLE = 0
# The name of gathered parameters, by which rematerialisation decides whether to keep them.
GATHERED = "gathered"


@dataclasses.dataclass(frozen=True)
class Gathering:
  """Options of the collectives that gather and scatter shares.

  Attributes:
    bucket: whole arrays of fewer bytes travel together, in collectives of at most so many bytes; 0:
      each array travels by itself.
    again: whether the backward pass gathers parameters again; if not, the forward pass keeps them.
    ahead: whether pairs that are written out are gathered one pair ahead, if `again`
      (`scmoe.models.regather`). Several collectives are then under way, which GPUs start in one
      order. Simulated devices start them in any order, and may wait for each other forever.
  """

  bucket: int = 0
  again: bool = True
  ahead: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Share:
  """This rank's share of a parameter, in place of the array, in the manual region.

  Attributes:
    value: the share.
    dimension: the divided dimension, counted from the end: -1 is the last. So it stays valid when
      layers are stacked in front.
    how: options of the gather.
  """

  value: Any
  dimension: int = dataclasses.field(metadata={"static": True})
  how: Gathering = dataclasses.field(default=Gathering(), metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class StateShares:
  """Which parts of parameters, moments and reduced gradients each data rank holds.

  Attributes:
    parameters: whether ranks hold shares of the parameters too, or only of the moments.
    specs: PartitionSpecs of whole parameters, with which the model computes.
    dimensions: for every parameter the divided dimension, counted from the end, or `WHOLE`.
    how: options of the collectives.
  """

  parameters: bool
  specs: PyTree
  dimensions: PyTree
  how: Gathering = Gathering()

  @property
  def share_specs(self) -> PyTree:
    """PartitionSpecs of the shares: of moments and reduced gradients, and of stored parameters if
    ranks share them."""
    return jax.tree.map(share_spec, self.specs, self.dimensions)

  def to_read(self, params: PyTree) -> PyTree:
    """The parameters for the model: a `Share` in place of each array that ranks divide.

    If ranks share only moments, it returns the parameters unchanged.

    Args:
      params: this rank's stored parameters, cast to the dtypes in which they are to be gathered.
    """
    if not self.parameters:
      return params
    place = lambda d, x: x if d == WHOLE else Share(x, d, self.how)
    return jax.tree.map(place, self.dimensions, params)

  def own(self, params: PyTree) -> PyTree:
    """This rank's shares of whole parameters; parameters that ranks do not divide stay whole."""
    cut = lambda d, x: x if d == WHOLE else own_share(x, x.ndim + d, AXIS)
    return jax.tree.map(cut, self.dimensions, params)

  def whole(self, params: PyTree) -> PyTree:
    """The inverse of `own`: whole parameters, gathered from all ranks; not to be differentiated."""
    place = lambda d, x: x if d == WHOLE else Share(x, d, self.how)
    leaves, tree = jax.tree.flatten(jax.tree.map(place, self.dimensions, params), is_leaf=is_share)
    return jax.tree.unflatten(tree, gathered(leaves))


def share_dimension(shape: Sequence[int], leading: int, ranks: int) -> int:
  """The dimension that ranks divide: the first, from the front, whose size `ranks` divides.

  Args:
    shape: shape of a device's array, already divided over the other axes.
    leading: number of dimensions in front that are never divided: 1 if layers are stacked, else 0.
    ranks: number of ranks on the data axis.

  Returns:
    The dimension as a negative index; `WHOLE` if `ranks` is 1, or divides no size after the leading
    ones. Example: the shape (16, 7, 2048, 1024) with `leading` 1 and 2 ranks gives -2, the 2048.
  """
  if ranks == 1:
    return WHOLE
  fits = (i for i in range(leading, len(shape)) if shape[i] and shape[i] % ranks == 0)
  return next((i - len(shape) for i in fits), WHOLE)


def share_dimensions(shapes: PyTree, leading: Callable[[Any], int]) -> PyTree:
  """`share_dimension` of every parameter; `WHOLE` if its spec divides it over data ranks already.

  Args:
    shapes: `jax.ShapeDtypeStruct`s with NamedShardings, of whole parameters.
    leading: path of a parameter -> its number of stacked dimensions.
  """

  def of(path: Any, x: Any) -> int:
    if AXIS in axes_of(x.sharding.spec):  # partitioned: each rank reads only its part
      return WHOLE
    return share_dimension(
      x.sharding.shard_shape(x.shape), leading(path), x.sharding.mesh.shape[AXIS]
    )

  return jax.tree_util.tree_map_with_path(of, shapes)


def share_spec(spec: P, dimension: int) -> P:
  """PartitionSpec of an array whose `dimension` the data axis divides further.

  Args:
    spec: PartitionSpec of the whole array, with one entry for each dimension.
    dimension: the dimension that data ranks divide, counted from the end; `WHOLE` returns `spec`.
  """
  if dimension == WHOLE:
    return spec
  parts = list(spec)
  axes = (*axes_of(P(parts[dimension])), AXIS)
  parts[dimension] = axes if len(axes) > 1 else AXIS
  return P(*parts)


def stored_specs(state: PyTree) -> PyTree:
  """PartitionSpecs of a tree of `nnx.Param`s, as `parameter_specs`; values may be `Share`s.

  A `Share` stays a `Share`; its value is the spec of the share, which the data axis divides, too.
  """
  divide = lambda x: (
    dataclasses.replace(x, value=share_spec(x.value, x.dimension)) if is_share(x) else x
  )
  return jax.tree.map(divide, parameter_specs(state), is_leaf=is_share)


def is_share(leaf: Any) -> bool:
  """Whether a leaf is a `Share`."""
  return isinstance(leaf, Share)


def shares_in(tree: PyTree) -> list[Share]:
  """All `Share`s of a tree."""
  return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_share) if is_share(leaf)]


# -- how shares travel ----------------------------------------------------------------------------


def gathered(leaves: Sequence[Any]) -> list[Any]:
  """The leaves with gathered, whole arrays in place of `Share`s; other leaves stay as they are.

  The gradient of a share is the sum of all ranks' gradients of this part of the whole array, in the
  share's dtype.
  """
  found = list(leaves)
  here = [i for i, leaf in enumerate(found) if is_share(leaf)]
  ranks = axis_size(AXIS)
  with jax.named_scope("parameters"):
    for bucket in _buckets([found[i].value for i in here], ranks, [found[i].how for i in here]):
      group = [found[here[j]] for j in bucket]
      for j, whole in zip(bucket, _gather_group(group, ranks)):
        found[here[j]] = checkpoint_name(whole, GATHERED)
  return found


def _gather_group(group: Sequence[Share], ranks: int) -> list[Array]:
  if len(group) == 1:
    (one,) = group
    axis = one.value.ndim + one.dimension
    return [jax.lax.all_gather(one.value, AXIS, axis=axis, tiled=True)]
  flat = jnp.concatenate([one.value.reshape(-1) for one in group])
  table = jax.lax.all_gather(flat, AXIS)  # [ranks, elements of all shares]
  wholes, start = [], 0
  for one in group:
    rows = table[:, start : start + one.value.size]
    wholes.append(_joined(rows, one.value.shape, one.dimension))
    start += one.value.size
  return wholes


def scattered(
  wholes: Sequence[Array], dimensions: Sequence[int], dtype: str, bucket: int
) -> list[Array]:
  """Sums arrays over the data ranks; each rank gets its share of each sum, float32 (float64 stays).

  Args:
    wholes: this rank's addends, whole arrays.
    dimensions: for each array the dimension that ranks divide, counted from the end; not `WHOLE`.
    dtype: dtype in which the addends travel and are summed.
    bucket: see `Gathering`.
  """
  ranks = axis_size(AXIS)
  sent = [x.astype(dtype) for x in wholes]
  found: list[Any] = list(sent)
  with jax.named_scope("gradients"):
    hows = [Gathering(bucket)] * len(sent)
    for group in _buckets(sent, 1, hows):
      shares = _scatter_group([sent[i] for i in group], [dimensions[i] for i in group], ranks)
      for i, share in zip(group, shares):
        found[i] = share.astype(jnp.promote_types(share.dtype, jnp.float32))
  return found


def _scatter_group(group: Sequence[Array], dimensions: Sequence[int], ranks: int) -> list[Array]:
  if len(group) == 1:
    axis = group[0].ndim + dimensions[0]
    return [jax.lax.psum_scatter(group[0], AXIS, scatter_dimension=axis, tiled=True)]
  rows = [_divided(x, d, ranks) for x, d in zip(group, dimensions)]
  table = jnp.concatenate([row.reshape(ranks, -1) for row in rows], 1)
  flat = jax.lax.psum_scatter(table, AXIS)
  shares, start = [], 0
  for row in rows:
    size = math.prod(row.shape[1:])
    shares.append(flat[start : start + size].reshape(row.shape[1:]))
    start += size
  return shares


def _divided(x: Array, dimension: int, ranks: int) -> Array:
  """The shares of all ranks, from a whole array: [..., n, ...] -> [ranks, ..., n / ranks, ...]."""
  axis = x.ndim + dimension
  parts = x.reshape(*x.shape[:axis], ranks, x.shape[axis] // ranks, *x.shape[axis + 1 :])
  return jnp.moveaxis(parts, axis, 0)


def _joined(rows: Array, shape: tuple[int, ...], dimension: int) -> Array:
  """The inverse of `_divided`: a whole array, from its shares as rows [ranks, elements of a share].

  `shape` is the shape of one share.
  """
  ranks, axis = len(rows), len(shape) + dimension
  parts = jnp.moveaxis(rows.reshape(ranks, *shape), 0, axis)
  return parts.reshape(*shape[:axis], ranks * shape[axis], *shape[axis + 1 :])


def _buckets(arrays: Sequence[Array], factor: int, hows: Sequence[Gathering]) -> list[list[int]]:
  """Groups of arrays that travel in one collective, as lists of their indices.

  An array of at least `Gathering.bucket` bytes has a group of its own. Smaller ones of one dtype
  fill groups of at most so many bytes, in their order.

  Args:
    arrays: shares or whole arrays.
    factor: bytes of a whole array for each byte of `arrays`: the number of ranks for shares, or 1.
    hows: for each array, its `Gathering`.
  """
  groups: list[list[int]] = []
  # For each dtype the group that is being filled, and the bytes in it.
  open_groups: dict[Any, tuple[list[int], int]] = {}
  for i, (x, how) in enumerate(zip(arrays, hows)):
    size = x.size * x.dtype.itemsize * factor
    group, filled = open_groups.get(x.dtype, ([], 0))
    if size >= how.bucket:
      groups.append([i])
    elif group and filled + size <= how.bucket:
      group.append(i)
      open_groups[x.dtype] = (group, filled + size)
    else:
      groups.append([i])
      open_groups[x.dtype] = (groups[-1], size)
  return groups
