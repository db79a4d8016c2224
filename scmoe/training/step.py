"""The training state, and one optimizer step: gradients, tests, clipping, update, metrics.

The gradients are those of all microbatches of the step. The tests skip a step whose loss or
gradients are not finite and, if asked for, a spike. The step runs in one manual region
(`jax.shard_map`), except an update that the host computes, and the gather of the parameters' shares
behind it (`HostStep`). This module knows no model, only the protocol `Objective`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.base.batch import Batch
from scmoe.models.fetched import to_fetch
from scmoe.models.gradient_sums import Losses, accumulate
from scmoe.models.stacked import is_apart
from scmoe.parallel.gradients import global_norm
from scmoe.parallel.mesh import BATCH_AXES, batch_sharding, manual, replicated, shardings_of
from scmoe.training import masters, streamed_update
from scmoe.training.filed import is_in_file
from scmoe.training.host_arrays import to_device
from scmoe.training.host_state import divided, in_files, joined, laid_out, made_on_cpu, taken_over
from scmoe.training.host_update import (
  begun_in_files,
  begun_on_host,
  make_host_step,
  without_files,
  without_kept,
)
from scmoe.training.kept import is_kept
from scmoe.training.optimizer import Optimizer
from scmoe.training.share_update import stored_shardings
from scmoe.training.update import Found, kept_if, left_to_host, unchanged, updated

PyTree = Any
Init = Callable[[Array], tuple[PyTree, PyTree]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """The arrays that one training step hands to the next; a run's checkpoints omit `teacher`.

  A skipped step (its loss or the norm of its gradients is not finite, or it is a spike) changes no
  bit of `params`, `opt_state`, `router` and `average`. `step` counts it: the next step reads
  the next batch, and the learning-rate schedule goes on.

  Attributes:
    step: int32 [], optimizer steps done, skipped ones included.
    params: float32 parameters, as arrays or as `Halves` (`scmoe.training.masters`). Here and in
      `opt_state` a stack may be divided into layers (`Apart`), and the host may keep arrays itself
      (`Kept`).
    opt_state: optax's state of the optimizer, such as moments and counters.
    router: router state that gradients do not train, e.g. balancing biases; may be {}.
    rng: uint32, data of a random key. It never changes: each step makes its own key from this one
      and its number.
    skipped: int32 [], skipped steps of the whole run.
    skipped_in_row: int32 [], steps skipped since the last good one, without those whose overflow
      lowers the factor of the loss.
    scale: state of `LossScaling`; None without loss scaling.
    recent: state of `Spikes`; None without a spike test.
    average: moving average of the parameters, float32; None without `optimizer.ema`.
    teacher: arrays that the loss reads and no step changes; checkpoints omit them.
  """

  step: Array
  params: PyTree
  opt_state: PyTree
  router: PyTree
  rng: Array
  skipped: Array
  skipped_in_row: Array
  scale: PyTree = None
  recent: PyTree = None
  average: PyTree = None
  teacher: PyTree = None

  def for_checkpoint(self) -> TrainState:
    """The state as a checkpoint holds it: float32 parameters, stacks whole, no teacher.

    What lies in the host's memory is put together by the host, and the result lies there, too. What
    lies in files stays there: it becomes a `Pieced`, to be read before the next step.
    """
    params = masters.to_float32(joined(self.params))
    return dataclasses.replace(self, params=params, opt_state=joined(self.opt_state), teacher=None)

  def readable(self) -> TrainState:
    """The state with the bfloat16 `high` in place of each parameter that is stored in `Halves`."""
    return dataclasses.replace(self, params=masters.readable(self.params))

  def averaged(self) -> PyTree:
    """The average of the parameters, with the types and shardings of `params`.

    Needs `average`, and `params` without `Halves` (`readable`).
    """
    put = lambda a, p: jax.device_put(a.astype(p.dtype), p.sharding)
    return jax.tree.map(put, self.average, self.params)

  def begun_from(self, params: PyTree, optimizer: Optimizer) -> TrainState:
    """This state with other float32 parameters, and with their copy as average if there is one.

    All else stays, `opt_state` included. `optimizer.average` says whether there is an average.
    """
    average = None if optimizer.average is None else optimizer.average.init(to_device(params))
    return dataclasses.replace(self, params=params, average=average)

  def like(self, abstract: TrainState) -> TrainState:
    """This state, its float32 parameters stored in `Halves` wherever `abstract` has them.

    Stacks are divided into layers wherever `abstract` has an `Apart`.
    """
    params = divided(masters.like(self.params, abstract.params), abstract.params)
    opt_state = divided(self.opt_state, abstract.opt_state)
    return dataclasses.replace(self, params=params, opt_state=opt_state)

  def placed(self, abstract: TrainState) -> TrainState:
    """This state with the shardings of `abstract`; the state must have no teacher.

    Only arrays with another sharding are copied; a `Kept` (`scmoe.training.kept`) stays as it is.
    """
    leaves, structure = jax.tree.flatten(self)
    places = jax.tree.leaves(shardings_of(dataclasses.replace(abstract, teacher=None)))
    here = [i for i, x in enumerate(leaves) if not is_kept(x)]
    moved = jax.device_put([leaves[i] for i in here], [places[i] for i in here])
    found = dict(zip(here, moved))
    return structure.unflatten(found.get(i, x) for i, x in enumerate(leaves))


class Objective(Losses, Protocol):
  """The model as the training step uses it: losses, the types they read, metrics, router updates.

  A model with a teacher, or for another seed, is an `Objective` of its own (`taught`, `seeded`).
  The step calls all methods in the manual region: parameters and batch are one device's shares.
  """

  def cast(self, params: PyTree) -> PyTree:
    """Parameters in the types in which `losses` reads them.

    Those in the host's memory stay as they are.
    """
    ...

  def taught(self, given: PyTree) -> Objective:
    """This objective with the arrays of `TrainState.teacher`; called only if there are some."""
    ...

  def seeded(self, seed: Array) -> Objective:
    """This objective for a run of another seed, int32 []; the seed may be a traced value.

    Only a step of several seeds calls it (`scmoe.training.side_by_side`).
    """
    ...

  def metrics(self, aux: PyTree) -> tuple[dict[str, Array], dict[str, Array]]:
    """(scalars, per-layer arrays) of a step, from the `aux` of `losses`, summed over microbatches.

    The console shows `drop` (share of choices dropped) and `imbalance` if these scalars include
    them. A `loss` among them is the step's `loss` in all outputs; the differentiated one stays as
    `objective`.
    """
    ...

  def left_over(self, aux: PyTree) -> Array:
    """Whether a layer needed more rounds than one, bool [].

    Only a step that was made with `repeats` calls it.

    Args:
      aux: of `losses`, summed over microbatches.
    """
    ...

  def update_router(self, router: PyTree, aux: PyTree) -> PyTree:
    """The router state after a step, from the `aux` of `losses`, summed over its microbatches."""
    ...


Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array], dict[str, Array]]]


def abstract_state(
  shapes: tuple[PyTree, PyTree],
  optimizer: Optimizer,
  mesh: Mesh,
  cast: Callable[[PyTree], PyTree] | None = None,
  teacher: PyTree = None,
) -> TrainState:
  """The training state as `jax.ShapeDtypeStruct`s with shardings; allocates nothing.

  An `InFile` stands in place of each array that is to lie in a file.

  Args:
    shapes: (params, router) as ShapeDtypeStructs with shardings. Those of `params` are the
      shardings of whole parameters (`mesh.shard_state=none`).
    optimizer: its moments, and the average of the parameters, are sharded like the parameters they
      belong to, and divided further over ranks if it has `Optimizer.shares`. With
      `Optimizer.on_host` moments, lower halves and experts' parameters lie where it says.
    mesh: counters and scalars are replicated over it.
    cast: parameters -> parameters in the types in which the model reads them. If given, float32
      parameters that the model reads in bfloat16 become `Halves` (`scmoe.training.masters`).
    teacher: ShapeDtypeStructs, with shardings, of the arrays for `Objective.taught`.
  """
  shardings = shardings_of(shapes)
  bare = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), shapes)
  fresh = jax.eval_shape(lambda made: _fresh(lambda key: made, optimizer, 0), bare)
  params, divided_places = stored_shardings(shardings[0], optimizer.shares)
  everywhere = replicated(mesh)
  # optax's mark of a parameter for which a rule keeps no state, e.g. Adam for a matrix of Muon.
  absent = lambda leaf: isinstance(leaf, optax.MaskedNode)
  opt_state = optax.tree_map_params(
    optimizer.tx,
    lambda leaf, sharding: leaf if absent(leaf) else sharding,
    fresh.opt_state,
    divided_places,
    transform_non_params=lambda _: everywhere,
    is_leaf=absent,
  )
  placed = jax.tree.map(lambda _: everywhere, fresh)
  average = None if optimizer.average is None else divided_places
  placed = dataclasses.replace(
    placed, params=params, router=shardings[1], opt_state=opt_state, average=average
  )
  state = jax.tree.map(
    lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), fresh, placed
  )
  state = dataclasses.replace(state, teacher=teacher)
  params, opt_state = state.params, state.opt_state
  if cast is not None:
    params = masters.halves_of(params, jax.eval_shape(cast, params), divided_places)
  if optimizer.on_host is not None:
    kept, experts = optimizer.on_host.kept, bool(optimizer.on_host.experts)
    params, opt_state = laid_out(params, opt_state, optimizer.tx, kept, experts=experts)
    if optimizer.on_host.folder:
      params, opt_state = in_files((params, opt_state), optimizer.on_host.folder)
  return dataclasses.replace(state, params=params, opt_state=opt_state)


def init_state(
  init: Init, optimizer: Optimizer, seed: int, abstract: TrainState, params: PyTree = None
) -> TrainState:
  """The state before step 0, with the same values on every mesh, but for rounding.

  Each device makes its own share of the arrays that the host does not make (`OnHost`).

  Args:
    init: key -> (params, router).
    optimizer: as for `abstract_state`.
    seed: of fresh parameters, and of the random keys of all steps.
    abstract: from `abstract_state`; says where arrays lie, which parameters become `Halves`, and
      which stacks become `Apart`s.
    params: float32 parameters to begin with, which may be donated; None: fresh ones from `init`.

  Returns:
    the state, with `teacher` None.
  """
  abstract = dataclasses.replace(abstract, teacher=None)
  if optimizer.on_host is not None and optimizer.on_host.experts:
    # The devices make all but the parameters, for which they may have no room.
    rest = dataclasses.replace(abstract, params=None)
    fresh = lambda: dataclasses.replace(_fresh(init, optimizer, seed), params=None).like(rest)
    state = jax.jit(fresh, out_shardings=shardings_of(rest))()
    made = made_on_cpu(lambda: _fresh(init, optimizer, seed).params) if params is None else params
    return dataclasses.replace(state, params=taken_over(made, abstract.params))
  if optimizer.on_host is not None and optimizer.on_host.computes and _in_layers(abstract):
    # The host makes the moments in ordinary memory or in files. Only lower halves pass through
    # pinned memory.
    made = dataclasses.replace(without_kept(abstract), params=abstract.params)
    state = _made(init, optimizer, seed, made, params)
    return begun_on_host(state, abstract)
  if any(map(is_in_file, jax.tree.leaves(abstract.opt_state))):
    made = dataclasses.replace(abstract, opt_state=without_files(abstract.opt_state))
    return begun_in_files(_made(init, optimizer, seed, made, params), abstract)
  return _made(init, optimizer, seed, abstract, params)


def _in_layers(abstract: TrainState) -> bool:
  return any(map(is_apart, jax.tree.leaves(abstract.opt_state, is_leaf=is_apart)))


def _made(
  init: Init, optimizer: Optimizer, seed: int, abstract: TrainState, params: PyTree
) -> TrainState:
  def make(params: PyTree) -> TrainState:
    state = _fresh(init, optimizer, seed)
    if params is None:
      return state.like(abstract)
    params = to_device(params)
    state = dataclasses.replace(state, opt_state=optimizer.tx.init(params))
    return state.begun_from(params, optimizer).like(abstract)

  return jax.jit(make, out_shardings=shardings_of(abstract), donate_argnums=0)(params)


def make_train_step(
  objective: Objective,
  optimizer: Optimizer,
  abstract: TrainState,
  *,
  gradient_dtype: str = "float32",
  flight: int = 1,
  embedding_rows: bool = False,
  repeats: bool = False,
  compiler_options: dict[str, Any] | None = None,
) -> Any:
  """The jitted step: (state, batch) -> (state, scalars, arrays). The given state is donated.

  If the host computes the update (`OnHost.computes`), it is a `HostStep` instead, which is called
  alike.

  Batch leaves are global arrays [A, B, ...] of A microbatches, B over the mesh's batch axes.

  Args:
    objective: gives the loss, the metrics and the router's update.
    optimizer: from `make_optimizer`.
    abstract: from `abstract_state`.
    gradient_dtype: type in which gradients travel between devices.
    flight: number of microbatches that run side by side, if it divides A (`accumulate`).
    embedding_rows: whether gradients of embeddings may travel as rows (`accumulate`).
    repeats: see `make_local_step`.
    compiler_options: XLA's, for this step only.

  The results are those of `make_local_step`; a `HostStep` adds a scalar (`HostStep.run`).
  """
  mesh: Any = abstract.step.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
  how: Any = {"gradient_dtype": gradient_dtype, "flight": flight, "repeats": repeats}
  how |= {"embedding_rows": embedding_rows}
  if optimizer.on_host is not None and optimizer.on_host.computes:
    specs = masters.readable(jax.tree.map(lambda s: s.spec, shardings_of(abstract.params)))
    leaving = make_local_step(objective, optimizer, specs, leave=True, **how)
    return make_host_step(leaving, optimizer, abstract, compiler_options)
  specs = jax.tree.map(lambda s: s.spec, shardings_of(abstract))
  one = lambda x: x.parts[0] if is_apart(x) else x  # layers of a stack have one spec
  whole_specs = jax.tree.map(one, masters.readable(specs.params), is_leaf=is_apart)
  local_step = make_local_step(objective, optimizer, whole_specs, **how)
  everywhere: NamedSharding = replicated(mesh)
  shardings = shardings_of(abstract)
  if optimizer.on_host is not None:
    compiler_options = streamed_update.COMPILED | (compiler_options or {})
  return jax.jit(
    manual(local_step, mesh, (specs, P(None, BATCH_AXES)), (specs, P(), P())),
    donate_argnums=0,
    in_shardings=(shardings, batch_sharding(mesh, leading=1)),
    out_shardings=(shardings, everywhere, everywhere),
    compiler_options=compiler_options,
  )


def make_local_step(
  objective: Objective,
  optimizer: Optimizer,
  params_specs: PyTree,
  *,
  gradient_dtype: str = "float32",
  flight: int = 1,
  embedding_rows: bool = False,
  repeats: bool = False,
  leave: bool = False,
) -> Step:
  """The step of one device in the manual region: (state, batch) -> (state, scalars, arrays).

  The scalars are those of `Objective.metrics`, and `objective` (the differentiated loss), `loss`
  (the same, unless the objective has its own), `grad_norm` before clipping, `lr`, `finite`,
  `skipped`, `skipped_in_row`; with loss scaling `loss_scale`, with a spike test `spike`. The arrays
  are the per-layer ones of `Objective.metrics`.

  Args:
    objective, optimizer, gradient_dtype, flight, embedding_rows: as of `make_train_step`.
    repeats: the caller runs the step again, by another program, if rows were left over
      (`Objective.left_over`): the step then changes no bit of the state, the counters included.
    params_specs: PartitionSpecs like the parameters, stacks whole; not read if the optimizer has
      `shares`, which hold specs of their own.
    leave: leave the update to the host: the state has None in place of what an update changes, and
      a fourth result is the `Left`.
  """
  shares = optimizer.shares
  whole_specs = update_specs = params_specs
  if shares is not None:
    whole_specs, update_specs = shares.specs, shares.share_specs

  def local_step(state: TrainState, batch: Batch) -> Any:
    own = objective if state.teacher is None else objective.taught(state.teacher)
    rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    # What `cast` has to cast (parameters in halves are in bfloat16 already) is cast here, once per
    # step: inside `accumulate`'s loop, each microbatch would read the float32 values again.
    with jax.named_scope("cast"):
      params = own.cast(masters.readable(state.params))
    if shares is not None:
      params = shares.to_read(params)
    if optimizer.on_host is not None and optimizer.on_host.experts:
      params = to_fetch(params, optimizer.on_host.experts)
    factor = None if optimizer.scaling is None else state.scale["factor"]
    loss, grads, aux = accumulate(
      *(own, params, state.router, batch, rng, whole_specs),
      gradient_dtype=gradient_dtype,
      flight=flight,
      factor=factor,
      shares=shares,
      embedding_rows=embedding_rows,
    )
    with jax.named_scope("optimizer"):
      if optimizer.scaling is not None:
        grads = optimizer.scaling.unscaled(grads, state.scale)
      with jax.named_scope("clip"):
        norm = global_norm(grads, update_specs)
      # Loss and norm are tested before clipping, which divides by the norm: an infinite gradient
      # makes the norm infinite, and clipping would turn that element into NaN, all others into 0.
      finite = jnp.isfinite(loss) & jnp.isfinite(norm)
      router = own.update_router(state.router, aux)
      good, spike = finite, None
      if optimizer.spikes is not None:
        spike = finite & optimizer.spikes.seen(state.recent, loss, norm)
        good = finite & ~spike
      over = own.left_over(aux) if repeats else None
      if over is not None:
        good = good & ~over
      found = Found(loss, norm, good)
      left = left_to_host(state, grads, optimizer, found) if leave else None
      changed = unchanged() if leave else updated(state, grads, optimizer, found)
      new = _after(state, changed, router, optimizer, found)
      if over is not None:
        new = _uncounted(new, state, over)
    with jax.named_scope("statistics"):
      scalars, arrays = own.metrics(aux)
    scalars = {"loss": loss} | scalars | {"objective": loss}
    scalars |= {"grad_norm": norm, "lr": optimizer.schedule(state.step), "finite": finite}
    scalars |= {"skipped": new.skipped, "skipped_in_row": new.skipped_in_row}
    if factor is not None:
      scalars["loss_scale"] = factor
    if spike is not None:
      scalars["spike"] = spike
    return (new, scalars, arrays, left) if leave else (new, scalars, arrays)

  return local_step


def _after(
  state: TrainState,
  changed: dict[str, PyTree],
  router: PyTree,
  optimizer: Optimizer,
  found: Found,
) -> TrainState:
  """The state after the step; if the step is not good, only counters and loss scale change.

  Args:
    state: before the step.
    changed: parameters, optimizer's state and average afterwards; None if the host updates them.
    router: the router state after a good step.
    optimizer: see `make_optimizer`.
    found: loss, norm, and whether the step is good.
  """
  missed = 1 - found.good.astype(jnp.int32)
  scaling, scale, failed = optimizer.scaling, state.scale, missed
  if scaling is not None:
    # If the loss is finite and the norm of the gradients is not, this counts as an overflow: the
    # loss's factor was too large. While the factor can still fall, such a step does not count in
    # `skipped_in_row`.
    overflow = jnp.isfinite(found.loss) & ~jnp.isfinite(found.norm)
    failed = missed * (1 - (overflow & scaling.may_fall(scale)).astype(jnp.int32))
    scale = scaling.after(scale, jnp.isfinite(found.loss) & jnp.isfinite(found.norm))
  return TrainState(
    step=state.step + 1,
    router=kept_if(found.good, router, state.router),
    rng=state.rng,
    skipped=state.skipped + missed,
    skipped_in_row=(state.skipped_in_row + failed) * missed,
    scale=scale,
    recent=None
    if optimizer.spikes is None
    else optimizer.spikes.after(state.recent, found.loss, found.norm, found.good),
    teacher=state.teacher,
    **changed,
  )


def _uncounted(new: TrainState, state: TrainState, over: Array) -> TrainState:
  """The state `new` or, if `over`, the same with the counters, loss scale and `recent` of `state`.

  If `over`, the step was not good, so it changed nothing else.

  Args:
    new: the state after the step.
    state: the state before it.
    over: bool [], whether rows were left over.
  """
  counters = ("step", "skipped", "skipped_in_row", "scale", "recent")
  keep = lambda n, o: jnp.where(over, o, n)
  kept = {name: jax.tree.map(keep, getattr(new, name), getattr(state, name)) for name in counters}
  return dataclasses.replace(new, **kept)


def _fresh(init: Init, optimizer: Optimizer, seed: int) -> TrainState:
  init_key, base = jax.random.split(jax.random.key(seed))
  params, router = init(init_key)
  zero = jnp.zeros((), jnp.int32)
  return TrainState(
    step=zero,
    params=params,
    opt_state=optimizer.tx.init(params),
    router=router,
    rng=jax.random.key_data(base),
    skipped=zero,
    skipped_in_row=zero,
    scale=None if optimizer.scaling is None else optimizer.scaling.init(),
    recent=None if optimizer.spikes is None else optimizer.spikes.init(),
    average=None if optimizer.average is None else optimizer.average.init(params),
  )
