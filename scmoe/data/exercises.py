"""Generated conversations and pairs of answers about small additions: nothing to download.

The answers follow from the questions, so a model that attends to the question can reach a loss near
0. The rows are the same on every platform (see `procedural`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

COUNT = 2000  # conversations
_LARGEST = 10  # summands are below it
_ASKED = ("{a}+{b}?", "sum of {a} and {b}?", "add {b} to {a}.")


def conversations() -> Iterator[dict[str, Any]]:
  """Yields `COUNT` rows: two in three hold `messages`, the third a `prompt` and a `completion`."""
  bits = np.random.PCG64(7)
  for number in range(COUNT):
    if number % 3 == 2:
      question, answer = _exercise(bits)
      yield {"prompt": f"{question} ", "completion": answer}
      continue
    messages = [{"role": "system", "content": "Answer with a number."}] if number % 6 == 0 else []
    for _ in range(1 + number % 2):
      question, answer = _exercise(bits)
      messages += [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
      ]
    yield {"messages": messages}


def preferences() -> Iterator[dict[str, Any]]:
  """Yields `COUNT` rows with a right (`chosen`) and a wrong (`rejected`) answer to a `prompt`."""
  bits = np.random.PCG64(8)
  for _ in range(COUNT):
    question, answer = _exercise(bits)
    wrong = (int(answer) + 1 + int(np.asarray(bits.random_raw())) % (2 * _LARGEST - 2)) % (
      2 * _LARGEST - 1
    )
    yield {"prompt": f"{question} ", "chosen": answer, "rejected": str(wrong)}


def _exercise(bits: np.random.PCG64) -> tuple[str, str]:
  a, b, form = (int(raw) for raw in np.asarray(bits.random_raw(3)))
  a, b = a % _LARGEST, b % _LARGEST
  return _ASKED[form % len(_ASKED)].format(a=a, b=b), str(a + b)
