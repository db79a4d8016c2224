"""Parses and checks the text of `--place` and `--prune`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scmoe.base.errors import ConfigError
from scmoe.inference.placement.devices import OBJECTIVES
from scmoe.moe.gates import arrays_of_experts
from scmoe.moe.options import GATES
from scmoe.parallel.mesh import expert_shards
from scmoe.run.config import RunConfig

SCORES = ("router_norm", "use", "random")
_BATCHES = 16  # batches of text on which choices are counted


class Placing(NamedTuple):
  """A request of `--place`.

  Attributes:
    devices: W, number of devices that divide the experts among them.
    objective: one of `scmoe.inference.placement.devices.OBJECTIVES`.
    batches: batches of text on which choices are counted; at least 2.
  """

  devices: int
  objective: str = "balance"
  batches: int = _BATCHES


class Pruning(NamedTuple):
  """A request of `--prune`.

  Attributes:
    keep: number of experts of each layer ("4"), or their share ("0.5").
    score: one of `SCORES`.
    batches: batches of text on which choices are counted.
    seed: of the scores of `random`.
  """

  keep: str
  score: str = "router_norm"
  batches: int = _BATCHES
  seed: int = 0


def placing(text: str) -> Placing:
  """Parses `devices=4` or `devices=4,by=affinity,batches=32`.

  Raises:
    ConfigError: the text has another form.
  """
  given = parsed("place", text, ("devices", "by", "batches"), "devices=4 or devices=4,by=affinity")
  asked = Placing(
    _number("place", given, "devices"),
    _word("place", given, OBJECTIVES, "balance"),
    _number("place", given, "batches", _BATCHES),
  )
  if asked.batches < 2:
    raise ConfigError(
      f"--place: batches={asked.batches} leaves no half of the text to judge the placement; use 2 "
      "at least"
    )
  return asked


def pruning(text: str) -> Pruning:
  """Parses `keep=4` or `keep=0.5,by=random,seed=1`.

  Raises:
    ConfigError: the text has another form, or names a key that its score does not read.
  """
  keys = ("keep", "by", "batches", "seed")
  given = parsed("prune", text, keys, "keep=4 or keep=0.5,by=use")
  score = _word("prune", given, SCORES, "router_norm")
  for key, reader in (("batches", "use"), ("seed", "random")):
    if key in given and score != reader:
      raise ConfigError(
        f"--prune: {key}={given[key]!r} has no effect with by={score}; leave it out, or use "
        f"by={reader}"
      )
  return Pruning(
    given.get("keep", ""),
    score,
    _number("prune", given, "batches", _BATCHES),
    _number("prune", given, "seed", 0),
  )


def smaller(run: RunConfig, keep: str) -> RunConfig:
  """The run with fewer experts in each layer.

  Args:
    run: resolved.
    keep: see `Pruning`.

  Raises:
    ConfigError: no such model is possible: `keep` gives no number of experts, or too few for the
      router's choices, its groups or the mesh.
  """
  count, groups = _kept(keep, run.model.num_experts), run.router.n_group
  if count % groups:
    raise ConfigError(
      f"--prune: keep={count} does not divide among router.n_group={groups} groups, of which each "
      f"keeps equally many; use a multiple of {groups}"
    )
  if count < run.model.top_k:
    raise ConfigError(
      f"--prune: keep={count} is fewer than model.top_k={run.model.top_k} experts per token; keep "
      "more"
    )
  changed = dataclasses.replace(run, model=dataclasses.replace(run.model, num_experts=count))
  try:
    found = changed.resolve(num_devices=max(run.mesh.size, 1), vocab_size=0)
  except ConfigError as error:
    raise ConfigError(f"--prune: keep={count}: {error}") from None
  shards = [expert_shards(run.mesh.expert, r.model.num_experts) for r in (run, found)]
  if shards[0] != shards[1]:
    raise ConfigError(
      f"--prune: keep={count} is fewer than mesh.expert={run.mesh.expert}, so that {shards[1]} "
      f"devices would share an expert; give --mesh=expert=N with an N that divides {count} (the "
      "new run may be trained on any mesh)"
    )
  return found


def check_experts(flag: str, run: RunConfig) -> None:
  """Checks that the experts of a run can be taken one by one.

  Raises:
    ConfigError: the model has none; a gate is the user's own, or its class does not name the arrays
      that belong to experts; or groups hold zero experts, which can neither move nor go.
  """
  if not run.model.wiring_rule.taps:
    raise ConfigError(
      f"--{flag}: model.wiring={run.model.wiring!r} has no experts; give another run"
    )
  if run.router.gate not in GATES:
    raise ConfigError(
      f"--{flag}: which parts of router.gate={run.router.gate!r} belong to which expert is not "
      f"known; give a run with one of: {', '.join(GATES)}"
    )
  if not arrays_of_experts(run.router.gate):
    raise ConfigError(
      f"--{flag}: the class of router.gate={run.router.gate!r} does not say which of its arrays "
      "have a column for each expert; name them in its tuple OF_EXPERTS"
    )
  if run.router.n_group > 1 and run.model.zero_experts:
    raise ConfigError(
      f"--{flag}: router.n_group={run.router.n_group} counts model.zero_experts="
      f"{run.model.zero_experts} among a group's experts, which neither move nor go; use a run "
      "without groups or without zero experts"
    )


def parsed(flag: str, text: str, keys: Sequence[str], example: str) -> dict[str, str]:
  """The text as a mapping.

  Raises:
    ConfigError: it has another key, one twice, or one without a value.
  """
  given: dict[str, str] = {}
  for part in text.split(","):
    key, _, value = (word.strip() for word in part.partition("="))
    if key not in keys or not value or key in given:
      raise ConfigError(
        f"--{flag}={text!r} has {part.strip()!r}; write KEY=VALUE, each KEY once, with a KEY of: "
        f"{', '.join(keys)}; e.g. {example}"
      )
    given[key] = value
  return given


def _word(flag: str, given: Mapping[str, str], words: Sequence[str], default: str) -> str:
  value = given.get("by", default)
  if value not in words:
    raise ConfigError(f"--{flag}: by={value!r} is unknown; one of: {', '.join(words)}")
  return value


def _number(flag: str, given: Mapping[str, str], key: str, default: int | None = None) -> int:
  if key not in given and default is not None:
    return default
  value = given.get(key, "")
  if not (value.isdecimal() and len(value) < 10) or (key == "batches" and not int(value)):
    raise ConfigError(f"--{flag}: {key}={value!r} is not such a number; e.g. {key}=4")
  return int(value)


def _kept(text: str, num_experts: int) -> int:
  """Number of experts to keep, from `keep=4` or `keep=0.5`.

  A text with a point is a share below 1. A share gives a number of experts if its product with
  `num_experts` is within 1e-9 of a whole number: in float64, 0.29 * 100 is 28.999999999999996.

  Raises:
    ConfigError: it is neither a number of experts nor a share that gives one.
  """
  count = int(text) if text.isdecimal() and len(text) < 10 else 0
  if re.fullmatch(r"0?\.[0-9]{1,30}", text):
    share = float(text) * num_experts
    count = round(share) if abs(share - round(share)) < 1e-9 else 0
  if not 1 <= count < num_experts:
    raise ConfigError(
      f"--prune: keep={text!r} of {num_experts} experts is not a number of experts from 1 to "
      f"{num_experts - 1}, nor a share below 1 that gives one; e.g. "
      f"keep={max(num_experts // 2, 1)} or keep=0.5"
    )
  return count
