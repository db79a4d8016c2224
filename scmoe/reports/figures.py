"""Figures as PNG, drawn without a display. matplotlib takes a second to import, so functions do."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def literal_text(draw: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
  """Decorates a function that draws, so that its labels are shown literally.

  Labels come from configurations and names of runs. By default matplotlib reads text between two
  dollar signs as a formula, and raises an error if it is not one.
  """

  @functools.wraps(draw)
  def drawn(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
      return draw(*args, **kwargs)

  return drawn


def new_figure(width: float, height: float) -> Any:
  """An empty figure of this size in inches."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), layout="constrained")
  FigureCanvasAgg(figure)
  return figure


def png(figure: Any, dpi: int) -> bytes:
  """The figure as PNG."""
  out = io.BytesIO()
  figure.savefig(out, format="png", dpi=dpi)
  return out.getvalue()
