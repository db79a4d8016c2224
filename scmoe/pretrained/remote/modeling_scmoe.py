"""ScMoE language models in plain PyTorch, for transformers.

`python -m scmoe.convert --to FOLDER` writes this file beside a model's weights, and transformers
runs it if the caller passes `trust_remote_code=True`. The model computes what scmoe computes in
evaluation: no noise on the router's scores, and room for every token at every expert. Modules,
names and shapes of parameters are those of scmoe: matrices are [in, out], heads have a dimension of
their own, and the experts of a layer are one tensor.

  B  rows     S  tokens of a row     T  tokens of all rows     K  experts of a token
  D  width    F  hidden width        H  heads                  N  width of a head
"""

import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

silu, relu = functional.silu, functional.relu
gelu = lambda h: functional.gelu(h, approximate="tanh")
clamped = lambda h: h.clamp(max=7) * (1.702 * h.clamp(max=7)).sigmoid()
# Activations of a gate. `up` is multiplied by the result; with `clamped_swiglu` it is first clamped
# to ± 7, and 1 is added.
GATED = {"swiglu": silu, "geglu": gelu, "reglu": relu, "clamped_swiglu": clamped}
PLAIN = {"silu": silu, "gelu": gelu, "gelu_exact": functional.gelu, "relu": relu,
         "relu2": lambda h: relu(h).square()}  # fmt: skip
GATES = ("linear", "affine", "cosine")  # kinds of the class `Gate`


class ScmoeConfig(PretrainedConfig):
  """config.json of a ScMoE model.

  Attributes:
    scmoe: three groups. `model` and `router` are options under the names that scmoe gives them.
      `derived` follows from them: `taps`, the values that routed experts read; `top_k`, experts of
      a token for each tap; `shared_expert`, whether one runs beside them; `distinct`, whether the
      second tap avoids the first one's expert; `units_per_moe`, units that share a set of experts;
      `first_taps`, the taps of the first unit if they differ; `skips`, whether a unit's first
      attention reads the residual stream without the routed experts of the unit before, and MLPs
      and shared experts read their block's input; `dense_layers`, blocks with a dense MLP in place
      of experts; the rotary embedding's `frequencies` (radians per position) and `amplitude`;
      `score_scale` of the attention; and `full_layers`, in which `sliding_window` does not hold.
  """

  model_type = "scmoe"
  keys_to_ignore_at_inference = ("past_key_values", "cache")

  def __init__(self, scmoe=None, **kwargs):
    self.scmoe = scmoe or {}
    super().__init__(**kwargs)


def as_options(values):
  """A group of options, and every group in it, as an object with attributes."""
  named = {k: as_options(v) if isinstance(v, dict) else v for k, v in values.items()}
  return SimpleNamespace(**named)


def weight(*shape, wanted=True):
  """A parameter for the checkpoint to fill; None if the model has no such parameter."""
  return nn.Parameter(torch.empty(*shape)) if wanted else None


def plus(x, bias):
  """x + bias; x where there is no bias."""
  return x if bias is None else x + bias


def wide(x):
  """x in float32, or in float64 if it has that type."""
  return x.to(torch.promote_types(x.dtype, torch.float32))


def normalised(x, scale, bias, eps):
  """LayerNorm of the last dimension; RMSNorm if `bias` is None. Statistics are float32."""
  y = wide(x)
  y = y if bias is None else y - y.mean(-1, keepdim=True)
  y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * scale
  return plus(y, bias).to(x.dtype)


class Norm(nn.Module):
  """A norm with parameters of its own; see `normalised`."""

  def __init__(self, width, eps, centred=False):
    super().__init__()
    self.scale, self.bias, self.eps = weight(width), weight(width, wanted=centred), eps

  def forward(self, x):
    return normalised(x, self.scale, self.bias, self.eps)


def model_norm(c):
  """A norm of the model's width: LayerNorm in gpt2 style, RMSNorm in llama style."""
  return Norm(c.width, c.norm_eps, c.style == "gpt2")


# -- attention ------------------------------------------------------------------------------------


