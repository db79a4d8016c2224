"""A server's programs: one makes the caches, one adds a token to slots, one also reads prompts.

The last two have few shapes: rows without work are masked, visit no routed expert and write to no
page. The last one passes the tokens of slots and prompts through the layers together, so that it
reads their weights once (Sarathi-Serve, arXiv 2403.02310); attention is computed for each apart.
The attention caches are a pool of pages (`scmoe.layers.pages`). On a mesh, every index on the axes
of tokens (`TOKEN_AXES`) is a *part* with its own slots and its own pool; the numbers in a page
table count the pages of the row's own part.

    B  slots of a part      R  rows of a part for pieces of prompts      C  tokens of such a row
    P  pages of a row's table

Outside the manual region the arrays of all parts lie one after the other.
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
from scmoe.layers.pages import PageTable, PageTables, is_cache, with_table
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
    following_RC: int32, the token after each token, for `scores` of `make_turn`; any token where
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
    position_B: int32, position of each slot's last token, which the step reads; 0 if the slot is
      not active.
    active_B: bool, whether the slot adds a token.
    page_BP: int32, the pages of each slot (`PageTable.page_BP`).
  """

  position_B: Any
  active_B: Any
  page_BP: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turn:
  """The input of a turn that reads prompts: a step, perhaps without active slots, and pieces."""

  step: Step
  piece: Piece


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


def page_bytes(static: Static, params: Any, page_tokens: int) -> tuple[int, int]:
  """Bytes that a page takes in all layers together, and those that all caches of experts take.

  Each device of the page's part needs so many.
  """
  model: GPT = nnx.merge(static.graph, params)
  shapes = jax.eval_shape(make_pool(static, 1, page_tokens), params)
  own = lambda x, spec: (
    int(np.prod(NamedSharding(static.mesh, spec).shard_shape(x.shape))) * x.dtype.itemsize
  )
  every = jax.tree.map(own, shapes, _cache_specs(model, static))
  experts = sum(jax.tree.leaves(every.pop("experts", None)))
  return sum(jax.tree.leaves(every)), experts


def tokens_of_a_page(static: Static, params: Any, page_tokens: int) -> int:
  """Number of tokens that a page holds: `page_tokens`, rounded up where a kernel needs it."""
  shapes = jax.eval_shape(make_pool(static, 1, page_tokens), params)
  first = jax.tree.leaves(shapes["stages"], is_leaf=is_cache)[0]
  return jax.tree.leaves(first)[0].shape[1 - first.dimensions]


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

  def local(model, router, caches, token_B, step: Step, draws: Draws):
    ((h_B1D,), caches) = _passed(model, [_rows_of_step(token_B, step)], caches, router, experts)
    drawn = draw(model.logits(h_B1D)[:, 0], draws, needs)
    return caches, jnp.where(step.active_B, drawn.token_B, token_B), drawn

  return _jitted(static, local, results=3)


@functools.cache
def make_turn(static: Static, needs: Needs, scores: bool) -> Any:
  """Makes the jitted program that also reads pieces of prompts; it draws where a prompt ends.

  Its arguments are (params, router, caches, token_B, turn, draws): `draws` says how each of the
  rows draws, on each part those of the B slots before those of the R pieces. It returns four
  values: the caches; `token_B` with the new token of every active slot, and of every slot whose
  prompt is complete now; the `Drawn` of all rows, in the order of `draws`, which means nothing for
  other rows; and the log-probability of the token that follows each token of a piece, float32
  [R, C], or an empty array [R, 0] without `scores`.

  Args:
    static: see `Static`; its `sampling` is not read.
    needs: the parts of drawing that the rows need.
    scores: whether to compute the log-probabilities of the prompts' own tokens.
  """
  experts = static.offload.prefill or OnDevice()

  def local(model, router, caches, token_B, turn: Turn, draws: Draws):
    step, piece = turn.step, turn.piece
    rows = [_rows_of_step(token_B, step), _rows_of_piece(piece)]
    (h_B1D, h_RCD), caches = _passed(model, rows, caches, router, experts)
    last_R = jnp.maximum(piece.count_R - 1, 0)
    last_R1D = jnp.take_along_axis(h_RCD, last_R[:, None, None], 1)
    drawn = draw(model.logits(jnp.concatenate([h_B1D, last_R1D]))[:, 0], draws, needs)
    slots = len(token_B)
    token_B = jnp.where(step.active_B, drawn.token_B[:slots], token_B)
    token_B = token_B.at[piece.slot_R].set(drawn.token_B[slots:], mode="drop")
    nats_RC = jnp.zeros((len(last_R), 0), jnp.float32)
    if scores:
      nats_RC = model.embedding.token_losses(h_RCD, piece.following_RC)[0]
    return caches, token_B, drawn, -nats_RC

  return _jitted(static, local, results=4)


