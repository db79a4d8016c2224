"""Takes a trained top-k model, gives it another wiring, and lets it learn from the model it was.

  python experiments/upcycle/run.py --scale cpu --out runs/upcycle
  python experiments/upcycle/run.py --scale gpu --jobs 4 --limit_seconds 570 --out "$OUT"
  python experiments/upcycle/run.py --scale gpu_steps --jobs 6 --out "$OUT"
  python experiments/upcycle/run.py --scale gpu_steps --times=prefill --out "$OUT"
  python experiments/upcycle/run.py --scale cpu --table

One teacher is trained. `scmoe.convert --upcycle` makes a start of every wiring from it. If the
scale has several learning rates, one pilot of each, with a seed that is not part of the study,
decides which all students get. Then every way of learning trains every start on a tenth of the
teacher's tokens, once a seed. Each run is a process of `python -m scmoe.train`; `--jobs 4` makes
four starts or students at a time; several can share a GPU. What the limit cuts off saves, and the
same command goes on from there; runs whose result is written are not trained again. What stands
behind -- goes to the teacher's training, and by its configuration to that of all students; with
--times to the commands that time them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import math
import os
import queue
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scmoe.base.stored import write_whole
from scmoe.sweep import shared_out

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GRACE = 60.0  # seconds that a run which is cut off has for its checkpoint
PREEMPTED = 75
Environment = dict[str, str]  # variables that give a process its part of the GPUs
PILOT_SEED = 9  # of the runs that choose the rate; the study has 0, 1 and 2

WIRINGS = ("scmoe_pos2", "farskip")
# The last one adds no shared expert to the teacher's experts.
ALL = (*WIRINGS, "farskip_routed")
# Under scmoe_pos2 the experts read what they read before: nothing to fit.
FITTED = ("farskip", "farskip_routed")
# Way of learning -> options of section train; `scores` and `hidden` have the teacher.
WAYS: dict[str, dict[str, str]] = {
  "text": {},
  "scores": {"teacher_share": "0.9", "teacher_temperature": "1"},
  "hidden": {"teacher_share": "0.9", "teacher_temperature": "1", "teacher_hidden": "1"},
}


@dataclasses.dataclass(frozen=True)
class Scale:
  """The sizes of one scale.

  Attributes:
    teacher: fields of the teacher beyond `configs/upcycle_small.py`.
    student: fields of every student beyond the teacher's.
    rates: learning rates of the students; the pilot that ends lowest chooses one of several.
    fit: training sequences to which the shortcut's norm of `FITTED` is fitted; 0: a copy.
    teacher_steps, student_steps: optimizer steps of the same number of tokens each.
    eval_batches: batches of every held-out loss.
    ways: keys of `WAYS`, the ways of learning.
    wirings: of the students.
  """

  teacher: dict[str, str]
  student: dict[str, str]
  rates: tuple[str, ...]
  fit: int
  teacher_steps: int
  student_steps: int
  eval_batches: int
  ways: tuple[str, ...] = tuple(WAYS)
  wirings: tuple[str, ...] = WIRINGS


SCALES = {
  "smoke": Scale(
    {"model.num_layers": "2", "model.width": "32", "data.seq_len": "32"},
    {"optimizer.warmup_steps": "1"},
    rates=("1e-3", "2e-3"),
    fit=8,
    teacher_steps=20,
    student_steps=4,
    eval_batches=2,
  ),
  "cpu": Scale(
    {"model.width": "64", "data.seq_len": "64"},
    {"optimizer.warmup_steps": "4"},
    rates=("1e-3",),
    fit=0,
    teacher_steps=400,
    student_steps=40,
    eval_batches=10,
  ),
  # 0.17 billion active parameters; 131,072 tokens a step, 105 million for the teacher.
  "gpu": Scale(
    {
      "model.num_layers": "12",
      "model.width": "768",
      "model.num_heads": "12",
      "model.mlp_hidden": "2048",
      "model.context": "1024",
      "model.dtype": "bfloat16",
      "data.seq_len": "1024",
      "data.tokenizer": "bpe",
      "data.vocab_size": "16384",
      "train.batch_size": "32",
      "train.tokens_per_step": "131072",
      "optimizer.learning_rate": "6e-4",
      "optimizer.warmup_steps": "80",
    },
    {"optimizer.warmup_steps": "8"},
    rates=("3e-4", "6e-4", "1.2e-3"),
    fit=1000,
    teacher_steps=800,
    student_steps=80,
    eval_batches=20,
  ),
}


# A quarter of the tokens in a step, four times as many steps.
SCALES["gpu_steps"] = dataclasses.replace(
  SCALES["gpu"],
  student={"optimizer.warmup_steps": "32", "train.tokens_per_step": "32768"},
  rates=("1e-4", "2e-4", "4e-4"),
  student_steps=320,
  ways=("hidden",),
  wirings=ALL,
)


class OutOfTime(Exception):
  """The limit of the call has come; the same command goes on."""


class Study:
  """The runs of one scale and their results, which are written after every run.

  Args:
    scale: key of `SCALES`.
    folder: the runs' folders.
    out: folder of the results.
    deadline: value of `time.monotonic` at which the call ends.
    jobs: starts and students at a time, each with its part of the GPUs (`scmoe.sweep.shared_out`).
    rest: further flags of the teacher's training.
  """

  def __init__(
    self, scale: str, folder: Path, out: Path, deadline: float, jobs: int, rest: list[str]
  ):
    self.scale, self.sizes, self.folder = scale, SCALES[scale], folder
    self.deadline, self.jobs, self.rest = deadline, jobs, rest
    self.path, self.lock = out / f"{scale}.json", threading.Lock()
    empty = {"starts": {}, "pilots": {}, "runs": []}
    found = json.loads(self.path.read_text("utf-8")) if self.path.is_file() else {}
    self.result: dict[str, Any] = empty | found

  def write(self) -> None:
    """Writes the results, and the table beside them."""
    self.path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(self.path, (json.dumps(self.result, indent=1) + "\n").encode())
    write_whole(self.path.with_suffix(".txt"), (table(self.result) + "\n").encode())

  def call(self, command: list[str], environment: Environment | None = None) -> None:
    """Runs one command of scmoe; at the deadline it saves, or is killed after `GRACE`.

    Args:
      command: module and flags.
      environment: variables in addition to this process's.

    Raises:
      OutOfTime: the deadline has come.
      SystemExit: the command failed.
    """
    if time.monotonic() >= self.deadline:
      raise OutOfTime
    words = [sys.executable, "-m", *command]
    print("$", shlex.join(["python", *words[1:]]), flush=True)
    # Students that differ only in the seed have the same program: the first compiles it for all.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(self.folder / "programs")}
    env = {**cache, **os.environ, **(environment or {})}
    process = subprocess.Popen(words, cwd=ROOT, env=env)
    try:
      limit = None if math.isinf(self.deadline) else max(self.deadline - time.monotonic(), 1)
      code = process.wait(limit)
    except subprocess.TimeoutExpired:
      process.terminate()
      try:
        process.wait(GRACE)
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
      raise OutOfTime from None
    if code == PREEMPTED:
      raise OutOfTime
    if code:
      raise SystemExit(code)

  def train(
    self,
    workdir: Path,
    steps: int,
    every: int,
    begin: list[str],
    fields: dict[str, str],
    environment: Environment | None = None,
  ) -> None:
    """Trains a run to its end, or goes on with it; `every` is the steps between evaluations."""
    options = {
      "train.steps": str(steps),
      "train.eval_every": str(every),
      "train.eval_batches": str(self.sizes.eval_batches),
      "train.sample_tokens": "0",
      "train.tensorboard": "false",
      "checkpoint.every": str(max(1, steps // 4)),
      "checkpoint.keep": "1",
      **fields,
    }
    flags = [f"--config.{name}={value}" for name, value in options.items()]
    self.call(["scmoe.train", *begin, f"--workdir={workdir}", *flags], environment)

  def prepare(self) -> None:
    """Trains the teacher and makes the starts, as far as they are missing."""
    teacher = self.folder / "teacher"
    if "teacher" in self.result and not has_step(teacher):
      raise SystemExit(
        f"{self.path} has a teacher's loss, but {teacher} holds no checkpoint of it: give another "
        "--out to begin anew, or the --workdir where it lies"
      )
    if "teacher" not in self.result:
      begin = ["--config=upcycle_small", *self.rest]
      self.train(teacher, self.sizes.teacher_steps, 0, begin, self.sizes.teacher)
      card = json.loads((teacher / "card.json").read_text("utf-8"))
      entries = {name: card[name] for name in ("git", "versions", "devices")}
      self.result |= {"date": time.strftime("%Y-%m-%d"), "command": shlex.join(sys.argv), **entries}
      tokens = last(teacher, "train")["tokens"]
      self.result["teacher"] = {"loss": self.evaluated("teacher"), "tokens": tokens}
      self.result["teacher"] |= {"steps": self.sizes.teacher_steps, **card["parameters"]}
      self.write()
    self.side_by_side(
      lambda given, wiring=wiring: self.begin(wiring, given) for wiring in self.sizes.wirings
    )

  def students(self) -> None:
    """Trains the pilots and students without a result, seed by seed: a cut leaves comparisons."""
    self.side_by_side(
      lambda given, rate=rate: self.pilot(rate, given) for rate in self.missing_pilots()
    )
    self.side_by_side(
      lambda given, entry=entry: self.student(*entry, given) for entry in self.missing_students()
    )

  def is_done(self) -> bool:
    """Whether every result is there."""
    begun = "teacher" in self.result and set(self.sizes.wirings) <= set(self.result["starts"])
    return begun and not self.missing_pilots() and not self.missing_students()

  def missing_pilots(self) -> list[str]:
    """The rates whose pilot has no result; none where there is one rate."""
    rates = self.sizes.rates if len(self.sizes.rates) > 1 else ()
    return [rate for rate in rates if rate not in self.result["pilots"]]

  def missing_students(self) -> list[tuple[str, str, int]]:
    """(wiring, way, seed) of the students without a result, seed by seed."""
    done = {(r["wiring"], r["way"], r["seed"]) for r in self.result["runs"]}
    all_of_them = itertools.product(range(3), self.sizes.wirings, self.sizes.ways)
    wanted = [(wiring, way, seed) for seed, wiring, way in all_of_them]
    return [entry for entry in wanted if entry not in done]

  def side_by_side(self, tasks: Iterable[Callable[[Environment], None]]) -> None:
    """Runs all tasks, `jobs` at a time, and gives each the environment of its part of the GPUs.

    Once a task has failed, those that run go on, and no other begins.

    Raises:
      OutOfTime: the deadline came; every task that was running has saved.
      SystemExit: a task failed.
    """
    waiting = list(tasks)
    free: queue.Queue[Environment] = queue.Queue()
    for environment in shared_out(self.jobs, len(waiting)):
      free.put(environment)
    failed = threading.Event()

    def in_turn(task: Callable[[Environment], None]) -> None:
      environment = free.get()
      try:
        if not failed.is_set():
          task(environment)
      except BaseException:
        failed.set()
        raise
      finally:
        free.put(environment)

    with concurrent.futures.ThreadPoolExecutor(free.qsize()) as pool:
      futures = [pool.submit(in_turn, task) for task in waiting]
    faults = [fault for future in futures if (fault := future.exception()) is not None]
    if faults:  # a failure says more than that the time is over
      raise min(faults, key=lambda fault: isinstance(fault, OutOfTime))

  def rate(self) -> str:
    """The students' learning rate: that of the pilot which ended lowest, or the scale's one."""
    pilots = self.result["pilots"]
    return min(pilots, key=pilots.get) if pilots else self.sizes.rates[0]

  def begin(self, wiring: str, environment: Environment) -> None:
    """Makes the start of a wiring, and reads its held-out loss."""
    start = self.folder / f"start-{wiring}"
    if not has_step(start):
      shutil.rmtree(start, ignore_errors=True)  # a cut may leave a part of it
      source = f"--from={self.folder / 'teacher'}"
      fit = [f"--fit={self.sizes.fit}"] if self.sizes.fit and wiring in FITTED else []
      # One device is enough, and all that --fit takes; the teacher may have had more.
      upcycle = [f"--upcycle=wiring={wiring}", "--mesh=data=1", *fit]
      self.call(["scmoe.convert", source, f"--workdir={start}", *upcycle], environment)
    if wiring not in self.result["starts"]:
      loss = self.evaluated(f"start-{wiring}", environment)
      with self.lock:
        self.result["starts"][wiring] = loss
        self.write()

  def evaluated(self, name: str, environment: Environment | None = None) -> float:
    """The held-out loss of a run, on the batches on which students are evaluated."""
    figures, batches = self.folder / f"{name}.json", f"--max_batches={self.sizes.eval_batches}"
    workdir = f"--workdir={self.folder / name}"
    self.call(["scmoe.evaluate", workdir, batches, f"--json={figures}"], environment)
    return json.loads(figures.read_text("utf-8"))["loss"]

  def pilot(self, rate: str, environment: Environment) -> None:
    """Trains the pilot of a learning rate, and writes its last held-out loss."""
    losses, _ = self.learn(f"pilot-{rate}", "scmoe_pos2", "hidden", PILOT_SEED, rate, environment)
    with self.lock:
      self.result["pilots"][rate] = losses[-1][1]
      self.write()

  def student(self, wiring: str, way: str, seed: int, environment: Environment) -> None:
    """Trains one student from the start of its wiring, and writes its recovery curve."""
    name, rate = f"{wiring}-{way}-{seed}", self.rate()
    losses, tokens = self.learn(name, wiring, way, seed, rate, environment)
    found = {"wiring": wiring, "way": way, "seed": seed, "rate": rate}
    with self.lock:
      self.result["runs"].append(found | {"losses": losses, "tokens": tokens})
      self.write()

  def learn(
    self, name: str, wiring: str, way: str, seed: int, rate: str, environment: Environment
  ) -> tuple[list[list[float]], int]:
    """Trains a run from the start of a wiring.

    Returns:
      its held-out losses as [step, loss], and the number of tokens that it has read.
    """
    workdir, start = self.folder / name, self.folder / f"start-{wiring}"
    if not has_step(workdir):
      partial = self.folder / f".{name}.partial"
      for left in (workdir, partial):  # a cut may leave a part of either
        shutil.rmtree(left, ignore_errors=True)
      shutil.copytree(start, partial)
      partial.rename(workdir)
    fields = {f"train.{option}": value for option, value in WAYS[way].items()}
    if fields:
      fields["train.teacher"] = str(self.folder / "teacher")
    fields |= self.sizes.student | {"train.seed": str(seed), "optimizer.learning_rate": rate}
    steps = self.sizes.student_steps
    fields["checkpoint.every"] = str(steps)  # a run is short, and a cut saves
    # As many data ranks as this task has devices, not as the teacher had. The teacher's other axes
    # stay: one that divided its experts needs as many devices for each student.
    fields["mesh.data"] = "-1"
    begin = [f"--config_json={start / 'config.json'}"]
    self.train(workdir, steps, max(1, steps // 4), begin, fields, environment)
    losses = [[line["step"], line["loss"]] for line in records(workdir, "eval")]
    shutil.rmtree(workdir / "checkpoints")  # eighteen states of the larger model fill a disk
    return losses, last(workdir, "train")["tokens"]

  def times(self, what: str) -> None:
    """Times teacher and students on the devices here, also as JSON.

    Args:
      what: "step" for a training step, "prefill" for prefill and decode, or "all".
    """
    wirings = f"--compare={','.join(('topk', *ALL))}"
    path = self.folder / "start-scmoe_pos2" / "config.json"
    if not path.is_file():
      raise SystemExit(f"{path} is missing: the study makes it (--starts trains no students)")
    context = json.loads(path.read_text("utf-8"))["model"]["context"]
    given = [f"--config_json={path}", "--config.mesh.data=1", "--config.mesh.expert=2", wirings]
    given += self.rest
    out = self.path.parent
    out.mkdir(parents=True, exist_ok=True)
    link = "-slow" if os.environ.get("NCCL_P2P_DISABLE") == "1" else ""
    # The trace says how much is hidden; by the clock would be a second program for each wiring.
    own = [
      f"--workdir={self.folder / 'profile'}",
      "--clock=false",
      f"--json={out / f'{self.scale}-step{link}.json'}",
    ]
    if what != "prefill":
      self.call(["scmoe.profile", *given, *own])
    sizes = ["--batch=8", f"--prompt_tokens={context // 2}", "--max_new_tokens=8", "--rounds=9"]
    json_file = f"--json={out / f'{self.scale}-prefill{link}.json'}"
    if what != "step":
      self.call(["scmoe.generate", "--benchmark", *given, *sizes, json_file])


def has_step(workdir: Path) -> bool:
  """Whether a folder holds a whole checkpoint; one that is being written has a longer name."""
  return any(path.name.isdigit() for path in (workdir / "checkpoints").glob("*"))


def records(workdir: Path, kind: str) -> list[dict[str, Any]]:
  """Lines of a run's metrics.jsonl of one kind; the last one counts where a step is there twice."""
  lines = (workdir / "metrics.jsonl").read_text("utf-8").splitlines()
  found = [json.loads(line) for line in lines]
  return list({line["step"]: line for line in found if line["kind"] == kind}.values())


