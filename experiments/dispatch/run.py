"""Dispatch + combine of three transports, without experts between: what moving rows costs.

  python experiments/dispatch/run.py --json experiments/dispatch/results/results.json

Every device holds t tokens of D bf16 numbers, each with K choices, so that t·K·D·2 bytes are the
size asked for. Arms, in one run and in turns:

  all_to_all   the dense exchange of those bytes and back, nothing else: the bound
  capacity     fixed buffers, capacity factor 1.25
  dropless     rounds over a fixed buffer, slack 1.25; every layer decides on overflow rounds
  put          the same rounds; a kernel writes rows straight into the experts' tiles (not among the
               default arms)
  ragged       jax.lax.ragged_all_to_all with receive buffers for the worst case (GPU only)

The layers of a model follow one another in one program, and so they do here: `--layers` of them,
each fed with what the one before brought back; times are per layer. (The host reads the trip count
of the loop of overflow rounds, and so cannot run ahead into the next program.) They are compiled
with the options of a training step: latency-hiding scheduler, no command buffers.
A row is gathered to its buffer, sent, put in the order of the experts, brought back, weighted and
summed: the whole path that a token takes, less its expert. A barrier stands in the experts' place:
without it XLA lets the order of `capacity` and its inverse, two transposes, cancel. Results are
checked before they are timed: y = Σ_k w_k · x. What `capacity` drops is left out of its y and
reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from scmoe.blocks.options import OverlapConfig
from scmoe.kernels.permute import gather_rows, make_permutation, running_positions, sum_rows
from scmoe.moe.dispatch import Capacity, Dropless, Put
from scmoe.moe.route import make_routing
from scmoe.parallel.collectives import Exchange
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh, manual
from scmoe.profiling.timer import Timing, interleave, repeated

SLACK = 1.25


def routing_of(expert_TK, weight_TK, num_experts):
  probs = jnp.zeros((expert_TK.shape[0], num_experts), jnp.float32)
  return make_routing(expert_TK, weight_TK, probs, probs)


def all_to_all_only(x, expert, weight, exchange, num_experts):
  """Twice the dense exchange of as many bytes as there are choices."""
  rows = jnp.repeat(x, expert.shape[1], 0).reshape(exchange.size, -1, x.shape[1])
  for _ in range(2):
    rows = jax.lax.all_to_all(rows, "expert", 0, 0, tiled=True)
  return rows.reshape(-1, expert.shape[1], x.shape[1])[:, 0], jnp.zeros((), jnp.int32)


def with_capacity(x, expert, weight, exchange, num_experts):
  routing = routing_of(expert, weight, num_experts)
  transport = Capacity(int(SLACK * expert.size / num_experts), exchange)
  sent = transport.dispatch(x, routing)
  # Rows stay in the order of their source ranks; XLA's experts put them in their own, and back.
  by_expert = lambda rows: jnp.swapaxes(rows, 0, 1)
  rows = jax.lax.optimization_barrier(tuple(map(by_expert, sent.rows)))
  sent = dataclasses.replace(sent, rows=tuple(map(by_expert, rows)))
  return transport.combine(sent), sent.dropped


def without_drops(x, expert, weight, exchange, num_experts, kind=Dropless):
  routing = routing_of(expert, weight, num_experts)
  transport = kind(exchange, SLACK)
  sent = transport.dispatch(x, routing, _to_experts_and_back)
  rows = tuple(map(_to_experts_and_back, sent.rows, sent.layouts))
  return transport.combine(dataclasses.replace(sent, rows=rows)), sent.rounds


def by_puts(x, expert, weight, exchange, num_experts):
  return without_drops(x, expert, weight, exchange, num_experts, Put)


def _to_experts_and_back(rows, layout):
  """Into the order of the experts, and back: rows stay in the order of their source ranks.

  Rows that lie in the experts' tiles already stay there.
  """
  if layout.tiles is not None:
    return jax.lax.optimization_barrier(rows)
  permutation = layout.sorted(1).permutation
  sorted_rows = jax.lax.optimization_barrier(gather_rows(rows, permutation))
  return sum_rows(sorted_rows, None, permutation)


def ragged(x, expert, weight, exchange, num_experts):
  """Rows sorted by expert; every slice goes to its peer with one ragged exchange."""
  choices, peers = expert.size, exchange.size
  position, count = running_positions(expert, num_experts)
  permutation = make_permutation((jnp.cumsum(count) - count)[expert] + position, choices)
  rows = gather_rows(x, permutation)
  send = count.reshape(peers, -1).sum(1).astype(jnp.int32)
  counts = jax.lax.all_gather(send, "expert")  # [from, to]
  me = jax.lax.axis_index("expert")
  starts = lambda a, axis: jnp.cumsum(a, axis) - a
  mine = starts(send, 0)  # where my slice for each peer begins here
  there = starts(counts, 0)[me]  # and there
  receive = counts[:, me]
  buffer = jnp.zeros((choices * peers, x.shape[1]), x.dtype)  # all rows of all devices
  exchange_rows = lambda rows, out, a, n, b, m: jax.lax.ragged_all_to_all(
    rows, out, a, n, b, m, axis_name="expert"
  )
  arrived = exchange_rows(rows, buffer, mine, send, there, receive)
  back_at = starts(counts, 1)[:, me]  # where my rows stand in each source rank's order
  back = exchange_rows(arrived, jnp.zeros_like(rows), starts(receive, 0), receive, back_at, send)
  return sum_rows(back, weight, permutation), jnp.zeros((), jnp.int32)


ARMS = {
  "all_to_all": all_to_all_only,
  "capacity": with_capacity,
  "dropless": without_drops,
  "ragged": ragged,
  "put": by_puts,
}
DEFAULT = "all_to_all,capacity,dropless,ragged"


def choices(kind: str, tokens: int, num_experts: int, k: int, seed: int) -> np.ndarray:
  """int32 [tokens, k], different experts in a row; Zipf(1.0) or as even as can be."""
  rng = np.random.default_rng(seed)
  if kind == "balanced":
    first = rng.permutation(np.arange(tokens) % num_experts)
    return np.stack([(first + j * 3) % num_experts for j in range(k)], 1).astype(np.int32)
  share = 1 / np.arange(1, num_experts + 1)
  gumbel = rng.gumbel(size=(tokens, num_experts)) + np.log(share / share.sum())
  return np.argsort(-gumbel, 1)[:, :k].astype(np.int32)


def programs(args, mebibytes: int, kind: str, mesh) -> dict:
  """name -> (compiled chain, its arguments, the most rounds or drops of a layer); checked."""
  devices = mesh.shape["expert"]
  tokens = mebibytes * 2**20 // (2 * args.width * args.k)
  exchange = Exchange("expert", devices)
  batch = NamedSharding(mesh, P(BATCH_AXES))
  expert = jax.device_put(choices(kind, tokens * devices, args.experts, args.k, 0), batch)
  x = jax.device_put(jax.random.normal(jax.random.key(0), (tokens * devices, args.width)), batch)
  x = x.astype(jnp.bfloat16)
  weight = jnp.full((tokens * devices, args.k), 1 / args.k, jnp.float32)
  weight = jax.device_put(weight, batch)
  options = OverlapConfig().compiler_options(gpu=jax.default_backend() == "gpu")
  found = {}
  for name in args.arms.split(","):
    body = lambda x, e, w, f=ARMS[name]: _chain(f, args.layers, x, e, w, exchange, args.experts)
    stage = jax.jit(
      manual(body, mesh, (P(BATCH_AXES),) * 3, P(BATCH_AXES)), compiler_options=options
    )
    y, extra = stage(x, expert, weight)
    if name in ("dropless", "ragged", "put"):  # nothing is lost: y is x again
      error = float(jnp.abs(y.astype(jnp.float32) - x.astype(jnp.float32)).max())
      assert error < 0.05, f"{name}: {error}"
    found[name] = stage, (x, expert, weight), int(np.asarray(extra).max())
  return found


def measure(args, mebibytes: int, kind: str, mesh) -> dict:
  found = programs(args, mebibytes, kind, mesh)
  arms = {name: repeated(stage, *given) for name, (stage, given, _) in found.items()}
  figures = {}
  for name, timing in interleave(arms, rounds=args.rounds, calls=args.calls).items():
    per_layer = Timing(tuple(s / args.layers for s in timing.seconds), timing.calls)
    figures[name] = {"extra": found[name][2]} | per_layer.as_json()
  tokens = mebibytes * 2**20 // (2 * args.width * args.k)
  return {"mebibytes": mebibytes, "routing": kind, "tokens_per_device": tokens, "arms": figures}


def _chain(arm, layers, x, expert, weight, exchange, num_experts):
  most = jnp.zeros((), jnp.int32)
  for layer in range(layers):
    # Every layer chooses other experts, or XLA would plan, and exchange counts, once for all.
    choice = (expert + layer) % num_experts
    x, extra = arm(x, choice, weight, exchange, num_experts)
    most = jnp.maximum(most, extra)
  return x, most[None]


def table(results: list[dict]) -> str:
  names = list(results[0]["arms"])
  lines = ["| MiB per GPU | routing | " + " | ".join(f"{n} ms" for n in names) + " | rounds |"]
  lines.append("|---" * (len(names) + 3) + "|")
  for row in results:
    cells = [f"{row['arms'][n]['ms']:.3f}" for n in names]
    rounds = row["arms"].get("dropless", {}).get("extra", "–")
    lines.append(
      f"| {row['mebibytes']} | {row['routing']} | " + " | ".join(cells) + f" | {rounds} |"
    )
  return "\n".join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("--mebibytes", default="16,64,256")
  parser.add_argument("--width", type=int, default=2048, help="D")
  parser.add_argument("--experts", type=int, default=64, help="E")
  parser.add_argument("--k", type=int, default=2, help="K")
  parser.add_argument("--arms", default=DEFAULT)
  parser.add_argument("--layers", type=int, default=8, help="layers in one program")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--calls", type=int, default=3)
  parser.add_argument("--json", type=pathlib.Path)
  args = parser.parse_args()
  mesh = make_mesh(MeshConfig(data=1, expert=jax.device_count()))
  results = [
    measure(args, size, kind, mesh)
    for size in map(int, args.mebibytes.split(","))
    for kind in ("balanced", "zipf")
  ]
  print(table(results))
  if args.json:
    sizes = {"width": args.width, "experts": args.experts, "k": args.k, "layers": args.layers}
    write(args.json, results, **sizes, slack=SLACK)


def write(file: pathlib.Path, results: list[dict], **sizes: Any) -> None:
  """Writes results as JSON, with date, hardware, versions, command and the given sizes."""
  setting = {
    "date": datetime.date.today().isoformat(),
    "device": jax.devices()[0].device_kind,
    "devices": jax.device_count(),
    "jax": jax.__version__,
    "command": " ".join(["python", *sys.argv]),
  }
  file.write_text(json.dumps({**setting, **sizes, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
  main()
