"""Seconds of collectives on a cluster of hosts: fast links inside a host, slower ones between them.

A model of two tiers. Devices are numbered as in the mesh, whose last axis varies fastest
(`scmoe.parallel.mesh.AXES`), and a host has `Links.host` neighbours. So a group of devices along
some axes has a part in each host. Example: 64 devices as data=4 x expert=16 on hosts of 8. A group
along `expert` has 8 members in each of 2 hosts, one along `data` has its 4 members in 4 hosts.

Both tiers work at the same time, and each device has a network port of its own. Switches between
hosts are taken to be fast enough for all ports at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple


class Group(NamedTuple):
  """Devices that take part in one collective.

  Attributes:
    size: their number.
    near: how many of them one host has.
  """

  size: int
  near: int


@dataclasses.dataclass(frozen=True)
class Links:
  """Rates that collectives reach.

  Attributes:
    inside: bytes/s that leave a device for others of its host.
    between: bytes/s that leave a device for other hosts.
    latency: seconds of a collective that moves nothing.
    host: number of devices of a host.
  """

  inside: float
  between: float
  latency: float
  host: int

  def group(self, mesh: Mapping[str, int], axes: Collection[str]) -> Group:
    """The devices that differ in their indices on `axes` alone.

    Args:
      mesh: axis -> its size, the axis that varies fastest last.
      axes: of the collective.
    """
    room, near = self.host, 1
    for axis, size in reversed(tuple(mesh.items())):
      near *= min(size, room) if axis in axes else 1
      room = max(room // size, 1)
    return Group(math.prod(mesh[axis] for axis in axes), near)

  def all_to_all(self, sent: float, group: Group) -> float:
    """Seconds in which a device sends equal parts of `sent` bytes to every other one of the group.

    A part of the bytes crosses the network, the others at the same time the links of the host.
    """
    if group.size == 1:
      return 0.0
    far = sent * (group.size - group.near) / (group.size - 1)
    return max((sent - far) / self.inside, far / self.between)

  def ring(self, sent: float, group: Group) -> float:
    """Seconds of a reduction or gather in rings, in which `sent` bytes leave every device.

    As many rings as a host has members run side by side. Each carries its part of the bytes and
    enters the host at a port of its own, so the members of a host share the traffic between hosts.
    """
    if group.size == 1:
      return 0.0
    across = sent / group.near / self.between if group.size > group.near else 0.0
    return max(sent / self.inside if group.near > 1 else 0.0, across)

  def neighbour(self, sent: float, group: Group) -> float:
    """Seconds in which each device sends `sent` bytes to the next one of one ring.

    The devices wait for the slowest link, so one hop between hosts slows the whole ring.
    """
    if group.size == 1:
      return 0.0
    return sent / (self.between if group.size > group.near else self.inside)
