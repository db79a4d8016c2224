"""Timelines: colours that are told apart, and times on every bar."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest

from scmoe.profiling.picture import COLOURS, Bar, Timeline, draw_png, draw_svg

LINE = Timeline(
  "modelled for <here>",
  {
    "scmoe_pos2": {
      "compute": [Bar("attention 1: projections", 0, 2, "3 operations"), Bar("experts", 2, 2.5)],
      "link": [Bar("dispatch 1", 0.25, 1), Bar("embedding", 1, 1)],
    }
  },
)


def light(colour):
  """Its parts, linear, red, green and blue."""
  parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
  return [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def luminance(colour):
  return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), light(colour)))


def lab(colour):
  """CIE L*a*b*, in which distances are what an eye sees."""
  r, g, b = light(colour)
  x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
  y = 0.2126 * r + 0.7152 * g + 0.0722 * b
  z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
  root = lambda t: t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
  return 116 * root(y) - 16, 500 * (root(x) - root(y)), 200 * (root(y) - root(z))


def test_stages_are_told_apart_by_their_colours():
  for one, other in itertools.combinations(COLOURS, 2):
    distance = sum((a - b) ** 2 for a, b in zip(lab(COLOURS[one]), lab(COLOURS[other]))) ** 0.5
    assert distance > 18, (one, other)


@pytest.mark.parametrize("background", ["#ffffff", "#121212"])
def test_stages_are_seen_on_light_and_on_dark_pages(background):
  for word, colour in COLOURS.items():
    bright, dim = sorted((luminance(colour), luminance(background)), reverse=True)
    assert (bright + 0.05) / (dim + 0.05) > 2, word
    assert (luminance(colour) + 0.05) / 0.05 > 4.5, word  # black words upon it


def test_every_bar_says_its_times():
  svg = draw_svg(LINE)
  titles = re.findall(r'<g class="bar"><title>(.*?)</title>', svg, re.S)
  assert titles == [
    "attention 1: projections (scmoe_pos2 · compute)\n0 to 2 ms: 2 ms\n3 operations",
    "experts (scmoe_pos2 · compute)\n2 to 2.5 ms: 0.5 ms",
    "dispatch 1 (scmoe_pos2 · link)\n0.25 to 1 ms: 0.75 ms",
    "embedding (scmoe_pos2 · link)\n1 to 1 ms: 0 ms",
  ]


def test_the_drawing_is_to_scale_and_well_formed():
  root = ElementTree.fromstring(draw_svg(LINE))
  assert root.get("aria-label") == "modelled for <here>"
  bars = [g.find("rect") for g in root.iter("g") if g.get("class") == "bar"]
  left, width = (([float(bar.get(k)) for bar in bars]) for k in ("x", "width"))
  assert width[0] == pytest.approx(4 * width[1], rel=1e-3)
  assert left[1] == pytest.approx(left[0] + width[0], abs=0.02)
  assert [bar.get("fill") for bar in bars] == [
    COLOURS[word] for word in ("attention", "experts", "dispatch", "other")
  ]
  assert "script" not in {element.tag for element in root.iter()}


def test_a_number_does_not_change_a_colour():
  plain = Timeline(
    LINE.title,
    {"scmoe_pos2": {"compute": [Bar("attention", 0, 2), Bar("experts", 2, 2.5)], "link": []}},
  )
  numbered = Timeline(
    LINE.title,
    {"scmoe_pos2": {"compute": [*LINE.rows["scmoe_pos2"]["compute"]], "link": []}},
  )
  assert draw_png([plain], "t") == draw_png([numbered], "t")


def test_nothing_to_draw_is_a_picture_too():
  assert draw_png([], "dense").startswith(b"\x89PNG")
  assert draw_svg(Timeline("empty", {})).endswith("</svg>")
