"""The options that blocks, pairs and whole models share, and the parts that they make."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from flax import nnx
from jax import Array

from scmoe.base.errors import ConfigError
from scmoe.base.options import Options, option, section
from scmoe.blocks.mix import MIXES
from scmoe.blocks.wiring import WIRINGS, Wiring
from scmoe.kernels.grouped_matmul import FFNOptions
from scmoe.kernels.grouped_matmul.backend import widths_have_kernels
from scmoe.layers.attention import QK_NORMS, Attention, AttentionConfig, LayerKind
from scmoe.layers.latent_attention import LatentAttention, LatentAttentionConfig
from scmoe.layers.mlp import MLPConfig
from scmoe.layers.norm import Norm
from scmoe.layers.rope import RopeConfig
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.layer import MoEConfig
from scmoe.moe.options import RouterConfig

SHORTCUT_NORMS = ("shared", "own", "megatron")
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class ModelAblation(Options, path="model.ablation"):
  """Options that change one part of a block, for ablations; other runs leave the defaults."""

  mix_input: str = option(
    "current",
    "which value the coefficients of model.mix=cg1 and cg2 are computed from: the shared expert's "
    "input (current), or the shortcut's",
    choices=("current", "shortcut"),
  )
  norm_after: bool = option(
    False,
    "a norm on what an expert stage adds to the residual stream, shared + routed, in any wiring; "
    "model.shortcut_norm=megatron has it with a shortcut alone",
  )


@dataclasses.dataclass(frozen=True)
class BlockConfig(Options, path="model"):
  """Options of transformer blocks of one wiring; the defaults are GPT-2's style in laptop size."""

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
  shortcut_norm: str = option(
    "shared",
    "norm that feeds the shortcut: shared with the sublayer that reads the same value "
    "(LongCat-Flash), own, or megatron (own, and one on shared + routed)",
    choices=SHORTCUT_NORMS,
  )
  num_experts: int = option(8, "routed experts E", minimum=1)
  top_k: int = option(
    1,
    "routed experts per token of topk, shared_expert, scmoe_pos1/2/3, farskip and farskip_routed; "
    "a shared expert comes on top. top1, top2, scmoe2, dgmoe say their own",
    minimum=1,
  )
  moe_every: int = option(2, "every Nth block has the MoE", minimum=1)
  width: int = option(128, "model width D", minimum=1)
  num_heads: int = option(4, "attention heads H", minimum=1)
  num_kv_heads: int = option(0, "key-value heads; 0: as many as heads", minimum=0)
  head_dim: int = option(0, "width of a head; 0: width / num_heads", minimum=0)
  mlp_hidden: int = option(0, "hidden width of dense MLPs; 0: 4 x width", minimum=0)
  expert_hidden: int = option(0, "hidden width F of a routed expert; 0: mlp_hidden", minimum=0)
  shared_hidden: int = option(0, "hidden width of the shared expert; 0: expert_hidden", minimum=0)
  ffn: FFNOptions = section(FFNOptions, "feed-forward networks: activation, and what computes them")
  zero_experts: int = option(
    0,
    "experts that return their input and cost nothing (LongCat-Flash zero_expert_num), behind the "
    "routed ones in the router's choice; router.real_experts is what their share is held at",
    minimum=0,
  )
  attention_bias: bool = option(
    False, "llama: biases of queries, keys, values and output; latent attention: of the "
    "projections from x and of the output"
  )  # fmt: skip
  attention_out_bias: bool = option(
    True, "llama: with model.attention_bias the output has a bias too (GLM-4.5: it has none)"
  )
  qk_norm: str = option(
    "none",
    "RMSNorm of queries and keys before they turn: head (each by itself; Qwen3), all (all heads at "
    "once; OLMoE); or after they turn: l2 (each by itself, without weights; Llama-4)",
    choices=QK_NORMS,
  )
  clip_qkv: float = option(0.0, "clips queries, keys and values (OLMoE); 0: off", minimum=0)
  attention_sinks: bool = option(
    False,
    "a learned score of each head takes a share of its softmax, so that the head may attend to "
    "nothing (GPT-OSS); no fused GPU attention then",
  )
  sliding_window: int = option(
    0, "positions that a token sees, itself included; 0: all before it", minimum=0
  )
  attention_chunk: int = option(
    0,
    "positions are cut into chunks of so many, and a token sees those of its own chunk alone "
    "(Llama-4 attention_chunk_size); 0: no chunks; no fused GPU attention with them",
    minimum=0,
  )
  attention_temperature: float = option(
    0.0,
    "in model.nope_layers queries at position p are multiplied by 1 + this · ln(1 + floor((p + 1) "
    "/ attention_temperature_floor)) (Llama-4 attn_scale); 0: they are not",
    minimum=0,
  )
  attention_temperature_floor: int = option(
    8192, "see attention_temperature (Llama-4 floor_scale)", minimum=1
  )
  attention_multiplier: float = option(
    0.0, "factor on the attention's scores (Granite); 0: 1 / sqrt(head_dim)", minimum=0
  )
  residual_multiplier: float = option(
    1.0,
    "factor on what attention, MLP and experts add to the residual stream (Granite)",
    minimum=0,
  )
  kv_lora_rank: int = option(
    0,
    "latent attention (DeepSeek-V2): width of the latent of keys and values, which with one rotary "
    "key is all that the cache keeps; 0: ordinary attention",
    minimum=0,
  )
  q_lora_rank: int = option(0, "latent attention: width of the queries' latent; 0: none", minimum=0)
  qk_nope_head_dim: int = option(
    0, "latent attention: part of a query that does not turn", minimum=0
  )
  qk_rope_head_dim: int = option(0, "latent attention: part of a query that turns", minimum=0)
  v_head_dim: int = option(0, "latent attention: width of a value", minimum=0)
  mla_scale_q_lora: bool = option(
    False, "latent attention: queries times sqrt(width / q_lora_rank) (LongCat-Flash)"
  )
  mla_scale_kv_lora: bool = option(
    False, "latent attention: latent times sqrt(width / kv_lora_rank) (LongCat-Flash)"
  )
  latent_norm_eps: float = option(
    1e-6, "latent attention: epsilon of the latents' norms", minimum=0
  )
  rope_theta: float = option(10000.0, "base of the rotary embedding (llama)", minimum=1)
  rope: RopeConfig = section(RopeConfig, "pairs of the rotary embedding, and longer contexts")
  norm_eps: float = option(1e-5, "epsilon of the norms", minimum=0)
  init_std: float = option(0.02, "standard deviation of the initial weights", minimum=0)
  dtype: str = option("bfloat16", "type of the computation; parameters are float32", choices=DTYPES)
  expert_bias: bool = option(
    False, "llama: biases of all three projections of routed experts (GPT-OSS)"
  )
  experts: str = option(
    "ffn",
    "what the experts are: ffn (feed-forward networks), or experts of one's own as "
    "my_package.module:Name",
    choices=("ffn",),
    importable=True,
  )
  document_mask: bool = option(
    False, "attention stays inside a document of a packed row (no fused GPU attention then)"
  )

  ablation: ModelAblation = section(ModelAblation, "parts of a block that only ablations set apart")

  @property
  def wiring_rule(self) -> Wiring:
    """The `Wiring` that the option `wiring` names."""
    return WIRINGS[self.wiring]

  def with_wiring(self, name: str) -> Self:
    """The same options with another wiring, and the norm of its shortcut if it takes no other."""
    changes = {"wiring": name}
    if name in WIRINGS and WIRINGS[name].norm_mlp_feeds_experts:
      changes["shortcut_norm"] = "shared"
    return dataclasses.replace(self, **changes)

  @property
  def depth(self) -> int:
    """Number of blocks of a pair, for `out_std`; in a whole model the number of its layers."""
    return self.moe_every * self.wiring_rule.units_per_moe

  def resolve(self) -> Any:
    """Replaces each 0 or empty word that means "follows from other fields", and checks the result.

    For example `head_dim` = 0 becomes width / num_heads.

    Raises:
      ConfigError: names the field, what was got and what would do.
    """
    resolved = self._filled()
    resolved.check()
    return resolved

  def _filled(self) -> Any:
    """The options with each 0 or empty word that means "follows from other fields" replaced."""
    hidden = self.mlp_hidden or 4 * self.width
    expert_hidden = self.expert_hidden or hidden
    return dataclasses.replace(
      self,
      num_kv_heads=self.num_kv_heads or self.num_heads,
      head_dim=self._head_width(),
      mlp_hidden=hidden,
      expert_hidden=expert_hidden,
      shared_hidden=self.shared_hidden or expert_hidden,
      ffn=self.ffn.filled(gated=self.style == "llama"),
    )

  def _head_width(self) -> int:
    """The width of a head: `head_dim`, else that of a latent query, else width / num_heads.

    Raises:
      ConfigError: none of them is given, and num_heads does not divide the width.
    """
    given = self.head_dim or self.qk_nope_head_dim + self.qk_rope_head_dim
    if not given and self.width % self.num_heads:
      raise ConfigError(
        f"model.width={self.width} is not divisible by model.num_heads={self.num_heads}; use a "
        "multiple, or set model.head_dim"
      )
    return given or self.width // self.num_heads

  def check(self) -> None:
    """Checks what depends on more than one field of a resolved configuration.

    Raises:
      ConfigError: names the field, what was got and what would do.
    """
    rule = self.wiring_rule
    if self.num_heads % self.num_kv_heads:
      raise ConfigError(
        f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads="
        f"{self.num_kv_heads}; use a divisor of {self.num_heads}"
      )
    odd = self.style == "llama" and not self.kv_lora_rank and self.head_dim % 2
    if self.head_dim == 0 or odd:
      raise ConfigError(
        f"model.head_dim={self.head_dim} (model.width={self.width} over model.num_heads="
        f"{self.num_heads}) must be positive, and even for rotary positions; set model.head_dim"
      )
    chosen = rule.routed_per_gating(self.top_k) if rule.taps else 0
    needed = max(chosen, 2 if rule.distinct else 0)
    if needed > self.num_experts + self.zero_experts:
      name = f"model.top_k={self.top_k}" if rule.k is None else f"model.wiring={self.wiring!r}"
      raise ConfigError(
        f"{name} needs {needed} experts, model.num_experts={self.num_experts}; raise "
        f"model.num_experts to at least {needed}"
      )
    if rule.norm_mlp_feeds_experts and self.shortcut_norm != "shared":
      raise ConfigError(
        f"model.shortcut_norm={self.shortcut_norm!r} does not go with model.wiring="
        f"{self.wiring!r}, whose experts alone read their block's norm; use 'shared'"
      )
    if rule.skips and self.ablation.norm_after:
      raise ConfigError(
        f"model.ablation.norm_after=True normalises shared + routed, got model.wiring="
        f"{self.wiring!r}, whose attention reads the shared part alone; leave it out"
      )
    if rule.skips and self.shortcut_norm == "megatron":
      raise ConfigError(
        f"model.shortcut_norm='megatron' normalises shared + routed, got model.wiring="
        f"{self.wiring!r}, whose attention reads the shared part alone; use 'shared' or 'own'"
      )
    if self.ffn.fp8 and self.ffn.impl == "block_sparse":
      raise ConfigError(
        "model.ffn.fp8=True goes with grouped and batched products, got "
        "model.ffn.impl='block_sparse'; use 'auto'"
      )
    if self.ffn.fp8 and self.experts != "ffn":
      raise ConfigError(
        "model.ffn.fp8=True rounds what feed-forward networks read, got "
        f"model.experts={self.experts!r}; use 'ffn', or leave model.ffn.fp8 out"
      )
    self.rope.check()
    if self.rope.scaling == "yarn" and self.rope_theta <= 1:
      raise ConfigError(
        f"model.rope_theta={self.rope_theta} does not go with model.rope.scaling='yarn'; give a "
        "base above 1, such as 10000"
      )
    self._check_attention()
    widths = (self.width, self.expert_hidden, self.mlp_hidden, self.shared_hidden)
    if self.ffn.backend == "mosaic_gpu" and not widths_have_kernels(self.dtype, *widths):
      raise ConfigError(
        "model.ffn.backend='mosaic_gpu' takes bfloat16 or float16 and multiples of 64, got "
        f"model.dtype={self.dtype!r}, model.width={self.width}, model.expert_hidden="
        f"{self.expert_hidden}, model.mlp_hidden={self.mlp_hidden} and model.shared_hidden="
        f"{self.shared_hidden}; use 'auto' or 'xla'"
      )

  def _check_attention(self) -> None:
    """Checks the options of attention that need each other, another style, or exclude each other.

    The options that need llama style also comprise `expert_bias`, which is one of experts.

    Raises:
      ConfigError: names the field, what was got and what would do.
    """
    named = lambda *names: ", ".join(f"model.{name}={getattr(self, name)!r}" for name in names)
    if self.style == "gpt2":
      names = ("attention_bias", "kv_lora_rank", "expert_bias")
      extra = [n for n in names if getattr(self, n)]
      extra += ["qk_norm"] if self.qk_norm == "l2" else []
      extra += [] if self.attention_out_bias else ["attention_out_bias"]
      if extra:
        raise ConfigError(f"{named(*extra)} goes with model.style='llama', not with 'gpt2'")
    elif not self.kv_lora_rank and self.rope.turning(self.head_dim) < 2:
      raise ConfigError(
        f"model.rope.share={self.rope.share} of model.head_dim={self.head_dim} turns no pair; use "
        f"at least {2 / self.head_dim:.3g}"
      )
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if not self.kv_lora_rank:
      extra = [n for n in ("q_lora_rank", *sizes, "mla_scale_kv_lora") if getattr(self, n)]
      if extra:
        raise ConfigError(
          f"{named(*extra)} is for latent attention; set model.kv_lora_rank as well, or leave it"
        )
      return
    if not all(getattr(self, name) for name in sizes) or self.qk_rope_head_dim % 2:
      raise ConfigError(
        f"model.kv_lora_rank={self.kv_lora_rank} makes latent attention, which needs "
        f"{', '.join(f'model.{name}' for name in sizes)} (the second one even), got {named(*sizes)}"
      )
    names = ("clip_qkv", "sliding_window", "attention_multiplier", "attention_sinks",
             "attention_chunk", "attention_temperature")  # fmt: skip
    extra = [n for n in names if getattr(self, n)]
    if self.rope.share < 1 or not self.attention_out_bias:
      name, value = ("rope.share", self.rope.share) if self.rope.share < 1 else (
        "attention_out_bias", False)  # fmt: skip
      raise ConfigError(
        f"model.{name}={value} does not go with latent attention (model.kv_lora_rank), whose "
        "queries have a part that turns anyway; leave it out"
      )
    if self.qk_norm != "none" or extra:
      extra = extra or ["qk_norm"]
      raise ConfigError(f"{named(*extra)} does not go with latent attention (model.kv_lora_rank)")
    if self.mla_scale_q_lora and not self.q_lora_rank:
      raise ConfigError("model.mla_scale_q_lora=True scales the latent of model.q_lora_rank=0")

  # -- what the parts of a block are made of ------------------------------------------------------

  @property
  def bias(self) -> bool:
    """Whether the style gives feed-forward layers and attention's projections biases, as gpt2 does.

    The projection to keys is the exception: only `attention_bias` gives it one.
    """
    return self.style == "gpt2"

  @property
  def out_std(self) -> float:
    """Initial standard deviation of layers that write to the residual stream.

    It is init_std / √(2 · depth), as in GPT-2.
    """
    return self.init_std / (2 * self.depth) ** 0.5

  def norm(self) -> Norm:
    """A norm of the model's width."""
    kind = {"gpt2": "layernorm", "llama": "rmsnorm"}[self.style]
    return Norm(self.width, kind, self.norm_eps)

  @property
  def attention(self) -> AttentionConfig | LatentAttentionConfig:
    """The options with which `make_attention` makes an attention, ordinary or latent."""
    shared: dict[str, Any] = {
      "rope_theta": self.rope_theta if self.style == "llama" else 0.0,
      "rope": self.rope,
      "init_std": self.init_std,
      "out_std": self.out_std,
    }
    if self.kv_lora_rank:
      names = ("width", "num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
               "qk_rope_head_dim", "v_head_dim")  # fmt: skip
      return LatentAttentionConfig(
        **{name: getattr(self, name) for name in names},
        scale_q=self.mla_scale_q_lora,
        scale_kv=self.mla_scale_kv_lora,
        norm_eps=self.latent_norm_eps,
        bias=self.attention_bias,
        **shared,
      )
    filled = self._filled()
    return AttentionConfig(
      width=self.width,
      num_heads=self.num_heads,
      num_kv_heads=filled.num_kv_heads,
      head_dim=filled.head_dim,
      bias=self.bias or self.attention_bias,
      key_bias=self.attention_bias,
      out_bias=self.attention_out_bias,
      qk_norm=self.qk_norm,
      norm_eps=self.norm_eps,
      window=self.sliding_window,
      clip_qkv=self.clip_qkv,
      multiplier=self.attention_multiplier,
      sinks=self.attention_sinks,
      chunk=self.attention_chunk,
      temperature=self.attention_temperature,
      temperature_floor=self.attention_temperature_floor,
      **shared,
    )

  def make_attention(self, rngs: nnx.Rngs, number: int = 0) -> Attention | LatentAttention:
    """A new attention with these options.

    Args:
      rngs: stream `params` for the initial weights.
      number: of the block in its unit; all blocks of a language model are alike.
    """
    del number
    config = self.attention
    if isinstance(config, LatentAttentionConfig):
      return LatentAttention(config, rngs=rngs)
    return Attention(config, rngs=rngs)

  def kind_of_layer(self, before: int | Array, unit: int, block: int) -> dict[str, Any]:
    """Keyword arguments for a layer's attention: its `kind`, or {} if all layers' are alike.

    They are those of `Attention.project` and `Attention.mix`.

    Args:
      before: number of pairs and dense layers before the layer's own pair; may be traced.
      unit, block: numbers of the layer's unit in its pair, and of its block in the unit.
    """
    kind = self._kind((before * self.wiring_rule.units_per_moe + unit) * self.moe_every + block)
    return {} if kind is None else {"kind": kind}

  def _kind(self, number: int | Array) -> LayerKind | None:
    """The `kind` of the layer with this number; None: the attentions of all layers are alike.

    Here it is always None; `ModelConfig` knows the layers that differ.
    """
    del number
    return None

  def mlp(self, hidden: int) -> MLPConfig:
    """The options of a dense MLP or shared expert of this hidden width."""
    return MLPConfig(self.width, hidden, **self._layer())

  def moe(
    self, router: RouterConfig, dispatch: DispatchConfig, *, copy_engines: bool = False
  ) -> MoEConfig:
    """The options of the MoE; its `top_k` is the number of experts per token and gating."""
    filled = self._filled()
    layer: dict[str, Any] = {**self._layer(), "bias": self.bias or self.expert_bias}
    return MoEConfig(
      width=self.width,
      hidden=filled.expert_hidden,
      num_experts=self.num_experts,
      zero_experts=self.zero_experts,
      top_k=self.wiring_rule.routed_per_gating(self.top_k),
      copy_engines=copy_engines,
      kind=self.experts,
      router=router,
      dispatch=dispatch,
      gate_bias=self.expert_bias,
      **layer,
    )

  def _layer(self) -> dict[str, Any]:
    """The fields of `FFNLayerOptions`, which MLPs and experts have in common."""
    std = {"init_std": self.init_std, "out_std": self.out_std}
    return {"bias": self.bias, **std, **self._filled().ffn.shared()}
