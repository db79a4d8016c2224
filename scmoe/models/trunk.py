"""The trunk, a stack of block pairs of one width, which every model of this project has.

A language model has one trunk between its embedding and its head (`scmoe.models.gpt`), a vision
model one trunk for each width (`scmoe.models.vision`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from scmoe.blocks.options import OverlapConfig
from scmoe.blocks.pair import BlockPair
from scmoe.blocks.turns import in_turns
from scmoe.blocks.walk import Context, PairWalk
from scmoe.blocks.wiring import Tap
from scmoe.models.ahead import Split, enter_scan, leave_scan, next_of, sends_ahead
from scmoe.models.config import ModelConfig
from scmoe.models.fetched import elsewhere_in, is_in_host_memory
from scmoe.models.gradient_totals import (
  added_by_layer,
  added_by_scan,
  all_added,
  large_layers_apart,
  ready_in_turn,
)
from scmoe.models.regather import OneAhead
from scmoe.models.rematerialisation import rematerialised
from scmoe.models.stacked import each_layer, is_apart, split_layers, stack_outputs, stacked
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.experts import ExpertSource, OnDevice
from scmoe.moe.losses import init_bias
from scmoe.moe.options import RouterConfig
from scmoe.moe.types import RouterSums
from scmoe.parallel.shares import GATHERED


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pass:
  """The arguments of one forward pass besides its tokens or images.

  Attributes:
    positions_BS: int32 position of each token; 0, 1, ... if None.
    segments_BS: int32 document of each token, used with `model.document_mask`.
    mask_BS: bool, False for padding, which visits no expert and is not counted; None: no padding.
    key: random key of the gates' noise; None: no noise, as outside training.
    router: router state (`Trunk.init_router`), in evaluation too; None or {} if the model has none.
    caches: key-value caches (`Trunk.init_caches`) for decoding, or None.
    begins: whether the caches are empty, and the tokens are the first of their rows, at positions
      0, 1, ...
    pairs: result of `Trunk.pairs()`, called before a loop over tokens; None: the pairs' parameters
      are read from the model.
    no_drop: whether experts have room for every token, so that no choice is dropped.
    remat: what the backward pass recomputes: none (nothing); dots (all but the rows that exchanges
      have delivered, and matrix products without batch dimensions); moe (only the experts'
      activations); full (all but the rows that exchanges have delivered).
    gate: index of the gate that chooses experts, if `router.compat.gates` > 1; may be traced. With
      `router.tasks` an array [B] of indices (`GPT.gates_of`).
    hidden: whether to return the main path after every block.
    gradient_totals: the model's `totals_of_pairs`, `scmoe.models.gradient_totals.GradientTotal`s to
      which the backward pass adds the gradients of the pairs' parameters; None: plain gradients.
    total_of_rows: the `GradientTotal` to which gradients of looked-up embeddings go
      (`scmoe.models.row_gradients`); None: to the table's gradient.
    experts: where the experts are. A source other than the default needs pairs that are
      `Trunk.written_out` and parameters that are `Trunk.taken_apart`.
  """

  positions_BS: Int[Array, "B S"] | None = None
  segments_BS: Int[Array, "B S"] | None = None
  mask_BS: Bool[Array, "B S"] | None = None
  key: Array | None = None
  router: Any = None
  caches: Any = None
  begins: bool = dataclasses.field(default=False, metadata={"static": True})
  pairs: Any = None
  no_drop: bool = dataclasses.field(default=False, metadata={"static": True})
  remat: str = dataclasses.field(default="none", metadata={"static": True})
  gate: int | Array = 0
  hidden: bool = dataclasses.field(default=False, metadata={"static": True})
  gradient_totals: Any = None
  total_of_rows: Any = None
  experts: ExpertSource = dataclasses.field(default=OnDevice(), metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
  """The results of a forward pass.

  Attributes:
    h_BSD: the last hidden state in the compute dtype. A model's is normalised for its head, and a
      language model's also divided by `model.logits_scaling`; a `Trunk`'s is the residual stream.
    sums: router sums per MoE layer over this device's tokens, [layers, ...]; None for the dense
      wiring.
    caches: updated caches, or None.
    hidden_LBSD: the main path after every block, in order; None without `Pass.hidden`.
  """

  h_BSD: Float[Array, "B S D"]
  sums: RouterSums | None
  caches: Any = None
  hidden_LBSD: Float[Array, "L B S D"] | None = None


class Trunk(nnx.Module):
  """Block pairs that follow one wiring, on a residual stream of one width.

  All pairs have the same shape, so their parameters are stacked. One scan runs them, so that
  compile time does not grow with depth; or they are written out one after the other
  (`overlap.unroll`). `model.dense_layers` have a second stack.

  Args:
    config: architecture.
    router, dispatch, overlap: options of routing, transport and schedule.
    rngs: stream `params` for the initial weights.

  Raises:
    ConfigError: options do not fit each other.
  """

  def __init__(
    self,
    config: ModelConfig,
    *,
    router: RouterConfig = RouterConfig(),
    dispatch: DispatchConfig = DispatchConfig(),
    overlap: OverlapConfig = OverlapConfig(),
    rngs: nnx.Rngs,
  ):
    config = config.resolve()
    self.config, self.router = config, router
    self.dispatch, self.overlap = dispatch, overlap
    options = {"router": router, "dispatch": dispatch, "overlap": overlap}
    self.stages = stacked(
      lambda key: BlockPair(config, **options, rngs=nnx.Rngs(params=key)),
      jax.random.split(rngs.params(), config.num_pairs),
    )
    passed, dense = self.stages.passed_on, config.of_dense_layers
    some = len(config.dense_indices)
    self.dense = stacked(
      lambda key: BlockPair(dense, hands_over=passed, rngs=nnx.Rngs(params=key)),
      jax.random.split(jax.random.fold_in(rngs.params(), 1), some),
    ) if some else None  # fmt: skip

  @property
  def written_out(self) -> bool:
    """Whether pairs run one after the other instead of in a scan (`OverlapConfig.writes_out`)."""
    return self.overlap.writes_out(self.config.num_pairs)

  @property
  def taken_apart(self) -> bool:
    """Whether each pair has parameter arrays of its own (`Apart`) instead of slices of stacks."""
    leaves = jax.tree.leaves(nnx.split(self.stages)[1], is_leaf=is_apart)
    return any(map(is_apart, leaves))

  def init_caches(self, batch: int, length: int, dtype: Any = None) -> Any:
    """Empty key-value caches of all attentions of the trunk.

    If pairs are `written_out`, each has a cache of its own, into which XLA writes a token in place.
    A scan over pairs has one array for the caches of all pairs, and copies it.

    Args:
      batch: number of rows; in the manual region those of this device.
      length: least number of positions of the caches; an attention rounds it up where its kernel
        needs it.
      dtype: dtype of keys and values; None: the compute dtype.
    """
    empty = lambda attention: attention.empty_cache(batch, length, dtype or self.config.dtype)
    return self._for_caches(empty, lambda x, layers: jnp.zeros((layers, *x.shape), x.dtype))

  def cache_specs(self) -> Any:
    """PartitionSpecs of the key-value caches, in a tree like that of `init_caches`."""
    return self._for_caches(
      lambda attention: attention.cache_specs(), lambda spec, _: PartitionSpec(None, *spec)
    )

  def _for_caches(self, of: Callable[[Any], Any], stack: Callable[[Any, int], Any]) -> Any:
    """Calls `of` on the attentions of each stack, and arranges the results like `caches` of `Pass`.

    A stack's name leads to nested lists [units][blocks] of results. `stack` gives each of their
    arrays a leading dimension of layers. Only if pairs are written out, "stages" leads to a list
    with one [units][blocks] per pair instead.
    """
    found, config = {}, self.config
    for name, stage in (("stages", self.stages), ("dense", self.dense)):
      if stage is None:
        continue
      own = [[of(block.attention) for block in unit.blocks] for unit in stage.units]
      count = config.num_pairs if name == "stages" else len(config.dense_indices)
      if name == "stages" and self.written_out:
        found[name] = [own] * count
      else:
        found[name] = jax.tree.map(lambda leaf, n=count: stack(leaf, n), own)
    return found

  def pairs(self) -> Any:
    """Parameters of `stages` for a loop over tokens: for each pair arrays of its own.

    The loop would copy every slice of a stack for every token. Only the experts' arrays stay
    stacked, because kernels read slices of them in place. None if a scan runs the pairs, or if the
    parameters are `taken_apart` already.
    """
    if not self.written_out or self.taken_apart:
      return None
    params = nnx.split(self.stages)[1]
    return split_layers(params, self.config.num_pairs, lambda path, _: "experts" in path)

  def init_router(self) -> dict[str, Array]:
    """Router state before the first step; {} if there is none.

    It holds no parameters: `RoutedObjective.update_router` changes it once per optimizer
    step, gradients do not.

    Returns:
      If `router.bias` is on, the arrays of `scmoe.moe.losses.init_bias`, `bias` [layers, E] among
      them; if `router.compat.gates` > 1, `turn`, int32 [], the index of the gate that trains in the
      next step.
    """
    config = self.config
    if not config.wiring_rule.taps:
      return {}
    state = init_bias(config.num_pairs, config.num_experts + config.zero_experts, self.router)
    if self.router.compat.gates > 1:
      state["turn"] = jnp.zeros((), jnp.int32)
    return state

  def totals_of_pairs(self, totals: Any) -> Any:
    """The part of the trunk's gradient totals that belongs to the pairs: `Pass.gradient_totals`."""
    return totals["stages"]

  def lay_out_totals(self, zeros: Any) -> Any:
    """The zeros, with an array of its own for each large layer if pairs are `written_out`.

    Args:
      zeros: the totals of the trunk's gradients, in a tree like its parameters.
    """
    if not self.written_out:
      return zeros
    return {**zeros, "stages": large_layers_apart(zeros["stages"], self.config.num_pairs)}


