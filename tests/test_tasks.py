"""Benchmarks by lm-evaluation-harness: tasks of one's own, with local data and without a network.

What needs the package is run where it is installed (`pip install .[eval]`); it is too large for the
environment of all tests.
"""

import importlib.util
import json
import math
import sys

import jax
import pytest
from leaving import write_run

from scmoe import evaluate
from scmoe.base.errors import ConfigError, DataError
from scmoe.inference.sampling import Sampling
from scmoe.inference.scoring import Continuation, score
from scmoe.run.build import vocab_size
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.run.opened import open_model, open_run
from scmoe.run.session import Session

NEEDED = "lm_eval is not installed: pip install .[eval]"
with_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason=NEEDED)

COMMON = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/{name}.jsonl
test_split: test
metadata:
  version: 1
"""
TASKS = {
  "local_choice": """
task: local_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
""",
  "local_text": """
task: local_text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
""",
  "local_writing": """
task: local_writing
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{target}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
""",
}
CHOICES = [
  {"question": "import", "choices": [" os", " zebra crossing", "."], "answer": 0},
  {"question": "for i in ", "choices": ["range(3):", "é"], "answer": 1},
  {"question": "", "choices": ["def f():", "qqqq"], "answer": 0},
]
TEXTS = [{"text": "def f(x):\n  return x\n" * 9}, {"text": "one line"}, {"text": "é" * 40}]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run on bytes with random weights."""
  folder = tmp_path_factory.mktemp("run") / "a"
  jax.config.update("jax_disable_most_optimizations", True)
  own = load_config(find_config("quickstart"), "smoke")
  for name, value in (("mesh.data", "1"), ("model.context", "64")):
    own = with_field(own, name, value)
  write_run(own.resolve(num_devices=1, vocab_size=vocab_size(own.data)), folder)
  yield str(folder)
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def asked(tmp_path, monkeypatch):
  """A folder of tasks; what would look for a network fails."""
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
  rows = {"local_choice": CHOICES, "local_text": TEXTS}
  rows["local_writing"] = [{"text": "import ", "target": "os"}, {"text": "x" * 99, "target": ""}]
  for name, text in TASKS.items():
    common = COMMON.format(folder=tmp_path, name=name)
    (tmp_path / f"{name}.yaml").write_text(text + common)
    lines = "".join(json.dumps(row) + "\n" for row in rows[name])
    (tmp_path / f"{name}.jsonl").write_text(lines)
  return tmp_path


def opened(workdir):
  stored = open_run(workdir, None)
  return open_model(stored.run, workdir, stored.step)


def by_hand(workdir, context, continuation):
  """Log-likelihood of a continuation in bytes, one request at a time."""
  found = opened(workdir)
  tokens = [256, *context.encode(), *continuation.encode()]
  asks = Continuation(tokens, len(continuation.encode()))
  length = found.run.data.seq_len
  return score(found.model, [asks], length=length, batch_size=1, router=found.router)[0]


