"""The order that hides communication, seen without a GPU: a change that loses it fails here."""

# ruff: noqa: E501 (lines of a program)

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from scmoe.blocks.block import BlockConfig
from scmoe.blocks.options import OverlapAblation, OverlapConfig
from scmoe.blocks.pair import BlockPair
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import GPT, Pass, run_batches_in_turns
from scmoe.models.gradient_sums import for_last_group
from scmoe.models.gradient_totals import GradientTotal, added
from scmoe.moe.dispatch import DispatchConfig
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh, manual, parameter_specs
from scmoe.profiling.windows import (
  Sum,
  Window,
  free_products,
  graph_windows,
  program_sums,
  program_windows,
  summary,
)


@functools.cache
def windows(wiring, reduced=False, **overlap):
  """Windows of the forward and backward pass of one block pair on four devices."""
  config = ModelConfig(
    wiring=wiring,
    num_layers=2,
    width=8,
    num_heads=2,
    num_experts=4,
    top_k=1,
    vocab_size=16,
    context=4,
    dtype="float32",
  ).resolve()
  mesh = make_mesh(MeshConfig(expert=4), jax.devices()[:4])
  make = lambda: GPT(config, overlap=OverlapConfig(**overlap), rngs=nnx.Rngs(params=0))
  graph, params = nnx.split(nnx.eval_shape(make))
  specs = parameter_specs(params)
  pure = nnx.to_pure_dict(specs)

  def loss(params, tokens):
    if not reduced:
      return nnx.merge(graph, params)(tokens).h_BSD.sum()
    # As a training step does it: the gradients with respect to the sums come back reduced.
    zeros = jax.tree.map(GradientTotal, nnx.to_pure_dict(params))
    totals = for_last_group(zeros, pure, "float32", empty=True)
    read = jax.lax.stop_gradient(nnx.to_pure_dict(params))
    others = lambda tree: {name: tree[name] for name in tree if name != "stages"}
    merged = {**read, **added([others(read)], others(totals))[0]}
    given = Pass(gradient_totals=totals["stages"])
    return nnx.merge(graph, merged)(tokens, given).h_BSD.sum()

  gradient = manual(jax.grad(loss), mesh, (specs, P(BATCH_AXES)), specs)
  return graph_windows(jax.make_jaxpr(gradient)(params, jnp.zeros((4, 4), jnp.int32)))


def beside(found, stage, direction):
  (window,) = [w for w in found if (w.stage, w.direction) == (stage, direction)]
  return set(window.beside)


EXCHANGES = [("dispatch", "forward"), ("combine", "forward")]
EXCHANGES += [(stage, "backward") for stage, _ in EXCHANGES]


def test_top_k_leaves_no_window_in_the_forward_pass():
  found = windows("topk")
  assert beside(found, "dispatch", "forward") == set()
  assert beside(found, "combine", "forward") == set()


@pytest.mark.parametrize(("stage", "direction"), EXCHANGES)
def test_the_shortcut_frees_every_exchange(stage, direction):
  assert {"mlp", "attention"} <= beside(windows("scmoe_pos2"), stage, direction)


@pytest.mark.parametrize(("stage", "direction"), EXCHANGES)
def test_a_sequential_run_has_no_dense_operation_beside_it(stage, direction):
  found = beside(windows("scmoe_pos2", schedule="off"), stage, direction)
  # In the backward pass a product whose result nothing waits for, a weight's gradient, stays free.
  if direction == "forward":
    assert found == set()


def test_barriers_divide_the_window_at_the_slot():
  found = windows(
    "scmoe_pos2", schedule="mlp 0", order="barriers"
  )  # MLP | experts | attention, shared expert
  assert beside(found, "dispatch", "forward") == {"mlp"}
  assert {"attention", "mlp"} <= beside(found, "combine", "forward")
  early = windows("scmoe_pos2", schedule="dispatch", order="barriers")
  assert beside(early, "dispatch", "forward") == set()


def test_the_backward_pass_has_its_own_slot():
  count = lambda found, stage: len(
    next(w for w in found if (w.stage, w.direction) == (stage, "backward")).beside
  )
  mirrored = windows("scmoe_pos2", schedule="mlp 0", order="barriers")
  later = windows(
    "scmoe_pos2", schedule="mlp 0", order="barriers", ablation=OverlapAblation("attention 1")
  )
  free = windows("scmoe_pos2", schedule="mlp 0", order="barriers", ablation=OverlapAblation("free"))
  forward = lambda found: [w for w in found if w.direction == "forward"]
  assert forward(mirrored) == forward(later) == forward(free)
  # The combine's exchange comes first: a later slot leaves it fewer dense operations, XLA all.
  assert count(later, "combine") < count(mirrored, "combine") < count(free, "combine")


