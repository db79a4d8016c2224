"""The device mesh: its axes, and the one table that says which array dimension lies on which axis.

A user gives `data` x `expert` x `tensor` x `sequence`. The batch is sharded over data x expert,
experts over expert, hidden widths, heads and the vocabulary over tensor, and the tokens of each row
over sequence. Everything else is replicated.

If the expert axis has more devices than there are experts, the mesh splits that axis in two:
`expert`, one position per expert, and `shard`, over which the hidden width of each expert is
divided. Example: 8 devices and 4 experts make expert=4 x shard=2. Otherwise `shard` has size 1.

The sequence axis becomes two axes, too: `sequence_ring` and `sequence_heads`. One of them has all
its devices and the other has size 1, so code in the manual region can see from the mesh how
attention crosses the devices (`MeshConfig.sequence_attention`).

Parameters keep their logical shape on every mesh.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.base.options import Options, check_callable, check_type, check_whole, option

AXES = ("data", "expert", "shard", "sequence_ring", "sequence_heads", "tensor")
# The rows of a batch are split over all of these axes together.
BATCH_AXES = ("data", "expert", "shard")
# The tokens of a row are split over one of these; the other has one device.
SEQUENCE_AXES = ("sequence_ring", "sequence_heads")
# Devices with different indices on one of these axes have different tokens.
TOKEN_AXES = (*BATCH_AXES, *SEQUENCE_AXES)

# Logical dimension of a parameter or activation -> the mesh axis, or axes, that divide it; None: no
# axis. The only such table.
LOGICAL_TO_MESH: dict[str | None, Any] = {
  None: None,
  "batch": BATCH_AXES,
  "expert": "expert",
  "heads": "tensor",
  "kv_heads": "tensor",
  "hidden": "tensor",  # hidden width of a dense MLP
  "expert_hidden": ("shard", "tensor"),  # hidden width of an expert, F
  "vocab": "tensor",
  "embed": None,  # width of the model, D
  "data_vocab": ("tensor", "data"),  # the vocabulary, with `mesh.embedding=partitioned`
  "data_embed": "data",  # width of a table that is only looked up, with the same
  "layers": None,
}


def host_device() -> Any | None:
  """JAX's device for the host itself, a CPU; None if JAX_PLATFORMS leaves it out."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:
    return None


