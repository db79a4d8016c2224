"""Rows sent to places on any rank: by one kernel where it runs (on Hopper), else by collectives."""

from scmoe.kernels.put.kernel import takes
from scmoe.kernels.put.mailboxes import Mailboxes
from scmoe.kernels.put.rows import meeting, put_rows

__all__ = ["Mailboxes", "meeting", "put_rows", "takes"]
