"""Compiled programs are shared by the tests of training, subprocesses included."""

import os

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory):
  """A private compilation cache for the session."""
  folder = str(tmp_path_factory.mktemp("compiled"))
  os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  jax.config.update("jax_compilation_cache_dir", folder)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  yield folder
  jax.config.update("jax_compilation_cache_dir", None)
