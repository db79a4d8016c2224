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
from typing import Any

from scmoe.base.errors import DataError
from scmoe.data.packages import need

Asked = tuple[Sequence[Mapping[str, Any]], bool]  # messages, and whether an answer is to follow
_SECONDS = 30  # of wall-clock time
_CPU_SECONDS = 5  # of processor time, to which the process limits itself
_EACH = 0.02  # more seconds of both for every further text
_SCRIPT = Path(__file__).with_name("render_chat.py")


def render(
  template: str, messages: Sequence[Mapping[str, Any]], *, bos_token: str, eos_token: str
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
  (text,) = render_all(template, [(messages, True)], bos_token=bos_token, eos_token=eos_token)
  if isinstance(text, DataError):
    raise text
  return text


def render_all(
  template: str, asked: Sequence[Asked], *, bos_token: str, eos_token: str
) -> list[str | DataError]:
  """The texts of several conversations, written by one process.

  Args:
    template, bos_token, eos_token: see `render`.
    asked: for each text its messages, and whether it ends with the beginning of a further answer.

  Returns:
    for each either its text, or the error with which the template fails on it.

  Raises:
    ConfigError: the package jinja2 is not installed.
    DataError: the process cannot run, or exceeds its limits on time and memory.
  """
  need("jinja2", "the chat template of this model")
  more = _EACH * (len(asked) - 1)
  conversations = [{"messages": list(of), "prompt": prompt} for of, prompt in asked]
  request = {"template": template, "bos_token": bos_token, "eos_token": eos_token}
  request |= {"conversations": conversations, "cpu_seconds": round(_CPU_SECONDS + more)}
  try:
    # -I (isolated): PYTHONPATH and the current folder do not change what the process imports.
    done = subprocess.run(
      [sys.executable, "-I", str(_SCRIPT)],
      input=json.dumps(request).encode(),
      capture_output=True,
      timeout=_SECONDS + more,
    )
  except subprocess.TimeoutExpired:
    raise DataError(
      f"the chat template of this model ran for more than {_SECONDS + more:.0f} s"
    ) from None
  except OSError as error:
    raise DataError(f"the chat template of this model cannot be run: {error}") from None
  try:
    found = json.loads(done.stdout)
    return [_text_or_error(item["text"], item["error"]) for item in found]
  except (ValueError, TypeError, KeyError):  # a limit ended the process before it could answer
    why = "it exceeds the limits on time and memory"
    raise DataError(f"the chat template of this model fails: {why}") from None


def _text_or_error(text: Any, why: Any) -> str | DataError:
  if isinstance(text, str):
    return text
  return DataError(f"the chat template of this model fails: {' '.join(str(why).split())[:200]}")
