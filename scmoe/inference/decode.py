"""Generation with a key-value cache, for a batch of prompts of different lengths.

Prompts are padded on the right, and prefill writes keys and values of the padding into the cache
too. No token of the text attends to them: a new token first overwrites those at its own position.
Example: after a prompt of 5 tokens, padded to 16, the positions 5 to 15 hold padding. The first new
token overwrites position 5 and attends to no position after it. The experts run with `no_drop`: no
transport of this project drops a row's token because of the other rows of the batch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from scmoe.base.errors import ConfigError
from scmoe.base.options import check_type, check_whole
from scmoe.inference.offload.model import Offload, Usage, expert_cache_specs, expert_caches
from scmoe.inference.sampling import Sampling, end_tokens, sample
from scmoe.inference.token import for_one_token
from scmoe.models.gpt import GPT, Pass
from scmoe.models.stacked import Apart, is_apart
from scmoe.moe.experts import ExpertSource, OnDevice
from scmoe.offload.cache import HOLDERS
from scmoe.parallel.mesh import TOKEN_AXES, make_mesh, manual, parameter_specs
from scmoe.parallel.sequence import whole_rows

# The type of a function from a jitted function to one with the same arguments, such as
# `scmoe.run.programs.Programs`. The result may read its compiled programs from the disk.
Prepare = Callable[[Any], Any]


def generate(
  model: GPT,
  prompts: list[list[int]],
  sampling: Sampling = Sampling(),
  *,
  max_new_tokens: int,
  seed: int = 0,
  eos_id: int | Collection[int] | None = None,
  router: Any = None,
  mesh: Mesh | None = None,
  prepare: Prepare | None = None,
  offload: Offload = Offload(),
  usage: Usage | None = None,
  deterministic: bool = False,
) -> list[list[int]]:
  """Continues every prompt, and returns all new tokens at once; `stream` yields them as they come.

  Args:
    model, prompts, sampling, max_new_tokens, seed, eos_id, router, mesh, prepare, offload, usage,
    deterministic: see `stream`.

  Returns:
    The new tokens of each prompt, without the prompt and without an end token.

  Raises:
    ConfigError: see `stream`.
  """
  options = {"seed": seed, "eos_id": eos_id, "router": router, "mesh": mesh, "prepare": prepare}
  options |= {"offload": offload, "usage": usage, "deterministic": deterministic}
  pieces = stream(
    model, prompts, sampling, max_new_tokens=max_new_tokens, chunk=max_new_tokens, **options
  )
  return [list(itertools.chain(*row)) for row in zip(*pieces)]


def stream(
  model: GPT,
  prompts: list[list[int]],
  sampling: Sampling = Sampling(),
  *,
  max_new_tokens: int,
  chunk: int = 8,
  seed: int = 0,
  eos_id: int | Collection[int] | None = None,
  router: Any = None,
  mesh: Mesh | None = None,
  prepare: Prepare | None = None,
  offload: Offload = Offload(),
  usage: Usage | None = None,
  deterministic: bool = False,
) -> Iterator[list[list[int]]]:
  """Continues every prompt: yields each one's first new token, then up to `chunk` more at a time.

  The stream ends when all prompts have ended, or after `max_new_tokens` tokens. If the number of
  prompts does not divide evenly over the devices that share the batch (all axes but `tensor`),
  copies of the last prompt fill the batch; their tokens are not returned.

  Args:
    model: a trained model.
    prompts: the token ids of each prompt, at least one id.
    sampling: how tokens are drawn. The noise of the draws does not depend on `chunk`.
    max_new_tokens: number of tokens to add to a prompt that draws no end token.
    chunk: number of tokens that the device adds to each row before the host reads them; clipped to
      [1, max(1, `max_new_tokens` - 1)].
    seed: seed of the sampling.
    eos_id: an end token, or several; None: no token ends a prompt. A prompt ends when it draws an
      end token, which is not returned.
    router: the training run's router state (balancing biases), if it has any.
    mesh: the devices of this process that hold the model; None: jax's first device.
    prepare: turns a jitted function into a program (`scmoe.run.programs`); None calls it as it is.
    offload: how experts reach the device. With `Migration`s it needs a model of
      `scmoe.inference.offload.model.offloaded`; without them, as by default, one whose experts are
      on the device.
    usage: an object that records the requests to the cache of experts; None: nothing is recorded.
    deterministic: whether XLA sums every product on a GPU in one order, in every process and for
      every `offload`; see `Static`.

  Yields:
    A list of the next tokens for each prompt: only those before an end token if the prompt draws
    one, and empty once it has ended.

  Raises:
    ConfigError: when the first tokens are asked for: `model`, `sampling`, `offload`, `mesh`,
      `eos_id` or a number is of another type, `prompts` is not a list or tuple of lists, tuples or
      1-D NumPy arrays of integers, there is no prompt or an empty one, an id is outside the
      vocabulary, `max_new_tokens` is below 1, prompt and new tokens are longer than the model's
      context, `offload` does not fit the memory that the experts are in, or the model cannot run on
      `mesh`.
  """
  check_type("model", model, GPT)
  check_type("sampling", sampling, Sampling)
  check_type("offload", offload, Offload)
  check_type("max_new_tokens", max_new_tokens, int)
  _check_prompts(model, prompts, max_new_tokens)
  check_whole("chunk", chunk)
  check_whole("seed", seed)
  ends = end_tokens(eos_id)
  if mesh is not None:
    check_type("mesh", mesh, Mesh)
  mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
  asked, parts = len(prompts), mesh.size // mesh.shape["tensor"]
  prompts = [*prompts, *[prompts[-1]] * (-asked % parts)]
  lengths_B = np.array([len(p) for p in prompts], np.int32)
  # XLA compiles a program for each length of the padded batch, so only multiples of 16 are used.
  padded = _round_up(int(lengths_B.max()), 16)
  tokens_BS = np.zeros((len(prompts), padded), np.int32)
  for row, prompt in enumerate(prompts):
    tokens_BS[row, : len(prompt)] = prompt
  graph, params = nnx.split(model)
  static = Static(graph, mesh, sampling, offload.checked(model), deterministic)
  chunk = max(1, min(chunk, max_new_tokens - 1))
  # Every call of the decoding program generates `chunk` tokens, even the last: another number of
  # tokens would need another program. The host drops the last call's surplus tokens; the caches
  # have room for them.
  room, key = padded + 1 + _round_up(max_new_tokens - 1, chunk), jax.random.key(seed)
  in_order = one_by_one(model, static.offload, len(prompts))
  first, rest = make_prefill(static, room), make_decode(static, chunk, in_order)
  if prepare is not None:
    first, rest = prepare(first), prepare(rest)
  given = params, router, lengths_B, key
  token_B, caches = first(*given, tokens_BS)
  if usage is not None and "experts" in caches:
    usage.begin(caches["experts"], offload.policy)
  if max_new_tokens > 1:
    given = taken_apart(static, params), *given[1:]
  new_BS, made, ended = token_B[:, None], 0, [False] * asked
  # The device generates the next tokens while the host reads those before. With `usage` the next
  # program must wait for the host: it overwrites the caches whose counters the host reads.
  ahead = usage is None
  while True:
    count = min(new_BS.shape[1], max_new_tokens - made)
    following = *given, np.int32(made + count), token_B, caches
    is_last = made + count == max_new_tokens
    coming = rest(*following) if ahead and not is_last else None
    pieces = [_until(row.tolist(), ends) for row in np.asarray(new_BS)[:asked, :count]]
    made += count
    yield [[] if over else piece for over, piece in zip(ended, pieces)]
    ended = [over or len(piece) < count for over, piece in zip(ended, pieces)]
    if all(ended) or is_last:
      return
    new_BS, token_B, caches, needed = coming or rest(*following)
    if usage is not None and needed is not None:
      usage.add(needed, caches["experts"])


@dataclasses.dataclass(frozen=True)
class Static:
  """The compile-time constants, besides shapes, that a generation's two programs share.

  The programs are prefill (`make_prefill`) and decoding (`make_decode`), or those of a server
  (`scmoe.inference.serving.programs`), where each request has a `sampling` of its own.

  Attributes:
    graph: the model's structure without its parameters (`nnx.split`).
    mesh: the devices that hold the model.
    sampling: how tokens are drawn.
    offload: how experts reach the devices.
    deterministic: whether greedy tokens on a GPU are the same in every process and for every
      `offload` of the same matrices. By default XLA times several kernels for a product and takes
      the fastest, so processes may take different ones. XLA may also split a product of few rows
      along its contracted dimension, and the kernel that reads the parts adds them in an order of
      its own. With this option decoding takes longer (experiments/LOG.md, 2026-11-26).
  """

  graph: nnx.GraphDef
  mesh: Mesh
  sampling: Sampling
  offload: Offload = Offload()
  deterministic: bool = False

  def compiler_options(self) -> dict[str, Any]:
    """XLA's options for these programs; `deterministic` adds those for one order of sums."""
    return _COMPILED | (_ONE_ORDER if self.deterministic else {})