def rotate(x_BSHN, where, c):
  """Rotary embedding of the pairs (i, i + n/2) of a head's first n elements, which turn.

  If `c.rope.interleaved`, of the pairs (2i, 2i + 1).
  """
  steps = torch.tensor(where.derived.frequencies, dtype=torch.float32, device=x_BSHN.device)
  angle, size = where.positions[:, :, None, None].float() * steps, where.derived.amplitude
  x, rest = wide(x_BSHN).tensor_split([2 * len(steps)], -1)
  sin, cos = size * angle.sin(), size * angle.cos()
  first, second = (x[..., 0::2], x[..., 1::2]) if c.rope.interleaved else x.chunk(2, -1)
  turned = first * cos - second * sin, second * cos + first * sin
  made = torch.stack(turned, -1).flatten(-2) if c.rope.interleaved else torch.cat(turned, -1)
  return torch.cat([made, rest], -1).to(x_BSHN.dtype)


def attend(q_BSHN, k_BSHN, v_BSHN, where, layer, sinks_H=None):
  """Softmax attention over the cache, to which it adds the new keys and values, if there is one.

  `layer` is the attention's number, under which the cache keeps its keys and values; it also says
  whether the window holds. A sink is the score of one more key, whose value is zero.
  """
  q, k, v = (x.transpose(1, 2) for x in (q_BSHN, k_BSHN, v_BSHN))
  if where.cache is not None:
    k, v = where.cache.update(k, v, layer)
  k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
  mask = where.before if layer in where.full_layers else where.visible
  if sinks_H is not None:
    mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -math.inf)
    sinks = sinks_H.to(q.dtype)[:, None, None].expand(len(mask), -1, mask.shape[2], 1)
    mask = torch.cat([mask.expand(-1, len(sinks_H), -1, -1), sinks], -1)
    k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
  options = {"attn_mask": mask, "scale": where.derived.score_scale}
  return functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


class Attention(nn.Module):
  """Attention whose heads of queries may share heads of keys and values."""

  def __init__(self, c, layer):
    super().__init__()
    self.c, self.layer = c, layer
    heads, kv, n, bias = c.num_heads, c.num_kv_heads, c.head_dim, c.attention_bias
    self.query, self.out = weight(c.width, heads, n), weight(heads, n, c.width)
    self.key, self.value = weight(c.width, kv, n), weight(c.width, kv, n)
    biased = bias or c.style == "gpt2"
    self.query_bias = weight(heads, n, wanted=biased)
    self.out_bias = weight(c.width, wanted=biased and c.attention_out_bias)
    self.key_bias, self.value_bias = weight(kv, n, wanted=bias), weight(kv, n, wanted=biased)
    shape = {"none": lambda h: (), "head": lambda h: (n,), "all": lambda h: (h, n)}[c.qk_norm]
    self.sinks = weight(heads, wanted=c.attention_sinks)
    self.query_norm = weight(*shape(heads), wanted=c.qk_norm != "none")
    self.key_norm = weight(*shape(kv), wanted=c.qk_norm != "none")

  def projected(self, x_BSD, matrix, bias, norm=None):
    """Queries, keys or values after bias, norm and clipping: [B, S, H, N]."""
    y, eps = plus(torch.einsum("bsd,dhn->bshn", x_BSD, matrix), bias), self.c.norm_eps
    if norm is not None and norm.dim() == 1:  # every head by itself
      y = normalised(y, norm, None, eps)
    elif norm is not None:
      y = normalised(y.flatten(2), norm.flatten(), None, eps).view_as(y)
    return y.clamp(-self.c.clip_qkv, self.c.clip_qkv) if self.c.clip_qkv else y

  def forward(self, x_BSD, where):
    q = self.projected(x_BSD, self.query, self.query_bias, self.query_norm)
    k = self.projected(x_BSD, self.key, self.key_bias, self.key_norm)
    v = self.projected(x_BSD, self.value, self.value_bias)
    if self.c.style == "llama":
      q, k = rotate(q, where, self.c), rotate(k, where, self.c)
    y = attend(q, k, v, where, self.layer, self.sinks)
    return plus(torch.einsum("bshn,hnd->bsd", y, self.out), self.out_bias)


