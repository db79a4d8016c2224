"""Logits of a linear gate and each token's k best experts, by kernels or by XLA."""

from scmoe.kernels.top_k.api import (
  GateOutput,
  PartialLogits,
  gate_product,
  gate_top_k,
  gate_under_norm,
)

__all__ = ["GateOutput", "PartialLogits", "gate_product", "gate_top_k", "gate_under_norm"]
