"""Adapters from the command line: a base that stays, bitwise resume, merged on the way out."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from drawn import drawn_init

from scmoe import convert, evaluate, generate, train
from scmoe.base.errors import CheckpointError, ConfigError, Preempted
from scmoe.models.low_rank import Adapters, LoraConfig
from scmoe.run import build
from scmoe.run.adapters import (
  BASE,
  build_training,
  digest_of_base,
  restore_weights,
  restore_weights_on_host,
)
from scmoe.run.base import load_base, with_base
from scmoe.run.config import to_dict
from scmoe.run.config_files import find_config, load_config
from scmoe.run.dry_run import dry_run
from scmoe.run.opened import open_run
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.description import WEIGHTS_ONLY
from scmoe.training.metrics import read_metrics
from scmoe.training.options import CheckpointConfig
from scmoe.training.restore import read_meta, restore_part

pytestmark = pytest.mark.usefixtures("quickly")


QUICK = ("--config=finetune_lora", "--smoke", "--config.train.tensorboard=false",
         "--config.mesh.data=1", "--config.checkpoint.keep=9", "--config.lora.rank=2",
         "--config.train.sample_tokens=0", "--config.router.bias=sign")  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """A base with random weights and balancing biases, and another one; nothing has trained them."""
  root = tmp_path_factory.mktemp("adapted")
  run = load_config(find_config("finetune_lora"), "smoke")
  router = dataclasses.replace(run.router, bias="sign")
  mesh = dataclasses.replace(run.mesh, data=1)
  run = dataclasses.replace(run, router=router, mesh=mesh)
  run = run.resolve(num_devices=1, vocab_size=build.vocab_size(run.data))
  built = build.build(run, jax.devices()[:1])
  for name, seed in (("base", 7), ("other", 8)):
    params, state = drawn_init(built, seed=seed)(None)
    state["bias"] = state["bias"] + 0.25 * np.arange(state["bias"].shape[-1], dtype=np.float32)
    keeper = Checkpointer(root / name, CheckpointConfig(async_save=False))
    meta = {"config": to_dict(run), "processes": 1, WEIGHTS_ONLY: True}
    keeper.save_now(0, {"params": params, "router": state}, {}, meta)
    keeper.close()
  return root


def run(workdir, base, *argv):
  train.main([*QUICK, f"--workdir={workdir}", f"--config.train.init_from={base}", *argv])


@pytest.fixture(scope="module")
def tuned(root):
  """Adapters of the base after four steps; the base is gone since."""
  moving = shutil.copytree(root / "base", root / "moving")
  with pytest.raises(Preempted):
    run(root / "tuned", moving, "--config.train.steps=4", "--config.train.stop_after=2")
  shutil.rmtree(moving)
  run(root / "tuned", moving, "--config.train.steps=4")
  return root / "tuned"


def parameters(workdir, step=None):
  stored = open_run(str(workdir), step)
  wanted = {"params": build.build(stored.run).shapes}
  return stored, jax.device_get(restore_weights(workdir, stored.run, wanted, stored.step)["params"])


@pytest.mark.nightly  # by day test_moments.py and test_average.py resume bitwise
def test_a_resumed_run_is_bitwise_the_same_and_needs_no_other_folder(root, tuned):
  run(root / "whole", root / "base", "--config.train.steps=4")
  # `train.init_from` names another folder, so configurations differ; the arrays do not.
  pairs = [read_meta(folder, 4)["leaves"] for folder in (root / "whole", tuned)]
  prints = [{name: leaf["fingerprint"] for name, leaf in leaves.items()} for leaves in pairs]
  assert prints[0] == prints[1]


def test_checkpoints_hold_adapters_and_the_base_stays_as_it_is(root, tuned):
  leaves = read_meta(tuned, 4)["leaves"]
  weights = [name for name in leaves if name.startswith("params.")]
  assert weights
  assert all(name.endswith((".lora_a", ".lora_b")) for name in weights)
  assert not any("norm" in name or "mlp" in name for name in leaves)
  kept, given = (read_meta(folder)["leaves"] for folder in (tuned / BASE, root / "base"))
  assert {n: x["fingerprint"] for n, x in kept.items()} == {
    n: x["fingerprint"] for n, x in given.items()
  }
  # The run began with its base's biases, not with zeros.
  stored = open_run(str(tuned), 4)
  shapes = build.build(stored.run).router_shapes
  bias = restore_part(tuned, {"router": shapes}, 4)["router"]["bias"]
  assert np.abs(np.asarray(bias)[:, -1] - 0.75).max() < 0.1


def test_weights_that_are_read_are_merged(root, tuned, capsys):
  stored, merged = parameters(tuned)
  wanted = {"params": build.build(stored.run).shapes}
  base = jax.device_get(restore_part(tuned / BASE, wanted)["params"])
  adapters = Adapters(stored.run.lora, wanted["params"])
  own = jax.device_get(restore_part(tuned, {"params": adapters.shapes}, 4)["params"])
  at = lambda tree: tree["stages"]["moe"]["experts"]["up"]
  product = at(own)["lora_a"] @ at(own)["lora_b"]
  assert np.abs(product).max() > 1e-5
  np.testing.assert_allclose(at(merged), at(base) + 16 / 2 * product, atol=1e-6)
  on_host = restore_weights_on_host(tuned, stored.run, wanted["params"], 4)
  jax.tree.map(np.testing.assert_array_equal, on_host, merged)
  norm = lambda tree: tree["norm"]["scale"]
  np.testing.assert_array_equal(norm(merged), norm(base))
  # The folders that leave hold the sums.
  convert.main([f"--workdir={tuned}", f"--to={root / 'out'}", "--mesh=data=1"])
  convert.main([f"--workdir={tuned}", f"--inference={root / 'plain'}", "--mesh=data=1"])
  assert json.loads((root / "plain" / "config.json").read_text())["lora"]["rank"] == 0
  ours = evaluate.evaluate_run(str(tuned), mesh="data=1", max_batches=2)
  theirs = evaluate.evaluate_run(model=str(root / "plain"), mesh="data=1", max_batches=2)
  np.testing.assert_allclose(theirs["loss"], ours["loss"], rtol=1e-6)
  last = read_metrics(tuned, "eval")[-1]
  np.testing.assert_allclose(last["loss"], ours["loss"], rtol=1e-6)
  convert.main([f"--from={root / 'out'}", f"--workdir={root / 'again'}", "--mesh=data=1"])
  _, again = parameters(root / "again")
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again, merged)
  capsys.readouterr()
  generate.main([f"--workdir={tuned}", "--prompt=1+2", "--max_new_tokens=2", "--mesh=data=1"])
  assert "1+2" in capsys.readouterr().out


@pytest.mark.nightly  # by day test_finetuning.py, with a base of its own
def test_preferences_compare_with_the_base_that_is_merged_from_adapters(root, tuned):
  """The reference is the base without adapters; the base here is itself one with adapters."""
  argv = ("--config.data.source=preference", "--config.router.noise=0", "--config.train.steps=3")
  run(root / "dpo", tuned, *argv)
  lines = read_metrics(root / "dpo")
  assert abs(lines[0]["reward_margin"]) < 1e-5
  assert abs(lines[-1]["reward_margin"]) > 1e-6
  assert not (root / "dpo" / "teacher.json").exists()
  _, merged = parameters(tuned)
  wanted = {"params": build.build(open_run(str(tuned), 4).run).shapes}
  base = jax.device_get(restore_part(root / "dpo" / BASE, wanted)["params"])
  jax.tree.map(np.testing.assert_array_equal, base, merged)


def test_a_dry_run_counts_adapters_and_the_frozen_model(root):
  stored = open_run(str(root / "base"), None).run
  train_options = dataclasses.replace(stored.train, init_from="base")
  adapted = dataclasses.replace(stored, lora=LoraConfig(rank=2), train=train_options)
  plain, own = dry_run(stored).memory, dry_run(adapted).memory
  shapes = Adapters(adapted.lora, build.build(stored).shapes).shapes
  trained = 4 * sum(x.size for x in jax.tree.leaves(shapes))
  assert own.frozen == plain.parameters > 5 * trained
  assert (own.parameters, own.gradients) == (trained, trained)
  assert 0 <= own.optimizer - 2 * trained < 64  # two moments, and counters


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["--config.model.width=32"], "init_from=.*is another model .*model.width: 16 -> 32"),
    (["--config.model.num_experts=8"], "init_from=.*is another model .*num_experts: 4 -> 8"),
    (
      ["--config.train.init_from=missing"],
      "train.init_from='missing': no valid checkpoint in .*missing.*; give the folder of a run",
    ),
    (["--config.lora.base=abc"], "lora.base='abc' is not the model in train.init_from"),
    (["--config.train.init_from=NEW"], "train.init_from=.* is the run itself"),
    (["--config.lora.targets=heads"], "lora.targets='heads'.*is unknown"),
  ],
)
def test_another_model_is_refused_and_nothing_is_written(root, tmp_path, argv, message):
  argv = [word.replace("NEW", str(tmp_path / "new")) for word in argv]
  with pytest.raises((ConfigError, CheckpointError), match=message) as caught:
    run(tmp_path / "new", root / "base", *argv)
  assert "\n" not in str(caught.value)
  assert not list((tmp_path / "new").glob("checkpoints/*"))
  if "is another model" in message or "no valid checkpoint" in message:
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
  ("inside", "message"),
  [
    ("a run's logs", "base exists and is no copy"),
    ("weights alone", "base exists and is no copy"),
    ("the model to adapt", "base'? lies in .*base, where this run keeps its own copy"),
  ],
)
def test_a_folder_that_the_user_has_where_the_copy_goes_stays(root, tmp_path, inside, message):
  """WORKDIR/base may be the user's own model, e.g. runs/base for a run in runs."""
  place = tmp_path / BASE
  if inside == "a run's logs":
    place.mkdir()
    (place / "metrics.jsonl").write_text("{}\n")
  else:
    shutil.copytree(root / "base", place)
  before = sorted(place.rglob("*"))
  base = place if inside == "the model to adapt" else root / "base"
  with pytest.raises(ConfigError, match=message) as caught:
    run(tmp_path, base)
  assert "\n" not in str(caught.value)
  assert sorted(place.rglob("*")) == before


