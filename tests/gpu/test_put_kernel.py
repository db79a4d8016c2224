"""Single puts between GPUs, in a process of its own: a hang ends with its time limit."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]

# Rows of 4 KiB fill every stage of the kernel many times over.
PROGRAM = """
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


def test_rows_put_between_gpus_are_those_that_nccl_exchanges():
  if jax.device_count() < 2:
    pytest.skip("needs two GPUs of one host")
  environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_MODULE_LOADING": "EAGER"}
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM], env=environment, timeout=90, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr[-2000:]
