"""Mistakes with data files and tokenizers that ended in tracebacks, aborts, or ever more memory."""

import errno
import json
import os
import shutil
import socket

import numpy as np
import pytest

from scmoe.base.errors import ConfigError, DataError
from scmoe.data import DataConfig, corpus, files, open_data
from scmoe.data import text as sources


def opened(tmp_path, **fields):
  return open_data(
    DataConfig(**{"seq_len": 16, "cache_dir": str(tmp_path / "cache")} | fields),
    batch_size=1,
    seed=0,
  )


@pytest.fixture
def text(tmp_path):
  (tmp_path / "a.txt").write_text("hello world\n\n" * 200)
  return str(tmp_path / "a.txt")


@pytest.mark.parametrize("field", ["path", "tokenizer", "cache_dir"])
@pytest.mark.parametrize(
  ("value", "message"),
  [
    ("~nosuchuser/x", "names a user that this machine does not have"),
    ("a\0b", "holds a NUL byte"),
    ("x" * 5000, "xxx'... cannot be used: File name too long"),
  ],
)
def test_no_path_is_a_traceback(field, value, message, tmp_path, text):
  fields = {"path": text, "tokenizer": "bpe", "vocab_size": 257} | {field: value}
  with pytest.raises(ConfigError, match=message) as refused:
    opened(tmp_path, **fields)
  assert f"data.{field}=" in str(refused.value)
  assert len(str(refused.value)) < 300
  if field == "path":
    with pytest.raises(ConfigError, match=message):
      DataConfig(mixture=f"text:{value}:1").check()


@pytest.mark.parametrize(
  ("field", "value"), [("vocab_size", 5 * 10**9), ("prefetch", 10**12), ("read_threads", 10**6)]
)
def test_sizes_beyond_any_machine(field, value, tmp_path, text):
  """The process was aborted, or took memory without end."""
  with pytest.raises(ConfigError, match=rf"data.{field}={value} is too large; the most is"):
    opened(tmp_path, path=text, tokenizer="bpe", **{field: value})


def rows(path, row, count=60):
  path.write_text("".join(json.dumps(row(i)) + "\n" for i in range(count)))
  return str(path)


def test_a_column_with_another_value_in_every_row_names_no_domains(tmp_path, monkeypatch):
  """Every domain takes a megabyte: a column of ids took all memory."""
  path = rows(tmp_path / "a.jsonl", lambda i: {"text": f"text {i}", "id": f"n{i}"})
  monkeypatch.setattr(corpus, "MOST_DOMAINS", 20)
  with pytest.raises(DataError, match=r"more than 20 domains, the last 'n20'; data.domain_field="):
    opened(tmp_path, path=path, domain_field="id")
  few = rows(tmp_path / "b.jsonl", lambda i: {"text": f"text {i}", "id": f"n{i % 20}"})
  assert len(opened(tmp_path, path=few, domain_field="id").domains) == 20


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "x" * 101, "\u202e"])
def test_names_of_domains_cannot_write_to_the_terminal(name, tmp_path):
  path = rows(tmp_path / "a.jsonl", lambda i: {"text": f"text {i}", "kind": name if i else "good"})
  with pytest.raises(DataError, match=r"a.jsonl:2: data.domain_field='kind' holds .*, not a name;"):
    opened(tmp_path, path=path, domain_field="kind", max_bad_rows=0)


def test_damaged_offsets_of_an_arrow_file_are_one_line(tmp_path):
  """pyarrow read beyond its memory: the process ended by a segmentation fault."""
  import pyarrow as pa

  path = tmp_path / "a.arrow"
  table = pa.table({"text": ["abcdef", "ghijkl", "mnopqr"]})
  with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
    writer.write_table(table)
  content = path.read_bytes()
  offsets = np.array([0, 6, 12, 18], "<i4").tobytes()
  assert content.count(offsets) == 1
  path.write_bytes(content.replace(offsets, np.array([0, 6, 2**30, 18], "<i4").tobytes()))
  with pytest.raises(DataError, match=r"a.arrow: not a readable Arrow file: .*") as refused:
    opened(tmp_path, path=str(path))
  assert "\n" not in str(refused.value)


def test_a_damaged_page_of_a_parquet_file_is_one_line(tmp_path):
  import pyarrow as pa
  import pyarrow.parquet as pq

  path = tmp_path / "a.parquet"
  pq.write_table(pa.table({"text": [f"row {i} " * 9 for i in range(500)]}), path)
  content = bytearray(path.read_bytes())
  content[4:40] = b"\xff" * 36
  path.write_bytes(content)
  with pytest.raises(DataError, match=r"a.parquet:1: cannot be read: ") as refused:
    opened(tmp_path, path=str(path))
  assert "\n" not in str(refused.value)


