"""Runs PTX inside a Pallas kernel, for instructions that Pallas lacks.

Interpret mode cannot run PTX, so a caller needs another implementation for the simulation.
"""

from collections.abc import Sequence
from typing import Any, cast

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

SCALAR = plgpu.Layout.WG_SPLAT(())


def ptx(text: str, operands: list[Any], constraints: str) -> None:
  """Embeds PTX in the kernel, for every thread that gets there; `$0`, `$1` ... are the operands.

  Args:
    text: PTX instructions. The compiler assumes that they may read and write any memory.
    operands: MLIR values.
    constraints: one letter per operand, separated by commas, as in LLVM's inline assembly: "l" for
      64 bits, "r" for 32 bits.
  """
  llvm.inline_asm(
    ir.Type.parse("!llvm.void"),
    operands,
    text,
    f"{constraints},~{{memory}}",
    has_side_effects=True,
    asm_dialect=0,
  )


def shared_address(ref: Any) -> Any:
  """The 32-bit address of a reference in shared memory, for constraint "r"."""
  return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu_utils.memref_ptr(ref))


def global_address(ref: Any) -> Any:
  """The 64-bit address of a reference in global memory, for constraint "l"."""
  return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu_utils.memref_ptr(ref))


def scalar(value: Any) -> Any:
  """The MLIR value of a kernel's 32-bit scalar, for constraint "r"."""
  return value.registers.item()


def run(text: str, in_global: Sequence[Any], in_shared: Sequence[Any] = ()) -> None:
  """Embeds PTX in the kernel, with addresses of references as operands; see `ptx`.

  Args:
    text: PTX instructions; `$0`, `$1` ... are the addresses.
    in_global: references in global memory; their addresses are the first operands.
    in_shared: references in shared memory; their addresses are the operands after those.
  """

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (len(in_global) + len(in_shared)))
  def inner(_, *refs):
    far = [global_address(ref) for ref in refs[: len(in_global)]]
    near = [shared_address(ref) for ref in refs[len(in_global) :]]
    ptx(text, far + near, ",".join(["l"] * len(far) + ["r"] * len(near)))

  cast(Any, inner)(*in_global, *in_shared)
