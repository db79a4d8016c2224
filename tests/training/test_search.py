"""The search trains, keeps to its bounds, takes the fastest, and is not repeated."""

import dataclasses
import functools
import json
import threading

import jax
import numpy as np
import pytest
from training_fakes import trainer

from scmoe.base.errors import ConfigError
from scmoe.blocks.options import OverlapConfig
from scmoe.profiling.timer import Timing
from scmoe.training import fastest
from scmoe.training import search as searching
from scmoe.training.decisions import Decisions
from scmoe.training.fastest import fastest_step
from scmoe.training.metrics import read_metrics
from scmoe.training.search import Search, against
from scmoe.training.variants import StepVariants, Variant, parse_candidates


class Clock:
  """Seconds that pass as the fake steps say."""

  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


class FakeStep:
  """Stands for a `GuidedStep`: compiles at once, then calls of given durations."""

  def __init__(self, variant, clock, costs, profiled=0, compiling=0.0, fails=False):
    self.variant, self.clock, self.costs = variant, clock, list(costs)
    self.left, self.compiling, self.fails = profiled + 1, compiling, fails
    self.calls, self.threads = 0, set()
    self.waiting, self.refuses = None, lambda: None

  compiles_next = repeats = False
  repeated = 0
  forget = give_up_trace = lambda self: None

  @property
  def settled(self):
    return self.left == 0

  def compile(self, *args, later=False):
    self.refuses()
    if later:
      self.waiting = self.compile
      return
    if self.fails:
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
    self.clock.now += self.compiling

  def finish(self):
    if self.waiting is not None:
      self.threads.add(threading.get_ident())
      self.waiting()
      self.waiting = None

  def __call__(self, state, batch):
    self.finish()
    self.calls += 1
    self.waiting = (lambda: None) if self.left == 2 else None  # with the profile
    self.left = max(0, self.left - 1)
    self.clock.now += self.costs.pop(0) if self.costs else 0
    return state + 1, {}, {}


def search(costs, clock=None, **options):
  """A search over the candidates chunks=1, 2, 4, ..., and its fakes; `costs` are their seconds."""
  clock = clock or Clock()
  own = {name: options.pop(name) for name in ("profiled", "compiling") if name in options}
  fails, refused = options.pop("fails", ()), options.pop("refused", ())
  traced = options.pop("traced", False)  # the model refuses a step as jax traces it
  fakes = {
    n: FakeStep(Variant(chunks=n), clock, c, fails=n in fails, **own) for n, c in costs.items()
  }
  candidates = parse_candidates("chunks=" + ",".join(map(str, costs)))
  lines = []

  def refuse(variant):
    if variant.chunks in refused:
      raise ConfigError(f"dispatch.chunks={variant.chunks} does not fit")

  def make(variant):
    fake, check = fakes[variant.chunks], lambda: refuse(variant)
    if traced:
      fake.refuses = check
    else:
      check()
    return fake

  steps = StepVariants(make)
  return Search(steps, candidates, say=lines.append, clock=clock, **options), fakes, lines


def train(found, most=100):
  """Steps until it has chosen, and two more."""
  state = 0
  for _ in range(most):
    state, _, _ = found(state, {})
    if found.chosen is not None:
      break
  before = state
  for _ in range(2):
    state, _, _ = found(state, {})
  return before


def test_it_takes_the_fastest_and_stays_with_it():
  costs = {1: [9.0, 3.0, 3.1, 2.9], 2: [1.0, 2.0, 5.0, 2.1], 4: [2.0, 4.0, 4.0, 4.0]}
  found, fakes, lines = search(costs, rounds=3)
  assert train(found) == 12, "every step trains"
  assert [f.calls for f in fakes.values()] == [4, 6, 4]
  times = found.timings()
  assert times[Variant(chunks=2)].median == pytest.approx(2.1), "the first call does not count"
  assert lines[-1] == (
    "schedule: chunks=2 is chosen. chunks=1: 3000.0 ± 50.0 ms, the first; chunks=2: 2100.0 ± "
    "750.0 ms, 30.0 % faster than chunks=1; chunks=4: 4000.0 ± 0.0 ms, 90.5 % slower than chunks=2 "
    "(on this run's steps, in 42 s)"
  )


