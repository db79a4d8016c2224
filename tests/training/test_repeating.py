"""A step without overflow rounds is the step with them, run again where rows were left over."""

import dataclasses
import functools
import json
import re
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from covering import night

from scmoe.parallel.mesh import batch_sharding
from scmoe.run.adapters import build_training
from scmoe.run.build import build
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.train import train
from scmoe.training.fastest import Steps
from scmoe.training.guided import GuidedStep
from scmoe.training.metrics import read_metrics
from scmoe.training.repeating import CALM, MOST, Pace, RepeatingStep
from scmoe.training.search import AGAIN, Search
from scmoe.training.step import init_state
from scmoe.training.variants import StepVariants, Variant

# Without slack a router that is not even leaves rows over. But whatever it chooses, the rows fit if
# only one token of RANKS is no padding: then even all of them to one rank are a balanced share.
RANKS, TIGHT = 4, "1"


def smoke(**fields):
  run = load_config(find_config("quickstart"), "smoke")
  given = {"mesh.data": "2", "mesh.expert": str(RANKS), "dispatch.transport": "dropless"}
  given |= {"model.num_layers": "2", "model.width": "16", "model.vocab_size": "0"}
  given |= {"train.batch_size": "8", "train.steps": "3", "train.log_every": "1"}
  given |= {"train.sample_tokens": "0", "train.tensorboard": "false"}
  given |= {"data.validation_fraction": "0", "data.seq_len": "16"}
  for path, text in (given | fields).items():
    run = with_field(run, path.replace("__", "."), text)
  return run


@functools.cache
def made(overflow, slack, **fields):
  """(built, step): the program of each is compiled once for all tests."""
  run = smoke(dispatch__overflow=overflow, dispatch__slack=slack, **fields)
  built = build(run.resolve(num_devices=8, vocab_size=257))
  return built, Steps(built, built.abstract_state(), Path("unused"), say=lambda line: None)(
    Variant()
  )


def start(built, padded=False):
  """(state, batch); padded: only the first token of each RANKS is no padding."""
  state = init_state(built.init, built.optimizer, 0, built.abstract_state())
  batch = built.random_batch()
  if padded:
    real = np.arange(batch.weights.shape[-1]) % RANKS == 0
    given = {name: getattr(batch, name) * real for name in ("weights", "segment_ids")}
    batch = dataclasses.replace(batch, **given)
  sharding = batch_sharding(built.mesh, leading=1)
  put = lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x))
  return state, jax.tree.map(put, batch)


def same_bits(got, want):
  got, want = jax.device_get((got, want))
  jax.tree.map(np.testing.assert_array_equal, got, want)


def stepped(overflow, slack, steps=2, padded=False, **fields):
  """(state, scalars, arrays) after some steps on one batch."""
  built, step = made(overflow, slack, **fields)
  if overflow == "repeat":
    assert isinstance(step, RepeatingStep)
    step.repeated, step.pace = 0, Pace()
  else:
    assert type(step) is GuidedStep
  state, batch = start(built, padded)
  for _ in range(steps):
    state, scalars, arrays = step(state, batch)
  return jax.device_get((state, scalars, arrays))


def gradients(state):
  """Adam's first moments: after one step they are the clipped gradients, times a constant."""
  return optax.tree_utils.tree_get(state.opt_state, "mu")


def test_with_room_for_all_rows_nothing_is_repeated():
  """Both programs add up the same numbers; XLA fuses them otherwise, and may round the last bit."""
  state, scalars, arrays = stepped("repeat", TIGHT, steps=1, padded=True)
  want, wanted, _ = stepped("loop", TIGHT, steps=1, padded=True)
  assert scalars.pop("repeated") == 0
  np.testing.assert_array_equal(arrays["rounds"], 1)
  for name in wanted:
    np.testing.assert_allclose(scalars[name], wanted[name], rtol=1e-6, err_msg=name)

  def close(path, got, want):
    limit = 1e-6 * np.abs(want).max()
    assert np.abs(got - want).max() <= limit, jax.tree_util.keystr(path)

  jax.tree_util.tree_map_with_path(close, gradients(state), gradients(want))
  assert any(leaf.any() for leaf in jax.tree.leaves(gradients(want)))


def repeats_with_the_loops_bits(**fields):
  (state, scalars, arrays), want = (stepped(kind, TIGHT, **fields) for kind in ("repeat", "loop"))
  assert scalars.pop("repeated") == 2
  assert np.max(arrays["rounds"]) > 1
  same_bits((state, scalars, arrays), want)


def test_a_step_that_leaves_rows_over_is_run_again_with_the_loops_bits():
  repeats_with_the_loops_bits()
  _, step = made("repeat", TIGHT)
  assert step.pace.looped, "after two of two steps"
  assert step.settled, "by its program with loops: warming up ends"
  assert loops(step.named_program())


