"""Generation with a key-value cache, for a batch of prompts of different lengths.

Prompts are padded on the right. A row's next token overwrites the cache at the row's own length, so
padding is written but never read. Experts have room for every token, so a row's text does not
depend on the other rows of the batch.
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
from scmoe.inference.offload.model import Offload, Usage, expert_cache_specs, expert_caches
from scmoe.inference.sampling import Sampling, sample
from scmoe.inference.token import for_one_token
from scmoe.models.gpt import GPT, Pass
from scmoe.models.stacked import Apart, is_apart
from scmoe.moe.experts import ExpertSource, OnDevice
from scmoe.offload.cache import HOLDERS
from scmoe.parallel.mesh import BATCH_AXES, make_mesh, manual, parameter_specs

# A jitted function -> a program that is called like it.
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
  """Continues every prompt: the tokens of `stream`, made by one program.

  Args:
    model, prompts, sampling, max_new_tokens, seed, eos_id, router, mesh, prepare, offload, usage,
    deterministic: as for `stream`.

  Returns:
    The new tokens of each prompt, without the prompt.

  Raises:
    ConfigError: as `stream`.
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
  """Continues every prompt, token by token as they come: the first of each, then a few at a time.

  Ends when all rows have. Where the mesh splits the batch, the last prompt is repeated until every
  part has one.

  Args:
    model: a trained model.
    prompts: a list of token ids for each prompt, at least one id each.
    sampling: how tokens are drawn; what is drawn does not depend on `chunk`.
    max_new_tokens: tokens to add.
    chunk: tokens that the device makes before the host looks at them.
    seed: of the draws.
    eos_id: a row that draws this token, or one of these, ends before it.
    router: router state of the training run (balancing biases), if it has any.
    mesh: devices of this process on which the model lies; None: one device.
    prepare: makes a program of a jitted function (`scmoe.run.programs`); None: jit does.
    offload: how experts come to the device. Any value but the default needs a model whose experts
      lie in the host's memory (`scmoe.inference.offload.model.offloaded`).
    usage: filled with the requests to the experts' cache.
    deterministic: XLA sums every product of a GPU in one order, in every process and wherever the
      experts lie; see `Static`.

  Yields:
    The next tokens of each prompt; none of one that has ended.

  Raises:
    ConfigError: no or empty prompts, ids outside the vocabulary, or more tokens than the model's
      context holds.
  """
  _check_prompts(model, prompts, max_new_tokens)
  ends = {eos_id} if eos_id is None or isinstance(eos_id, int) else set(eos_id)
  mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
  asked, parts = len(prompts), mesh.size // mesh.shape["tensor"]
  prompts = prompts + [prompts[-1]] * (-asked % parts)
  lengths_B = np.array([len(p) for p in prompts], np.int32)
  padded = _round_up(int(lengths_B.max()), 16)  # few prompt lengths to compile for
  tokens_BS = np.zeros((len(prompts), padded), np.int32)
  for row, prompt in enumerate(prompts):
    tokens_BS[row, : len(prompt)] = prompt
  graph, params = nnx.split(model)
  static = Static(graph, mesh, sampling, offload.checked(model), deterministic)
  chunk = max(1, min(chunk, max_new_tokens - 1))
  # The last chunk is as long as the others, so one program serves all; the caches have room for it.
  room, key = padded + 1 + _round_up(max_new_tokens - 1, chunk), jax.random.key(seed)
  in_order = one_by_one(model, static.offload, len(prompts))
  first, rest = make_prefill(static, room), make_decode(static, chunk, in_order)
  if prepare is not None:
    first, rest = prepare(first), prepare(rest)
  given = params, router, lengths_B, key
  token_B, caches = first(*given, tokens_BS)
  if usage is not None and "experts" in caches:
    usage.begin(caches["experts"])
  if max_new_tokens > 1:
    given = taken_apart(static, params), *given[1:]
  new_BS, made, ended = token_B[:, None], 0, [False] * asked
  # The device makes the next tokens while the host reads the last ones. If the experts' caches are
  # counted it must wait: the next tokens overwrite them.
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
  """Everything that a compiled generation depends on, beside shapes.

  Attributes:
    graph: the model without parameters.
    mesh: the devices.
    sampling: how tokens are drawn.
    offload: how experts come to the devices.
    deterministic: greedy tokens on a GPU are the same in every process and for every way to hold
      experts. By default XLA times several kernels for each product and takes the fastest, so
      processes may take different ones. A product of few rows may also be cut along its contracted
      dimension, and the kernel that reads the parts adds them in an order of its own. Decoding
      takes longer with it (experiments/LOG.md, 2026-11-26).
  """

  graph: nnx.GraphDef
  mesh: Mesh
  sampling: Sampling
  offload: Offload = Offload()
  deterministic: bool = False

  def compiler_options(self) -> dict[str, Any]:
    """XLA's options for the programs of generation."""
    return _COMPILED | (_ONE_ORDER if self.deterministic else {})


