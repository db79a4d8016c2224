"""Stored corpora against the same read in memory, which is the plain form of both."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from covering import night

from scmoe.base.errors import DataError
from scmoe.data import DataConfig, open_data, packing, store, text
from scmoe.data.text import split_file, split_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path):
  """Text, rows in two domains, and rows whose files are named by split."""
  rng = np.random.default_rng(0)
  words = [bytes(rng.integers(97, 123, rng.integers(2, 9), np.uint8)).decode() for _ in range(200)]
  line = lambda: " ".join(rng.choice(words, 12)) + ("\n\n" if rng.random() < 0.2 else "\n")
  for name in ("a.txt", "b.txt"):
    (tmp_path / name).write_text("".join(line() for _ in range(600)) + "é" * 50)
  rows = [json.dumps({"text": line() + "ü", "kind": "xy"[i % 2]}) for i in range(400)]
  rows[7] = "no json"
  (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
  (tmp_path / "named").mkdir()
  for split, part in (("train", rows[8:200]), ("validation", rows[200:220]), ("test", rows[220:])):
    (tmp_path / "named" / f"{split}-0.jsonl").write_text("\n".join(part) + "\n")
  return tmp_path


SOURCES = {
  "text": {"source": "text", "path": "{}/a.txt", "document_bytes": 700},
  "folder": {"source": "text", "path": "{}", "document_bytes": 300, "limit_bytes": 30000},
  "rows": {"source": "jsonl", "path": "{}/rows.jsonl", "domain_field": "kind"},
  "named": {"source": "jsonl", "path": "{}/named"},
  "one document": {"source": "text", "path": "{}/a.txt", "document_bytes": 0},
  "all of it for training": {"source": "text", "path": "{}/a.txt", "validation_fraction": 0.0},
  "mixture": {
    "source": "mixture",
    "mixture": "text:{}/a.txt:0.7,text:{}/b.txt:0.2,jsonl:{}/rows.jsonl:0.1",
  },
}


def config_of(name, folder, **more):
  fields = {k: v.replace("{}", str(folder)) if isinstance(v, str) else v
            for k, v in SOURCES[name].items()}  # fmt: skip
  return DataConfig(**{"seq_len": 32, "cache_dir": str(folder / "cache"), **fields, **more})


def opened(config, monkeypatch, *, large):
  with monkeypatch.context() as patch:
    patch.setattr(store, "LARGE", 0 if large else 1 << 40)
    patch.setattr(store, "_BATCH", 5000)  # many batches
    patch.setattr(text, "_LARGE", 1000 if large else 1 << 40)
    patch.setattr(text, "_BLOCK", 1777)
    return open_data(config, batch_size=4, seed=3)


@pytest.mark.parametrize(
  ("name", "tokenizer"),
  [*((name, "bytes") for name in SOURCES), ("text", "bpe"), ("mixture", "bpe")],
)
def test_the_same_rows_in_the_same_order(name, tokenizer, folder, monkeypatch):
  config = config_of(name, folder, tokenizer=tokenizer, vocab_size=300)
  plain, stored = (opened(config, monkeypatch, large=large) for large in (False, True))
  assert stored.domains == plain.domains
  assert stored.corpus.documents == plain.corpus.documents
  assert stored.corpus.bad_rows == plain.corpus.bad_rows
  assert stored.tokenizer.digest == plain.tokenizer.digest
  for a, b in zip(stored.corpus.domains, plain.corpus.domains):
    for split in ("train", "validation"):
      own, other = getattr(a, split), getattr(b, split)
      np.testing.assert_array_equal(own.tokens[0 : len(own.tokens)], other.tokens)
      np.testing.assert_array_equal(own.starts, other.starts)
      np.testing.assert_array_equal(own.pairs, other.pairs)
      assert own.text_bytes == other.text_bytes
  theirs = plain.train()
  for _, batch in zip(range(20), stored.train()):
    for name_, value in vars(next(theirs)).items():
      np.testing.assert_array_equal(getattr(batch, name_), value)
  assert len(stored.validation_domains) == len(plain.validation_domains)


def test_a_second_start_reads_no_text(folder, monkeypatch):
  config = config_of("mixture", folder)
  first = opened(config, monkeypatch, large=True)
  iterator = first.train()
  for _ in range(5):
    next(iterator)
  state, after = iterator.state(), next(iterator)
  monkeypatch.setattr(store, "documents_of", lambda *_: pytest.fail("it reads the text again"))
  second = opened(config, monkeypatch, large=True)
  assert second.fingerprint() == first.fingerprint()
  resumed = second.train()
  resumed.restore(state)
  np.testing.assert_array_equal(next(resumed).inputs, after.inputs)


def test_other_text_other_options_and_other_tokenizers_have_other_files(folder, monkeypatch):
  config = config_of("text", folder)
  opened(config, monkeypatch, large=True)
  count = lambda: len(list((folder / "cache").glob("corpus-*")))
  assert count() == 1
  opened(dataclasses.replace(config, seq_len=16, packing="pack"), monkeypatch, large=True)
  assert count() == 1  # rows are made anew, tokens are not
  opened(dataclasses.replace(config, validation_fraction=0.2), monkeypatch, large=True)
  opened(dataclasses.replace(config, tokenizer="bpe", vocab_size=280), monkeypatch, large=True)
  assert count() == 3
  before = opened(config, monkeypatch, large=True).fingerprint()
  with open(folder / "a.txt", "a") as file:
    file.write("one more line\n" * 90)
  after = opened(config, monkeypatch, large=True).fingerprint()
  assert count() == 4
  assert after["digest"] != before["digest"]


def test_what_shares_a_row_is_decided_once(folder, monkeypatch, caplog):
  """Best fit over all documents takes its time: a second start reads what the first one found."""
  config = config_of("text", folder, packing="pack")
  rows = lambda data: [
    data._train.read(r, True)["inputs"].tolist() for r in range(len(data._train))
  ]
  plain = rows(opened(config, monkeypatch, large=False))
  assert rows(opened(config, monkeypatch, large=True)) == plain
  (kept,) = (folder / "cache").glob("corpus-*/0.train.pack-32.*.npy")
  with monkeypatch.context() as patch:
    patch.setattr(packing, "_best_fit", lambda *_: pytest.fail("it packs again"))
    assert rows(opened(config, monkeypatch, large=True)) == plain
  good = np.load(kept)
  for damaged in (good[:-1], good + 1, np.zeros_like(good), good.astype(np.int64)):
    np.save(kept, damaged)
    caplog.clear()
    assert rows(opened(config, monkeypatch, large=True)) == plain
    assert "is damaged; making it again" in caplog.text
    np.testing.assert_array_equal(np.load(kept), good)
  kept.write_bytes(b"no array")
  assert rows(opened(config, monkeypatch, large=True)) == plain


# Tracing every allocation takes seconds; other tests compare the rows of all packings.
@pytest.mark.parametrize("packing_", [night("concat"), night("pad"), "pack"])
def test_opening_holds_nothing_per_row(packing_, folder, monkeypatch):
  """Memory grows with the number of documents, however short the rows are."""
  sizes = []
  for seq_len in (4, 64):
    config = config_of("text", folder, packing=packing_, seq_len=seq_len)
    # The first one tokenises and imports; what that takes is not counted.
    next(opened(config, monkeypatch, large=True).train())
    gc.collect()
    tracemalloc.start()
    data = opened(config, monkeypatch, large=True)
    next(data.train())
    gc.collect()
    sizes.append((tracemalloc.get_traced_memory()[0], len(data._train)))
    tracemalloc.stop()
  (short, many), (long, few) = sizes
  assert many > few + 9000
  assert short - long < 4 * (many - few)


@pytest.mark.parametrize("name", ["0.train.tokens", "meta.json", "0.validation.starts.npy"])
def test_damaged_files_are_made_again(name, folder, monkeypatch, caplog):
  config = config_of("text", folder)
  before = opened(config, monkeypatch, large=True).fingerprint()
  (made,) = (folder / "cache").glob("corpus-*")
  (made / name).write_bytes((made / name).read_bytes()[:-10])
  assert opened(config, monkeypatch, large=True).fingerprint() == before
  assert "is damaged; reading the text again" in caplog.text


@pytest.mark.parametrize("name", ["0.train.starts.npy", "0.train.pairs.npy", "meta.json"])
def test_one_flipped_bit_of_a_small_file_is_found_at_the_start(name, folder, monkeypatch, caplog):
  config = config_of("text", folder)
  before = opened(config, monkeypatch, large=True).fingerprint()
  (made,) = (folder / "cache").glob("corpus-*")
  content = bytearray((made / name).read_bytes())
  at = content.index(b'"tokens": ') + 10 if name == "meta.json" else len(content) - 9
  content[at] ^= 1
  (made / name).write_bytes(content)
  assert opened(config, monkeypatch, large=True).fingerprint() == before
  assert "is damaged; reading the text again" in caplog.text


def test_one_flipped_bit_of_the_tokens_is_found_before_it_is_trained_on(folder, monkeypatch):
  """The damaged file has the same length and valid tokens; only the batch would differ."""
  config = config_of("text", folder)
  plain = opened(config, monkeypatch, large=True)
  rows = [next(it).inputs.tolist() for it in [plain.train()] for _ in range(9)]
  (made,) = (folder / "cache").glob("corpus-*")
  content = bytearray((made / "0.train.tokens").read_bytes())
  content[len(content) // 2 * 2 - 40] ^= 1
  (made / "0.train.tokens").write_bytes(content)
  data = opened(config, monkeypatch, large=True)
  with pytest.raises(
    DataError, match=r"0\.train\.tokens is damaged at byte 65536: .* run the same"
  ):
    [data._train.read(row, True) for row in range(len(data._train))]
  again = opened(config, monkeypatch, large=True)
  assert [next(it).inputs.tolist() for it in [again.train()] for _ in range(9)] == rows


def test_blocks_are_summed_as_they_lie_in_the_file(folder, monkeypatch):
  monkeypatch.setattr(store, "BLOCK", 1000)
  data = opened(config_of("text", folder), monkeypatch, large=True)
  tokens = data.corpus.domains[0].train.tokens
  content = tokens[0 : len(tokens)].tobytes()
  sums = [zlib.crc32(content[at : at + 1000]) for at in range(0, len(content), 1000)]
  assert len(sums) > 20
  assert tokens._sums.tolist() == sums
  assert all(tokens._checked)


def test_a_corpus_of_version_02_is_read_as_it_is(folder, monkeypatch):
  config = config_of("text", folder)
  before = opened(config, monkeypatch, large=True).fingerprint()
  (made,) = (folder / "cache").glob("corpus-*")
  meta = json.loads((made / "meta.json").read_text())
  del meta["crc32"]
  (made / "meta.json").write_text(json.dumps(meta))
  for file in made.glob("*.crc.npy"):
    file.unlink()
  monkeypatch.setattr(store, "documents_of", lambda *_: pytest.fail("it reads the text again"))
  assert opened(config, monkeypatch, large=True).fingerprint() == before


def test_text_that_changes_while_it_is_read_is_no_corpus(folder, monkeypatch):
  config = config_of("rows", folder)
  read, calls = store.documents_of, []

  def changing(*args):
    calls.append(1)
    if len(calls) == 2:  # between the two readings; with a domain that the first has not seen
      with open(folder / "rows.jsonl", "a") as file:
        file.write(json.dumps({"text": "late", "kind": "z"}) + "\n")
    return read(*args)

  monkeypatch.setattr(store, "documents_of", changing)
  with pytest.raises(DataError, match="the text changed while it was read; run the same command"):
    opened(config, monkeypatch, large=True)
  assert not list((folder / "cache").glob("corpus-*"))
  assert opened(config, monkeypatch, large=True).corpus.documents == 400


BUILD = """
import logging, sys, time
from scmoe.data import DataConfig, open_data, store
logging.basicConfig(level=logging.INFO)
store.LARGE = 0
read = store.documents_of
def slowly(*args):
  for document in read(*args):
    time.sleep(0.002)
    yield document
