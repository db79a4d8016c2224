"""Activations of experts and MLPs, with the derivatives that the backward passes need.

    R  rows      F  width of a pre-activation

A layer computes `a = act(h)` from one pre-activation, or `a = act(gate) * up` from two (the gated
kinds). In `clamped_swiglu`, the kind of GPT-OSS, a function of `up` stands in place of `up`. Kinds
differ only in the gate and in these scalar functions, so one table serves the dense layers, the
reference, the XLA path and the kernels.

`gelu` and `geglu` have the tanh form of GELU, as in `jax.nn.gelu(approximate=True)` and in GPT-2;
`gelu_exact` is the definition, h · Φ(h), with the normal distribution's Φ.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

_Unary = Callable[[jax.Array], jax.Array]
_WithDerivative = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def _itself(up):
  return up, None


@dataclasses.dataclass(frozen=True)
class Activation:
  """One kind of activation: its scalar functions and their derivatives.

  Attributes:
    name: what the user writes.
    gated: whether the layer has a gate beside its up projection.
    value: h -> act(h), in the type of h.
    value_and_derivative: h -> (act(h), act'(h)). At a finite h jax's derivative of `value` is this
      act', too, up to rounding, except in a `kernel_form`, which nobody differentiates by jax.
    factor: of gated kinds: up -> (the number by which act(gate) is multiplied, its derivative with
      respect to up). None in place of the derivative: it is 1.
  """

  name: str
  gated: bool
  value: _Unary
  value_and_derivative: _WithDerivative
  factor: Callable[[jax.Array], tuple[jax.Array, jax.Array | None]] = _itself

  def of(self, h: Sequence[jax.Array]) -> jax.Array:
    """a = act(h), or act(gate) * factor(up), in the type of h.

    Args:
      h: (gate_RF, up_RF) of gated kinds, (h_RF,) otherwise.
    """
    value = self.value(h[0])
    return value * self.factor(h[1])[0] if self.gated else value

  def pullback(
    self, h: Sequence[jax.Array]
  ) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]:
    """(a, function from the gradient of a to the gradients of h); arguments as for `of`.

    The function returns a tuple in the order of h.
    """
    value, derivative = self.value_and_derivative(h[0])
    if not self.gated:
      return value, lambda da: (da * derivative,)
    factor, slope = self.factor(h[1])

    def gradients(da: jax.Array) -> tuple[jax.Array, ...]:
      of_gate, of_up = da * factor * derivative, da * value
      return of_gate, of_up if slope is None else of_up * slope

    return value * factor, gradients


def _silu(h):
  return h * jax.nn.sigmoid(h)


def _silu_grad(h):
  s = jax.nn.sigmoid(h)
  value = h * s
  return value, s + value * (1.0 - s)


def _fast_silu(h):
  half = 0.5 * h
  return half + half * jnp.tanh(half)


def _fast_silu_grad(h):
  s = 0.5 + 0.5 * jnp.tanh(0.5 * h)
  value = h * s
  return value, s + value * (1.0 - s)


_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


def _gelu_inner(h):
  """The number t for which Φ(h) ≈ 0.5 + 0.5 · tanh(t) = sigmoid(2 t)."""
  return _SQRT_2_OVER_PI * (h + _GELU_CUBIC * (h * (h * h)))


def _gelu_inner_grad(h):
  return _SQRT_2_OVER_PI + (3.0 * _GELU_CUBIC * _SQRT_2_OVER_PI) * (h * h)


def _gelu(h):
  # A sigmoid stands for 0.5 + 0.5 · tanh: below zero that sum would cancel.
  return h * jax.nn.sigmoid(2.0 * _gelu_inner(h))


def _gelu_grad(h):
  s = jax.nn.sigmoid(2.0 * _gelu_inner(h))
  value = h * s
  return value, s + (value * (1.0 - s)) * (2.0 * _gelu_inner_grad(h))


def _fast_gelu_grad(h):
  t = jnp.tanh(_gelu_inner(h))
  s = 0.5 + 0.5 * t
  return h * s, s + (0.5 * h) * (1.0 - t * t) * _gelu_inner_grad(h)


def _fast_gelu(h):
  return _fast_gelu_grad(h)[0]


_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_PI = math.sqrt(2.0 * math.pi)


def _gelu_exact(h):
  # erfc stands for 1 + erf: below zero that sum would cancel.
  return 0.5 * h * jax.lax.erfc(-_SQRT_HALF * h)


def _gelu_exact_grad(h):
  cdf = 0.5 * jax.lax.erfc(-_SQRT_HALF * h)
  return h * cdf, cdf + h * jnp.exp(-0.5 * h * h) / _SQRT_2_PI


# Φ(-|h|) = exp(-h²/2) · t · polynomial(t) with t = 1 / (1 + 0.3275911 |h| / √2), to 7.5e-8
# (Abramowitz and Stegun 7.1.26). The coefficients, that of the highest power first, are half of the
# published ones, which give erfc.
_TAIL_SLOPE = 0.3275911 * _SQRT_HALF
_TAIL = (0.5307027145, -0.7265760135, 0.7107068705, -0.142248368, 0.127414796)


def _fast_gelu_exact_grad(h):
  bell = jnp.exp(-0.5 * h * h)
  t = 1.0 / (1.0 + _TAIL_SLOPE * jnp.abs(h))
  tail = _TAIL[0]
  for coefficient in _TAIL[1:]:
    tail = tail * t + coefficient
  tail = tail * t * bell
  cdf = jnp.where(h < 0.0, tail, 1.0 - tail)
  return h * cdf, cdf + h * bell * (1.0 / _SQRT_2_PI)


def _fast_gelu_exact(h):
  return _fast_gelu_exact_grad(h)[0]


def _fast_relu(h):
  return jnp.maximum(h, 0.0)


def _relu_grad(h):
  return jnp.maximum(h, 0.0), jnp.where(h > 0.0, jnp.ones_like(h), jnp.zeros_like(h))


def _relu2(h):
  r = jnp.maximum(h, 0.0)
  return r * r


def _relu2_grad(h):
  r = jnp.maximum(h, 0.0)
  return r * r, 2.0 * r


def clamped(x: jax.Array, low: float | None, high: float) -> jax.Array:
  """x, but at least `low` (None: no lower bound) and at most `high`; NaN stays NaN.

  The derivative at a bound is 1, as that of `torch.clamp` is; that of `jax.numpy.clip` is 1/2
  there. Values on a bound are common in bfloat16: near 7, GPT-OSS's bound, its numbers are 1/32
  apart.
  """
  x = jnp.where(x > high, jnp.full_like(x, high), x)
  return x if low is None else jnp.where(x < low, jnp.full_like(x, low), x)


# GPT-OSS clamps the gate g to at most 7 and activates it as g · sigmoid(1.702 g). It clamps the up
# projection to ± 7, and adds 1 to it.
_STEEPNESS, _LIMIT = 1.702, 7.0


def _clamped_silu(h):
  g = clamped(h, None, _LIMIT)
  return g * jax.nn.sigmoid(_STEEPNESS * g)


def _clamped_silu_grad(h):
  g = clamped(h, None, _LIMIT)
  s = jax.nn.sigmoid(_STEEPNESS * g)
  return _clamped_silu_slope(h, g, s)


def _fast_clamped_silu(h):
  return _fast_clamped_silu_grad(h)[0]


def _fast_clamped_silu_grad(h):
  g = clamped(h, None, _LIMIT)
  return _clamped_silu_slope(h, g, 0.5 + 0.5 * jnp.tanh(0.5 * _STEEPNESS * g))


def _clamped_silu_slope(h, g, s):
  value = g * s
  slope = s + _STEEPNESS * value * (1.0 - s)
  return value, jnp.where(h <= _LIMIT, slope, jnp.zeros_like(slope))


def _clamped_plus_one(up):
  inside = (up >= -_LIMIT) & (up <= _LIMIT)
  slope = jnp.where(inside, jnp.ones_like(up), jnp.zeros_like(up))
  return clamped(up, -_LIMIT, _LIMIT) + 1.0, slope


_ACTIVATIONS = {
  activation.name: activation
  for activation in (
    Activation("swiglu", True, _silu, _silu_grad),
    Activation("geglu", True, _gelu, _gelu_grad),
    Activation("reglu", True, jax.nn.relu, _relu_grad),
    Activation("clamped_swiglu", True, _clamped_silu, _clamped_silu_grad, _clamped_plus_one),
    Activation("silu", False, _silu, _silu_grad),
    Activation("gelu", False, _gelu, _gelu_grad),
    Activation("gelu_exact", False, _gelu_exact, _gelu_exact_grad),
    Activation("relu", False, jax.nn.relu, _relu_grad),
    Activation("relu2", False, _relu2, _relu2_grad),
  )
}


def kernel_form(activation: Activation) -> Activation:
  """The same function, or a close approximation, in a form that Mosaic lowers to a fast kernel.

  The special-function unit can limit an epilogue. It has tanh as one instruction, where the usual
  sigmoid takes two (exponential and reciprocal). Mosaic cannot lower erfc, so the exact GELU
  becomes an approximation with an error below 1e-6 · max(1, |h|). Nor can Mosaic in jax 0.10 lower
  functions with a custom derivative, such as `jax.nn.relu`.
  """
  fast = {
    _silu: (_fast_silu, _fast_silu_grad),
    _gelu: (_fast_gelu, _fast_gelu_grad),
    _gelu_exact: (_fast_gelu_exact, _fast_gelu_exact_grad),
    jax.nn.relu: (_fast_relu, _relu_grad),
    _clamped_silu: (_fast_clamped_silu, _fast_clamped_silu_grad),
  }
  value, both = fast.get(activation.value, (activation.value, activation.value_and_derivative))
  return dataclasses.replace(activation, value=value, value_and_derivative=both)


def get_activation(name: str) -> Activation:
  """The activation of this name.

  Raises:
    ValueError: the name is unknown.
  """
  if name not in _ACTIVATIONS:
    raise ValueError(f"unknown activation {name!r}: use one of {', '.join(sorted(_ACTIVATIONS))}")
  return _ACTIVATIONS[name]


def activation_names() -> tuple[str, ...]:
  """All names that `get_activation` knows."""
  return tuple(_ACTIVATIONS)


def activate(activation: Activation, pre: tuple[jax.Array, ...]) -> jax.Array:
  """a = act(h), or act(gate) * factor(up), in float32 (or wider).

  Args:
    activation: act, with or without a gate.
    pre: (gate_RF, up_RF) for gated kinds, (h_RF,) otherwise, any float type.
  """
  return activation.of([_widen(h) for h in pre])


def activation_vjp(
  activation: Activation, pre: tuple[jax.Array, ...], da_RF: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """The activation recomputed and the gradients of its pre-activations, in float32 (or wider).

  Args:
    activation: act, with or without a gate.
    pre: pre-activations, as for `activate`.
    da_RF: gradient of the activation's result.

  Returns:
    a_RF and the gradients in the order of `pre`.
  """
  a_RF, gradients = activation.pullback([_widen(h) for h in pre])
  return a_RF, gradients(da_RF)


def _widen(x: jax.Array) -> jax.Array:
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
