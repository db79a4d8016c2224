"""The loop over requests: lines in and lines out, the same tokens as alone, and lines that ask for
nothing sensible."""

# Tests call with wrong types on purpose, and fakes stand for typed objects.

import dataclasses
import functools
import gc
import io
import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from covering import night
from drawn import drawn_init

from scmoe import serve
from scmoe.base.errors import ConfigError, DataError, StorageError
from scmoe.inference.offload.plan import OffloadRequest
from scmoe.inference.sampling import Sampling
from scmoe.inference.serving.jobs import Statistics
from scmoe.inference.serving.requests import Answer
from scmoe.pretrained.inference_files import parts, values_of, write_folder
from scmoe.pretrained.stream import flat
from scmoe.run.build import build, vocab_size
from scmoe.run.config_files import find_config, load_config
from scmoe.run.placement import single_device
from scmoe.run.session import Session
from scmoe.serve import Lines

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A small model with random weights."""
  jax.config.update("jax_disable_most_optimizations", True)
  run = load_config(find_config("quickstart"), "smoke")
  model = dataclasses.replace(run.model, context=64, init_std=0.3)
  run = dataclasses.replace(run, model=model)
  run = single_device(run.resolve(num_devices=1, vocab_size=vocab_size(run.data)))
  params, router = drawn_init(build(run), 0.3)(None)
  leaves = flat({"params": params, "router": router})
  path = tmp_path_factory.mktemp("model") / "a"
  write_folder(path, run, values_of(leaves, parts(run, "float32")), dtype="float32")
  yield str(path)
  jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def session_of(folder):
  """One session for all that is asked of the model alone: its programs are compiled once."""
  return Session(model=folder)


def alone(folder, prompt, new):
  return session_of(folder).texts([prompt], GREEDY, max_new_tokens=new)[0]


@pytest.mark.parametrize(
  "flags", [[], night(["--offload=ring,early", "--expert_cache=3"])], ids=str
)
def test_answers_are_those_of_single_requests(folder, tmp_path, capsys, flags):
  """Five requests in two slots; one asks for less, and empty lines lie between."""
  asked = [{"prompt": "def "}, {"prompt": "import os", "id": "x", "max_new_tokens": 3},
           {"prompt": ""}, {"prompt": "é" * 9}, {"prompt": "a"}]  # fmt: skip
  (tmp_path / "ask").write_text("\n\n".join(json.dumps(one) for one in asked) + "\n")
  (tmp_path / "out").write_text('{"id": "before"}\n')
  serve.main(
    ["--model", folder, f"--input={tmp_path / 'ask'}", f"--output={tmp_path / 'out'}", "--slots=2",
     "--max_new_tokens=9", "--temperature=0", "--in_order", "--warm=flags", *flags]
  )  # fmt: skip
  answers = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
  assert [answer["id"] for answer in answers] == ["before", 1, "x", 5, 7, 9]
  for one, answer in zip(asked, answers[1:]):
    new = one.get("max_new_tokens", 9)
    assert answer["text"] == alone(folder, one["prompt"], new)
    assert answer["tokens"] <= new
    assert answer["finish"] == ("length" if answer["tokens"] == new else "end")
  err = capsys.readouterr().err
  assert re.search(r"^programs     3 compiled and run once in [\d.]+ s$", err, re.M)
  assert "5 requests answered" in err
  assert "of 2 slots filled" in err
  assert err.endswith("0 preemptions; 0 refused\n")


def test_answers_come_as_they_end_and_a_request_says_how_it_is_answered(
  folder, monkeypatch, capsys
):
  """The third of four ends first; the fields of a request are stronger than the flags."""
  asked = [
    {"prompt": "a", "id": "long"},
    {"prompt": "a", "id": "drawn", "temperature": 2, "top_k": 40, "top_p": 0.9, "seed": 3},
    {"prompt": [256, 97], "id": "short", "max_new_tokens": 1, "logprobs": 2},
    {"prompt": "ab", "id": "scored", "max_new_tokens": 0, "prompt_logprobs": True},
  ]
  monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(map(json.dumps, asked))))
  argv = ["--model", folder, "--max_new_tokens=20", "--temperature=0", "--slots=4", "--warm=all"]
  serve.main(argv)
  out, err = capsys.readouterr()
  assert re.search(r"^programs     5 compiled and run once in [\d.]+ s$", err, re.M)
  lines = [json.loads(line) for line in out.splitlines()]
  answers = {answer["id"]: answer for answer in lines}
  assert {lines[0]["id"], lines[1]["id"]} == {"short", "scored"}
  sampled = Sampling(2, 40, 0.9)
  drawn = session_of(folder).texts(["a"], sampled, max_new_tokens=20, seed=3)[0]
  assert answers["drawn"]["text"] == drawn
  assert answers["long"]["text"] == alone(folder, "a", 20)
  (entry,) = answers["short"]["logprobs"]
  assert entry["text"] == answers["short"]["text"] == alone(folder, "a", 1)
  assert entry["top"][0] == [entry["token"], entry["logprob"]]
  assert len(entry["top"]) == 2
  scores = answers["scored"]["prompt_logprobs"]
  assert scores[0] is None
  assert len(scores) == 3
  assert max(scores[1:]) < 0


def test_a_stop_ends_an_answer(folder, monkeypatch, capsys):
  text = alone(folder, "def ", 12)
  ask = {"prompt": "def ", "max_new_tokens": 12, "stop": text[3:5]}
  monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(ask)))
  serve.main(["--model", folder, "--temperature=0", "--slots=2", "--max_new_tokens=9"])
  (answer,) = map(json.loads, capsys.readouterr().out.splitlines())
  assert answer["text"] == text[: text.index(text[3:5])]
  assert answer["finish"] == "stop"


def test_an_interrupted_generation_leaves_nothing_behind(folder):
  """No thread, no open file of the model and no pinned memory, once its session is gone."""
  pinned = lambda: [x for x in jax.live_arrays() if x.sharding.memory_kind == "pinned_host"]
  opened = lambda: [
    link for link in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if folder in link
  ]
  gc.collect()
  threads, before = set(threading.enumerate()), len(pinned())
  session = Session(model=folder, request=OffloadRequest("ring,early", expert_cache=2))
  tokens = session.tokens([session.encode("def ")], GREEDY, max_new_tokens=30, chunk=2)
  next(tokens), next(tokens)
  assert len(pinned()) > before
  tokens.close()  # as an interrupt does
  del session, tokens
  gc.collect()
  assert len(pinned()) == before
  assert set(threading.enumerate()) <= threads
  assert not opened()


WRONG = {
  "def ": "the line is not JSON",
  "[1]": "the line is not an object with a text as prompt",
  '{"prompt": 3}': "the line is not an object with a text as prompt",
  '{"prompt": "a", "top_n": 3}': "'top_n' is unknown; a request has: prompt, id, max_new_tokens",
  '{"prompt": "a", "max_new_tokens": 99}': "max_new_tokens=99 must be a whole number from 1 to 64",
  '{"prompt": "a", "max_new_tokens": true}': "max_new_tokens=True must be a whole number",
  '{"prompt": []}': "prompt=[] must be a list of token ids, at least one",
  '{"prompt": [1, "a"]}': "prompt=[1, 'a'] must be a list of token ids",
  '{"prompt": "a", "temperature": 1e999}': "temperature=inf must be a number from 0 to 1e+06",
  '{"prompt": "a", "stop": [""]}': "stop: one is empty",
  '{"prompt": "a", "logprobs": 99}': "logprobs=99 must be a whole number from 0 to 20",
  json.dumps({"prompt": "a" * 99}): "after a prompt of 100 tokens needs 108 positions, more than",
  '{"prompt": "\\ud800"}': "prompt='\\ud800' is not valid UTF-8",
  # Requests that nobody sends by accident.
  "[" * 100_000: "the line is not JSON",
  '{"a":' * 100_000: "the line is not JSON",
  "9" * 5000: "the line is not JSON",
  '{"prompt": "a", "id": NaN}': "NaN is not a JSON number",
  '{"prompt": "a", "max_new_tokens": Infinity}': "Infinity is not a JSON number",
  '{"prompt": "a", "max_new_tokens": -1}': "max_new_tokens=-1 must be a whole number",
  '{"prompt": "a", "max_new_tokens": 1e99}': "max_new_tokens=1e+99 must be",
  '{"prompt": "a", "max_new_tokens": [[1]]}': "max_new_tokens=[[1]] must be",
  '{"prompt": "a", "id": {"b": [1]}}': "id={'b': [1]} must be a text or a finite number",
  '{"prompt": "a", "id": 1e999}': "id=inf must be a text or a finite number",
  '{"prompt": "a", "id": true}': "id=True must be a text or a finite number",
  '{"prompt": "a", "prompt": "b"}': "'prompt' is given twice",
  json.dumps({"prompt": "a", "id": "x" * 300}): "id is longer than 256 characters",
  json.dumps({"prompt": "a", "y" * 10_000: 1}): "y' is unknown; a request has",
  "\0": "the line is not JSON",
  '"' + "a" * 2**24 + '"': "the line is longer than 16,777,216 characters",
}


def test_a_wrong_line_is_the_answer_to_itself_alone(folder, monkeypatch, capsys):
  lines = [*WRONG, json.dumps({"prompt": "def ", "id": 0})]
  monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
  argv = ["--model", folder, "--max_new_tokens=8", "--temperature=0", "--in_order"]
  serve.main([*argv, "--slots=2"])
  out, err = capsys.readouterr()
  answers = [json.loads(line) for line in out.splitlines()]
  for number, (answer, words) in enumerate(zip(answers, WRONG.values()), 1):
    assert answer["id"] == number
    assert words in answer["error"]
  assert answers[-1]["text"] == alone(folder, "def ", 8)
  assert "1 requests answered" in err
  assert f"{len(WRONG)} refused" in err


def test_a_line_without_an_end_is_read_in_pieces_and_the_next_one_is_answered(monkeypatch):
  monkeypatch.setattr(serve, "MOST_LINE", 100)
  text = io.StringIO("a" * 1000 + "\n" + "b\n" + "c" * 100 + "\n" + "d" * 1000)
  found = taken(Lines(text, 2))
  lines = [line for _, line in found]
  assert [number for number, _ in found] == [1, 2, 3, 4]
  assert [len(line.rstrip()) for line in lines] == [101, 1, 100, 101]


def test_an_id_and_a_terminal_that_cannot_be_written_end_nothing(folder, monkeypatch, capsys):
  """Half of a character as an id, and answers for a terminal of ASCII."""
  out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
  lines = '{"prompt": "a", "id": "\\ud800"}\n{"prompt": "é", "id": "é"}\n'
  monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
  monkeypatch.setattr(sys, "stdout", out)
  serve.main(["--model", folder, "--max_new_tokens=2", "--temperature=0", "--slots=2"])
  answers = [json.loads(line) for line in out.buffer.getvalue().decode("utf-8").splitlines()]
  assert [answer["id"] for answer in answers] == ["?", "é"]


def test_a_full_disk_is_one_line(folder, monkeypatch):
  monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "a"}\n'))
  argv = ["--model", folder, "--max_new_tokens=2", "--slots=2", "--output=/dev/full"]
  with pytest.raises(StorageError, match="--output='/dev/full' cannot be written: No space left"):
    serve.main(argv)


def test_an_input_that_stays_open_does_not_keep_the_command(folder, tmp_path):
  """The thread that waits for the pipe's next line holds the lock that closing the pipe takes."""
  os.mkfifo(tmp_path / "ask")
  writer = os.open(tmp_path / "ask", os.O_RDWR)
  rescue = threading.Timer(60, os.write, (writer, b"\n"))
  rescue.start()
  os.write(writer, b'{"prompt": "a"}\n')
  argv = ["--model", folder, "--max_new_tokens=2", "--slots=2", "--output=/dev/full"]
  try:
    with pytest.raises(StorageError, match="No space left"):
      serve.main([*argv, f"--input={tmp_path / 'ask'}"])
    assert rescue.is_alive(), "it ended only when another line came"
  finally:
    rescue.cancel()
    os.close(writer)


