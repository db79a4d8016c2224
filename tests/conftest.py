"""Environment of all tests: eight simulated CPU devices, decided before jax is imported.

Most of the tests' time is compilation: LLVM's expensive passes are left out, also in the processes
that tests start. They change no result that a test looks at.
"""

import collections
import ctypes
import functools
import gc
import os
import shutil
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path

import pytest

DEVICES = "--xla_force_host_platform_device_count=8"

COMPILE_FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
COMPILE_FAST += " --xla_cpu_parallel_codegen_split_count=1"  # a core is all that a worker has
if version("jax").startswith("0.10."):  # later ones have no other emitters than the slow ones
  COMPILE_FAST += " --xla_cpu_use_fusion_emitters=false"

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
  os.environ["XLA_FLAGS"] += f" {COMPILE_FAST}"
# A collective among eight simulated devices waits for eight threads at once. XLA sizes its pool by
# the number of cores unless it is told otherwise, and with two cores such a step would never end.
os.environ["NPROC"] = "16"


# Python looks for cycles of dead objects whenever so many more were allocated than freed. Tracing a
# program allocates millions of objects that stay: with Python's own limit of 700, a tenth of the
# tests' time goes into searching them in vain.
ALLOCATIONS = (50_000, 10, 10)

# Programs are compiled once for all workers and the processes that tests start.
CACHE = "JAX_COMPILATION_CACHE_DIR"


def pytest_configure(config: pytest.Config) -> None:
  """The CPU, except where the tests that need a GPU are asked for; and one compilation cache."""
  if config.getoption("markexpr", "") != "gpu":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
  gc.set_threshold(*ALLOCATIONS)
  if CACHE not in os.environ:  # workers have the first process' one
    config.stash[OWN] = os.environ[CACHE] = tempfile.mkdtemp(prefix="programs-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"


# Files of 14 s and more of a whole run on two cores come first, the longest before the others, so
# that no worker is left with one in the end.
LONG = ("test_state_shares", "test_quality_trained", "test_cli", "test_processes")
LONG += ("test_mosaic_gpu", "test_host_moments")
LONG += ("test_rearranged", "test_wirings", "test_repeating", "test_transports", "test_killed")
LONG += ("test_execution", "test_serve", "test_gradient_reduction", "test_dry_run", "test_mistakes")
LONG += ("test_storage", "test_decode", "test_serving", "test_filed_moments", "test_side_by_side")
LONG += ("test_distillation", "test_offload", "test_lora", "test_loop", "test_vision", "test_disk")
LONG += ("test_average", "test_tokens_in_place", "test_own", "test_upcycled_run", "test_profile")
LONG += ("test_token", "test_files", "test_released", "test_conventions", "test_extending")
LONG += ("test_sequence_axis", "test_preference", "test_inference", "test_configs", "test_probe")
LONG += ("test_peft", "test_adding", "test_multitask_run", "test_prediction")
LONG += ("test_partitioned_embedding", "test_library", "test_expert_parallel", "test_teacher")
LONG += ("test_docs",)


def pytest_addoption(parser: pytest.Parser) -> None:
  """Adds the option that `.ci/run` gives to a second Python."""
  text = "of every test's parameters only the first of each N"
  parser.addoption("--every", type=int, default=1, metavar="N", help=text)


@pytest.hookimpl(trylast=True)  # of those that -m leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  """`LONG` first, other files in their order; and what `--every` leaves out."""
  place = {stem: i for i, stem in enumerate(LONG)}
  seen: collections.Counter[tuple[Path, str]] = collections.Counter()
  kept, left = [], []
  for item in sorted(items, key=lambda item: place.get(item.path.stem, len(LONG))):
    test = (item.path, getattr(item, "originalname", item.name))
    every = 1 if item.get_closest_marker("each_jax") else config.getoption("every")
    (left if seen[test] % every else kept).append(item)
    seen[test] += 1
  if left:
    config.hook.pytest_deselected(items=left)
  items[:] = kept


def pytest_collection_finish() -> None:
  """Freezes the imported modules: they stay, so the collector need not look at them again."""
  gc.collect()
  gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
  """Deletes the programs with the session that made them."""
  if folder := config.stash.get(OWN, None):
    shutil.rmtree(folder, ignore_errors=True)
    del os.environ[CACHE]


OWN = pytest.StashKey[str]()


# Of 65,530 that Linux grants a process. A compiled program takes 3 to 30: a worker that has run
# thousands of them is aborted by the next.
MAPPINGS = 16_000
# Bytes that a worker may grow by before it drops what it has compiled: without a limit each holds
# 5.6 GiB in the end.
GROWTH = 3 << 29


@pytest.fixture(scope="session")
def smallest():
  """Bytes that the process held when it had last dropped its programs."""
  return [_resident()]


@pytest.fixture(scope="session", autouse=True)
def remember_procedural_text():
  """Smoke runs read the same procedural text: it is written once a process, not at every start."""
  from scmoe.data import procedural

  written = functools.cache(lambda name, size: tuple(original(name, size)))
  original = procedural.documents
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(procedural, "documents", lambda name, size: iter(written(name, size)))
    yield


@pytest.fixture(scope="session", autouse=True)
def share_contexts():
  """On jax 0.10, ten programs in a row share an MLIR context, as jax does itself since 0.11.

  Making one takes 2 to 5 ms, and the tests lower tens of thousands of small programs. A context
  keeps the types of every program lowered in it, so it is replaced after ten.
  """
  if not version("jax").startswith("0.10."):
    yield
    return
  from jax._src.interpreters import mlir

  make, own = mlir.make_ir_context, threading.local()

  def shared():
    own.uses = getattr(own, "uses", 0) + 1
    if own.uses % 10 == 1:
      own.context = make()
    return own.context

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(mlir, "make_ir_context", shared)
    yield


@pytest.fixture(scope="module", autouse=True)
def forget_programs(smallest):
  """Drops compiled programs when they are many; the slow ones come back from the cache on disk."""
  yield
  maps = Path("/proc/self/maps")
  many = maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS
  if many or _resident() > smallest[0] + GROWTH:
    import jax

    jax.clear_caches()
    gc.collect()
    # What was freed goes back to the system only when it is asked for.
    getattr(ctypes.CDLL(None), "malloc_trim", lambda keep: 0)(0)
    smallest[0] = _resident()


def _resident() -> int:
  """Bytes of memory that this process holds; 0 where that is not known."""
  statm = Path("/proc/self/statm")
  return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@pytest.fixture(scope="module")
def quickly():
  """Programs compile with few optimisations: for files whose programs run once or twice."""
  import jax

  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def mesh_of():
  """Mesh of data x expert x tensor devices, by their numbers."""
  from scmoe.parallel.mesh import MeshConfig, make_mesh

  return lambda data=1, expert=1, tensor=1: make_mesh(MeshConfig(data, expert, tensor))


@pytest.fixture(scope="session")
def mesh1(mesh_of):
  """One device."""
  return mesh_of()


@pytest.fixture(scope="session")
def mesh8(mesh_of):
  """Eight devices, data 2 x expert 4."""
  return mesh_of(2, 4)
