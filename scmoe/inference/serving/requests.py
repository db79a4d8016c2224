"""Requests to a server, its answers, and the rule by which a request's text ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scmoe.base.errors import ConfigError
from scmoe.inference.serving.draw import MOST_LOGPROBS, Needs

# Most entries of `Request.stop`, texts and lists of tokens together.
MOST_STOPS = 16
# Most characters of a text in `Request.stop`, and most tokens of a list in it.
MOST_STOP = 1024


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt and how to continue it.

  The new tokens depend on other requests only as far as `Server` says of rounding.

  Attributes:
    prompt: token ids, at least one.
    max_new_tokens: most tokens to add; 0 only with `prompt_logprobs`.
    temperature, top_k, top_p: see `scmoe.inference.sampling.Sampling`.
    seed: seed of the draws.
    stop: texts and lists of token ids, or one text; the answer ends where one of them is complete.
    logprobs: number of most probable tokens whose log-probabilities the answer has beside each new
      token's own, from 0 to `MOST_LOGPROBS`; None: the answer has none of new tokens.
    prompt_logprobs: whether to compute the log-probability of each of the prompt's tokens but the
      first.
  """

  prompt: Sequence[int]
  max_new_tokens: int = 64
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0
  stop: Sequence[str | Sequence[int]] = ()
  logprobs: int | None = None
  prompt_logprobs: bool = False

  def checked(self, vocabulary: int, context: int) -> Request:
    """Checks every field; returns the request with some fields in other types.

    The prompt, `stop` and the lists in it become tuples, `temperature` and `top_p` floats, NumPy's
    integers Python's; `top_k` becomes at most V.

    Args:
      vocabulary: V, the number of token ids; they are from 0 to V - 1.
      context: the model's longest text, in tokens.

    Raises:
      ConfigError: a field cannot be used; the message names it.
    """
    prompt = _ids(self.prompt, "prompt", vocabulary)
    least = 0 if self.prompt_logprobs is True else 1
    new = self._integer("max_new_tokens", least, context)
    if len(prompt) + new > context:
      raise ConfigError(
        f"max_new_tokens={new} after a prompt of {len(prompt)} tokens needs {len(prompt) + new} "
        f"positions, more than model.context={context}; shorten one of them"
      )
    if type(self.prompt_logprobs) is not bool:
      raise ConfigError(f"prompt_logprobs={_shown(self.prompt_logprobs)} must be true or false")
    shown = None if self.logprobs is None else self._integer("logprobs", 0, MOST_LOGPROBS)
    return dataclasses.replace(
      self,
      prompt=prompt,
      max_new_tokens=new,
      seed=self._integer("seed", -(2**63) + 1, 2**63 - 1),
      logprobs=shown,
      temperature=self._number("temperature", 0.0, 1e6),
      top_k=min(self._integer("top_k", 0, 2**63 - 1), vocabulary),
      top_p=self._number("top_p", 0.0, 1.0, above=True),
      stop=self._stops(vocabulary),
    )

  @property
  def needs(self) -> Needs:
    """The parts of drawing that a program must have to draw for this request."""
    draws = self.temperature > 0
    return Needs(draws, draws and (self.top_k > 0 or self.top_p < 1), self.logprobs is not None)

  def _integer(self, name: str, least: int, most: int) -> int:
    value = getattr(self, name)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not (
      least <= value <= most
    ):  # fmt: skip
      raise ConfigError(f"{name}={_shown(value)} must be a whole number from {least} to {most}")
    return int(value)

  def _number(self, name: str, least: float, most: float, *, above: bool = False) -> float:
    value = getattr(self, name)
    is_number = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or (above and value == least):
      bounds = f"above {least:g}" if above else f"from {least:g}"
      raise ConfigError(f"{name}={_shown(value)} must be a number {bounds} to {most:g}")
    return float(value)

  def _stops(self, vocabulary: int) -> tuple[str | tuple[int, ...], ...]:
    stop = [self.stop] if isinstance(self.stop, str) else self.stop
    if not isinstance(stop, (list, tuple)) or len(stop) > MOST_STOPS:
      raise ConfigError(
        f"stop={_shown(stop)} must be a list of at most {MOST_STOPS} texts or lists of token ids"
      )
    if any(not one for one in stop if isinstance(one, (str, list, tuple))):
      raise ConfigError("stop: one is empty; leave it out")
    found = tuple(one if isinstance(one, str) else _ids(one, "stop", vocabulary) for one in stop)
    if any(len(one) > MOST_STOP for one in found):
      raise ConfigError(f"stop: one is longer than {MOST_STOP} characters or tokens; shorten it")
    try:
      "".join(one for one in found if isinstance(one, str)).encode()
    except UnicodeEncodeError:
      raise ConfigError(f"stop={_shown(stop)}: a text is not valid UTF-8") from None
    return found


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
  """The log-probabilities of one new token and of the most probable tokens in its place.

  They are natural logarithms of the model's softmax, before temperature, top-k and top-p.

  Attributes:
    token: the new token's id.
    logprob: the new token's log-probability.
    top: (id, log-probability) of the most probable tokens, the likeliest first: `Request.logprobs`
      of them, or as many as the vocabulary has.
  """

  token: int
  logprob: float
  top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Answer:
  """The answer to one request.

  Attributes:
    id: what `Server.submit` returned.
    tokens: the new tokens, those of a stop included; without the end token if `finish` is "end".
    text: their text, cut before a stop; None without a tokenizer.
    finish: why it ended: "end" (the model drew an end token), "stop" (one of `Request.stop`) or
      "length" (`max_new_tokens`).
    logprobs: an entry for each of `tokens`, or None.
    prompt_logprobs: for each of the prompt's tokens the natural logarithm of its probability after
      those before it; None for the first one. None if they were not asked for.
    seconds: time from `submit` until the host read the drawn token with which the request ended.
    first_seconds: time from `submit` until the host read the first drawn token.
    preemptions: how often the request was put back because pages ran out.
  """

  id: int
  tokens: list[int]
  text: str | None
  finish: str
  logprobs: list[TokenLogprob] | None
  prompt_logprobs: list[float | None] | None
  seconds: float
  first_seconds: float
  preemptions: int


