"""The update at the end of a training step: parameters, moments and average from the gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from scmoe.training import masters
from scmoe.training.optimizer import Optimizer
from scmoe.training.share_update import gathered_again, own_shares
from scmoe.training.streamed_update import UpdateLayer, updated_by_layer

PyTree = Any
PARTS = ("params", "opt_state", "average")  # the fields of a state that an update changes


class Left(NamedTuple):
  """The values that the program of a step leaves to the host.

  Attributes:
    near: `params`, `opt_state` and `average`, with `ABSENT` in place of all that the host keeps.
      Parameters are those that a device updates: its shares where `mesh.shard_state` divides them.
    grads: summed over devices, divided by the loss scale if there is one, not clipped. A device has
      those of the parameters, or shares of parameters, that it updates.
    step: int32 [], number of steps before this one.
    norm: float32 [], of all gradients.
    good: bool [], False if the host is to change nothing.
  """

  near: dict[str, PyTree]
  grads: PyTree
  step: Array
  norm: Array
  good: Array


class Found(NamedTuple):
  """Loss and gradient norm of a step, float32 [], and whether it is good, bool []."""

  loss: Array
  norm: Array
  good: Array


def left_to_host(state: Any, grads: PyTree, optimizer: Optimizer, found: Found) -> Left:
  """The arrays that `updated` would read, for the host; arguments as of `updated`."""
  own = own_shares(state.params, optimizer.shares)
  near = {"params": own, "opt_state": state.opt_state, "average": state.average}
  return Left(near, grads, state.step, found.norm, found.good)


def unchanged() -> dict[str, PyTree]:
  """None for each of `PARTS`, for a program that leaves them to the host."""
  return dict.fromkeys(PARTS)


def updated(state: Any, grads: PyTree, optimizer: Optimizer, found: Found) -> dict[str, PyTree]:
  """Parameters, optimizer's state and average after the step.

  Args:
    state: the `TrainState` before the step.
    grads: as `Left.grads`.
    optimizer: see `make_optimizer`.
    found: loss, norm, and whether the step is good.
  """
  own = own_shares(state.params, optimizer.shares)
  given = {"params": own, "opt_state": state.opt_state, "average": state.average}
  update: Any = rule_of(optimizer, state.step, found.norm, found.good)
  if optimizer.on_host is None:
    new = update(grads, given)
  else:
    new = updated_by_layer(update, grads, given, optimizer.on_host, found.norm)
  return new | {"params": gathered_again(new["params"], optimizer.shares)}


def rule_of(optimizer: Optimizer, step: Array, norm: Array, good: Array | None) -> UpdateLayer:
  """A function that updates parameters, optimizer's state and average, of a layer or of all.

  It takes the gradients, the old `PARTS` as a dictionary, and the layer's number in its stack (0 if
  it gets all layers), and returns the new `PARTS`.

  Args:
    optimizer: see `make_optimizer`.
    step: int32 [], of the run.
    norm: float32 [], of all gradients.
    good: bool [], False to change nothing; None: the step is good.
  """
  keep = lambda new, old: new if good is None else kept_if(good, new, old)

  def update(grads: PyTree, old: dict[str, PyTree], layer: Any = 0) -> dict[str, PyTree]:
    before, rule = masters.to_float32(old["params"]), optimizer.average
    updates, opt_state = optimizer.tx.update(
      grads, old["opt_state"], before, step=step, norm=norm, layer=layer
    )
    params, average = optax.apply_updates(before, updates), old["average"]
    if rule is not None:
      average = keep(rule.after(average, params, step), average)
    kept = masters.like(keep(params, before), old["params"])
    return {"params": kept, "opt_state": keep(opt_state, old["opt_state"]), "average": average}

  return update


def kept_if(good: Array, new: PyTree, old: PyTree) -> PyTree:
  """The new arrays if `good`, bool [], else the old ones."""
  return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
