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
  Flag("top_p", float, 1.0, "draw from the most probable tokens that make up this probability"),
  Flag("seed", int, 0, "of the draws"),
  Flag(
    "deterministic",
    bool,
    False,
    "on a GPU: the same greedy tokens in every process and for every --offload; slower",
  ),
  Flag("mesh", str, "", "axes such as data=2,expert=2; training's, or one device, if not given"),
  SIMULATE,
)
OFFLOAD_FLAGS = (
  Flag(
    "offload",
    str,
    "auto",
    "experts in the host's memory: none, blocking, early, ring, or two of "
    "them for prefill,decode; auto: where they do not fit, as fits and is fastest",
  ),
  Flag(
    "gpu_memory", str, "", "bytes of each device that may be used, such as 8GiB; all if not given"
  ),
  Flag(
    "host_memory", str, "", "bytes of the host's memory that experts may take; all if not given"
  ),
  Flag("expert_cache", int, -1, "experts of every layer that a device keeps; -1: what is left"),
  Flag(
    "cache_policy",
    str,
    "lfu",
    "which expert makes room: lfu (fewest requests, the older ones worth less) or lru",
  ),
  Flag("ring_sections", int, 2, "layers of a ring that are on the device at once"),
  Flag(
    "int8_experts", bool, False, "experts in eight bits in the host's memory: half of the bytes"
  ),
)


def offload_request(values: dict[str, Any]) -> OffloadRequest:
  """Reads the offloading flags.

  Raises:
    ConfigError: one of them is out of range.
  """
  size = lambda name: bytes_of(values[name], name) if values[name] else 0
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
