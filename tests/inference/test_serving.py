"""Continuous batching: each answer is the request's own, whatever its neighbours, its pages and the
order of arrival."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from flax import nnx

from scmoe.base.errors import ConfigError
from scmoe.blocks.options import OverlapConfig
from scmoe.inference.decode import generate
from scmoe.inference.offload.model import Offload, offloaded
from scmoe.inference.sampling import Sampling, sample
from scmoe.inference.serving import server as server_module
from scmoe.inference.serving.draw import Draws, Needs, draw
from scmoe.inference.serving.jobs import NEWEST, Job, Statistics, key_data
from scmoe.inference.serving.pool import FREE_SHARE, FreePages, widths
from scmoe.inference.serving.programs import Turn
from scmoe.inference.serving.requests import Answer, Ending, Request
from scmoe.inference.serving.server import Server
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import GPT, Pass
from scmoe.parallel.mesh import make_mesh

VOCAB = 64
SMALL = {"slots": 3, "page_tokens": 8, "prefill_tokens": 16}


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
  """Every program here runs a few times."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def make_model(unroll=1, **options):
  config = ModelConfig(
    **{"style": "gpt2", "wiring": "scmoe_pos2", "num_layers": 2, "context": 32, **options},
    width=16,
    num_heads=2,
    num_experts=4,
    dtype="float32",
    init_std=0.4,  # far from uniform predictions, so that greedy choices are no ties
  )
  overlap = OverlapConfig(unroll=unroll)
  return GPT(config.resolve(vocab_size=VOCAB), overlap=overlap, rngs=nnx.Rngs(0))


def prompts(count, most=20, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(0, VOCAB, rng.integers(1, most)).tolist() for _ in range(count)]


def noting_pieces():
  """A value of `Server`'s `prepare`, and the (shape, tokens of each) of the pieces that it saw."""
  shapes = []

  def noting(program):
    def call(params, router, caches, token, own, draws):
      if isinstance(own, Turn):
        shapes.append((own.piece.tokens_RC.shape, own.piece.count_R.tolist()))
      return program(params, router, caches, token, own, draws)

    return call

  return noting, shapes


def answers(server, requests):
  """The answers in the order of the requests; checks that nothing is lost or left behind."""
  numbers = [server.submit(**request) for request in requests]
  found = {answer.id: answer for answer in server}
  assert sorted(found) == sorted(numbers)
  assert all(len(part.free) == server.pages and not part.jobs for part in server._parts)
  return [found[number] for number in numbers]


HOW = (Sampling(0.0), Sampling(1.3, 40, 0.95))


