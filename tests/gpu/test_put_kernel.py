"""Puts between GPUs, each program in a process of its own: a hang ends with its time limit.

Where there is one GPU, it is two ranks at once (`TWO_RANKS`).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]

# Rows of 4 KiB fill every stage of the kernel many times over.
LAYER = """
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from scmoe.moe.dispatch import Dropless, Put
from scmoe.moe.route import make_routing
from scmoe.parallel.collectives import Exchange
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh, manual

T, D, E, K = 8192, 2048, 16, 4  # T is global
mesh, batch = make_mesh(MeshConfig(data=1, expert=2)), P(BATCH_AXES)
rng = np.random.default_rng(0)
x = jnp.asarray(rng.normal(size=(T, D)), jnp.bfloat16)
weight = jnp.asarray(rng.uniform(size=(T, K)), jnp.float32)
expert = jnp.asarray(np.argsort(rng.random((T, E)), 1)[:, :K], jnp.int32)


def step(kind):
  def local(x, weight, expert):
    def output(x, weight):
      probs = jnp.zeros((x.shape[0], E))
      way = kind(Exchange("expert", 2), **({"blocks": PUT_BLOCKS} if kind is Put else {}))
      double = lambda rows, layout: 2 * rows
      sent = way.dispatch(x, make_routing(expert, weight, probs, probs), double)
      rows = tuple(map(double, sent.rows, sent.layouts))
      return way.combine(dataclasses.replace(sent, rows=rows))

    y, pull = jax.vjp(output, x, weight)
    return y, *pull(x)

  return jax.jit(manual(local, mesh, (batch,) * 3, (batch,) * 3))


want, put = step(Dropless)(x, weight, expert), step(Put)
for _ in range(200):
  got = put(x, weight, expert)
for a, b in zip(got, want):
  np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
"""

# One mailbox serves all of the loop's 200 calls.
LOOP = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from scmoe.kernels.put import put_rows, shared_mailboxes
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh, manual

M, D, W = 512, 256, 2  # M rows of a device
mesh, batch = make_mesh(MeshConfig(data=1, expert=W)), P(BATCH_AXES)
rng = np.random.default_rng(0)
x = rng.normal(size=(W * M, D)).astype(np.float32)
place = rng.permutation(W * M).astype(np.int32)


def local(x, place):
  mailboxes = shared_mailboxes("expert")

  def moved(_, x):
    to = {"num_rows": M, "axis": "expert", "mailboxes": mailboxes}
    to |= {"blocks": PUT_BLOCKS, "beside": True} if PUT_BLOCKS else {}
    return -put_rows(x, place[:, None], **to)[0]

  return jax.lax.fori_loop(0, 200, moved, x)


got = jax.jit(manual(local, mesh, (batch, batch), batch))(jnp.asarray(x), jnp.asarray(place))
want = x
for _ in range(200):
  moved = np.empty_like(want)
  moved[place] = -want
  want = moved
np.testing.assert_array_equal(np.asarray(got), want)
"""

