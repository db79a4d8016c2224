"""ScMoE language models in the style of GPT-2 and of LLaMA."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from scmoe.blocks.mix import MIXES, Mix
from scmoe.blocks.pair import SHORTCUT_NORMS, Block, Call, Unit
from scmoe.blocks.schedule import OverlapConfig, check_slots
from scmoe.blocks.wiring import WIRINGS, Wiring, dense_operations, is_handed_over, tap_index
from scmoe.errors import ConfigError
from scmoe.kernels.grouped_matmul import activation_names
from scmoe.kernels.grouped_matmul.backend import widths_have_kernels
from scmoe.layers.attention import Attention, KeyValues
from scmoe.layers.embed import Embedding
from scmoe.layers.mlp import MLP
from scmoe.layers.norm import Norm
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.layer import MoE
from scmoe.moe.route import RouterConfig
from scmoe.moe.types import RouterSums
from scmoe.options import check_options, option
from scmoe.parallel.mesh import batch_sharding, expert_shards, inside_shard_map

REMATS = ("none", "dots", "moe", "full")
DTYPES = ("float32", "bfloat16", "float16", "float64")
EXPERT_BACKENDS = ("auto", "mosaic_gpu", "xla")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Architecture of a language model. The defaults are a GPT-2 style model of laptop size."""

  style: str = option(
    "gpt2",
    "gpt2: LayerNorm, learned positions, biases; llama: RMSNorm, rotary positions, no biases",
    choices=("gpt2", "llama"),
  )
  wiring: str = option(
    "scmoe_pos2", "which values the routed experts read; scmoe/blocks/wiring.py", choices=WIRINGS
  )
  mix: str = option(
    "cg1", "how shared and routed output are added: direct, cg1 or cg2 (paper §5.2)", choices=MIXES
  )
  mix_input: str = option(
    "current", "what the coefficients of cg1 and cg2 read", choices=("current", "shortcut")
  )
  shortcut_norm: str = option(
    "shared",
    "norm that feeds the shortcut: shared with the sublayer that reads the same value "
    "(LongCat-Flash), own, or megatron (own, and one on shared + routed)",
    choices=SHORTCUT_NORMS,
  )
  num_experts: int = option(8, "routed experts E", minimum=1)
  top_k: int = option(
    1,
    "routed experts per token of topk, shared_expert and scmoe_pos1/2/3; the shared expert comes "
    "on top. top1, top2, scmoe2, dgmoe say their own",
    minimum=1,
  )
  moe_every: int = option(2, "every Nth block has the MoE", minimum=1)
  num_layers: int = option(4, "transformer blocks L", minimum=1)
  width: int = option(128, "model width D", minimum=1)
  num_heads: int = option(4, "attention heads H", minimum=1)
  num_kv_heads: int = option(0, "key-value heads; 0: as many as heads", minimum=0)
  head_dim: int = option(0, "width of a head; 0: width / num_heads", minimum=0)
  mlp_hidden: int = option(0, "hidden width of dense MLPs; 0: 4 x width", minimum=0)
  expert_hidden: int = option(0, "hidden width F of a routed expert; 0: mlp_hidden", minimum=0)
  shared_hidden: int = option(0, "hidden width of the shared expert; 0: expert_hidden", minimum=0)
  activation: str = option(
    "",
    "activation of MLPs and experts; empty: gelu (gpt2), swiglu (llama)",
    choices=("", *activation_names()),
  )
  vocab_size: int = option(
    0, "size of the embedding V; 0: the tokenizer's, rounded up to a multiple of 64", minimum=0
  )
  context: int = option(1024, "longest sequence (learned positions) S", minimum=1)
  tie_embeddings: bool = option(True, "read the logits from the token embeddings")
  rope_theta: float = option(10000.0, "base of the rotary embedding (llama)", minimum=1)
  norm_eps: float = option(1e-5, "epsilon of the norms", minimum=0)
  init_std: float = option(0.02, "standard deviation of the initial weights", minimum=0)
  dtype: str = option("bfloat16", "type of the computation; parameters are float32", choices=DTYPES)
  expert_backend: str = option(
    "auto",
    "what computes experts and dense MLPs: mosaic_gpu (kernels for Hopper), xla, or auto (kernels "
    "where they run)",
    choices=EXPERT_BACKENDS,
  )
  document_mask: bool = option(
    False, "attention stays inside a document of a packed row (no fused GPU attention then)"
  )

  @property
  def wiring_rule(self) -> Wiring:
    """The wiring as data."""
    return WIRINGS[self.wiring]

  def resolve(self, *, vocab_size: int = 0) -> ModelConfig:
    """Fills in every 0 and empty word, and checks what depends on more than one field.

    Args:
      vocab_size: of the tokenizer; used where the field is 0.

    Raises:
      ConfigError: names the field, what was got and what would do.
    """
    check_options(self, "model")
    hidden = self.mlp_hidden or 4 * self.width
    expert_hidden = self.expert_hidden or hidden
    resolved = dataclasses.replace(
      self,
      num_kv_heads=self.num_kv_heads or self.num_heads,
      head_dim=self.head_dim or self.width // self.num_heads,
      mlp_hidden=hidden,
      expert_hidden=expert_hidden,
      shared_hidden=self.shared_hidden or expert_hidden,
      activation=self.activation or {"gpt2": "gelu", "llama": "swiglu"}[self.style],
      vocab_size=self.vocab_size or -(-vocab_size // 64) * 64,
    )
    resolved._check()
    return resolved

  def _check(self) -> None:
    rule = self.wiring_rule
    blocks = self.moe_every * rule.units_per_moe
    if self.num_layers % blocks:
      raise ConfigError(
        f"model.num_layers={self.num_layers} is not a multiple of model.moe_every={self.moe_every}"
        + (f" x {rule.units_per_moe} ({self.wiring} shares)" if rule.units_per_moe > 1 else "")
        + f"; use a multiple of {blocks}"
      )
    if self.num_heads % self.num_kv_heads:
      raise ConfigError(
        f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads="
        f"{self.num_kv_heads}; use a divisor of {self.num_heads}"
      )
    if self.head_dim == 0 or (self.style == "llama" and self.head_dim % 2):
      raise ConfigError(
        f"model.head_dim={self.head_dim} (model.width={self.width} over model.num_heads="
        f"{self.num_heads}) must be positive, and even for rotary positions; set model.head_dim"
      )
    chosen = rule.routed_per_gating(self.top_k) if rule.taps else 0
    needed = max(chosen, 2 if rule.distinct else 0)
    if needed > self.num_experts:
      name = f"model.top_k={self.top_k}" if rule.k is None else f"model.wiring={self.wiring!r}"
      raise ConfigError(
        f"{name} needs {needed} experts, model.num_experts={self.num_experts}; raise "
        f"model.num_experts to at least {needed}"
      )
    widths = (self.width, self.expert_hidden, self.mlp_hidden, self.shared_hidden)
    if self.expert_backend == "mosaic_gpu" and not widths_have_kernels(self.dtype, *widths):
      raise ConfigError(
        "model.expert_backend='mosaic_gpu' takes bfloat16 or float16 and multiples of 64, got "
        f"model.dtype={self.dtype!r}, model.width={self.width}, model.expert_hidden="
        f"{self.expert_hidden}, model.mlp_hidden={self.mlp_hidden} and model.shared_hidden="
        f"{self.shared_hidden}; use 'auto' or 'xla'"
      )
    if self.vocab_size == 0:
      raise ConfigError("model.vocab_size=0 needs the size of a tokenizer; set it")

  def check_mesh(self, *, expert: int, tensor: int) -> None:
    """Checks that experts and hidden widths divide over the mesh.

    Raises:
      ConfigError: names the field, what was got and what would do.
    """
    shards = expert_shards(expert, self.num_experts) if self.wiring_rule.taps else 1
    if self.expert_hidden % (shards * tensor):
      raise ConfigError(
        f"model.expert_hidden={self.expert_hidden} is not divisible by the {shards * tensor} "
        f"devices that share an expert (mesh.expert={expert}, mesh.tensor={tensor}); use a multiple"
      )
    for name in (
      "num_heads",
      "num_kv_heads",
      "mlp_hidden",
      "shared_hidden",
      "vocab_size",
    ):
      value = getattr(self, name)
      if value % tensor:
        raise ConfigError(
          f"model.{name}={value} is not divisible by mesh.tensor={tensor}; use a multiple of "
          f"{tensor}, or a mesh.tensor that divides {value}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
  """What a forward pass gives.

  Attributes:
    h_BSD: the last hidden state, normalised, in the compute dtype; `GPT.logits` reads it.
    sums: router sums per MoE layer, [layers, batch shards, ...]; None for the dense wiring.
    caches: updated key-value caches, or None.
  """

  h_BSD: Array
  sums: RouterSums | None
  caches: Any = None


class Stage(nnx.Module):
  """What one step of the scan over layers holds: the units that share one set of experts."""

  def __init__(
    self, config: ModelConfig, router, transport, mesh, equal_backend: str, *, rngs: nnx.Rngs
  ):
    rule = config.wiring_rule
    make_unit = lambda: _make_unit(config, mesh, equal_backend, rngs)
    self.units = nnx.List([make_unit() for _ in range(rule.units_per_moe)])
    moe = lambda: _make_moe(config, router, transport, mesh, equal_backend, rngs)
    self.moe = moe() if rule.taps else None


class GPT(nnx.Module):
  """A decoder-only language model whose blocks follow one wiring.

  Stages are alike, so their parameters are stacked and run under one scan: compile time does not
  grow with depth. Compute type `config.dtype`; parameters are float32.

  Args:
    config: resolved architecture (`ModelConfig.resolve`).
    router, transport, overlap: options of routing, dispatch and schedule.
    mesh: device mesh, or None for one device.
    rngs: stream `params` for the initial weights.

  Raises:
    ConfigError: a slot of `overlap` lies inside an operation that cannot be divided.
  """

  def __init__(
    self,
    config: ModelConfig,
    *,
    router: RouterConfig | None = None,
    transport: DispatchConfig | None = None,
    overlap: OverlapConfig | None = None,
    mesh: Mesh | None = None,
    rngs: nnx.Rngs,
  ):
    self.config, self.mesh = config, mesh
    self.overlap = overlap or OverlapConfig()
    dense = dense_operations(config.wiring_rule, config.moe_every)
    for tap in config.wiring_rule.taps:
      check_slots(self.overlap, dense[tap_index(tap, config.moe_every) :])
    router, transport = router or RouterConfig(), transport or DispatchConfig()
    self.router, self.transport = router, transport
    self.embedding = Embedding(
      config.vocab_size,
      config.width,
      context=config.context if config.style == "gpt2" else 0,
      tied=config.tie_embeddings,
      init_std=config.init_std,
      rngs=rngs,
    )
    equal = _equal_backend(config, mesh, self.overlap)
    self.stages = _stacked(
      lambda key: Stage(config, router, transport, mesh, equal, rngs=nnx.Rngs(params=key)),
      jax.random.split(rngs.params(), self.num_stages),
    )
    self.norm = _norm(config)

  @property
  def num_stages(self) -> int:
    """Steps of the scan."""
    return self.config.num_layers // (self.config.moe_every * self.config.wiring_rule.units_per_moe)

  def __call__(
    self,
    tokens_BS: Array,
    *,
    positions_BS: Array | None = None,
    segments_BS: Array | None = None,
    live_BS: Array | None = None,
    caches: Any = None,
    key: Array | None = None,
    no_drop: bool = False,
    remat: str = "none",
    router: Any = None,
    gate: int = 0,
    one_round: bool = False,
  ) -> Output:
    """Runs the model.

    Args:
      tokens_BS: int32.
      positions_BS: int32 position of each token; 0, 1, ... if None.
      segments_BS: int32 document of each token, used with `config.document_mask`.
      live_BS: bool, False for padding, which visits no expert and is not counted.
      caches: key-value caches (`init_caches`) for decoding, or None.
      key: random key of the gate noise; None outside training.
      no_drop: experts have room for every token.
      remat: what the backward pass recomputes: none; dots (all but matrix products); moe (expert
        activations, nothing that travelled); full (all but the rows that travelled).
      router: router state (`init_router`), where there is any; evaluation needs it too.
      gate: index of the gate that chooses, where `router.gates` > 1.
      one_round: the dropless transport makes no further rounds: a first attempt, whose sums say
        whether anything is missing (`MoE.start`).
    """
    config = self.config
    if positions_BS is None:
      positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
    call = Call(
      positions_BS,
      segments_BS if config.document_mask else None,
      live_BS,
      no_drop,
      config.top_k,
      self.overlap,
      gate,
      one_round=one_round,
      recompute_experts=remat == "moe",
    )
    bias_LE = (router or {}).get("bias")
    h_BSD = self._pin(self.embedding(tokens_BS, positions_BS, jnp.dtype(config.dtype)))
    h_BSD, sums, caches = self._scan(h_BSD, caches, key, call, remat, bias_LE)
    return Output(self.norm(h_BSD), sums, caches)

  def logits(self, h_BSD: Array) -> Array:
    """float32 [B, S, V]."""
    return self.embedding.logits(h_BSD)

  def init_caches(self, batch: int, length: int, dtype: Any = None) -> Any:
    """Empty key-value caches of `length` positions, stacked as the scan wants them."""
    config = self.config
    shape = (self.num_stages, batch, length, config.num_kv_heads, config.head_dim)
    empty = lambda: KeyValues(*(jnp.zeros(shape, dtype or config.dtype) for _ in "kv"))
    units = config.wiring_rule.units_per_moe
    return [[empty() for _ in range(config.moe_every)] for _ in range(units)]

  def init_router(self) -> dict[str, Array]:
    """Router state before the first step, where there is any.

    It is no parameter: gradients do not train it. `LanguageModelObjective.update_router` does, once
    per optimizer step.

    Returns:
      `bias`: balancing biases [layers, E], with `router.bias`. `skewed`: int32 scalar, 1 if the
      last step needed further rounds, with `dispatch.transport=dropless`; on any mesh and whoever
      decides on them, so that a resumed run may change both.
    """
    config, state = self.config, {}
    if not config.wiring_rule.taps:
      return state
    if self.router.bias != "none":
      state["bias"] = jnp.zeros((self.num_stages, config.num_experts), jnp.float32)
    if self.transport.transport == "dropless":
      state["skewed"] = jnp.zeros((), jnp.int32)
    return state

  def _scan(self, h_BSD, caches, key, call: Call, remat: str, bias_LE: Array | None):
    rule = self.config.wiring_rule
    graph, params = nnx.split(self.stages)
    gatings = rule.units_per_moe * len(rule.taps)
    keys = None
    if key is not None and gatings:
      keys = jax.random.split(key, (self.num_stages, rule.units_per_moe, len(rule.taps)))
    hands_over = any(is_handed_over(tap, self.config.moe_every) for tap in rule.taps)
    handed = jnp.zeros_like(h_BSD) if hands_over else None

    def body(carry, xs):
      h_BSD, handed, first = carry
      params, caches, keys, bias_E = xs
      stage, here = nnx.merge(graph, params), dataclasses.replace(call, bias_E=bias_E)
      new_caches, sums = [], None
      for index, unit in enumerate(stage.units):
        if handed is not None and index == 0:
          # Nothing precedes the first unit: its experts read its own input (the paper's L0 Pos-1).
          own = unit.own_norm is not None
          start = h_BSD if own else unit.blocks[0].norm_attention(h_BSD)
          handed = jnp.where(first, start, handed)
        h_BSD, handed, unit_caches, unit_sums = unit(
          h_BSD,
          stage.moe,
          handed,
          None if caches is None else caches[index],
          None if keys is None else keys[index],
          here,
        )
        new_caches.append(unit_caches)
        if unit_sums is not None:
          sums = unit_sums if sums is None else jax.tree.map(jnp.add, sums, unit_sums)
      out = None if caches is None else new_caches
      return (self._pin(h_BSD), handed, jnp.zeros((), bool)), (sums, out)

    carry = (h_BSD, handed, jnp.ones((), bool))
    carry, (sums, caches) = jax.lax.scan(
      _rematerialised(body, remat),
      carry,
      (params, caches, keys, bias_LE),
      unroll=self.overlap.unroll or self.num_stages,
    )
    return carry[0], sums, caches

  def _pin(self, h_BSD: Array) -> Array:
    """Keeps the batch dimension on its mesh axes."""
    if self.mesh is None or self.mesh.size == 1 or inside_shard_map():
      return h_BSD
    return jax.lax.with_sharding_constraint(h_BSD, batch_sharding(self.mesh))


def _rematerialised(body, remat: str):
  """`body` under the named rematerialisation preset; see `GPT.__call__`."""
  policies = jax.checkpoint_policies
  if remat in ("none", "moe"):  # the units recompute the experts by themselves
    return body
  if remat == "dots":
    dots = policies.dots_with_no_batch_dims_saveable
    travelled = policies.save_only_these_names("moe_rows")
    return jax.checkpoint(body, policy=policies.save_from_both_policies(dots, travelled))
  if remat == "full":
    return jax.checkpoint(body, policy=policies.save_only_these_names("moe_rows"))
  raise ConfigError(f"train.remat={remat!r} is unknown; one of: {', '.join(REMATS)}")


def _stacked(make, keys: Array) -> Any:
  """A module whose parameters carry a leading dimension, one slice per key."""
  graph = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))))[0]
  params = jax.vmap(lambda key: nnx.split(make(key))[1])(keys)
  return nnx.merge(graph, params)