class LatentAttention(nn.Module):
  """Multi-head latent attention (DeepSeek-V2); the cache keeps all heads' keys and values."""

  def __init__(self, c, layer):
    super().__init__()
    self.c, self.layer = c, layer
    rank, bias, eps = c.q_lora_rank, c.attention_bias, c.latent_norm_eps
    self.query_down = weight(c.width, rank, wanted=rank)
    self.query_down_bias = weight(rank, wanted=rank and bias)
    self.query_norm = Norm(rank, eps) if rank else None
    self.query = weight(rank or c.width, c.num_heads, c.qk_nope_head_dim + c.qk_rope_head_dim)
    self.kv_down = weight(c.width, c.kv_lora_rank + c.qk_rope_head_dim)
    self.kv_down_bias = weight(c.kv_lora_rank + c.qk_rope_head_dim, wanted=bias)
    self.kv_norm = Norm(c.kv_lora_rank, eps)
    self.kv_up = weight(c.kv_lora_rank, c.num_heads, c.qk_nope_head_dim + c.v_head_dim)
    self.out = weight(c.num_heads, c.v_head_dim, c.width)
    self.out_bias = weight(c.width, wanted=bias)

  def forward(self, x_BSD, where):
    c, read = self.c, x_BSD
    if c.q_lora_rank:
      read = self.query_norm(plus(x_BSD @ self.query_down, self.query_down_bias))
      read = read * math.sqrt(c.width / c.q_lora_rank) if c.mla_scale_q_lora else read
    q = torch.einsum("bsr,rhn->bshn", read, self.query)
    straight, turning = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
    made = plus(x_BSD @ self.kv_down, self.kv_down_bias)
    latent, key = made.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
    latent = self.kv_norm(latent)
    latent = latent * math.sqrt(c.width / c.kv_lora_rank) if c.mla_scale_kv_lora else latent
    made = torch.einsum("bsr,rhn->bshn", latent, self.kv_up)
    k, v = made.split([c.qk_nope_head_dim, c.v_head_dim], -1)
    key = rotate(key[:, :, None], where, c).expand(-1, -1, c.num_heads, -1)
    q = torch.cat([straight, rotate(turning, where, c)], -1)
    y = attend(q, torch.cat([k, key], -1), v, where, self.layer)
    return plus(torch.einsum("bshv,hvd->bsd", y, self.out), self.out_bias)


# -- feed-forward networks and experts ------------------------------------------------------------


class FeedForward(nn.Module):
  """A dense MLP or shared expert; with `experts` > 0 so many networks, stacked."""

  def __init__(self, c, hidden, experts=0):
    super().__init__()
    self.kind, first = c.ffn.activation, (experts,) * bool(experts)
    every = c.expert_bias and experts > 0  # all three projections of experts have a bias
    bias = every or c.style == "gpt2"
    self.up, self.down = weight(*first, c.width, hidden), weight(*first, hidden, c.width)
    self.gate = weight(*first, c.width, hidden, wanted=self.kind in GATED)
    self.up_bias = weight(*first, hidden, wanted=bias)
    self.down_bias = weight(*first, c.width, wanted=bias)
    self.gate_bias = weight(*first, hidden, wanted=every and self.gate is not None)

  def forward(self, x, expert=...):
    """The output for x [..., D] of this network, or of one of the stacked ones."""
    of = lambda parameter: None if parameter is None else parameter[expert]
    h = plus(x @ of(self.up), of(self.up_bias))
    if self.gate is None:
      return plus(PLAIN[self.kind](h) @ of(self.down), of(self.down_bias))
    h = h.clamp(-7, 7) + 1 if self.kind == "clamped_swiglu" else h
    h = GATED[self.kind](plus(x @ of(self.gate), of(self.gate_bias))) * h
    return plus(h @ of(self.down), of(self.down_bias))


class Gate(nn.Module):
  """Scores of the experts: x · W (linear), x · W + b (affine), or scaled cosines (cosine).

  A cosine is that of the angle between the projected x and the expert's direction.
  """

  def __init__(self, width, experts, router):
    super().__init__()
    self.kind, dim = router.gate, router.cosine_dim
    if self.kind in ("linear", "affine"):
      self.weight = weight(width, experts)
      self.bias = weight(experts, wanted=self.kind == "affine")
    else:
      self.projection, self.projection_bias = weight(width, dim), weight(dim)
      self.directions, self.log_scale = weight(dim, experts), weight(1)

  def forward(self, x_TD):
    if self.kind in ("linear", "affine"):
      return plus(x_TD @ self.weight.to(x_TD.dtype), self.bias)
    dtype, floor = x_TD.dtype, max(1e-12, torch.finfo(x_TD.dtype).tiny)
    unit = lambda a, dim: functional.normalize(wide(a.to(dtype)), dim=dim, eps=floor).to(dtype)
    point = x_TD @ self.projection.to(x_TD.dtype) + self.projection_bias.to(x_TD.dtype)
    scale = self.log_scale.to(x_TD.dtype).clamp(max=math.log(100.0)).exp()
    return unit(point, 1) @ unit(self.directions, 0) * scale


