"""Steps whose moments lie in the host's memory are the steps of moments in the device's."""

import dataclasses
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from jax.sharding import NamedSharding
from moment_places import (
  BAD,
  EXACT,
  HALVES,
  MODEL,
  ROWS,
  STEPS,
  built,
  named_bits,
  step_of,
  stepped,
)
from reloading import reloaded

from scmoe.base.errors import ConfigError
from scmoe.models.stacked import is_apart
from scmoe.offload.memory import HOST
from scmoe.parallel.mesh import batch_sharding
from scmoe.run import host_memory as host_memory_module
from scmoe.run import summary
from scmoe.run.dry_run import dry_run
from scmoe.run.host_memory import Away, away, check_host_memory
from scmoe.training import fingerprint, streamed_update
from scmoe.training import kept as kept_module
from scmoe.training.fingerprint import survey
from scmoe.training.host_arrays import lies_on_host
from scmoe.training.kept import Groups, is_kept
from scmoe.training.options import (
  OptimizerConfig,
)
from scmoe.training.step import init_state, make_train_step

# A second microbatch doubles a program.
MICROBATCHES = [ROWS, night(ROWS // 2)]


@pytest.mark.parametrize("rows", MICROBATCHES)
@pytest.mark.parametrize("place", ["host", "part"])
def test_the_steps_are_the_same_bit_for_bit(place, rows, monkeypatch):
  """With clipping, a skipped step, an average, moments that ranks share, small and large arrays."""
  monkeypatch.setattr(streamed_update, "SMALL", 1024)
  own, state, good = stepped(place, rows=rows)
  _, want, same = stepped("device", rows=rows)
  assert good == same == [number != BAD for number in range(STEPS)]
  got = named_bits(state.for_checkpoint())
  assert got == named_bits(want.for_checkpoint())
  if place == "host":
    assert all(map(lies_on_host, jax.tree.leaves(own.abstract_state().opt_state)[1:]))


def test_the_last_layers_of_a_stack_may_stay_on_the_device():
  """And the plan counts them there; the first layer leaves it whatever is asked for."""
  own, state, _ = stepped("part")
  stacks = jax.tree.leaves((state.params, state.opt_state), is_leaf=is_apart)
  places = {tuple(map(lies_on_host, x.parts)) for x in stacks if is_apart(x)}
  assert places == {(True, False, False)}
  plan, whole = dry_run(own.run), dry_run(built("host").run)
  assert plan.away.layers == whole.away.layers[:2]
  moved = whole.away.total - plan.away.total
  memory = lambda run: run.memory.parameters + run.memory.optimizer
  assert memory(plan) == memory(whole) + moved
  more = dataclasses.replace(own.run, mesh=dataclasses.replace(own.run.mesh, moments_kept=9))
  assert dry_run(more).away == plan.away


@pytest.mark.parametrize("rows", MICROBATCHES)
def test_the_host_computes_the_same_update(rows):
  """XLA orders the sums of a gradient otherwise if the gradient leaves the program.

  So float32 numbers may differ in their last bits, and a moment may be rounded to the next
  bfloat16.
  """
  _, state, good = stepped("computed", rows=rows)
  _, want, same = stepped("device", rows=rows)
  assert good == same
  pairs = zip(*(jax.tree.leaves(x.for_checkpoint()) for x in (state, want)), strict=True)
  for x, right in pairs:
    x, right = np.asarray(x), np.asarray(right)
    wide, exact = x.astype(np.float64), right.astype(np.float64)
    if x.dtype == jnp.bfloat16:
      assert (wide != exact).mean() <= 0.01
      np.testing.assert_allclose(wide, exact, rtol=2**-7)
    else:
      np.testing.assert_allclose(wide, exact, rtol=0, atol=1e-6 * np.abs(exact).max())


def test_a_run_whose_host_computes_goes_on_bit_for_bit():
  """From a checkpoint, whose arrays lie in pinned memory, and without gradients sent ahead."""
  _, step, _ = step_of("computed")
  want = named_bits(stepped("computed")[1].for_checkpoint())
  step.ahead = 0
  assert named_bits(stepped("computed", stored=2)[1].for_checkpoint()) == want
  step.ahead = 1


def test_devices_with_equal_shards_share_what_the_host_keeps():
  """Ranks of `data` do, if they share no state; then the host updates two shards, not four."""
  kept = lambda mode: jax.tree.leaves(built("computed", mode=mode).abstract_state().opt_state)
  of = lambda mode: Groups([x for x in kept(mode) if lies_on_host(x)])
  assert [len(of(mode).members) for mode in ("none", "moments")] == [2, 4]
  groups = of("none")
  first, second = (sorted(device.id for device in group) for group in groups.members)
  assert (first, second) == ([0, 2], [1, 3])
  assert {groups.of[device] for device in groups.members[1]} == {1}


def test_the_host_s_update_needs_adam_and_a_cpu(monkeypatch):
  with pytest.raises(ConfigError, match=r"computes AdamW, got optimizer.name='muon'"):
    built("computed", optimizer=OptimizerConfig(name="muon"))
  monkeypatch.setattr(kept_module, "host_device", lambda: None)
  with pytest.raises(ConfigError, match=r"which JAX_PLATFORMS leaves out; add cpu"):
    check_host_memory(built("computed"))


@pytest.mark.nightly  # by day AdamW, and Muon on the device in test_state_shares.py
def test_muon_and_shared_parameters_step_as_on_the_device():
  """Muon's rules divide the parameters, and with `parameters` ranks gather what they read.

  XLA compiles the products that make a layer's matrices orthogonal otherwise than those of a stack,
  so last bits may differ.
  """
  optimizer = OptimizerConfig(name="muon", warmup_steps=1, clip_norm=0.5, ablation=HALVES)
  found = []
  for place in ("host", "device"):
    own = built(place, mode="parameters", optimizer=optimizer, rows=ROWS, layers=2)
    abstract = own.abstract_state()
    state = init_state(own.init, own.optimizer, 0, abstract)
    begun = named_bits(state.for_checkpoint().params)
    step = make_train_step(own.objective, own.optimizer, abstract, compiler_options=EXACT)
    batch = jax.device_put(own.random_batch(), batch_sharding(own.mesh, leading=1))
    for _ in range(2):
      state, scalars, _ = step(state, batch)
      assert bool(scalars["finite"])
    after = state.for_checkpoint()
    moved = [name for name, bits in named_bits(after.params).items() if bits != begun[name]]
    assert len(moved) == len(begun)
    found.append(jax.device_get((after.params, after.opt_state)))
  for x, want in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_allclose(x, want, rtol=1e-6, atol=1e-7 * np.abs(want).max())


def test_only_counters_and_what_the_model_reads_lie_on_the_device():
  _, state, _ = stepped("host")
  here = [x for x in jax.tree.leaves(state.opt_state) if not lies_on_host(x)]
  assert {(x.dtype.name, x.ndim) for x in here} == {("int32", 0)}
  away = {x.dtype.name for x in jax.tree.leaves(state.params) if lies_on_host(x)}
  assert away == {"int16"}
  assert all(lies_on_host(x) for x in jax.tree.leaves(state.params) if x.dtype == "int16")
  parts = [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_apart) if is_apart(x)]
  assert {len(x.parts) for x in parts} == {MODEL.num_layers}


@pytest.mark.parametrize(
  ("place", "other"),
  [("host", "device"), ("device", "host"), ("computed", "device"), ("device", "part")],
)
def test_a_checkpoint_loads_in_the_other_place(place, other, tmp_path):
  """Also on another mesh, where ranks share nothing."""
  own, state, _ = stepped(place)
  abstract = built(other, mode="none", data=1).abstract_state()
  got = reloaded(tmp_path, state, own.config, abstract)
  assert named_bits(got.for_checkpoint()) == named_bits(state.for_checkpoint())


def test_the_plan_is_what_the_arrays_are():
  own, state, _ = stepped("host")
  plan, held = dry_run(own.run), lambda x: x.addressable_shards[0].data.nbytes
  leaves = jax.tree.leaves((state.params, state.opt_state))
  assert plan.away.total == sum(held(x) for x in leaves if lies_on_host(x))
  kept = set(map(id, leaves))
  saved = [x for x in jax.tree.leaves(state.for_checkpoint()) if id(x) not in kept]
  assert plan.away.saving == sum(held(x) for x in saved if lies_on_host(x)) > plan.away.total
  assert plan.memory.parameters == sum(map(held, jax.tree.leaves(state.readable().params)))
  counters = sum(held(x) for x in jax.tree.leaves(state.opt_state) if not lies_on_host(x))
  assert plan.memory.optimizer == counters + sum(map(held, jax.tree.leaves(state.average)))
  assert plan.away == away(state, 1)
  layers = plan.away.layers
  assert len(layers) == 1 + MODEL.num_layers
  assert len(set(layers[1:])) == 1
  assert plan.memory.arriving == max(layers[0] + layers[1], 2 * layers[1])


def test_the_plan_of_an_update_by_the_host():
  """Kept are as many bytes; gradients, upper halves, norms and average pass, none of them twice."""
  own, state, _ = stepped("computed")
  plan = dry_run(own.run).away
  parts = jax.tree.leaves((state.params, state.opt_state))
  held = sum(x.shards[0].nbytes for x in parts if is_kept(x))
  assert plan.total == held == dry_run(built("host").run).away.total
  shared = own.optimizer.shares.share_specs
  counts = [
    NamedSharding(own.mesh, spec).shard_shape(x.shape)
    for x, spec in zip(jax.tree.leaves(state.average), jax.tree.leaves(shared), strict=True)
  ]
  elements = sum(map(math.prod, counts))
  readable = jax.tree.leaves(state.readable().params)
  stored = sum(x.dtype.itemsize * math.prod(n) for x, n in zip(readable, counts, strict=True))
  assert sum(plan.arriving) == stored + 4 * elements
  assert sum(plan.leaving) == sum(plan.arriving) + 4 * elements
  assert (len(plan.layers), plan.together) == (1 + MODEL.num_layers, 4)
  assert plan.saving > plan.total


@pytest.mark.parametrize(
  ("place", "words"), [("host", "copies take"), ("computed", "copies and the host's update take")]
)
def test_a_run_says_what_the_plan_expects_of_its_gpu(place, words, monkeypatch):
  own = built(place)

  class Gpu:
    device_kind = "NVIDIA H100 80GB HBM3"

  monkeypatch.setattr(jax, "devices", lambda: [Gpu()])
  (line,) = summary._host_lines(own)
  assert re.search(rf"during a save; {words} [0-9.e-]+ ms a step by the plan$", line)


def test_the_model_of_the_host_s_update_by_hand(monkeypatch):
  """Two layers of 4 bytes, 2 leave and 1 comes back; link and host have 1 byte/s."""
  monkeypatch.setattr(host_memory_module, "HOST_RATE", 1.0)
  layers = ((4, 4), (2, 2), (1, 1))
  of = lambda ahead, together=1: Away(layers[0], ahead, 0, *layers[1:], together)
  # leaves 0 to 2, update to 16, the second layer leaves meanwhile, update to 30, comes back at 31
  assert of(1).seconds(1.0) == 31
  # ... comes back at 17, the second leaves to 19, update to 33, comes back at 34
  assert of(0).seconds(1.0) == 34
  assert of(1, together=2).seconds(1.0) == 59
  assert (of(1).on_device, of(1).staging, of(0).staging) == (3, 4, 2)


def region(jaxpr):
  """The equations of the manual region, in order; inner functions count as one."""
  (inner,) = [e.params["jaxpr"] for e in jaxpr.eqns if e.primitive.name == "shard_map"]
  return getattr(inner, "jaxpr", inner).eqns


@pytest.mark.parametrize(("ahead", "pairwise"), [(0, False), (1, False), (1, True)])
def test_a_fetch_waits_for_the_store_of_the_layer_before_it(ahead, pairwise, monkeypatch):
  """The fetch of layer i waits for the stores of layers up to i - 1 - ahead.

  The fetch of a large array waits for the stores of the arrays before it, too, in the layer that
  leaves meanwhile.
  """
  monkeypatch.setattr(streamed_update, "SMALL", 1 if pairwise else 2**24)
  own = built("host", ahead)
  abstract = own.abstract_state()
  step = make_train_step(own.objective, own.optimizer, abstract)
  batch = jax.eval_shape(own.random_batch)
  jaxpr = step.trace(abstract, batch).jaxpr
  before, copies = {}, Counter()  # variable -> the stores that it waits for
  for number, equation in enumerate(region(jaxpr.jaxpr)):
    inputs = [before.get(id(v), frozenset()) for v in equation.invars]
    waits = frozenset().union(*inputs)
    if equation.primitive.name == "device_put":
      spaces = [x.aval.memory_space for x in (*equation.invars, *equation.outvars)]
      host, device = jax.memory.Space.Host, jax.memory.Space.Device
      if spaces == [host, device]:
        copies[len(waits)] += 1
      elif spaces == [device, host]:
        waits |= {number}
    before |= {id(v): waits for v in equation.outvars}
  state = {"params": abstract.params, "opt_state": abstract.opt_state}
  entries = jax.tree.leaves(state, is_leaf=is_apart)
  slots = ["" if lies_on_host(x) else "stack" if is_apart(x) else None for x in entries]
  layers = ["", *["stack"] * MODEL.num_layers]
  want = Counter()
  for i, layer in enumerate(layers):
    done = sum(slots.count(earlier) for earlier in layers[: max(0, i - ahead)])
    for slot, stack in enumerate(slots):
      if stack == layer:
        earlier = slots[:slot].count(layers[i - ahead]) if pairwise and i >= ahead else 0
        want[done + earlier] += 1
  assert copies == want


def test_the_model_of_the_copies_by_hand():
  """Layers of 2, 1 and 1 bytes at 1 byte/s; with 1 ahead, both directions at once."""
  assert Away((2, 1, 1), 0).seconds(1.0) == 8
  # the first fetch ends at 2, each store and the fetch beside it at 4, 5, and the last store at 6
  assert Away((2, 1, 1), 1).seconds(1.0) == 6
  assert Away((1, 2, 1), 1).seconds(1.0) == 6  # a larger layer's fetch holds the store's place
  assert Away((2, 1, 1), 2).seconds(1.0) == 7
  assert Away((1,) * 10, 1).seconds(2.0) == 5.5
  assert [Away((2, 1, 3), n).on_device for n in (0, 1, 2, 9)] == [3, 4, 6, 6]


def test_fingerprints_do_not_depend_on_the_memory(monkeypatch):
  """Also where JAX_PLATFORMS leaves the CPU out: then the shards go to their devices."""
  values = [np.arange(48, dtype=t).reshape(2, 24) for t in ("float32", "int16")]
  here = [jax.device_put(x) for x in values]
  place = here[0].sharding.with_memory_kind(HOST)
  away, want = [jax.device_put(x, place) for x in values], survey(here)
  assert survey(away) == want
  monkeypatch.setattr(fingerprint, "host_device", lambda: None)
  computed = fingerprint._walk

  def walked(x, *rest):
    assert not lies_on_host(x)
    return computed(x, *rest)

  monkeypatch.setattr(fingerprint, "_walk", walked)
  assert survey(away) == want


def test_a_host_with_too_little_memory_says_so(monkeypatch):
  own = built("host")
  plan = dry_run(own.run).away
  need = 4 * (plan.total + plan.saving)
  monkeypatch.setattr(host_memory_module, "host_memory", lambda: need)
  check_host_memory(own)
  monkeypatch.setattr(host_memory_module, "host_memory", lambda: need - 1)
  with pytest.raises(
    ConfigError, match=r"^mesh.moments_in='host' keeps .* more to save .* here: 4\), got"
  ):
    check_host_memory(own)
  check_host_memory(built("device"))


def test_devices_without_such_memory_are_refused(monkeypatch):
  own = built("host")

  class Bare:
    device_kind = "toy"

    def addressable_memories(self):
      return []

  monkeypatch.setattr(jax, "local_devices", lambda: [Bare()])
  with pytest.raises(ConfigError, match=r"needs memory of the kind pinned_host, a toy"):
    check_host_memory(own)
