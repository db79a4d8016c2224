"""Predicted steps: collectives on two tiers by hand, limits of the model, what the page says."""

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from covering import night

from scmoe.base.errors import ConfigError
from scmoe.profiling.roofline import Machine
from scmoe.run import build, traffic
from scmoe.run.cluster import HOSTS_OF_8, Cluster, machine_of, prediction_table
from scmoe.run.command_line import parse, run_config
from scmoe.run.config_files import find_config, load_config
from scmoe.run.dry_run import dry_run, state_memory, step_work
from scmoe.run.estimates import DEVICES, USABLE
from scmoe.run.fields import with_field
from scmoe.run.links import Group, Links
from scmoe.run.modelled import pair_sizes
from scmoe.run.nearest import changed_fields, on_as_many_devices
from scmoe.run.prediction import BACKWARD, not_counted, predictable, predicted
from scmoe.train import FLAGS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "scale.md").read_text()
H100 = next(device for device in DEVICES if device.name == "H100")
ENDLESS = Machine(flops=1e30, memory=1e30, link=1.0, latency=0.0)


def tiny(**values):
  run = load_config(find_config("quickstart"), "smoke")
  for name, value in values.items():
    run = with_field(run, name.replace("__", "."), str(value))
  return run.resolve(num_devices=run.mesh.planned_size, vocab_size=build.vocab_size(run.data))


# --- links ----------------------------------------------------------------------------------------

LINKS = Links(inside=100.0, between=10.0, latency=0.0, host=8)
MESH = {"data": 4, "expert": 16, "shard": 1, "sequence_ring": 2, "sequence_heads": 1, "tensor": 1}


def test_groups_of_a_mesh_on_hosts():
  """Two parts of a row lie beside each other, so a host has four neighbours along `expert`."""
  assert LINKS.group(MESH, ("expert", "shard")) == Group(16, 4)
  assert LINKS.group(MESH, ("sequence_ring", "sequence_heads")) == Group(2, 2)
  assert LINKS.group(MESH, ("data",)) == Group(4, 1)
  assert LINKS.group(MESH, ("data", "expert", "sequence_ring")) == Group(128, 8)
  assert LINKS.group(MESH, ("tensor",)) == Group(1, 1)


def test_seconds_of_collectives_by_hand():
  inside, across, apart = Group(4, 4), Group(16, 4), Group(4, 1)
  assert LINKS.all_to_all(300, inside) == 3
  # Of 1,500 bytes to 15 others 300 stay in the host, and 1,200 cross the network.
  assert LINKS.all_to_all(1500, across) == 120
  assert LINKS.all_to_all(300, apart) == 30
  assert LINKS.ring(300, inside) == 3
  assert LINKS.ring(1500, across) == 1500 / 4 / 10  # four ports carry a quarter each
  assert LINKS.ring(300, apart) == 30
  assert (LINKS.neighbour(300, inside), LINKS.neighbour(300, across)) == (3, 30)
  for collective in (LINKS.all_to_all, LINKS.ring, LINKS.neighbour):
    assert collective(0, Group(1, 1)) == 0


# --- the step -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spread():
  """Pos-2 on four devices that exchange rows."""
  return step_work(tiny(mesh__data=1, mesh__expert=4))


def test_exchanges_take_what_their_bytes_take(spread):
  """Endless rates of computation hide nothing: all bytes cross the link, and latencies add up."""
  found = predicted(spread, ENDLESS, Links(1e6, 1e6, 0.5, 8))
  sent = spread.traffic
  assert found.exchanges == pytest.approx(sent.all_to_all / 1e6 + 0.5 * sent.exchanges)
  assert found.exposed == pytest.approx(found.exchanges)
  assert found.bound == "exposed"
  slower = predicted(spread, ENDLESS, Links(1e6, 5e5, 0.0, 2))  # two hosts of two
  assert slower.exchanges == pytest.approx(sent.all_to_all * 2 / 3 / 5e5)


def test_slow_computation_hides_the_exchanges_of_a_shortcut(spread):
  slow = Machine(flops=1e6, memory=1e6, link=1.0, latency=0.0)
  links = Links(1e9, 1e9, 0.0, 8)
  assert predicted(spread, slow, links).exposed == pytest.approx(0, abs=1e-9)
  off = dataclasses.replace(spread, run=with_field(spread.run, "overlap.schedule", "off"))
  waiting = predicted(off, slow, links)
  assert waiting.exposed == pytest.approx(waiting.exchanges)
  named = dataclasses.replace(spread, run=with_field(spread.run, "overlap.schedule", "mlp 0"))
  assert predicted(named, slow, links).exposed < waiting.exposed


