"""A linear gate and the k best experts of every token, in one kernel where there is one."""

from scmoe.kernels.top_k.api import TopK, gate_product, gate_top_k

__all__ = ["TopK", "gate_product", "gate_top_k"]