def test_gradients_travel_beside_the_backward_pass_of_what_is_still_to_come():
  """In a model of one pair, the sums of the last block's gradients can run beside the first
  block's backward pass."""
  found = [w for w in windows("scmoe_pos2", reduced=True) if w.stage == "gradients"]
  assert all(w.direction == "backward" for w in found)
  some = [set(w.beside) for w in found]
  assert {"attention", "mlp", "experts"} <= set.union(*some)
  # Behind the embedding's gradient, the last of all, there is nothing; before it nearly all is.
  assert sum(bool(beside & {"attention", "mlp"}) for beside in some) > len(some) // 2
  assert not [w for w in windows("scmoe_pos2") if w.stage == "gradients"]


def forward_windows(wiring, batches=1, chunks=1, pairs=1, transport="capacity", **overlap):
  """Windows of a forward pass whose layers are one step of the scan, with `batches` side by side."""
  config = ModelConfig(
    wiring=wiring,
    num_layers=2 * pairs,
    width=8,
    num_heads=2,
    num_experts=4,
    vocab_size=16,
    context=4,
  ).resolve()
  dispatch = DispatchConfig(chunks=chunks, transport=transport)
  options = {"dispatch": dispatch, "overlap": OverlapConfig(**overlap)}
  make = lambda: GPT(config, **options, rngs=nnx.Rngs(params=0))
  graph, params = nnx.split(nnx.eval_shape(make))

  def local(params, tokens):
    models = [nnx.merge(graph, params)] * batches
    return [
      out.h_BSD for out in run_batches_in_turns(models, [tokens] * batches, [Pass()] * batches)
    ]

  mesh, specs = make_mesh(MeshConfig(expert=4), jax.devices()[:4]), parameter_specs(params)
  function = manual(local, mesh, (specs, P(BATCH_AXES)), P(BATCH_AXES))
  with jax.disable_jit(pairs > 1):  # writes the steps of a scan out, as XLA does with its `unroll`
    program = jax.make_jaxpr(function)(params, jnp.zeros((4, 4), jnp.int32))
  found = graph_windows(program)
  stages = {"attention", "mlp", "experts"}
  return [w.stage for w in found], [set(w.beside) & stages for w in found]


ORDER = ["dispatch", "dispatch", "combine", "combine"]


def test_chunks_have_each_others_experts_beside_them():
  stages, beside = forward_windows("topk", chunks=2, schedule="dispatch", order="barriers")
  assert stages == ORDER
  # The second's rows arrive beside the first's experts; the first's leave beside the second's.
  assert beside == [set(), {"experts"}, {"experts"}, set()]


def test_barriers_put_each_chunk_where_its_slot_is():
  """MLP | experts 1 | attention | experts 2 | shared expert."""
  slots = "mlp 0, attention 1"
  stages, beside = forward_windows("scmoe_pos2", chunks=2, schedule=slots, order="barriers")
  assert stages == ORDER
  # The MLP is only for the first dispatch: XLA would otherwise give it to the second, and leave the
  # first with nothing. So is the shared expert, whose products are also "mlp", for the last combine.
  both = {"experts", "attention"}
  assert beside == [{"mlp"}, both, both, {"mlp"}]


@pytest.mark.parametrize("transport", ["capacity", "packed", "dropless"])
def test_the_second_chunk_leaves_the_first_what_it_needs(transport):
  """Both chunks' experts stand behind the whole window, whose first half only the first can have."""
  both = {"schedule": "shared expert", "order": "barriers"}
  stages, beside = forward_windows("scmoe_pos2", chunks=2, transport=transport, **both)
  assert stages == ORDER
  assert beside[0] == {"mlp", "attention"}
  assert beside[1] == {"experts", "mlp", "attention"}
  split = forward_windows(
    "scmoe_pos2", chunks=2, transport=transport, schedule="mlp 0", order="barriers"
  )
  assert split[1][:2] == [{"mlp"}, {"experts"}]


