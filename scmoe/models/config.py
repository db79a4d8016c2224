"""The options of a model's architecture, and the numbers that follow from them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from scmoe.base.errors import ConfigError
from scmoe.base.options import check_whole, option, section
from scmoe.blocks.block import BlockConfig
from scmoe.layers.attention import LayerKind
from scmoe.models.vision.options import ARCHITECTURES, VisionConfig
from scmoe.parallel.mesh import expert_shards


class Run(NamedTuple):
  """Neighbouring layers of one kind.

  Attributes:
    dense: whether they are `dense_layers`.
    start, stop: their range, counted among the layers of their kind. Example: of 4 layers, of which
      0 and 3 are dense, the runs are (dense, 0, 1), (not dense, 0, 2) and (dense, 1, 2).
  """

  dense: bool
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class ModelConfig(BlockConfig):
  """Architecture of a model. The defaults are a GPT-2 style language model of laptop size."""

  architecture: str = option(
    "gpt",
    "what the blocks are part of: gpt (a language model), vit or swin (classifiers of images; "
    "model.vision)",
    choices=ARCHITECTURES,
  )
  vision: VisionConfig = section(VisionConfig, "the image, its tokens, and the stages of a Swin")
  num_layers: int = option(
    4,
    "transformer blocks L (n_layer, num_hidden_layers); swin: model.vision.depths says them",
    minimum=1,
  )
  vocab_size: int = option(
    0,
    "rows of the embedding V, in tokens; 0: the tokenizer's size, rounded up to a multiple of 64",
    minimum=0,
  )
  context: int = option(
    1024,
    "longest sequence S, in tokens; 1024 is GPT-2's (n_positions, max_position_embeddings)",
    minimum=1,
  )
  tie_embeddings: bool = option(
    True, "the logits are products with the token embeddings, as in GPT-2 (tie_word_embeddings)"
  )
  embedding_multiplier: float = option(
    1.0, "factor on the embeddings, before the first block (Granite)", minimum=0
  )
  logits_scaling: float = option(1.0, "number by which logits are divided (Granite)", minimum=0)
  dense_layers: str = option(
    "",
    "layers, counted from 0, with a dense MLP of width mlp_hidden in place of the MoE, such as 0-2 "
    "or 1,3,5 (DeepSeek first_k_dense_replace, Qwen mlp_only_layers); needs moe_every=1",
  )

  full_attention_layers: str = option(
    "",
    "layers, counted from 0, in which model.sliding_window and model.attention_chunk do not hold, "
    "such as 1,3,5 (layer_types of published models)",
  )
  nope_layers: str = option(
    "",
    "llama: layers, counted from 0, without a rotary embedding, such as 3,7 (Llama-4 "
    "no_rope_layers)",
  )

  @property
  def reads_images(self) -> bool:
    """Whether it classifies images; otherwise it reads token ids."""
    return self.architecture != "gpt"

  @property
  def depth(self) -> int:
    """Number of blocks that write to one residual stream: L."""
    return self.num_layers

  @property
  def num_pairs(self) -> int:
    """Number of block pairs (`BlockPair`), without the layers of `dense_layers`."""
    pairs = self.num_layers // (self.moe_every * self.wiring_rule.units_per_moe)
    return pairs - len(self.dense_indices)

  @property
  def dense_indices(self) -> tuple[int, ...]:
    """The numbers of the layers in `dense_layers`, ascending.

    Raises:
      ConfigError: `dense_layers` is no list of numbers and ranges.
    """
    return self._layers("dense_layers")

  def _layers(self, name: str) -> tuple[int, ...]:
    """The numbers of the layers that an option lists, ascending; see `dense_indices`."""
    found: set[int] = set()
    for part in filter(None, getattr(self, name).replace(" ", "").split(",")):
      match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
      if match is None:
        raise ConfigError(
          f"model.{name}={getattr(self, name)!r} has {part!r}; use numbers and ranges of layers "
          "such as 0-2 or 1,3,5"
        )
      found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))

  def _kind(self, number: int | Array) -> LayerKind | None:
    listed = self.full_layers, self.straight_layers
    if not any(listed):
      return None
    every = np.arange(self.num_layers)
    own = (jnp.asarray(np.isin(every, some))[number] if some else None for some in listed)
    return LayerKind(*own)

  @property
  def full_layers(self) -> tuple[int, ...]:
    """The numbers of the layers in `full_attention_layers`, ascending; see `dense_indices`."""
    return self._layers("full_attention_layers")

  @property
  def straight_layers(self) -> tuple[int, ...]:
    """The numbers of the layers in `nope_layers`, ascending; see `dense_indices`."""
    return self._layers("nope_layers")

  @property
  def opens_apart(self) -> bool:
    """Whether the first pair has another wiring than the others (`Wiring.opening`)."""
    return self.wiring_rule.first is not None and self.moe_every > 1

  @property
  def runs(self) -> tuple[Run, ...]:
    """Neighbouring layers of one kind, in order: block pairs, and `dense_layers`.

    The first pair is a run of its own if the model `opens_apart`.
    """
    if self.opens_apart:
      return tuple(Run(False, *ends) for ends in ((0, 1), (1, self.num_pairs)) if ends[0] < ends[1])
    dense, found, counts = set(self.dense_indices), [], {True: 0, False: 0}
    layers = [i in dense for i in range(self.num_pairs + len(dense))]
    for kind, group in itertools.groupby(layers):
      start, size = counts[kind], len(list(group))
      counts[kind] += size
      found.append(Run(kind, start, start + size))
    return tuple(found)

  @property
  def of_dense_layers(self) -> ModelConfig:
    """The architecture of the blocks of `dense_layers`: these options without a MoE."""
    return dataclasses.replace(self, wiring="dense", dense_layers="", zero_experts=0)

  def resolve(self, *, vocab_size: int = 0) -> ModelConfig:
    """Replaces options of 0 or "" that stand for a derived value, and checks options together.

    A model of images gets the number of classes as `vocab_size`, and the number of tokens of an
    image, in the first stage of a Swin, as `context`.

    Args:
      vocab_size: size of the tokenizer's vocabulary; used if the option is 0, rounded up to a
        multiple of 64.

    Raises:
      ConfigError: names the field, what was got and what would do.
    """
    check_whole("vocab_size", vocab_size, 0)
    given: dict[str, int] = {"vocab_size": self.vocab_size or -(-vocab_size // 64) * 64}
    if self.reads_images:
      given = {"vocab_size": self.vision.classes, "context": self.vision.side**2}
    if self.architecture == "swin":
      given["num_layers"] = sum(self.vision.stage_depths)
    return BlockConfig.resolve(dataclasses.replace(self, **given))

  def with_layers(self, layers: int) -> ModelConfig:
    """The same model with so many layers.

    `dense_layers`, `full_attention_layers` and `nope_layers` keep the numbers below `layers`. If
    all layers that are left were dense, the last one gets a MoE. If no `nope_layers` are left,
    `attention_temperature` is 0. In a Swin `vision.depths` decides the number of layers: `resolve`
    replaces the one given here.
    """

    def kept(name: str, below: int) -> str:
      listed = self._layers(name)
      left = [i for i in listed if i < below]
      return getattr(self, name) if len(left) == len(listed) else ",".join(map(str, left))

    every_layer = set(range(layers)) <= set(self.dense_indices)
    straight = kept("nope_layers", layers)
    return dataclasses.replace(
      self,
      num_layers=layers,
      dense_layers=kept("dense_layers", layers - every_layer),
      full_attention_layers=kept("full_attention_layers", layers),
      nope_layers=straight,
      attention_temperature=self.attention_temperature if straight else 0.0,
    )

  def shortened(self, pairs: int) -> ModelConfig:
    """The same model with at most `pairs` pairs, without `dense_layers`; see `with_layers`.

    In a Swin the limit holds for each stage.
    """
    blocks = self.moe_every * self.wiring_rule.units_per_moe
    layers = min(self.num_pairs * blocks, pairs * blocks)
    vision = self.vision
    if self.architecture == "swin":
      depths = [min(depth, pairs * blocks) for depth in vision.stage_depths]
      vision = dataclasses.replace(vision, depths=",".join(map(str, depths)))
      layers = sum(depths)
    return dataclasses.replace(self.with_layers(layers), vision=vision, dense_layers="")

  def check(self) -> None:
    """See `BlockConfig.check`."""
    rule = self.wiring_rule
    if self.reads_images:
      self._check_images()
    blocks = self.moe_every * rule.units_per_moe
    if self.num_layers % blocks and self.architecture != "swin":  # each of its stages is checked
      raise ConfigError(
        f"model.num_layers={self.num_layers} is not a multiple of model.moe_every={self.moe_every}"
        + (f" x {rule.units_per_moe} ({self.wiring} shares)" if rule.units_per_moe > 1 else "")
        + f"; use a multiple of {blocks}"
      )
    dense = self.dense_indices
    if dense and (blocks != 1 or not rule.taps):
      raise ConfigError(
        f"model.dense_layers={self.dense_layers!r} needs a wiring with a MoE in every block, got "
        f"model.wiring={self.wiring!r} and model.moe_every={self.moe_every}; use model.moe_every=1"
      )
    if dense and (dense[-1] >= self.num_layers or len(dense) == self.num_layers):
      raise ConfigError(
        f"model.dense_layers={self.dense_layers!r} of model.num_layers={self.num_layers} names "
        "layers that are not there, or leaves no MoE; use some of 0 to "
        f"{self.num_layers - 1}, or model.wiring='dense'"
      )
    full = self.full_layers
    if full and (not (self.sliding_window or self.attention_chunk) or full[-1] >= self.num_layers):
      raise ConfigError(
        f"model.full_attention_layers={self.full_attention_layers!r} lifts the window of some of "
        f"model.num_layers={self.num_layers}, got model.sliding_window={self.sliding_window} and "
        f"model.attention_chunk={self.attention_chunk}; use some of 0 to {self.num_layers - 1}, "
        "and a window or chunks"
      )
    straight = self.straight_layers
    if straight and (straight[-1] >= self.num_layers or self.style != "llama" or self.kv_lora_rank):
      raise ConfigError(
        f"model.nope_layers={self.nope_layers!r} of model.num_layers={self.num_layers} needs "
        f"ordinary attention with rotary positions, got model.style={self.style!r} and "
        f"model.kv_lora_rank={self.kv_lora_rank}; use some of 0 to {self.num_layers - 1}, and llama"
      )
    if self.attention_temperature and not straight:
      raise ConfigError(
        f"model.attention_temperature={self.attention_temperature} is of model.nope_layers, got "
        "''; name such layers, or use 0"
      )
    super().check()
    if self.logits_scaling == 0:
      raise ConfigError("model.logits_scaling=0 divides the logits; use 1, or a larger number")
    if self.vocab_size == 0:
      raise ConfigError("model.vocab_size=0 needs the size of a tokenizer; set it")

  def _check_images(self) -> None:
    """Checks that no option of language models only is set, and checks `vision`."""
    plain = ModelConfig()
    for name in (
      "style",
      "kv_lora_rank",
      "sliding_window",
      "attention_sinks",
      "attention_chunk",
      "full_attention_layers",
      "nope_layers",
      "dense_layers",
      "document_mask",
      "attention_multiplier",
      "embedding_multiplier",
      "logits_scaling",
    ):
      if (value := getattr(self, name)) != getattr(plain, name):
        raise ConfigError(
          f"model.{name}={value!r} is of language models, got model.architecture="
          f"{self.architecture!r}; leave model.{name} out"
        )
    self.vision.check()

  def check_mesh(self, *, expert: int, tensor: int, embedding: int = 1) -> None:
    """Checks that experts, heads, hidden widths and the vocabulary divide over the mesh.

    Args:
      expert, tensor: devices on these axes.
      embedding: data ranks that partition embedding and head (`mesh.embedding`); 1: none does.

    Raises:
      ConfigError: names the field, what was got and what would do.
    """
    shards = expert_shards(expert, self.num_experts) if self.wiring_rule.taps else 1
    if self.expert_hidden % (shards * tensor):
      raise ConfigError(
        f"model.expert_hidden={self.expert_hidden} is not divisible by the {shards * tensor} "
        f"devices that share an expert (mesh.expert={expert}, mesh.tensor={tensor}); use a multiple"
      )
    names = ["num_heads", "num_kv_heads", "mlp_hidden", "shared_hidden"]
    # The scores of a few classes are computed on every device.
    names += [] if self.reads_images else ["vocab_size"]
    for name in names:
      value = getattr(self, name)
      if value % tensor:
        raise ConfigError(
          f"model.{name}={value} is not divisible by mesh.tensor={tensor}; use a multiple of "
          f"{tensor}, or a mesh.tensor that divides {value}"
        )
    if embedding > 1:
      self._check_partition(embedding, tensor)

  def _check_partition(self, ranks: int, tensor: int) -> None:
    """Checks that data ranks, and tensor ranks with them, can partition embedding and head."""
    why = "mesh.embedding='partitioned'"
    if self.reads_images:
      raise ConfigError(
        f"{why} cuts a vocabulary, got model.architecture={self.architecture!r}, which reads "
        "images; set mesh.embedding=whole"
      )
    parts = ranks * tensor
    if self.vocab_size % parts:
      near = -(-self.vocab_size // parts) * parts
      axes = f"mesh.data={ranks}" + f" x mesh.tensor={tensor}" * (tensor > 1)
      raise ConfigError(
        f"{why} cuts the vocabulary into {axes} equal parts, got model.vocab_size="
        f"{self.vocab_size}; use {near}, or mesh.embedding=whole"
      )
    if self.width % ranks:
      raise ConfigError(
        f"{why} cuts rows of the table into mesh.data={ranks} equal slices, got model.width="
        f"{self.width}; use a multiple of {ranks}, or mesh.embedding=whole"
      )
