"""Says what a link leaves bare at the end of a training step, computed without a GPU.

  python experiments/exchange_cost/replay.py
  python experiments/exchange_cost/replay.py --link 100e9 overlap.gradient_dtype=bfloat16
  python experiments/exchange_cost/replay.py --stretch-sums 2.5

The last microbatch of a step sums the gradients beside its backward pass. XLA compiles that step
for two H200s (windows.py), and schedules it by a profile, as it does on GPUs; but the times are
computed: products by their FLOPs, other kernels by their bytes, transfers by the bytes that leave a
device. The program is then replayed in its order: one kernel at a time, one transfer at a time, and
a kernel that needs a transfer waits for it. Launches, and how much slower a kernel is beside a
transfer, are left out. So the figures say what has room on the link, not how long a step takes.

Words FIELD=VALUE change the model, by default Pos-2 of width 1,280 with 16 experts in 8 layers.
XLA starts a transfer early enough for --stretch times its time, and a sum for --stretch-sums times.
It compiles twice, for two to three minutes.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

# First of all: it puts the checkout on Python's path, and has jax compute on the CPU.
from windows import MODELS, SHARED, fields_of, program

from scmoe.base.errors import run_main
from scmoe.profiling.costs import STRETCH
from scmoe.profiling.wire import as_profile

WIDE = {
  "model.width": "1280", "model.num_heads": "20", "model.num_experts": "16",
  "model.num_layers": "8", "model.vocab_size": "50304", "train.batch_size": "8",
  "train.tokens_per_step": "131072", "dispatch.transport": "packed",
}  # fmt: skip
LINK = 26.6e9  # bytes/s that leave a device for another over the host's memory (H200, NCCL)
FLOPS, MEMORY = 600e12, 3.3e12  # what large products and copies reach on an H200
LAUNCH = 2e-6  # of a kernel
LATENCY = 20e-6  # of a transfer
SIZES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s16": 2, "f32": 4}
SIZES |= {"s32": 4, "u32": 4, "s64": 8, "u64": 8}
KERNELS = ("fusion", "custom-call", "copy", "sort", "scatter", "dot")
TRANSFERS = ("all-to-all", "all-reduce", "reduce-scatter", "all-gather")
PRODUCT = re.compile(r"gemm|dot|matmul|attention")
EXPERTS = re.compile(r"experts|ffn")  # stages whose Pallas kernels, `mpmd_map`, are products


class Instruction(NamedTuple):
  """A line of a program's entry.

  Attributes:
    name, kind: `fusion.3` and `fusion`.
    shapes: dtype and sizes of its results.
    operands: names of what it reads.
    called: its name and the custom call's target.
    op_name: its name in jax.
  """

  name: str
  kind: str
  shapes: list[tuple[str, list[int]]]
  operands: list[str]
  called: str
  op_name: str

  @property
  def is_product(self) -> bool:
    """Whether it multiplies matrices."""
    of_experts = "mpmd_map" in self.name and EXPERTS.search(self.op_name)
    return bool(PRODUCT.search(self.called) or of_experts)


class Bare(NamedTuple):
  """Milliseconds of a replay.

  Attributes:
    total: of the whole program.
    kernels: of all kernels.
    transfers: of all transfers.
    exchanges, sums: in which kernels wait for an exchange, or for a sum or gather.
  """

  total: float
  kernels: float
  transfers: float
  exchanges: float
  sums: float


def entry(text: str) -> list[Instruction]:
  """The instructions of a scheduled program's entry, in order."""
  found = []
  for line in text[text.index("\nENTRY ") :].splitlines():
    named = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)$", line)
    if named is None:
      continue
    rest, _, about = named.group(2).partition(", metadata=")
    kind = re.search(r" ([a-z][a-z\-]*)\(", f" {rest}")
    if kind is None:
      continue
    shapes = _shapes(rest[: kind.start()])
    operands = re.findall(r"%([\w.\-]+)", rest[kind.end() - 1 :].partition("), ")[0])
    target = re.search(r'custom_call_target="([^"]*)"', rest)
    op_name = re.search(r'op_name="([^"]*)"', about)
    called = f"{named.group(1)} {target.group(1) if target else ''}"
    path = op_name.group(1) if op_name else ""
    found.append(Instruction(named.group(1), kind.group(1), shapes, operands, called, path))
  return found


def _shapes(text: str) -> list[tuple[str, list[int]]]:
  found = re.findall(r"\b(\w+)\[([\d,]*)\]", text)
  return [(kind, [int(n) for n in sizes.split(",") if n]) for kind, sizes in found if kind in SIZES]


def _bytes(shapes: list[tuple[str, list[int]]]) -> int:
  return sum(SIZES[kind] * math.prod(sizes) for kind, sizes in shapes)


