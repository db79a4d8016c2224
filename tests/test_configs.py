"""Every config with every wiring takes a step; a change of wiring changes nothing else."""

import ast
import functools
import itertools
import math

import jax
import numpy as np
import pytest
from covering import night

from scmoe.blocks.wiring import WIRINGS
from scmoe.run import build
from scmoe.run.config import to_dict
from scmoe.run.config_files import config_names, find_config, load_config
from scmoe.run.fields import with_field
from scmoe.run.modality import modality_of

# Each config runs once as it is, each wiring once as quickstart; the rest are traced only, by day
# each config with one wiring.
RUN = [(name, "") for name in config_names() if name != "quickstart"]
RUN += [("quickstart", wiring) for wiring in WIRINGS]
TRACED = [(name, wiring) for name in config_names() for wiring in ("", *WIRINGS)]
TRACED = [case for case in TRACED if case not in RUN]
BY_DAY = set(zip(config_names(), itertools.cycle(WIRINGS)))
# Made small they are others' like, or other tests run them: `gpt2_moe_medium` and `llama2_moe`,
# `finetune_small`, test_teacher.py, test_vision.py, `longcat_flash_small`, test_sequence_axis.py,
# `shapes_vit`, test_preference.py.
RUN_BY_NIGHT = {"gpt2_moe_small", "gpt3_moe_xl", "finetune_lora", "distillation", "cifar10_swin"}
RUN_BY_NIGHT |= {"cifar10_vit", "preference_small"}
RUN_BY_NIGHT |= {"gpt_moe_1t", "longcat_flash", "deepseek_v3"}
# With a shortcut and without an MoE; by day test_wirings.py has the gradients of all wirings.
WIRED_BY_DAY = {"", "dense", "scmoe_pos2"}


@functools.cache
def smoke(name, wiring=""):
  run = load_config(find_config(name), "smoke")
  run = run if not wiring else with_field(run, "model.wiring", wiring)
  run = run if not wiring.endswith("share") else with_field(run, "model.num_layers", "4")
  return run.resolve(num_devices=1, vocab_size=build.vocab_size(run.data))


def loss_of(run):
  """(function, abstract arguments) of the loss and its gradients."""
  built = build.build(run, jax.devices()[:1])
  batch = modality_of(run).batch_shapes(run, (2,))
  bare = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), built.shapes)
  function = jax.value_and_grad(lambda p, b: built.objective.loss(p, {}, b, None), has_aux=True)
  return built, function, (bare, batch)


@pytest.mark.parametrize("name", config_names())
def test_config_as_it_is_resolves_and_is_a_result_card(name):
  run = load_config(find_config(name))
  assert run.name == name
  need = run.mesh.expert * run.mesh.tensor
  run.resolve(num_devices=need, vocab_size=build.vocab_size(run.data))
  card = ast.get_docstring(ast.parse(find_config(name).read_text())) or ""
  for word in ("command", "hardware", "time", "expect"):
    assert f"\n{word} " in card


@pytest.mark.parametrize(
  ("name", "wiring"), [case if case in BY_DAY else night(*case) for case in TRACED]
)
def test_every_config_with_every_wiring_has_a_loss(name, wiring):
  built, _, (params, batch) = loss_of(smoke(name, wiring))
  loss, _ = jax.eval_shape(lambda p, b: built.objective.loss(p, {}, b, None), params, batch)
  assert loss.shape == ()


@pytest.mark.each_jax
@pytest.mark.parametrize(
  ("name", "wiring"),
  [
    case if case[0] not in RUN_BY_NIGHT and case[1] in WIRED_BY_DAY else night(*case)
    for case in RUN
  ],
)
def test_one_step(name, wiring):
  run = smoke(name, wiring)
  built, function, (params, _) = loss_of(run)
  numbers = np.random.default_rng(0)
  weights = jax.tree.map(lambda p: 0.02 * numbers.standard_normal(p.shape, np.float32), params)
  fed = modality_of(run).random_batch(run, (2,), seed=0)
  (_, aux), grads = jax.jit(function)(weights, fed)
  scalars, _ = built.objective.metrics(aux)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
  # Fresh weights know nothing: the cross-entropy is that of a uniform guess.
  uniform = math.log(run.model.vocab_size)
  assert float(scalars["cross_entropy"]) == pytest.approx(uniform, rel=0.05)
  assert ("drop" in scalars) == bool(run.model.wiring_rule.taps)


@pytest.mark.parametrize("wiring", WIRINGS)
def test_wiring_is_one_word(wiring):
  base, other = to_dict(smoke("quickstart")), to_dict(smoke("quickstart", wiring))
  other["model"]["wiring"] = base["model"]["wiring"]
  assert base == other


def test_smoke_keeps_the_character_of_the_config():
  for name in config_names():
    full, small = load_config(find_config(name)), smoke(name)
    for field in ("style", "wiring", "moe_every", "dtype", "tie_embeddings"):
      assert getattr(full.model, field) == getattr(small.model, field)
    assert full.train.remat == small.train.remat
    assert full.dispatch == small.dispatch
