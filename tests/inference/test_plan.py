"""Plans of where experts lie, from a model's sizes and the memory that there is."""

# Tests call with wrong types on purpose, and fakes stand for typed objects.

import dataclasses
import math

import jax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from scmoe.base.errors import ConfigError
from scmoe.inference.offload import needs, plan
from scmoe.inference.offload.model import Offload
from scmoe.models.config import ModelConfig
from scmoe.parallel.mesh import MeshConfig
from scmoe.run import build
from scmoe.run.config import RunConfig

RATE = 1e9  # bytes/s from the host
ONE = needs.Workload(1, 64, 32)


def built(wiring="scmoe_pos2", **options):
  mesh = options.pop("mesh", MeshConfig(1))
  sizes = {"width": 128, "num_heads": 4, "num_layers": 8, "num_experts": 16, "expert_hidden": 512}
  model = ModelConfig(wiring=wiring, top_k=2, dtype="bfloat16", **{**sizes, **options})
  run = dataclasses.replace(RunConfig(), model=model, mesh=mesh)
  return build.build(run.resolve(num_devices=mesh.size, vocab_size=256))


@pytest.fixture(scope="module")
def pos2():
  """Four pairs of Pos-2."""
  return built()


def needed(made, load=ONE, **options):
  return needs.needs(made.run.model, made.shapes, load, **options)


def planned(made, share, load=ONE, host=2**40, budget=0):
  need = needed(made, load)
  budget = budget or need.fixed + int(share * need.pairs * need.layer)
  return plan.plan(made.run.model, need, load, gpu_memory=budget, host_memory=host, bandwidth=RATE)


def test_bytes_are_those_of_the_arrays(pos2):
  need = needed(pos2)
  assert need.expert == need.moved == 2 * 128 * 512 * 2
  assert (need.experts, need.pairs, need.layer) == (16, 4, 16 * need.expert)
  every = sum(leaf.size for leaf in jax.tree.leaves(pos2.shapes))
  assert need.dense == 2 * every - need.pairs * need.layer
  # Keys and values of eight layers, 96 positions.
  assert need.caches == 96 * 8 * 2 * 128 * 2
  packed = needed(pos2, int8=True)
  assert packed.expert == need.expert
  assert packed.moved == 2 * 128 * 512 + 4 * (128 + 512)
  assert packed.host == 64 * packed.moved


@pytest.mark.parametrize(
  ("share", "prefill", "decode", "slots"),
  [
    (1.0, None, None, 0),
    (0.99, "ring", "early", 7),  # half of the layers' experts are the ring's
    (0.6, "ring", "early", 1),
    (0.25, "ring", "early", 0),
  ],
)
def test_the_way_follows_from_the_budget(pos2, share, prefill, decode, slots):
  found = planned(pos2, share).offload
  mode = lambda way: way and way.mode
  assert (mode(found.prefill), mode(found.decode)) == (prefill, decode)
  assert found.cache_size == (slots if slots >= 2 else 0), "a cache holds what one token asks for"


def test_what_is_planned_fits(pos2):
  need = needed(pos2)
  for share in (1.0, 0.9, 0.7, 0.5, 0.3, 0.26):
    assert planned(pos2, share).device <= need.fixed + int(share * need.pairs * need.layer)


def test_a_model_without_a_shortcut_can_only_block():
  assert planned(built("topk"), 0.5).offload.decode.mode == "blocking"


def test_many_rows_ask_for_everything(pos2):
  found = planned(pos2, 0.5, needs.Workload(8, 64, 32)).offload
  assert (found.prefill.mode, found.decode.mode) == ("ring", "ring")


def test_a_short_prompt_needs_no_ring(pos2):
  assert planned(pos2, 0.5, needs.Workload(1, 4, 32)).offload.prefill.mode == "early"


def test_without_a_ring_the_cache_gets_its_second_section(pos2):
  """One pair's experts are beside the cache; 16 more are 4 of each of the 4 pairs."""
  short = needs.Workload(1, 4, 32)
  found = [planned(pos2, share, short) for share in (0.5, 0.75)]
  assert [one.offload.cache_size for one in found] == [4, 8]
  need = needed(pos2, short)
  assert [one.device for one in found] == [need.fixed + n * need.layer for n in (2, 3)]


def test_what_is_expected_orders_the_ways(pos2):
  need, load = needed(pos2), needs.Workload(1, 64, 32)
  of = lambda *way, cache_size=0: plan.expected(
    Offload.named(*way, cache_size), pos2.run.model, need, load, RATE
  )
  none, blocking, early = of("none", "none"), of("blocking", "blocking"), of("early", "early")
  cached = of("early", "early", cache_size=8)
  assert none.decode > cached.decode > early.decode > blocking.decode
  assert none.device > cached.device > early.device
  assert (none.host, early.host) == (0, need.host)
  assert 0 < early.hidden <= 1
  assert blocking.hidden == 0
  assert of("ring", "early").prefill > of("blocking", "early").prefill


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: planned(built(), 0.1), r"^gpu_memory: .* is less than the .* of the|one layer's exp"),
    (lambda: planned(built("dense"), 0.0, budget=1000), r"^gpu_memory: 1000 B is less than the"),
    (
      lambda: planned(built(), 0.5, host=1000),
      r"^host_memory: 1000 B is less than the .* of the ",
    ),
    (
      lambda: plan.bytes_of("8x", "--gpu_memory"),
      r"--gpu_memory='8x' is not a size of at least one byte; write it as 8GiB",
    ),
    (lambda: plan.bytes_of("-1GiB", "host_memory"), r"^host_memory='-1GiB' is not a size"),
    (
      lambda: plan.bytes_of("0.5", "--gpu_memory"),
      r"^--gpu_memory='0.5' is not a size of at least",
    ),
  ],
)
def test_what_does_not_fit_names_the_number_needed(make, message):
  with pytest.raises(ConfigError, match=message) as error:
    make()
  assert "\n" not in str(error.value)


