"""Dropless memory: bounded by the buffers, whatever the routing, and near the capacity transport's.

Sizes are read off the compiled program. The routing is data: one program serves balanced tokens and
all tokens to one expert, so its memory cannot depend on them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.moe.dispatch import DispatchConfig, dropless
from scmoe.moe.layer import MoE, MoEConfig
from scmoe.parallel.gradients import reduce_gradients
from scmoe.parallel.mesh import (
  AXES,
  BATCH_AXES,
  MeshConfig,
  batch_sharding,
  make_mesh,
  manual,
  parameter_specs,
)

E, K = 16, 2


def gradient(dispatch: DispatchConfig, mesh, S, D, F):
  """The compiled gradient of a MoE layer, its parameters, and the number of rounds it reports."""
  config = MoEConfig(D, F, E, K, activation="swiglu", dispatch=dispatch)
  graph, params = nnx.split(MoE(config, rngs=nnx.Rngs(0)))
  specs = parameter_specs(params)
  params = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), params, specs)

  def local(params, x):
    def loss(params, x):
      y, sums = nnx.merge(graph, params)(x)
      return (y**2).sum(), (sums.rounds[None], sums.dropped[None])

    (dparams, dx), aux = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    return (reduce_gradients(dparams, specs), dx), aux

  batch = P(BATCH_AXES)
  step = manual(local, mesh, (specs, batch), ((specs, batch), P(AXES)))
  x = jax.ShapeDtypeStruct((mesh.size, S, D), jnp.float32, sharding=batch_sharding(mesh))
  return jax.jit(step).lower(params, x).compile(), params


@pytest.fixture
def mesh(devices):
  return make_mesh(MeshConfig(data=1, expert=devices), jax.devices()[:devices])


@pytest.mark.parametrize("devices", [night(2), 4, night(8)])
def test_within_1_35_of_the_capacity_transport(mesh):
  """Measured 1.07, 0.95 and 0.88: fewer devices have more experts, whose gradient the loop adds up.

  Rows of 1 KiB; narrower ones weigh less beside the integers that route them.
  """
  sizes = {"S": 4096, "D": 256, "F": 512}
  used = [
    gradient(dispatch, mesh, **sizes)[0].memory_analysis().temp_size_in_bytes
    for dispatch in (DispatchConfig(transport="dropless"), DispatchConfig(capacity_factor=1.25))
  ]
  assert used[0] <= 1.35 * used[1], used


@pytest.mark.parametrize("devices", [8])
def test_one_program_for_every_routing(mesh):
  """Equal tokens all choose the same experts: many rounds, in the program of the balanced case."""
  S, D = 256, 32
  program, params = gradient(DispatchConfig(transport="dropless"), mesh, S, D, 64)
  rng = np.random.default_rng(0)
  spread = rng.normal(size=(8, S, D)).astype(np.float32)
  same = np.broadcast_to(spread[:1, :1], spread.shape)
  rounds = []
  for x in (spread, same):
    _, (count, dropped) = program(params, jax.device_put(x, batch_sharding(mesh)))
    rounds.append(int(count.max()))
    assert int(dropped.sum()) == 0
  # One peer gets every first choice of a device, S rows; its buffer has slack · S·K / 8 of them.
  first = int(np.ceil(1.25 * S * K / 8))
  assert rounds[1] >= 1 + (S - first) // dropless.overflow_rows(first)
  assert rounds[0] < rounds[1] / 4
