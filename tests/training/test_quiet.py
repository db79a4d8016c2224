"""Exceptions that nobody can catch: orbax's abandoned work is dropped, all others are shown."""

import types

import pytest

from scmoe.training.quiet import _WithoutAbandoned


def coroutine_of(file):
  """A coroutine whose code claims to be in `file`."""
  names = {}
  exec(compile("async def read():\n  pass", file, "exec"), names)
  return names["read"]()


@pytest.mark.parametrize(
  ("error", "file", "shown"),
  [
    (RuntimeError("Event loop is closed"), None, False),
    (Exception("read failed"), "site-packages/orbax/checkpoint/serialization.py", False),
    (Exception("read failed"), "a_users/module.py", True),
    (RuntimeError("another"), None, True),
  ],
)
def test_only_abandoned_reads_and_writes_are_dropped(error, file, shown):
  passed = []
  thing = None if file is None else coroutine_of(file)
  given = types.SimpleNamespace(exc_value=error, object=thing)
  _WithoutAbandoned(passed.append)(given)
  assert passed == ([given] if shown else [])
  if thing is not None:
    thing.close()
