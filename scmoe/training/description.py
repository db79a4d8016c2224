"""The description of a checkpoint's step: two JSON files beside its arrays, sealed by a digest.

`N/meta/metadata` holds the name, shape, type and fingerprint of each array, the digest of both
files, and what the writer adds, such as the configuration. `N/data/metadata` holds the position of
each process in the data.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from scmoe.base.errors import NonFiniteError
from scmoe.base.stored import Maybe, StoredError, read_json
from scmoe.training.distributed import from_all_processes
from scmoe.training.fingerprint import survey
from scmoe.training.schema import SCHEMA, upgraded

PyTree = Any
# Name of a field of a step's meta; it is true if the step holds weights and no optimizer's state.
WEIGHTS_ONLY = "weights_only"
# The folder into which all arrays go if a step is saved in pieces.
PIECES = "params"
# The 16-bit types in which models are released; float32 holds all their values exactly.
_NARROW = ("bfloat16", "float16")
_ITEM = re.compile(r"params(_\d+)?|state")
_LEAF = {
  "shape": [int],
  "dtype": str,
  "fingerprint": str,
  "stored_as": Maybe(str),
  "item": Maybe(str),
}
_META = {"digest": str, "step": int, "leaves": {"*": _LEAF}, "config": Maybe({"*": object}),
         "data_fingerprint": Maybe(dict)}  # fmt: skip
_DATA = {"processes": [dict]}


class Damaged(Exception):
  """Files of a step are missing, cannot be read, were changed, or are those of another step."""


def check_access(place: Path) -> None:
  """Opens every file of a step, since TensorStore's errors do not say what was not permitted.

  Files that are missing, or cannot be opened for another reason, are passed over.

  Raises:
    PermissionError: this process may not read a file or folder of the step, which it names.
  """

  def refuse(error: OSError) -> None:
    if isinstance(error, PermissionError):
      raise error

  for folder, _, files in os.walk(place, onerror=refuse):
    for file in files:
      try:
        os.close(os.open(os.path.join(folder, file), os.O_RDONLY | os.O_NONBLOCK))
      except OSError as error:
        refuse(error)


def flatten(tree: PyTree) -> dict[str, Any]:
  """Leaves by dotted name, in tree order: `{"a": (x, y)}` gives `a.0` and `a.1`.

  The containers' types do not matter: a dataclass with the field `a` gives the same names.

  Raises:
    ValueError: two leaves have the same name.
  """
  pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
  leaves = {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in pairs}
  if len(leaves) != len(pairs):
    raise ValueError("two leaves of the state have the same dotted name")
  return leaves


def item_of(name: str) -> str:
  """The folder of a step that holds an array: `params` for parameters, or `state`.

  So parameters can be read alone. If the array's entry in the step's meta gives an `item`, as in a
  step that was saved in pieces, it lies in that folder instead.
  """
  return "params" if name.partition(".")[0] == "params" else "state"


def describe(leaves: dict[str, jax.Array]) -> dict[str, dict]:
  """Shape, type and fingerprint of each leaf, by name; all processes call it.

  Raises:
    NonFiniteError: a leaf holds NaN or infinity.
  """
  prints, finite = survey(list(leaves.values()))
  refuse_non_finite(dict(zip(leaves, finite)))
  return {name: description_of(x, own) for (name, x), own in zip(leaves.items(), prints)}


def description_of(x: Any, fingerprint: str) -> dict[str, Any]:
  """The entry of one array in `leaves` of a step's meta, without `item`.

  Args:
    x: has the array's shape and dtype.
    fingerprint: of its values (`scmoe.training.fingerprint`).
  """
  return {"shape": list(x.shape), "dtype": str(x.dtype), "fingerprint": fingerprint}


def refuse_non_finite(finite: Mapping[str, bool]) -> None:
  """Raises NonFiniteError if an array holds NaN or infinity.

  Args:
    finite: for each array's name, whether all its values are finite.
  """
  if bad := next((name for name, good in finite.items() if not good), None):
    raise NonFiniteError(f"{bad} is not finite and is not saved; resume from an older checkpoint")


def records(
  step: int, described: dict[str, dict], data_state: dict, meta: dict
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The two JSON descriptions of a step, data and sealed meta; all processes call it.

  Args:
    step: optimizer steps done.
    described: shape, type and fingerprint of each array, by name (`describe`); maybe its `item`.
    data_state: this process's position in the data.
    meta: the other fields of the description.
  """
  data = {"processes": from_all_processes(data_state)}
  return data, sealed(meta | {"schema": SCHEMA, "step": step, "leaves": described}, data)