def test_without_a_capacity_rows_are_predicted_as_those_of_dropless():
  """`dispatch.capacity_factor=0` sends no fixed buffers, and experts compute only rows."""
  rates = Machine(flops=1e12, memory=1e12, link=1.0, latency=0.0)
  spread = lambda **how: predicted(
    step_work(tiny(mesh__data=1, mesh__expert=4, **how)), rates, LINKS
  )
  fixed = spread(dispatch__transport="capacity")
  without = spread(dispatch__transport="capacity", dispatch__capacity_factor=0.0)
  assert without == spread(dispatch__transport="dropless")
  assert without.computation < fixed.computation


def test_a_row_for_each_rank_is_predicted_as_rows_of_tokens():
  """Two of four experts, one on each device: half of the tokens reach each, all fit with slack 2.

  The traced step sends as many: in each of two layers four times a row of 16 numbers of 4 bytes,
  two numbers for its choice there, and one back.
  """
  given = {"mesh__data": 1, "mesh__expert": 4, "model__num_experts": 4, "model__top_k": 2}
  given |= {"dispatch__transport": "per_rank"}
  for slack, rows in ((1.75, 4 * 7 / 8), (9.0, 4)):
    work = step_work(tiny(**given, dispatch__slack=slack))
    sizes = pair_sizes(work.run)
    assert sizes.sent == pytest.approx(rows)
    sent = rows * sizes.tokens * 2 * (4 * 16 + 2 + 1) * 4
    assert work.traffic.all_to_all == sent * 3 / 4


def test_computation_is_that_of_the_products():
  """With an endless memory rate the products alone count: FLOPs over rate, three times forward."""
  work = step_work(tiny(mesh__data=1, model__wiring="dense", data__seq_len=16))
  result = dry_run(work.run)
  machine = Machine(flops=1e9, memory=1e30, link=1.0, latency=0.0)
  found = predicted(work, machine, LINKS)
  exact = result.flops.training * result.tokens_per_step
  # The model of a pair counts half of all scores, the exact count (S + 1) / 2 positions of a token.
  scores = 2 * 2 * 16 * 0.5 * 4 * (1 + BACKWARD) * result.tokens_per_step
  assert found.computation == pytest.approx((exact - scores) / 1e9)
  again = dataclasses.replace(work, run=with_field(work.run, "train.remat", "full"))
  blocks = result.flops.forward - result.flops.logits
  more = predicted(again, machine, LINKS).computation - found.computation
  assert more == pytest.approx((blocks * result.tokens_per_step - scores / 3) / 1e9)


def test_parts_add_up_and_say_what_bounds():
  work = step_work(tiny(mesh__data=4, mesh__shard_state="parameters", model__wiring="top2"))
  found = predicted(work, machine_of(H100), Links(1e3, 1e3, 0.0, 8))
  assert found.step == pytest.approx(sum(found.parts.values()))
  assert found.parameters == pytest.approx(work.traffic.parameters / 1e3)
  assert found.gradients == pytest.approx(work.traffic.gradients / 1e3, rel=1e-3)
  assert found.bound in ("parameters", "gradients")
  assert found.exchanges == found.exposed == found.tensor == found.attention == 0


def test_gradients_hide_beside_the_backward_pass():
  """All but the last layer's: of four layers' sums a quarter is left."""
  work = step_work(tiny(mesh__data=4, model__wiring="dense"))
  slow = Machine(flops=1.0, memory=1.0, link=1.0, latency=0.0)
  found = predicted(work, slow, Links(1e3, 1e3, 0.0, 8))
  assert found.gradients == pytest.approx(work.traffic.gradients / 1e3 / 4, rel=1e-3)


def test_gradients_wait_for_hidden_exchanges():
  """A device sends one thing at a time, so what exchanges of the backward pass take, sums lack."""
  work = step_work(tiny(mesh__data=2, mesh__expert=2, train__tokens_per_step=0))
  work = dataclasses.replace(work, gradients={("data",): 1e9})
  rates = Machine(flops=1e4, memory=1e4, link=1.0, latency=0.0)  # slow: all exchanges are hidden
  gradients = {}
  for sent in (0, 40_000):
    traffic = dataclasses.replace(work.traffic, all_to_all=sent)
    found = predicted(dataclasses.replace(work, traffic=traffic), rates, Links(1e3, 1e3, 0.0, 8))
    assert found.exposed == 0
    assert found.exchanges == pytest.approx(sent / 1e3)
    gradients[sent] = found.gradients
  # Half of the exchanges are of the backward pass, of which the last pair has no sum beside it.
  layers = work.run.model.num_pairs
  assert gradients[40_000] - gradients[0] == pytest.approx(20 * (layers - 1) / layers)


