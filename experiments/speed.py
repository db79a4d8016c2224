"""Arms of a speed comparison on the real model code: build, compile, take turns, trace.

An arm is one word for the wiring and more words, after dots, for how it runs: `pos2`, `top.ch2`,
`pos2.after mlp 0.compute`.

  wiring      dense · top (top-k) · shared · pos1 · pos2 · pos3; shared and pos* route one expert
              less than top and have a shared expert, so that active FLOPs are equal
  after STEP  the experts after this step of the main path (a slot of `overlap.schedule`), tied with
              barriers, forward and (mirrored) backward; otherwise XLA orders
  back STEP   another slot for the backward pass; `back free` leaves that to XLA
  seq         control: nothing beside the MoE's stages
  compute     control: the all-to-all is left out (`dispatch.ablation.silent`)
  comm        control: only the program's all-to-alls, one after the other
  scan        one stage per scan step instead of all stages unrolled
  nopgle      without profile-guided latencies; nolhs also without the latency-hiding scheduler
  cb          with command buffers (XLA's default; off in all other arms)
  ch<N>       the MoE stream in N chunks
  kernels     experts on the Pallas kernels, also where exchanges take multiprocessors; GPUs only
  batched     experts by XLA's batched products, also where the kernels would be chosen
  bf16        training: gradients travel in bfloat16 instead of float32
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.sharding import PartitionSpec as P

from scmoe.base.batch import Batch
from scmoe.blocks.options import OverlapConfig
from scmoe.data.config import DataConfig
from scmoe.models.config import ModelConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.parallel.collectives import request_copy_engines
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, batch_sharding, manual
from scmoe.profiling.clock import Paid, percent
from scmoe.profiling.overlap import measure_overlap
from scmoe.profiling.program import Program, profiled, traced
from scmoe.profiling.timer import Timing, interleave
from scmoe.run.build import build
from scmoe.run.config import RunConfig
from scmoe.run.controls import exchanges_in, exchanges_program
from scmoe.run.fields import with_field
from scmoe.training.measured import before_training, spread
from scmoe.training.options import TrainConfig
from scmoe.training.step import init_state, make_train_step

WIRINGS = {
  "dense": "dense",
  "top": "topk",
  "shared": "shared_expert",
  "pos1": "scmoe_pos1",
  "pos2": "scmoe_pos2",
  "pos3": "scmoe_pos3",
}
WORDS = {
  "seq": {"overlap.schedule": "off"},
  "compute": {"dispatch.ablation.silent": "true"},
  "comm": {"overlap.ablation.profile_guided": "false"},
  "scan": {"overlap.unroll": "1"},
  "nopgle": {"overlap.ablation.profile_guided": "false"},
  "nolhs": {"overlap.ablation.profile_guided": "false", "overlap.ablation.latency_hiding": "false"},
  "cb": {"overlap.command_buffers": "on"},
  "kernels": {"model.ffn.backend": "mosaic_gpu", "model.ffn.impl": "grouped"},
  "batched": {"model.ffn.impl": "batched"},
  "bf16": {"overlap.gradient_dtype": "bfloat16"},
}

# The paper's GPT3-MoE-XL: one expert is as wide as the dense MLP. A small vocabulary: the head is
# not what is compared.
_XL = ModelConfig(
  style="gpt2",
  num_layers=8,
  num_experts=8,
  top_k=2,
  width=2048,
  num_heads=16,
  mlp_hidden=8192,
  expert_hidden=8192,
  vocab_size=1024,
  context=2048,
)
SHAPES = {
  "gpt3_xl": _XL,
  # Half as wide experts and MLP: the same rows travel for half of the dense time.
  "narrow": dataclasses.replace(_XL, mlp_hidden=4096, expert_hidden=4096, num_experts=16),
  # Fine-grained: 8 of 64 experts of an eighth of the MLP's width.
  "fine": dataclasses.replace(_XL, expert_hidden=1024, num_experts=64, top_k=8),
  "tiny": dataclasses.replace(
    _XL, num_layers=4, width=64, num_heads=4, mlp_hidden=128, expert_hidden=128, context=32
  ),
}

# How GPUs reach each other in a comparison.
LINKS = {
  "nvlink": "NVLink",
  "copy_engines": "NVLink, all-to-all by copy engines",
  "slow": "slow (NCCL_P2P_DISABLE=1)",
}
TRACED = {"forward": 2, "train": 1}  # calls in a trace


@dataclasses.dataclass(frozen=True)
class Job:
  """One comparison.

  Attributes:
    link, shape: of `LINKS` and `SHAPES`.
    direction: "forward" or "train".
    arms: the first is the baseline.
    accumulation: microbatches of a training step.
    batch: sequences per device and microbatch.
  """

  link: str
  shape: str
  direction: str
  arms: tuple[str, ...]
  accumulation: int = 1
  batch: int = 4

  def run(self) -> RunConfig:
    """The configuration that all arms share, before it is resolved."""
    model, devices = SHAPES[self.shape], jax.device_count()
    sequences = self.batch * devices
    tokens = self.accumulation * sequences * model.context
    return RunConfig(
      model=model,
      dispatch=DispatchConfig(capacity_factor=1.0),
      overlap=OverlapConfig(unroll=0, copy_engines=self.link == "copy_engines"),
      mesh=MeshConfig(data=1, expert=devices),
      data=DataConfig(seq_len=model.context, document_mask=False),
      train=TrainConfig(batch_size=sequences, tokens_per_step=tokens),
    )


def arm_run(name: str, base: RunConfig) -> RunConfig:
  """The resolved run of an arm.

  Raises:
    KeyError: an unknown word.
  """
  wiring, *words = name.split(".")
  routed = base.model.top_k - (wiring not in ("dense", "top"))  # a shared expert replaces one
  fields = {"model.wiring": WIRINGS[wiring], "model.top_k": str(routed)}
  for word in words:
    if word.startswith("after "):
      fields |= {"overlap.schedule": word.removeprefix("after "), "overlap.order": "barriers"}
    elif word.startswith("back "):
      fields["overlap.ablation.backward"] = word.removeprefix("back ")
    elif re.fullmatch(r"ch\d+", word):
      fields["dispatch.chunks"] = word.removeprefix("ch")
    elif word != "kernels" or on_gpu():
      fields |= WORDS[word]
  run = functools.reduce(lambda run, field: with_field(run, *field), fields.items(), base)
  return run.resolve(num_devices=jax.device_count(), vocab_size=base.model.vocab_size)


def on_gpu() -> bool:
  """Whether there are GPUs; otherwise nothing is profiled, and traces are empty."""
  return jax.default_backend() == "gpu"


class Arm:
  """One arm: its program, and calls of it in turns.

  Args:
    name: see the module's words.
    job: what it belongs to.
    held: parameters, or the training state, of each wiring, which its arms have in common.
  """

  def __init__(self, name: str, job: Job, held: dict[str, Any]):
    self.run = arm_run(name, job.run())
    self.built, self.held = build(self.run), held
    self.guided = on_gpu() and self.run.overlap.ablation.profile_guided
    self.profile = b""
    traced, self.call = {"forward": self._forward, "train": self._train}[job.direction]()
    if has_word(name, "comm"):
      run, buffers = exchanges_program(exchanges_in(traced.jaxpr), self.built.mesh)
      traced, self.call = run.trace(*buffers), lambda: self.program(*buffers)
    self.program = Program(traced.lower())

  def __call__(self, calls: int) -> None:
    out = None
    for _ in range(calls):
      out = self.call()
    jax.block_until_ready(out)

  def compile(self) -> None:
    """With the profile, where there is one; else, where one is wanted, for collecting it."""
    profiling = self.guided and not self.profile
    options = self.run.overlap.compiler_options(gpu=on_gpu(), profiling=profiling)
    self.program.compile(options, self.profile)

  def collect_profile(self) -> None:
    self.profile = profiled(lambda: self(3), self.program)

  def compile_json(self) -> dict:
    return {"compile_s": [round(s, 1) for s in self.program.compile_seconds]}

  def trace_json(self, calls: int, folder: Path | None) -> dict:
    """Communication of one call and how much is hidden; nothing without a GPU.

    Args:
      calls: traced ones.
      folder: keeps the trace, and the compiled program.
    """
    overlap = measure_overlap(traced(lambda: self(calls), folder and str(folder)), calls)
    if folder:
      (folder / "program.txt").write_text(self.program.text)
    return {"trace": overlap.as_json()} if overlap else {}

  def _forward(self):
    """The forward pass of the whole batch, parameters in the types in which products read them."""
    built, wiring = self.built, self.run.model.wiring
    if wiring not in self.held:
      init = lambda key: built.objective.cast(spread(built.init)(key)[0])
      self.held[wiring] = jax.jit(init, out_shardings=built.shardings[0])(jax.random.key(0))
    hidden = lambda params, tokens: built.model(params)(tokens).h_BSD
    rows = P(BATCH_AXES)
    run = jax.jit(manual(hidden, built.mesh, (built.specs, rows), rows))
    tokens = jax.device_put(self._tokens()[0], batch_sharding(built.mesh))
    given = self.held[wiring], tokens
    return run.trace(*given), lambda: self.program(*given)

  def _train(self):
    """The training step, without a learning rate; it donates the state, which so passes from arm to
    arm."""
    built, wiring = self.built, self.run.model.wiring
    abstract = built.abstract_state()
    if wiring not in self.held:
      self.held[wiring] = init_state(spread(built.init), built.optimizer, 0, abstract)
    dtype = self.run.overlap.gradient_dtype
    step = make_train_step(built.objective, built.optimizer, abstract, gradient_dtype=dtype)
    batch = jax.device_put(Batch.of_tokens(self._tokens()), batch_sharding(built.mesh, leading=1))

    def call():
      self.held[wiring], scalars, _ = self.program(before_training(self.held[wiring]), batch)
      return scalars

    return step.trace(abstract, batch), call

  def _tokens(self) -> jax.Array:
    """Uniformly drawn tokens of the step's microbatches: [A, B, S]."""
    model, train = self.run.model, self.run.train
    shape = (train.microbatches(model.context), train.batch_size, model.context)
    return jax.random.randint(jax.random.key(7), shape, 0, model.vocab_size)