class MoE(nn.Module):
  """Routed experts. Of several gates only the first one serves outside training."""

  def __init__(self, c, router, top_k):
    super().__init__()
    self.router, self.top_k, self.computing = router, top_k, c.num_experts
    choices = c.num_experts + c.zero_experts
    gates = [Gate(c.width, choices, router) for _ in range(router.compat.gates)]
    self.router_gate = nn.ModuleList(gates)
    self.experts = FeedForward(c, c.expert_hidden, c.num_experts)
    self.bias = weight(choices, wanted=router.bias != "none")  # added to scores to choose experts

  def forward(self, x, avoided_T1=None):
    """The weighted sum of the experts' outputs, in the shape of x, and the experts [T, K].

    With `avoided_T1` a token visits one expert, and not that one.
    """
    x_TD, router, compat = x.flatten(0, -2), self.router, self.router.compat
    logits_TE = wide(self.router_gate[0](wide(x_TD) if compat.fp32_gate else x_TD))
    sigmoid = router.scoring_func == "sigmoid"
    scores_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(-1)
    count = self.top_k if avoided_T1 is None else 2
    chosen_TK = self.best(logits_TE, scores_TE)[:, :count]
    if avoided_T1 is not None:
      chosen_TK, count = chosen_TK.gather(1, (chosen_TK[:, :1] == avoided_T1).long()), 1
    share_TK = scores_TE.gather(1, chosen_TK)
    limits = torch.finfo(share_TK.dtype)
    if compat.weight_norm:
      power = share_TK.pow(compat.weight_norm).sum(-1, keepdim=True).clamp(min=limits.tiny)
      share_TK = share_TK / power.pow(1 / compat.weight_norm)
    elif router.normalise and count > 1:
      share_TK = share_TK / share_TK.sum(-1, keepdim=True).clamp(min=limits.eps)
    share_TK = (share_TK * router.routed_scaling_factor).to(x.dtype)
    total_TD = torch.zeros_like(x_TD)
    for expert in chosen_TK.unique().tolist():
      token, place = torch.where(chosen_TK == expert)
      rows, share = x_TD[token], share_TK[token, place, None]
      if expert >= self.computing:  # a zero expert returns its input
        rows = rows * share
      elif compat.weights == "before":
        rows = self.experts(rows * share, expert)
      else:
        rows = self.experts(rows, expert) * share
      total_TD.index_add_(0, token, rows)
    return total_TD.view_as(x), chosen_TK

  def best(self, logits_TE, scores_TE):
    """The experts of every token, best first; of equal ones the first one comes first."""
    router, order_TE = self.router, logits_TE
    ranked = lambda values: values.argsort(dim=-1, descending=True, stable=True)
    if self.bias is not None or router.n_group > 1:
      order_TE = plus(scores_TE, self.bias)
    if router.n_group > 1:  # experts outside the best groups are out of the question
      order_TGE = order_TE.view(len(order_TE), router.n_group, -1)
      count = {"top2": 2, "max": 1}[router.group_score]
      opened = ranked(order_TGE.topk(count, -1)[0].sum(-1))[:, : router.topk_group]
      closed = torch.ones_like(order_TGE[:, :, 0], dtype=torch.bool).scatter(1, opened, False)
      order_TE = order_TGE.masked_fill(closed[:, :, None], -math.inf).flatten(1)
    return ranked(order_TE)


class Mix(nn.Module):
  """shared + routed (direct), σ(w·x) · shared + routed (cg1), or a softmax's shares (cg2)."""

  def __init__(self, c):
    super().__init__()
    outputs = {"direct": 0, "cg1": 1, "cg2": 2}[c.mix]
    self.weight = weight(c.width, outputs, wanted=outputs)

  def forward(self, shared, routed, x):
    if self.weight is None:
      return shared + routed
    score = wide(x) @ wide(self.weight)
    if score.shape[-1] == 1:
      return score.sigmoid().to(x.dtype) * shared + routed
    share = score.softmax(-1).to(x.dtype)
    return share[..., :1] * shared + share[..., 1:] * routed


# -- blocks ---------------------------------------------------------------------------------------


