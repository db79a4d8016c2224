"""Tilings measured on a user's GPU: what is asked for, what is found, where it is kept."""

import dataclasses
import json
import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from scmoe.base.errors import ConfigError, StorageError, run_main
from scmoe.bench import layer as bench
from scmoe.bench import tune
from scmoe.kernels.grouped_matmul import tiles, tuned
from scmoe.kernels.grouped_matmul.pipeline import Tiling
from scmoe.run.command_line import parse, run_config

HERE = jax.devices()[0].device_kind
KEY = ("up", 128, 256, True)
OTHER = tiles.variants("up", 128, 256, gathered=True)[3]
SHAPE = bench.Shape(tokens=256, width=128, hidden=256, experts=4, top_k=2)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
  """A cache folder of the test's own, and nothing read before."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.setattr(tuned, "_tables", {})


def measured(tiling=OTHER, ms=1.0, shipped_ms=2.0):
  return tuned.Measured(tiling, ms, shipped_ms, "2026-11-23, jax 0.0")


def forgotten():
  """Forgets the tables that were read, so that they are read again, as in a new process."""
  tuned._tables.clear()


def test_what_is_kept_is_chosen_by_later_processes():
  before = tiles.choose(*KEY[:3], gathered=True)
  file = tuned.keep(HERE, {KEY: measured()})
  assert before != OTHER == tiles.choose(*KEY[:3], gathered=True)
  forgotten()
  assert tiles.choose(*KEY[:3], gathered=True) == OTHER
  assert tiles.choose(*KEY[:3]) != OTHER
  assert tiles.choose(*KEY[:3], 4, gathered=True) != OTHER
  assert list(file.parent.iterdir()) == [file], "nothing half-written"


def test_a_file_with_the_former_name_of_a_field_is_read():
  file = tuned.keep(HERE, {KEY: measured()})
  file.write_text(file.read_text().replace('"store_buffers"', '"stores"'))
  forgotten()
  assert tuned.stored(HERE) == {KEY: measured()}


def test_a_later_measurement_is_added_and_replaces():
  more = ("rows", 256, 128, False)
  rows = tiles.variants("rows", 256, 128)
  tuned.keep(HERE, {KEY: measured(ms=3.0), more: measured(rows[0])})
  forgotten()
  tuned.keep(HERE, {KEY: measured(ms=0.5)})
  found = tuned.stored(HERE)
  assert found == {KEY: measured(ms=0.5), more: measured(rows[0])}


def changed(**entry):
  whole = json.loads(tuned.text({KEY: measured()}, HERE))
  whole["tilings"][0] |= entry
  return json.dumps(whole)


@pytest.mark.parametrize(
  ("content", "said"),
  [
    ("", "Expecting value"),
    ("[]", "not a list of tilings of format 1"),
    ("[" * 10**5, "it is nested too deep"),
    ('{"format": 1, "format": 1}', "'format' is given twice"),
    (tuned.text({KEY: measured()}, HERE)[:-40], "line"),
    (tuned.text({KEY: measured()}, "another"), "it is of 'another'"),
    (changed(tiling={"rows": 128}), "an entry lacks"),
    (changed(product=["up", 128]), "not enough values"),
    (changed(product=["up", float("inf"), 256, True]), "infinity"),
    (changed(tiling=dataclasses.asdict(OTHER) | {"cols": "256"}), "is no tiling"),
    (changed(tiling=dataclasses.asdict(OTHER) | {"more": 1}), "is no tiling"),
    (" " * 2**20 + "{}", "is larger than 1,048,576 bytes"),
    ("\udcff", "utf-8"),
  ],
)
def test_a_file_that_cannot_be_used_is_named_and_left_out(content, said, caplog):
  file = tuned.file_of(HERE)
  file.parent.mkdir(parents=True)
  file.write_bytes(content.encode("utf-8", "surrogateescape"))
  with caplog.at_level(logging.WARNING):
    assert tiles.choose(*KEY[:3], gathered=True) != OTHER
    tiles.choose(*KEY[:3], gathered=True)
  (record,) = caplog.records
  assert str(file) in record.getMessage()
  assert said in record.getMessage()
  tuned.keep(HERE, {KEY: measured()})
  forgotten()
  assert tiles.choose(*KEY[:3], gathered=True) == OTHER


@pytest.mark.parametrize(
  "tiling",
  [Tiling(cols=96), Tiling(cols=256, stages=40), dataclasses.replace(OTHER, pair="cols")],
  ids=["columns", "memory", "a gathered operand shared"],
)
def test_a_tiling_that_does_not_fit_is_not_chosen(tiling):
  tuned.keep(HERE, {KEY: measured(tiling)})
  assert tiles.choose(*KEY[:3], gathered=True) == tiles.candidates(*KEY[:3], gathered=True)[0]


def test_what_cannot_be_kept_is_one_line(tmp_path):
  (tmp_path / "cache").write_text("a file where the folder should be")
  with pytest.raises(StorageError, match=r"cannot be written.*set XDG_CACHE_HOME"):
    tuned.keep(HERE, {KEY: measured()})


def test_a_user_without_a_home_has_none_and_keeps_none(monkeypatch, tmp_path):
  """A container may run as a number that no password file knows."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setattr("os.path.expanduser", lambda path: path)
  assert tiles.choose(*KEY[:3], gathered=True) != OTHER
  with pytest.raises(StorageError, match="set XDG_CACHE_HOME"):
    tuned.keep(HERE, {KEY: measured()})
  assert list(tmp_path.iterdir()) == []


