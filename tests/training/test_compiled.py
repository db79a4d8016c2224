"""A second start loads what the first one compiled, and computes the same bits."""

import os
import shutil
import sys
import zlib
from collections import Counter

import jax
import pytest
import zstandard
from training_fakes import bits, trainer

from scmoe.training.compile_only import compile_only
from scmoe.training.compiled import PROGRAMS, kept_programs, remove_cut
from scmoe.training.options import CheckpointConfig


@pytest.fixture
def no_cache():
  """Takes away the tests' compilation cache: a user starts without one."""
  names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
  before = {name: getattr(jax.config, name) for name in names}
  jax.config.update(names[0], None)
  jax.config.update(names[1], 1.0)
  yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.fixture
def requests():
  """Counts what jax's compilation cache was asked for and what it had."""
  found = Counter()
  listen = lambda event, **_: found.update([event.rpartition("/")[2]])
  jax.monitoring.register_event_listener(listen)
  yield found
  jax.monitoring.clear_event_listeners()


def test_a_second_start_compiles_no_step_and_goes_on_bitwise(
  mesh8, tmp_path, no_cache, requests, monkeypatch
):
  monkeypatch.setattr("scmoe.training.compiled._WORTH", 0.0)
  keep, run = CheckpointConfig(every=2), tmp_path / "run"
  whole = bits(trainer(mesh8, tmp_path / "whole", steps=6, checkpoint=keep).run())
  jax.clear_caches()
  with pytest.raises(Exception, match="stopped at step 4"):
    trainer(mesh8, run, steps=6, stop_after=4, checkpoint=keep).run()
  kept = {file.name.split("-")[0] for file in (run / PROGRAMS).rglob("*-cache")}
  assert "jit_local_step" in kept
  jax.clear_caches()
  requests.clear()
  assert bits(trainer(mesh8, run, steps=6, checkpoint=keep).run()) == whole
  again = {file.name.split("-")[0] for file in (run / PROGRAMS).rglob("*-cache")}
  assert again >= kept
  assert requests["cache_hits"] >= 1
  (step,) = (run / PROGRAMS).rglob("jit_local_step-*-cache")  # the same program, found again
  assert step.stat().st_size > 0
  assert jax.config.jax_compilation_cache_dir is None, "what a run sets ends with it"


def test_a_resumed_run_finds_what_was_compiled_for_it(
  mesh8, tmp_path, no_cache, requests, monkeypatch
):
  """The first start leaves no program, as a run leaves none for a mesh that it has not used."""
  monkeypatch.setattr("scmoe.training.compiled._WORTH", 0.0)
  run, how = tmp_path / "run", {"checkpoint": CheckpointConfig(every=2), "steps": 4}
  with pytest.raises(Exception, match="stopped at step 2"):
    trainer(mesh8, run, stop_after=2, **how).run()
  shutil.rmtree(run / PROGRAMS)
  before = {path for path in run.rglob("*") if path.is_file()}
  jax.clear_caches()
  requests.clear()
  compile_only(trainer(mesh8, run, **how).built, run)
  assert requests["cache_hits"] == 0
  assert {path for path in run.rglob("*") if path.is_file()} >= before, "nothing else is touched"
  programs = lambda: Counter(f.name.partition("-")[0] for f in (run / PROGRAMS).rglob("*-cache"))
  compiled = programs()
  assert (compiled["jit__survey"], compiled["jit_local_step"]) == (1, 1)
  jax.clear_caches()
  requests.clear()
  trainer(mesh8, run, **how).run()
  assert requests["cache_hits"] >= 2
  assert (programs()["jit__survey"], programs()["jit_local_step"]) == (1, 1)


