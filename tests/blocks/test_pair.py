"""A block pair alone: what it computes, in which order, and what it hands over."""

import dataclasses
import graphlib
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from drawn import drawn_model
from flax import nnx

import scmoe
from scmoe.base.errors import ConfigError
from scmoe.blocks.block import BlockConfig
from scmoe.blocks.options import OverlapConfig
from scmoe.blocks.pair import BlockPair
from scmoe.blocks.schedule import slot_names
from scmoe.blocks.walk import SCOPES, Context
from scmoe.blocks.wiring import Tap
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.layer import MoECall

ROOM = DispatchConfig(capacity_factor=0.0)  # for every token
WIRINGS = ("dense", "top2", "shared_expert", "scmoe_pos1", "scmoe_pos2", "scmoe_pos3", "dgmoe",
           "farskip", "farskip_routed")  # fmt: skip


def make_pair(wiring, overlap=OverlapConfig(), **fields):
  """A float32 pair of width 16 in which no norm is the identity."""
  config = BlockConfig(wiring=wiring, width=16, num_heads=2, num_experts=4, dtype="float32")
  config = dataclasses.replace(config, **fields)
  make = lambda: BlockPair(config, dispatch=ROOM, overlap=overlap, rngs=nnx.Rngs(params=0))
  return drawn_model(make, 0.2)


def inputs(batch=2, length=5, width=16):
  return jax.random.normal(jax.random.key(2), (batch, length, width))


def output(pair):
  """The output of a pair for `inputs`, by one program."""
  return jax.jit(lambda h: pair(h).h_BSD)(inputs())


def attention(block, h_BSD):
  positions_BS = jnp.broadcast_to(jnp.arange(h_BSD.shape[1]), h_BSD.shape[:2])
  projected = block.attention.project(block.norm_attention(h_BSD), positions_BS)
  return block.attention.mix(projected, positions_BS, None, None)[0]


# --- what it computes -----------------------------------------------------------------------------


@pytest.mark.parametrize("shortcut_norm", ["shared", "own", "megatron"])
def test_pos2_is_the_papers_equation(shortcut_norm):
  """The experts read between attention and MLP of the first block (paper Eq. 7-9)."""
  pair = make_pair("scmoe_pos2", shortcut_norm=shortcut_norm, mix="direct")
  (unit,) = pair.units
  first, second = unit.blocks

  @jax.jit
  def equation(h):
    h = h + attention(first, h)
    read = (first.norm_mlp if shortcut_norm == "shared" else unit.own_norm)(h)
    h = h + first.mlp(first.norm_mlp(h))
    h = h + attention(second, h)
    shared = second.mlp(second.norm_mlp(h))
    routed, _ = pair.moe(read, MoECall(mask=jnp.ones(h.shape[:2], bool)))
    added = shared + routed
    return h + (unit.post_norm(added) if shortcut_norm == "megatron" else added)

  want = equation(inputs())
  np.testing.assert_allclose(output(pair), want, rtol=1e-5, atol=1e-5)


