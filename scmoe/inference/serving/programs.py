"""A server's programs: one makes the caches, one reads prompts, one adds a token to active slots.

The last two have fixed shapes: rows without work are masked, visit no expert and write to no page.
The attention caches are a pool of pages (`scmoe.layers.pages`), which both update in place. On a
mesh, every index on the axes of tokens (`TOKEN_AXES`) is a *part* with its own slots and its own
pool; the numbers in a page table count the pages of the row's own part.

    B  slots of a part      R  rows of a piece of a part      C  tokens of a row of a piece
    P  pages of a table
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.inference.decode import Static
from scmoe.inference.offload.model import expert_cache_specs, expert_caches
from scmoe.inference.serving.draw import Draws, Needs, draw
from scmoe.layers.pages import PageTable, is_cache, with_table
from scmoe.models.gpt import GPT, Pass
from scmoe.moe.experts import ExpertSource, OnDevice
from scmoe.parallel.mesh import TOKEN_AXES, manual, parameter_specs
from scmoe.parallel.sequence import whole_rows

_ROWS = P(TOKEN_AXES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Piece:
  """Pieces of prompts, at most one in each row; `count_R` is 0 for a row without one.

  Several rows may hold pieces of one prompt.

  Attributes:
    tokens_RC: int32, padded on the right.
    start_R: int32, position of the piece's first token in its row's text: the prompt and, for a
      request that was put back, its new tokens.
    count_R: int32, number of the piece's tokens.
    slot_R: int32, the slot, counted within its part, whose next token is drawn after the piece. A
      number past the last slot if none is: more pieces of the prompt follow, or the row has none.
    page_RP: int32, the pages of each row (`PageTable.page_BP`).
    following_RC: int32, the token after each token, for `scores` of `make_piece`; any token where
      there is none.
  """

  tokens_RC: Any
  start_R: Any
  count_R: Any
  slot_R: Any
  page_RP: Any
  following_RC: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
  """The input of one step of decoding, by slot, without the slots' last tokens.

  Attributes:
    position_B: int32, position of each slot's last token, which the step reads; 0 for an idle slot.
    active_B: bool, whether the slot adds a token.
    page_BP: int32, the pages of each slot (`PageTable.page_BP`).
  """

  position_B: Any
  active_B: Any
  page_BP: Any


@functools.cache
def make_pool(static: Static, pages: int, page_tokens: int) -> Any:
  """Makes a jitted (params) -> caches: an empty pool, and the caches of experts if there are any.

  Args:
    static: see `Static`.
    pages: pages of each part.
    page_tokens: tokens of a page; rounded up where a kernel needs it (`GPT.init_caches`).
  """

  def local(params):
    model: GPT = nnx.merge(static.graph, params)
    return model.init_caches(pages, page_tokens) | expert_caches(model, static.offload)

  def program(params):
    model: GPT = nnx.merge(static.graph, params)
    return manual(local, static.mesh, (parameter_specs(params),), _cache_specs(model, static))(
      params
    )

  return jax.jit(program)


def page_bytes(static: Static, params: Any, page_tokens: int) -> int:
  """Bytes that one page takes in all layers together, on each device of the page's part."""
  model: GPT = nnx.merge(static.graph, params)
  shapes = jax.eval_shape(make_pool(static, 1, page_tokens), params)
  shapes.pop("experts", None)
  own = lambda x, spec: (
    int(np.prod(NamedSharding(static.mesh, spec).shard_shape(x.shape))) * x.dtype.itemsize
  )
  return sum(jax.tree.leaves(jax.tree.map(own, shapes, model.cache_specs())))


def tokens_of_a_page(static: Static, params: Any, page_tokens: int) -> int:
  """Number of tokens that a page holds: `page_tokens`, rounded up where a kernel needs it."""
  shapes = jax.eval_shape(make_pool(static, 1, page_tokens), params)
  first = jax.tree.leaves(shapes["stages"], is_leaf=is_cache)[0]
  return jax.tree.leaves(first)[0].shape[1 - first.dimensions]