def test_microbatches_in_turns_give_even_top_k_a_window():
  stages, beside = forward_windows("topk", batches=2, flight=2)
  assert stages == ORDER
  # Beside the first's dispatch the other's way to its own; then the experts of either.
  assert beside == [{"attention", "mlp"}, {"experts"}, {"experts"}, set()]


def test_the_last_of_a_turn_has_the_next_pair_beside_it():
  stages, beside = forward_windows("topk", batches=2, pairs=2, flight=2)
  assert stages == 2 * ORDER
  assert beside[3] == {"attention", "mlp"}, "of the first batch, which has all that it needs"
  assert beside[4:] == [{"attention", "mlp"}, {"experts"}, {"experts"}, set()]


def test_a_unit_of_one_block_has_the_preceding_block_beside_its_dispatch():
  """The tap of Pos-2 lies between the attention and the shared expert of the preceding block."""
  config = BlockConfig(wiring="scmoe_pos2", moe_every=1, width=8, num_heads=2, num_experts=4)
  make = lambda: [BlockPair(config, rngs=nnx.Rngs(params=n)) for n in range(2)]
  graph, params = nnx.split(nnx.List(nnx.eval_shape(make)))
  mesh = make_mesh(MeshConfig(expert=4), jax.devices()[:4])

  def local(params, h):
    first, second = nnx.merge(graph, params)
    out = first(h)
    return second(out.h_BSD, handed_BSD=out.handed_BSD).h_BSD

  specs = parameter_specs(params)
  function = manual(local, mesh, (specs, P(BATCH_AXES)), P(BATCH_AXES))
  found = graph_windows(jax.make_jaxpr(function)(params, jnp.zeros((4, 4, 8))))
  dispatched = [w for w in found if w.stage == "dispatch"]
  assert len(dispatched) == 2
  # Its own attention and shared expert, and the preceding block's shared expert.
  count = lambda window: {stage: window.beside.count(stage) for stage in ("attention", "mlp")}
  first, second = map(count, dispatched)
  assert second["attention"] >= first["attention"] > 0
  assert second["mlp"] == 2 * first["mlp"] > 0


PROGRAM = """
HloModule jit_run, is_scheduled=true
ENTRY %main {
  %p = bf16[4,8]{1,0} parameter(0)
  %all-to-all-start = (bf16[4,8], bf16[4,8]) all-to-all-start(%p), metadata={op_name="jit(f)/dispatch/all_to_all"}
  %gemm_fusion_dot.1 = bf16[8,8] fusion(%p), kind=kCustom, metadata={op_name="jit(f)/mlp/dot_general"}
  %bitcast.1 = bf16[8,8] bitcast(%gemm_fusion_dot.1)
  %loop_add_fusion = bf16[8,8] fusion(%bitcast.1), kind=kLoop, metadata={op_name="jit(f)/attention/add"}
  %cublas.1 = bf16[8,8] custom-call(%p), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/attention/dot_general"}
  %all-to-all-done = bf16[4,8] all-to-all-done(%all-to-all-start), metadata={op_name="jit(f)/dispatch/all_to_all"}
  %all-to-all-start.1 = (bf16[4,8], bf16[4,8]) all-to-all-start(%p), metadata={op_name="jit(f)/transpose(jvp())/combine/all_to_all"}
  %all-to-all-done.1 = bf16[4,8] all-to-all-done(%all-to-all-start.1), metadata={op_name="x"}
  ROOT %all-to-all.3 = bf16[4,8] all-to-all(%p), metadata={op_name="jit(f)/combine/all_to_all"}
}
"""


def test_windows_of_a_scheduled_program():
  found = program_windows(PROGRAM)
  assert found == [
    Window("dispatch", "forward", ("mlp", "attention"), 3),
    Window("combine", "backward", (), 0),
    Window("combine", "forward", (), 0),
  ]
  assert "dispatch beside: 1 mlp, 1 attention (3 operations)" in summary(found)


