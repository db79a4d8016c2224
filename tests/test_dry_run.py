"""Counts worked out by hand, and the dry run against what really happens."""

import dataclasses
import math
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from scmoe.base.batch import Batch
from scmoe.base.sizes import duration, number, size_of
from scmoe.blocks.wiring import WIRINGS
from scmoe.models.config import ModelConfig
from scmoe.models.flops import count_parameters, forward_flops, peak_flops
from scmoe.run import build, summary
from scmoe.run.config import RunConfig
from scmoe.run.config_files import find_config, load_config
from scmoe.run.dry_run import (
  dry_run,
  matched_baselines,
  step_work,
)
from scmoe.run.dry_run_text import report
from scmoe.run.estimates import DEVICES, USABLE, StepNeeds, device_table, fits, step_seconds
from scmoe.run.fields import with_field
from scmoe.run.model import build_model
from scmoe.run.modelled import modelled_times
from scmoe.run.nearest import smallest_data


def resolved(run, **values):
  for name, value in values.items():
    run = with_field(run, name.replace("__", "."), str(value))
  return run.resolve(num_devices=run.mesh.planned_size, vocab_size=build.vocab_size(run.data))


def tiny(**values):
  return resolved(load_config(find_config("quickstart"), "smoke"), **values)


# --- FLOPs and parameters by hand -----------------------------------------------------------------


def test_flops_by_hand():
  # D = 16, H = 2 heads of 8, S = 16, F = 32, E = 4, V = 320, 4 blocks of which 2 have an MoE.
  f = forward_flops(tiny().model, 16)
  assert f.attention == 4 * (2 * 16 * 4 * 16 + 2 * 2 * 16 * 8.5)
  assert f.mlp == f.shared == f.routed == 2 * (2 * 2 * 16 * 32)
  assert f.router == 2 * 2 * 16 * (4 + 1)
  assert f.logits == 2 * 16 * 320
  assert f.training == 3 * f.forward == 3 * sum(dataclasses.astuple(f))


def test_flops_of_gated_and_grouped_models():
  run = tiny(model__style="llama", model__num_kv_heads=1, model__wiring="dense")
  f = forward_flops(run.model, 16)
  assert f.attention == 4 * (2 * 16 * (2 * 16 + 2 * 8) + 2 * 2 * 16 * 8.5)
  assert f.mlp == 4 * (3 * 2 * 16 * 32)
  assert f.shared == f.routed == f.router == 0


@pytest.mark.parametrize("wiring", WIRINGS)
def test_parameters_sum_to_the_model(wiring):
  run = tiny(model__wiring=wiring)
  _, shapes = build_model(run, None)
  p = count_parameters(run.model, shapes)
  assert p.total == sum(leaf.size for leaf in jax.tree.leaves(shapes))
  expert = 2 * 16 * 32 + 32 + 16  # two matrices and two biases
  layers = {"dense": 0, "dgmoe_share": 1}.get(wiring, 2)
  assert p.routed == layers * 4 * expert
  assert p.shared == (layers * expert if WIRINGS[wiring].shared_expert else 0)
  visited = {"dgmoe_share": 4}.get(wiring, WIRINGS[wiring].routed_per_token(1))
  assert p.routed_active == layers * visited * expert
  assert p.active == p.total - p.routed + p.routed_active


def test_papers_sizes():
  # reference: 323M (GPT2-S) and 4.1B (GPT3-XL) without a shared expert, 6.7B (LLaMA2-MoE).
  for name, total in (("gpt2_moe_small", 323e6), ("gpt3_moe_xl", 4.1e9), ("llama2_moe", 6.7e9)):
    run = resolved(load_config(find_config(name)), model__wiring="top2")
    _, shapes = build_model(run, None)
    assert count_parameters(run.model, shapes).total == pytest.approx(total, rel=0.015)
  run = resolved(load_config(find_config("olmoe")))
  _, shapes = build_model(run, None)
  olmoe = count_parameters(run.model, shapes)
  assert (olmoe.total, olmoe.active) == pytest.approx((6.9e9, 1.3e9), rel=0.015)


