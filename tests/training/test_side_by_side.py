"""Seeds side by side in one program are the runs that each would be alone."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from covering import night

from scmoe.base.errors import ConfigError, NonFiniteError, Preempted
from scmoe.models.vision.augment import AugmentConfig
from scmoe.run.config import RunConfig
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.train import beside, train, train_seeds
from scmoe.training import side_by_side
from scmoe.training.metrics import metrics_by_kind

SEEDS = (0, 3)
# What depends on the clock, or on what else the process holds.
TIMES = ("seconds_per_step", "tokens_per_second", "eta_seconds", "host_memory_bytes", "mfu")
MIXED = AugmentConfig(flip=0.5, crop=2, mixup=0.8, cutmix=1.0, erase=0.5, label_smoothing=0.1)


def run_of(config: str, seed: int = 0, **train_fields) -> RunConfig:
  run = load_config(find_config(config), "smoke")
  options = {"steps": 4, "tensorboard": False, "eval_batches": 1, "eval_every": 2, "seed": seed}
  options |= {"sample_tokens": 0, **train_fields}
  return dataclasses.replace(
    run,
    name=f"seed-{seed}",
    model=dataclasses.replace(run.model, dtype="float32", num_layers=2),
    router=dataclasses.replace(run.router, noise=0.5, bias="sign"),
    augment=MIXED if run.model.reads_images else run.augment,
    train=dataclasses.replace(run.train, **options),
    checkpoint=dataclasses.replace(run.checkpoint, every=2, keep=1),
    mesh=dataclasses.replace(run.mesh, data=1, expert=1, tensor=1),
  )


def same_rows(a, b):
  """The lines of metrics.jsonl, but for times; per-layer numbers have four digits there."""
  found, wanted = metrics_by_kind(a), metrics_by_kind(b)
  assert list(found) == list(wanted) == ["start", "train", "eval", "end"]
  for kind in ("train", "eval"):
    assert len(found[kind]) == len(wanted[kind])
    for one, other in zip(found[kind], wanted[kind]):
      assert list(one) == list(other)
      for name in sorted(set(one) - set(TIMES) - {"kind", "layers"}):
        np.testing.assert_allclose(one[name], other[name], rtol=2e-6, atol=2e-6, err_msg=name)
      for name, layers in one.get("layers", {}).items():
        np.testing.assert_allclose(layers, other["layers"][name], rtol=2e-3, atol=1e-6)


def same_state(found, wanted):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
  ("config", "stopped"),
  [night("shapes_vit", True), night("quickstart", True), ("quickstart", False)],
)
def test_seeds_are_the_runs_that_each_is_alone(config, stopped, tmp_path, capsys):
  alone = [train(run_of(config, seed), tmp_path / f"alone-{seed}") for seed in SEEDS]
  asked = [(run_of(config, seed, stop_after=2), tmp_path / f"beside-{seed}") for seed in SEEDS]
  if stopped:
    with pytest.raises(Preempted, match="stopped at step 2 of 4 and saved"):
      train_seeds(asked)
  capsys.readouterr()
  found = train_seeds([(run_of(config, seed), folder) for seed, (_, folder) in zip(SEEDS, asked)])
  told = [line for line in capsys.readouterr().out.splitlines() if "compiling" in line]
  assert len(told) == 2, "one program, begun and done, and none of each seed's own"
  for state, wanted, seed in zip(found, alone, SEEDS):
    same_state(state, wanted)
    same_rows(tmp_path / f"beside-{seed}", tmp_path / f"alone-{seed}")
  first, second = (jax.tree.leaves(state.params)[0] for state in found)
  assert not np.array_equal(first, second)


def test_a_seed_that_fails_ends_alone(tmp_path, monkeypatch):
  """The seeds have one program; only the first one's weights of the loss are not finite."""
  runs = [(run_of("quickstart", seed, max_skipped_in_row=0, eval_every=0), tmp_path / str(seed))
          for seed in SEEDS]  # fmt: skip
  spoil = side_by_side.Lane.next_batch

  def next_batch(lane):
    batch = spoil(lane)
    if lane.train.seed == SEEDS[0] and lane.step == 1:
      batch = dataclasses.replace(batch, weights=np.full_like(batch.weights, np.nan))
    return batch

  monkeypatch.setattr(side_by_side.Lane, "next_batch", next_batch)
  with pytest.raises(NonFiniteError, match="step 2"):
    train_seeds(runs)
  failed, fine = (metrics_by_kind(folder) for _, folder in runs)
  assert "end" not in failed
  assert [line["step"] for line in failed["train"]] == [1, 2]
  assert fine["end"][-1]["step"] == 4
  assert all(line["finite"] for line in fine["train"])


@pytest.mark.parametrize(
  ("fields", "said"),
  [
    ({"mesh.data": "2"}, "run on one device, got a mesh of 2; set mesh.data=1"),
    ({"train.tune": "chunks=1,2"}, "train.tune='chunks=1,2' needs a program of its own"),
    (
      {
        "model.ffn.backend": "mosaic_gpu",
        "model.dtype": "bfloat16",
        "model.width": "64",
        "model.mlp_hidden": "64",
      },
      "was not tried for several seeds at once",
    ),
  ],
)
def test_what_cannot_go_side_by_side_is_refused(fields, said, tmp_path):
  run = run_of("shapes_vit")
  for name, text in fields.items():
    run = with_field(run, name, text)
  with pytest.raises(ConfigError, match=re.escape(said)):
    train_seeds([(run, tmp_path / "a"), *beside(run, [f"1={tmp_path / 'b'}"])])


def test_other_differences_than_the_seed_are_refused(tmp_path):
  one, other = run_of("shapes_vit", 0), run_of("shapes_vit", 1, log_every=2)
  with pytest.raises(ConfigError, match=r"but train\.log_every is 1 in one and 2 in another"):
    train_seeds([(one, tmp_path / "a"), (other, tmp_path / "b")])
  with pytest.raises(ConfigError, match=r"must differ and be below 2147483648, got \[0, 0\]"):
    train_seeds([(one, tmp_path / "a"), (one, tmp_path / "b")])
  with pytest.raises(ConfigError, match="--beside='3' is not SEED=FOLDER"):
    beside(one, ["3"])
