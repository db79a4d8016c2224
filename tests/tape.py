"""Reverse-mode differentiation of NumPy float64 loops, for the oracles.

The oracles compare values *and gradients* of the model. Their gradients must not come from the
machinery under test, so they come from these few operations, which `test_tape.py` checks against
finite differences. A `Var` remembers which Vars it was made of and how to pass a cotangent on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

_ORDER = itertools.count()


class Var:
  """A float64 array with a memory."""

  __array_priority__ = 1000  # numpy leaves `array * var` to Var

  def __init__(self, value: Any, parents: tuple[tuple[Var, Callable], ...] = ()):
    self.value = np.asarray(value, np.float64)
    self.parents = parents
    self.order = next(_ORDER)

  @property
  def shape(self) -> tuple[int, ...]:
    return self.value.shape

  def __len__(self) -> int:
    return len(self.value)

  def __add__(self, other):
    a, b = self, lift(other)
    return Var(a.value + b.value, ((a, _like(a)), (b, _like(b))))

  def __mul__(self, other):
    a, b = self, lift(other)
    left = lambda bar: _reduce(bar * b.value, a.shape)
    right = lambda bar: _reduce(bar * a.value, b.shape)
    return Var(a.value * b.value, ((a, left), (b, right)))

  def __pow__(self, power: float):
    slope = power * self.value ** (power - 1)
    return Var(self.value**power, ((self, lambda bar: bar * slope),))

  def __matmul__(self, other):
    """vector @ vector, vector @ matrix or matrix @ vector."""
    a, b = self, lift(other)
    if a.value.ndim == b.value.ndim == 1:
      left, right = (lambda bar: bar * b.value), (lambda bar: bar * a.value)
    elif a.value.ndim == 1:
      left, right = (lambda bar: b.value @ bar), (lambda bar: np.outer(a.value, bar))
    else:
      left, right = (lambda bar: np.outer(bar, b.value)), (lambda bar: bar @ a.value)
    return Var(a.value @ b.value, ((a, left), (b, right)))

  def __getitem__(self, index):
    def scatter(bar):
      full = np.zeros(self.shape)
      full[index] = bar
      return full

    return Var(self.value[index], ((self, scatter),))

  def sum(self):
    return Var(self.value.sum(), ((self, lambda bar: np.broadcast_to(bar, self.shape)),))

  def __neg__(self):
    return self * -1.0

  def __sub__(self, other):
    return self + -lift(other)

  def __rsub__(self, other):
    return lift(other) + -self

  def __truediv__(self, other):
    return self * lift(other) ** -1.0

  def __rtruediv__(self, other):
    return lift(other) * self**-1.0

  __radd__, __rmul__ = __add__, __mul__


def lift(x: Any) -> Var:
  """x as a Var; a constant if it is none."""
  return x if isinstance(x, Var) else Var(x)


def exp(x: Any) -> Var:
  x = lift(x)
  y = np.exp(x.value)
  return Var(y, ((x, lambda bar: bar * y),))


def log(x: Any) -> Var:
  x = lift(x)
  return Var(np.log(x.value), ((x, lambda bar: bar / x.value),))


def tanh(x: Any) -> Var:
  x = lift(x)
  y = np.tanh(x.value)
  return Var(y, ((x, lambda bar: bar * (1 - y * y)),))


def stack(parts: list) -> Var:
  """Vars of equal shape along a new first dimension."""
  parts = [lift(part) for part in parts]
  pick = lambda i: lambda bar: bar[i]
  return Var(np.stack([p.value for p in parts]), tuple((p, pick(i)) for i, p in enumerate(parts)))


def gradients(out: Var, leaves: list[Var]) -> list[np.ndarray]:
  """d out / d leaf for a scalar `out`; zeros where it does not depend on the leaf."""
  seen, todo = {out.order: out}, [out]
  while todo:
    for parent, _ in todo.pop().parents:
      if parent.order not in seen:
        seen[parent.order] = parent
        todo.append(parent)
  bars = {out.order: np.ones(out.shape)}
  for order in sorted(seen, reverse=True):  # parents are older than what is made of them
    for parent, pull in seen[order].parents:
      bar = pull(bars[order])
      bars[parent.order] = bars[parent.order] + bar if parent.order in bars else bar
  return [bars.get(leaf.order, np.zeros(leaf.shape)) for leaf in leaves]


def _like(x: Var) -> Callable:
  return lambda bar: _reduce(bar, x.shape)


def _reduce(bar: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """The transpose of broadcasting."""
  bar = np.asarray(bar)
  bar = bar.sum(tuple(range(bar.ndim - len(shape))))
  return bar.sum(tuple(i for i, n in enumerate(shape) if n == 1 != bar.shape[i]), keepdims=True)
