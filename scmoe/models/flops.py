"""Analytic counts: FLOPs per token, parameters by kind, and the peak FLOP/s of devices.

A product of [m, k] and [k, n] counts 2·m·n·k. Smaller operations (norms, activations, softmax) are
left out, as is usual for MFU (the share of the peak FLOP/s that is reached), and so is capacity
padding, which is no useful work. XLA's own cost analysis is not used, because it counts the body of
a scan once, not once per iteration.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from scmoe.layers.mlp import is_gated
from scmoe.models.config import ModelConfig
from scmoe.models.vision.stages import StageConfig, stages_of
from scmoe.models.vision.stem import products

TRAINING = 3  # for each product of the forward pass the backward pass has two

# Dense peak of 16-bit matrix products, FLOP/s per device: (part of jax's device_kind, peak). The
# first match counts. From the makers' data sheets, without sparsity.
_PEAKS = (
  ("GB200", 2500e12),
  ("B200", 2250e12),
  ("H200", 989e12),
  ("H100 PCIe", 756e12),
  ("H100", 989e12),
  ("H800", 989e12),
  ("H20", 148e12),
  ("A100", 312e12),
  ("A800", 312e12),
  ("A30", 165e12),
  ("A40", 150e12),
  ("A10G", 70e12),
  ("A10", 125e12),
  ("L40S", 362e12),
  ("L4", 121e12),
  ("T4", 65e12),
  ("V100", 125e12),
)


def peak_flops(device_kind: str, dtype: str = "bfloat16") -> float | None:
  """Peak FLOP/s of a device in a 16-bit dtype; None for unknown devices, CPUs and other dtypes."""
  if dtype not in ("bfloat16", "float16"):
    return None
  return next((peak for name, peak in _PEAKS if name.lower() in device_kind.lower()), None)


@dataclasses.dataclass(frozen=True)
class Flops:
  """Forward FLOPs per token, by kind.

  Attributes:
    attention: projections, scores and the sum over values. A token of text counts the positions
      that it attends to on average, (S + 1) / 2 without a window or chunks.
    mlp: dense MLPs.
    shared: shared experts.
    routed: the routed experts that a token visits; zero experts count nothing.
    router: gates and mixing coefficients.
    logits: output projection to logits.
    stem: in models of images, the way from pixels to tokens, and mergers of tokens between stages.
  """

  attention: float
  mlp: float
  shared: float
  routed: float
  router: float
  logits: float
  stem: float = 0.0

  @property
  def forward(self) -> float:
    """Forward FLOPs per token, of all kinds together."""
    return sum(dataclasses.astuple(self))

  @property
  def training(self) -> float:
    """FLOPs per token of forward and backward pass; recomputation under remat is not counted."""
    return TRAINING * self.forward


def forward_flops(model: ModelConfig, seq_len: int, real_share: float | None = None) -> Flops:
  """Forward FLOPs per token of a model, on sequences of `seq_len` tokens.

  In a model of images the tokens are those of the first stage, and the FLOPs of all stages are
  divided by their number.

  Args:
    model: resolved options.
    seq_len: S of text; not read for images.
    real_share: share of a token's choices that go to experts that compute, not to zero experts:
      measured, or from `RouterConfig.real_share`. None: the share of such experts among all.
  """
  if not model.reads_images:
    seen = _positions_seen(model, seq_len)
    return _of_blocks(model, seen, real_share, logits=2 * model.width * model.vocab_size)
  stages = stages_of(model)
  found = [dataclasses.astuple(_of_stage(stage, real_share)) for stage in stages]
  # FLOPs of an image in all stages together, divided by its number of tokens in the first stage.
  kinds = [sum(f * s.tokens for f, s in zip(of_kind, stages)) for of_kind in zip(*found)]
  flops = Flops(*(of_kind / stages[0].tokens for of_kind in kinds))
  head = 2 * stages[-1].width * model.vision.classes / stages[0].tokens
  return dataclasses.replace(flops, logits=head, stem=_stem_flops(stages) / stages[0].tokens)


def _of_blocks(
  model: ModelConfig, seen: float, real_share: float | None, logits: float = 0.0
) -> Flops:
  """Forward FLOPs per token of blocks of one width, whose tokens attend to `seen` positions."""
  rule, width = model.wiring_rule, model.width
  moe_blocks = model.num_pairs * rule.units_per_moe if rule.taps else 0
  projections = 2 * sum(projection_weights(model))
  pairs = 2 * sum(head_widths(model)) * seen
  ffn = lambda hidden: 2 * width * hidden * (3 if is_gated(model.ffn.activation) else 2)
  choices = model.num_experts + model.zero_experts
  share = model.num_experts / choices if real_share is None else real_share
  experts = rule.routed_per_token(model.top_k) * share
  mix = {"direct": 0, "cg1": 1, "cg2": 2}[model.mix] if rule.shared_expert else 0
  dense_blocks = model.num_layers - moe_blocks
  return Flops(
    attention=model.num_layers * (projections + pairs),
    mlp=dense_blocks * ffn(model.mlp_hidden),
    shared=moe_blocks * ffn(model.shared_hidden) if rule.shared_expert else 0.0,
    routed=moe_blocks * experts * ffn(model.expert_hidden),
    router=moe_blocks * 2 * width * (len(rule.taps) * choices + mix),
    logits=logits,
  )


def _of_stage(stage: StageConfig, real_share: float | None) -> Flops:
  """Forward FLOPs per token of a stage's blocks, the convolutions of their values among them."""
  blocks = _of_blocks(stage, stage.seen, real_share)
  local = 2 * stage.vision.value_convolution**2 * stage.num_kv_heads * stage.head_dim
  return dataclasses.replace(blocks, attention=blocks.attention + stage.num_layers * local)


