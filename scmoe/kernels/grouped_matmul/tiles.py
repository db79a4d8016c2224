"""Chooses the tile shape of a product: the user's measured one, one of a table, or one by rules.

`python -m scmoe.bench.tune` measures `variants` on a user's GPU and stores its choice (`tuned`). A
product for which no such choice counts takes its entry of `tiling_tables.TABLE`. A product without
an entry, or with a result that is not of 2-byte elements, takes the first of `candidates`. That
function orders tilings by rules, and finds at least one for any two widths that are positive
multiples of 64. Products of fp8 operands all take `FP8`.
"""

import contextlib
import contextvars
import dataclasses
import functools
import logging
from collections.abc import Iterator

import jax

from scmoe.kernels.grouped_matmul import tuned
from scmoe.kernels.grouped_matmul.layout import KERNEL_ROW_TILE
from scmoe.kernels.grouped_matmul.pipeline import Tiling
from scmoe.kernels.grouped_matmul.tile_order import tiles_over
from scmoe.kernels.grouped_matmul.tiling_tables import (
  DOWN_BACKWARD,
  KINDS,
  MEASURED,
  PAIRS,
  PINGPONG_FIRST,
  TABLE,
  TWO_RESULTS,
  WEIGHTS,
  Product,
  first_form,
)
from scmoe.kernels.grouped_matmul.tuned import Key

ROW_TILE = KERNEL_ROW_TILE
SMEM_LIMIT = 232_448  # Bytes of shared memory that a CTA may have on Hopper.
# The largest share of a result's rows or columns that tiles may compute twice, without the further
# tile that makes their number even for pairs.
TWICE = 0.07
_RESERVED = 2_048  # Bytes of shared memory for barriers, biases and their alignment.

# The tiling for fp8 operands. A stage is one block of `fp8` deep. The sums take registers beside
# each stage's accumulators, so a tile has 128 columns, where other products may have 256.
FP8 = Tiling(rows=128, cols=128, depth=128, stages=5, band=16, pair="rows")

BANDS = (8, 4, 16, 32)  # the bands that `variants` offers for measuring
_log = logging.getLogger(__name__)
_recording: contextvars.ContextVar[dict[Key, None] | None]
_recording = contextvars.ContextVar("recording", default=None)


def smem_bytes(tiling: Tiling, out_itemsize: int = 2) -> int:
  """Bytes of shared memory of a product with 2-byte operands, with stores' buffers and barriers.

  Not for "down_backward": its epilogue has other buffers, larger ones with two pre-activations.
  """
  stage = (tiling.rows + tiling.cols) * tiling.depth * 2
  stores = 2 * tiling.store_buffers * tiling.consumer_rows * 64 * out_itemsize
  return tiling.stages * stage + stores + _RESERVED


def _fit(tiling: Tiling, out_itemsize: int) -> Tiling:
  """The tiling with the largest number of stages, at most 6, that fits into shared memory.

  A further stage is preferred to a second store buffer.
  """
  for stages in (6, 5, 4, 3, 2):
    for buffers in (2, 1):
      candidate = dataclasses.replace(tiling, stages=stages, store_buffers=buffers)
      if smem_bytes(candidate, out_itemsize) <= SMEM_LIMIT:
        return candidate
  raise AssertionError(f"no stage count fits {tiling}")


def candidates(
  kind: str, width: int, n: int, out_itemsize: int = 2, *, gathered: bool = False
) -> list[Tiling]:
  """Tilings that fit a product; the first is the one that the rules prefer, whatever `TABLE` says.

  Args:
    kind: one of `KINDS`.
    width: contracted width; for the weight gradients, rows of the result.
    n: result width.
    out_itemsize: bytes of an element of the result.
    gathered: the kernel gathers an operand itself.

  Raises:
    ValueError: the kind is unknown, or a width is not a multiple of 64.
  """
  if kind not in KINDS:
    raise ValueError(f"unknown product {kind!r}: use one of {', '.join(KINDS)}")
  if width % 64 or n % 64:
    raise ValueError(f"widths {width} and {n} must both be multiples of 64 for the kernels")
  product = Product(kind, width, n, gathered)
  if kind == "down_backward":
    form = first_form(DOWN_BACKWARD, product)
    return [dataclasses.replace(form, cols=c) for c in (128, 64) if _covers(c, n)]
  result = _single_forms(product, out_itemsize)
  _put_pingpong_first(result, product)
  _insert_pairs(result, product, out_itemsize)
  if kind not in TWO_RESULTS and n % 128 and n % 192 == 0:
    # Tiles of 192 columns are 2 to 16 % faster than tiles of 256, which compute columns twice (2880
    # columns; GPT-OSS in experiments/kernels/h200-tilings-2026-11-25.json).
    result.sort(key=lambda t: t.cols != 192)
  return result


def _single_forms(product: Product, out_itemsize: int) -> list[Tiling]:
  """The forms of single CTAs whose tiles cover the result, widest first."""
  parts = 2 if product.kind in TWO_RESULTS else 1
  small = product.kind in WEIGHTS and not _covers(ROW_TILE, product.width)
  rows = 64 if small else ROW_TILE
  result = []
  for cols, pingpong in ((256, False), (192, True), (128, True), (128, False), (64, True)):
    cols = max(cols, 64 * parts)
    own = cols // parts
    if not _covers(own, product.n) or own % 64 or (rows == 64 and not pingpong):
      continue
    tiling = _fit(Tiling(rows=rows, cols=cols, pingpong=pingpong, band=8), out_itemsize)
    if tiling not in result:
      result.append(tiling)
  return result


