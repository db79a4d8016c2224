"""Makes a run of another run's experts: in another order (`--place`) or fewer of them (`--prune`).

The new run begins at step 0 with weights and balancing biases, without optimizer, like one that
`scmoe.convert --from` makes of a released model. All other commands read it.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from scmoe.base.errors import ConfigError
from scmoe.base.sizes import size_of
from scmoe.base.stored import write_json
from scmoe.inference.placement.choices import Choices, record
from scmoe.inference.placement.devices import check_devices, order_of, place
from scmoe.inference.placement.rows import Rows, rows_of
from scmoe.inference.reading import ReadText
from scmoe.models.flops import count_parameters
from scmoe.moe.dispatch.fp8_rows import row_size
from scmoe.moe.gates import arrays_of_experts
from scmoe.pretrained.imported import SOURCE, check_new, new_run
from scmoe.pretrained.requests import check_experts, placing, pruning, smaller
from scmoe.pretrained.stream import flat, leaves_of, nested
from scmoe.pretrained.taken import gate_norms, take
from scmoe.run import build, placement
from scmoe.run.adapters import restore_weights
from scmoe.run.config import RunConfig
from scmoe.run.modality import modality_of, with_other_data
from scmoe.run.model import build_model
from scmoe.run.opened import Stored, open_run, weights_of
from scmoe.run.successor import PLACED, PRUNED, check_source, successor, write_successor
from scmoe.run.text import load_tokenizer, with_tokenizer
from scmoe.training.restore import with_newest


class Source(NamedTuple):
  """The run whose experts are taken, and how its text is read.

  Attributes:
    folder: of the run.
    step: of its checkpoint; None: the newest.
    ema: whether the moving average of the weights is taken.
    mesh: see `--mesh`.
    text: a file or folder of text on which choices are counted; "": the run's validation text.
  """

  folder: Path
  step: int | None = None
  ema: bool = False
  mesh: str = ""
  text: str = ""


# -- the two commands -----------------------------------------------------------------------------


def place_run(source: Source, workdir: Path, request: str) -> str:
  """Writes a run with the same experts in another order; returns lines for the user.

  The placement is made for one half of the text's batches, and its figures are of the other half.

  Args:
    source: the run.
    workdir: folder of the new run.
    request: `devices=4`, `devices=4,by=affinity`; see `--place`.

  Raises:
    ConfigError: the request has another form or does not fit the model, its text or the devices.
    CheckpointError: there is no such run or step.
    DataError: the text cannot be read.
    StorageError: the new run cannot be written.
  """
  asked = placing(request)
  check_new(workdir)

  def opened_step() -> tuple[Stored, Choices, build.Built, dict[str, Any]]:
    stored = _opened(source, "place")
    check_devices(stored.run.model.num_experts, asked.devices, stored.run.router.n_group)
    choices = choices_of(source, stored, asked.batches)
    if len(choices.expert_NGTK) < 2:
      raise ConfigError("--place needs two batches of text at least, got 1; give more with --text")
    return stored, choices, *_restored(source, stored)

  stored, choices, built, leaves = with_newest(opened_step, source.step)
  run = stored.run
  half = choices.of_batches(slice(0, None, 2))
  device_LE = place(half, asked.devices, asked.objective, groups=run.router.n_group)
  held_out = choices.of_batches(slice(1, None, 2))
  present_LE = np.tile(np.arange(choices.num_experts) * asked.devices // choices.num_experts,
                       (choices.layers, 1))  # fmt: skip
  slack = run.dispatch.slack
  before, after = (
    rows_of(held_out, at, asked.devices, slack=slack) for at in (present_LE, device_LE)
  )
  order_LE = order_of(device_LE)
  said: dict[str, Any] = {"by": asked.objective, "devices": asked.devices, "slack": slack}
  said |= {"batches": len(choices.expert_NGTK), "source": source.folder.name, "step": stored.step}
  said |= {"before": before._asdict(), "after": after._asdict(), "order": order_LE.tolist()}
  _begin(source, stored, built, leaves, built.run, order_LE, workdir, {PLACED: said})
  lines = [
    f"{source.folder}, step {stored.step}: {choices.num_experts} experts of {choices.layers} "
    f"layers, ordered for {asked.devices} devices by {asked.objective}, as step 0 of {workdir}",
    *_table(before, after, run),
  ]
  return "\n".join([*lines, *_next(workdir)])


def prune_run(source: Source, workdir: Path, request: str, start: str) -> str:
  """Writes a run with some of the experts of each layer; returns lines for the user.

  Args:
    source: the run.
    workdir: folder of the new run.
    request: `keep=4`, `keep=0.5,by=use`; see `--prune`.
    start: for `by=router_norm`, folder of the run from whose newest checkpoint the training began;
      "": the run's own `train.init_from`.

  Raises:
    ConfigError: the request has another form, or the smaller model is not a possible one; `start`
      is missing, another model, or has the same gates; `source.text` is not read.
    CheckpointError: there is no such run or step.
    DataError: the text cannot be read.
    StorageError: the new run cannot be written.
  """
  asked = pruning(request)
  score = asked.score
  if start and score != "router_norm":
    raise ConfigError(f"--start has no effect with --prune by={score}; leave it out")
  if source.text and score != "use":
    raise ConfigError(f"--text has no effect with --prune by={score}; leave it out, or use by=use")
  check_new(workdir)

  def opened_step() -> tuple[Stored, RunConfig, np.ndarray, build.Built, dict[str, Any]]:
    stored = _opened(source, "prune")
    fewer = smaller(placement.on_mesh(stored.run, source.mesh), asked.keep)
    built, leaves = _restored(source, stored)
    if score == "router_norm":
      begun = _leaves_of_start(start or stored.run.train.init_from, stored.run, built)
      count = stored.run.model.num_experts
      worth_LE = gate_norms(leaves, count) - gate_norms(begun, count)
      if not worth_LE.any():
        raise ConfigError(
          "--prune: by=router_norm has nothing to compare: the gates have not changed since "
          "--start; use by=use"
        )
    elif score == "use":
      worth_LE = choices_of(source, stored, asked.batches).load_LE().astype(np.float64)
    else:
      shape = stored.run.model.num_pairs, stored.run.model.num_experts
      worth_LE = np.random.default_rng(asked.seed).random(shape)
    return stored, fewer, worth_LE, built, leaves

  stored, fewer, worth_LE, built, leaves = with_newest(opened_step, source.step)
  keep = fewer.model.num_experts
  kept_LE = best(worth_LE, keep, groups=stored.run.router.n_group)
  said: dict[str, Any] = {"by": score, "source": source.folder.name, "step": stored.step}
  said |= {"start": start or stored.run.train.init_from} if score == "router_norm" else {}
  said |= {
    "kept": kept_LE.tolist(),
    "score": [[float(f"{x:.6g}") for x in row] for row in worth_LE],
  }
  new = _begin(source, stored, built, leaves, fewer, kept_LE, workdir, {PRUNED: said})
  sizes = [count_parameters(b.run.model, b.shapes) for b in (built, new)]
  was, now = (_bytes(b.shapes) for b in (built, new))
  lines = [
    f"{source.folder}, step {stored.step}: {keep} of {stored.run.model.num_experts} experts in "
    f"each of {len(kept_LE)} layers, by {score}, as step 0 of {workdir}",
    f"parameters {sizes[0].total:,} → {sizes[1].total:,}, {size_of(was)} → {size_of(now)}; active "
    f"{sizes[0].active:,} → {sizes[1].active:,}",
  ]
  return "\n".join([*lines, *_next(workdir)])


def best(worth_LE: np.ndarray, keep: int, *, groups: int = 1) -> np.ndarray:
  """The experts of the highest worth in each layer, ascending: int [L, keep].

  Of experts of equal worth, those with the smaller index are kept.

  Args:
    worth_LE: float [L, E].
    keep: number of experts to keep in each layer, a multiple of `groups`.
    groups: groups of consecutive experts, each of which keeps equally many.
  """
  layers, num_experts = worth_LE.shape
  size = num_experts // groups
  by_group = worth_LE.reshape(layers, groups, size)
  first = np.argsort(-by_group, axis=-1, kind="stable")[..., : keep // groups]
  return np.sort((first + np.arange(groups)[:, None] * size).reshape(layers, keep), -1)


# -- the source -----------------------------------------------------------------------------------


def _opened(source: Source, flag: str) -> Stored:
  """The stored run.

  Raises:
    CheckpointError: there is no such step.
    ConfigError: its experts cannot be taken one by one.
  """
  stored = open_run(str(source.folder), source.step)
  check_source(stored.run, flag)
  check_experts(flag, stored.run)
  return stored


def _restored(source: Source, stored: Stored) -> tuple[build.Built, dict[str, Any]]:
  """The model on the mesh of the conversion, its weights and router state by dotted name."""
  built = build.build(placement.on_mesh(stored.run, source.mesh))
  return built, weights_of(source.folder, stored.run, built, stored.step, source.ema)


def _leaves_of_start(folder: str, run: RunConfig, built: build.Built) -> dict[str, Any]:
  """The gates' weights of the run from which the training began.

  Raises:
    ConfigError: the folder is missing, or its model has other shapes; or the gate has no norms.
  """
  if "weight" not in arrays_of_experts(run.router.gate):
    raise ConfigError(
      "--prune: by=router_norm reads the columns of a gate's matrix `weight`, and router.gate="
      f"{run.router.gate!r} has none; use by=use"
    )
  if not folder:
    raise ConfigError(
      "--prune: by=router_norm needs --start: folder of the run from which the training began; or "
      "use by=use"
    )

  def newest() -> tuple[Stored, Any]:
    begun = open_run(folder, None)
    if build_model(begun.run, None)[1] != build_model(run, None)[1]:
      raise ConfigError(
        f"--start: {folder} has parameters of other shapes than --from; give the run from which "
        "its training began"
      )
    return begun, restore_weights(folder, begun.run, {"params": built.shapes}, begun.step)

  return flat(with_newest(newest)[1])


def choices_of(source: Source, stored: Stored, batches: int) -> Choices:
  """The choices of all routers on the text, from the model on one device.

  Experts drop what they drop in an evaluation: the run's capacity groups stay.

  Raises:
    DataError: there is no text.
  """
  single = placement.single_device(stored.run)
  built = build.build(placement.with_capacity_groups_of(single, stored.run))
  run, elsewhere = built.run, bool(source.text)
  if elsewhere:
    run = with_other_data(run, source.text)
    run = dataclasses.replace(run, data=with_tokenizer(run.data, source.folder))
  data = modality_of(run).open_data(run, evaluated=elsewhere)
  state = weights_of(source.folder, stored.run, built, stored.step, source.ema)
  like = {"params": built.shapes} | ({"router": built.router_shapes} if built.router_shapes else {})
  tree = nested(state, like)
  reading = ReadText(np.zeros(run.model.vocab_size, np.int32), tree.get("router"))
  return record(built.model(tree["params"]), data.validation(max_batches=batches), reading)


# -- the new run ----------------------------------------------------------------------------------


def _begin(
  source: Source,
  stored: Stored,
  built: build.Built,
  leaves: dict[str, Any],
  run: RunConfig,
  index_LE: np.ndarray,
  workdir: Path,
  files: Mapping[str, Any],
) -> build.Built:
  """Writes step 0 of the new run, its configuration, tokenizer and `files`; returns its objects.

  A folder that did not exist is removed if that fails.
  """
  tokenizer = load_tokenizer(stored.run, str(source.folder))
  begun = successor(run, tokenizer, workdir, keep_teacher=True)
  new = build.build(begun, list(built.mesh.devices.flat))
  taken = take(
    leaves,
    index_LE,
    run.model.zero_experts,
    leaves_of(new),
    arrays_of_experts(run.router.gate),
  )
  with new_run(workdir) as keeper:
    if (source.folder / SOURCE).is_file():
      shutil.copyfile(source.folder / SOURCE, workdir / SOURCE)
    for name, content in files.items():
      write_json(workdir / name, content)
    write_successor(keeper, workdir, new, taken, source=stored.run, tokenizer=tokenizer)
  return new


def _table(before: Rows, after: Rows, run: RunConfig) -> list[str]:
  """Lines that compare two placements on the half of the text that was held out."""
  numbers, dtype = run.model.width, np.dtype(run.model.dtype)
  size = row_size(numbers) if run.dispatch.fp8 else numbers * dtype.itemsize
  rows = [
    ("rows with content that leave their device", f"{before.away:.1%}", f"{after.away:.1%}"),
    ("devices that hold a token's experts", f"{before.receivers:.3f}", f"{after.receivers:.3f}"),
    ("experts of consecutive layers apart", f"{before.apart:.1%}", f"{after.apart:.1%}"),
    ("busiest device over the mean", f"{before.busiest:.3f}", f"{after.busiest:.3f}"),
    ("dropless rounds", f"{before.rounds:.3f}", f"{after.rounds:.3f}"),
    ("dropless bytes that a device sends in a dispatch", size_of(before.sent * size),
     size_of(after.sent * size)),
  ]  # fmt: skip
  width = max(len(name) for name, *_ in rows) + 2
  return [f"{'held-out text':{width}}{'before':>12}{'after':>12}"] + [
    f"{name:{width}}{old:>12}{new:>12}" for name, old, new in rows
  ]


def _bytes(shapes: Any) -> int:
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def _next(workdir: Path) -> list[str]:
  return [
    f"next: python -m scmoe.evaluate --workdir {workdir}",
    f"      python -m scmoe.train --config_json {workdir}/config.json --workdir {workdir}",
  ]
