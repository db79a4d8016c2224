"""ViT-MoE and Swin-MoE: image classifiers made of the same block pairs as the language models.

B  images    S  pixels on a side, then tokens of an image    C  channels
D  width     V  classes
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from scmoe.base.errors import ConfigError
from scmoe.base.options import check_array, check_type
from scmoe.blocks.options import OverlapConfig
from scmoe.models.config import ModelConfig
from scmoe.models.trunk import Leg, Output, Pass, Route, Trunk, context_of, run_trunks
from scmoe.models.vision.stages import check_stages, stages_of
from scmoe.models.vision.stem import PatchMerging, Stem, linear, normal
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.losses import init_bias
from scmoe.moe.options import RouterConfig
from scmoe.moe.types import RouterSums


class VisionModel(nnx.Module):
  """An image classifier: stem, trunks with mergers between them, norm, mean over tokens, head.

  A ViT (V-MoE, arXiv 2106.05974) has one trunk, whose attention sees the whole image; a Swin
  (Swin-MoE, arXiv 2206.03382) has a trunk for each stage, whose attention sees windows. Each trunk
  is a `Trunk`: wirings, schedule and MoE are those of the language models. The model computes in
  `config.dtype`; its parameters are made in float32.

  Args:
    config: options of the model; its `architecture` is vit or swin.
    router, dispatch, overlap: options of routing, transport and schedule.
    rngs: stream `params` for the initial weights.

  Raises:
    ConfigError: an argument is of another type, the architecture is one of text, or options do not
      fit each other.
  """

  def __init__(
    self,
    config: ModelConfig,
    *,
    router: RouterConfig = RouterConfig(),
    dispatch: DispatchConfig = DispatchConfig(),
    overlap: OverlapConfig = OverlapConfig(),
    rngs: nnx.Rngs,
  ):
    check_type("config", config, ModelConfig)
    check_type("rngs", rngs, nnx.Rngs)
    if not config.reads_images:
      raise ConfigError(
        f"model.architecture={config.architecture!r} reads text, got VisionModel; use GPT, or "
        "model.architecture=vit or swin"
      )
    config = config.resolve()
    check_stages(config)
    self.config, self.router = config, router
    self.dispatch, self.overlap = dispatch, overlap
    stages = stages_of(config)
    options = {"router": router, "dispatch": dispatch, "overlap": overlap}
    self.embedding = Stem(stages[0], positions=config.architecture == "vit", rngs=rngs)
    self.trunks = nnx.List([Trunk(stage, **options, rngs=rngs) for stage in stages])
    self.mergers = nnx.List([PatchMerging(stage, rngs=rngs) for stage in stages[:-1]])
    self.norm = stages[-1].norm()
    shape = (stages[-1].width, config.vision.classes)
    self.head = normal(rngs, shape, config.init_std, ("embed", None))
    self.head_bias = nnx.Param(jnp.zeros((config.vision.classes,)), axes=(None,))

  def __call__(self, images_BSSC: Array, given: Pass = Pass()) -> Output:
    """Runs the model on images, without the head: for scores pass the result's `h_BSD` to `logits`.

    Args:
      images_BSSC: uint8 pixels, or floats around 0 (`pixels`).
      given: see `Pass`; `mask_BS` is [B, 1], False for images that are padding. With `hidden` the
        result has the main path of the last trunk's blocks.

    Returns:
      `h_BSD`, the normalised tokens of the last trunk, and `sums` of the MoE layers of all trunks.

    Raises:
      ConfigError: an argument is of another type, the images have another shape, or `given.remat`
        is unknown.
    """
    check_type("given", given, Pass)
    return run_trunks(route([self], [images_BSSC], [given]))[0]

  def logits(self, h_BSD: Float[Array, "B S D"]) -> Float[Array, "B V"]:
    """Scores of the classes, float32 (float64 stays), from the mean over an image's tokens.

    Args:
      h_BSD: `Output.h_BSD` of a call.

    Raises:
      ConfigError: `h_BSD` is no array.
    """
    check_array("h_BSD", h_BSD)
    wide = jnp.promote_types(h_BSD.dtype, jnp.float32)
    return linear(h_BSD.astype(wide).mean(1), self.head, self.head_bias)

  def check_images(self, images_BSSC: Array) -> None:
    """Checks that a batch of images has the shape [B, size, size, channels] of `model.vision`.

    Raises:
      ConfigError: it is no array, or has another shape.
    """
    check_array("images_BSSC", images_BSSC)
    vision = self.config.vision
    wanted = (vision.size, vision.size, vision.channels)
    if tuple(images_BSSC.shape[1:]) != wanted:
      raise ConfigError(
        f"the model reads images [batch, {', '.join(map(str, wanted))}], got "
        f"{list(images_BSSC.shape)}; resize them, or set model.vision"
      )

  @property
  def tokens_of_layers(self) -> list[int]:
    """The number of tokens of an image in each MoE layer, in the order of the layers."""
    stages = [stage for stage in stages_of(self.config) if stage.wiring_rule.taps]
    return [stage.tokens for stage in stages for _ in range(stage.num_pairs)]

  @property
  def moe_trunks(self) -> list[Trunk]:
    """The trunks with routed experts, in order."""
    return [trunk for trunk in self.trunks if trunk.config.wiring_rule.taps]

  def init_router(self) -> dict[str, Array]:
    """Router state before the first step, for the MoE layers of all trunks; {} if there is none.

    Returns:
      If `router.bias` is on, the arrays of `scmoe.moe.losses.init_bias`, `bias` [layers, E] among
      them; if `router.compat.gates` > 1, `turn`, int32 [], the index of the gate that trains in the
      next step.
    """
    config = self.config
    layers = sum(trunk.config.num_pairs for trunk in self.moe_trunks)
    if not layers:
      return {}
    state = init_bias(layers, config.num_experts + config.zero_experts, self.router)
    if self.router.compat.gates > 1:
      state["turn"] = jnp.zeros((), jnp.int32)
    return state

  def router_of(self, router: Any) -> list[Any]:
    """The router state of each trunk, from that of the model; {} for a trunk without experts.

    A trunk gets the slices of its own layers from arrays with a dimension of layers, and all other
    arrays whole.

    Args:
      router: state like that of `init_router`, or None.
    """
    found, start = [], 0
    by_layer = ("bias", "error", "error_before")
    for trunk in self.trunks:
      stop = start + (trunk.config.num_pairs if trunk.config.wiring_rule.taps else 0)
      part = {name: x[start:stop] if name in by_layer else x for name, x in (router or {}).items()}
      found.append(part if stop > start else {})
      start = stop
    return found

  def totals_of_pairs(self, totals: Any) -> Any:
    """The parts of the model's gradient totals that belong to pairs: `Pass.gradient_totals`.

    It is a list with one entry for each trunk.
    """
    return [trunk.totals_of_pairs(totals["trunks"][i]) for i, trunk in enumerate(self.trunks)]

  def lay_out_totals(self, zeros: Any) -> Any:
    """The zeros, with an array of its own for each large layer of pairs that are written out.

    Args:
      zeros: the totals of the model's gradients, in a tree like its parameters.
    """
    trunks = {i: trunk.lay_out_totals(zeros["trunks"][i]) for i, trunk in enumerate(self.trunks)}
    return {**zeros, "trunks": trunks}


def route(models: Sequence[VisionModel], batches: Sequence[Array], given: Sequence[Pass]) -> Route:
  """The way of several batches of images: stem, a trunk for each stage, mergers between, norm.

  A generator for `run_trunks`, which returns an `Output` for each batch.

  Args:
    models: one per batch, with the same parameters, so that each batch has gradients of its own.
    batches: images of each batch, as `VisionModel` takes them.
    given: one per batch. Mask, key and gate are each batch's own; router, remat, no_drop, hidden,
      experts and gradient_totals of the first one hold for all batches.

  Raises:
    ConfigError: the images have another shape.
  """
  model, shared = models[0], given[0]
  dtype, streams = jnp.dtype(model.config.dtype), []
  for own, images_BSSC in zip(models, batches):
    own.check_images(images_BSSC)
    with jax.named_scope("embedding"):
      streams.append(own.embedding(pixels(images_BSSC).astype(dtype)))
  sums: list[list[RouterSums]] = [[] for _ in models]
  hidden: list[Any] = [None] * len(models)
  for i, router in enumerate(model.router_of(shared.router)):
    if i:
      with jax.named_scope("merging"):
        streams = [own.mergers[i - 1](h_BSD) for own, h_BSD in zip(models, streams)]
    totals = shared.gradient_totals
    here = [
      dataclasses.replace(
        one,
        key=None if one.key is None else jax.random.fold_in(one.key, i),
        router=router,
        gradient_totals=None if totals is None else totals[i],
      )
      for one in given
    ]
    masks = [
      None if one.mask_BS is None else jnp.broadcast_to(one.mask_BS, h_BSD.shape[:2])
      for one, h_BSD in zip(given, streams)
    ]
    contexts = [context_of(shared, one, None, mask_BS=mask) for one, mask in zip(here, masks)]
    outs = yield Leg([own.trunks[i] for own in models], streams, contexts, here)
    streams, hidden = [out.h_BSD for out in outs], [out.hidden_LBSD for out in outs]
    for found, out in zip(sums, outs):
      found += [] if out.sums is None else [out.sums]
  layers = [
    jax.tree.map(lambda *some: jnp.concatenate(some), *own) if own else None for own in sums
  ]
  return [
    Output(own.norm(h_BSD), of_layers, hidden_LBSD=of_blocks)
    for own, h_BSD, of_layers, of_blocks in zip(models, streams, layers, hidden)
  ]


def pixels(images: Array) -> Array:
  """Maps uint8 pixels, 0 to 255, to float32 from -1 to 1; floats stay as they are."""
  return images if images.dtype != jnp.uint8 else images.astype(jnp.float32) / 127.5 - 1
