"""Reads the instructions of a compiled GPU program from its text (optimised HLO)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_PRODUCT = re.compile(r"gemm|dot|matmul|convolution|sdpa|fmha|attention", re.IGNORECASE)
_KIND = re.compile(r"(?:^| )([a-z][a-z\-]*)\(")
# The jitted function of `scmoe.kernels.put`. On a stream of its own its kernel is a call, with a
# start and a done; otherwise the kernel itself stands in the program.
_PUT = "jit(put_rows_kernel)"


class Instruction(NamedTuple):
  """A line of a compiled program: NAME = REST, where the rest has the operation's name in jax."""

  name: str
  rest: str
  op_name: str

  @property
  def kind(self) -> str:
    """The operation: fusion, all-reduce-start, ...; "" for a line that is no instruction."""
    found = _KIND.search(self.rest)
    return found.group(1) if found else ""

  @property
  def shapes(self) -> list[str]:
    """The arrays that it makes, as XLA writes them: f32[50304,1280]."""
    found = _KIND.search(self.rest)
    return re.findall(r"\w+\[[\d,]*\]", self.rest[: found.start()]) if found else []

  @property
  def operands(self) -> list[str]:
    """Names of what it reads, in order."""
    found = _KIND.search(self.rest)
    return _names(self.rest[found.end() :].partition("), ")[0]) if found else []

  @property
  def mentions(self) -> list[str]:
    """The same, and names of computations that it calls and of instructions that it waits for."""
    return _names(self.rest.partition(", metadata=")[0])

  @property
  def is_product(self) -> bool:
    """Whether it is a matrix product or a fused attention."""
    target = re.search(r'custom_call_target="([^"]*)"', self.rest)
    return _PRODUCT.search(f"{self.name} {target.group(1) if target else ''}") is not None

  @property
  def starts_exchange(self) -> bool:
    """Whether it starts an exchange that another instruction ends."""
    is_put = " call-start(" in self.rest and _PUT in self.op_name
    return is_put or " all-to-all-start(" in self.rest

  @property
  def is_exchange(self) -> bool:
    """Whether it is a whole exchange; XLA merges a start with the done that directly follows it."""
    is_put = " custom-call(" in self.rest and _PUT in self.op_name
    # The kernel of a put with a start stands in a computation of its own, `compute_on`.
    return (is_put and "/compute_on" not in self.op_name) or " all-to-all(" in self.rest

  @property
  def ends(self) -> str | None:
    """The name of the instruction that this one ends, whether an exchange or another call."""
    found = re.search(r" (?:all-to-all|call)-done\(%?([\w.\-]+)", self.rest)
    return found.group(1) if found else None


def _names(text: str) -> list[str]:
  return re.findall(r"%([\w.\-]+)", text)


def instructions(program: str) -> Iterator[Instruction]:
  """The instructions of a program's text, in the order of its lines."""
  for line in program.splitlines():
    if match := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)$", line):
      found = re.search(r'op_name="([^"]*)"', match.group(2))
      name, rest = match.groups()
      yield Instruction(name, rest, found.group(1) if found else "")


def sizes_of(shape: str) -> list[int]:
  """The sizes of an array as XLA writes it: f32[8,2] -> [8, 2]."""
  return [int(size) for size in shape.rstrip("]").partition("[")[2].split(",") if size]


def bytes_of(shape: str) -> int:
  """Bytes of an array as XLA writes it: f32[8,2] -> 64."""
  bits = re.search(r"\d+", shape.partition("[")[0])
  return math.prod(sizes_of(shape)) * (int(bits.group()) if bits else 8) // 8
