"""Reads XLA's serialised programs and writes its profiles, in protobuf's wire format.

A program's text names an asynchronous exchange by its start and done. A trace names it by the
operation inside, which the text omits. The serialised program (`HloModuleProto`) has both names.
XLA takes a profile as a `ProfiledInstructionsProto`. Only a few fields of each are needed, whose
numbers in protobuf never change, so there is no generated code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

# HloModuleProto.computations, HloComputationProto.instructions, HloInstructionProto.name and
# .metadata, OpMetadata.op_name.
_COMPUTATIONS, _INSTRUCTIONS, _NAME, _METADATA, _OP_NAME = 3, 2, 1, 7, 2


def operation_names(compiled: Any) -> dict[str, str]:
  """Instruction -> op_name of a compiled function (`jax.stages.Compiled`).

  Instructions inside fusions and asynchronous operations are included.
  """
  names: dict[str, str] = {}
  for module in compiled.runtime_executable().hlo_modules():
    for computation in _all(module.as_serialized_hlo_module_proto(), _COMPUTATIONS):
      for instruction in _all(computation, _INSTRUCTIONS):
        found = dict(_fields(instruction))
        op_name = dict(_fields(found.get(_METADATA, b""))).get(_OP_NAME, b"")
        if op_name:
          names[found[_NAME].decode()] = op_name.decode()
  return names


def as_profile(costs: Mapping[str, float]) -> bytes:
  """Microseconds of each instruction, serialised for XLA's scheduler.

  `ProfiledInstructionsProto`: field 1 is repeated, with a name (1) and microseconds (2, double).
  """
  entry = lambda name, us: _text(1, name.encode()) + b"\x11" + struct.pack("<d", us)
  return b"".join(_text(1, entry(name, us)) for name, us in sorted(costs.items()))


def _all(message: bytes, number: int) -> Iterator[bytes]:
  return (value for field, value in _fields(message) if field == number)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
  """Yields (number, value) of every field: an int, or bytes for any other type."""
  at = 0
  while at < len(message):
    key, at = _number(message, at)
    kind = key & 7
    if kind == 0:
      value, at = _number(message, at)
    else:
      size = {1: 8, 5: 4}.get(kind)
      if size is None:
        size, at = _number(message, at)
      value, at = message[at : at + size], at + size
    yield key >> 3, value


def _number(message: bytes, at: int) -> tuple[int, int]:
  """Reads a varint; returns it and the position after it.

  Each byte has seven bits, the lowest first; its top bit says that another byte follows.
  """
  number = shift = 0
  while True:
    byte = message[at]
    number, shift, at = number | (byte & 127) << shift, shift + 7, at + 1
    if byte < 128:
      return number, at


def _text(field: int, body: bytes) -> bytes:
  size, length = bytearray(), len(body)
  while length > 127:
    size.append(length & 127 | 128)
    length >>= 7
  return bytes([field << 3 | 2, *size, length]) + body