def _stem_flops(stages: Sequence[StageConfig]) -> float:
  """Forward FLOPs of one image from pixels to tokens, and in the mergers between stages."""
  merged = sum(2 * 4 * s.width * 2 * s.width * s.tokens / 4 for s in stages[:-1])
  return merged + sum(2 * m * n * places for m, n, places in products(stages[0]))


def projection_weights(model: ModelConfig) -> tuple[int, int]:
  """Numbers of weights of one attention: of (input projections, output projection).

  Biases and norms do not count. Latent attention counts as training computes it, with keys and
  values of every head.
  """
  width, heads = model.width, model.num_heads
  if not model.kv_lora_rank:
    queries, keys = heads * model.head_dim, model.num_kv_heads * model.head_dim
    return width * (queries + 2 * keys), queries * width
  straight, turning, value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
  query, rank = heads * (straight + turning), model.q_lora_rank
  inward = width * rank + rank * query if rank else width * query
  inward += width * (model.kv_lora_rank + turning)
  inward += model.kv_lora_rank * heads * (straight + value)
  return inward, heads * value * width


def head_widths(model: ModelConfig) -> tuple[int, int]:
  """(width of all heads' queries together, width of all their values), as in training."""
  latent = model.kv_lora_rank
  query = model.qk_nope_head_dim + model.qk_rope_head_dim if latent else model.head_dim
  return model.num_heads * query, model.num_heads * (model.v_head_dim if latent else query)


def _positions_seen(model: ModelConfig, seq_len: int) -> float:
  """Positions that a token attends to on average: (S + 1) / 2, fewer with a window or chunks.

  `model.full_attention_layers` have neither; the result is the mean over all layers.
  """
  window = min(model.sliding_window or seq_len, seq_len)
  inside = (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
  if model.attention_chunk:  # an upper bound if there is a window, too
    chunks, rest = divmod(seq_len, model.attention_chunk)
    sizes = chunks * model.attention_chunk * (model.attention_chunk + 1) + rest * (rest + 1)
    inside = min(inside, sizes / 2 / seq_len)
  full = len(model.full_layers) / model.num_layers
  return full * (seq_len + 1) / 2 + (1 - full) * inside


@dataclasses.dataclass(frozen=True)
class Parameters:
  """Numbers of parameters.

  Attributes:
    embedding: tokens, positions and an untied output projection; of images the stem.
    dense: attention, norms, dense MLPs, gates and mixing coefficients; of images also the mergers
      between stages, and the head.
    shared: shared experts.
    routed: all routed experts.
    routed_active: the routed experts that one token visits. It is an upper bound if several gatings
      use the same experts, as they may choose the same one, and a mean if there are zero experts.
  """

  embedding: int
  dense: int
  shared: int
  routed: int
  routed_active: int

  @property
  def total(self) -> int:
    """The number of all parameters."""
    return self.embedding + self.dense + self.shared + self.routed

  @property
  def active(self) -> int:
    """The number of parameters without the routed experts that a token does not visit."""
    return self.embedding + self.dense + self.shared + self.routed_active


def count_parameters(
  model: ModelConfig, shapes: Any, real_share: float | None = None
) -> Parameters:
  """Counts parameters by kind.

  Args:
    model: resolved options.
    shapes: the model's parameters as nested dictionaries of arrays or abstract arrays.
    real_share: see `forward_flops`.
  """
  rule = model.wiring_rule
  counts = {"embedding": 0, "dense": 0, "shared": 0, "routed": 0}
  for path, leaf in _leaves(shapes):
    counts[_kind(path, model)] += math.prod(leaf.shape)
  visited = rule.routed_per_token(model.top_k) * rule.units_per_moe
  choices = model.num_experts + model.zero_experts
  share = model.num_experts / choices if real_share is None else real_share
  active = round(counts["routed"] * min(visited, choices) * share / model.num_experts)
  return Parameters(**counts, routed_active=active)


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
  if isinstance(tree, dict):
    for name, child in tree.items():
      yield from _leaves(child, (*path, str(name)))
  else:
    yield path, tree


def _kind(path: tuple[str, ...], model: ModelConfig) -> str:
  if path[0] == "trunks":  # of a stage of a vision model
    model, path = stages_of(model)[int(path[1])], path[2:]
  if path[0] in ("embedding", "dense"):
    return path[0]
  if "moe" in path:
    return "dense" if "router_gate" in path else "routed"
  last_block = str(model.moe_every - 1)
  if "mlp" in path and model.wiring_rule.shared_expert:
    return "shared" if path[path.index("mlp") - 1] == last_block else "dense"
  return "dense"
