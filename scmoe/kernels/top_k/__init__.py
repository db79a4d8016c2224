"""Logits of a linear gate and each token's k best experts: by a kernel where one runs, else XLA."""

from scmoe.kernels.top_k.api import (
  GateOutput,
  PartialLogits,
  gate_product,
  gate_top_k,
  gate_under_norm,
)

__all__ = ["GateOutput", "PartialLogits", "gate_product", "gate_top_k", "gate_under_norm"]
