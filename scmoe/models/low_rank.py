"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685): a frozen matrix plus a product of two.

An adapted matrix is W + (alpha / rank) · A · B. W stays as it is; A [in, rank] and B [rank, out]
are trained. A begins as uniform numbers between ±1/√in, B as zeros, as in PEFT, so a run begins as
the model that it adapts. Where a parameter holds many matrices, each has its own A and B: with rank
8 the matrices of 64 experts in 16 layers, [16, 64, 2048, 1024], have A in an array
[16, 64, 2048, 8] and B in an array [16, 64, 8, 1024].

A `LowRank` stands in place of the parameter's array. A module that reads the parameter gets the sum
in the base's type, so every kernel, transport and schedule computes with a plain matrix, and
differentiation gives the gradients of A and B. That costs one product and one sum for each matrix
and microbatch, and the gradient of the whole matrix, from which those of A and B follow. The
forward pass keeps the sum for the backward pass, unless `train.remat=full` computes it again. With
two thin products, (x · A) · B, beside x · W none of this would be needed, but every kernel for
experts would need a second path.

A and B are divided over devices as W's dimensions are; `rank` is never divided.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.base.options import Options, option
from scmoe.models.matrices import Sides, holder_and_sides
from scmoe.parallel.collectives import repeat
from scmoe.parallel.gradients import axes_of

PyTree = Any
TARGETS = ("attention", "mlp", "experts", "head")
A, B = "lora_a", "lora_b"  # names of the two trained arrays, below the name of their parameter
_HEAD: Sides = ((-2,), (-1,))


