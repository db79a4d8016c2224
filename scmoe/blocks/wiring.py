"""Which sublayer reads which value: the architectures as data, one word each.

A *unit* is `moe_every` transformer blocks of which the last one has the MoE. With the preceding
block l and the MoE block l+1 (paper §3, Eq. 7-10):

  H_{l-1} --attention--> H_l^MH --MLP--> H_l --attention--> H_{l+1}^MH --expert stage--> H_{l+1}
  ^ BLOCK_INPUT          ^ ATTENTION     ^ BLOCK_OUTPUT     ^ CURRENT

| word           | routed experts read  | experts per token | beside them           | paper   |
|----------------|----------------------|-------------------|-----------------------|---------|
| dense          | –                    | –                 | MLP                   | –       |
| top1, top2     | CURRENT              | 1, 2              | –                     | Eq. 1   |
| topk           | CURRENT              | top_k             | –                     | Eq. 1   |
| shared_expert  | CURRENT              | top_k             | shared expert         | Eq. 6   |
| scmoe_pos1     | BLOCK_OUTPUT         | top_k             | shared expert         | §3.1    |
| scmoe_pos2     | ATTENTION            | top_k             | shared expert         | Eq. 7   |
| scmoe_pos3     | BLOCK_INPUT          | top_k             | shared expert         | §3.1    |
| scmoe_pos2_l0  | ATTENTION; in the first pair BLOCK_OUTPUT | top_k | shared expert | Table 3 |
| scmoe2         | ATTENTION            | 2                 | shared expert         | A.4     |
| dgmoe          | ATTENTION + CURRENT  | 1 + 1, distinct   | –                     | Eq. 23  |
| dgmoe_repeat   | ATTENTION + CURRENT  | 1 + 1             | –                     | A.2     |
| dgmoe_share    | as dgmoe             | 1 + 1, distinct   | –; two units share one MoE | A.2 |
| farskip        | BLOCK_OUTPUT         | top_k             | shared expert, skips  | –       |
| farskip_routed | BLOCK_OUTPUT         | top_k             | –; skips              | –       |

`farskip` is FarSkip-Collective (arXiv 2511.11505): attention does not wait for the routed experts
before it, nor a feed-forward sublayer for its block's attention. With f_l the residual stream after
unit l, and n_l the same without the unit's routed experts, a unit of one block computes

  m       = f_l + attention(n_l)
  n_{l+1} = m + shared expert(f_l)
  f_{l+1} = n_{l+1} + routed experts(f_l)

`farskip_routed` is the same without a shared expert: n_{l+1} = m. A model of `topk` has the same
parameters, so that it becomes one with no new weights and no more arithmetic.

In a unit of several blocks only the last one has experts. The others' MLPs read their block's input
too; the attention that follows one of them reads the whole stream.
"""

from __future__ import annotations

import dataclasses
import enum


class Tap(enum.Enum):
  """A value on the main path that routed experts can read; UNROUTED is for attention alone."""

  BLOCK_INPUT = "input of the preceding block"
  ATTENTION = "between attention and MLP of the preceding block"
  BLOCK_OUTPUT = "output of the preceding block"
  UNROUTED = "output of the preceding block without its routed experts; attention alone reads it"
  CURRENT = "between attention and expert stage of the MoE block"


