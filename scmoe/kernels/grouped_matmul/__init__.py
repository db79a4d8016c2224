"""Grouped matrix products: each group of rows times its own matrix, with gradients."""

from scmoe.kernels.grouped_matmul.activations import activation_names, get_activation
from scmoe.kernels.grouped_matmul.api import grouped_ffn, grouped_matmul, grouped_outer
from scmoe.kernels.grouped_matmul.backend import BACKENDS, device_has_kernels, resolve_backend
from scmoe.kernels.grouped_matmul.equal_groups import (
  equal_ffn,
  rows_have_kernels,
  without_gradient,
)
from scmoe.kernels.grouped_matmul.reference import grouped_ffn_reference, grouped_matmul_reference

__all__ = [
  "BACKENDS",
  "activation_names",
  "device_has_kernels",
  "equal_ffn",
  "get_activation",
  "grouped_ffn",
  "grouped_ffn_reference",
  "grouped_matmul",
  "grouped_matmul_reference",
  "grouped_outer",
  "resolve_backend",
  "rows_have_kernels",
  "without_gradient",
]
