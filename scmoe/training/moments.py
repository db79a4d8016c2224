"""An optimizer's moments in bfloat16, rounded at random so that small changes are not lost.

While gradients keep their size, a second moment changes by some 1 - β₂ of itself a step. With β₂ =
0.999 that is a thousandth, but neighbouring bfloat16 numbers are 1/256 to 1/128 of themselves
apart: rounded to the nearest, such a moment would hardly ever change. Here moments are rounded up
or down at random, with the probabilities that keep their expected values. They then move as in
float32, with a noise whose standard deviation is at most 1/256 of the moment a step. Over many
steps the noise of a moment that keeps its size adds up, with decay β, to a standard deviation of at
most (1/256) / √(1 - β²) of the moment (P. Zamirai et al., "Revisiting BFloat16 Training", arXiv
2010.06192).
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from scmoe.training.fingerprint import mixed, positions

PyTree = Any


def narrow(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """An optax rule that stores the moments of `rule` in bfloat16 and computes them in float32.

  The random bits are a function of the step (`step=` of `update`), the leaf and the position in the
  device's share of it. So a run that is resumed on the same mesh draws the same bits, and so do
  devices that hold the same array.

  Args:
    rule: any transformation; the float32 arrays of its state that belong to parameters become
      bfloat16.
  """
  inner = optax.with_extra_args_support(rule)

  def init(params: PyTree) -> PyTree:
    cut = lambda x: x.astype(jnp.bfloat16) if _is(jnp.float32, x) else x
    return optax.tree_map_params(inner, cut, inner.init(params))

  def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Any:
    narrowed = lambda x: _is(jnp.bfloat16, x)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if narrowed(x) else x, state)
    updates, after = inner.update(updates, wide, params, **extra)

    def kept(path: Any, new: Any, old: Any) -> Any:
      name = jax.tree_util.keystr(path).encode()
      if not narrowed(old):
        return new
      # If `update` sees one layer of a stack, `layer` is its number there. The place of its first
      # element gives it the bits that an update of the whole stack would draw for it.
      first = jnp.uint32(extra.get("layer", 0)) * jnp.uint32(new.size % 2**32)
      return rounded(new, extra["step"], zlib.crc32(name), first)

    return updates, jax.tree_util.tree_map_with_path(kept, after, state)

  return optax.GradientTransformationExtraArgs(init, update)


def rounded(x: Array, step: Array, salt: int, first: Any = 0) -> Array:
  """A float32 array rounded to bfloat16, up or down at random; the expected value is `x`.

  Args:
    x: finite; any shape.
    step: int32 [], of the run.
    salt: uint32, different for each array of a step.
    first: position of the first element of `x` in the array of which it is a part, modulo 2^32; 0:
      `x` is whole, or the beginning.
  """
  seed = mixed(step.astype(jnp.uint32) ^ mixed(jnp.uint32(salt)))
  place = positions(x.shape) + jnp.uint32(first)
  bits = mixed(place ^ seed) >> 16
  # Adding 16 random bits to a float32 carries into its upper 16 bits, which are the bfloat16, with
  # the probability (lower 16 bits) / 2^16.
  raised = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits
  return jax.lax.bitcast_convert_type((raised >> 16).astype(jnp.uint16), jnp.bfloat16)


def _is(dtype: Any, x: Any) -> bool:
  return getattr(x, "dtype", None) == dtype