@with_harness
def test_local_tasks_from_the_command_line(run, asked, capsys):
  """All three kinds of question; every figure computed by hand from single requests."""
  argv = ["--workdir", run, "--task_folder", str(asked), "--json", str(asked / "found.json")]
  evaluate.main([*argv, "--tasks", ",".join(TASKS)])
  out = capsys.readouterr().out
  assert all(name in out for name in TASKS)
  found = json.loads((asked / "found.json").read_text())["results"]
  right = 0
  for row in CHOICES:
    logs = [by_hand(run, row["question"], choice).log_likelihood for choice in row["choices"]]
    right += logs.index(max(logs)) == row["answer"]
  assert found["local_choice"]["acc,none"] == pytest.approx(right / len(CHOICES))
  nats = -sum(by_hand(run, "", row["text"]).log_likelihood for row in TEXTS)
  size = sum(len(row["text"].encode()) for row in TEXTS)
  bits = found["local_text"]["bits_per_byte,none"]
  assert bits == pytest.approx(nats / math.log(2) / size, rel=1e-4)
  assert 0 <= found["local_writing"]["exact_match,none"] <= 1
  evaluate.main([*argv, "--tasks", "local_text", "--limit", "1", "--train.batch_size=3"])
  one = json.loads((asked / "found.json").read_text())["results"]["local_text"]
  first = -by_hand(run, "", TEXTS[0]["text"]).log_likelihood
  bits = first / math.log(2) / len(TEXTS[0]["text"].encode())
  assert one["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)


@with_harness
def test_generation_stops_where_it_is_asked_to(run):
  from types import SimpleNamespace

  from scmoe.run.tasks import ScmoeLM

  model = ScmoeLM(run, batch_size=2)
  request = lambda text, **kwargs: SimpleNamespace(args=(text, kwargs))
  plain = Session(run).texts(["import ", "def"], Sampling(temperature=0.0), max_new_tokens=20)
  asked = [request("import ", max_gen_toks=20), request("def", max_gen_toks=20)]
  assert model.generate_until(asked) == plain
  stop = plain[1][3:5]
  stopped = model.generate_until(
    [request("def", until=[stop, ""], max_gen_toks=20), request("import ", max_gen_toks=5)]
  )
  assert stopped == [plain[1][: plain[1].index(stop)], plain[0][:5]]
  drawn = {"do_sample": True, "temperature": 0.7, "top_k": 5, "max_gen_toks": 8}
  again = [model.generate_until([request("a", **drawn, seed=seed)])[0] for seed in (1, 1, 2)]
  assert again[0] == again[1] != again[2]
  with pytest.raises(ConfigError, match="generation_kwargs 'num_beams' of a task is unknown"):
    model.generate_until([request("a", num_beams=3)])
  with pytest.raises(ConfigError, match=r"max_gen_toks=999 .* give --gen_kwargs=max_gen_toks=249"):
    model.generate_until([request("a", max_gen_toks=999)])


@with_harness
def test_the_harness_finds_the_model_by_its_name(run, asked):
  import lm_eval
  from lm_eval.tasks import TaskManager

  import scmoe.run.tasks  # noqa: F401 - registers it

  found = lm_eval.simple_evaluate(
    "scmoe",
    f"workdir={run},max_length=16",
    tasks=["local_text"],
    batch_size=2,
    task_manager=TaskManager(include_path=str(asked), include_defaults=False),
  )
  assert found["config"]["max_length"] == 16
  shorter = found["results"]["local_text"]["bits_per_byte,none"]
  assert shorter > 0


@with_harness
def test_what_there_is_not(run, asked, monkeypatch):
  """One line each, with what would do."""
  from scmoe.run.tasks import evaluate_tasks

  model, own = opened(run), {"folder": str(asked)}
  with pytest.raises(
    ConfigError, match=r"'local_txt' is not in lm_eval .* did you mean local_text"
  ):
    evaluate_tasks(model, ["local_txt"], **own)
  (asked / "local_text.jsonl").unlink()
  with pytest.raises(DataError, match=r"local_text: cannot be loaded .* files of this machine"):
    evaluate_tasks(model, ["local_text"], **own)
  (asked / "local_far.yaml").write_text(
    TASKS["local_text"].replace("local_text", "local_far")
    + "dataset_path: nobody-at-all/nothing\ntest_split: test\n"
  )
  with pytest.raises(DataError, match="local_far: cannot be loaded"):
    evaluate_tasks(model, ["local_far"], **own)


def test_without_the_package_one_line_says_so(run, monkeypatch):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  with pytest.raises(ConfigError, match="--tasks needs the package 'lm_eval': pip install lm_eval"):
    evaluate.main(["--workdir", run, "--tasks", "piqa"])


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (["--limit=3"], "--limit has no effect without --tasks; name some"),
    (["--tasks=piqa", "--data.path=my.txt"], "--data.path has no effect with --tasks"),
    (["--tasks=piqa", "--max_batches=2"], "--max_batches has no effect with --tasks"),
    (["--tasks=piqa", "--dispatch.capacity_factor=2"], "drop no token; leave one of them out"),
  ],
)
def test_flags_that_mean_nothing_together(argv, words):
  with pytest.raises(ConfigError, match=words):
    evaluate.main(["--workdir=none", *argv])
