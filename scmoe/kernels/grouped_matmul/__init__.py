"""Matrix products of groups of rows, and the experts' network."""

from scmoe.kernels.grouped_matmul.activations import activation_names, get_activation
from scmoe.kernels.grouped_matmul.backend import BACKENDS, resolve_backend
from scmoe.kernels.grouped_matmul.ffn import FFNConfig, expert_ffn
from scmoe.kernels.grouped_matmul.layout import (
  KERNEL_ROW_TILE,
  GroupLayout,
  RowLayout,
  TiledRows,
  arrived_layout,
  choices_layout,
  make_layout,
  padded_layout,
  sorted_layout,
  tiled_layout,
  with_spare_tiles,
)
from scmoe.kernels.grouped_matmul.matmul import grouped_matmul, grouped_outer
from scmoe.kernels.grouped_matmul.options import FFNOptions
from scmoe.kernels.grouped_matmul.reference import expert_ffn_reference, grouped_matmul_reference
from scmoe.kernels.grouped_matmul.weights import FFNWeights
from scmoe.kernels.launch import device_has_kernels
from scmoe.kernels.one_row.experts import splits as splits_of_one_row

__all__ = [
  "BACKENDS",
  "KERNEL_ROW_TILE",
  "FFNConfig",
  "FFNOptions",
  "FFNWeights",
  "GroupLayout",
  "RowLayout",
  "TiledRows",
  "activation_names",
  "arrived_layout",
  "choices_layout",
  "device_has_kernels",
  "expert_ffn",
  "expert_ffn_reference",
  "get_activation",
  "grouped_matmul",
  "grouped_matmul_reference",
  "grouped_outer",
  "make_layout",
  "padded_layout",
  "resolve_backend",
  "sorted_layout",
  "splits_of_one_row",
  "tiled_layout",
  "with_spare_tiles",
]
