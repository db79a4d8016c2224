"""Writes a conversation as a prompt, by the chat template of a released model.

A template is a Jinja program from an untrusted source. It runs in a process of its own
(`scmoe/data/render_chat.py`), in Jinja's sandbox, with limits on processor time, memory and output.
So it cannot call Python, read files or run for ever.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scmoe.base.errors import DataError
from scmoe.data.packages import need

_SECONDS = 30  # of wall-clock time; the process limits its own CPU time (render_chat.CPU_SECONDS)
_SCRIPT = Path(__file__).with_name("render_chat.py")


def render(
  template: str, messages: Sequence[Mapping[str, str]], *, bos_token: str, eos_token: str
) -> str:
  """The text of a conversation, up to where the model's next answer begins.

  Args:
    template: a Jinja template, e.g. `chat_template` of a released model's tokenizer_config.json.
    messages: turns in order, each with `role` ("system", "user", "assistant") and `content`.
    bos_token, eos_token: the texts of these tokens, which the template may use; "" for none.

  Raises:
    ConfigError: the package jinja2 is not installed.
    DataError: the template is not Jinja, fails, or exceeds its limits; one line says why.
  """
  need("jinja2", "the chat template of this model")
  asked = {"template": template, "messages": list(messages)}
  asked |= {"bos_token": bos_token, "eos_token": eos_token}
  try:
    # -I (isolated): PYTHONPATH and the current folder do not change what the process imports.
    done = subprocess.run(
      [sys.executable, "-I", str(_SCRIPT)],
      input=json.dumps(asked).encode(),
      capture_output=True,
      timeout=_SECONDS,
    )
  except subprocess.TimeoutExpired:
    raise DataError(f"the chat template of this model ran for more than {_SECONDS} s") from None
  except OSError as error:
    raise DataError(f"the chat template of this model cannot be run: {error}") from None
  try:
    found = json.loads(done.stdout)
    text, why = found["text"], found["error"]
  except (ValueError, TypeError, KeyError):  # a limit ended the process before it could answer
    text, why = None, "it exceeds the limits on time and memory"
  if not isinstance(text, str):
    raise DataError(f"the chat template of this model fails: {' '.join(str(why).split())[:200]}")
  return text