# The devices divide the batch over all axes of tokens. So each has whole rows, even on the axes
# `SEQUENCE_AXES`, whose devices divide the tokens of a row in training.
_ROWS = P(TOKEN_AXES)
_COMPILED: dict[str, Any] = {
  # Without excess precision every operation rounds its result to the result's type. With it XLA may
  # keep float32 within a fusion, so the tokens of a bfloat16 model could depend on what XLA fuses.
  # That can change with the batch's size, and with the memory that the experts are in.
  "xla_allow_excess_precision": False,
  # XLA may have eight asynchronous copies in flight, enough for the up, gate and down matrices of a
  # layer's experts. With its default limit of two, XLA waits for the first copy before it starts
  # the third.
  "xla_gpu_experimental_parallel_async_compute_limit": 8,
  # Decoding a token can take hundreds of small kernels in a CUDA graph. In serial order each kernel
  # or copy would wait for the one before it; in this mode it waits only for its operands.
  "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
  # Disables the pass named here, which rewrites a matrix product of one row as a sum of rounded
  # terms. With that pass XLA would write some matrices to memory again, and decoding would round
  # otherwise than prefill, so that both could choose different tokens after the same text.
  "xla_disable_hlo_passes": "dot-strength-reduction",
}

# With these options a GPU has one order of sums: XLA chooses no kernel by its time, and splits no
# matrix product along its contracted dimension.
_ONE_ORDER = {"xla_gpu_autotune_level": 0, "xla_gpu_experimental_force_split_k": 1}


