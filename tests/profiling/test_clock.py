"""The cost of exchanges by the clock: the formula, and the two controls that it needs."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import night
from jax.sharding import PartitionSpec as P

from scmoe.kernels.put import put_rows
from scmoe.parallel.collectives import Exchange
from scmoe.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh, manual
from scmoe.profiling.clock import Paid
from scmoe.profiling.exchanges import Exchanged, alone, buffers_for, exchanges_of
from scmoe.profiling.timer import Timing, interleave
from scmoe.run import build
from scmoe.run.config_files import find_config, load_config
from scmoe.run.controls import (
  exchanges_alone,
  exchanges_in,
  exchanges_program,
  without_exchanges,
)
from scmoe.run.fields import with_field
from scmoe.training.step import make_train_step


def test_six_pairs_pay_72_percent():
  """The worked example of `scmoe.profiling.clock`, milliseconds as seconds."""
  paid = Paid(Timing((33.2,) * 3, 2), Timing((31.1,) * 3, 2), Timing((2.9,) * 3, 2))
  assert paid.seconds == pytest.approx(2.1)
  assert paid.share == pytest.approx(0.724, abs=1e-3)
  assert paid.spread == 0
  assert "2100.000 ms of 2900.000 ms are paid, 72 % (72 to 72)" in str(paid)


class Machine:
  """A model of the clock: a link beside a computation that an exchange slows down.

  Each turn of the machine is slower than the one before, as a GPU that gets warm.
  """

  def __init__(self, hidden: float, slower: float, drift: float = 0.0):
    self.now, self.pace = 0.0, 1.0
    self.hidden, self.slower, self.drift = hidden, slower, drift

  def __call__(self) -> float:
    return self.now

  def _run(self, seconds: float):
    def run(calls: int) -> None:
      self.now += calls * seconds * self.pace
      self.pace *= 1 + self.drift

    return run

  def paid(self, computation: float, exchanges: float) -> Paid:
    """The formula's result for the times of a program that hides a share of its exchanges."""
    program = computation * (1 + self.slower) + (1 - self.hidden) * exchanges
    arms = {"program": program, "without": computation, "alone": exchanges}
    runs = {name: self._run(seconds) for name, seconds in arms.items()}
    found = interleave(runs, rounds=9, calls=2, clock=self)
    return Paid(found["program"], found["without"], found["alone"])


def test_what_a_trace_shows_as_hidden_is_paid_where_the_computation_slows_down():
  assert Machine(hidden=1, slower=0).paid(30, 3).share == pytest.approx(0)
  assert Machine(hidden=0, slower=0).paid(30, 3).share == pytest.approx(1)
  # Everything has computation beside it, which takes 8 % longer: 2.4 of 3 are paid.
  slowed = Machine(hidden=1, slower=0.08).paid(30, 3)
  assert slowed.share == pytest.approx(0.8)
  assert slowed.spread == pytest.approx(0, abs=1e-9)


def test_a_machine_that_gets_slower_within_a_round_shows_in_the_spread():
  """0.2 % from one arm to the next are 2 % of exchanges that take a tenth of the program."""
  drifting = Machine(hidden=0.5, slower=0, drift=0.002).paid(30, 3)
  assert drifting.share == pytest.approx(0.5, abs=0.03)
  assert 0.01 < drifting.spread < 0.03


def test_a_machine_whose_clock_changes_between_rounds_pays_the_same_share():
  paces = (1.0, 1.3, 0.9, 2.0, 1.1)
  of = lambda seconds: Timing(tuple(seconds * pace for pace in paces), 1)
  paid = Paid(of(31.5), of(30.0), of(3.0))
  assert paid.share == pytest.approx(0.5)
  assert paid.spread == pytest.approx(0, abs=1e-9)
  assert paid.seconds == pytest.approx(1.5 * 1.1), "of the median round"
  assert Paid(Timing((2.0,), 1), Timing((1.0,), 1), Timing((1.0,), 1)).spread == 0


