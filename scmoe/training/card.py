"""WORKDIR/card.json: facts for repeating a run.

It has the time, commit, versions, host, devices, some environment variables (`environment`), the
starts, and what the caller says (`write_card`), such as command, configuration, fingerprint of the
data and numbers of parameters.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import socket
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from scmoe.base.errors import StorageError
from scmoe.base.stored import Maybe, StoredError, read_json, write_json

CARD = "card.json"
PACKAGE = Path(__file__).resolve().parents[1]  # the folder scmoe/; see `commit`
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")
# The fields of card.json that are checked when it is read; see `scmoe.base.stored`. Of all others,
# such as `command`, readers make copies at most, whatever they hold.
CARD_SHAPE = {
  "time": Maybe(str),
  "git": Maybe({"commit": Maybe(str), "changed": Maybe(bool)}),
  "versions": Maybe({"*": str}),
  "host": Maybe(dict),
  "devices": Maybe({"count": int, "kind": str}),
  "config": Maybe(dict),
  "data": Maybe(dict),
  "parameters": Maybe(dict),
  "flops_per_token": Maybe(float),
  "starts": Maybe([dict]),
}
# The environment variables that the card holds, with all of NCCL's: they change how jax computes,
# or which link NCCL takes. All others are left out, since they may hold secrets.
_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_ENABLE_X64", "CUDA_VISIBLE_DEVICES")


def write_card(workdir: Path, **said: Any) -> None:
  """Writes the card of a new start; its list `starts` adds this start to those of the card before.

  A card before that cannot be used is replaced, and its starts are lost.

  Args:
    workdir: of the run; exists.
    **said: fields from the caller, such as `command`, `config` (as the user gave it, not resolved),
      `data` and `tokenizer` (fingerprints), `parameters` (numbers of them).

  Raises:
    StorageError: it cannot be written.
  """
  start = {
    "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "git": commit(PACKAGE),
    "versions": versions(),
    "host": {"name": socket.gethostname(), "system": platform.platform(), "cpus": os.cpu_count()},
    "devices": devices(),
    "environment": environment(),
  }
  before = read_card(workdir).get("starts", [])
  card = {**start, **said, "starts": [*before, {**start, "command": said.get("command")}]}
  try:
    write_json(workdir / CARD, card)
  except OSError as error:
    raise StorageError(f"{workdir / CARD} cannot be written: {error.strerror or error}") from None


def environment() -> dict[str, str]:
  """The variables of this process's environment that a card holds (`_VARIABLES` and NCCL's)."""
  held = lambda name: name in _VARIABLES or name.startswith("NCCL_")
  return {name: value for name, value in sorted(os.environ.items()) if held(name)}


def origin(module: str, argv: Sequence[str], given: dict[str, str]) -> dict[str, Any]:
  """Tells where figures come from, for a file that holds them without a run's folder.

  Args:
    module: of the command, e.g. "scmoe.profile".
    argv: its arguments.
    given: `environment` as it was when the command began: commands add to XLA_FLAGS and NCCL's
      variables.

  Returns:
    `command`, `environment` (`given`), `git` and `date`.
  """
  return {
    "command": shlex.join(["python", "-m", module, *argv]),
    "environment": given,
    "git": commit(PACKAGE),
    "date": time.strftime("%Y-%m-%d"),
  }


def read_card(workdir: str | os.PathLike[str]) -> dict[str, Any]:
  """The fields of a run's card; {} if there is none, or none that can be used."""
  try:
    return read_json(Path(workdir) / CARD, CARD_SHAPE)
  except (FileNotFoundError, StoredError):
    return {}


def versions() -> dict[str, str]:
  """Versions, by name, of Python and of those of scmoe and `PACKAGES` that are installed."""
  found = {"python": platform.python_version()}
  for name in ("scmoe", *PACKAGES):
    try:
      found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      continue
  return found


def devices() -> dict[str, Any]:
  """Platform and kind of the first device, and how many devices and processes jax has.

  A run of one process may leave some of these devices out of its mesh.
  """
  import jax  # not at the top of the file, since commands that only read a card need no jax

  first = jax.devices()[0]
  return {"platform": first.platform, "kind": first.device_kind, "count": jax.device_count(),
          "processes": jax.process_count()}  # fmt: skip


def commit(folder: Path) -> dict[str, Any]:
  """`commit` of the git checkout around `folder`, and `changed`: whether files differ from it.

  Only tracked files in `folder` count for `changed`. The result is {} if there is no checkout, or
  git is missing or fails.
  """
  try:
    head = _git(folder, "rev-parse", "HEAD").strip()
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", str(folder))
  except (OSError, subprocess.SubprocessError):
    return {}
  return {"commit": head, "changed": bool(changed.strip())}


def _git(folder: Path, *words: str) -> str:
  command: Sequence[str] = ("git", "-C", str(folder), *words)
  done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
  return done.stdout
