"""Runs that train adapters (`lora.rank`): the objects of their training, and their whole weights.

A checkpoint of such a run holds the adapters. The frozen model, the run's base, lies once in
WORKDIR/base, a checkpoint of weights alone (`scmoe.run.base` puts it there). Code that needs the
weights of a stored run calls `restore_weights`, which merges base and adapters.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from scmoe.base.errors import ConfigError
from scmoe.models.adapted import Adapted
from scmoe.models.flops import forward_flops
from scmoe.models.low_rank import Adapters, LowRank
from scmoe.models.objective import RoutedObjective
from scmoe.parallel.mesh import shardings_of
from scmoe.run import build
from scmoe.run.config import RunConfig
from scmoe.run.model import build_model
from scmoe.training.optimizer import make_optimizer
from scmoe.training.restore import read_meta, restore_on_host, restore_part
from scmoe.training.variants import Variant

BASE = "base"  # folder in the run's folder, laid out like that of a run with one checkpoint
PyTree = Any


@dataclasses.dataclass(frozen=True)
class BuiltAdapters(build.Built):
  """The objects of a run that trains adapters.

  `shapes` and `graph` are those of the whole model; the trained parameters are `adapters.shapes`.
  """

  adapters: Adapters = dataclasses.field(kw_only=True)

  def init(self, key: Array) -> tuple[build.Params, dict[str, Any]]:
    """Adapters that change nothing yet, and a fresh router state; call it under jit."""
    _, router = super().init(key)
    return self.adapters.init(key), router

  @property
  def trained_shapes(self) -> build.Params:
    """Adapters, as `jax.ShapeDtypeStruct`s with shardings."""
    return self.adapters.shapes

  @property
  def specs(self) -> build.Params:
    """PartitionSpecs of the adapters."""
    return _specs(self.adapters)

  @property
  def shapes_given(self) -> dict[str, Any]:
    """Shapes of `TrainState.teacher`: under "base" the base, under "second" a teacher, if any."""
    given = {"base": self.given_shapes}
    return given if self.teacher is None else given | {"second": self.teacher.given_shapes}

  def flops_per_token(self, figures: Mapping[str, Any]) -> float:
    """See `Built.flops_per_token`; the forward pass of a base that is the reference counts, too.

    The count is that of a step that trains all parameters, although the frozen parameters without
    adapters need no gradients.
    """
    base = forward_flops(self.run.model, self.run.data.seq_len).forward
    return super().flops_per_token(figures) + base * compares_with_base(self)

  def variant(self, variant: Variant) -> RoutedObjective:
    """See `Built.variant`."""
    changed = self.varied(variant)
    graph = build_model(changed, self.mesh)[0]
    return _objective(dataclasses.replace(self, run=changed, graph=graph), self.adapters)

  def whole(self, params: build.Params, given: Any) -> build.Params:
    """The base's parameters with adapters added, in the types in which a step reads them."""
    return self._merge(given["base"]["params"], params)

  @functools.cached_property
  def _merge(self) -> Any:
    merge = lambda base, own: self.adapters.merged(base, self.objective.cast(own))
    return jax.jit(merge, out_shardings=shardings_of(self.shapes))


def build_training(
  run: RunConfig, devices: Sequence[Any] | None = None, teacher: RunConfig | None = None
) -> build.Built:
  """Builds a run that is to be trained: `BuiltAdapters` with `lora.rank`, else a plain `Built`.

  Arguments and errors as of `scmoe.run.build.build`.

  Raises:
    ConfigError: `lora.targets` names what the model lacks.
  """
  plain = build.build(run, devices, teacher)
  if not run.lora.rank:
    return plain
  adapters = Adapters(run.lora, plain.shapes)
  optimizer = make_optimizer(
    run.optimizer,
    run.train.steps,
    half=run.model.dtype == "float16",
    spike_sigma=run.train.spike_sigma,
    specs=_specs(adapters),
  )
  fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
  fields |= {"objective": _objective(plain, adapters), "optimizer": optimizer}
  return BuiltAdapters(**fields, adapters=adapters)


