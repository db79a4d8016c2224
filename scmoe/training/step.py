"""One optimizer step: scan over microbatches, test for finite numbers, clip, update. One jit.

The step knows nothing of models: it meets them through `Objective`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.errors import ConfigError
from scmoe.parallel.mesh import BATCH_AXES, batch_parts, batch_sharding, replicated
from scmoe.training.optimizer import Optimizer

PyTree = Any
Batch = dict[str, Array]
Init = Callable[[Array], tuple[PyTree, PyTree]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that a step changes and a checkpoint holds.

  A skipped step (non-finite loss or gradient) leaves `params`, `opt_state` and `router` bitwise
  alone but counts in `step`: the data and the learning-rate schedule go on.
  """

  step: Array  # int32 [], optimizer steps done, skipped ones included
  params: PyTree  # float32
  opt_state: PyTree
  router: PyTree  # router state that gradients do not train, e.g. balancing biases; may be {}
  rng: Array  # uint32 key data; never changes, the step's key is folded from it
  skipped: Array  # int32 [], skipped steps of the whole run
  skipped_in_row: Array  # int32 [], skipped steps since the last good one


class Objective(Protocol):
  """What is trained; the model's side of the contract."""

  def loss(self, params: PyTree, router: PyTree, batch: Batch, rng: Array) -> tuple[Array, PyTree]:
    """Scalar to differentiate over one microbatch (leaves [B, ...]; `rng` a typed key), and aux.

    `aux` is a pytree of sums that add up over microbatches.
    """
    ...

  # Optional: `retry(router, aux=None)`, where a microbatch may first be tried without the work that
  # only skewed routing needs, as `loss(..., one_round=True)`; see `_gradients`.

  def metrics(self, aux: PyTree) -> tuple[dict[str, Array], dict[str, Array]]:
    """(scalars, per-layer arrays) of the summed `aux`.

    The console shows the scalars `loss`, `drop` (share of choices dropped) and `imbalance`.
    """
    ...

  def update_router(self, router: PyTree, aux: PyTree) -> PyTree:
    """Router state after one optimizer step; called once per step, not per microbatch."""
    ...


Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array], dict[str, Array]]]


def abstract_state(
  init: Init, optimizer: Optimizer, mesh: Mesh, shardings: tuple[PyTree, PyTree]
) -> TrainState:
  """Shapes, types and shardings of the state; nothing is allocated.

  Args:
    init: key -> (params, router).
    optimizer: its state is sharded like the parameters it belongs to.
    mesh: counters and scalars are replicated over it.
    shardings: pytrees of NamedSharding like `params` and like `router`.
  """
  shapes = jax.eval_shape(lambda: _fresh(init, optimizer, 0))
  params, router = shardings
  everywhere = replicated(mesh)
  opt_state = optax.tree_map_params(
    optimizer.tx,
    lambda _, sharding: sharding,
    shapes.opt_state,
    params,
    transform_non_params=lambda _: everywhere,
  )
  placed = jax.tree.map(lambda _: everywhere, shapes)
  placed = dataclasses.replace(placed, params=params, router=router, opt_state=opt_state)
  return jax.tree.map(
    lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, placed
  )


def init_state(init: Init, optimizer: Optimizer, seed: int, abstract: TrainState) -> TrainState:
  """The state before step 0, created where it belongs; the same values on every mesh."""
  return jax.jit(lambda: _fresh(init, optimizer, seed), out_shardings=shardings_of(abstract))()


def shardings_of(tree: PyTree) -> PyTree:
  """Shardings of a pytree of arrays or of abstract arrays."""
  return jax.tree.map(lambda x: x.sharding, tree)


def make_train_step(
  objective: Objective,
  optimizer: Optimizer,
  mesh: Mesh,
  state_shardings: TrainState,
  *,
  gradients: str = "microbatch",
  gradient_dtype: str = "float32",
  compiler_options: dict[str, Any] | None = None,
) -> Step:
  """The jitted step: (state, batch) -> (state, scalars, arrays). The given state is donated.

  Args:
    objective: see `Objective`.
    optimizer: from `make_optimizer`.
    mesh: batch leaves are global arrays [A, B, ...], B sharded over its axes data x expert.
    state_shardings: as of `shardings_of(abstract_state(...))`.
    gradients: when gradients are summed over devices: in every "microbatch", where XLA places
      the sums, or once per "step", after each device has added up its own.
    gradient_dtype: in which they travel in the latter case.
    compiler_options: of XLA, for this step only.

  The scalars are those of the objective, and `objective` (what is differentiated, meaned over the
  microbatches), `loss` (the same, unless the objective says its own), `grad_norm` before clipping,
  `lr`, `finite`, `skipped`, `skipped_in_row`.
  """

  def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict, dict]:
    rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    if gradients == "step":
      specs = jax.tree.map(lambda s: s.spec, state_shardings.params)
      add_up = partial(accumulate_locally, mesh=mesh, specs=specs, dtype=gradient_dtype)
    else:
      add_up = accumulate
    loss, grads, aux = add_up(objective, state.params, state.router, batch, rng)
    norm = optax.global_norm(grads)
    # Before clipping: clipping by a norm with one inf turns that leaf into NaN, the rest into 0.
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    new = _updated(state, grads, objective.update_router(state.router, aux), optimizer, finite)
    scalars, arrays = objective.metrics(aux)
    scalars = {"loss": loss} | scalars | {"objective": loss}
    scalars |= {"grad_norm": norm, "lr": optimizer.schedule(state.step), "finite": finite}
    scalars |= {"skipped": new.skipped, "skipped_in_row": new.skipped_in_row}
    return new, scalars, arrays

  everywhere: NamedSharding = replicated(mesh)
  return jax.jit(
    step,
    donate_argnums=0,
    in_shardings=(state_shardings, batch_sharding(mesh, leading=1)),
    out_shardings=(state_shardings, everywhere, everywhere),
    compiler_options=compiler_options,
  )