class Ending:
  """Decides whether a request's text has come to its end, and cuts the text before a stop.

  Args:
    request: a checked request.
    ends: the model's end tokens.
    decode: makes text of token ids; None: the request has no texts to stop at.
  """

  def __init__(
    self, request: Request, ends: frozenset[int], decode: Callable[[list[int]], str] | None
  ):
    self._most, self._ends, self._decode = request.max_new_tokens, ends, decode
    self._texts = [one for one in request.stop if isinstance(one, str)]
    self._lists = [list(one) for one in request.stop if not isinstance(one, str)]
    # `_tail` begins with the last `_window` tokens, which are enough if each has a byte of text.
    # They are enough for certain if those before the last token decode to `_reach` characters: one
    # less than the longest stop has, and 8 more, because the first token may begin within a
    # character.
    self._window = max((len(one.encode()) for one in self._texts), default=0) + 8
    self._reach = max(map(len, self._texts), default=0) + 7

  def after(self, tokens: list[int]) -> str:
    """The reason for which the text ends with the last of these new tokens; "" if it goes on.

    Where several reasons hold, it is the first of these: "stop" for a list, "end", "stop" for a
    text, "length".

    Args:
      tokens: all new tokens so far, at least one.
    """
    if any(tokens[-len(own) :] == own for own in self._lists):
      return "stop"
    if tokens[-1] in self._ends:
      return "end"
    if self._texts and self._decode is not None:
      tail = self._tail(tokens, self._decode)
      is_last = len(tokens) == self._most
      if (is_last or self._found(tail) >= 0) and self._found(self._decode(tokens)) >= 0:
        return "stop"
    return "length" if len(tokens) == self._most else ""

  def _tail(self, tokens: list[int], decode: Callable[[list[int]], str]) -> str:
    """Text of the last tokens, long enough to hold every stop that the last token completes.

    Tokens may have no text, as special ones and ids that the tokenizer does not know. Where the
    last `_window` tokens have too little text, more are decoded.
    """
    size = self._window
    while size < len(tokens) and len(decode(tokens[-size:-1])) < self._reach:
      size *= 2
    return decode(tokens[-size:])

  def text(self, tokens: list[int], finish: str) -> str | None:
    """The text of the new tokens, cut before a stop; None without `decode`.

    Args:
      tokens: all new tokens, without the end token if `finish` is "end".
      finish: why it ended (`Answer.finish`).
    """
    if self._decode is None:
      return None
    if finish == "stop":
      whole = next((own for own in self._lists if tokens[-len(own) :] == own), [])
      tokens = tokens[: len(tokens) - len(whole)]
    text = self._decode(tokens)
    cut = self._found(text)
    return text[:cut] if cut >= 0 else text

  def _found(self, text: str) -> int:
    """The smallest index in `text` at which a stop text begins; -1 if it holds none."""
    return min((at for at in map(text.find, self._texts) if at >= 0), default=-1)


def _ids(value: Any, name: str, vocabulary: int) -> tuple[int, ...]:
  is_id = lambda x: isinstance(x, (int, np.integer)) and not isinstance(x, bool)
  if isinstance(value, str) or not isinstance(value, (list, tuple, np.ndarray)) or not (
    getattr(value, "ndim", 1) and len(value) and all(map(is_id, value))
  ):  # fmt: skip
    raise ConfigError(f"{name}={_shown(value)} must be a list of token ids, at least one")
  wrong = next((int(x) for x in value if not 0 <= x < vocabulary), None)
  if wrong is not None:
    raise ConfigError(
      f"{name} has token {wrong}, outside the vocabulary of {vocabulary}; use ids from 0 to "
      f"{vocabulary - 1}"
    )
  return tuple(int(x) for x in value)


def _shown(value: Any) -> str:
  """A value's repr on one line, cut to 40 characters."""
  text = " ".join(repr(value).split())
  return text if len(text) <= 40 else f"{text[:37]}..."
