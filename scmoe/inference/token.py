"""Decodes one token at a time, by kernels that fuse neighbouring steps of a block.

For a single row, launching a kernel and waiting for the one before it takes a large part of the
time, so fewer kernels decode faster. `for_one_token` copies a model, with the same parameters and
these classes in place of the plain ones:

    TokenNorm        one kernel computes the norm of the row
    TokenBlock       one kernel computes the attention's norm and its input projections
    TokenAttention   one kernel adds up the projections' partial sums, rotates queries and keys,
                     attends and writes the cache; another computes the output projection
    TokenUnit        leaves the norm before the experts to the gate's kernel; makes XLA write the
                     residual stream once
    TokenMoE         one kernel computes the norm before the experts and the gate's product

Partial sums occur because several thread blocks share the rows of a matrix: each block writes the
sum over its rows, and the kernel that reads the product adds the blocks' sums. Schedule, transports
and experts are those of the plain pair. If no kernel supports a shape, an option or the device, the
plain class computes, as on a CPU (`tests/inference/test_token.py`).

    B  rows: 1                 H  heads of queries               N  width of a head
    S  tokens of a row: 1      K  heads of keys and values       P  partial sums of a product
    D  width                   E  experts
    M  outputs of all input projections, (H + 2 K) N
    T  positions of a cache; in `x_TD` tokens: 1
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from flax import nnx
from jax import Array
from jaxtyping import Float

from scmoe.blocks.unit import Block, Unit
from scmoe.blocks.wiring import Tap
from scmoe.kernels.one_row import attention as kernel
from scmoe.kernels.one_row.attention import PartialAttention, PartialProjections
from scmoe.kernels.one_row.linear import products, sums
from scmoe.kernels.one_row.norm import Normalisation, Normalised, takes
from scmoe.kernels.top_k import GateOutput, PartialLogits, gate_under_norm
from scmoe.layers.attention import Attention, KeyValues
from scmoe.layers.norm import Norm
from scmoe.layers.rope import turns
from scmoe.models.gpt import GPT
from scmoe.moe.gates import Gate, LinearGate
from scmoe.moe.layer import MoE, MoECall, RoutedTokens
from scmoe.parallel.collectives import repeat


def for_one_token(model: GPT) -> GPT:
  """A copy of a model for passes of a single token; its parameters are the arrays of `model`.

  Args:
    model: any model; it is not changed.
  """
  copy = nnx.merge(*nnx.split(model))
  for _, module in nnx.iter_modules(copy):
    # A Token class adds and overrides only methods, so changing the class of an object is safe.
    if (own := _CLASSES.get(type(module))) is not None:
      object.__setattr__(module, "__class__", own)
  return copy


def normalisation_of(norm: Norm) -> Normalisation:
  """The parameters and options of a `Norm` as a `Normalisation`, which the one-row kernels take."""
  bias = None if norm.bias is None else norm.bias[...]
  return Normalisation(norm.scale[...], bias, norm.kind == "layernorm", norm.eps)


class TokenNorm(Norm):
  """A `Norm` of one row: one kernel computes it if it supports the row, else XLA as in `Norm`."""

  def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    if not takes(x):
      return super().__call__(x)
    return Normalised(x, normalisation_of(self)).alone()


class TokenAttention(Attention):
  """An `Attention` of one token, in fewer kernels if they support the attention's options."""

  def partial_sums(self, row: Normalised, positions_BS: Array) -> PartialProjections | None:
    """The token's queries, keys and values as partial sums, for the attention kernel, or None.

    It is None if queries, keys or values have a bias, a norm (before or after the rotation) or
    clipping; if their rotation is interleaved, or turns only a part of each head; or if the kernel
    that would compute the partial sums does not support the widths and the dtype, or does not run
    on this device.
    """
    c = self.config
    biased = any(b is not None for b in (self.query_bias, self.key_bias, self.value_bias))
    normalised = c.qk_norm != "none"
    otherwise = c.rope_theta and (c.rope.interleaved or c.rope.share < 1)
    if biased or normalised or c.clip_qkv or otherwise:
      return None
    weights = [w[...].astype(row.dtype) for w in (self.query, self.key, self.value)]
    row = repeat(row, ("tensor",), "tensor")
    sums_PM = sums(row, [w.reshape(w.shape[0], -1) for w in weights])
    if sums_PM is None:
      return None
    turn_2N = turns(positions_BS[0, 0], c.head_dim, c.rope_theta, c.rope) if c.rope_theta else None
    heads, kv_heads = (w.shape[1] for w in weights[:2])
    return PartialProjections(sums_PM, turn_2N, heads, kv_heads, row.dtype)

  def into_heads(self, x_BSD: Array) -> list[Array]:
    """The products of the token with the query, key and value matrices, before biases are added.

    One kernel computes all three if it supports the sizes and the type and runs on this device,
    else XLA; see `Attention.into_heads`.
    """
    weights = [w[...].astype(x_BSD.dtype) for w in (self.query, self.key, self.value)]
    found = products(x_BSD, [w.reshape(w.shape[0], -1) for w in weights])
    if found is None:
      return super().into_heads(x_BSD)
    return [y.reshape(*y.shape[:-1], *w.shape[1:]) for y, w in zip(found, weights)]

  def out_of_heads(self, y_BSHN: Array) -> Array:
    """The product of the heads' outputs with the output matrix, before a bias is added: [1, 1, D].

    A one-row kernel computes it if it supports the sizes and the type and runs on this device, else
    XLA; see `Attention.out_of_heads`.
    """
    found = self._out_product(y_BSHN.reshape(*y_BSHN.shape[:2], -1))
    return super().out_of_heads(y_BSHN) if found is None else found

  def mix(self, projected: Any, *args: Any, **options: Any) -> Any:
    """`Attention.mix`, which can also begin from partial sums of queries, keys and values.

    Arguments and results are those of `Attention.mix`, but `projected` may be a
    `PartialProjections`, beside a cache without pages. XLA finishes the partial sums
    (`PartialProjections.finished`), and `Attention.mix` computes the rest, if the attention's
    kernel does not support these partial sums or the cache, if the attention has sinks or chunks
    (`AttentionConfig.is_masked`), or if the layer has a `kind`.
    """
    if not isinstance(projected, PartialProjections):
      return super().mix(projected, *args, **options)
    positions_BS, _, cache = args
    plain = not self.config.is_masked and options.get("kind") is None
    if plain and kernel.takes_partial(projected, cache.k_BSHN, cache.v_BSHN):
      return self._mix_partial_sums(projected, positions_BS, cache)
    finished = tuple(x[None, None] for x in projected.finished())
    return super().mix(finished, *args, **options)  # pyright: ignore[reportArgumentType]

  def _mix_partial_sums(
    self, own: PartialProjections, positions_BS: Array, cache: KeyValues
  ) -> tuple[Array, KeyValues]:
    """Writes the token's key and value into the cache, attends, and applies the output projection.

    One kernel does the first two. A second one computes the output projection, if it supports the
    sizes and the type; else XLA does. Returns the attention's output, [1, 1, D], and the cache.
    """
    y, k_TKN, v_TKN = kernel.attend_partial(
      own,
      cache.k_BSHN[0],
      cache.v_BSHN[0],
      positions_BS[0],
      scale=self.config.multiplier or 1 / math.sqrt(own.width),
      window=self.config.window,
    )
    y_BSD = (
      self._out_of_parts(y) if isinstance(y, PartialAttention) else self.out_of_heads(y[None, None])
    )
    return self.over_devices(y_BSD), KeyValues(k_TKN[None], v_TKN[None])

  def _out_of_parts(self, parts: PartialAttention) -> Array:
    """The output projection, [1, 1, D], of attention that several thread blocks have computed.

    Each of them attended over a part of the cache; `parts` holds one result for each part.
    """
    found = self._out_product(parts)
    return super().out_of_heads(parts.joined()[None, None]) if found is None else found[None]

  def _out_product(self, row: Any) -> Array | None:
    weight_HND = self.out[...].astype(row.dtype)
    found = products(row, [weight_HND.reshape(-1, weight_HND.shape[-1])])
    return None if found is None else found[0]


