"""MegaBlocks' formulation of the experts: block-sparse matrices and their products."""

from scmoe.kernels.block_sparse.api import (
  BlockSparse,
  dds,
  dsd,
  from_dense,
  random_mask,
  sdd,
  to_dense,
)
from scmoe.kernels.block_sparse.ffn import block_sparse_ffn
from scmoe.kernels.block_sparse.topology import Topology, moe_topology, topology_from_mask

__all__ = [
  "BlockSparse",
  "Topology",
  "block_sparse_ffn",
  "dds",
  "dsd",
  "from_dense",
  "moe_topology",
  "random_mask",
  "sdd",
  "to_dense",
  "topology_from_mask",
]
