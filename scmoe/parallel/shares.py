"""State that ranks share: which rank holds which part of a parameter, and how parts travel.

Every device with the same part of a parameter, and other tokens, is a *rank* of that parameter.
Without `mesh.shard_state` each rank holds that part whole, and all moments of the optimizer for it.
With it a rank holds a *share* of the moments, and with `parameters` also of the parameter (ZeRO:
Rajbhandari et al., arXiv 1910.02054; FSDP: Zhao et al., arXiv 2304.11277).

Example: a mesh of data=2 x expert=4. The expert axis gives each device 16 of the 64 experts of
`up` [16 layers, 64 experts, 2048, 1024], with or without shares. Two devices, those of the data
axis, have the same 16 experts. They divide the first dimension of a layer's [16, 2048, 1024] whose
size is a multiple of 2, here the experts: rank 0 holds the first 8 of them in each layer, rank 1
the last 8. The PartitionSpec is `P(None, ("expert", "data"))`. The weights of attention are the
same on all eight devices, which divide them over both axes, as `P(None, ("data", "expert"))`; so do
the data ranks and the expert ranks in Megatron's distributed optimizer.

Why the first dimension: the shares of all ranks, one after the other, are then the whole array, so
that no collective has to transpose. Why never the dimension of the layers: each layer is gathered
by itself. An array without a dimension that all its ranks can divide evenly is divided by the
devices of fewer axes, the most that can divide one, or stays whole on every rank. Nothing is
padded, so parameters keep their logical shape on every mesh, and checkpoints move between meshes.

`StateShares` is the only description of these shares. The step, the checkpoint and the dry run read
it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from scmoe.parallel.gradients import axes_of
from scmoe.parallel.mesh import TOKEN_AXES, axis_size, own_share, parameter_specs

PyTree = Any

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


@dataclasses.dataclass(frozen=True)
class Division:
  """How ranks divide one parameter; a leaf of trees.

  Attributes:
    dimension: the divided dimension, counted from the end: -1 is the last. So it stays valid when
      layers are stacked in front. 0 if the parameter stays whole.
    axes: mesh axes of the ranks, the first varying slowest; () if the parameter stays whole.
  """

  dimension: int
  axes: tuple[str, ...]

  @property
  def ranks(self) -> int:
    """Number of ranks, in the manual region."""
    return axis_size(*self.axes)


# Every rank holds the whole array.
WHOLE = Division(0, ())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Share:
  """This rank's share of a parameter, in place of the array, in the manual region.

  Attributes:
    value: the share.
    division: how the ranks divide the parameter; not `WHOLE`.
    how: options of the gather.
  """

  value: Any
  division: Division = dataclasses.field(metadata={"static": True})
  how: Gathering = dataclasses.field(default=Gathering(), metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class StateShares:
  """Which parts of parameters, moments and reduced gradients each rank holds.

  Attributes:
    parameters: whether ranks hold shares of the parameters too, or only of the moments.
    specs: PartitionSpecs of whole parameters, with which the model computes.
    divisions: for every parameter its `Division`, or `WHOLE`.
    how: options of the collectives.
  """

  parameters: bool
  specs: PyTree
  divisions: PyTree
  how: Gathering = Gathering()

  @property
  def share_specs(self) -> PyTree:
    """PartitionSpecs of the shares: of moments and reduced gradients, and of stored parameters if
    ranks share them."""
    return jax.tree.map(share_spec, self.specs, self.divisions)

  def to_read(self, params: PyTree) -> PyTree:
    """The parameters for the model: a `Share` in place of each array that ranks divide.

    If ranks share only moments, it returns the parameters unchanged.

    Args:
      params: this rank's stored parameters, cast to the dtypes in which they are to be gathered.
    """
    if not self.parameters:
      return params
    place = lambda d, x: x if d == WHOLE else Share(x, d, self.how)
    return jax.tree.map(place, self.divisions, params)

  def own(self, params: PyTree) -> PyTree:
    """This rank's shares of whole parameters; parameters that ranks do not divide stay whole."""
    cut = lambda d, x: x if d == WHOLE else own_share(x, x.ndim + d.dimension, *d.axes)
    return jax.tree.map(cut, self.divisions, params)

  def whole(self, params: PyTree) -> PyTree:
    """The inverse of `own`: whole parameters, gathered from all ranks; not to be differentiated."""
    place = lambda d, x: x if d == WHOLE else Share(x, d, self.how)
    leaves, tree = jax.tree.flatten(jax.tree.map(place, self.divisions, params), is_leaf=is_share)
    return jax.tree.unflatten(tree, gathered(leaves))