def test_bfloat16_gradients_travel_in_half_the_bytes():
  whole, half = (
    step_work(tiny(mesh__data=4, overlap__gradient_dtype=dtype)).traffic.gradients
    for dtype in ("float32", "bfloat16")
  )
  assert half == pytest.approx(whole / 2, rel=1e-6)


@pytest.mark.parametrize(
  ("given", "microbatches"),
  [
    ({}, 1),
    ({"model__tie_embeddings": False, "mesh__embedding": "partitioned"}, 1),
    ({"model__tie_embeddings": False}, 2),
  ],
  ids=["a tied head", "in parts", "two microbatches"],
)
def test_the_table_is_summed_where_rows_do_not_travel(given, microbatches):
  tokens = tiny().train.batch_size * tiny().data.seq_len
  given = {"train__tokens_per_step": microbatches * tokens, **given}
  given |= {"mesh__data": 2, "model__vocab_size": 65536}
  one, other = (
    step_work(tiny(overlap__embedding_rows=rows, **given)).traffic for rows in (False, True)
  )
  assert one == other


def test_rows_of_embeddings_travel_in_place_of_the_table():
  """In a step of one microbatch whose model has a head of its own."""
  given = {"mesh__data": 2, "model__vocab_size": 65536, "model__tie_embeddings": False}
  given["train__tokens_per_step"] = 0
  table, rows = (
    step_work(tiny(overlap__embedding_rows=rows, **given)).traffic.gradients
    for rows in (False, True)
  )
  run = tiny(**given)
  size = 65536 * run.model.width * 4
  tokens = run.train.batch_size * run.data.seq_len // 2
  assert table - rows == size - tokens * run.model.width * jnp.dtype(run.model.dtype).itemsize


def test_sums_over_the_tensor_axis_by_hand():
  """A dense block has four of [tokens, width]: attention and MLP, forward and backward."""
  four, two = (
    step_work(tiny(mesh__data=1, mesh__tensor=2, model__wiring="dense", model__num_layers=layers))
    for layers in (4, 2)
  )
  tokens, width = 8 * 16, 16
  added = four.traffic.tensor - two.traffic.tensor
  assert added == 2 * 4 * tokens * width * 4 * 2 * (2 - 1) // 2
  text = "\n".join(traffic.lines(four.traffic, four.run.mesh))
  assert re.search(r"tensor axis \(sums and gathers\) +\S+ [KM]iB", text)


def test_the_ring_of_rows_hides_beside_attention():
  ring, heads = (
    step_work(tiny(mesh__data=1, mesh__sequence=2, mesh__sequence_attention=how))
    for how in ("ring", "heads")
  )
  slow, links = Machine(flops=1.0, memory=1.0, link=1.0, latency=0.0), Links(1e3, 1e3, 0.0, 8)
  assert predicted(ring, slow, links).attention == 0
  assert predicted(ring, ENDLESS, links).attention == pytest.approx(ring.traffic.sequence / 1e3)
  assert predicted(heads, slow, links).attention == pytest.approx(heads.traffic.sequence / 1e3)


def test_two_gatings_are_not_predicted():
  run = tiny(model__wiring="dgmoe")
  assert "two gatings" in predictable(run)
  (line,) = prediction_table(step_work(run), 1.0, HOSTS_OF_8)
  assert line.startswith("no predicted step: model.wiring=dgmoe")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rates_are_those_of_16_bit_types(dtype):
  run = tiny()
  of = lambda name: dataclasses.replace(run, model=dataclasses.replace(run.model, dtype=name))
  assert predictable(of(dtype)).startswith(f"model.dtype={dtype} has no measured rates")
  assert predictable(of("bfloat16")) == predictable(of("float16")) == ""


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"router.balance_over": "step"}, "router.balance_over=step"),
    ({"train.teacher": "runs/a"}, "train.teacher=runs/a"),
    ({"lora.rank": "2"}, "lora.rank=2"),
    ({"optimizer.name": "muon", "optimizer.ema": "0.9"}, "optimizer.name=muon, optimizer.ema=0.9"),
    ({"overlap.flight": "2"}, "overlap.flight=2"),
    ({"multitask.names": "a,b", "multitask.plan": "equal"}, "multitask.plan=equal"),
  ],
)
def test_what_is_not_counted_is_named(fields, words, spread):
  """The fields are set behind the checks of a run, since only their names are read."""
  run = with_field(spread.run, "model.dtype", "bfloat16")
  run = with_field(run, "train.tokens_per_step", str(2 * run.train.batch_size * run.data.seq_len))
  counted = prediction_table(dataclasses.replace(spread, run=run), 1.0, HOSTS_OF_8)
  assert "not counted" not in "\n".join(counted)
  for name, value in fields.items():
    run = with_field(run, name, value)
  lines = prediction_table(dataclasses.replace(spread, run=run), 1.0, HOSTS_OF_8)
  assert lines[-1] == f"  not counted: {words}"