@functools.cache
def mixed():
  """Nine requests that draw in two ways, with what `generate` answers to each alone.

  The last two have one prompt.
  """
  model, found = make_model(), []
  texts = prompts(8, most=16)
  for i, (prompt, how) in enumerate(zip([*texts, texts[-1]], itertools.cycle(HOW))):
    new = (12, 3, 7)[i // 3]
    (want,) = generate(model, [prompt], how, max_new_tokens=12, seed=i)
    request = {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}
    found.append((request | {"prompt": prompt, "max_new_tokens": new, "seed": i}, want[:new]))
  return found


@pytest.mark.parametrize(("pages", "order"), [(0, 1), (5, 1), (5, -1)], ids=str)
def test_answers_are_those_of_generate(pages, order):
  """Three slots; five pages hold one text and a page of another, so that requests are put back."""
  asked = mixed()[::order]
  server = Server(make_model(), pages=pages, **SMALL)
  got = answers(server, [request for request, _ in asked])
  assert [answer.tokens for answer in got] == [want for _, want in asked]
  assert server.statistics.preemptions == sum(answer.preemptions for answer in got)
  assert (server.statistics.preemptions > 0) == (pages == 5)
  assert server.statistics.tokens == sum(len(want) for _, want in asked)
  assert all(0 < answer.first_seconds <= answer.seconds for answer in got)


def test_requests_that_come_later_join_the_batch():
  """One request at a time comes, two turns after the one before.

  The first one draws, so that no later one makes XLA compile other programs.
  """
  server, asked = Server(make_model(), **SMALL), mixed()[1:]
  got = {}
  for request, _ in asked:
    server.submit(**request)
    got |= {answer.id: answer for answer in [*server.step(), *server.step()]}
  got |= {answer.id: answer for answer in server}
  assert [got[i].tokens for i in range(len(asked))] == [want for _, want in asked]
  assert 1 < server.statistics.occupancy <= 3


@pytest.fixture
def compiled():
  """A list that grows by an entry for each program that XLA compiles."""
  found = []

  def listen(event, seconds, **_):
    found.extend([seconds] * (event == "/jax/core/compile/backend_compile_duration"))

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield found
  jax.monitoring.clear_event_listeners()


def test_a_warm_server_compiles_nothing_more_and_changes_no_answer(compiled):
  """Two widths of page tables, each for a step and for two sizes of pieces; warmed again, busy."""
  server = Server(make_model(context=64), slots=2, page_tokens=8, prefill_tokens=64)
  asked = [{"prompt": p, "max_new_tokens": 14, "seed": len(p)} for p in prompts(5, most=50)]
  for request in asked:
    key_data(request["seed"])
  before = len(compiled)
  assert server.warm(temperature=0.5) == 6
  assert len(compiled) >= before + 6
  before = len(compiled)
  first = [answer.tokens for answer in answers(server, asked)]
  numbers, again = [server.submit(**request) for request in asked], {}
  while server.busy:
    again |= {answer.id: answer.tokens for answer in server.step()}
    server.warm()
  assert [again[number] for number in numbers] == first
  assert len(compiled) == before
  with pytest.raises(ConfigError, match="temperature=-1 must be"):
    server.warm(temperature=-1)


def test_a_prompt_can_have_several_pieces_in_a_program():
  """Four pieces of 16 tokens where they read more than one of 64; answers are the requests' own.

  With the 20 slots a pass has 84 tokens, more than the model's context.
  """
  model, rng = make_model(context=80), np.random.default_rng(3)
  texts = [rng.integers(0, VOCAB, count).tolist() for count in (40, 20, 30, 70)]
  want = generate(model, texts, Sampling(0.0), max_new_tokens=4)
  noting, shapes = noting_pieces()
  server = Server(model, slots=20, page_tokens=16, prefill_tokens=64, prepare=noting)
  asked = [{"prompt": text, "max_new_tokens": 4, "temperature": 0} for text in texts]
  assert [answer.tokens for answer in answers(server, asked)] == want
  # The third program could read the last 54 tokens by pieces of either width.
  assert shapes == [
    ((4, 16), [16, 16, 8, 16]),
    ((4, 16), [4, 16, 14, 16]),
    ((1, 64), [54]),
  ]


ARCHITECTURES = {
  "GQA, window and sinks": {
    "style": "llama", "wiring": "topk", "top_k": 2, "moe_every": 1, "num_kv_heads": 1,
    "sliding_window": 6, "full_attention_layers": "1", "attention_sinks": True,
  },
  "latent, dense layer first": {
    "style": "llama", "wiring": "shared_expert", "moe_every": 1, "num_layers": 3,
    "dense_layers": "0", "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8,
  },
  "chunks, a layer without rotation, zero experts": {
    "style": "llama", "wiring": "topk", "top_k": 2, "moe_every": 1, "attention_chunk": 5,
    "full_attention_layers": "1", "nope_layers": "1", "zero_experts": 2,
  },
  "FarSkip, written out": {"wiring": "farskip", "num_layers": 4, "unroll": 0},
}  # fmt: skip
BY_DAY = ("GQA, window and sinks", "latent, dense layer first")


@pytest.mark.parametrize(
  "name", [name if name in BY_DAY else night(name) for name in ARCHITECTURES]
)
def test_every_architecture_agrees_with_a_pass_without_a_cache(name):
  """Greedy tokens, their log-probabilities, and those of the prompts."""
  model = make_model(**ARCHITECTURES[name])
  asked = [
    {"prompt": prompt, "max_new_tokens": 6, "temperature": 0, "logprobs": 3,
     "prompt_logprobs": True}
    for prompt in prompts(5)
  ]  # fmt: skip
  got = answers(Server(model, pages=6, **SMALL), asked)

  @jax.jit
  def uncached(tokens_BS):
    return jax.nn.log_softmax(model.logits(model(tokens_BS, Pass(no_drop=True)).h_BSD), -1)

  texts = [request["prompt"] + answer.tokens for request, answer in zip(asked, got)]
  want_BSV = np.asarray(uncached(np.array([text + [0] * (32 - len(text)) for text in texts])))
  for want_SV, text, answer in zip(want_BSV, texts, got):
    chosen = [None, *(want_SV[i, token] for i, token in enumerate(text[1:]))]
    begin = len(text) - len(answer.tokens)
    assert answer.tokens == want_SV[begin - 1 : len(text) - 1].argmax(-1).tolist()
    assert answer.prompt_logprobs[0] is None
    np.testing.assert_allclose(answer.prompt_logprobs[1:], chosen[1:begin], rtol=1e-4, atol=1e-5)
    for entry, token, own, want_V in zip(
      answer.logprobs, answer.tokens, chosen[begin:], want_SV[begin - 1 :], strict=False
    ):
      assert entry.token == entry.top[0][0] == token
      assert [at for at, _ in entry.top] == want_V.argsort()[::-1][:3].tolist()
      np.testing.assert_allclose(entry.logprob, own, rtol=1e-4, atol=1e-5)
      assert entry.top[0][1] == pytest.approx(entry.logprob)
    assert len(answer.logprobs) == 6


def test_a_mesh_answers_the_same(mesh_of):
  """Two parts, each with its own slots and pages, and heads over two devices."""
  server = Server(make_model(), **SMALL, mesh=mesh_of(expert=2, tensor=2), pages=5)
  got = answers(server, [request for request, _ in mixed()])
  assert [answer.tokens for answer in got] == [want for _, want in mixed()]


def test_a_request_may_ask_for_its_prompt_alone():
  server = Server(make_model(), **SMALL)
  (answer,) = answers(server, [{"prompt": [1, 2, 3], "max_new_tokens": 0, "prompt_logprobs": True}])
  assert (answer.tokens, answer.finish) == ([], "length")
  assert all(value < 0 for value in answer.prompt_logprobs[1:])


def test_answers_end_at_end_tokens_and_stops():
  """A text, a list of ids and an end token that the model is known to write."""
  request, want = mixed()[1]
  decode = lambda tokens: "".join(f"<{token}>" for token in tokens)
  assert len(set(want[:6])) == 6
  end = want[5]
  server = Server(make_model(), decode=decode, eos_id=[end, 99], **SMALL)
  stops = [], [f"{want[1]}><{want[2]}>", "none"], [want[1:3]], [[end]]
  plain, text, ids, both = answers(server, [request | {"stop": stop} for stop in stops])
  assert (plain.finish, plain.tokens, plain.text) == ("end", want[:5], decode(want[:5]))
  assert (text.finish, text.tokens) == ("stop", want[:3])
  assert text.text == f"<{want[0]}><"
  assert (ids.finish, ids.tokens, ids.text) == ("stop", want[:3], f"<{want[0]}>")
  assert (both.finish, both.tokens, both.text) == ("stop", want[:6], decode(want[:5]))


def test_a_stop_over_several_tokens_and_within_one_is_found():
  decode = lambda tokens: "".join(chr(96 + token) * 2 for token in tokens)
  ending = Ending(Request([1], max_new_tokens=9, stop=["abb"]), frozenset(), decode)
  assert [ending.after([1, 3, 1, 2][:i]) for i in range(1, 5)] == ["", "", "", "stop"]
  assert ending.text([1, 3, 1, 2], "stop") == "aacca"
  # Tokens without text fill the window; the last token finds the stop nevertheless.
  quiet = lambda tokens: "".join("ab" if token == 1 else "" for token in tokens)
  for most in (20, 40):  # at the last token of the request and before it
    ending = Ending(Request([1], max_new_tokens=most, stop=["abab"]), frozenset(), quiet)
    tokens = [1, *[0] * 18, 1]
    assert not ending.after(tokens[:19])
    assert ending.after(tokens) == "stop"


def test_a_row_draws_what_it_would_draw_alone():
  rng = np.random.default_rng(0)
  logits = jnp.asarray(3 * rng.normal(size=(6, 50)), jnp.float32)
  hows = [Sampling(0.0), Sampling(1.0), Sampling(0.5, 3), Sampling(2.0, 0, 0.6),
          Sampling(1.5, 7, 0.9), Sampling(0.8, 99, 1e-9)]  # fmt: skip
  keys = [jax.random.key(seed) for seed in range(6)]
  of = lambda name, dtype: np.array([getattr(how, name) for how in hows], dtype)
  program = jax.jit(draw, static_argnums=2)
  for made in range(6):
    rows = Draws(
      of("temperature", np.float32),
      of("top_k", np.int32),
      of("top_p", np.float32),
      np.stack([jax.random.key_data(key) for key in keys]),
      np.full(6, made, np.int32),
    )
    want = [
      int(sample(logits[i : i + 1], how, jax.random.fold_in(keys[i], made))[0])
      for i, how in enumerate(hows)
    ]
    assert program(logits, rows, Needs(True, True)).token_B.tolist() == want


WRONG = {
  "prompt=[] must be a list of token ids": {"prompt": []},
  "prompt='a' must be a list of token ids": {"prompt": "a"},
  "prompt=array(5) must be a list of token ids": {"prompt": np.array(5)},
  "prompt has token 64, outside the vocabulary of 64": {"prompt": [64]},
  "max_new_tokens=0 must be a whole number from 1 to 32": {"max_new_tokens": 0},
  "max_new_tokens=True must be": {"max_new_tokens": True},
  "max_new_tokens=1000000000 must be": {"max_new_tokens": 10**9},
  "max_new_tokens=30 after a prompt of 3 tokens needs 33 positions": {"max_new_tokens": 30},
  "temperature=-1 must be a number from 0": {"temperature": -1},
  "temperature=nan must be": {"temperature": float("nan")},
  "temperature='hot' must be": {"temperature": "hot"},
  "top_p=0 must be a number above 0 to 1": {"top_p": 0},
  "top_k=1.5 must be a whole number": {"top_k": 1.5},
  "seed=9223372036854775808 must be": {"seed": 2**63},
  "logprobs=21 must be a whole number from 0 to 20": {"logprobs": 21},
  "prompt_logprobs=1 must be true or false": {"prompt_logprobs": 1},
  "stop=3 must be a list": {"stop": 3},
  "stop: one is empty": {"stop": [""]},
  "stop=3 must be a list of token ids": {"stop": [3]},
  "stop has token -1": {"stop": [[-1]]},
  "stop: one is longer than 1024": {"stop": ["a" * 1025]},
  "a text is not valid UTF-8": {"stop": ["\ud800"]},
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_request_is_refused_in_one_line(words):
  with pytest.raises(ConfigError) as caught:
    Request(**{"prompt": [1, 2, 3], "max_new_tokens": 4, **WRONG[words]}).checked(VOCAB, 32)
  assert words in str(caught.value)
  assert "\n" not in str(caught.value)


def test_numbers_of_numpy_do_not_overflow():
  """A position behind 300 tokens is no np.uint8; one in a sum would end the server's loop."""
  given = {"max_new_tokens": np.uint8(200), "seed": np.int8(-5), "logprobs": np.int16(3)}
  request = Request(list(range(64)) * 5, **given).checked(VOCAB, 1024)
  assert Job(0, request, Ending(request, frozenset(), None), 0.0).positions == 519
  for name, value in given.items():
    assert type(getattr(request, name)) is int
    assert getattr(request, name) == value


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"slots": 0}, "slots=0 must be at least 1"),
    ({"prefill_tokens": 0}, "prefill_tokens=0 must be at least 1"),
    ({"pages": 3}, "pages=3 of 8 tokens, fewer than the 4 of a text .*=32; use at least 4"),
    ({"cache_bytes": 1}, r"cache_bytes=1 \(.*\) holds 0 pages .*; use at least 8192 bytes"),
  ],
)
def test_a_wrong_server_is_refused_in_one_line(options, words):
  with pytest.raises(ConfigError, match=words):
    Server(make_model(), **SMALL | options)


