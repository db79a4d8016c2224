"""Tokenizers: exact round trips, exact byte counts, caches that survive damage."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scmoe.base.errors import ConfigError, DataError
from scmoe.data import procedural, tokenizers
from scmoe.data.corpus import join_documents

TEXTS = [*procedural.documents("arithmetic", 20_000), "naïve café, 日本 🙂\r\n\ttab".encode()]


@pytest.fixture(scope="module")
def bpe():
  return tokenizers.JsonTokenizer(tokenizers.train_bpe(TEXTS, 300), name="bpe")


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request, bpe):
  return tokenizers.ByteTokenizer() if request.param == "bytes" else bpe


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=60))
def test_round_trip_and_bytes_are_exact_for_any_text(text, bpe):
  for tokenizer in (tokenizers.ByteTokenizer(), bpe):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eos_id for i in ids)


def test_documents_are_encoded_as_one_by_one(tokenizer):
  many = [ids.tolist() for ids in tokenizer.encode_documents(TEXTS)]
  assert many == [tokenizer.encode(t.decode()) for t in TEXTS]


def test_end_of_text_is_left_out_and_counts_no_bytes(tokenizer):
  ids = [tokenizer.eos_id, *tokenizer.encode("ab"), tokenizer.eos_id]
  assert tokenizer.decode(ids) == "ab"
  assert tokenizer.decode(np.array(ids)) == "ab"
  assert tokenizer.decode([*ids, tokenizer.vocab_size + 7]) == "ab"  # a padded vocabulary
  assert tokenizer.token_bytes()[tokenizer.eos_id] == 0
  assert tokenizer.token_bytes().dtype == np.int32
  assert len(tokenizer.token_bytes()) == tokenizer.vocab_size


def test_half_a_character_decodes_to_the_replacement():
  assert tokenizers.ByteTokenizer().decode([0x61, 0xC3]) == "a\ufffd"


def test_text_that_spells_the_end_of_text_stays_text(bpe):
  ids = bpe.encode(f"a{tokenizers.EOS}b")
  assert bpe.eos_id not in ids
  assert bpe.decode(ids) == f"a{tokenizers.EOS}b"


def test_training_is_deterministic_and_uses_its_vocabulary(bpe):
  assert tokenizers.train_bpe(TEXTS, 300) == tokenizers.train_bpe(TEXTS, 300)
  assert bpe.vocab_size == 300
  assert len(bpe.encode(TEXTS[0].decode())) < len(TEXTS[0])


def test_the_cache_is_used_and_a_damaged_one_replaced(tmp_path, monkeypatch):
  first = tokenizers.load_bpe(TEXTS, 300, tmp_path)
  (file,) = tmp_path.iterdir()
  with monkeypatch.context() as patch:
    patch.setattr(tokenizers, "train_bpe", None)  # a second training would fail
    assert tokenizers.load_bpe(TEXTS, 300, tmp_path).digest == first.digest
  good = file.read_bytes()
  file.write_bytes(good[: len(good) // 2])
  assert tokenizers.load_bpe(TEXTS, 300, tmp_path).digest == first.digest
  assert file.read_bytes() == good
  tokenizers.load_bpe(TEXTS[:5], 300, tmp_path)  # other texts, another file
  assert len(list(tmp_path.iterdir())) == 2


def test_a_tokenizer_json_from_a_file_or_its_folder(tmp_path, bpe):
  (tmp_path / "tokenizer.json").write_text(tokenizers.train_bpe(TEXTS, 300))
  for path in (tmp_path, tmp_path / "tokenizer.json"):
    loaded = tokenizers.load_json(str(path), "")
    assert loaded.encode("37+85=25;") == bpe.encode("37+85=25;")


def word_level(tokens, special=()):
  added = [
    {"id": tokens.index(t), "content": t, "special": t in special}
    | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for t in tokens
    if t.startswith("<")
  ]
  return json.dumps(
    {
      "version": "1.0",
      "added_tokens": added,
      "pre_tokenizer": {"type": "WhitespaceSplit"},
      "model": {
        "type": "WordLevel",
        "vocab": {t: i for i, t in enumerate(tokens)},
        "unk_token": "unk",
      },
    }
  )


def test_tokenizers_without_an_end_of_text_say_so():
  with pytest.raises(ConfigError, match=r"'t' does not have any of <\|endoftext\|>, </s>"):
    tokenizers.JsonTokenizer(word_level(["unk", "a"]), name="t")
  with pytest.raises(ConfigError, match=r"does not have data.eos_token='<stop>'"):
    tokenizers.JsonTokenizer(word_level(["unk", "</s>"]), eos_token="<stop>", name="t")
  named = tokenizers.JsonTokenizer(word_level(["unk", "<stop>"]), eos_token="<stop>", name="t")
  assert named.eos_id == 1


def test_an_end_of_text_that_text_can_spell_is_refused():
  tokenizer = tokenizers.JsonTokenizer(word_level(["unk", "a", "</s>"]), name="t")
  with pytest.raises(DataError, match=r"spells the end-of-text token 2 of data\.tokenizer"):
    join_documents([b"a </s> a"], tokenizer)
  special = tokenizers.JsonTokenizer(word_level(["unk", "a", "</s>"], ["</s>"]), name="t")
  assert join_documents([b"a"], special).tolist() == [2, 1, 2]


def test_files_that_are_no_tokenizer_are_named(tmp_path):
  with pytest.raises(DataError, match="is not a file; use bytes, bpe or the path of a tokenizer"):
    tokenizers.load_json(str(tmp_path / "none.json"), "")
  (tmp_path / "t.json").write_text('{"a": 1}')
  with pytest.raises(DataError, match=r"t\.json': not a tokenizer\.json"):
    tokenizers.load_json(str(tmp_path / "t.json"), "")


def test_a_flipped_bit_of_a_cached_tokenizer_is_found(tmp_path, caplog):
  """Still a tokenizer, of another vocabulary."""
  first = tokenizers.load_bpe(TEXTS, 300, tmp_path)
  (file,) = tmp_path.iterdir()
  content = file.read_text()
  token = '"37"' if '"37"' in content else next(t for t in ('"25"', '"=1"', '"00"') if t in content)
  file.write_text(content.replace(token, token[:2] + '~"', 1))
  assert tokenizers.load_bpe(TEXTS, 300, tmp_path).digest == first.digest
  assert "is damaged; making it again" in caplog.text


@pytest.mark.parametrize(
  ("vocab", "message"),
  [
    ({}, r"'t' has no token: its vocabulary is empty"),
    ({"</s>": 0, "a": 4 * 10**9}, r"'t' gives 'a' the id 4000000000; ids are below 16777216"),
    ({"</s>": 0, "a": 10**12}, r"'t': not a tokenizer.json"),
    ({"</s>": 0, "a": -1}, r"'t': not a tokenizer.json"),
    ({"</s>": 0, "a": 1.5}, r"'t': not a tokenizer.json"),
  ],
)
def test_vocabularies_that_cannot_be_used_are_one_line(vocab, message):
  content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
             "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "</s>"}}  # fmt: skip
  with pytest.raises(DataError, match=message) as caught:
    tokenizers.JsonTokenizer(json.dumps(content), name="t")
  assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch):
  import sys

  monkeypatch.setitem(sys.modules, "tokenizers", None)
  with pytest.raises(ConfigError, match="needs the package 'tokenizers': pip install tokenizers"):
    tokenizers.train_bpe(TEXTS, 300)
