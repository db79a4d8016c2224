"""No output sees a later token: shown by gradients, for every wiring."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from flax import nnx

from scmoe.blocks.wiring import WIRINGS
from scmoe.models.gpt import Pass
from scmoe.moe.dispatch import DispatchConfig

LENGTH = 5
DROPS = DispatchConfig(capacity_factor=0.5)
ROOM = DispatchConfig(capacity_factor=0.0)  # for every token


def sensitivities(config, dispatch, **given):
  """|d out[t] / d input embedding[s]|, the largest over the width: [t, s]; and the drops."""
  graph, params = harness.parts(config, dispatch=dispatch)
  ids = harness.tokens(batch=1, length=LENGTH)
  direction = jnp.asarray(np.random.default_rng(0).normal(size=config.width), jnp.float32)

  def outputs(shift_SD):
    # Each position gets a word of its own, so that embeddings can be moved one position at a time.
    def place(path, leaf):
      is_table = [str(key) for key in path[:2]] == ["['embedding']", "['tokens']"]
      return leaf[ids[0]] + shift_SD if is_table else leaf

    model = nnx.merge(graph, jax.tree_util.tree_map_with_path(place, params))
    out = model(jnp.arange(LENGTH)[None], Pass(**given))
    return out.h_BSD[0] @ direction, out.sums

  rows, sums = jax.jit(jax.jacrev(outputs, has_aux=True))(jnp.zeros((LENGTH, config.width)))
  dropped = 0 if sums is None else int(sums.dropped.sum())
  return np.abs(rows).max(-1), dropped


def assert_causal(seen):
  later = np.triu(np.ones((LENGTH, LENGTH), bool), 1)
  np.testing.assert_array_equal(seen[later], 0.0)
  assert (seen[~later] > 0).all()


# By day: test_wirings.py compares each wiring with its equations, which read no later token.
BY_DAY = ("scmoe_pos2",)
# Where every block has a MoE these differ, as scmoe_pos2 does.
HANDED_OVER = (
  "dense",
  "scmoe_pos1",
  "scmoe_pos3",
  "dgmoe",
  "farskip",
  "farskip_routed",
)


@pytest.mark.parametrize(
  ("wiring", "every"),
  [(w, 2) if w in BY_DAY else night(w, 2) for w in WIRINGS]
  + [night(w, 1) for w in ("scmoe_pos2", *HANDED_OVER)],
)
def test_no_output_sees_a_later_token(wiring, every):
  style = "llama" if every == 1 else "gpt2"
  config = harness.tiny(wiring=wiring, moe_every=every, style=style)
  seen, dropped = sensitivities(config, ROOM)
  assert_causal(seen)
  assert dropped == 0


@pytest.mark.parametrize("wiring", [night("top1"), night("shared_expert"), "scmoe_pos2", "dgmoe"])
def test_nor_with_drops(wiring):
  seen, dropped = sensitivities(harness.tiny(wiring=wiring), DROPS)
  assert_causal(seen)
  assert dropped > 0


def test_nor_without_dropping_by_request():
  seen, dropped = sensitivities(harness.tiny(wiring="scmoe_pos2"), DROPS, no_drop=True)
  assert_causal(seen)
  assert dropped == 0