@functools.cache
def make_prefill(static: Static, room: int) -> Any:
  """Makes the jitted program that reads prompts, fills caches and draws each row's first new token.

  Its arguments are (params, router, lengths_B, key, tokens_BS): `lengths_B` are the prompts'
  lengths, `tokens_BS` the padded prompts. It returns the first new tokens, int32 [B], and the
  caches, with those of experts if there are any.

  Args:
    static: see `Static`.
    room: least number of positions of the attention caches (`GPT.init_caches`).
  """
  offload = static.offload
  experts = offload.prefill or OnDevice()

  @whole_rows()
  def local(params, router, lengths_B, key, tokens_BS):
    model: GPT = nnx.merge(static.graph, params)
    caches = model.init_caches(tokens_BS.shape[0], room) | expert_caches(model, offload)
    logits_BV, caches = prefill(model, tokens_BS, lengths_B, caches, router, experts)
    return sample(logits_BV, static.sampling, jax.random.fold_in(key, 0)), caches

  def program(params, router, lengths_B, key, tokens_BS):
    model: GPT = nnx.merge(static.graph, params)
    specs = (parameter_specs(params), P(), _ROWS, P(), _ROWS)
    caches = model.cache_specs() | expert_cache_specs(model, offload)
    function = manual(local, static.mesh, specs, (_ROWS, caches))
    return function(params, router, lengths_B, key, tokens_BS)

  return jax.jit(program, compiler_options=static.compiler_options())


def taken_apart(static: Static, params: Any) -> Any:
  """Splits the pairs' stacked parameters into arrays of each pair, except those of the experts.

  An unrolled loop over pairs reads slices of the stacked parameters, and XLA copies each slice in
  every call. This function copies them once, so decoding is faster. If the model scans over its
  pairs, or its parameters are split already, `params` is returned unchanged.
  """
  leaves, tree = jax.tree.flatten(params)
  cut = _cut(static, tree, tuple((x.shape, x.dtype) for x in leaves))
  if cut is None:
    return params
  which, copies, apart = cut
  parts = iter(copies([x for x, is_cut in zip(leaves, which) if is_cut]))
  return apart.unflatten([next(parts) if is_cut else x for x, is_cut in zip(leaves, which)])