def test_an_answer_that_was_cut_off_stays_a_line_of_its_own(folder, tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "a"}\n'))
  (tmp_path / "out").write_text('{"id": 1}\n{"id": 2, "te')
  serve.main(["--model", folder, "--max_new_tokens=2", "--slots=2", f"--output={tmp_path / 'out'}"])
  lines = (tmp_path / "out").read_text().splitlines()
  assert lines[:2] == ['{"id": 1}', '{"id": 2, "te']
  assert json.loads(lines[2])["id"] == 1


def taken(lines):
  """All lines, each waited for."""
  found = []
  while (line := lines.take(wait=True)) is not None:
    found.append(line)
  assert lines.ended
  return found


def test_a_line_that_has_not_come_is_not_waited_for():
  gate = threading.Event()

  def given():
    gate.wait(30)
    yield "late\n"

  lines = Lines(given(), 1)
  assert lines.take(wait=False) is None
  assert not lines.ended
  gate.set()
  assert taken(lines) == [(1, "late\n")]


class OneSlow:
  """A server that answers request 0 once no other one has come for 50 turns."""

  def __init__(self):
    self.statistics = Statistics(2)
    self._asked, self._idle, self._count = set(), 0, 0

  @property
  def busy(self):
    return bool(self._asked)

  @property
  def waiting(self):
    return max(0, len(self._asked) - 2)

  def submit(self, prompt, **options):
    self._asked.add(self._count)
    self._count += 1
    return self._count - 1

  def step(self):
    ended = self._asked - {0}
    if not ended:
      self._idle += 1
      time.sleep(0.002)
      ended = {0} if self._idle == 50 else set()
    self._asked -= ended
    return [Answer(i, [], "", "length", None, None, 1.0, 1.0, 0) for i in sorted(ended)]


