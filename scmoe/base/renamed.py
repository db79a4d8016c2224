"""Options that earlier versions had under other names.

Command lines, Python configuration files, JSON files and checkpoints that use an old name go on
working. Where a user wrote it, one line says the new name. `RENAMED` is the only list; values did
not change. Names of schema 1 of the checkpoints are in `scmoe.training.schema`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from scmoe.base.output import note

# Dotted name before -> dotted name now.
RENAMED = {
  "model.activation": "model.ffn.activation",
  "model.expert_fp8": "model.ffn.fp8",
  "model.expert_impl": "model.ffn.impl",
  "model.expert_backend": "model.ffn.backend",
  "model.mix_input": "model.ablation.mix_input",
  "router.gates": "router.compat.gates",
  "router.fp32_gate": "router.compat.fp32_gate",
  "dispatch.silent": "dispatch.ablation.silent",
  "overlap.backward": "overlap.ablation.backward",
  "overlap.latency_hiding": "overlap.ablation.latency_hiding",
  "overlap.profile_guided": "overlap.ablation.profile_guided",
  "overlap.profile_runs": "overlap.ablation.profile_runs",
  "optimizer.masters": "optimizer.ablation.masters",
}
_noted: set[str] = set()


def present_name(path: str) -> str:
  """Today's name of an option; of an old name, with a note."""
  if path not in RENAMED:
    return path
  note_name(path)
  return RENAMED[path]


def note_name(path: str) -> None:
  """Says on standard error, once in a process, what an old name is called now."""
  if path not in _noted:
    _noted.add(path)
    note(f"{path} is now {RENAMED[path]}; the old name still works")


def old_names(section: str) -> dict[str, str]:
  """Old name -> new name of a section's options, both without the section: for its class.

  Args:
    section: its dotted name, such as `model`.
  """
  prefix = f"{section}."
  inside = {old: new for old, new in RENAMED.items() if old.startswith(prefix)}
  return {old.removeprefix(prefix): new.removeprefix(prefix) for old, new in inside.items()}


def with_present_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
  """A nested configuration with today's names, and the old names that it had.

  A value under the new name counts more than one under the old name. What is no group of fields
  stays as it is: the check of the configuration refuses it.
  """
  values, found = copy.deepcopy(dict(values)), []
  for old, new in RENAMED.items():
    group, name = _group(values, old, make=False)
    if group is None or name not in group:
      continue
    target, last = _group(values, new, make=True)
    if target is not None:
      target.setdefault(last, group.pop(name))
      found.append(old)
  return values, found


def _group(values: dict[str, Any], path: str, *, make: bool) -> tuple[dict[str, Any] | None, str]:
  """The dictionary that holds an option, and the option's name in it; None: there is none.

  Args:
    values: the whole configuration.
    path: dotted name of the option.
    make: add the groups that are missing.
  """
  *parents, name = path.split(".")
  group: Any = values
  for parent in parents:
    if make:
      group.setdefault(parent, {})
    group = group.get(parent)
    if not isinstance(group, dict):
      return None, name
  return group, name