class Fake:
  """Products that give what they are told to, and a clock that says how fast each tiling is."""

  def __init__(self, times, wrong=(), broken=()):
    self.times, self.wrong, self.broken, self.rounds = times, wrong, broken, []

  def make(self, key, shape, seed):
    def run(x, tiling):
      if tiling in self.broken:
        raise RuntimeError("no code for it")
      # The clock knows a tiling by its result, 0.1 % apart; a wrong one is far off.
      value = 1 + 1e-4 * self.place(tiling) if tiling not in self.wrong else 3.0
      return x * value

    self.offered = tiles.variants(*key[:3], gathered=key[3])
    return run, (jnp.ones(4),)

  def place(self, tiling):
    return self.offered.index(tiling)

  def __call__(self, contenders, rounds):
    self.rounds.append(rounds)
    found = {}
    for name, (run, arguments) in contenders.items():
      tiling = self.offered[round((float(run(*arguments)[0]) - 1) / 1e-4)]
      found[name] = self.times.get(tiling, 2.0)
    return found


def run_fake(fake, **options):
  tune.measure({KEY: SHAPE}, 9, timer=fake, make=fake.make, **options)
  return tuned.stored(HERE)[KEY]


def test_the_fastest_form_and_its_fastest_band_are_found(capsys):
  offered = tiles.variants(*KEY[:3], gathered=True)
  form = offered[2]
  winner = dataclasses.replace(form, band=32)
  fake = Fake({form: 1.5, winner: 1.2})
  found = run_fake(fake)
  assert (found.tiling, found.ms, found.shipped_ms) == (winner, 1.2, 2.0)
  assert fake.rounds == [3, 9]
  assert tiles.choose(*KEY[:3], gathered=True) == winner
  assert "2.000 ms as shipped" in capsys.readouterr().out


def test_less_than_a_percent_leaves_what_is_shipped():
  offered = tiles.variants(*KEY[:3], gathered=True)
  found = run_fake(Fake({offered[2]: 1.985}))
  assert found.tiling == offered[0]


def test_a_shipped_tiling_is_what_has_to_be_beaten(monkeypatch):
  """A table's entry stays, although it is little faster than the rule's, and others are slower."""
  offered = tiles.variants(*KEY[:3], gathered=True)
  monkeypatch.setattr(tiles, "TABLE", {HERE: {KEY: offered[3]}})
  assert run_fake(Fake({offered[3]: 1.99})).tiling == offered[3]
  assert tiles.choose(*KEY[:3], gathered=True) == offered[3]


def test_a_product_without_a_program_is_left_out(capsys):
  fake = Fake({}, broken=tiles.variants(*KEY[:3], gathered=True))
  tune.measure({KEY: SHAPE}, 9, timer=fake, make=fake.make)
  assert tuned.stored(HERE) == {}
  assert "is left out: no code for it" in capsys.readouterr().out


def test_every_shipped_tiling_is_among_those_that_are_measured():
  for table in tiles.TABLE.values():
    for (kind, width, n, gathered), tiling in table.items():
      assert tiling in tiles.variants(kind, width, n, gathered=gathered)


def test_what_is_wrong_or_cannot_be_compiled_does_not_win(capsys):
  offered = tiles.variants(*KEY[:3], gathered=True)
  fake = Fake({offered[1]: 0.1, offered[2]: 0.1, offered[3]: 1.0}, offered[1:2], offered[2:3])
  assert run_fake(fake).tiling == offered[3]
  assert "is left out: no code for it" in capsys.readouterr().out


def test_nothing_is_measured_twice_unless_asked(capsys):
  offered = tiles.variants(*KEY[:3], gathered=True)
  tuned.keep(HERE, {KEY: measured()})
  fake = Fake({offered[2]: 1.0})
  assert run_fake(fake) == measured()
  assert not fake.rounds
  assert "measured before" in capsys.readouterr().out
  assert run_fake(fake, again=True).tiling == offered[2]


# -- what is asked for ----------------------------------------------------------------------------


def config(*words):
  values, given = parse([*words], tune.FLAGS, with_fields=True)
  other = {"config_json": "", "smoke": False, "allow_config_change": False}
  return run_config({**values, **other}, given)


