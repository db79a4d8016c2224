"""Maps the name of every tensor of a released model to a slice of scmoe's stacked parameters.

scmoe stacks the parameters of equal layers; a released tensor is the slice of one layer, and for an
expert of one layer and expert. Released matrices are [out, in], ours [in, out], and attention's
have heads as a dimension of their own. Example from OLMoE:
`model.layers.3.mlp.experts.5.up_proj.weight` [F, D] is `params.stages.moe.experts.up[3, 5]` [D, F].
Some families have other layouts: a tensor of all experts of a layer, [in, out] (GPT-OSS, Llama-4),
or two matrices of ours in one tensor (Granite's `input_linear` [E, 2F, D] holds gate and up
projections). No tensor is padded or scaled here, so reading and writing a model preserves every
bit.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import jax
import numpy as np

from scmoe.models.config import ModelConfig
from scmoe.moe.options import RouterConfig
from scmoe.pretrained import llama4, own
from scmoe.run.config import RunConfig
from scmoe.run.model import build_model

_BESIDE_IMAGES = "language_model."  # prefix of the text part's names in a model with images
_STACKS = ("dense.", "stages.")  # parameters with a leading dimension over layers


@dataclasses.dataclass(frozen=True)
class Tensor:
  """The slice of one parameter that a tensor of a released model holds, or a part of the tensor.

  A tensor that holds several slices, such as gate and up projections, has a `Tensor` for each.

  Attributes:
    name: its name in the files.
    shape: its shape in the files.
    leaf: dotted name of the parameter that contains it, beginning with `params` or `router`.
    index: the slice of that parameter: (), (layer,) or (layer, expert).
    split: `shape` with heads, and fused matrices, as dimensions of their own.
    order: dimension i of the slice is dimension order[i] of `split`, without that of `within`.
    within: (dimension of `split`, index in it) of a tensor that several slices share; None: the
      slice is the whole tensor.
  """

  name: str
  shape: tuple[int, ...]
  leaf: str
  index: tuple[int, ...]
  split: tuple[int, ...]
  order: tuple[int, ...]
  within: tuple[int, int] | None = None

  def cut(self, value: np.ndarray) -> np.ndarray:
    """The part of the tensor's value that is this slice, with its dimensions in the tensor's order.

    Args:
      value: the whole tensor, of `shape`.
    """
    value = value.reshape(self.split)
    return value if self.within is None else value.take(self.within[1], self.within[0])


def tensors(family: str, model: ModelConfig, router: RouterConfig) -> Iterator[Tensor]:
  """The `Tensor`s of all tensors of a model, in the order in which they are written."""
  if family == own.FAMILY:
    yield from _own(model, router)
    return
  if family == llama4.WHOLE:
    for tensor in tensors(llama4.TEXT, model, router):
      yield dataclasses.replace(tensor, name=f"{_BESIDE_IMAGES}{tensor.name}")
    return
  yield _plain(
    "model.embed_tokens.weight", "params.embedding.tokens", model.vocab_size, model.width
  )
  for layer in range(model.num_layers // (2 if family == "longcat_flash" else 1)):
    yield from _layer(family, model, layer)
  yield _plain("model.norm.weight", "params.norm.scale", model.width)
  if not model.tie_embeddings:
    yield _linear("lm_head.weight", "params.embedding.head", (), model.width, model.vocab_size)


def ignored(family: str, model: ModelConfig) -> re.Pattern[str]:
  """A pattern of the names of tensors that a model of this family may have and scmoe ignores."""
  found = [r".*\.rotary_emb\.inv_freq"]
  if family.startswith(("deepseek", "glm")):  # extra layers, for predicting several tokens at once
    layers = "|".join(str(model.num_layers + i) for i in range(8))
    found.append(rf"model\.layers\.({layers})\..*")
  if family == "longcat_flash":
    found.append(r"model\.mtp\..*")
    # transformers 5 also writes weights for the zero experts, which need none.
    experts = "|".join(str(model.num_experts + i) for i in range(model.zero_experts))
    found += [rf"model\.layers\.\d+\.mlp\.experts\.({experts})\..*"] if experts else []
  if family == llama4.WHOLE:
    found.append(r"(vision_model|multi_modal_projector)\..*")
  if model.tie_embeddings:
    found.append(r"lm_head\.weight")  # a copy of the embedding
  return re.compile("|".join(f"(?:{pattern})" for pattern in found))


def _own(model: ModelConfig, router: RouterConfig) -> Iterator[Tensor]:
  """The tensors of the family `scmoe`: scmoe's parameters, one tensor for each layer of a stack.

  `params.stages.moe.experts.up` [L, E, D, F] is `stages.0.moe.experts.up` [E, D, F] and so on.
  """
  shapes = build_model(RunConfig(model=model, router=router), None)[1]
  pairs, _ = jax.tree_util.tree_flatten_with_path(shapes)
  named = {jax.tree_util.keystr(path, simple=True, separator="."): x.shape for path, x in pairs}
  for name, shape in named.items():
    if not name.startswith(_STACKS):
      there = name + ".weight" * (name == "embedding.tokens")  # a module of torch has this one
      yield _plain(there, f"params.{name}", *shape)
  for stack, count in zip(_STACKS, (len(model.dense_indices), model.num_pairs)):
    for layer in range(count):
      for name, shape in named.items():
        if name.startswith(stack):
          there = f"{stack}{layer}.{name.removeprefix(stack)}"
          yield _plain(there, f"params.{name}", *shape[1:], index=(layer,))
      if stack == "stages." and router.bias != "none" and model.wiring_rule.taps:
        choices = model.num_experts + model.zero_experts
        yield _plain(f"stages.{layer}.moe.bias", "router.bias", choices, index=(layer,))


def _layer(family: str, model: ModelConfig, layer: int) -> Iterator[Tensor]:
  prefix = f"model.layers.{layer}"
  if family == "longcat_flash":
    for i in range(2):
      block = f"params.stages.units.0.blocks.{i}"
      yield from _block(family, model, prefix, block, layer, suffix=f".{i}")
      hidden = model.shared_hidden if i else model.mlp_hidden
      yield from _mlp(f"{prefix}.mlps.{i}", f"{block}.mlp", model.width, hidden, (layer,))
    yield from _moe(family, model, f"{prefix}.mlp", "params.stages", layer)
    return
  dense = model.dense_indices
  if layer in dense:
    stack, place, block_index, is_moe = "dense", dense.index(layer), 0, False
  else:
    before = layer - sum(i < layer for i in dense)
    place, block_index = divmod(before, model.moe_every)
    stack, is_moe = "stages", bool(model.wiring_rule.taps) and block_index == model.moe_every - 1
  block = f"params.{stack}.units.0.blocks.{block_index}"
  yield from _block(family, model, prefix, block, place)
  if not is_moe:
    mlp = "feed_forward" if family == llama4.TEXT else "mlp"
    yield from _mlp(f"{prefix}.{mlp}", f"{block}.mlp", model.width, model.mlp_hidden, (place,))
    return
  inner = "block_sparse_moe" if family in ("mixtral", "granitemoe") else "mlp"
  inner = "feed_forward" if family == llama4.TEXT else inner
  yield from _moe(family, model, f"{prefix}.{inner}", f"params.{stack}", place)
  if model.wiring_rule.shared_expert:
    where = f"{prefix}.{inner}.shared_expert{'' if family == llama4.TEXT else 's'}"
    yield from _mlp(where, f"{block}.mlp", model.width, model.shared_hidden, (place,))


def _block(
  family: str, model: ModelConfig, prefix: str, block: str, place: int, suffix: str = ""
) -> Iterator[Tensor]:
  """The tensors of one block's norms and attention."""
  norm = f"{prefix}.input_layernorm{suffix}.weight"
  yield _plain(norm, f"{block}.norm_attention.scale", model.width, index=(place,))
  attention = f"{prefix}.self_attn{suffix}", f"{block}.attention", model, (place,)
  yield from (_latent_attention if model.kv_lora_rank else _attention)(*attention)
  norm = f"{prefix}.post_attention_layernorm{suffix}.weight"
  yield _plain(norm, f"{block}.norm_mlp.scale", model.width, index=(place,))


