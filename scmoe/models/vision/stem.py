"""The stem, from pixels to tokens, and the merger between stages, from four tokens to one.

B  images    S  pixels on a side, then tokens of an image    C  channels
D  width     P  side of a patch
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from scmoe.kernels.wide_sums import plus_bias
from scmoe.layers.group_norm import GroupNormGelu
from scmoe.layers.norm import Norm
from scmoe.models.vision.stages import StageConfig


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, axes: tuple[Any, ...]) -> nnx.Param:
  """A float32 parameter of normally distributed values: mean 0, standard deviation `std`.

  Args:
    rngs: stream `params` for the values.
    shape: shape of the parameter.
    std: standard deviation.
    axes: logical name of each dimension, for sharding; None: not sharded.
  """
  return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def linear(x: Array, weight: Any, bias: Any = None) -> Array:
  """The product x · weight in the dtype of x, plus the bias unless it is None."""
  y = x @ weight[...].astype(x.dtype)
  return plus_bias(y, bias)


class Stem(nnx.Module):
  """Turns images into the tokens of the first stage, in the order of the grid's rows.

  Args:
    config: options of the first stage. `vision.stem` says how: "patch", one product per patch, or
      "conv", convolutions and a product.
    positions: whether a learned position is added to each token (ViT). A Swin has none: its
      attention knows relative positions.
    rngs: stream `params` for the initial weights.
  """

  def __init__(self, config: StageConfig, *, positions: bool, rngs: nnx.Rngs):
    vision, width, std = config.vision, config.width, config.init_std
    self.patch, steps = vision.patch, convolutions(config)
    self.convolutions = nnx.List(
      [Convolution(*step, norm=vision.stem_norm, rngs=rngs) for step in steps]
    )
    read = steps[-1].after if steps else vision.channels * vision.patch**2
    # With std = 1 / sqrt(inputs) a sum over all inputs is about as large as one input.
    self.weight = normal(rngs, (read, width), read**-0.5, (None, "embed"))
    self.bias = nnx.Param(jnp.zeros((width,)), axes=("embed",))
    shape = (config.tokens, width)
    self.positions = normal(rngs, shape, std, (None, "embed")) if positions else None

  def __call__(self, images_BSSC: Float[Array, "B S S C"]) -> Float[Array, "B S D"]:
    """The tokens of images whose pixels are floats, in the images' dtype."""
    x = images_BSSC
    for convolution in self.convolutions:
      x = convolution(x)
    x = x if len(self.convolutions) else patches(x, self.patch)
    x_BSD = linear(x.reshape(x.shape[0], -1, x.shape[-1]), self.weight, self.bias)
    return plus_bias(x_BSD, self.positions)


class ConvolutionStep(NamedTuple):
  """One convolution of the stem: channels of its input and its output, and its stride."""

  before: int
  after: int
  stride: int


def convolutions(config: StageConfig) -> list[ConvolutionStep]:
  """The convolutions of the stem, first to last; [] for a stem without them.

  The side is halved until a token is left of each patch. The channels double with each halving, and
  the last ones are the model's width: for patches of side 4 and D = 384 they are 192 and 384, and
  never fewer than 8. Before each halving `vision.stem_convolutions` - 1 convolutions keep the side;
  with 2 those of the example are 3 -> 192, 192 -> 192 (halves), 192 -> 384, 384 -> 384 (halves).
  """
  vision = config.vision
  halvings = int(math.log2(vision.patch)) if vision.stem == "conv" else 0
  found, before = [], vision.channels
  for i in range(halvings):
    after = max(config.width >> (halvings - 1 - i), 8)
    for left in reversed(range(vision.stem_convolutions)):
      found.append(ConvolutionStep(before, after, 1 if left else 2))
      before = after
  return found


def products(config: StageConfig) -> list[tuple[int, int, int]]:
  """(inputs, outputs, places in an image) of each matrix product of the stem, to count FLOPs."""
  vision, side, found = config.vision, config.vision.size, []
  steps = convolutions(config)
  for step in steps:
    side //= step.stride
    found.append((9 * step.before, step.after, side * side))
  read = steps[-1].after if steps else vision.channels * vision.patch**2
  return [*found, (read, config.width, config.tokens)]


class Convolution(nnx.Module):
  """A 3 x 3 convolution of stride 1 or 2, a norm, and GELU (arXiv 2106.14881).

  That paper's stem has batch norm. Here it is a layer norm over a pixel's channels, or a group norm
  over an image, so that no image depends on the others of its batch, nor on how the batch is
  divided over devices.

  Args:
    before, after: numbers of channels of the input and of the output.
    stride: 1 keeps the side, 2 halves it.
    norm: a word of `model.vision.stem_norm`.
    rngs: stream `params` for the initial weights.
  """

  def __init__(self, before: int, after: int, stride: int, *, norm: str, rngs: nnx.Rngs):
    self.stride = stride
    std = (2 / (9 * before)) ** 0.5
    self.kernel = normal(rngs, (3, 3, before, after), std, (None, None, None, "embed"))
    grouped = norm == "group"
    self.norm = GroupNormGelu(after, 1e-5) if grouped else Norm(after, "layernorm", 1e-5)

  def __call__(self, x_BSSC: Float[Array, "B S S C"]) -> Float[Array, "B S S C"]:
    """[B, S, S, before] -> [B, S / stride, S / stride, after]; outside the image is zero."""
    y = jax.lax.conv_general_dilated(
      x_BSSC,
      self.kernel[...].astype(x_BSSC.dtype),
      window_strides=(self.stride, self.stride),
      padding=((1, 1), (1, 1)),
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return self.norm(y) if isinstance(self.norm, GroupNormGelu) else jax.nn.gelu(self.norm(y))


class PatchMerging(nnx.Module):
  """Merges four neighbouring tokens into one of twice the width, by a norm and a product (Swin).

  Args:
    config: options of the stage before the merger.
    rngs: stream `params` for the initial weights.
  """

  def __init__(self, config: StageConfig, *, rngs: nnx.Rngs):
    self.side, width = config.side, config.width
    self.norm = Norm(4 * width, "layernorm", config.norm_eps)
    std = (4 * width) ** -0.5  # 1 / sqrt(inputs): results are about as large as the norm's
    self.reduce = normal(rngs, (4 * width, 2 * width), std, (None, "embed"))

  def __call__(self, h_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """Merges squares of 2 x 2 tokens: [B, G·G, D] -> [B, G·G/4, 2 D].

    G is the number of tokens on a side of the grid; tokens are in the order of its rows.
    """
    batch, _, width = h_BSD.shape
    four = patches(h_BSD.reshape(batch, self.side, self.side, width), 2)
    return linear(self.norm(four.reshape(batch, -1, 4 * width)), self.reduce)


def patches(x_BSSC: Array, side: int) -> Array:
  """Squares of `side` x `side` pixels as vectors: [B, S, S, C] -> [B, S/side, S/side, side·side·C].

  In a vector the pixels stand row by row, and the channels of a pixel stand together.
  """
  batch, rows, columns, channels = x_BSSC.shape
  x = x_BSSC.reshape(batch, rows // side, side, columns // side, side, channels).swapaxes(2, 3)
  return x.reshape(batch, rows // side, columns // side, side * side * channels)
