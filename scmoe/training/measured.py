"""The state on which steps are timed, made so that its routers spread tokens about evenly.

`overlap.schedule=auto` and `scmoe.profile` time steps with fresh parameters and a random batch. The
routers of deep blocks would then send far more tokens to some experts than to others: a fresh
model's attention adds nearly the same value to all tokens of a sequence. Where an exchange goes in
rounds, the rows for which the first has no room then travel in overflow rounds, beside which XLA
runs nothing, and the measurement sees exchanges that a trained, balanced router does not cause. For
`gpt2_moe_medium` with 4 layers over a slow link such steps took 181 ms, and 146 ms when no round
overflowed (experiments/LOG.md, 2026-11-27).

So the embeddings of tokens, and of the patches of images, are `SPREAD` times as large as a run
initialises them. What tells tokens apart then outweighs what fresh layers add to all tokens alike,
which grows with the width, and experts are loaded about evenly. In three blocks of width 1536 the
fullest of eight experts got 1.09, 1.22 and 1.06 times the mean load. With embeddings only ten times
as large it was 1.09, 2.31 and 1.92, and one of two devices got 1.32 times its share, where the
first round had room for 1.25 (experiments/exchange_cost/loads.py).

A timed step changes no parameter: each is step -1, whose learning rate is 0
(`scmoe.training.optimizer.make_schedule`). Even the smallest learning rate of a warm-up would
change what is timed. With the large embeddings the loss is large, and steps on the same batch move
all tokens' values in one direction: after twelve of them the last router of `gpt2_moe_medium` sent
90 % of its choices to one of two devices, where 61 % had gone at first (batches of 4 rows of 256
tokens, 2026-11-29).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from scmoe.parallel.mesh import batch_sharding
from scmoe.training.step import Init, TrainState, init_state

SPREAD = 100.0
# Paths, in the parameters of a model, of the matrices that embed tokens or patches of images.
_EMBEDS = (("embedding", "tokens"), ("embedding", "weight"))


class MeasuredState:
  """A training state and one random batch, with which several compiled steps run in turns.

  Args:
    built: the model, its optimizer, mesh and random batch (`scmoe.training.fastest.Searchable`).
    abstract: from `abstract_state`; None: `built.abstract_state()`.
    seed: of the parameters and of the random keys.
  """

  def __init__(self, built: Any, abstract: TrainState | None = None, seed: int = 0):
    self.built = built
    self.abstract = built.abstract_state() if abstract is None else abstract
    self.state = init_state(spread(built.init), built.optimizer, seed, self.abstract)
    sharding = batch_sharding(built.mesh, leading=1)
    put = lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x))
    self.batch = jax.tree.map(put, built.random_batch())
    self.figures: Any = None  # [scalars, arrays] of the last step; None before the first

  def train(self, step: Callable[..., Any], calls: int = 1) -> None:
    """Calls `step`, which donates its state, `calls` times; may return before the devices are done.

    Every call is step -1 of the run: parameters stay what they are, moments and balancing biases do
    not.
    """
    for _ in range(calls):
      self.state, *self.figures = step(before_training(self.state), self.batch)

  def wait(self) -> None:
    """Waits until the devices have finished the steps that were called."""
    jax.block_until_ready((self.state, self.figures))

  @property
  def rounds(self) -> float:
    """Mean number of rounds that the last step's exchanges needed, in the block that needed most.

    It is 1 if none overflowed, before the first step, and without experts.
    """
    arrays = self.figures[1] if self.figures else {}
    return float(np.max(jax.device_get(arrays["rounds"]))) if "rounds" in arrays else 1.0


def before_training(state: TrainState) -> TrainState:
  """The state at step -1: a step from there changes no parameter."""
  step = jax.device_put(np.full((), -1, np.int32), state.step.sharding)
  return dataclasses.replace(state, step=step)


def spread(init: Init) -> Init:
  """The initialisation `init`, but with embeddings of tokens or patches `SPREAD` times as large."""

  def spread_init(key: Array) -> tuple[Any, Any]:
    params, router = init(key)
    own = lambda path, leaf: leaf * jnp.asarray(SPREAD, leaf.dtype) if _embeds(path) else leaf
    return jax.tree_util.tree_map_with_path(own, params), router

  return spread_init


def _embeds(path: tuple[Any, ...]) -> bool:
  return tuple(getattr(part, "key", None) for part in path) in _EMBEDS