def test_no_line_is_read_while_many_answers_wait_for_an_older_one(monkeypatch):
  """Answers in order: 200 requests, of which the first is slow, and at most 5 answers are held."""
  monkeypatch.setattr(serve, "MOST_HELD", 5)
  session = SimpleNamespace(encode=lambda text: [1], tokenizer=SimpleNamespace(decode=None))
  desk = serve.Desk(session, OneSlow(), {}, in_order=True)
  given = [f'{{"prompt": "a", "id": {i}}}' for i in range(200)]
  groups = [[answer["id"] for answer in answers] for answers in desk.answers(given)]
  assert [one for group in groups for one in group] == list(range(200))
  # Four answers are held, then a turn ends the five beside the slow one: two in slots, four wait.
  assert 5 < len(groups[0]) <= 1 + 4 + 5


@pytest.mark.parametrize(
  ("error", "kind", "words"),
  [
    (OSError("the disk is gone"), DataError, "--input cannot be read: the disk is gone"),
    (ValueError("not a line"), ValueError, "not a line"),
  ],
)
def test_what_cannot_be_read_ends_the_loop(error, kind, words):
  def given():
    yield "a\n"
    raise error

  lines = Lines(given(), 1)
  assert lines.take(wait=True) == (1, "a\n")
  with pytest.raises(kind, match=words):
    lines.take(wait=True)