def share_dimension(shape: Sequence[int], leading: int, ranks: int) -> int:
  """The dimension that ranks divide: the first, from the front, whose size `ranks` divides.

  Args:
    shape: shape of a device's array, already divided over the other axes.
    leading: number of dimensions in front that are never divided: 1 if layers are stacked, else 0.
    ranks: number of ranks.

  Returns:
    The dimension as a negative index; 0 if `ranks` is 1, or divides no size after the leading ones.
    Example: the shape (16, 7, 2048, 1024) with `leading` 1 and 2 ranks gives -2, the 2048.
  """
  if ranks == 1:
    return 0
  fits = (i for i in range(leading, len(shape)) if shape[i] and shape[i] % ranks == 0)
  return next((i - len(shape) for i in fits), 0)


def division(shape: Sequence[int], leading: int, axes: Mapping[str, int]) -> Division:
  """How ranks divide an array: by the most devices, of some axes or all, that can divide a size.

  Example: the shape (512, 12) on axes of 16, 64 and 2 devices. Neither 2,048 devices nor 16 x 64
  divide a size; 64 x 2 divide the 512, and so do 16 x 2, which are fewer.

  Args:
    shape, leading: as of `share_dimension`.
    axes: mesh axes whose devices hold the same array, and their sizes.
  """
  names = [axis for axis, size in axes.items() if size > 1]
  ranks = lambda taken: math.prod(axes[axis] for axis in taken)
  some = (itertools.combinations(names, count) for count in range(len(names), 0, -1))
  for taken in sorted(itertools.chain(*some), key=ranks, reverse=True):
    dimension = share_dimension(shape, leading, ranks(taken))
    if dimension:
      return Division(dimension, taken)
  return WHOLE


def divisions(shapes: PyTree, leading: Callable[[Any], int]) -> PyTree:
  """`division` of every parameter; `WHOLE` if data ranks partition it (`mesh.embedding`).

  Args:
    shapes: `jax.ShapeDtypeStruct`s with NamedShardings, of whole parameters.
    leading: path of a parameter -> its number of stacked dimensions.
  """

  def of(path: Any, x: Any) -> Division:
    split = axes_of(x.sharding.spec)
    if "data" in split:  # partitioned: each data rank reads only its part
      return WHOLE
    axes = {axis: x.sharding.mesh.shape[axis] for axis in TOKEN_AXES if axis not in split}
    return division(x.sharding.shard_shape(x.shape), leading(path), axes)

  return jax.tree_util.tree_map_with_path(of, shapes)


def share_spec(spec: P, how: Division) -> P:
  """PartitionSpec of an array that ranks divide further.

  Args:
    spec: PartitionSpec of the whole array, with one entry for each dimension.
    how: `WHOLE` returns `spec`.
  """
  if how == WHOLE:
    return spec
  parts = list(spec)
  axes = [*axes_of(P(parts[how.dimension])), *how.axes]
  parts[how.dimension] = tuple(axes) if len(axes) > 1 else axes[0]
  return P(*parts)


