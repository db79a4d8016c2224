"""The experts of this device, rows -> rows: feed-forward networks, or a user's own module.

`ExpertSource` says how a pass gets at a model's experts. By default, and always in training, a
pair's experts are on the device when the pair begins (`OnDevice`). In generation
`scmoe.offload.experts.Migration` can copy them from the host's memory or from files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from scmoe.base.options import option
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
from scmoe.layers.mlp import FFNLayerOptions, is_gated
from scmoe.moe.types import Routing
from scmoe.parallel.collectives import repeat
from scmoe.parallel.mesh import AXES, axis_index, axis_size

# A function that applies experts: (rows, layout) -> their outputs, in the order of the rows.
ApplyExperts = Callable[[Array, RowLayout], Array]


class ExpertRows:
  """Positions of each expert's rows in an array sorted by expert; `matmul` multiplies these rows.

  `Experts.compute` gets such an object beside the rows.

  Attributes:
    groups: number and place of each expert's rows; padding rows between experts are zero.
  """

  def __init__(self, groups: GroupLayout):
    self.groups = groups

  def matmul(self, rows_RM: Array, weight_EMN: Array, bias_EN: Array | None = None) -> Array:
    """Each row times its expert's matrix, plus its expert's bias: [R, M] -> [R, N]; differentiable.

    Args:
      rows_RM: rows sorted by expert.
      weight_EMN: a matrix for each expert; converted to the rows' type.
      bias_EN: a vector for each expert, added to the products of its rows, its padding rows
        included; None: no bias.

    Raises:
      ValueError: the shapes of rows, matrices and biases disagree.
    """
    sizes_E = self.groups.tiles_G * self.groups.tile
    weight_EMN = weight_EMN.astype(rows_RM.dtype)
    return grouped_matmul(rows_RM, weight_EMN, sizes_E, bias_GN=bias_EN)


class Experts(nnx.Module):
  """Base class of experts: a user's subclass has to define one method, `compute`.

  The first dimension of every parameter counts experts, `nnx.Param(value, axes=("expert", ...))`,
  so that expert parallelism spreads experts over devices: inside `compute` a device sees its own
  experts only. The layer does everything else: it moves rows, multiplies the outputs (or the rows,
  with `router.compat.weights=before`) by the choices' weights and computes gradients.
  """

  # Mesh axes over which each device computes a partial sum of every output; the layer adds the sums
  # up. Here there is none: each device computes whole outputs.
  partial: ClassVar[tuple[str, ...]] = ()

  def compute(self, rows_RD: Float[Array, "R D"], experts: ExpertRows) -> Float[Array, "R D"]:
    """The experts' outputs for rows sorted by expert; an implementation treats each row by itself.

    Args:
      rows_RD: rows sorted by expert, with padding rows between experts.
      experts: its method `matmul` multiplies each row with its expert's matrix.

    Raises:
      NotImplementedError: the subclass does not define this method.
    """
    raise NotImplementedError(f"{type(self).__name__} has no method compute(rows_RD, experts)")

  def __call__(self, rows: Array, layout: RowLayout) -> Array:
    """The experts' outputs in the order of the rows, by `compute` on rows sorted by expert.

    Where the layout has weights, a row's result is the weighted sum of its experts' outputs for it.
    Rows and layout are those of `expert_ffn`, as are the order and the type of the result.
    """
    rows_MD = rows.reshape(-1, rows.shape[-1])
    tiles = layout.sorted(choose_tile(layout.num_copies, layout.num_groups))
    assert tiles.permutation is not None
    rows_RD = gather_rows(rows_MD, tiles.permutation)
    done_RD = self.compute(rows_RD, ExpertRows(tiles.groups)).astype(rows.dtype)
    out = sum_rows(done_RD, layout.weight_MK, tiles.permutation)
    return out.reshape(*rows.shape[:-1], out.shape[-1])


# -- where the experts' parameters are ------------------------------------------------------------


class LayerExperts(Protocol):
  """One layer's experts during one pass of its block pair.

  A *gating* is one choice of experts for all tokens. Most block pairs make one in each of their
  units, DGMoE makes two. For each gating, the pair calls

      main = experts.chosen(gating, routing, main)    # the gate has chosen its tokens' experts
      main = experts.ready(gating, main)              # the experts compute next
      rows = experts.of(gating)(rows, layout)

  `main` is the value that the main path reads next. If experts are copied and the main path must
  wait for the copy, the implementation ties `main` to the copy by a barrier. If each chunk of rows
  has a step of its own (`dispatch.chunks`), the pair calls `ready` and `of` in each. The dispatch,
  which comes between `chosen` and `ready`, gets `of(gating)` too, for the rows of overflow rounds.
  Where the pair before has routed and dispatched this pair's tokens already (`scmoe.models.ahead`;
  only with `OnDevice`), `chosen` is not called, and overflow rounds get `of(gating)` as it begins.
  """

  def chosen(self, gating: int, routing: Routing, main: Any) -> Any:
    """Called when a gate has chosen: a copy of the chosen experts may begin here.

    Args:
      gating: index of the gating in the unit.
      routing: the choices.
      main: the value that the main path reads next.

    Returns:
      `main`, perhaps tied to the copy by a barrier.
    """
    ...

  def ready(self, gating: int, main: Any) -> Any:
    """Called before a gating's experts compute; from here on they must be on the device.

    An implementation that copies experts copies them here, unless a copy has begun before. Result
    and arguments are those of `chosen`, without `routing`.
    """
    ...

  def of(self, gating: int) -> ApplyExperts:
    """The function (rows, layout) -> outputs that applies this gating's experts."""
    ...

  @property
  def kept(self) -> Any:
    """The cache of experts that stay on the device for the next pass, a pytree; None: no cache."""
    ...