def _attention(
  prefix: str, leaf: str, model: ModelConfig, index: tuple[int, ...]
) -> Iterator[Tensor]:
  width, head = model.width, model.head_dim
  projections = (("q", "query", model.num_heads), ("k", "key", model.num_kv_heads),
                 ("v", "value", model.num_kv_heads))  # fmt: skip
  for theirs, ours, heads in projections:
    name = f"{prefix}.{theirs}_proj"
    yield _into_heads(f"{name}.weight", f"{leaf}.{ours}", index, width, heads, head)
    if model.attention_bias:
      yield _plain(f"{name}.bias", f"{leaf}.{ours}_bias", heads, head, index=index, flat=True)
  yield _out_of_heads(f"{prefix}.o_proj.weight", f"{leaf}.out", index, model.num_heads, head, width)
  if model.attention_sinks:
    yield _plain(f"{prefix}.sinks", f"{leaf}.sinks", model.num_heads, index=index)
  if model.attention_bias and model.attention_out_bias:
    yield _plain(f"{prefix}.o_proj.bias", f"{leaf}.out_bias", width, index=index)
  if model.qk_norm in ("head", "all"):
    for theirs, ours, heads in projections[:2]:
      shape = (heads, head) if model.qk_norm == "all" else (head,)
      name = f"{prefix}.{theirs}_norm.weight"
      yield _plain(name, f"{leaf}.{ours}_norm", *shape, index=index, flat=True)