def _objective(built: build.Built, adapters: Adapters) -> Adapted:
  """The objective over adapters; a preference loss without `train.teacher` refers to the base."""
  second = built if compares_with_base(built) else built.teacher
  inner = build.make_objective(built.run, built.graph, second)
  return Adapted(inner, adapters, built.run.model.dtype)


def compares_with_base(built: build.Built) -> bool:
  """Whether the reference of a preference loss over adapters is their base."""
  run = built.run
  return run.data.reads_preferences and not run.train.reference_free and built.teacher is None


def _specs(adapters: Adapters) -> PyTree:
  return jax.tree.map(lambda s: s.sharding.spec, adapters.shapes)


# -- the whole weights of a stored run ------------------------------------------------------------


def restore_weights(
  workdir: str | Path, run: RunConfig, abstract: dict[str, PyTree], step: int | None = None
) -> dict[str, PyTree]:
  """`restore_part` of a run whose weights may be a base with adapters: these are merged.

  Args:
    workdir: of the run.
    run: as the checkpoint stores it.
    abstract: the parts of the state to restore, by name, with the shapes of the whole model;
      `params` and `average` are weights.
    step: step of the checkpoint; None: the newest undamaged one.

  Raises:
    CheckpointError: no such step, or no valid one, of the run or its base.
    ConfigError: a stored shape or type is not that of `abstract`.
  """
  kinds = [kind for kind in ("params", "average") if kind in abstract] if run.lora.rank else []
  own = {kind: Adapters(run.lora, abstract[kind]) for kind in kinds}
  wanted = abstract | {kind: adapters.shapes for kind, adapters in own.items()}
  found = restore_part(workdir, wanted, step)
  for kind, adapters in own.items():
    base = restore_part(base_of(workdir, run), {"params": abstract[kind]})["params"]
    merge = jax.jit(adapters.merged, out_shardings=shardings_of(abstract[kind]), donate_argnums=0)
    found[kind] = merge(base, found[kind])
  return found


def restore_weights_on_host(
  workdir: str | Path,
  run: RunConfig,
  abstract: PyTree,
  step: int | None = None,
  *,
  part: str = "params",
) -> PyTree:
  """`restore_on_host` of a run whose weights may be a base with adapters: these are merged.

  One leaf is merged at a time, so a device holds at most one leaf of the model. Arguments and
  errors as of `restore_weights`, but `abstract` is the tree of the parameters. `part` is as of
  `restore_on_host`.
  """
  if not run.lora.rank:
    return restore_on_host(workdir, abstract, step, part=part)
  adapters = Adapters(run.lora, abstract)
  own = restore_on_host(workdir, adapters.shapes, step, part=part)
  base = restore_on_host(base_of(workdir, run), abstract)
  return adapters.merged(base, own, lambda leaf: np.asarray(_merged(leaf)))


def digest_of_base(workdir: str | Path) -> str:
  """Digest of the checksums of all weights and router state of a run's base.

  Raises:
    CheckpointError: there is no base, or its description is damaged.
  """
  leaves = read_meta(Path(workdir) / BASE)["leaves"]
  prints = {name: leaf["fingerprint"] for name, leaf in leaves.items()}
  text = json.dumps(prints, sort_keys=True)
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def base_of(workdir: str | Path, run: RunConfig) -> Path:
  """The folder of a stored run's base.

  Raises:
    ConfigError: it is not the model that the adapters belong to.
  """
  place = Path(workdir) / BASE
  if (found := digest_of_base(workdir)) != run.lora.base:
    raise ConfigError(
      f"{place} is not the model that its adapters were trained on: its digest is {found!r}, "
      f"lora.base={run.lora.base!r}; restore that folder"
    )
  return place


_merged = jax.jit(LowRank.merged)
