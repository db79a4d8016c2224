"""Pairs that are gathered one pair ahead: which gather waits for which work, and what is kept."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from scmoe.models.gradient_totals import GradientTotal, ready
from scmoe.models.regather import OneAhead
from scmoe.parallel.mesh import MeshConfig, make_mesh, manual
from scmoe.parallel.shares import Division, Gathering, Share

PAIRS, WIDTH = 4, 6


def body(carry, xs):
  (((weight,),), _), _, _ = xs
  return jnp.tanh(carry @ weight), None


def gradients(weights, x, one_ahead):
  """Gradients of a chain of products, of which each data rank holds half of every weight."""
  totals = [[GradientTotal(jnp.zeros(w.shape))] for w in weights]

  def loss(shares, totals, x):
    copies = [[[Share(share, Division(-2, ("data",)), Gathering())]] for share in shares]
    run = OneAhead(body, totals) if one_ahead else None
    for own, total in zip(copies, totals):
      if run is None:
        x, _ = body(x, ((ready(own, total), None), None, None))
      else:
        x, _ = run(x, own, None)
    return jnp.sum(x**2)

  _, found, x_bar = jax.grad(loss, (0, 1, 2))(weights, totals, x)
  return [total.value for (total,) in found], x_bar


def on_two_ranks(one_ahead):
  mesh = make_mesh(MeshConfig(2, 1, 1), jax.devices()[:2])
  rows = P(("data", "expert", "shard"))
  run = lambda weights, x: gradients(weights, x, one_ahead)
  return manual(run, mesh, (P("data"), rows), (P("data"), rows))


def given():
  draw = lambda seed, *shape: np.random.default_rng(seed).normal(size=shape).astype(np.float32)
  return [draw(i, WIDTH, WIDTH) / 2 for i in range(PAIRS)], draw(9, 8, WIDTH)


def test_gradients_are_those_of_gathers_in_place():
  got, want = (jax.jit(on_two_ranks(ahead))(*given()) for ahead in (True, False))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


def operations():
  """(primitive, places of the operations whose results it reads, also indirectly), in order."""
  closed = jax.make_jaxpr(on_two_ranks(True))(*given())
  found, made = [], {}

  def walk(jaxpr, sources):
    """Follows nested programs, whose inputs come from `sources`; returns those of its outputs."""
    for var, source in zip(jaxpr.invars, sources):
      made[var] = source
    of = lambda v: frozenset() if hasattr(v, "val") else made.get(v, frozenset())
    for eqn in jaxpr.eqns:
      name, inputs = eqn.primitive.name, list(map(of, eqn.invars))
      inner = [getattr(v, "jaxpr", v) for v in eqn.params.values()]
      inner = [v for v in inner if hasattr(v, "eqns")]
      if name in ("all_gather", "dot_general") or not inner:
        everything = frozenset().union(*inputs)
        found.append((name, everything))
        results = [everything | {len(found) - 1}] * len(eqn.outvars)
      else:
        results = walk(inner[0], inputs)
      made.update(zip(eqn.outvars, results))
    return list(map(of, jaxpr.outvars))

  walk(closed.jaxpr, [frozenset()] * len(closed.jaxpr.invars))
  return found


def test_a_gather_waits_for_no_work_of_the_pair_beside_it():
  found = operations()
  count = lambda sources, name: sum(found[i][0] == name for i in sources)
  products = [count(sources, "dot_general") for name, sources in found if name == "all_gather"]
  # Forward: pair k is gathered when pair k - 1 begins, after k - 1 products. Backward: pair 2 when
  # pair 3 begins, after the 4 products of the forward pass; pairs 1 and 0 one product later each.
  assert products == [0, 0, 1, 2, 4, 5, 6]


def test_the_backward_pass_reads_what_is_gathered_again():
  found = operations()
  gathers = [i for i, (name, _) in enumerate(found) if name == "all_gather"]
  products = [sources for name, sources in found if name == "dot_general"]
  newest = [max(i for i in gathers if i in sources) for sources in products[PAIRS:]]
  # Two products a pair in the backward pass, of which one reads its weight: only the last pair's
  # is the one of the forward pass.
  assert set(newest) == set(gathers[PAIRS - 1 :])
