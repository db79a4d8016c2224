"""Layers written out give what a scan over them gives: values, gradients, and what each reports."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scmoe.models import stacked
from scmoe.models.stacked import joined, layers
from scmoe.parallel.gradients import added_to

D = 5


def run(written_out: bool, params, sums, noise, into=None):
  """A made-up layer of a carry, parameters, sums and something without a gradient."""

  def layer(carry, xs):
    (own,), total, added = xs
    y = jnp.tanh(carry @ own["w"] + own["b"]) + added
    if total is not None:
      y = y + 0.01 * total["w"].sum(0)
    return y, {"norm": (y * y).sum(), "y": y}

  params, carry = [params], jnp.ones(D)
  if not written_out:
    params = params if into is None else added_to(into, params)
    return jax.lax.scan(layer, carry, (params, sums, noise))
  made = []
  for xs in layers(params, len(noise), sums, noise, into):
    carry, out = layer(carry, xs)
    made.append(out)
  return carry, joined(made)


@pytest.mark.parametrize("with_sums", [False, True], ids=["params", "sums"])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_written_out_equals_the_scan(count, with_sums):
  rng = np.random.default_rng(count)
  wide = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  params = {"w": wide(count, D, D) / 2, "b": wide(count, D)}
  sums = {"w": wide(count, D, D)} if with_sums else None
  noise = wide(count, D)

  def loss(params, sums, written_out):
    carry, made = run(written_out, params, sums, noise)
    return (carry * jnp.arange(D)).sum() + made["norm"].sum(), made

  both = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
  scanned, written = both(params, sums, False), both(params, sums, True)
  assert jax.tree.structure(scanned) == jax.tree.structure(written)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), scanned, written
  )


@pytest.mark.parametrize("written_out", [False, True], ids=["scan", "written_out"])
def test_gradients_are_added_to_what_was_there(written_out):
  """Those of all copies, in float32; the parameters themselves get none."""
  rng, count = np.random.default_rng(3), 5
  params = {"w": jnp.asarray(rng.normal(size=(count, D, D)) / 2, jnp.bfloat16)}
  params["b"] = jnp.asarray(rng.normal(size=(count, D)), jnp.bfloat16)
  into = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
  noise = jnp.zeros((count, D))

  def loss(params, into):
    return (run(written_out, params, None, noise, into)[0] * jnp.arange(D)).sum()

  alone = jax.jit(jax.grad(lambda params: loss(params, None)))(params)
  own, sums = jax.jit(jax.grad(loss, (0, 1)))(params, into)
  for name, before in into.items():
    assert not own[name].any()
    np.testing.assert_allclose(sums[name], before + alone[name].astype(jnp.float32), rtol=1e-6)


def test_large_sums_of_gradients_lie_apart(monkeypatch):
  """And are, put together, those of a stack."""
  monkeypatch.setattr(stacked, "SMALL", D + 1)
  rng, count = np.random.default_rng(3), 5
  params = {"w": jnp.asarray(rng.normal(size=(count, D, D)) / 2, jnp.bfloat16)}
  params["b"] = jnp.asarray(rng.normal(size=(count, D)), jnp.bfloat16)
  into = stacked.large_apart(jax.tree.map(lambda p: jnp.zeros(p.shape), params), count)
  assert {name: stacked.is_apart(own) for name, own in into.items()} == {"w": True, "b": False}
  assert all(part.dtype == jnp.float32 for part in into["w"].parts)
  noise = jnp.zeros((count, D))

  def loss(params, into):
    return (run(True, params, None, noise, into)[0] * jnp.arange(D)).sum()

  want = jax.jit(jax.grad(loss))(params, None)
  once = jax.jit(jax.grad(loss, 1))(params, into)
  twice = stacked.put_together(jax.jit(jax.grad(loss, 1))(params, once))
  for name, grad in want.items():
    assert twice[name].dtype == jnp.float32
    np.testing.assert_allclose(twice[name], 2 * grad.astype(jnp.float32), rtol=1e-6)


def test_how_gradients_are_put_together():
  """As a sum of padded arrays, which a loop fusion reads where they are: nothing is copied."""
  count = 5
  params = {"w": jax.ShapeDtypeStruct((count, D, D), jnp.float32)}
  params["b"] = jax.ShapeDtypeStruct((count, D), jnp.float32)
  loss = lambda params: run(True, params, None, jnp.zeros((count, D)))[0].sum()
  text = jax.jit(jax.grad(loss)).lower(params).as_text()
  pads = [line for line in text.splitlines() if "stablehlo.pad" in line]
  assert len(pads) == 2 * count
  assert all(f"-> tensor<{count}x" in line for line in pads)
  for word in ("concatenate", "dynamic_update_slice", "stablehlo.scatter", "stablehlo.while"):
    assert word not in text
