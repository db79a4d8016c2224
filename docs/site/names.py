"""Docstrings for the API pages: "width, hidden: D and F" is one entry about two names, and
"[pairs][blocks]" are two brackets, not a link."""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMES = re.compile(r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+)(?=: )", re.MULTILINE)


class AsWritten(griffe.Extension):
  """Joins several names by a space that does not end the first one for the parser."""

  def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
    """Called for every module, class, function and attribute."""
    if obj.docstring is not None:
      joined = lambda m: m[1] + m[2].replace(", ", ",\N{NO-BREAK SPACE}")
      text = NAMES.sub(joined, obj.docstring.value)
      obj.docstring.value = re.sub(r"\](?=\s*\[)", "]\N{WORD JOINER}", text)