def test_a_model_whose_tokens_take_experts_in_turn_is_not_served():
  """A token's experts would depend on its place in the batch, so on its neighbours."""
  model = make_model()
  compat = dataclasses.replace(model.router.compat, uniform=True)
  turns = nnx.merge(*nnx.split(model))  # the shared model stays as it is
  turns.router = dataclasses.replace(model.router, compat=compat)
  with pytest.raises(ConfigError, match=r"router.compat.uniform=True .* neighbours; serve a model"):
    Server(turns, **SMALL)


def test_pages_leave_room_for_the_caches_of_experts(monkeypatch):
  """Five pages fit beside the experts and a step's copies: all twelve pages, with two layers."""
  mesh = make_mesh(devices=jax.devices()[:1])
  model, options = offloaded(make_model(), mesh), {"mesh": mesh, **SMALL}
  options["offload"] = Offload.named("early", "early", cache_size=2)
  small = Server(model, pages=4, **options)
  experts = sum(x.nbytes for x in jax.tree.leaves(small._caches["experts"]))
  page = sum(x.nbytes for x in jax.tree.leaves(small._caches["stages"])) // 4
  assert experts > 0
  free = experts + int((5 + 12) * page / FREE_SHARE) + 1
  monkeypatch.setattr(server_module, "free_bytes", lambda device: free)
  assert Server(model, **options).pages == 5
  monkeypatch.setattr(server_module, "free_bytes", lambda device: free - 2 * page)
  with pytest.raises(ConfigError, match="free bytes leave room for 3 pages of 8 tokens, fewer"):
    Server(model, **options)


