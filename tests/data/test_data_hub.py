"""Datasets by name, without a network: what lies in the hub's cache, and what does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scmoe.base.errors import ConfigError, DataError
from scmoe.data import DataConfig, hub
from scmoe.data.files import find_files

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_names():
  assert hub.parse("hf:a/b") == ("a/b", "", "")
  assert hub.parse("hf:a/b/c/d@v1") == ("a/b", "c/d", "v1")
  for path in ("hf:", "hf:a", "hf:a//b", "hf:a/@v1"):
    with pytest.raises(ConfigError, match="names no dataset; write hf:OWNER/NAME"):
      hub.parse(path)


def test_the_kind_follows_from_the_name():
  kinds = {"hf:a/b": "parquet", "hf:a/b.txt": "text", "hf:a/b/rows.jsonl.gz@v1": "jsonl"}
  assert {path: DataConfig(path=path).kind for path in kinds} == kinds
  part, other = DataConfig(mixture="auto:hf:a/b@v1:0.5,jsonl:hf:c/d:0.5").parts()
  assert (part.kind, part.path, other.path) == ("parquet", "hf:a/b@v1", "hf:c/d")


def test_files_of_a_kind_are_fetched_and_no_others(tmp_path, monkeypatch):
  """Records the requests to the hub's client, which answers with a folder."""
  asked = []

  def snapshot_download(repo, **options):
    asked.append((repo, options))
    return str(tmp_path)

  monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
  hub.fetched.cache_clear()
  (tmp_path / "en").mkdir()
  for name in ("train-0.jsonl", "validation-0.jsonl", "test-0.jsonl", "script.py"):
    (tmp_path / "en" / name).write_text("{}")
  found = find_files("jsonl", "hf:a/b/en@v2")
  assert [(f.path.name, f.split) for f in found] == [
    ("train-0.jsonl", "train"), ("validation-0.jsonl", "validation")]  # fmt: skip
  find_files("jsonl", "hf:a/b/en@v2")
  ((repo, options),) = asked  # once
  assert (repo, options["repo_type"], options["revision"]) == ("a/b", "dataset", "v2")
  assert "en/*.jsonl" in options["allow_patterns"]
  assert not any("py" in pattern for pattern in options["allow_patterns"])
  with pytest.raises(DataError, match=r"hf:a/b' has no parquet file; .*data\.source=jsonl"):
    find_files("parquet", "hf:a/b")
  hub.fetched.cache_clear()


CODE = """
import sys
from scmoe.data import DataConfig, open_data
from scmoe.base.errors import DataError
options = {"batch_size": 2, "seed": 0}
small = {"seq_len": 8, "source": "jsonl"}
data = open_data(DataConfig(path="hf:someone/texts/en", **small), **options)
print(data.domains, data.corpus.documents, len(data.validation_domains))
try:
  open_data(DataConfig(path="hf:someone/else", **small), **options)
except DataError as error:
  print(error)
"""


def test_without_a_network_what_was_fetched_is_read_and_the_rest_is_one_line(tmp_path):
  """The hub's own client and the layout of its cache."""
  cached = tmp_path / "hub" / "datasets--someone--texts"
  (cached / "refs").mkdir(parents=True)
  (cached / "refs" / "main").write_text(COMMIT)
  for language in ("en", "de"):
    folder = cached / "snapshots" / COMMIT / language
    folder.mkdir(parents=True)
    for split, count in (("train", 30), ("validation", 3)):
      rows = [json.dumps({"text": f"{language} {split} {i}"}) + "\n" for i in range(count)]
      (folder / f"{split}-00000.jsonl").write_text("".join(rows))
  environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path)}
  # Nothing listens there: the client looks for the network, and finds none.
  environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
  done = subprocess.run(
    [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, timeout=200
  )
  assert done.returncode == 0, done.stderr
  first, second = done.stdout.splitlines()
  assert first == "('en',) 33 1"
  assert second.startswith("data.path='hf:someone/else' cannot be fetched (")
  assert "hf download someone/else --repo-type dataset --local-dir DIR" in second
