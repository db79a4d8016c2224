"""Norms of gradients by layer and part, against the gradients' own leaves."""

import numpy as np
import pytest

from scmoe import inspect
from scmoe.base.errors import ConfigError
from scmoe.data.config import DataConfig
from scmoe.inference.gradients import PARTS, gradient_norms
from scmoe.models.config import ModelConfig
from scmoe.models.low_rank import LoraConfig
from scmoe.run import placement
from scmoe.run.config import RunConfig
from scmoe.run.model import build_model
from scmoe.run.opened import Stored
from scmoe.training.options import TrainConfig


def tree_of(model):
  """A tree like the parameters, with numbers instead of gradients: the i-th leaf is all i + 1."""
  import jax

  _, shapes = build_model(RunConfig(model=model), None)
  leaves, structure = jax.tree.flatten(shapes)
  full = [np.full(leaf.shape, i + 1.0) for i, leaf in enumerate(leaves)]
  return jax.tree.unflatten(structure, full)


def small(**fields):
  sizes = {"num_layers": 4, "width": 8, "num_heads": 2, "num_experts": 4, "vocab_size": 16,
           "context": 8, "mlp_hidden": 8, "dtype": "float32"}  # fmt: skip
  return ModelConfig(**(sizes | fields)).resolve()


def squares(tree):
  import jax

  return sum(np.square(leaf).sum() for leaf in jax.tree.leaves(tree))


def test_layers_and_parts_of_two_blocks_and_a_moe():
  model = small(wiring="scmoe_pos2")
  tree = tree_of(model)
  found = gradient_norms(tree, model)
  assert list(found) == list(PARTS)
  blocks, moe = tree["stages"]["units"][0]["blocks"], tree["stages"]["moe"]
  at = lambda node, pair: {
    k: at(v, pair) if isinstance(v, dict) else v[pair] for k, v in node.items()
  }
  for pair in (0, 1):
    for block in (0, 1):
      expected = squares(at(blocks[block]["attention"], pair)) ** 0.5
      assert found["attention"][2 * pair + block] == pytest.approx(expected)
    assert found["mlp"][2 * pair] == pytest.approx(squares(at(blocks[0]["mlp"], pair)) ** 0.5)
    shared = squares(at(blocks[1]["mlp"], pair)) ** 0.5
    assert found["shared expert"][2 * pair + 1] == pytest.approx(shared)
    experts = squares(at(moe["experts"], pair)) ** 0.5
    assert found["experts"][2 * pair + 1] == pytest.approx(experts)
  assert np.isnan(found["mlp"][1::2]).all()
  assert np.isnan(found["experts"][::2]).all()
  inside = sum(np.nansum(np.square(norms)) for norms in found.values())
  assert inside == pytest.approx(squares(tree["stages"]))


def test_a_dense_layer_between_pairs_with_a_shared_expert_has_an_mlp():
  model = small(wiring="shared_expert", moe_every=1, dense_layers="0,2")
  found = gradient_norms(tree_of(model), model)
  np.testing.assert_array_equal(np.isfinite(found["mlp"]), [True, False, True, False])
  for part in ("shared expert", "experts", "gate"):
    np.testing.assert_array_equal(np.isfinite(found[part]), [False, True, False, True])


@pytest.mark.parametrize("fields", [
  {"wiring": "topk", "moe_every": 1, "dense_layers": "0,2"},
  {"wiring": "dgmoe_share", "shortcut_norm": "megatron"},
  {"wiring": "scmoe_pos2_l0"},
  {"architecture": "vit", "wiring": "farskip"},
], ids=lambda f: f["wiring"])  # fmt: skip
def test_nothing_is_lost_or_counted_twice(fields):
  model = small(**fields)
  tree = tree_of(model)
  found = gradient_norms(tree, model)
  assert {norms.shape for norms in found.values()} == {(4,)}
  assert np.isfinite(found["attention"]).all()
  inside = sum(np.nansum(np.square(norms)) for norms in found.values())
  parts = list(tree["trunks"].values()) if "trunks" in tree else [tree]
  stacks = [trunk[name] for trunk in parts for name in ("stages", "dense") if trunk.get(name)]
  assert inside == pytest.approx(sum(squares(stack) for stack in stacks))


class Built(Exception):
  """The run passed the check and would be built."""


@pytest.mark.parametrize(("data", "train", "lora", "words"), [
  ("auto", {"teacher": "runs/a"}, 0, "train.teacher='runs/a'"),
  ("preference", {"teacher": "runs/a"}, 0, "train.teacher='runs/a'"),
  ("preference", {}, 4, "train.reference_free=False, with the base of the adapters"),
  ("preference", {"reference_free": True}, 4, None),
  ("auto", {}, 4, None),
])  # fmt: skip
def test_a_loss_of_two_models_has_no_gradients_here(data, train, lora, words, monkeypatch):
  """Nothing loads the second model, so the gradients would be those of another loss."""
  run = RunConfig(
    data=DataConfig(source=data), train=TrainConfig(**train), lora=LoraConfig(rank=lora)
  )

  def passed(run):
    raise Built

  monkeypatch.setattr(inspect, "open_run", lambda workdir, step: Stored(run, 3, {}))
  monkeypatch.setattr(placement, "single_device", passed)
  with pytest.raises(ConfigError if words else Built) as caught:
    inspect.inspect_run("runs/b", 3, gradients=True)
  if words:
    assert f"--gradients=True needs a loss of one model, got {words}" in str(caught.value)