store.documents_of = slowly
config = DataConfig(path=sys.argv[1], cache_dir=sys.argv[2], seq_len=32, document_bytes=300)
data = open_data(config, batch_size=2, seed=0)
print(data.fingerprint()["digest"], next(data.train()).inputs.sum())
"""


def test_of_two_builders_one_makes_the_corpus_and_the_other_waits(folder):
  words = [sys.executable, "-c", BUILD, str(folder / "a.txt"), str(folder / "cache")]
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  running = [subprocess.Popen(words, env=environment, **options) for _ in range(2)]
  said = [process.communicate(timeout=120) for process in running]
  assert [process.returncode for process in running] == [0, 0], said
  assert said[0][0] == said[1][0]
  assert sum("tokenising into" in errors for _, errors in said) == 1
  assert len(list((folder / "cache").glob("corpus-*"))) == 1


def test_what_a_killed_builder_left_is_removed(folder, monkeypatch):
  config = config_of("text", folder)
  key = store._key(config, store.tokenizers.ByteTokenizer())
  left = folder / "cache" / f"corpus-{key}.partial-abc"
  left.mkdir(parents=True)
  (left / "0.train.tokens").write_bytes(b"half")
  opened(config, monkeypatch, large=True)
  assert [p.name for p in (folder / "cache").glob("corpus-*")] == [f"corpus-{key}"]


def test_a_cache_that_cannot_be_written_and_text_that_is_none(folder, monkeypatch):
  (folder / "file").write_text("")
  config = config_of("text", folder, cache_dir=str(folder / "file" / "x"))
  with pytest.raises(DataError, match=r"data\.cache_dir: .* cannot be written .*; name a folder"):
    opened(config, monkeypatch, large=True)
  for content, words in (
    (b"good\n" * 900 + b"bad \xff\n", "a.txt:901: invalid UTF-8"),
    (b"good\n" * 900 + b"\0\n", "a.txt:901: NUL byte"),
    (b" \n" * 900, "a.txt:1: empty text"),
    (b"good\n" * 900 + "é".encode()[:1], "a.txt:901: invalid UTF-8"),
  ):
    (folder / "a.txt").write_bytes(content)
    with pytest.raises(DataError) as refused:
      opened(config_of("text", folder, max_bad_rows=0), monkeypatch, large=True)
    assert words in str(refused.value)
    assert not list((folder / "cache").glob("corpus-*"))  # nothing half-made stays


def test_a_file_is_cut_as_its_text_is(tmp_path, monkeypatch):
  rng = np.random.default_rng(1)
  pieces = [b"abc", "é".encode(), b"\n", b"\n\n", b"x" * 40, "日本".encode()]
  for block in (7, 64, 100000):
    monkeypatch.setattr(text, "_BLOCK", block)
    content = b"".join(pieces[i] for i in rng.integers(0, len(pieces), 900))
    (tmp_path / "a").write_bytes(content)
    for size in (1, 10, 333, 10**6):
      assert list(split_file(tmp_path / "a", size)) == list(split_text(content, size))


def test_arrow_folders_of_hugging_face_datasets(tmp_path, monkeypatch):
  """`save_to_disk` makes a folder per split, with files in Arrow's stream format."""
  arrow = pytest.importorskip("pyarrow")
  for split, count in (("train", 60), ("validation", 6)):
    (tmp_path / "set" / split).mkdir(parents=True)
    texts = [f"{split} row {i} " + "word " * 20 for i in range(count)]
    table = arrow.table({"text": texts, "n": list(range(count))})
    path = tmp_path / "set" / split / "data-00000-of-00001.arrow"
    with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
      writer.write_table(table, max_chunksize=7)
    (tmp_path / "set" / split / "state.json").write_text("{}")
  config = DataConfig(path=str(tmp_path / "set"), seq_len=32, cache_dir=str(tmp_path / "cache"))
  assert config.kind == "arrow"
  for large in (False, True):
    data = opened(config, monkeypatch, large=large)
    assert data.corpus.documents == 66
    (domain,) = data.corpus.domains
    held = bytes(domain.validation.tokens[1:19].astype(np.uint8))
    assert held == b"validation row 0 w"
  with pytest.raises(DataError, match=r"no column data\.field='body'; it has: text, n"):
    open_data(dataclasses.replace(config, field="body"), batch_size=2, seed=0)
  (tmp_path / "set" / "train" / "data-00000-of-00001.arrow").write_bytes(b"nothing")
  with pytest.raises(DataError, match="not a readable Arrow file"):
    open_data(config, batch_size=2, seed=0)


@pytest.mark.nightly  # it reads 160 MB
def test_memory_does_not_grow_with_the_text(tmp_path):
  """160 MB in a process of its own, which may take 100 MB above what it has at its start."""
  line = "some words of a line that is long enough to be one of many lines in a text\n"
  with open(tmp_path / "a.txt", "w") as file:
    for i in range(160):
      file.write(f"part {i}\n\n" + line * (10**6 // len(line)))
  code = """
import resource, sys
from scmoe.data import DataConfig, open_data
import grain, numpy
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
data = open_data(DataConfig(path=sys.argv[1], cache_dir=sys.argv[2]), batch_size=16, seed=0)
batches = data.train()
for _ in range(50):
  next(batches)
print(data.corpus.domains[0].train.text_bytes, peak() - before)
"""
  words = [sys.executable, "-c", code, str(tmp_path / "a.txt"), str(tmp_path / "cache")]
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=200)
  assert done.returncode == 0, done.stderr
  size, grown = map(float, done.stdout.split())
  assert size > 140e6
  assert grown < 100, f"{grown:.0f} MiB"
