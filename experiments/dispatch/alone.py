"""One way of the exchange alone: rows to their experts' devices, no plan and no way back.

  CUDA_MODULE_LOADING=EAGER python experiments/dispatch/alone.py --json OUT

Every device has t tokens of D bf16 numbers with K choices each, t·K·D·2 bytes of rows. Of W devices
a row's expert is on the row's own with probability 1 / W; the bytes of the other rows are the
*remote bytes*. CUDA loads a kernel before its first call (`CUDA_MODULE_LOADING=EAGER`), since its
documentation warns of kernels that wait for one that is being loaded. Arms, in one run and in
turns:

  all_to_all   the dense exchange of those rows, gathered already
  put          the kernel of dispatch.transport=put: rows from the tokens to the experts' tiles
  put back     the same kernel on the way back: rows from the tiles to the senders' slots
  ragged       jax.lax.ragged_all_to_all of those rows, gathered already (not a default arm)

A program has calls of an arm one after the other, `--calls` of them or five times as many. The time
of a call is the difference of the two over the calls that the longer one has more; what the host
needs to start a program is left out, and printed beside it. The devices meet by mailboxes that are
opened once in a program. With `--loop` the calls are iterations of a loop, as for layers in a scan.
Before anything is timed, the rows at all places, and the rows that come back, are compared with the
tokens. Then rows go there and back nine times, their signs changed each time, and must equal the
negated tokens.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from run import write

from scmoe.blocks.options import OverlapConfig
from scmoe.kernels.grouped_matmul import make_layout
from scmoe.kernels.put import put_rows, shared_mailboxes, with_room_for_tags
from scmoe.kernels.put.kernel import BLOCKS
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh, manual
from scmoe.profiling.timer import interleave, repeated

TILE = 128
LONGER = 5  # the longer chain has so many times the calls of the shorter one
BATCH = P(BATCH_AXES)


class Problem:
  """Random choices of all devices, and the place of each in its expert's tiles.

  Attributes:
    ranks, tokens, k, experts: W, t, K and the experts of one device.
    place, slot: int32 [W, t, K]: rank · R + row for the R rows of a rank's tiles, and rank · S +
      slot for its S = t·K choices.
    sizes: int32 [W, experts], rows of each expert.
    row_bytes: bytes of a row.
    num_rows: R.
    remote: mean bytes that leave a device.
  """

  def __init__(self, ranks: int, tokens: int, width: int, k: int, experts: int):
    self.ranks, self.tokens, self.k, self.experts = ranks, tokens, k, experts
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((ranks, tokens, ranks * experts)), -1)[..., :k]
    self.sizes = np.bincount(chosen.reshape(-1), minlength=ranks * experts).astype(np.int32)
    order = np.argsort(chosen.reshape(-1), kind="stable")
    position = np.empty(order.size, np.int64)
    position[order] = np.arange(order.size) - np.repeat(
      np.cumsum(self.sizes) - self.sizes, self.sizes
    )
    self.sizes = self.sizes.reshape(ranks, experts)
    tiles = -(-self.sizes // TILE)
    starts = np.cumsum(tiles, 1) - tiles
    self.row_bytes = width * 2
    self.num_rows = jax.eval_shape(self.layout, jnp.asarray(self.sizes[0])).num_rows
    rank, expert = np.divmod(chosen, experts)
    place = rank * self.num_rows + starts[rank, expert] * TILE + position.reshape(chosen.shape)
    self.place = place.astype(np.int32)
    self.slot = np.arange(chosen.size, dtype=np.int32).reshape(chosen.shape)
    away = (rank != np.arange(ranks)[:, None, None]).sum()
    self.remote = int(away) * width * 2 / ranks

  def layout(self, sizes):
    """The tiles of a device whose experts have so many rows each."""
    return with_room_for_tags(
      make_layout(sizes, int(self.sizes.sum(1).max()), TILE), self.row_bytes
    )


def there(x, place, slot, sizes, *, p: Problem, **to):
  """The rows that arrive at the experts, their slots, and how many rows are in use."""
  groups = p.layout(sizes)
  arrive = {"num_rows": p.num_rows, "groups": groups, "axis": "expert", **to}
  rows, tags = put_rows(x, place, tag_MK=slot, **arrive)
  return rows, tags, groups.num_tiles * TILE


def back(rows, tags, used, *, p: Problem, **to):
  """The rows that come back to their slots."""
  arrive = {"num_rows": p.tokens * p.k, "count": used[0], "axis": "expert", **to}
  return put_rows(rows, tags[:, None], **arrive)[0]


def next_after_put(place, x, slot, sizes, **options):
  """The next call's places: the same, but XLA does not know that they do not depend on this one."""
  _, tags, _ = there(x, place, slot, sizes, **options)
  assert tags is not None
  return place + jnp.minimum(jnp.abs(tags[0]), 0)


def next_after_put_back(tags, rows, used, **options):
  """The next call's slots, as in `next_after_put`."""
  slots = back(rows, tags, used, **options)
  return tags + jnp.minimum(jnp.abs(slots[0, 0]).astype(jnp.int32), 0)


def all_to_all(rows, mailboxes):
  """The next call's rows: those that NCCL's dense exchange brings."""
  del mailboxes
  by_rank = rows.reshape(jax.device_count(), -1, rows.shape[-1])
  return jax.lax.all_to_all(by_rank, "expert", 0, 0, tiled=True).reshape(rows.shape)


