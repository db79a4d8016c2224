"""A linear gate and the k best experts of every token, in one kernel where there is one."""

from scmoe.kernels.top_k.api import Begun, TopK, begin_gate, gate_product, gate_top_k

__all__ = ["Begun", "TopK", "begin_gate", "gate_product", "gate_top_k"]
