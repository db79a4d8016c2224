"""Tile shapes of the kernels: a short rule, and what was measured to be better.

`python -m scmoe.bench.tune` measures `variants` on a user's GPU and keeps the fastest there
(`tuned`); a table of what was measured for known shapes is shipped here. A product that is in
neither gets the rule's choice, which always exists for widths that are multiples of 64.
"""

import contextlib
import contextvars
import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Literal

import jax

from scmoe.kernels.grouped_matmul import tuned
from scmoe.kernels.grouped_matmul.layout import KERNEL_ROW_TILE
from scmoe.kernels.grouped_matmul.pipeline import Tiling, tiles_over
from scmoe.kernels.grouped_matmul.tuned import Key

ROW_TILE = KERNEL_ROW_TILE
SMEM_LIMIT = 232_448  # bytes a CTA may have on Hopper
TWICE = 0.07  # share of columns that tiles may compute twice
_RESERVED = 2_048  # barriers, biases and their alignment

# Product kinds: "rows" (one result), "activated" (one with its activation), "up" (gate and up with
# theirs), "dx" (two products into one result), "weights" and "weights_pair" (weight gradients),
# "down_backward".
KINDS = ("rows", "activated", "up", "dx", "weights", "weights_pair", "down_backward")

# Of fp8 operands: a stage is one block of `fp8` deep, and as the sums stand beside each
# stage's accumulators, a tile has half the columns of others. Of six forms the fastest, at OLMoE's
# and Mixtral's widths (experiments/LOG.md).
FP8 = Tiling(rows=128, cols=128, depth=128, stages=5, band=16, pair="rows")

BANDS = (8, 4, 16, 32)  # that are measured
_log = logging.getLogger(__name__)
_recording: contextvars.ContextVar[dict[Key, None] | None]
_recording = contextvars.ContextVar("recording", default=None)


def _narrow(pair: Literal["", "rows", "cols"] = "") -> Tiling:
  """A ping-pong tile of 128 columns with all the stages that fit."""
  return Tiling(cols=128, stages=6, pingpong=True, band=8, stores=1, pair=pair)


def _halved(band: int = 16) -> Tiling:
  """A pair of CTAs on the halves of a row tile of the layout: one group, 256 columns for both."""
  return Tiling(rows=64, cols=256, stages=5, pingpong=True, band=band, stores=1, pair="rows")


# Device kind -> where the rule's choice was beaten there, in turns with the other candidates
# (experiments/kernels). What the rule chooses anyway does not stand here.
TABLE: dict[str, dict[Key, Tiling]] = {
  "NVIDIA H200": {
    # 6.521 ms, with skewed groups 6.741 ms; single CTAs: 7.266 and 7.274 ms
    ("weights", 4096, 2048, False): _narrow("cols"),
    # 1.875 ms; single CTAs: 2.070 ms
    ("weights", 1024, 2048, True): Tiling(cols=256, stages=4, band=8, pair="cols"),
    # 1.788 ms; bands of 16: 1.836 ms
    ("rows", 512, 4096, False): _halved(band=32),
    # 6.350 ms; bands of 16: 6.603 ms
    ("rows", 2048, 4096, False): _halved(band=32),
    # Of OLMoE 1.695 ms; bands of 16: 1.749 ms
    ("rows", 1024, 2048, False): _halved(band=32),
    # 0.498 ms; single CTAs, 128 columns: 0.517 ms
    ("rows", 512, 1536, False): Tiling(cols=192, stages=4, pingpong=True, band=8, pair="cols"),
    # With skewed groups 0.280 ms, single CTAs: 0.288 ms; equal ones 0.271 and 0.274 ms
    ("rows", 1536, 256, False): _narrow("cols"),
    # Of GPT-OSS 0.938 and 1.893 ms; single CTAs: 0.989 and 1.930 ms
    ("rows", 2880, 2880, False): Tiling(cols=192, stages=4, pingpong=True, band=8, pair="rows"),
    ("dx", 2880, 2880, False): Tiling(cols=192, stages=4, pingpong=True, band=8, pair="rows"),
    # Of Llama-4-Scout 1.264 and 2.518 ms; halves of row tiles: 1.311, bands of 8: 2.587 ms
    ("rows", 8192, 5120, False): Tiling(cols=256, stages=4, band=8, pair="cols"),
    ("dx", 8192, 5120, False): Tiling(cols=256, stages=4, band=16, pair="rows"),
    # Of JetMoE 0.627 ms; halves of row tiles: 0.645 ms
    ("rows", 5632, 2048, False): _narrow(),
  },
}


