"""An elastic run's mesh for the processes that are left, and the command that trains on it.

Batch, tokens per step and the order of the data are the same on every mesh that is chosen, so each
device of a smaller mesh takes more rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scmoe.base.errors import ConfigError, Unavailable
from scmoe.base.output import warn
from scmoe.base.stored import StoredError, read_json
from scmoe.parallel.mesh import MeshConfig
from scmoe.run import build
from scmoe.run.config import RunConfig
from scmoe.training.children import QuietChild, start_child
from scmoe.training.distributed import VARIABLES, Cluster, find_cluster, is_loopback
from scmoe.training.elastic import SILENT_SECONDS, Launch, Supervisor
from scmoe.training.members import FOLDER, Choice, Plan
from scmoe.training.options import DistributedConfig
from scmoe.training.restore import FOLDER as CHECKPOINTS
from scmoe.training.restore import list_steps
from scmoe.training.vitals import heartbeat_file
from scmoe.training.workdir import LOCK, owner_lives, prepare_workdir

HOST = "SCMOE_HOST"  # name or address of this host, if others reach it by none of its own names
# A share of a GPU's memory above which a training leaves a second process too little to compile.
MOST_MEMORY = 0.9
_QUIET = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # take a GPU's memory only as it is needed
_COUNT = "import jax; print(jax.local_device_count())"
_COUNT_SECONDS = 300.0


def choose_mesh(run: RunConfig, processes: int, devices: int, *, most: int) -> Choice:
  """The mesh for the processes that are there: the largest that batch, experts and processes allow.

  `mesh.tensor` and `mesh.sequence` stay as configured. `mesh.expert` shrinks only if no size of
  the data axis fits it. All devices of a process are used, or none.

  Args:
    run: not resolved.
    processes: processes that are there.
    devices: devices of each.
    most: processes of the whole run, for the words.

  Returns:
    The mesh, with the reason why it is smaller than the processes would allow.

  Raises:
    ConfigError: no mesh fits, even for one process; the message is the first mesh's.
  """
  vocabulary, refused = build.vocab_size(run.data), ""
  for used in range(processes, 0, -1):
    for expert in range(run.mesh.expert, 0, -1):
      others = expert * run.mesh.tensor * run.mesh.sequence
      if used * devices % others:
        continue
      mesh = dataclasses.replace(run.mesh, data=used * devices // others, expert=expert)
      try:
        check_mesh(dataclasses.replace(run, mesh=mesh), vocabulary, used)
      except ConfigError as error:
        refused = refused or f"{used} processes: {error}"
        continue
      return Choice(used, mesh.data, expert, _words(mesh, used, most, refused))
  what = f"{run.mesh.words} on {processes} processes of {devices} devices"
  raise ConfigError(refused or f"no mesh like {what}; use a mesh whose axes divide {devices}")


def check_mesh(run: RunConfig, vocabulary: int, processes: int) -> None:
  """Checks that a run can train on its mesh, which is given in full, with so many processes.

  Raises:
    ConfigError: a size does not divide another one.
  """
  resolved = run.resolve(num_devices=run.mesh.size, vocab_size=vocabulary, num_processes=processes)
  if resolved.mesh.batch_shards % processes:
    raise ConfigError(
      f"mesh.data x mesh.expert = {resolved.mesh.batch_shards} is not divisible by the {processes} "
      "processes"
    )


def _words(mesh: MeshConfig, used: int, most: int, refused: str) -> str:
  why = f"; not {refused.partition('; ')[0]}" if refused else ""
  return f"{mesh.words} on {used} of {most} processes{why}"


def member_of(
  run: RunConfig,
  workdir: Path,
  command: Sequence[str],
  *,
  restarts: int,
  simulated: int,
  ahead: bool = True,
) -> Supervisor:
  """This process's member of an elastic run.

  Args:
    run: not resolved.
    workdir: of the run, shared by all processes.
    command: trains; flags for the mesh are appended.
    restarts: most restarts in a row without a later checkpoint.
    simulated: devices to simulate; 0: those of the machine.
    ahead: whether the step for the mesh after the next loss is compiled beside the training.

  Raises:
    ConfigError: the run has one process only, or a part of the coordinator's address is wrong.
    StorageError: the folder cannot be written.
    Unavailable: as `count_devices`.
  """
  cluster = find_cluster(run.distributed)
  if cluster is None:
    raise ConfigError(
      "--elastic is for runs of several processes, and this is one; set SCMOE_COORDINATOR, "
      "SCMOE_NUM_PROCESSES and SCMOE_PROCESS_ID, or leave --elastic out"
    )
  folder = prepare_workdir(workdir) / FOLDER
  folder.mkdir(exist_ok=True)
  given = run.distributed != DistributedConfig(heartbeat_seconds=run.distributed.heartbeat_seconds)

  def compiling(plan: Plan, index: int) -> QuietChild:
    only = [*command, *flags(plan, given), "--compile_only"]
    return QuietChild(only, variables(plan, index) | _QUIET)

  launch = Launch(
    choose=functools.cache(functools.partial(choose_mesh, run, most=cluster.num_processes)),
    start=lambda plan, index: start_child([*command, *flags(plan, given)], variables(plan, index)),
    trains=lambda pid: _has_beaten(workdir, pid),
    progress=lambda: max(list_steps(workdir / CHECKPOINTS), default=0),
    release=lambda: (workdir / LOCK).unlink(missing_ok=True),
    held=lambda: owner_lives(workdir / LOCK),
    count=functools.partial(begin_count, simulated),
    compile=compiling if ahead and leaves_room() else None,
  )
  return Supervisor(
    folder,
    cluster.process_id,
    cluster.num_processes,
    host=address(cluster),
    devices=count_devices(simulated),
    launch=launch,
    restarts=restarts,
    silent=min(SILENT_SECONDS, run.distributed.heartbeat_seconds),
  )


def leaves_room(environment: Mapping[str, str] = os.environ) -> bool:
  """Whether the training leaves memory of each GPU to a second process; says so if it does not.

  XLA measures kernels as it compiles, on arrays of their size. A GPU without memory for these would
  fail the compilation, or the next program that the training loads.
  """
  for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
    with contextlib.suppress(ValueError):
      if float(environment.get(name, "0")) > MOST_MEMORY:
        warn(
          f"elastic: nothing is compiled ahead: {name}={environment[name]} leaves a second process "
          f"too little memory; at most {MOST_MEMORY} would do"
        )
        return False
  return True


def flags(plan: Plan, given: bool) -> list[str]:
  """Flags of `scmoe.train` for one turn.

  Args:
    plan: of the turn.
    given: whether the configuration names coordinator or processes, which would come before the
      environment's (`variables`).
  """
  mesh = [f"--config.mesh.data={plan.data}", f"--config.mesh.expert={plan.expert}"]
  unset = ["coordinator=", "num_processes=0", "process_id=-1"] if given else []
  return mesh + [f"--config.distributed.{word}" for word in unset]


def variables(plan: Plan, index: int) -> dict[str, str]:
  """The environment of one turn's process: where all meet, how many they are, which one this is."""
  values = {"coordinator": plan.coordinator, "num_processes": len(plan.members)}
  values["process_id"] = index
  return {VARIABLES[name]: str(value) for name, value in values.items()}


