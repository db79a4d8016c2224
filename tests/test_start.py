"""Commands that run a training step ask jax for what the run needs before it finds its devices."""

import os

import pytest

from scmoe import profile, replay, train
from scmoe.run import start
from scmoe.run.config_files import find_config, load_config
from scmoe.run.fields import with_field
from scmoe.run.opened import Stored

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
FIELDS = {"mesh.moments_in": "host", "train.deterministic": "true"}
WORDS = ["--config=quickstart", "--smoke", *(f"--config.{name}={x}" for name, x in FIELDS.items())]


class Devices(Exception):
  """Here the command would look for devices."""


def stored(*args):
  run = load_config(find_config("quickstart"), "smoke")
  for name, text in FIELDS.items():
    run = with_field(run, name, text)
  return Stored(run, 1, {})


@pytest.mark.parametrize(
  ("command", "words", "first"),
  [(train, WORDS, "train.prepare"), (profile, WORDS, "profile.compared"),
   (replay, ["runs/a/replay"], "run.placement.on_mesh")],
)  # fmt: skip
def test_pinned_memory_and_determinism_are_asked_for(monkeypatch, tmp_path, command, words, first):
  def devices(*args, **options):
    raise Devices

  asked = []
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv(LIMIT, "")
  monkeypatch.delenv(LIMIT)
  monkeypatch.setattr(start.determinism, "request", lambda: asked.append("determinism"))
  monkeypatch.setattr(replay, "open_run", stored)
  monkeypatch.setattr(replay, "_failure", lambda bundle: None)
  monkeypatch.setattr(f"scmoe.{first}", devices)
  with pytest.raises(Devices):
    command.main(words)
  assert int(os.environ[LIMIT]) > 0
  assert asked == ["determinism"]