def test_a_layers_products_are_those_that_its_training_traces():
  keys = tune.asked_by_layer(SHAPE)
  assert keys[0] == KEY
  kinds = {key[0] for key in keys}
  assert kinds == {"up", "rows", "down_backward", "weights", "weights_pair", "dx"}


@pytest.mark.parametrize(
  ("hidden", "inside"),
  [
    (576, {"up", "down_backward", "weights", "weights_pair"}),
    (640, {"up", "weights_pair"}),
    (1344, {"up", "weights_pair"}),
    (1408, set()),
  ],
)
def test_wide_experts_have_their_rows_gathered_before_the_products(hidden, inside):
  """The wider, the more often a kernel that gathers does so for the same rows."""
  keys = tune.asked_by_layer(bench.Shape(256, 128, hidden, 2, 1))
  assert {kind for kind, *_, gathered in keys if gathered} == inside


def test_rows_in_order_have_tilings_of_their_own():
  """Narrow tiles overlap their ends where nothing is gathered; gathers want wide ones."""

  def rule(kind, width, n, gathered=False):
    return tiles.candidates(kind, width, n, gathered=gathered)[0]

  assert rule("up", 4096, 1536).pingpong
  assert not rule("up", 4096, 1536, gathered=True).pingpong
  assert rule("weights", 4096, 1408).pair == "rows"
  assert rule("weights", 1408, 4096).pair == "", "of eleven tiles one would be computed twice"
  assert rule("weights", 4096, 1408, gathered=True).pair == ""
  assert rule("dx", 6400, 4096).rows == 128
  assert rule("dx", 5632, 2048).rows == 64, "halves of a row tile"


def test_rows_in_order_give_the_gradients_of_both_first_weights_one_by_one():
  keys = tune.asked_by_layer(bench.Shape(256, 128, 2048, 2, 1))
  assert {key for key in keys if key[0].startswith("weights")} == {
    ("weights", 128, 2048, False),
    ("weights", 2048, 128, False),
  }


def test_a_configurations_products_and_the_share_of_one_device():
  run = config(
    "--config", "gpt2_moe_small", "--config.mesh.data=2", "--config.mesh.expert=2",
    "--config.mesh.tensor=2", "--config.model.num_layers=2",
  )  # fmt: skip
  found = tune.asked_by_config(run)
  shape = bench.Shape(run.train.batch_size * run.data.seq_len // 4, 768, 1536, 4, 1)
  assert set(found.values()) == {shape}
  assert ("activated", 768, 1536, False) in found, "rows come in blocks, gathered"
  assert all({768, 1536} == set(key[1:3]) for key in found)


def test_what_the_kernels_do_not_take_is_one_line():
  with pytest.raises(ConfigError, match="multiples of 64"):
    tune.asked_by_config(config("--config", "quickstart", "--config.mesh.data=8"))
  dense = config("--config", "gpt2_moe_small", "--config.mesh.data=8",
                 "--config.model.wiring=dense", "--config.model.num_layers=2")  # fmt: skip
  with pytest.raises(ConfigError, match="has no experts"):
    tune.asked_by_config(dense)


@pytest.mark.parametrize(
  ("key", "hidden"),
  [
    (("up", 256, 128, True), 128),
    (("up", 256, 128, False), 128),
    (("activated", 256, 128, True), 128),
    (("rows", 128, 256, False), 128),
    (("dx", 128, 256, False), 128),
    (("weights", 128, 256, True), 128),
    (("weights", 256, 128, True), 128),
    (("weights", 256, 128, False), 128),
    (("weights_pair", 256, 128, True), 128),
    (("down_backward", 256, 128, True), 128),
  ],
  ids=str,
)
def test_every_product_is_made_and_lowers_for_cuda(key, hidden):
  """With the rule's tiling, and in the pairs that the rule never offers."""
  shape = bench.Shape(tokens=256, width=256, hidden=hidden, experts=4, top_k=2)
  run, arguments = tune.product(key, shape, 0)
  kind, width, n, gathered = key
  offered = tiles.variants(kind, width, n, gathered=gathered)
  pairs = {t.pair: t for t in reversed(offered) if t.rows == 128}
  for tiling in {offered[0], *pairs.values()}:
    jitted = jax.jit(lambda *a, t=tiling: run(*a, t))
    jitted.trace(*arguments).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
  ("argv", "words"),
  [([], "--config NAME or --shape"), (["--shape", "OLMoE"], "does not run the kernels")],
  ids=["no shape", "a shape"],
)
def test_without_such_a_gpu_it_says_so(argv, words, capsys):
  with pytest.raises(SystemExit) as ended:
    run_main(tune.main, argv)
  line = capsys.readouterr().err
  assert (ended.value.code, line.count("\n")) == (2, 1)
  assert words in line


def test_the_module_is_a_command():
  command = [sys.executable, "-m", "scmoe.bench.tune", "--list"]
  env = os.environ | {"JAX_PLATFORMS": "cpu"}
  listed = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
  assert "no tiling is stored for" in listed.stdout