def test_sizes():
  sizes = {"8GiB": 8 * 2**30, "500MB": 500_000_000, "1048576": 2**20, "1.5 KiB": 1536, "7B": 7,
           "0.5KB": 500, ".5 GiB": 2**29, "64.1MB": 64_100_000, "1e3": 1000, "1.0009KB": 1000,
           "9007199254740993": 2**53 + 1}  # fmt: skip
  assert {text: plan.bytes_of(text, "x") for text in sizes} == sizes
  for text in ("inf", "nan", "1e999999999", "1e-999999999", "1/2", "0.9999999999999999999", ""):
    with pytest.raises(ConfigError, match="is not a size of at least one byte"):
      plan.bytes_of(text, "x")


def test_a_request_is_kept_or_refused(pos2):
  model, shapes, load = pos2.run.model, pos2.shapes, needs.Workload(1, 64, 32)
  request = lambda **options: plan.chosen(model, shapes, load, plan.OffloadRequest(**options))
  resident, lines = request()
  assert (resident.offload, lines) == (Offload(), [])
  assert request(offload="none,none", host_memory=1) == (resident, [])
  with pytest.raises(ConfigError, match=r"^expert_cache=3 has no effect with offload='none': "):
    request(offload="none", expert_cache=3)
  found, lines = request(offload="ring,blocking", expert_cache=3, cache_policy="lru")
  assert (found.offload.prefill.mode, found.offload.decode.mode) == ("ring", "blocking")
  assert (found.offload.cache_size, found.offload.decode.policy) == (3, "lru")
  assert [line.split()[0] for line in lines] == ["offload", "memory", "expected"]
  tight = resident.device // 2
  assert request(gpu_memory=tight)[0].device <= tight
  with pytest.raises(
    ConfigError, match=r"offload='none' needs; use offload='auto', or a smaller expert_cache$"
  ):
    request(offload="none", gpu_memory=tight)


def test_every_device_has_its_experts_in_the_host_memory():
  made = built(mesh=MeshConfig(2, expert=2))
  every = 4 * needed(made).host  # two devices hold copies of the experts of the two others
  request = lambda size: plan.chosen(
    made.run.model, made.shapes, ONE, plan.OffloadRequest("early", host_memory=size)
  )[0]
  assert request(every).host == every
  with pytest.raises(ConfigError, match=r"^host_memory: "):
    request(every - 1)


LATENTS = {
  "style": "llama", "kv_lora_rank": 24, "q_lora_rank": 16, "qk_nope_head_dim": 24,
  "qk_rope_head_dim": 8, "v_head_dim": 32,
}  # fmt: skip


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("options", [{}, {"style": "llama", "num_kv_heads": 2}, LATENTS])
def test_caches_are_those_that_a_device_holds(options, tensor):
  made = built("topk", mesh=MeshConfig(1, tensor=tensor), **options)
  rows, length = 3, 96
  model = nnx.merge(made.graph, made.shapes)
  caches = jax.eval_shape(lambda: model.init_caches(rows, length))
  own = lambda x, spec: math.prod(NamedSharding(made.mesh, spec).shard_shape(x.shape))
  held = jax.tree.leaves(jax.tree.map(own, caches, model.cache_specs()))
  need = needed(made, needs.Workload(rows, 64, 32))
  assert need.caches == 2 * sum(held)
  assert need.caches == rows * length * needs.cached_bytes(made.run.model, tensor)


def test_the_tensor_axis_divides_hidden_widths_and_logits():
  one, two = (needed(built(mesh=MeshConfig(1, tensor=n))) for n in (1, 2))
  stays = 64 * 2 * 8 * 128  # the stream's values of 64 tokens
  assert two.scratch - stays == (one.scratch - stays) // 2


def test_a_server_needs_activations_of_one_piece_only(pos2):
  """A pool of 4 x 4,096 tokens, of which a pass reads 256."""
  whole = needed(pos2, needs.Workload(4, 4096, 1))
  pieces = needed(pos2, needs.Workload(4, 4096, 1, piece=256))
  logits = 4 * 256 * 8
  assert pieces.scratch - logits == (whole.scratch - logits) // 64
  assert pieces.caches == whole.caches
  wide = needed(pos2, needs.Workload(400, 4096, 1, piece=256))  # a decode step has 400 tokens
  assert wide.scratch == 400 * (pieces.scratch - logits) // 256 + 400 * 256 * 8
  assert needs.Workload(4, 16, 1, piece=256).read == 64


def test_a_short_piece_needs_no_ring(pos2):
  """A pass of 4 tokens makes 8 choices of 16 experts."""
  found = planned(pos2, 0.5, needs.Workload(1, 512, 1, piece=4)).offload
  assert found.prefill.mode == "early"
