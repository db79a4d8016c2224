"""A state that was saved and is read into other places."""

import jax

from scmoe.training.checkpoint import Checkpointer
from scmoe.training.options import CheckpointConfig


def reloaded(folder, state, config, abstract):
  """Saves a state, and reads it as a state with the places of `abstract`, which are checked."""
  keeper = Checkpointer(folder, CheckpointConfig())
  keeper.save_now(3, state.for_checkpoint(), {}, {"config": config})
  found = keeper.restore_latest_valid(abstract.for_checkpoint())
  keeper.close()
  got = found.state.like(abstract).placed(abstract)
  assert jax.tree.structure(got) == jax.tree.structure(abstract)
  for x, like in zip(jax.tree.leaves(got), jax.tree.leaves(abstract), strict=True):
    assert (x.sharding, x.shape, x.dtype) == (like.sharding, like.shape, like.dtype)
  return got
