"""Scores of given continuations, as benchmarks of language models need them.

A score is the continuation's log-likelihood, and whether greedy decoding would have chosen it. As
in generation, experts have room for every token, so no expert drops a text's token because of the
other texts of the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scmoe.base.errors import ConfigError
from scmoe.models.gpt import GPT, Pass
from scmoe.parallel.mesh import TOKEN_AXES, make_mesh, manual, parameter_specs
from scmoe.parallel.sequence import whole_rows

_SHORTEST = 16  # rows are padded to at least 16 tokens, or to `length` of `score` if that is less


class Continuation(NamedTuple):
  """A text whose last tokens are to be scored: a context and its continuation.

  Attributes:
    tokens: ids of the context, followed by those of the continuation.
    asked: number of tokens of the continuation. At least one token must remain as context, because
      the first token has no prediction.
  """

  tokens: Sequence[int]
  asked: int


class Score(NamedTuple):
  """The score of a continuation.

  Attributes:
    log_likelihood: natural logarithm of the continuation's probability after its context.
    greedy: whether every token of the continuation is the model's most probable one at its place.
  """

  log_likelihood: float
  greedy: bool


def score(
  model: GPT,
  continuations: Sequence[Continuation],
  *,
  length: int,
  batch_size: int = 8,
  mesh: Mesh | None = None,
  router: Any = None,
  prepare: Callable[[Any], Any] | None = None,
) -> list[Score]:
  """Scores every continuation; the results are in the order of `continuations`.

  The model reads context and continuation without the last token, at most `length` tokens in a row.
  If they are more, the tokens scored in a row follow as much of what is before them as fits; a
  continuation of more than `length` tokens is scored in several rows (`windows`).

  Args:
    model: a trained model.
    continuations: the continuations, each with its context.
    length: most tokens that the model reads in one row, at most `model.context`.
    batch_size: windows at a time; rounded up to a multiple of the devices that share a batch (all
      axes but `tensor`).
    mesh: the devices that hold the model; None: jax's first device.
    router: the training run's router state (balancing biases), if it has any.
    prepare: turns a jitted function into a program (`scmoe.run.programs`); None calls it as it is.

  Raises:
    ConfigError: a continuation is empty or has no context, an id is outside the vocabulary,
      `length` is below 1 or larger than the model's context, or `batch_size` is below 1.
  """
  if not 1 <= length <= model.config.context:
    raise ConfigError(f"length={length} must be between 1 and model.context={model.config.context}")
  if batch_size < 1:
    raise ConfigError(f"batch_size={batch_size} must be at least 1")
  mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
  parts = mesh.size // mesh.shape["tensor"]
  batch_size = -(-batch_size // parts) * parts
  asked = [
    (number, window)
    for number, continuation in enumerate(continuations)
    for window in windows(_checked(continuation, model.config.vocab_size), length)
  ]
  # Sorted by length, windows of similar length share a batch, so that rows have less padding.
  asked.sort(key=lambda item: -len(item[1].tokens))
  graph, params = nnx.split(model)
  program = make_scores(graph, mesh)
  if prepare is not None:
    program = prepare(program)
  found = [Score(0.0, True)] * len(continuations)
  for start in range(0, len(asked), batch_size):
    batch = asked[start : start + batch_size]
    arrays = _rows([window for _, window in batch], batch_size, length)
    logs_B, wrong_B = program(params, router, *arrays)
    for (number, _), log, wrong in zip(batch, np.asarray(logs_B), np.asarray(wrong_B)):
      before = found[number]
      found[number] = Score(before.log_likelihood + float(log), before.greedy and not wrong)
  return found


def windows(continuation: Continuation, length: int) -> Iterator[Continuation]:
  """Splits a continuation into windows; each token to be scored is scored in exactly one of them.

  Each window scores `length` tokens (the last window scores the rest), after as much context as
  fits into `length` inputs. A window has one token more than inputs, because the model scores its
  last token but does not read it. Example with `length` 4: the continuation abcdef after the
  context xyz becomes the windows z|abcd and bcd|ef, with the scored tokens behind the bar.
  """
  tokens, asked = continuation
  begin, end = len(tokens) - asked, len(tokens)
  while begin < end:
    stop = min(end, begin + length)
    yield Continuation(tokens[max(0, stop - length - 1) : stop], stop - begin)
    begin = stop


def _checked(continuation: Continuation, vocabulary: int) -> Continuation:
  tokens, asked = continuation
  if not 0 < asked < len(tokens):
    raise ConfigError(
      f"asked={asked} of {len(tokens)} tokens; score at least 1, and all but the first at most"
    )
  if not 0 <= min(tokens) <= max(tokens) < vocabulary:
    raise ConfigError(
      f"tokens from {min(tokens)} to {max(tokens)}; the vocabulary has the ids 0 to "
      f"{vocabulary - 1}"
    )
  return continuation


def _rows(asked: list[Continuation], batch_size: int, length: int) -> tuple[np.ndarray, ...]:
  """A batch of windows as arrays [B, S]: inputs, targets (int32), mask (bool), weights (float32).

  The mask is False for padding, at a row's end and in rows without a window. Weights are 1 for
  targets that are scored, 0 for context and padding.
  """
  longest = max(len(tokens) for tokens, _ in asked) - 1
  # The width is rounded up to a power of two from 16 on, but to at most `length`, so that XLA
  # compiles few programs.
  size = min(length, max(_SHORTEST, 1 << (longest - 1).bit_length()))
  inputs, targets = np.zeros((2, batch_size, size), np.int32)
  mask, weights = np.zeros((batch_size, size), bool), np.zeros((batch_size, size), np.float32)
  for row, (tokens, count) in enumerate(asked):
    end = len(tokens) - 1
    inputs[row, :end], targets[row, :end] = tokens[:-1], tokens[1:]
    mask[row, :end], weights[row, end - count : end] = True, 1
  return inputs, targets, mask, weights


@functools.cache
def make_scores(graph: nnx.GraphDef, mesh: Mesh) -> Any:
  """Makes a jitted (params, router, inputs, targets, mask, weights) -> log-likelihoods, mistakes.

  Both results are float32 [B]: for each row the sum of the log-likelihoods, and the number of
  mistakes, of its targets with weight 1. A mistake is a target that is not the model's most
  probable token.
  """

  @whole_rows()
  def local(params, router, inputs_BS, targets_BS, mask_BS, weights_BS):
    model: GPT = nnx.merge(graph, params)
    positions_BS = jnp.broadcast_to(jnp.arange(inputs_BS.shape[1]), inputs_BS.shape)
    out = model(inputs_BS, Pass(positions_BS, mask_BS=mask_BS, no_drop=True, router=router))
    nats_BS, correct_BS = model.embedding.token_losses(out.h_BSD, targets_BS)
    return -(nats_BS * weights_BS).sum(1), ((1 - correct_BS) * weights_BS).sum(1)

  def program(params, router, *arrays):
    rows = P(TOKEN_AXES)
    specs = (parameter_specs(params), P(), *[rows] * len(arrays))
    return manual(local, mesh, specs, (rows, rows))(params, router, *arrays)

  return jax.jit(program)
