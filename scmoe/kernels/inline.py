"""PTX inside a Pallas kernel, for instructions that Pallas has no operation for.

Interpret mode cannot run PTX: on a CPU a caller needs another implementation.
"""

from collections.abc import Sequence
from typing import Any, cast

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

SCALAR = plgpu.Layout.WG_SPLAT(())


def ptx(text: str, operands: list[Any], constraints: str) -> None:
  """Runs the text in every thread; `$0`, `$1` ... are the operands.

  Args:
    text: the instructions. The compiler assumes that they read and write any memory.
    operands: MLIR values.
    constraints: LLVM's letter of each operand, for example "l,r": 64 bits, 32 bits.
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
  """The 32-bit address of a reference in shared memory: constraint "r"."""
  return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu_utils.memref_ptr(ref))


def global_address(ref: Any) -> Any:
  """The 64-bit address of a reference in global memory: constraint "l"."""
  return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu_utils.memref_ptr(ref))


def scalar(value: Any) -> Any:
  """A 32-bit scalar argument: constraint "r"."""
  return value.registers.item()


def run(text: str, in_global: Sequence[Any], in_shared: Sequence[Any] = ()) -> None:
  """Runs the text in every thread, with addresses of references as operands.

  Args:
    text: the instructions, see `ptx`.
    in_global: references in global memory: the first operands, 64 bits.
    in_shared: references in shared memory: the operands behind them, 32 bits.
  """

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (len(in_global) + len(in_shared)))
  def inner(_, *refs):
    far = [global_address(ref) for ref in refs[: len(in_global)]]
    near = [shared_address(ref) for ref in refs[len(in_global) :]]
    ptx(text, far + near, ",".join(["l"] * len(far) + ["r"] * len(near)))

  cast(Any, inner)(*in_global, *in_shared)