class TokenBlock(Block):
  """A `Block` of one token: one kernel, if it can, computes the norm and the input projections.

  Otherwise each of the two is computed by itself.
  """

  def project(self, h_BSD: Array, positions_BS: Array, **kind: Any) -> Any:
    """Queries, keys and values of the token, as partial sums or as in `Block.project`.

    They are partial sums, a `PartialProjections`, where `TokenAttention.partial_sums` gives them
    and the layer has no `kind`.
    """
    if isinstance(self.attention, TokenAttention) and not kind:
      row = Normalised(h_BSD, normalisation_of(self.norm_attention))
      found = self.attention.partial_sums(row, positions_BS)
      if found is not None:
        return found
    return super().project(h_BSD, positions_BS, **kind)

  def mix(self, h_BSD: Array, projected: Any, *args: Any, **options: Any) -> Any:
    """The residual stream with the attention's output added, and the cache, as `Block.mix`.

    XLA writes the new residual stream to memory once.
    """
    h_BSD, cache = super().mix(h_BSD, projected, *args, **options)
    return _written_once(h_BSD), cache


class TokenUnit(Unit):
  """A `Unit` of one token; it leaves the norm before the experts to the gate's kernel if it can.

  It can if the experts read the current representation, there is no shared expert, and the norm's
  kernel takes the token; see `tapped`. XLA writes the residual stream after a unit with experts to
  memory once.
  """

  def tapped(self, tap: Tap, h_BSD: Array, handed_BSD: Array | None) -> Any:
    """The value that routed experts read, as `Unit.tapped`, or a token still to be normalised.

    If that value is the current representation and there is no shared expert, only the MoE reads
    its norm. Then this method returns a `Normalised`, the token with its norm still to be computed,
    where the norm's kernel supports the token.
    """
    if tap is Tap.CURRENT and self.mix is None and takes(h_BSD):
      return Normalised(h_BSD, normalisation_of(self.blocks[-1].norm_mlp))
    return super().tapped(tap, h_BSD, handed_BSD)

  def add(self, *args: Any) -> Array:
    """The residual stream after the unit, as `Unit.add`; XLA writes it to memory once."""
    return _written_once(super().add(*args))