def sealed(meta: dict, data: dict) -> dict:
  """Meta as JSON reads it back, with `digest`, a SHA-256 over meta and data, added."""
  meta = json.loads(json.dumps(meta))
  return meta | {"digest": _digest(meta, data)}


def _digest(meta: dict, data: dict) -> str:
  rest = {k: v for k, v in meta.items() if k != "digest"}
  return hashlib.sha256(json.dumps([rest, data], sort_keys=True).encode()).hexdigest()


def read_description(place: Path) -> tuple[dict, dict]:
  """(meta, data) of a step, verified; meta as the present schema has it (`scmoe.training.schema`).

  Raises:
    Damaged: the description is missing, of another form, or changed since it was written.
    PermissionError: this process may not read a file of the step.
    CheckpointError: this version of scmoe does not know the description's schema.
  """
  try:
    meta = read_json(place / "meta" / "metadata", _META)
    data = read_json(place / "data" / "metadata", _DATA)
    for leaf in meta["leaves"].values():
      jnp.dtype(leaf["dtype"])
  except (FileNotFoundError, StoredError, TypeError) as error:
    check_access(place)
    raise Damaged(f"its description cannot be read: {error}") from None
  if meta["digest"] != _digest(meta, data):
    raise Damaged("its description was changed after it was written")
  if odd := [
    leaf for leaf in meta["leaves"].values() if not _ITEM.fullmatch(leaf.get("item", PIECES))
  ]:
    raise Damaged(f"an array lies in {odd[0]['item']!r}, which is no folder of a step")
  return upgraded(meta), data


def held_part(abstract: PyTree, meta: dict) -> PyTree:
  """The part of `abstract`, a whole training state, that a step with this meta holds.

  A step of a training run holds all of it. For a step of weights alone (`WEIGHTS_ONLY`) the result
  is a dictionary: `params`, and the part of `router` that the step stores.
  """
  if not meta.get(WEIGHTS_ONLY):
    return abstract
  router = {n: x for n, x in abstract.router.items() if f"router.{n}" in meta["leaves"]}
  return {"params": abstract.params, "router": router}


def misfit(abstract: PyTree, stored: dict[str, dict], *, partial: bool = False) -> str:
  """Says how stored names, shapes and types first differ from those asked for; "" if they fit.

  bfloat16 and float16 fit where float32 is asked for; float32 fits where bfloat16 is asked for in
  `opt_state`.

  Args:
    abstract: pytree of ShapeDtypeStruct, or `InFile` in place of one.
    stored: `leaves` of a checkpoint's meta.
    partial: `abstract` may leave out leaves.
  """
  wanted = flatten(abstract)
  missing = sorted(set(wanted) - set(stored))
  extra = [] if partial else sorted(set(stored) - set(wanted))
  if missing or extra:
    return f"lacks {missing[0]!r}" if missing else f"also holds {extra[0]!r}"
  for name, leaf in wanted.items():
    have = (tuple(stored[name]["shape"]), stored[name]["dtype"])
    want = (tuple(leaf.shape), str(leaf.dtype))
    exact = have[1] in _NARROW and want[1] == "float32"
    moments = name.startswith("opt_state.") and (have[1], want[1]) == ("float32", "bfloat16")
    if have[0] != want[0] or (have[1] != want[1] and not exact and not moments):
      return (
        f"holds {name} as {have[1]}{list(have[0])}, the configuration asks for "
        f"{want[1]}{list(want[0])}"
      )
  return ""
