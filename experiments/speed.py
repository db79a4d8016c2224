"""Arms of a speed comparison on the real model code: build, compile, take turns, trace.

An arm is one word for the wiring and dotted words for how it runs, e.g. `pos2.s1`, `top.seq`:

  wiring   dense · top (top-k) · shared · pos1 · pos2 · pos3; shared and pos* route one expert less
           than top and have a shared expert, so that active FLOPs are equal
  s<N>     expert stage in slot N, s<N>h in slot N.5, tied with barriers, forward and (mirrored)
           backward; a forward pass then has kernels in its first layers, where without barriers it
           has XLA's products
  b<N>     another slot for the backward pass; bfree leaves the backward pass to XLA
  free     no barriers: XLA orders (the default)
  seq      control: no dense operation beside the MoE's stages
  compute  control: the all-to-all is replaced by the identity
  scan     one stage per scan step instead of all stages unrolled
  nopgle   without profile-guided latencies; nolhs also without the latency-hiding scheduler
  cb       with command buffers (XLA's default; off in all other arms)
  ch<N>    the MoE stream in N chunks
  kernels  experts on the Pallas kernels (without barriers they are XLA's)
  once     training: gradients are added up on each device and reduced once per step, in float32;
           once16 in bfloat16; otherwise in every microbatch, where XLA places it
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import gzip
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.profiler import get_profiled_instructions_proto
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.blocks.schedule import OverlapConfig
from scmoe.models.gpt import GPT, ModelConfig
from scmoe.models.objective import LanguageModelObjective
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.dispatch.capacity import capacity
from scmoe.moe.route import RouterConfig
from scmoe.parallel.collectives import request_copy_engines
from scmoe.parallel.mesh import MeshConfig, batch_sharding, make_mesh, partition_spec
from scmoe.profiling.overlap import measure_overlap
from scmoe.profiling.timer import interleave
from scmoe.profiling.trace import find_trace, read_events
from scmoe.training.optimizer import make_optimizer
from scmoe.training.options import OptimizerConfig
from scmoe.training.step import abstract_state, init_state, make_train_step, shardings_of

WIRINGS = {
  "dense": "dense",
  "top": "topk",
  "shared": "shared_expert",
  "pos1": "scmoe_pos1",
  "pos2": "scmoe_pos2",
  "pos3": "scmoe_pos3",
}


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of a comparison.

  Attributes:
    width, mlp, expert, shared: D, and the hidden widths of dense MLP, routed and shared expert.
    experts, top_k: E, and experts per token of the top-k arm.
    heads, seq, batch: attention heads, sequence length, sequences per device and microbatch.
    pairs: block pairs.
    capacity_factor: rows of an expert's buffer over its balanced share.
  """

  width: int
  mlp: int
  expert: int
  shared: int
  experts: int
  top_k: int
  heads: int = 16
  seq: int = 2048
  batch: int = 4
  pairs: int = 4
  capacity_factor: float = 1.0
  dtype: str = "bfloat16"


# How GPUs reach each other in a comparison.
LINKS = {
  "nvlink": "NVLink",
  "copy_engines": "NVLink, all-to-all by copy engines",
  "slow": "slow (NCCL_P2P_DISABLE=1)",
}
LINK = "SCMOE_LINK"  # tells a child process which link it measures

SHAPES = {
  # The paper's GPT3-MoE-XL: one expert is as wide as the dense MLP.
  "gpt3_xl": Shape(2048, 8192, 8192, 8192, experts=8, top_k=2),
  # Half as wide experts and MLP: the same rows travel for half of the dense time.
  "narrow": Shape(2048, 4096, 4096, 4096, experts=16, top_k=2),
  # Fine-grained: 8 of 64 experts of an eighth of the MLP's width.
  "fine": Shape(2048, 8192, 1024, 1024, experts=64, top_k=8),
  "tiny": Shape(64, 128, 128, 128, experts=8, top_k=2, heads=4, seq=32, batch=2, pairs=2),
}