def measure(label: str, job: Job, args: argparse.Namespace) -> dict:
  """Runs all arms of one comparison in turns; returns the results as JSON."""
  begin = time.perf_counter()
  elapsed = lambda: time.perf_counter() - begin
  log = lambda text: print(f"[{elapsed():6.1f} s] {text}", flush=True)
  arms: dict[str, Arm] = {}
  failed: dict[str, str] = {}
  held: dict[str, Any] = {}

  def attempt(work: Callable[[str], object], names: Iterable[str], threads: int = 1) -> None:
    def one(name: str) -> None:
      try:
        work(name)
      except Exception as error:  # one arm must not cost the others
        failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
        arms.pop(name, None)
        log(f"{name}: {failed[name]}")

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
      list(pool.map(one, list(names)))

  attempt(lambda name: arms.update({name: Arm(name, job, held)}), job.arms)
  log(f"lowered {len(arms)} arms")
  # XLA times products to choose their kernels, and keeps the choice: the first arm of each wiring
  # has the GPU to itself for that.
  alone = list({arm.run.model.wiring: name for name, arm in reversed(arms.items())}.values())
  attempt(lambda name: arms[name].compile(), alone)
  log(f"compiled {', '.join(alone)} one by one")
  attempt(lambda name: arms[name].compile(), [n for n in arms if n not in alone], threads=16)
  attempt(lambda name: arms[name](1), arms)
  log("compiled, first calls")
  guided = [name for name, arm in arms.items() if arm.guided]
  attempt(lambda name: arms[name].collect_profile(), guided)
  attempt(lambda name: arms[name].compile(), [n for n in arms if n in guided], threads=16)
  attempt(lambda name: arms[name](2), arms)
  log("compiled with profiles")
  if not arms:
    sys.exit(f"{label}: no arm runs")
  calls = args.calls or {"forward": 8, "train": 2}[job.direction]
  timings = interleave(arms, rounds=args.rounds, calls=calls, deadline=begin + args.seconds)
  log("timed")
  results = {name: timings[name].as_json() | arm.compile_json() for name, arm in arms.items()}
  for name, arm in arms.items():
    if elapsed() < args.seconds + 30:
      folder = args.keep / label / re.sub(r"[^\w.-]+", "_", name) if args.keep else None
      results[name] |= arm.trace_json(TRACED[job.direction], folder)
  log("traced")
  result = {
    "label": label,
    "date": time.strftime("%Y-%m-%d"),
    "command": " ".join(["python", *sys.argv]).split(" --child")[0],
    "machine": machine() | {"link": LINKS[job.link]},
    "direction": job.direction,
    "model": dataclasses.asdict(SHAPES[job.shape]),
    "batch": job.batch,
    "accumulation": job.accumulation,
    "arms": results,
    "failed": failed,
  }
  print(f"{table(result)}\n{ceiling(result)}", flush=True)
  return result


