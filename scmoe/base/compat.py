"""The differences between jax 0.10 (Python 3.11) and jax 0.11-0.12 (Python >= 3.12), in one place.

Only this module looks up names and defaults that depend on the version of jax or of its NCCL.
"""

from typing import Any

import jax
from jax.experimental import compute_on as _compute_on
from jax.experimental.pallas import mosaic_gpu as plgpu

# (f, compute_type, out_memory_spaces) -> f: compute_on2 in jax 0.10, and compute_on from 0.11.
compute_on: Any = getattr(_compute_on, "compute_on2", None) or _compute_on.compute_on


def jax_version() -> tuple[int, ...]:
  """Version of jax as numbers, so that 0.10 sorts after 0.9."""
  return tuple(int(part) for part in jax.__version__.split(".")[:3])


# Whether a Mosaic GPU kernel that returns arrays may also write into a `jax.Ref`: from jax 0.11.
KERNELS_WRITE_IN_PLACE = jax_version() >= (0, 11)

# NCCL's policy (2.28 and later) of no thread blocks, which leaves an all-to-all to copy engines.
COPY_ENGINE_POLICY = ("NCCL_CTA_POLICY", "2")


def gpu_interpret_params(**options: Any) -> Any:
  """Parameters of GPU interpret mode: public from jax 0.11, private in 0.10."""
  public = getattr(plgpu, "InterpretGPUParams", None)
  if public is not None:
    return public(**options)
  from jax._src.pallas.mosaic_gpu.interpret import params

  return params.InterpretGPUParams(**options)


def load_as(ref: Any, layout: Any) -> Any:
  """Loads in a kernel what lies in any memory, in a layout that its own does not suggest: from jax
  0.11 on without an index."""
  index = () if jax_version() >= (0, 11) else ((),)
  return plgpu.load(ref, *index, layout=layout, optimized=False)