def test_a_step_that_leaves_rows_over_changes_no_bit_of_the_state():
  built, step = made("repeat", TIGHT)
  step.pace = Pace()
  state, batch = start(built)
  before = jax.device_get(state)
  state, scalars, arrays = step.begin(state, batch)
  same_bits(state, before)
  assert step.left_over(arrays)
  # The discarded attempt had lost rows: its loss is another one.
  again, final, _ = step.again(state, batch)
  assert float(final["loss"]) != float(scalars["loss"])
  assert int(again.step) == 1


def loops(program):
  """Loops of a compiled program whose number of rounds XLA does not know."""
  found = [line for line in program.text.splitlines() if re.search(r" while\(", line)]
  return [line for line in found if "known_trip_count" not in line]


def test_the_program_has_no_loop_of_unknown_length():
  """Before such a loop a GPU waits for the host; a scan over layers is none."""
  for overflow, fewest in (("repeat", 0), ("loop", 2)):  # forward and backward, in one layer
    built, step = made(overflow, TIGHT)
    if step.program is None:
      step.compile(*start(built))
    found = loops(step.program)
    assert bool(found) == bool(fewest)
    assert len(found) >= fewest


@pytest.mark.parametrize("compared", [False, night(True)], ids=["alone", "with the loop"])
def test_training_repeats_steps_and_says_how_many(compared, tmp_path):
  """The host reads a step's rounds before it dispatches the next; the losses are the loop's.

  By day the steps' bits are compared above, without the command's own loop around them.
  """
  found = {}
  for overflow in ("repeat", "loop")[: 1 + compared]:
    train(smoke(dispatch__overflow=overflow, dispatch__slack=TIGHT), tmp_path / overflow)
    found[overflow] = read_metrics(tmp_path / overflow)
  values = lambda name, which: [line[name] for line in found[which]]
  # Two of the first steps are repeated; then the program with loops runs at once.
  assert values("repeated", "repeat") == [1, 2, 2]
  if compared:
    for name in ("loss", "grad_norm", "skipped"):
      assert values(name, "repeat") == values(name, "loop")
    assert "repeated" not in found["loop"][0]
  # And so it does in a run that goes on from there.
  train(
    smoke(dispatch__overflow="repeat", dispatch__slack=TIGHT, train__steps="4"), tmp_path / "repeat"
  )
  assert read_metrics(tmp_path / "repeat")[-1]["repeated"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
  "fields",
  [
    {"dispatch__transport": "packed", "dispatch__capacity_factor": "4"},
    {"dispatch__transport": "put"},
    {"dispatch__transport": "per_rank", "model__wiring": "topk", "model__top_k": "2"},
    {"dispatch__chunks": "2"},
    {"train__tokens_per_step": "256", "overlap__flight": "2"},
    {"mesh__shard_state": "parameters"},
    {"model__moe_every": "1", "model__wiring": "scmoe_pos3"},
    {"router__bias": "sign"},
    {"model__dtype": "float16"},
  ],
  ids=lambda fields: " ".join(fields),
)
def test_each_kind_of_step_keeps_its_bits(fields):
  repeats_with_the_loops_bits(**fields)


# -- which steps are repeated ----------------------------------------------------------------------


@pytest.mark.parametrize(
  "fields",
  [
    {"mesh.expert": "1"},
    {"dispatch.transport": "capacity"},
    {"dispatch.adaptive_r": "0"},
    {"dispatch.ablation.first_round": "true"},
    {"dispatch.overflow": "loop"},
    {"model.wiring": "dense"},
  ],
  ids=lambda fields: " ".join(fields),
)
def test_a_run_without_overflow_rounds_repeats_nothing(fields):
  run = smoke(**({"dispatch.overflow": "repeat"} | fields))
  assert build(run.resolve(num_devices=8, vocab_size=257)).without_loops(Variant()) is None


@pytest.mark.parametrize(("slack", "rounds"), [("1.25", True), ("2.5", False)])
def test_a_row_for_each_rank_repeats_where_a_queue_may_be_too_short(slack, rounds):
  """A token with two of eight experts on four ranks reaches a rank with the probability 13 / 28.

  With room for 2.5 times that share, a queue has room for all tokens: the program has no loops in
  any case, and the step is not asked whether it has to be run again.
  """
  fields = {"dispatch__overflow": "repeat", "dispatch__transport": "per_rank"}
  fields |= {"model__wiring": "topk", "model__num_experts": "8", "model__top_k": "2"}
  built = build(smoke(dispatch__slack=slack, **fields).resolve(num_devices=8, vocab_size=257))
  step = Steps(built, built.abstract_state(), Path("unused"))(Variant())
  assert (type(step), step.repeats) == ((RepeatingStep, True) if rounds else (GuidedStep, False))
  traced = (step.looped if rounds else step).step.trace(
    built.abstract_state(), jax.eval_shape(built.random_batch)
  )
  assert ("while[" in str(traced.jaxpr)) == rounds
  assert built.without_loops(Variant(transport="dropless")) is not None


def test_a_capacity_that_drops_nothing_repeats():
  fields = {"dispatch.transport": "capacity", "dispatch.capacity_factor": "0"}
  run = smoke(**({"dispatch.overflow": "repeat"} | fields))
  assert build(run.resolve(num_devices=8, vocab_size=257)).without_loops(Variant()) is not None


