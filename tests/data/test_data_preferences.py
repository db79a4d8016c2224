"""Pairs of answers: two segments a pair, the answers alone counted, one line for what is broken."""

import json

import numpy as np
import pytest

from scmoe.base.errors import ConfigError, DataError
from scmoe.data import DataConfig, exercises, open_data


def opened(tmp_path, rows, **fields):
  path = tmp_path / "pairs.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  given = {"source": "preference", "path": str(path), "packing": "pack", "seq_len": 96}
  given |= {"cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.0, "max_bad_rows": 0}
  return open_data(DataConfig(**given | fields), batch_size=1, seed=0)


def rows_of(data):
  table = data._train
  return [table.read(key, data.config.document_mask) for key in table.keys(None)]


def as_text(ids):
  return "".join(chr(i) if i < 256 else "E" for i in ids)


def segments(row):
  """(text, counted targets) of every segment; checks that positions begin anew in each."""
  for number in range(1, row["segment_ids"].max() + 1):
    here = np.flatnonzero(row["segment_ids"] == number)
    assert row["positions"][here].tolist() == list(range(len(here)))
    counted = here[row["weights"][here] > 0]
    yield as_text(row["inputs"][here]), as_text(row["targets"][counted])


def test_pairs_share_a_row_in_two_segments_each(tmp_path):
  rows = [{"prompt": f"q{i}", "chosen": f"y{i}", "rejected": f"no{i}"} for i in range(4)]
  found = [list(segments(row)) for row in rows_of(opened(tmp_path, rows, seq_len=32))]
  assert max(map(len, found)) > 2
  pairs = [row[i : i + 2] for row in found for i in range(0, len(row), 2)]
  assert sorted(pairs) == [
    [(f"Eq{i}y{i}E", f"y{i}E"), (f"Eq{i}no{i}E", f"no{i}E")] for i in range(4)
  ]


def test_of_two_conversations_the_last_answers_count(tmp_path):
  before = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
  ]
  answers = [[{"role": "assistant", "content": text}] for text in ("yes", "no")]
  whole = {"chosen": before + answers[0], "rejected": before + answers[1]}
  split = {"prompt": before, "chosen": answers[0], "rejected": answers[1]}
  found = [rows_of(opened(tmp_path, [row], seq_len=160)) for row in (whole, split)]
  assert [counted for _, counted in segments(found[0][0])] == ["yesE", "noE"]
  for name, array in found[0][0].items():
    np.testing.assert_array_equal(array, found[1][0][name], err_msg=name)


def test_validation_counts_chosen_answers_alone(tmp_path):
  rows = [{"prompt": "q", "chosen": f"y{i}", "rejected": f"no{i}"} for i in range(40)]
  data = opened(tmp_path, rows, validation_fraction=0.3)
  counted = "".join(as_text(batch.targets[batch.weights > 0]) for batch in data.validation())
  assert "y" in counted
  assert "n" not in counted


def test_long_pairs_are_refused_or_both_texts_cut(tmp_path):
  row = {"prompt": "q", "chosen": "y" * 30, "rejected": "n" * 50}
  with pytest.raises(DataError, match=r"1 of 1 conversations .* data.seq_len=64 tokens, .* 86"):
    opened(tmp_path, [row], seq_len=64)
  (found,) = rows_of(opened(tmp_path, [row], seq_len=64, long_conversations="truncate"))
  assert list(segments(found)) == [
    ("Eq" + "y" * 30, "y" * 30), ("Eq" + "n" * 30, "n" * 30)
  ]  # fmt: skip


TURN = {"role": "user", "content": "q"}
YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no"))


@pytest.mark.parametrize(
  ("row", "why"),
  [
    ({"prompt": "q", "chosen": "a"}, "no field 'rejected'; it has: prompt, chosen"),
    ({"chosen": "a", "rejected": "b"}, "no field 'prompt', and 'chosen' and 'rejected' are no"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "'chosen' and 'rejected' are equal"),
    ({"prompt": "q", "chosen": "", "rejected": "b"}, "'chosen' is empty: there is nothing to"),
    ({"prompt": "q", "chosen": 1, "rejected": "b"}, "'chosen' holds int, not text"),
    ({"chosen": [TURN, YES], "rejected": [TURN, YES]}, "'chosen' and 'rejected' are equal"),
    ({"chosen": [TURN, YES], "rejected": [TURN, TURN, NO]}, "differ before their last messages"),
    ({"chosen": [TURN, YES], "rejected": [TURN, NO, TURN]}, "'rejected' does not end with the"),
    ({"chosen": [TURN, {"role": "bot"}], "rejected": [TURN, NO]}, "'chosen': message 2: unknown"),
  ],
)
def test_a_broken_pair_is_one_line_with_its_place(row, why, tmp_path):
  good = {"prompt": "q", "chosen": "a", "rejected": "b"}
  with pytest.raises(DataError) as refused:
    opened(tmp_path, [good, row])
  assert "pairs.jsonl:2: " in str(refused.value)
  assert why in str(refused.value)
  assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"document_mask": False, "packing": "pad"}, "lets the answers of a pair of a row attend"),
    ({"train_on": "all"}, "compares prompts, which are equal"),
    ({"packing": "concat"}, "cuts conversations"),
    ({"source": "mixture", "mixture": "preference:a.jsonl:1", "path": ""}, "unknown source"),
  ],
)
def test_options_that_do_not_fit_pairs(fields, message, tmp_path):
  with pytest.raises(ConfigError, match=message):
    opened(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": "b"}], **fields)


def test_the_exercises_prefer_the_right_answer():
  rows = list(exercises.preferences())
  assert len(rows) == exercises.COUNT
  for row in rows:
    numbers = "".join(c if c.isdigit() else " " for c in row["prompt"]).split()
    assert int(row["chosen"]) == sum(map(int, numbers)) != int(row["rejected"])