def last(workdir: Path, kind: str) -> dict[str, Any]:
  """The last such line."""
  return records(workdir, kind)[-1]


def table(result: dict[str, Any]) -> str:
  """Held-out losses: of the teacher, of every start, and along the way of each way of learning."""
  teacher = result.get("teacher")
  if not teacher:
    return "no teacher yet"
  goal = teacher["loss"]
  lines = [
    f"{result['date']}: teacher {goal:.4f} after {teacher['tokens']:,} tokens, "
    f"{teacher['active']:,} of {teacher['total']:,} parameters active",
    "held-out loss after steps; mean and standard deviation over seeds; distance from the teacher",
  ]
  if pilots := result.get("pilots"):
    ended = ", ".join(f"{rate}: {loss:.4f}" for rate, loss in pilots.items())
    lines.append(f"pilots of the rate, {ended}; the lowest chose the students'")
  for wiring in (wiring for wiring in ALL if wiring in result["starts"]):
    start = result["starts"][wiring]
    lines.append(f"{wiring}: start {start:.4f} ({start / goal - 1:+.2%})")
    for way in WAYS:
      runs = [r for r in result["runs"] if (r["wiring"], r["way"]) == (wiring, way)]
      if not runs:
        continue
      curves = [[loss for _, loss in run["losses"]] for run in runs]
      steps = [step for step, _ in runs[0]["losses"]]
      means = [statistics.fmean(losses) for losses in zip(*curves)]
      spread = statistics.stdev(c[-1] for c in curves) if len(curves) > 1 else math.nan
      curve = "  ".join(f"{step}: {mean:.3f}" for step, mean in zip(steps, means))
      share = runs[0]["tokens"] / teacher["tokens"]
      lines.append(
        f"  {way:7} {means[-1]:.4f} ± {spread:.4f} ({means[-1] / goal - 1:+.2%}), {len(runs)} "
        f"seeds, {share:.1%} of the tokens | {curve}"
      )
  return "\n".join(lines)


