"""The two controls of a measurement of exchanges: a run without them, and they alone.

`scmoe.profiling.clock` says how the cost of the exchanges follows from their times.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.blocks.options import OverlapConfig
from scmoe.kernels.put import MARK, put_rows
from scmoe.parallel.mesh import AXES, manual
from scmoe.profiling.exchanges import Exchanged, alone, buffers_for, collectives, exchanges_of
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
    None if the program has no exchange that `exchanges_in` finds.
  """
  run, buffers = exchanges_program(exchanges_in(jaxpr), mesh)
  if not buffers:
    return None
  options = overlap.compiler_options(gpu=jax.default_backend() == "gpu")
  return repeated(run.lower(*buffers).compile(compiler_options=options), *buffers)


def exchanges_in(jaxpr: Any) -> list[Exchanged]:
  """The exchanges of rows that a program runs on every device, equal ones together.

  They are its all-to-alls (`exchanges_of`) and its puts (`dispatch.transport=put`). A put sends as
  many rows here as it would with balanced routing, an equal part of them to each rank.

  Args:
    jaxpr: of the program.
  """
  puts: dict[str, Exchanged] = {}
  for mark, count in collectives(getattr(jaxpr, "jaxpr", jaxpr), (MARK,)):
    rows, key = mark.invars[0].aval, f"{mark.invars[0].aval} {mark.params}"
    before = puts[key].count if key in puts else 0
    if count:
      send = functools.partial(_put, **mark.params)
      puts[key] = Exchanged(rows.shape, rows.dtype, before + count, send)
  return [*exchanges_of(jaxpr), *puts.values()]


def _put(
  x_MD: Array, *, expected: int, copies: int, num_rows: int, tagged: bool, axis: str, **options: Any
) -> Array:
  """Puts `expected` copies, as many to each rank, where those of a rank follow each other."""
  ranks, me = jax.lax.psum(1, axis), jax.lax.axis_index(axis)
  number = jnp.arange(x_MD.shape[0] * copies, dtype=jnp.int32).reshape(-1, copies)
  share = -(-expected // ranks)  # copies that each rank puts on each
  place = (number % ranks) * num_rows + me * share + number // ranks
  place = jnp.where(number < expected, place, ranks * num_rows)
  tag = jnp.zeros_like(place) if tagged else None
  count = jnp.full((), -(-expected // copies), jnp.int32)
  arrive = {"num_rows": num_rows, "axis": axis, "tag_MK": tag, "count": count}
  return put_rows(x_MD, place, **arrive, **options)[0]


def exchanges_program(found: Sequence[Exchanged], mesh: Mesh) -> tuple[Any, tuple[Array, ...]]:
  """The jitted function of `exchanges_alone`, and the arrays that it sends.

  Without exchanges there are no arrays.
  """
  places = P(AXES)
  fill = lambda: buffers_for(found, mesh.size)
  buffers = jax.jit(fill, out_shardings=NamedSharding(mesh, places))()
  return jax.jit(manual(alone(found), mesh, places, places)), buffers
