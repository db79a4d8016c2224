"""Experts in the host's memory on a GPU: the same tokens if sums have one order, and copies that
begin behind the gate."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scmoe.inference.decode import generate
from scmoe.inference.sampling import Sampling
from scmoe.models.config import ModelConfig
from scmoe.offload.fetch import fetch, has_kernel
from scmoe.parallel.mesh import MeshConfig
from scmoe.run import build
from scmoe.run.benchmark import offload_request, random_model
from scmoe.run.config import RunConfig

pytestmark = pytest.mark.gpu

PROMPTS = [list(range(1, 40))]


def tokens(way, dtype, **options):
  config = ModelConfig(
    width=512, num_heads=8, num_layers=4, num_experts=8, wiring="scmoe_pos2", context=256,
    dtype=dtype, init_std=0.1, **options,
  )  # fmt: skip
  run = dataclasses.replace(RunConfig(), model=config, mesh=MeshConfig(1))
  built = build.build(run.resolve(num_devices=1, vocab_size=512), jax.devices()[:1])
  model = random_model(built, offload_request(way))
  options = {"mesh": built.mesh, "offload": offload_request(way).named, "max_new_tokens": 24}
  options["deterministic"] = True
  return generate(model, PROMPTS, Sampling(temperature=0.0), **options)


@functools.cache
def tokens_on_device(dtype):
  """The tokens of a model whose experts are all in the device's memory."""
  return tokens("none", dtype)


# Each way is a test of its own, so that processes beside each other share them.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
  "way", ["blocking", "early", "early+3", "ring", "ring,early+8", "ring,blocking+2"]
)
def test_every_way_says_the_same(way, dtype):
  assert tokens(way, dtype) == tokens_on_device(dtype)


def test_two_experts_of_a_token():
  assert tokens("ring,early+4", "bfloat16", top_k=2) == tokens("none", "bfloat16", top_k=2)


def test_experts_are_copied_into_their_slots_and_no_others():
  host = NamedSharding(Mesh(jax.devices()[:1], "x"), PartitionSpec(), memory_kind="pinned_host")
  wide = np.arange(5 * 256 * 384, dtype=np.float32).reshape(5, 256, 384)
  stacks = [jax.device_put(x, host) for x in (wide, wide[:, :96].astype(jnp.bfloat16))]
  slots = [jnp.full((4, *x.shape[1:]), 7, x.dtype) for x in stacks]
  assert has_kernel(stacks)
  id_N, place_N = jnp.asarray([3, 1, 5]), jnp.asarray([2, 0, 1])
  for copies in (0, 2):
    found = jax.jit(fetch)(stacks, id_N, place_N, jnp.int32(copies), slots)
    for new, stack in zip(found, stacks):
      expected = np.full(new.shape, 7, new.dtype)
      for i in range(copies):
        expected[place_N[i]] = np.asarray(stack)[id_N[i]]
      np.testing.assert_array_equal(np.asarray(new), expected)
