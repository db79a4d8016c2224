"""A model and a data source small enough to check by hand, with the contracts of the real ones."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.base.batch import Batch
from scmoe.blocks.options import OverlapConfig
from scmoe.models.gradient_totals import added
from scmoe.parallel.collectives import largest, total
from scmoe.parallel.mesh import BATCH_AXES, axis_size, own_share, shardings_of
from scmoe.training.description import Damaged
from scmoe.training.loop import Trainer
from scmoe.training.optimizer import Optimizer, make_optimizer
from scmoe.training.options import CheckpointConfig, OptimizerConfig, TrainConfig
from scmoe.training.restore import load, read_meta
from scmoe.training.step import abstract_state, init_state, make_train_step
from scmoe.training.variants import Variant

VOCAB, WIDTH, EXPERTS, SEQ = 17, 8, 4, 8


def init(key):
  """Parameters and router state of a two-layer language model with top-1 experts."""
  shapes = ((VOCAB, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, WIDTH), (WIDTH, VOCAB))
  sizes = [math.prod(shape) for shape in shapes]
  draw = jax.random.uniform(key, (sum(sizes),), minval=-0.5, maxval=0.5)  # one draw: compiles fast
  parts = jnp.split(draw, np.cumsum(sizes)[:-1])
  embed, router, experts, head = (p.reshape(shape) for p, shape in zip(parts, shapes))
  params = {
    "embed": embed,
    "router": router,
    "experts": experts,
    "head": {"kernel": head, "bias": jnp.zeros(VOCAB)},
  }
  return params, {"bias": jnp.zeros(EXPERTS)}


def shapes(mesh):
  """Parameters and router state, abstract: experts over the expert axis, the rest replicated."""
  over = lambda *axes: NamedSharding(mesh, P(*axes))
  at = lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where)
  fresh = jax.eval_shape(init, jax.random.key(0))
  params, router = jax.tree.map(lambda s: at(s, over()), fresh)
  return params | {"experts": at(params["experts"], over("expert"))}, router


class Objective:
  """Weighted cross-entropy; the router bias follows the load.

  Every device computes all experts of its own tokens: experts are gathered over the expert axis,
  and their gradients, by transposition, added up and handed back.
  """

  noise = 0.01

  def losses(self, params, totals=None, *, router, batches, rngs, ahead=None):
    """One after the other."""
    params = added(params, totals)
    found = [self.loss(p, router, b, r) for p, b, r in zip(params, batches, rngs)]
    return [{"count": loss * aux["count"]} for loss, aux in found], [aux for _, aux in found]

  def counts(self, batch):
    return total({"count": batch.weights.sum()}, BATCH_AXES, "statistics")

  def look_ahead(self, params, router, batch, key_of):
    return None

  def lay_out_totals(self, zeros):
    return zeros

  def loss(self, params, router, batch, rng):
    x = params["embed"][batch.inputs]
    logits = x @ params["router"] + router["bias"]
    expert = jnp.argmax(logits, -1)
    gate = jax.nn.softmax(logits)
    one_hot = jax.nn.one_hot(expert, EXPERTS)
    x = x + self.noise * self._draw(rng, x.shape)
    experts = params["experts"]
    if axis_size("expert") > 1:
      experts = jax.lax.all_gather(experts, "expert", tiled=True)
    y = jnp.einsum("bsd,edf,bse->bsf", x, experts, one_hot * gate)
    out = jax.nn.gelu(x + y) @ params["head"]["kernel"] + params["head"]["bias"]
    token = jnp.take_along_axis(jax.nn.log_softmax(out), batch.targets[..., None], -1)[..., 0]
    own = -(token * batch.weights).sum(), batch.weights.sum(), one_hot.sum((0, 1))[None]
    nats, count, load = total(own, BATCH_AXES, "statistics")
    return nats / count, {"loss": nats, "count": count, "load": load}

  def _draw(self, rng, shape):
    """Drawn for the global batch, so that it is the same on every mesh."""
    whole = (shape[0] * axis_size(*BATCH_AXES), *shape[1:])
    return own_share(jax.random.uniform(rng, whole), 0, *BATCH_AXES)

  def cast(self, params):
    return params

  def metrics(self, aux):
    load = aux["load"] / aux["load"].sum()
    scalars = {"loss": aux["loss"] / aux["count"], "imbalance": EXPERTS * load.max()}
    return scalars | {"drop": jnp.zeros(())}, {"load": load, "max_violation": load.max(-1)}

  def update_router(self, router, aux):
    load = aux["load"][0]
    return {"bias": router["bias"] + 1e-3 * jnp.sign(load.mean() - load)}


class Poisoned(Objective):
  """NaN where the batch has a token 0, which no good batch has."""

  def loss(self, params, router, batch, rng):
    loss, aux = super().loss(params, router, batch, rng)
    bad = largest((batch.inputs == 0).any().astype(jnp.float32), BATCH_AXES, "statistics")
    poison = jnp.where(bad > 0, jnp.nan, 1.0)
    return loss * poison, aux | {"loss": aux["loss"] * poison}


class Iterator:
  """Microbatches of one process; a function of (seed, index) only."""

  def __init__(self, source: Source):
    self.source, self.index = source, 0

  def __iter__(self):
    return self

  def __next__(self) -> Batch:
    batch = self.source.batch(self.index)
    self.index += 1
    return batch

  def state(self) -> dict[str, Any]:
    return {"next_index": self.index}

  def restore(self, state: dict[str, Any]) -> None:
    self.index = state["next_index"]


class Source:
  """A pipeline of learnable sequences: token n + 1 = (token n) + stride, with some noise.

  Args:
    batch_size: sequences per microbatch over all processes.
    bad: indices of microbatches whose first token is 0 (see `Poisoned`).
  """

  def __init__(self, batch_size: int, *, seed: int = 0, bad: tuple[int, ...] = ()):
    self.batch_size, self.seed, self.bad = batch_size, seed, frozenset(bad)

  def train(self) -> Iterator:
    return Iterator(self)

  def fingerprint(self) -> dict[str, Any]:
    return {"source": "stride", "seed": self.seed, "batch_size": self.batch_size, "length": SEQ}

  def batch(self, index: int) -> Batch:
    rng = np.random.default_rng([self.seed, index])
    start = rng.integers(1, VOCAB, (self.batch_size, 1))
    rows = (start + 3 * np.arange(SEQ + 1)) % (VOCAB - 1) + 1
    rows = np.where(rng.random(rows.shape) < 0.05, 1, rows).astype(np.int32)
    if index in self.bad:
      rows[0, 0] = 0
    local = self.batch_size // jax.process_count()
    rows = rows[jax.process_index() * local :][:local]
    ones = np.ones((local, SEQ), np.int32)
    positions = np.arange(SEQ, dtype=np.int32) * ones
    weights, domain = ones.astype(np.float32), np.zeros(local, np.int32)
    return Batch(rows[:, :-1], rows[:, 1:], weights, ones, positions, domain)


OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=2)


@dataclasses.dataclass(frozen=True)
class FakeBuilt:
  """The fake model on a mesh: a `Trainable`."""

  mesh: Any
  train: TrainConfig
  checkpoint: CheckpointConfig
  optimizer: Optimizer
  config: dict[str, Any]
  objective: Objective
  overlap: OverlapConfig = OverlapConfig()
  sequence_length: int = SEQ
  peak_flops: float = 0.0
  aimed_share: float | None = None
  candidates: tuple[Variant, ...] = (Variant(),)
  state: Any = None  # shapes to ask for instead of those of the mesh

  def init(self, key):
    return init(key)

  def abstract_state(self):
    if self.state is not None:
      return self.state
    return abstract_state(shapes(self.mesh), self.optimizer, self.mesh)

  def cut(self):
    """Small enough as it is."""
    return self

  @property
  def batch_shapes(self):
    """Shapes of one step's batch."""
    rows = self.train.microbatches(SEQ), self.train.batch_size
    ids, of_row = (jax.ShapeDtypeStruct(s, np.int32) for s in ((*rows, SEQ), rows))
    return Batch(ids, ids, jax.ShapeDtypeStruct(ids.shape, np.float32), ids, ids, of_row)

  def random_batch(self):
    """The first batch of a fake source."""
    return Batch.stack([Source(self.train.batch_size, seed=1).batch(0)])

  def without_loops(self, variant):
    return None

  def variant(self, variant):
    """Returns this objective: no choice of a tuner changes its result."""
    assert variant.top_k is None
    return self.objective