class LayerParams(Protocol):
  """Parameters of a model's block pairs that are written out one after the other, not scanned.

  `advance` is called after each pair.
  """

  def take(self, pair: int) -> Any:
    """The parameters of the pair with this index."""
    ...

  def advance(self, pair: int, after: Any) -> Any:
    """Called when a pair has computed its results `after`; the next pair reads what this returns.

    The returned value is `after`, perhaps behind a barrier.
    """
    ...


class ExpertSource(Protocol):
  """Says how a pass gets at a model's experts: they are on the device, or it copies them there.

  An implementation is hashable, since jax compiles it into the program as a constant.
  """

  def of_layer(self, experts: Experts, kept: Any) -> LayerExperts:
    """One layer's experts for one pass.

    Args:
      experts: the layer's module.
      kept: the layer's cache of experts: that of the pass before (`LayerExperts.kept`), or for the
        first pass an empty one; None: no cache.
    """
    ...

  def of_pairs(self, params: Sequence[Any], *, prompts: bool) -> LayerParams:
    """The parameters of pairs that run one after the other.

    Args:
      params: the parameters of every pair, in order.
      prompts: whether the pass reads rows of several tokens, as prompts are.
    """
    ...


@dataclasses.dataclass(frozen=True)
class OnDevice:
  """The default `ExpertSource`: a pair's experts are in their devices' memory when the pair begins.

  With `mesh.experts_in=host` the model has copied them there (`scmoe.models.fetched`).

  Attributes:
    recompute: whether the backward pass computes the experts' activations again, to save memory.
  """

  recompute: bool = False

  def of_layer(self, experts: Experts, kept: Any) -> LayerExperts:
    """The layer's experts, which need no copy; see `ExpertSource.of_layer`."""
    del kept
    if not self.recompute:
      return ExpertsOnDevice(experts)
    return ExpertsOnDevice(RecomputedExperts(experts))

  def of_pairs(self, params: Sequence[Any], *, prompts: bool) -> LayerParams:
    """The parameters of the pairs as they are given; see `ExpertSource.of_pairs`."""
    del prompts
    return ParamsOnDevice(params)


@dataclasses.dataclass(frozen=True)
class ExpertsOnDevice:
  """`LayerExperts` that are on the device and need no copy.

  Attributes:
    apply: the function that applies the experts.
    kept: None: there is no cache of experts.
  """

  apply: ApplyExperts
  kept: Any = None

  def chosen(self, gating: int, routing: Routing, main: Any) -> Any:
    """Returns `main`, since no copy has to begin; see `LayerExperts.chosen`."""
    del gating, routing
    return main

  def ready(self, gating: int, main: Any) -> Any:
    """Returns `main`, since no copy has to be made; see `LayerExperts.ready`."""
    del gating
    return main

  def of(self, gating: int) -> ApplyExperts:
    """The function that applies the experts, the same for every gating; see `LayerExperts.of`."""
    del gating
    return self.apply


@dataclasses.dataclass(frozen=True)
class ParamsOnDevice:
  """`LayerParams` that are handed out as they are given; nothing is copied here.

  Attributes:
    params: the parameters of every pair, in order.
  """

  params: Sequence[Any]

  def take(self, pair: int) -> Any:
    """The parameters of the pair with this index."""
    return self.params[pair]

  def advance(self, pair: int, after: Any) -> Any:
    """Returns `after`: no copy begins here; see `LayerParams.advance`."""
    del pair
    return after