@dataclasses.dataclass(frozen=True)
class Arm:
  """One arm: a wiring and how it runs; see the module's words."""

  name: str
  wiring: str
  overlap: OverlapConfig
  chunks: int = 1
  identity: bool = False
  latency_hiding: bool = True
  profile_guided: bool = True
  command_buffers: bool = False
  kernels: bool = False
  gradient_dtype: str = ""


def parse_arm(name: str) -> Arm:
  """The arm that a dotted word names."""
  wiring, *words = name.split(".")
  overlap, arm = OverlapConfig(unroll=0), {}
  for word in words:
    if slot := re.fullmatch(r"([sb])(\d+)(h?)", word):
      place = int(slot[2]) + len(slot[3]) / 2
      change = {"s": {"slot": place, "barriers": True}, "b": {"backward_slot": place}}
      overlap = dataclasses.replace(overlap, **change[slot[1]])
    elif re.fullmatch(r"ch\d+", word):
      arm["chunks"] = int(word[2:])
    else:
      overlap_change, arm_change = {
        "free": ({}, {}),
        "bfree": ({"backward_slot": -2}, {}),
        "seq": ({"sequential": True}, {}),
        "scan": ({"unroll": 1}, {}),
        "compute": ({}, {"identity": True}),
        "nopgle": ({}, {"profile_guided": False}),
        "nolhs": ({}, {"profile_guided": False, "latency_hiding": False}),
        "cb": ({}, {"command_buffers": True}),
        "kernels": ({}, {"kernels": True}),
        "once": ({}, {"gradient_dtype": "float32"}),
        "once16": ({}, {"gradient_dtype": "bfloat16"}),
      }[word]
      overlap = dataclasses.replace(overlap, **overlap_change)
      arm |= arm_change
  return Arm(name, WIRINGS[wiring], overlap, **arm)


def model_config(shape: Shape, wiring: str, expert_backend: str = "auto") -> ModelConfig:
  """The model of an arm, with FLOPs equal to the top-k arm's."""
  return ModelConfig(
    style="gpt2",
    wiring=wiring,
    num_experts=shape.experts,
    top_k=shape.top_k if wiring == "topk" else shape.top_k - 1,
    num_layers=2 * shape.pairs,
    width=shape.width,
    num_heads=shape.heads,
    mlp_hidden=shape.mlp,
    expert_hidden=shape.expert,
    shared_hidden=shape.mlp if wiring == "dense" else shape.shared,
    vocab_size=1024,  # small: the head is not what is compared
    context=shape.seq,
    dtype=shape.dtype,
    expert_backend=expert_backend,
  ).resolve()


