"""Rows sent to places on any rank: by one kernel where it runs (on Hopper), else by collectives."""

from scmoe.kernels.put.kernel import takes
from scmoe.kernels.put.rows import put_rows

__all__ = ["put_rows", "takes"]
