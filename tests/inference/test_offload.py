"""Experts in the host's memory: every way of offloading says what a resident model says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from drawn import drawn_model
from flax import nnx
from jax.sharding import NamedSharding

from scmoe.base.errors import ConfigError
from scmoe.inference.decode import Static, generate, make_decode, make_prefill
from scmoe.inference.offload.model import Offload, Usage, offloaded
from scmoe.inference.sampling import Sampling
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import GPT
from scmoe.moe.dispatch import DispatchConfig
from scmoe.parallel.mesh import MeshConfig, make_mesh, parameter_specs

VOCAB, GREEDY, NEW = 64, Sampling(temperature=0.0), 6
PROMPTS = {"one": [[1, 2, 3, 4, 5]], "several": [[1, 2, 3, 4, 5], [7, 8], [9]]}


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
  """Programs run once or twice here."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def make_model(mesh_config=None, **options):
  sizes = {"width": 16, "num_heads": 2, "num_layers": 4, "num_experts": 8, "expert_hidden": 24}
  config = ModelConfig(
    **{**sizes, "wiring": "scmoe_pos2", "top_k": 2, "context": 32, "dtype": "float32",
       "init_std": 0.3, **options}
  ).resolve(vocab_size=VOCAB)  # fmt: skip
  model = drawn_model(lambda: GPT(config, rngs=nnx.Rngs(0)))
  mesh = make_mesh(mesh_config) if mesh_config else make_mesh(devices=jax.devices()[:1])
  graph, params = nnx.split(model)
  put = lambda x, spec: jax.device_put(x.astype(config.dtype), NamedSharding(mesh, spec))
  return nnx.merge(graph, jax.tree.map(put, params, parameter_specs(params))), mesh


@functools.cache
def resident(prompts, mesh_config=None, **options):
  model, mesh = make_model(mesh_config, **options)
  return generate(model, PROMPTS[prompts], GREEDY, max_new_tokens=NEW, mesh=mesh)


@functools.cache
def on_host(mesh_config=None, int8=False, **options):
  model, mesh = make_model(mesh_config, **options)
  return offloaded(model, mesh, int8=int8), mesh


@pytest.mark.parametrize(
  ("way", "size", "prompts", "options"),
  [
    (("blocking", "blocking"), 0, "one", {}),
    night(("early", "early"), 0, "several", {"dtype": "bfloat16"}),
    night(("early", "early"), 0, "one", {}),
    night(("early", "early"), 3, "one", {"dtype": "bfloat16"}),
    (("ring", "early"), 3, "one", {}),
    night(("ring", "blocking"), 8, "several", {}),
    (("ring", "ring"), 0, "several", {}),
    (("early", "early"), 3, "one", {"wiring": "dgmoe_share"}),
    night(("ring", "blocking"), 2, "one", {"wiring": "topk"}),
    night(
      ("early", "early"), 0, "one", {"wiring": "shared_expert", "moe_every": 1, "zero_experts": 2}
    ),
  ],
  ids=str,
)
def test_the_same_tokens(way, size, prompts, options):
  expected = resident(prompts, **options)
  model, mesh = on_host(**options)
  usage = Usage()
  found = generate(
    model,
    PROMPTS[prompts],
    GREEDY,
    max_new_tokens=NEW,
    mesh=mesh,
    offload=Offload.named(*way, size),
    usage=usage,
  )
  assert found == expected
  assert bool(usage.traces) == bool(size)
  if size:
    assert usage.requests == np.concatenate(usage.traces[0], 1).sum()
    assert usage.hit_rate == pytest.approx(usage.hit_rate_of("lfu"))
    assert usage.hit_rate <= usage.hit_rate_of("belady")


@pytest.mark.parametrize("config", [MeshConfig(2, 4, 1), night(MeshConfig(1, 2, 2))], ids=str)
def test_the_same_tokens_on_a_mesh(config):
  expected = resident("several", config)
  model, mesh = on_host(config)
  ways = [Offload.named("ring", "early", 2)]
  ways += [Offload.named("blocking", "blocking")] * (config.tensor > 1)
  for offload in ways:
    found = generate(
      model, PROMPTS["several"], GREEDY, max_new_tokens=NEW, mesh=mesh, offload=offload
    )
    assert found == expected


def test_devices_with_rows_of_their_own_count_their_requests():
  """Two rows on two devices, along the data axis and along that of sequences."""

  def counted(config):
    model, mesh = on_host(config)
    usage, offload = Usage(), Offload.named("blocking", "blocking", 4)
    options = {"max_new_tokens": 3, "mesh": mesh, "offload": offload, "usage": usage}
    generate(model, [[1, 2, 3], [7, 8]], GREEDY, **options)
    return usage.requests, usage.misses, usage.held[0].shape, usage.traces[0][0].shape

  assert counted(MeshConfig(data=2)) == counted(MeshConfig(data=1, sequence=2))


