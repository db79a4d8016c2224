"""Typical mistakes: one line that says what to do, and doing it works."""

# Tests call with wrong types on purpose, and fakes stand for typed objects.

import dataclasses
import functools
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from compiler import flags_of_one_device

from scmoe import convert, evaluate, generate, profile, serve, train
from scmoe.base.errors import ScmoeError
from scmoe.run import summary
from scmoe.run.config_files import find_config, load_config
from scmoe.run.dry_run import dry_run as run_dry
from scmoe.run.fields import with_field
from scmoe.run.text import Text

ROOT = Path(__file__).resolve().parent.parent


def field(*texts):
  return [f"--config.{text}" for text in texts]


# What was typed beside --smoke, what the line says, and what it says to type instead. On the eight
# simulated devices of the tests; my.txt, rows.jsonl are there.
MISTAKES = {
  "text that is not read": (
    field("data.path=my.txt", "data.source=stdlib"),
    "data.path='my.txt' has no effect: data.source='stdlib' reads no path; set data.source=auto",
    field("data.path=my.txt", "data.source=auto"),
  ),
  "text under a config that has another source": (
    field("data.path=my.txt"),
    "data.source=auto",
    field("data.path=my.txt", "data.source=auto"),
  ),
  "experts that the wiring does not visit": (
    field("model.wiring=top2", "model.top_k=4"),
    "model.top_k=4 has no effect: model.wiring='top2' gives a token 2 experts per gating; "
    "set model.wiring=topk",
    field("model.wiring=topk", "model.top_k=4"),
  ),
  "a router without experts": (
    field("model.wiring=dense", "router.bias=sign"),
    "router.bias='sign' has no effect: model.wiring='dense' has no routed experts; set "
    "model.wiring, e.g. scmoe_pos2",
    field("model.wiring=scmoe_pos2", "router.bias=sign"),
  ),
  "a shared expert that is not there": (
    field("model.wiring=top2", "model.mix=cg2"),
    "has no shared expert; set model.wiring=shared_expert",
    field("model.wiring=shared_expert", "model.mix=cg2"),
  ),
  "the momentum of an optimizer that is not used": (
    field("optimizer.muon_beta=0.9"),
    "optimizer.muon_beta=0.9 has no effect: optimizer.name='adamw' has no Muon; set "
    "optimizer.name=muon",
    field("optimizer.muon_beta=0.9", "optimizer.name=muon"),
  ),
  "a next pair of which nothing begins": (
    field("model.moe_every=2", "overlap.ahead=False"),
    "overlap.ahead=False has no effect: model.wiring='scmoe_pos2' with model.moe_every=2 begins "
    "nothing of the next pair; set model.moe_every=1 with model.wiring=scmoe_pos2 or scmoe_pos3",
    field("model.moe_every=1", "overlap.ahead=False"),
  ),
  "the rate of a bias that does not move": (
    field("router.bias_rate=0.1"),
    "set router.bias=sign",
    field("router.bias_rate=0.1", "router.bias=sign"),
  ),
  "a capacity without a buffer": (
    field("dispatch.transport=dropless", "dispatch.capacity_factor=1"),
    "set dispatch.transport=capacity",
    field("dispatch.transport=capacity", "dispatch.capacity_factor=1"),
  ),
  "a decay without a phase": (
    field("optimizer.decay_fraction=0.5"),
    "set optimizer.schedule=wsd",
    field("optimizer.decay_fraction=0.5", "optimizer.schedule=wsd"),
  ),
  "blocks of no kernel": (
    field("train.tune=num_sms=0,124", "model.ffn.backend=xla"),
    "leave it out, or set model.ffn.backend=auto",
    field("train.tune=num_sms=0,124"),
  ),
  "puts between hosts": (
    field("dispatch.transport=put", "dispatch.nodes=2", "mesh.expert=2"),
    "use dispatch.transport=dropless",
    field("dispatch.transport=dropless", "dispatch.nodes=2", "mesh.expert=2"),
  ),
  "steps of no trace": (
    field("train.profile_steps=1"),
    "set train.profile_step, e.g. 2",
    field("train.profile_steps=1", "train.profile_step=2"),
  ),
  "a vocabulary of bytes": (
    field("data.vocab_size=300"),
    "set data.tokenizer=bpe",
    field("data.vocab_size=300", "data.tokenizer=bpe", "data.limit_bytes=20000"),
  ),
  "a column of no rows": (
    field("data.field=body"),
    "give a data.path that ends in .jsonl",
    field("data.field=body", "data.path=rows.jsonl", "data.source=auto"),
  ),
  "rows without that column": (
    field("data.path=rows.jsonl", "data.source=auto", "data.max_bad_rows=0"),
    "no field data.field='text'; it has: body",
    field("data.path=rows.jsonl", "data.source=auto", "data.field=body"),
  ),
  "a balancing loss without its noise": (
    field("router.balance=load_importance"),
    "set router.noise > 0 (1 is usual)",
    field("router.balance=load_importance", "router.noise=1"),
  ),
  "a field without its prefix": (
    ["--model.wiring=top2"],
    "did you mean --config.model.wiring?",
    field("model.wiring=top2"),
  ),
  "a field that is misspelt": (
    field("model.num_expertz=4"),
    "did you mean model.num_experts?",
    field("model.num_experts=4"),
  ),
  "a field of another section": (
    field("train.learning_rate=1e-3"),
    "did you mean optimizer.learning_rate?",
    field("optimizer.learning_rate=1e-3"),
  ),
  "a wiring that is misspelt": (
    field("model.wiring=scmoe_pos4"),
    "model.wiring='scmoe_pos4' is unknown; did you mean 'scmoe_pos",
    field("model.wiring=scmoe_pos3"),
  ),
  "a config that is misspelt": (
    ["--config=quikstart"],
    "did you mean quickstart?",
    ["--config=quickstart"],
  ),
  "a config without its flag": (
    ["quickstart"],
    "did you mean --config=quickstart?",
    ["--config=quickstart"],
  ),
  "a number with a fraction": (
    field("train.steps=1e3"),
    "use a whole number such as 8",
    field("train.steps=1000"),
  ),
  "a batch that does not divide": (
    field("train.batch_size=7"),
    "is not divisible by mesh.data x mesh.expert = 8; use 8",
    field("train.batch_size=8"),
  ),
  "tokens that are no microbatches": (
    field("train.tokens_per_step=200"),
    "use 256, or 0",
    field("train.tokens_per_step=256"),
  ),
  "a sequence beyond the positions": (
    field("data.seq_len=64"),
    "use sequences of at most 16 tokens, or a larger model.context",
    field("data.seq_len=64", "model.context=64"),
  ),
  "layers that are no pairs": (
    field("model.num_layers=3"),
    "use a multiple of 2",
    field("model.num_layers=2"),
  ),
  "devices that are not there": (
    field("mesh.data=4", "mesh.expert=4"),
    "--simulate 16",
    field("mesh.data=2", "mesh.expert=4"),
  ),
  "a mask on one side": (
    field("model.document_mask=true"),
    "set data.document_mask=True as well",
    field("model.document_mask=true", "data.document_mask=true"),
  ),
  "a source without its file": (
    field("data.source=jsonl"),
    "needs a file or folder",
    field("data.source=jsonl", "data.path=rows.jsonl", "data.field=body"),
  ),
  "a file that is not there": (
    field("data.source=auto", "data.path=mine.txt"),
    "does not exist; give a file",
    field("data.source=auto", "data.path=my.txt"),
  ),
  "a tokenizer by its name": (
    field("data.tokenizer=gpt2"),
    "use bytes, bpe or the path of a tokenizer.json",
    field("data.tokenizer=bytes"),
  ),
  "a weight that is missing": (
    field("data.mixture=stdlib,text:my.txt", "data.source=auto"),
    "write kind[:path]:weight joined by commas",
    field("data.mixture=procedural:0.5,text:my.txt:0.5", "data.source=auto"),
  ),
  "more of a batch than there is text": (
    field("data.path=my.txt", "data.source=auto", "train.batch_size=80000"),
    "use a batch of at most",
    field("data.path=my.txt", "data.source=auto", "train.batch_size=8"),
  ),
  "a folder above": (["--workdir=../a"], "give the folder itself", ["--workdir=a"]),
}


