"""One training step of a few layers of a model on one GPU, with its experts on several backends.

python experiments/kernels/train_step.py --json OUT          # 4 of OLMoE's 16 layers
python experiments/kernels/train_step.py --smoke             # toy sizes, on any device

A step is forward, backward, clipping and AdamW, as `scmoe.train` runs it: bf16 products, float32
parameters. An arm is a word of `model.ffn.backend`. Arms take turns on one state, which every
step donates to the next, so that memory holds one of them. Before that, each arm takes two steps
from the same fresh state: losses and gradient norms must agree.

MFU counts the model's FLOPs (`scmoe.models.flops`), no recomputation and no padding. Memory is of
the compiled step: arguments + results + temporaries, less what the state's donation saves.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jaxlib

from scmoe.base.batch import Batch
from scmoe.kernels.grouped_matmul.backend import resolve_backend
from scmoe.models.flops import forward_flops, peak_flops
from scmoe.parallel.mesh import batch_sharding
from scmoe.profiling.overlap import stage_table, stage_times
from scmoe.profiling.timer import interleave, speed_up
from scmoe.profiling.trace import find_trace, read_events
from scmoe.profiling.wire import operation_names
from scmoe.run import build
from scmoe.run.config import RunConfig
from scmoe.run.config_files import find_config, load_config
from scmoe.training.measured import before_training
from scmoe.training.step import init_state, make_train_step

COMPARED = ("objective", "grad_norm")


def configuration(args: argparse.Namespace) -> RunConfig:
  """The config file's run, cut to the layers and the batch asked for, on one device."""
  run = load_config(find_config(args.config), "smoke" if args.smoke else "get_config")
  given = {name: getattr(args, name) for name in ("width", "layers", "context", "vocab_size")}
  given["num_layers"] = given.pop("layers")
  model = dataclasses.replace(run.model, **{k: v for k, v in given.items() if v})
  run = dataclasses.replace(
    run,
    model=model,
    dispatch=dataclasses.replace(run.dispatch, transport="dropless"),
    overlap=dataclasses.replace(run.overlap, unroll=args.unroll),
    mesh=dataclasses.replace(run.mesh, data=1, expert=1, tensor=1),
    data=dataclasses.replace(run.data, seq_len=model.context),
    train=dataclasses.replace(
      run.train, batch_size=args.batch, tokens_per_step=0, remat=args.remat
    ),
  )
  return run.resolve(num_devices=1, vocab_size=build.vocab_size(run.data))


def random_batch(run: RunConfig, mesh) -> Batch:
  """One microbatch of uniformly drawn tokens, where the step wants it."""
  shape = (1, run.train.batch_size, run.data.seq_len)
  tokens = jax.random.randint(jax.random.key(7), shape, 0, run.model.vocab_size)
  return jax.device_put(Batch.of_tokens(tokens), batch_sharding(mesh, leading=1))


class Bench:
  """The one state that all arms step, and the batch that they see."""

  def __init__(self, run: RunConfig):
    self.run = run
    self.built = build.build(run, jax.devices()[:1])
    self.abstract = self.built.abstract_state()
    self.batch = random_batch(run, self.built.mesh)
    self.state = None

  def fresh(self) -> None:
    """The state before step 0, the same in every call; the old one goes first."""
    self.state = None
    self.state = init_state(self.built.init, self.built.optimizer, 0, self.abstract)

  def compile(self, arm: str):
    """The compiled step of an arm."""
    ffn = dataclasses.replace(self.run.model.ffn, backend=arm)
    model = dataclasses.replace(self.run.model, ffn=ffn).resolve()
    built = build.build(dataclasses.replace(self.run, model=model), jax.devices()[:1])
    options = self.run.overlap.compiler_options(gpu=jax.default_backend() == "gpu")
    step = make_train_step(
      built.objective, built.optimizer, self.abstract, compiler_options=options
    )
    return step.lower(self.abstract, self.batch).compile()

  def steps(self, compiled, calls: int, *, train: bool = True) -> dict[str, jax.Array]:
    """Steps the state; returns the last step's scalars when the device is done.

    Without `train` no step changes a parameter.
    """
    scalars = {}
    for _ in range(calls):
      assert self.state is not None
      state = self.state if train else before_training(self.state)
      self.state, scalars, _ = compiled(state, self.batch)
    return jax.block_until_ready(scalars)


def gib(compiled) -> float:
  """Memory of a compiled step, GiB."""
  m = compiled.memory_analysis()
  used = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
  return (used - m.alias_size_in_bytes) / 2**30


def check(bench: Bench, programs: dict, tolerance: float) -> dict[str, list[dict[str, float]]]:
  """Losses and gradient norms of two steps of every arm from the same state.

  Raises:
    SystemExit: one of them is not finite, or not within `tolerance` of the first arm's.
  """
  seen: dict[str, list[dict[str, float]]] = {}
  for arm, compiled in programs.items():
    bench.fresh()
    steps = [bench.steps(compiled, 1) for _ in range(2)]
    seen[arm] = [{name: float(s[name]) for name in (*COMPARED, "imbalance")} for s in steps]
    print(f"{arm}: {seen[arm]}", flush=True)
  first = next(iter(seen.values()))
  for arm, steps in seen.items():
    for step, (got, expected) in enumerate(zip(steps, first)):
      for name in COMPARED:
        if not abs(got[name] - expected[name]) <= tolerance * abs(expected[name]):
          sys.exit(f"{arm}, step {step}: {name} is {got[name]}, the first arm's {expected[name]}")
  return seen


