"""Several processes of one run: how they find each other, and how they agree."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from scmoe.base.errors import ConfigError, PeerLost, ScmoeError, Unavailable
from scmoe.kernels.grouped_matmul import tuned
from scmoe.training.options import DistributedConfig

VARIABLES = {
  "coordinator": "SCMOE_COORDINATOR",
  "num_processes": "SCMOE_NUM_PROCESSES",
  "process_id": "SCMOE_PROCESS_ID",
}
# A process waits for the coordinator to listen as long as jax waits for all processes by default.
_COORDINATOR_SECONDS = 300.0
# What Gloo, NCCL and jax's coordination service say of a connection that has broken off.
_BROKEN = (
  "closed by peer",
  "reset by peer",
  "Socket closed",
  "Broken pipe",
  "remote process exited",
  "heartbeat timeout",
)


class Cluster(NamedTuple):
  """The processes of a run: host:port of process 0, how many they are, and which one this is."""

  coordinator: str
  num_processes: int
  process_id: int


def find_cluster(
  cfg: DistributedConfig, environment: Mapping[str, str] = os.environ
) -> Cluster | None:
  """The processes of this run; None if it has one process only.

  Coordinator, number of processes and number of this process are each taken from the first source
  that gives it: the configuration, the SCMOE_* variables (`VARIABLES`), SLURM's variables of a
  step (`_slurm`).

  Raises:
    ConfigError: a number that is taken from an SCMOE_* variable is malformed; this process is not
      the first, and there is no coordinator; or, with a coordinator or several processes, a part is
      missing or malformed, or does not fit the others.
  """
  slurm = _slurm(environment)
  coordinator = (
    cfg.coordinator
    or environment.get(VARIABLES["coordinator"], "")
    or (slurm.coordinator if slurm else "")
  )
  count = cfg.num_processes or _number(environment, "num_processes", slurm, 0)
  index = cfg.process_id if cfg.process_id >= 0 else _number(environment, "process_id", slurm, -1)
  if not coordinator and count <= 1:
    if index > 0:  # without this, every host of the run would train alone
      raise ConfigError(
        f"distributed.process_id={index} without other processes; set distributed.coordinator and "
        "distributed.num_processes, too"
      )
    return None
  _check(coordinator, count, index)
  return Cluster(coordinator, count, index) if count > 1 else None


def initialize(cfg: DistributedConfig) -> None:
  """Connects the processes of the run, if it has several; call before any other use of jax.

  If the coordinator's address is a loopback address, the coordinator listens on 127.0.0.1 alone;
  else jax chooses the interface. All processes get process 0's measured kernel tilings.

  Raises:
    ConfigError: as `find_cluster`.
    Unavailable: no process listens at the coordinator's address within 300 s, or jax raises a
      RuntimeError, for example since the coordinator's port is taken. If the coordinator listens,
      but not all processes come, jax aborts those that do (SIGABRT), after 300 s.
  """
  cluster = find_cluster(cfg)
  if cluster is None:
    return
  host, _, port = cluster.coordinator.rpartition(":")
  if cluster.process_id:
    _wait_for(host, int(port), cluster)
  bind = f"127.0.0.1:{port}" if is_loopback(host) else None
  try:
    jax.distributed.initialize(
      cluster.coordinator,
      cluster.num_processes,
      cluster.process_id,
      heartbeat_timeout_seconds=cfg.heartbeat_seconds,
      coordinator_bind_address=bind,
    )
  except RuntimeError as error:
    raise Unavailable(
      f"distributed.coordinator={cluster.coordinator}: process {cluster.process_id} of "
      f"{cluster.num_processes} could not connect: {' '.join(str(error).split())[:200]}"
    ) from None
  _share_tilings()


def _wait_for(host: str, port: int, cluster: Cluster) -> None:
  """Waits until a process listens at the coordinator's address.

  jax itself aborts a process that cannot reach the coordinator, without an error to catch.

  Raises:
    Unavailable: none does within `_COORDINATOR_SECONDS`.
  """
  end = time.monotonic() + _COORDINATOR_SECONDS
  while True:
    try:
      socket.create_connection((host.strip("[]"), port), timeout=5).close()
      return
    except OSError as error:
      if time.monotonic() >= end:
        raise Unavailable(
          f"distributed.coordinator={cluster.coordinator}: process {cluster.process_id} of "
          f"{cluster.num_processes} could not connect ({error}); is process 0 running?"
        ) from None
    time.sleep(0.1)


def _share_tilings() -> None:
  """Gives all processes the measured kernel tilings of process 0: all must compile one program."""
  kind = jax.devices()[0].device_kind
  own = tuned.text(tuned.table(kind), kind) if is_first() else ""
  tuned.use(kind, tuned.parsed(bytes_of_first(own.encode()).decode(), kind))


def lost_peer(error: Exception) -> PeerLost | None:
  """The failure if a collective broke off since another process ended; None if it did not.

  Between CPUs Gloo may report at once that a connection is closed. NCCL mostly waits, until the
  watchdog ends the process.
  """
  said = " ".join(str(error).split())
  if jax.process_count() == 1 or not any(words in said for words in _BROKEN):
    return None
  return PeerLost(
    f"process {jax.process_index()} of {jax.process_count()}: another process has ended or is not "
    f"reached any more ({said[:200]}); run the same command again, for all processes"
  )


def is_first() -> bool:
  """True on process 0, which writes the files that a run has once."""
  return jax.process_index() == 0


def barrier(name: str) -> None:
  """Waits until every process has called it with this name."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(f"scmoe-{name}")


