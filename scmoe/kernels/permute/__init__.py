"""The permutation to expert order and back, and its metadata."""

from scmoe.kernels.permute.api import combine_rows, gather_rows, sum_rows
from scmoe.kernels.permute.plan import PermutePlan, make_plan

__all__ = ["PermutePlan", "combine_rows", "gather_rows", "make_plan", "sum_rows"]
