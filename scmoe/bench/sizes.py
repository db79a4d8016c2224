"""The MoE layer of a model by its sizes, for benchmarks: known shapes, inputs, and the function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.layer import MoE, MoEConfig
from scmoe.moe.options import CompatConfig, RouterConfig

# 7B-256, 7B-1024, 30B-512, 120B-1024 of SonicMoE; OLMoE, Qwen3-30B, Mixtral.
SHAPES = {
  "7B-256": (24576, 1536, 256, 128, 8),
  "7B-1024": (24576, 1536, 1024, 32, 2),
  "30B-512": (32768, 4096, 512, 128, 8),
  "120B-1024": (32768, 4096, 1024, 128, 8),
  "OLMoE": (32768, 2048, 1024, 64, 8),
  "Qwen3-30B": (32768, 2048, 768, 128, 8),
  "Mixtral": (8192, 4096, 14336, 8, 2),
}
# Sizes of released models, with 8,192 tokens. Models with over 64 experts, or experts that one GPU
# cannot hold, have an eighth of their experts here, as on one GPU of eight.
MODELS = {
  "Mixtral-8x22B": (8192, 6144, 16384, 8, 2),
  "DBRX": (8192, 6144, 10752, 16, 4),
  "Phi-3.5-MoE": (8192, 4096, 6400, 16, 2),
  "Qwen3-235B": (8192, 4096, 1536, 16, 8),
  "DeepSeek-V2-Lite": (8192, 2048, 1408, 64, 6),
  "DeepSeek-V3": (8192, 7168, 2048, 32, 8),
  "GPT-OSS-20B": (8192, 2880, 2880, 32, 4),
  "GPT-OSS-120B": (8192, 2880, 2880, 16, 4),
  "GLM-4.5": (8192, 5120, 1536, 20, 8),
  "GLM-4.5-Air": (8192, 4096, 1408, 16, 8),
  "Kimi-K2": (8192, 7168, 2048, 48, 8),
  "Llama-4-Scout": (8192, 5120, 8192, 16, 1),
  "MiniMax-Text-01": (8192, 6144, 9216, 4, 2),
  "Granite-3B": (8192, 1536, 512, 40, 8),
  "JetMoE": (8192, 2048, 5632, 8, 2),
}
KNOWN = SHAPES | MODELS
# For bf16 operands, float32 accumulation, and intermediates rounded to bf16 two or three times.
TOLERANCE = 1e-2


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of one layer: T, D, F, E, K."""

  tokens: int
  width: int
  hidden: int
  experts: int
  top_k: int

  @property
  def flops(self) -> float:
    """Forward FLOPs of a gated layer's experts: 6·T·K·D·F."""
    return 6.0 * self.tokens * self.top_k * self.width * self.hidden

  @property
  def name(self) -> str:
    """The name of a known shape, else the numbers."""
    numbers = dataclasses.astuple(self)
    known = {value: name for name, value in KNOWN.items()}
    return known.get(numbers, ",".join(map(str, numbers)))


def parse_shape(text: str) -> Shape:
  """Parses T,D,F,E,K or the name of a known shape.

  Raises:
    ValueError: the text is neither.
  """
  if text in KNOWN:
    return Shape(*KNOWN[text])
  try:
    numbers = [int(part) for part in text.split(",")]
    return Shape(*numbers)
  except (TypeError, ValueError):
    raise ValueError(f"{text!r} is neither T,D,F,E,K nor one of {', '.join(KNOWN)}") from None


def relative_error(got: jax.Array, want: jax.Array) -> float:
  """‖got − want‖ / ‖want‖ in float32; NaN if anything is NaN."""
  difference = got.astype(jnp.float32) - want.astype(jnp.float32)
  return float(jnp.linalg.norm(difference) / jnp.linalg.norm(want.astype(jnp.float32)))


def normal_arrays(seed: int, dtype=jnp.bfloat16) -> Callable[..., jax.Array]:
  """A function (*shape, scale=1) -> array that draws new standard normal numbers at each call."""
  keys = iter(jax.random.split(jax.random.key(seed), 64))
  return lambda *shape, scale=1.0: jax.random.normal(next(keys), shape, dtype) * scale


class Layer:
  """The model's MoE layer of one shape, as a function of x and its parameters in bfloat16.

  Args:
    shape: its sizes.
    backend: implementation of the grouped products (`model.ffn.backend`).
    fp32_gate: `router.compat.fp32_gate`.
    dispatch: options of the transport.
  """

  def __init__(
    self,
    shape: Shape,
    backend: str = "auto",
    *,
    fp32_gate: bool = True,
    dispatch: DispatchConfig = DispatchConfig(transport="dropless"),
  ):
    s = self.shape = shape
    self.fp32_gate = fp32_gate
    config = MoEConfig(
      s.width,
      s.hidden,
      s.experts,
      s.top_k,
      activation="swiglu",
      backend=backend,
      router=RouterConfig(compat=CompatConfig(fp32_gate=fp32_gate)),
      dispatch=dispatch,
    )
    abstract = nnx.eval_shape(lambda: MoE(config, rngs=nnx.Rngs(0)))
    self.graph, self._params = nnx.split(abstract)

  def shapes(self) -> Any:
    """Shapes and types of the parameters, as `jax.ShapeDtypeStruct`."""
    return self._params

  def params(self, seed: int) -> Any:
    """Random weights, scaled so that activations are of order one.

    The gate is float32 if `fp32_gate`, as in training.
    """
    normal = normal_arrays(seed)

    def leaf(path: Any, p: Any) -> jax.Array:
      gate = self.fp32_gate and "router_gate" in str(path)
      value = normal(*p.shape, scale=p.shape[-2] ** -0.5)
      return value.astype(jnp.float32) if gate else value

    return jax.tree_util.tree_map_with_path(leaf, self._params)

  def inputs(self, seed: int) -> tuple[jax.Array, Any]:
    """(x, parameters)."""
    return normal_arrays(seed + 1)(self.shape.tokens, self.shape.width), self.params(seed)

  def __call__(self, x_TD: jax.Array, params: Any) -> jax.Array:
    """y_TD, without the router's sums for statistics."""
    return nnx.merge(self.graph, params)(x_TD)[0]
