"""A checkpoint travels over expert-parallel sizes without a changed bit: 2 -> 1 -> 4 -> 8.

Parameters and optimizer moments; every expert distinct and where it was. With 4 experts, 8 devices
share each expert's hidden width between two of them.
"""

import dataclasses

import jax
import numpy as np
import pytest
from drawn import drawn_init

from scmoe.parallel.mesh import MeshConfig
from scmoe.run import build
from scmoe.run.config_files import find_config, load_config
from scmoe.training.checkpoint import Checkpointer
from scmoe.training.options import CheckpointConfig
from scmoe.training.step import init_state

SAVING = CheckpointConfig(async_save=False)


def built_on(expert: int) -> build.Built:
  """The smoke model of the quick start, in float32, on `expert` devices of the expert axis."""
  run = load_config(find_config("quickstart"), "smoke")
  run = dataclasses.replace(run, mesh=MeshConfig(data=1, expert=expert))
  return build.build(run.resolve(num_devices=expert, vocab_size=64), jax.devices()[:expert])


def leaves(state) -> dict[str, np.ndarray]:
  flat = jax.tree_util.tree_leaves_with_path(state)
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


@pytest.fixture(scope="module")
def initial():
  """A state of two devices whose moments are as different from expert to expert as its weights."""
  built = built_on(2)
  state = init_state(drawn_init(built), built.optimizer, 0, built.abstract_state())
  copy = lambda moments: jax.tree.map(
    lambda m, p: p * 3 + 1 if m.shape == p.shape else m, moments, state.params
  )
  adam = lambda node: hasattr(node, "mu")
  refill = lambda node: node._replace(mu=copy(node.mu), nu=copy(node.nu)) if adam(node) else node
  return dataclasses.replace(state, opt_state=jax.tree.map(refill, state.opt_state, is_leaf=adam))


def test_no_bit_changes_from_2_to_1_to_4_to_8(initial, tmp_path):
  want = leaves(initial)
  up = next(v for k, v in want.items() if "moe" in k and "up" in k and v.ndim == 4)
  experts = up.reshape(-1, *up.shape[2:])
  assert len({e.tobytes() for e in experts}) == len(experts), "every expert is distinct"
  assert any(".mu" in k and v.std() > 0 for k, v in want.items())

  state = initial
  for index, expert in enumerate((1, 4, 8)):
    folder = tmp_path / str(index)
    saver = Checkpointer(folder, SAVING)
    saver.save_now(1, state, {}, {"config": {}})
    saver.close()
    built = built_on(expert)
    reader = Checkpointer(folder, SAVING)
    restored = reader.restore_latest_valid(built.abstract_state())
    reader.close()
    assert restored is not None
    state = restored.state
    for name, value in leaves(state).items():
      np.testing.assert_array_equal(value, want[name], err_msg=f"{name} on {expert} devices")
