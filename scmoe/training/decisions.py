"""WORKDIR/schedule.json: the variant that a search chose, for later starts of the same program."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax

from scmoe.base.errors import ConfigError
from scmoe.base.output import warn
from scmoe.base.stored import Maybe, StoredError, check_shape, read_json, write_json
from scmoe.training.distributed import from_all_processes, is_first
from scmoe.training.variants import Variant

SCHEDULE = "schedule.json"
# A kept decision holds for the same number and kind of devices, number of processes and jax
# version, and for the same values of the sections SECTIONS, of the fields FIELDS of `train`, and of
# `data.seq_len`. Other settings are not compared.
SECTIONS = ("model", "router", "dispatch", "mesh", "overlap")
FIELDS = ("batch_size", "tokens_per_step", "remat", "tune")


# The fields of a variant that the search may choose.
_CHOSEN = {
  "transport": Maybe(str),
  "schedule": Maybe(str),
  "order": Maybe(str),
  "adaptive_r": Maybe(int),
  "chunks": Maybe(int),
  "num_sms": Maybe(int),
}


def stored_variant(fields: dict[str, Any], where: str) -> Variant:
  """Makes the variant of the fields that a file stores; refuses fields that no search chooses.

  Raises:
    StoredError: the file has fields that a search does not choose, fields of other types, or a
      number below 0.
  """
  try:
    check_shape(fields, _CHOSEN, "the variant")
    if unknown := sorted(set(fields) - set(_CHOSEN)):
      raise ValueError(f"{unknown[0]!r} is not chosen by a search")
    return Variant(**fields)
  except (ValueError, ConfigError) as error:
    raise StoredError(f"{where} cannot be used: {error}") from None


@dataclasses.dataclass(frozen=True)
class Decisions:
  """WORKDIR/schedule.json: a search's decision, with the program and machine it is valid for.

  Attributes:
    file: path of schedule.json.
    config: the run's configuration, JSON-able.
  """

  file: Path
  config: dict[str, Any]

  def known(self) -> Variant | None:
    """The variant that an earlier start chose for the same program and machine, or None.

    All processes call it, and process 0 reads the file.
    """
    found = None
    if is_first():
      try:
        stored = read_json(self.file, {"for": dict, "chosen": dict})
        if stored["for"] == self._identity():
          found = stored_variant(stored["chosen"], str(self.file)).given
      except FileNotFoundError:
        found = None
      except StoredError as error:
        warn(f"{error}; the search begins anew")
    found = from_all_processes({"found": found})[0]["found"]
    return None if found is None else Variant(**found)

  def keep(self, decision: dict[str, Any]) -> None:
    """Writes the decision, on process 0; if that fails, the next start searches again."""
    if not is_first():
      return
    try:
      write_json(self.file, {**decision, "for": self._identity()})
    except OSError as error:
      warn(f"{self.file} cannot be written ({error.strerror}): the next start searches again")

  def _identity(self) -> dict[str, Any]:
    relevant = {name: self.config.get(name) for name in SECTIONS}
    train, data = self.config.get("train", {}), self.config.get("data", {})
    relevant |= {name: train.get(name) for name in FIELDS}
    text = json.dumps([relevant, data.get("seq_len")], sort_keys=True, default=str)
    return {
      "program": hashlib.sha256(text.encode()).hexdigest()[:16],
      "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
      "processes": jax.process_count(),
      "jax": jax.__version__,
    }