def _put_pingpong_first(result: list[Tiling], product: Product) -> None:
  """Sorts ping-pong forms to the front where `PINGPONG_FIRST` says so.

  For "weights" and "dx" those of 128 columns come before the other ping-pong forms, and likewise
  among the cooperative forms behind them.
  """
  if any(where.holds(product) for where in PINGPONG_FIRST):
    narrow = product.kind in ("weights", "dx")
    result.sort(key=lambda t: (not t.pingpong, narrow and t.cols != 128))


def _insert_pairs(result: list[Tiling], product: Product, out_itemsize: int) -> None:
  """Adds forms with pairs of CTAs: one for one matrix's gradient ("weights"), and those of `PAIRS`.

  The pair for a gradient is inserted in front. It needs an even number of row tiles and no gather.
  """
  paired = product.kind == "weights" and not product.gathered
  if paired and tiles_over(product.width, result[0].rows) % 2 == 0:
    # Pairs are up to 12 % faster than single CTAs, and in one case of eighteen over 2 % slower (512
    # columns). With an odd number of tiles one would be computed for nothing, 3 to 16 % slower
    # (experiments/kernels/h200-tilings-2026-11-25.json).
    result.insert(0, dataclasses.replace(result[0], pair="rows"))
  seen: list[Tiling] = []
  for where, form, place in PAIRS:
    if where.holds(product) and form not in seen and _covers(form.cols, product.n):
      seen.append(form)
      result.insert(place, _fit(form, out_itemsize))


def _covers(size: int, width: int) -> bool:
  """Whether tiles of `size` columns (or rows) may cover a result of `width` columns (or rows).

  Tiles of 64 columns must divide the width, and so must wider tiles if 128 divides it. On other
  widths wider tiles may compute some columns twice (`tile_order.first_of`), at most 7 % of them:
  tiles of 256 columns cover 960, since 4 · 256 = 1,024 is 6.7 % more.
  """
  if width % 128 == 0 or size < 128:
    return width % size == 0
  return width >= size and tiles_over(width, size) * size <= (1 + TWICE) * width


def variants(kind: str, width: int, n: int, *, gathered: bool = False) -> list[Tiling]:
  """The tilings that are worth measuring for a 2-byte result; arguments as for `candidates`.

  They are the candidates with each of `BANDS` and, except for "down_backward", also the pairs of
  those that are single. Pairs that would share the gathered operand of "rows", "activated" or "up",
  or gather a gradient's operand past the array, are left out. The first candidate comes first. The
  shipped tiling is among them.
  """
  alone = candidates(kind, width, n, gathered=gathered)
  # A pair of "cols" shares the rows' operand, so that operand cannot be gathered. A product for
  # weights' gradients may gather either operand: its kernel knows which one, and runs single CTAs
  # if the pair would share that one.
  sides = ("rows",) if gathered and not kind.startswith("weights") else ("rows", "cols")
  paired = [dataclasses.replace(t, pair=side) for t in alone if not t.pair for side in sides]
  if gathered and kind.startswith("weights"):
    paired = [t for t in paired if not _gathers_past(t, kind, width, n)]
  forms = alone if kind == "down_backward" else alone + paired
  bands = [dataclasses.replace(form, band=band) for band in BANDS for form in forms]
  return list(dict.fromkeys([alone[0], *bands]))


def _gathers_past(tiling: Tiling, kind: str, width: int, n: int) -> bool:
  """Whether the last tile of a paired gradient begins where the result ends (`first_of`).

  Its operand would be gathered from past the array: with tiles of 128 rows, 384 rows have a fourth
  tile at row 384.
  """
  cols = tiling.cols // (2 if kind in TWO_RESULTS else 1)
  size, length = (tiling.rows, width) if tiling.pair == "rows" else (cols, n)
  return length % size == 0 and length // size % 2 == 1


def shipped(kind: str, width: int, n: int, *, gathered: bool = False) -> Tiling:
  """The package's tiling for a 2-byte result: the one in `TABLE`, or else the first candidate.

  `TABLE` is asked for the kind of the first device. Arguments are those of `candidates`.
  """
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
  """The tiling of a product with a 2-byte result: the user's measured one, or else the shipped one.

  A measured tiling counts only if it is among `variants`. A result of other elements takes the
  first candidate.

  Args:
    kind, width, n, out_itemsize, gathered: as for `candidates`.
    experts: whether this is the first product of experts. If so, and no measured tiling counts, the
      log of a run on a GPU says if the shipped tables were not measured at these widths.

  Raises:
    ValueError: as for `candidates`.
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
  """Collects the keys of the products for which `choose` is called inside this context, in order.

  Only products with 2-byte results are collected.
  """
  keys: dict[Key, None] = {}
  token = _recording.set(keys)
  try:
    yield keys
  finally:
    _recording.reset(token)


@functools.cache
def _say_once(message: str) -> None:
  _log.info(message)