def _norm(config: ModelConfig) -> Norm:
  return Norm(
    config.width, {"gpt2": "layernorm", "llama": "rmsnorm"}[config.style], config.norm_eps
  )


def _out_std(config: ModelConfig) -> float:
  """GPT-2's rule: layers that write to the residual stream start smaller, by sqrt(2 L)."""
  return config.init_std / (2 * config.num_layers) ** 0.5


def _equal_backend(config: ModelConfig, mesh: Mesh | None, overlap: OverlapConfig) -> str:
  """What computes groups of one size: dense MLPs, and experts with equal room.

  Left to itself on several devices, XLA, unless the schedule is tied: its scheduler knows no times
  of kernels, and without barriers laid the exchanges badly beside them (experiments/LOG.md).
  """
  alone = mesh is None or mesh.size == 1
  free = config.expert_backend == "auto" and not alone and not overlap.barriers
  return "xla" if free else config.expert_backend


def _make_moe(
  config: ModelConfig, router, transport, mesh, equal_backend: str, rngs: nnx.Rngs
) -> MoE:
  return MoE(
    config.width,
    config.expert_hidden,
    config.num_experts,
    activation=config.activation,
    bias=config.style == "gpt2",
    init_std=config.init_std,
    out_std=_out_std(config),
    router=router,
    transport=transport,
    mesh=mesh,
    backend=config.expert_backend,
    equal_backend=equal_backend,
    rngs=rngs,
  )


