"""The state on which steps are timed: experts stay evenly loaded, and steps do not train it."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from covering import night

from scmoe.run import build
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.training.measured import SPREAD, MeasuredState, spread
from scmoe.training.step import init_state, make_train_step

FIELDS = {
  "model.num_layers": "8",
  "model.width": "256",
  "model.num_heads": "2",
  "data.seq_len": "256",
  "train.batch_size": "8",
  "train.tokens_per_step": "0",
  "train.remat": "none",
  "mesh.data": "1",
}


TINY = {"model.num_layers": "2", "model.width": "32", "data.seq_len": "32"}


@functools.cache
def built(large=False):
  run = load_config(find_config("gpt2_moe_medium"))
  for field in (FIELDS if large else FIELDS | TINY).items():
    run = with_field(run, *field)
  return build.build(run.resolve(num_devices=1, vocab_size=8192), jax.devices()[:1])


@functools.cache
def compiled_step(large):
  """One training step; it donates its state."""
  own = built(large)
  return make_train_step(own.objective, own.optimizer, own.abstract_state())


def fullest(arrays):
  """The load of the fullest expert of any block, over the balanced share."""
  return float(np.max(jax.device_get(arrays["max_violation"]))) + 1


@pytest.mark.parametrize("large", [False, night(True)], ids=["tiny", "large"])
def test_experts_are_loaded_evenly_and_stay_so(large):
  """A fresh model's fullest expert gets 2.2 times its share, and a measured state's 1.3 times.

  The measured state's steps all have the learning rate 0, so that no parameter changes. The loads
  are those of a large model: a tiny one's few tokens load its experts by chance.
  """
  own = built(large)
  measured, step = MeasuredState(own), compiled_step(large)
  before = jax.device_get(measured.state.params)
  for _ in range(2):
    measured.train(step)
    assert float(measured.figures[0]["lr"]) == 0
    assert float(measured.figures[0]["grad_norm"]) > 0
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(measured.state.params), before)
  if large:
    fresh = init_state(own.init, own.optimizer, 0, own.abstract_state())
    _, _, arrays = step(fresh, measured.batch)
    assert fullest(arrays) > 1.8
    assert fullest(measured.figures[1]) < 1.5
    assert measured.rounds == 1.0


def test_only_the_embeddings_of_tokens_grow():
  """All other parameters are those of the model's own initialisation."""
  init = jax.jit(lambda key: (built().init(key)[0], spread(built().init)(key)[0]))
  params, grown = init(jax.random.key(0))
  flat, near = jax.tree_util.tree_leaves_with_path, functools.partial(np.allclose, rtol=1e-6)
  changed = [
    jax.tree_util.keystr(path)
    for (path, a), (_, b) in zip(flat(params), flat(grown), strict=True)
    if not near(a, b)
  ]
  assert changed == ["['embedding']['tokens']"]
  assert near(SPREAD * params["embedding"]["tokens"], grown["embedding"]["tokens"])


def test_patches_of_images_grow_too():
  """A vision model's first product reads the patches; it grows like a table of tokens."""
  run = load_config(find_config("shapes_vit"), "smoke")
  run = dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, data=1))
  own = build.build(run.resolve(num_devices=1, vocab_size=0), jax.devices()[:1])
  params, grown = jax.eval_shape(own.init, jax.random.key(0))[0], spread(own.init)
  assert "weight" in params["embedding"]
  small, large = jax.jit(lambda key: (own.init(key)[0], grown(key)[0]))(jax.random.key(0))
  np.testing.assert_allclose(
    large["embedding"]["weight"], SPREAD * small["embedding"]["weight"], rtol=1e-6
  )
