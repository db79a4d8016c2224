"""Rows sent to places on any rank: by one kernel on Hopper, by collectives elsewhere."""

from scmoe.kernels.put.kernel import takes
from scmoe.kernels.put.rows import put_rows

__all__ = ["put_rows", "takes"]
