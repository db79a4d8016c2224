"""Puts between GPUs, each program in a process of its own: a hang ends with its time limit."""

import os
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
      way = kind(Exchange("expert", 2))
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
    return -put_rows(x, place[:, None], num_rows=M, axis="expert", mailboxes=mailboxes)[0]

  return jax.lax.fori_loop(0, 200, moved, x)


got = jax.jit(manual(local, mesh, (batch, batch), batch))(jnp.asarray(x), jnp.asarray(place))
want = x
for _ in range(200):
  moved = np.empty_like(want)
  moved[place] = -want
  want = moved
np.testing.assert_array_equal(np.asarray(got), want)
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
    }
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    run_main(main, ["--config", "quickstart", "--smoke", "--workdir", folder, *flags])
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    losses[transport] = [r["loss"] for r in map(json.loads, lines) if r["kind"] == "train"]
assert len(losses["put"]) == 6
for a, b in zip(losses["put"], losses["dropless"], strict=True):
  assert abs(a - b) < 2e-2, losses
"""


@pytest.mark.parametrize("program", [LAYER, LOOP, RUN], ids=["layer", "loop", "run"])
def test_rows_put_between_gpus_are_those_that_nccl_exchanges(program):
  """Values and gradients of a layer, 200 calls by one mailbox, and a run's losses."""
  if jax.device_count() < 2:
    pytest.skip("needs two GPUs of one host")
  paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_MODULE_LOADING": "EAGER"}
  done = subprocess.run(
    [sys.executable, "-c", program], env=environment, timeout=150, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr[-2000:]