@pytest.mark.parametrize("way", ["ring", "early"])
def test_a_layer_is_let_go_before_its_experts_are_needed_for_a_cache(way):
  """The next pair waits for the places to be filled, or all layers' experts stay until the end."""
  model, mesh = on_host(num_layers=8)
  graph, params = nnx.split(model)
  prefill = make_prefill(Static(graph, mesh, GREEDY, Offload.named(way, "early", 3)), 8)
  tokens = jnp.ones((4, 4), jnp.int32)
  traced = prefill.trace(params, None, jnp.full((4,), 4), jax.random.key(0), tokens)
  places = (3, 16, 24)  # of the first matrix
  held = [
    any(v.aval.shape == places for v in eqn.invars)
    for eqn in jaxpr_equations(traced.jaxpr.jaxpr, "optimization_barrier")
  ]
  assert sum(held) >= 4 - 2  # pairs, but those in the ring's two sections


def jaxpr_equations(jaxpr, name):
  """All equations of a primitive, inner ones too."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == name:
      yield eqn
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
      inner = getattr(value, "jaxpr", value)  # closed ones have one
      if hasattr(inner, "eqns"):
        yield from jaxpr_equations(inner, name)


def test_eight_bits_are_what_they_are_multiplied_out_to():
  model, mesh = on_host(int8=True)
  early = generate(
    model,
    PROMPTS["one"],
    GREEDY,
    max_new_tokens=NEW,
    mesh=mesh,
    offload=Offload.named("early", "early"),
  )
  rounded, _ = make_model()
  graph, params = nnx.split(rounded)
  is_matrix = lambda path, x: "experts" in jax.tree_util.keystr(path) and x.ndim == 4
  scale = lambda x: jnp.abs(x).max(-2, keepdims=True) / 127
  params = jax.tree_util.tree_map_with_path(
    lambda path, x: jnp.round(x / scale(x)) * scale(x) if is_matrix(path, x) else x, params
  )
  rounded = nnx.merge(graph, params)
  assert early == generate(rounded, PROMPTS["one"], GREEDY, max_new_tokens=NEW, mesh=mesh)


def test_only_matrices_of_experts_lie_in_the_host():
  model, _ = on_host()
  leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.split(model)[1])
  where = {jax.tree_util.keystr(path): leaf.sharding.memory_kind for path, leaf in leaves}
  host = {name for name, kind in where.items() if kind == "pinned_host"}
  assert len(host) == 2 * 2, sorted(host)  # up and down of two pairs
  assert all("experts" in name and "bias" not in name for name in host)


def test_an_early_copy_begins_before_the_window_and_a_blocking_one_behind_it():
  model, mesh = on_host()
  graph, params = nnx.split(model)
  order = {}
  for way in ("early", "blocking"):
    static = Static(graph, mesh, GREEDY, Offload.named(way, way))
    caches = model.init_caches(1, 16)
    args = (params, {}, jnp.ones(1, jnp.int32), jax.random.key(0), np.int32(1),
            jnp.zeros(1, jnp.int32), caches)  # fmt: skip
    text = str(make_decode(static, 2).trace(*args).jaxpr)
    steps = text.splitlines()
    first = next(i for i, line in enumerate(steps) if "device_put" in line)
    order[way] = sum("= dot_general" in line for line in steps[:first])
  # MLP and shared expert have two products each, the second attention six.
  assert order["blocking"] - order["early"] == 2 + 6 + 2


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: Offload.named("late", "early"), r"offload='late' is unknown; one of: none, block"),
    (lambda: Offload.named("none", "early"), r"use none for both, or for neither"),
    (lambda: Offload.named("ring", "ring").checked(make_model()[0]), r"are in the device's memory"),
    (lambda: Offload().checked(on_host()[0]), r"are in the host's memory"),
    (
      lambda: offloaded(make_model(wiring="dense")[0], make_mesh(devices=jax.devices()[:1])),
      r"model.wiring='dense' has no experts",
    ),
    (
      lambda: offloaded(make_model()[0], make_mesh(MeshConfig(1, 8, 1), num_experts=4)),
      r"at most as many on the expert axis",
    ),
  ],
)
def test_what_cannot_be_is_one_line(make, message):
  with pytest.raises(ConfigError, match=message) as error:
    make()
  assert "\n" not in str(error.value)


def test_weights_that_are_gathered_cannot_lie_in_the_host():
  config = make_model()[0].config
  model = GPT(config, dispatch=DispatchConfig(adaptive_r=0), rngs=nnx.Rngs(0))
  with pytest.raises(ConfigError, match=r"dispatch\.adaptive_r=1"):
    offloaded(model, make_mesh(devices=jax.devices()[:1]))
