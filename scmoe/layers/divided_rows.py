"""Attention among the tokens of rows that the devices of `mesh.sequence` divide.

Only in attention does a token's result depend on other tokens of its row, which another device may
have; all other layers compute token by token. Attention layers call `attend` of this module, which
is that of `scmoe.layers.dot_product` where each device has whole rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from scmoe.base.errors import ConfigError
from scmoe.layers import dot_product
from scmoe.layers.attention_blocks import Block
from scmoe.layers.dot_product import runs_fused, widened_on_cpu
from scmoe.layers.ring_attention import attend_round
from scmoe.parallel.collectives import gathered
from scmoe.parallel.mesh import axis_size, own_share
from scmoe.parallel.sequence import HEADS, parts


def attend(
  q_BSHN: Float[Array, "B S H N"],
  k_BSKN: Float[Array, "B S K N"],
  v_BSKM: Float[Array, "B S K M"],
  segments_BS: Int[Array, "B S"] | None = None,
  *,
  window: int = 0,
  scale: float | None = None,
  causal: bool = True,
  sinks_H: Float[Array, " H"] | None = None,
  chunk: int = 0,
  full: Bool[Array, ""] | None = None,
) -> Float[Array, "B S H M"]:
  """Softmax attention among the tokens of each whole row, in the type of q.

  Args:
    q_BSHN, k_BSKN, v_BSKM, segments_BS: as for `scmoe.layers.dot_product.attend`, of this device's
      tokens of each row.
    window, scale, causal, sinks_H, chunk, full: as there; a window counts the positions of whole
      rows.

  Raises:
    ConfigError: rows are divided, and attention is not causal, or the devices cannot divide heads,
      or form a ring and attention is in chunks.
  """
  given = {"window": window, "scale": scale, "sinks_H": sinks_H, "chunk": chunk, "full": full}
  if parts() == 1:
    return dot_product.attend(q_BSHN, k_BSKN, v_BSKM, segments_BS, causal=causal, **given)
  if not causal:
    raise ConfigError("attention: causal=False with rows that devices divide; use mesh.sequence=1")
  if axis_size(HEADS) > 1:
    return _by_heads(q_BSHN, k_BSKN, v_BSKM, segments_BS, **given)
  if chunk:  # `RunConfig` refuses such options earlier, before anything is built
    raise ConfigError(f"chunk={chunk} with rows that a ring divides; use sequence_attention=heads")
  half, masked = q_BSHN.shape[1] // 2, segments_BS is not None
  fused = not (masked or window) and q_BSHN.shape[-1] == v_BSKM.shape[-1]
  fused = fused and runs_fused(q_BSHN[:, :half], masked=False)
  block = Block(q_BSHN.shape[-1] ** -0.5 if scale is None else scale, fused)
  seen = None
  if window:
    seen = jnp.int32(window) if full is None else jnp.where(full, q_BSHN.shape[1] * parts(), window)
  q, k, v = map(widened_on_cpu, (q_BSHN, k_BSKN, v_BSKM))
  y: Any = attend_round(q, k, v, sinks_H, segments_BS, seen, block)
  return y.astype(q_BSHN.dtype)


def _by_heads(
  q_BSHN: Array,
  k_BSKN: Array,
  v_BSKM: Array,
  segments_BS: Array | None,
  *,
  sinks_H: Array | None,
  **given: Any,
) -> Array:
  """`attend` with all-to-alls before and after it (DeepSpeed-Ulysses, arXiv 2309.14509).

  With 2 devices, 8 heads of queries, 2 of keys and 16 tokens, each device has 8 tokens of all heads
  before the first all-to-all and after the last, and between them 16 tokens of 4 heads of queries
  and 1 of keys. With fewer heads of keys than devices, several devices get the same head: it is
  repeated before it travels.
  """
  check_heads(q_BSHN.shape[2], k_BSKN.shape[2], parts())
  copies = max(parts() // k_BSKN.shape[2], 1)
  if copies > 1:
    k_BSKN, v_BSKM = (jnp.repeat(x, copies, 2) for x in (k_BSKN, v_BSKM))

  def moved(x: Array, split: int, joined: int) -> Array:
    with jax.named_scope("sequence"):
      return jax.lax.all_to_all(x, HEADS, split, joined, tiled=True)

  q, k, v = (moved(x, 2, 1) for x in (q_BSHN, k_BSKN, v_BSKM))
  if segments_BS is not None:
    segments_BS = gathered(segments_BS, 1, (HEADS,), "sequence")
  sinks_H = None if sinks_H is None else own_share(sinks_H, 0, HEADS)
  y = dot_product.attend(q, k, v, segments_BS, sinks_H=sinks_H, **given)
  return moved(y, 1, 2)


def check_heads(heads: int, kv_heads: int, devices: int) -> None:
  """Checks that `mesh.sequence_attention=heads` can give each device equally many heads.

  Args:
    heads, kv_heads: of queries, and of keys and values, on a device of `mesh.tensor`.
    devices: those that divide a row.

  Raises:
    ConfigError: `heads` is not a multiple of `devices`, or of `kv_heads` and `devices` neither is a
      multiple of the other.
  """
  for what, number in (("num_heads", heads), ("num_kv_heads", kv_heads)):
    if number % devices and (what == "num_heads" or devices % number):
      raise ConfigError(
        f"model.{what}={number} of a tensor rank cannot be divided by mesh.sequence={devices} with "
        "mesh.sequence_attention=heads; use mesh.sequence_attention=ring"
      )