def trainer(mesh, workdir, *, data=None, objective=None, config=None, **fields):
  """A `Trainer` of the fake model; `fields` are those of TrainConfig, or of Trainer itself."""
  names = {f.name for f in dataclasses.fields(TrainConfig)}
  train = {"steps": 20, "log_every": 1, "batch_size": 8, "tensorboard": False}
  train |= {k: fields.pop(k) for k in list(fields) if k in names}
  checkpoint = fields.pop("checkpoint", CheckpointConfig(every=5))
  parts = {"train": TrainConfig(**train), "optimizer": OPTIMIZER, "checkpoint": checkpoint}
  whole = {name: dataclasses.asdict(part) for name, part in parts.items()}
  built: Any = FakeBuilt(
    mesh,
    parts["train"],
    checkpoint,
    make_optimizer(OPTIMIZER, train["steps"], spike_sigma=parts["train"].spike_sigma),
    whole | (config or {}),
    objective or Objective(),
  )
  if "aimed_share" in fields:
    built = dataclasses.replace(built, aimed_share=fields.pop("aimed_share"))
  return Trainer(built, data or Source(train["batch_size"]), workdir, **fields)


class Setup:
  """State and step of the fake model on a mesh."""

  def __init__(self, mesh, objective: Any = None, optimizer: OptimizerConfig = OPTIMIZER, steps=20):
    self.mesh = mesh
    self.optimizer = make_optimizer(optimizer, steps)
    self.abstract = abstract_state(shapes(mesh), self.optimizer, mesh)
    self._fresh: dict[int, Any] = {}
    fake: Any = objective or Objective()
    self.step = make_train_step(fake, self.optimizer, self.abstract)

  def state(self, seed: int = 0):
    """A fresh state; compiled once, since a state may be donated but not its copy on the host."""
    if seed not in self._fresh:
      self._fresh[seed] = jax.device_get(init_state(init, self.optimizer, seed, self.abstract))
    return jax.device_put(self._fresh[seed], shardings_of(self.abstract))


def bits(tree: Any) -> list[bytes]:
  """The raw bytes of every leaf, for bitwise comparison."""
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def leaf_files(step: Path, abstract: Any) -> list[Path]:
  """Files of array data that a restore reads, largest first.

  Found by taking each away in turn. Names and sizes do not tell: each process writes a database of
  its own (`ocdbt.process_0`), and at the end orbax merges them into one. What is small is copied;
  then the process's own file, as large as the merged one, is referred to by nothing. When a process
  writes its file, and so which of the two a directory lists first, depends on the disk's load.
  """
  meta, found = read_meta(step.parent.parent, int(step.name)), []
  for file in [f for f in step.rglob("d/*") if f.is_file()]:
    away = file.rename(step.parent.parent / "away")
    try:
      load(step, abstract, meta)
    except Damaged:
      found.append(file)
    away.rename(file)
  return sorted(found, key=lambda f: -f.stat().st_size)
