"""rows -> rows: the experts of this device. Feed-forward networks, or a user's own."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from scmoe.kernels.block_sparse import block_sparse_ffn
from scmoe.kernels.grouped_matmul import (
  FFNConfig,
  FFNWeights,
  GroupLayout,
  RowLayout,
  expert_ffn,
  grouped_matmul,
)
from scmoe.kernels.grouped_matmul.xla import choose_tile
from scmoe.kernels.permute import gather_rows, sum_rows
from scmoe.layers.mlp import is_gated
from scmoe.parallel.collectives import repeat
from scmoe.parallel.mesh import AXES, axis_index, axis_size

IMPLEMENTATIONS = ("auto", "grouped", "batched", "block_sparse")


class ExpertRows:
  """Rows in the order of the experts, and the product that each kind of expert is made of.

  Attributes:
    groups: how many rows each expert has, and where; rows of no expert lie between and are zero.
  """

  def __init__(self, groups: GroupLayout):
    self.groups = groups

  def matmul(self, rows_RM: Array, weight_EMN: Array, bias_EN: Array | None = None) -> Array:
    """Each row times its expert's matrix [M, N]: [R, M] -> [R, N]; differentiable."""
    sizes_E = self.groups.tiles_G * self.groups.tile
    weight_EMN = weight_EMN.astype(rows_RM.dtype)
    return grouped_matmul(rows_RM, weight_EMN, sizes_E, bias_GN=bias_EN)


class Experts(nnx.Module):
  """Experts of one's own: a subclass with one method, `compute`.

  Its parameters have the experts as first dimension, `nnx.Param(value, axes=("expert", ...))`, so
  that expert parallelism spreads them: inside `compute` a device sees its own experts'. Everything
  else, transports, weights, gradients, is the layer's.
  """

  # Axes over which a device has a part of every result, which the layer adds up.
  partial: ClassVar[tuple[str, ...]] = ()

  def compute(self, rows_RD: Float[Array, "R D"], experts: ExpertRows) -> Float[Array, "R D"]:
    """What the experts make of their rows; a row may only depend on itself.

    Args:
      rows_RD: rows in the order of the experts.
      experts: `matmul` multiplies each row with its expert's matrix.
    """
    raise NotImplementedError(f"{type(self).__name__} has no method compute(rows_RD, experts)")

  def __call__(self, rows: Array, layout: RowLayout) -> Array:
    """The rows' experts applied to them, in the rows' own order; see `expert_ffn`."""
    rows_MD = rows.reshape(-1, rows.shape[-1])
    tiles = layout.sorted(choose_tile(layout.num_copies, layout.num_groups))
    assert tiles.permutation is not None
    rows_RD = gather_rows(rows_MD, tiles.permutation)
    done_RD = self.compute(rows_RD, ExpertRows(tiles.groups)).astype(rows.dtype)
    out = sum_rows(done_RD, layout.weight_MK, tiles.permutation)
    return out.reshape(*rows.shape[:-1], out.shape[-1])


@dataclasses.dataclass(frozen=True)
class FFNExpertsConfig:
  """Feed-forward experts.

  Attributes:
    width, hidden, num_experts: D, F and E.
    activation, bias, init_std, out_std: as of `MLPConfig`.
    impl: one of `IMPLEMENTATIONS` (MegaBlocks mlp_impl); see `FFNConfig`.
    backend: of grouped products; see `FFNConfig`.
    adaptive_r: Tutel's r; see `FFNExperts`.
    copy_engines: whether copy engines exchange rows, which leaves all multiprocessors to kernels.
    fp8: see `FFNConfig`.
  """

  width: int
  hidden: int
  num_experts: int
  activation: str = "gelu"
  bias: bool = False
  init_std: float = 0.02
  out_std: float = 0.02
  impl: str = "auto"
  backend: str = "auto"
  adaptive_r: int = 1
  copy_engines: bool = False
  fp8: bool = False