def test_products_that_a_fusion_ties_to_an_exchange_are_not_free():
  """A kernel with two results needs the operands of both, so what reads one waits for the other."""
  free = lambda program: [(w.stage, w.beside) for w in free_products(program)]
  assert free(PROGRAM) == [
    ("dispatch", ("mlp", "attention")),
    ("combine", ()),
    ("combine", ("mlp", "attention")),
  ]
  both = "  %both = (bf16[8,8], bf16[8,8]) fusion(%p, %all-to-all-done), kind=kLoop\n"
  both += "  %both.1 = bf16[8,8] get-tuple-element(%both), index=1"
  tied = PROGRAM.replace("custom-call(%p)", "custom-call(%both.1)")
  lines = tied.splitlines()
  done = next(i for i, line in enumerate(lines) if "%all-to-all-done =" in line)
  product = lines.pop(next(i for i, line in enumerate(lines) if "%cublas.1" in line))
  lines[done:done] = [*both.splitlines(), product]
  assert free("\n".join(lines))[0] == ("dispatch", ("mlp",))


PUTS = """
HloModule jit_run, is_scheduled=true
%compute_on (p: bf16[4,8]) -> bf16[4,8] {
  ROOT %k.1 = bf16[4,8] custom-call(%p.1), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/dispatch/jit(put_rows_kernel)/compute_on/put_rows"}
}
ENTRY %main {
  %p = bf16[4,8]{1,0} parameter(0)
  %other-start = (bf16[4,8], bf16[4,8]) call-start(%p), to_apply=%copies, metadata={op_name="jit(f)/fetch/compute_on"}
  %call-start = (bf16[4,8], bf16[4,8]) call-start(%p), to_apply=%compute_on, metadata={op_name="jit(f)/dispatch/jit(put_rows_kernel)/compute_on"}
  %gemm_fusion_dot.1 = bf16[8,8] fusion(%p), kind=kCustom, metadata={op_name="jit(f)/mlp/dot_general"}
  %other-done = bf16[4,8] call-done(%other-start), metadata={op_name="jit(f)/fetch/compute_on"}
  %call-done = bf16[4,8] call-done(%call-start), metadata={op_name="jit(f)/dispatch/jit(put_rows_kernel)/compute_on"}
  %gemm_fusion_dot.2 = bf16[8,8] fusion(%call-done), kind=kCustom, metadata={op_name="jit(f)/experts/dot_general"}
  ROOT %k.2 = bf16[4,8] custom-call(%gemm_fusion_dot.2), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/combine/jit(put_rows_kernel)/put_rows/mpmd_map"}
}
"""


def test_puts_are_exchanges_with_a_start_and_a_done_if_they_have_a_stream_of_their_own():
  """A call of another kind on a stream, such as a copy from the host, is none."""
  assert program_windows(PUTS) == [
    Window("dispatch", "forward", ("mlp",), 1),
    Window("combine", "forward", (), 0),
  ]
  assert [(w.stage, w.beside) for w in free_products(PUTS)] == [
    ("dispatch", ("mlp",)),
    ("combine", ("mlp",)),
  ]


def test_exchanges_that_are_alike_share_a_line():
  dispatch = Window("dispatch", "forward", ("mlp", "attention", "mlp"), 5)
  combine = Window("combine", "backward", (), 0)
  windows = [dispatch, combine, dataclasses.replace(dispatch, operations=7)] * 6
  assert summary(windows).splitlines() == [
    "12 x forward  dispatch beside: 2 mlp, 1 attention (5 to 7 operations)",
    "6 x backward combine  beside: nothing (0 operations)",
  ]


SUMS = """HloModule step, is_scheduled=true

%loop (p: f32[8]) -> f32[8] {
  %all-reduce.9 = f32[8]{0} all-reduce(%p), to_apply=%add
}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %gemm.1 = f32[8,4]{1,0} fusion(%x), kind=kCustom, calls=%gemm
  %all-reduce-start.1 = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-reduce-start(%gemm.1), to_apply=%add
  %gemm.2 = f32[8,4]{1,0} fusion(%x), kind=kCustom, calls=%gemm
  %all-reduce-done.1 = f32[8,4]{1,0} all-reduce-done(%all-reduce-start.1)
  %a2a = f32[8,4]{1,0} all-to-all(%gemm.2)
  ROOT %all-gather.1 = bf16[16,4]{1,0} all-gather(%gemm.2), dimensions={0}
}
"""


def test_where_sums_stand():
  """Those of the entry, with the products before start and end; exchanges are no sums."""
  found, products = program_sums(SUMS)
  assert products == 2
  assert found == [
    Sum("all-reduce", "f32[8,4]", 8 * 4 * 4, 1, 2), Sum("all-gather", "bf16[16,4]", 16 * 4 * 2, 2, 2)
  ]  # fmt: skip
