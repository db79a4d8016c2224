"""The fused layer: values, all gradients, and what it keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.kernels.grouped_matmul import get_activation
from scmoe.kernels.moe_layer import moe_ffn, moe_layer, route_top_k


def dense_layer(x, router, gate, up, down, top_k, activation):
  """Every expert on every token, in float32, weighted by a masked softmax."""
  kind = get_activation(activation)
  logits = jnp.dot(x, router)
  chosen = jnp.argsort(-logits, axis=1)[:, :top_k]
  mask = jnp.any(chosen[:, :, None] == jnp.arange(router.shape[1]), axis=1)
  weight = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=1)
  h = jnp.einsum("td,edf->tef", x, up)
  if kind.gated:
    h = kind.value(jnp.einsum("td,edf->tef", x, gate)) * h
  else:
    h = kind.value(h)
  return jnp.einsum("te,tef,efd->td", weight, h, down)


def problem(seed, tokens=40, width=16, hidden=8, experts=6, gated=True):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return (
    normal(tokens, width),
    normal(width, experts),
    normal(experts, width, hidden) if gated else None,
    normal(experts, width, hidden),
    normal(experts, hidden, width),
  )


@pytest.mark.parametrize(("top_k", "activation"), [(1, "relu2"), (2, "swiglu"), (6, "geglu")])
def test_values_and_gradients_match_the_dense_layer(top_k, activation):
  arguments = problem(top_k, gated=get_activation(activation).gated)
  fast = lambda *a: moe_layer(*a, top_k=top_k, activation=activation, backend="xla")
  plain = lambda *a: dense_layer(*a, top_k, activation)
  got, vjp = jax.vjp(jax.jit(fast), *arguments)
  want, plain_vjp = jax.vjp(plain, *arguments)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
  dout = jnp.asarray(np.random.default_rng(9).normal(size=want.shape), jnp.float32)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), vjp(dout), plain_vjp(dout)
  )


def test_choices_of_no_expert_add_nothing():
  x, _, gate, up, down = problem(3)
  expert = jnp.tile(jnp.asarray([[1, 6]]), (40, 1))
  weight = jnp.full((40, 2), 0.5)
  got = moe_ffn(x, expert, weight, gate, up, down, backend="xla")
  want = moe_ffn(x, expert[:, :1], weight[:, :1], gate, up, down, backend="xla")
  np.testing.assert_array_equal(got, want)


def test_the_backward_keeps_x_and_pre_activations_only():
  x, router, gate, up, down = (a.astype(jnp.bfloat16) for a in problem(4, tokens=64))
  _, vjp = jax.vjp(lambda x: moe_layer(x, router, gate, up, down, top_k=2, backend="xla"), x)
  # Every kept array with one row for each (token, choice) or more; weights are the caller's own.
  kept = [a for a in jax.tree.leaves(vjp) if getattr(a, "ndim", 0) == 2 and a.shape[0] > 64]
  assert len(kept) == 2
  assert all(a.shape[1] == up.shape[2] and a.dtype == jnp.bfloat16 for a in kept)
  wide = [a for a in jax.tree.leaves(vjp) if getattr(a, "shape", ())[-1:] == (x.shape[1],)]
  assert all(a.shape in (x.shape, down.shape) for a in wide)


def test_route_top_k_is_lax_top_k():
  x, router, *_ = problem(5)
  expert, weight = route_top_k(x, router, 3)
  value, want = jax.lax.top_k(x @ router, 3)
  np.testing.assert_array_equal(expert, want)
  np.testing.assert_allclose(weight, jax.nn.softmax(value, axis=1), rtol=1e-5)
  with pytest.raises(ValueError, match="top_k=7 but there are 6 experts"):
    route_top_k(x, router, 7)
