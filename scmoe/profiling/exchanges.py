"""The all-to-alls of a program alone: found in its jaxpr, and made again without anything beside.

Rows travel to their experts and back in all-to-alls. The jaxpr of a training step has them all,
those of the backward pass too, with the shapes that one device sends; loops tell how often each
runs. So a measurement of the exchanges alone needs to know neither transport nor schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

WRITTEN_OUT = 16  # exchanges of one kind that a loop's iteration has


@dataclasses.dataclass(frozen=True)
class Exchanged:
  """Equal exchanges of a program.

  Attributes:
    shape: of the buffer that one device has for it; in an all-to-all [W, ...], a slice for each of
      W ranks.
    dtype: its type.
    count: how many of them the program runs.
    send: sends such a buffer once, in the manual region; returns what arrives.
  """

  shape: tuple[int, ...]
  dtype: Any
  count: int
  send: Callable[[Array], Array]

  @property
  def nbytes(self) -> int:
    """Bytes of a device's buffers in all of them together, the slice for itself included."""
    return self.count * math.prod(self.shape) * self.dtype.itemsize


def exchanges_of(jaxpr: Any) -> list[Exchanged]:
  """The all-to-alls over the expert axis that a program runs on every device, equal ones together.

  Exchanges in a loop whose number of iterations only the run decides are left out: the overflow
  rounds of the dropless transport, of which balanced routing has none. So are those that a
  transport sends by other means than jax's all-to-all; `scmoe.run.controls` adds puts.

  Args:
    jaxpr: of the program, e.g. `jax.jit(f).trace(...).jaxpr`.
  """
  found: dict[str, Exchanged] = {}
  for eqn, count in collectives(getattr(jaxpr, "jaxpr", jaxpr), ("all_to_all",)):
    if not count or "expert" not in eqn.params["axis_name"]:
      continue
    sent = eqn.invars[0].aval
    send = functools.partial(eqn.primitive.bind, **eqn.params)
    own = Exchanged(sent.shape, sent.dtype, count, send)
    key = f"{sent.shape} {sent.dtype} {sorted(eqn.params.items(), key=lambda item: item[0])}"
    before = found[key].count if key in found else 0
    found[key] = dataclasses.replace(own, count=before + count)
  return list(found.values())


def collectives(jaxpr: Any, names: Sequence[str], times: int = 1) -> Iterator[tuple[Any, int]]:
  """The equations of a jaxpr with these primitives, inner jaxprs included, and how often each runs.

  In a `while` loop, whose number of iterations only the run decides, they count as run 0 times.

  Args:
    jaxpr: a `Jaxpr`, with `eqns`.
    names: of the primitives, e.g. `all_to_all`.
    times: how often the jaxpr itself runs.
  """
  for equation in jaxpr.eqns:
    if equation.primitive.name in names:
      yield equation, times
    inner = {"scan": equation.params.get("length"), "while": 0}.get(equation.primitive.name, 1)
    for value in equation.params.values():
      for part in value if isinstance(value, (tuple, list)) else (value,):
        part = getattr(part, "jaxpr", part)
        if hasattr(part, "eqns"):
          yield from collectives(part, names, times * inner)


def alone(exchanges: Sequence[Exchanged]) -> Callable[..., tuple[Array, ...]]:
  """A function of one device's buffers that runs these exchanges one after the other.

  Each sends what the one before it brought, so that no two are under way at once, as in a step.
  Call it in the manual region of the program's mesh, with one array of `Exchanged.shape` and
  `Exchanged.dtype` for each entry; it returns as many.
  """

  def run(*buffers: Array) -> tuple[Array, ...]:
    out: list[Array] = []
    for exchange, x in zip(exchanges, buffers, strict=True):
      if out:  # begins when the last exchange of the kind before has ended
        out[-1], x = jax.lax.optimization_barrier((out[-1], x))
      send, unroll = functools.partial(_send, exchange), min(exchange.count, WRITTEN_OUT)
      out.append(jax.lax.fori_loop(0, exchange.count, send, x, unroll=unroll))
    return tuple(out)

  return run


def _send(exchange: Exchanged, _: Any, x: Array) -> Array:
  """Sends x once; returns the array that the next exchange sends, which so waits for this one.

  Where what arrives has another shape, the next one sends x again. One number of x then depends on
  what has arrived: XLA drops an exchange whose result nobody reads, even through an
  `optimization_barrier`.
  """
  arrived = exchange.send(x)
  if arrived.shape == x.shape:
    return arrived
  first, own = (a[(0,) * a.ndim] for a in (arrived, x))
  kept = jnp.where(jnp.isnan(first.astype(jnp.float32)), jnp.zeros_like(own), own)
  return x.at[(0,) * x.ndim].set(kept)


def buffers_for(exchanges: Sequence[Exchanged], devices: int) -> tuple[Array, ...]:
  """Buffers to send, those of all devices along the first dimension; jittable.

  Args:
    exchanges: see `exchanges_of`.
    devices: of the mesh.
  """
  shape = lambda e: (devices * e.shape[0], *e.shape[1:])
  fill = lambda e: jax.lax.broadcasted_iota(jnp.int32, shape(e), len(e.shape) - 1) % 127
  return tuple(fill(e).astype(e.dtype) for e in exchanges)
