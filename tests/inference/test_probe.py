"""The probe's counts against the model's own sums of the same tokens, wiring by wiring."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from flax import nnx
from harness import parts, tiny

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError
from scmoe.inference.probe import PARTS, Probe, probe, specialisation
from scmoe.inference.reading import ReadText
from scmoe.inference.similarity import hsic
from scmoe.inspect import CLASSES, token_classes
from scmoe.models.gpt import GPT, Pass
from scmoe.moe.losses import statistics

VOCAB = 11


def model_of(**fields) -> GPT:
  config = tiny(**fields)
  graph, params = parts(config)
  return nnx.merge(graph, params)


def batch_of(seed=0):
  rng = np.random.default_rng(seed)
  batch = Batch.of_tokens(rng.integers(0, VOCAB, (3, 6)))
  segments = np.ones((3, 6), np.int32)
  segments[2, 4:] = 0  # padding counts nowhere
  return dataclasses.replace(batch, segment_ids=segments, domain=np.array([0, 1, 1], np.int32))


def probed(model, *batches) -> Probe:
  classes = np.arange(model.config.vocab_size) % 3
  return probe(model, batches, num_domains=2, num_classes=3, reading=ReadText(classes))


@pytest.mark.parametrize("fields", [
  {"wiring": "top2", "num_layers": 4},
  night({"wiring": "scmoe_pos2_l0", "num_layers": 4}),
  {"wiring": "farskip", "moe_every": 1, "num_layers": 2, "style": "llama", "sliding_window": 2,
   "full_attention_layers": "1"},
  night({"wiring": "farskip_routed", "moe_every": 1, "num_layers": 2}),
  night({"wiring": "scmoe_pos3", "moe_every": 1, "num_layers": 2, "shortcut_norm": "own"}),
  night({"wiring": "dgmoe_share"}),  # by day the gatings of dgmoe, below
  {"wiring": "scmoe_pos2", "style": "llama", "moe_every": 1, "num_layers": 3, "top_k": 2,
   "dense_layers": "1", "zero_experts": 2},
], ids=lambda f: f["wiring"])  # fmt: skip
def test_counts_are_the_models_own(fields):
  model, batch = model_of(**fields), batch_of()
  given = Pass(jnp.asarray(batch.positions), mask_BS=jnp.asarray(batch.segment_ids) > 0)
  sums = jax.jit(lambda model: model(jnp.asarray(batch.inputs), given).sums)(model)
  found, own = probed(model, batch), statistics(sums)
  per_pair = len(found.gatings) // len(found.drop_P)
  of_pairs = lambda x: x.reshape(-1, per_pair, *x.shape[1:]).mean(1)
  assert found.tokens == 16
  np.testing.assert_allclose(of_pairs(found.load_GE), own["load"], atol=1e-6)
  np.testing.assert_allclose(of_pairs(found.entropy_G), own["entropy"], rtol=1e-5)
  np.testing.assert_allclose(of_pairs(found.confidence_G), own["confidence"], rtol=1e-5)
  np.testing.assert_allclose(found.drop_P, own["drop"], atol=1e-6)
  np.testing.assert_allclose(found.shortcut_ratio_P, own["shortcut_ratio"], rtol=1e-5)
  assert len(found.similarity_V) == len(found.points) - 1
  assert (found.similarity_V <= 1 + 1e-6).all()


def test_domains_and_classes_add_up_to_the_load():
  model = model_of(wiring="top2", num_layers=4)
  found = probed(model, batch_of(0), batch_of(1))
  assert found.tokens == 32
  domain_tokens = np.array([12, 20]) / 32  # every token has as many choices
  together = (found.domain_load_GDE * domain_tokens[:, None]).sum(1)
  np.testing.assert_allclose(together, found.load_GE, atol=1e-6)
  np.testing.assert_allclose(found.class_load_GCE.sum(-1), 1, atol=1e-6)
  np.testing.assert_allclose(found.neighbours_GEE.sum((-1, -2)), 1, atol=1e-6)
  assert np.isnan(found.repeated_G).all()
  assert np.isnan(found.as_current_G).all()  # top2 reads the current representation


def test_repeated_choices_are_those_of_dgmoe():
  """Counted again from the gates' scores: the second gating's best is the first one's choice."""
  model = model_of(wiring="dgmoe", num_layers=2)
  seen = []
  route = type(model.stages.moe).route

  def listening(self, x, call):
    flight = route(self, x, call)
    seen.append((call.avoid_T, flight.routing))
    return flight

  found = probed(model, batch_of())
  assert found.gatings == ("layer 1, preceding", "layer 1, current")
  with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
    patch.setattr(type(model.stages.moe), "route", listening)
    batch = batch_of()
    model(jnp.asarray(batch.inputs), Pass(mask_BS=jnp.asarray(batch.segment_ids) > 0))
  ((avoid, routing),) = [(a, r) for a, r in seen if a is not None]
  mask = batch_of().segment_ids.reshape(-1) > 0
  repeated = (np.asarray(routing.logits_TE).argmax(-1) == np.asarray(avoid))[mask].mean()
  assert found.repeated_G[1] == pytest.approx(repeated)
  assert np.isnan(found.repeated_G[0])
  assert 0 <= found.as_current_G[0] <= 1