def test_another_way_has_to_be_worth_it():
  costs = {1: [9.0] + [1.0] * 3, 2: [9.0] + [0.995] * 3}
  found, _, _ = search(costs, margin=0.01)
  train(found)
  assert found.chosen == Variant(chunks=1)
  found, _, _ = search({**costs, 2: [9.0] + [0.95] * 3}, margin=0.01)
  train(found)
  assert found.chosen == Variant(chunks=2)


def test_what_replaces_what_was_kept():
  """The two pairs of medians that a search on cuts gave for one program."""
  of = lambda middle, width: Timing((middle - 2 * width, middle, middle + 2 * width), 1)
  assert of(57.3, 4.0).spread * 57.3 == pytest.approx(4.0)
  assert against(of(50.8, 0.5), of(57.3, 0.4), 0.01) == (True, "11.3 % faster")
  assert against(of(50.8, 3.0), of(57.3, 4.0), 0.01) == (False, "within the spread, 11.3 % faster")
  assert against(of(52.4, 0.9), of(50.5, 1.2), 0.01) == (False, "3.8 % slower")
  assert against(of(50.5, 0.1), of(50.5, 0.1), 0.01) == (False, "0.0 % slower")
  small = against(of(50.2, 0.01), of(50.5, 0.01), 0.01)
  assert small == (False, "only 0.6 % faster")


def test_a_difference_within_the_spread_is_no_change():
  """The second is 11 % faster by its median, but both vary by more; the third is beyond that."""
  noisy = [[9.0, 57.3, 47.0, 64.0, 52.0, 61.0], [9.0, 50.8, 61.0, 44.0, 50.0, 58.0]]
  found, _, lines = search({1: noisy[0], 2: noisy[1]}, rounds=5, margin=0.01)
  train(found)
  assert found.chosen == Variant(chunks=1)
  words = "chunks=2: 50800.0 ± 4000.0 ms, within the spread, 11.3 % faster than chunks=1"
  assert words in lines[-1]
  tried = found.decision()["tried"]
  assert [t["spread_ms"] for t in tried] == [4500, 4000]
  found, _, _ = search({1: noisy[0], 2: noisy[1], 4: [9.0] + [40.0] * 5}, rounds=5, margin=0.01)
  train(found)
  assert found.chosen == Variant(chunks=4)


def test_a_change_is_made_to_the_configured_one_unless_another_is_faster_beyond_the_spread():
  """Three glances at packed rows, faster by chance, do not make them the base of the slots."""
  clock, tried = Clock(), []
  glances = {None: [9.0, 5.0, 3.0, 4.0], "packed": [9.0, 3.5, 5.5, 2.9]}

  def make(variant):
    tried.append(variant)
    return FakeStep(variant, clock, glances[variant.transport] + [4.0] * 30)

  changes = [Variant(), Variant(transport="packed"), Variant(order="barriers")]
  options = {"on_best": True, "rounds": 5, "say": lambda line: None, "clock": clock}
  found = Search(StepVariants(make), changes, **options)
  train(found)
  assert tried == changes, "the base and the change have the same transport"
  assert found.chosen == Variant()


def test_changes_are_made_to_the_fastest_so_far():
  clock, tried = Clock(), []
  seconds = {None: 4.0, "packed": 3.0}

  def make(variant):
    tried.append(variant)
    cost = seconds[variant.transport] - (variant.order == "barriers") + (variant.chunks or 0)
    return FakeStep(variant, clock, [9.0] + [cost] * 30)

  changes = [Variant(), Variant(transport="packed"), Variant(chunks=2), Variant(order="barriers")]
  found = Search(
    StepVariants(make), changes, on_best=True, rounds=5, say=lambda line: None, clock=clock
  )
  assert train(found) == 4 * (1 + 3) + 4 * 5
  both = Variant(transport="packed", order="barriers")
  assert tried == [*changes[:2], Variant(transport="packed", chunks=2), both]
  assert found.chosen == both
  medians = {variant: timing.median for variant, timing in found.timings().items()}
  assert medians == {tried[0]: 4, tried[1]: 3, tried[2]: 5, both: 2}