def stages(bench: Bench, compiled, folder: Path) -> str:
  """One arm's time by stage and direction, from a profiler trace of two steps."""
  with jax.profiler.trace(str(folder)):
    bench.steps(compiled, 2)
  events, names = read_events(find_trace(str(folder))), operation_names(compiled)
  return stage_table(stage_times(events, names, 2))


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--config", default="olmoe")
  parser.add_argument("--smoke", action="store_true", help="the config's smoke(): toy sizes")
  parser.add_argument("--arms", default="", help="mosaic_gpu,xla; auto in --smoke")
  parser.add_argument("--layers", type=int, default=0, help="4; 0 in --smoke: as the config")
  parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
  parser.add_argument(
    "--context", type=int, default=0, help="tokens of a sequence; 0: the config's"
  )
  parser.add_argument("--width", type=int, default=0, help="0: the config's")
  parser.add_argument("--vocab_size", type=int, default=0, help="0: the config's")
  parser.add_argument("--remat", default="none")
  parser.add_argument("--unroll", type=int, default=1, help="layers per step of the scan; 0: all")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--calls", type=int, default=3, help="steps per turn")
  parser.add_argument(
    "--seconds", type=float, default=240, help="no new round begins after so long"
  )
  parser.add_argument("--tolerance", type=float, default=0.01, help="of losses and gradient norms")
  parser.add_argument("--trace", type=Path, help="also trace every arm, into this folder")
  parser.add_argument("--json", type=Path, help="results file")
  args = parser.parse_args()
  args.layers = args.layers or (0 if args.smoke else 4)
  default = "auto,xla" if args.smoke else "mosaic_gpu,xla"
  names = (args.arms or default).split(",")

  begin = time.perf_counter()
  log = lambda text: print(f"[{time.perf_counter() - begin:6.1f} s] {text}", flush=True)
  run = configuration(args)
  bench, programs, seconds = Bench(run), {}, {}
  for name in names:
    start = time.perf_counter()
    programs[name] = bench.compile(name)
    seconds[name] = time.perf_counter() - start
    log(f"compiled {name}: {gib(programs[name]):.2f} GiB")
  seen = check(bench, programs, args.tolerance)
  log("losses and gradient norms agree")
  bench.fresh()
  for compiled in programs.values():
    bench.steps(compiled, 2)
  timings = interleave(
    {name: lambda calls, c=c: bench.steps(c, calls, train=False) for name, c in programs.items()},
    rounds=args.rounds,
    calls=args.calls,
    deadline=time.perf_counter() + args.seconds,
  )
  log("timed")

  model, device = run.model, jax.devices()[0]
  tokens = run.train.batch_size * run.data.seq_len
  flops = forward_flops(model, run.data.seq_len).training * tokens
  peak = peak_flops(device.device_kind, model.dtype)
  arms = {}
  for name, timing in timings.items():
    arms[name] = timing.as_json() | {
      "backend": resolve_backend(name, model.dtype, model.width, model.expert_hidden),
      "times_the_first": round(1 / speed_up(timings[names[0]], timing), 4),
      "tokens_per_second": round(tokens / timing.median),
      "mfu": None if peak is None else round(flops / timing.median / peak, 4),
      "memory_gib": round(gib(programs[name]), 3),
      "compile_s": round(seconds[name], 1),
      "first_steps": seen[name],
    }
    if args.trace:
      arms[name]["stages"] = stages(bench, programs[name], args.trace / name)
  result = {
    "date": time.strftime("%Y-%m-%d"),
    "device": device.device_kind,
    "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
    "command": " ".join(["python", *sys.argv]),
    "model": dataclasses.asdict(model),
    "tokens": tokens,
    "flops_per_step": flops,
    "remat": args.remat,
    "arms": arms,
  }
  print(table(result))
  if args.json:
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n")


def table(result: dict) -> str:
  """A line for each arm; traces below."""
  line = "{:18s}{:>11s}{:>9s}{:>9s}{:>12s}{:>8s}{:>9s}".format
  where = f"{result['device']}, jax {result['versions']['jax']}, {result['date']}"
  model = result["model"]
  lines = [
    f"{where}: {model['num_layers']} layers of width {model['width']}, {result['tokens']} tokens",
    line("arm", "ms/step", "spread", "/ first", "tokens/s", "MFU", "GiB"),
  ]
  for name, arm in result["arms"].items():
    mfu = "–" if arm["mfu"] is None else f"{100 * arm['mfu']:.1f} %"
    spread, times = f"{100 * arm['spread']:.1f} %", f"{arm['times_the_first']:.2f}"
    rate, memory = f"{arm['tokens_per_second']:,}", f"{arm['memory_gib']:.2f}"
    lines.append(line(name, f"{arm['ms']:.2f}", spread, times, rate, mfu, memory))
  lines += [f"\n{name}\n{arm['stages']}" for name, arm in result["arms"].items() if "stages" in arm]
  return "\n".join(lines)


if __name__ == "__main__":
  main()
