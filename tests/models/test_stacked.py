"""Layers written out give what a scan over them gives: values, gradients, and what each reports."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from scmoe.models import gradient_totals
from scmoe.models.gradient_sums import for_last_group
from scmoe.models.gradient_totals import (
  GradientTotal,
  added_by_layer,
  added_by_scan,
  all_added,
  large_layers_apart,
  ready_in_turn,
)
from scmoe.models.stacked import each_layer, is_apart, stack_outputs, stacked_again

D = 5


def run(written_out: bool, params, totals, noise):
  """A made-up layer of a carry, parameters, their totals and something without a gradient."""

  def layer(carry, xs):
    (x, turn), (own, total, noise) = carry, xs
    (own,), turn = ready_in_turn(own, total, turn)
    y = jnp.tanh(x @ own["w"] + own["b"]) + noise
    return (y, turn), {"norm": (y * y).sum(), "y": y}

  x, count = jnp.ones(D), len(noise)
  if not written_out:
    sliced, turn = added_by_scan(totals)
    (x, turn), made = jax.lax.scan(layer, (x, turn), ([params], sliced, noise))
    return x if turn is None else all_added(x, turn, totals), made
  made = []
  for xs in zip(*added_by_layer([params], totals, count), each_layer(noise, count)):
    (x, _), out = layer((x, None), xs)
    made.append(out)
  return x, stack_outputs(made)


def totals_of(values, last):
  """Totals that hold these values, before the last group or for it."""
  totals = jax.tree.map(GradientTotal, values)
  specs = jax.tree.map(lambda _: P(), values)
  return for_last_group(totals, specs, "float32", empty=False) if last else totals


def values_of(totals):
  return jax.tree.map(lambda t: t.value, totals, is_leaf=lambda t: isinstance(t, GradientTotal))


@pytest.mark.parametrize("last", [None, False, True], ids=["no_totals", "early", "last"])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_written_out_equals_the_scan(count, last):
  rng = np.random.default_rng(count)
  wide = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  params = {"w": wide(count, D, D) / 2, "b": wide(count, D)}
  earlier = {"w": wide(count, D, D), "b": wide(count, D)}
  totals = None if last is None else totals_of(earlier, last)
  noise = wide(count, D)

  def loss(params, totals, written_out):
    carry, made = run(written_out, params, totals, noise)
    return (carry * jnp.arange(D)).sum() + made["norm"].sum(), made

  both = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
  scanned, written = both(params, totals, False), both(params, totals, True)
  assert jax.tree.structure(scanned) == jax.tree.structure(written)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), scanned, written
  )


@pytest.mark.parametrize("last", [False, True], ids=["early", "last"])
@pytest.mark.parametrize("written_out", [False, True], ids=["scan", "written_out"])
def test_gradients_are_added_to_what_was_there(written_out, last):
  """Those of all copies, in float32; the parameters themselves get none."""
  rng, count = np.random.default_rng(3), 5
  params = {"w": jnp.asarray(rng.normal(size=(count, D, D)) / 2, jnp.bfloat16)}
  params["b"] = jnp.asarray(rng.normal(size=(count, D)), jnp.bfloat16)
  into = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
  noise = jnp.zeros((count, D))

  def loss(params, totals):
    return (run(written_out, params, totals, noise)[0] * jnp.arange(D)).sum()

  alone = jax.jit(jax.grad(lambda params: loss(params, None)))(params)
  own, totals = jax.jit(jax.grad(loss, (0, 1)))(params, totals_of(into, last))
  for name, before in into.items():
    assert not own[name].any()
    want = before + alone[name].astype(jnp.float32)
    np.testing.assert_allclose(totals[name].value, want, rtol=1e-6)


def test_large_layers_have_totals_of_their_own(monkeypatch):
  """And these are, stacked again, those of a stack."""
  monkeypatch.setattr(gradient_totals, "LARGE_LAYER", D + 1)
  rng, count = np.random.default_rng(3), 5
  params = {"w": jnp.asarray(rng.normal(size=(count, D, D)) / 2, jnp.bfloat16)}
  params["b"] = jnp.asarray(rng.normal(size=(count, D)), jnp.bfloat16)
  zeros = large_layers_apart(jax.tree.map(lambda p: jnp.zeros(p.shape), params), count)
  assert {name: is_apart(own) for name, own in zeros.items()} == {"w": True, "b": False}
  assert all(part.dtype == jnp.float32 for part in zeros["w"].parts)
  totals, noise = jax.tree.map(GradientTotal, zeros, is_leaf=is_apart), jnp.zeros((count, D))

  def loss(params, totals):
    return (run(True, params, totals, noise)[0] * jnp.arange(D)).sum()

  want = jax.jit(jax.grad(loss))(params, None)
  once = jax.jit(jax.grad(loss, 1))(params, totals)
  twice = stacked_again(values_of(jax.jit(jax.grad(loss, 1))(params, once)))
  for name, grad in want.items():
    assert twice[name].dtype == jnp.float32
    np.testing.assert_allclose(twice[name], 2 * grad.astype(jnp.float32), rtol=1e-6)


def test_how_gradients_are_stacked_again():
  """They become a sum of padded arrays; a loop fusion reads these in place, without a copy."""
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
