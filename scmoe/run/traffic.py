"""Traffic of a training step between devices, read off its jaxpr; for the dry run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from scmoe.base.sizes import size_of
from scmoe.parallel.mesh import MeshConfig
from scmoe.parallel.sequence import HEADS
from scmoe.profiling.exchanges import collectives
from scmoe.run.config import RunConfig
from scmoe.run.sharing import Sharing


@dataclasses.dataclass(frozen=True)
class Traffic:
  """Bytes that each device sends in one optimizer step.

  Attributes:
    exchanges: number of all-to-alls over the expert axis, forward and backward, over all
      microbatches: of rows, and with `dispatch.transport=per_rank` of their choices.
    all_to_all: what leaves the device in them.
    gradients: ring all-reduce of the gradients of replicated parameters; their reduce-scatter
      where ranks share the state.
    parameters: all-gathers of parameters that ranks share.
    sequence: queries, keys, values, results and their gradients, sent to the devices that have
      other tokens of the same rows (`mesh.sequence`).
    tensor: sums over the devices that divide hidden widths, heads and vocabulary (`mesh.tensor`),
      as ring all-reduces, and gathers from them.
    embedding: rows, hidden states or tables, and their gradients, between data ranks that partition
      the embedding (`mesh.embedding`).
  """

  exchanges: int
  all_to_all: int
  gradients: int
  parameters: int = 0
  sequence: int = 0
  tensor: int = 0
  embedding: int = 0


@dataclasses.dataclass(frozen=True)
class Sent:
  """Traffic that leaves a device in the forward and backward pass of one microbatch.

  Attributes:
    exchanges: number of all-to-alls over the expert axis: of rows, to experts and back, and with
      `dispatch.transport=per_rank` of their choices.
    all_to_all: bytes that leave the device in them. An all-to-all of W devices divides a buffer
      into W parts, of which one stays on the device.
    sequence: bytes that leave the device for those with other tokens of the same rows.
    largest: bytes of the largest buffer of an exchange of rows.
    tensor: bytes that leave the device for those of its group on the tensor axis.
    embedding: bytes that leave the device for data ranks with other parts of the embedding.
  """

  exchanges: int = 0
  all_to_all: int = 0
  sequence: int = 0
  largest: int = 0
  tensor: int = 0
  embedding: int = 0


def sent_in(jaxpr: Any, mesh: Mapping[str, int]) -> Sent:
  """Adds up the bytes that leave a device in a jaxpr: all-to-alls, rings, sums over `tensor`.

  Gathers, reduce-scatters and all-to-alls over the data axis are those of a partitioned embedding;
  the sums of its softmax, three numbers a token, are not counted.

  A `while` loop counts nothing: it holds the dropless transport's overflow rounds, and balanced
  routing needs none. Sums over other axes are those of gradients (`Sharing`) and a few numbers.

  Args:
    jaxpr: loss and gradients of one microbatch, as one device computes them.
    mesh: axis -> its size.
  """
  exchanges = all_to_all = sequence = largest = tensor = embedding = 0
  width, ranks = mesh["tensor"], mesh["data"]
  kinds = ("all_to_all", "ppermute", "psum", "all_gather", "reduce_scatter")
  for equation, times in collectives(jaxpr, kinds):
    buffer, params = equation.invars[0].aval, equation.params
    size = sum(v.aval.size * v.aval.dtype.itemsize for v in equation.invars)
    name = equation.primitive.name
    if name != "psum" and params["axis_name"] in ("data", ("data",)):
      share = ranks - 1 if name == "all_gather" else (ranks - 1) / ranks
      embedding += round(times * share * size)
    elif name in ("psum", "all_gather"):
      axes = params["axes" if name == "psum" else "axis_name"]
      if axes in ("tensor", ("tensor",)):
        share = 2 * (width - 1) / width if name == "psum" else width - 1
        tensor += round(times * share * size)
    elif name == "ppermute":
      sequence += times * size
    elif HEADS in params["axis_name"]:
      parts = (
        buffer.shape[params["split_axis"]] // equation.outvars[0].aval.shape[params["split_axis"]]
      )
      sequence += times * size * (parts - 1) // parts
    else:
      parties = buffer.shape[params["split_axis"]]
      exchanges += times
      all_to_all += times * size * (parties - 1) // parties
      largest = max(largest, size)
  return Sent(exchanges, all_to_all, sequence, largest, tensor, embedding)


def of_step(run: RunConfig, sent: Sent, sharing: Sharing) -> Traffic:
  """The traffic of an optimizer step.

  Args:
    run: resolved.
    sent: traffic of one microbatch.
    sharing: traffic that depends on how the run's ranks share the state.
  """
  microbatches = run.train.microbatches(run.data.seq_len)
  return Traffic(
    exchanges=microbatches * sent.exchanges,
    all_to_all=microbatches * sent.all_to_all,
    gradients=sharing.gradient_traffic,
    parameters=sharing.parameter_traffic,
    sequence=microbatches * sent.sequence,
    tensor=microbatches * sent.tensor,
    embedding=microbatches * sent.embedding,
  )


def lines(traffic: Traffic, mesh: MeshConfig) -> list[str]:
  """The lines that `--dry_run` prints about traffic."""
  if mesh.size == 1:
    return ["", "traffic      none: one device"]
  how = "reduce-scatter" if mesh.shares_state else "ring all-reduce"
  found = [
    "",
    "traffic that leaves each device, per step",
    f"  {f'all-to-all ({traffic.exchanges} exchanges)':36} {size_of(traffic.all_to_all):>12}",
    f"  {f'gradients ({how})':36} {size_of(traffic.gradients):>12}",
  ]
  if traffic.parameters:
    found.append(f"  {'parameters (all-gather)':36} {size_of(traffic.parameters):>12}")
  if traffic.embedding:
    found.append(f"  {'embedding (partitioned)':36} {size_of(traffic.embedding):>12}")
  if traffic.sequence:
    name = f"attention ({mesh.sequence_attention})"
    found.append(f"  {name:36} {size_of(traffic.sequence):>12}")
  if traffic.tensor:
    found.append(f"  {'tensor axis (sums and gathers)':36} {size_of(traffic.tensor):>12}")
  return found


def shared_words(mesh: MeshConfig) -> str:
  """Names what ranks share and partition, as the end of a line; "" if each holds all."""
  kinds = {"none": "", "moments": "moments", "parameters": "parameters and moments"}
  words = f"; ranks share {kinds[mesh.shard_state]}" if mesh.shares_state else ""
  if mesh.embedding_ranks > 1:
    words += "; data ranks partition the embedding"
  return words