def ragged(rows, mailboxes):
  """The next call's rows: those that `lax.ragged_all_to_all` brings."""
  del mailboxes
  ranks = jax.device_count()
  part = rows.shape[0] // ranks
  sizes = jnp.full((ranks,), part, jnp.int32)
  starts = jnp.arange(ranks, dtype=jnp.int32) * part
  mine = jnp.full((ranks,), jax.lax.axis_index("expert") * part, jnp.int32)
  return jax.lax.ragged_all_to_all(rows, rows, starts, sizes, mine, sizes, axis_name="expert")


def programs(p: Problem, blocks: int, args, mesh) -> dict:
  """Chain -> (compiled chain, its arguments); what arrives there and back is checked."""
  options = OverlapConfig().compiler_options(gpu=jax.default_backend() == "gpu")
  place_on = lambda a: jax.device_put(a, NamedSharding(mesh, BATCH))
  flat = lambda a: place_on(jnp.asarray(a.reshape(-1, *a.shape[2:])))
  x = jax.random.normal(jax.random.key(0), (p.ranks * p.tokens, args.width)).astype(jnp.bfloat16)
  x, place, slot, sizes = place_on(x), flat(p.place), flat(p.slot), flat(p.sizes)
  by_puts = {"p": p, "blocks": blocks, "beside": args.beside}

  def jitted(arm, count, results: Any = BATCH):
    return jax.jit(manual(arm, mesh, (BATCH,) * count, results), compiler_options=options)

  rows, tags, used = jitted(lambda *a: there(*a, **by_puts), 4, (BATCH,) * 3)(x, place, slot, sizes)
  want = np.repeat(np.asarray(x), p.k, 0)
  np.testing.assert_array_equal(np.asarray(rows)[p.place.reshape(-1)], want)
  slots = jitted(lambda *a: back(*a, **by_puts), 3)(rows, tags, used)
  np.testing.assert_array_equal(np.asarray(slots), want)

  def nine_times(x, *rest):
    to: dict[str, Any] = by_puts | {"mailboxes": shared_mailboxes("expert", blocks)}
    turned = lambda x: -back(*there(x, *rest, **to), **to)[:: p.k]
    return jax.lax.fori_loop(0, 9, lambda _, x: turned(x), x)

  turned = jitted(nine_times, 4)(x, place, slot, sizes)
  np.testing.assert_array_equal(np.asarray(turned), -np.asarray(x))

  def chain(arm, calls, first, *rest):
    mailboxes = shared_mailboxes("expert", blocks)
    if args.loop:
      step = lambda _, given: arm(given, *rest, mailboxes=mailboxes)
      return jax.lax.fori_loop(0, calls, step, first)
    for _ in range(calls):
      first = arm(first, *rest, mailboxes=mailboxes)
    return first

  packed = place_on(jnp.repeat(x, p.k, 0))
  arms = {
    "all_to_all": (all_to_all, (packed,)),
    "put": (functools.partial(next_after_put, **by_puts), (place, x, slot, sizes)),
    "put back": (functools.partial(next_after_put_back, **by_puts), (tags, rows, used)),
    "ragged": (ragged, (packed,)),
  }
  found = {}
  for name in args.arms.split(","):
    arm, given = arms[name]
    for calls in (args.calls, LONGER * args.calls):
      stage = jitted(functools.partial(chain, arm, calls), len(given))
      found[f"{name}, {calls} calls"] = stage, given
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("--mebibytes", default="32", help="rows of a device, several with commas")
  parser.add_argument("--width", type=int, default=2048, help="D")
  parser.add_argument("--experts", type=int, default=8, help="experts of a device")
  parser.add_argument("--k", type=int, default=2, help="K")
  parser.add_argument("--blocks", default=str(BLOCKS), help="thread blocks of the kernel")
  parser.add_argument("--beside", action="store_true", help="the kernel has a stream of its own")
  parser.add_argument("--arms", default="all_to_all,put,put back")
  parser.add_argument("--calls", type=int, default=20, help="calls in the shorter program")
  parser.add_argument("--loop", action="store_true", help="calls are a loop's iterations")
  parser.add_argument("--rounds", type=int, default=9)
  parser.add_argument("--json", type=pathlib.Path)
  args = parser.parse_args()
  mesh = make_mesh(MeshConfig(data=1, expert=jax.device_count()))
  results = []
  print("| MiB a device | blocks | arm | us a call | GB/s of remote bytes | start, us |")
  print("|---|---|---|---|---|---|")
  for size in map(int, args.mebibytes.split(",")):
    tokens = size * 2**20 // (2 * args.width * args.k)
    p = Problem(mesh.shape["expert"], tokens, args.width, args.k, args.experts)
    for blocks in map(int, args.blocks.split(",")):
      found = programs(p, blocks, args, mesh)
      arms = {name: repeated(stage, *given) for name, (stage, given) in found.items()}
      timings = interleave(arms, rounds=args.rounds, calls=1)
      for name in args.arms.split(","):
        chains = [f"{name}, {n * args.calls} calls" for n in (1, LONGER)]
        short, long = (timings[chain].median for chain in chains)
        seconds = (long - short) / args.calls / (LONGER - 1)
        start = short - args.calls * seconds
        # The dense exchange sends equal parts.
        sent = p.remote if name.startswith("put") else size * 2**20 * (p.ranks - 1) / p.ranks
        row = {"mebibytes": size, "blocks": blocks, "arm": name, "us": seconds * 1e6}
        row |= {"remote_gb_s": sent / seconds / 1e9, "start_us": start * 1e6}
        row |= {"us_with_start": short / args.calls * 1e6}
        results.append(row)
        figures = f"{row['us']:.1f} | {row['remote_gb_s']:.0f} | {row['start_us']:.0f} |"
        print(f"| {size} | {blocks} | {name} | {figures}", flush=True)
  if args.json:
    write(args.json, results)


if __name__ == "__main__":
  main()
