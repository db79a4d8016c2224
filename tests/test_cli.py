"""The commands as a user types them: flags, help, exit codes, and one run from start to text."""

import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from covering import night

import scmoe
from scmoe import evaluate, generate, inspect, train
from scmoe.base.errors import ConfigError, run_main
from scmoe.reports.analyses import read_analyses
from scmoe.run.command_line import TRAIN_FLAGS, Flag, parse
from scmoe.run.config import RunConfig, from_json
from scmoe.run.fields import fields, with_field
from scmoe.run.suggestions import OTHER_NAMES
from scmoe.training.card import environment, origin
from scmoe.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def here(tmp_path, monkeypatch):
  """An empty current folder, where only what a command writes can appear."""
  monkeypatch.chdir(tmp_path)
  return tmp_path


def outcome(main, capsys, *argv):
  """(exit code, standard output, standard error) of an entry point."""
  code = 0
  try:
    run_main(main, list(argv))
  except SystemExit as end:
    code = end.code
  captured = capsys.readouterr()
  return code, captured.out, captured.err


# --- parsing --------------------------------------------------------------------------------------


def test_both_spellings():
  values, given = parse(
    [
      "--config=a",
      "--workdir",
      "b",
      "--dry_run",
      "--config.train.steps",
      "-3",
      "--config.name=x=y",
    ],
    TRAIN_FLAGS,
    with_fields=True,
  )
  assert (values["config"], values["workdir"], values["dry_run"]) == ("a", "b", True)
  assert values["print_config"] is False
  assert given == [("train.steps", "-3"), ("name", "x=y")]


def test_repeated_and_required_flags():
  flags = (Flag("prompt", str, "", "text", repeat=True, required=True), Flag("k", int, 3, "k"))
  assert parse(["--prompt=a", "--prompt", "b"], flags)[0] == {"prompt": ["a", "b"], "k": 3}
  with pytest.raises(ConfigError, match="--prompt is missing"):
    parse([], flags)
  with pytest.raises(ConfigError, match="--k='x' is not of type int"):
    parse(["--prompt=a", "--k=x"], flags)


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (["--workdri=a"], "did you mean --workdir"),
    (["--model.wiring=top2"], "did you mean --config.model.wiring"),
    (["--num_experts=2"], "did you mean --config.model.num_experts"),
    (["quickstart"], "belongs to no flag"),
    (["--workdir"], "--workdir has no value"),
    (["--config.train.steps"], "--config.train.steps has no value"),
    (["--config.train.steps", "--dry_run"], "--config.train.steps has no value"),
    (["--zzz"], "--help"),
    # another framework's name, another spelling, a value after a switch
    (["--lr=1e-3"], "did you mean --config.optimizer.learning_rate?"),
    (["--epochs=3"], "did you mean --config.train.steps?"),
    (["--dry-run"], "did you mean --dry_run?"),
    (["-workdir=a"], "did you mean --workdir?"),
    (["model.width=3"], "did you mean --config.model.width?"),
    (["config.model.width=3"], "did you mean --config.model.width?"),
    (["--output_dir=a"], "did you mean --workdir?"),
    (["--smoke", "true"], "'true' belongs to no flag; write --smoke=true, or --smoke alone"),
  ],
)
def test_wrong_flags(argv, words):
  with pytest.raises(ConfigError, match=words):
    parse(argv, TRAIN_FLAGS, with_fields=True)


# --- text that is printed -------------------------------------------------------------------------


COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def test_help_lists_every_field_and_every_exit_code(capsys):
  code, text, _ = outcome(train.main, capsys, "--help", "all")
  assert code == 0
  for field in fields(RunConfig()):
    assert f" {field.path}" in text, field.path
  for word in ("watchdog", "configuration error", "75", "86", "--dry_run", "one of 'none'"):
    assert word in text
  for main in (evaluate.main, generate.main):
    assert "--workdir" in outcome(main, capsys, "--help", "all")[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen_and_names_every_flag(name, capsys):
  module = importlib.import_module(name.replace("scmoe-", "scmoe."))
  code, text, _ = outcome(module.main, capsys, "--help")
  lines = text.splitlines()
  assert code == 0
  assert len(lines) <= 24
  assert max(map(len, lines)) <= 100
  assert lines[0].startswith(f"python -m scmoe.{name.removeprefix('scmoe-')}: ")
  for flag in getattr(module, "FLAGS", TRAIN_FLAGS):
    assert (flag.name if flag.words else f"--{flag.name}") in text
  assert "--help all" in text
  code, everything, _ = outcome(module.main, capsys, "--help", "all")
  assert code == 0
  assert "Exit codes:" in everything


@pytest.mark.parametrize("name", COMMANDS)
def test_a_console_script_is_its_command(name, capsys, monkeypatch):
  module, _, function = COMMANDS[name].partition(":")
  script = getattr(importlib.import_module(module), function)
  monkeypatch.setattr(sys, "argv", [name, "--version"])
  with pytest.raises(SystemExit) as ended:
    script()
  assert (ended.value.code, capsys.readouterr().out) == (0, f"scmoe {scmoe.__version__}\n")
  monkeypatch.setattr(sys, "argv", [name, "--zzz"])
  with pytest.raises(SystemExit) as ended:
    script()
  err = capsys.readouterr().err
  assert ended.value.code == 2
  assert err == "ConfigError: --zzz is not a flag; see --help all\n"


def test_a_script_s_card_names_the_script(monkeypatch):
  monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
  monkeypatch.setattr(sys, "argv", ["/usr/local/bin/scmoe-train", "--smoke"])
  assert train._program() == ["scmoe-train"]


def test_names_of_other_frameworks_stand_for_fields_and_flags_that_there_are():
  known = {field.path for field in fields(RunConfig())}
  known |= {flag.name for flags in (TRAIN_FLAGS, generate.FLAGS) for flag in flags}
  assert set(OTHER_NAMES.values()) <= known


def test_list_configs(capsys):
  _, text, _ = outcome(train.main, capsys, "--list_configs")
  names = ("quickstart", "gpt2_moe_small", "gpt2_moe_medium", "gpt3_moe_xl", "llama2_moe", "olmoe")
  for name in names:
    assert f"{name} " in text


def test_print_config_can_be_read_back(here, capsys):
  argv = ["--config.model.wiring=top2", "--config.mesh.expert=4", "--config.train.batch_size=32"]
  _, text, _ = outcome(train.main, capsys, "--print_config", *argv)
  run = from_json(text)
  assert (run.model.wiring, run.mesh.expert, run.mesh.data) == ("top2", 4, -1)
  (here / "run.json").write_text(text)
  _, again, _ = outcome(train.main, capsys, "--config_json=run.json", "--print_config")
  assert again == text
  assert sorted(p.name for p in here.iterdir()) == ["run.json"]


def test_dry_run_writes_nothing(here, capsys):
  argv = ["--smoke", "--dry_run", "--config.mesh.expert=4", "--config.mesh.data=2"]
  code, text, _ = outcome(train.main, capsys, *argv)
  assert code == 0
  assert "8 devices" in text
  assert list(here.iterdir()) == []


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("argv", "code", "words"),
  [
    (["--config=quikstart"], 2, "did you mean quickstart"),
    (["--config=no/such.py"], 2, "is not a file"),
    (["--config_json=none.json"], 2, "none.json does not exist"),
    (["--config_json=/dev/zero"], 2, "/dev/zero is not a regular file"),
    (["--config.model.num_expertz=4"], 2, "did you mean model.num_experts"),
    (["--config.model.experts=8"], 2, "did you mean model.num_experts=8?"),
    (["--config.lr=1"], 2, "did you mean optimizer.learning_rate?"),
    (["--tensor-model-parallel-size", "2"], 2, "did you mean --config.mesh.tensor?"),  # Megatron
    (["--use-distributed-optimizer"], 2, "did you mean --config.mesh.shard_state?"),
    (["--config.mesh.ici_fsdp_parallelism=8"], 2, "did you mean mesh.shard_state?"),  # MaxText
    (
      ["--config.parallelism.expert_parallel_degree=8"],
      2,
      "did you mean mesh.expert?",
    ),  # torchtitan
    (["--config.moe.a2a_ffn_overlap_degree=2"], 2, "did you mean dispatch.chunks?"),  # Tutel
    (["--config.model.num_experts=-3"], 2, "model.num_experts=-3"),
    (["--config.model.num_experts=four"], 2, "not of type int"),
    (["--config.model.wiring=topk", "--config.model.top_k=99"], 2, "model.top_k=99"),
    (["--config.mesh.expert=64"], 2, "mesh.expert=64"),
    (["--config.mesh.expert=8", "--config.model.num_experts=12"], 2, "model.num_experts=12"),
    (["--config.train.batch_size=7"], 2, "train.batch_size=7"),
    (["--config.data.seq_len=4096"], 2, "model.context"),
    (["--workdir=../evil"], 2, "'..'"),
    (["--config.name=../evil"], 2, "is not a run name"),
    (["--config.data.source=jsonl", "--config.data.path=none.jsonl"], 3, "none.jsonl"),
    (["--config.data.tokenizer=none.json"], 3, "none.json"),
    (["--config.data.source=text", "--config.data.path=empty.txt"], 3, "empty.txt"),
    (["--config.data.limit_bytes=2000", "--config.train.batch_size=80000"], 3, "batch"),
  ],
)
def test_one_line_and_nothing_written(here, capsys, argv, code, words):
  (here / "empty.txt").write_text("")
  got, out, err = outcome(train.main, capsys, "--smoke", *argv)
  assert got == code
  assert words in err
  lines = [line for line in err.splitlines() if not line.startswith("WARNING")]
  assert len(lines) == 1
  assert "Traceback" not in err + out
  assert [p.name for p in here.iterdir()] == ["empty.txt"]


