"""Counts the rows that a placement of experts sends between devices. NumPy computes on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from scmoe.base.errors import ConfigError
from scmoe.inference.placement.choices import Choices
from scmoe.moe.dispatch.dropless import buffer_rows, overflow_rows


class Rows(NamedTuple):
  """Figures of one placement on W devices, over all batches, gatings and devices.

  The tokens of a batch are divided evenly among the devices, in their order, and the devices
  exchange rows as `dispatch.transport=dropless` does in one dispatch of one chunk. A combine sends
  as many back.

  Attributes:
    away: of the choices that need a row (`Choices`), the share whose expert lies on another device
      than the token. Each of these is a row with content that travels.
    sent: mean number of rows that a device sends to others, filled or not: the first round's and
      the overflow rounds'. Times the bytes of a row, these are bytes.
    rounds: 1 + the mean number of overflow rounds.
    busiest: filled rows that the busiest device receives, from itself too, over the mean of all
      devices; the mean over batches and gatings.
    receivers: number of devices that hold the experts that a token chose, its own device perhaps
      among them; the mean over gatings and over the tokens with a choice that needs a row. An
      exchange that sent such a token to each of these devices once would send `receivers` rows for
      it on average.
    apart: share of pairs of experts that lie on different devices, of all pairs that a token forms
      of its experts in a layer's last gating and those in the next layer's first; NaN without
      such a pair, as with one layer. With one expert per token it is how often a token travels in
      ExFlow, where it stays with its last expert.
  """

  away: float
  sent: float
  rounds: float
  busiest: float
  receivers: float
  apart: float


def rows_of(
  choices: Choices, device_LE: Int[np.ndarray, "L E"], devices: int, *, slack: float
) -> Rows:
  """The figures of a placement, on the text of the recorded choices.

  Args:
    choices: the choices.
    device_LE: the device of each layer's experts.
    devices: W.
    slack: `dispatch.slack`.

  Raises:
    ConfigError: a batch's tokens do not divide over the devices.
  """
  batches, gatings, tokens, k = choices.expert_NGTK.shape
  if tokens % devices:
    raise ConfigError(
      f"devices={devices} does not divide the {tokens} tokens of a batch; use a divisor"
    )
  own_T = np.arange(tokens) // (tokens // devices)
  first = buffer_rows(tokens // devices * k, slack=slack, peers=devices)
  later = overflow_rows(first)
  away = made = sent = rounds = receivers = counted = 0.0
  busiest, before, apart, pairs = [], None, 0.0, 0.0
  for gating, layer in enumerate(choices.layer_G):
    expert_NTK = choices.expert_NGTK[:, gating]
    # Device W is that of choices which send no row.
    device_NTK = np.where(expert_NTK < 0, devices, device_LE[layer][expert_NTK])
    row_NTK = device_NTK < devices
    away += ((device_NTK != own_T[:, None]) & row_NTK).sum()
    made += row_NTK.sum()
    at_NTW = np.stack([(device_NTK == w).sum(-1) for w in range(devices)], -1)
    queue_NWW = at_NTW.reshape(batches, devices, -1, devices).sum(2)  # from, to
    longest_N = queue_NWW.max((1, 2))
    rounds_N = 1 + np.ceil(np.maximum(0, longest_N - first) / later)
    rounds += rounds_N.sum()
    sent += ((devices - 1) * (first + (rounds_N - 1) * later)).sum()
    received_NW = queue_NWW.sum(1)
    busiest.append(received_NW.max(1) / np.maximum(received_NW.mean(1), 1e-9))
    receivers += (at_NTW > 0).sum()
    counted += (at_NTW.sum(-1) > 0).sum()
    if before is not None and before[0] != layer:
      both = at_NTW.sum(-1) * before[1].sum(-1)
      pairs += both.sum()
      apart += (both - (at_NTW * before[1]).sum(-1)).sum()
    before = layer, at_NTW
  calls = batches * gatings
  return Rows(
    away=float(away / max(made, 1)),
    sent=float(sent / calls),
    rounds=float(rounds / calls),
    busiest=float(np.mean(busiest)),
    receivers=float(receivers / max(counted, 1)),
    apart=float(apart / pairs) if pairs else float("nan"),
  )