def seconds_of(instructions: list[Instruction], devices: int, link: float) -> dict[str, float]:
  """Seconds of each kernel and of each transfer, by name.

  Args:
    instructions: from `entry`.
    devices: that take part in every transfer.
    link: bytes/s that leave a device.
  """
  shapes = {one.name: one.shapes for one in instructions}
  found = {}
  for one in instructions:
    kind = one.kind.removesuffix("-start")
    if one.kind in KERNELS:
      # An operand of several arrays is a loop's or a call's; which of them is read is not known.
      read = [shapes[name] for name in one.operands if len(shapes.get(name, ())) == 1]
      seconds = LAUNCH + (_bytes(one.shapes) + sum(map(_bytes, read))) / MEMORY
      if one.is_product:
        seconds = max(seconds, _flops([s for own in read for _, s in own], one.shapes) / FLOPS)
      found[one.name] = seconds
    elif kind in TRANSFERS:
      given = sum(_bytes(shapes.get(name, [])) for name in one.operands)
      times = {"all-reduce": 2.0, "all-gather": float(devices)}.get(kind, 1.0)  # in rings
      found[one.name] = LATENCY + times * given * (devices - 1) / devices / link
  return found


def _flops(read: list[list[int]], made: list[tuple[str, list[int]]]) -> float:
  """FLOPs of a product: of sizes MK, KN and MN the product is (MKN)².

  Experts' weights [E, K, N] are E times as large as what a row is multiplied by.
  """
  largest = sorted(read, key=math.prod, reverse=True)[:2]
  if len(largest) < 2:
    return 0.0
  flops = 2 * math.sqrt(math.prod(map(math.prod, largest)) * max(math.prod(s) for _, s in made))
  experts = [sizes[0] for sizes in largest if len(sizes) == 3 and sizes[0] <= 16]
  return flops / math.sqrt(experts[0]) if experts else flops


def replayed(instructions: list[Instruction], seconds: Mapping[str, float]) -> Bare:
  """The replay of a program: one kernel at a time, and beside it one transfer at a time."""
  now = link = kernels = transfers = 0.0
  ends: dict[str, float] = {}
  bare = {"exchanges": 0.0, "sums": 0.0}
  for one in instructions:
    kind = one.kind.removesuffix("-start").removesuffix("-done")
    which = "exchanges" if kind == "all-to-all" else "sums"
    if one.name in seconds and kind in TRANSFERS:
      link = max(now, link) + seconds[one.name]
      transfers += seconds[one.name]
      ends[one.name] = link
      if not one.kind.endswith("-start"):  # XLA merges a start with the done that follows it
        bare[which] += link - now
        now = link
    elif one.name in seconds:
      now += seconds[one.name]
      kernels += seconds[one.name]
    elif one.kind.endswith("-done") and one.operands and one.operands[0] in ends:
      bare[which] += max(ends[one.operands[0]] - now, 0.0)
      now = max(now, ends[one.operands[0]])
  return Bare(*(1e3 * x for x in (now, kernels, transfers, bare["exchanges"], bare["sums"])))


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("words", nargs="*", help="fields of the configuration, NAME=VALUE")
  parser.add_argument("--link", type=float, default=LINK, help="bytes/s that leave a device")
  parser.add_argument("--stretch", type=float, default=STRETCH, help="of exchanges")
  parser.add_argument("--stretch-sums", type=float, default=STRETCH, help="of sums and gathers")
  args = parser.parse_args()
  fields = SHARED | MODELS["medium"] | {"mesh.expert": "2", "dispatch.overflow": "repeat"} | WIDE
  fields |= fields_of(args.words)
  plain = entry(program(fields, 2))
  seconds = seconds_of(plain, 2, args.link)
  stretch = lambda one: args.stretch if one.kind.startswith("all-to-all") else args.stretch_sums
  profile = {
    one.name: 1e6 * seconds[one.name] * (stretch(one) if one.kind.endswith("-start") else 1)
    for one in plain
    if one.name in seconds
  }
  guided = entry(program(fields, 2, as_profile(profile)))
  print(f"Pos-2, width 1,280, {' '.join(args.words) or 'as it is'}: the last microbatch, ms")
  print(f"link {args.link / 1e9:g} GB/s; stretch {args.stretch:g}, of sums {args.stretch_sums:g}")
  print("scheduled by             total  kernels  transfers  bare exchanges  bare sums")
  for name, of in (("XLA's own estimates", plain), ("the computed times", guided)):
    found = replayed(of, seconds_of(of, 2, args.link))
    print(f"{name:22} {found.total:7.1f} {found.kernels:8.1f} {found.transfers:10.1f} "
          f"{found.exchanges:15.1f} {found.sums:10.1f}")  # fmt: skip


if __name__ == "__main__":
  run_main(lambda argv: main())