def test_the_last_glance_at_a_candidate_may_compile_the_next_one():
  found, _, _ = search({n: [1.0] * 20 for n in (1, 2)}, on_best=True, rounds=2, compiling=5.0)
  found.compile(0, {})
  took, said = [], []
  while found.chosen is None:
    said.append(found.compiles_next)
    before = found._clock()
    found(0, {})
    took.append(found._clock() - before)
  # A warm-up, three glances, of the second candidate too, then two rounds of both.
  assert took == [1, 1, 1, 6] + [1] * 8
  assert said == [True, False, False, True] * 2 + [False] * 4


def test_candidates_compile_side_by_side():
  """In threads, each twice, before the first is measured; what does not compile is left out."""
  costs = {1: [0, 0, 0] + [5] * 20, 2: [0, 0, 0] + [4] * 20, 4: []}
  found, fakes, lines = search(costs, profiled=2, on_best=True, together=3, fails=(4,))
  train(found)
  assert found.chosen == Variant(chunks=2)
  assert lines[0].startswith("schedule: trying chunks=1; chunks=2; chunks=4")
  assert list(found.prepared) == [Variant(chunks=1), Variant(chunks=2)]
  assert "no memory" in found.untried[Variant(chunks=4)]
  assert threading.get_ident() not in fakes[1].threads | fakes[2].threads
  with pytest.raises(jax.errors.JaxRuntimeError, match="no memory"):
    train(search({1: [], 2: []}, on_best=True, together=2, fails=(1,))[0])


def test_what_compiles_side_by_side_for_too_long_is_not_gone_on_with():
  costs = {1: [0, 0, 0] + [5] * 20, 2: [0, 0, 0] + [4] * 20}
  options = {"profiled": 2, "on_best": True, "together": 2, "compiling": 20}
  found, fakes, _ = search(costs, seconds=30, **options)
  train(found)
  assert (found.chosen, fakes[2].calls) == (Variant(chunks=1), 0)
  assert found.untried == {Variant(chunks=2): "no time left"}
  found, _, _ = search(costs, seconds=50, **options)
  train(found)
  assert found.chosen == Variant(chunks=2)


def test_what_builds_on_another_than_expected_is_tried_by_itself():
  """The third was compiled as a change of the second; the first proves to be the fastest."""
  first, second, third = (Variant(chunks=n) for n in (1, 2, 4))
  costs = {first: [0] + [3] * 40, second: [0] + [9] * 40, third: [0] + [9] * 40}
  again = Variant(chunks=1, order="barriers")
  costs[again] = [0] + [2] * 40
  clock = Clock()
  fakes = {v: FakeStep(v, clock, c) for v, c in costs.items()}
  change = lambda best: again if best == first else third
  steps = StepVariants(lambda variant: fakes[variant])
  found = Search(
    steps, [first, second, change], on_best=True, together=3, say=lambda line: None, clock=clock
  )
  train(found)
  assert list(found.prepared) == [first, second, third, again]
  assert found.chosen == again


def test_profiled_steps_are_not_measured():
  found, _, _ = search({1: [7, 7, 7, 7, 2, 2], 2: [1, 1, 1, 1, 3, 3]}, profiled=3, rounds=2)
  assert train(found) == 2 * 4 + 2 * 2
  assert found.chosen == Variant(chunks=1)


def test_it_ends_where_its_seconds_do():
  """Each takes 40 s to compile: two fit into 90 s."""
  found, fakes, _ = search(dict.fromkeys((1, 2, 4, 8), [1.0] * 9), compiling=40, seconds=90)
  train(found)
  assert [f.calls > 0 for f in fakes.values()] == [True, True, False, False]
  assert list(found.untried.values()) == ["no time left"] * 2
  assert sum(found.prepared.values()) <= 90


def test_it_takes_no_more_steps_than_it_may():
  costs = dict.fromkeys((1, 2, 4, 8), [1.0] * 40)
  found, _, _ = search(costs, profiled=4, rounds=3, most_steps=20)
  assert train(found) <= 20
  assert len(found.prepared) == 2