LATENT = """shared_expert model.mix=direct model.style=llama model.moe_every=1 model.num_layers=4
  model.dense_layers=0,2 model.num_experts=4 model.zero_experts=2 model.top_k=3
  model.kv_lora_rank=16 model.q_lora_rank=24 model.qk_nope_head_dim=12
  model.qk_rope_head_dim=4 model.v_head_dim=10 model.attention_bias=True
  router.real_experts=1.5 mesh.data=2 mesh.expert=2"""


def latent():
  fields = [part.partition("=")[::2] for part in f"model.wiring={LATENT}".split()]
  return tiny(**{name.replace(".", "__"): value for name, value in fields})


def test_latent_attention_dense_layers_and_zero_experts_by_hand():
  run = latent()
  model, result = run.model, dry_run(run)
  built = build.build(run)
  assert result.parameters.total == sum(leaf.size for leaf in jax.tree.leaves(built.shapes))
  held = [s.sharding.shard_shape(s.shape) for s in jax.tree.leaves(built.shapes)]
  assert result.memory.parameters == 4 * sum(map(math.prod, held))
  # D = 16, H = 2, S = 16; every product of the model once, from the shapes of its weights.
  flat, _ = jax.tree_util.tree_flatten_with_path(built.shapes)
  sizes = {jax.tree_util.keystr(path): leaf.size for path, leaf in flat}
  names = ("query_down'", "query'", "kv_down'", "kv_up'", "['out'")
  is_product = lambda name: "attention" in name and "bias" not in name and "norm" not in name
  weights = sum(n for name, n in sizes.items() if is_product(name))
  assert len([name for name in sizes if is_product(name)]) == 2 * len(names)
  seen = (16 + 1) / 2
  heads = model.num_heads * (12 + 4 + 10)
  assert result.flops.attention == 2 * weights + 4 * 2 * heads * seen
  experts = sum(n for name, n in sizes.items() if "experts" in name)
  assert result.flops.routed == pytest.approx(2 * experts * 1.5 / 4)  # K_e of E, in both layers
  assert result.parameters.routed_active == round(experts * 1.5 / 4)
  assert result.flops.router == 2 * 2 * model.width * (4 + 2)
  assert result.flops.mlp == result.flops.shared * model.mlp_hidden / model.shared_hidden
  assert "4 experts (2 more return their input) + shared expert" in report(result)


def test_the_modelled_schedule_knows_them():
  """Fewer experts compute, fewer seconds; products before attention as the weights have them."""
  run = latent()
  times = lambda run: modelled_times(run, "h200-nvlink")
  more = with_field(run, "router.real_experts", "3.0")
  assert dataclasses.asdict(times(more)) != dataclasses.asdict(times(run))
  wide = resolved(run, model__q_lora_rank=4096)
  assert dataclasses.asdict(times(wide)) != dataclasses.asdict(times(run))


def test_peak_flops():
  assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
  assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
  assert peak_flops("NVIDIA H100 PCIe") == 756e12
  assert peak_flops("cpu") is None
  assert peak_flops("NVIDIA H200", "float32") is None


# --- memory and traffic ---------------------------------------------------------------------------


def test_overflow_rounds_are_no_traffic_of_a_balanced_step():
  capacity = {"dispatch__capacity_factor": 1.0, "dispatch__transport": "capacity"}
  dropless = {"dispatch__slack": 1.0, "dispatch__transport": "dropless"}
  spread = {"mesh__data": 1, "mesh__expert": 4}
  want, got = (dry_run(tiny(**spread, **fields)) for fields in (capacity, dropless))
  assert got.traffic.exchanges == want.traffic.exchanges
  assert got.memory.gradients == got.memory.parameters


def test_state_is_what_the_devices_hold():
  run = tiny(mesh__data=2, mesh__expert=2, mesh__tensor=2)
  memory = dry_run(run).memory
  built = build.build(run)
  params = jax.tree.map(lambda s: jax.device_put(jnp.zeros(s.shape), s.sharding), built.shapes)
  held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
  assert memory.parameters == memory.gradients == held
  moments = jax.tree.leaves(built.abstract_state().opt_state)
  scalars = sum(m.dtype.itemsize for m in moments if not m.shape)
  assert memory.optimizer == 2 * held + scalars