def test_one_microbatch_looks_at_no_other(spread):
  run = with_field(with_field(spread.run, "router.balance_over", "step"), "overlap.flight", "2")
  assert not_counted(run) == []


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("values", "words"),
  [
    ((0, ""), "--host_devices=0 must be at least 1"),
    ((8, "fast"), "--network='fast' is not a size"),
    ((8, "-1GB"), "--network='-1GB' is not a size"),
  ],
)
def test_a_cluster_that_cannot_be_is_refused(values, words):
  with pytest.raises(ConfigError, match=re.escape(words)):
    Cluster.of_flags(*values)


def test_the_network_is_an_option():
  work = step_work(tiny(mesh__data=1, mesh__expert=4, model__dtype="bfloat16"))
  hosts = Cluster.of_flags(2, "1MB")
  assert hosts.links(H100).between == 1e6
  assert HOSTS_OF_8.links(H100).between == pytest.approx(0.43 * 50e9)
  fast, slow = (c.predicted(work, H100).exchanges for c in (HOSTS_OF_8, hosts))
  assert slow > 10 * fast
  text = "\n".join(prediction_table(work, 1.0, hosts))
  assert "hosts of 2 GPUs, 976.56 KiB/s between them" in text


def test_a_mesh_that_does_not_hold_the_state_names_the_nearest_that_does():
  """Ranks that share moments, then parameters; expert ranks share all but experts."""
  fields = {"model__num_experts": 16, "model__dtype": "bfloat16", "model__num_layers": 16}
  run = tiny(mesh__data=2, mesh__expert=4, **fields)
  memory = state_memory(run)
  of = lambda **mesh: (
    state_memory(dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, **mesh))).total
  )
  moments, parameters = of(shard_state="moments"), of(shard_state="parameters")
  assert memory.total > moments > parameters
  found = on_as_many_devices(run, memory, [memory.total - 1, moments - 1, 1])
  assert found[0] == (dataclasses.replace(run.mesh, shard_state="moments"), moments)
  assert found[1] == (dataclasses.replace(run.mesh, shard_state="parameters"), parameters)
  assert found[2] is None
  assert changed_fields(run.mesh, found[1][0]) == "mesh.shard_state=parameters"
  alone = tiny(mesh__data=1, mesh__expert=8, **fields)  # no two ranks hold the same experts
  memory = state_memory(alone)
  (shared,) = on_as_many_devices(alone, memory, [memory.total - 1])
  assert changed_fields(alone.mesh, shared[0]) == "mesh.shard_state=moments"
  assert shared[1] < memory.total


def test_one_rank_has_no_nearest_mesh():
  run = tiny(mesh__data=1, mesh__expert=1)
  assert on_as_many_devices(run, state_memory(run), [1e12]) == [None]


# --- the page -------------------------------------------------------------------------------------


def table_after(heading: str) -> list[list[str]]:
  """Cells of the rows of the first table behind a heading of docs/scale.md."""
  text = PAGE[PAGE.index(heading) :]
  rows = re.search(r"(?:^\|.*\n)+", text, re.M).group().splitlines()
  return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def of_command(command: str):
  """The resolved run of a `scmoe.train` command of the page."""
  values, given = parse(command.replace("\\\n", " ").split()[3:], FLAGS, with_fields=True)
  run = run_config(values, given)
  return run.resolve(
    num_devices=run.mesh.planned_size, vocab_size=build.vocab_size(run.data)
  ), values


PUBLISHED = re.findall(
  r"python -m scmoe\.train --config (?:gpt_moe_1t|deepseek_v3|longcat_flash)[^`]*?--dry_run[^\n]*",
  PAGE,
)


