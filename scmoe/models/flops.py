"""Analytic counts: FLOPs per token, parameters by kind, and what devices can do at their peak.

A product of [m, k] and [k, n] counts 2·m·n·k; everything smaller (norms, activations, softmax) is
left out, as is usual for MFU. Capacity padding is not counted: it is no useful work. XLA's own cost
analysis is not used: it counts a scan's body once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from scmoe.layers.mlp import is_gated
from scmoe.models.config import ModelConfig

TRAINING = 3  # one forward product has two in the backward pass

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
  """Peak FLOP/s of one device; None where unknown (CPUs) or where `dtype` is not of 16 bits."""
  if dtype not in ("bfloat16", "float16"):
    return None
  return next((peak for name, peak in _PEAKS if name.lower() in device_kind.lower()), None)


@dataclasses.dataclass(frozen=True)
class Flops:
  """Forward FLOPs per token, by kind.

  Attributes:
    attention: projections and, at half the sequence on average, scores and values.
    mlp: dense MLPs of blocks without MoE.
    shared: shared experts.
    routed: routed experts, of the experts that a token visits.
    router: gates and mixing coefficients.
    logits: output projection.
  """

  attention: float
  mlp: float
  shared: float
  routed: float
  router: float
  logits: float

  @property
  def forward(self) -> float:
    """All kinds together."""
    return sum(dataclasses.astuple(self))

  @property
  def training(self) -> float:
    """Forward and backward; recomputation under remat is not counted."""
    return TRAINING * self.forward


def forward_flops(model: ModelConfig, seq_len: int) -> Flops:
  """FLOPs per token of a resolved model on sequences of `seq_len` tokens."""
  rule, width = model.wiring_rule, model.width
  moe_blocks = model.num_layers // model.moe_every if rule.taps else 0
  heads = model.num_heads * model.head_dim
  kv_heads = model.num_kv_heads * model.head_dim
  projections = 2 * width * (2 * heads + 2 * kv_heads)
  # Scores and weighted values: position i sees i + 1 positions, (S + 1) / 2 on average.
  pairs = 2 * 2 * heads * (seq_len + 1) / 2
  ffn = lambda hidden: 2 * width * hidden * (3 if is_gated(model.activation) else 2)
  experts = rule.routed_per_token(model.top_k)
  mix = {"direct": 0, "cg1": 1, "cg2": 2}[model.mix] if rule.shared_expert else 0
  dense_blocks = model.num_layers - moe_blocks
  return Flops(
    attention=model.num_layers * (projections + pairs),
    mlp=dense_blocks * ffn(model.mlp_hidden),
    shared=moe_blocks * ffn(model.shared_hidden) if rule.shared_expert else 0.0,
    routed=moe_blocks * experts * ffn(model.expert_hidden),
    router=moe_blocks * 2 * width * (len(rule.taps) * model.num_experts + mix),
    logits=2 * width * model.vocab_size,
  )


@dataclasses.dataclass(frozen=True)
class Parameters:
  """Numbers of parameters.

  Attributes:
    embedding: tokens, positions and an untied output projection.
    dense: attention, norms, dense MLPs, gates and mixing coefficients.
    shared: shared experts.
    routed: routed experts, all of them.
    routed_active: of those, what one token visits (at most, where several gatings choose).
  """

  embedding: int
  dense: int
  shared: int
  routed: int
  routed_active: int

  @property
  def total(self) -> int:
    """All parameters."""
    return self.embedding + self.dense + self.shared + self.routed

  @property
  def active(self) -> int:
    """Parameters that work on one token."""
    return self.embedding + self.dense + self.shared + self.routed_active


def count_parameters(model: ModelConfig, shapes: Any) -> Parameters:
  """Counts parameters by kind.

  Args:
    model: resolved.
    shapes: the model's parameters as nested dictionaries of arrays or abstract arrays.
  """
  rule = model.wiring_rule
  counts = {"embedding": 0, "dense": 0, "shared": 0, "routed": 0}
  for path, leaf in _leaves(shapes):
    counts[_kind(path, model)] += math.prod(leaf.shape)
  visited = rule.routed_per_token(model.top_k) * rule.units_per_moe
  active = counts["routed"] * min(visited, model.num_experts) // model.num_experts
  return Parameters(**counts, routed_active=active)


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
  if isinstance(tree, dict):
    for name, child in tree.items():
      yield from _leaves(child, (*path, str(name)))
  else:
    yield path, tree


def _kind(path: tuple[str, ...], model: ModelConfig) -> str:
  if path[0] == "embedding":
    return "embedding"
  if "moe" in path:
    return "dense" if "router_gate" in path else "routed"
  last_block = str(model.moe_every - 1)
  if "mlp" in path and model.wiring_rule.shared_expert:
    return "shared" if path[path.index("mlp") - 1] == last_block else "dense"
  return "dense"
