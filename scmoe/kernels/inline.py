"""PTX inside a Pallas kernel, for what Pallas has no operation for.

It has no interpretation on a CPU: whoever uses it needs another way there.
"""

from collections.abc import Sequence
from typing import Any, cast

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

SCALAR = plgpu.Layout.WG_SPLAT(())


def ptx(text: str, operands: list[Any], constraints: str) -> None:
  """Runs the text in every thread; `$0`, `$1` ... are the operands. It may touch any memory."""
  llvm.inline_asm(
    ir.Type.parse("!llvm.void"),
    operands,
    text,
    f"{constraints},~{{memory}}",
    has_side_effects=True,
    asm_dialect=0,
  )


def shared_address(ref: Any) -> Any:
  """Address of a ref in shared memory: constraint "r"."""
  return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu_utils.memref_ptr(ref))


def global_address(ref: Any) -> Any:
  """Address of a ref in global memory: constraint "l"."""
  return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu_utils.memref_ptr(ref))


def scalar(value: Any) -> Any:
  """A 32-bit scalar argument: constraint "r"."""
  return value.registers.item()


def run(text: str, in_global: Sequence[Any], in_shared: Sequence[Any] = ()) -> None:
  """Runs the text in every thread with the addresses of refs: `$0` ... those in global memory
  (64 bits), then those in shared memory (32 bits)."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (len(in_global) + len(in_shared)))
  def inner(_, *refs):
    far = [global_address(ref) for ref in refs[: len(in_global)]]
    near = [shared_address(ref) for ref in refs[len(in_global) :]]
    ptx(text, far + near, ",".join(["l"] * len(far) + ["r"] * len(near)))

  cast(Any, inner)(*in_global, *in_shared)