@pytest.fixture
def started(tmp_path, monkeypatch):
  """Commands go as far as the first step, and say with what."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  text = "".join(f"line {i} of a short text that is a little longer\n\n" for i in range(2000))
  (tmp_path / "my.txt").write_text(text)
  (tmp_path / "rows.jsonl").write_text('{"body": "some text in a row"}\n' * 900)
  runs = []

  class Trainer:
    def __init__(self, built, data, workdir, **options):
      runs.append((built, data, options))

    def run(self):
      return None

  monkeypatch.setattr(train, "Trainer", Trainer)
  monkeypatch.setattr(Text, "result", lambda self, data, workdir: "")
  return runs


@pytest.mark.parametrize("name", MISTAKES)
def test_the_line_says_what_to_do_and_doing_it_works(name, started, capsys):
  typed, words, instead = MISTAKES[name]
  with pytest.raises(ScmoeError) as refused:
    train.main(["--smoke", *typed])
  line = str(refused.value)
  assert words in line
  assert "\n" not in line
  assert not started, "it was noticed after something had been started"
  train.main(["--smoke", *instead])
  assert len(started) == 1


# Of other commands, and of the environment: refused before a model is made. (command, flags, words)
OF_COMMANDS = (
  (train, ["--restarts=-1"], "--restarts=-1 must be at least 0"),
  (train, ["--smoke", "--network=40GB"], "--network has no effect without --dry_run; add it"),
  (train, ["--host_devices=4", "--print_config"], "--host_devices has no effect without --dry_run"),
  (profile, ["--rounds=0"], "--rounds=0 must be at least 1"),
  (
    profile,
    ["--config.mesh.moments_in=host", "--config.mesh.moments_update=host"],
    "mesh.moments_update='host': a profile traces",
  ),
  (profile, ["--calls=0"], "--calls=0 must be at least 1"),
  (profile, ["--workdir=my.txt"], "my.txt is a file, not a folder"),
  (profile, ["--machine=h100"], "machine='h100' is unknown; one of: h200-nvlink"),
  (profile, ["--json=nowhere/x.json"], "--json='nowhere/x.json': there is no folder"),
  (profile, ["--json=~no-such-user/x.json"], "--json='~no-such-user/x.json': there is no folder"),
  (generate, ["--json=nowhere/x.json"], "--json='nowhere/x.json': there is no folder"),
  (generate, ["--json=."], "--json='.' is a folder; give a file"),
  (generate, ["--seed=9999999999999999999"], "--seed=9999999999999999999 is too large"),
  (generate, ["--benchmark", "--rounds=0"], "--rounds=0 must be at least 1"),
  (evaluate, ["--workdir=a", "--json=."], "--json='.' is a folder; give a file"),
  (evaluate, ["--workdir=a"], "a does not exist; give the folder of a run"),
  (evaluate, ["--workdir=my.txt"], "my.txt is a file, not a folder; give the folder of a run"),
)


@pytest.mark.parametrize(
  ("command", "typed", "stream", "words"),
  [
    (generate, ["--workdir=a", "--chat"], "stdin", "--chat reads standard input, which is closed"),
    (serve, ["--workdir=a"], "", "--workdir is not a flag here; name in --model the folder that"),
    (serve, ["--model=a"], "stdin", "--input=- is a standard stream that is closed; give a file"),
    (serve, ["--model=a"], "stdout", "--output=- is a standard stream that is closed; give a file"),
    (
      serve,
      ["--model=.", "--output=x"],
      "",
      "inference.json is missing: python -m scmoe.convert --workdir RUN --inference FOLDER",
    ),
  ],
)
def test_closed_streams_and_other_folders_are_one_line(
  command, typed, stream, words, started, monkeypatch
):
  monkeypatch.setattr(command.sys, "stdin", io.StringIO())
  if stream:  # as Python has it after `<&-` or `>&-`
    monkeypatch.setattr(command.sys, stream, None)
  with pytest.raises(ScmoeError) as refused:
    command.main(typed)
  assert words in str(refused.value)
  assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("command", "typed", "words"), OF_COMMANDS)
def test_other_commands_refuse_before_they_work(command, typed, words, started):
  with pytest.raises(ScmoeError) as refused:
    command.main(typed)
  assert words in str(refused.value)
  assert "\n" not in str(refused.value)


def test_what_is_only_shown_starts_no_supervisor(started, monkeypatch, capsys):
  monkeypatch.setattr(train, "supervised", lambda *_: pytest.fail("a supervisor was started"))
  train.main(["--smoke", "--print_config", "--restarts=5", "--elastic"])
  assert '"model"' in capsys.readouterr().out
  monkeypatch.setattr(train, "dry_run", lambda run: run)
  monkeypatch.setattr(train, "report", lambda run, cluster: f"dry run of {run.name}")
  train.main(["--smoke", "--dry_run", "--restarts=5", "--elastic"])
  assert "dry run of quickstart" in capsys.readouterr().out
  assert not started


def test_a_platform_that_jax_has_not_is_one_line(monkeypatch):
  for platform, words in (("nonsense", "is unknown; use cpu, cuda or tpu"),
                          ("cuda", "this jax has no CUDA build; pip install")):  # fmt: skip
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ScmoeError, match=words):
      train.main(["--smoke"])


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    ("--nonsense", "XLA_FLAGS='--nonsense': Unknown flag in XLA_FLAGS: --nonsense; use flags of"),
    ("--xla_no_such_flag=1", "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1; use flags"),
    ("nonsense", 'Could not open file "nonsense" to read flags from; use flags'),
    ("--xla_cpu_enable_fast_math=maybe", "value maybe for flag xla_cpu_enable_fast_math; use"),
  ],
)
def test_flags_that_xla_has_not_are_one_line(flags, words, monkeypatch):
  """XLA itself ends the process, with a dump of its registers."""
  monkeypatch.setenv("XLA_FLAGS", flags)
  for command, argv in ((train, ["--smoke"]), (convert, ["--workdir=a", "--to=b"])):
    with pytest.raises(ScmoeError) as refused:
      command.main(argv)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_there_are_enough_of_them():
  assert len(MISTAKES) >= 25


def test_what_was_not_typed_is_not_refused(started):
  """A config file may set what another wiring reads; so may a value that is in force anyway."""
  train.main(["--config=olmoe", "--smoke", "--config.model.wiring=top2"])
  train.main(["--smoke", *field("model.wiring=top2", "model.top_k=2")])
  assert len(started) == 2


# The command as far as its first step: it prints the header that names the devices.
UNTIL_THE_STEP = """
import sys
from scmoe import train
from scmoe.base.errors import run_main
from scmoe.run.text import Text

