"""Packing: every token of a document and its end is predicted once, in its own context."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scmoe.data.bigram import count_pairs
from scmoe.data.corpus import Stream, join_documents
from scmoe.data.packing import make_rows
from scmoe.data.tokenizers import ByteTokenizer

EOS = ByteTokenizer.eos_id


def stream_of(texts):
  tokens = join_documents(texts, ByteTokenizer())
  starts = np.flatnonzero(tokens == EOS)[:-1]
  return Stream(tokens, starts, sum(map(len, texts)), count_pairs(tokens))


def segments(table, document_mask=True):
  # (inputs, targets) of every segment of every row, padding left out.
  for r in range(len(table)):
    row = table.read(r, document_mask)
    for number in range(1, row["segment_ids"].max() + 1):
      here = row["segment_ids"] == number
      yield row["inputs"][here].tolist(), row["targets"][here].tolist(), row["positions"][here]


def test_a_row_on_paper():
  table = make_rows(stream_of([b"abc", b"de"]), "concat", 4)
  first, second = table.read(0), table.read(1)
  a, b, c, d, e = b"abcde"
  assert first["inputs"].tolist() == [EOS, a, b, c]
  assert first["targets"].tolist() == [a, b, c, EOS]
  assert second["inputs"].tolist() == [EOS, d, e, 0]
  assert second["targets"].tolist() == [d, e, EOS, 0]
  assert second["weights"].tolist() == [1, 1, 1, 0]
  assert second["segment_ids"].tolist() == [1, 1, 1, 0]
  assert first["positions"].tolist() == [0, 1, 2, 3]
  assert len(table) == 2
  wide = make_rows(stream_of([b"abc", b"de"]), "concat", 8).read(0)
  assert wide["segment_ids"].tolist() == [1, 1, 1, 1, 2, 2, 2, 0]
  assert wide["positions"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]


DOCUMENTS = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=25)


@settings(deadline=None, max_examples=60)
@given(texts=DOCUMENTS, seq_len=st.integers(2, 17), packing=st.sampled_from(["concat", "pad"]))
def test_every_token_is_predicted_once_from_its_own_document(texts, seq_len, packing):
  check_coverage(texts, seq_len, packing)


@settings(deadline=None, max_examples=25)
@given(texts=DOCUMENTS, seq_len=st.integers(2, 17))
def test_best_fit_packing_predicts_every_token_once(texts, seq_len):
  check_coverage(texts, seq_len, "pack")


def check_coverage(texts, seq_len, packing):
  table = make_rows(stream_of(texts), packing, seq_len)
  expected = [[EOS, *text, EOS] for text in texts]
  pairs = sorted(p for doc in expected for p in itertools.pairwise(doc))
  found = []
  for inputs, targets, positions in segments(table):
    assert inputs[1:] == targets[:-1]  # targets are the inputs, one later
    assert EOS not in inputs[1:]  # one document
    assert positions.tolist() == list(range(len(inputs)))
    found += zip(inputs, targets)
  assert sorted(found) == pairs
  for r in range(len(table)):
    row = table.read(r)
    assert {k: (v.dtype, v.shape) for k, v in row.items()} == {
      "inputs": (np.int32, (seq_len,)),
      "targets": (np.int32, (seq_len,)),
      "weights": (np.float32, (seq_len,)),
      "segment_ids": (np.int32, (seq_len,)),
      "positions": (np.int32, (seq_len,)),
    }
    np.testing.assert_array_equal(row["weights"], row["segment_ids"] > 0)
    assert row["weights"][0] == 1  # no empty row


def test_concat_pads_only_the_last_row():
  table = make_rows(stream_of([b"x" * 13, b"y" * 20, b"z"]), "concat", 8)
  filled = [table.read(r)["weights"].sum() for r in range(len(table))]
  assert filled == [8, 8, 8, 8, 5]


def test_pack_keeps_whole_what_fits_and_wastes_less_than_pad():
  texts = [bytes([65 + i]) * (3 + 5 * i % 13) for i in range(26)]
  packed, padded = (make_rows(stream_of(texts), kind, 16) for kind in ("pack", "pad"))
  assert len(padded) == 26
  assert len(packed) <= 1.2 * sum(len(t) + 1 for t in texts) / 16 + 1
  assert sorted(len(s[0]) for s in segments(packed)) == sorted(len(t) + 1 for t in texts)


def test_pad_gives_each_document_its_own_rows():
  table = make_rows(stream_of([b"a" * 3, b"b" * 12]), "pad", 8)
  assert [int(table.read(r)["weights"].sum()) for r in range(len(table))] == [4, 8, 5]


def test_without_the_document_mask_a_row_is_one_segment():
  table = make_rows(stream_of([b"abc", b"de"]), "concat", 8)
  row = table.read(0, document_mask=False)
  assert row["segment_ids"].tolist() == [1] * 7 + [0]
  assert row["positions"].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
  np.testing.assert_array_equal(row["inputs"], table.read(0)["inputs"])


@pytest.mark.parametrize("packing", ["concat", "pack", "pad"])
def test_no_documents_make_no_rows(packing):
  assert len(make_rows(stream_of([]), packing, 8)) == 0
