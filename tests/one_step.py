"""One optimizer step of a run whose loss may read a second model, from random arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from drawn import drawn_init

from scmoe.base.batch import Batch
from scmoe.parallel.mesh import batch_sharding
from scmoe.run.build import Built
from scmoe.training.step import init_state, make_train_step


def second_arrays(second: Built, **router: Any) -> dict[str, Any]:
  """Random parameters of a second model, and its router state with the given arrays in it."""
  params, found = drawn_init(second, 0.3, seed=5)(None)
  place = lambda x, s: jax.device_put(x, s.sharding)
  return jax.tree.map(place, {"params": params, "router": found | router}, second.given_shapes)


def one_step(built: Built, batch: Batch, given: Any = None) -> tuple[Any, Any, Any]:
  """(state before, state after, scalars) on the host.

  Args:
    built: the run.
    batch: its microbatches [A, B, ...].
    given: `second_arrays` of the second model, if there is one.
  """
  abstract = built.abstract_state()
  state = dataclasses.replace(
    init_state(drawn_init(built, 0.3), built.optimizer, 0, abstract), teacher=given
  )
  before = jax.device_get(state)
  put = lambda x: jax.device_put(x, batch_sharding(built.mesh, leading=1))
  step = make_train_step(built.objective, built.optimizer, abstract)
  state, scalars, _ = step(state, jax.tree.map(put, batch))
  return before, jax.device_get(state), jax.device_get(scalars)
