"""Fits the norm of a new shortcut, so that experts read nearly what they read before.

A source model and the model that was made from it (`scmoe.pretrained.upcycle`) have the same
experts, which may read different values. Scale and bias (an RMSNorm has no bias) of the norm before
the new model's experts are fitted by least squares, channel by channel: its output comes as close
as they can bring it to what the same experts read in the source, in the mean of the squares over
all tokens but padding.

Both models run pair by pair, on one device, and the new model's pairs read the source's residual
stream. So nothing that the new model's experts add changes the values that are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from scmoe.base.batch import Batch
from scmoe.blocks.pair import BlockPair
from scmoe.blocks.walk import Context
from scmoe.inference.listening import Listener
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import GPT


class FittedNorm(NamedTuple):
  """The fitted norm of each of L pairs, and how near its output is to what the experts read before.

  Attributes:
    scale_LD: float32.
    bias_LD: float32; None for an RMSNorm.
    copied_L, fitted_L: the distance, with the norm that the new model came with and with the fitted
      one: the mean square of (norm's output - what the source's experts read), over the mean square
      of the latter.
    tokens: number of tokens that were read, without padding.
  """

  scale_LD: Float[np.ndarray, "L D"]
  bias_LD: Float[np.ndarray, "L D"] | None
  copied_L: Float[np.ndarray, " L"]
  fitted_L: Float[np.ndarray, " L"]
  tokens: int


def fit_norms(source: GPT, model: GPT, batches: Iterable[Batch], router: Any = None) -> FittedNorm:
  """Fits the norm before the experts of every pair to what the experts of the source read.

  It returns the fitted norms and leaves both models as they are.

  Args:
    source: the model whose experts `model` has, in the same layers, without dense layers.
    model: the new model, whose pairs have one unit with such a norm (`norm_to_fit`).
    batches: rows of text; padding does not count.
    router: router state of the source; None if it has none.

  Raises:
    AssertionError: there is no batch, a pair of `source` has no experts, or one of `model` no such
      norm.
  """
  sums_of = nnx.jit(_sums)
  total: Any = None
  for batch in batches:
    found = jax.tree.map(
      lambda x: np.asarray(x, np.float64), sums_of(source, model, router or {}, batch)
    )
    total = found if total is None else jax.tree.map(np.add, total, found)
  assert total is not None, "no batch to fit a norm to"
  count, zz, zy = total["count"], total["zz"], total["zy"]
  own: Any = getattr(*_fitted_in(model.stages, model.config))
  centred = own.bias is not None
  z, y = (total["z"] / count, total["y"] / count) if centred else (0.0, 0.0)
  scale_LD = (zy - count * z * y) / np.maximum(zz - count * z * z, 1e-12 * count)
  bias_LD = y - scale_LD * z if centred else np.zeros_like(scale_LD)

  def distance(scale_LD: Any, bias_LD: Any) -> np.ndarray:
    """Σ (scale · z + bias - y)² over tokens and channels, over Σ y²."""
    squares = scale_LD**2 * zz + total["yy"] + count * bias_LD**2
    products = scale_LD * bias_LD * total["z"] - scale_LD * zy - bias_LD * total["y"]
    return (squares + 2 * products).sum(-1) / total["yy"].sum(-1)

  before = np.asarray(own.scale[...]), np.asarray(own.bias[...]) if centred else 0.0
  return FittedNorm(
    scale_LD.astype(np.float32),
    bias_LD.astype(np.float32) if centred else None,
    distance(*before),
    distance(scale_LD, bias_LD),
    int(count),
  )


def norm_to_fit(config: ModelConfig) -> str:
  """Name in a unit of a shortcut's norm that the routed experts alone read; "": there is none."""
  rule = config.wiring_rule
  if rule.norm_mlp_feeds_experts:
    return f"blocks.{config.moe_every - 1}.norm_mlp"
  return "own_norm" if rule.is_shortcut and config.shortcut_norm != "shared" else ""


def _fitted_in(pair: BlockPair, config: ModelConfig) -> tuple[Any, str]:
  """The module of a pair that has the norm of `norm_to_fit`, and the norm's name in it."""
  owner: Any = pair.units[0]
  *owners, name = norm_to_fit(config).split(".")
  assert name
  for part in owners:
    owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
  return owner, name


def _sums(source: GPT, model: GPT, router: Any, batch: Batch) -> dict[str, Array]:
  """Sums over a batch's tokens, [L, D]: z, y, zz, zy and yy; and the number of tokens.

  Padding does not count. z is the new norm's output before scale and bias; y is what the source's
  experts read.
  """
  config, mask_BS = source.config, batch.segment_ids > 0
  h_BSD = source.embedded(batch.inputs, batch.positions)
  segments_BS = batch.segment_ids if config.document_mask else None
  handed: list[Any] = [None, None]
  found: list[dict[str, Array]] = []
  for i in range(config.num_pairs):
    heard: dict[str, Array] = {}
    bias = router.get("bias")
    context = Context(
      batch.positions, segments_BS, mask_BS, bias_E=None if bias is None else bias[i], no_drop=True,
      before=i,
    )  # fmt: skip
    pairs = [_pair(trunk, i) for trunk in (source, model)]
    moe, (owner, name) = pairs[0].moe, _fitted_in(pairs[1], model.config)
    own = getattr(owner, name)
    assert moe is not None
    assert own is not None
    hear_y = lambda _, y, *rest, heard=heard: heard.setdefault("y", y)
    hear_x = lambda _, x, heard=heard: heard.setdefault("x", x)
    # A `Listener` is no nnx module; see `scmoe.inference.listening`.
    object.__setattr__(pairs[0], "moe", Listener(moe, hear_y, "route"))
    object.__setattr__(owner, name, Listener(own, hear_x))
    outs = [pair(h_BSD, context, handed_BSD=own) for pair, own in zip(pairs, handed)]
    h_BSD, handed = outs[0].h_BSD, [out.handed_BSD for out in outs]
    ones = jnp.ones_like(own.scale[...])
    own.scale = nnx.Param(ones)
    if own.bias is not None:
      own.bias = nnx.Param(jnp.zeros_like(ones))
    weights = mask_BS.reshape(-1, 1).astype(jnp.float32)
    flat = lambda x: x.astype(jnp.float32).reshape(-1, x.shape[-1])
    z, y = flat(own(heard["x"].astype(jnp.float32))), flat(heard["y"])
    products = {"z": z, "y": y, "zz": z * z, "zy": z * y, "yy": y * y}
    found.append({name: (value * weights).sum(0) for name, value in products.items()})
  stacked = {name: jnp.stack([sums[name] for sums in found]) for name in found[0]}
  return stacked | {"count": mask_BS.sum()}


def _pair(trunk: GPT, i: int) -> BlockPair:
  """Pair i of a trunk, with its slices of the stacked parameters.

  The model's first pair has the wiring of `BlockPair.as_first` if the model `opens_apart`.
  """
  graph, params = nnx.split(trunk.stages)
  pair: BlockPair = nnx.merge(graph, jax.tree.map(lambda x: x[i], params))
  return pair.as_first() if trunk.config.opens_apart and i == 0 else pair
