"""Formats bytes, counts and seconds with units for people to read."""

from __future__ import annotations


def number(value: float) -> str:
  """A count with three digits and a decimal unit: 1.71G."""
  for unit in ("", "K", "M", "G", "T", "P", "E", "Z"):
    if abs(value) < 999.5 or unit == "Z":
      break
    value /= 1000
  return f"{value:.3g}{unit}"


def size_of(size: float) -> str:
  """Bytes in binary units: 3.10 GiB."""
  unit = "B"
  for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
    if size < 1024 or unit == "TiB":
      break
    size /= 1024
  return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"


def duration(seconds: float) -> str:
  """Seconds as 340 ms, 12.0 s, 5.2 min, 3.1 h or 4.0 days."""
  for limit, divisor, unit in (
    (1, 1e-3, "ms"),
    (120, 1, "s"),
    (7200, 60, "min"),
    (172800, 3600, "h"),
  ):
    if seconds < limit:
      return f"{seconds / divisor:.3g} {unit}"
  return f"{seconds / 86400:.3g} days"


def elapsed(seconds: float) -> str:
  """Whole seconds as a clock counts them: `47s`, `3m05s`, `2h03m`, `4d07h`."""
  rounded = round(seconds)
  if rounded < 60:
    return f"{rounded}s"
  if rounded < 3600:
    return f"{rounded // 60}m{rounded % 60:02d}s"
  if rounded < 86400:
    return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"
  return f"{rounded // 86400}d{rounded % 86400 // 3600:02d}h"
