"""Files that are not what they were: text that changed, pipes in the place of files."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from covering import night

from scmoe import evaluate, train
from scmoe.base.errors import DataError, ScmoeError, StorageError
from scmoe.base.stored import write_json
from scmoe.data import store
from scmoe.reports import page
from scmoe.reports.records import read_run
from scmoe.run.config import RunConfig
from scmoe.run.opened import open_run
from scmoe.run.text import load_tokenizer
from scmoe.training.metrics import read_metrics
from scmoe.training.workdir import RunLock

LINES = "".join(f"line {i} of a text about nothing in particular\n\n" for i in range(400))


def start(workdir, text, steps, *argv):
  fields = {"data.source": "text", "data.path": text, "train.tensorboard": "false",
            "data.cache_dir": workdir.parent / "cache", "train.steps": steps,
            "train.sample_tokens": 0, "mesh.data": 1}  # fmt: skip
  given = [f"--config.{name}={value}" for name, value in fields.items()]
  train.main(["--config=quickstart", "--smoke", f"--workdir={workdir}", *given, *argv])


def words_tokenizer(words):
  """A tokenizer.json with a token for each word."""
  vocabulary = {word: i for i, word in enumerate(("</s>", "?", *words))}
  model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"}
  content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
  return json.dumps(content | {"model": model})


def edit(path):
  """Changes one letter; length and time of modification stay."""
  before = path.stat()
  path.write_text(path.read_text().replace("line 7 of", "line 7 on"))
  os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
  assert path.stat().st_size == before.st_size
  assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("large", [night(False), True], ids=["in memory", "stored"])
def test_text_that_changed_between_stop_and_resume_is_refused(tmp_path, monkeypatch, capsys, large):
  monkeypatch.setattr(store, "LARGE", 0 if large else store.LARGE)
  text = tmp_path / "a.txt"
  text.write_text(LINES)
  start(tmp_path / "run", text, 2)
  edit(text)
  with pytest.raises(DataError, match="the data are not those of the checkpoint: digest: ") as said:
    start(tmp_path / "run", text, 3)
  assert said.value.code == 3
  assert "\n" not in str(said.value)
  capsys.readouterr()
  evaluate.main(["--workdir", str(tmp_path / "run"), "--max_batches=1"])
  assert "the text has changed since the run was trained" in capsys.readouterr().err


def test_a_tokenizer_that_changed_between_stop_and_resume_is_refused(tmp_path):
  text, tokenizer = tmp_path / "a.txt", tmp_path / "tokenizer.json"
  text.write_text(LINES)
  tokenizer.write_text(words_tokenizer(["line", "of", "a", "text"]))
  start(tmp_path / "run", text, 2, f"--config.data.tokenizer={tokenizer}",
        "--config.data.validation_fraction=0")  # fmt: skip
  tokenizer.write_text(words_tokenizer(["of", "line", "a", "text"]))
  with pytest.raises(DataError, match=r"not those of the checkpoint: .*tokenizer: "):
    start(tmp_path / "run", text, 3, f"--config.data.tokenizer={tokenizer}",
          "--config.data.validation_fraction=0")  # fmt: skip


def _in_place(path, kind):
  if kind == "pipe":
    os.mkfifo(path)
  elif kind == "folder":
    path.mkdir()
  else:
    path.symlink_to({"loop": path, "device": "/dev/zero"}[kind])


def _read_tokenizer(folder):
  data = dataclasses.replace(RunConfig().data, tokenizer="bpe")
  return load_tokenizer(dataclasses.replace(RunConfig(), data=data), str(folder))


READERS = {
  "metrics.jsonl": read_metrics,
  "run.lock": lambda folder: RunLock(folder).__enter__(),
  "checkpoints": lambda folder: open_run(str(folder), None),
  "tokenizer.json": _read_tokenizer,
  "card.json": read_run,
}


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "device"])
@pytest.mark.parametrize("name", READERS)
def test_what_stands_in_the_place_of_a_runs_file_is_one_line(tmp_path, name, kind):
  """Opening a pipe would wait for its writer, and /dev/zero has no end."""
  _in_place(tmp_path / name, kind)
  with pytest.raises(ScmoeError) as said:
    READERS[name](tmp_path)
  assert name in str(said.value)
  assert "\n" not in str(said.value)


def test_a_device_is_not_replaced_by_a_file(tmp_path, monkeypatch):
  monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("a file was put in its place"))
  os.mkfifo(tmp_path / "pipe")
  for name, target in (("a", "/dev/null"), ("b", tmp_path / "pipe")):
    (tmp_path / name).symlink_to(target)
    with pytest.raises(OSError, match="it is a device or a stream, not a file"):
      write_json(tmp_path / name, {})
  with pytest.raises(OSError, match="it is a device or a stream, not a file"):
    write_json(Path("/dev/null"), {})
  with pytest.raises(StorageError, match="/dev/null cannot be written: it is a device"):
    page.write(Path("/dev/null"), "x")
  assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "pipe"]