def all_agree(good: bool) -> bool:
  """True if `good` is true on every process; all must call it."""
  if jax.process_count() == 1:
    return good
  return bool(np.all(multihost_utils.process_allgather(np.array([good]))))


def first_decides(value: bool) -> bool:
  """The value that process 0 gives; all processes must call it."""
  if jax.process_count() == 1:
    return value
  return bool(multihost_utils.broadcast_one_to_all(np.array(value)))


class OnFirst:
  """A context manager for all processes, in which process 0 alone enters and leaves `inner`.

  If entering `inner` raises a `ScmoeError`, process 0 raises it and the others a `ConfigError`.
  """

  def __init__(self, inner: contextlib.AbstractContextManager[Any]):
    self._inner = inner if is_first() else None

  def __enter__(self) -> None:
    problem: ScmoeError | None = None
    try:
      if self._inner is not None:
        self._inner.__enter__()
    except ScmoeError as error:
      problem = error
    if not all_agree(problem is None):
      raise problem or ConfigError("process 0 could not take the workdir; see its message")

  def __exit__(self, *details: Any) -> None:
    if self._inner is not None:
      self._inner.__exit__(*details)


def bytes_of_first(value: bytes) -> bytes:
  """The bytes that process 0 gives; all must call it, the others with any bytes."""
  if jax.process_count() == 1:
    return value
  length = int(multihost_utils.broadcast_one_to_all(np.array(len(value))))
  padded = np.frombuffer(value[:length].ljust(length, b"\0"), np.uint8)
  return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))) if length else b""


def from_all_processes(value: dict[str, Any]) -> list[dict[str, Any]]:
  """The JSON-able values of all processes, in the order of their numbers; all must call it."""
  value = json.loads(json.dumps(value))
  if jax.process_count() == 1:
    return [value]
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  longest = int(np.max(multihost_utils.process_allgather(np.array([text.size]))))
  rows = multihost_utils.process_allgather(np.pad(text, (0, longest - text.size)))
  return [json.loads(bytes(row).rstrip(b"\0")) for row in np.asarray(rows)]


def _slurm(environment: Mapping[str, str]) -> Cluster | None:
  """The processes of a SLURM step, one for each task; None outside a step or for one task.

  `srun` begins a step. A batch script is outside, though it has a task's number, 0, and the number
  of tasks: a process that it starts itself has no peers. None, too, if SLURM_NTASKS, SLURM_PROCID
  or SLURM_JOB_ID is missing or no number.

  The coordinator is the first node of the step (127.0.0.1 if SLURM says that it has one node only).
  Its port follows from the job's number, so that neighbouring jobs have different ports.
  """
  try:
    count = int(environment["SLURM_NTASKS"])
    index = int(environment["SLURM_PROCID"])
    job = int(environment["SLURM_JOB_ID"])
    host = _first_host(environment["SLURM_STEP_NODELIST"])
  except (KeyError, ValueError):
    return None
  if environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES")) == "1":
    host = "127.0.0.1"
  return Cluster(f"{host}:{57344 + job % 4096}", count, index) if count > 1 else None


def _first_host(nodes: str) -> str:
  """First host of a list such as `gpu[007-012,020],login1`: gpu007."""
  prefix, bracket, rest = nodes.partition("[")
  if "," in prefix or not bracket:
    return nodes.partition(",")[0]
  first = rest.partition("]")[0].split(",")[0].split("-")[0]
  return prefix + first


def _number(environment: Mapping[str, str], field: str, slurm: Cluster | None, default: int) -> int:
  text = environment.get(VARIABLES[field], "")
  if not text:
    return getattr(slurm, field) if slurm else default
  if not text.isdecimal():
    raise ConfigError(f"{VARIABLES[field]}={text!r} is not a number; set it to 0, 1, 2, ...")
  return int(text)


def _check(coordinator: str, count: int, index: int) -> None:
  host, colon, port = coordinator.rpartition(":")
  if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
    raise ConfigError(f"distributed.coordinator={coordinator!r} is not host:port, e.g. node1:29500")
  if count < 1:
    raise ConfigError(
      f"distributed.coordinator={coordinator} without a number of processes; set "
      "distributed.num_processes"
    )
  if not 0 <= index < count:
    raise ConfigError(
      f"distributed.process_id={index} is not a process of {count}; use 0 to {count - 1}"
    )


def is_loopback(host: str) -> bool:
  """True if a name or address is one by which this host reaches only itself, e.g. 127.0.0.1."""
  name = host.strip("[]")
  if name == "localhost":
    return True
  try:
    return ipaddress.ip_address(name).is_loopback
  except ValueError:
    try:
      return ipaddress.ip_address(socket.gethostbyname(name)).is_loopback
    except OSError:
      return False
