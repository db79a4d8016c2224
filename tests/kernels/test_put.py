"""Rows put into other devices' results: against a loop in NumPy, and lowered for Hopper GPUs."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.kernels.grouped_matmul.layout import make_layout
from scmoe.kernels.put import peers, put_rows, rows, takes, with_room_for_tags
from scmoe.kernels.put.kernel import put_rows_kernel, rows_of_tags, tags_in
from scmoe.kernels.put.mailboxes import open_mailboxes
from scmoe.moe.dispatch import DispatchConfig, make_transport, put
from scmoe.moe.dispatch.put import Put
from scmoe.moe.route import make_routing
from scmoe.parallel.collectives import Exchange
from scmoe.parallel.mesh import AXES, BATCH_AXES, MeshConfig, make_mesh, manual

W, M, K, D, R, TILE = 4, 6, 2, 8, 24, 4
BATCH = P(BATCH_AXES)


PLACES = R - rows_of_tags(R, 4 * D)  # the rows after these hold the tags


def places() -> np.ndarray:
  """int32 [W, M, K], all different; a third of them no place."""
  rng = np.random.default_rng(0)
  rank, row = np.divmod(rng.permutation(W * PLACES)[: W * M * K].reshape(W, M, K), PLACES)
  drawn = rank * R + row
  return np.where(rng.random((W, M, K)) < 1 / 3, W * R, drawn).astype(np.int32)


@functools.cache
def put_on_devices(with_count: bool, with_groups: bool):
  mesh = make_mesh(MeshConfig(data=1, expert=W))
  sizes_G = jnp.asarray([5, 0, 2], jnp.int32)

  def local(x_MD, place_MK, tag_MK):
    count = jnp.asarray(4, jnp.int32) if with_count else None
    groups = None
    if with_groups:
      groups = make_layout(sizes_G, R - TILE - 3 * (TILE - 1), TILE)
      assert groups.num_rows == R - TILE
      groups = with_room_for_tags(groups, 4 * D)
      assert groups.num_rows == R
    options = {"num_rows": R, "axis": "expert", "count": count, "groups": groups}
    return put_rows(x_MD, place_MK, tag_MK=tag_MK, **options)

  return jax.jit(manual(local, mesh, (BATCH,) * 3, (BATCH, BATCH)))


@pytest.mark.parametrize("with_count", [False, True])
@pytest.mark.parametrize("with_groups", [False, True])
def test_rows_and_tags_arrive_at_their_places(with_count, with_groups):
  x = np.random.default_rng(1).normal(size=(W, M, D)).astype(np.float32)
  place, tag = places(), np.arange(W * M * K, dtype=np.int32).reshape(W, M, K)
  flat = lambda a: a.reshape(-1, a.shape[-1])
  got, tags = put_on_devices(with_count, with_groups)(flat(x), flat(place), flat(tag))
  want, wanted_tags = np.full((W * R, D), np.nan, np.float32), np.full(W * R, -2)
  if with_groups:  # tiles of 5, 0 and 2 rows: rows 5 to 7 and 10 to 11 are padding
    for row in (5, 6, 7, 10, 11):
      want[row::R], wanted_tags[row::R] = 0, -1
  for w, m, k in np.ndindex(W, M, K):
    if place[w, m, k] < W * R and (m < 4 or not with_count):
      want[place[w, m, k]], wanted_tags[place[w, m, k]] = x[w, m], tag[w, m, k]
  here = np.arange(W * R) % R < PLACES
  np.testing.assert_array_equal(got[here], want[here])
  np.testing.assert_array_equal(tags[here], wanted_tags[here])


@pytest.mark.parametrize(
  ("row_bytes", "copies", "ranks", "fits"),
  [
    (16, 1, 2, True),
    (22_208, 32, 8, True),
    (24, 1, 2, False),
    (22_240, 1, 2, False),
    (16, 33, 2, False),
    (16, 1, 9, False),
  ],
)
def test_rows_that_the_kernel_takes(row_bytes, copies, ranks, fits):
  assert takes(row_bytes, copies, ranks) == fits


@functools.cache
def four_devices():
  return make_mesh(MeshConfig(data=1, expert=W))


def transport_of(**options):
  """The transport that every command and program gets that asks for puts on four devices."""
  mesh, found = four_devices(), []

  def local(x):
    config = DispatchConfig(transport="put", **options)
    found.append(make_transport(config, tokens=4, num_experts=8, k=2))
    return x

  jax.eval_shape(manual(local, mesh, BATCH, BATCH), jax.ShapeDtypeStruct((W, D), jnp.float32))
  return found[0]


@pytest.mark.parametrize(
  ("capability", "processes", "disabled", "fault"),
  [
    ("8.0", 1, "0", r"is for Hopper GPUs \(compute capability 9\.0\), got A100"),
    ("9.0", 2, "0", r"is for GPUs that one process drives, got 2 processes"),
    ("9.0", 1, "1", r"writes into the other GPUs' memory, which NCCL_P2P_DISABLE forbids"),
    ("9.0", 1, "0", r"writes into the other .* memory, but GPU 0 does not reach that of 3"),
  ],
)
def test_gpus_that_cannot_put_refuse_it_and_a_cpu_does_not(
  monkeypatch, capability, processes, disabled, fault
):
  monkeypatch.setenv("NCCL_P2P_DISABLE", disabled)
  assert isinstance(transport_of(), Put)
  gpus = [
    types.SimpleNamespace(
      platform="gpu", compute_capability=capability, device_kind="A100", local_hardware_id=number
    )
    for number in (0, 1, 3)
  ]
  monkeypatch.setattr(put.jax, "devices", lambda: gpus)
  monkeypatch.setattr(put.jax, "local_devices", lambda: gpus)
  monkeypatch.setattr(peers, "reaches", lambda number, other: {number, other} != {0, 3})
  monkeypatch.setattr(put.jax, "process_count", lambda: processes)
  with pytest.raises(ConfigError, match=f"{fault}; use dispatch\\.transport=dropless"):
    transport_of()


def test_the_kernel_has_a_stream_of_its_own_if_its_blocks_are_given():
  assert (transport_of().blocks, transport_of(put_blocks=16).blocks) == (0, 16)


def test_without_a_driver_every_gpu_counts_as_within_reach(monkeypatch):
  def none(name):
    raise OSError(f"{name}: cannot open shared object file")

  monkeypatch.setattr(peers.ctypes, "CDLL", none)
  assert peers.apart((0, 1)) is None


def test_puts_do_not_go_from_host_to_host():
  with pytest.raises(ConfigError, match=r"works within one host, got dispatch\.nodes=2; use"):
    transport_of(nodes=2)


# -- lowered for GPUs ------------------------------------------------------------------------------


def lowered(function, in_specs, out_specs, *shapes) -> str:
  """The program for CUDA of a function of one device's shares, on two GPUs that need not exist."""
  mesh = AbstractMesh((1, 2, 1, 1, 1, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))
  traced = jax.jit(manual(function, mesh, in_specs, out_specs)).trace(*shapes)
  return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_no_row_arrives_where_tags_lie():
  """On devices without the kernel such a place would do no harm, and the mistake would not show."""
  mesh = make_mesh(MeshConfig(data=1, expert=W))

  def local(x_MD, place_MK):
    return put_rows(x_MD, place_MK, tag_MK=place_MK, num_rows=R, axis="expert")[0]

  put = jax.jit(manual(local, mesh, (BATCH, BATCH), BATCH))
  place = np.full((W * M, 1), W * R, np.int32)
  place[0], place[1] = PLACES - 1, PLACES
  got = np.asarray(put(jnp.ones((W * M, D)), place))
  assert (got[PLACES - 1] == 1).all()
  assert np.isnan(got[PLACES]).all()