@functools.cache
def _cut(static: Static, tree: Any, kinds: tuple[tuple[Any, Any], ...]) -> Any:
  """The plan of `taken_apart`: (leaves to cut, a program that cuts them, the new tree's form).

  The plan is None if no leaf needs cutting. The first is a list with a bool for each leaf. The
  program returns an `Apart` for each leaf that is cut. The last is the definition of a tree with
  these `Apart`s as leaves. The plan is cached, because merging modules takes milliseconds, and the
  first token of each generation could wait for it.
  """
  params = tree.unflatten([jax.ShapeDtypeStruct(*kind) for kind in kinds])
  pairs = jax.eval_shape(lambda own: nnx.merge(static.graph, own).pairs(), params)
  if pairs is None:
    return None
  model: GPT = nnx.merge(static.graph, params)
  nnx.update(model.stages, pairs)
  wanted, apart = jax.tree.flatten(nnx.split(model)[1], is_leaf=is_apart)
  count = model.config.num_pairs
  copies = jax.jit(lambda stacks: [Apart(tuple(x[i] for i in range(count))) for x in stacks])
  return [is_apart(leaf) for leaf in wanted], copies, apart


# With this option a CUDA graph runs its kernels one after the other. The graph then needs no
# branches, and saves about 10 us of waiting before each branch. But no kernel runs beside another,
# so the option is only for a single row and models that have little to overlap (`one_by_one`).
_ONE_BY_ONE = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}


def one_by_one(model: GPT, offload: Offload, rows: int) -> bool:
  """Whether decoding should run its kernels one after the other, as it has little to overlap.

  This is so for a single row, if all experts are on the device and the model has neither a shortcut
  nor a shared expert.

  Args:
    model: the model.
    offload: how its experts reach the device.
    rows: number of rows of the batch.
  """
  rule = model.config.wiring_rule
  return rows == 1 and offload == Offload() and not (rule.is_shortcut or rule.shared_expert)


@functools.cache
def make_decode(static: Static, steps: int, in_order: bool = False) -> Any:
  """Makes the jitted program that adds `steps` tokens to each row, and updates the caches.

  Its arguments are (params, router, lengths_B, key, made, token_B, caches): `params` are the
  model's, or for speed those of `taken_apart`; `lengths_B` are the prompts' lengths; `made`, int32
  [], is the number of new tokens of each row so far; `token_B` is the last token of each row. It
  returns the new tokens int32 [B, steps], the last token of each row, the caches, and the experts
  that each call of a layer requested, or None without a cache of experts. These are bool [pairs,
  steps · N, E], with N the number of these calls in a pair at each step; on several devices, each
  position on the data and sequence axes has E columns of its own.

  Args:
    static: see `Static`.
    steps: number of tokens to add.
    in_order: whether the GPU runs kernels one after the other; see `one_by_one`.
  """
  offload = static.offload
  experts = offload.decode or OnDevice()

  @whole_rows()
  def local(params, router, lengths_B, key, made, token_B, caches):
    model: GPT = nnx.merge(static.graph, params)
    pairs = model.pairs()

    def step(carry, index):
      token_B, caches = carry
      position_B = lengths_B + index - 1
      logits_BV, caches = decode_step(model, token_B, position_B, caches, router, pairs, experts)
      next_B = sample(logits_BV, static.sampling, jax.random.fold_in(key, index))
      requested = [own.requested_Ne for own in caches["experts"]] if offload.cache_size else None
      return (next_B, caches), (next_B, requested)

    at = made + jnp.arange(steps)
    (token_B, caches), (new_SB, requested) = jax.lax.scan(step, (token_B, caches), at)
    if requested is not None:
      requested = jnp.stack([own.reshape(-1, own.shape[-1]) for own in requested])
    return new_SB.T, token_B, caches, requested

  def program(params, router, lengths_B, key, made, token_B, caches):
    model: GPT = nnx.merge(static.graph, params)
    of_caches = model.cache_specs() | expert_cache_specs(model, offload)
    specs = (parameter_specs(params), P(), _ROWS, P(), P(), _ROWS, of_caches)
    of_requested = P(None, None, HOLDERS)
    function = manual(local, static.mesh, specs, (_ROWS, _ROWS, of_caches, of_requested))
    return function(params, router, lengths_B, key, made, token_B, caches)

  # The caches are donated, so that XLA can update them in place.
  options = static.compiler_options() | (_ONE_BY_ONE if in_order else {})
  return jax.jit(program, donate_argnums=6, compiler_options=options)