def test_a_candidate_that_does_not_compile_is_left_out():
  found, _, lines = search({1: [1.0] * 9, 2: [0.5] * 9, 4: [0.1] * 9}, fails=(4,))
  train(found)
  assert found.chosen == Variant(chunks=2)
  assert any("chunks=4 does not compile: RESOURCE_EXHAUSTED" in line for line in lines)


@pytest.mark.parametrize("refused", [(2,), (1, 4)], ids=["a later one", "the first"])
@pytest.mark.parametrize("together", [1, 3], ids=["one by one", "side by side"])
@pytest.mark.parametrize("traced", [False, True], ids=["as it is made", "as it is traced"])
def test_a_candidate_that_the_model_refuses_is_left_out(refused, together, traced):
  costs = {n: [9.0 / n] * 23 for n in (1, 2, 4, 8)}
  options = {"on_best": together > 1, "together": together, "traced": traced}
  found, fakes, lines = search(costs, refused=refused, **options)
  train(found)
  assert found.chosen == Variant(chunks=8)
  why = {Variant(chunks=n): f"does not fit the run: dispatch.chunks={n} does not fit"
         for n in refused}  # fmt: skip
  assert found.untried == why
  for variant, words in why.items():
    assert lines.count(f"schedule: {variant} {words}") == 1
  assert [n for n, fake in fakes.items() if not fake.calls] == list(refused)
  assert len(found.decision()["not_tried"]) == len(refused)


@pytest.mark.parametrize("together", [1, 2], ids=["one by one", "side by side"])
def test_a_run_of_which_the_model_refuses_every_candidate_ends(together):
  options = {"on_best": together > 1, "together": together}
  found, _, lines = search({1: [], 2: []}, refused=(1, 2), **options)
  with pytest.raises(ConfigError, match="chunks=1 does not fit"):
    found(0, {})
  assert sum("does not fit" in line for line in lines) == 2


def test_the_first_candidate_that_is_not_refused_has_to_compile():
  """Else the refusal of another one would hide that the GPU's memory is too small."""
  found, _, _ = search({1: [], 2: []}, refused=(1,), fails=(2,), traced=True, together=2)
  with pytest.raises(jax.errors.JaxRuntimeError, match="no memory"):
    found(0, {})


def test_a_run_that_the_model_refuses_as_configured_ends():
  def make(variant):
    raise ConfigError("a capacity of 0")

  found = Search(StepVariants(make), (Variant(), Variant(chunks=1)), say=lambda line: None)
  with pytest.raises(ConfigError, match="a capacity of 0"):
    found(0, {})


def test_one_that_cannot_run_as_configured_says_so():
  found, _, _ = search({1: [], 2: []}, fails=(1,))
  with pytest.raises(jax.errors.JaxRuntimeError, match="no memory"):
    found(0, {})


@pytest.mark.parametrize(
  ("fails", "words"),
  [((1,), "RESOURCE_EXHAUSTED"), ((), "chunks=1 does not compile on another process")],
  ids=["here", "elsewhere"],
)
def test_one_that_cannot_run_as_configured_ends_all_processes(fails, words, monkeypatch):
  """A process that alone went on would wait for the others in its first step."""
  asked = []
  monkeypatch.setattr(searching, "all_agree", asked.append)  # None: not all agree
  found, _, _ = search({1: [1.0] * 5, 2: [1.0] * 5}, fails=fails)
  with pytest.raises(jax.errors.JaxRuntimeError, match=words):
    train(found)
  assert asked == [not fails]


