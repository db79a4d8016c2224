"""Expert activations, with the derivatives the fused backward needs.

An expert computes `a = act(h)` from one pre-activation, or `a = act(gate) * up` from two (the gated
kinds). Only the scalar function differs between kinds, so one table of scalar functions serves the
reference, the XLA path and the kernels' epilogues.

GELU is the tanh form, as in `jax.nn.gelu(approximate=True)` and in GPT-2.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

_Unary = Callable[[jax.Array], jax.Array]
_WithDerivative = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Activation:
  """One kind of expert activation.

  Attributes:
    name: what the user writes.
    gated: whether the expert has a gate and an up projection.
    value: h -> act(h).
    value_and_derivative: h -> (act(h), act'(h)).
  """

  name: str
  gated: bool
  value: _Unary
  value_and_derivative: _WithDerivative


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


def _gelu(h):
  return 0.5 * h * (1.0 + jnp.tanh(_SQRT_2_OVER_PI * (h + _GELU_CUBIC * h * h * h)))


def _gelu_grad(h):
  t = jnp.tanh(_SQRT_2_OVER_PI * (h + _GELU_CUBIC * h * h * h))
  inner = _SQRT_2_OVER_PI * (1.0 + 3.0 * _GELU_CUBIC * h * h)
  return 0.5 * h * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * h * (1.0 - t * t) * inner


def _relu(h):
  return jnp.maximum(h, 0.0)


def _relu_grad(h):
  return jnp.maximum(h, 0.0), jnp.where(h > 0.0, jnp.ones_like(h), jnp.zeros_like(h))


def _relu2(h):
  r = jnp.maximum(h, 0.0)
  return r * r


def _relu2_grad(h):
  r = jnp.maximum(h, 0.0)
  return r * r, 2.0 * r


_ACTIVATIONS = {
  activation.name: activation
  for activation in (
    Activation("swiglu", True, _silu, _silu_grad),
    Activation("geglu", True, _gelu, _gelu_grad),
    Activation("reglu", True, _relu, _relu_grad),
    Activation("silu", False, _silu, _silu_grad),
    Activation("gelu", False, _gelu, _gelu_grad),
    Activation("relu", False, _relu, _relu_grad),
    Activation("relu2", False, _relu2, _relu2_grad),
  )
}


def kernel_form(activation: Activation) -> Activation:
  """The same function, cheaper in a kernel's epilogue.

  A GPU has tanh as one instruction of the special-function unit, where the usual sigmoid takes two
  (exponential and reciprocal), and that unit is what limits an epilogue.
  """
  if activation.value is not _silu:
    return activation
  return dataclasses.replace(activation, value=_fast_silu, value_and_derivative=_fast_silu_grad)


def get_activation(name: str) -> Activation:
  """Looks an activation up by name.

  Raises:
    ValueError: the name is unknown.
  """
  if name not in _ACTIVATIONS:
    raise ValueError(f"unknown activation {name!r}: use one of {', '.join(sorted(_ACTIVATIONS))}")
  return _ACTIVATIONS[name]


def activation_names() -> tuple[str, ...]:
  """All names `get_activation` knows."""
  return tuple(_ACTIVATIONS)


def activate(activation: Activation, pre: tuple[jax.Array, ...]) -> jax.Array:
  """a = act(h), or act(gate) * up, in float32 (or wider).

  Args:
    activation: the kind.
    pre: (gate_RF, up_RF) for gated kinds, (h_RF,) otherwise, any float type.
  """
  wide = [_widen(h) for h in pre]
  value = activation.value(wide[0])
  return value * wide[1] if activation.gated else value


def activation_vjp(
  activation: Activation, pre: tuple[jax.Array, ...], da_RF: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """The activation recomputed and the gradients of its pre-activations, in float32 (or wider).

  Returns:
    a_RF and the gradients in the order of `pre`.
  """
  wide = [_widen(h) for h in pre]
  value, derivative = activation.value_and_derivative(wide[0])
  if not activation.gated:
    return value, (da_RF * derivative,)
  return value * wide[1], (da_RF * wide[1] * derivative, da_RF * value)


def _widen(x: jax.Array) -> jax.Array:
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
