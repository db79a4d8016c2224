"""Runtime switching moves no parameter and changes no result."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from covering import night
from drawn import drawn

from scmoe.base.errors import ConfigError
from scmoe.data import open_data
from scmoe.moe.dispatch import DispatchConfig
from scmoe.parallel.mesh import MeshConfig, batch_sharding, shardings_of
from scmoe.run import build
from scmoe.run.config_files import find_config, load_config
from scmoe.training.decisions import stored_variant
from scmoe.training.step import make_train_step
from scmoe.training.variants import StepVariants, Variant, parse_candidates


@pytest.fixture(scope="module")
def run():
  """Two experts on four devices: r is 0, 1 or 2."""
  run = load_config(find_config("quickstart"), "smoke")
  run = dataclasses.replace(
    run,
    mesh=MeshConfig(data=1, expert=4),
    model=dataclasses.replace(run.model, num_experts=2, num_layers=2),
    dispatch=DispatchConfig(capacity_factor=4.0),
  )
  return run.resolve(num_devices=4, vocab_size=build.vocab_size(run.data))


@pytest.fixture(scope="module")
def built(run):
  return build.build(run, jax.devices()[:4])


@pytest.fixture(scope="module")
def steps(built):
  abstract = built.abstract_state()
  return StepVariants(lambda v: make_train_step(built.variant(v), built.optimizer, abstract))


@pytest.fixture(scope="module")
def fresh(built):
  """() -> the state before step 0; kept on the host, since a step donates what it is given."""
  abstract = built.abstract_state()
  zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), abstract)
  host = dataclasses.replace(zeros, params=drawn(built.shapes))
  return lambda: jax.device_put(host, shardings_of(abstract))


@pytest.fixture(scope="module")
def batch(run, built):
  data = open_data(run.data, batch_size=run.train.batch_size, seed=0)
  rows = next(iter(data.train()))
  sharding = batch_sharding(built.mesh, leading=1)
  return jax.tree.map(lambda a: jax.device_put(a[None], sharding), rows)


@pytest.mark.parametrize(
  "way",
  [Variant(adaptive_r=2, chunks=2), night(Variant(transport="packed")),
   night(Variant(transport="per_rank")),
   night(Variant(schedule="mlp 0", order="barriers"))],
  ids=str,
)  # fmt: skip
def test_results_do_not_depend_on_r_and_chunks(steps, fresh, batch, way):
  results = []
  for variant in (Variant(), way):
    state = fresh()
    for _ in range(2):
      state, scalars, _ = steps(state, batch, variant)
    results.append((float(scalars["loss"]), jax.tree.map(np.asarray, state.params)))
  (want, wanted), (loss, params) = results
  assert loss == pytest.approx(want, rel=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), params, wanted)


def test_switching_in_one_run_compiles_each_variant_once(steps, fresh, batch):
  state = fresh()
  before = len(steps.variants)
  switched = [Variant(), Variant(top_k=2), Variant(), Variant(), Variant(top_k=2)]
  where = jax.tree.map(lambda a: a.sharding, state.params)
  for variant in switched:
    state, scalars, _ = steps(state, batch, variant)
    assert np.isfinite(float(scalars["loss"]))
  assert len(steps.variants) - before <= 2
  assert int(state.step) == 5
  assert jax.tree.map(lambda a: a.sharding, state.params) == where


def test_candidates():
  assert parse_candidates("") == (Variant(),)
  assert len(parse_candidates("adaptive_r=0,1 chunks=1,2,4")) == 6
  assert parse_candidates("num_sms=0,124") == (Variant(num_sms=0), Variant(num_sms=124))
  for text, told in (
    ("top_k=1,2", "'top_k' is none of adaptive_r, chunks, transport, num_sms; write NAME="),
    ("num_sm=0,124", "did you mean 'num_sms'"),
    ("chunks=a", "train.tune='chunks=a': chunks takes a whole number from 0 on, got 'a'"),
    ("chunks=1, 2", "got ''; write chunks=VALUE,VALUE without spaces"),
    ("transport=droples,packed", "takes one of capacity, packed, dropless, per_rank, got 'drop"),
    ("chunks=1,2,1", "names chunks, or one of its values, twice"),
    ("chunks=1 chunks=2", "names chunks, or one of its values, twice"),
  ):
    with pytest.raises(ConfigError, match=re.escape(told)):
      parse_candidates(text)


def test_the_blocks_of_the_experts_kernels_are_the_variant_s(built):
  assert built.run.model.ffn.num_sms == 0
  varied = built.varied(Variant(num_sms=124, chunks=2))
  assert (varied.model.ffn.num_sms, varied.dispatch.chunks) == (124, 2)
  assert stored_variant({"num_sms": 124}, "schedule.json") == Variant(num_sms=124)


def test_a_variant_that_does_not_fit_names_the_field(built):
  with pytest.raises(ConfigError, match=r"dispatch.adaptive_r=3 must be 0 or divide the 2 devices"):
    built.variant(Variant(adaptive_r=3))
  with pytest.raises(ConfigError, match=r"dispatch.chunks=0 is too small"):
    built.variant(Variant(chunks=0))
  with pytest.raises(ConfigError, match=r"model.top_k=3 needs 3 experts"):
    built.variant(Variant(top_k=3))


def test_a_cut_of_a_run_has_its_sizes_in_two_pairs_and_eight_groups(run):
  """Only the last group of a step sums gradients over devices, so one group is not like a step."""
  tokens = run.train.batch_size * 16  # of a microbatch
  deep = dataclasses.replace(
    run,
    model=dataclasses.replace(run.model, num_layers=12),
    train=dataclasses.replace(run.train, tokens_per_step=20 * tokens),
  )
  few = dataclasses.replace(deep, train=dataclasses.replace(deep.train, tokens_per_step=3 * tokens))
  groups_of = lambda run: build.build(run, jax.devices()[:4]).cut().random_batch().inputs.shape[0]
  assert groups_of(few) == 3, "as many as the run has"
  assert groups_of(run) == 1
  assert build.build(deep, jax.devices()[:4]).cut(groups=2).random_batch().inputs.shape[0] == 2
  whole = build.build(deep, jax.devices()[:4])
  cut = whole.cut()
  assert cut.mesh == whole.mesh
  assert cut.run.model.num_pairs == 2
  assert cut.train.microbatches(cut.sequence_length) == 8
  pair = lambda built: [s.shape[1:] for s in jax.tree.leaves(built.shapes["stages"])]
  assert pair(cut) == pair(whole)
  batch = cut.random_batch()
  assert batch.inputs.shape == (8, run.train.batch_size, run.data.seq_len)
  assert len(np.unique(batch.inputs)) > 10
  overlap = dataclasses.replace(deep.overlap, flight=2)
  both = build.build(dataclasses.replace(deep, overlap=overlap), jax.devices()[:4]).cut()
  assert both.random_batch().inputs.shape[0] == 16, "two microbatches run side by side in a group"


def test_what_auto_tries(built, run, monkeypatch):
  assert built.candidates == (Variant(),), "nothing without a GPU"
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  chunks = dataclasses.replace(run.dispatch, chunks=2)
  tried = lambda **fields: build.build(dataclasses.replace(run, **fields)).candidates
  plain, packed, in_slots = tried()
  assert (plain, packed) == (Variant(), Variant(transport="packed"))
  found = in_slots(packed)
  assert found == dataclasses.replace(packed, schedule=found.schedule, order="barriers", chunks=2)
  assert len(found.schedule.split(",")) == 2
  monkeypatch.setattr(build, "has_kernels", lambda device: True)
  assert in_slots(packed) == dataclasses.replace(found, num_sms=124), "of 132, eight for NCCL"
  assert in_slots(dataclasses.replace(packed, num_sms=0)).num_sms == 0, "train.tune has chosen"
  for given in ({"num_sms": 132}, {"backend": "xla"}, {"impl": "batched"}):
    ffn = dataclasses.replace(run.model.ffn, **given)
    taken = tried(model=dataclasses.replace(run.model, ffn=ffn))[-1]
    assert taken(packed).num_sms is None, given
  assert in_slots(plain).num_sms is None, "padded experts"
  put = dataclasses.replace(run.dispatch, transport="put")
  assert tried(dispatch=put)[-1](plain).num_sms is None, "NCCL moves no rows"
  assert built.variant(found), "names that the schedule knows"
  assert tried(dispatch=chunks)[-1](plain).chunks == 2
  lossless = dataclasses.replace(run.dispatch, transport="dropless")
  two = MeshConfig(data=2, expert=2)
  many = dataclasses.replace(run.model, wiring="topk", num_experts=8, top_k=4)
  per_rank = lambda **fields: Variant(transport="per_rank") in tried(dispatch=lossless, **fields)
  assert per_rank(model=many, mesh=two)
  assert not per_rank(model=dataclasses.replace(many, top_k=1), mesh=two), "one row with either"
  assert not per_rank(model=many), "of four ranks 79 % of the rows"
  more = lambda experts, k: dataclasses.replace(many, num_experts=experts, top_k=k)
  assert not per_rank(model=more(64, 8)), "of four ranks 40 % of the rows, and 3.2 times the room"
  assert per_rank(model=more(8, 6)), "of four ranks with two experts each 1.07 times the room"
  alone = dataclasses.replace(many, num_experts=2, top_k=2)
  assert not per_rank(model=alone, mesh=two), "each rank has one expert: nothing is saved"
  taught = dataclasses.replace(run.train, teacher="a folder")
  assert not per_rank(model=many, mesh=two, train=taught)
  held = dataclasses.replace(run.overlap, order="barriers")
  assert tried(overlap=held) == (plain, packed), "its order is the user's"
  assert tried(overlap=dataclasses.replace(run.overlap, schedule="mlp 0")) == (Variant(),)
  assert tried(overlap=dataclasses.replace(run.overlap, search_seconds=0)) == (Variant(),)
  assert tried(mesh=MeshConfig(data=4, expert=1)) == (Variant(),), "no exchange, no choice"
  gathered = dataclasses.replace(run.dispatch, adaptive_r=0)
  assert tried(dispatch=gathered) == (Variant(),), "weights travel there, not rows"
