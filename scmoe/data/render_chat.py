"""Renders one chat template in a process of its own and exits.

`scmoe.data.chat` runs it as `python -I render_chat.py`. It imports no module of scmoe, so it starts
within a fraction of a second. It reads {"template", "messages", "bos_token", "eos_token"} as JSON
from standard input and writes {"text", "error"} to standard output; one of the two is null.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import sys
from typing import Any

CPU_SECONDS = 5
MEMORY = 2**30  # bytes of address space
OUTPUT = 2**22  # characters of a rendered conversation


def limit() -> None:
  """Limits this process's CPU time and memory, and forbids it to write files."""
  for what, most in (
    (resource.RLIMIT_CPU, CPU_SECONDS),
    (resource.RLIMIT_AS, MEMORY),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0),
  ):
    with contextlib.suppress(ValueError, OSError):  # some systems lack one of these limits
      resource.setrlimit(what, (most, most))


def render(asked: dict[str, Any]) -> str:
  """The text of a conversation. A bad template can raise any exception."""
  import jinja2
  import jinja2.ext
  import jinja2.sandbox

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))

  def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)

  class Generation(jinja2.ext.Extension):
    """Ignores the tag `generation`, with which transformers marks the model's own turns."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads a set

    def parse(self, parser: Any) -> Any:
      """Returns the statements up to `endgeneration` unchanged."""
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
  )
  environment.filters["tojson"] = tojson
  environment.globals["raise_exception"] = raise_exception
  environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
  pieces, length = [], 0
  values = {"messages": asked["messages"], "add_generation_prompt": True, "tools": None}
  values |= {"bos_token": asked["bos_token"], "eos_token": asked["eos_token"]}
  for piece in environment.from_string(asked["template"]).generate(values):
    pieces.append(piece)
    length += len(piece)
    if length > OUTPUT:
      raise ValueError(f"it writes more than {OUTPUT} characters")
  return "".join(pieces)


def main() -> None:
  """Reads the request from standard input and writes the answer to standard output."""
  asked = json.load(sys.stdin)
  limit()
  found: dict[str, str | None] = {"text": None, "error": None}
  try:
    found["text"] = render(asked)
  except Exception as error:  # an untrusted template can raise anything; report it to the caller
    found["error"] = f"{type(error).__name__}: {str(error)[:1000]}"
  json.dump(found, sys.stdout)


if __name__ == "__main__":
  main()
