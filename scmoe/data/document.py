"""A document: text, the domain it belongs to, and which of its characters training learns."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Learned:
  """The part of a conversation's text that the loss counts.

  Attributes:
    spans: characters [begin, end) of the text, in order: the answers.
    apart: True: each span is tokenised by itself and followed by the end-of-text token, and the
      tokens of a prompt's beginning precede the text. False: a chat template wrote all of the text,
      special tokens included, and it is tokenised as a whole.
    where: file:line of the row, for messages.
    second: of a pair of answers, the character at which the second text begins, which holds the
      rejected answer; None where the document is one text.
  """

  spans: tuple[tuple[int, int], ...]
  apart: bool
  where: str
  second: int | None = None


@dataclasses.dataclass(frozen=True)
class Document:
  """UTF-8 text, its domain, and the split that its file's name gives (None: split by hash).

  `learned` is None for plain text, of which the loss counts every token.
  """

  text: bytes
  domain: str
  split: str | None = None
  learned: Learned | None = None

  def texts(self) -> list[Document]:
    """The two texts of a pair of answers, each a document of its own; else this document alone."""
    if self.learned is None or self.learned.second is None:
      return [self]
    at, whole, found = self.learned.second, self.text.decode(), []
    for begin, text in ((0, whole[:at]), (at, whole[at:])):
      own = [
        (a - begin, b - begin) for a, b in self.learned.spans if begin <= a < begin + len(text)
      ]
      learned = dataclasses.replace(self.learned, spans=tuple(own), second=None)
      found.append(dataclasses.replace(self, text=text.encode(), learned=learned))
    return found
