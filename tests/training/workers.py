"""Processes of `worker.py`, which tests kill, stop and read."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


class Worker:
  """A `worker.py` process; its output is collected in files."""

  def __init__(self, workdir, environment=None, **args):
    self.name = f"{workdir.name}-{time.monotonic_ns()}"
    self.out = workdir.parent / f"{self.name}.out"
    self.err = workdir.parent / f"{self.name}.err"
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    with open(self.out, "w") as out, open(self.err, "w") as err:
      self.process = subprocess.Popen(
        [sys.executable, str(HERE / "worker.py"), json.dumps({"workdir": str(workdir)} | args)],
        env=os.environ | {"PYTHONPATH": paths} | (environment or {}),
        stdout=out,
        stderr=err,
      )

  def wait_for(self, text, seconds=90.0):
    """Until the output holds the text."""
    end = time.monotonic() + seconds
    while text not in self.out.read_text():
      assert self.process.poll() is None, self.err.read_text()[-3000:]
      assert time.monotonic() < end, f"no {text!r} in {seconds} s"
      time.sleep(0.01)

  def end(self, seconds=90.0):
    """Exit code."""
    try:
      return self.process.wait(seconds)
    finally:
      self.kill()

  def kill(self):
    with contextlib.suppress(ProcessLookupError):
      self.process.kill()
    self.process.wait()


def pair(workdir, **args):
  """Two processes with four simulated devices each."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  common = {"SCMOE_COORDINATOR": f"127.0.0.1:{port}", "SCMOE_NUM_PROCESSES": "2"}
  return [
    Worker(workdir, common | {"SCMOE_PROCESS_ID": str(i)}, devices=4, **args) for i in range(2)
  ]