class RecomputedExperts(nnx.Module):
  """Experts whose activations the backward pass computes again (`train.remat=moe`).

  It is a module because `Dropless` differentiates its loop of overflow rounds with a rule of its
  own: the loop takes the experts' parameters from a module, and a function would hide them.

  Args:
    experts: the experts, whose parameters this module has too.
  """

  def __init__(self, experts: Experts):
    self.experts = experts

  def __call__(self, rows_RD: Array, layout: RowLayout) -> Array:
    """The experts' outputs; the rows, their layout and what is all-gathered stay in memory.

    So the backward pass gathers nothing again, except in overflow rounds, which it runs again.
    """
    apply = lambda rows_RD, layout: self.experts(rows_RD, layout)
    return jax.checkpoint(apply, policy=_keeps_gathered)(rows_RD, layout)


def _keeps_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
  """A policy of `jax.checkpoint` that keeps the results of all-gathers."""
  return primitive.name.startswith("all_gather")


# -- feed-forward experts -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FFNExpertsConfig(FFNLayerOptions, path="FFNExpertsConfig"):
  """Options of feed-forward experts.

  Attributes:
    width: D, the width of tokens.
    hidden: F, the hidden width of an expert.
    num_experts: E, number of experts that have parameters.
    gate_bias: whether the gate of a gated activation has a bias (GPT-OSS); `bias` is for up and
      down projection. Given by keyword.
  """

  width: int = option(minimum=1)
  hidden: int = option(minimum=1)
  num_experts: int = option(minimum=1)
  _: dataclasses.KW_ONLY
  gate_bias: bool = option(False)


