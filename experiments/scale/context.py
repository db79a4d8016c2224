"""Rows of 131,072 tokens, divided over two GPUs (`mesh.sequence`): right, how fast, how large?

  python experiments/scale/context.py --json experiments/scale/results/context.json

First a length that one GPU holds too: loss and gradient norm of a step on one GPU, and on two with
`mesh.sequence_attention` ring and heads. In float32 the three agree to rounding. In bfloat16 they
round differently, so each is compared with the float32 step of the same parameters and tokens.

Then the long rows: as many of OLMoE's layers as two GPUs hold by the dry run, one row a step,
train.remat=full. Printed are the time of a step, the memory of the compiled step on one device, how
many calls of cuDNN's fused attention it has, and what the same step would need on one GPU. --tiny
does all of it on two simulated devices with short rows, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

from scmoe.parallel.mesh import batch_sharding
from scmoe.profiling.program import Program
from scmoe.profiling.timer import NO_GPU
from scmoe.run.build import Built, build, vocab_size
from scmoe.run.command_line import simulate
from scmoe.run.config_files import find_config, load_config
from scmoe.run.dry_run import dry_run
from scmoe.run.fields import with_field
from scmoe.run.summary import device_memory
from scmoe.training.step import init_state, make_train_step

MESHES = {
  "one": {"mesh.data": "1"},
  "ring": {"mesh.data": "1", "mesh.sequence": "2", "mesh.sequence_attention": "ring"},
  "heads": {"mesh.data": "1", "mesh.sequence": "2", "mesh.sequence_attention": "heads"},
}
FUSED = ("fmhaSoftmax", "cudnn$fmha")  # in the names of cuDNN's calls


class Arm:
  """A compiled step on one mesh, and how long it takes."""

  def __init__(self, run: Any):
    self.built: Built = build(run, jax.devices()[: run.mesh.size])
    self.abstract = self.built.abstract_state()
    step = make_train_step(self.built.objective, self.built.optimizer, self.abstract)
    self.batch = jax.device_put(
      self.built.random_batch(), batch_sharding(self.built.mesh, leading=1)
    )
    self.program = Program(step.lower(self.abstract, self.batch))
    self.seconds: list[float] = []
    self.peak: int | None = None  # bytes that this process has used at most so far

  def compile(self) -> None:
    """Compiles the step; arms compile side by side."""
    gpu = jax.default_backend() == "gpu"
    self.program.compile(self.built.overlap.compiler_options(gpu=gpu))

  def turn(self, calls: int) -> dict[str, float]:
    """Makes the state and takes a step; times `calls` more; returns the first step's scalars."""
    state = init_state(self.built.init, self.built.optimizer, 0, self.abstract)
    state, scalars, _ = self.program(state, self.batch)
    first = {name: float(scalars[name]) for name in ("loss", "grad_norm")}
    for _ in range(calls):
      begin = time.perf_counter()
      state, scalars, _ = self.program(state, self.batch)
      jax.block_until_ready((state, scalars))
      self.seconds.append(time.perf_counter() - begin)
    self.peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return first

  @property
  def fused_calls(self) -> int:
    """Instructions of the program that call cuDNN's fused attention."""
    lines = self.program.text.splitlines()
    return sum("custom-call" in line and any(word in line for word in FUSED) for line in lines)

  def figures(self) -> dict[str, Any]:
    """Its entry in the results file, after at least one timed step."""
    run, middle = self.built.run, statistics.median(self.seconds)
    tokens = run.train.microbatches(run.data.seq_len) * run.train.batch_size * run.data.seq_len
    peak = self.built.peak_flops * run.mesh.size
    return {
      "ms": round(1e3 * middle, 1),
      "steps_ms": [round(1e3 * s, 1) for s in self.seconds],
      "tokens_per_second": round(tokens / middle),
      "mfu": round(self.built.flops_per_token({}) * tokens / middle / peak, 4) if peak else None,
      "program_gibibytes": round(self.program.gibibytes, 2),
      "peak_gibibytes": round(self.peak / 2**30, 2) if self.peak else None,
      "fused_calls": self.fused_calls,
    }


def planned(args: argparse.Namespace, length: int, **fields: str) -> Any:
  """An unresolved run of OLMoE (--tiny: the quickstart, shrunk) on rows of a length."""
  name, form = ("quickstart", "smoke") if args.tiny else ("olmoe", "get_config")
  run = load_config(find_config(name), form)
  given = {
    "data.seq_len": str(length),
    "model.context": str(length),
    "model.document_mask": "false",
    "data.document_mask": "false",
    "dispatch.transport": "dropless",
    "train.batch_size": "1",
    "train.tokens_per_step": "0",
  }
  given |= {"model.num_heads": "4"} if args.tiny else {"data.tokenizer": "bytes"}
  for field, value in (given | fields).items():
    run = with_field(run, field, value)
  return run


def on(run: Any, mesh: str) -> Any:
  """A run, resolved, on one of `MESHES`."""
  for field, value in MESHES[mesh].items():
    run = with_field(run, field, value)
  return run.resolve(num_devices=2, vocab_size=vocab_size(run.data))


def short_arms(args: argparse.Namespace) -> dict[str, Arm]:
  """Arms by dtype and mesh, at a length that one GPU holds."""
  arms = {}
  jax.config.update("jax_default_matmul_precision", "highest")  # float32 without TF32
  for dtype in ("float32", "bfloat16"):
    fields = {"model.dtype": dtype, "model.num_layers": "4" if args.tiny else "2"}
    run = planned(args, args.short, **fields)
    arms |= {f"{dtype}, {mesh}": Arm(on(run, mesh)) for mesh in MESHES}
  jax.config.update("jax_default_matmul_precision", None)
  return arms


