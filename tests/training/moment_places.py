"""A tiny run whose moments lie on the device, in the host's memory, or in files; and its steps."""

import dataclasses
import functools
import tempfile

import jax
import numpy as np
from drawn import drawn_init

from scmoe.models.config import ModelConfig
from scmoe.parallel.mesh import MeshConfig, batch_sharding
from scmoe.run.build import build
from scmoe.run.config import RunConfig
from scmoe.training.options import OptimizerAblation, OptimizerConfig, TrainConfig
from scmoe.training.step import init_state, make_train_step

MODEL = ModelConfig(
  wiring="top2", moe_every=1, num_layers=3, width=8, num_heads=2, mlp_hidden=8, num_experts=2,
  vocab_size=32, context=8, dtype="bfloat16",
)  # fmt: skip
LENGTH, ROWS, STEPS = 8, 8, 4
BAD = 1  # the step that is skipped, because a norm's scale is infinite
# Without fused multiply-adds: which products and sums become one depends on the kernel around them.
EXACT = {"xla_cpu_max_isa": "AVX"}
PLACES = {
  "device": {},
  "host": {"moments_in": "host"},
  "part": {"moments_in": "host", "moments_kept": 2},
  "computed": {"moments_in": "host", "moments_update": "host"},
  "filed": {
    "moments_in": "files",
    "moments_update": "host",
    "moments_folder": tempfile.gettempdir(),
  },
}
HALVES = OptimizerAblation(masters="halves")
CLIPPED = OptimizerConfig(
  moments="bfloat16", ema=0.9, warmup_steps=1, clip_norm=0.5, ablation=HALVES
)


def built(
  place, ahead=1, mode="moments", data=2, optimizer=CLIPPED, rows=ROWS, layers=MODEL.num_layers
):
  """A run of `ROWS` rows a step, `rows` in a microbatch, on data x expert=2 devices."""
  mesh = MeshConfig(data, 2, 1, shard_state=mode, moments_ahead=ahead, **PLACES[place])
  train = TrainConfig(batch_size=rows, tokens_per_step=ROWS * LENGTH, steps=8)
  model = dataclasses.replace(MODEL, num_layers=layers)
  run = RunConfig(model=model, optimizer=optimizer, mesh=mesh, train=train)
  run = dataclasses.replace(run, data=dataclasses.replace(run.data, seq_len=LENGTH))
  run = run.resolve(num_devices=mesh.size, vocab_size=32)
  return build(run, jax.devices()[: mesh.size])


def step_of(place, rows=ROWS):
  """(the run, its compiled step, one batch)."""
  return _step_of(place, rows)


@functools.cache
def _step_of(place, rows):
  own = built(place, rows=rows)
  step = make_train_step(own.objective, own.optimizer, own.abstract_state(), compiler_options=EXACT)
  return own, step, jax.device_put(own.random_batch(), batch_sharding(own.mesh, leading=1))


def stepped(place, stored=-1, rows=ROWS):
  """(the run, its state after `STEPS` steps, whether each step was good).

  Step `stored` begins from the state that a checkpoint would hold.
  """
  return _stepped(place, stored, rows)


@functools.cache
def _stepped(place, stored, rows):
  own = step_of(place, rows)[0]
  abstract = own.abstract_state()
  state, good = begun(own), []
  for number in range(STEPS):
    if number == stored:
      state = state.for_checkpoint().like(abstract).placed(abstract)
    state, fine = advanced(place, state, number, rows)
    good.append(fine)
  return own, state, good


def begun(own):
  """A run's state before step 0."""
  return init_state(drawn_init(own), own.optimizer, 0, own.abstract_state())


def advanced(place, state, number, rows=ROWS):
  """(state after a step, whether it was good); step `BAD` is not."""
  _, step, batch = step_of(place, rows)
  norm = state.params["norm"]
  scale, at = np.asarray(norm["scale"]), norm["scale"].sharding
  if number == BAD:
    norm["scale"] = jax.device_put(np.full_like(scale, np.inf), at)
  state, scalars, _ = step(state, batch)
  assert ("update_seconds" in scalars) == ("moments_update" in PLACES[place])
  if number == BAD:
    state.params["norm"]["scale"] = jax.device_put(scale, at)
  return state, bool(scalars["finite"])


def named_bits(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
