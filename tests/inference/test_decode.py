"""Generation with a cache is the uncached model, token by token."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import by_day_and_night, night
from drawn import drawn_model
from flax import nnx

from scmoe.base.errors import ConfigError
from scmoe.blocks.options import OverlapConfig
from scmoe.inference.decode import (
  Static,
  decode_step,
  generate,
  one_by_one,
  prefill,
  stream,
  taken_apart,
)
from scmoe.inference.offload.model import Offload
from scmoe.inference.sampling import Sampling
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import GPT, Pass
from scmoe.models.stacked import is_apart
from scmoe.parallel.mesh import make_mesh
from scmoe.run.programs import Programs

VOCAB = 64
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
  """Programs run once or twice here, `generate`'s own included."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def make_model(wiring="scmoe_pos2", *, style="gpt2", moe_every=2, context=64, unroll=1):
  config = ModelConfig(
    style=style,
    wiring=wiring,
    moe_every=moe_every,
    num_layers=4 if wiring == "dgmoe_share" else 2 * moe_every,
    width=32,
    num_heads=4,
    num_kv_heads=2 if style == "llama" else 0,
    num_experts=4,
    context=context,
    dtype="float32",
    init_std=0.3,  # far from uniform predictions, so that greedy choices are no ties
  )
  overlap = OverlapConfig(unroll=unroll)
  config = config.resolve(vocab_size=VOCAB)
  return drawn_model(lambda: GPT(config, overlap=overlap, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
  ("wiring", "style", "moe_every", "unroll"),
  [
    night("dense", "gpt2", 2, 1),
    ("topk", "llama", 1, 1),
    night("scmoe_pos1", "gpt2", 2, 1),
    night("scmoe_pos2", "llama", 2, 1),  # by day its first pair stands outside the scan, below
    ("scmoe_pos2", "llama", 2, 0),  # written out, each pair with a cache of its own
    night("scmoe_pos2", "gpt2", 1, 1),
    night("scmoe_pos3", "gpt2", 2, 1),
    ("scmoe_pos2_l0", "gpt2", 2, 1),  # the first pair stands outside the scan
    night("scmoe_pos2_l0", "gpt2", 2, 0),
    ("farskip", "gpt2", 2, 1),
    night("farskip", "llama", 1, 0),
    night("farskip_routed", "llama", 1, 1),
    night("dgmoe_share", "gpt2", 2, 1),
    ("dgmoe_share", "gpt2", 2, 0),
  ],
)
def test_cached_logits_equal_uncached(wiring, style, moe_every, unroll):
  """Two prompts of different lengths in one batch; every step against a full forward pass."""
  model = make_model(wiring, style=style, moe_every=moe_every, unroll=unroll)
  rng = np.random.default_rng(0)
  text_BS = rng.integers(0, VOCAB, (2, 12)).astype(np.int32)
  lengths_B = np.array([5, 8], np.int32)

  @jax.jit
  def uncached(tokens_BS):
    return model.logits(model(tokens_BS, Pass(no_drop=True)).h_BSD)

  want_BSV = np.asarray(uncached(text_BS))
  prompts_BS = np.where(np.arange(8) < lengths_B[:, None], text_BS[:, :8], 63)
  logits_BV, caches = jax.jit(lambda t: prefill(model, t, lengths_B, model.init_caches(2, 12)))(
    prompts_BS
  )
  step = jax.jit(lambda token, position, caches: decode_step(model, token, position, caches))
  for offset in range(4):
    position_B = lengths_B + offset
    want_BV = want_BSV[np.arange(2), position_B - 1]
    np.testing.assert_allclose(logits_BV, want_BV, rtol=1e-5, atol=1e-5 * np.abs(want_BV).max())
    token_B = text_BS[np.arange(2), position_B]
    logits_BV, caches = step(token_B, position_B, caches)


def test_greedy_generation_is_the_argmax_of_the_uncached_model():
  model = make_model()
  prompts = [[1, 2, 3], [9, 8, 7, 6, 5]]
  got = generate(model, prompts, GREEDY, max_new_tokens=6)

  @jax.jit
  def uncached(tokens_S, length):
    logits_SV = model.logits(model(tokens_S[None], Pass(no_drop=True)).h_BSD)[0]
    return logits_SV[length - 1].argmax()

  for prompt, new in zip(prompts, got):
    text = list(prompt)
    for token in new:
      padded = jnp.array(text + [0] * (12 - len(text)))
      assert int(uncached(padded, len(text))) == token
      text.append(token)


def test_a_prompt_does_not_depend_on_its_batch():
  """Experts have room for all: nobody's token is dropped because of a neighbour's."""
  model = make_model("topk")
  alone = generate(model, [[1, 2, 3]], GREEDY, max_new_tokens=8)[0]
  crowd = generate(model, [[1, 2, 3]] + [[1, 2, 3, 4]] * 7, GREEDY, max_new_tokens=8)[0]
  assert alone == crowd


@pytest.mark.parametrize(
  ("sizes", "unroll", "wiring"),
  [night((2, 4, 1), 1, "dgmoe_share"), night((1, 2, 2), 1, "dgmoe_share"),
   night((1, 2, 2), 0, "dgmoe_share"), ((1, 2, 2), 0, "scmoe_pos2")],
  ids=["data-expert", "expert-tensor", "expert-tensor written out", "a pair written out"],
)  # fmt: skip
def test_a_mesh_says_the_same(mesh_of, sizes, unroll, wiring):
  """Three prompts over eight, or two, parts of the batch."""
  prompts = [[5, 17, 3], [8], [1, 2, 3, 4, 5, 6]]
  say = lambda unroll, **mesh: generate(
    make_model(wiring=wiring, unroll=unroll), prompts, GREEDY, max_new_tokens=6, **mesh
  )
  assert say(unroll, mesh=mesh_of(*sizes)) == say(1)


def test_layers_are_taken_apart_for_all_calls():
  """Those that are written out, but for experts; the caller's model stays as it is."""
  model = make_model("scmoe_pos2", unroll=0)
  graph, params = nnx.split(model)
  static = Static(graph, make_mesh(devices=jax.devices()[:1]), GREEDY)
  got = taken_apart(static, params)
  assert not model.taken_apart
  assert nnx.merge(graph, got).taken_apart
  assert taken_apart(static, got) is got
  before, after = jax.tree.leaves(params), jax.tree.leaves(got, is_leaf=is_apart)
  for old, new in zip(before, after, strict=True):
    if not is_apart(new):
      assert new is old
    else:
      np.testing.assert_array_equal(jnp.stack(new.parts), old)
  experts = jax.tree.leaves(got["stages"]["moe"]["experts"], is_leaf=is_apart)
  assert not any(map(is_apart, experts))
  scanned = nnx.split(make_model("scmoe_pos2"))
  assert taken_apart(Static(scanned[0], static.mesh, GREEDY), scanned[1]) is scanned[1]


def test_what_has_nothing_beside_it_is_decoded_in_order():
  whether = lambda wiring, rows: one_by_one(make_model(wiring), Offload(), rows)
  assert whether("topk", 1)
  assert not whether("topk", 2)
  assert not whether("scmoe_pos2", 1)
  assert not one_by_one(make_model("topk"), Offload.named("early", "early"), 1)


def test_draws_follow_the_seed_and_end_at_eos():
  model = make_model()
  draw = lambda seed, **kw: generate(model, [[1]], max_new_tokens=20, seed=seed, **kw)[0]
  assert draw(0) == draw(0)
  assert draw(0) != draw(1)
  stop = draw(0)[5]
  assert draw(0, eos_id=stop) == draw(0)[: draw(0).index(stop)]


@pytest.mark.parametrize(("unroll", "chunk"), by_day_and_night([1, 0], [1, 3, 50]))
def test_a_stream_is_the_whole_in_pieces(chunk, unroll):
  model, prompts = make_model(unroll=unroll), [[1, 2, 3], [9, 8]]
  draws = {"max_new_tokens": 11, "seed": 1}
  want = generate(model, prompts, **draws)
  pieces = list(stream(model, prompts, chunk=chunk, **draws))
  assert [len(piece) for piece, _ in pieces][:2] == [1, min(chunk, 10)]
  assert [list(itertools.chain(*row)) for row in zip(*pieces)] == want
  stop = want[0][4]  # one row ends there, the other later or not at all
  ended = list(stream(model, prompts, chunk=chunk, eos_id=stop, **draws))
  assert [list(itertools.chain(*row)) for row in zip(*ended)] == [
    row[: row.index(stop)] if stop in row else row for row in want
  ]


def test_a_stream_ends_with_its_last_row():
  draws = {"max_new_tokens": 40, "seed": 1}
  (text,) = generate(make_model(), ((1,),), **draws)  # prompts may be tuples
  pieces = list(stream(make_model(), [[1]], chunk=2, eos_id=text[2], **draws))
  assert len(pieces) <= 3


@pytest.mark.parametrize(
  ("prompts", "options", "text"),
  [
    ([], {}, "prompts: one is empty, or there is none"),
    ([[1], []], {}, "prompts: one is empty, or there is none"),
    ([1, 2, 3], {}, r"prompts=\[1, 2, 3\] must be a list of lists of token ids"),
    ("abc", {}, "prompts='abc' must be a list of lists of token ids"),
    ([["a"]], {}, "must be a list of lists of token ids"),
    ([[1.5]], {}, "must be a list of lists of token ids"),
    (
      [[1], [64]],
      {},
      r"prompts\[1\] has token 64, outside the vocabulary of 64; use ids from 0 to 63",
    ),
    ([[-1]], {}, r"prompts\[0\] has token -1"),
    ([[1] * 60], {}, "needs 65 positions, more than model.context=64"),
    ([[1]], {"temperature": -1.0}, r"Sampling\.temperature=-1\.0 is too small; the least is 0"),
    ([[1]], {"top_p": 0.0}, r"Sampling\.top_p=0\.0 is too small; it must be larger than 0"),
    ([[1]], {"top_k": -1}, r"Sampling\.top_k=-1 is too small; the least is 0"),
  ],
)
def test_bad_requests_name_the_argument(prompts, options, text):
  with pytest.raises(ConfigError, match=text):
    generate(make_model(), prompts, Sampling(**options), max_new_tokens=5)


def test_programs_are_those_of_their_functions(tmp_path):
  """Prompts padded to 16 with 20 new tokens, and to 32 with 4, have caches of one shape."""
  model, programs = make_model(), Programs(OverlapConfig(), tmp_path)
  for prompt, new in ((list(range(1, 9)), 20), (list(range(1, 21)), 4)):
    for _ in range(2):
      want = generate(model, [prompt], GREEDY, max_new_tokens=new)
      assert generate(model, [prompt], GREEDY, max_new_tokens=new, prepare=programs) == want
  assert programs.settled