def equality(arms: dict[str, Arm], say: Any) -> dict[str, Any]:
  """Loss and gradient norm of each arm's first step, and how far they are from the exact ones."""
  found: dict[str, Any] = {}
  for name, arm in arms.items():
    found[name] = arm.turn(0) | {"fused_calls": arm.fused_calls}
    say(f"{name}: {found[name]}")
  exact = found["float32, one"]
  for own in found.values():
    own["off"] = {name: abs(own[name] / exact[name] - 1) for name in ("loss", "grad_norm")}
  return found


def longest(args: argparse.Namespace) -> Any:
  """The run on long rows with as many layers as two devices hold.

  Memory grows by the same bytes with each layer, so two dry runs say how many fit.
  """
  fields = {"train.remat": args.remat}
  of = lambda layers: planned(args, args.length, **fields, **{"model.num_layers": str(layers)})
  limit = device_memory()
  if args.layers or args.tiny or limit is None:
    return of(args.layers or 4)
  two, four = (dry_run(on(of(layers), "ring")).memory.total for layers in (2, 4))
  fit = 2 + int((args.room * limit - two) // ((four - two) / 2))
  if fit < 1:
    raise SystemExit("no layer of OLMoE fits these devices")
  return of(min(fit, 16))


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--arms", default="ring,heads")
  parser.add_argument("--length", type=int, default=131072, help="tokens of a long row")
  parser.add_argument("--short", type=int, default=8192, help="tokens of a row for both")
  parser.add_argument("--layers", type=int, default=0, help="0: as many as fit, by the dry run")
  parser.add_argument("--room", type=float, default=0.85, help="part of the memory to plan with")
  parser.add_argument("--remat", default="full")
  parser.add_argument("--calls", type=int, default=3, help="steps that an arm times")
  parser.add_argument("--seconds", type=float, default=190, help="no new arm after these")
  parser.add_argument("--skip_equality", action="store_true")
  parser.add_argument("--tiny", action="store_true")
  parser.add_argument("--json", type=Path)
  args = parser.parse_args()
  begin = time.perf_counter()
  say = lambda text: print(f"[{time.perf_counter() - begin:5.0f} s] {text}", flush=True)
  if args.tiny:
    simulate(2)
    args.length, args.short, args.calls = 64, 32, 1
  report: dict[str, Any] = {
    "date": time.strftime("%Y-%m-%d"),
    "device": f"2 x {jax.devices()[0].device_kind}",
    "jax": jax.__version__,
    "command": " ".join(["python", *map(shlex.quote, sys.argv)]),
  }
  run, arms = longest(args), {}
  single = dry_run(on(run, "one")).memory.total
  short = {} if args.skip_equality else short_arms(args)
  long = {name: Arm(on(run, name)) for name in args.arms.split(",")}
  say(f"{run.model.num_layers} layers, rows of {args.length:,} tokens")
  every = [*short.values(), *long.values()]
  with concurrent.futures.ThreadPoolExecutor(1 if args.tiny else len(every)) as pool:
    list(pool.map(lambda arm: arm.compile(), every))
  say("compiled")
  if short:
    report["short"] = {"tokens": args.short, "steps": equality(short, say)}
  for name, arm in long.items():
    if time.perf_counter() - begin > args.seconds:
      break
    needed, first = dry_run(arm.built.run).memory.total, arm.turn(args.calls)
    arms[name] = arm.figures() | first | {"dry_run_gibibytes": round(needed / 2**30, 2)}
    say(f"{name}: {arms[name]}")
  report["long"] = {
    "tokens": args.length,
    "layers": run.model.num_layers,
    "remat": args.remat,
    "one_device_dry_run_gibibytes": round(single / 2**30, 2),
    "arms": arms,
  }
  print(table(report))
  if args.json:
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


def table(report: dict[str, Any]) -> str:
  """Both parts as text."""
  lines = [] if "cpu" not in report["device"].lower() else [NO_GPU]
  if "short" in report:
    head = f"rows of {report['short']['tokens']:,} tokens"
    lines.append(f"{head:28}{'loss':>12}{'off by':>10}{'grad norm':>12}{'off by':>10}{'cuDNN':>7}")
    for name, own in report["short"]["steps"].items():
      lines.append(
        f"  {name:26}{own['loss']:12.6f}{own['off']['loss']:10.1e}{own['grad_norm']:12.6f}"
        f"{own['off']['grad_norm']:10.1e}{own['fused_calls']:7}"
      )
  long = report["long"]
  head = f"rows of {long['tokens']:,} tokens"
  lines.append(f"{head:28}{'ms':>12}{'MFU':>8}{'step GiB':>10}{'dry run':>9}{'cuDNN':>7}  loss")
  for name, own in long["arms"].items():
    mfu = "" if own["mfu"] is None else f"{100 * own['mfu']:.1f} %"
    lines.append(
      f"  {name:26}{own['ms']:12.1f}{mfu:>8}{own['program_gibibytes']:10.2f}"
      f"{own['dry_run_gibibytes']:9.2f}{own['fused_calls']:7}  {own['loss']:.5f}"
    )
  need = long["one_device_dry_run_gibibytes"]
  lines.append(f"  one device would need {need:.2f} GiB by the dry run")
  return "\n".join(lines)


if __name__ == "__main__":
  main()
