"""Training steps that share one state: compiled side by side, profiled, called in turns."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from scmoe.base.errors import ConfigError, StorageError
from scmoe.run import build
from scmoe.run.config import RunConfig
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.run.names import check_run_name
from scmoe.training.fastest import Steps
from scmoe.training.guided import GuidedStep
from scmoe.training.measured import MeasuredState
from scmoe.training.variants import Variant

# Two devices share the experts, and no schedule is searched for.
SPLIT = {"mesh.expert": "2", "mesh.data": "1", "overlap.search_seconds": "0"}
# Fields of the arms of run.py and wirings.py, beside those of the configuration.
MODEL = SPLIT | {
  "model.num_layers": "8",
  "train.batch_size": "16",
  "train.tokens_per_step": "131072",
  "dispatch.transport": "packed",
}


def configured(config: str, fields: Mapping[str, str], *, tiny: bool = False) -> RunConfig:
  """A configuration with some fields replaced, not resolved; `tiny`: of the smoke run."""
  name, of = ("quickstart", "smoke") if tiny else (config, "get_config")
  run = load_config(find_config(name), of)
  return functools.reduce(lambda run, field: with_field(run, *field), fields.items(), run)


def fields_of(words: list[str]) -> dict[str, str]:
  """The values by field, from words FIELD=VALUE.

  Raises:
    ConfigError: a word has no "=".
  """
  for word in words:
    if "=" not in word:
      raise ConfigError(
        f"{word!r} is not of the form FIELD=VALUE; quote a value with spaces, e.g. "
        "'overlap.schedule=mlp 0'"
      )
  return {field: value for field, _, value in (word.partition("=") for word in words)}


class StepArm:
  """One step as an arm of `scmoe.profiling.timer`."""

  def __init__(self, step: GuidedStep, shared: MeasuredState):
    self.step, self.shared = step, shared

  def __call__(self, calls: int) -> None:
    self.shared.train(self.step, calls)
    self.shared.wait()

  def lower(self) -> None:
    """Traces and lowers; `finish` has XLA compile."""
    self.step.compile(self.shared.abstract, self.shared.batch, later=True)

  def rounds(self) -> float:
    """Rounds of an exchange in one more step, which it runs; the router may have changed."""
    self(1)
    return self.shared.rounds

  @property
  def jaxpr(self) -> Any:
    """The step as jax traced it."""
    return self.step.step.trace(self.shared.abstract, self.shared.batch).jaxpr


def step_arm(run: RunConfig, states: dict[str, MeasuredState], profiles: Path) -> StepArm:
  """The step of a resolved run, on a state of its kind, which is made if `states` lacks it.

  Args:
    run: resolved.
    states: by wiring and `mesh.shard_state`.
    profiles: folder of the measured times.
  """
  built = build.build(run)
  kind = f"{run.model.wiring}, {run.mesh.shard_state}"
  if kind not in states:
    states[kind] = MeasuredState(built)
  step = Steps(built, built.abstract_state(), profiles)(Variant())
  return StepArm(step, states[kind])


def prepare(arms: Mapping[str, StepArm], alone: Iterable[str]) -> dict[str, str]:
  """Compiles all arms, profiles them, and compiles them again with the measured times.

  XLA times matrix products while it compiles. So those of `alone`, which have all the products, are
  compiled one after the other with the GPUs to themselves; the others find these timings.

  Args:
    arms: by name.
    alone: names of arms.

  Returns:
    The arms that failed, each with XLA's message.
  """
  failed: dict[str, str] = {}
  begin = time.perf_counter()
  log = lambda text: print(f"[{time.perf_counter() - begin:6.1f} s] {text}", flush=True)

  def each(work, names: Iterable[str], threads: int = 1) -> None:
    def one(name: str) -> None:
      try:
        work(arms[name])
      except jax.errors.JaxRuntimeError as error:  # one arm must not cost the others
        failed[name] = " ".join(str(error).split())[:300]
        log(f"{name}: {failed[name]}")

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
      list(pool.map(one, [name for name in names if name not in failed]))

  def run_until_compiled_again(arm: StepArm) -> None:
    while not arm.step.settled and arm.step.waiting is None:
      arm(1)

  threads = max(1, (os.cpu_count() or 1) // 3)
  first = list(alone)
  others = [name for name in arms if name not in first]
  each(StepArm.lower, first)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    compiling = pool.submit(each, lambda arm: arm.step.finish(), first)
    each(StepArm.lower, others)
    log(f"lowered {len(arms)} steps")
    compiling.result()
  log(f"compiled by themselves: {', '.join(first)}")
  each(lambda arm: arm.step.finish(), others, threads)
  log("compiled")
  each(run_until_compiled_again, arms)
  log("profiled")
  each(lambda arm: arm.step.finish(), arms, threads)
  log("compiled with measured times")
  each(lambda arm: arm(2), arms)
  log("ready")
  return failed


def machine(link: str) -> dict[str, str]:
  """Devices, versions and link, for a results file."""
  device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
  slow = os.environ.get("NCCL_P2P_DISABLE") == "1"
  return {
    "devices": device,
    "jax": f"jax {jax.__version__}",
    "date": time.strftime("%Y-%m-%d"),
    "link": link or ("slow (NCCL_P2P_DISABLE=1)" if slow else "as NCCL finds it"),
  }


def out_file(folder: Path, name: str) -> Path:
  """FOLDER/NAME.json, the folder made.

  Raises:
    ConfigError: the name is no file's name, e.g. it has a slash.
    StorageError: the folder cannot be made.
  """
  check_run_name(name, "--name")
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise StorageError(f"--out={folder} cannot be made: {error.strerror}") from None
  return folder / f"{name}.json"
