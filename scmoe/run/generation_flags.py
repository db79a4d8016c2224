"""Flags that `scmoe.generate` and `scmoe.serve` share: sampling, and where experts may lie."""

from __future__ import annotations

from typing import Any

from scmoe.base.errors import ConfigError
from scmoe.inference.offload.plan import OffloadRequest, bytes_of
from scmoe.offload.cache import POLICIES
from scmoe.run.command_line import SIMULATE, Flag

SAMPLING_FLAGS = (
  Flag("temperature", float, 1.0, "divides the logits; 0 takes the most probable token"),
  Flag("top_k", int, 0, "draw from the k most probable tokens; 0: from all"),
  Flag("top_p", float, 1.0, "draw from the most probable tokens up to this sum"),
  Flag("seed", int, 0, "seed of the draws"),
  Flag(
    "deterministic",
    bool,
    False,
    "on a GPU: the same greedy tokens in every process and for every --offload; slower",
  ),
  Flag("mesh", str, "", "such as data=2,expert=2; default: training's, or one device"),
  SIMULATE,
)
OFFLOAD_FLAGS = (
  Flag(
    "offload",
    str,
    "auto",
    "hold experts in the host's memory: none, blocking, early, ring, or PREFILL,DECODE of them; "
    "auto: none if the experts fit the devices, else the fastest that fits",
  ),
  Flag("gpu_memory", str, "", "bytes of each device that may be used, such as 8GiB; default: all"),
  Flag("host_memory", str, "", "bytes of the host's memory that experts may take; default: all"),
  Flag(
    "expert_cache",
    int,
    -1,
    "experts per layer that a device caches; -1: with auto as many as fit, else none",
  ),
  Flag(
    "cache_policy",
    str,
    "lfu",
    "which expert the cache evicts: lfu (fewest requests, older ones weigh less) or lru",
  ),
  Flag("ring_sections", int, 2, "ring: number of layers whose experts are on the device at once"),
  Flag(
    "int8_experts", bool, False, "store experts in eight bits in the host's memory: half the bytes"
  ),
)


def offload_request(values: dict[str, Any]) -> OffloadRequest:
  """Reads the offloading flags.

  Raises:
    ConfigError: one of them is out of range.
  """
  size = lambda name: bytes_of(values[name], f"--{name}") if values[name] else 0
  if values["cache_policy"] not in POLICIES:
    raise ConfigError(
      f"--cache_policy={values['cache_policy']!r} is unknown; one of: {', '.join(POLICIES)}"
    )
  if values["ring_sections"] < 1:
    raise ConfigError(f"--ring_sections={values['ring_sections']} must be at least 1")
  return OffloadRequest(
    values["offload"],
    size("gpu_memory"),
    size("host_memory"),
    values["expert_cache"],
    values["cache_policy"],
    values["ring_sections"],
    values["int8_experts"],
  )
