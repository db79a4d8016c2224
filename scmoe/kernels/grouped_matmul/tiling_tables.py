"""Tables of tilings that measurements favour: for known products, and for ranges of widths.

To add a known product, put a line into `TABLE`. To change what other products take, change or add
a row of `PINGPONG_FIRST`, `PAIRS` or `DOWN_BACKWARD`. All numbers are from H200s; the files that
hold them are in experiments/kernels.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from scmoe.kernels.grouped_matmul.pipeline import Tiling
from scmoe.kernels.grouped_matmul.tuned import Key

# Kinds of product: "rows" (one result), "activated" (the activation of one result, perhaps beside
# the result), "up" (that of the results for gate and up, perhaps beside these), "dx" (two products
# added into one result), "weights" and "weights_pair" (the gradients of one matrix and of two), and
# "down_backward" (`down_backward.py`).
KINDS = ("rows", "activated", "up", "dx", "weights", "weights_pair", "down_backward")
WEIGHTS = ("weights", "weights_pair")
TWO_RESULTS = ("up", "weights_pair")


class Product(NamedTuple):
  """A product to be tiled.

  Attributes:
    kind: one of `KINDS`.
    width: contracted width; for weight gradients, rows of the result.
    n: result width.
    gathered: whether the kernel gathers an operand.
  """

  kind: str
  width: int
  n: int
  gathered: bool


@dataclasses.dataclass(frozen=True)
class Where:
  """The products that a row of a table is for; bounds are inclusive.

  Attributes:
    kinds: kinds of product.
    gathered: whether the kernel gathers an operand; None for either.
    width: least and largest `Product.width`.
    n: least and largest result width.
    n_multiple: the result width is a multiple of this.
  """

  kinds: tuple[str, ...]
  gathered: bool | None = None
  width: tuple[float, float] = (0, math.inf)
  n: tuple[float, float] = (0, math.inf)
  n_multiple: int = 64

  def holds(self, product: Product) -> bool:
    """Whether the row is for this product."""
    return (
      product.kind in self.kinds
      and self.gathered in (None, product.gathered)
      and self.width[0] <= product.width <= self.width[1]
      and self.n[0] <= product.n <= self.n[1]
      and product.n % self.n_multiple == 0
    )


def first_form(rows: Sequence[tuple[Where, Tiling]], product: Product) -> Tiling:
  """The tiling of the first table row that is for a product (`Where.holds`)."""
  return next(form for where, form in rows if where.holds(product))


def _narrow(pair: Literal["", "rows", "cols"] = "") -> Tiling:
  """A ping-pong tile of 128 columns with six stages, which fit with one store buffer."""
  return Tiling(cols=128, stages=6, pingpong=True, band=8, store_buffers=1, pair=pair)


def _halved(band: int = 16) -> Tiling:
  """A pair of CTAs on the halves of a row tile of the layout, each with 64 rows and 256 columns."""
  return Tiling(rows=64, cols=256, stages=5, pingpong=True, band=band, store_buffers=1, pair="rows")


# Products for which ping-pong tiles come before cooperative ones. With few steps, with an
# activation, and in one matrix's gradient, the epilogue of a tile weighs more than the traffic of
# its operands, and ping-pong hides the epilogue. A product that gathers is mostly better off with
# wide cooperative tiles, since narrow tiles gather each row more often; "rows" with few steps is
# not. The order does not concern products that have ping-pong tiles only, as "down_backward" has.
PINGPONG_FIRST = (
  Where(("activated", "up", "weights"), gathered=False),
  Where(("rows", "dx"), width=(0, 512)),
  Where(("rows",), gathered=False, width=(0, 1536), n=(257, math.inf)),
)

# (products, form, where the form is inserted among those found so far). Rows are applied in order,
# and a form is inserted once. Halves of a row tile hide the epilogue as ping-pong tiles of 128 x
# 128 do, with the operands' traffic of tiles of 128 x 256. Of 22 products of eleven models (down
# and dx in h200-tilings-2026-11-25.json) 15 are 1 to 7 % faster than with the better of these two,
# and five are 1 to 6 % slower. Pairs of whole row tiles make Phi-3.5's dx, 6400 into 4096, 7 %
# faster than halves, and that of most other models 1 to 10 % slower (same file).
PAIRS = (
  (Where(("dx",), gathered=False), _halved(), 0),
  (Where(("rows",), gathered=False, width=(512, math.inf), n=(512, math.inf)), _halved(), 0),
  (Where(("rows",), gathered=False), _halved(), 1),
  (
    Where(("dx",), width=(4096, math.inf), n=(4096, math.inf), n_multiple=256),
    Tiling(cols=256, band=8, pair="rows"),
    0,
  ),
)

# Without a gather, bands of 16 are up to 8 % slower than bands of 8, in nine models of eleven by
# 2 % or more (h200-tilings-2026-11-25.json). A fifth stage, in the room of half of the buffers for
# pre-activations, makes long products up to 9 % faster. At widths of 1,536 and 2,048 products with
# it were between 6 % slower and 8 % faster, and whole layers of OLMoE and DeepSeek-V2-Lite were no
# faster (h200-layers-2026-11-26.json, h200-all-shapes-2026-11-26.json).
DOWN_BACKWARD = (
  (Where(("down_backward",), gathered=True), Tiling(stages=4, pingpong=True, band=16)),
  (
    Where(("down_backward",), width=(2049, math.inf)),
    Tiling(stages=5, store_buffers=1, pingpong=True, band=8),
  ),
  (Where(("down_backward",)), Tiling(stages=4, pingpong=True, band=8)),
)

# Device kind -> product -> a tiling that beat what was the first candidate then, timed in turns
# with other tilings. The comment above a line, or above two, gives its time, then that of other
# tilings or how many times as long they take. The file that holds these figures is named above the
# first of its lines.
TABLE: dict[str, dict[Key, Tiling]] = {
  "NVIDIA H200": {
    # -- h200-tilings-2026-11-21.json, fourth machine
    # 6.521 ms with equal groups, 6.741 ms with skewed ones; with single CTAs 7.266 and 7.274 ms
    ("weights", 4096, 2048, False): _narrow("cols"),
    # -- the same file, seventh machine
    # 1.788 ms with this tiling; 1.836 ms with bands of 16
    ("rows", 512, 4096, False): _halved(band=32),
    # 6.350 ms with this tiling; 6.603 ms with bands of 16
    ("rows", 2048, 4096, False): _halved(band=32),
    # With skewed groups 0.280 ms, single CTAs with bands of 8 0.288 ms; with equal groups 0.271 and
    # 0.274 ms
    ("rows", 1536, 256, False): _narrow("cols"),
    # -- the same file, second machine
    # 0.498 ms with this tiling; 0.517 ms with single CTAs of 128 columns
    ("rows", 512, 1536, False): Tiling(cols=192, stages=4, pingpong=True, band=8, pair="cols"),
    # -- h200-pairs-2026-11-21.json, in the layer
    # 1.875 ms with this tiling; single CTAs take 1.104 times as long
    ("weights", 1024, 2048, True): Tiling(cols=256, stages=4, band=8, pair="cols"),
    # -- h200-tilings-2026-11-25.json
    # OLMoE: 1.695 ms with this tiling; 1.749 ms with bands of 16
    ("rows", 1024, 2048, False): _halved(band=32),
    # GPT-OSS: 0.938 and 1.893 ms with the next two tilings; 0.989 and 1.930 ms with single CTAs
    ("rows", 2880, 2880, False): Tiling(cols=192, stages=4, pingpong=True, band=8, pair="rows"),
    ("dx", 2880, 2880, False): Tiling(cols=192, stages=4, pingpong=True, band=8, pair="rows"),
    # Llama-4-Scout: 1.264 and 2.518 ms with the next two tilings; 1.311 ms for "rows" with halves
    # of row tiles, 2.587 ms for "dx" with bands of 8
    ("rows", 8192, 5120, False): Tiling(cols=256, stages=4, band=8, pair="cols"),
    ("dx", 8192, 5120, False): Tiling(cols=256, stages=4, band=16, pair="rows"),
    # JetMoE: 0.627 ms with this tiling; 0.645 ms with halves of row tiles
    ("rows", 5632, 2048, False): _narrow(),
  },
}


# (model width, expert width) of the shapes that these tables were measured with.
MEASURED: dict[str, set[tuple[int, int]]] = {
  "NVIDIA H200": {
    (1536, 256), (1536, 1024), (4096, 512), (4096, 1024), (2048, 1024), (2048, 768), (4096, 14336),
    (1536, 512), (2048, 1408), (2048, 5632), (2880, 2880), (4096, 1408), (4096, 1536), (4096, 6400),
    (5120, 8192), (7168, 2048),
  },
}  # fmt: skip
