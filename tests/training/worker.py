"""One process of a training run for the tests that need to kill it; arguments as JSON in argv[1].

Prints `batch N` before microbatch N is read.
"""

import dataclasses
import functools
import json
import os
import signal
import sys
import time

if __name__ == "__main__":
  ARGS = json.loads(sys.argv[1])
  signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests started under nohup would hand on "ignored"
  # The other flags stay: results are compared bit for bit with those of the test's own process.
  count = "--xla_force_host_platform_device_count="
  others = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(count)]
  os.environ["XLA_FLAGS"] = " ".join([*others, f"{count}{ARGS.get('devices', 8)}"])

import jax
from training_fakes import Iterator, Objective, Source, trainer

from scmoe.base.errors import run_main
from scmoe.base.output import say
from scmoe.blocks.options import OverlapAblation, OverlapConfig
from scmoe.parallel.mesh import MeshConfig, make_mesh
from scmoe.profiling.program import Program
from scmoe.training import loop
from scmoe.training.distributed import initialize
from scmoe.training.fastest import fastest_step
from scmoe.training.options import CheckpointConfig, DistributedConfig
from scmoe.training.variants import Variant


class Faulty(Source):
  """Says what it reads, and stops for ever at some microbatch if told to."""

  def __init__(self, args):
    super().__init__(8)
    self.args = args

  def train(self):
    args = self.args

    class Loud(Iterator):
      def __next__(self):
        print(f"batch {self.index}", flush=True)
        time.sleep(args.get("slow", 0.0) * (1 + 9 * (jax.process_index() == args.get("slower"))))
        if self.index == args.get("sleep_at"):
          time.sleep(100)
        if self.index == args.get("freeze_at") and jax.process_index() == 1:
          os.kill(os.getpid(), signal.SIGSTOP)
        return super().__next__()

    return Loud(self)


class SlowToCompile(Objective):
  """Takes seconds to trace, as a large model takes to compile."""

  def __init__(self, seconds):
    self.seconds = seconds

  def loss(self, params, router, batch, rng):
    time.sleep(self.seconds)
    return super().loss(params, router, batch, rng)


def search(run):
  """Searches as GPUs that exchange rows do: with a profile a process, and three candidates."""
  number = jax.process_index()
  collect = lambda directory, program: f"profile of process {number}".encode()

  def compile(self, options, profile=b""):
    print(f"compiled with {profile.decode()!r}", flush=True)
    self.compiled = self.lowered.compile()

  Program.compile = compile
  loop.fastest_step = functools.partial(fastest_step, gpu=True, collect=collect)
  overlap = OverlapConfig(search_seconds=60, ablation=OverlapAblation(profile_runs=1))
  candidates = (Variant(), Variant(chunks=2), Variant(chunks=4))
  run.built = dataclasses.replace(run.built, overlap=overlap, candidates=candidates)


def main(argv):
  args = json.loads(argv[0])
  # A busy machine leaves a process without time for seconds; only who waits for a death has haste.
  initialize(DistributedConfig(heartbeat_seconds=args.get("heartbeat", 60)))
  run = trainer(
    make_mesh(MeshConfig(2, 4)),
    args["workdir"],
    data=Faulty(args),
    objective=SlowToCompile(args.get("compile_seconds", 0)),
    checkpoint=CheckpointConfig(every=args.get("every", 5)),
    **args.get("train", {}),
  )
  if args.get("search"):
    search(run)
  say(f"processes {jax.process_count()}")
  run.run()


if __name__ == "__main__":
  run_main(main)