def test_traffic_by_hand():
  # 8 sequences of 16 over 4 devices: 32 tokens each, E = 4, C = 2 · 32 / 4 = 16 rows of 16 floats.
  run = tiny(mesh__data=1, mesh__expert=4)
  buffer = 4 * 16 * 16 * 4
  result = dry_run(run)
  # 2 MoE blocks; dispatch and combine, forward and backward; a quarter stays at home.
  assert result.traffic.exchanges == 2 * 2 * 2
  assert result.traffic.all_to_all == 8 * buffer * 3 // 4
  assert result.memory.exchange == 4 * buffer
  routed = result.parameters.routed * 4
  replicated = (result.parameters.total * 4) - routed
  assert result.traffic.gradients == round(2 * 3 / 4 * replicated)


@pytest.mark.parametrize("transport", ["capacity", "packed"])
def test_rows_in_fp8_are_fewer_bytes_to_the_experts_alone(transport):
  """A row of 16 float32 numbers, 64 bytes, leaves as 32: 16 numbers, an exponent, zeros to 32."""
  given = {"mesh__data": 1, "mesh__expert": 4, "dispatch__transport": transport}
  usual = dry_run(tiny(**given)).traffic
  fp8 = dry_run(tiny(**given, dispatch__fp8=True)).traffic
  assert fp8.exchanges == usual.exchanges
  assert fp8.all_to_all == usual.all_to_all * (3 + 32 / 64) / 4


def test_rows_that_are_put_count_as_those_of_dropless():
  given = {"mesh__data": 1, "mesh__expert": 4}
  dropless, put = (
    step_work(tiny(**given, dispatch__transport=name)).traffic for name in ("dropless", "put")
  )
  assert put == dropless
  assert put.exchanges == 2 * 2 * 2


def test_recomputing_sends_nothing_again():
  """Every rematerialisation preset keeps the rows that travelled, in fp8 too."""
  for remat, fp8 in (("dots", False), ("moe", False), ("full", False), ("full", True)):
    run = tiny(mesh__data=1, mesh__expert=4, train__remat=remat, dispatch__fp8=fp8)
    assert step_work(run).traffic.exchanges == 2 * 2 * 2, remat


def test_traffic_follows_microbatches_and_batch_axes():
  one = dry_run(tiny(mesh__data=2, mesh__expert=2)).traffic
  run = tiny(mesh__data=2, mesh__expert=2, train__tokens_per_step=3 * 8 * 16)
  three = dry_run(run).traffic
  assert three.exchanges == 3 * one.exchanges
  assert three.all_to_all == 3 * one.all_to_all
  assert three.gradients == one.gradients  # reduced once per step


def test_traffic_of_a_shared_state_by_hand():
  """4 data ranks; every array of the model divides by 4 but the mixing coefficients."""
  common = {"mesh__data": 4, "model__wiring": "top2", "train__tokens_per_step": 2 * 8 * 16}
  none, moments, parameters, kept = (
    dry_run(tiny(**common, mesh__shard_state=mode, **more))
    for mode, more in (
      ("none", {}),
      ("moments", {}),
      ("parameters", {}),
      ("parameters", {"mesh__gather_again": False}),
    )
  )
  size = 4 * none.parameters.total  # float32
  assert none.traffic.gradients == 2 * size * 3 // 4
  assert none.traffic.parameters == 0
  assert moments.traffic.gradients == moments.traffic.parameters == size * 3 // 4
  beside = 4 * (320 * 16 + 16 * 16 + 2 * 16)  # tokens, positions, the last norm's scale and bias
  assert parameters.traffic.gradients == 2 * size * 3 // 4  # once a microbatch
  assert parameters.traffic.parameters == 2 * (beside + 2 * (size - beside)) * 3 // 4
  assert kept.traffic.parameters == 2 * size * 3 // 4
  assert none.memory.gathered == moments.memory.gathered == 0
  pair = (size - beside) // 2
  assert parameters.memory.gathered == beside + 3 * pair
  assert kept.memory.gathered == size
  assert moments.memory.gradients == size  # two microbatches: whole until the last one
  assert parameters.memory.gradients == size // 4


