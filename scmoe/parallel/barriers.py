"""Barriers: they fix an order of operations that data dependencies leave open.

docs/architecture.md, section 5, says of each place what XLA would do without it.
"""

from __future__ import annotations

from typing import Any

import jax


@jax.custom_vjp
def _forward(values: Any) -> Any:
  return jax.lax.optimization_barrier(values)


@jax.custom_vjp
def _backward(values: Any) -> Any:
  return values


_forward.defvjp(lambda v: (jax.lax.optimization_barrier(v), None), lambda _, bar: (bar,))
_backward.defvjp(lambda v: (v, None), lambda _, bar: (jax.lax.optimization_barrier(bar),))
_BARRIERS = {"": jax.lax.optimization_barrier, "forward": _forward, "backward": _backward}


def barrier(values: Any, direction: str = "") -> Any:
  """Returns the same values; no operation reads one of them before all are computed.

  Args:
    values: any tree of arrays.
    direction: "forward": a barrier between the values, in the forward pass only. "backward": one
      between their gradients, in the backward pass only. "": both.
  """
  return _BARRIERS[direction](values)