class Block(nn.Module):
  """Attention and, if `hidden` is not 0, a dense MLP or shared expert."""

  def __init__(self, c, hidden, layer):
    super().__init__()
    self.norm_attention, self.norm_mlp = model_norm(c), model_norm(c)
    self.attention = (LatentAttention if c.kv_lora_rank else Attention)(c, layer)
    self.mlp = FeedForward(c, hidden) if hidden else None


class Unit(nn.Module):
  """Blocks of which the last one has routed experts; or, if `dense`, a block without.

  A tap is a value that routed experts read: input of the block before theirs (block_input), the
  same after its attention (attention), its output (block_output), or the value before the experts
  (current). In a unit of one block the first two come from the unit before.
  """

  def __init__(self, c, derived, layer, dense):
    super().__init__()
    own = derived.taps if layer else getattr(derived, "first_taps", derived.taps)
    taps, self.skips = () if dense else tuple(own), getattr(derived, "skips", False)
    before = {"block_input", "attention"} & set(derived.taps[:1]) if c.moe_every == 1 else ()
    self.taps, self.passed = taps, "unrouted" if self.skips else "".join(before)
    hidden = [c.mlp_hidden] * c.moe_every
    if taps:
      hidden[-1] = c.shared_hidden if derived.shared_expert else 0
    self.blocks = nn.ModuleList([Block(c, h, layer + i) for i, h in enumerate(hidden)])
    shortcut, kind = any(tap != "current" for tap in taps), c.shortcut_norm
    self.shared_norm, self.residual = kind == "shared", c.residual_multiplier
    self.own_norm = model_norm(c) if shortcut and kind != "shared" else None
    after = (taps and c.ablation.norm_after) or (shortcut and kind == "megatron")
    self.post_norm = model_norm(c) if after else None
    self.mix = Mix(c) if taps and derived.shared_expert else None
    self.distinct, self.mix_current = derived.distinct, c.ablation.mix_input == "current"

  def handed(self, tap, h):
    """A value for the next unit: for experts normalised if they have no norm of their own.

    If the wiring skips, it is for the next unit's attention, and stays as it is.
    """
    norm = self.blocks[0].norm_mlp if tap == "attention" else self.blocks[0].norm_attention
    return norm(h) if self.shared_norm and not self.skips else h

  def read(self, tap, values, before):
    """The normalised value of a tap."""
    last = self.blocks[-1]
    if tap == "current":
      return last.norm_mlp(values[tap])
    if tap == self.passed:
      return before if self.own_norm is None else self.own_norm(before)
    if self.own_norm is not None:
      return self.own_norm(values[tap])
    if tap == "block_output":
      return (last.norm_mlp if self.skips else last.norm_attention)(values[tap])
    block = self.blocks[-2]
    return (block.norm_mlp if tap == "attention" else block.norm_attention)(values[tap])

  def forward(self, h, before, moe, where):
    """The residual stream after the unit, and the value that it passes on.

    `before` is the value that the unit before passes on; None: there is no such unit, and this
    unit's own input serves.
    """
    after = self.handed("block_input", h) if self.passed else None
    before, values = after if before is None else before, {}
    for i, block in enumerate(self.blocks):
      left = len(self.blocks) - 1 - i  # blocks that follow
      values[("block_output", "block_input", "")[min(left, 2)]] = h
      start, read = h, before if self.skips and not i else h
      h = h + self.residual * block.attention(block.norm_attention(read), where)
      fed = start if self.skips else h
      values[("current", "attention", "")[min(left, 2)]] = h
      if self.passed == "attention":
        after = self.handed("attention", h)
      if self.skips and not left:
        after = h
      if left or not self.taps:
        h = h + self.residual * block.mlp(block.norm_mlp(fed))
        where.states.append(h)
    if not self.taps:
      return h, h if self.skips else after
    inputs, routed, avoided = [self.read(tap, values, before) for tap in self.taps], 0, None
    for x in inputs:
      made, chosen_TK = moe(x, avoided)
      routed, avoided = routed + made, chosen_TK[:, :1] if self.distinct else None
    if self.mix is not None:
      x = self.blocks[-1].norm_mlp(fed)
      shared, read = self.blocks[-1].mlp(x), x if self.mix_current else inputs[0]
      after = h + self.residual * self.mix(shared, 0 * routed, read) if self.skips else after
      routed = self.mix(shared, routed, read)
    h = h + self.residual * (routed if self.post_norm is None else self.post_norm(routed))
    where.states.append(h)
    return h, after