def _latent_attention(
  prefix: str, leaf: str, model: ModelConfig, index: tuple[int, ...]
) -> Iterator[Tensor]:
  width, heads, rank = model.width, model.num_heads, model.q_lora_rank
  straight, turning, value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
  query = straight + turning
  if rank:
    yield _linear(f"{prefix}.q_a_proj.weight", f"{leaf}.query_down", index, width, rank)
    if model.attention_bias:
      yield _plain(f"{prefix}.q_a_proj.bias", f"{leaf}.query_down_bias", rank, index=index)
    yield _plain(f"{prefix}.q_a_layernorm.weight", f"{leaf}.query_norm.scale", rank, index=index)
  name = f"{prefix}.{'q_b_proj' if rank else 'q_proj'}.weight"
  yield _into_heads(name, f"{leaf}.query", index, rank or width, heads, query)
  name, kept = f"{prefix}.kv_a_proj_with_mqa", model.kv_lora_rank + turning
  yield _linear(f"{name}.weight", f"{leaf}.kv_down", index, width, kept)
  if model.attention_bias:
    yield _plain(f"{name}.bias", f"{leaf}.kv_down_bias", kept, index=index)
  norm = f"{prefix}.kv_a_layernorm.weight"
  yield _plain(norm, f"{leaf}.kv_norm.scale", model.kv_lora_rank, index=index)
  name = f"{prefix}.kv_b_proj.weight"
  yield _into_heads(name, f"{leaf}.kv_up", index, model.kv_lora_rank, heads, straight + value)
  yield _out_of_heads(f"{prefix}.o_proj.weight", f"{leaf}.out", index, heads, value, width)
  if model.attention_bias:
    yield _plain(f"{prefix}.o_proj.bias", f"{leaf}.out_bias", width, index=index)


def _mlp(
  prefix: str,
  leaf: str,
  width: int,
  hidden: int,
  index: tuple[int, ...],
  names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Tensor]:
  gate, up, down = (f"{prefix}.{name}.weight" for name in names)
  yield _linear(gate, f"{leaf}.gate", index, width, hidden)
  yield _linear(up, f"{leaf}.up", index, width, hidden)
  yield _linear(down, f"{leaf}.down", index, hidden, width)


def _moe(family: str, model: ModelConfig, prefix: str, leaf: str, place: int) -> Iterator[Tensor]:
  choices, gate = model.num_experts + model.zero_experts, f"{leaf}.moe.router_gate.0.weight"
  names = {"longcat_flash": "router.classifier", "granitemoe": "router.layer", "gpt_oss": "router",
           llama4.TEXT: "router"}  # fmt: skip
  router = f"{prefix}.{names.get(family, 'gate')}"
  yield _linear(f"{router}.weight", gate, (place,), model.width, choices)
  if family in ("deepseek_v3", "glm4_moe", "longcat_flash"):
    holder = f"{prefix}.router" if family == "longcat_flash" else router
    yield _plain(f"{holder}.e_score_correction_bias", "router.bias", choices, index=(place,))
  if family == "gpt_oss":
    bias = f"{leaf}.moe.router_gate.0.bias"
    yield _plain(f"{router}.bias", bias, choices, index=(place,))
    yield from _interleaved_experts(model, f"{prefix}.experts", f"{leaf}.moe.experts", place)
    return
  if family == llama4.TEXT:
    yield from _joined_experts(model, f"{prefix}.experts", f"{leaf}.moe.experts", place)
    return
  if family == "granitemoe":
    yield from _fused_experts(model, prefix, f"{leaf}.moe.experts", place)
    return
  names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
  for expert in range(model.num_experts):
    where, own = f"{prefix}.experts.{expert}", (place, expert)
    yield from _mlp(where, f"{leaf}.moe.experts", model.width, model.expert_hidden, own, names)