def _make_unit(config: ModelConfig, mesh: Mesh | None, equal_backend: str, rngs: nnx.Rngs) -> Unit:
  rule = config.wiring_rule
  blocks = []
  for index in range(config.moe_every):
    ends_in_moe = index == config.moe_every - 1 and bool(rule.taps)
    hidden = config.shared_hidden if ends_in_moe else config.mlp_hidden
    has_mlp = not ends_in_moe or rule.shared_expert
    blocks.append(_make_block(config, hidden if has_mlp else 0, mesh, equal_backend, rngs))
  own = rule.is_shortcut and config.shortcut_norm != "shared"
  post = rule.is_shortcut and config.shortcut_norm == "megatron"
  mix = None
  if rule.shared_expert:
    mix = Mix(config.mix, config.width, init_std=config.init_std, rngs=rngs)
  return Unit(
    blocks,
    rule,
    shortcut_norm=config.shortcut_norm,
    norms=(_norm(config) if own else None, _norm(config) if post else None),
    mix=mix,
    mix_reads_shortcut=config.mix_input == "shortcut",
  )


def _make_block(
  config: ModelConfig, hidden: int, mesh: Mesh | None, equal_backend: str, rngs: nnx.Rngs
) -> Block:
  """A transformer block; `hidden` = 0 leaves its feed-forward sublayer out."""
  bias = config.style == "gpt2"
  attention = Attention(
    config.width,
    num_heads=config.num_heads,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    rope_theta=config.rope_theta if config.style == "llama" else 0.0,
    bias=bias,
    init_std=config.init_std,
    out_std=_out_std(config),
    rngs=rngs,
  )
  mlp = None
  if hidden:
    mlp = MLP(
      config.width,
      hidden,
      activation=config.activation,
      bias=bias,
      init_std=config.init_std,
      out_std=_out_std(config),
      mesh=mesh,
      backend=equal_backend,
      rngs=rngs,
    )
  return Block(_norm(config), attention, _norm(config), mlp)
