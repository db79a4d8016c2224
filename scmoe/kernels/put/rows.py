"""Rows sent to places in any rank's result: by the put kernel where it runs, else by collectives.

    M  rows at hand      K  copies of each      D  width      R  rows of every device's result
    W  ranks: the devices of one mesh axis      G  groups of a tiled result

A place is one number, rank · R + row. Worked example: two ranks, R = 4, one copy each.

    rank 0: rows a b c, places 5 0 4        rank 1: rows d e f, places 1 6 8 (8 = W · R: no place)
    result of rank 0: b d - -               result of rank 1: c a e -

All places of all ranks differ from each other, so no two rows meet in one place, and results do not
depend on which arrives first.

A number can arrive beside each row, its *tag*. The last rows of a result then hold the tags of the
others (`kernel.rows_of_tags`), and are no places. `with_room_for_tags` adds tiles for them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from scmoe.kernels.grouped_matmul import GroupLayout, with_spare_tiles
from scmoe.kernels.launch import runs_ptx
from scmoe.kernels.put import kernel
from scmoe.kernels.put.mailboxes import Mailboxes, open_mailboxes


def put_rows(
  x_MD: jax.Array,
  place_MK: jax.Array,
  *,
  num_rows: int,
  axis: str | None,
  tag_MK: jax.Array | None = None,
  count: jax.Array | None = None,
  groups: GroupLayout | None = None,
  mailboxes: Mailboxes | None = None,
  blocks: int = kernel.BLOCKS,
  beside: bool = False,
  expected: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """Sends each row to its places on any rank; returns the rows and tags that arrive here.

  Every device of the axis calls this function. Where `runs_ptx` is true, one kernel, which has no
  gradient, writes into the GPUs' memory. Elsewhere every rank gathers the rows of all ranks, for
  which it needs memory, and keeps those with places in its own result.

  Args:
    x_MD: this device's rows. For the kernel the bytes of a row, K and W are such as it `takes`.
    place_MK: int32, the place of each copy; a number outside [0, W·R) is no place.
    num_rows: R. With tags the last `rows_of_tags` of them hold tags and are no places.
    axis: the mesh axis; None: this device alone, W = 1, so that a place is a row of its own result.
    tag_MK: int32, a number that arrives beside each copy; None: no numbers are sent.
    count: int32 scalar: only the first `count` rows are sent to their places; None: all M rows.
    groups: the tiles of this device's own result. In each group's last tile, the rows that nobody
      fills become zero, with the tag -1. None: no row becomes zero.
    mailboxes: those by which the kernel's devices meet (`shared_mailboxes`); None: the call opens
      its own, which takes an all-gather of two numbers.
    blocks: thread blocks of the kernel.
    beside: run the kernel on a stream of its own, so that XLA may compute beside it. Few blocks
      leave multiprocessors to the computation.
    expected: how many copies have a place in balanced routing; None: all M·K. For measurements of
      the puts alone; it changes nothing here.

  Returns:
    The rows [R, D] that have arrived here, and their tags [R], or None without `tag_MK`. Other rows
    and their tags may hold anything, except those that `groups` makes zero.
  """
  count = jnp.asarray(x_MD.shape[0] if count is None else count, jnp.int32)
  if axis is not None:
    sizes = {"copies": place_MK.shape[1], "num_rows": num_rows, "tagged": tag_MK is not None}
    sizes |= {"expected": place_MK.size if expected is None else expected}
    x_MD = _marked.bind(x_MD, axis=axis, **sizes, blocks=blocks, beside=beside)
  if not runs_ptx():
    return _collected(x_MD, place_MK, tag_MK, count, groups, num_rows, axis)
  of_groups = None
  if groups is not None:
    of_groups = groups.group_sizes_G, groups.tile_starts_G, groups.tiles_G
  tile = 1 if groups is None else groups.tile
  rows_RD = kernel.put_rows_kernel(
    x_MD,
    place_MK,
    tag_MK,
    count,
    of_groups,
    open_mailboxes(axis, blocks) if mailboxes is None else mailboxes,
    num_rows=num_rows,
    tile=tile,
    blocks=blocks,
    beside=beside,
  )
  if tag_MK is None:
    return rows_RD, None
  tags = kernel.tags_in(rows_RD)
  return rows_RD, jnp.pad(tags, (0, num_rows - tags.shape[0]), constant_values=-1)


# Returns the rows. With it a program's jaxpr names every put between devices, and its arguments:
# `scmoe.run.controls` times the puts of a program alone.
MARK = "put_rows"
_marked = Primitive(MARK)
_marked.def_impl(lambda x_MD, **_: x_MD)
_marked.def_abstract_eval(lambda x_MD, **_: x_MD)
mlir.register_lowering(_marked, lambda _, x_MD, **__: [x_MD])
batching.defvectorized(_marked)


def with_room_for_tags(groups: GroupLayout, row_bytes: int) -> GroupLayout:
  """The layout with as many further tiles, of no group, as the tags of the other rows need."""
  spare = 0
  while kernel.rows_of_tags(groups.num_rows + spare, row_bytes) > spare:
    spare += groups.tile
  return with_spare_tiles(groups, spare // groups.tile)


def shared_mailboxes(axis: str | None, blocks: int = kernel.BLOCKS) -> Mailboxes | None:
  """Mailboxes for several calls of `put_rows`, inside `jax.shard_map`; None without the kernel.

  No step of a scan may hand them to the next one, nor a forward to a backward pass: see
  `Mailboxes`.
  """
  return open_mailboxes(axis, blocks) if runs_ptx() else None


def _collected(x_MD, place_MK, tag_MK, count, groups: GroupLayout | None, num_rows: int, axis):
  """The rows and tags of `put_rows`, by all-gathers, or by none if `axis` is None.

  Rows that the kernel would leave unwritten become NaN (0 in an integer type), and their tags -2,
  so that tests notice code that reads them.
  """
  counted_M1 = (jnp.arange(x_MD.shape[0], dtype=jnp.int32) < count)[:, None]
  place_MK = jnp.where(counted_M1, place_MK, -1)
  gathered = (lambda a: a[None]) if axis is None else lambda a: lax.all_gather(a, axis)
  place_WMK = gathered(place_MK)
  row_WMK = place_WMK - (0 if axis is None else lax.axis_index(axis)) * num_rows
  # The kernel's rows after these would hold tags.
  tags = 0 if tag_MK is None else kernel.rows_of_tags(num_rows, x_MD.shape[1] * x_MD.dtype.itemsize)
  mine_WMK = (row_WMK >= 0) & (row_WMK < num_rows - tags)
  row_N = jnp.where(mine_WMK, row_WMK, num_rows).reshape(-1)
  x_WMD = gathered(x_MD)
  x_ND = jnp.broadcast_to(x_WMD[:, :, None], (*place_WMK.shape, x_MD.shape[1]))
  unwritten = jnp.nan if jnp.issubdtype(x_MD.dtype, jnp.floating) else 0
  rows_RD = jnp.full((num_rows, x_MD.shape[1]), unwritten, x_MD.dtype)
  tag_R = None if tag_MK is None else jnp.full((num_rows,), -2, jnp.int32)
  if groups is not None:
    padding_R = _padding(groups, num_rows)
    rows_RD = jnp.where(padding_R[:, None], jnp.zeros((), x_MD.dtype), rows_RD)
    tag_R = None if tag_R is None else jnp.where(padding_R, -1, tag_R)
  rows_RD = rows_RD.at[row_N].set(x_ND.reshape(-1, x_MD.shape[1]), mode="drop")
  if tag_R is not None:
    tag_R = tag_R.at[row_N].set(gathered(tag_MK).reshape(-1), mode="drop")
  return rows_RD, tag_R


def _padding(groups: GroupLayout, num_rows: int) -> jax.Array:
  """bool [R]: rows of tiles in use that no row of their group fills."""
  index_R = jnp.arange(num_rows, dtype=jnp.int32)
  group_R = groups.tile_group_I[index_R // groups.tile]
  position_R = index_R - groups.tile_starts_G[group_R] * groups.tile
  used_R = index_R < groups.num_tiles[0] * groups.tile
  return used_R & (position_R >= groups.group_sizes_G[group_R])
