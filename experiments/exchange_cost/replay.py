"""Says what a link leaves bare at the end of a training step, computed without a GPU.

  python experiments/exchange_cost/replay.py
  python experiments/exchange_cost/replay.py --link 100e9 overlap.gradient_dtype=bfloat16
  python experiments/exchange_cost/replay.py --stretch-sums 2.5

The last microbatch of a step sums the gradients beside its backward pass. XLA compiles that step
for two H200s (windows.py), and schedules it by a profile, as it does on GPUs; but the times are
computed: products by their FLOPs, other kernels by their bytes, transfers by the bytes that leave a
device. The program is then replayed in its order: one kernel at a time, one transfer at a time, and
a kernel that needs a transfer waits for it. What the host does, and how much slower a kernel is
beside a transfer, are left out. So the figures say what has room on the link, not how long a step
takes.

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
from windows import SHARED, compiled, fields_of

from scmoe.base.errors import run_main
from scmoe.profiling.costs import STRETCH
from scmoe.profiling.program_text import Instruction, bytes_of, instructions, sizes_of
from scmoe.profiling.wire import as_profile

WIDE = {
  "model.width": "1280", "model.num_heads": "20", "model.num_experts": "16",
  "model.vocab_size": "50304", "train.batch_size": "8", "train.tokens_per_step": "131072",
  "dispatch.transport": "packed", "dispatch.overflow": "repeat",
}  # fmt: skip
LINK = 26.6e9  # bytes/s that leave a device for another over the host's memory (H200, NCCL)
FLOPS, MEMORY = 600e12, 3.3e12  # what large products and copies reach on an H200
LAUNCH = 2e-6  # of a kernel
LATENCY = 20e-6  # of a transfer
KERNELS = ("fusion", "custom-call", "copy", "sort", "scatter", "dot")
TRANSFERS = ("all-to-all", "all-reduce", "reduce-scatter", "all-gather")
EXPERTS = re.compile(r"mpmd_map.* .*(?:experts|ffn)")  # Pallas kernels that multiply


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
  return list(instructions(text[text.index("\nENTRY ") :]))


def seconds_of(program: list[Instruction], devices: int, link: float) -> dict[str, float]:
  """Seconds of each kernel and of each transfer, by name.

  Args:
    program: from `entry`.
    devices: that take part in every transfer.
    link: bytes/s that leave a device.
  """
  shapes = {one.name: one.shapes for one in program}
  size = lambda own: sum(map(bytes_of, own))
  found = {}
  for one in program:
    given = [shapes[name] for name in one.operands if name in shapes]
    kind = one.kind.removesuffix("-start")
    if one.kind in KERNELS:
      # An operand of several arrays is a loop's or a call's; which of them is read is not known.
      read = [own[0] for own in given if len(own) == 1]
      seconds = LAUNCH + (size(one.shapes) + size(read)) / MEMORY
      if one.is_product or EXPERTS.search(f"{one.name} {one.op_name}"):
        seconds = max(seconds, _flops(read, one.shapes) / FLOPS)
      found[one.name] = seconds
    elif kind in TRANSFERS:
      times = {"all-reduce": 2.0, "all-gather": float(devices)}.get(kind, 1.0)  # in rings
      sent = times * sum(map(size, given)) * (devices - 1) / devices
      found[one.name] = LATENCY + sent / link
  return found


def _flops(read: list[str], made: list[str]) -> float:
  """FLOPs of a product: of sizes MK, KN and MN the product is (MKN)².

  Experts' weights [E, K, N] are E times as large as what a row is multiplied by.
  """
  largest = sorted(map(sizes_of, read), key=math.prod, reverse=True)[:2]
  if len(largest) < 2:
    return 0.0
  result = max(math.prod(sizes_of(shape)) for shape in made)
  flops = 2 * math.sqrt(math.prod(map(math.prod, largest)) * result)
  experts = [sizes[0] for sizes in largest if len(sizes) == 3 and sizes[0] <= 16]
  return flops / math.sqrt(experts[0]) if experts else flops


def replayed(program: list[Instruction], seconds: Mapping[str, float]) -> Bare:
  """The replay of a program: one kernel at a time, and beside it one transfer at a time."""
  now = link = kernels = transfers = 0.0
  ends: dict[str, float] = {}
  bare = {"exchanges": 0.0, "sums": 0.0}
  for one in program:
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
  fields = SHARED | WIDE | fields_of(args.words)
  plain = entry(compiled(fields, 2))
  seconds = seconds_of(plain, 2, args.link)
  stretch = lambda one: args.stretch if one.kind.startswith("all-to-all") else args.stretch_sums
  profile = {
    one.name: 1e6 * seconds[one.name] * (stretch(one) if one.kind.endswith("-start") else 1)
    for one in plain
    if one.name in seconds
  }
  guided = entry(compiled(fields, 2, as_profile(profile)))
  print(f"the last microbatch, {' '.join(args.words) or 'as it is'}, ms")
  print(f"link {args.link / 1e9:g} GB/s; stretch {args.stretch:g}, of sums {args.stretch_sums:g}")
  print("scheduled by             total  kernels  transfers  bare exchanges  bare sums")
  for name, of in (("XLA's own estimates", plain), ("the computed times", guided)):
    found = replayed(of, seconds_of(of, 2, args.link))
    print(f"{name:22} {found.total:7.1f} {found.kernels:8.1f} {found.transfers:10.1f} "
          f"{found.exchanges:15.1f} {found.sums:10.1f}")  # fmt: skip


if __name__ == "__main__":
  run_main(lambda argv: main())