def _fused_experts(model: ModelConfig, prefix: str, leaf: str, place: int) -> Iterator[Tensor]:
  """A layer's experts in two tensors: gate and up projections, and down projections."""
  experts, hidden, width = model.num_experts, model.expert_hidden, model.width
  name, shape = f"{prefix}.input_linear.weight", (experts, 2 * hidden, width)
  split = (experts, 2, hidden, width)
  for half, ours in enumerate(("gate", "up")):
    yield Tensor(name, shape, f"{leaf}.{ours}", (place,), split, (0, 2, 1), (1, half))
  shape = (experts, width, hidden)
  name = f"{prefix}.output_linear.weight"
  yield Tensor(name, shape, f"{leaf}.down", (place,), shape, (0, 2, 1))


def _interleaved_experts(
  model: ModelConfig, prefix: str, leaf: str, place: int
) -> Iterator[Tensor]:
  """A layer's experts, [in, out], in four tensors: gate and up in one, down, and a bias of each.

  In the first and in its bias the columns of gate and up take turns: column 2i is the gate's column
  i, and column 2i + 1 that of up.
  """
  experts, hidden, width = model.num_experts, model.expert_hidden, model.width
  for kind, *inner in (("", width), ("_bias",)):
    name, shape = f"{prefix}.gate_up_proj{kind}", (experts, *inner, 2 * hidden)
    split, order = (experts, *inner, hidden, 2), tuple(range(len(inner) + 2))
    for half, which in enumerate(("gate", "up")):
      last = len(split) - 1, half
      yield Tensor(name, shape, f"{leaf}.{which}{kind}", (place,), split, order, last)
  yield _plain(f"{prefix}.down_proj", f"{leaf}.down", experts, hidden, width, index=(place,))
  yield _plain(f"{prefix}.down_proj_bias", f"{leaf}.down_bias", experts, width, index=(place,))


def _joined_experts(model: ModelConfig, prefix: str, leaf: str, place: int) -> Iterator[Tensor]:
  """A layer's experts, [in, out], in two tensors: gate and up (the gate's columns first), down."""
  experts, hidden, width = model.num_experts, model.expert_hidden, model.width
  name, shape = f"{prefix}.gate_up_proj", (experts, width, 2 * hidden)
  for half, which in enumerate(("gate", "up")):
    split = (experts, width, 2, hidden)
    yield Tensor(name, shape, f"{leaf}.{which}", (place,), split, (0, 1, 2), (2, half))
  yield _plain(f"{prefix}.down_proj", f"{leaf}.down", experts, hidden, width, index=(place,))


def _plain(
  name: str, leaf: str, *shape: int, index: tuple[int, ...] = (), flat: bool = False
) -> Tensor:
  """A tensor whose dimensions keep their order. If `flat`, the files join them into one."""
  there = (_product(shape),) if flat else shape
  return Tensor(name, there, leaf, index, shape, tuple(range(len(shape))))


def _linear(name: str, leaf: str, index: tuple[int, ...], into: int, out: int) -> Tensor:
  return Tensor(name, (out, into), leaf, index, (out, into), (1, 0))


def _into_heads(
  name: str, leaf: str, index: tuple[int, ...], into: int, heads: int, head: int
) -> Tensor:
  return Tensor(name, (heads * head, into), leaf, index, (heads, head, into), (2, 0, 1))


def _out_of_heads(
  name: str, leaf: str, index: tuple[int, ...], heads: int, head: int, out: int
) -> Tensor:
  return Tensor(name, (out, heads * head), leaf, index, (out, heads, head), (1, 2, 0))


def _product(shape: tuple[int, ...]) -> int:
  result = 1
  for size in shape:
    result *= size
  return result