class Leg(NamedTuple):
  """The input of one trunk for several batches: a `Route` yields it to `run_trunks`.

  Attributes:
    trunks: one per batch, with the same parameters, so that each batch has gradients of its own.
    starts: the residual stream [B, S, D] of each batch before the first pair.
    contexts: one per batch, without keys, bias and kept experts: each pair gets its own of these.
    given: one per batch. Key, gate, pairs and caches are each batch's own; router, remat, begins
      and gradient_totals of the first one hold for all batches.
  """

  trunks: Sequence[Trunk]
  starts: Sequence[Array]
  contexts: Sequence[Context]
  given: Sequence[Pass]


# A model's way through its trunks, as a generator. It yields a `Leg` for each trunk, is sent the
# trunk's `Output` for each batch, and returns the model's `Output` for each batch. The code before,
# between and after its yields is embedding, mergers and the last norm.
Route = Generator[Leg, list[Output], list[Output]]


def run_trunks(route: Route) -> list[Output]:
  """Runs several batches through a model; in each pair they take turns (`in_turns`).

  With two batches or more, one computes while the rows of another travel to their experts.

  Args:
    route: a model's way through its trunks, e.g. from `scmoe.models.gpt.route`.

  Returns:
    The model's `Output` for each batch, as the route returns it.

  Raises:
    ConfigError: `Pass.remat` is unknown, or what the route raises.
  """
  outs: Any = None
  while True:
    try:
      trunks, starts, contexts, given = route.send(outs)
    except StopIteration as end:
      return end.value
    model, shared = trunks[0], given[0]
    config, rule, router = model.config, model.config.wiring_rule, shared.router or {}
    experts = contexts[0].experts
    shape = (config.num_pairs, rule.units_per_moe, len(rule.taps))
    keys = [
      None if one.key is None or not rule.taps else jax.random.split(one.key, shape)
      for one in given
    ]
    passes_on = model.stages.passed_on is not None
    streams = [(h_BSD, jnp.zeros_like(h_BSD) if passes_on else None, None) for h_BSD in starts]
    graph = nnx.split(model.stages)[0]
    params = [g.pairs or nnx.split(own.stages)[1] for own, g in zip(trunks, given)]

    def stage(carry, xs, graph=graph, contexts=contexts, split: Split | None = None, opens=False):
      read, (caches, kept, keys, bias_E), following = xs
      before, values, turn = carry  # the number of pairs before this one
      if split is None:
        copies, totals = read
        (params, turn), nexts = ready_in_turn(copies, totals, turn), [None] * len(contexts)
      else:
        params, nexts, turn = split.params(read, following, graph, contexts, turn)
      walks = []
      for own, then, (h_BSD, handed_BSD, begun), context, key, cache, own_kept in zip(
        params, nexts, values, contexts, keys, caches, kept
      ):
        pair: BlockPair = nnx.merge(graph, own)
        pair = pair.as_first() if opens else pair
        if handed_BSD is not None:
          # No pair hands a value over to the first pair, whose experts read the pair's own input.
          start_BSD = pair.units[0].hand_over(Tap.BLOCK_INPUT, h_BSD)
          handed_BSD = jnp.where(before == 0, start_BSD, handed_BSD)
        here = dataclasses.replace(context, keys=key, bias_E=bias_E, kept=own_kept, before=before)
        walks.append(PairWalk(pair, h_BSD, here, handed_BSD, cache, begun=begun, following=then))
      for run, step in in_turns(walks):
        run(step)
      outs = [walk.output for walk in walks]
      new = [(out.h_BSD, None if out.begun else out.handed_BSD, out.begun) for out in outs]
      return (before + 1, new, turn), [
        (out.sums, out.caches, out.hidden and jnp.stack(out.hidden), out.kept) for out in outs
      ]

    shares = elsewhere_in(params[0])
    fetches = any(map(is_in_host_memory, shares))
    kept = () if not shares or shares[0].how.again else (GATHERED,)
    remat: dict[str, Any] = {"remat": shared.remat, "kept": kept, "gathers": bool(shares)}
    body = rematerialised(stage, **remat)
    carry, totals = (jnp.zeros((), jnp.int32), streams, None), shared.gradient_totals
    stored = lambda name, given=given: [
      None if g.caches is None else g.caches.get(name) for g in given
    ]
    caches, kept, others = stored("stages"), stored("experts"), (keys, router.get("bias"))
    runs, per_step = config.runs, model.overlap.pairs_per_step(config.num_pairs)
    absent: list[Any] = [None] * len(trunks)
    split: Any = None
    parts: Any
    begins_next = not fetches and all(g.caches is None for g in given)
    if begins_next and sends_ahead(model.stages, contexts[0], starts[0]):
      split = Split.of(params[0])
      body = rematerialised(functools.partial(stage, split=split), **remat)
    one_ahead = model.written_out and not split and bool(shares)
    one_ahead = one_ahead and shares[0].how.again and shares[0].how.ahead
    one_ahead = one_ahead and (fetches or totals is not None)
    if one_ahead:
      remat = {"remat": shared.remat}  # `OneAhead` gathers
      body = rematerialised(stage, **remat)
    if model.written_out:
      body = jax.jit(body, inline=True)  # so jax traces `body` once, not once a pair
      own_params, own_totals = added_by_layer(params, totals, config.num_pairs)
      of_pairs: list[Any] = each_layer(others, config.num_pairs)
      at_hand = experts.of_pairs(list(own_params), prompts=starts[0].shape[1] > 1)
      parts = split and [split.parts(*both) for both in zip(own_params, own_totals)]
    else:
      parts = split and split.parts(params, totals)
      rest, totals = parts[1] if parts else (params, totals)
      sliced, turn = added_by_scan(totals)
      parts = (parts[0], (rest, sliced)) if parts else (rest, sliced)
      carry = (*carry[:2], turn)
    bodies = {False: body, True: body}  # whether the run begins with the first pair -> its body
    if config.opens_apart:
      bodies[True] = rematerialised(functools.partial(stage, opens=True), **remat)
    if model.dense is not None:
      graph_of_dense = nnx.split(model.dense)[0]
      of_dense = functools.partial(stage, graph=graph_of_dense)
      of_dense = rematerialised(of_dense, shared.remat)
      dense = ([nnx.split(own.dense)[1] for own in trunks], None), (
        stored("dense"), absent, absent, None), None  # fmt: skip
    made: list[
      tuple[bool, Any]
    ] = []  # for every run of layers in order: whether its layers are dense, and its results
    whole = len(runs) == 1
    for run in runs:
      take = lambda tree, run=run, whole=whole: tree if whole else (
        jax.tree.map(lambda x: x[run.start : run.stop], tree))  # fmt: skip
      if run.dense:
        carry, out = jax.lax.scan(of_dense, carry, take(dense))
      elif model.written_out:
        found = []
        own_body = bodies[run.start == 0]
        in_order = OneAhead(own_body, own_totals[run.start : run.stop]) if one_ahead else None
        for i in range(run.start, run.stop):
          at = lambda some, i=i: [c and c[i] for c in some]
          read = parts[i] if parts else (at_hand.take(i), own_totals[i])
          then = (parts[i + 1][0], of_pairs[i + 1]) if parts and i + 1 < run.stop else None
          here = (at(caches), at(kept), *of_pairs[i])
          if in_order is not None:
            made_here = in_order(carry, read[0], here)
          else:
            made_here = own_body(carry, (read, here, then))
          carry, out = at_hand.advance(i, made_here)
          found.append(out)
        out = [_of_pairs(list(of)) for of in zip(*found)]
      else:
        read, own, here = take((parts, caches, others))
        ahead = split and run.stop > run.start + 1
        if ahead:
          carry = enter_scan(carry, split, graph, contexts, read, here)
        xs = read, (own, absent, *here), (next_of((read[0], here)) if ahead else None)
        carry, out = jax.lax.scan(bodies[run.start == 0], carry, xs, unroll=per_step)
        carry = leave_scan(carry) if ahead else carry
      made.append((run.dense, out))
    _, streams, turn = carry
    last = [h_BSD for h_BSD, *_ in streams]
    if turn is not None:
      last = all_added(last, turn, totals)
    outs = [
      Output(h_BSD, *_in_order([(dense, out[i]) for dense, out in made], model.written_out))
      for i, h_BSD in enumerate(last)
    ]