@functools.cache
def make_piece(static: Static, needs: Needs, scores: bool) -> Any:
  """Makes the jitted program that reads pieces of prompts, and draws a token where a prompt ends.

  Its arguments are (params, router, caches, token_B, piece, draws): `token_B` are the slots' last
  tokens, `draws` says how each of the R rows draws. It returns four values: the caches;
  `token_B`, in which a slot whose prompt is complete now has the token drawn after it; the `Drawn`
  of all rows, which means nothing for rows without a slot in `Piece.slot_R`; and the
  log-probability of the token that follows each token, float32 [R, C], or an empty array [R, 0]
  without `scores`.

  Args:
    static: see `Static`; its `sampling` is not read.
    needs: the parts of drawing that the rows need.
    scores: whether to compute the log-probabilities of the prompts' own tokens.
  """
  experts = static.offload.prefill or OnDevice()

  @whole_rows()
  def local(params, router, caches, token_B, piece: Piece, draws: Draws):
    model: GPT = nnx.merge(static.graph, params)
    at_C = jnp.arange(piece.tokens_RC.shape[1])
    mask_RC = at_C < piece.count_R[:, None]
    positions_RC = piece.start_R[:, None] + at_C
    h_RCD, caches = _passed(
      model, piece.tokens_RC, positions_RC, mask_RC, caches, piece.page_RP, router, experts
    )
    last_R = jnp.maximum(piece.count_R - 1, 0)
    last_R1D = jnp.take_along_axis(h_RCD, last_R[:, None, None], 1)
    drawn = draw(model.logits(last_R1D)[:, 0], draws, needs)
    token_B = token_B.at[piece.slot_R].set(drawn.token_B, mode="drop")
    nats_RC = jnp.zeros((len(last_R), 0), jnp.float32)
    if scores:
      nats_RC = model.embedding.token_losses(h_RCD, piece.following_RC)[0]
    return caches, token_B, drawn, -nats_RC

  def program(params, router, caches, token_B, piece, draws):
    model: GPT = nnx.merge(static.graph, params)
    of_caches = _cache_specs(model, static)
    specs = (parameter_specs(params), P(), of_caches, _ROWS, _ROWS, _ROWS)
    function = manual(local, static.mesh, specs, (of_caches, _ROWS, _ROWS, _ROWS))
    return function(params, router, caches, token_B, piece, draws)

  return jax.jit(program, donate_argnums=2, compiler_options=static.compiler_options())


@functools.cache
def make_step(static: Static, needs: Needs) -> Any:
  """Makes the jitted program that adds one token to every active slot.

  Its arguments are (params, router, caches, token_B, step, draws): `token_B` are the last tokens of
  the slots, `draws` says how each slot draws. It returns the caches; the last token of each slot,
  int32 [B], unchanged for slots that are not active; and the `Drawn` of all slots, which means
  nothing for those.

  Args:
    static: see `Static`; its `sampling` is not read.
    needs: the parts of drawing that the slots need.
  """
  experts = static.offload.decode or OnDevice()

  @whole_rows()
  def local(params, router, caches, token_B, step: Step, draws: Draws):
    model: GPT = nnx.merge(static.graph, params)
    h_B1D, caches = _passed(
      model,
      token_B[:, None],
      step.position_B[:, None],
      step.active_B[:, None],
      caches,
      step.page_BP,
      router,
      experts,
    )
    drawn = draw(model.logits(h_B1D)[:, 0], draws, needs)
    return caches, jnp.where(step.active_B, drawn.token_B, token_B), drawn

  def program(params, router, caches, token_B, step, draws):
    model: GPT = nnx.merge(static.graph, params)
    of_caches = _cache_specs(model, static)
    specs = (parameter_specs(params), P(), of_caches, _ROWS, _ROWS, _ROWS)
    function = manual(local, static.mesh, specs, (of_caches, _ROWS, _ROWS))
    return function(params, router, caches, token_B, step, draws)

  return jax.jit(program, donate_argnums=2, compiler_options=static.compiler_options())


def _cache_specs(model: GPT, static: Static) -> Any:
  return model.cache_specs() | expert_cache_specs(model, static.offload)


def _passed(
  model: GPT,
  tokens_BS: Array,
  positions_BS: Array,
  mask_BS: Array,
  caches: Any,
  page_BP: Array,
  router: Any,
  experts: ExpertSource,
) -> tuple[Array, Any]:
  """Runs the model over new tokens: their hidden states, and the caches with their keys and values.

  Args:
    model: the model.
    tokens_BS, positions_BS: the new tokens and their positions.
    mask_BS: True for tokens, False for padding after them.
    caches: the pool, and caches of experts if there are any.
    page_BP: the pages of each row (`PageTable.page_BP`).
    router, experts: see `Pass`.
  """
  options = {"no_drop": True, "router": router, "experts": experts}
  table = PageTable(page_BP, positions_BS[:, 0] + mask_BS.sum(1, dtype=jnp.int32) - 1)
  caches = with_table(caches, table)
  out = model(tokens_BS, Pass(positions_BS, mask_BS=mask_BS, caches=caches, **options))
  return out.h_BSD, with_table(out.caches, None)