_ROWS = P(BATCH_AXES)
_COMPILED: dict[str, Any] = {
  # Every operation rounds to its type. XLA would keep float32 within a fusion, and tokens in bf16
  # would depend on what it fuses: on where the experts are, and on the number of tokens.
  "xla_allow_excess_precision": False,
  # All matrices of a layer's experts may be copied at once. With a limit of two, XLA would wait for
  # the first copy before it begins the third.
  "xla_gpu_experimental_parallel_async_compute_limit": 8,
  # A token is hundreds of small kernels in one CUDA graph. In XLA's order each kernel, and a copy
  # of experts, would wait for the one before it. Here a kernel waits only for its operands.
  "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
  # The products of one row stay products. This pass would make them sums of rounded terms: some
  # matrices would be written to memory again, and tokens would differ from prefill's.
  "xla_disable_hlo_passes": "dot-strength-reduction",
}

# One order of sums: no choice of kernels by their times, and no product cut along its contracted
# dimension.
_ONE_ORDER = {"xla_gpu_autotune_level": 0, "xla_gpu_experimental_force_split_k": 1}


@functools.cache
def make_prefill(static: Static, room: int) -> Any:
  """Jitted: (params, router, lengths_B, key, tokens_BS) -> first new token int32 [B], caches.

  Args:
    static: see `Static`.
    room: positions of the caches.
  """
  offload = static.offload
  experts = offload.prefill or OnDevice()

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
  """The parameters as `make_decode` reads them fastest.

  Layers that are written out read slices of stacked arrays, and XLA copies each slice in every
  call. Here the slices are made once. Parameters of a scan, and experts, stay as they are.
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
  """(which leaves to cut, a program that cuts them, the resulting tree), or None if no leaf has to
  be cut.

  The result is kept: merging modules takes milliseconds, and the first token waits for them.
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


# In XLA's order a CUDA graph needs no branches, each of which begins with 10 us of waiting. Then
# nothing runs beside anything else, so this is only for models that have nothing to overlap.
_ONE_BY_ONE = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}


def one_by_one(model: GPT, offload: Offload, rows: int) -> bool:
  """Whether decoding so many rows has nothing to overlap."""
  rule = model.config.wiring_rule
  return rows == 1 and offload == Offload() and not (rule.is_shortcut or rule.shared_expert)


@functools.cache
def make_decode(static: Static, steps: int, in_order: bool = False) -> Any:
  """Jitted: (params, router, lengths_B, key, made, token_B, caches) -> int32 [B, steps], token_B,
  caches, requested.

  `made` is the number of new tokens so far, int32 [], and `token_B` the last token of each row.
  `requested` is bool [pairs, steps · gatings, E], the experts that each call of a layer requested;
  None without a cache of experts. `params` are the model's, or faster those of `taken_apart`.

  Args:
    static: see `Static`.
    steps: tokens to add behind `token_B`.
    in_order: whether kernels run one after the other in XLA's order; see `one_by_one`.
  """
  offload = static.offload
  experts = offload.decode or OnDevice()

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

  # The caches are donated: the program returns them, and memory holds them once.
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
  """Runs whole prompts and fills the caches.

  Args:
    model: on this device, or in the manual region.
    tokens_BS: int32 prompts, padded on the right.
    lengths_B: int32 lengths of the prompts.
    caches: empty caches of at least S positions (`GPT.init_caches`).
    router: router state (balancing biases), if the model has any.
    experts: where the experts are; see `Pass`.

  Returns:
    float32 logits [B, V] after each prompt's last token, and the caches.
  """
  position_S = jnp.arange(tokens_BS.shape[1])
  # Padding is behind the prompt; it may share the last position of the learned embedding.
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
  """Runs one token per row at its own position: float32 logits [B, V], and the caches.

  Args:
    model: on this device, or in the manual region.
    token_B, position_B: int32 token of each row, and its position.
    caches: filled by `prefill` and by earlier steps.
    router, experts: as for `prefill`.
    pairs: `model.pairs()`, if many tokens follow each other in one program.
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
      "such as [[1, 2, 3]]"
    )
  if not prompts or not all(len(p) for p in prompts):
    raise ConfigError(
      "prompts: one of them is empty, or there is none; give at least one token each"
    )
  if max_new_tokens < 1:
    raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 1")
  for row, prompt in enumerate(prompts):
    wrong = next((t for t in prompt if not 0 <= t < config.vocab_size), None)
    if wrong is not None:
      raise ConfigError(
        f"prompts[{row}] has token {wrong}, the vocabulary has {config.vocab_size}; use ids from 0 "
        f"to {config.vocab_size - 1}"
      )
  longest = max(len(p) for p in prompts) + max_new_tokens
  if longest > config.context:
    raise ConfigError(
      f"max_new_tokens={max_new_tokens} after a prompt of {longest - max_new_tokens} tokens "
      f"needs {longest} positions, model.context={config.context}; shorten one of them"
    )


def _are_lists_of_ids(prompts: Any) -> bool:
  """Whether these are sequences of sequences of integers."""
  is_list = lambda x: isinstance(x, (list, tuple)) or getattr(x, "ndim", 0) == 1
  is_id = lambda x: isinstance(x, (int, np.integer)) and not isinstance(x, bool)
  return isinstance(prompts, (list, tuple)) and all(
    is_list(prompt) and all(map(is_id, prompt)) for prompt in prompts
  )


def _shown(value: Any) -> str:
  """A value in an error's one line."""
  text = " ".join(repr(value).split())
  return text if len(text) <= 60 else f"{text[:57]}..."


def _round_up(value: int, multiple: int) -> int:
  return -(-value // multiple) * multiple


def _until(tokens: list[int], ends: Collection[int | None]) -> list[int]:
  return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]