# -- the report -----------------------------------------------------------------------------------


def has_word(name: str, *words: str) -> bool:
  return bool(set(words) & set(name.split(".")))


def exposed(result: dict) -> float:
  """Communication of one arm beside which nothing computed, ms."""
  trace = result.get("trace")
  return trace["communication"] - trace["hidden"] if trace else 0.0


def table(result: dict) -> str:
  """A line per arm: time, speed-up over the first arm, communication, and how much of it is hidden
  in the trace, and paid by the clock."""
  arms = result["arms"]
  base = next(iter(arms.values()))
  width = max(24, *map(len, arms))
  line = f"{{:{width}s}}{{:>10s}}{{:>8s}}{{:>7s}}{{:>9s}}{{:>9s}}{{:>8s}}{{:>9s}}{{:>18s}}".format
  lines = [line("arm", "ms", "spread", "x", "comm", "compute", "hidden", "exposed", "paid")]
  for name, r in arms.items():
    trace = ("", "", "", "")
    if t := r.get("trace"):
      share = f"{100 * t['share_hidden']:.1f} %" if t["communication"] else "–"
      trace = (f"{t['communication']:.2f}", f"{t['computation']:.2f}", share, f"{exposed(r):.2f}")
    ratio = "" if has_word(name, "comm") else f"{base['ms'] / r['ms']:.2f}"
    cost = paid(result, name)
    told = percent(cost.share, cost.interval) if cost else ""
    lines.append(line(name, f"{r['ms']:.3f}", f"{100 * r['spread']:.1f} %", ratio, *trace, told))
  return "\n".join(lines)


