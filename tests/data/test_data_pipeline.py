"""The pipeline: deterministic, resumable, the same for any number of processes."""

import dataclasses
import hashlib
import itertools
import json
import logging

import jax
import numpy as np
import pytest

from scmoe.base.batch import Batch
from scmoe.base.errors import ConfigError, DataError
from scmoe.base.options import check_options
from scmoe.data import (
  DataConfig,
  bigram,
  bigram_bits_per_byte,
  check_fingerprint,
  check_vocab,
  open_data,
  pipeline,
)
from scmoe.data.files import atomic_write

FIELDS = tuple(field.name for field in dataclasses.fields(Batch))
SMALL = DataConfig(source="procedural", limit_bytes=20_000, seq_len=32)


def write_rows(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def take(iterator, n):
  return list(itertools.islice(iterator, n))


def assert_same(left, right):
  assert len(left) == len(right)
  for a, b in zip(left, right):
    for name in FIELDS:
      x, y = getattr(a, name), getattr(b, name)
      assert x.dtype == y.dtype
      np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.fixture(scope="module")
def small():
  return open_data(SMALL, batch_size=8, seed=0)


def test_a_batch_is_what_the_contract_says(small):
  batch = next(small.train())
  ints = dict.fromkeys(("inputs", "targets", "segment_ids", "positions"), (np.int32, (8, 32)))
  expected = ints | {"weights": (np.float32, (8, 32)), "domain": (np.int32, (8,))}
  assert {name: (a.dtype, a.shape) for name, a in vars(batch).items()} == expected
  assert small.domains == ("markov", "recall", "arithmetic")


def test_a_batch_of_tokens_and_microbatches():
  batch = Batch.of_tokens([[3, 1, 4], [1, 5, 9]])
  np.testing.assert_array_equal(batch.targets, [[1, 4, 3], [5, 9, 1]])
  np.testing.assert_array_equal(batch.positions, [[0, 1, 2]] * 2)
  assert batch.weights.sum() == batch.segment_ids.sum() == 6
  given = Batch.of_tokens([[3, 1, 4]], targets=[[1, 4, 1]])
  np.testing.assert_array_equal(given.targets, [[1, 4, 1]])
  for part in (batch, Batch.stack([batch, batch, batch])):
    ids = dict.fromkeys(("inputs", "targets", "segment_ids", "positions"), np.int32)
    types = {name: array.dtype for name, array in vars(part).items() if array is not None}
    assert types == ids | {"weights": np.float32}
  assert part.inputs.shape == (3, 2, 3)
  np.testing.assert_array_equal(part.inputs[1], batch.inputs)


def test_rows_never_mix_domains(small):
  letters = {0: set(b"abcdefghijklmnopqrstuvwxyz012345"), 2: set(b"0123456789+=;")}
  for batch in take(small.train(), 20):
    for inputs, domain in zip(batch.inputs, batch.domain):
      seen = set(inputs.tolist()) - {0, 256}
      if domain == 1:
        assert seen <= set(b"abcdefghijklmnopqrstuvwxyz0123456789?")
      else:
        assert seen <= letters[int(domain)]


def test_order_is_a_function_of_the_seed(small):
  again = open_data(SMALL, batch_size=8, seed=0)
  assert_same(take(small.train(), 6), take(again.train(), 6))
  other = next(open_data(SMALL, batch_size=8, seed=1).train())
  assert not np.array_equal(next(small.train()).inputs, other.inputs)


def test_every_row_comes_once_a_pass_and_passes_differ(tmp_path):
  write_rows(tmp_path / "x.jsonl", [{"text": f"{i:03}" * 5} for i in range(40)])
  cfg = DataConfig(
    source="jsonl",
    path=str(tmp_path / "x.jsonl"),
    packing="pad",
    seq_len=16,
    validation_fraction=0.0,
  )
  iterator = open_data(cfg, batch_size=10, seed=3).train()
  passes = []
  for _ in range(3):
    rows = np.concatenate([batch.inputs for batch in take(iterator, 4)])
    passes.append([bytes(row[1:4].astype(np.uint8)).decode() for row in rows])
  for one in passes:
    assert sorted(one) == [f"{i:03}" for i in range(40)]
  assert passes[0] != passes[1] != passes[2] != passes[0]


def test_the_shuffle_takes_neighbours_far_apart():
  """docs/data.md compares the shuffle with a perfect one; these are its figures."""
  config = DataConfig(source="procedural", path="markov", limit_bytes=100_000, seq_len=4)
  for seed in range(3):
    data = open_data(config, batch_size=16, seed=seed)
    (table,) = data._train.tables
    rows, order = len(table), data.training_order()
    assert rows > 20_000
    first, second = ([order[i + p * rows] for i in range(rows)] for p in (0, 1))
    assert sorted(first) == sorted(second) == list(range(rows))
    places = np.argsort(first)
    apart = np.abs(np.diff(places)) / rows
    assert 0.2 < apart.mean() < 0.45  # a perfect shuffle: 1/3
    assert (apart < 0.01).mean() < 0.025  # 0.02
    assert (np.diff(places // 16) == 0).mean() < 2 * 15 / rows  # in one batch: 15 / rows
    drift = np.abs([np.mean(part) / rows - 0.5 for part in np.array_split(np.array(first), 50)])
    assert drift.max() < 4 * np.sqrt(50 / 12 / rows)  # any fiftieth of a pass is a fair sample
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.2


def test_the_order_of_validation_is_that_of_the_hashes(monkeypatch):
  """The plain form, and pieces of any size."""
  hashed = lambda i: hashlib.blake2b(b"%d" % i, digest_size=8).digest()
  for size in (3, 64, 1 << 16):
    monkeypatch.setattr(pipeline, "_HASHED", size)
    for count in (0, 1, 64, 200):
      assert pipeline.shuffled(range(7, 7 + count)).tolist() == [
        7 + i for i in sorted(range(count), key=hashed)
      ]


@pytest.mark.parametrize("packing", ["concat", "pack", "pad"])
def test_resume_is_bitwise(packing):
  data = open_data(dataclasses.replace(SMALL, packing=packing), batch_size=8, seed=0)
  straight = take(data.train(), 20)
  first = data.train()
  assert_same(take(first, 8), straight[:8])
  state = json.loads(json.dumps(first.state()))
  take(first, 3)  # what was read ahead must not move the stored position
  resumed = open_data(data.config, batch_size=8, seed=0).train()
  resumed.restore(state)
  assert_same(take(resumed, 12), straight[8:])
  first.restore(state)  # and back, in the same iterator
  assert_same(take(first, 12), straight[8:])


def test_a_fresh_iterator_has_a_state(small):
  iterator = small.train()
  state = iterator.state()
  ahead = take(iterator, 2)
  iterator.restore(state)
  assert_same(take(iterator, 2), ahead)


@pytest.mark.parametrize("state", [None, {}, {"next_index": -1}, {"next_index": "4"}, {"x": 1}])
def test_foreign_states_are_refused(small, state):
  with pytest.raises(DataError, match=r"data position .* needs next_index >= 0"):
    small.train().restore(state)


@pytest.mark.parametrize("count", [2, 4])
def test_processes_together_read_the_batches_of_one(small, count):
  shares = [
    open_data(SMALL, batch_size=8, seed=0, process_index=i, process_count=count)
    for i in range(count)
  ]

  def joined(streams):
    steps = zip(*streams)
    return [jax.tree.map(lambda *parts: np.concatenate(parts), *step) for step in steps]

  whole = take(small.train(), 6)
  assert_same(joined([take(share.train(), 6) for share in shares]), whole)
  held_out = list(small.validation(max_batches=4))
  assert_same(joined([list(share.validation(max_batches=4)) for share in shares]), held_out)
  # The position counts global batches: another number of processes can continue from it.
  iterator = small.train()
  take(iterator, 3)
  streams = []
  for share in shares:
    resumed = share.train()
    resumed.restore(iterator.state())
    streams.append(take(resumed, 3))
  assert_same(joined(streams), whole[3:])
  check_fingerprint(small.fingerprint(), shares[0].fingerprint())


def test_validation_is_always_the_same_and_complete(small):
  first, second = list(small.validation()), list(small.validation())
  assert_same(first, second)
  assert len(first) == len(small.validation())
  tokens = sum(d.validation.size for d in small.corpus.domains)
  assert sum(batch.weights.sum() for batch in first) == tokens
  assert {batch.inputs.shape for batch in first} == {(8, 32)}
  assert len(list(small.validation(max_batches=2))) == 2
  other_seed = open_data(SMALL, batch_size=8, seed=5)
  assert_same(list(other_seed.validation()), first)


def test_validation_of_a_domain_pads_its_last_batch(small):
  rows = 0
  for index, name in enumerate(small.domains):
    batches = list(small.validation(name))
    real = np.concatenate([batch.weights.any(axis=1) for batch in batches])
    domain = np.concatenate([batch.domain for batch in batches])
    assert (domain[real] == index).all()
    count = int(real.sum())
    assert real[:count].all()
    assert len(real) == -(-count // 8) * 8
    rows += count
  assert rows == sum(batch.weights.any(axis=1).sum() for batch in small.validation())


def split_of(tmp_path, rows):
  write_rows(tmp_path / "x.jsonl", rows)
  cfg = DataConfig(
    source="jsonl",
    path=str(tmp_path / "x.jsonl"),
    seq_len=16,
    packing="pad",
    validation_fraction=0.2,
  )
  data = open_data(cfg, batch_size=1, seed=0)
  held_out = data.corpus.domains[0].validation.tokens
  parts = "".join(chr(t) if t < 256 else "|" for t in held_out.tolist()).split("|")
  return {part for part in parts if part}


def test_adding_documents_moves_none_of_the_old_ones(tmp_path):
  rows = [{"text": f"document {i}"} for i in range(200)]
  before = split_of(tmp_path, rows)
  after = split_of(tmp_path, [{"text": f"new {i}"} for i in range(100)] + rows[::-1])
  assert {text for text in after if text.startswith("document")} == before
  assert 0.1 < len(before) / 200 < 0.3


def test_copies_of_a_document_are_on_one_side(tmp_path):
  rows = [{"text": f"document {i % 10}"} for i in range(100)]
  held_out = split_of(tmp_path, rows)
  data = open_data(
    DataConfig(source="jsonl", path=str(tmp_path / "x.jsonl"), validation_fraction=0.2, seq_len=8),
    batch_size=1,
    seed=0,
  )
  trained = bytes(t for t in data.corpus.domains[0].train.tokens.tolist() if t < 256).decode()
  assert held_out
  assert not any(text in trained for text in held_out)


def test_two_documents_are_enough_for_both_splits(tmp_path):
  write_rows(tmp_path / "x.jsonl", [{"text": "first text"}, {"text": "second text"}])
  cfg = DataConfig(source="jsonl", path=str(tmp_path / "x.jsonl"), seq_len=8)
  data = open_data(cfg, batch_size=1, seed=0)
  assert data.validation_domains == ("x",)
  assert data.corpus.domains[0].train.text_bytes > 0


def test_files_named_by_split_decide_it(tmp_path):
  write_rows(tmp_path / "train-0.jsonl", [{"text": f"t{i}"} for i in range(30)])
  write_rows(tmp_path / "validation-0.jsonl", [{"text": f"v{i}"} for i in range(3)])
  data = open_data(DataConfig(source="jsonl", path=str(tmp_path), seq_len=4), batch_size=1, seed=0)
  (domain,) = data.corpus.domains
  assert bytes(t for t in domain.validation.tokens.tolist() if t < 256) == b"v0v1v2"
  assert domain.train.text_bytes == sum(len(f"t{i}") for i in range(30))


def test_mixtures_keep_their_proportions(tmp_path):
  write_rows(tmp_path / "a.jsonl", [{"text": "a" * 50} for _ in range(20)])
  mixture = f"jsonl:{tmp_path}/a.jsonl:3,procedural:markov:1"
  cfg = DataConfig(
    source="mixture", mixture=mixture, limit_bytes=30_000, seq_len=32, validation_fraction=0.0
  )
  data = open_data(cfg, batch_size=16, seed=0)
  assert data.domains == ("a", "markov")
  domains = np.concatenate([batch.domain for batch in take(data.train(), 50)])
  assert (domains == 0).mean() == pytest.approx(0.75, abs=0.01)
  assert "a: 75.0% of rows" in data.summary()
  assert data.validation_domains == ()


def test_a_single_source_mixes_its_domains_by_size(tmp_path):
  rows = [{"text": "x" * 60, "kind": "big" if i % 10 else "small"} for i in range(200)]
  write_rows(tmp_path / "a.jsonl", rows)
  cfg = DataConfig(
    source="jsonl",
    path=str(tmp_path / "a.jsonl"),
    domain_field="kind",
    seq_len=16,
    validation_fraction=0.0,
  )
  data = open_data(cfg, batch_size=10, seed=0)
  domains = np.concatenate([batch.domain for batch in take(data.train(), 40)])
  assert (domains == data.domains.index("big")).mean() == pytest.approx(0.9, abs=0.02)


def test_domains_of_one_name_are_told_apart(tmp_path):
  for folder in ("one", "two"):
    (tmp_path / folder).mkdir()
    write_rows(tmp_path / folder / "x.jsonl", [{"text": f"{folder} {i}"} for i in range(9)])
  mixture = ",".join(f"jsonl:{tmp_path}/{folder}/x.jsonl:1" for folder in ("one", "two"))
  data = open_data(DataConfig(source="mixture", mixture=mixture, seq_len=8), batch_size=1, seed=0)
  assert data.domains == ("x", "x#2")


def test_limit_bytes_stops_reading_early(tmp_path):
  # The broken line lies beyond the limit, in a source of one domain: it is never reached.
  write_rows(tmp_path / "x.jsonl", [{"text": f"{i:09} "} for i in range(100)])
  with (tmp_path / "x.jsonl").open("a") as file:
    file.write("{broken")
  cfg = DataConfig(source="jsonl", path=str(tmp_path / "x.jsonl"), seq_len=8, max_bad_rows=0)
  data = open_data(dataclasses.replace(cfg, limit_bytes=200), batch_size=1, seed=0)
  assert data.corpus.documents == 20
  with pytest.raises(DataError, match=r"x\.jsonl:101: invalid JSON"):
    open_data(cfg, batch_size=1, seed=0)


def test_limit_bytes_takes_a_prefix():
  full = open_data(dataclasses.replace(SMALL, limit_bytes=0), batch_size=8, seed=0)
  half = open_data(dataclasses.replace(SMALL, limit_bytes=5_000), batch_size=8, seed=0)
  for domain in half.corpus.domains:
    assert 5_000 <= domain.train.text_bytes + domain.validation.text_bytes < 6_000
  assert full.corpus.documents > 100 * half.corpus.documents


# --- fingerprints ---------------------------------------------------------------------------------


def test_fingerprint_is_json_and_stable(small):
  now = open_data(SMALL, batch_size=8, seed=0).fingerprint()
  check_fingerprint(json.loads(json.dumps(small.fingerprint())), now)


@pytest.mark.parametrize(
  ("field", "change", "batch", "seed"),
  [
    ("digest", {"limit_bytes": 21_000}, 8, 0),
    ("rows", {"seq_len": 64}, 8, 0),
    ("rows", {"packing": "pad"}, 8, 0),
    ("document_mask", {"document_mask": False}, 8, 0),
    ("digest", {"validation_fraction": 0.2}, 8, 0),
    ("seed", {}, 8, 1),
    ("batch_size", {}, 4, 0),
  ],
)
def test_a_changed_fingerprint_names_its_field(small, field, change, batch, seed):
  now = open_data(dataclasses.replace(SMALL, **change), batch_size=batch, seed=seed)
  with pytest.raises(DataError) as error:
    check_fingerprint(small.fingerprint(), now.fingerprint())
  assert f"data fingerprint: {field} was " in str(error.value)
  assert "start anew" in str(error.value)


def test_one_edited_byte_changes_the_fingerprint(tmp_path):
  rows = [{"text": f"document {i}"} for i in range(50)]
  prints = []
  for text in ("document 7", "document !"):
    rows[7] = {"text": text}
    write_rows(tmp_path / "x.jsonl", rows)
    cfg = DataConfig(source="jsonl", path=str(tmp_path / "x.jsonl"), seq_len=8)
    prints.append(open_data(cfg, batch_size=1, seed=0).fingerprint())
  with pytest.raises(DataError, match="data fingerprint: digest was "):
    check_fingerprint(*prints)


def test_a_field_missing_on_one_side_differs(small):
  stored = small.fingerprint()
  del stored["order"]
  with pytest.raises(DataError, match="order was None"):
    check_fingerprint(stored, small.fingerprint())
  with pytest.raises(DataError, match="extra was 1 when the run was saved and is None"):
    check_fingerprint({**small.fingerprint(), "extra": 1}, small.fingerprint())


# --- bits per byte --------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("packing", ["concat", "pack", "pad"])
def test_target_bytes_are_the_bytes_of_the_text(tmp_path, tokenizer, packing):
  cfg = dataclasses.replace(
    SMALL, tokenizer=tokenizer, vocab_size=300, packing=packing, cache_dir=str(tmp_path)
  )
  data = open_data(cfg, batch_size=4, seed=0)
  sizes = data.tokenizer.token_bytes()
  for domain in data.corpus.domains:
    batches = data.validation(domain.name)
    total = sum((sizes[b.targets] * b.weights).sum() for b in batches)
    assert total == domain.validation.text_bytes


def test_bigram_is_that_of_a_loop(small):
  fitted = np.zeros((257, 257))
  for domain in small.corpus.domains:
    np.add.at(fitted, (domain.train.tokens[:-1], domain.train.tokens[1:]), 1)
  smooth = fitted + bigram.SMOOTHING
  chance = smooth / smooth.sum(axis=1, keepdims=True)
  bits, size, expected = 0.0, 0, {}
  for domain in small.corpus.domains:
    tokens = domain.validation.tokens
    cost = -np.log2(chance[tokens[:-1], tokens[1:]]).sum()
    expected[domain.name] = cost / domain.validation.text_bytes
    bits, size = bits + cost, size + domain.validation.text_bytes
  total, domains = bigram_bits_per_byte(small)
  assert total == pytest.approx(bits / size)
  assert domains == pytest.approx(expected)


def test_pairs_are_counted_in_order_and_across_chunks(monkeypatch):
  tokens = np.frombuffer(b"abracadabra", np.uint8).astype(np.uint16)
  counts = bigram.count_pairs(tokens)
  assert (counts[97, 98], counts[98, 97], counts[114, 97], counts[97, 114]) == (2, 0, 2, 0)
  monkeypatch.setattr(bigram, "_CHUNK", 3)
  np.testing.assert_array_equal(bigram.count_pairs(tokens), counts)
  assert counts.sum() == len(tokens) - 1
  assert bigram.count_pairs(tokens[:0]).sum() == 0


def test_bigram_does_not_depend_on_the_tokenizer(tmp_path, small):
  cfg = dataclasses.replace(SMALL, tokenizer="bpe", vocab_size=300, cache_dir=str(tmp_path))
  assert bigram_bits_per_byte(open_data(cfg, batch_size=4, seed=0)) == bigram_bits_per_byte(small)


def test_cached_tokens_are_the_same_and_survive_damage(tmp_path, caplog):
  cfg = dataclasses.replace(SMALL, tokenizer="bpe", vocab_size=300, cache_dir=str(tmp_path))
  first = take(open_data(cfg, batch_size=4, seed=0).train(), 3)
  assert_same(take(open_data(cfg, batch_size=4, seed=0).train(), 3), first)
  assert not list(tmp_path.glob("*.tmp"))
  for file in tmp_path.glob("tokens-*.npy"):
    damaged = file.read_bytes()[:-64]
    file.unlink()  # a new file: threads of the readers above still have the old one mapped
    file.write_bytes(damaged)
  with caplog.at_level(logging.WARNING):
    assert_same(take(open_data(cfg, batch_size=4, seed=0).train(), 3), first)
  assert "is damaged; making it again" in caplog.text


def test_a_flipped_bit_of_cached_tokens_is_found(tmp_path, caplog):
  """A flipped bit that keeps length, documents and vocabulary still makes other text."""
  cfg = dataclasses.replace(SMALL, tokenizer="bpe", vocab_size=300, cache_dir=str(tmp_path))
  first = take(open_data(cfg, batch_size=4, seed=0).train(), 3)
  for file in tmp_path.glob("tokens-*.npy"):
    content = bytearray(file.read_bytes())
    content[-40] ^= 2
    file.write_bytes(content)
  with caplog.at_level(logging.WARNING):
    assert_same(take(open_data(cfg, batch_size=4, seed=0).train(), 3), first)
  assert "is damaged; making it again" in caplog.text


@pytest.mark.parametrize("processes", [1, 2])
def test_one_row_a_process(processes):
  """Was an OverflowError of grain: the length of an endless order is more than it can divide."""
  whole = take(open_data(SMALL, batch_size=processes, seed=0).train(), 5)
  shares = [
    take(open_data(SMALL, batch_size=processes, seed=0, process_index=i,
                   process_count=processes).train(), 5)
    for i in range(processes)
  ]  # fmt: skip
  for step in range(5):
    rows = np.concatenate([share[step].inputs for share in shares])
    assert rows.shape == (processes, SMALL.seq_len)
    np.testing.assert_array_equal(rows, whole[step].inputs)
  eight = take(open_data(SMALL, batch_size=8, seed=0).train(), 1)
  np.testing.assert_array_equal(whole[0].inputs[0], eight[0].inputs[0])


def test_a_cache_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path):
  (tmp_path / "file").write_text("in the way")
  cfg = dataclasses.replace(SMALL, tokenizer="bpe", vocab_size=300)
  with pytest.raises(DataError, match=r"data\.cache_dir: .* cannot be written .*; name a folder"):
    open_data(dataclasses.replace(cfg, cache_dir=str(tmp_path / "file")), batch_size=4, seed=0)

  def fill_the_disk():
    with atomic_write(tmp_path / "x") as file:
      file.write(b"half")
      raise OSError(28, "No space left on device")

  with pytest.raises(DataError, match="No space left"):
    fill_the_disk()
  assert [p.name for p in tmp_path.iterdir()] == ["file"]


# --- errors ---------------------------------------------------------------------------------------


def test_data_smaller_than_a_batch_say_what_fits(tmp_path):
  write_rows(tmp_path / "x.jsonl", [{"text": "a" * 10} for _ in range(3)])
  cfg = DataConfig(
    source="jsonl",
    path=str(tmp_path / "x.jsonl"),
    seq_len=16,
    packing="pad",
    validation_fraction=0.0,
  )
  with pytest.raises(DataError) as error:
    open_data(cfg, batch_size=4, seed=0)
  assert "3 sequences of data.seq_len=16, less than one batch of train.batch_size=4" in str(
    error.value
  )
  assert "use a batch of at most 3" in str(error.value)
  open_data(cfg, batch_size=3, seed=0)


def test_empty_data_are_an_error(tmp_path):
  (tmp_path / "x.jsonl").write_text("\n\n")
  with pytest.raises(DataError, match=r"x\.jsonl' has no usable document \(0 bad rows\)"):
    open_data(DataConfig(source="jsonl", path=str(tmp_path / "x.jsonl")), batch_size=1, seed=0)


def test_no_validation_text_is_an_error_only_when_asked_for(tmp_path):
  write_rows(tmp_path / "x.jsonl", [{"text": "only one document"}])
  data = open_data(
    DataConfig(source="jsonl", path=str(tmp_path / "x.jsonl"), seq_len=4), batch_size=1, seed=0
  )
  with pytest.raises(DataError, match=r"has no validation text; raise data.validation_fraction"):
    data.validation()
  with pytest.raises(DataError, match="has no validation text"):
    bigram_bits_per_byte(data)


def test_errors_of_the_call(small):
  with pytest.raises(ConfigError, match=r"train.batch_size=9 is not divisible by the 2 processes"):
    open_data(SMALL, batch_size=9, seed=0, process_count=2)
  with pytest.raises(DataError, match="no domain 'prose' in the data; one of: markov, recall"):
    small.validation("prose")
  check_vocab(small, 257)
  with pytest.raises(DataError, match=r"model\.vocab_size=256 is smaller than the 257 tokens"):
    check_vocab(small, 256)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"source": "stdlibb"}, "data.source='stdlibb' is unknown; did you mean 'stdlib'?"),
    ({"source": "text"}, "data.path='' is empty; data.source='text' needs a file or folder"),
    (
      {"source": "stdlib", "mixture": "stdlib:1"},
      "is not read by data.source='stdlib'; set data.source='mixture'",
    ),
    ({"packing": "tight"}, "data.packing='tight' is unknown"),
    ({"seq_len": 1}, "data.seq_len=1 is too small; the least is 2"),
    ({"validation_fraction": 1.5}, "data.validation_fraction=1.5 is too large"),
    ({"source": "procedural", "path": "x"}, "unknown procedural domain 'x'"),
  ],
)
def test_config_errors_name_the_field(fields, words):
  with pytest.raises(ConfigError) as error:
    open_data(DataConfig(**fields), batch_size=1, seed=0)
  assert words in str(error.value)
  assert "\n" not in str(error.value)


def test_every_field_has_a_meaning():
  check_options(DataConfig(), "data")
  assert all(f.metadata["help"] for f in dataclasses.fields(DataConfig))


def test_a_machine_without_grain_is_told_so(monkeypatch):
  import sys

  monkeypatch.setitem(sys.modules, "grain", None)
  with pytest.raises(ConfigError, match="reading data needs the package 'grain'"):
    open_data(SMALL, batch_size=8, seed=0)