@dataclasses.dataclass(frozen=True)
class LoraConfig(Options, path="lora"):
  """Low-rank adapters on a frozen model (section `lora`)."""

  rank: int = option(
    0,
    "rank of the adapters that are trained instead of the model in train.init_from, which stays as "
    "it is; 0: no adapters, all parameters are trained",
    minimum=0,
    maximum=2**16,
  )
  alpha: float = option(16.0, "the product of an adapter counts alpha / rank", above=0)
  targets: str = option(
    "attention,experts",
    "matrices with adapters, joined by commas: attention, mlp (dense and shared experts), experts, "
    "head",
  )
  base: str = option(
    "", "digest of the model that is adapted; a run fills it in, and refuses another model"
  )

  @property
  def scale(self) -> float:
    """The factor of A · B: alpha / rank."""
    return self.alpha / self.rank

  @property
  def wanted(self) -> tuple[str, ...]:
    """The words of `targets`.

    Raises:
      ConfigError: a word is unknown, or there is none.
    """
    words = tuple(word.strip() for word in self.targets.split(","))
    for word in words:
      if word not in TARGETS:
        raise ConfigError(
          f"lora.targets={self.targets!r}: {word!r} is unknown; use one or more of: "
          f"{', '.join(TARGETS)}"
        )
    return words


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
  """A frozen array of matrices and its adapter; stands where a tree of parameters had the array.

  Attributes:
    base: W [..., in, out]; `in` and `out` are one dimension or several. `scmoe.models.adapted` does
      not differentiate with respect to it.
    a: A [..., in, rank].
    b: B [..., rank, out].
    scale: alpha / rank.
    reads, writes: number of dimensions of `in` and of `out`.
    parts: (mesh axes for A, mesh axes for B). On the devices of these axes each computes only a
      part of the array's gradient, because the axes divide the side of W that the array lacks: out
      for A, in for B.
  """

  base: Any
  a: Any
  b: Any
  scale: float = dataclasses.field(metadata={"static": True})
  reads: int = dataclasses.field(metadata={"static": True})
  writes: int = dataclasses.field(metadata={"static": True})
  parts: tuple[tuple[str, ...], tuple[str, ...]] = dataclasses.field(
    default=((), ()), metadata={"static": True}
  )

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of W."""
    return self.base.shape

  @property
  def dtype(self) -> Any:
    """The type of W."""
    return self.base.dtype

  def merged(self) -> Array:
    """W + scale · A · B in the shape and type of W, computed in float32 (float64 if W is)."""
    base, wide = self.base, jnp.promote_types(self.base.dtype, jnp.float32)
    a = repeat(self.a, self.parts[0], "tensor")
    b = repeat(self.b, self.parts[1], "tensor")
    leading = base.shape[: base.ndim - self.reads - self.writes]
    a, b = a.reshape(*leading, -1, a.shape[-1]), b.reshape(*leading, a.shape[-1], -1)
    change = jnp.matmul(a, b, preferred_element_type=wide).reshape(base.shape)
    return (base.astype(wide) + self.scale * change).astype(base.dtype)

  def __getitem__(self, index: Any) -> Array:
    """`merged()[index]`: modules read their parameters as `param[...]`."""
    return self.merged()[index]


def is_low_rank(leaf: Any) -> bool:
  """Whether a leaf of parameters is a `LowRank`."""
  return isinstance(leaf, LowRank)


@dataclasses.dataclass(frozen=True)
class Adapters:
  """The adapters of a model: which of its parameters have one, and their arrays' shapes.

  Attributes:
    config: rank, alpha and targets.
    model: the model's parameters as `jax.ShapeDtypeStruct`s.
  """

  config: LoraConfig
  model: PyTree

  @functools.cached_property
  def shapes(self) -> PyTree:
    """The trained arrays as float32 `jax.ShapeDtypeStruct`s, sharded as the model is.

    The tree is that of the model's parameters, with only those that have adapters. In place of
    each stands a dictionary with the arrays A and B under "lora_a" and "lora_b".

    Raises:
      ConfigError: a word of `lora.targets` is unknown, or names no matrix of the model.
    """
    found: dict[Any, Any] = {}
    left = dict.fromkeys(self.config.wanted)
    for path, leaf in jax.tree_util.tree_leaves_with_path(self.model):
      if (target := _target(path, leaf)) is None or target[0] not in self.config.wanted:
        continue
      left.pop(target[0], None)
      place = found
      for key in path:
        place = place.setdefault(key.key, {})
      place |= self._pair(leaf, target[1])
    if left:
      raise ConfigError(
        f"lora.targets={self.config.targets!r}: the model has no matrices of {next(iter(left))!r}; "
        "leave it out" + (", or set model.tie_embeddings=False" if list(left) == ["head"] else "")
      )
    return found

  def init(self, key: Array) -> PyTree:
    """Arrays of adapters that change nothing yet: A uniform between ±1/√in, B zero."""
    flat, structure = jax.tree_util.tree_flatten_with_path(self.shapes)
    made = []
    for number, (path, x) in enumerate(flat):
      if path[-1].key == B:
        made.append(jnp.zeros(x.shape, x.dtype))
        continue
      leaf = _at(self.model, path[:-1])
      target = _target(path[:-1], leaf)
      assert target is not None
      bound = 1 / math.sqrt(math.prod(leaf.shape[d] for d in target[1][0]))
      own = jax.random.fold_in(key, number)
      made.append(jax.random.uniform(own, x.shape, x.dtype, -bound, bound))
    return jax.tree.unflatten(structure, made)

  def applied(self, base: PyTree, own: PyTree) -> PyTree:
    """The model's parameters, with a `LowRank` in place of each that has an adapter.

    Args:
      base: the frozen parameters.
      own: arrays like `shapes`.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
      pair, target = _at(own, path), _target(path, leaf)
      if pair is None or target is None:
        return leaf
      reads, writes = map(len, target[1])
      parts = self._parts(_at(self.model, path), target[1])
      return LowRank(leaf, pair[A], pair[B], self.config.scale, reads, writes, parts)

    return jax.tree_util.tree_map_with_path(place, base)

  def merged(
    self, base: PyTree, own: PyTree, merge: Callable[[LowRank], Any] = LowRank.merged
  ) -> PyTree:
    """The model's parameters with the adapters added, as plain arrays in the base's types.

    Args:
      base, own: as of `applied`.
      merge: makes the array of one parameter.
    """
    whole = lambda leaf: merge(leaf) if is_low_rank(leaf) else leaf
    return jax.tree.map(whole, self.applied(base, own), is_leaf=is_low_rank)

  def _pair(self, leaf: Any, sides: Sides) -> dict[str, Any]:
    rank, leading = self.config.rank, leaf.ndim - len(sides[0]) - len(sides[1])
    reads, writes = slice(leading, -len(sides[1])), slice(-len(sides[1]), None)
    spec = _spec(leaf)
    a = (*leaf.shape[:leading], *leaf.shape[reads], rank)
    b = (*leaf.shape[:leading], rank, *leaf.shape[writes])
    a_spec = P(*spec[:leading], *spec[reads], None)
    b_spec = P(*spec[:leading], None, *spec[writes])
    return {A: _placed(leaf, a, a_spec), B: _placed(leaf, b, b_spec)}

  def _parts(self, leaf: Any, sides: Sides) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`LowRank.parts`: the tensor axis for A if it divides W's out, for B if it divides W's in.

    `LowRank.merged` has gradients summed over these axes. The axes that divide batches are not
    among them: over those the step sums all gradients (`scmoe.parallel.gradients.travels_over`).
    """
    spec = _spec(leaf)
    splits = lambda side: "tensor" in axes_of(P(*(spec[d] for d in side)))
    return ("tensor",) * splits(sides[1]), ("tensor",) * splits(sides[0])


def _target(path: tuple[Any, ...], leaf: Any) -> tuple[str, Sides] | None:
  """The word of `TARGETS` that names a parameter, and its sides; None if none does."""
  if [getattr(key, "key", None) for key in path[-2:]] == ["embedding", "head"]:
    return "head", _HEAD
  return holder_and_sides(path, leaf.ndim)


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
  """The part of nested dictionaries at a path; None if there is none."""
  for key in path:
    if not isinstance(tree, dict) or key.key not in tree:
      return None
    tree = tree[key.key]
  return tree


def _spec(leaf: Any) -> P:
  """The PartitionSpec of a `jax.ShapeDtypeStruct`, with one entry for each dimension."""
  sharding = getattr(leaf, "sharding", None)
  own = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
  return P(*own, *([None] * (leaf.ndim - len(own))))


def _placed(leaf: Any, shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
  sharding = getattr(leaf, "sharding", None)
  if isinstance(sharding, NamedSharding):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(sharding.mesh, spec))
  return jax.ShapeDtypeStruct(shape, jnp.float32)