def stored_specs(state: PyTree) -> PyTree:
  """PartitionSpecs of a tree of `nnx.Param`s, as `parameter_specs`; values may be `Share`s.

  A `Share` stays a `Share`; its value is the spec of the share, which its ranks' axes divide, too.
  """
  divide = lambda x: (
    dataclasses.replace(x, value=share_spec(x.value, x.division)) if is_share(x) else x
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
  shares = [found[i] for i in here]
  with jax.named_scope("parameters"):
    sizes = [one.value.size * one.value.dtype.itemsize * one.division.ranks for one in shares]
    kinds = [(one.value.dtype, one.division.axes) for one in shares]
    for bucket in _buckets(sizes, kinds, [one.how.bucket for one in shares]):
      for j, whole in zip(bucket, _gather_group([shares[j] for j in bucket])):
        found[here[j]] = checkpoint_name(whole, GATHERED)
  return found


def _gather_group(group: Sequence[Share]) -> list[Array]:
  axes = group[0].division.axes
  if len(group) == 1:
    (one,) = group
    axis = one.value.ndim + one.division.dimension
    return [jax.lax.all_gather(one.value, axes, axis=axis, tiled=True)]
  flat = jnp.concatenate([one.value.reshape(-1) for one in group])
  table = jax.lax.all_gather(flat, axes)  # [ranks, elements of all shares]
  wholes, start = [], 0
  for one in group:
    rows = table[:, start : start + one.value.size]
    wholes.append(_joined(rows, one.value.shape, one.division.dimension))
    start += one.value.size
  return wholes


def scattered(
  wholes: Sequence[Array], hows: Sequence[Division], dtype: str, bucket: int
) -> list[Array]:
  """Sums arrays over their ranks; each rank gets its share of each sum, float32 (float64 stays).

  Args:
    wholes: this rank's addends, whole arrays.
    hows: for each array how ranks divide it; not `WHOLE`.
    dtype: dtype in which the addends travel and are summed.
    bucket: see `Gathering`.
  """
  sent = [x.astype(dtype) for x in wholes]
  found: list[Any] = list(sent)
  with jax.named_scope("gradients"):
    sizes = [x.size * x.dtype.itemsize for x in sent]
    kinds = [(x.dtype, how.axes) for x, how in zip(sent, hows)]
    for group in _buckets(sizes, kinds, [bucket] * len(sent)):
      shares = _scatter_group([sent[i] for i in group], [hows[i] for i in group])
      for i, share in zip(group, shares):
        found[i] = share.astype(jnp.promote_types(share.dtype, jnp.float32))
  return found


def _scatter_group(group: Sequence[Array], hows: Sequence[Division]) -> list[Array]:
  axes, ranks = hows[0].axes, hows[0].ranks
  if len(group) == 1:
    axis = group[0].ndim + hows[0].dimension
    return [jax.lax.psum_scatter(group[0], axes, scatter_dimension=axis, tiled=True)]
  rows = [_divided(x, how.dimension, ranks) for x, how in zip(group, hows)]
  table = jnp.concatenate([row.reshape(ranks, -1) for row in rows], 1)
  flat = jax.lax.psum_scatter(table, axes)
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


def _buckets(
  sizes: Sequence[int], kinds: Sequence[Hashable], most: Sequence[int]
) -> list[list[int]]:
  """Groups of arrays that travel in one collective, as lists of their indices.

  An array of at least `Gathering.bucket` bytes has a group of its own. Smaller ones of one kind
  fill groups of at most so many bytes, in their order.

  Args:
    sizes: bytes of the whole arrays.
    kinds: for each array what a group has in common: its dtype, and the axes of its ranks.
    most: for each array its `Gathering.bucket`.
  """
  groups: list[list[int]] = []
  # For each kind the group that is being filled, and the bytes in it.
  open_groups: dict[Hashable, tuple[list[int], int]] = {}
  for i, (size, kind, bucket) in enumerate(zip(sizes, kinds, most)):
    group, filled = open_groups.get(kind, ([], 0))
    if size >= bucket:
      groups.append([i])
    elif group and filled + size <= bucket:
      group.append(i)
      open_groups[kind] = (group, filled + size)
    else:
      groups.append([i])
      open_groups[kind] = (groups[-1], size)
  return groups