class TokenMoE(MoE):
  """A `MoE` of one token: one kernel, if it can, computes the token's norm and the gate's product.

  If no kernel supports the gate and the token, or the call has a mask, a random key or an expert to
  avoid, norm and product are computed one after the other.
  """

  def route(
    self, x: Array | Normalised, call: MoECall = MoECall(), gate: Gate | None = None
  ) -> RoutedTokens:
    """Chooses experts as `MoE.route`; x may be a token whose norm is still to be computed."""
    if not isinstance(x, Normalised):
      return super().route(x, call, gate)
    gate = self._gate(call.gate) if gate is None else gate
    plain = call.mask is None and call.key is None and call.avoid_T is None
    sums = _gate_under_norm(x, gate) if plain else None
    if sums is None:
      return super().route(x.alone(), call, gate)
    return super().route(sums.x_TD, call, GateOfSums(sums))


@dataclasses.dataclass(frozen=True)
class GateOfSums:
  """A linear gate of one token whose product is already computed, as partial sums.

  Attributes:
    sums: the normalised token and the partial sums.
  """

  sums: PartialLogits

  def __call__(self, x_TD: Array) -> Array:
    """The token's logits [1, E], from the partial sums; `x_TD` is not read."""
    del x_TD
    return self.sums.sums_PE.sum(0)[None]

  def top_k(self, x_TD: Array, k: int) -> GateOutput:
    """The `GateOutput` with the token's k best experts, from the partial sums; ignores `x_TD`."""
    del x_TD
    return self.sums.top_k(k)


def _gate_under_norm(row: Normalised, gate: Any) -> PartialLogits | None:
  """The normalised token and the partial sums of its logits, from one kernel, or None.

  It is None unless the gate is a `LinearGate`, no subclass of it, which may compute other logits,
  and the kernel takes it and the token and runs here.
  """
  if type(gate) is not LinearGate:
    return None
  return gate_under_norm(row, gate.weight[...], fp32=gate.fp32)


def _written_once(h_BSD: Array) -> Array:
  """Makes XLA write the residual stream to memory once.

  Without this barrier XLA may add up the products' partial sums again in every kernel that reads
  the residual stream.
  """
  return jax.lax.optimization_barrier(h_BSD)


_CLASSES: dict[type, type] = {
  Norm: TokenNorm,
  Attention: TokenAttention,
  Block: TokenBlock,
  Unit: TokenUnit,
  MoE: TokenMoE,
}