class Bench:
  """All arms of one shape on one mesh."""

  def __init__(self, shape: Shape, accumulation: int = 4):
    self.shape, self.accumulation = shape, accumulation
    devices = len(jax.devices())
    self.mesh = make_mesh(MeshConfig(expert=devices))
    self.devices = devices
    self.gpu = jax.default_backend() == "gpu"
    self.states, self.weights = {}, {}

  # -- models ---------------------------------------------------------------------------------

  def make(self, arm: Arm, key) -> GPT:
    options = {"capacity_factor": self.shape.capacity_factor}
    if arm.chunks > 1:
      options["chunks"] = arm.chunks
    backend = "mosaic_gpu" if arm.kernels and self.gpu else "auto"
    return GPT(
      model_config(self.shape, arm.wiring, backend),
      transport=DispatchConfig(**options),
      overlap=arm.overlap,
      mesh=self.mesh,
      rngs=nnx.Rngs(params=key),
    )

  def graph(self, arm: Arm):
    """(graph definition, shardings of the parameters as a plain dict)."""
    model = nnx.eval_shape(lambda: self.make(arm, jax.random.key(0)))
    graph, state = nnx.split(model)

    def place(variable):
      axes = variable.get_metadata().get("axes") or ()
      return NamedSharding(self.mesh, partition_spec(axes, variable.get_value().ndim))

    is_variable = lambda v: isinstance(v, nnx.Variable)
    shardings = jax.tree.map(
      place, nnx.to_pure_dict(state, extract_fn=lambda v: v), is_leaf=is_variable
    )
    return graph, shardings

  def params(self, arm: Arm):
    """Parameters in the compute dtype, as inference holds them."""
    if arm.wiring not in self.weights:
      _, shardings = self.graph(arm)

      def init():
        params = nnx.to_pure_dict(nnx.split(self.make(arm, jax.random.key(0)))[1])
        return jax.tree.map(lambda p: p.astype(self.shape.dtype), params)

      self.weights[arm.wiring] = jax.jit(init, out_shardings=shardings)()
    return self.weights[arm.wiring]

  def tokens(self, leading: tuple[int, ...] = ()):
    size = (*leading, self.devices * self.shape.batch, self.shape.seq)
    return jax.random.randint(jax.random.key(7), size, 0, 1024)

  # -- programs -------------------------------------------------------------------------------

  def forward(self, arm: Arm):
    """Lowered forward pass and its arguments."""
    graph, shardings = self.graph(arm)
    place = batch_sharding(self.mesh)

    def run(params, tokens):
      return nnx.merge(graph, params)(tokens).h_BSD

    args = (self.params(arm), jax.device_put(self.tokens(), place))
    jitted = jax.jit(run, in_shardings=(shardings, place), out_shardings=place)
    with _exchange(arm.identity):
      return jitted.lower(*args), args

  def train(self, arm: Arm):
    """Lowered training step, and its batch; the state is kept per wiring, since it is donated."""
    graph, shardings = self.graph(arm)
    objective = LanguageModelObjective(graph, RouterConfig())
    optimizer = make_optimizer(OptimizerConfig(), 1000)
    init = lambda key: (nnx.to_pure_dict(nnx.split(self.make(arm, key))[1]), {})
    abstract = abstract_state(init, optimizer, self.mesh, (shardings, {}))
    if arm.wiring not in self.states:
      self.states[arm.wiring] = init_state(init, optimizer, 0, abstract)
    inputs = self.tokens((self.accumulation,))
    ones = jnp.ones_like(inputs)
    positions = jnp.broadcast_to(jnp.arange(self.shape.seq), inputs.shape)
    batch = {"inputs": inputs, "targets": jnp.roll(inputs, -1, -1), "segment_ids": ones}
    batch |= {"weights": ones.astype(jnp.float32), "positions": positions.astype(jnp.int32)}
    batch = jax.device_put(batch, batch_sharding(self.mesh, leading=1))
    options = (
      {"gradients": "step", "gradient_dtype": arm.gradient_dtype} if arm.gradient_dtype else {}
    )
    step = make_train_step(objective, optimizer, self.mesh, shardings_of(abstract), **options)
    with _exchange(arm.identity):
      return step.lower(self.states[arm.wiring], batch), batch

  def exchange_only(self, k: int):
    """As many all-to-alls in a row as a forward pass with k experts per token has."""
    shape = self.shape
    tokens = shape.batch * shape.seq
    per_expert = min(
      tokens, capacity(shape.capacity_factor, tokens=tokens, num_experts=shape.experts, k=k)
    )
    rows = (self.devices * self.devices, shape.experts // self.devices * per_expert, shape.width)

    def run(x):
      for _ in range(2 * shape.pairs):
        x = jax.lax.all_to_all(x, "expert", split_axis=0, concat_axis=0, tiled=True)
      return x

    spec = P(("data", "expert"))
    place = NamedSharding(self.mesh, spec)
    x = jax.jit(
      lambda: jax.random.normal(jax.random.key(3), rows, jnp.dtype(shape.dtype)),
      out_shardings=place,
    )()
    mapped = jax.shard_map(run, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(x), (x,)


@dataclasses.dataclass(frozen=True)
class Job:
  """One comparison: link (of `LINKS`), shape, direction ("forward" or "train"), arms."""

  link: str
  shape: str
  direction: str
  arms: tuple[str, ...]
  accumulation: int = 1


@contextlib.contextmanager
def _exchange(identity: bool):
  """With `identity` every all-to-all traced inside is left out: the shape stays."""
  if not identity:
    yield
    return
  with mock.patch.object(jax.lax, "all_to_all", lambda x, *a, **k: x):
    yield


class Program:
  """One arm, compiled: calls, profile, trace."""

  def __init__(self, bench: Bench, arm: Arm, direction: str):
    self.bench, self.arm, self.direction = bench, arm, direction
    make = bench.forward if direction == "forward" else bench.train
    self.lowered, self.args = make(arm)
    self.profile: bytes | None = None
    self.compile_seconds: list[float] = []

  def options(self) -> dict:
    arm = self.arm
    if not self.bench.gpu:
      return {}
    options: dict = {"xla_gpu_enable_latency_hiding_scheduler": arm.latency_hiding}
    profiling = arm.profile_guided and self.profile is None
    if profiling or not arm.command_buffers:
      options["xla_gpu_enable_command_buffer"] = ""  # a trace of a graph names no instructions
    if self.profile:
      options["fdo_profile"] = self.profile
    return options

  def compile(self) -> None:
    start = time.perf_counter()
    self.compiled = self.lowered.compile(compiler_options=self.options())
    self.compile_seconds.append(round(time.perf_counter() - start, 1))

  def __call__(self, calls: int) -> None:
    out = None
    for _ in range(calls):
      if self.direction == "forward":
        out = self.compiled(*self.args)
      else:
        states, wiring = self.bench.states, self.arm.wiring
        states[wiring], out, _ = self.compiled(states[wiring], self.args)
    jax.block_until_ready(out)

  def collect_profile(self, calls: int = 3) -> None:
    with tempfile.TemporaryDirectory() as directory:
      with jax.profiler.trace(directory):
        self(calls)
      self.profile = get_profiled_instructions_proto(os.path.dirname(find_trace(directory)))

  def trace(self, calls: int = 2):
    with tempfile.TemporaryDirectory() as directory:
      with jax.profiler.trace(directory):
        self(calls)
      return read_events(find_trace(directory))


class Exchange(Program):
  """The all-to-alls alone."""

  def __init__(self, bench: Bench, name: str, k: int):
    self.bench, self.direction = bench, "forward"
    self.arm = Arm(name, "", OverlapConfig(), profile_guided=False)
    self.lowered, self.args = bench.exchange_only(k)
    self.profile, self.compile_seconds = None, []


def measure(
  shape: Shape,
  direction: str,
  names: list[str],
  *,
  rounds: int,
  calls: int,
  seconds: float,
  accumulation: int = 4,
  threads: int = 16,
  keep: str | None = None,
  label: str = "",
) -> dict:
  """Runs all arms of one shape and direction in turns; returns the results as JSON.

  Args:
    names: arms; the first is the baseline.
    rounds, calls: of `interleave`.
    seconds: no new phase begins after so many seconds.
    keep: folder for the first traced events and optimised programs of every arm.
    label: prefix of the files there.
  """
  begin = time.perf_counter()
  log = lambda text: print(f"[{time.perf_counter() - begin:6.1f} s] {text}", flush=True)
  bench = Bench(shape, accumulation)
  programs = {}
  for name in names:
    try:
      if name.startswith("comm"):
        k = shape.top_k if name == "comm.top" else shape.top_k - 1
        programs[name] = Exchange(bench, name, k)
      else:
        programs[name] = Program(bench, parse_arm(name), direction)
    except Exception as error:  # one arm that does not build must not cost the others
      log(f"{name}: {type(error).__name__}: {str(error)[:300]}")
  log(f"lowered {len(programs)} arms")

  def build(chosen, threads=threads):
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
      futures = {name: pool.submit(programs[name].compile) for name in chosen}
      for name, future in futures.items():
        try:
          future.result()
        except Exception as error:
          log(f"{name}: {type(error).__name__}: {str(error)[:300]}")
          del programs[name]

  # XLA times products to choose their kernels, and keeps the choice: the first arm of each wiring
  # has the GPU to itself for that.
  alone = {program.arm.wiring: name for name, program in reversed(programs.items())}.values()
  build(alone, threads=1)
  log(f"compiled {', '.join(alone)} one by one")
  build([name for name in programs if name not in alone])
  log("compiled")
  guided = [n for n in programs if bench.gpu and programs[n].arm.profile_guided]
  for program in programs.values():
    program(1)
  log("first calls")
  for name in guided:
    programs[name].collect_profile()
  log("profiled")
  build(guided)
  log("compiled with profiles")
  for program in programs.values():
    program(2)
  timings = interleave(programs, rounds=rounds, calls=calls, deadline=begin + seconds)
  log("timed")
  results = {}
  texts, traces = {}, {}
  for name, program in programs.items():
    results[name] = timings[name].as_json() | {"compile_s": program.compile_seconds}
    texts[name] = program.compiled.as_text()
    if time.perf_counter() - begin > seconds + 30:
      continue
    traced = 2 if direction == "forward" else 1
    events = program.trace(traced)
    overlap = measure_overlap(events, traced)
    if overlap is not None:
      results[name]["trace"] = overlap.as_json()
      first = events[0].device
      traces[name] = [
        (e.stream, e.name[:60], e.op, round(e.start - events[0].start), round(e.end - e.start))
        for e in events
        if e.device == first
      ]
  log("traced")
  if keep:
    with gzip.open(os.path.join(keep, f"{label}.json.gz"), "wt") as f:
      json.dump({"texts": texts, "traces": traces}, f)
  result = {
    "label": label,
    "date": time.strftime("%Y-%m-%d"),
    "machine": machine(),
    "direction": direction,
    "shape": dataclasses.asdict(shape),
    "accumulation": accumulation if direction == "train" else 1,
    "arms": results,
  }
  print(f"{table(result)}\n{ceiling(result)}", flush=True)
  return result


def table(result: dict) -> str:
  """A line per arm: time, speed-up over the first arm, communication and how much is hidden."""
  arms = result["arms"]
  base = next(iter(arms.values()))
  line = "{:24s}{:>10s}{:>8s}{:>7s}{:>9s}{:>9s}{:>8s}{:>9s}".format
  lines = [line("arm", "ms", "spread", "x", "comm", "compute", "hidden", "exposed")]
  for name, r in arms.items():
    trace = ("", "", "", "")
    if t := r.get("trace"):
      share = f"{100 * t['share_hidden']:.1f} %" if t["communication"] else "–"
      exposed = f"{t['communication'] - t['hidden']:.2f}"
      trace = (f"{t['communication']:.2f}", f"{t['computation']:.2f}", share, exposed)
    ratio = "" if name.startswith("comm") else f"{base['ms'] / r['ms']:.2f}"
    lines.append(line(name, f"{r['ms']:.3f}", f"{100 * r['spread']:.1f} %", ratio, *trace))
  return "\n".join(lines)


def ceiling(result: dict) -> str:
  """Speed-up if everything were hidden and nothing stretched, and the share that was reached."""
  arms = result["arms"]
  base = next(iter(arms.values()))["ms"]
  lines = []
  for name in [n for n in arms if "compute" in n.split(".")]:
    wiring = name.split(".")[0]
    others = [
      n for n in arms if n.split(".")[0] == wiring and not {"compute", "seq"} & set(n.split("."))
    ]
    best = min(others, key=lambda n: arms[n]["ms"])
    lines.append(
      f"{name}: ceiling {base / arms[name]['ms']:.2f}x, reached {base / arms[best]['ms']:.2f}x "
      f"({best}), {100 * arms[name]['ms'] / arms[best]['ms']:.1f} % of it"
    )
  return "\n".join(lines)


def plot(results: list[dict], path: str) -> None:
  """Bars of all arms, the exposed communication marked."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(4.6 * len(results), 4.2), layout="constrained")
  FigureCanvasAgg(figure)
  for axes, result in zip(figure.subplots(1, len(results), squeeze=False)[0], results):
    arms = {n: r for n, r in result["arms"].items() if not n.startswith("comm")}
    exposed = [
      t["communication"] - t["hidden"] if (t := r.get("trace")) else 0 for r in arms.values()
    ]
    total = [r["ms"] for r in arms.values()]
    axes.bar(list(arms), total, color="#4c78a8", label="computation, hidden communication, gaps")
    axes.bar(list(arms), exposed, bottom=[t - e for t, e in zip(total, exposed)], color="#e45756",
      label="exposed communication (trace)",
    )  # fmt: skip
    axes.tick_params(axis="x", labelrotation=70, labelsize=8)
    axes.set_ylabel("ms")
    where = result["machine"]
    title = f"{result['label']}, {where['link']}\n{where['devices']}, {result['date']}"
    axes.set_title(title, fontsize=8)
  figure.axes[0].legend(fontsize=7)
  figure.savefig(path, dpi=140)


@functools.cache
def machine() -> dict:
  """Hardware and versions, for a results file."""
  import jaxlib

  return {
    "devices": f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
    "jax": jax.__version__,
    "jaxlib": jaxlib.__version__,
    "python": platform.python_version(),
    "link": LINKS[os.environ.get(LINK, "nvlink")],
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


def main(jobs: dict[str, Job], folder: Path, about: str) -> None:
  """The command of an experiment; see its own docstring."""
  parser = argparse.ArgumentParser(
    description=about, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--links", default=",".join(LINKS), help="links to measure on")
  parser.add_argument("--jobs", default=",".join(jobs), help="comparisons to run")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--calls", type=int, default=0, help="per round; 0: 8 forward, 2 training")
  parser.add_argument("--seconds", type=float, default=120, help="about, for one comparison")
  parser.add_argument("--tiny", action="store_true", help="toy sizes, 1 round")
  parser.add_argument("--out", type=Path, default=folder)
  parser.add_argument("--child", default="", help=argparse.SUPPRESS)
  args = parser.parse_args()
  chosen = {n: jobs[n] for n in args.jobs.split(",")}
  args.out.mkdir(parents=True, exist_ok=True)
  if args.child:
    results = [_run(n, job, args) for n, job in chosen.items() if job.link == args.child]
    (args.out / f"{args.child}.json").write_text(json.dumps(results))
    return
  results = []
  for link in args.links.split(","):
    if not any(job.link == link for job in chosen.values()):
      continue
    command = [sys.executable, *sys.argv, "--child", link]
    subprocess.run(command, env=_environment(link), check=True)
    part = args.out / f"{link}.json"
    results += json.loads(part.read_text())
    part.unlink()
  write(results, args.out)


def _environment(link: str) -> dict[str, str]:
  """Of the process that measures this link."""
  environment = {**os.environ, LINK: link}
  if link == "slow":
    environment["NCCL_P2P_DISABLE"] = "1"
  if link == "copy_engines":
    request_copy_engines(environment)
  return environment


def write(results: list[dict], out: Path) -> None:
  """results.json, table.txt and plot.png."""
  (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
  texts = []
  for r in results:
    head = (
      f"{r['label']}, {r['direction']}, accumulation {r['accumulation']}, {r['machine']['link']}"
    )
    where = f"{r['machine']['link']}, {r['machine']['devices']}, {r['date']}"
    texts.append(f"{head}\n{where}\n{table(r)}\n{ceiling(r)}\n")
  (out / "table.txt").write_text("\n".join(texts))
  plot(results, str(out / "plot.png"))


def _run(name: str, job: Job, args: argparse.Namespace) -> dict:
  return measure(
    SHAPES["tiny" if args.tiny else job.shape],
    job.direction,
    list(job.arms),
    rounds=1 if args.tiny else args.rounds,
    calls=1 if args.tiny else args.calls or (8 if job.direction == "forward" else 2),
    seconds=args.seconds,
    accumulation=2 if args.tiny else job.accumulation,
    label=name,
  )
