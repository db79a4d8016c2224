"""How many more runs an hour a device trains when seeds share a program.

  python experiments/seeds/run.py --config cifar10_vit --seeds 1,2,5 --json OUT
  python experiments/seeds/run.py --config gpt2_moe_small --seeds 1,2 --config.train.batch_size=8

Times training steps on random batches, in turns: `alone` is the step of one seed as
`python -m scmoe.train` runs it, with the kernels; `S seeds` is the step of S seeds in one program,
which has none (`scmoe.training.side_by_side`). Seeds an hour are S steps' worth over the time of
the program's step, without compilation, data and evaluation. Fields of the configuration are given
as for `scmoe.train`.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from scmoe.base.errors import ConfigError, run_main
from scmoe.base.stored import write_json
from scmoe.kernels.launch import without_kernels
from scmoe.parallel.mesh import batch_sharding, replicated
from scmoe.profiling.timer import NO_GPU, interleave
from scmoe.reports.tables import Table
from scmoe.run import build, placement
from scmoe.run.command_line import HELP, TRAIN_FLAGS, Flag, help_text, parse, run_config
from scmoe.run.config import RunConfig
from scmoe.training.fastest import PROFILES
from scmoe.training.guided import GuidedStep
from scmoe.training.meters import memory_in_use
from scmoe.training.side_by_side import make_seeds_step
from scmoe.training.step import init_state, make_train_step

FLAGS = (
  *(f for f in TRAIN_FLAGS if f.name in ("config", "config_json", "smoke", "allow_import")),
  Flag("seeds", str, "1,2,5", "numbers of seeds in a program, joined by commas"),
  Flag("rounds", int, 5, "how often each program is timed"),
  Flag("calls", int, 20, "steps that are timed together"),
  Flag("workdir", str, "runs/seeds", "folder for profiles"),
  Flag("json", str, "", "also write the figures to this file"),
  HELP,
)


class Arm:
  """A training step with its state: `arm(n)` runs n steps and waits.

  Args:
    run: not resolved.
    count: seeds in the program; 0: the step of one seed, with kernels.
    folder: for profiles.
  """

  def __init__(self, run: RunConfig, count: int, folder: Path):
    built = build.build(placement.single_device(run).resolve(num_devices=1, vocab_size=_words(run)))
    abstract, overlap, began = built.abstract_state(), built.overlap, time.perf_counter()
    how = {"gradient_dtype": overlap.gradient_dtype, "flight": overlap.flight}
    state = lambda seed: init_state(built.init, built.optimizer, seed, abstract)
    if not count:
      step = make_train_step(built.objective, built.optimizer, abstract, **how)
      put = lambda x: jax.device_put(x, batch_sharding(built.mesh, leading=1))
      self.state, self.given = state(0), (jax.tree.map(put, built.random_batch()),)
    else:
      here = replicated(built.mesh)
      step = make_seeds_step(built.objective, built.optimizer, abstract, **how)
      states = [state(seed) for seed in range(count)]
      stacked: Any = jax.tree.map(lambda *x: jnp.stack(x), *states)
      batches = jax.tree.map(lambda x: np.stack([x] * count), built.random_batch())
      given = stacked, batches, np.arange(count, dtype=np.int32)
      self.state, *self.given = jax.tree.map(lambda x: jax.device_put(x, here), given)
    self.step = GuidedStep(step, overlap, folder / PROFILES)
    self(2)
    self.prepared = time.perf_counter() - began

  def __call__(self, steps: int) -> None:
    """Runs so many steps and waits for them."""
    for _ in range(steps):
      self.state, _, _ = self.step(self.state, *self.given)
    jax.block_until_ready(self.state)


def _words(run: RunConfig) -> int:
  return build.vocab_size(run.data)


def main(argv: list[str]) -> None:
  """Times the programs and prints the table."""
  values, given = parse(argv, FLAGS, with_fields=True)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"], with_fields=True))
  counts = values["seeds"].split(",")
  if not all(word.isdecimal() and int(word) for word in counts):
    raise ConfigError(f"--seeds={values['seeds']!r} is no list of numbers from 1; e.g. 1,2,5")
  run = run_config({**values, "deterministic": False, "allow_config_change": False}, given)
  folder, arms = Path(values["workdir"]), {}
  arms["alone"] = Arm(run, 0, folder)
  with without_kernels():
    arms |= {f"{word} seeds": Arm(run, int(word), folder) for word in counts}
  timings = interleave(arms, rounds=values["rounds"], calls=values["calls"])
  figures: dict[str, Any] = {
    "device": f"{jax.devices()[0].device_kind}, jax {jax.__version__}",
    "date": time.strftime("%Y-%m-%d"),
    "command": " ".join(["python experiments/seeds/run.py", *argv]),
    "batch": dataclasses.asdict(run.train)["batch_size"],
    **memory_in_use(),
    "arms": {},
  }
  rows = []
  base = timings["alone"].median
  for name, timing in timings.items():
    seeds = 1 if name == "alone" else int(name.split()[0])
    gain = seeds * base / timing.median
    figures["arms"][name] = timing.as_json() | {"gain": round(gain, 3), "seeds": seeds}
    start = f"{arms[name].prepared:.0f}"
    rows.append((name, f"{1e3 * timing.median:.2f}", f"{gain:.2f}", start))
  if jax.default_backend() != "gpu":
    print(NO_GPU)
  heads = ("program", "ms a step", "seeds an hour, relative", "start, s")
  print(Table(f"{run.name} on {figures['device']}", heads, tuple(rows)).text())
  if values["json"]:
    write_json(Path(values["json"]), figures)


if __name__ == "__main__":
  run_main(main)