def accumulate(
  objective: Objective, params: PyTree, router: PyTree, batch: Batch, rng: Array
) -> tuple[Array, PyTree, PyTree]:
  """Loss and fp32 gradients, meaned over microbatches, and the summed aux.

  Batch leaves are [A, B, ...]; microbatch i uses the key folded with i.
  """

  def one(micro: Batch, index: Any) -> tuple[Array, PyTree, PyTree]:
    return _gradients(objective, params, router, micro, jax.random.fold_in(rng, index))

  count = jax.tree.leaves(batch)[0].shape[0]
  first = jax.tree.map(lambda x: x[0], batch)
  if count == 1:
    return one(first, 0)

  def body(total: PyTree, item: tuple[Batch, Array]) -> tuple[PyTree, None]:
    return jax.tree.map(jnp.add, total, one(*item)), None

  zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, first, 0))
  (loss, grads, aux), _ = jax.lax.scan(body, zero, (batch, jnp.arange(count)))
  return loss / count, jax.tree.map(lambda g: g / count, grads), aux


def _gradients(
  objective: Objective, params: PyTree, router: PyTree, micro: Batch, key: Array
) -> tuple[Array, PyTree, PyTree]:
  """Loss, fp32 gradients and aux of one microbatch, tried in one round where that may do.

  A loop of further rounds in every layer makes the host wait for every layer, forward and backward.
  So a first attempt goes without them, and only if its sums say that something is missing are loss
  and gradients computed again, complete. Where the last step needed that, there is no attempt.
  """

  def run(**options: Any) -> tuple[Array, PyTree, PyTree]:
    loss = lambda params: objective.loss(params, router, micro, key, **options)
    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value.astype(jnp.float32), jax.tree.map(lambda g: g.astype(jnp.float32), grads), aux

  retry = getattr(objective, "retry", lambda *_: None)
  expected = retry(router)
  if expected is None:
    return run()
  shapes = jax.eval_shape(run)
  nothing = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  attempt = jax.lax.cond(expected, nothing, lambda: run(one_round=True))
  return jax.lax.cond(expected | retry(router, attempt[2]), run, lambda: attempt)


def accumulate_locally(
  objective: Objective,
  params: PyTree,
  router: PyTree,
  batch: Batch,
  rng: Array,
  *,
  mesh: Mesh,
  specs: PyTree,
  dtype: str,
) -> tuple[Array, PyTree, PyTree]:
  """As `accumulate`, but each device adds up its own gradients and they are reduced once.

  Left to XLA, the gradient of every replicated weight is summed over the devices in every
  microbatch: on a slow link that takes longer than the computation. Here the whole accumulation
  runs under `shard_map`, where the objective sees one device's part of the batch
  (`scmoe.parallel.mesh.across_batch`).

  Args:
    mesh: its tensor axis has one device.
    specs: PartitionSpecs like `params`.
    dtype: in which gradients travel; they are added up in float32 on each device.
  """

  def local(params: PyTree, router: PyTree, batch: Batch, rng: Array):
    # Left inside the loop, every microbatch would read all float32 weights to cast them again.
    cast = getattr(objective, "cast", lambda params: params)
    loss, grads, aux = accumulate(objective, cast(params), router, batch, rng)
    return loss, jax.tree.map(reduce, grads, specs), aux

  def reduce(grad: Array, spec: P) -> Array:
    held = {axis for part in spec for axis in ((part,) if isinstance(part, str) else part or ())}
    over = tuple(a for a in BATCH_AXES if a not in held and mesh.shape[a] > 1)
    # Every device has differentiated the same global loss: the sum counts it once per device.
    grad = grad / batch_parts(mesh)
    return jax.lax.psum(grad.astype(dtype), over).astype(jnp.float32) if over else grad

  if mesh.shape["tensor"] > 1:
    raise ConfigError(
      "overlap.gradients='step' needs mesh.tensor=1; use overlap.gradients='microbatch'"
    )
  one = P()
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(specs, one, P(None, BATCH_AXES), one),
    out_specs=(one, specs, one),
    check_vma=False,
  )(params, router, batch, rng)


def _updated(
  state: TrainState, grads: PyTree, router: PyTree, optimizer: Optimizer, finite: Array
) -> TrainState:
  """The next state; where not `finite`, only the counters move."""
  updates, opt_state = optimizer.tx.update(grads, state.opt_state, state.params, step=state.step)
  params = optax.apply_updates(state.params, updates)
  keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
  missed = 1 - finite.astype(jnp.int32)
  return TrainState(
    step=state.step + 1,
    params=keep(params, state.params),
    opt_state=keep(opt_state, state.opt_state),
    router=keep(router, state.router),
    rng=state.rng,
    skipped=state.skipped + missed,
    skipped_in_row=(state.skipped_in_row + 1) * missed,
  )


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
  )
