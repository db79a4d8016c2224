"""Parameters from numpy: a model's own initialisation takes a second to compile on every mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def drawn(shapes: Any, std: float = 0.1, seed: int = 0) -> Any:
  """Normal numbers for a tree of shapes, on the host; a norm's scales lie around 1."""
  numbers = np.random.default_rng(seed)

  def draw(path: Any, leaf: Any) -> np.ndarray:
    centre = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
    return np.asarray(centre + std * numbers.normal(size=leaf.shape), leaf.dtype)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def drawn_init(built: Any, std: float = 0.1, seed: int = 0) -> Any:
  """Stands for `built.init`: the same parameters on every mesh, router state of zeros."""
  params = drawn(built.shapes, std, seed)
  router = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), built.router_shapes)
  return lambda key: jax.tree.map(jnp.asarray, (params, router))


def drawn_model(make: Any, std: float = 0.3, seed: int = 0) -> Any:
  """The module that `make` makes, with parameters of `drawn`; its own are never made."""
  graph, state = nnx.split(nnx.eval_shape(make))
  return nnx.merge(graph, jax.tree.map(jnp.asarray, drawn(state, std, seed)))