def prefill(
  model: GPT,
  tokens_BS: Int[Array, "B S"],
  lengths_B: Int[Array, " B"],
  caches: Any,
  router: Any = None,
  experts: ExpertSource = OnDevice(),
) -> tuple[Float[Array, "B V"], Any]:
  """Runs a model over whole prompts: gives the logits of the first new token, and fills the caches.

  Args:
    model: a model on one device, or this device's part in the manual region (`shard_map`).
    tokens_BS: int32 prompts, padded on the right.
    lengths_B: int32 lengths of the prompts.
    caches: empty attention caches of at least S positions (`GPT.init_caches`), and the caches of
      experts if there are any (`scmoe.inference.offload.model.expert_caches`).
    router: router state (balancing biases), if the model has any.
    experts: where the experts are; see `Pass`.

  Returns:
    float32 logits [B, V] after each prompt's last token, and the caches.
  """
  position_S = jnp.arange(tokens_BS.shape[1])
  # Padding has the positions that follow the prompt's. They can exceed a learned position
  # embedding, whose lookup then takes the last position; no token of the text reads the result.
  positions_BS = jnp.broadcast_to(position_S, tokens_BS.shape)
  mask_BS = position_S < lengths_B[:, None]
  options = {"no_drop": True, "router": router, "experts": experts}
  given = Pass(positions_BS, mask_BS=mask_BS, caches=caches, begins=True, **options)
  out = model(tokens_BS, given)
  last_B1D = jnp.take_along_axis(out.h_BSD, (lengths_B - 1)[:, None, None], 1)
  return model.logits(last_B1D)[:, 0], out.caches


def decode_step(
  model: GPT,
  token_B: Int[Array, " B"],
  position_B: Int[Array, " B"],
  caches: Any,
  router: Any = None,
  pairs: Any = None,
  experts: ExpertSource = OnDevice(),
) -> tuple[Float[Array, "B V"], Any]:
  """Runs a model over one token of each row: the next token's logits, float32 [B, V], and caches.

  If a device has a single row, the classes of `scmoe.inference.token` run it: with their kernels
  where these run and support the model's shapes, types and options, else as the plain model.

  Args:
    model: see `prefill`.
    token_B, position_B: int32, the last token of each row, and its position in that row.
    caches: the caches that `prefill` or an earlier step returned.
    router, experts: see `prefill`.
    pairs: result of `model.pairs()`, which a program that decodes many tokens calls once before its
      loop; None: each pair's parameters are read from the model.
  """
  if token_B.shape[0] == 1:
    model = for_one_token(model)
  options = {"no_drop": True, "router": router, "pairs": pairs, "experts": experts}
  given = Pass(position_B[:, None], caches=caches, **options)
  out = model(token_B[:, None], given)
  return model.logits(out.h_BSD)[:, 0], out.caches


def _check_prompts(model: GPT, prompts: list[list[int]], max_new_tokens: int) -> None:
  config = model.config
  if not _are_lists_of_ids(prompts):
    raise ConfigError(
      f"prompts={_shown(prompts)} must be a list of lists of token ids, one list for each prompt, "
      "e.g. [[1, 2, 3]]"
    )
  if not prompts or not all(len(p) for p in prompts):
    raise ConfigError(
      "prompts: one is empty, or there is none; give at least one prompt, of at least one token"
    )
  if max_new_tokens < 1:
    raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 1")
  for row, prompt in enumerate(prompts):
    wrong = next((t for t in prompt if not 0 <= t < config.vocab_size), None)
    if wrong is not None:
      raise ConfigError(
        f"prompts[{row}] has token {wrong}, outside the vocabulary of {config.vocab_size}; use ids "
        f"from 0 to {config.vocab_size - 1}"
      )
  longest = max(len(p) for p in prompts) + max_new_tokens
  if longest > config.context:
    raise ConfigError(
      f"max_new_tokens={max_new_tokens} after a prompt of {longest - max_new_tokens} tokens "
      f"needs {longest} positions, more than model.context={config.context}; shorten one of them"
    )


def _are_lists_of_ids(prompts: Any) -> bool:
  """Whether prompts are a list or tuple of lists, tuples or 1-D NumPy arrays of integers.

  A bool is no integer here.
  """
  is_list = lambda x: isinstance(x, (list, tuple)) or getattr(x, "ndim", 0) == 1
  is_id = lambda x: isinstance(x, (int, np.integer)) and not isinstance(x, bool)
  return isinstance(prompts, (list, tuple)) and all(
    is_list(prompt) and all(map(is_id, prompt)) for prompt in prompts
  )


def _shown(value: Any) -> str:
  """A value's repr on one line, cut to 60 characters."""
  text = " ".join(repr(value).split())
  return text if len(text) <= 60 else f"{text[:57]}..."


def _round_up(value: int, multiple: int) -> int:
  return -(-value // multiple) * multiple


def _until(tokens: list[int], ends: Collection[int | None]) -> list[int]:
  return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]