def test_a_program_that_was_cut_short_is_compiled_once_more(
  tmp_path, no_cache, requests, monkeypatch, capsys
):
  """A process that is killed while it writes, or whose disk is full, leaves such a file."""
  monkeypatch.setattr("scmoe.training.compiled._WORTH", 0.0)

  def start():
    jax.clear_caches()
    requests.clear()
    with kept_programs(tmp_path):
      jax.jit(lambda x: x * 3 + 1).lower(1.0).compile()
    return requests["cache_hits"], capsys.readouterr().err

  def age(seconds):
    """Moves everything in the folder so far into the past."""
    for path in tmp_path.rglob("*"):
      os.utime(path, (path.stat().st_mtime - seconds,) * 2)

  assert start() == (0, "")
  (program,) = tmp_path.rglob("*-cache")
  whole = program.read_bytes()
  age(3600)
  assert start() == (1, "")
  assert program.read_bytes() == whole
  program.write_bytes(whole[: len(whole) // 2])
  with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
    assert start() == (0, ""), "another process may be writing it"
  age(301)
  hits, said = start()
  assert hits == 0
  assert "cut short, to compile them again: 1" in said
  assert start() == (1, "")
  assert len(program.read_bytes()) > len(whole) // 2


def test_no_whole_program_is_removed(tmp_path, capsys):
  """By size and format: of each whole file, all that are cut, and one that is damaged."""
  text = os.urandom(3_000_000) + bytes(1_000_000)
  formats = zstandard.ZstdCompressor().compress(text), zlib.compress(text)
  kept = {"whole0": formats[0], "whole1": formats[1], "unknown": b"not a program"}
  gone = {"nothing": b"", "zeros": bytes(5000)}
  for number, whole in enumerate(formats):
    lengths = 1, 3, 4, 8, 1 << 20, len(whole) - 1
    gone.update({f"cut{number}-{length}": whole[:length] for length in lengths})
  gone["damaged"] = formats[1][:1000] + b"?" + formats[1][1001:]
  for name, content in (kept | gone).items():
    (tmp_path / f"{name}-cache").write_bytes(content)
    os.utime(tmp_path / f"{name}-cache", (1e9, 1e9))
  (tmp_path / "folder-cache").mkdir()
  (tmp_path / "other").write_bytes(b"")
  remove_cut(tmp_path)
  left = {path.name for path in tmp_path.iterdir()}
  assert left == {f"{name}-cache" for name in (*kept, "folder")} | {"other", ".checked"}
  assert f"to compile them again: {len(gone)}" in capsys.readouterr().err
  (tmp_path / "old-cache").write_bytes(b"")
  os.utime(tmp_path / "old-cache", (1e9, 1e9))
  remove_cut(tmp_path)
  assert (tmp_path / "old-cache").exists(), "what was checked once is not read again"
  remove_cut(tmp_path / "none")
  assert not (tmp_path / "none").exists()
  assert not capsys.readouterr().err


def test_without_zstandard_its_entries_stay(tmp_path, monkeypatch, capsys):
  """A machine without the package starts, and an entry that it cannot judge stays."""
  monkeypatch.setitem(sys.modules, "zstandard", None)
  formats = {"zstd": zstandard.ZstdCompressor().compress, "zlib": zlib.compress}
  for name, compress in formats.items():
    (tmp_path / f"{name}-cache").write_bytes(compress(b"text" * 1000)[:-1])
    os.utime(tmp_path / f"{name}-cache", (1e9, 1e9))
  remove_cut(tmp_path)
  assert {path.name for path in tmp_path.iterdir()} == {"zstd-cache", ".checked"}
  assert "to compile them again: 1" in capsys.readouterr().err


def test_a_cache_that_is_set_stays(tmp_path, no_cache):
  jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
  with kept_programs(tmp_path / PROGRAMS):
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
  assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
  assert not (tmp_path / PROGRAMS).exists()


def test_two_runs_of_a_process_keep_their_own(tmp_path, no_cache, monkeypatch):
  monkeypatch.setattr("scmoe.training.compiled._WORTH", 0.0)
  for number, name in enumerate(("a", "b")):
    with kept_programs(tmp_path / name):
      jax.jit(lambda x, n=number: x * 3 + n).lower(1.0).compile()
    assert len(list((tmp_path / name).rglob("*-cache"))) == 1
