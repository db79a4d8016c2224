"""Generated text whose entropy is known: a floor, below which no model's loss can fall.

Three domains, all ASCII:

* `markov`: a first-order Markov chain over 32 letters and the end of the document. The next token
  depends on the current one only, so the floor holds wherever a row is cut.
* `recall`: key-value pairs, then questions about them ("q3f7b2...?f7?q3...").
* `arithmetic`: additions modulo 97 ("37+85=25;").

Floors are in nats per byte token; the end of a document counts as a token. For `recall` and
`arithmetic` they hold for a model that sees the whole document from its start.

The text is the same on every platform: it is made by integer arithmetic from the raw 64-bit stream
of PCG64, which numpy never changes (numpy does change its distributions).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np

from scmoe.base.errors import ConfigError

DEFAULT_BYTES = 1_000_000  # bytes of each domain, if data.limit_bytes is 0
LETTERS = b"abcdefghijklmnopqrstuvwxyz012345"
_TOTAL = 1 << 16  # every row of the transition table sums to this
_END = len(LETTERS)  # the state that ends a document and begins the next
_END_SHARE = _TOTAL >> 7  # a document is 128 letters long on average
_FAVOURITES = (24000, 16000, 8000, 4000, 2000)  # counts, out of 65536, of the likeliest followers
_PAIRS = 12  # a recall document has 12 key-value pairs and 12 questions
_SUMS = 16  # additions in an arithmetic document
_MODULUS = 97
_BLOCK = 256  # documents generated together


def domain_names(names: str) -> tuple[str, ...]:
  """Splits 'markov+recall' into names; an empty string means all domains.

  Raises:
    ConfigError: a name is unknown.
  """
  chosen = tuple(names.split("+")) if names else tuple(_DOMAINS)
  for name in chosen:
    if name not in _DOMAINS:
      raise ConfigError(
        f"data.path={names!r}: unknown procedural domain {name!r}; some of: {'+'.join(_DOMAINS)}; "
        "set data.source=auto to read a file"
      )
  return chosen


def documents(name: str, total_bytes: int) -> Iterator[bytes]:
  """Yields documents of one domain until they have `total_bytes`; a larger total only appends."""
  seed = list(_DOMAINS).index(name)
  bits, sent = np.random.PCG64(seed), 0
  while True:
    for text in _DOMAINS[name][0](bits):
      yield text
      sent += len(text)
      if sent >= total_bytes:
        return


def entropy_floor(name: str) -> float:
  """Entropy of a domain in nats per byte token; the end of a document counts as a token."""
  domain_names(name)
  return _DOMAINS[name][1]()


# --- markov ---------------------------------------------------------------------------------------


@functools.cache
def markov_counts() -> np.ndarray:
  """int64[33, 33]: row i has the probabilities, times 65536, of the states after state i.

  The last state is the end of the document.
  """
  states = len(LETTERS) + 1
  counts = np.zeros((states, states), np.int64)
  bits = np.random.PCG64(1234)
  for state in range(states):
    order = np.argsort(bits.random_raw(len(LETTERS)), kind="stable")
    for follower, share in zip(order, _FAVOURITES):
      counts[state, follower] = share
    if state != _END:  # from _END to _END would be an empty document
      counts[state, _END] = _END_SHARE
    left = _TOTAL - counts[state].sum()
    counts[state, : len(LETTERS)] += left // len(LETTERS)
    counts[state, order[0]] += left % len(LETTERS)
  return counts


def _markov_block(bits: np.random.PCG64) -> list[bytes]:
  # Advances all documents of the block by one letter at a time.
  cumulative = np.cumsum(markov_counts(), axis=1)
  state = np.full(_BLOCK, _END)
  alive = np.ones(_BLOCK, bool)
  steps = []
  while alive.any():
    draw = (bits.random_raw(_BLOCK) >> np.uint64(48)).astype(np.int64)  # 16 bits
    following = (cumulative[state] <= draw[:, None]).sum(axis=1)
    state = np.where(alive, following, _END)
    alive &= state != _END
    steps.append(state)
  letters = np.frombuffer(LETTERS + b"\0", np.uint8)[np.stack(steps, axis=1)]
  return [row.tobytes().rstrip(b"\0") for row in letters]


def _markov_floor() -> float:
  chain = markov_counts() / _TOTAL
  size = len(chain)
  # Stationary distribution: pi (P - 1) = 0 with sum(pi) = 1.
  system = np.vstack([chain.T - np.eye(size), np.ones(size)])
  stationary = np.linalg.lstsq(system, np.append(np.zeros(size), 1.0), rcond=None)[0]
  logs = np.log(chain, out=np.zeros_like(chain), where=chain > 0)
  return float(-(stationary @ (chain * logs).sum(axis=1)))


# --- associative recall and modular arithmetic ----------------------------------------------------


def _below(bits: np.random.PCG64, n: int) -> int:
  # 64 random bits modulo n: for n < 100 the bias is below 1e-17.
  return int(bits.random_raw()) % n


def _recall_block(bits: np.random.PCG64) -> list[bytes]:
  return [_recall_document(bits) for _ in range(_BLOCK)]


def _recall_document(bits: np.random.PCG64) -> bytes:
  keys = np.argsort(bits.random_raw(26), kind="stable")[:_PAIRS]
  pairs = [f"{chr(97 + key)}{_below(bits, 10)}" for key in keys]
  questions = [f"?{pairs[_below(bits, _PAIRS)]}" for _ in range(_PAIRS)]
  return "".join(pairs + questions).encode()


def _recall_floor() -> float:
  keys = sum(math.log(26 - i) for i in range(_PAIRS))
  nats = keys + _PAIRS * math.log(10) + _PAIRS * math.log(_PAIRS)
  return nats / (2 * _PAIRS + 3 * _PAIRS + 1)


def _arithmetic_block(bits: np.random.PCG64) -> list[bytes]:
  return [_arithmetic_document(bits) for _ in range(_BLOCK)]


def _arithmetic_document(bits: np.random.PCG64) -> bytes:
  operands = [(_below(bits, _MODULUS), _below(bits, _MODULUS)) for _ in range(_SUMS)]
  return "".join(f"{a:02}+{b:02}={(a + b) % _MODULUS:02};" for a, b in operands).encode()


def _arithmetic_floor() -> float:
  return _SUMS * 2 * math.log(_MODULUS) / (_SUMS * len("37+85=25;") + 1)


_DOMAINS = {
  "markov": (_markov_block, _markov_floor),
  "recall": (_recall_block, _recall_floor),
  "arithmetic": (_arithmetic_block, _arithmetic_floor),
}
