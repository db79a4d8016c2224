"""The bytes that a model and a generation need on each device and in the host's memory.

They are computed from options and shapes; no parameter's values are read.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from scmoe.inference.offload.model import is_routed
from scmoe.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Workload:
  """The size of a generation: its prompts and the tokens to add.

  Attributes:
    rows: number of prompts in a batch.
    prompt: most tokens of a prompt.
    new: most tokens to add to a prompt.
    piece: most tokens of a device in a pass that reads prompts; 0: no limit.
  """

  rows: int
  prompt: int
  new: int
  piece: int = 0

  @property
  def read(self) -> int:
    """The most tokens that one device reads in a pass over prompts.

    They are those of all rows: devices that divide the rows are not taken into account.
    """
    whole = self.rows * self.prompt
    return min(self.piece, whole) if self.piece else whole


@dataclasses.dataclass(frozen=True)
class Needs:
  """The bytes that a model and its workload need on a device, and in the host's memory for it.

  Where devices divide a parameter among them, only the part of one device counts.

  Attributes:
    dense: bytes of all parameters but the matrices of routed experts, in the compute type.
    expert: bytes of one routed expert's matrices of one pair, in the compute type.
    moved: bytes of the same matrices in the host's memory, where they may be in eight bits.
    experts: number of experts of one pair that belong to a device.
    pairs: number of pairs of the model.
    caches: bytes of all rows' tokens in the attention caches, without the positions by which these
      are rounded up; no less if devices divide the batch.
    scratch: bytes of the activations and logits of one pass, estimated: of a prefill, or of a
      decode step if that has more tokens.
  """

  dense: int
  expert: int
  moved: int
  experts: int
  pairs: int
  caches: int
  scratch: int

  @property
  def layer(self) -> int:
    """Bytes of the matrices of all experts of one pair that belong to a device, in its memory."""
    return self.expert * self.experts

  @property
  def host(self) -> int:
    """Bytes of the matrices of all pairs' experts of one device, if the host's memory has them."""
    return self.moved * self.experts * self.pairs

  @property
  def fixed(self) -> int:
    """Bytes that the device needs under every `Offload`: all but the matrices of routed experts."""
    return self.dense + self.caches + self.scratch


def needs(model: ModelConfig, shapes: Any, load: Workload, *, int8: bool = False) -> Needs:
  """Computes the `Needs` of a model and its workload; no parameter's values are read.

  Args:
    model: the model's resolved options.
    shapes: its parameters as `jax.ShapeDtypeStruct` with shardings.
    load: the size of the generation.
    int8: whether the host keeps the experts' matrices in eight bits.
  """
  item = jnp.dtype(model.dtype).itemsize
  dense = routed = moved = 0
  flat, _ = jax.tree_util.tree_flatten_with_path(shapes)
  for path, leaf in flat:
    shape = leaf.sharding.shard_shape(leaf.shape)
    if is_routed(path, leaf):
      routed += math.prod(shape) * item
      moved += math.prod(shape) * (1 if int8 else item)
      # In eight bits each column of a matrix also has a float32 scale.
      moved += math.prod((*shape[:-2], shape[-1])) * 4 * int8
    else:
      dense += math.prod(shape) * item
  pairs, tokens = model.num_pairs, max(load.read, load.rows)
  experts = next((p[1].sharding.shard_shape(p[1].shape)[1] for p in flat if is_routed(*p)), 0)
  tensor = flat[0][1].sharding.mesh.shape["tensor"]
  caches = load.rows * (load.prompt + load.new) * cached_bytes(model, tensor)
  hidden = max(model.mlp_hidden, model.shared_hidden, model.expert_hidden * model.top_k)
  scratch = tokens * item * (8 * model.width + 2 * hidden // tensor)
  scratch += load.rows * model.vocab_size * 8 // tensor
  every = max(pairs * experts, 1)
  return Needs(dense, routed // every, moved // every, experts, pairs, caches, scratch)


def cached_bytes(model: ModelConfig, tensor: int = 1) -> int:
  """Bytes that a device keeps of one token of its rows in the attention caches of all layers.

  The devices of the tensor axis divide the heads of keys and values. With latent attention each of
  them keeps a token's whole latent, and the part of its key that turns.

  Args:
    model: the model's resolved options.
    tensor: number of devices on the tensor axis.
  """
  width = 2 * model.num_kv_heads * model.head_dim // tensor
  if model.kv_lora_rank:
    width = model.kv_lora_rank + model.qk_rope_head_dim
  return model.num_layers * width * jnp.dtype(model.dtype).itemsize