@dataclasses.dataclass(frozen=True)
class Wiring:
  """One architecture: which values its sublayers read, and how many experts a token visits.

  Attributes:
    taps: the values that routed experts read. Each tap has a gating, a choice of experts of its
      own. Empty: no routed experts.
    k: experts per token and gating; None takes `model.top_k`.
    shared_expert: whether a dense expert runs beside the routed ones; it reads CURRENT, or with
      `skips` its block's input.
    distinct: the second gating avoids the first one's expert.
    units_per_moe: units that share one set of experts.
    first: the tap of the model's first pair, if it differs from that of the others (`opening`);
      None: all pairs have the same taps.
    skips: whether the first attention of a unit reads UNROUTED, and MLPs and the shared expert read
      the input of their block.
  """

  taps: tuple[Tap, ...]
  k: int | None = None
  shared_expert: bool = False
  distinct: bool = False
  units_per_moe: int = 1
  first: Tap | None = None
  skips: bool = False

  @property
  def opening(self) -> Wiring:
    """The wiring of a model's first pair, for units of several blocks.

    For units of one block no wiring needs this: nothing is handed over to the first pair, so its
    experts read BLOCK_OUTPUT in place of ATTENTION or BLOCK_INPUT.
    """
    return self if self.first is None else dataclasses.replace(self, taps=(self.first,), first=None)

  @property
  def norm_mlp_feeds_experts(self) -> bool:
    """Whether routed experts read a shortcut through a norm that serves no other sublayer anyway.

    It is `norm_mlp` of the MoE block; a norm of the shortcut's own would leave it without a reader.
    """
    return self.skips and bool(self.taps) and not self.shared_expert

  @property
  def is_shortcut(self) -> bool:
    """Whether routed experts read a value older than the current one."""
    return any(tap is not Tap.CURRENT for tap in self.taps)

  def routed_per_gating(self, top_k: int) -> int:
    """Experts that one gating gives a token."""
    return top_k if self.k is None else self.k

  def routed_per_token(self, top_k: int) -> int:
    """Experts that a token visits in all, the shared one not counted."""
    return len(self.taps) * self.routed_per_gating(top_k)


WIRINGS: dict[str, Wiring] = {
  "dense": Wiring(()),
  "top1": Wiring((Tap.CURRENT,), k=1),
  "top2": Wiring((Tap.CURRENT,), k=2),
  "topk": Wiring((Tap.CURRENT,)),
  "shared_expert": Wiring((Tap.CURRENT,), shared_expert=True),
  "scmoe_pos1": Wiring((Tap.BLOCK_OUTPUT,), shared_expert=True),
  "scmoe_pos2": Wiring((Tap.ATTENTION,), shared_expert=True),
  "scmoe_pos3": Wiring((Tap.BLOCK_INPUT,), shared_expert=True),
  "scmoe_pos2_l0": Wiring((Tap.ATTENTION,), shared_expert=True, first=Tap.BLOCK_OUTPUT),
  "scmoe2": Wiring((Tap.ATTENTION,), k=2, shared_expert=True),
  "dgmoe": Wiring((Tap.ATTENTION, Tap.CURRENT), k=1, distinct=True),
  "dgmoe_repeat": Wiring((Tap.ATTENTION, Tap.CURRENT), k=1),
  "dgmoe_share": Wiring((Tap.ATTENTION, Tap.CURRENT), k=1, distinct=True, units_per_moe=2),
  "farskip": Wiring((Tap.BLOCK_OUTPUT,), shared_expert=True, skips=True),
  "farskip_routed": Wiring((Tap.BLOCK_OUTPUT,), skips=True),
}


def tap_index(tap: Tap, blocks: int) -> int:
  """Number of dense operations of a unit that come before this tap.

  A unit of N blocks runs attention 0, MLP 0, ..., attention N-1, MLP N-1 (the last one is the
  shared expert, if any). With one block per unit the preceding block belongs to the unit before:
  ATTENTION and BLOCK_INPUT are then handed over and read at the start (index 0).
  """
  if tap is Tap.CURRENT:
    return 2 * blocks - 1
  return max(0, 2 * (blocks - 1) - {Tap.BLOCK_OUTPUT: 0, Tap.ATTENTION: 1, Tap.BLOCK_INPUT: 2}[tap])


def is_handed_over(tap: Tap, blocks: int) -> bool:
  """Whether experts that read this tap get its value from the preceding unit."""
  return blocks == 1 and tap in (Tap.ATTENTION, Tap.BLOCK_INPUT)