class FFNExperts(Experts):
  """down(act(up(rows))) for every expert, on the grouped kernels.

  Where several devices share an expert, each holds a part of its hidden width. Tutel's adaptive
  parallelism says who moves: with r replicas, the weights are gathered within r groups of devices,
  every row is sent to one device of each group, and the r partial sums are added. r = 1 moves
  weights only, r = all of them rows only; r = 0 gathers the weights of all experts. Results and
  gradients do not depend on r.
  """

  partial = ("tensor",)

  def __init__(self, config: FFNExpertsConfig, *, rngs: nnx.Rngs):
    c = self.config = config

    def weight(shape, std, axes):
      return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)

    def zeros(shape, axes):
      return nnx.Param(jnp.zeros(shape), axes=axes) if c.bias else None

    into, out = (c.num_experts, c.width, c.hidden), (c.num_experts, c.hidden, c.width)
    into_axes, out_axes = ("expert", "embed", "expert_hidden"), ("expert", "expert_hidden", "embed")
    self.up = weight(into, c.init_std, into_axes)
    self.gate = weight(into, c.init_std, into_axes) if is_gated(c.activation) else None
    self.down = weight(out, c.out_std, out_axes)
    self.up_bias = zeros((c.num_experts, c.hidden), ("expert", "expert_hidden"))
    self.down_bias = zeros((c.num_experts, c.width), ("expert", "embed"))

  def __call__(self, rows: Array, layout: RowLayout) -> Array:
    """See `expert_ffn`; with whatever must be gathered or added up over devices first and last."""
    weights, r = self.weights(), self.config.adaptive_r
    if axis_size("shard") > 1 or r == 0:
      weights = _gathered(weights, max(r, 1), every_expert=r == 0)
    run = block_sparse_ffn if self.config.impl == "block_sparse" else expert_ffn
    if r <= 1:
      return run(rows, weights, layout, self._static())
    return self._on_replicas(run, rows, weights, layout)

  def weights(self) -> FFNWeights:
    """This device's share of the weights, as they are stored."""
    read = lambda param: None if param is None else param[...]
    down_bias_GD = read(self.down_bias)
    if down_bias_GD is not None and (self.config.adaptive_r > 1 or axis_size("tensor") > 1):
      # The output's bias counts once among partial sums.
      shards = axis_size("shard") // max(self.config.adaptive_r, 1)
      first = (axis_index("shard") < shards) & (axis_index("tensor") == 0)
      down_bias_GD = jnp.where(first, repeat(down_bias_GD, ("tensor",), "tensor"), 0)
    return FFNWeights(
      up_GDF=self.up[...],
      down_GFD=self.down[...],
      gate_GDF=read(self.gate),
      up_bias_GF=read(self.up_bias),
      down_bias_GD=down_bias_GD,
    )

  def _static(self) -> FFNConfig:
    c = self.config
    shared = axis_size(*AXES) > 1 and not c.copy_engines
    impl = "grouped" if c.impl == "block_sparse" else c.impl
    return FFNConfig(c.activation, impl, c.backend, shared_sms=shared, fp8=c.fp8)

  def _on_replicas(self, run: Any, rows: Array, weights: FFNWeights, layout: RowLayout) -> Array:
    """Every row on r devices, each with a part of the hidden width; the partial sums added."""
    # Four devices per expert and r = 2: weights are gathered within [0, 1] and [2, 3], which gives
    # every device a half of the hidden width. Rows are shared between [0, 2] and [1, 3], whose two
    # halves make the whole expert.
    r = self.config.adaptive_r
    group = axis_size("shard") // r
    peers = [[place + group * i for i in range(r)] for place in range(group)]
    with jax.named_scope("weights"):
      share = lambda a: jax.lax.all_gather(a, "shard", axis_index_groups=peers)
      shared = jax.tree.map(share, (rows, layout))
    sums = []
    for i in range(r):
      part = jax.tree.map(lambda a, i=i: a[i], shared)
      sums.append(run(part[0], weights, part[1], self._static()))
    with jax.named_scope("weights"):
      return jax.lax.psum_scatter(jnp.stack(sums), "shard", axis_index_groups=peers)


def _gathered(weights: FFNWeights, replicas: int, *, every_expert: bool) -> FFNWeights:
  """Collects the slices of the hidden width, and all experts if asked; gradients scatter back."""
  shards = axis_size("shard")
  group = shards // replicas
  groups = [[group * r + place for place in range(group)] for r in range(replicas)]
  hidden = FFNWeights(up_GDF=2, down_GFD=1, gate_GDF=2, up_bias_GF=1, down_bias_GD=None)  # pyright: ignore

  def gather(name: str) -> Array | None:
    w, dimension = getattr(weights, name), getattr(hidden, name)
    if w is None:
      return None
    if group > 1 and dimension is not None:
      w = jax.lax.all_gather(w, "shard", axis=dimension, axis_index_groups=groups, tiled=True)
    if every_expert and axis_size("expert") > 1:
      w = jax.lax.all_gather(w, "expert", axis=0, tiled=True)
    return w

  with jax.named_scope("weights"):
    fields = dataclasses.fields(FFNWeights)
    return FFNWeights(**{f.name: gather(f.name) for f in fields})  # pyright: ignore
