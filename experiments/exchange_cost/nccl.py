"""Times an all-to-all and a sum alone between all GPUs of a host, as NCCL's environment has it.

  NCCL_P2P_DISABLE=1 python experiments/exchange_cost/nccl.py
  NCCL_P2P_DISABLE=1 NCCL_NCHANNELS_PER_PEER=8 python experiments/exchange_cost/nccl.py
  NCCL_P2P_DISABLE=1 NCCL_DEBUG=INFO python experiments/exchange_cost/nccl.py | grep -i channel

A program has four or twenty collectives one after the other; the time of one is the difference of
the two, medians of seven calls in turns, over sixteen. Prints one line: NCCL's settings, then for
each size in MB (10^6 bytes) a device the time and the bytes that leave a device a second: of an
all-to-all those for other devices, of a sum over W devices 2 (W - 1) / W times its size, as in a
ring.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scmoe.base.errors import ConfigError, run_main
from scmoe.profiling.timer import interleave, repeated

WIDTH = 1280
SHORT, LONG = 4, 20


def chain(collective, count: int, mesh):
  """`count` collectives, none of which begins before the one ahead has ended."""

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
  def program(x):
    for _ in range(count):
      x = jax.lax.optimization_barrier(collective(x))
    return x

  return jax.jit(program)


def megabytes_of(flag: str, text: str) -> list[float]:
  """The sizes in `text`, separated by commas.

  Raises:
    ConfigError: one of them is no number of at least 0.1, below which nothing can be told.
  """
  try:
    sizes = [float(word) for word in text.split(",") if word]
    if min(sizes, default=1.0) >= 0.1:
      return sizes
  except ValueError:
    pass
  raise ConfigError(f"{flag}={text!r} must be megabytes from 0.1 on, with commas; e.g. 10.5,42")


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--rows", default="5.2,10.5,42", help="of an all-to-all, MB a device")
  parser.add_argument("--sums", default="52", help="of a sum, MB a device")
  args = parser.parse_args()
  rows, sums = megabytes_of("--rows", args.rows), megabytes_of("--sums", args.sums)
  devices = jax.device_count()
  if devices < 2:
    raise ConfigError(f"nothing travels with one device, got {jax.devices()[0]}; use two GPUs")
  mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  swap = lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True)
  mean = lambda x: jax.lax.psum(x, "x") / jnp.float32(devices)
  others = (devices - 1) / devices
  kinds = (
    ("all-to-all", swap, rows, jnp.bfloat16, others),
    ("sum", mean, sums, jnp.float32, 2 * others),
  )
  found = []
  for name, collective, sizes, dtype, leaving in kinds:
    for megabytes in sizes:
      length = max(1, int(1e6 * megabytes / dtype.dtype.itemsize / WIDTH) // devices) * devices
      x = jax.device_put(jnp.ones((devices * length, WIDTH), dtype), NamedSharding(mesh, P("x")))
      arms = {str(n): repeated(chain(collective, n, mesh), x) for n in (SHORT, LONG)}
      for arm in arms.values():
        arm(2)  # compiles, and connects the devices
      short, long = interleave(arms, rounds=7, calls=1).values()
      each = (long.median - short.median) / (LONG - SHORT)
      speed = leaving * megabytes / each / 1e3
      found.append(f"{name} {megabytes:g} MB {1e3 * each:.3f} ms {speed:.1f} GB/s")
  settings = " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_"))
  print(f"{settings or 'as NCCL finds it'} | {'; '.join(found)}", flush=True)


if __name__ == "__main__":
  run_main(lambda argv: main())
