"""Rows sent to places on any rank: by one kernel where it runs (on Hopper), else by collectives."""

from scmoe.kernels.put.kernel import takes
from scmoe.kernels.put.mailboxes import Mailboxes
from scmoe.kernels.put.peers import apart
from scmoe.kernels.put.rows import MARK, put_rows, shared_mailboxes, with_room_for_tags

__all__ = [
  "MARK",
  "Mailboxes",
  "apart",
  "put_rows",
  "shared_mailboxes",
  "takes",
  "with_room_for_tags",
]
