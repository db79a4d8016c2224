"""The model of a resolved run: with fresh parameters, or as a graph and shapes.

A command asks for graph and shapes many times: for the mesh and each batch size that a dry run
compares, for each variant of a step. Tracing a model takes 0.05 to 0.3 s, so each is traced once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from scmoe.blocks.options import OverlapConfig
from scmoe.models.config import ModelConfig
from scmoe.parallel.mesh import parameter_specs
from scmoe.run.config import RunConfig
from scmoe.run.modality import Modality, modality_of

Params = dict[str, Any]


def build_model(run: RunConfig, mesh: Mesh | AbstractMesh | None) -> tuple[nnx.GraphDef, Params]:
  """The model's graph, and the shapes and shardings of its parameters; nothing is allocated.

  With `mesh` None the shapes have no sharding.
  """
  graph, shapes, specs = _traced(modality_of(run), run.model, **_model_options(run))
  at = lambda spec: None if mesh is None else NamedSharding(mesh, spec)
  place = lambda s, spec: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at(spec))
  return graph, jax.tree.map(place, shapes, specs)


@functools.lru_cache(maxsize=64)
def _traced(
  modality: Modality, config: ModelConfig, **options: Any
) -> tuple[nnx.GraphDef, Params, Params]:
  """The model's graph, and the shapes and PartitionSpecs of its parameters.

  Args:
    modality, config, options: as for `Modality.make_model`.
  """
  make = lambda: modality.make_model(config, jax.random.key(0), **options)
  graph, state = nnx.split(nnx.eval_shape(make))
  return graph, nnx.to_pure_dict(state), nnx.to_pure_dict(parameter_specs(state))


def router_shapes(graph: nnx.GraphDef, shapes: Params) -> dict[str, Any]:
  """Router state as `jax.ShapeDtypeStruct`.

  Args:
    graph, shapes: from `build_model`.
  """
  bare = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), shapes)
  return jax.eval_shape(lambda params: nnx.merge(graph, params).init_router(), bare)


def make_model(run: RunConfig, key: Array) -> Any:
  """A model with fresh parameters."""
  return modality_of(run).make_model(run.model, key, **_model_options(run))


def _model_options(run: RunConfig) -> dict[str, Any]:
  options = {"router": run.router, "dispatch": run.dispatch, "overlap": derived_overlap(run)}
  return options | {"partitioned": run.mesh.embedding_ranks > 1}


def derived_overlap(run: RunConfig, *, gpu: bool | None = None) -> OverlapConfig:
  """Overlap options of a resolved run, with defaults that depend on the machine filled in.

  Args:
    run: resolved.
    gpu: whether it runs on GPUs; None: if this process has some.
  """
  taps, gathered = run.model.wiring_rule.taps, run.dispatch.adaptive_r == 0
  exchange = run.mesh.expert > 1 and bool(taps) and not gathered
  gpu = jax.default_backend() == "gpu" if gpu is None else gpu
  pairs, devices = run.model.num_pairs, run.mesh.size
  overlap = run.overlap
  if run.mesh.experts_in == "host":  # XLA moves no copy across iterations of a scan over pairs
    overlap = dataclasses.replace(overlap, unroll=0)
  return overlap.derived(gpu=gpu, exchange=exchange, pairs=pairs, devices=devices)