def test_without_the_kernel_rows_are_put_under_vmap():
  """Each batch has its own rows, at the same places here, like seeds that train side by side."""
  mesh, place = make_mesh(MeshConfig(data=1, expert=W)), places()

  def local(x_BMD, place_MK):
    return jax.vmap(lambda x_MD: put_rows(x_MD, place_MK, num_rows=R, axis="expert")[0])(x_BMD)

  put = jax.jit(manual(local, mesh, (P(None, BATCH_AXES), BATCH), P(None, BATCH_AXES)))
  x = jnp.arange(2.0 * W * M).reshape(2, W * M, 1)
  got = np.asarray(put(x, place.reshape(-1, K)))
  for batch, w, m, k in np.ndindex(2, W, M, K):
    if place[w, m, k] < W * R:
      assert got[batch, place[w, m, k], 0] == x[batch, w * M + m, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_tags_are_read_from_the_last_rows(dtype):
  """The kernel writes them there one after the other, as words of four bytes."""
  width, num_rows = 32, 40
  size = jnp.dtype(dtype).itemsize
  room = rows_of_tags(num_rows, width * size)
  held = np.zeros((num_rows, width * size), np.uint8)
  tags = np.arange(num_rows - room, dtype=np.int32) * 70_000 - 3
  held[num_rows - room :].reshape(-1)[: tags.nbytes] = tags.view(np.uint8)
  got = tags_in(jnp.asarray(held.view(jnp.dtype(dtype))))
  np.testing.assert_array_equal(got, tags)


@pytest.mark.parametrize(
  ("num_rows", "row_bytes", "tile", "spare"),
  # One more row of 16 bytes holds four tags. One more tile of 64 rows of 2,560 bytes holds 40,064
  # tags, which need 63 rows. For 128 rows of 16 bytes 32 more hold the tags, 8 tiles of four.
  [(4, 16, 1, 1), (40_064, 2_560, 64, 1), (128, 16, 4, 8)],
)
def test_tiles_have_room_for_the_tags_of_all_other_rows(num_rows, row_bytes, tile, spare):
  made = make_layout(jnp.asarray([0]), num_rows - tile + 1, tile)
  assert made.num_rows == num_rows
  groups = with_room_for_tags(made, row_bytes)
  assert groups.num_rows == num_rows + spare * tile
  room = rows_of_tags(groups.num_rows, row_bytes)
  assert room <= spare * tile
  assert room * row_bytes >= 4 * (groups.num_rows - room) > (room - 1) * row_bytes
  assert int(groups.num_tiles[0]) == 0
  assert len(groups.tile_group_I) == groups.num_rows // tile


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("tagged", [False, True])
def test_the_kernel_lowers_for_cuda(tagged, beside):
  def local(x, place, tag, sizes):
    layout = with_room_for_tags(make_layout(sizes, 512, 128), 512)
    groups = layout.group_sizes_G, layout.tile_starts_G, layout.tiles_G
    mailboxes, tags = open_mailboxes("expert", 8), tag if tagged else None
    sizes = {"num_rows": layout.num_rows, "tile": 128, "blocks": 8, "beside": beside}
    return put_rows_kernel(x, place, tags, jnp.asarray(256), groups, mailboxes, **sizes)

  shape = lambda *s, dtype: jax.ShapeDtypeStruct(s, dtype)
  places = shape(512, 2, dtype=jnp.int32)
  given = shape(512, 256, dtype=jnp.bfloat16), places, places, shape(8, dtype=jnp.int32)
  text = lowered(local, (BATCH,) * 4, BATCH, *given)
  assert text.count("@mosaic_gpu_v2") == 2  # the second kernel opens the mailboxes
  assert ('_xla_stream_annotation = "2"' in text) == beside


def layer_text(monkeypatch, blocks: int) -> str:
  """The program for CUDA of a layer that puts rows, with its gradient."""
  for module in (rows, put):
    monkeypatch.setattr(module, "runs_ptx", lambda: True)

  def local(x, weight, expert):
    def output(x, weight):
      probs = jnp.zeros((x.shape[0], 4))
      # A slack of 2 has room for all rows, so the loop of overflow rounds is not in the program.
      way = Put(Exchange("expert", 2), slack=2.0, longest=2 * x.shape[0], blocks=blocks)
      sent = way.dispatch(x, make_routing(expert, weight, probs, probs), None)
      done = tuple(2 * rows for rows in sent.rows)
      return way.combine(dataclasses.replace(sent, rows=done)).astype(jnp.float32).sum()

    return jax.grad(output, (0, 1))(x, weight)

  shape = lambda *s, dtype: jax.ShapeDtypeStruct(s, dtype)
  choices = shape(256, 2, dtype=jnp.float32), shape(256, 2, dtype=jnp.int32)
  return lowered(local, (BATCH,) * 3, BATCH, shape(256, 256, dtype=jnp.bfloat16), *choices)


def test_a_layer_puts_rows_four_times_with_its_gradient(monkeypatch):
  """Dispatch, combine, and the gradient of each; a pair of exchanges forward, a pair backward."""
  text = layer_text(monkeypatch, blocks=0)
  assert text.count("call @put_rows_kernel") == 4
  # Each of them opens mailboxes of its own, whose addresses one all-gather tells.
  assert text.count("@mosaic_gpu_v2() {") == 4  # the kernel that opens them has no operand
  counts = 1
  assert text.count('"stablehlo.all_gather"') == 4 + counts
  assert "_xla_stream_annotation" not in text


def test_a_layer_whose_blocks_are_given_puts_rows_on_a_stream_of_its_own(monkeypatch):
  text = layer_text(monkeypatch, blocks=16)
  calls = [line for line in text.splitlines() if '_xla_stream_annotation = "2"' in line]
  # Dispatch, the gradient of combine, and one call for combine and for the gradient of dispatch.
  assert len([line for line in calls if " = call @compute_on" in line]) == 3
  assert text.count("call @put_rows_kernel") == 4
  assert text.count("-> (tensor<2048xi32>, tensor<2xi32>)") >= 4  # a mailbox for 16 blocks
