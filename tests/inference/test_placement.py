"""Placements of experts against every placement there is, and their rows against the transport."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.inference.placement.choices import Choices
from scmoe.inference.placement.devices import affinities, assigned, gain, order_of, place
from scmoe.inference.placement.rows import rows_of
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.layer import MoE, MoEConfig
from scmoe.parallel.mesh import (
  AXES,
  BATCH_AXES,
  MeshConfig,
  batch_sharding,
  make_mesh,
  manual,
  parameter_specs,
)


def every_placement(experts, devices):
  """All placements of so many experts on devices that hold equally many."""
  devices_of_slots = np.arange(experts) // (experts // devices)
  return {tuple(p) for p in itertools.permutations(devices_of_slots.tolist())}


def choices_of(expert_NGTK, layer_G=None, num_experts=None):
  expert_NGTK = np.asarray(expert_NGTK, np.int32)
  layer_G = np.arange(expert_NGTK.shape[1]) if layer_G is None else np.asarray(layer_G)
  return Choices(expert_NGTK, layer_G, num_experts or int(expert_NGTK.max()) + 1)


def drawn(seed, *, batches=3, layers=2, tokens=24, k=2, experts=6):
  """Choices of a skewed router: expert e is about 1 / (1 + e) as likely as expert 0."""
  rng = np.random.default_rng(seed)
  score = rng.gumbel(size=(batches, layers, tokens, experts)) - np.log1p(rng.permutation(experts))
  return choices_of(np.argsort(-score, -1)[..., :k], num_experts=experts)


@pytest.mark.parametrize(("experts", "devices"), [(6, 3), (6, 2), (8, 4)])
def test_swaps_find_the_best_of_all_placements(experts, devices):
  rng = np.random.default_rng(0)
  found = every_placement(experts, devices)
  start = np.arange(experts) // (experts // devices)
  for _ in range(5 if experts < 8 else 2):
    pairs = rng.normal(size=(experts, experts))
    pairs = np.where(np.eye(experts), 0, pairs + pairs.T)
    alone = rng.normal(size=(experts, devices))
    most = max(gain(pairs, alone, np.array(p)) for p in found)
    end = assigned(pairs, alone, start, np.random.default_rng(1))
    assert gain(pairs, alone, end) == pytest.approx(most)
    assert sorted(end.tolist()) == start.tolist()


@pytest.mark.parametrize(("objective", "name"), [
  ("together", "receivers"), ("balance", "squares"), ("affinity", "apart")])  # fmt: skip
def test_no_placement_is_better_by_the_objective_itself(objective, name):
  """Two layers of six experts on three devices: all 90 placements of a layer, or all pairs."""
  choices = drawn(3)
  got = place(choices, 3, objective)

  def figure(device_LE):
    if name != "squares":
      return getattr(rows_of(choices, device_LE, 3, slack=1.25), name)
    total = 0
    for gating, layer in enumerate(choices.layer_G):
      rows = choices.chosen(gating).reshape(3 * 3, 8, 6).sum(1) @ np.eye(3)[device_LE[layer]]
      total += (rows.astype(float) ** 2).sum()
    return total

  every = [np.array(p) for p in sorted(every_placement(6, 3))]
  if objective == "affinity":  # a name of a device means nothing: layer 0 has 15 placements
    named = [p for p in every if list(dict.fromkeys(p.tolist())) == [0, 1, 2]]
    rest = [figure(np.stack([a, b])) for a in named for b in every]
  else:
    both = [figure(np.stack([p, p])) for p in every]
    least = [figure(np.stack([p, every[0]])) for p in every]
    # The layers do not depend on each other: each layer's best, whatever the other one is.
    best = [every[int(np.argmin(least))]]
    best.append(every[int(np.argmin([figure(np.stack([best[0], p])) for p in every]))])
    rest = [*both, figure(np.stack(best))]
  assert figure(got) == pytest.approx(min(rest))
  present = np.tile(np.arange(6) // 2, (2, 1))
  assert figure(got) < figure(present)


def test_planted_partners_meet():
  """Experts e and 7 - e are chosen together, and e of layer 0 is followed by (e + 3) % 8."""
  first_T = np.arange(64) % 8
  layers = [
    np.stack([first_T, 7 - first_T], -1),
    np.stack([(first_T + 3) % 8, (4 - first_T) % 8], -1),
  ]
  choices = choices_of([layers])
  assert rows_of(choices, place(choices, 4, "together"), 4, slack=1.25).receivers == 1
  alone = choices_of([[layer[:, :1] for layer in layers]])
  assert rows_of(alone, np.tile(np.arange(8) // 2, (2, 1)), 4, slack=1.25).apart > 0.9
  assert rows_of(alone, place(alone, 4, "affinity"), 4, slack=1.25).apart == 0
  np.testing.assert_array_equal(affinities(alone)[0], 8 * np.eye(8)[(np.arange(8) + 3) % 8])


@pytest.mark.parametrize("objective", ["balance", "together", "affinity"])
@pytest.mark.parametrize("devices", [2, 8])
def test_groups_stay_groups(objective, devices):
  choices = drawn(5, experts=16, k=4)
  order_LE = order_of(place(choices, devices, objective, groups=4))
  assert (np.sort(order_LE, -1) == np.arange(16)).all()
  of_group = order_LE.reshape(2, 4, 4) // 4
  assert (of_group == of_group[..., :1]).all()
  assert (order_LE != np.arange(16)).any()


def test_rows_by_hand():
  """Two devices with two experts each, four tokens; tokens 0 and 1 are of device 0.

  Layer 0 sends both choices of token 0 to device 1, one of token 1 and one of token 2, and none of
  token 3, whose choices are of zero experts. A buffer has 1.0 · 4 / 2 = 2 rows for a peer: the
  longest queue, of device 0 for device 1, has 3 rows, so one overflow round of one row follows.
  """
  layer_0 = [[2, 3], [0, 2], [1, 2], [-1, -1]]
  layer_1 = [[2, 3], [0, 1], [2, 3], [2, 3]]
  rows = rows_of(choices_of([[layer_0, layer_1]]), np.array([[0, 0, 1, 1]] * 2), 2, slack=1.0)
  assert rows.away == pytest.approx((4 + 2) / (6 + 8))
  assert rows.rounds == pytest.approx((2 + 3) / 2)  # layer 1: device 1 has 4 rows for itself
  assert rows.sent == pytest.approx((2 + 1 + 2 + 2) / 2)
  assert rows.busiest == pytest.approx((4 / 3 + 6 / 4) / 2)
  assert rows.receivers == pytest.approx((1 + 2 + 2 + 1 + 1 + 1 + 1) / 7)
  assert rows.apart == pytest.approx((0 + 2 + 2) / 12)


def test_rounds_are_those_of_the_transport():
  """A layer on four simulated devices runs as many rounds as are counted from its choices."""
  devices, experts, width, tokens = 4, 8, 16, 64
  config = MoEConfig(width, 8, experts, 2, dispatch=DispatchConfig(transport="dropless"))
  layer = MoE(config, rngs=nnx.Rngs(0))
  weight = np.asarray(layer.router_gate[0].weight[...]) + np.linspace(0, 0.6, experts)
  x = np.random.default_rng(0).normal(size=(devices, tokens, width)).astype(np.float32) + 0.3
  chosen = np.argsort(-(x.reshape(-1, width) @ weight), -1)[:, :2]
  choices = choices_of(chosen[None, None], num_experts=experts)
  mesh = make_mesh(MeshConfig(data=1, expert=devices), jax.devices()[:devices])
  graph, params = nnx.split(layer)
  specs = parameter_specs(params)
  run = jax.jit(
    manual(
      lambda params, x: nnx.merge(graph, params)(x)[1].rounds[None],
      mesh, (specs, P(BATCH_AXES)), P(AXES),
    )
  )  # fmt: skip
  counted = []
  for device_LE in (np.arange(experts)[None] // 2, place(choices, devices, "balance")):
    layer.router_gate[0].weight[...] = jnp.asarray(weight[:, order_of(device_LE)[0]])
    _, params = nnx.split(layer)
    params = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), params, specs)
    got = run(params, jax.device_put(x, batch_sharding(mesh)))
    counted.append(rows_of(choices, device_LE, devices, slack=config.dispatch.slack).rounds)
    assert (np.asarray(got) == counted[-1]).all()
  assert counted[0] > counted[1] > 1


@pytest.mark.parametrize(("options", "message"), [
  ({"devices": 4, "objective": "balance"}, "devices=4 does not divide 6 experts"),
  ({"devices": 1, "objective": "balance"}, "devices=1 does not divide 6 experts"),
  ({"devices": 3, "objective": "near"}, "by='near' is unknown; one of: balance, together"),
  ({"devices": 3, "objective": "balance", "groups": 2}, "a group would be torn"),
])  # fmt: skip
def test_what_cannot_be_placed(options, message):
  with pytest.raises(ConfigError, match=message):
    place(drawn(0), **options)


def test_objectives_that_have_nothing_to_do():
  with pytest.raises(ConfigError, match="needs two experts per token in a gating, got 1"):
    place(drawn(0, k=1), 3, "together")
  with pytest.raises(ConfigError, match="needs two layers with experts, got 1"):
    place(drawn(0, layers=1), 3, "affinity")
  with pytest.raises(ConfigError, match="devices=5 does not divide the 24 tokens"):
    rows_of(drawn(0), np.zeros((2, 6), int), 5, slack=1.25)


def test_rows_of_fewer_tokens_than_devices_have_a_placement():
  """No device has a token then, so the experts stay where they are."""
  chosen = np.zeros((3, 1, 2, 1), np.int32)
  found = place(Choices(chosen, np.zeros(1, np.int32), 8), 4, "balance")
  np.testing.assert_array_equal(found, [np.arange(8) // 2])