def test_a_text_to_stop_at_needs_a_tokenizer():
  server = Server(make_model(), **SMALL)
  with pytest.raises(ConfigError, match="stop: a text needs a tokenizer"):
    server.submit([1], max_new_tokens=1, stop=["a"])
  assert not server.busy


def test_the_times_of_the_newest_answers_are_kept():
  found = Statistics(2)
  for i in range(NEWEST):
    found.add(Answer(i, [1], "", "length", None, None, 2.0, 2.0, 0))
  assert "first token: median 2.000 s" in found.line()
  for i in range(NEWEST):
    found.add(Answer(i, [1], "", "length", None, None, 3.0, 3.0, 0))
  assert (len(found.first_seconds), found.answers) == (NEWEST, 2 * NEWEST)
  assert f"first token of the last {NEWEST}: median 3.000 s" in found.line()
  assert found.first_at(0.0) == 3.0


def test_the_page_that_was_freed_last_is_taken_first():
  free = FreePages(4)
  first = free.take(3)
  assert free.take(2) is None
  assert len(free) == 1
  held = list(first)
  free.free(first)
  assert not first
  assert free.take(3) == held


def test_pieces_fill_the_columns_of_their_programs():
  """70 tokens hold 3 pieces of 23, not only of 18: three prompts of 20 are read in one turn."""
  noting, shapes = noting_pieces()
  server = Server(
    make_model(context=80), slots=4, page_tokens=16, prefill_tokens=70, prepare=noting
  )
  answers(
    server, [{"prompt": text, "max_new_tokens": 1} for text in [[1] * 20, [2] * 20, [3] * 20]]
  )
  assert shapes == [((3, 23), [20, 20, 20])]


def test_programs_have_few_widths():
  assert widths(64, 3, 2, 4) == [16, 32, 64]
  assert widths(10, 3, 2, 4) == [5, 10]
  assert widths(2, 3, 2, 4) == [2]
  assert widths(100, 2, 4, 16) == [25, 100]
