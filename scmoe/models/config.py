"""The architecture of a language model."""

from __future__ import annotations

import dataclasses

from scmoe.blocks.block import BlockConfig
from scmoe.errors import ConfigError
from scmoe.options import option
from scmoe.parallel.mesh import expert_shards


@dataclasses.dataclass(frozen=True)
class ModelConfig(BlockConfig):
  """Architecture of a language model. The defaults are a GPT-2 style model of laptop size."""

  num_layers: int = option(4, "transformer blocks L", minimum=1)
  vocab_size: int = option(
    0, "size of the embedding V; 0: the tokenizer's, rounded up to a multiple of 64", minimum=0
  )
  context: int = option(1024, "longest sequence (learned positions) S", minimum=1)
  tie_embeddings: bool = option(True, "read the logits from the token embeddings")

  @property
  def depth(self) -> int:
    """Blocks that write to one residual stream: L."""
    return self.num_layers

  @property
  def num_pairs(self) -> int:
    """Block pairs (`BlockPair`), each with a MoE of its own."""
    return self.num_layers // (self.moe_every * self.wiring_rule.units_per_moe)

  def resolve(self, *, vocab_size: int = 0) -> ModelConfig:
    """Fills in every 0 and empty word, and checks what depends on more than one field.

    Args:
      vocab_size: of the tokenizer; used where the field is 0.

    Raises:
      ConfigError: names the field, what was got and what would do.
    """
    size = self.vocab_size or -(-vocab_size // 64) * 64
    return BlockConfig.resolve(dataclasses.replace(self, vocab_size=size))

  def check(self) -> None:
    """See `BlockConfig.check`."""
    rule = self.wiring_rule
    blocks = self.moe_every * rule.units_per_moe
    if self.num_layers % blocks:
      raise ConfigError(
        f"model.num_layers={self.num_layers} is not a multiple of model.moe_every={self.moe_every}"
        + (f" x {rule.units_per_moe} ({self.wiring} shares)" if rule.units_per_moe > 1 else "")
        + f"; use a multiple of {blocks}"
      )
    super().check()
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