class Trainer:
  def __init__(self, built, data, workdir, **options):
    print(options["header"])

  def run(self):
    return None

train.Trainer, Text.result = Trainer, lambda self, data, workdir: ""
run_main(train.main, sys.argv[1:])
"""


def test_the_devices_that_are_suggested_can_be_had(tmp_path):
  """The line's own flag, in a process of its own: jax has its devices already here."""
  environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags_of_one_device()}
  words = [sys.executable, "-c", UNTIL_THE_STEP, "--smoke", "--config.mesh.expert=2"]
  words += ["--workdir=a", "--config.data.limit_bytes=20000"]

  def run(*more):
    return subprocess.run([*words, *more], cwd=tmp_path, env=environment, capture_output=True,
                          text=True, timeout=300)  # fmt: skip

  refused = run()
  assert refused.returncode == 2
  (flag,) = re.findall(r"--simulate \d+", refused.stderr)
  done = run(*flag.split())
  assert done.returncode == 0, done.stderr
  assert "data 1 x expert 2 x tensor 1: 2 of 2 x cpu" in done.stdout


def test_the_source_follows_the_path(started):
  for path, kind in (("my.txt", "text"), ("rows.jsonl", "jsonl")):
    train.main(["--smoke", *field(f"data.path={path}", "data.source=auto", "data.field=body")]
               if kind == "jsonl" else
               ["--smoke", *field(f"data.path={path}", "data.source=auto")])  # fmt: skip
    assert started[-1][0].run.data.source == kind