class FFNExperts(Experts):
  """Feed-forward experts: each computes down(act(up(row))) of its rows, or the gated form of this.

  With a gated activation an expert computes down(act(gate(row)) · up(row)). With `clamped_swiglu`
  gate(row) is clamped to at most 7 and up(row) to ± 7, and 1 is added to up(row).

  Where several devices share an expert (mesh axis `shard`), each holds a part of the expert's
  hidden width. Tutel's adaptive parallelism decides whether weights or rows travel between these
  devices. With r replicas (`adaptive_r`) they form r groups: every device gathers the weights of
  its group, 1/r of the hidden width that they share; every row goes to one device of each group;
  and the r partial sums are added. r = 1 moves only weights between the devices that share an
  expert; r = the number of these devices moves only rows. With r = 0 every device gathers the
  weights of all experts, and no row leaves its device. Results and gradients do not depend on r,
  except for rounding.

  Args:
    config: see `FFNExpertsConfig`.
    adaptive_r: r; 0 or a divisor of the number of devices that share an expert.
    copy_engines: whether the GPUs' copy engines exchange rows. The experts' kernels may then use
      all multiprocessors.
    rngs: stream `params` for the initial weights.
  """

  partial = ("tensor",)

  def __init__(
    self,
    config: FFNExpertsConfig,
    *,
    adaptive_r: int = 1,
    copy_engines: bool = False,
    rngs: nnx.Rngs,
  ):
    c = self.config = config.filled()
    self.adaptive_r, self.copy_engines = adaptive_r, copy_engines

    def weight(shape, std, axes):
      return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)

    def zeros(shape, axes, wanted=c.bias):
      return nnx.Param(jnp.zeros(shape), axes=axes) if wanted else None

    into, out = (c.num_experts, c.width, c.hidden), (c.num_experts, c.hidden, c.width)
    into_axes, out_axes = ("expert", "embed", "expert_hidden"), ("expert", "expert_hidden", "embed")
    self.up = weight(into, c.init_std, into_axes)
    self.gate = weight(into, c.init_std, into_axes) if is_gated(c.activation) else None
    self.down = weight(out, c.out_std, out_axes)
    hidden, gated = (c.num_experts, c.hidden), self.gate is not None
    self.up_bias = zeros(hidden, ("expert", "expert_hidden"))
    self.gate_bias = zeros(hidden, ("expert", "expert_hidden"), gated and c.gate_bias)
    self.down_bias = zeros((c.num_experts, c.width), ("expert", "embed"))

  def __call__(self, rows: Array, layout: RowLayout) -> Array:
    """The experts' outputs in the order of the rows, by `expert_ffn` or `block_sparse_ffn`.

    If several devices share an expert, each first gathers the weights of its group. With r = 0
    every device gathers those of all experts instead. For r > 1 the devices then exchange rows, and
    add up their partial sums (see the class).
    """
    weights, r = self.weights(), self.adaptive_r
    if axis_size("shard") > 1 or r == 0:
      weights = _gathered(weights, max(r, 1), every_expert=r == 0)
    run = block_sparse_ffn if self.config.impl == "block_sparse" else expert_ffn
    if r <= 1:
      return run(rows, weights, layout, self._static(layout))
    return self._on_replicas(run, rows, weights, layout)

  def weights(self) -> FFNWeights:
    """This device's share of the parameters, as stored; zeros may stand for the output bias.

    Of the devices whose partial sums are added, all but one get a zero output bias.
    """
    read = lambda param: None if param is None else param[...]
    down_bias_GD = read(self.down_bias)
    if down_bias_GD is not None and (self.adaptive_r > 1 or axis_size("tensor") > 1):
      # Each output is the sum of several devices' partial sums, and only one of these devices may
      # add the bias. With adaptive_r > 1 a sum has one device in each of the r groups, and the one
      # in the first group adds it. On the tensor axis the first device does.
      shards = axis_size("shard") // max(self.adaptive_r, 1)
      first = (axis_index("shard") < shards) & (axis_index("tensor") == 0)
      down_bias_GD = jnp.where(first, repeat(down_bias_GD, ("tensor",), "tensor"), 0)
    return FFNWeights(
      up_GDF=self.up[...],
      down_GFD=self.down[...],
      gate_GDF=read(self.gate),
      up_bias_GF=read(self.up_bias),
      down_bias_GD=down_bias_GD,
      gate_bias_GF=read(self.gate_bias),
    )

  def _static(self, layout: RowLayout) -> FFNConfig:
    """The options of `expert_ffn`, or of `block_sparse_ffn`, for these rows.

    `batched` becomes `grouped` for rows in groups of any size, since it needs buffers of equal
    size. Calls that drop nothing have such rows, for example in decoding and exact evaluation; a
    user's own transport may make them. `block_sparse` always becomes `grouped`, since `__call__`
    has chosen `block_sparse_ffn` by it.
    """
    shared_sms = axis_size(*AXES) > 1 and not self.copy_engines
    config = FFNConfig(**self.config.shared(), shared_sms=shared_sms)
    sparse = config.impl == "block_sparse"  # `__call__` runs `block_sparse_ffn`
    if sparse or (config.impl == "batched" and layout.padded is None):
      config = dataclasses.replace(config, impl="grouped")
    return config

  def _on_replicas(self, run: Any, rows: Array, weights: FFNWeights, layout: RowLayout) -> Array:
    """Computes every row on r devices, each with 1/r of the hidden width they share; adds it up."""
    # Four devices per expert and r = 2: weights are gathered within [0, 1] and within [2, 3], so
    # devices 0 and 1 have one half of the hidden width, 2 and 3 the other. Devices 0 and 2 exchange
    # their rows, and so do 1 and 3: the halves of the two are the whole expert.
    r = self.adaptive_r
    group = axis_size("shard") // r
    peers = [[place + group * i for i in range(r)] for place in range(group)]
    with jax.named_scope("weights"):
      share = lambda a: jax.lax.all_gather(a, "shard", axis_index_groups=peers)
      shared = jax.tree.map(share, (rows, layout))
    sums = []
    for i in range(r):
      part = jax.tree.map(lambda a, i=i: a[i], shared)
      sums.append(run(part[0], weights, part[1], self._static(part[1])))
    with jax.named_scope("weights"):
      return jax.lax.psum_scatter(jnp.stack(sums), "shard", axis_index_groups=peers)


def _gathered(weights: FFNWeights, replicas: int, *, every_expert: bool) -> FFNWeights:
  """Gathers the weights' slices of the hidden width within each group of devices.

  With `every_expert` it also gathers the experts of all devices of the expert axis. The groups are
  those of `FFNExperts`. The backward pass reduce-scatters the gradients.

  Args:
    weights: this device's share of the matrices and biases.
    replicas: number of groups: r of `FFNExperts`, or 1 for r = 0.
    every_expert: whether to gather also over the expert axis, so that every device has all experts.
  """
  shards = axis_size("shard")
  group = shards // replicas
  groups = [[group * r + place for place in range(group)] for r in range(replicas)]
  hidden = {"up_GDF": 2, "down_GFD": 1, "gate_GDF": 2, "up_bias_GF": 1, "gate_bias_GF": 1}

  def gather(name: str) -> Array | None:
    w, dimension = getattr(weights, name), hidden.get(name)
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
