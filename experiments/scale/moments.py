"""A training step of OLMoE on one GPU with moments on the device, and in the host's memory.

  python experiments/scale/moments.py --layers 4 --json experiments/scale/results/moments.json

The arms take turns; each turn makes its state anew, runs one step, and times the next ones:

  host      moments and lower halves in pinned memory of the host, each layer's fetched while the
            layer before it leaves (mesh.moments_in=host)
  blocking  the same, but no copy runs beside another (mesh.moments_ahead=0)
  part      as host, with the moments of the last two layers on the device (mesh.moments_kept=2)
  computed  the host updates them with its own cores: gradients leave, each layer's while the layer
            before is updated (mesh.moments_update=host)
  waiting   the same, but no copy runs beside an update (mesh.moments_ahead=0)
  filed     as computed, but moments lie in a file in --folder, each layer's read while the layer
            before is updated, and written behind it (mesh.moments_in=files)
  reading   the same, but no layer is read or written beside an update (mesh.moments_ahead=0)
  experts   as host, with the experts' matrices there, too, each pair's fetched while the pair
            before it computes (mesh.experts_in=host)
  device    all on the device; left out if the dry run says that it does not fit

First the link is timed, each way alone and both at once, and then the host: AdamW on jax's CPU, in
bytes that it reads and writes a second, and the disk of --folder. The planner's figure of an arm is
a step's computation, and the copies at these speeds: those of the link both ways at once, and for
an arm that copies one way at a time those of each way alone. Of the experts' copies beside the
passes the part counts that outlasts the computation. The computation is what the arm `device` took;
without that arm it is the model's FLOPs at --mfu of the peak. What can be hidden of the copies of
`blocking` is what the plan of `host` takes less. Peak memory is the process's so far, so the arm
that needs least comes first; and as jax keeps pinned memory that it once had, arms whose host
computes come before those that need much of it. --tiny runs a tiny model on a CPU, which has one
memory and copies nothing: its times mean nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from run import Arm

from scmoe.base.sizes import size_of
from scmoe.offload.memory import HOST, allow_pinned_memory
from scmoe.profiling.timer import NO_GPU
from scmoe.run import host_memory
from scmoe.run.build import vocab_size
from scmoe.run.config_files import find_config, load_config
from scmoe.run.dry_run import dry_run
from scmoe.run.estimates import MFU
from scmoe.run.fields import with_field
from scmoe.run.summary import device_memory
from scmoe.training.kept import cpu
from scmoe.training.masters import Halves

ARMS = {
  "host": {"mesh.moments_in": "host"},
  "blocking": {"mesh.moments_in": "host", "mesh.moments_ahead": "0"},
  "part": {"mesh.moments_in": "host", "mesh.moments_kept": "2"},
  "computed": {"mesh.moments_in": "host", "mesh.moments_update": "host"},
  "waiting": {"mesh.moments_in": "host", "mesh.moments_update": "host", "mesh.moments_ahead": "0"},
  "filed": {"mesh.moments_in": "files", "mesh.moments_update": "host"},
  "reading": {
    "mesh.moments_in": "files", "mesh.moments_update": "host", "mesh.moments_ahead": "0"
  },
  "experts": {"mesh.moments_in": "host", "mesh.experts_in": "host"},
  "device": {"mesh.moments_in": "device"},
}  # fmt: skip


def link_speed(size: int) -> dict[str, float]:
  """GB/s from pinned memory to the device, back, and each way with both at once.

  Args:
    size: bytes of the array that is copied.
  """
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  away = here.with_memory_kind(HOST)
  values = np.zeros(size // 4, np.float32)
  up, down = jax.device_put(values, away), jax.device_put(values, here)
  inward, outward = (up, here), (down, away)
  ways = {"in": [inward], "out": [outward], "both": [inward, outward]}
  found = {}
  for name, pairs in ways.items():
    times = []
    for _ in range(4):  # the first makes the buffers
      begin = time.perf_counter()
      jax.block_until_ready([jax.device_put(x, to, may_alias=False) for x, to in pairs])
      times.append(time.perf_counter() - begin)
    found[name] = size / min(times[1:]) / 1e9
  return found


def host_speed(size: int) -> float:
  """Bytes/s that the host reads and writes in an update by AdamW in place.

  Args:
    size: number of parameters, each of which makes it move 36 bytes (`Away`).
  """
  here, rule = cpu(), optax.scale_by_adam()
  zeros = lambda dtype: jax.device_put(np.zeros(size, dtype), here, may_alias=False)

  def update(kept: Any, high: Any, grads: Any) -> Any:
    moments, low = kept
    updates, moments = rule.update(grads, moments)
    params = Halves(high, low).to_float32() - 1e-3 * jnp.asarray(updates)
    halves = Halves.of(params)
    return (moments, halves.low), halves.high

  program = jax.jit(update, donate_argnums=0)
  moments = jax.device_put(rule.init(np.zeros(1, np.float32)), here)
  kept = moments._replace(mu=zeros(np.float32), nu=zeros(np.float32)), zeros(np.int16)
  high, grads, times = zeros(jnp.bfloat16), zeros(np.float32), []
  for _ in range(4):  # the first compiles
    begin = time.perf_counter()
    kept, high = jax.block_until_ready(program(kept, high, grads))
    times.append(time.perf_counter() - begin)
  return 36 * size / min(times[1:])


def disk_speed(folder: str, size: int) -> float:
  """Bytes/s that a folder's disk takes and gives by turns; the page cache serves none of them.

  Args:
    folder: on the disk.
    size: bytes that are written, and then read.
  """
  values = np.random.default_rng(0).bytes(min(size, 2**26))
  with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
    begin = time.perf_counter()
    for _ in range(size // len(values)):
      file.write(values)
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    while file.read(len(values)):
      pass
    return 2 * file.tell() / (time.perf_counter() - begin)


def check_memory(name: str, plan: Any) -> None:
  """Ends the program if the host cannot keep what an arm puts there. Nothing is saved here.

  If the host computes, lower halves, a fifth of all, come through pinned memory as the state is
  made, and jax keeps that.
  """
  free = host_memory.host_memory()
  if plan is None or free is None:
    return
  need = plan.in_memory + (plan.total // 5 + plan.staging if plan.leaving else 0)
  if need > free:
    raise SystemExit(
      f"{name} needs {size_of(need)} of the host's memory, which has {size_of(free)}; use fewer "
      "--layers"
    )


def planned(args: argparse.Namespace) -> Any:
  """The resolved run of the arm `device`."""
  name, form = ("quickstart", "smoke") if args.tiny else ("olmoe", "get_config")
  run = load_config(find_config(name), form)
  fields = {"mesh.data": "1", "train.tokens_per_step": "0"}
  if not args.tiny:
    # The data are random: no tokenizer is trained.
    fields |= {"data.tokenizer": "bytes", "train.batch_size": str(args.batch_size)}
    fields |= {"model.num_layers": str(args.layers), "train.remat": args.remat}
    tokens = args.microbatches * args.batch_size * run.data.seq_len
    fields["train.tokens_per_step"] = str(tokens)
  for field, value in (fields | dict(word.split("=", 1) for word in args.fields)).items():
    run = with_field(run, field, value)
  return run.resolve(num_devices=1, vocab_size=vocab_size(run.data))


def figures(
  arms: dict[str, Arm], plans: dict[str, Any], speed: dict[str, float], mfu: float
) -> dict[str, Any]:
  """The entries of all arms in the results file: times, bytes, and the planner's figures.

  Args:
    arms, plans: by name.
    speed: of the link, see `link_speed`.
    mfu: of the computation, where no arm `device` measured it.
  """
  both, in_turn = 1e9 * speed["both"], 2e9 / (1 / speed["in"] + 1 / speed["out"])
  found = {name: arm.figures() for name, arm in arms.items()}
  seconds = {name: statistics.median(arm.seconds) for name, arm in arms.items()}
  plan = next(iter(plans.values())).step_needs
  peak = next(iter(arms.values())).built.peak_flops or 1e12
  compute = seconds["device"] if "device" in seconds else plan.flops / (mfu * peak)
  passes = {name: p.away.passes if p.away else None for name, p in plans.items()}
  beside = {name: p.seconds(both) if p else 0.0 for name, p in passes.items()}
  copies = {
    name: max(beside[name] - compute, 0.0)
    + (p.away.seconds(both if p.away.ahead else in_turn) if p.away else 0.0)
    for name, p in plans.items()
  }
  for name, own in found.items():
    away = plans[name].away
    own["host_bytes"] = away.in_memory if away else 0
    own["file_bytes"] = away.total if away and away.filed else 0
    own["planned_bytes"] = plans[name].memory.total
    own["planned_ms"] = round(1e3 * (compute + copies[name]), 3)
    own["over_plan"] = round(seconds[name] / (compute + copies[name]), 3)
    own["copies_planned_ms"] = round(1e3 * copies[name], 3)
    own["beside_planned_ms"] = round(1e3 * beside[name], 3)
  for name, plain in (("host", "blocking"), ("computed", "waiting"), ("filed", "reading")):
    if {name, plain} <= set(arms) and copies[plain] > copies[name]:
      won = seconds[plain] - seconds[name]
      found[name]["hidden"] = round(won / copies[plain], 3)
      found[name]["hidden_of_hideable"] = round(won / (copies[plain] - copies[name]), 3)
  return found


def table(arms: dict[str, Any], device: str) -> str:
  """Times and memory of each arm, and the share of copies that is hidden."""
  lines = [] if "cpu" not in device.lower() else [NO_GPU]
  lines.append(
    f"{'':10}{'ms':>10}{'planned':>10}{'ratio':>7}{'copies':>10}{'step GiB':>10}{'host GiB':>10}"
    f"{'peak GiB':>10}  loss"
  )
  for name, own in arms.items():
    peak = own["peak_bytes"]
    lines.append(
      f"{name:10}{own['ms']:10.2f}{own['planned_ms']:10.2f}{own['over_plan']:7.3f}"
      f"{own['copies_planned_ms']:10.2f}{own['program_gibibytes']:10.2f}"
      f"{own['host_bytes'] / 2**30:10.2f}{peak / 2**30 if peak else 0:10.2f}  {own['loss']}"
    )
  for name, own in arms.items():
    if "hidden" in own and "cpu" not in device.lower():
      lines.append(
        f"{name} hides {own['hidden']:.1%} of the copies' time, {own['hidden_of_hideable']:.1%} of "
        "what can be hidden"
      )
  return "\n".join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("fields", nargs="*", help="SECTION.FIELD=VALUE, for all arms")
  parser.add_argument("--arms", default="computed,waiting,host,blocking,device")
  parser.add_argument("--layers", type=int, default=4, help="of OLMoE's 16")
  parser.add_argument("--batch_size", type=int, default=4, help="rows of 4,096 tokens")
  parser.add_argument("--microbatches", type=int, default=1)
  parser.add_argument("--remat", default="none")
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--calls", type=int, default=3, help="steps that a turn times")
  parser.add_argument("--seconds", type=float, default=150, help="no new turn after these")
  parser.add_argument("--mfu", type=float, default=MFU, help="of computation, without `device`")
  parser.add_argument("--tiny", action="store_true")
  parser.add_argument("--folder", default=".", help="on a local disk, for the arms with a file")
  parser.add_argument("--json", type=Path)
  args = parser.parse_args()
  begin = time.perf_counter()
  say = lambda text: print(f"[{time.perf_counter() - begin:5.0f} s] {text}", flush=True)
  if args.tiny:
    args.rounds, args.calls = 1, 1
  allow_pinned_memory()
  first, plans, arms, limit = planned(args), {}, {}, device_memory()
  for name in args.arms.split(","):
    run = first
    for field, value in ARMS[name].items():
      run = with_field(run, field, value)
    if run.mesh.moments_in == "files":
      run = with_field(run, "mesh.moments_folder", args.folder)
    plans[name] = dry_run(run)
    if name == "device" and limit is not None and plans[name].memory.total > limit:
      say(
        f"device is left out: it needs {size_of(plans.pop(name).memory.total)} of {size_of(limit)}"
      )
      continue
    arms[name] = Arm(run)
    check_memory(name, plans[name].away)
  speed = link_speed(2**20 if args.tiny else 2**29)
  if any(plans[name].away and plans[name].away.filed for name in arms):
    host_memory.DISK_RATE = disk_speed(args.folder, 2**26 if args.tiny else 2**33)
    speed["disk"] = host_memory.DISK_RATE / 1e9
  if any(plans[name].away and plans[name].away.leaving for name in arms):
    host_memory.HOST_RATE = host_speed(2**18 if args.tiny else 2**28)
    speed["host"] = host_memory.HOST_RATE / 1e9
  say(", ".join(f"{name} {value:.1f} GB/s" for name, value in speed.items()))
  with concurrent.futures.ThreadPoolExecutor(1 if args.tiny else len(arms)) as pool:
    list(pool.map(lambda arm: arm.compile(), arms.values()))
  say(f"compiled {first.model.num_layers} layers, arms {', '.join(arms)}")
  peaks: dict[str, int | None] = {}
  for _ in range(args.rounds):
    for name, arm in arms.items():
      if arm.seconds and time.perf_counter() - begin > args.seconds:
        continue
      arm.turn(args.calls)
      peaks.setdefault(name, (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"))
      say(f"{name}: {1e3 * arm.seconds[-1]:.2f} ms")
  found = figures(arms, plans, speed, args.mfu)
  for name, own in found.items():
    own["peak_bytes"] = peaks[name]
  device = jax.devices()[0].device_kind
  report = {
    "date": time.strftime("%Y-%m-%d"),
    "device": device,
    "jax": jax.__version__,
    "command": " ".join(["python", *map(shlex.quote, sys.argv)]),
    "layers": first.model.num_layers,
    "rows": first.train.batch_size,
    "gigabytes_per_second": {name: round(value, 2) for name, value in speed.items()},
    "arms": found,
  }
  print(table(found, device))
  if args.json:
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
  main()