def test_text_that_is_read_too_often_and_text_without_validation_are_said_before(started):
  train.main(["--smoke", *field("data.path=my.txt", "data.source=auto", "train.steps=100000")])
  header = started[-1][2]["header"]
  assert re.search(r"passes +my \d+", header)
  assert "WARNING      my is read" in header
  (fewer,) = re.findall(r"at most train.steps=([\d,]+)", header)
  mine = field("data.path=my.txt", "data.source=auto")
  train.main(["--smoke", *mine, *field("train.steps=" + fewer.replace(",", ""))])
  assert "WARNING" not in started[-1][2]["header"]
  train.main(["--smoke", *mine, *field("data.validation_fraction=0")])
  assert "no validation data: nothing will be evaluated" in started[-1][2]["header"]
  assert started[-1][2]["evaluate"] is None


def test_a_state_that_does_not_fit_is_said_before_it_is_allocated(started, monkeypatch):
  monkeypatch.setattr(summary, "device_memory", lambda: 100_000)
  with pytest.raises(
    ScmoeError, match=r"need \d\d\d\.\d\d KiB on each device, which has 97\.66 KiB; try"
  ):
    train.main(["--smoke"])
  assert not started
  monkeypatch.undo()
  assert summary.device_memory() > 2**20


def test_a_step_that_does_not_fit_lists_levers_with_figures(started, monkeypatch):
  class Full:
    def __init__(self, *args, **options):
      pass

    def run(self):
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

  monkeypatch.setattr(train, "Trainer", Full)
  argv = ["--smoke", *field("train.batch_size=64", "mesh.data=1")]
  with pytest.raises(ScmoeError) as refused:
    train.main(argv)
  line = str(refused.value)
  assert re.match(
    r"out of memory: a step needs about [\d.]+ [KM]iB on each device \(parameters", line
  )
  need = dict(
    re.findall(r"([\w.=]+(?: [\w.=]+| on \d devices)?) \(([\d.]+) [KM]iB\)", line.split("try ")[1])
  )
  assert set(need) == {"train.batch_size=32 train.tokens_per_step=1024", "train.remat=full",
                       "mesh.expert=2 on 2 devices"}  # fmt: skip
  monkeypatch.undo()
  from scmoe.run.summary import size_of

  (words,) = [w for w in need if w.startswith("train.batch_size")]
  values, given = train.parse([*argv, *field(*words.split())], train.TRAIN_FLAGS, with_fields=True)
  smaller = train.run_config(values, given).resolve(num_devices=1, vocab_size=257)
  assert size_of(run_dry(smaller).memory.total).split()[0] == need[words]

  class Broken(Full):
    def run(self):
      raise jax.errors.JaxRuntimeError("INTERNAL: something else")

  monkeypatch.setattr(train, "Trainer", Broken)
  with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
    train.main(["--smoke", "--workdir=b"])