def test_parts_of_a_row_and_alignment_by_hand(monkeypatch):
  """Entropy and score by place from the gates' probabilities; alignment from sums over batches."""
  from scmoe.inference import probe as module

  model = model_of(wiring="top2", num_layers=2)
  heard, grams = [], []
  of_routings, of_gram = module._of_routings, module.gram
  note = lambda kept: lambda x: kept.append(np.asarray(x))

  def noted_routings(found, *rest):
    jax.debug.callback(note(heard), found.routings[0].probs_TE, ordered=True)
    return of_routings(found, *rest)

  def noted_gram(*given):
    made = of_gram(*given)
    jax.debug.callback(note(grams), made, ordered=True)
    return made

  monkeypatch.setattr(module, "_of_routings", noted_routings)
  monkeypatch.setattr(module, "gram", noted_gram)
  found = probed(model, batch_of(0), batch_of(1))
  jax.effects_barrier()
  mask = batch_of().segment_ids.reshape(-1) > 0
  part = np.arange(18) % 6 * PARTS // 6
  p = np.stack(heard).astype(np.float64)[:, mask]
  entropy = -(p * np.log(p)).sum(-1) / np.log(p.shape[-1])
  for q in range(PARTS):
    own = part[mask] == q
    if not own.any():
      assert np.isnan(found.entropy_GQ[0, q])
      continue
    assert found.entropy_GQ[0, q] == pytest.approx(entropy[:, own].mean(), rel=1e-5)
    assert found.confidence_GQ[0, q] == pytest.approx(p.max(-1)[:, own].mean(), rel=1e-5)
  assert np.isfinite(found.entropy_GQ[0]).sum() == 6
  values = len(found.points)
  first, second = grams[:values], grams[values:]
  n = jnp.asarray(float(mask.sum()))
  cross = [sum(float(hsic(g[i], g[i + 1], n)) for g in (first, second)) for i in range(values - 1)]
  own = [sum(float(hsic(g[i], g[i], n)) for g in (first, second)) for i in range(values)]
  expected = [c / np.sqrt(a * b) for c, a, b in zip(cross, own, own[1:])]
  np.testing.assert_allclose(found.alignment_V, expected, rtol=1e-4)
  assert (found.alignment_V > 0).all()


def test_specialisation_is_the_share_that_would_have_to_move():
  load = np.array([[0.5, 0.25, 0.25]])
  kinds = np.array([[[1.0, 0, 0], [0.25, 0.375, 0.375], [np.nan] * 3]])
  np.testing.assert_allclose(specialisation(kinds, load), [(0.5 + 0.25) / 2])
  assert np.isnan(specialisation(kinds[:, 2:], load)).all()
  np.testing.assert_allclose(specialisation(load[:, None], load), [0])


def test_overlap_is_one_for_a_copy_and_zero_for_independence():
  zeros = {f.name: np.zeros(2) for f in dataclasses.fields(Probe)}
  copy, apart = np.diag([0.5, 0.25, 0.25]), np.outer([0.5, 0.25, 0.25], [0.2, 0.2, 0.6])
  found = Probe(**{**zeros, "neighbours_GEE": np.stack([copy, apart])})
  np.testing.assert_allclose(found.overlap_G, [1, 0], atol=1e-9)


def test_a_dense_model_has_no_router():
  with pytest.raises(ConfigError, match="has no router to inspect"):
    probed(model_of(wiring="dense"), batch_of())


def test_classes_of_bytes():
  from scmoe.data.tokenizers import ByteTokenizer

  classes = token_classes(ByteTokenizer(), 320)
  named = {text: CLASSES[classes[ord(text)]] for text in "aZ7 \n."}
  assert named == {"a": "lower case", "Z": "upper case", "7": "digit", " ": "space",
                   "\n": "line end", ".": "punctuation"}  # fmt: skip
  assert CLASSES[classes[256]] == "end"
  assert CLASSES[classes[200]] == CLASSES[classes[300]] == "other"
