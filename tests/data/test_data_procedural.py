"""Procedural text: the same everywhere, and its entropy is what it says."""

import hashlib
import math

import numpy as np
import pytest

from scmoe.base.errors import ConfigError
from scmoe.data import procedural
from scmoe.data.bigram import count_pairs
from scmoe.data.corpus import join_documents
from scmoe.data.tokenizers import ByteTokenizer


def stream(name, size):
  return join_documents(list(procedural.documents(name, size)), ByteTokenizer())


@pytest.mark.parametrize(
  ("name", "digest"),
  [
    ("markov", "74117cda60035fe4"),
    ("recall", "79c36670cc5dc4e8"),
    ("arithmetic", "bbc13118bf4f1170"),
  ],
)
def test_the_text_never_changes(name, digest):
  # Golden losses rest on this: a new numpy or platform must not change a byte.
  text = b"\n".join(procedural.documents(name, 50_000))
  assert hashlib.sha256(text).hexdigest()[:16] == digest


def test_more_text_only_appends():
  short, long = (list(procedural.documents("markov", n)) for n in (1_000, 60_000))
  assert long[: len(short)] == short


def test_markov_floor_is_the_entropy_of_the_text():
  tokens = stream("markov", 400_000)
  order = np.argsort(np.frombuffer(procedural.LETTERS, np.uint8))
  alphabet = np.append(np.sort(np.frombuffer(procedural.LETTERS, np.uint8)), 256)
  states = np.append(order, len(order))[np.searchsorted(alphabet, tokens)]
  chain = procedural.markov_counts() / procedural.markov_counts().sum(axis=1, keepdims=True)
  realised = -np.log(chain[states[:-1], states[1:]])
  floor = procedural.entropy_floor("markov")
  # Five standard errors of the mean.
  assert abs(realised.mean() - floor) < 5 * realised.std() / math.sqrt(len(realised))

  # And without knowing the chain: the conditional entropy of pairs, biased down by its
  # (states - 1) x states free parameters over 2N.
  pairs = count_pairs(tokens).astype(float)
  share = pairs / pairs.sum()
  given = share.sum(axis=1, keepdims=True)
  seen = share > 0
  empirical = -(share[seen] * np.log((share / np.where(given > 0, given, 1))[seen])).sum()
  bias = 33 * 32 / (2 * pairs.sum())
  assert empirical + bias == pytest.approx(floor, rel=0.01)


def test_markov_rows_are_distributions_and_documents_are_not_empty():
  counts = procedural.markov_counts()
  assert (counts.sum(axis=1) == 65536).all()
  assert counts[-1, -1] == 0
  assert (counts[:, :-1] > 0).all()


def test_answers_are_right():
  for text in procedural.documents("arithmetic", 2_000):
    for line in text.decode().rstrip(";").split(";"):
      left, right = line.split("=")
      a, b = left.split("+")
      assert (int(a) + int(b)) % 97 == int(right)
  for text in procedural.documents("recall", 2_000):
    pairs, *questions = text.decode().split("?")
    known = dict(zip(pairs[::2], pairs[1::2]))
    assert len(known) == len(questions) == 12
    assert all(known[q[0]] == q[1] for q in questions)


def test_floors_of_documents_of_a_fixed_form():
  # Entropy of a document over its tokens, the end included: operands, or keys, values, questions.
  assert procedural.entropy_floor("arithmetic") == pytest.approx(32 * math.log(97) / 145)
  keys = math.log(math.perm(26, 12))
  recall = (keys + 12 * math.log(10) + 12 * math.log(12)) / 61
  assert procedural.entropy_floor("recall") == pytest.approx(recall)
  assert {len(t) for t in procedural.documents("arithmetic", 9_000)} == {144}
  assert {len(t) for t in procedural.documents("recall", 9_000)} == {60}


def test_unknown_domains_are_named():
  with pytest.raises(ConfigError, match=r"'markow'; some of: markov\+recall\+arithmetic"):
    procedural.domain_names("markov+markow")