# (model width, expert width) of the shapes that the rule and the table were measured with.
MEASURED: dict[str, set[tuple[int, int]]] = {
  "NVIDIA H200": {
    (1536, 256), (1536, 1024), (4096, 512), (4096, 1024), (2048, 1024), (2048, 768), (4096, 14336),
    (1536, 512), (2048, 1408), (2048, 5632), (2880, 2880), (4096, 1408), (4096, 1536), (4096, 6400),
    (5120, 8192), (7168, 2048),
  },
}  # fmt: skip


def smem_bytes(tiling: Tiling, out_itemsize: int = 2) -> int:
  """Shared memory of a product with 2-byte operands and its stores."""
  stage = (tiling.rows + tiling.cols) * tiling.depth * 2
  stores = 2 * tiling.stores * tiling.consumer_rows * 64 * out_itemsize
  return tiling.stages * stage + stores + _RESERVED


def _fit(tiling: Tiling, out_itemsize: int) -> Tiling:
  """As many stages as fit, at most 6; a stage more is worth a buffer of stores."""
  for stages in (6, 5, 4, 3, 2):
    for stores in (2, 1):
      candidate = dataclasses.replace(tiling, stages=stages, stores=stores)
      if smem_bytes(candidate, out_itemsize) <= SMEM_LIMIT:
        return candidate
  raise AssertionError(f"no stage count fits {tiling}")


def candidates(
  kind: str, width: int, n: int, out_itemsize: int = 2, *, gathered: bool = False
) -> list[Tiling]:
  """Tilings that divide the problem, the rule's choice first.

  Args:
    kind: one of `KINDS`.
    width: contracted width; for the weight gradients, rows of the result.
    n: result width.
    out_itemsize: bytes of an element of the result.
    gathered: an operand is gathered by the kernel itself.

  Raises:
    ValueError: the kind is unknown, or a width is not a multiple of 64.
  """
  if kind not in KINDS:
    raise ValueError(f"unknown product {kind!r}: use one of {', '.join(KINDS)}")
  if width % 64 or n % 64:
    raise ValueError(f"widths {width} and {n} must both be multiples of 64 for the kernels")
  if kind == "down_backward":
    # Ungathered, bands of 16 are 1 to 8 % slower than those of 8. A fifth stage, for half of the
    # epilogue's buffers, makes long products up to 9 % faster; a short one does not hide how long
    # the epilogue then takes (even at 2,048, 2 % slower at 1,536).
    form = Tiling(stages=4, pingpong=True, band=16)
    if not gathered:
      long = {"stages": 5, "stores": 1} if width > 2048 else {}
      form = dataclasses.replace(form, band=8, **long)
    return [dataclasses.replace(form, cols=c) for c in (128, 64) if _covers(c, n)]
  parts = 2 if kind in ("up", "weights_pair") else 1
  to_rows = kind in ("weights", "weights_pair")
  rows = 64 if to_rows and not _covers(ROW_TILE, width) else ROW_TILE
  result = []
  for cols, pingpong in ((256, False), (192, True), (128, True), (128, False), (64, True)):
    cols = max(cols, 64 * parts)
    own = cols // parts
    if not _covers(own, n) or own % 64 or (rows == 64 and not pingpong):
      continue
    tiling = _fit(Tiling(rows=rows, cols=cols, pingpong=pingpong, band=8), out_itemsize)
    if tiling not in result:
      result.append(tiling)
  if _overlaps_ends(kind, width, n, gathered):
    narrow = kind in ("weights", "dx")
    result.sort(key=lambda t: (not t.pingpong, narrow and t.cols != 128))
  if kind == "weights" and not gathered and tiles_over(width, rows) % 2 == 0:
    # Up to 12 % faster than single CTAs, once of eighteen over 2 % slower (512 columns); of an
    # odd number of tiles one is computed for nothing, 3 to 16 % slower (experiments/kernels).
    result.insert(0, dataclasses.replace(result[0], pair="rows"))
  if kind in ("rows", "dx") and _covers(256, n) and not gathered:
    result.insert(0 if _halves_pay(kind, width, n) else 1, _fit(_halved(), out_itemsize))
  if kind == "dx" and width >= 4096 and n >= 4096 and n % 256 == 0:
    # Long and wide products: 2 to 6 % faster than halves; others are up to 5 % slower.
    result.insert(0, _fit(Tiling(cols=256, band=8, pair="rows"), out_itemsize))
  if parts == 1 and n % 128 and n % 192 == 0:
    # 4 to 8 % faster than to compute columns twice (2880 columns; experiments/kernels).
    result.sort(key=lambda t: t.cols != 192)
  return result