class Pair(nn.Module):
  """The units around one set of experts; or, if `dense`, a block without experts."""

  def __init__(self, c, router, derived, layer, dense):
    super().__init__()
    count, every = 1 if dense else derived.units_per_moe, c.moe_every
    self.units = nn.ModuleList([Unit(c, derived, layer + i * every, dense) for i in range(count)])
    self.moe = MoE(c, router, derived.top_k) if derived.taps and not dense else None


class Embedding(nn.Module):
  """Token embeddings, learned positions in gpt2 style, and the head unless it is tied."""

  def __init__(self, c):
    super().__init__()
    self.tokens = nn.Embedding(c.vocab_size, c.width)
    self.positions = weight(c.context, c.width, wanted=c.style == "gpt2")
    self.head = weight(c.width, c.vocab_size, wanted=not c.tie_embeddings)


class ScmoeForCausalLM(PreTrainedModel, GenerationMixin):
  """A decoder-only language model."""

  config_class = ScmoeConfig
  _no_split_modules = ("Pair",)
  _supports_sdpa = True

  def __init__(self, config):
    super().__init__(config)
    groups = as_options(config.scmoe)
    c, self.derived = groups.model, groups.derived
    self.c, self.embedding, self.norm = c, Embedding(c), model_norm(c)
    self.stages, self.dense, self.order, layer = nn.ModuleList(), nn.ModuleList(), [], 0
    while layer < c.num_layers:
      dense = layer in self.derived.dense_layers
      stack = self.dense if dense else self.stages
      self.order.append((dense, len(stack)))
      stack.append(Pair(c, groups.router, self.derived, layer, dense))
      layer += sum(len(unit.blocks) for unit in stack[-1].units)
    self.post_init()

  def _init_weights(self, module):
    """Random weights, for a model that is made from its configuration alone."""
    for name, value in module.named_parameters(recurse=False):
      if name == "scale" or name.endswith("_norm"):
        nn.init.ones_(value)
      elif name.endswith("bias"):
        nn.init.zeros_(value)
      else:
        nn.init.normal_(value, std=self.c.init_std)

  def get_input_embeddings(self):
    return self.embedding.tokens

  def forward(
    self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
    inputs_embeds=None, labels=None, use_cache=None, output_hidden_states=False, logits_to_keep=0,
    cache=None, **others,
  ):  # fmt: skip
    """Logits of the next token, float32 [B, S, V], with arguments as of other causal models.

    Later versions of transformers call `past_key_values` `cache`.
    """
    cache = past_key_values if cache is None else cache
    cache = DynamicCache() if cache is None and use_cache else cache
    h = self.embedding.tokens(input_ids) if inputs_embeds is None else inputs_embeds
    past, length = 0 if cache is None else cache.get_seq_length(), h.shape[1]
    places = torch.arange(past + length, device=h.device)
    own, window = places[past:, None], self.c.sliding_window or past + length
    before = (places <= own)[None, None]
    if attention_mask is not None:  # padding sees itself, so that its softmax has a finite sum
      before = before & attention_mask[:, None, None, :].bool() | (places == own)
    if position_ids is None and attention_mask is not None:
      position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
    positions = (places[None, past:] if position_ids is None else position_ids).expand(len(h), -1)
    if self.embedding.positions is not None:
      h = h + self.embedding.positions[positions]
    h = h * self.c.embedding_multiplier
    where = SimpleNamespace(
      positions=positions, before=before, visible=before & (places > own - window), cache=cache,
      derived=self.derived, full_layers=getattr(self.derived, "full_layers", ()), states=[h],
    )  # fmt: skip
    passed = None
    for dense, number in self.order:
      pair = (self.dense if dense else self.stages)[number]
      for unit in pair.units:
        h, passed = unit(h, passed, pair.moe, where)
    h = self.norm(h)
    kept, head = h[:, -logits_to_keep:] if logits_to_keep else h, self.embedding.head
    logits = wide(kept @ (self.embedding.tokens.weight.T if head is None else head))
    logits = logits / self.c.logits_scaling
    loss = None
    if labels is not None:
      loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    states = (*where.states[:-1], h) if output_hidden_states else None
    return CausalLMOutputWithPast(loss, logits, cache, states)  # the third field has had two names
