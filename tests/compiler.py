"""Flags of XLA's compiler for the processes that tests start."""

import os

DEVICES = "--xla_force_host_platform_device_count="


def flags_of_one_device() -> str:
  """`XLA_FLAGS` of this process without its simulated devices; programs compile as fast as here."""
  return " ".join(f for f in os.environ["XLA_FLAGS"].split() if not f.startswith(DEVICES))
