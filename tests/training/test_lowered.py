"""Programs that an earlier start lowered: the same results, and no program of another function."""

import hashlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scmoe.training import lowered
from scmoe.training.compiled import CACHE


def step_of(scale=2.0):
  mesh = Mesh(np.array(jax.devices()[:1]), ("data",))

  def local(state, key, x):
    noise = jax.random.normal(key, x.shape)
    return {"w": state["w"] * scale + x.sum()}, jnp.sin(x) + noise

  def step(state, key, x):
    specs = (P(), P(), P("data"))
    out = (P(), P("data"))
    manual = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return manual(state, key, x)

  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  args = ({"w": put(jnp.ones(3), P())}, jax.random.key(1), put(jnp.arange(4.0), P("data")))
  return jax.jit(step, donate_argnums=0), args


@pytest.fixture
def kept(tmp_path):
  folder = getattr(jax.config, CACHE)
  jax.config.update(CACHE, str(tmp_path))
  yield lambda: sorted(tmp_path.rglob("lowered-*"))
  jax.config.update(CACHE, folder)


def run(step, args):
  return compiled(step, args)(*args)


def compiled(step, args, *, gpu=True):
  return lowered.lower(step, step.trace(*args), args, gpu=gpu).compile()


def test_second_start_does_not_lower(kept, monkeypatch):
  step, args = step_of()
  expected = jax.tree.map(np.asarray, step(*jax.tree.map(jnp.copy, args)))
  first = run(step, args)
  assert len(kept()) == 1
  monkeypatch.setattr(lowered, "_exported", lambda *_: pytest.fail("lowered again"))
  monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # how much memory, and when
  step, args = step_of()
  second = run(step, args)
  for found in (first, second):
    jax.tree.map(np.testing.assert_array_equal, found, expected)
  assert args[0]["w"].is_deleted()  # donated, as by the step


def test_result_is_an_argument_again(kept):
  step, args = step_of()
  program = compiled(step, args)
  state, _ = program(*args)
  state, _ = program(state, *args[1:])
  np.testing.assert_array_equal(state["w"], np.ones(3) * 4 + 6 * 2 + 6)


def test_another_program_is_lowered(kept):
  run(*step_of())
  state, _ = run(*step_of(scale=3.0))
  np.testing.assert_array_equal(state["w"], np.ones(3) * 3 + 6)
  assert len(kept()) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_damaged_file_is_lowered_again(kept, damage):
  run(*step_of())
  (file,) = kept()
  whole = file.read_bytes()
  flipped = whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]
  file.write_bytes({"cut": whole[:-9], "flipped": flipped, "empty": b""}[damage])
  state, _ = run(*step_of())
  np.testing.assert_array_equal(state["w"], np.ones(3) * 2 + 6)
  kept_again = file.read_bytes()
  assert hashlib.sha256(kept_again[32:]).digest() == kept_again[:32]


def test_compiler_options_stay(kept):
  step, args = step_of()
  options = {"xla_cpu_enable_fast_math": True}
  with_options = jax.jit(inspect.unwrap(step), compiler_options=options)
  run(with_options, args)
  wrong = jax.jit(inspect.unwrap(step), compiler_options={"xla_no_such_option": True})
  with pytest.raises(Exception, match="xla_no_such_option"):
    run(wrong, args)


def test_callbacks_are_not_kept(kept):
  def step(x):
    jax.debug.callback(lambda y: None, x)
    return x + 1

  np.testing.assert_array_equal(run(jax.jit(step), (jnp.ones(2),)), np.full(2, 2.0))
  assert not kept()


def test_no_gpu_or_several_devices_lower_as_usual(kept):
  step, args = step_of()
  compiled(step, args, gpu=False)
  mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
  x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("data")))
  np.testing.assert_array_equal(run(jax.jit(lambda x: x * 2), (x,)), np.arange(4.0) * 2)
  assert not kept()
