"""experiments/exchange_cost/wirings.py: every arm is a step that can be made."""

import pytest
from scripts import script

from scmoe.base.errors import ConfigError
from scmoe.run import build


@pytest.fixture(scope="module")
def wirings():
  """The script as a module."""
  return script("exchange_cost/wirings.py")


def test_arms_of_a_name_and_fields_stand_beside_the_wirings(wirings):
  arms = wirings.arms_of(["top2"], [["four", "model.wiring=top2", "a.b=c=d"]], chunks=False)
  assert arms == {
    "top2": {"model.wiring": "top2"},
    "four": {"model.wiring": "top2", "a.b": "c=d"},
  }


@pytest.mark.parametrize(
  ("names", "own", "message"),
  [
    (["top2"], [["top2", "model.wiring=top2"]], "--arm 'top2' names an arm that there is already"),
    ([], [], "there is no arm to time"),
    ([], [["four", "dispatch.chunks"]], "'dispatch.chunks' is not of the form FIELD=VALUE"),
  ],
)
def test_arms_that_cannot_be_are_refused(wirings, names, own, message):
  with pytest.raises(ConfigError, match=message):
    wirings.arms_of(names, own, chunks=False)


def test_another_configuration_keeps_its_sizes(wirings):
  given = wirings.configured("olmoe", {})
  run = wirings.configured("olmoe", wirings.sizes_of("olmoe"))
  assert run.model == given.model
  assert run.train == given.train
  assert (run.mesh.expert, run.mesh.data) == (2, 1)


def test_every_arm_of_both_links_can_be_built(wirings):
  arms = wirings.arms_of([*wirings.WIRINGS], [], chunks=True)
  assert len(arms) == 2 * len(wirings.WIRINGS)
  for name, own in arms.items():
    run = wirings.configured(wirings.CONFIG, wirings.sizes_of(wirings.CONFIG) | own)
    run = run.resolve(num_devices=2, vocab_size=wirings.VOCABULARY)
    built = build.build(run)
    assert built.train.microbatches(run.data.seq_len) == 4
    assert run.dispatch.chunks == (2 if name.endswith("in chunks") else 1)
    slots = name.endswith("in chunks") and name.split()[0] in wirings.SLOTS
    assert run.overlap.order == ("barriers" if slots else "xla")
    assert run.model.wiring == own["model.wiring"]
    schedule = run.overlap.schedule
    assert schedule.count(",") == 1 if slots else schedule == "auto"