def test_top2_reads_where_it_adds():
  pair = make_pair("top2", top_k=2)
  (unit,) = pair.units
  first, second = unit.blocks

  @jax.jit
  def equation(h):
    h = h + attention(first, h)
    h = h + first.mlp(first.norm_mlp(h))
    h = h + attention(second, h)
    return h + pair.moe(second.norm_mlp(h))[0]

  np.testing.assert_allclose(output(pair), equation(inputs()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  "wiring", [night("scmoe_pos1"), "scmoe_pos2", night("scmoe_pos3"), "dgmoe"]
)
def test_no_schedule_changes_a_value(wiring):
  slots = slot_names([step.name for step in make_pair(wiring).schedule.steps])
  plain = make_pair(wiring, OverlapConfig(schedule="off"))(inputs()).h_BSD
  ran = 0
  for slot, order in itertools.product(slots, ("xla", "barriers")):
    try:
      pair = make_pair(wiring, OverlapConfig(schedule=slot, order=order))
    except ConfigError:  # a step before the shortcut begins
      continue
    ran += 1
    np.testing.assert_array_equal(pair(inputs()).h_BSD, plain)
  assert ran >= 4


def test_padding_visits_no_expert():
  pair, h = make_pair("scmoe_pos2"), inputs()
  mask = jnp.ones(h.shape[:2], bool).at[0, 3:].set(False)
  whole, padded = pair(h), pair(h, Context(mask_BS=mask))
  assert float(whole.sums.choices.sum()) == h.shape[0] * h.shape[1]
  assert float(padded.sums.choices.sum()) == float(mask.sum())
  # Real tokens keep their values; a causal attention never looks at what follows.
  np.testing.assert_allclose(padded.h_BSD[mask], whole.h_BSD[mask], rtol=1e-5, atol=1e-5)
  assert not np.allclose(padded.h_BSD[~mask], whole.h_BSD[~mask])


# --- in which order -------------------------------------------------------------------------------


@pytest.mark.parametrize("wiring", WIRINGS)
def test_the_traced_order_is_the_schedule(wiring):
  """The program's operations stand in the order of the list that `describe` prints."""
  pair = make_pair(wiring)
  graph, state = nnx.split(pair)
  run = lambda state, h: nnx.merge(graph, state)(h).h_BSD
  jaxpr = jax.make_jaxpr(run)(state, inputs()).jaxpr
  scopes = [str(equation.source_info.name_stack).split("/")[0] for equation in jaxpr.eqns]
  found = [scope for scope, _ in itertools.groupby(filter(None, scopes))]
  words = [SCOPES.get(step.operation, step.operation) for step in pair.schedule.steps]
  words = words[:-1] if wiring == "dense" else words  # which has nothing to add
  assert found == [word for word, _ in itertools.groupby(words)]


def test_a_token_walks_through_the_files_one_way():
  """No chain of calls comes back to a file that it has left, in the forward or the backward pass.

  The plain pair enters no file of `offload`, `inference` or the kernels of one row.
  """
  pair, edges = make_pair("scmoe_pos2"), set()
  root = str(Path(scmoe.__file__).parent)

  def note(frame, event, _):
    path, back = frame.f_code.co_filename, frame.f_back
    while back is not None and not back.f_code.co_filename.startswith(root):
      back = back.f_back
    if event == "call" and path.startswith(root) and back is not None:
      edges.add((back.f_code.co_filename[len(root) + 1 :], path[len(root) + 1 :]))

  before = sys.getprofile()
  sys.setprofile(note)
  try:
    jax.make_jaxpr(jax.grad(lambda h: pair(h).h_BSD.sum()))(inputs())
  finally:
    sys.setprofile(before)
  entered = {callee for _, callee in edges}
  assert {"moe/layer.py", "moe/experts.py", "layers/attention.py", "blocks/unit.py"} <= entered
  callers = {file: {a for a, b in edges if b == file != a} for file in entered}
  graphlib.TopologicalSorter(callers).prepare()  # CycleError: files that call each other in a ring
  elsewhere = ("offload/", "inference/", "kernels/one_row/norm", "kernels/one_row/linear")
  assert not [path for path in entered if path.startswith(elsewhere)]


# --- what it hands over ---------------------------------------------------------------------------


@pytest.mark.parametrize("wiring", ["scmoe_pos2", "scmoe_pos3"])
def test_units_of_one_block_read_the_preceding_one(wiring):
  pair, h = make_pair(wiring, moe_every=1), inputs()
  first = pair(h)
  # Nothing precedes the first pair: its experts read its own normalised input.
  (block,) = pair.units[0].blocks
  start = pair(h, handed_BSD=block.norm_attention(h))
  np.testing.assert_array_equal(start.h_BSD, first.h_BSD)
  # What is handed over is the tap, and the next pair's experts read it, they alone.
  tap = block.norm_attention(h)
  if wiring == "scmoe_pos2":
    tap = block.norm_mlp(h + attention(block, h))
  np.testing.assert_allclose(first.handed_BSD, tap, rtol=1e-5, atol=1e-5)
  other = pair(h, handed_BSD=pair(-h).handed_BSD)
  assert not np.array_equal(other.h_BSD, first.h_BSD)
  np.testing.assert_array_equal(other.sums.main_square, first.sums.main_square)


def test_farskip_reads_two_streams():
  """Attention reads the value handed over, everything else the pair's input."""
  pair, f, n = make_pair("farskip", moe_every=1, mix="direct"), inputs(), -inputs()
  (block,) = pair.units[0].blocks
  out = pair(f, handed_BSD=n)
  unrouted = f + attention(block, n) + block.mlp(block.norm_mlp(f))
  routed, _ = pair.moe(block.norm_mlp(f), MoECall(mask=jnp.ones(f.shape[:2], bool)))
  np.testing.assert_allclose(out.handed_BSD, unrouted, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(out.h_BSD, unrouted + routed, rtol=1e-5, atol=1e-5)
  assert not np.allclose(routed, 0, atol=1e-3)
  np.testing.assert_array_equal(pair(f).h_BSD, pair(f, handed_BSD=f).h_BSD)


def test_farskip_without_a_shared_expert_reads_two_streams():
  pair, f, n = make_pair("farskip_routed", moe_every=1), inputs(), -inputs()
  (block,) = pair.units[0].blocks
  assert block.mlp is None
  out = pair(f, handed_BSD=n)
  unrouted = f + attention(block, n)
  routed, _ = pair.moe(block.norm_mlp(f), MoECall(mask=jnp.ones(f.shape[:2], bool)))
  np.testing.assert_allclose(out.handed_BSD, unrouted, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(out.h_BSD, unrouted + routed, rtol=1e-5, atol=1e-5)
  assert not np.allclose(routed, 0, atol=1e-3)


def test_a_layer_without_experts_in_a_model_that_skips():
  """The same two streams, which are one behind it."""
  config = BlockConfig(wiring="dense", moe_every=1, width=16, num_heads=2, dtype="float32")
  pair, f, n = BlockPair(config, hands_over=Tap.UNROUTED, rngs=nnx.Rngs(0)), inputs(), -inputs()
  (block,) = pair.units[0].blocks
  want = f + attention(block, n) + block.mlp(block.norm_mlp(f))
  out = pair(f, handed_BSD=n)
  np.testing.assert_allclose(out.h_BSD, want, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(out.handed_BSD, out.h_BSD)


def test_a_pair_of_two_blocks_hands_nothing_over():
  assert make_pair("scmoe_pos2")(inputs()).handed_BSD is None


@pytest.mark.parametrize("wiring", ["topk", "scmoe_pos2", "dgmoe"])
def test_the_main_path_is_handed_out_behind_every_block(wiring):
  pair, h = make_pair(wiring, moe_every=3), inputs()
  out = pair(h, Context(hidden=True))
  assert pair(h).hidden is None
  for block, after in zip(pair.units[0].blocks[:2], out.hidden):
    h = h + attention(block, h)
    h = h + block.mlp(block.norm_mlp(h))
    np.testing.assert_allclose(after, h, atol=1e-5)
  assert len(out.hidden) == 3
  np.testing.assert_array_equal(out.hidden[2], out.h_BSD)


@pytest.mark.parametrize("shape", [(2, 5, 15), (5, 16), (16,)])
def test_a_wrong_shape_names_what_would_do(shape):
  with pytest.raises(ConfigError, match=r"reads \[batch, sequence, width 16\], got \["):
    make_pair("dense")(jnp.zeros(shape))
