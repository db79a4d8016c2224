"""Finds the computation that can run, or is scheduled, beside each exchange, without a GPU.

`program_windows` reads a scheduled GPU program (optimised HLO text) and lists the operations
between the start and the done of each exchange, an all-to-all or a put
(`dispatch.transport=put`); `free_products` lists the matrix products that could be there.
`graph_windows` reads a jaxpr, before any compiler, and lists the matrix products
that neither depend on an exchange nor are needed by it. `program_sums` says where a scheduled
program sums gradients and gathers parameters. A barrier counts as a dependency, so this
is the window that the schedule leaves in both passes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from scmoe.profiling.overlap import direction_of, stage_of
from scmoe.profiling.program_text import Instruction, bytes_of, instructions

_SUM = re.compile(r" (all-reduce|reduce-scatter|all-gather)(-start|-done|)\(%?([\w.\-]+)")
_COMPUTE = ("fusion", "custom-call", "call", "dot", "convolution", "sort", "scatter", "while")


@dataclasses.dataclass(frozen=True)
class Window:
  """One exchange and its window: the computation beside it.

  Attributes:
    stage, direction: stage and direction of the exchange, e.g. dispatch and forward.
    beside: stages of the matrix products (and other large kernels) in its window.
    operations: number of computing operations in the window.
  """

  stage: str
  direction: str
  beside: tuple[str, ...]
  operations: int


def program_windows(program: str) -> list[Window]:
  """Windows of all exchanges of a scheduled program, in order.

  The text must be of a scheduled module (`is_scheduled=true`), whose order is that of execution.
  """
  windows: list[Window] = []
  open_at: dict[str, tuple[str, list[Instruction]]] = {}
  for one in instructions(program):
    if one.is_exchange:
      windows.append(Window(stage_of(one.op_name), direction_of(one.op_name), (), 0))
    elif one.starts_exchange:
      open_at[one.name] = (one.op_name, [])
    elif one.ends in open_at:
      op_name, beside = open_at.pop(one.ends)
      stages = tuple(stage_of(other.op_name) for other in beside if other.is_product)
      windows.append(Window(stage_of(op_name), direction_of(op_name), stages, len(beside)))
    elif open_at and any(f" {kind}(" in one.rest for kind in _COMPUTE):
      for _, beside in open_at.values():
        beside.append(one)
  return windows


class Sum(NamedTuple):
  """A collective that is no exchange, such as a sum of gradients, and where it stands.

  Attributes:
    kind: all-reduce, reduce-scatter or all-gather.
    shape: the largest array that it makes, as XLA writes it: f32[50304,1280].
    bytes: of that array.
    begun, ended: numbers of the program's products before its start and before its end.
  """

  kind: str
  shape: str
  bytes: int
  begun: int
  ended: int


def program_sums(program: str) -> tuple[list[Sum], int]:
  """Sums and gathers of a scheduled program's entry, in order of their ends, and its products.

  What runs inside a loop is not in the entry.
  """
  started: dict[str, int] = {}
  products, found = 0, []
  for one in instructions(program[program.index("\nENTRY ") :]):
    if match := _SUM.search(one.rest):
      kind, part, operand = match.groups()
      if part == "-start":
        started[one.name] = products
      else:  # XLA merges a start with the done that directly follows it
        begun = started.pop(operand, products)
        largest = max(one.shapes, key=bytes_of, default="u8[0]")
        found.append(Sum(kind, largest, bytes_of(largest), begun, products))
    elif (" fusion(" in one.rest or " custom-call(" in one.rest) and one.is_product:
      products += 1
  return found, products


def free_products(program: str) -> list[Window]:
  """The products that XLA could run beside each exchange of a compiled program, in order.

  They are those of the same pass, forward or backward, that neither depend on the exchange nor are
  needed by it. XLA's fusions can tie operations that `graph_windows` shows as independent: a kernel
  with two results needs the operands of both.
  """
  graph, index_of = _Graph(), {}
  starts: dict[int, int] = {}  # done -> start
  begun: set[str] = set()  # names of the starts
  products: list[int] = []
  for index, one in enumerate(instructions(program)):
    parents = {index_of[operand] for operand in one.mentions if operand in index_of}
    graph.nodes.append(_Node(one.name, one.op_name, parents))
    index_of[one.name] = index
    if one.is_exchange:
      starts[index] = index
    elif one.starts_exchange:
      begun.add(one.name)
    elif one.ends in begun:
      starts[index] = index_of[one.ends]
    elif (" fusion(" in one.rest or " custom-call(" in one.rest) and one.is_product:
      products.append(index)  # what a fusion calls is not listed again
  windows = []
  for done, start in starts.items():
    name = graph.nodes[start].name
    related = graph.ancestors(start) | graph.descendants(done)
    own = [graph.nodes[i].name for i in products if i not in related]
    stages = [stage_of(n) for n in own if direction_of(n) == direction_of(name)]
    windows.append(Window(stage_of(name), direction_of(name), tuple(stages), len(stages)))
  return windows


def graph_windows(jaxpr: Any) -> list[Window]:
  """Windows of a jaxpr's all-to-alls and sums of gradients, with the products independent of each.

  Barriers count as dependencies. Calls are inlined; a loop's body counts once.
  """
  graph = _Graph()
  graph.add(getattr(jaxpr, "jaxpr", jaxpr), {})
  windows = []
  for index, node in enumerate(graph.nodes):
    is_sum = node.primitive.startswith("psum") and stage_of(node.name) == "gradients"
    if node.primitive != "all_to_all" and not is_sum:
      continue
    related = graph.ancestors(index) | graph.descendants(index)
    beside = [
      stage_of(other.name)
      for j, other in enumerate(graph.nodes)
      if j not in related and j != index and other.primitive == "dot_general"
    ]
    windows.append(Window(stage_of(node.name), direction_of(node.name), tuple(beside), len(beside)))
  return windows


@dataclasses.dataclass
class _Node:
  primitive: str
  name: str
  parents: set[int]


class _Graph:
  """Operations and the operations that they depend on, with calls inlined."""

  def __init__(self) -> None:
    self.nodes: list[_Node] = []

  def add(self, jaxpr: Any, known: dict[Any, set[int]], scope: str = "") -> list[set[int]]:
    """Adds the operations of `jaxpr`; returns the operations that computed each of its results.

    `known` maps a variable to the operations that computed it.
    """
    source = lambda v: known.get(v, set()) if not hasattr(v, "val") else set()
    for eqn in jaxpr.eqns:
      inputs = [source(v) for v in eqn.invars]
      name = f"{scope}/{eqn.source_info.name_stack}"
      inner = _inner(eqn)
      if inner is None:
        self.nodes.append(_Node(eqn.primitive.name, name, set().union(*inputs)))
        made = [{len(self.nodes) - 1}] * len(eqn.outvars)
      else:
        # A call may have constants before its arguments, so both are matched from the right.
        variables = dict(zip(reversed(inner.invars), reversed(inputs)))
        made = self.add(inner, variables, name)
        made = made[: len(eqn.outvars)] + [set()] * (len(eqn.outvars) - len(made))
      known.update(zip(eqn.outvars, made))
    return [source(v) for v in jaxpr.outvars]

  def ancestors(self, index: int) -> set[int]:
    seen: set[int] = set()
    todo = list(self.nodes[index].parents)
    while todo:
      node = todo.pop()
      if node not in seen:
        seen.add(node)
        todo.extend(self.nodes[node].parents)
    return seen

  def descendants(self, index: int) -> set[int]:
    seen = {index}
    for j in range(index + 1, len(self.nodes)):  # nodes are in execution order
      if self.nodes[j].parents & seen:
        seen.add(j)
    return seen - {index}


def _inner(eqn: Any) -> Any:
  """The jaxpr of a call or a loop's body; None for an operation."""
  if eqn.primitive.name in ("while", "cond"):
    return None
  for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
    inner = eqn.params.get(name)
    if inner is not None:
      return getattr(inner, "jaxpr", inner)
  return None


def summary(windows: Iterable[Window]) -> str:
  """The products beside each exchange, one line for all exchanges with equal windows.

  A step of 12 pairs has 48 exchanges or more, most of them with equal windows: `12 x forward
  dispatch beside: ... (3 to 5 operations)`.
  """
  alike: dict[str, list[int]] = {}
  for w in windows:
    counted = {stage: w.beside.count(stage) for stage in dict.fromkeys(w.beside)}
    beside = ", ".join(f"{n} {stage}" for stage, n in counted.items()) or "nothing"
    alike.setdefault(f"{w.direction:8s} {w.stage:8s} beside: {beside}", []).append(w.operations)
  lines = []
  for words, operations in alike.items():
    least, most = min(operations), max(operations)
    span = f"{least}" if least == most else f"{least} to {most}"
    count = f"{len(operations)} x " if len(operations) > 1 else ""
    lines.append(f"{count}{words} ({span} operations)")
  return "\n".join(lines)