def test_a_state_shared_by_expert_ranks_by_hand():
  """data=1 x expert=4: four devices share all but experts, each of which is on one of them."""
  common = {"mesh__data": 1, "mesh__expert": 4, "model__wiring": "top2"}
  none, moments, parameters = (
    dry_run(tiny(**common, mesh__shard_state=mode)) for mode in ("none", "moments", "parameters")
  )
  shared = 4 * (none.parameters.total - none.parameters.routed)  # bytes, float32
  experts = 4 * none.parameters.routed // 4  # of one device
  assert none.traffic.gradients == 2 * shared * 3 // 4
  assert moments.traffic.gradients == moments.traffic.parameters == shared * 3 // 4
  assert parameters.traffic.gradients == shared * 3 // 4
  assert none.memory.parameters == moments.memory.parameters == experts + shared
  assert parameters.memory.parameters == experts + shared // 4
  assert none.memory.optimizer - moments.memory.optimizer == 2 * shared * 3 // 4
  assert moments.memory.optimizer == parameters.memory.optimizer


def test_the_smallest_mesh_that_holds_a_shared_state():
  """Exact but for scalars, which no rank divides."""
  run, room = tiny(mesh__data=2, model__wiring="top2"), 64
  fields = {"model__wiring": "top2", "mesh__shard_state": "parameters"}
  four, eight = (
    dry_run(tiny(mesh__data=data, train__batch_size=4 * data, **fields)).memory.total
    for data in (4, 8)
  )
  roomy, tight, none = smallest_data(run, [four + room, four - room, 1])
  assert (roomy[0], tight[0], none) == (4, 8, None)
  assert abs(roomy[1] - four) <= room
  assert abs(tight[1] - eight) <= room


def test_a_report_says_from_which_mesh_a_shared_state_fits():
  """OLMoE on 8 data ranks needs 108 GiB on each device; shared it fits three more kinds of GPU."""
  run = resolved(load_config(find_config("olmoe")), mesh__data=8)
  text = report(dry_run(run))
  (line,) = [line for line in text.splitlines() if "from mesh.data=" in line]
  found = dict(re.findall(r"(\w+) from mesh.data=(\d+)", line))
  assert found.keys() == {"H100", "A100", "L4"}
  assert found["H100"] == "8"
  for name, data in found.items():
    shared = resolved(
      load_config(find_config("olmoe")), mesh__data=data, mesh__shard_state="parameters",
      train__batch_size=data, train__tokens_per_step=0,
    )  # fmt: skip
    (device,) = [device for device in DEVICES if device.name == name]
    assert dry_run(shared).memory.total <= USABLE * device.memory


def test_expert_ranks_that_share_need_no_data_axis():
  """OLMoE on data=1 x expert=8 needs no second data rank where the eight ranks share."""
  run = resolved(load_config(find_config("olmoe")), mesh__data=1, mesh__expert=8)
  shared = resolved(
    load_config(find_config("olmoe")),
    mesh__data=1, mesh__expert=8, mesh__shard_state="parameters",
  )  # fmt: skip
  total = dry_run(shared).memory.total
  assert smallest_data(run, [total]) == [(1, total)]


def test_traffic_without_an_expert_axis():
  alone = dry_run(tiny(mesh__data=4)).traffic
  assert alone.exchanges == alone.all_to_all == 0
  assert alone.gradients > 0


def test_activations_are_of_the_order_that_xla_needs():
  run = tiny(model__width=64, data__seq_len=64, model__context=64)
  built = build.build(run)
  ids = jnp.ones((run.train.batch_size, run.data.seq_len), jnp.int32)
  batch = Batch(ids, ids, jnp.ones(ids.shape), ids, ids)
  loss = lambda p, b: built.objective.loss(p, {}, b, None)[0]
  compiled = jax.jit(jax.grad(loss)).lower(built.shapes, batch).compile()
  needed = compiled.memory_analysis().temp_size_in_bytes
  estimate = dry_run(run).memory.activations
  assert 0.5 < estimate / needed < 2


def test_remat_keeps_less():
  run = tiny(model__num_layers=16)
  kept = {
    r: dry_run(with_field(run, "train.remat", r)).memory.activations for r in ("none", "full")
  }
  assert kept["full"] < kept["none"]


# --- what is printed ------------------------------------------------------------------------------


def test_report_of_a_mesh_nobody_has():
  started = time.monotonic()
  run = resolved(
    load_config(find_config("gpt3_moe_xl")),
    mesh__data=8,
    mesh__expert=8,
    train__batch_size=64,
    train__tokens_per_step=0,
  )
  text = report(dry_run(run))
  assert time.monotonic() - started < 60
  for words in ("64 devices", "all-to-all", "activations", "H200", "nothing is allocated"):
    assert words in text
  for wiring in WIRINGS:
    assert f" {wiring} " in text
  assert "> scmoe_pos2" in text