def paid(result: dict, name: str) -> Paid | None:
  """The cost of an arm's exchanges by the clock; None if the arms of its wiring lack the controls.

  The controls are the arm's own without exchanges if there is one, else another of its wiring, and
  the exchanges of the wiring alone.
  """
  arms, (wiring, *_) = result["arms"], name.split(".")
  same = [other for other in arms if other.split(".")[0] == wiring]
  quiet = [other for other in same if has_word(other, "compute")]
  alone = [other for other in same if has_word(other, "comm")]
  if has_word(name, "compute", "comm") or not quiet or not alone:
    return None
  own = f"{name}.compute"
  chosen = name, own if own in quiet else quiet[0], alone[0]
  seconds = (tuple(1e-3 * ms for ms in arms[other]["rounds_ms"]) for other in chosen)
  return Paid(*(Timing(times, 1) for times in seconds))


def ceiling(result: dict) -> str:
  """Speed-up if everything were hidden and nothing stretched, and the share that was reached."""
  arms = result["arms"]
  base = next(iter(arms.values()))["ms"]
  lines = []
  for name in [name for name in arms if has_word(name, "compute")]:
    same = [other for other in arms if other.split(".")[0] == name.split(".")[0]]
    reached = [other for other in same if not has_word(other, "compute", "seq", "comm")]
    if not reached:
      continue
    best = min(reached, key=lambda other: arms[other]["ms"])
    lines.append(
      f"{name}: ceiling {base / arms[name]['ms']:.2f}x, reached {base / arms[best]['ms']:.2f}x "
      f"({best}), {100 * arms[name]['ms'] / arms[best]['ms']:.1f} % of it"
    )
  return "\n".join(lines)