def address(cluster: Cluster, environment: Mapping[str, str] = os.environ) -> str:
  """Name or address at which other processes reach this host.

  It is 127.0.0.1 if all processes are on one host. Else it is the first of: SCMOE_HOST, SLURM's
  name of the node, the coordinator's host for process 0, the host's full name.
  """
  host = cluster.coordinator.rpartition(":")[0]
  if is_loopback(host):
    return "127.0.0.1"
  own = environment.get(HOST) or environment.get("SLURMD_NODENAME")
  return own or (host if cluster.process_id == 0 else socket.getfqdn())


def count_devices(simulated: int) -> int:
  """Devices that jax finds on this host; another process counts them, and gives them back.

  Raises:
    Unavailable: jax finds none, or does not answer for `_COUNT_SECONDS`.
  """
  if simulated:
    return simulated
  command = [sys.executable, "-c", _COUNT]
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, env=os.environ | _QUIET, timeout=_COUNT_SECONDS
    )
  except subprocess.TimeoutExpired:
    raise Unavailable(
      f"jax has not found this host's devices in {_COUNT_SECONDS:g} s; check the driver"
    ) from None
  last = done.stdout.split()[-1:]
  if done.returncode or not last or not last[0].isdecimal():
    said = (done.stderr.split("\n")[-2:] or [""])[0][:200]
    raise Unavailable(f"jax finds no devices here ({said}); check JAX_PLATFORMS and the driver")
  return int(last[0])


def begin_count(simulated: int) -> Callable[[], int | None]:
  """Begins `count_devices` in a thread, for a member that goes on writing its file meanwhile.

  Returns:
    A function that returns the number of devices, 0 if jax finds none (which is said), and None as
    long as they are being counted.
  """
  found: list[int] = []

  def count() -> None:
    try:
      found.append(count_devices(simulated))
    except Unavailable as error:
      warn(str(error))
      found.append(0)

  threading.Thread(target=count, daemon=True).start()
  return lambda: found[0] if found else None


def _has_beaten(workdir: Path, pid: int) -> bool:
  """True once process `pid`, the first of its turn, has done a step."""
  with contextlib.suppress(OSError, StoredError):
    return read_json(heartbeat_file(workdir, 0), {"pid": int})["pid"] == pid
  return False
