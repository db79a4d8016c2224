"""Downloads datasets from the Hugging Face hub once, to be read as files.

  data.path=hf:OWNER/NAME            its files of the kind data.source; Parquet by default
           hf:OWNER/NAME/FOLDER      only the files in a folder, or one file
           hf:OWNER/NAME@REVISION    the files of a branch, tag or commit; by default the newest

Only files of that kind are downloaded, and no code of a dataset is run. They stay in the hub's own
cache (HF_HOME), where a later start without a network finds them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

from scmoe.base.errors import ConfigError, DataError
from scmoe.data.config import HUB, SUFFIXES
from scmoe.data.packages import need


class HubPath(NamedTuple):
  """A dataset OWNER/NAME, a folder or file in it (or ""), and a revision (or "")."""

  repo: str
  inside: str
  revision: str


def parse(path: str) -> HubPath:
  """Parses `hf:OWNER/NAME[/FOLDER][@REVISION]`.

  Raises:
    ConfigError: OWNER or NAME is missing.
  """
  name, _, revision = path.removeprefix(HUB).partition("@")
  parts = name.strip("/").split("/")
  if len(parts) < 2 or not all(parts):
    raise ConfigError(
      f"data.path={path!r} names no dataset; write hf:OWNER/NAME, e.g. hf:Salesforce/wikitext"
    )
  return HubPath("/".join(parts[:2]), "/".join(parts[2:]), revision)


@functools.cache
def fetched(kind: str, path: str) -> Path:
  """Downloads a dataset's files unless the cache has them; returns their local path.

  Args:
    kind: the kind of source; only files of this kind are downloaded.
    path: see `parse`.

  Raises:
    ConfigError: the path names no dataset, or the hub's client is not installed.
    DataError: the dataset does not exist or cannot be reached.
  """
  asked = parse(path)
  hub = need("huggingface_hub", f"data.path={path!r}")
  inside = f"{asked.inside}/" if asked.inside else ""
  wanted = [f"{inside}*{suffix}" for suffix in SUFFIXES[kind]]
  if asked.inside.endswith(SUFFIXES[kind]):
    wanted = [asked.inside]
  try:
    root = hub.snapshot_download(
      asked.repo, repo_type="dataset", revision=asked.revision or None, allow_patterns=wanted
    )
  except Exception as error:  # the network, the hub and the disk each have errors of their own
    what = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    raise DataError(
      f"data.path={path!r} cannot be fetched ({what}); check the name, or where there is no "
      f"network fetch it elsewhere (hf download {asked.repo} --repo-type dataset --local-dir DIR) "
      "and give data.path=DIR"
    ) from None
  return Path(root) / asked.inside