def _covers(size: int, width: int) -> bool:
  """Whether tiles of a size may cover a width.

  One that 128 does not divide is not left to tiles of 64: wider ones compute a few of its columns
  twice (`pipeline.first_of`).
  """
  if width % 128 == 0 or size < 128:
    return width % size == 0
  return width >= size and tiles_over(width, size) * size <= (1 + TWICE) * width


def _halves_pay(kind: str, width: int, n: int) -> bool:
  """Whether pairs on the halves of a row tile are the first choice where nothing is gathered.

  They overlap the ends of tiles as 128 x 128 ping-pong does, with the operands' traffic of 128 x
  256. On one H200 (experiments/kernels) 1 to 9 % faster than either, but for short products of one
  operand and for results that one of their tiles is as wide as.
  """
  return kind == "dx" or (width >= 512 and n >= 512)


def _overlaps_ends(kind: str, width: int, n: int, gathered: bool) -> bool:
  """Whether one consumer's end of a tile is better laid beside the other's products (ping-pong).

  With few steps, and where a group's result is all that is written, the end of a tile weighs more
  than its operands' traffic. Gathers are the other way round: narrow tiles gather each row more
  often. Bounds from one H200 (experiments/kernels).
  """
  if kind in ("activated", "up"):
    return not gathered
  if kind == "rows":
    return width <= 512 or (width <= 1536 and n > 256 and not gathered)
  if kind == "dx":
    return width <= 512
  return kind == "weights" and not gathered


def variants(kind: str, width: int, n: int, *, gathered: bool = False) -> list[Tiling]:
  """All that is worth measuring for a 2-byte result: candidates alone and in pairs, in all bands.

  The rule's choice comes first; arguments as for `candidates`. What is shipped is among them.
  """
  alone = candidates(kind, width, n, gathered=gathered)
  # A pair of "cols" shares the rows' operand, which cannot be gathered; of the weights' products
  # the kernel knows which operand is, and drops what cannot be.
  sides = ("rows",) if gathered and not kind.startswith("weights") else ("rows", "cols")
  paired = [dataclasses.replace(t, pair=side) for t in alone if not t.pair for side in sides]
  forms = alone if kind == "down_backward" else alone + paired
  bands = [dataclasses.replace(form, band=band) for band in BANDS for form in forms]
  return list(dict.fromkeys([alone[0], *bands]))


def shipped(kind: str, width: int, n: int, *, gathered: bool = False) -> Tiling:
  """What is taken where a user has measured nothing, for a 2-byte result: of the table, or of the
  rule; arguments as for `candidates`."""
  table = TABLE.get(jax.devices()[0].device_kind, {})
  known = table.get((kind, width, n, gathered))
  return known or candidates(kind, width, n, gathered=gathered)[0]


def choose(
  kind: str,
  width: int,
  n: int,
  out_itemsize: int = 2,
  *,
  gathered: bool = False,
  experts: bool = False,
) -> Tiling:
  """The tiling to use; arguments as for `candidates`.

  Args:
    experts: this is the first product of experts. It speaks for their layer: on a GPU the log
      says if that was not measured.
  """
  if out_itemsize != 2:
    return candidates(kind, width, n, out_itemsize, gathered=gathered)[0]
  device, key = jax.devices()[0], (kind, width, n, gathered)
  if (keys := _recording.get()) is not None:
    keys[key] = None
  own = tuned.table(device.device_kind).get(key)
  if own is not None and own.tiling in variants(kind, width, n, gathered=gathered):
    return own.tiling
  measured = MEASURED.get(device.device_kind, ())
  if experts and device.platform == "gpu" and (width, n) not in measured:
    _say_once(
      f"tilings for experts of {width} x {n} were not measured on {device.device_kind}: "
      "`python -m scmoe.bench.tune --config ...` looks for faster ones"
    )
  return shipped(kind, width, n, gathered=gathered)


@contextlib.contextmanager
def recorded() -> Iterator[dict[Key, None]]:
  """Collects the keys of the products that are traced inside this context, in their order."""
  keys: dict[Key, None] = {}
  token = _recording.set(keys)
  try:
    yield keys
  finally:
    _recording.reset(token)


@functools.cache
def _say_once(message: str) -> None:
  _log.info(message)