def test_a_copy_that_an_earlier_start_left_is_replaced(root, tmp_path):
  """Such a start ended before its first checkpoint; a half-written step may lie beside the copy."""
  stored = open_run(str(root / "base"), None).run
  digests = []
  for name in ("other", "base"):
    of = dataclasses.replace(stored.train, init_from=str(root / name))
    adapted = dataclasses.replace(stored, lora=LoraConfig(rank=2), train=of)
    digests.append(with_base(adapted, tmp_path).lora.base)
    (tmp_path / BASE / "checkpoints" / "0.orbax-checkpoint-tmp-5").mkdir()
  assert len(set(digests)) == 2
  assert digests[1] == digest_of_base(tmp_path)


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["--config.lora.rank=4"], "lora.rank: 2 -> 4"),
    (["--config.lora.targets=experts"], "lora.targets: attention,experts -> experts"),
    (["--config.lora.rank=0"], "lora.rank: 2 -> 0"),
    (["--config.lora.base=abc"], "lora.base='abc' is not the model in .*base, which is"),
  ],
)
def test_a_run_goes_on_with_its_own_adapters_only(root, tuned, argv, message):
  before = sorted(path.name for path in (tuned / "checkpoints").iterdir())
  with pytest.raises((ConfigError, CheckpointError), match=message):
    run(tuned, root / "base", "--config.train.steps=4", *argv)
  assert sorted(path.name for path in (tuned / "checkpoints").iterdir()) == before


def test_a_base_that_was_exchanged_or_removed_is_refused(root, tuned, tmp_path):
  other = shutil.copytree(tuned, tmp_path / "other")
  shutil.rmtree(other / BASE)
  with pytest.raises(ConfigError, match="holds checkpoints and no base"):
    run(other, root / "moving", "--config.train.steps=4")
  with pytest.raises(CheckpointError, match=r"no valid checkpoint in .*base"):
    evaluate.evaluate_run(str(other), mesh="data=1", max_batches=1)
  stored = open_run(str(other), None).run
  shutil.copytree(root / "other", other / BASE)
  with pytest.raises(ConfigError, match=r"lora.base: .* -> "):
    run(other, root / "moving", "--config.train.steps=4")
  with pytest.raises(ConfigError, match="is not the model that its adapters were trained on"):
    evaluate.evaluate_run(str(other), mesh="data=1", max_batches=1)
  # A replay reads the base through the same function, and would blame the hardware.
  with pytest.raises(ConfigError, match="is not the model that its adapters were trained on"):
    load_base(build_training(stored), other)
