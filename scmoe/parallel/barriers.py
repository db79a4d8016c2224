"""Points that values pass together: they hold an order that data leaves open."""

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
  """The same values, of which none is read before all are there.

  Args:
    values: any tree of arrays.
    direction: "forward" or "backward": in one pass only. Else the cotangents pass it together too.
  """
  return _BARRIERS[direction](values)
