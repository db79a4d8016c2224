"""Bytes that devices store and send when ranks share the state, for the dry run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scmoe.layers.partitioned import Travels, rows_travel
from scmoe.models.gradient_sums import group_size
from scmoe.models.objective import cast_params
from scmoe.models.row_gradients import TABLE, rows_are_fewer
from scmoe.models.stacked import STACKS
from scmoe.parallel.gradients import axes_of
from scmoe.parallel.mesh import TOKEN_AXES
from scmoe.parallel.shares import WHOLE, Division, StateShares
from scmoe.run import build
from scmoe.run.config import RunConfig
from scmoe.run.model import derived_overlap
from scmoe.training.host_arrays import lies_on_host
from scmoe.training.streamed_update import stack_of

PyTree = Any
PAIRS_AT_WORK = 3  # arrays as large as a pair's parameters: those of two pairs, and a gradient


@dataclasses.dataclass(frozen=True)
class Sharing:
  """Bytes of gradients, gathered parameters and their traffic on one device (`mesh.shard_state`).

  Attributes:
    run: resolved.
    shapes: of whole trained parameters, with shardings.
  """

  run: RunConfig
  shapes: PyTree

  @functools.cached_property
  def shares(self) -> StateShares | None:
    """The shares of the run's ranks; None if each holds the whole state."""
    return build.shares_of(self.run, self.shapes)

  @property
  def cast(self) -> Callable[[PyTree], PyTree]:
    """Parameters -> parameters in the types in which the model reads them."""
    return functools.partial(cast_params, dtype=self.run.model.dtype)

  def bytes_read(self, shapes: PyTree) -> int:
    """Bytes on each device of whole parameters in the types in which the model reads them."""
    typed = jax.eval_shape(self.cast, shapes)
    return bytes_per_device(jax.tree.map(lambda s, t: s.update(dtype=t.dtype), shapes, typed))

  @property
  def gradient_bytes(self) -> int:
    """Bytes of float32 gradients that a device holds when a step's last microbatch is added."""
    shares, whole = self.shares, bytes_per_device(self.shapes)
    if shares is None or (self._microbatches > 1 and not shares.parameters):
      return whole
    return self._bytes_of_shares(self._leaves)

  @property
  def scattered_bytes(self) -> int:
    """Bytes of shares that a step's last microbatch makes of its gradients while these are whole.

    The layers of a scan over pairs read their totals from stacks that stay until the scan ends, and
    put their shares into others. Layers that are written out have a total each, which goes when its
    share is made; so do those of adapters, which no scan adds to. Whether there is a scan is asked
    as on GPUs.
    """
    shares, pairs = self.shares, self.run.model.num_pairs
    if shares is None or shares.parameters or self._microbatches == 1 or self.run.lora.rank:
      return 0
    if derived_overlap(self.run, gpu=True).writes_out(pairs):
      return 0
    inside = [leaf for path, leaf in zip(self._paths, self._leaves) if stack_of(path) == STACKS[0]]
    return self._bytes_of_shares([(leaf, how) for leaf, how in inside if how != WHOLE])

  def _bytes_of_shares(self, leaves: list[tuple[Any, Division]]) -> int:
    return sum(bytes_per_device(leaf) // ranks_of(leaf, how) for leaf, how in leaves)

  @property
  def gathered_bytes(self) -> int:
    """Bytes of gathered parameters, in the compute type, that a device holds beside its shares.

    0 if each rank stores whole parameters. Tables of a partitioned embedding count if they travel.
    """
    tables = self._gathered_tables
    if self.shares is None or not self.shares.parameters:
      return tables
    pairs, beside = self._read_bytes
    if not self.run.mesh.gather_again:
      return tables + beside + pairs
    return tables + beside + PAIRS_AT_WORK * pairs // self.run.model.num_pairs

  @property
  def travels(self) -> Travels | None:
    """Rows or tables of a partitioned embedding, in training; None: each data rank reads all."""
    run, model = self.run, self.run.model
    if run.mesh.embedding_ranks == 1:
      return None
    return rows_travel(
      tokens=run.train.batch_size * run.data.seq_len // run.mesh.token_shards,
      vocab=model.vocab_size // run.mesh.tensor,
      ranks=run.mesh.embedding_ranks,
      itemsize=jnp.dtype(model.dtype).itemsize,
      tied=model.tie_embeddings,
    )

  @property
  def _gathered_tables(self) -> int:
    travels, model = self.travels, self.run.model
    if travels is None:
      return 0
    table = jnp.dtype(model.dtype).itemsize * model.vocab_size * model.width // self.run.mesh.tensor
    if model.tie_embeddings:
      return 0 if travels.head else table
    return (2 - travels.lookup - travels.head) * table

  @property
  def copied_bytes(self) -> int:
    """Bytes on each device of a step's copy of the parameters that the model reads in other types.

    Where ranks share parameters, each copies its shares.
    """
    divided = self.shares is not None and self.shares.parameters
    return sum(
      bytes_per_device(leaf.update(dtype=read.dtype)) // (ranks_of(leaf, how) if divided else 1)
      for (leaf, how), read in zip(self._leaves, self._typed)
      if read.dtype != leaf.dtype
    )

  @property
  def gradient_traffic(self) -> int:
    """Bytes of gradients that leave a device in a step, in `overlap.gradient_dtype`."""
    return round(sum(self.gradient_parts.values()))

  @functools.cached_property
  def gradient_parts(self) -> dict[tuple[str, ...], float]:
    """The same by the mesh axes over which they are added.

    A ring moves (n - 1)/n of an array in a reduce-scatter over n devices, twice as much in a sum.
    Where ranks share parameters, the reduce-scatter is made once a microbatch. All other sums are
    made once a step. Rows of embeddings (`overlap.embedding_rows`) travel in place of the table's
    sum, in the narrower of the compute type and `overlap.gradient_dtype`.
    """
    times = self._microbatches if self.shares and self.shares.parameters else 1
    parts: dict[tuple[str, ...], float] = {}

    def add(axes: tuple[str, ...], leaving: float) -> None:
      if leaving:
        parts[axes] = parts.get(axes, 0.0) + leaving

    share = jnp.dtype(self.run.overlap.gradient_dtype).itemsize / 4  # of float32
    for path, (leaf, how) in zip(self._paths, self._leaves, strict=True):
      axes = set(TOKEN_AXES) - set(axes_of(leaf.sharding.spec))
      size, shape = share * bytes_per_device(leaf), leaf.sharding.mesh.shape
      if jax.tree_util.keystr(path, simple=True, separator=".") == ".".join(TABLE):
        everywhere = tuple(axis for axis in shape if axis in axes and shape[axis] > 1)
        rows = self._row_bytes(leaf, how, math.prod(shape[axis] for axis in everywhere))
        add(everywhere, rows)
        if rows:
          continue
      if how != WHOLE:
        ranks = ranks_of(leaf, how)
        add(how.axes, times * (ranks - 1) / ranks * size)
        size, axes = size / ranks, axes - set(how.axes)
      axes = tuple(axis for axis in shape if axis in axes)
      copies = math.prod(shape[axis] for axis in axes)
      add(axes, 2 * (copies - 1) / copies * size)
    return parts

  def _row_bytes(self, table: Any, how: Division, ranks: int) -> int:
    """Bytes of rows that leave a device for the gradient of a looked-up table; 0 if none travel."""
    run = self.run
    parts_travel = self.shares is not None and self.shares.parameters
    if not run.overlap.embedding_rows or ranks == 1 or parts_travel:
      return 0
    if run.model.tie_embeddings or self._microbatches > self._group:
      return 0
    if run.mesh.embedding == "partitioned":  # its rows travel in any case
      return 0
    tokens = self._group * run.train.batch_size * run.data.seq_len // run.mesh.token_shards
    travels = jnp.dtype(run.overlap.gradient_dtype).itemsize
    itemsize = min(jnp.dtype(run.model.dtype).itemsize, travels)
    vocab, width = table.sharding.shard_shape(table.shape)
    sizes = {"itemsize": itemsize, "table_itemsize": travels, "scattered": how != WHOLE}
    fewer = rows_are_fewer(ranks * tokens, vocab, **sizes)
    return (ranks - 1) * tokens * width * itemsize if fewer else 0

  @property
  def parameter_traffic(self) -> int:
    """Bytes of parameters that leave a device in a step: all-gathers of shares."""
    return round(sum(self.parameter_parts.values()))

  @functools.cached_property
  def parameter_parts(self) -> dict[tuple[str, ...], float]:
    """The same by the mesh axes over which they are gathered."""
    if self.shares is None:
      return {}
    of_pairs = of_others = 1
    if self.shares.parameters:
      of_others = self._microbatches
      of_pairs = of_others * (2 if self.run.mesh.gather_again else 1)
    parts: dict[tuple[str, ...], float] = {}
    for inside, leaf, how, size in self._read:
      ranks = ranks_of(leaf, how)
      times = of_pairs if inside else of_others
      parts[how.axes] = parts.get(how.axes, 0.0) + times * (ranks - 1) / ranks * size
    return parts

  @property
  def _microbatches(self) -> int:
    return self.run.train.microbatches(self.run.data.seq_len)

  @property
  def _group(self) -> int:
    """Microbatches that run side by side."""
    return group_size(self._microbatches, self.run.overlap.flight)

  @property
  def _leaves(self) -> list[tuple[Any, Division]]:
    shapes = jax.tree.leaves(self.shapes)
    if self.shares is None:
      return [(leaf, WHOLE) for leaf in shapes]
    return list(zip(shapes, jax.tree.leaves(self.shares.divisions)))

  @property
  def _paths(self) -> list[Any]:
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(self.shapes)[0]]

  @property
  def _typed(self) -> list[Any]:
    return jax.tree.leaves(jax.eval_shape(self.cast, self.shapes))

  @functools.cached_property
  def _read_bytes(self) -> tuple[int, int]:
    """(bytes of the pairs' shared parameters, bytes of all others that are shared).

    They are those of whole parameters in the types in which the model reads them.
    """
    found = {True: 0, False: 0}
    for inside, _, _, size in self._read:
      found[inside] += size
    return found[True], found[False]

  @functools.cached_property
  def _read(self) -> list[tuple[bool, Any, Division, int]]:
    """For each shared parameter: whether it is a pair's, its shape, its division, and its bytes.

    The bytes are those of the whole parameter in the type in which the model reads it.
    """
    assert self.shares is not None
    found = []
    for path, (leaf, how), read in zip(self._paths, self._leaves, self._typed):
      if how != WHOLE:
        size = bytes_per_device(leaf.update(dtype=read.dtype))
        found.append((stack_of(path) == STACKS[0], leaf, how, size))
    return found


def ranks_of(leaf: Any, how: Division) -> int:
  """Number of ranks that divide a parameter, a `jax.ShapeDtypeStruct` with a sharding."""
  return math.prod(leaf.sharding.mesh.shape[axis] for axis in how.axes)


def bytes_per_device(tree: PyTree) -> int:
  """Bytes of `jax.ShapeDtypeStruct`s with shardings on each device; none for those on the host."""
  leaves = [leaf for leaf in jax.tree.leaves(tree) if not lies_on_host(leaf)]
  return sum(math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in leaves)