def test_fits_is_said_of_every_kind_of_gpu():
  """OLMoE on one device: 141 GiB of a step are more than 92 % of an H200's 141 GB."""
  run = resolved(load_config(find_config("olmoe")))
  result = dry_run(run)
  lines = {line.split()[0]: line for line in device_table(result.step_needs, 1) if line.split()}
  assert {"B200", "H200", "H100", "A100", "L4"} <= set(lines)
  for device in DEVICES:
    over = result.memory.total - USABLE * device.memory
    words = f"does not fit, {size_of(over)} over" if over > 0 else f"fits, {size_of(-over)} left"
    assert words in lines[device.name]
    assert fits(result.memory.total, device) == words
  assert "does not fit" in lines["H200"]
  assert "does not fit" not in lines["B200"]
  assert "\n".join(device_table(result.step_needs, run.train.steps)) in report(result)


def test_the_exchange_has_a_time_of_its_own_by_hand():
  """989 TFLOP/s and 450 GB/s of an H100: 40 % and 43 % of them, one after the other or together."""
  needs = StepNeeds(memory=0, flops=989e12, exchange=450e9, tokens=1e6, exchanging=8)
  h100 = next(device for device in DEVICES if device.name == "H100")
  assert step_seconds(needs, h100) == pytest.approx((1 / 0.40, 1 / 0.43, 9 / 0.43))
  (line,) = [line for line in device_table(needs, 10) if line.startswith("  H100")]
  slow, fast = 1e6 / (1 / 0.40 + 1 / 0.43), 1e6 / (1 / 0.40)
  assert f"{number(slow)} to {number(fast)}, 48.3 s to 25 s" in line
  # An expert axis that one host cannot hold exchanges between hosts.
  (line,) = [
    line
    for line in device_table(dataclasses.replace(needs, exchanging=16), 1)
    if line.startswith("  H100")
  ]
  assert f"{number(1e6 / (1 / 0.40 + 9 / 0.43))} to {number(1e6 / (9 / 0.43))}" in line


def test_what_larger_microbatches_would_take():
  """The report has the figures of a run that asks for them, if a step has so many."""
  length = tiny().data.seq_len
  of = lambda rows: dry_run(tiny(train__batch_size=rows, train__tokens_per_step=4 * length))
  result, larger = of(2), of(4)
  assert result.larger == {2: larger.memory}
  name = "total with train.batch_size=4"
  text = report(result)
  assert f"{name:36} {size_of(larger.memory.total):>12}\n" in text
  assert "total with train.batch_size=8" not in text, "there are two microbatches"
  assert "total with" not in report(larger)


def test_baseline_that_cannot_be_built_says_why():
  assert "multiple of 4" in str(matched_baselines(tiny(model__num_layers=2))["dgmoe_share"])


def test_free_data_axis_counts_as_one():
  run = with_field(with_field(RunConfig(), "mesh.expert", "4"), "mesh.tensor", "2")
  assert run.mesh.planned_size == 8


def test_units():
  assert number(1_714_000_000) == "1.71G"
  assert number(999.6e3) == "1M"
  assert number(0) == "0"
  assert size_of(512) == "512 B"
  assert size_of(3.1 * 2**30) == "3.10 GiB"
  assert duration(0.25) == "250 ms"
  assert duration(90) == "90 s"
  assert duration(86400 * 4) == "4 days"


def test_the_layers_that_fit_come_with_their_lists(monkeypatch):
  """Eight layers of which every second one has no window; four fit."""
  model = ModelConfig(style="llama", wiring="topk", num_layers=8, vocab_size=64, sliding_window=4,
                      moe_every=1, full_attention_layers="1,3,5,7")  # fmt: skip

  def needs(run):
    return SimpleNamespace(memory=SimpleNamespace(total=run.model.resolve().num_layers))

  monkeypatch.setattr(summary, "dry_run", needs)
  line = summary.levers(RunConfig(model=model).resolve(num_devices=1, vocab_size=64), 4)
  assert "model.num_layers=4 model.full_attention_layers=1,3 train.batch_size=1 " in line
