"""The loop over requests: batches by number and by time, the same tokens as alone, and lines that
ask for nothing sensible."""

# Tests call with wrong types on purpose, and fakes stand for typed objects.

import dataclasses
import gc
import io
import json
import os
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from scmoe import serve
from scmoe.base.errors import ConfigError, DataError, StorageError
from scmoe.inference.offload.plan import OffloadRequest
from scmoe.inference.sampling import Sampling
from scmoe.pretrained.inference_files import parts, values_of, write_folder
from scmoe.pretrained.stream import flat
from scmoe.run.build import build, single_device, vocab_size
from scmoe.run.config_files import find_config, load_config
from scmoe.run.session import Session
from scmoe.serve import Request, Server, batches

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A small model with random weights."""
  jax.config.update("jax_disable_most_optimizations", True)
  run = load_config(find_config("quickstart"), "smoke")
  model = dataclasses.replace(run.model, context=64, init_std=0.3)
  run = dataclasses.replace(run, model=model)
  run = single_device(run.resolve(num_devices=1, vocab_size=vocab_size(run.data)))
  params, router = jax.jit(build(run).init)(jax.random.key(0))
  leaves = flat({"params": params, "router": router})
  path = tmp_path_factory.mktemp("model") / "a"
  write_folder(path, run, values_of(leaves, parts(run, "float32")), dtype="float32")
  yield str(path)
  jax.config.update("jax_disable_most_optimizations", False)


def alone(folder, prompt, new):
  return Session(model=folder).texts([prompt], GREEDY, max_new_tokens=new)[0]


@pytest.mark.parametrize("flags", [[], ["--offload=ring,early", "--expert_cache=3"]], ids=str)
def test_answers_are_those_of_single_requests(folder, tmp_path, capsys, flags):
  """Three batches of two, the last with a row to spare; one request asks for less."""
  asked = [{"prompt": "def "}, {"prompt": "import os", "id": "x", "max_new_tokens": 3},
           {"prompt": ""}, {"prompt": "é" * 9}, {"prompt": "a"}]  # fmt: skip
  (tmp_path / "ask").write_text("\n\n".join(json.dumps(one) for one in asked) + "\n")
  (tmp_path / "out").write_text('{"id": "before"}\n')
  serve.main(
    ["--model", folder, f"--input={tmp_path / 'ask'}", f"--output={tmp_path / 'out'}", "--batch=2",
     "--max_new_tokens=9", "--temperature=0", "--max_wait=30", *flags]
  )  # fmt: skip
  answers = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
  assert [answer["id"] for answer in answers] == ["before", 1, "x", 5, 7, 9]
  session = Session(model=folder)
  for one, answer in zip(asked, answers[1:]):
    new = one.get("max_new_tokens", 9)
    assert answer["text"] == session.texts([one["prompt"]], GREEDY, max_new_tokens=new)[0]
    assert answer["tokens"] <= new
  assert [answer["batch"] for answer in answers[1:]] == [2, 2, 2, 2, 1]
  assert "5 requests answered, 0 refused, in 3 batches" in capsys.readouterr().err


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
  '{"prompt": "a", "top_k": 3}': "'top_k' is unknown; a request has: prompt, id, max_new_tokens",
  '{"prompt": "a", "max_new_tokens": 9}': "max_new_tokens=9 must be a number from 1 to",
  '{"prompt": "a", "max_new_tokens": true}': "max_new_tokens=True must be a number",
  json.dumps({"prompt": "a" * 99}): "prompt has 100 tokens, model.context=64 leaves room for 56",
  '{"prompt": "\\ud800"}': "is not valid UTF-8",
  # Requests that nobody sends by accident.
  "[" * 100_000: "the line is not JSON",
  '{"a":' * 100_000: "the line is not JSON",
  "9" * 5000: "the line is not JSON",
  '{"prompt": "a", "id": NaN}': "NaN is not a JSON number",
  '{"prompt": "a", "max_new_tokens": Infinity}': "Infinity is not a JSON number",
  '{"prompt": "a", "max_new_tokens": -1}': "max_new_tokens=-1 must be a number",
  '{"prompt": "a", "max_new_tokens": 1e99}': "max_new_tokens=1e+99 must be a number",
  '{"prompt": "a", "max_new_tokens": [[1]]}': "max_new_tokens=[[1]] must be a number",
  '{"prompt": "a", "id": {"b": [1]}}': "id={'b': [1]} must be a text or a number",
  json.dumps({"prompt": "a", "id": "x" * 300}): "id is longer than 256 characters",
  json.dumps({"prompt": "a", "y" * 10_000: 1}): "y' is unknown; a request has",
  "\0": "the line is not JSON",
  '"' + "a" * 2**24 + '"': "the line is longer than 16,777,216 characters",
}


def test_a_wrong_line_is_the_answer_to_itself_alone(folder, monkeypatch, capsys):
  lines = [*WRONG, json.dumps({"prompt": "def ", "id": 0})]
  monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
  argv = ["--model", folder, "--max_new_tokens=8", "--temperature=0", "--max_wait=30"]
  serve.main([*argv, "--batch=20"])
  out, err = capsys.readouterr()
  answers = [json.loads(line) for line in out.splitlines()]
  for number, (answer, words) in enumerate(zip(answers, WRONG.values()), 1):
    assert answer["id"] == number
    assert words in answer["error"]
  assert answers[-1]["text"] == alone(folder, "def ", 8)
  assert f"1 requests answered, {len(WRONG)} refused" in err


def test_a_line_without_an_end_is_read_in_pieces_and_the_next_one_is_answered(monkeypatch):
  monkeypatch.setattr(serve, "MOST_LINE", 100)
  text = io.StringIO("a" * 1000 + "\n" + "b\n" + "c" * 100 + "\n" + "d" * 1000)
  lines = [request.line for found in batches(text, 9, 1.0) for request in found]
  assert [len(line.rstrip()) for line in lines] == [101, 1, 100, 101]


def test_an_id_and_a_terminal_that_cannot_be_written_end_nothing(folder, monkeypatch, capsys):
  """Half of a character as an id, and answers for a terminal of ASCII."""
  out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
  lines = '{"prompt": "a", "id": "\\ud800"}\n{"prompt": "é", "id": "é"}\n'
  monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
  monkeypatch.setattr(sys, "stdout", out)
  serve.main(["--model", folder, "--max_new_tokens=2", "--temperature=0", "--max_wait=1"])
  answers = [json.loads(line) for line in out.buffer.getvalue().decode("utf-8").splitlines()]
  assert [answer["id"] for answer in answers] == ["?", "é"]


def test_a_full_disk_is_one_line(folder, monkeypatch):
  monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "a"}\n'))
  argv = ["--model", folder, "--max_new_tokens=2", "--max_wait=0", "--output=/dev/full"]
  with pytest.raises(StorageError, match="--output='/dev/full' cannot be written: No space left"):
    serve.main(argv)


def test_a_batch_is_full_or_its_time_is_over():
  """Seven requests at once, then one that comes later than anybody waits."""
  gate = threading.Event()

  def lines():
    yield from (f"{i}\n" for i in range(7))
    gate.wait(30)
    yield "late\n"

  found = batches(lines(), 3, 0.2)
  assert [[r.line for r in next(found)] for _ in range(2)] == [
    ["0\n", "1\n", "2\n"],
    ["3\n", "4\n", "5\n"],
  ]
  begin = time.perf_counter()
  assert [r.line for r in next(found)] == ["6\n"]
  assert time.perf_counter() - begin >= 0.2
  gate.set()
  assert [[r.line for r in batch] for batch in found] == [["late\n"]]
  for thread in threading.enumerate():
    if thread.name == "requests":
      thread.join(10)
  assert "requests" not in {thread.name for thread in threading.enumerate()}


def test_what_cannot_be_read_ends_the_loop():
  def lines():
    yield "a\n"
    raise OSError("the disk is gone")

  found = batches(lines(), 1, 0.0)
  assert len(next(found)) == 1
  with pytest.raises(DataError, match="--input cannot be read: the disk is gone"):
    next(found)


def test_rows_end_when_they_have_what_they_asked_for():
  """A session that counts: the loop does not go on for rows that nobody asked for."""

  class Counting:
    asked = 0

    class tokenizer:
      decode = staticmethod(lambda tokens: " ".join(map(str, tokens)))

    class model:
      class config:
        context = 100

    def encode(self, prompt):
      return list(range(len(prompt) + 1))

    def tokens(self, prompts, sampling, **options):
      assert len(prompts) == 3
      for i in range(20):
        self.asked += 1
        yield [[i]] * 3

  session = Counting()
  server = Server(session, GREEDY, 20, rows=3)  # pyright: ignore
  lines = ['{"prompt": "a", "max_new_tokens": 2}', '{"prompt": "abc", "max_new_tokens": 4}']
  answers = server.answer([Request(line, i, 0.0) for i, line in enumerate(lines)])
  assert [answer["text"] for answer in answers] == ["0 1", "0 1 2 3"]
  assert session.asked == 4


@pytest.mark.parametrize(
  ("argv", "error", "words"),
  [
    (["--batch=0"], ConfigError, "--batch=0 must be at least 1"),
    (["--max_wait=-1"], ConfigError, "--max_wait=-1.0 must be at least 0"),
    (["--input=/nowhere/a"], DataError, "--input='/nowhere/a' cannot be opened"),
    (["--temperature=-1"], ConfigError, "temperature"),
    (["--batch=1000000000"], ConfigError, "--batch=1000000000 must be at least 1, and at most"),
    (["--max_wait=1e300"], ConfigError, r"--max_wait=1e\+300 must be at least 0 seconds, and at"),
    (["--max_new_tokens=99"], ConfigError, "--max_new_tokens=99 leaves no room for a prompt in"),
    (["--input=a", "--output=a"], ConfigError, "--input and --output are both 'a'"),
    (["--input=."], DataError, "--input='.' cannot be opened"),
    (["--output=/nowhere/a"], StorageError, "--output='/nowhere/a' cannot be opened"),
  ],
)
def test_bad_flags_are_one_line(folder, argv, error, words):
  with pytest.raises(error, match=words):
    serve.main(["--model", folder, *argv])