# -- the controls ---------------------------------------------------------------------------------


def step_of(fields: dict[str, str], silent: bool = False):
  """The jaxpr of a small training step on two devices, and its mesh."""
  run = load_config(find_config("quickstart"), "smoke")
  given = {"mesh.expert": "2", "mesh.data": "1", "model.num_layers": "4", **fields}
  for field in given.items():
    run = with_field(run, *field)
  run = run.resolve(num_devices=2, vocab_size=256)
  built = build.build(without_exchanges(run) if silent else run, jax.devices()[:2])
  state = built.abstract_state()
  step = make_train_step(built.objective, built.optimizer, state)
  return step.trace(state, built.batch_shapes).jaxpr, built.mesh


def operations(jaxpr, found=None) -> Counter:
  """How many operations of each kind and shape a program has, calls and loops looked into."""
  found = Counter() if found is None else found
  for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    parts = [v if isinstance(v, (tuple, list)) else [v] for v in eqn.params.values()]
    inner = [v for part in parts for v in part if hasattr(getattr(v, "jaxpr", v), "eqns")]
    for part in inner:
      operations(part, found)
    if not inner:
      found[eqn.primitive.name, str([v.aval for v in eqn.outvars])] += 1
  return found


TRANSPORTS = [
  night({}),
  {"dispatch.chunks": "2", "dispatch.transport": "packed"},
  {"dispatch.transport": "dropless", "train.remat": "full", "overlap.unroll": "0"},
]


@pytest.mark.parametrize("fields", TRANSPORTS)
def test_without_exchanges_the_step_has_the_same_operations_of_the_same_shapes(fields):
  """A barrier takes the place of each all-to-all, so that XLA fuses nothing across it either."""
  (with_them, _), (without, _) = step_of(fields), step_of(fields, silent=True)
  usual, silent = operations(with_them), operations(without)
  gone, new = usual - silent, silent - usual
  assert {name for name, _ in gone} == {"all_to_all"}
  assert {name for name, _ in new} == {"optimization_barrier"}
  assert Counter(shape for _, shape in gone.elements()) == Counter(s for _, s in new.elements())
  assert exchanges_of(without) == []


@pytest.mark.parametrize("fields", TRANSPORTS)
def test_all_exchanges_of_a_step_are_found(fields):
  """Dispatch and combine of two pairs, forward and backward, in one or two chunks."""
  jaxpr, mesh = step_of(fields)
  (found,) = exchanges_of(jaxpr)
  assert found.count == 2 * 2 * 2 * int(fields.get("dispatch.chunks", 1))
  assert found.shape[0] == 2
  assert found.nbytes == found.count * int(np.prod(found.shape)) * 4
  arm = exchanges_alone(jaxpr, mesh)
  assert arm is not None
  arm(2)
  assert exchanges_alone(step_of(fields, silent=True)[0], mesh) is None


@pytest.mark.parametrize("transport", ["capacity", "packed"])
def test_a_recomputed_forward_pass_exchanges_no_row_again(transport):
  """Though a barrier has the shared expert wait for the first chunk's rows, there and back."""
  fields = {"dispatch.transport": transport, "dispatch.chunks": "2", "train.remat": "full"}
  fields |= {"overlap.order": "barriers", "overlap.schedule": "mlp 0, attention 1: projections"}
  (found,) = exchanges_of(step_of(fields)[0])
  assert found.count == 2 * 2 * 2 * 2


