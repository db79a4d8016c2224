"""The two controls of a measurement of exchanges: a run without them, and they alone.

`scmoe.profiling.clock` says how the cost of the exchanges follows from their times.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.blocks.options import OverlapConfig
from scmoe.parallel.mesh import AXES, manual
from scmoe.profiling.exchanges import alone, buffers_for, exchanges_of
from scmoe.profiling.timer import Arm, repeated
from scmoe.run.config import RunConfig


def without_exchanges(run: RunConfig) -> RunConfig:
  """The run with `dispatch.ablation.silent`: the same shapes and the same work, no row sent.

  Every device's experts compute that device's own rows: as many for each expert as would have
  arrived, since the counts still travel. With `dispatch.transport=put` they are the rows that the
  device would have sent, those for expert e of any rank for its own expert e. The result is not the
  model's.
  """
  ablation = dataclasses.replace(run.dispatch.ablation, silent=True)
  return dataclasses.replace(run, dispatch=dataclasses.replace(run.dispatch, ablation=ablation))


def exchanges_alone(jaxpr: Any, mesh: Mesh, overlap: OverlapConfig = OverlapConfig()) -> Arm | None:
  """An arm that runs the exchanges of a program and nothing else, compiled already.

  Args:
    jaxpr: of the program (`jax.stages.Traced.jaxpr`), e.g. of a training step.
    mesh: on which the program runs.
    overlap: the program's options, for XLA's compiler.

  Returns:
    None if the program has no exchange that `exchanges_of` finds.
  """
  run, buffers = exchanges_program(jaxpr, mesh)
  if not buffers:
    return None
  options = overlap.compiler_options(gpu=jax.default_backend() == "gpu")
  return repeated(run.lower(*buffers).compile(compiler_options=options), *buffers)


def exchanges_program(jaxpr: Any, mesh: Mesh) -> tuple[Any, tuple[Array, ...]]:
  """The jitted function of `exchanges_alone`, and the arrays that it sends.

  Without exchanges there are no arrays.
  """
  found, places = exchanges_of(jaxpr), P(AXES)
  fill = lambda: buffers_for(found, mesh.size)
  buffers = jax.jit(fill, out_shardings=NamedSharding(mesh, places))()
  return jax.jit(manual(alone(found), mesh, places, places)), buffers