def _jitted(static: Static, local: Any, results: int) -> Any:
  """Jits (params, router, caches, token_B, rows, draws) -> caches and other results, over the mesh.

  Args:
    static: see `Static`.
    local: the same function on each device, of the model in place of its parameters.
    results: number of results. Each but the caches has a leading dimension of rows.
  """

  @whole_rows()
  def with_model(params, *args):
    return local(nnx.merge(static.graph, params), *args)

  def program(params, router, caches, token_B, rows, draws):
    model: GPT = nnx.merge(static.graph, params)
    of_caches = _cache_specs(model, static)
    specs = (parameter_specs(params), P(), of_caches, _ROWS, _ROWS, _ROWS)
    function = manual(with_model, static.mesh, specs, (of_caches, *[_ROWS] * (results - 1)))
    return function(params, router, caches, token_B, rows, draws)

  # The caches are donated, so that XLA can update them in place.
  return jax.jit(program, donate_argnums=2, compiler_options=static.compiler_options())


def _cache_specs(model: GPT, static: Static) -> Any:
  return model.cache_specs() | expert_cache_specs(model, static.offload)


@dataclasses.dataclass(frozen=True)
class _Rows:
  """Rows of one length in a pass.

  Attributes:
    tokens_BS, positions_BS: the new tokens and their positions, int32.
    mask_BS: True for tokens, False for padding after them.
    page_BP: the pages of each row (`PageTable.page_BP`).
  """

  tokens_BS: Array
  positions_BS: Array
  mask_BS: Array
  page_BP: Array

  @property
  def table(self) -> PageTable:
    """The rows' pages, and the position of each row's last token; -1 for a row without one."""
    last_B = self.positions_BS[:, 0] + self.mask_BS.sum(1, dtype=jnp.int32) - 1
    return PageTable(self.page_BP, last_B)


def _rows_of_step(token_B: Array, step: Step) -> _Rows:
  new_B1 = (x[:, None] for x in (token_B, step.position_B, step.active_B))
  return _Rows(*new_B1, page_BP=step.page_BP)


def _rows_of_piece(piece: Piece) -> _Rows:
  at_C = jnp.arange(piece.tokens_RC.shape[1])
  positions_RC, mask_RC = piece.start_R[:, None] + at_C, at_C < piece.count_R[:, None]
  return _Rows(piece.tokens_RC, positions_RC, mask_RC, piece.page_RP)


def _passed(
  model: GPT, groups: list[_Rows], caches: Any, router: Any, experts: ExpertSource
) -> tuple[list[Array], Any]:
  """Runs the model once over the new tokens of all groups of rows.

  Args:
    model: the model.
    groups: the rows; those of a group have equally many tokens.
    caches: the pool, and caches of experts if there are any.
    router, experts: see `Pass`.

  Returns:
    The hidden states of each group, [B, S, D], and the caches with the new keys and values.
  """
  options = {"no_drop": True, "router": router, "experts": experts}
  new = [(rows.tokens_BS, rows.positions_BS, rows.mask_BS) for rows in groups]
  if len(groups) == 1:
    ((tokens, positions, mask),), table = new, groups[0].table
  else:
    flat = (jnp.concatenate([x.reshape(1, -1) for x in of], 1) for of in zip(*new))
    tokens, positions, mask = flat
    widths = tuple(rows.tokens_BS.shape[1] for rows in groups)
    table = PageTables(tuple(rows.table for rows in groups), widths)
  given = Pass(positions, mask_BS=mask, caches=with_table(caches, table), **options)
  out = model(tokens, given)
  found = [out.h_BSD]
  if isinstance(table, PageTables):
    found = [own for _, own in table.groups(out.h_BSD)]
  return found, with_table(out.caches, None)