@pytest.mark.parametrize("column", [1, night(2), night(3), night(4)])
def test_published_meshes_are_as_the_page_says(column):
  """Every number of the table, from the command of its column; nothing lies on a device then."""
  rows = {row[0]: row[column] for row in table_after("### Published models")}
  run, values = of_command(PUBLISHED[column - 1])
  before = {id(array): array for array in jax.live_arrays()}  # held, so that no id is used again
  result = dry_run(run)
  assert not [array for array in jax.live_arrays() if id(array) not in before]
  kind = next(device for device in DEVICES if device.name == rows["GPU"])
  one = Cluster.of_flags(values["host_devices"], values["network"]).predicted(result.work, kind)
  gib = lambda size: f"{size / 2**30:.1f}" if size else "–"
  seconds = lambda time: f"{time:.2f}" if time >= 0.005 else "–"
  memory, traffic = result.memory, result.traffic
  assert rows["devices"] == f"{run.mesh.size:,}"
  assert rows["parameters"] == f"{result.parameters.total / 1e9:.0f}G"
  state = memory.parameters + memory.gradients + memory.optimizer
  rest = memory.activations + memory.exchange + memory.gathered
  assert rows["state, GiB"] == gib(state)
  assert rows["activations, buffers, gathered, GiB"] == gib(rest)
  fits = "yes" if memory.total <= USABLE * kind.memory else "no"
  assert rows["fits"] == f"{fits}, {gib(memory.total)} of {gib(USABLE * kind.memory)}"
  assert rows["exchanges, GiB"] == gib(traffic.all_to_all)
  assert rows["gradients, GiB"] == gib(traffic.gradients)
  assert rows["parameters gathered, GiB"] == gib(traffic.parameters)
  assert rows["attention, GiB"] == gib(traffic.sequence)
  assert rows["computation, s"] == seconds(one.computation)
  assert rows["exchanges exposed, s"] == seconds(one.exposed)
  rest = one.gradients + one.parameters + one.attention + one.update
  assert rows["all else, s"] == seconds(rest)
  assert rows["step, s"] == seconds(one.step)
  assert rows["bound by"] == ("exchanges" if one.bound == "exposed" else one.bound)


def experiment():
  """The script that predicts what was measured."""
  sys.path.insert(0, str(ROOT / "experiments" / "scale"))
  try:
    return importlib.import_module("predicted")
  finally:
    sys.path.pop(0)


ROWS = table_after("### Predictions beside measured steps")


@pytest.mark.parametrize(
  "row", [n if n % 6 == 0 else night(n) for n in range(len(experiment().MEASURED))]
)
def test_a_measured_step_stands_beside_its_prediction(row):
  found = experiment()
  (line,) = found.lines(found.MEASURED[row : row + 1])[2:]
  assert ROWS[2 + row] == [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_s_span_of_errors_is_that_of_its_table():
  assert len(ROWS) == 2 + len(experiment().MEASURED)
  errors = [float(row[-1].removesuffix("%")) for row in ROWS[2:]]
  assert f"{min(errors):.0f} to +{max(errors):.0f} %".replace("-", "−") in PAGE


def test_tables_of_olmoe_are_those_of_the_dry_run():
  """The memory of every `mesh.shard_state`, and of moments in the host's memory."""
  gib = lambda size: f"{size / 2**30:.2f}" if size >= 2**20 else "–"
  names = {
    "parameters": "parameters", "gradients": "gradients", "moments": "optimizer",
    "gathered parameters (estimate)": "gathered", "total": "total", "total on the device": "total",
    "activations of one row (estimate)": "activations", "activations (estimate)": "activations",
    "moments of layers under way": "arriving",
  }  # fmt: skip
  one_row = {"mesh.shard_state": "parameters", "mesh.gather_again": "False"}
  modes = ({}, {"mesh.shard_state": "moments"}, {"mesh.shard_state": "parameters"}, one_row)
  places = ({"mesh.moments_in": "device"}, {"mesh.moments_in": "host"})
  for heading, ranks, fields in (
    ("### An example in numbers", "8", modes),
    ("## Moments in the host's memory", "1", places),
  ):
    table, activations = table_after(heading), 0
    for column, changed in enumerate(fields, 1):
      run = with_field(load_config(find_config("olmoe")), "mesh.data", ranks)
      for name, value in changed.items():
        run = with_field(run, name, value)
      run = run.resolve(num_devices=run.mesh.planned_size, vocab_size=50304)
      activations = activations or dry_run(run).memory.activations  # the same in each column
      memory = dataclasses.replace(state_memory(run), activations=activations)
      for row in table[2:]:
        if row[0] in names:
          assert row[column] == gib(getattr(memory, names[row[0]])), (heading, row[0], column)