def tokenizer_of(tmp_path, model):
  content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
  (tmp_path / "tok.json").write_text(json.dumps(content | {"model": model}))
  return str(tmp_path / "tok.json")


@pytest.mark.parametrize(
  "model",
  [
    {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "unk"},
    {"type": "Unigram", "unk_id": None, "vocab": [["</s>", 0.0], ["a", -1.0]]},
  ],
  ids=["WordLevel", "Unigram"],
)
def test_a_tokenizer_that_knows_too_little_is_one_line(model, tmp_path, text):
  path = tokenizer_of(tmp_path, model)
  with pytest.raises(
    DataError, match=r"data.tokenizer='.*tok.json' cannot encode the text: .*(?i:unk)"
  ):
    opened(tmp_path, path=text, tokenizer=path)
  with pytest.raises(DataError, match="cannot encode the text"):
    corpus.tokenizers.load_json(path, "").encode("hello")


def test_a_tokenizer_that_drops_the_text_is_warned_of(tmp_path, text, caplog):
  model = {"type": "BPE", "vocab": {"</s>": 0, "q": 1}, "merges": []}
  opened(tmp_path, path=text, tokenizer=tokenizer_of(tmp_path, model))
  assert "data.tokenizer makes no token of 1 of 1 documents" in caplog.text


def test_files_that_are_taken_for_a_tokenizer_json(tmp_path, text, monkeypatch):
  (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e<unk>\xff")
  with pytest.raises(DataError, match=r"is a SentencePiece model; give the tokenizer.json"):
    opened(tmp_path, path=text, tokenizer=str(tmp_path / "tokenizer.model"))
  monkeypatch.setattr(corpus.tokenizers, "_MOST_BYTES", 10)
  (tmp_path / "t.json").write_text("{}" * 99)
  with pytest.raises(DataError, match="is larger than 10 bytes"):
    opened(tmp_path, path=text, tokenizer=str(tmp_path / "t.json"))


def _make(place, kind):
  """Something that is no file, at a path."""
  if kind == "pipe":
    os.mkfifo(place)
  elif kind == "socket":
    with socket.socket(socket.AF_UNIX) as made:
      made.bind(os.path.relpath(place))  # the path of a socket has at most 107 bytes
  else:
    place.symlink_to({"loop": place, "device": "/dev/zero", "link to nothing": "nowhere"}[kind])


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "loop", "link to nothing"])
@pytest.mark.parametrize("where", ["itself", "inside", "a glob"])
def test_what_is_no_file_is_said(tmp_path, kind, where):
  """Left out, it would be text that the user named and the model never sees."""
  folder = tmp_path / "texts"
  folder.mkdir()
  (folder / "b.txt").write_text("some text\n" * 40)
  _make(folder / "a.txt", kind)
  path = {"itself": folder / "a.txt", "inside": folder, "a glob": folder / "*.txt"}[where]
  with pytest.raises(DataError, match=r"data.path.*(is not a regular file|cannot be read)") as said:
    opened(tmp_path, path=str(path))
  assert "\n" not in str(said.value)
  assert "a.txt" in str(said.value)
  assert sources.kind_of(np.zeros(64, np.uint8).tobytes()) == ""


def test_a_folder_that_cannot_be_listed_is_said(tmp_path, text, monkeypatch):
  """Root may list every folder, so the refusal is the system's by hand."""
  inside = tmp_path / "texts" / "private"
  inside.mkdir(parents=True)
  shutil.copy(text, tmp_path / "texts" / "a.txt")
  scan = os.scandir

  def refusing(path):
    if os.fspath(path) == os.fspath(inside):
      raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
    return scan(path)

  monkeypatch.setattr(os, "scandir", refusing)
  with pytest.raises(DataError, match=r"private' cannot be read \(Permission denied\); name"):
    opened(tmp_path, path=str(tmp_path / "texts"))


def test_a_loop_of_folders_is_read_once(tmp_path, text):
  inside = tmp_path / "texts" / "more"
  inside.mkdir(parents=True)
  shutil.copy(text, inside / "a.txt")
  (inside / "again").symlink_to(tmp_path / "texts")
  found = files.find_files("text", str(tmp_path / "texts"))
  assert [file.path.name for file in found] == ["a.txt"]


def test_zero_bytes_are_of_no_known_kind():
  assert sources.kind_of(np.zeros(64, np.uint8).tobytes()) == ""