def main() -> None:
  """Trains what is missing, and prints the table."""
  flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  flags.add_argument("--scale", choices=SCALES, required=True)
  flags.add_argument("--limit_seconds", type=float, default=0.0, help="time of the call; 0: none")
  flags.add_argument(
    "--jobs", type=int, default=1, help="starts and students at a time, also several on a GPU"
  )
  flags.add_argument("--workdir", type=Path, help="of the runs; default: runs/upcycle/SCALE")
  flags.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
  flags.add_argument("--table", action="store_true", help="print the table, train nothing")
  flags.add_argument("--starts", action="store_true", help="teacher and starts, no students")
  flags.add_argument(
    "--times",
    nargs="?",
    const="all",
    choices=("step", "prefill", "all"),
    help="time the wirings on two devices instead: a training step, prefill, or (default) both",
  )
  flags.add_argument("rest", nargs="*", help="further flags of the training or of --times")
  given = flags.parse_args()
  folder = (given.workdir or ROOT / "runs" / "upcycle" / given.scale).resolve()
  deadline = math.inf
  if given.limit_seconds:
    deadline = time.monotonic() + max(given.limit_seconds - GRACE, 1)
  study = Study(given.scale, folder, given.out.resolve(), deadline, given.jobs, given.rest)
  try:
    if given.times:
      study.times(given.times)
    elif not given.table and not study.is_done():
      study.prepare()
      if not given.starts:
        study.students()
  except OutOfTime:
    print("the time is over; the same command goes on", file=sys.stderr)
  print(table(study.result))


if __name__ == "__main__":
  main()