def test_only_changes_that_fit_are_suggested(monkeypatch):
  """Each with its need; where none fits, what would."""
  dry_run = functools.cache(run_dry)  # the lines and this test ask for the same needs
  monkeypatch.setattr(summary, "dry_run", dry_run)
  run = load_config(find_config("olmoe")).resolve(num_devices=1, vocab_size=50304)
  need = lambda **train: (
    dry_run(dataclasses.replace(run, train=dataclasses.replace(run.train, **train))).memory.total
  )
  full = need(remat="full")
  assert full < need(batch_size=4)
  line = summary.levers(run, full)
  assert line.startswith(f"try train.remat=full ({summary.size_of(full)})")
  assert "train.batch_size=4" not in line
  line = summary.levers(run, 20 * 2**30)
  assert "none of these suffices alone: train.batch_size=4" in line
  (words, size) = re.findall(r"; (model.num_layers=.*) would fit \(([\d.]+) GiB\)", line)[0]
  assert float(size) <= 20
  smaller = run
  for word in words.split():
    smaller = with_field(smaller, *word.split("="))
  smaller = smaller.resolve(num_devices=1, vocab_size=50304)
  assert summary.size_of(dry_run(smaller).memory.total) == f"{size} GiB"
  assert "no number of layers fits here" in summary.levers(run, 2**20)


def test_help_on_a_section_and_a_field(capsys):
  train.main(["-h"])
  assert "router" in capsys.readouterr().out
  train.main(["-h", "all"])
  everything = capsys.readouterr().out
  assert "model.wiring" in everything
  assert "Exit codes" in everything
  train.main(["--help", "router"])
  section = capsys.readouterr().out
  assert "router.bias_rate" in section
  assert "--help router.compat" in section  # a group inside it has one line
  assert "router.compat.order" not in section
  assert "model.wiring" not in section
  train.main(["--help", "router.compat"])
  assert "router.compat.order" in capsys.readouterr().out
  train.main(["--help", "ablation"])
  groups = capsys.readouterr().out
  assert "overlap.ablation.backward" in groups
  assert "optimizer.ablation.masters" in groups
  train.main(["--help", "top_k"])
  assert "model.top_k" in capsys.readouterr().out
  with pytest.raises(ScmoeError, match="did you mean model"):
    train.main(["--help", "modell"])


def test_a_full_disk_is_not_too_little_memory():
  """jax has one word for both."""
  error = RuntimeError("RESOURCE_EXHAUSTED: a.xplane.pb; No space left on device")
  assert summary.out_of_memory(None, error) is None
