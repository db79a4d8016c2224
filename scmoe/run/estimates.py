"""Estimates a step on GPUs that are not here: whether it fits, and its times.

The rates are assumptions, and the table says so: matrix products at `MFU` of the maker's bfloat16
peak, exchanges at `LINK_SHARE` of the link's peak, copies from the host's memory at `BUS_SHARE` of
PCIe's. Tokens per second are given twice, with none of the exchange hidden and with all of it; a
real schedule lies between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from scmoe.base.sizes import duration, number, size_of
from scmoe.models.flops import peak_flops

MFU = 0.40  # assumed share of the peak; one H200 reached 0.43 to 0.46 (configs/olmoe.py)
LINK_SHARE = 0.43  # measured: 193 of 450 GB/s in an all-to-all of 4 H200s of one host
USABLE = 0.92  # share of the memory that a program gets; CUDA, NCCL and XLA take the rest
PRODUCTS = 0.71  # measured: 700 of 989 TFLOP/s in large products on one H200
MEMORY_SHARE = 0.83  # measured: 4.0 of 4.8 TB/s on one H200
BUS_SHARE = 0.81  # measured: 52 of 64 GB/s from pinned memory to one H200
HOST_DEVICES = 8  # GPUs of one host that NVLink joins
# Bytes/s that a host reads and writes in an update: 16 cores at 5 GB/s, as one core was measured.
HOST_RATE = 8e10
# Bytes/s of a host's disk, which reads and writes by turns; one was measured at 2.1 and 1.9 GB/s.
DISK_RATE = 2e9


@dataclasses.dataclass(frozen=True)
class Device:
  """A kind of GPU.

  Attributes:
    name: part of its `device_kind`.
    memory: bytes.
    host_link: bytes/s that leave it for another device of its host (NVLink, or PCIe for an L4).
    network: bytes/s that leave it for another host, with one network port per GPU.
    bus: bytes/s between it and the host's memory, each way (PCIe x16).
    memory_rate: bytes/s of its own memory.
  """

  name: str
  memory: float
  host_link: float
  network: float
  bus: float
  memory_rate: float


# From the makers' data sheets.
DEVICES = (
  Device("B200", 180e9, 900e9, 50e9, 64e9, 8.0e12),
  Device("H200", 141e9, 450e9, 50e9, 64e9, 4.8e12),
  Device("H100", 80e9, 450e9, 50e9, 64e9, 3.35e12),
  Device("A100", 80e9, 300e9, 25e9, 32e9, 2.04e12),
  Device("L4", 24e9, 32e9, 12.5e9, 32e9, 0.3e12),
)


@dataclasses.dataclass(frozen=True)
class StepNeeds:
  """The demands of one optimizer step on each device.

  Attributes:
    memory: bytes.
    flops: FLOPs of the step.
    exchange: bytes that leave the device in all-to-alls.
    tokens: tokens of the step, over all devices.
    exchanging: number of devices on the expert axis.
    copies: bytes/s of the link to the host's memory, each way -> seconds of the step's copies, and
      of the update if the host computes it; None if nothing is copied.
    computes: whether the host computes the update.
    filed: whether it keeps moments in files.
    passes: bytes/s of that link -> seconds of copies that run beside the passes: those of experts
      in the host's memory; None: there are none.
  """

  memory: float
  flops: float
  exchange: float
  tokens: float
  exchanging: int
  copies: Callable[[float], float] | None = None
  computes: bool = False
  filed: bool = False
  passes: Callable[[float], float] | None = None


def fits(memory: float, device: Device) -> str:
  """`fits, 12.00 GiB left`, or `does not fit, 3.00 GiB over`."""
  left = USABLE * device.memory - memory
  return f"fits, {size_of(left)} left" if left >= 0 else f"does not fit, {size_of(-left)} over"


def step_seconds(needs: StepNeeds, device: Device) -> tuple[float, float, float]:
  """Seconds of (computation, the exchange if one host has all devices, the exchange over hosts)."""
  peak = peak_flops(device.name)
  assert peak is not None, device
  exchange = lambda rate: needs.exchange / (LINK_SHARE * rate)
  return needs.flops / (MFU * peak), exchange(device.host_link), exchange(device.network)


def copy_seconds(needs: StepNeeds, device: Device) -> float:
  """Seconds that a step waits for copies between device and host's memory; 0 if there are none.

  They all count, because no computation of the step runs beside them: the update follows the last
  gradient.
  """
  return needs.copies(BUS_SHARE * device.bus) if needs.copies else 0.0


def _host_words(needs: StepNeeds) -> list[str]:
  """A line that says which rates the copies assume; none without copies."""
  if not needs.copies:
    return []
  what = "gradients leave for the host" if needs.computes else "moments come from the host's memory"
  rate = f", which updates moments at {HOST_RATE / 1e9:.0f} GB/s (assumption)" * needs.computes
  rate += f", in files that its disk reads and writes by turns at {DISK_RATE / 1e9:.0f} GB/s" * (
    needs.filed
  )
  return [f"{what} at {BUS_SHARE:.0%} of PCIe's peak, each way{rate}"]


def device_table(needs: StepNeeds, steps: int) -> list[str]:
  """The table's lines: assumptions, headings, and one line for each kind of GPU.

  A line says whether the step fits, its times, tokens per second, and the length of the run.
  """
  row = "  {:6}{:32}{:>12}{:>12}{:>12}  {}".format
  lines = [
    f"one step: computation at {MFU:.0%} of the bfloat16 peak, exchange at {LINK_SHARE:.0%} of the "
    "link's peak (assumptions);",
    f"last column: with none of the exchange{' and of the copies of experts' * bool(needs.passes)} "
    "hidden, to all of it",
    *_host_words(needs),
    row("", "", "", "exchange", "exchange", ""),
    row("", f"{USABLE:.0%} of memory", "computation", "in a host", "cross-host", "tokens/s, run"),
  ]
  for device in DEVICES:
    compute, inside, between = step_seconds(needs, device)
    copies = copy_seconds(needs, device)
    link = inside if needs.exchanging <= HOST_DEVICES else between
    beside = needs.passes(BUS_SHARE * device.bus) if needs.passes else 0.0
    # The two are equal where nothing is exchanged or fetched.
    ends = dict.fromkeys((compute + link + beside + copies, max(compute, link, beside) + copies))
    rates = " to ".join(number(needs.tokens / seconds) for seconds in ends)
    what = "copies and host's update" if needs.computes else "copies"
    told = f"; {what} {duration(copies)} a step" if copies else ""
    told += f"; copies of experts {duration(beside)} beside the passes" if beside else ""
    spans = " to ".join(duration(seconds * steps) for seconds in ends)
    times = [duration(s) if s else "–" for s in (compute, inside, between)]
    lines.append(row(device.name, fits(needs.memory, device), *times, f"{rates}, {spans}{told}"))
  return lines
