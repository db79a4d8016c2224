"""Names and order of low-rank adapters in PEFT's layout, and our A and B in them and back.

A folder holds adapter_config.json and adapter_model.safetensors. Its matrices are [out, in], and
one with an adapter is W + alpha/r · B · A; our A [in, r] and B [r, out] are the transposes
(`scmoe.models.low_rank`). The names are those of the modules in transformers 5:
`base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight` [r, in].

transformers holds the experts of a layer in two parameters: `gate_up_proj` [E, 2F, D] with the gate
and up projections, and `down_proj` [E, D, F]. PEFT (`target_parameters`, since 0.19.1) wraps the
module `experts` once for each of them, so the first one's tensors have `.base_layer` in their name.
It joins experts and rank in one dimension, in `lora_A` [E·r, in] with the ranks of one expert side
by side, in `lora_B` [out, r·E] with the experts of one rank side by side. Gate and up projection
each have an adapter here. In their common matrix the two are one adapter of rank 2r: the A of both
side by side, and a B that is zero where the rank of one meets the rows of the other.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from scmoe.base.errors import ConfigError
from scmoe.models.config import ModelConfig
from scmoe.models.low_rank import LoraConfig
from scmoe.models.matrices import HOLDERS, MATRICES
from scmoe.pretrained import llama4, own
from scmoe.pretrained.names import Tensor

GATE_UP, DOWN = "gate_up_proj", "down_proj"  # the two parameters of a layer's experts
HEAD = "params.embedding.head"  # the one parameter with an adapter that no module of a block holds
PREFIX, ENDS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")  # of a tensor's name
# Families whose experts transformers 5 holds otherwise: Llama-4's class does not say that its
# matrices are [in, out], and LongCat-Flash's has matrices for its zero experts.
OTHER_EXPERTS = (llama4.TEXT, llama4.WHOLE, "longcat_flash")
_LAYER = re.compile(r"model\.layers\.\d+")


@dataclasses.dataclass(frozen=True)
class Place:
  """A matrix with an adapter, or the matrices of a layer's experts, as PEFT's files name them.

  Attributes:
    module: path of its module in the model of transformers.
    key: what `target_modules`, `target_parameters`, `rank_pattern` and `alpha_pattern` name: the
      module, or the parameter of the experts.
    parts: (dotted name of a parameter of ours, its slice): one, or gate and up projection.
    reads, writes: rows of A and columns of B of one part, with heads in one dimension.
    experts: number of matrices; 0: a single one, which is a module of its own.
    turns: whether gate and up projection take turns in the rows of the matrix (GPT-OSS).
  """

  module: str
  key: str
  parts: tuple[tuple[str, tuple[int, ...]], ...]
  reads: int
  writes: int
  experts: int = 0
  turns: bool = False

  @property
  def names(self) -> tuple[str, str]:
    """Names of the tensors of A and B."""
    return tuple(PREFIX + self.module + end for end in ENDS)  # pyright: ignore[reportReturnType]

  def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the tensors of A and B, for the rank that adapter_config.json gives this matrix."""
    rows = rank * max(self.experts, 1)
    return (rows, self.reads), (self.writes * len(self.parts), rows)

  def packed(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The tensors of A and B from the slices of each part, A [..., in, r] and B [..., r, out]."""
    count, experts, rank = len(pairs), max(self.experts, 1), pairs[0][0].shape[-1]
    a_EIR = np.concatenate([a.reshape(experts, self.reads, rank) for a, _ in pairs], -1)
    b_ERO = np.zeros((experts, count * rank, count * self.writes), pairs[0][1].dtype)
    for i, (_, b) in enumerate(pairs):
      b_ERO[:, i * rank : (i + 1) * rank, self._rows(i)] = b.reshape(experts, rank, self.writes)
    shapes = self.shapes(count * rank)
    return a_EIR.swapaxes(1, 2).reshape(shapes[0]), b_ERO.transpose(2, 1, 0).reshape(shapes[1])

  def unpacked(self, a: np.ndarray, b: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """A [E, in, r] and B [E, r, out] of each part from the tensors; without E for one matrix."""
    experts = max(self.experts, 1)
    a_EIR = a.reshape(experts, -1, self.reads).swapaxes(1, 2)
    b_ERO = b.reshape(len(b), -1, experts).transpose(2, 1, 0)
    pairs = [(a_EIR, b_ERO[..., self._rows(i)]) for i in range(len(self.parts))]
    return pairs if self.experts else [(a[0], b[0]) for a, b in pairs]

  def _rows(self, part: int) -> slice:
    """The rows of the matrix that one part has."""
    if self.turns:
      return slice(part, None, len(self.parts))
    return slice(part * self.writes, (part + 1) * self.writes)


def places(
  family: str,
  model: ModelConfig,
  tensors: Iterable[Tensor],
  nested: Sequence[str] = (GATE_UP, DOWN),
) -> Iterator[Place]:
  """The places of all matrices that can have an adapter, in the order of the tensors.

  A family in `OTHER_EXPERTS` has none for its experts.

  Args:
    family: the released family.
    model: the options of the model.
    tensors: those of the model, `scmoe.pretrained.names.tensors`.
    nested: the parameters of the experts that have an adapter, in the order in which PEFT wraps
      their module.
  """
  seen: set[tuple[str, int]] = set()
  for tensor in tensors:
    owner, _, kind = tensor.leaf.rpartition(".")
    holder = owner.rpartition(".")[2]
    if tensor.leaf != HEAD and (holder not in HOLDERS or kind not in MATRICES):
      continue
    if holder != "experts":
      yield single(tensor)
    elif (owner, tensor.index[0]) not in seen and family not in OTHER_EXPERTS:
      seen.add((owner, tensor.index[0]))
      yield from _experts(family, model, tensor, nested)


def single(tensor: Tensor) -> Place:
  """The place of a matrix that is the whole of a tensor [out, in]."""
  module = tensor.name.removesuffix(".weight")
  return Place(module, module, ((tensor.leaf, tensor.index),), tensor.shape[1], tensor.shape[0])


def _experts(
  family: str, model: ModelConfig, first: Tensor, nested: Sequence[str]
) -> Iterator[Place]:
  """The places of a layer's experts; `first` is one of their tensors."""
  layer = _LAYER.match(first.name)
  assert layer is not None, first.name
  module = f"{layer[0]}.{'block_sparse_moe' if family == 'granitemoe' else 'mlp'}.experts"
  owner, index = first.leaf.rpartition(".")[0], first.index[:1]
  for i, name in enumerate(nested):
    wrapped = module + ".base_layer" * (len(nested) - 1 - i)
    kinds = ("gate", "up") if name == GATE_UP else ("down",)
    sizes = model.width, model.expert_hidden
    reads, writes = sizes if name == GATE_UP else reversed(sizes)
    parts = tuple((f"{owner}.{kind}", index) for kind in kinds)
    turns = family == "gpt_oss" and name == GATE_UP
    yield Place(wrapped, f"{module}.{name}", parts, reads, writes, model.num_experts, turns)


def check_family(family: str, lora: LoraConfig) -> None:
  """Checks that PEFT has names for the adapters of a family.

  Raises:
    ConfigError: it has none.
  """
  merged = "--to FOLDER writes the model with its adapters merged"
  if family == own.FAMILY:
    raise ConfigError(
      "--peft: no released family has this model, and PEFT has no layout for the parameters of its "
      f"own code; {merged}"
    )
  if family in OTHER_EXPERTS and "experts" in lora.wanted:
    raise ConfigError(
      f"--peft: lora.targets={lora.targets!r}: PEFT has no settled layout for the experts of "
      f"{family}; train adapters without experts, or {merged}"
    )


def described(lora: LoraConfig, held: Sequence[Place]) -> dict[str, Any]:
  """The adapter_config.json of a run's adapters.

  Args:
    lora: the run's options.
    held: the places of its adapters.
  """
  last = lambda key, words: ".".join(key.split(".")[-words:])
  fused = any(len(place.parts) == 2 for place in held)
  return {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": None,
    "r": lora.rank,
    "lora_alpha": lora.alpha,
    "rank_pattern": {GATE_UP: 2 * lora.rank} if fused else {},
    "alpha_pattern": {GATE_UP: 2 * lora.alpha} if fused else {},
    "target_modules": sorted({last(place.key, 1) for place in held if not place.experts}),
    "target_parameters": sorted({last(place.key, 3) for place in held if place.experts}) or None,
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "inference_mode": True,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
  }
