"""Cross-entropy of the next token, a chunk of tokens at a time.

The scores of all tokens for a whole vocabulary are the largest array of many models: 8,192 tokens
and a vocabulary of 50,304 make 1.5 GiB in float32, and reading and writing them takes as long as
the products themselves. Here the losses of a chunk of tokens, and in training their gradients, are
computed before the scores of the next chunk are made. So the scores that exist at a time take about
1 GiB at most, however many tokens there are; the weight's gradient is added up in one float32
array.

The gradient of a sum of losses depends on later computation only by one factor. So the forward pass
computes it without that factor and the backward pass multiplies: the scores are computed once and
never kept.

A teacher's scores (`taught_losses`) are computed and used in the same chunks.

If several devices share the vocabulary (Megatron-LM's vocabulary-parallel cross-entropy), three
small collectives a chunk replace a gather of the scores, or seven with a teacher. Devices of the
tensor axis have the same tokens. Data ranks do not: where they partition the vocabulary
(`mesh.embedding`), each reads the hidden states of all ranks' tokens of a chunk, scores its part of
the vocabulary for them, and sums each gradient of a hidden state at the rank that has the token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from scmoe.parallel.collectives import gathered, largest, summed_parts, total
from scmoe.parallel.mesh import TOKEN_AXES, axis_index, axis_size, own_share

CHUNK_SCORES = 2**28  # at most about so many scores in a chunk: 1 GiB in float32
CHUNK_TOKENS = 128  # a chunk has a multiple of so many tokens, unless it has all of them

Axes = tuple[str, ...]
OVER: Axes = ("tensor",)  # mesh axes that divide the vocabulary, unless a caller says otherwise


def scores(h_TD: Float[Array, "T D"], weight: Array, by_token: bool) -> Float[Array, "T v"]:
  """Scores of this device's part of the vocabulary, float32; the products read the inputs' type.

  Args:
    h_TD: last hidden states.
    weight: [v, D] with `by_token`, like an embedding; else [D, v]. Of the type of `h_TD`.
    by_token: which of the two.
  """
  equation = "td,vd->tv" if by_token else "td,dv->tv"
  return jnp.einsum(equation, h_TD, weight, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def token_losses(
  h_TD: Float[Array, "T D"],
  weight: Array,
  targets_T: Int[Array, " T"],
  by_token: bool,
  axes: Axes = OVER,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
  """Cross-entropy in nats, and 1 where the best guess is right: float32 [T] each.

  The first has gradients, as in `summed_losses`; the backward pass computes the scores again.

  Args:
    h_TD, weight, by_token: as in `scores`.
    targets_T: int32 tokens of the whole vocabulary.
    axes: mesh axes that divide the vocabulary, the first varying slowest: ("tensor",), or
      ("tensor", "data"). `h_TD` and `targets_T` are this data rank's tokens in both cases.
  """
  return _token_fwd(h_TD, weight, targets_T, by_token, axes)[0]


def _token_fwd(h_TD, weight, targets_T, by_token, axes):
  def chunk(carry: None, xs: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
    h_CD, targets_C = _of_all_ranks(xs, axes)
    nats_C, correct_C, _ = _losses(scores(h_CD, weight, by_token), targets_C, axes)
    return carry, _of_own_rank((nats_C, correct_C), axes)

  per_token = _own_tokens(weight, by_token) * axis_size(*_apart(axes))
  _, found = _over_chunks(chunk, None, (h_TD, targets_T), per_token)
  return found, (h_TD, weight, targets_T)


def _token_bwd(by_token, axes, kept, bars):
  h_TD, weight, targets_T = kept
  *_, h_bar_TD, weight_bar = _with_gradients(h_TD, weight, targets_T, bars[0], by_token, axes)
  return h_bar_TD, weight_bar.astype(weight.dtype), None


token_losses.defvjp(_token_fwd, _token_bwd)


def summed_losses(
  h_TD: Float[Array, "T D"],
  weight: Array,
  targets_T: Int[Array, " T"],
  weights_T: Float[Array, " T"],
  by_token: bool,
  axes: Axes = OVER,
) -> tuple[Array, Array]:
  """Σ weights · cross-entropy and Σ weights · [the best guess is right]: float32 [] each.

  The first has gradients for `weight` and for `h_TD`; that of `h_TD` comes from this tensor rank's
  part of the vocabulary alone, so pass `h_TD` through `scmoe.parallel.collectives.repeat` before.
  The factor by which the backward pass multiplies these gradients must be the same on all data
  ranks that divide the vocabulary. The second sum has no gradient. Gradients of the scores are
  rounded to the type of `h_TD`; their products are added up in float32.

  Args:
    h_TD, weight, targets_T, by_token, axes: as in `token_losses`.
    weights_T: float32, one for each token; 0: it does not count.
  """
  found: Any = summed_and_each(h_TD, weight, targets_T, weights_T, by_token, axes)
  return found[:2]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def summed_and_each(
  h_TD: Float[Array, "T D"],
  weight: Array,
  targets_T: Int[Array, " T"],
  weights_T: Float[Array, " T"],
  by_token: bool,
  axes: Axes = OVER,
) -> tuple[Array, Array, Float[Array, " T"]]:
  """The sums of `summed_losses`, and each token's cross-entropy: float32 [], [] and [T].

  The third has no gradient. Metrics by kinds of text add it up, without another pass over the
  scores. Arguments are those of `summed_losses`.
  """
  found: Any = token_losses(h_TD, weight, targets_T, by_token, axes)
  nats_T, correct_T = found
  return (nats_T * weights_T).sum(), (correct_T * weights_T).sum(), nats_T


def _summed_fwd(h_TD, weight, targets_T, weights_T, by_token, axes):
  sums, nats_T, h_bar_TD, weight_bar = _with_gradients(
    h_TD, weight, targets_T, weights_T, by_token, axes
  )
  like = jnp.zeros((0,), weight.dtype)  # the type of the gradient; no bytes
  return (*sums, nats_T), (h_bar_TD, weight_bar, like)


def _summed_bwd(by_token, axes, kept, bars):
  h_bar_TD, weight_bar, like = kept
  scale = bars[0]
  times = lambda x, dtype: (x.astype(jnp.float32) * scale).astype(dtype)
  return times(h_bar_TD, h_bar_TD.dtype), times(weight_bar, like.dtype), None, None


summed_and_each.defvjp(_summed_fwd, _summed_bwd)


@dataclasses.dataclass(frozen=True)
class Teaching:
  """How a teacher's scores enter the loss, and the layout of both models' output weights.

  Attributes:
    share: weight of the divergence in the loss, from 0 to 1; the rest is cross-entropy.
    temperature: divides both models' scores before they are compared.
    by_token, teacher_by_token: layout of the student's and the teacher's weight; see `scores`.
    axes: mesh axes that divide the student's vocabulary; see `token_losses`. The tensor axis alone
      divides the teacher's.
  """

  share: float
  temperature: float
  by_token: bool
  teacher_by_token: bool
  axes: Axes = OVER


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def taught_losses(
  student: tuple[Float[Array, "T D"], Array],
  teacher: tuple[Float[Array, "T d"], Array],
  targets_T: Int[Array, " T"],
  weights_T: Float[Array, " T"],
  how: Teaching,
) -> tuple[Array, Array, Array, Array]:
  """The loss of distillation (Hinton et al., arXiv 1503.02531): from text and from a teacher.

  Let q and t be the softmax of the student's and of the teacher's scores over the temperature τ. A
  token's loss is (1 - share) · cross-entropy + share · τ² · KL(t | q). The factor τ² keeps the size
  of the gradient whatever τ is.

  Args:
    student: last hidden states and output weight, as in `summed_losses`.
    teacher: the same of the teacher: any width, the same vocabulary; no gradient.
    targets_T, weights_T: as in `summed_losses`.
    how: static.

  Returns:
    Σ weights · loss, Σ weights · cross-entropy, Σ weights · [the best guess is right], and
    Σ weights · KL, float32 [] each. Only the first has gradients, for `student`, as in
    `summed_losses`.
  """
  return _taught_fwd(student, teacher, targets_T, weights_T, how)[0]


def _taught_fwd(student, teacher, targets_T, weights_T, how):
  (h_TD, weight), (taught_Td, given) = student, teacher
  own, axes = _own_tokens(weight, how.by_token), how.axes
  given = own_share(given, 0 if how.teacher_by_token else 1, *_apart(axes))
  first, heat = _first_token(own, axes), how.temperature
  back, outer = _PRODUCTS[how.by_token]

  def chunk(carry: Any, xs: tuple[Array, ...]) -> tuple[Any, Array]:
    sums, weight_bar = carry
    h_CD, taught_Cd, targets_C, weights_C = _of_all_ranks(xs, axes)
    logits_Cv = scores(h_CD, weight, how.by_token)
    nats_C, correct_C, log_sum_C = _losses(logits_Cv, targets_C, axes)
    wanted_Cv = scores(taught_Cd, given, how.teacher_by_token)
    apart_C, gap_Cv = _divergence(logits_Cv / heat, wanted_Cv / heat, axes)
    here_Cv = jnp.arange(own) == (targets_C - first)[:, None]
    bar_Cv = (1 - how.share) * (jnp.exp(logits_Cv - log_sum_C[:, None]) - here_Cv)
    bar_Cv = ((bar_Cv + how.share * heat * gap_Cv) * weights_C[:, None]).astype(h_CD.dtype)
    h_bar_CD = jnp.einsum(back, bar_Cv, weight)
    pair = (bar_Cv, h_CD) if how.by_token else (h_CD, bar_Cv)
    weight_bar += jnp.einsum(outer, *pair, preferred_element_type=jnp.float32)
    loss_C = (1 - how.share) * nats_C + how.share * heat**2 * apart_C
    summed = [each_C * weights_C for each_C in (loss_C, nats_C, correct_C, apart_C)]
    new = jnp.stack([each_C.sum() for each_C in _of_own_rank(summed, axes)])
    return (sums + new, weight_bar), _at_own_rank(h_bar_CD, axes)

  start = jnp.zeros(4, jnp.float32), jnp.zeros(weight.shape, jnp.float32)
  arrays = (h_TD, taught_Td, targets_T, weights_T)
  per_token = 2 * own * axis_size(*_apart(axes))
  (sums, weight_bar), h_bar_TD = _over_chunks(chunk, start, arrays, per_token)
  like = jnp.zeros((0,), weight.dtype)
  return tuple(sums), (h_bar_TD, weight_bar, like)


def _taught_bwd(how, kept, bars):
  del how
  h_bar_TD, weight_bar, _, _ = _summed_bwd(None, None, kept, bars)
  return (h_bar_TD, weight_bar), None, None, None


taught_losses.defvjp(_taught_fwd, _taught_bwd)


def _divergence(
  logits_Cv: Float[Array, "C v"], wanted_Cv: Float[Array, "C v"], axes: Axes
) -> tuple[Array, Array]:
  """KL(t | q) of each token, and q - t; q is the softmax of `logits_Cv`, t that of `wanted_Cv`."""
  tops = [x.max(-1) for x in (logits_Cv, wanted_Cv)]
  tops = [largest(top_C, axes, _name(axes)) for top_C in tops]
  shifted = [x - top_C[:, None] for x, top_C in zip((logits_Cv, wanted_Cv), tops)]
  powers = total([jnp.exp(x).sum(-1) for x in shifted], axes, _name(axes))
  q_log, t_log = (x - jnp.log(power_C)[:, None] for x, power_C in zip(shifted, powers))
  t_Cv = jnp.exp(t_log)
  return total((t_Cv * (t_log - q_log)).sum(-1), axes, _name(axes)), jnp.exp(q_log) - t_Cv


# `by_token` -> equations of the gradients of h and of the weight.
_PRODUCTS = {True: ("tv,vd->td", "tv,td->vd"), False: ("tv,dv->td", "td,tv->dv")}


def _with_gradients(
  h_TD: Array, weight: Array, targets_T: Array, weights_T: Array, by_token: bool, axes: Axes
) -> tuple[tuple[Array, Array], Array, Array, Array]:
  """(sums of `summed_losses`, each token's loss, gradient of h, float32 gradient of the weight)."""
  own = _own_tokens(weight, by_token)
  first = _first_token(own, axes)
  back, outer = _PRODUCTS[by_token]

  def chunk(carry: Any, xs: tuple[Array, ...]) -> tuple[Any, tuple[Array, Array]]:
    nats, correct, weight_bar = carry
    h_CD, targets_C, weights_C = _of_all_ranks(xs, axes)
    logits_Cv = scores(h_CD, weight, by_token)
    nats_C, correct_C, log_sum_C = _losses(logits_Cv, targets_C, axes)
    here_Cv = jnp.arange(own) == (targets_C - first)[:, None]
    bar_Cv = jnp.exp(logits_Cv - log_sum_C[:, None]) - here_Cv
    bar_Cv = (bar_Cv * weights_C[:, None]).astype(h_CD.dtype)
    h_bar_CD = jnp.einsum(back, bar_Cv, weight)
    pair = (bar_Cv, h_CD) if by_token else (h_CD, bar_Cv)
    weight_bar += jnp.einsum(outer, *pair, preferred_element_type=jnp.float32)
    nats_C, correct_C, weights_C = _of_own_rank((nats_C, correct_C, weights_C), axes)
    sums = nats + (nats_C * weights_C).sum(), correct + (correct_C * weights_C).sum()
    return (*sums, weight_bar), (nats_C, _at_own_rank(h_bar_CD, axes))

  zero = jnp.zeros((), jnp.float32)
  start = zero, zero, jnp.zeros(weight.shape, jnp.float32)
  (nats, correct, weight_bar), (nats_T, h_bar_TD) = _over_chunks(
    chunk, start, (h_TD, targets_T, weights_T), own * axis_size(*_apart(axes))
  )
  return (nats, correct), nats_T, h_bar_TD, weight_bar


def _losses(
  logits_Cv: Float[Array, "C v"], targets_C: Int[Array, " C"], axes: Axes
) -> tuple[Array, Array, Array]:
  """(loss, [the best guess is right], log Σ exp(score)) of each token, float32 [C] each."""
  own, name = logits_Cv.shape[-1], _name(axes)
  first = _first_token(own, axes)
  at = lambda index_C: jnp.take_along_axis(logits_Cv, index_C[:, None], -1)[:, 0]
  best_C, power_C, guess_C = _largest_and_power(logits_Cv)
  guess_C = guess_C.astype(targets_C.dtype)
  top_C = largest(best_C, axes, name)
  power_C = power_C * jnp.exp(best_C - top_C)
  if axis_size(*axes) == 1:
    log_sum_C = jnp.log(power_C) + top_C
    return log_sum_C - at(targets_C), (guess_C == targets_C).astype(jnp.float32), log_sum_C
  index_C = targets_C - first
  here_C = (index_C >= 0) & (index_C < own)
  chosen_C = jnp.where(here_C, at(jnp.clip(index_C, 0, own - 1)), 0)
  power_C, chosen_C = total((power_C, chosen_C), axes, name)
  nowhere = own * axis_size(*axes)
  guess_C = -largest(-jnp.where(best_C == top_C, first + guess_C, nowhere), axes, name)
  log_sum_C = jnp.log(power_C) + top_C
  return log_sum_C - chosen_C, (guess_C == targets_C).astype(jnp.float32), log_sum_C


def _largest_and_power(logits_Cv: Float[Array, "C v"]) -> tuple[Array, Array, Array]:
  """(largest score, Σ exp(score - largest), index of the largest) of each token.

  Among equal scores the first counts, as in arg-max.
  """
  # XLA vectorises exponentials on a CPU, but no reduction of three values at once.
  return jax.lax.platform_dependent(logits_Cv, cpu=_in_two_passes, default=_in_one_pass)


def _in_two_passes(logits_Cv: Array) -> tuple[Array, Array, Array]:
  index_C = logits_Cv.argmax(-1).astype(jnp.int32)
  top_C = jnp.take_along_axis(logits_Cv, index_C[:, None], -1)[:, 0]
  return top_C, jnp.exp(logits_Cv - top_C[:, None]).sum(-1), index_C


def _in_one_pass(logits_Cv: Array) -> tuple[Array, Array, Array]:
  """Online softmax (Milakov & Gimelshein, arXiv 1805.02867): reads the scores, the step's largest
  array, once. When a larger score comes, the sum so far is scaled down."""

  def merged(left, right):
    (top_l, power_l, index_l), (top_r, power_r, index_r) = left, right
    top = jnp.maximum(top_l, top_r)
    less = jnp.exp(jnp.minimum(top_l, top_r) - top)
    power = jnp.where(top_l >= top_r, power_l + power_r * less, power_l * less + power_r)
    first = (top_l > top_r) | ((top_l == top_r) & (index_l < index_r))
    return top, power, jnp.where(first, index_l, index_r)

  index_Cv = jax.lax.broadcasted_iota(jnp.int32, logits_Cv.shape, 1)
  least = jnp.full((), jnp.finfo(logits_Cv.dtype).min, logits_Cv.dtype)
  nothing = least, jnp.zeros_like(least), jnp.int32(logits_Cv.shape[-1])
  each = logits_Cv, jnp.ones_like(logits_Cv), index_Cv
  return jax.lax.reduce(each, nothing, merged, (1,))


def _own_tokens(weight: Array, by_token: bool) -> int:
  return weight.shape[0 if by_token else 1]


def _first_token(own: int, axes: Axes) -> Any:
  """The first token of this device's part of the vocabulary."""
  return axis_index(*axes) * own if axis_size(*axes) > 1 else 0


# -- data ranks that divide the vocabulary ---------------------------------------------------------


def _apart(axes: Axes) -> Axes:
  """Those of the axes on which devices have different tokens."""
  return tuple(axis for axis in axes if axis in TOKEN_AXES)


def _name(axes: Axes) -> str:
  """Name of the collectives over these axes."""
  return "vocabulary" if _apart(axes) else "tensor"


def _of_all_ranks(arrays: Any, axes: Axes) -> Any:
  """A chunk's arrays [C, ...] for the tokens of all data ranks: [ranks · C, ...]."""
  return jax.tree.map(lambda x: gathered(x, 0, _apart(axes), "vocabulary"), arrays)


def _of_own_rank(arrays: Any, axes: Axes) -> Any:
  """The part of this rank's tokens: [ranks · C, ...] -> [C, ...]."""
  return jax.tree.map(lambda x: own_share(x, 0, *_apart(axes)), arrays)


def _at_own_rank(h_bar_CD: Array, axes: Axes) -> Array:
  """The gradients of this rank's tokens, summed over the ranks: [ranks · C, D] -> [C, D]."""
  return summed_parts(h_bar_CD, 0, _apart(axes), "vocabulary")


def _over_chunks(
  chunk: Callable[[Any, Any], tuple[Any, Any]], start: Any, arrays: Any, per_token: int
) -> tuple[Any, Any]:
  """`lax.scan` of a function over chunks of tokens; one call if all tokens fit in one chunk.

  Zeros, tokens of weight 0, fill the last chunk up; the results are cut to the number of tokens.

  Args:
    chunk: (carry, arrays of one chunk) -> (carry, results with an entry for each token).
    start: the first carry.
    arrays: a tree of arrays whose first dimension is the tokens.
    per_token: number of scores that `chunk` makes for each of a device's tokens.
  """
  tokens = len(jax.tree.leaves(arrays)[0])
  count = -(-tokens * per_token // CHUNK_SCORES)
  if count <= 1:  # 0 without tokens
    return chunk(start, arrays)
  size = -(-tokens // (count * CHUNK_TOKENS)) * CHUNK_TOKENS
  count = -(-tokens // size)

  def cut(x: Array) -> Array:
    x = jnp.pad(x, ((0, count * size - tokens), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(count, size, *x.shape[1:])

  carry, made = jax.lax.scan(chunk, start, jax.tree.map(cut, arrays))
  return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], made)
