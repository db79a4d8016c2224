"""Collapsed routers are named once, with their layer, after as many steps as asked for."""

import jax.numpy as jnp
import numpy as np
import training_fakes as fakes

from scmoe.training.health import CollapseAlarm

GOOD, BAD = (0.0, 0.9), (0.5, 0.2)


def arrays(*layers, zero_share=None):
  dead, diversity = zip(*layers)
  given = {} if zero_share is None else {"zero_share": np.array(zero_share)}
  return given | {"dead": np.array(dead), "diversity": np.array(diversity)}


def test_it_names_the_layer_and_what_would_do():
  alarm = CollapseAlarm(20)
  assert alarm.check(10, arrays(GOOD, BAD)) == []
  assert alarm.check(20, arrays(GOOD, BAD)) == []
  (text,) = alarm.check(30, arrays(GOOD, BAD))
  assert "MoE layer 1 (50 % of its experts without a token, diversity 0.20)" in text
  assert "router.balance_loss" in text
  assert "\n" not in text


def test_each_sign_is_enough():
  for layer in ((0.3, 0.9), (0.0, 0.29)):
    alarm = CollapseAlarm(1)
    assert alarm.check(1, arrays(layer)) == []
    assert alarm.check(2, arrays(layer))
  alarm = CollapseAlarm(1)
  assert [alarm.check(step, arrays((0.25, 0.3))) for step in (1, 2, 3)] == [[]] * 3


def test_it_speaks_once_per_episode():
  alarm = CollapseAlarm(1)
  said = [bool(alarm.check(s, arrays(p))) for s, p in enumerate([BAD, BAD, BAD, GOOD, BAD, BAD])]
  assert said == [False, True, False, False, False, True]


def test_zero_steps_and_models_without_routers_are_silent():
  silent = CollapseAlarm(0)
  assert [silent.check(step, arrays(BAD)) for step in range(3)] == [[]] * 3
  assert CollapseAlarm(1).check(5, {"load": np.ones(3)}) == []


def test_layers_whose_zero_experts_take_the_others_choices_are_named():
  """Half of the choices are meant for computing experts; layer 1 gives them 6 %, layer 0 a third.

  `dead` and `diversity` count the choices of computing experts alone, and need not show it.
  """
  alarm, given = CollapseAlarm(20, aimed_share=0.5), arrays(GOOD, GOOD, zero_share=(0.67, 0.94))
  assert [alarm.check(step, given) for step in (0, 10)] == [[], []]
  (text,) = alarm.check(20, given)
  assert text == (
    "step 20: for 20 steps computing experts have had less than half of the 50 % of the choices "
    "that the balancing bias aims at, in MoE layer 1 (6.0 %); raise router.bias_rate"
  )
  assert alarm.check(30, given) == []
  assert [CollapseAlarm(1).check(step, given) for step in (0, 1)] == [[], []], "nothing is aimed at"


def test_where_a_bias_holds_a_share_its_rate_is_the_remedy():
  alarm, given = CollapseAlarm(1, aimed_share=0.5), arrays(BAD, zero_share=(0.4,))
  alarm.check(0, given)
  (text,) = alarm.check(1, given)
  assert text.endswith("; raise router.bias_rate, or lower optimizer.learning_rate")


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


def test_a_run_warns_of_zero_experts_that_take_the_others_choices(mesh1, tmp_path, capsys):
  class Starved(fakes.Objective):
    def metrics(self, aux):
      scalars, arrays = super().metrics(aux)
      return scalars, arrays | {"zero_share": jnp.array([0.9])}

  options = {"steps": 5, "log_every": 1, "collapse_steps": 2}
  fakes.trainer(mesh1, tmp_path, objective=Starved(), aimed_share=0.5, **options).run()
  lines = [line for line in capsys.readouterr().err.splitlines() if "computing experts" in line]
  assert len(lines) == 1
  assert "step 3: for 2 steps computing experts have had less than half of the 50 %" in lines[0]