def test_the_decision_says_what_it_rests_on_and_is_found_again(tmp_path, capsys):
  config = {"model": {"width": 8}, "train": {"batch_size": 4, "steps": 10}, "data": {"seq_len": 8}}
  kept = Decisions(tmp_path / "schedule.json", config)
  assert kept.known() is None
  found, _, _ = search({1: [1.0] * 9, 2: [0.5] * 9}, keep=kept.keep)
  train(found)
  stored = json.loads(kept.file.read_text())
  assert stored["chosen"] == {"chunks": 2}
  assert [t["variant"] for t in stored["tried"]] == [{"chunks": 1}, {"chunks": 2}]
  assert [t["step_ms"] for t in stored["tried"]] == [1000, 500]
  assert kept.known() == Variant(chunks=2)
  longer = {**config, "train": {"batch_size": 4, "steps": 20}}
  assert dataclasses.replace(kept, config=longer).known() == Variant(chunks=2), "no time changes"
  wider = {**config, "model": {"width": 16}}
  assert dataclasses.replace(kept, config=wider).known() is None, "another program"
  kept.file.write_text(json.dumps({**stored, "chosen": {"gone": 1}}))
  assert kept.known() is None, "of another version"
  kept.file.write_text(json.dumps({**stored, "chosen": {"adaptive_r": -1}}))
  assert kept.known() is None, "a number that no search writes"
  told = capsys.readouterr().err
  assert str(kept.file) in told
  assert "the search begins anew" in told
  kept.file.write_text(json.dumps(stored)[:50])
  assert kept.known() is None, "half a file is none"


def test_a_cut_that_fails_leaves_the_run_as_configured(tmp_path, mesh1, monkeypatch):
  """A measurement before the first step may not end a run."""
  built = trainer(mesh1, tmp_path).built
  overlap = OverlapConfig(search_seconds=60)
  built = dataclasses.replace(
    built, overlap=overlap, candidates=(Variant(), Variant(transport="packed"))
  )
  lines, state = [], built.abstract_state()

  def no_memory(*args):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

  monkeypatch.setattr(fastest, "MeasuredState", no_memory)
  step = fastest_step(built, state, tmp_path, say=lines.append)
  assert step.variant == Variant()
  assert "nothing was measured (RESOURCE_EXHAUSTED: out of memory)" in lines[-1]
  assert not (tmp_path / "schedule.json").exists(), "a later start tries again"


def test_the_tuner_and_the_schedule_are_one_search(tmp_path, mesh1):
  """The user's candidates are tried first; the schedule's build on the fastest of them."""
  run = trainer(mesh1, tmp_path, tune="chunks=2,4")
  overlap = OverlapConfig(search_seconds=600)
  candidates = (Variant(), Variant(transport="packed"))
  built = dataclasses.replace(run.built, overlap=overlap, candidates=candidates)
  step = fastest_step(built, built.abstract_state(), tmp_path, say=lambda line: None)
  decision = json.loads((tmp_path / "schedule.json").read_text())
  on_cut = decision.get("cut", decision)  # whole steps decide only where the cut proposes a change
  tried = [t["variant"] for t in on_cut["tried"]]
  assert tried[:3] == [{}, {"chunks": 2}, {"chunks": 4}]
  assert tried[3]["transport"] == "packed"
  assert on_cut["not_tried"] == []
  assert step.variant.given == decision["chosen"]


class FakeState:
  """A `MeasuredState` without arrays: its steps are fakes that count."""

  def __init__(self, *_):
    self.state = 0

  def train(self, step):
    """Calls a step once."""
    self.state, _, _ = step(self.state, {})


class TwoPrograms:
  """Fake steps of a run and of its cut, whose candidates may be fast in one and slow in the other.

  Args:
    built: the run.
    cut, whole: seconds of a step with each transport, None as configured.
  """

  def __init__(self, monkeypatch, built, cut, whole):
    self.clock, self.made = Clock(), []

    def make(steps, variant):
      here = "whole" if steps.built is built else "cut"
      self.made.append((here, variant))
      cost = {"whole": whole, "cut": cut}[here][variant.transport]
      return FakeStep(variant, self.clock, [9.0] + [cost, 1.01 * cost] * 20)

    monkeypatch.setattr(type(built), "cut", dataclasses.replace)
    monkeypatch.setattr(fastest.Steps, "__call__", make)
    monkeypatch.setattr(fastest, "MeasuredState", FakeState)
    own = functools.partial(Search, clock=self.clock)
    monkeypatch.setattr(fastest, "Search", own)


@pytest.fixture
def searched(tmp_path, mesh1):
  """A run whose search tries packed rows."""
  built = trainer(mesh1, tmp_path).built
  overlap = OverlapConfig(search_seconds=900)
  candidates = (Variant(), Variant(transport="packed"))
  return dataclasses.replace(built, overlap=overlap, candidates=candidates)


