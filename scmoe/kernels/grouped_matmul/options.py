"""The options of a feed-forward network: what it computes, and by which matrix products."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from scmoe.base.options import Options, option
from scmoe.kernels.grouped_matmul.activations import activation_names
from scmoe.kernels.grouped_matmul.backend import EXPERT_BACKENDS

IMPLEMENTATIONS = ("auto", "grouped", "batched", "block_sparse")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FFNOptions(Options, path="model.ffn"):
  """Options of feed-forward networks: dense MLP, shared expert and routed experts.

  `fp8`, `impl` and `num_sms` are for routed experts; the dense MLP and the shared expert ignore
  them.

  The configurations of the layers and of the kernels inherit these fields, and a model holds them
  as its section `model.ffn`. So a new option of this kind is declared in this class alone.
  """

  activation: str = option(
    "",
    "activation of MLPs and experts; empty: swiglu in models of style llama, else gelu",
    choices=("", *activation_names()),
  )
  fp8: bool = option(
    False,
    "experts: round the operands of forward products to e4m3, with a scale for 128 elements of a "
    "row and 128 x 128 of a matrix (DeepSeek-V3); backward passes stay in model.dtype",
  )
  impl: str = option(
    "auto",
    "experts: grouped (grouped products), batched (XLA's batched products; capacity transport), "
    "block_sparse (MegaBlocks' products), or auto (MegaBlocks mlp_impl)",
    choices=IMPLEMENTATIONS,
  )
  backend: str = option(
    "auto",
    "whose products: mosaic_gpu (kernels for Hopper), xla, auto (kernels where they run)",
    choices=EXPERT_BACKENDS,
  )
  num_sms: int = option(
    0,
    "experts: thread blocks of the kernels of their products (mosaic_gpu); a multiprocessor runs "
    "one at a time, so fewer blocks than multiprocessors leave some to the exchanges beside them; "
    "0: one for each, for padded experts of several devices eight",
    minimum=0,
  )

  @property
  def may_have_kernels(self) -> bool:
    """Whether kernels may compute the experts' products, and so read `num_sms`."""
    return self.backend != "xla" and self.impl not in ("batched", "block_sparse")

  def filled(self, *, gated: bool = False) -> Self:
    """The same options with an activation: an empty one becomes swiglu if `gated`, else gelu."""
    return dataclasses.replace(self, activation=self.activation or ("swiglu" if gated else "gelu"))

  def shared(self) -> dict[str, Any]:
    """The fields of `FFNOptions` alone, by name: arguments for another class that inherits them."""
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(FFNOptions)}