def context_of(
  shared: Pass,
  own: Pass,
  positions_BS: Int[Array, "B S"] | None,
  segments_BS: Int[Array, "B S"] | None = None,
  mask_BS: Bool[Array, "B S"] | None = None,
) -> Context:
  """The `Context` of one batch, whose arguments every pair reads.

  Args:
    shared: the first batch's `Pass`, whose options hold for all batches.
    own: this batch's `Pass`, of which mask and gate are read.
    positions_BS, segments_BS: see `Context`.
    mask_BS: replaces `own.mask_BS`, e.g. for a trunk with fewer tokens; None: `own.mask_BS` holds.
  """
  return Context(
    positions_BS,
    segments_BS,
    own.mask_BS if mask_BS is None else mask_BS,
    gate=own.gate,
    no_drop=shared.no_drop,
    experts=OnDevice(recompute=True) if shared.remat == "moe" else shared.experts,
    begins=shared.begins,
    hidden=shared.hidden,
  )


def _of_pairs(found: list[tuple[Any, ...]]) -> tuple[Any, ...]:
  """Joins the results of pairs that are written out.

  Each result is (sums, caches, hidden states, kept experts). Sums and hidden states are stacked, as
  by a scan. Caches and kept experts become lists with one entry per pair, unlike in a scan.
  """
  sums, caches, hidden, kept = zip(*found)
  each = lambda some: None if some[0] is None else list(some)
  return stack_outputs(sums), each(caches), stack_outputs(hidden), each(kept)


def _in_order(
  made: list[tuple[bool, Any]], written_out: bool
) -> tuple[RouterSums | None, Any, Array | None]:
  """(sums of all pairs; caches and hidden states of all layers), from the results of each run.

  Args:
    made: for each run in order: whether its layers are dense, and its results, joined over layers.
    written_out: whether the caches of pairs are lists, one entry per pair.
  """
  join = lambda parts: parts[0] if len(parts) == 1 else (
    jax.tree.map(lambda *some: jnp.concatenate(some), *parts))  # fmt: skip
  pairs, dense = ([out for kind, out in made if kind is wanted] for wanted in (False, True))
  sums, caches = join([out[0] for out in pairs]), [out[1] for out in pairs]
  if written_out and caches[0] is not None:
    caches = list(itertools.chain(*caches))
  else:
    caches = join(caches)
  if caches is not None:
    caches = {"stages": caches}
    if (kept := [out[3] for out in pairs])[0] is not None:
      caches["experts"] = list(itertools.chain(*kept))
    if dense:
      caches["dense"] = join([out[1] for out in dense])
  hidden = [x if x is None else x.reshape(-1, *x.shape[2:]) for x in (out[2] for _, out in made)]
  return sums, caches, join(hidden)