# One GPU is two ranks: one kernel has the blocks of the first rank, then those of the second.
TWO_RANKS = """
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from scmoe.kernels import ptx
from scmoe.kernels.launch import compiled
from scmoe.kernels.put import kernel
from scmoe.kernels.put.mailboxes import Mailboxes, open_mailboxes

W, M, K, D, R, BLOCKS = 2, 700, 2, 1024, 1800, 16
places = R - kernel.rows_of_tags(R, 2 * D)
rng = np.random.default_rng(0)
x = rng.normal(size=(W, M, D)).astype(jnp.bfloat16)
rank, row = np.divmod(rng.permutation(W * places)[: W * M * K].reshape(W, M, K), places)
# Tiles of 64 rows: a group of 70 rows in tiles 0 and 1, one of 20 rows in tile 2.
groups = jnp.asarray([70, 20]), jnp.asarray([0, 2]), jnp.asarray([2, 1])
padding = np.r_[70:128, 148:192]
nowhere = np.isin(row, padding) | (rng.random(row.shape) < 0.1)
place = np.where(nowhere, W * R, rank * R + row).astype(np.int32)
tag = np.arange(W * M * K, dtype=np.int32).reshape(W, M, K)
bodies, operands, built = [], [], {}
BLOCK = "block_of_grid"


def caught(body, **options):
  def call(*given):
    bodies.append(body)
    operands.extend(given)
    return jnp.zeros(options["out_type"].shape, options["out_type"].dtype)

  built.update(options)
  return call


def both_bodies(*refs):
  # Operands of both ranks, their results, and the block's shared memory.
  half, shared = len(operands) // W, refs[-1]
  for rank, body in enumerate(bodies):
    mine = (*refs[rank * half : (rank + 1) * half], refs[W * half + rank], shared)
    pl.when(jax.lax.axis_index("block") // BLOCKS == rank)(lambda: body(*mine))


def both(*given):
  opened = [open_mailboxes(None, BLOCKS) for _ in range(W)]
  addresses = jnp.concatenate([one.address_W2 for one in opened])
  for rank, one in enumerate(opened):
    mailboxes = Mailboxes(one.own, addresses, jnp.full((1,), rank, jnp.int32))
    block = lambda to: ptx.lines([f"mov.u32 {to}, %ctaid.x;", ptx.subtract(to, to, rank * BLOCKS)])
    rest = jnp.asarray(M - 100), groups, mailboxes
    sizes = {"num_rows": R, "tile": 64, "blocks": BLOCKS}
    with mock.patch.object(kernel, "compiled", caught), mock.patch.object(ptx, BLOCK, block):
      kernel.put_rows_kernel.__wrapped__(*given[rank::W], *rest, **sizes)
  options = built | {"out_type": [built["out_type"]] * W, "grid": (W * BLOCKS,)}
  return compiled(both_bodies, **options)(*operands)


stage = jax.jit(both).lower(*x, *place, *tag).compile()
for _ in range(3):
  results = stage(*x, *place, *tag)
for rank in range(W):
  rows, tags = np.asarray(results[rank]), np.asarray(kernel.tags_in(results[rank]))
  for w in range(W):
    here = (place[w] // R == rank) & (np.arange(M) < M - 100)[:, None]
    assert here.sum() > 200
    np.testing.assert_array_equal(rows[place[w][here] % R], x[w][np.nonzero(here)[0]])
    np.testing.assert_array_equal(tags[place[w][here] % R], tag[w][here])
  np.testing.assert_array_equal(rows[padding].astype(np.float32), 0)
  np.testing.assert_array_equal(tags[padding], -1)
"""

# A scan whose every step begins the next one's dispatch, so that it hands on what was sent.
RUN = """
import json
import sys
import tempfile
from pathlib import Path

from scmoe.base.errors import run_main
from scmoe.train import main

losses = {}
for transport in ("dropless", "put"):
  with tempfile.TemporaryDirectory() as folder:
    fields = {
      "mesh.expert": 2, "mesh.data": 1, "model.moe_every": 1, "model.num_layers": 3,
      "model.width": 64, "model.dtype": "bfloat16", "overlap.unroll": 1,
      "overlap.search_seconds": 0, "train.steps": 6, "train.log_every": 1, "train.remat": "dots",
      "dispatch.transport": transport, "dispatch.slack": 2.0,
      **({"dispatch.put_blocks": PUT_BLOCKS} if transport == "put" and PUT_BLOCKS else {}),
    }
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    run_main(main, ["--config", "quickstart", "--smoke", "--workdir", folder, *flags])
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    losses[transport] = [r["loss"] for r in map(json.loads, lines) if r["kind"] == "train"]
assert len(losses["put"]) == 6
for a, b in zip(losses["put"], losses["dropless"], strict=True):
  assert abs(a - b) < 2e-2, losses
"""


def run(program: str, **change: str) -> None:
  """Runs a program in a process of its own, with constants changed; fails if it does.

  Args:
    program: Python.
    change: name -> the value that it gets in place of the one in the program's text.
  """
  for name, value in change.items():
    program, found = re.subn(rf"\b{name}\b", value, program)
    assert found, name
  paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_MODULE_LOADING": "EAGER"}
  done = subprocess.run(
    [sys.executable, "-c", program], env=environment, timeout=150, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(autouse=True)
def _hopper():
  """By the device: a Hopper that is not recognised fails."""
  if getattr(jax.devices()[0], "compute_capability", None) != "9.0":
    pytest.skip("needs a GPU of compute capability 9.0")


def test_two_ranks_on_one_gpu_put_rows_to_each_other():
  """Rows, tags and zeros of two ranks, both of them blocks of one kernel on one GPU."""
  run(TWO_RANKS)


@pytest.mark.parametrize("blocks", [0, 16])
@pytest.mark.parametrize("program", [LAYER, LOOP, RUN], ids=["layer", "loop", "run"])
def test_rows_put_between_gpus_are_those_that_nccl_exchanges(program, blocks):
  """Values and gradients of a layer, 200 calls by one mailbox, and a run's losses."""
  if jax.device_count() < 2:
    pytest.skip("needs two GPUs of one host")
  run(program, PUT_BLOCKS=str(blocks))