@pytest.mark.parametrize("free", ["false", "true"])
def test_a_base_as_reference_keeps_its_overflow_rounds(free):
  """Only the trained model's rows are counted, so what the reference left over would be lost."""
  fields = {"lora.rank": "2", "train.init_from": "any", "dispatch.overflow": "repeat"}
  fields |= {"data.source": "preference", "data.packing": "pad", "train.reference_free": free}
  fields |= {"data.document_mask": "true", "model.document_mask": "true"}
  built = build_training(smoke(**fields).resolve(num_devices=8, vocab_size=257))
  abstract = built.abstract_state()
  step = Steps(built, abstract, Path("unused"))(Variant())
  traced = step.step.trace(abstract, jax.eval_shape(built.random_batch))
  assert ("while[" in str(traced.jaxpr)) == (free == "false")


def test_a_measured_step_of_a_search_has_time_to_compile_the_loops():
  """Rows may be left over for the first time in a step that the search times."""
  built = build(smoke(dispatch__overflow="repeat").resolve(num_devices=8, vocab_size=257))
  make = Steps(built, built.abstract_state(), Path("unused"), say=lambda line: None)
  search = Search(StepVariants(make), (Variant(), Variant(chunks=2)))
  for variant in search.candidates:
    search.steps.step(variant).program = "compiled"
  search._visit = Variant(), True
  assert search.compiles_next


class Counted:
  """Stands for a `RepeatingStep` whose steps all leave rows over."""

  compiles_next, settled, repeats, repeated = False, True, True, 0
  compile = forget = give_up_trace = lambda self, *args, **options: None

  def __call__(self, state, batch):
    self.repeated += 1
    return state, {"loss": 0.0, "repeated": self.repeated}, {}

  begin = again = __call__


def test_a_search_counts_the_repeated_steps_of_all_variants():
  """And times none of them, unless one step after the other leaves rows over."""
  steps = StepVariants(lambda variant: Counted())
  search = Search(steps, (Variant(), Variant(chunks=2)), rounds=2, say=lambda line: None)
  count = lambda step: step(None, None)[1]["repeated"]
  calls = 0
  while search.chosen is None:
    calls += 1
    assert count(search) == calls
    assert sum(map(len, search.measured.values())) == calls // (AGAIN + 1)
  assert calls == 4 * (AGAIN + 1)
  assert [count(search.begin), count(search.again), count(search)] == [calls + i for i in (1, 2, 3)]


# -- which program runs the next step --------------------------------------------------------------


def paced(pace, over):
  """For each step, whether it ran with loops."""
  ran = []
  for each in over:
    ran.append(pace.looped)
    pace.note(bool(each))
  return ran


def test_single_steps_are_repeated_and_bursts_run_with_loops():
  assert not any(paced(Pace(), [1, 0, 0, 0, 0, 0, 0, 0] * 4)), "one in eight"
  pace = Pace()
  assert paced(pace, [0, 1, 1, 1, 0, 1]) == [False, False, False, True, True, True]
  assert paced(pace, [0] * (CALM + 1)) == [True] * CALM + [False]


def test_a_resumed_run_goes_on_with_the_program_that_was_at_work():
  """At whatever step it was stopped; the state has passed through a checkpoint's JSON."""
  over = [1, 1, *[0] * CALM, 1, 1, *[0] * (2 * CALM), 0, 1]
  want = paced(Pace(), over)
  for stop in range(len(over)):
    pace, resumed = Pace(), Pace()
    ran = paced(pace, over[:stop])
    resumed.restore(json.loads(json.dumps(pace.state())))
    assert ran + paced(resumed, over[stop:]) == want


def test_steps_that_measured_a_variant_are_forgotten():
  _, step = made("repeat", TIGHT)
  step.repeated = 3
  paced(step.pace, [1, 1])
  step.forget()
  assert (step.repeated, step.pace.state()) == (0, Pace().state())


def test_steps_with_loops_run_without_the_trace_of_the_others(monkeypatch):
  """The trace would hold two programs' steps, and in a burst nothing would end it."""
  _, step = made("repeat", TIGHT)
  step.forget()
  log = []
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: log.append("stop"))
  for rounds, stops in ((1, 0), (2, 1)):
    step.trace = tempfile.TemporaryDirectory()
    step.left_over({"rounds": np.array([1, rounds])})
    assert len(log) == stops
  assert step.trace is None
  assert step.calls_to_profile == step.overlap.ablation.profile_runs
  step.calls_to_profile = 0
  step.forget()


def test_a_burst_that_comes_back_soon_has_to_calm_down_for_longer():
  pace, calm = Pace(), []
  for _ in range(10):
    paced(pace, [1, 1])
    calm.append(pace.calm)
    paced(pace, [0] * pace.calm)
    assert not pace.looped
  assert calm == [min(CALM * 2**i, MOST) for i in range(10)]
  paced(pace, [0] * (MOST + 1))
  paced(pace, [1, 1])
  assert pace.calm == CALM, "a long stretch without a burst forgets the ones before"