def plot(results: list[dict], path: Path) -> None:
  """Bars of all arms, the exposed communication marked."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(4.6 * len(results), 4.2), layout="constrained")
  FigureCanvasAgg(figure)
  for axes, result in zip(figure.subplots(1, len(results), squeeze=False)[0], results):
    arms = {n: r for n, r in result["arms"].items() if not has_word(n, "comm")}
    bare = [exposed(r) for r in arms.values()]
    rest = [r["ms"] - e for r, e in zip(arms.values(), bare)]
    label = "computation, hidden communication, gaps"
    axes.bar(list(arms), rest, color="#4c78a8", label=label)
    label = "exposed communication (trace)"
    axes.bar(list(arms), bare, bottom=rest, color="#e45756", label=label)
    axes.tick_params(axis="x", labelrotation=70, labelsize=8)
    axes.set_ylabel("ms")
    where = result["machine"]
    title = f"{result['label']}, {where['link']}\n{where['devices']}, {result['date']}"
    axes.set_title(title, fontsize=8)
  figure.axes[0].legend(fontsize=7)
  figure.savefig(path, dpi=140)


def machine() -> dict:
  """Hardware and versions, for a results file."""
  return {
    "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    "jax": jax.__version__,
    "jaxlib": jaxlib.__version__,
    "python": platform.python_version(),
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


def write(results: list[dict], out: Path) -> None:
  """results.json, table.txt and plot.png."""
  (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
  texts = []
  for r in results:
    head = f"{r['label']}, {r['direction']}, accumulation {r['accumulation']}"
    where = f"{r['machine']['link']}, {r['machine']['devices']}, {r['date']}"
    texts.append(f"{head}\n{where}\n{table(r)}\n{ceiling(r)}\n")
  (out / "table.txt").write_text("\n".join(texts))
  plot(results, out / "plot.png")


# -- the command ----------------------------------------------------------------------------------


def main(jobs: dict[str, Job], out: Path, about: str) -> None:
  """The command of an experiment; see its own docstring.

  Args:
    jobs: comparisons by name.
    out: where results are written by default.
    about: help text.
  """
  parser = argparse.ArgumentParser(
    description=about, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--links", default=",".join(LINKS), help="links to measure on")
  parser.add_argument("--jobs", default=",".join(jobs), help="comparisons to run")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--calls", type=int, default=0, help="per round; 0: 8 forward, 2 training")
  parser.add_argument("--seconds", type=float, default=120, help="about, for one comparison")
  parser.add_argument("--tiny", action="store_true", help="toy sizes, 1 round; links are not set")
  parser.add_argument("--out", type=Path, default=out)
  parser.add_argument("--keep", type=Path, help="folder for every arm's trace and program")
  parser.add_argument("--child", default="", help=argparse.SUPPRESS)
  args = parser.parse_args()
  chosen = {name: jobs[name] for name in args.jobs.split(",")}
  if args.tiny:
    args.rounds = args.calls = 1
    small = {"shape": "tiny", "batch": 2}
    for name, job in chosen.items():
      chosen[name] = dataclasses.replace(job, **small, accumulation=min(job.accumulation, 2))
  args.out.mkdir(parents=True, exist_ok=True)
  if args.child:  # the process of one link
    results = [measure(n, job, args) for n, job in chosen.items() if job.link == args.child]
    (args.out / f"{args.child}.json").write_text(json.dumps(results))
    return
  results = []
  for link in args.links.split(","):
    if not any(job.link == link for job in chosen.values()):
      continue
    environment = dict(os.environ) if args.tiny else link_environment(link)
    command = [sys.executable, *sys.argv, "--child", link]
    subprocess.run(command, env=environment, check=True)
    part = args.out / f"{link}.json"
    results += json.loads(part.read_text())
    part.unlink()
  write(results, args.out)
  failed = [f"{r['label']}: {name}" for r in results for name in r["failed"]]
  if failed:
    sys.exit(f"not measured: {', '.join(failed)}")


def link_environment(link: str) -> dict[str, str]:
  """Environment variables of the process that measures this link."""
  environment = dict(os.environ)
  if link == "slow":
    environment["NCCL_P2P_DISABLE"] = "1"
  if link == "copy_engines":
    request_copy_engines(environment)
  return environment
