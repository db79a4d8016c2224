"""Renders a chat template, for one or more conversations, in a process of its own and exits.

`scmoe.data.chat` runs it as `python -I render_chat.py`. It imports no module of scmoe, so it starts
within a fraction of a second. It reads {"template", "bos_token", "eos_token", "cpu_seconds",
"conversations": [{"messages", "prompt"}, ...]} as JSON from standard input and writes a list of
{"text", "error"}, one for each conversation, to standard output; one of the two is null.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import sys
from typing import Any

MEMORY = 2**30  # bytes of address space
OUTPUT = 2**22  # characters of a rendered conversation


def limit(cpu_seconds: int) -> None:
  """Limits this process's CPU time and memory, and forbids it to write files."""
  for what, most in (
    (resource.RLIMIT_CPU, cpu_seconds),
    (resource.RLIMIT_AS, MEMORY),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0),
  ):
    with contextlib.suppress(ValueError, OSError):  # some systems lack one of these limits
      resource.setrlimit(what, (most, most))


def environment() -> Any:
  """Jinja's sandbox, with the functions that templates of released models call."""
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

  found = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
  )
  found.filters["tojson"] = tojson
  found.globals["raise_exception"] = raise_exception
  found.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
  return found


def render(template: Any, asked: dict[str, Any], names: dict[str, str]) -> str:
  """The text of one conversation. A bad template can raise any exception."""
  pieces, length = [], 0
  values = {"messages": asked["messages"], "add_generation_prompt": asked["prompt"], "tools": None}
  for piece in template.generate(values | names):
    pieces.append(piece)
    length += len(piece)
    if length > OUTPUT:
      raise ValueError(f"it writes more than {OUTPUT} characters")
  return "".join(pieces)


def answer(asked: dict[str, Any]) -> list[dict[str, str | None]]:
  """The text or the error of each conversation; the first failure to parse is that of all."""
  names = {name: asked[name] for name in ("bos_token", "eos_token")}
  found: list[dict[str, str | None]] = []
  template = None
  for conversation in asked["conversations"]:
    try:
      template = template or environment().from_string(asked["template"])
      found.append({"text": render(template, conversation, names), "error": None})
    except Exception as error:  # an untrusted template can raise anything; report it to the caller
      found.append({"text": None, "error": f"{type(error).__name__}: {str(error)[:1000]}"})
  return found


def main() -> None:
  """Reads the request from standard input and writes the answers to standard output."""
  asked = json.load(sys.stdin)
  limit(asked["cpu_seconds"])
  json.dump(answer(asked), sys.stdout)


if __name__ == "__main__":
  main()
