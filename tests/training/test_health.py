"""Collapsed routers are named once, with their layer, after as many steps as asked for."""

import jax.numpy as jnp
import numpy as np
import training_fakes as fakes

from scmoe.training.health import CollapseAlarm

GOOD, BAD = (0.0, 0.9), (0.5, 0.2)


def arrays(*layers):
  dead, diversity = zip(*layers)
  return {"dead": np.array(dead), "diversity": np.array(diversity)}


def test_it_names_the_layer_and_what_would_do():
  alarm = CollapseAlarm(20)
  assert alarm.check(10, arrays(GOOD, BAD)) is None
  assert alarm.check(20, arrays(GOOD, BAD)) is None
  text = alarm.check(30, arrays(GOOD, BAD))
  assert text is not None
  assert "MoE layer 1 (50 % of its experts without a token, diversity 0.20)" in text
  assert "router.balance_loss" in text
  assert "\n" not in text


def test_each_sign_is_enough():
  for layer in ((0.3, 0.9), (0.0, 0.29)):
    alarm = CollapseAlarm(1)
    assert alarm.check(1, arrays(layer)) is None
    assert alarm.check(2, arrays(layer))
  alarm = CollapseAlarm(1)
  assert [alarm.check(step, arrays((0.25, 0.3))) for step in (1, 2, 3)] == [None] * 3


def test_it_speaks_once_per_episode():
  alarm = CollapseAlarm(1)
  said = [bool(alarm.check(s, arrays(p))) for s, p in enumerate([BAD, BAD, BAD, GOOD, BAD, BAD])]
  assert said == [False, True, False, False, False, True]


def test_zero_steps_and_models_without_routers_are_silent():
  silent = CollapseAlarm(0)
  assert [silent.check(step, arrays(BAD)) for step in range(3)] == [None] * 3
  assert CollapseAlarm(1).check(5, {"load": np.ones(3)}) is None


def test_a_run_warns(mesh1, tmp_path, capsys):
  class Collapsed(fakes.Objective):
    def metrics(self, aux):
      scalars, arrays = super().metrics(aux)
      return scalars, arrays | {"dead": jnp.array([0.5]), "diversity": jnp.array([0.1])}

  options = {"steps": 5, "log_every": 1, "collapse_steps": 2}
  fakes.trainer(mesh1, tmp_path, objective=Collapsed(), **options).run()
  lines = [line for line in capsys.readouterr().err.splitlines() if "routers collapsed" in line]
  assert len(lines) == 1
  assert "step 3: routers collapsed for 2 steps in MoE layer 0" in lines[0]