@pytest.mark.parametrize("chunks", [1, 2])
def test_all_puts_of_a_step_are_found_and_run_alone(chunks):
  """Each of two pairs puts tokens into tiles, slots into tiles, and tiles into slots twice.

  A device has 64 tokens with one choice each. With the kernel the tiles have other sizes.
  """
  fields = {"dispatch.transport": "put", "dispatch.chunks": str(chunks), "train.remat": "full"}
  jaxpr, mesh = step_of(fields)
  found = {e.shape[0]: e.count for e in exchanges_in(jaxpr)}
  assert exchanges_of(jaxpr) == []
  assert found.pop(64) == 2 * chunks  # no put is computed again
  assert sorted(found.values()) == [2 * chunks, 4 * chunks]
  run, buffers = exchanges_program(exchanges_in(jaxpr), mesh)
  program = run.lower(*buffers).compile().as_text()
  # XLA keeps each, though what arrives has another shape than what the next one sends.
  assert program.count(" all-gather(") >= 8 * chunks
  arm = exchanges_alone(jaxpr, mesh)
  assert arm is not None
  arm(2)
  assert exchanges_in(step_of(fields, silent=True)[0]) == []


def test_puts_alone_bring_as_many_rows_to_each_rank():
  """Each of two devices puts 3 of its 6 rows on each: the first of every two on rank 0."""
  mesh, batch = make_mesh(MeshConfig(expert=2), jax.devices()[:2]), P(BATCH_AXES)

  def program(x, place):
    return put_rows(x, place, num_rows=8, axis="expert")[0]

  x, place = jnp.arange(1.0, 13.0).reshape(12, 1), jnp.full((12, 1), -1)
  jaxpr = jax.jit(manual(program, mesh, (batch, batch), batch)).trace(x, place).jaxpr
  (found,) = exchanges_in(jaxpr)
  assert (found.shape, found.count) == ((6, 1), 1)
  got = jax.jit(manual(found.send, mesh, batch, batch))(x)
  arrived = [1, 3, 5, 7, 9, 11, np.nan, np.nan, 2, 4, 6, 8, 10, 12, np.nan, np.nan]
  np.testing.assert_array_equal(got[:, 0], arrived)


def test_the_exchanges_alone_run_as_often_as_in_the_program():
  """Three of one kind and two of another: an odd number of times a slice ends where it belongs."""
  mesh = make_mesh(MeshConfig(expert=2), jax.devices()[:2])
  exchange, rows = Exchange("expert", 2), P(BATCH_AXES)

  def program(x, y):
    for _ in range(3):
      x = exchange.all_to_all(x)
    y = jax.lax.fori_loop(0, 2, lambda _, y: exchange.all_to_all(y), y)
    return x, y

  x, y = jnp.zeros((4, 3)), jnp.zeros((4, 5), jnp.bfloat16)
  found = exchanges_of(jax.jit(manual(program, mesh, rows, rows)).trace(x, y).jaxpr)
  assert [(e.shape, e.count) for e in found] == [((2, 3), 3), ((2, 5), 2)]
  given = buffers_for(found, 2)
  assert [(b.shape, b.dtype) for b in given] == [((4, 3), jnp.float32), ((4, 5), jnp.bfloat16)]
  marked = given[0].at[1].set(7), given[1]  # rank 0's slice for rank 1
  run = jax.jit(manual(alone(found), mesh, rows, rows))
  arrived, back = run(*marked)
  np.testing.assert_array_equal(arrived[2], jnp.full(3, 7.0))
  np.testing.assert_array_equal(back, marked[1])
  assert run.lower(*given).compile().as_text().count(" all-to-all(") == 5


def test_rounds_whose_number_is_not_known_are_left_out():
  def program(x, n):
    body = lambda _, x: jax.lax.all_to_all(x, "expert", 0, 0, tiled=True)
    return jax.lax.fori_loop(0, n, body, x)

  mesh = make_mesh(MeshConfig(expert=2), jax.devices()[:2])
  function = jax.jit(manual(program, mesh, (P(BATCH_AXES), P()), P(BATCH_AXES)))
  assert exchanges_of(function.trace(jnp.zeros((4, 3)), 3).jaxpr) == []
  assert Exchanged((2, 3), np.dtype("float32"), 2, lambda x: x).nbytes == 48
