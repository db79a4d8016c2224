"""Sizes of the mesh, the one table of axes, and what cannot be."""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.parallel import mesh as meshes
from scmoe.parallel.mesh import MeshConfig, batch_sharding, make_mesh, partition_spec, replicated


def test_eight_simulated_devices():
  assert len(jax.devices()) == 8


@pytest.mark.parametrize(
  ("config", "resolved"),
  [
    (MeshConfig(), (8, 1, 1)),
    (MeshConfig(expert=4), (2, 4, 1)),
    (MeshConfig(expert=2, tensor=2), (2, 2, 2)),
    (MeshConfig(data=1, expert=2), (1, 2, 1)),
  ],
  ids=str,
)
def test_data_takes_what_the_others_leave(config, resolved):
  assert dataclasses.astuple(config.resolve(8))[:3] == resolved


def test_shape_and_order_of_the_mesh():
  mesh = make_mesh(MeshConfig(2, 2, 2))
  assert [mesh.shape[axis] for axis in ("data", "expert", "tensor")] == [2, 2, 2]
  assert [device.id for device in mesh.devices.reshape(-1)] == list(range(8))


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ({"data": 0}, r"mesh\.data=0 has no devices; use -1"),
    ({"expert": 0}, r"mesh\.expert=0 is too small; the least is 1"),
    ({"data": -2}, r"mesh\.data=-2 is too small; the least is -1"),
    ({"expert": 3}, r"mesh\.expert=3 x mesh\.tensor=1 = 3 does not divide the 8 devices"),
    (
      {"data": 4, "expert": 4},
      r"mesh\.data=4 x mesh\.expert=4 x mesh\.tensor=1 needs 16 devices, 8 found",
    ),
  ],
  ids=str,
)
def test_meshes_that_cannot_be(sizes, message):
  with pytest.raises(ConfigError, match=message):
    make_mesh(MeshConfig(**sizes))


def test_names_align_to_the_right():
  assert partition_spec(("embed", "heads", None), 4) == P(None, None, "tensor", None)
  assert partition_spec(("expert", "embed", "hidden")) == P("expert", None, "tensor")


def test_every_axis_of_the_table_is_one_of_the_mesh():
  for name, axis in meshes.LOGICAL_TO_MESH.items():
    axes = axis if isinstance(axis, tuple) else (axis,)
    assert set(axes) <= {None, *meshes.AXES}, name


def test_the_batch_lies_over_data_and_expert():
  mesh = make_mesh(MeshConfig(2, 4))
  assert batch_sharding(mesh).shard_shape((8, 3)) == (1, 3)
  assert batch_sharding(mesh, leading=1).shard_shape((5, 8, 3)) == (5, 1, 3)
  assert replicated(mesh).shard_shape((8, 3)) == (8, 3)
