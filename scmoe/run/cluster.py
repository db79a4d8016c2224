"""GPUs of many hosts that are not here: their rates, and the table of predicted steps on them.

Rates that nobody measured here are shares of the makers' peaks, as the rest of the dry run assumes
(`scmoe.run.estimates`). `--host_devices` and `--network` of `scmoe.train` describe the hosts.
"""

from __future__ import annotations

import dataclasses

from scmoe.base.errors import ConfigError
from scmoe.base.sizes import duration, number, size_of
from scmoe.inference.offload.plan import bytes_of
from scmoe.models.flops import peak_flops
from scmoe.profiling.roofline import MACHINES, Machine
from scmoe.run.command_line import Flag
from scmoe.run.estimates import (
  BUS_SHARE,
  DEVICES,
  HOST_DEVICES,
  LINK_SHARE,
  MEMORY_SHARE,
  PRODUCTS,
  Device,
)
from scmoe.run.links import Links
from scmoe.run.prediction import Prediction, StepWork, not_counted, predictable, predicted

CLUSTER_FLAGS = (
  Flag("host_devices", int, HOST_DEVICES, "with --dry_run: GPUs of a host, which NVLink joins"),
  Flag(
    "network",
    str,
    "",
    "with --dry_run: bytes/s that each GPU reaches to other hosts, such as 40GB; default: "
    f"{LINK_SHARE:.0%} of its network port's peak",
  ),
)
MOST_HOST = 2**20


@dataclasses.dataclass(frozen=True)
class Cluster:
  """How GPUs are joined.

  Attributes:
    host: GPUs of a host.
    network: bytes/s that a GPU reaches to other hosts; 0: `LINK_SHARE` of the port of its kind.
  """

  host: int = HOST_DEVICES
  network: float = 0.0

  @classmethod
  def of_flags(cls, host_devices: int, network: str) -> Cluster:
    """The cluster that the values of `CLUSTER_FLAGS` describe.

    Raises:
      ConfigError: a host has no GPU, or the network's rate is not a positive size.
    """
    if not 1 <= host_devices <= MOST_HOST:
      raise ConfigError(
        f"--host_devices={host_devices} must be at least 1, and at most {MOST_HOST}"
      )
    return cls(host_devices, bytes_of(network, "--network") if network else 0.0)

  def links(self, device: Device) -> Links:
    """The rates between GPUs of one kind."""
    between = self.network or LINK_SHARE * device.network
    latency = MACHINES["h200-nvlink"].latency
    return Links(LINK_SHARE * device.host_link, between, latency, self.host)

  def predicted(self, work: StepWork, device: Device) -> Prediction:
    """The predicted step on GPUs of one kind; see `scmoe.run.prediction.predicted`."""
    return predicted(work, machine_of(device), self.links(device), BUS_SHARE * device.bus)


HOSTS_OF_8 = Cluster()


def machine_of(device: Device) -> Machine:
  """The rates of computation of one kind of GPU."""
  peak = peak_flops(device.name)
  assert peak is not None, device
  link = LINK_SHARE * device.host_link
  return Machine(PRODUCTS * peak, MEMORY_SHARE * device.memory_rate, link, 0.0)


def prediction_table(work: StepWork, tokens: float, cluster: Cluster) -> list[str]:
  """The lines of `--dry_run` about predicted steps: one for each kind of GPU.

  Args:
    work: of one step.
    tokens: of one step, over all devices.
    cluster: how the GPUs are joined.
  """
  if reason := predictable(work.run):
    return [f"no predicted step: {reason}"]
  network = f"{size_of(cluster.network)}/s" if cluster.network else f"{LINK_SHARE:.0%} of the port"
  lines = [
    f"one step as predicted from the schedule, hosts of {cluster.host} GPUs, {network} between "
    "them (docs/scale.md):"
  ]
  found = {device.name: cluster.predicted(work, device) for device in DEVICES}
  names = list(next(iter(found.values())).parts)
  names = [name for name in names if any(one.parts[name] for one in found.values())]
  row = ("  {:6}" + "{:>12}" * (len(names) + 2) + "  {}").format
  heads = ["exchanges" if name == "exposed" else name for name in names]
  lines.append(row("", *heads, "step", "tokens/s", "bound by"))
  for name, one in found.items():
    times = [duration(one.parts[part]) if one.parts[part] else "–" for part in names]
    bound = "exchanges" if one.bound == "exposed" else one.bound
    lines.append(row(name, *times, duration(one.step), number(tokens / one.step), bound))
  if missing := not_counted(work.run):
    lines.append(f"  not counted: {', '.join(missing)}")
  return lines
