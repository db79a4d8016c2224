"""Lines for a person who watches a run: one per logged step, and a progress bar on a terminal."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

from scmoe.base.sizes import elapsed


def console_line(step: int, steps: int, values: dict[str, Any]) -> str:
  """One line for people; figures that are missing, infinite or NaN are left out.

  But a loss or gradient norm is shown even if it is infinite or NaN.

  Reads `loss`, `lr`, `grad_norm`, `tokens_per_second`, `mfu` (0 to 1), `eta_seconds`, `drop` (share
  of the routers' choices that were dropped, 0 to 1), `imbalance` (in the worst layer, load of the
  busiest expert over the mean load), and `skipped` and `repeated` (numbers of steps), which are
  left out if 0.

  Args:
    step: number of the step.
    steps: steps of the whole run; with 0 the line says 100%.
    values: the figures by name; others are not read.
  """
  width = len(str(steps))
  parts = [f"step {step:{width}d}/{steps} ({100 * step // steps if steps else 100}%)"]
  formats = {
    "loss": lambda v: f"loss {v:.4f}",
    "lr": lambda v: f"lr {v:.2e}",
    "grad_norm": lambda v: f"grad {v:.3g}",
    "tokens_per_second": lambda v: f"{_thousands(v)} tok/s",
    "mfu": lambda v: f"MFU {100 * v:.1f}%",
    "eta_seconds": lambda v: f"ETA {elapsed(v)}",
    "drop": lambda v: f"drop {100 * v:.1f}%",
    "imbalance": lambda v: f"imbalance {v:.2f}",
    "skipped": lambda v: f"skipped {v}" if v else "",
    "repeated": lambda v: f"repeated {v}" if v else "",
  }
  for name, form in formats.items():
    value = values.get(name)
    if value is not None and (name in ("loss", "grad_norm") or math.isfinite(value)):
      parts.append(form(value))
  return " | ".join(part for part in parts if part)


class Bar:
  """A progress bar on a terminal; elsewhere, or for 0 steps, lines alone; nothing unless `shown`.

  Args:
    start: steps that the run has done already.
    steps: steps of the whole run.
    shown: False (on all processes but the first): there is no bar, and no line is printed.
  """

  def __init__(self, start: int, steps: int, *, shown: bool = True):
    self._shown, self._bar = shown, None
    if shown and steps and _is_terminal():
      from tqdm import tqdm

      self._bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True, leave=False)

  def advance(self) -> None:
    """Moves the bar on by one step."""
    if self._bar is not None:
      self._bar.update()

  def print(self, text: str) -> None:
    """Prints a line, above the bar if there is one; nothing unless `shown`."""
    if self._bar is not None:
      self._bar.write(text)
    elif self._shown:
      print(text, flush=True)

  def close(self) -> None:
    """Removes the bar."""
    if self._bar is not None:
      self._bar.close()


def _is_terminal() -> bool:
  # Without a standard output `isatty` raises AttributeError, with a closed one ValueError.
  with contextlib.suppress(AttributeError, ValueError):
    return sys.stdout.isatty()
  return False


def _thousands(value: float) -> str:
  for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
    if value >= size:
      return f"{value / size:.1f}{letter}"
  return f"{value:.0f}"
