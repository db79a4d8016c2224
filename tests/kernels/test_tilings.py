"""Which tiling a product takes where nobody measured it: known answers, shape by shape."""

import pytest

from scmoe.kernels.grouped_matmul import tiles
from scmoe.kernels.grouped_matmul.pipeline import Tiling
from scmoe.kernels.grouped_matmul.tiling_tables import DOWN_BACKWARD, Product, Where, first_form

# (kind, contracted width, result width, gathered, (rows, columns, stages, ping-pong, band, store
# buffers, pair)).
EXPECTED = (
  ("up", 2048, 1024, True, (128, 256, 4, False, 8, 2, "")),
  ("up", 2048, 1024, False, (128, 128, 6, True, 8, 1, "")),
  ("rows", 1024, 2048, False, (64, 256, 5, True, 16, 1, "rows")),
  ("rows", 512, 4096, False, (64, 256, 5, True, 16, 1, "rows")),
  ("rows", 256, 1536, False, (128, 192, 4, True, 8, 2, "")),
  ("rows", 2880, 2880, False, (128, 192, 4, True, 8, 2, "")),
  ("rows", 1024, 2048, True, (128, 256, 4, False, 8, 2, "")),
  ("rows", 4096, 14336, False, (64, 256, 5, True, 16, 1, "rows")),
  ("dx", 1024, 2048, False, (64, 256, 5, True, 16, 1, "rows")),
  ("dx", 512, 1536, False, (64, 256, 5, True, 16, 1, "rows")),
  ("dx", 14336, 4096, False, (128, 256, 4, False, 8, 2, "rows")),
  ("dx", 4096, 4160, False, (64, 256, 5, True, 16, 1, "rows")),
  ("dx", 2880, 2880, False, (128, 192, 4, True, 8, 2, "")),
  ("weights", 2048, 1024, False, (128, 128, 6, True, 8, 1, "rows")),
  ("weights", 1024, 2048, True, (128, 256, 4, False, 8, 2, "")),
  ("weights", 192, 2048, False, (64, 128, 6, True, 8, 2, "")),
  ("weights", 2880, 2880, False, (128, 192, 4, True, 8, 2, "")),
  ("weights_pair", 2048, 1024, True, (128, 256, 4, False, 8, 2, "")),
  ("weights_pair", 2048, 1024, False, (128, 256, 4, False, 8, 2, "")),
  ("down_backward", 2048, 1024, True, (128, 128, 4, True, 16, 2, "")),
  ("down_backward", 2048, 1024, False, (128, 128, 4, True, 8, 2, "")),
  ("down_backward", 4096, 14336, False, (128, 128, 5, True, 8, 1, "")),
  ("down_backward", 2048, 2880, False, (128, 128, 4, True, 8, 2, "")),
)


@pytest.mark.parametrize(("kind", "width", "n", "gathered", "form"), EXPECTED)
def test_the_first_candidate(kind, width, n, gathered, form):
  rows, cols, stages, pingpong, band, buffers, pair = form
  want = Tiling(rows, cols, 64, stages, pingpong, band, buffers, pair)
  assert tiles.candidates(kind, width, n, gathered=gathered)[0] == want


def test_a_row_holds_within_its_bounds_inclusive():
  where = Where(("dx",), gathered=False, width=(512, 1024), n=(256, 512), n_multiple=128)
  assert where.holds(Product("dx", 512, 256, False))
  assert where.holds(Product("dx", 1024, 512, False))
  for other in (
    Product("rows", 512, 256, False),
    Product("dx", 512, 256, True),
    Product("dx", 448, 256, False),
    Product("dx", 1088, 256, False),
    Product("dx", 512, 192, False),
    Product("dx", 512, 640, False),
    Product("dx", 512, 320, False),
  ):
    assert not where.holds(other), other


def test_every_gradient_of_the_down_projection_has_a_row():
  for width in (64, 2048, 2112, 14336):
    for gathered in (False, True):
      assert first_form(DOWN_BACKWARD, Product("down_backward", width, 64, gathered))


def test_no_pair_gathers_past_the_array():
  offered = lambda width, **how: {
    (form.pair, form.rows) for form in tiles.variants("weights", width, 512, **how)
  }
  assert ("rows", 128) in offered(512, gathered=True)
  # Three whole tiles: the pair's fourth would begin at row 384 of 384.
  assert ("rows", 128) not in offered(384, gathered=True)
  assert ("rows", 128) in offered(384)