def test_runs_that_are_not_there(here, capsys):
  for main, argv in ((evaluate.main, []), (generate.main, ["--prompt=a"])):
    code, _, err = outcome(main, capsys, "--workdir=none", *argv)
    assert code == 5
    assert len(err.splitlines()) == 1
    assert outcome(main, capsys, *argv)[0] == 2  # no --workdir
  assert list(here.iterdir()) == []


def test_exit_code_of_the_process(here):
  command = [sys.executable, "-m", "scmoe.train", "--config.train.stepz=1"]
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
  assert done.returncode == 2
  assert done.stderr.startswith("ConfigError: ")
  assert "did you mean train.steps" in done.stderr
  assert list(here.iterdir()) == []


# --- a whole run ----------------------------------------------------------------------------------


@pytest.fixture
def quick_compiler():
  """Steps that run a few times: compile them fast rather than well."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("further", [False, night(True)], ids=["once", "further"])
def test_train_stop_resume_evaluate_generate(further, here, capsys, quick_compiler):
  """On eight simulated devices, data 8: trained, evaluated, sampled; continued on one of them.

  `further`: each changed option and each mesh is a program of its own, and there are several.
  """
  argv = ["--smoke", "--workdir=a", "--config.train.steps=4"]
  code, out, err = outcome(train.main, capsys, *argv, "--config.train.stop_after=2")
  assert code == 75, err
  for words in (
    "quickstart -> a",
    "parameters",
    "FLOPs forward",
    "data 8 x",
    "memory",
    "procedural",
  ):
    assert words in out
  code, out, err = outcome(train.main, capsys, *argv)
  assert code == 0, err
  trained = out
  assert "resuming from step 2" in out
  assert "sample at step 4" in out
  assert "a bigram model of bytes" in out
  assert "next: python -m scmoe.evaluate --workdir a" in out
  lines = [json.loads(line) for line in Path("a/metrics.jsonl").read_text().splitlines()]
  assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4]
  stored = from_json(Path("a/config.json").read_text())
  assert stored.train.steps == 4

  code, out, err = outcome(train.main, capsys, *argv, "--config.model.width=32")
  assert code == 2
  assert "model.width: 16 -> 32" in err

  code, out, err = outcome(evaluate.main, capsys, "--workdir=a", "--max_batches=2", "--json=e.json")
  assert code == 0, err
  figures = json.loads(Path("e.json").read_text())
  last = [line for line in lines if line["kind"] == "eval"][-1]
  assert figures["step"] == last["step"] == 4
  assert figures["loss"] == pytest.approx(last["loss"], rel=1e-5)
  assert figures["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-5)
  assert figures["drop"] == pytest.approx(last["drop"], rel=1e-5)
  assert figures["drop"] > 0
  assert re.search(r"on 2 of [\d,]+ batches, scmoe.evaluate reads all", trained)
  assert "at step 4, 2 batches" in out
  assert "found no room (capacity factor 2, 8 parts a batch)" in out
  assert "bigram bits/byte" in out

  # Another run that begins where this one ended: one step that moves nothing, the same loss.
  still = ["--config.train.init_from=a", "--config.optimizer.learning_rate=0"]
  begun = ["--smoke", "--workdir=b", "--config.train.steps=1", *still]
  code, out, err = outcome(train.main, capsys, *begun)
  assert code == 0, err
  (again,) = read_metrics("b", "eval")
  assert again["loss"] == pytest.approx(last["loss"], rel=1e-5)
  code, _, err = outcome(train.main, capsys, *begun, "--workdir=c", "--config.model.width=32")
  assert code == 2
  assert "train.init_from='a' has parameters of other shapes" in err

  # Other text, all of it, by the same figures as its validation text had been; other routing.
  text = "a text that the run has never seen, of a few lines\n\n" * 40
  Path("mine.txt").write_text(text)
  mine = ["--workdir=a", "--data.path=mine.txt", "--json=g.json"]
  code, out, err = outcome(evaluate.main, capsys, *mine)
  assert code == 0, err
  assert "validation of a at step 4 with data.path=mine.txt" in out
  assert "bigram" not in out
  other = json.loads(Path("g.json").read_text())
  assert other["domains"]["mine"]["bytes"] == other["bytes"] == len(text)
  assert 7 < other["bits_per_byte"] < 9  # four steps: about as good as no model
  if further:
    few = ["--dispatch.capacity_factor=0.25", "--max_batches=2", "--json=h.json"]
    assert outcome(evaluate.main, capsys, "--workdir=a", *few)[0] == 0
    assert json.loads(Path("h.json").read_text())["drop"] > max(figures["drop"], 0.3)
    assert outcome(evaluate.main, capsys, "--workdir=a", "--model.top_k=2", *few[1:])[0] == 0
    assert json.loads(Path("h.json").read_text())["loss"] != figures["loss"]
    assert outcome(evaluate.main, capsys, "--workdir=a", "--data.seq_len=8", *few[1:])[0] == 0
    assert json.loads(Path("h.json").read_text())["tokens"] == 2 * 8 * 8
  for argv, got, words in (
    (["--data.seq_len=99"], 2, "model.context=16"),
    (["--data.path=none.txt"], 3, "does not exist; give a file"),
    (["--data.source=stdlib", "--data.path=mine.txt"], 2, "data.path='mine.txt' has no effect"),
    (["--dispatch.slack=2"], 2, "--dispatch.slack is not a flag"),
  ):
    code, _, err = outcome(evaluate.main, capsys, "--workdir=a", *argv)
    assert code == got
    assert words in err

  code, out, err = outcome(inspect.main, capsys, "--workdir=a", "--batches=2", "--gradients")
  assert code == 0, err
  assert "layer 3" in out
  assert max(len(line) for line in out.splitlines() if "page:" not in line) <= 100
  for words in ("imbalance", "tells of the next", "as on current"):
    assert words in out
  with np.load("a/inspect/inspect.npz", allow_pickle=False) as arrays:
    assert arrays["load_GE"].shape == (2, 4)
    assert arrays["load_GE"].sum(-1) == pytest.approx(1)
    assert arrays["training_load"].shape == (4, 2, 4)  # four logged steps
    assert arrays["training_entropy"].shape == (4, 2)
  page = Path("a/inspect/inspect.html").read_text()
  for words in ("Experts by domain", "Experts by class", "Load over training", "Gradients"):
    assert words in page
  (analysis,) = read_analyses(Path("a/inspect"))
  assert analysis.said["wiring"] == "scmoe_pos2"
  assert [x is None for x in analysis.curves["gradient of experts"]] == [True, False] * 2
  assert all(x > 0 for x in analysis.curves["gradient of attention"])
  assert len(analysis.curves["alignment"]) == 8

  prompts = ["--prompt=ab", "--prompt=", "--max_new_tokens=3", "--temperature=0"]
  code, out, err = outcome(generate.main, capsys, "--workdir=a", *prompts)
  assert code == 0, err
  assert "--- prompt 2" in out
  assert out == outcome(generate.main, capsys, "--workdir=a", *prompts)[1]
  # One prompt comes as it is made, and so does every line of a chat.
  texts = [text.split("\n", 1)[1] for text in out.split("--- prompt ")[1:]]
  code, alone, err = outcome(generate.main, capsys, "--workdir=a", *prompts[:1], *prompts[2:])
  assert (code, alone) == (0, texts[0]), err
  assert "3 tokens in " in err
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("sys.stdin", io.StringIO("ab\n\n"))
    code, chat, err = outcome(generate.main, capsys, "--workdir=a", "--chat", *prompts[2:])
  assert (code, chat) == (0, "".join(texts)), err
  code, _, err = outcome(generate.main, capsys, "--workdir=a", "--chat", "--prompt=a")
  assert (code, "--prompt and --chat exclude each other" in err) == (2, True)
  # The mesh changes no greedy token, and no loss but by rounding.
  for mesh in ("expert=2,tensor=2", "data=2")[: 2 * further]:
    code, text, err = outcome(generate.main, capsys, "--workdir=a", *prompts, f"--mesh={mesh}")
    assert (code, text) == (0, out), err
  argv = ["--workdir=a", "--max_batches=2", "--json=f.json", "--mesh=expert=2"]
  assert outcome(evaluate.main, capsys, *argv)[0] == 0
  again = json.loads(Path("f.json").read_text())
  # The capacity of the eight devices of training, on two: nothing differs but rounding.
  assert again["loss"] == pytest.approx(figures["loss"], rel=1e-4)
  assert again["drop"] == pytest.approx(figures["drop"], rel=1e-4)
  assert again["capacity"] == figures["capacity"]
  code, _, err = outcome(evaluate.main, capsys, "--workdir=a", "--mesh=experts=2")
  assert code == 2
  assert "'experts=2' is not of the form AXIS=N with an AXIS of: data, expert, tensor" in err
  code, _, err = outcome(generate.main, capsys, "--workdir=a", "--prompt=a", "--mesh=data=99")
  assert code == 2
  assert "needs 99 devices, 8 found" in err
  code, _, err = outcome(generate.main, capsys, "--workdir=a", "--max_new_tokens=99")
  assert code == 2
  assert "--prompt is missing: text to continue" in err
  code, _, err = outcome(generate.main, capsys, "--workdir=a", "--prompt=a", "--max_new_tokens=99")
  assert code == 2
  assert "model.context=16" in err
  assert outcome(generate.main, capsys, "--workdir=a", "--prompt=a", "--temperature=-1")[0] == 2


@pytest.mark.parametrize(
  ("context", "prompts", "room"),
  [(16, ["def main("], 6), (16, ["a", "abcdefgh"], 7), (16, [], 8), (16, ["a" * 40], 1),
   (1024, ["def main("], 64)],
)  # fmt: skip
def test_generate_adds_what_the_context_has_room_for(context, prompts, room):
  """The command that a run of --smoke names as the next one has no --max_new_tokens."""
  session = SimpleNamespace(
    model=SimpleNamespace(config=SimpleNamespace(context=context)),
    encode=lambda prompt: [256, *prompt.encode()],
  )
  assert generate._room(session, prompts) == room


def test_prefill_and_decode_of_two_wirings(here, capsys, quick_compiler):
  load = ["--batch=4", "--prompt_tokens=8", "--max_new_tokens=3", "--rounds=2"]
  own = ["--benchmark", "--config=quickstart", "--smoke", "--config.mesh.data=2"]
  own += ["--config.mesh.expert=2", "--json=b.json", "--compare=top2,scmoe_pos2"]
  code, out, err = outcome(generate.main, capsys, *own, *load)
  assert code == 0, err
  assert "prefill ms" in out
  assert "not GPU times" in out
  figures = json.loads(Path("b.json").read_text())
  assert figures["command"] == shlex.join(["python", "-m", "scmoe.generate", *own, *load])
  assert {"git", "environment", "date"} <= set(figures)
  arms = figures["arms"]
  assert set(arms) == {"top2", "scmoe_pos2"}
  for parts in arms.values():
    assert parts["prefill"]["tokens_per_s"] == pytest.approx(
      4 * 8 / parts["prefill"]["wall"]["ms"] * 1e3, rel=1e-2
    )
    assert parts["decode"]["wall"]["ms"] > 0
  assert arms["top2"]["decode"]["speed_up"] == 1
  code, _, err = outcome(generate.main, capsys, *own, "--batch=3")
  assert code == 2
  assert "--batch=3 does not divide over the 4 batch shards of the mesh; use a multiple of 4" in err
  code, _, err = outcome(generate.main, capsys, *own, "--prompt_tokens=99")
  assert code == 2
  assert "model.context=16" in err
  code, _, err = outcome(generate.main, capsys, *own[:-1], "--compare=top3")
  assert code == 2
  assert "--compare='top3' is no wiring" in err


def test_default_run_is_the_quickstart(here, capsys, monkeypatch):
  seen = {}
  monkeypatch.setattr(train, "train", lambda run, workdir: seen.update(run=run, workdir=workdir))
  train.main([])
  assert (seen["run"].name, seen["workdir"]) == ("quickstart", Path("runs/quickstart"))
  train.main(["--allow_config_change", "--config.name=b"])
  assert seen["run"].checkpoint.allow_config_change
  assert seen["workdir"] == Path("runs/b")
  # The plain command after a smoke run finds no run of other sizes in its folder.
  train.main(["--smoke"])
  assert (seen["run"].name, seen["workdir"]) == ("quickstart", Path("runs/quickstart-smoke"))
  train.main(["--smoke", "--workdir=a"])
  assert seen["workdir"] == Path("a")
  assert with_field(RunConfig(), "name", "b").name == "b"


def test_figures_say_where_they_are_from(monkeypatch):
  monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
  monkeypatch.setenv("MY_TOKEN", "secret")
  variables = environment()
  monkeypatch.setenv("NCCL_ALGO", "Ring")  # by the command itself
  said = origin("scmoe.profile", ["--config", "a b"], variables)
  assert said["command"] == "python -m scmoe.profile --config 'a b'"
  assert said["environment"]["NCCL_P2P_DISABLE"] == "1"
  assert "NCCL_ALGO" not in said["environment"]
  assert "secret" not in json.dumps(said)