@pytest.mark.parametrize(("memory", "tokens"), [(0, 160), (20, 20), (2**30, 2 * 72)], ids=str)
def test_the_planner_reserves_what_the_pages_need(folder, monkeypatch, memory, tokens):
  """Two slots of 64 positions, each of which fills 6 pages of 12 tokens; `memory` in tokens.

  Without it 0.9 of 160 hold one text and the copies in a step: half of all pages, with 4 layers.
  """
  seen = {}
  made = lambda **options: seen.update(options) or SimpleNamespace(plan=[])
  monkeypatch.setattr(serve, "Session", made)
  monkeypatch.setattr(serve, "cached_bytes", lambda *model: 1)
  values, _ = serve.parse([f"--model={folder}", "--slots=2", "--page_tokens=12"], serve.FLAGS)
  serve._session(values, memory)
  assert seen["rows"] * seen["longest"] == tokens


@pytest.mark.parametrize(
  ("argv", "error", "words"),
  [
    (["--slots=0"], ConfigError, "--slots=0 must be at least 1"),
    (["--prefill_tokens=0"], ConfigError, "--prefill_tokens=0 must be at least 1"),
    (["--page_tokens=0"], ConfigError, "--page_tokens=0 must be at least 1"),
    (["--cache_memory=1KiB"], ConfigError, r"--cache_memory of scmoe.serve\) holds 0 pages of 64"),
    (["--warm=fast"], ConfigError, "--warm='fast' is unknown; did you mean"),
    (["--cache_memory=much"], ConfigError, "--cache_memory='much' is not a size"),
    ([f"--seed={2**63}"], ConfigError, "is too large; the most is"),
    (["--input=/nowhere/a"], DataError, "--input='/nowhere/a' cannot be opened"),
    (["--temperature=-1"], ConfigError, "temperature"),
    (["--slots=1000000000"], ConfigError, "--slots=1000000000 must be at least 1, and at most"),
    (["--max_new_tokens=99"], ConfigError, "--max_new_tokens=99 leaves no room for a prompt in"),
    (["--input=a", "--output=a"], ConfigError, "--input and --output are both 'a'"),
    (["--input=."], DataError, "--input='.' cannot be opened"),
    (["--output=/nowhere/a"], StorageError, "--output='/nowhere/a' cannot be opened"),
  ],
)
def test_bad_flags_are_one_line(folder, argv, error, words):
  with pytest.raises(error, match=words):
    serve.main(["--model", folder, *argv])
