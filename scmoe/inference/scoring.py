"""Log-likelihoods of given continuations, as benchmarks of language models need them.

As in generation, experts have room for every token, so a text's score does not depend on the other
texts of the batch.
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
from scmoe.parallel.mesh import BATCH_AXES, make_mesh, manual, parameter_specs

_SHORTEST = 16  # tokens to which rows are padded at least


class Continuation(NamedTuple):
  """A context and its continuation, whose likelihood is computed.

  Attributes:
    tokens: ids of the context, then of the continuation.
    asked: number of tokens of the continuation; less than all, since the first has no context.
  """

  tokens: Sequence[int]
  asked: int


class Score(NamedTuple):
  """The score of a continuation.

  Attributes:
    log_likelihood: natural logarithm of its probability.
    greedy: whether every one of its tokens is the most probable one.
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
  """The score of every continuation, in their order.

  If context and continuation are longer than `length`, the beginning of the context is left out. A
  continuation of more than `length` tokens is read in several windows (`windows`).

  Args:
    model: a trained model.
    continuations: the continuations, each with its context.
    length: tokens that are read at a time, at most the model's context.
    batch_size: windows at a time, a multiple of the devices that share a batch.
    mesh: where the model lies; None: one device.
    router: router state of the training run (balancing biases), if it has any.
    prepare: makes a program of a jitted function (`scmoe.run.programs`); None: jit does.

  Raises:
    ConfigError: nothing is asked for, ids are outside the vocabulary, or more than the context is
      to be read at a time.
  """
  if not 1 <= length <= model.config.context:
    raise ConfigError(f"length {length} is not 1 to model.context={model.config.context}")
  mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
  parts = mesh.size // mesh.shape["tensor"]
  batch_size = -(-batch_size // parts) * parts
  asked = [
    (number, window)
    for number, continuation in enumerate(continuations)
    for window in windows(_checked(continuation, model.config.vocab_size), length)
  ]
  asked.sort(key=lambda item: -len(item[1].tokens))  # rows of similar length share a batch
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
  """Pieces that ask for every token once, each with at most `length` tokens to read.

  A piece asks for `length` tokens, the last one for the rest, with as much context as fits.
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
      f"{asked} of {len(tokens)} tokens cannot be asked for; 1 to all but the first"
    )
  if not 0 <= min(tokens) <= max(tokens) < vocabulary:
    raise ConfigError(f"token {max(tokens)} is not in the vocabulary of {vocabulary}")
  return continuation


def _rows(asked: list[Continuation], batch_size: int, length: int) -> tuple[np.ndarray, ...]:
  """inputs, targets int32[B, S], mask bool[B, S] and weights float32[B, S] of these windows."""
  longest = max(len(tokens) for tokens, _ in asked) - 1
  # Few lengths to compile for: powers of two, and the longest there is.
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
  """Jitted: (params, router, inputs, targets, mask, weights) -> log-likelihood, wrong guesses.

  Both float32 [B], of the tokens with weight 1.
  """

  def local(params, router, inputs_BS, targets_BS, mask_BS, weights_BS):
    model: GPT = nnx.merge(graph, params)
    positions_BS = jnp.broadcast_to(jnp.arange(inputs_BS.shape[1]), inputs_BS.shape)
    out = model(inputs_BS, Pass(positions_BS, mask_BS=mask_BS, no_drop=True, router=router))
    nats_BS, correct_BS = model.embedding.token_losses(out.h_BSD, targets_BS)
    return -(nats_BS * weights_BS).sum(1), ((1 - correct_BS) * weights_BS).sum(1)

  def program(params, router, *arrays):
    rows = P(BATCH_AXES)
    specs = (parameter_specs(params), P(), *[rows] * len(arrays))
    return manual(local, mesh, specs, (rows, rows))(params, router, *arrays)

  return jax.jit(program)
