"""The differences between jax 0.10 (Python 3.11) and jax 0.11-0.12 (Python >= 3.12), in one place.

Only this module looks up names and defaults that depend on the version of jax or of NCCL.
"""

import inspect
from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo as _cudnn
from jax.experimental import compute_on as _compute_on
from jax.experimental.pallas import mosaic_gpu as plgpu

# (f, compute_type, out_memory_spaces) -> f that runs where compute_type says, e.g. on a GPU stream.
# jax 0.10 calls it compute_on2.
compute_on: Any = getattr(_compute_on, "compute_on2", None) or _compute_on.compute_on


def jax_version() -> tuple[int, ...]:
  """The version of jax as numbers: as texts, "0.10" would sort before "0.9"."""
  return tuple(int(part) for part in jax.__version__.split(".")[:3])


# From jax 0.11, a Mosaic GPU kernel that returns arrays may also write into a `jax.Ref`.
KERNELS_WRITE_IN_PLACE = jax_version() >= (0, 11)

# With this setting NCCL (2.28 and later) uses no thread blocks for an all-to-all: the GPU's copy
# engines move the data, and all multiprocessors stay free for other kernels.
COPY_ENGINE_POLICY = ("NCCL_CTA_POLICY", "2")


def gpu_interpret_params(**options: Any) -> Any:
  """Parameters of Pallas' GPU interpret mode: public in jax 0.11, private in 0.10."""
  public = getattr(plgpu, "InterpretGPUParams", None)
  if public is not None:
    return public(**options)
  from jax._src.pallas.mosaic_gpu.interpret import params

  return params.InterpretGPUParams(**options)


def load_as(ref: Any, layout: Any) -> Any:
  """Loads a kernel's reference, in any memory, as registers of the given layout.

  `plgpu.load` has an index argument in jax 0.10 only; here the index is always the whole array.
  """
  index = () if jax_version() >= (0, 11) else ((),)
  return plgpu.load(ref, *index, layout=layout, optimized=False)


def store_into(ref: Any, value: Any) -> None:
  """Stores a value of any size into device memory, inside a kernel.

  From jax 0.12 on `ref[...] = value` refuses to lower unless a warpgroup writes whole cache lines
  of 128 bytes: 32 numbers of float32. A gate with 8 experts has rows of 32 bytes.
  """
  store = getattr(plgpu, "store", None)
  if store is None:
    ref[...] = value
  else:
    store(ref, value, optimized=False)


def compiler_options(traced: Any) -> dict[str, Any]:
  """XLA's options that a `jax.stages.Traced` was given by `jax.jit(..., compiler_options=)`.

  jax shows them nowhere in public (0.10 to 0.12), and refuses a jitted function with such options
  within another one.
  """
  return dict(traced._params["compiler_options_kvs"])


def cudnn_attention(q: Any, k: Any, v: Any, *, scale: float, causal: bool) -> tuple[Any, Any]:
  """(result of cuDNN's fused attention, logarithm of each softmax's denominator), in float32.

  With these logarithms the results over several parts of the keys can be joined. In jax 0.10 to
  0.12 `jax.nn.dot_product_attention` returns them in the type of the queries, too coarse for that.

  Args:
    q, k, v: bfloat16 or float16 [B, S, H, N], [B, T, K, N] and [B, T, K, N].
    scale: factor on the scores.
    causal: query i sees keys 0 to i. False: each query sees all keys.

  Returns:
    [B, S, H, N] and [B, H, S].
  """
  mask = _cudnn.MaskType.CAUSAL if causal else _cudnn.MaskType.NO_MASK
  found: Any = _cudnn.dot_product_attention(
    q, k, v, scale=scale, mask_type=mask, return_residual=True
  )
  return found[0].astype("float32"), found[1]


def cudnn_attention_gradients(
  q: Any, k: Any, v: Any, y: Any, logs: Any, dy: Any, *, scale: float, causal: bool
) -> tuple[Any, Any, Any]:
  """cuDNN's gradients of q, k and v, where k and v may be a part of the keys that q attends to.

  jax's own rule takes the result and the logarithms from its forward pass over k. Here the caller
  gives those over all keys, from which this part's addend to the gradient of q follows.

  Args:
    q, k, v, scale, causal: as of `cudnn_attention`.
    y, logs: result over all keys, in the type of q, and its logarithms, float32 [B, H, S].
    dy: gradient of y, in its type.
  """
  rule: Any = _cudnn._dot_product_attention_bwd_rule
  mask = _cudnn.MaskType.CAUSAL if causal else _cudnn.MaskType.NO_MASK
  absent = q[:0, 0, 0, 0]  # an array without elements: jax's rule gets one for each absent input
  # jax 0.12's rule takes one more argument: a function that changes the scores.
  modified = "score_mod" in inspect.signature(rule).parameters
  kept = (q, k, v, *[absent] * 7, *([()] if modified else []), logs, y)
  how = (scale, 42, 0.0, (False, False), mask, _cudnn.AttentionLayout.BTNH.value, None)
  how += (None,) if modified else ()
  found = rule(*how, _cudnn.check_cudnn_version(), False, kept, dy)
  return tuple(found[:3])