@dataclasses.dataclass(frozen=True)
class MeshConfig(Options, path="mesh"):
  """Sizes of the mesh axes, and how the state and attention are divided over the devices.

  The product of the sizes is the number of devices used. The other options say how attention
  crosses the sequence axis, what ranks share or partition and how they gather it, and in which
  memory moments lie.
  """

  data: int = option(-1, "devices on the data axis; -1 takes all that the others leave", minimum=-1)
  expert: int = option(1, "devices on the expert axis (expert parallelism)", minimum=1)
  tensor: int = option(
    1, "devices on the tensor axis (hidden widths, heads, vocabulary)", minimum=1
  )
  sequence: int = option(
    1,
    "devices that divide the tokens of each row among them, for contexts that one device cannot "
    "hold (docs/scale.md)",
    minimum=1,
  )
  sequence_attention: str = option(
    "ring",
    "with mesh.sequence: how a token attends to those of other devices: ring (keys and values go "
    "round), or heads (all-to-alls give each device all tokens of some heads)",
    choices=("ring", "heads"),
  )
  shard_state: str = option(
    "none",
    "what the devices with equal parameters share instead of each holding it whole: none; the "
    "optimizer's moments; or parameters too, gathered a pair at a time (docs/scale.md)",
    choices=("none", "moments", "parameters"),
  )
  gather_again: bool = option(
    True,
    "with mesh.shard_state=parameters: the backward pass gathers a pair's parameters again; False "
    "keeps those of all pairs meanwhile, in the compute type",
  )
  gather_ahead: bool = option(
    False,
    "advanced: with mesh.gather_again and pairs that are written out (overlap.unroll): a pair is "
    "gathered while the pair before it computes, in both passes; for GPUs, as simulated devices "
    "may wait for each other forever (docs/scale.md)",
  )
  embedding: str = option(
    "whole",
    "how data ranks read embedding and head: whole (stored as mesh.shard_state says); or "
    "partitioned: each rank has a part, and the rows of a batch travel, or the table if that is "
    "fewer bytes (docs/scale.md)",
    choices=("whole", "partitioned"),
  )
  bucket_bytes: int = option(
    1 << 25,
    "with mesh.shard_state: arrays of fewer bytes travel together, up to so many in a collective; "
    "0 sends each array by itself",
    minimum=0,
  )

  moments_in: str = option(
    "device",
    "where the optimizer's moments, and the lower halves of parameters (optimizer.ablation.masters)"
    ", lie between updates: device; host, in pinned memory from which they come layer by layer; or "
    "files, in mesh.moments_folder (docs/scale.md)",
    choices=("device", "host", "files"),
  )
  moments_folder: str = option(
    "",
    "with mesh.moments_in=files: a folder on a local disk for the file of moments, which has no "
    "name and goes when the run ends",
  )
  moments_update: str = option(
    "device",
    "who updates moments in the host's memory: device, to which they are copied; or host, to which "
    "gradients are copied instead, AdamW only, also for moments in files (docs/scale.md)",
    choices=("device", "host"),
  )
  moments_ahead: int = option(
    1,
    "with mesh.moments_in=host or files: layers whose moments (or gradients, "
    "mesh.moments_update=host) are copied or read before their turn, each of which takes memory; "
    "0: none, so that no copy is hidden",
    minimum=0,
  )
  moments_kept: int = option(
    0,
    "with mesh.moments_in=host: the last layers of each stack, so many, keep their moments on the "
    "device, as its memory allows; the first layer's leave it in any case",
    minimum=0,
  )

  experts_in: str = option(
    "device",
    "with mesh.moments_in=host: where the matrices of routed experts lie in training: device; or "
    "host, from which each layer's come while the layer before computes, in both passes, and to "
    "which their gradients go (docs/scale.md)",
    choices=("device", "host"),
  )

  def resolve(self, num_devices: int) -> MeshConfig:
    """The same options, with a number in place of `data` = -1, for `num_devices` devices.

    Raises:
      ConfigError: `data` is 0; or `data` is -1 and the product of the other sizes does not divide
        `num_devices`; or the product of all sizes is larger than `num_devices`.
    """
    if self.data == 0:
      raise ConfigError("mesh.data=0 has no devices; use -1 for all that the other axes leave")
    others = self.expert * self.tensor * self.sequence
    inner = f"mesh.expert={self.expert} x mesh.tensor={self.tensor}"
    inner += f" x mesh.sequence={self.sequence}" if self.sequence > 1 else ""
    if self.data == -1:
      if num_devices % others:
        raise ConfigError(
          f"{inner} = {others} does not divide the {num_devices} devices; choose axes whose "
          f"product divides {num_devices}, or set up as many on a CPU with "
          f"jax_num_cpu_devices={others} (commands: --simulate {others})"
        )
      return dataclasses.replace(self, data=num_devices // others)
    if self.size > num_devices:
      raise ConfigError(
        f"mesh.data={self.data} x {inner} needs "
        f"{self.size} devices, {num_devices} found; make the axes smaller or add devices "
        f"(on a CPU jax_num_cpu_devices={self.size} sets them up; commands: --simulate {self.size})"
      )
    return self

  @property
  def size(self) -> int:
    """Number of devices; needs a resolved `data`."""
    return self.data * self.expert * self.tensor * self.sequence

  @property
  def planned_size(self) -> int:
    """Number of devices that the mesh asks for; a `data` that is not resolved yet counts as 1."""
    return max(self.data, 1) * self.expert * self.tensor * self.sequence

  @property
  def embedding_ranks(self) -> int:
    """Number of data ranks that partition the embedding; 1: each reads all. `data` is resolved."""
    return self.data if self.embedding == "partitioned" else 1

  @property
  def shares_state(self) -> bool:
    """Whether devices hold shares of the state: there are several with the same parameters."""
    return self.shard_state != "none" and self.token_shards > 1

  @property
  def words(self) -> str:
    """The axes and their sizes for a line of text: data 2 x expert 4 x tensor 1 x sequence 2.

    An axis `sequence` of size 1 is left out.
    """
    axes = ["data", "expert", "tensor", *["sequence"] * (self.sequence > 1)]
    return " x ".join(f"{axis} {getattr(self, axis)}" for axis in axes)

  @property
  def batch_shards(self) -> int:
    """Number of shards of the batch's rows."""
    return self.data * self.expert

  @property
  def token_shards(self) -> int:
    """Number of shards of the batch's tokens: `batch_shards`, times the parts of a row.

    So many devices have the same part of a parameter, except of experts and of a partitioned
    embedding.
    """
    return self.batch_shards * self.sequence

  @property
  def sequence_multiple(self) -> int:
    """A row's length must be a multiple of this number: the parts of a row, or a ring's chunks.

    A device of a ring holds two chunks (`scmoe.parallel.sequence`).
    """
    chunks = 2 if self.sequence > 1 and self.sequence_attention == "ring" else 1
    return chunks * self.sequence


def make_mesh(
  config: MeshConfig = MeshConfig(), devices: Sequence[Any] | None = None, *, num_experts: int = 0
) -> Mesh:
  """Builds the mesh over the first `config.size` devices (all processes' devices by default).

  The tensor axis varies fastest, then sequence, shard and expert, so that their collectives stay
  inside a host if they fit.

  Args:
    config: sizes of the axes.
    devices: all of jax by default.
    num_experts: E; an expert axis with more devices is split into experts and shards. 0: never
      split.

  Raises:
    ConfigError: an argument is of another type; the mesh needs more devices than there are, or
      there are none; of several processes' devices the mesh leaves some out; or neither of the
      expert axis and the number of experts divides the other.
  """
  check_type("config", config, MeshConfig)
  devices = jax.devices() if devices is None else devices
  check_type("devices", devices, Iterable)
  devices = list(devices)
  for device in devices:
    check_type("devices", device, jax.Device)
  if not devices:
    raise ConfigError("devices=[] is empty; give at least one, or None for all")
  check_whole("num_experts", num_experts, 0)
  config = config.resolve(len(devices))
  if jax.process_count() > 1 and config.size != len(devices):
    raise ConfigError(
      f"mesh uses {config.size} of {len(devices)} devices; with several processes every device "
      "must be in the mesh: set mesh.data=-1"
    )
  grid = np.array(devices[: config.size]).reshape(_axis_sizes(config, num_experts))
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def make_abstract_mesh(config: MeshConfig, *, num_experts: int = 0) -> AbstractMesh:
  """The mesh of `make_mesh` without devices, of which this machine may have too few.

  Args:
    config: resolved.
    num_experts: as of `make_mesh`.

  Raises:
    ConfigError: neither of the expert axis and the number of experts divides the other.
  """
  sizes = _axis_sizes(config, num_experts)
  return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _axis_sizes(config: MeshConfig, num_experts: int) -> tuple[int, ...]:
  shards = expert_shards(config.expert, num_experts)
  ring = config.sequence if config.sequence_attention == "ring" else 1
  sequence = (ring, config.sequence // ring)
  return config.data, config.expert // shards, shards, *sequence, config.tensor


def expert_shards(expert_axis: int, num_experts: int) -> int:
  """Number of devices that share one expert: 1 unless there are more devices than experts.

  Args:
    expert_axis: number of devices on the expert axis, as the user gives it.
    num_experts: E; 0: no experts, so 1 device.

  Raises:
    ConfigError: neither divides the other.
  """
  if num_experts == 0 or num_experts % expert_axis == 0:
    return 1
  if expert_axis % num_experts == 0:
    return expert_axis // num_experts
  near = -(-num_experts // expert_axis) * expert_axis
  raise ConfigError(
    f"model.num_experts={num_experts} is not divisible by mesh.expert={expert_axis}, nor the other "
    f"way round; use a multiple such as {near}, or a mesh.expert that divides {num_experts}"
  )


def partition_spec(logical: Sequence[str | None], ndim: int | None = None) -> P:
  """PartitionSpec of an array with these logical dimensions (the keys of `LOGICAL_TO_MESH`).

  If the array has more dimensions than names, `ndim` in all, the names are those of its last ones,
  so they stay valid when layers are stacked in front.
  """
  missing = 0 if ndim is None else ndim - len(logical)
  return P(*([None] * missing), *(LOGICAL_TO_MESH[name] for name in logical))


def parameter_specs(state: Any) -> Any:
  """PartitionSpecs like a tree of `nnx.Param`s, from the logical names in their declarations.

  A module is such a tree. Parameters without names, such as those of Flax's layers, are replicated.

  Raises:
    ConfigError: a leaf is no `nnx.Variable`.
  """
  is_param = lambda leaf: isinstance(leaf, nnx.Variable)

  def spec(param: Any) -> Any:
    check_type("state", param, nnx.Variable)
    names = param.get_metadata().get("axes") or ()
    # A value may be several arrays: one per layer (`Apart`), or an 8-bit matrix and its scales. The
    # scales' dimension of size 1 is not split.
    return param.replace(jax.tree.map(lambda x: _spec_of(names, x.shape), param.get_value()))

  return jax.tree.map(spec, state, is_leaf=is_param)


def _spec_of(names: Sequence[str | None], shape: Sequence[int]) -> P:
  whole = partition_spec(names, len(shape))
  return P(*(None if size == 1 else axis for axis, size in zip(whole, shape))) if whole else whole


def batch_sharding(mesh: Mesh, *, leading: int = 0) -> NamedSharding:
  """Sharding of a batch whose batch dimension comes after `leading` unsharded dimensions."""
  return NamedSharding(mesh, P(*([None] * leading), BATCH_AXES))


def batch_shards(mesh: Mesh) -> int:
  """Number of shards of the batch's rows on a mesh."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def replicated(mesh: Mesh) -> NamedSharding:
  """Sharding of an array that every device holds whole."""
  return NamedSharding(mesh, P())


def shardings_of(tree: Any) -> Any:
  """Shardings of a pytree of arrays or of abstract arrays."""
  return jax.tree.map(lambda x: x.sharding, tree)


# -- the manual region ----------------------------------------------------------------------------


def manual(function: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any) -> Any:
  """Turns a function of one device's shares into a function of global arrays.

  Every device runs the function given; its body is called the manual region. Each call of a
  program (training step, evaluation, prefill, decoding) enters it once, over all axes of the mesh.
  Inside, arrays are one device's shares, and layers and losses are plain functions of them. Data
  travel only by collectives that these functions call, each under a name of
  `scmoe.parallel.collectives.NAMES`. XLA's partitioner adds no collective: the schedule would not
  know of it, and it could separate an exchange from the work beside it. Take gradients inside
  (`scmoe.training.step`): taken outside, on a mesh with a tensor axis, they would be too small.

  Args:
    function: a pure function of one device's shares.
    mesh: a mesh with the axes `AXES`; may be abstract.
    in_specs, out_specs: PartitionSpecs of the arguments and of the results; a spec in place of a
      subtree holds for all its arrays.

  Raises:
    ConfigError: `function` cannot be called, or `mesh` is no mesh.
  """
  check_callable("function", function)
  if not isinstance(mesh, AbstractMesh):
    check_type("mesh", mesh, Mesh)
  return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def axis_size(*axes: str) -> int:
  """Product of the numbers of devices on these axes; 1 outside the manual region."""
  mesh = jax.sharding.get_abstract_mesh()
  return math.prod(mesh.shape[axis] for axis in axes if axis in mesh.manual_axes)


def axis_index(*axes: str) -> Any:
  """This device's index on these axes together, the first varying slowest; 0 outside the region."""
  here = tuple(axis for axis in axes if axis_size(axis) > 1)
  return jax.lax.axis_index(here) if here else 0


def own_share(x: Any, dimension: int, *axes: str) -> Any:
  """This device's slice of an array that all devices hold whole, e.g. of random draws.

  `dimension` is cut into equal slices, one for each index on the axes together (`axis_index`).
  """
  parts = axis_size(*axes)
  if parts == 1:
    return x
  size = x.shape[dimension] // parts
  return jax.lax.dynamic_slice_in_dim(x, axis_index(*axes) * size, size, dimension)
