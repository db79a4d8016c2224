"""The norm of a new shortcut against numpy's least squares on values that are computed by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn_model
from flax import nnx

from scmoe.base.batch import Batch
from scmoe.inference.norm_fit import fit_norms
from scmoe.models.config import ModelConfig
from scmoe.models.gpt import GPT, Pass
from scmoe.moe.dispatch import DispatchConfig
from scmoe.moe.options import RouterConfig
from scmoe.pretrained.upcycle import plan

SIZES = {"width": 16, "num_heads": 2, "num_layers": 4, "num_experts": 4, "top_k": 2,
         "vocab_size": 64, "context": 16, "dtype": "float32", "init_std": 0.3}  # fmt: skip


def models(style, wiring):
  """A random top-k model, and the start of another wiring from it: norms not of ones."""
  dropless = {"dispatch": DispatchConfig(transport="dropless")}
  config = ModelConfig(wiring="topk", style=style, **SIZES).resolve()
  source = drawn_model(lambda: GPT(config, **dropless, rngs=nnx.Rngs(params=0)))
  planned = plan(f"wiring={wiring}", config, RouterConfig())
  model = drawn_model(lambda: GPT(planned.model, **dropless, rngs=nnx.Rngs(params=1)), seed=1)
  taken, own = nnx.to_pure_dict(nnx.state(source)), nnx.to_pure_dict(nnx.state(model))
  nnx.update(model, jax.tree_util.tree_map_with_path(lambda path, x: at(taken, path, x), own))
  return source, model


def at(tree, path, otherwise):
  """The leaf of a tree at a path, if it has one there."""
  for key in path:
    if not isinstance(tree, dict) or key.key not in tree:
      return otherwise
    tree = tree[key.key]
  return tree


def batches():
  draw = np.random.default_rng(2).integers
  for _ in range(2):
    batch = Batch.of_tokens(draw(0, 64, (3, 16)).astype(np.int32))
    segment_ids = np.ones((3, 16), np.int32)
    segment_ids[1, 10:] = 0
    yield dataclasses.replace(batch, segment_ids=segment_ids)


def by_hand(source, wiring, batch, i):
  """(x, y) [T, D] of pair i: what the shortcut reads, and what the source's experts read."""
  out = source(batch.inputs, Pass(hidden=True, no_drop=True, mask_BS=batch.segment_ids > 0))
  h_BSD = source.embedding(batch.inputs, batch.positions, jnp.float32)
  h_BSD = out.hidden_LBSD[2 * i - 1] if i else h_BSD
  graph, params = nnx.split(source.stages)
  first, last = nnx.merge(graph, jax.tree.map(lambda x: x[i], params)).units[0].blocks
  attend = lambda block, h: block.mix(
    h, block.project(h, batch.positions), batch.positions, None, None
  )[0]
  middle = attend(first, h_BSD)
  end = first.added(middle, first.dense(middle))
  x_BSD = {"scmoe_pos2": middle, "scmoe_pos1": end}[wiring]
  keep = np.asarray(batch.segment_ids > 0)
  return np.asarray(x_BSD)[keep], np.asarray(last.norm_mlp(attend(last, end)))[keep]


@pytest.mark.parametrize(("style", "wiring"), [("gpt2", "scmoe_pos2"), ("llama", "scmoe_pos1")])
def test_each_channel_is_a_least_squares_fit(style, wiring):
  source, model = models(style, wiring)
  found = fit_norms(source, model, batches())
  assert found.tokens == 2 * (3 * 16 - 6)
  for i in range(2):
    some = [by_hand(source, wiring, batch, i) for batch in batches()]
    x_TD, y_TD = (np.concatenate(values).astype(np.float64) for values in zip(*some))
    centred = x_TD - x_TD.mean(-1, keepdims=True) if style == "gpt2" else x_TD
    z_TD = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    residual = 0.0
    for d in range(16):
      columns = [z_TD[:, d]] + [np.ones(len(z_TD))] * (style == "gpt2")
      wanted, *_ = np.linalg.lstsq(np.stack(columns, 1), y_TD[:, d], rcond=None)
      given = [found.scale_LD[i, d]]
      given += [] if found.bias_LD is None else [found.bias_LD[i, d]]
      np.testing.assert_allclose(given, wanted, rtol=1e-3, atol=1e-4)
      residual += ((np.stack(columns, 1) @ wanted - y_TD[:, d]) ** 2).sum()
    np.testing.assert_allclose(found.fitted_L[i], residual / (y_TD**2).sum(), rtol=1e-3)
    own = model.stages.units[0].own_norm
    copied = z_TD * np.asarray(own.scale)[i] - y_TD
    copied += np.asarray(own.bias)[i] if style == "gpt2" else 0
    np.testing.assert_allclose(found.copied_L[i], (copied**2).sum() / (y_TD**2).sum(), rtol=1e-3)
  assert (found.fitted_L < found.copied_L).all()
  assert (found.bias_LD is None) == (style == "llama")