def test_whole_steps_decide_on_what_a_cut_proposes(searched, tmp_path, monkeypatch):
  """The run goes on as configured if the whole steps rank the candidates unlike the cut."""
  lines = []
  find = lambda folder: fastest_step(
    searched, searched.abstract_state(), tmp_path / folder, say=lines.append
  )
  fakes = TwoPrograms(monkeypatch, searched, {None: 5, "packed": 4}, {None: 50, "packed": 60})
  (tmp_path / "other").mkdir()
  assert find("other").variant == Variant()
  assert fakes.made == [
    ("cut", Variant()), ("cut", Variant(transport="packed")),
    ("whole", Variant()), ("whole", Variant(transport="packed")),
  ]  # fmt: skip
  assert "transport='packed' is chosen." in lines[-4]
  assert "(on two pairs, microbatches: 1, in" in lines[-4]
  assert lines[-1].startswith("schedule: as configured is chosen. as configured: 50")
  assert (
    "transport='packed': 60000.0 ± 300.0 ms, 20.0 % slower than as configured (on whole"
    in (lines[-1])
  )
  stored = json.loads((tmp_path / "other" / "schedule.json").read_text())
  assert (stored["chosen"], stored["measured on"]) == ({}, "whole steps")
  assert stored["cut"]["chosen"] == {"transport": "packed"}
  made = len(fakes.made)
  assert find("other").variant == Variant()
  assert len(fakes.made) == made + 1, "a later start reads the decision"

  TwoPrograms(monkeypatch, searched, {None: 5, "packed": 4}, {None: 50, "packed": 40})
  (tmp_path / "same").mkdir()
  assert find("same").variant == Variant(transport="packed")


def test_what_a_cut_leaves_as_configured_needs_no_whole_step(searched, tmp_path, monkeypatch):
  fakes = TwoPrograms(monkeypatch, searched, {None: 5, "packed": 5}, {None: 50, "packed": 40})
  find = functools.partial(fastest_step, searched, searched.abstract_state(), tmp_path)
  assert find(say=lambda line: None).variant == Variant()
  assert [here for here, _ in fakes.made] == ["cut", "cut", "whole"]
  assert json.loads((tmp_path / "schedule.json").read_text())["measured on"].startswith("two pairs")


def test_steps_that_are_compared_keep_their_transport(searched, tmp_path, monkeypatch):
  """Neither the search nor an earlier start's decision changes it."""
  fakes = TwoPrograms(monkeypatch, searched, {None: 5, "packed": 4}, {None: 50, "packed": 40})
  find = functools.partial(fastest_step, searched, searched.abstract_state(), tmp_path)
  assert find(say=lambda line: None).variant == Variant(transport="packed")
  fakes.made.clear()
  assert find(say=lambda line: None, same_transport=True).variant == Variant()
  assert fakes.made == [("whole", Variant())]


@pytest.mark.nightly
def test_a_tuned_run_from_the_command_line(tmp_path, capsys):
  """Without a search the first steps decide; a later start finds the decision."""
  from scmoe import train

  small = ["--config", "quickstart", "--smoke", "--config.mesh.expert=2"]
  small += ["--config.train.tensorboard=false", "--config.train.steps=12"]
  tune = ["--config.train.tune=chunks=1,2 transport=capacity,packed"]
  tune += ["--config.train.tune_rounds=1", "--workdir", str(tmp_path / "tuned")]
  train.main([*small, *tune])
  assert "is chosen. " in capsys.readouterr().out
  decision = json.loads((tmp_path / "tuned" / "schedule.json").read_text())
  assert len(decision["tried"]) == 4
  assert decision["chosen"] in [t["variant"] for t in decision["tried"]]
  train.main([*small, *tune, "--config.train.steps=14"])
  assert "trying" not in capsys.readouterr().out
  assert json.loads((tmp_path / "tuned" / "schedule.json").read_text()) == decision
  train.main([*small, "--workdir", str(tmp_path / "plain")])
  want, found = (
    [line["loss"] for line in read_metrics(tmp_path / name)][:12] for name in ("plain", "tuned")
  )
  np.testing.assert_allclose(found, want, rtol=1e-3)
