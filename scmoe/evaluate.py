"""python -m scmoe.evaluate: prints loss and accuracy of a trained model; of text, bits per byte.

  python -m scmoe.evaluate --workdir runs/quickstart
  python -m scmoe.evaluate --workdir runs/a --step 500 --json result.json
  python -m scmoe.evaluate --workdir runs/a --data.path=my.txt
  python -m scmoe.evaluate --model exports/a
  python -m scmoe.evaluate --workdir runs/a --dispatch.capacity_factor=4 --data.seq_len=256
  python -m scmoe.evaluate --workdir runs/a --task code
  python -m scmoe.evaluate --workdir runs/a --tasks hellaswag,arc_easy --limit 100

Reads the configuration stored in the checkpoint, and evaluates on the validation part of its data.
With --data.path or another source: on all of that text, or on its validation files where files are
named so. Experts per token and capacity may differ from training. A run of several tasks
(docs/multitask.md) is evaluated on all of them, each with its gates; --task names one, whose gates
other text is read with. With --tasks: runs benchmarks of EleutherAI's lm-evaluation-harness
(pip install lm_eval).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from scmoe.base.errors import ConfigError, StorageError, run_main
from scmoe.base.output import warn
from scmoe.base.stored import write_json
from scmoe.data.packages import need
from scmoe.pretrained.inference import InferenceFolder
from scmoe.run import placement
from scmoe.run.command_line import (
  ALLOW_IMPORT,
  HELP,
  SIMULATE,
  Flag,
  help_text,
  json_file,
  one_model,
  parse,
  simulate,
)
from scmoe.run.config import RunConfig
from scmoe.run.effects import check_typed
from scmoe.run.fields import with_field
from scmoe.run.modality import modality_of, with_other_data
from scmoe.run.multitask import OfTask, of_task
from scmoe.run.opened import OpenRun, Stored, open_folder, open_model, open_run
from scmoe.run.programs import user_programs
from scmoe.run.text import with_tokenizer
from scmoe.training.restore import with_newest

# Fields of the stored configuration that evaluation may change: none of them changes a parameter.
DATA = ("data.path", "data.source", "data.mixture", "data.field", "data.domain_field",
        "data.limit_bytes", "data.document_bytes")  # fmt: skip
EVALUATED = (*DATA, "data.seq_len", "model.top_k", "dispatch.capacity_factor",
             "dispatch.transport", "train.batch_size")  # fmt: skip

# Flags that have no effect on tasks, which bring their own text and drop no token.
IDLE = (*DATA, "dispatch.capacity_factor", "dispatch.transport", "max_batches")
OF_TASKS = (
  Flag("tasks", str, "", "benchmarks of lm_eval instead of text, separated by commas"),
  Flag("task_folder", str, "", "tasks: a folder with your own task files"),
  Flag("num_fewshot", int, -1, "tasks: examples in a prompt; -1: as each task says"),
  Flag("limit", float, 0.0, "tasks: documents of each, or, below 1, the share of them; 0: all"),
  Flag("gen_kwargs", str, "", "tasks: replaces their own, e.g. max_gen_toks=64,temperature=0"),
)

# Figures of the table, where an evaluation has them, and what heads their columns.
COLUMNS = {
  "loss": "loss",
  "perplexity": "perplexity",
  "bits_per_byte": "bits/byte",
  "bigram_bits_per_byte": "bigram bits/byte",
  "accuracy": "accuracy",
  "accuracy_5": "top-5 accuracy",
  "tokens": "tokens",
  "images": "images",
}
WHOLE = ("tokens", "images")

FLAGS = (
  Flag("workdir", str, "", "folder of the run"),
  Flag("model", str, "", "folder that scmoe.convert --inference wrote, instead of --workdir"),
  Flag("step", int, -1, "step of the checkpoint; -1: the newest"),
  Flag("task", str, "", "run of several tasks: evaluate one by itself, on its text or another"),
  Flag("ema", bool, False, "evaluate the moving average of the weights (optimizer.ema) instead"),
  Flag("max_batches", int, 0, "batches to evaluate; 0: all validation text"),
  Flag("mesh", str, "", "such as data=2,expert=2; default: training's, or one device"),
  SIMULATE,
  Flag("json", str, "", "also write the figures to this file"),
  *(Flag(name, str, None, "replaces the run's value") for name in EVALUATED),
  *OF_TASKS,
  ALLOW_IMPORT,
  HELP,
)


@user_programs()
def main(argv: list[str]) -> None:
  """Evaluates a checkpoint and prints a table."""
  values, _ = parse(argv, FLAGS)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"]))
  simulate(values["simulate"])
  one_model(values)
  if not values["workdir"] and not values["model"]:
    raise ConfigError("--workdir is missing: folder of the run; or give --model")
  if values["model"] and values["ema"]:
    raise ConfigError("--ema has no effect with --model, whose weights scmoe.convert chose")
  if values["max_batches"] < 0:
    raise ConfigError(f"--max_batches={values['max_batches']} must be >= 0; 0 takes all")
  out = json_file(values["json"])
  changed = {name: values[name] for name in EVALUATED if values[name] is not None}
  if values["tasks"]:
    figures = _on_tasks(values, changed)
  else:
    if lost := [flag.name for flag in OF_TASKS if values[flag.name] != flag.default]:
      raise ConfigError(f"--{lost[0]} has no effect without --tasks; name some, e.g. --tasks=piqa")
    given = (values[name] for name in ("workdir", "step", "max_batches", "mesh", "allow_import"))
    which = {name: values[name] for name in ("model", "ema", "task")}
    figures = evaluate_run(*given, changed=changed, **which)
    print(table(figures))
  if out is not None:
    try:
      write_json(out, figures)
    except OSError as error:
      raise StorageError(
        f"--json={values['json']!r} cannot be written: {error.strerror or error}"
      ) from None


def _on_tasks(values: Mapping[str, Any], changed: Mapping[str, str]) -> dict[str, Any]:
  """Runs the benchmarks of --tasks and prints their table; returns the harness's results.

  Raises:
    ConfigError: lm_eval is not installed, a task is unknown, or a flag has no effect.
    DataError: a task's data cannot be loaded.
  """
  idle = [name for name in IDLE if values[name]]
  if idle:
    raise ConfigError(
      f"--{idle[0]} has no effect with --tasks, which read their own text and drop no token; "
      "leave one of them out"
    )
  need("lm_eval", "--tasks")
  from scmoe.run.tasks import evaluate_tasks, task_table  # the harness takes seconds to import

  step = None if values["step"] < 0 else values["step"]
  allowed, folder = values["allow_import"], None
  if values["model"]:
    folder = InferenceFolder(values["model"], allowed)

  def opened_step() -> tuple[int, OpenRun]:
    stored = folder or open_run(values["workdir"], step, allowed)
    own = of_task(stored.run, values["task"])
    run = placement.on_mesh(with_changes(own.run, changed), values["mesh"])
    if folder:
      return stored.step, open_folder(folder, run)
    options = {"ema": values["ema"], "gate": own.gate}
    return stored.step, open_model(run, values["workdir"], stored.step, **options)

  at, opened = with_newest(opened_step, step)
  found = evaluate_tasks(
    opened,
    [name.strip() for name in values["tasks"].split(",") if name.strip()],
    folder=values["task_folder"],
    fewshot=None if values["num_fewshot"] < 0 else values["num_fewshot"],
    limit=values["limit"] or None,
    gen_kwargs=values["gen_kwargs"],
  )
  print(f"{opened.workdir} at step {at}\n{task_table(found)}")
  return found


def evaluate_run(
  workdir: str = "",
  step: int = -1,
  max_batches: int = 0,
  mesh: str = "",
  allow_import: Sequence[str] = (),
  changed: Mapping[str, str] | None = None,
  model: str = "",
  ema: bool = False,
  task: str = "",
) -> dict[str, Any]:
  """Evaluates a run: the figures of `scmoe.inference.evaluation.evaluate`, and a bigram model's.

  Args:
    workdir: folder of the run.
    step: step of the checkpoint; -1: the newest.
    max_batches: batches to evaluate; 0: all.
    mesh: see `scmoe.run.placement.on_mesh`.
    allow_import: see `scmoe.base.extensions.check_allowed`.
    changed: fields of `EVALUATED` to change, with their values.
    model: folder that `scmoe.convert --inference` wrote, instead of a run's.
    ema: the moving average of the run's weights instead of the weights.
    task: of a run of several tasks, the one to evaluate, with its gates; "": all, each on its text.

  Raises:
    ConfigError: a field cannot be used, or has no effect on this model; the mesh does not divide
      the batch, or the rows; or the run keeps no average.
    DataError: there is no text to evaluate on, or the model's folder is damaged.
  """
  folder = InferenceFolder(model, allow_import) if model else None
  named, workdir, changed = None if step < 0 else step, workdir or model, changed or {}

  def opened_step() -> tuple[Stored | InferenceFolder, RunConfig, OpenRun]:
    stored = folder or open_run(workdir, named, allow_import)
    own = of_task(stored.run, task) if task or elsewhere else OfTask(stored.run)
    run = placement.on_mesh(with_changes(own.run, changed), mesh)
    run.train.check_mesh(run.mesh.batch_shards)
    run.check_divided_rows()
    run = placement.with_capacity_groups_of(run, stored.run)
    if folder:
      return stored, run, open_folder(folder, run)
    return stored, run, open_model(run, workdir, stored.step, ema=ema, gate=own.gate)

  elsewhere = any(name in DATA for name in changed)
  stored, run, opened = with_newest(opened_step, named)
  source = with_tokenizer(run.data, workdir) if elsewhere or task else run.data
  modality, read = modality_of(run), dataclasses.replace(run, data=source)
  data = modality.open_data(read, evaluated=elsewhere, trained=False)
  if not elsewhere and not task and isinstance(stored, Stored):
    _warn_of_other_text(stored, data)
  options = {
    "mesh": opened.mesh,
    "router": opened.router,
    "max_batches": max_batches or None,
    "prepare": opened.prepare,
  }
  figures = modality.evaluate(opened.model, data, **options)
  assert figures is not None  # it returns None only if told to stop
  if not elsewhere:  # other data have no training part on which to fit a baseline
    modality.add_baseline(data, figures)
  capacity = {"capacity_factor": run.dispatch.capacity_factor, "groups": capacity_groups(run)}
  capacity["groups_trained"] = capacity_groups(stored.run)
  where = {"workdir": str(workdir), "step": stored.step, "changed": dict(changed)}
  where |= {"weights": "average"} if ema else {}
  where |= {"task": task} if task else {}
  return {**where, **figures, "capacity": capacity}


def _warn_of_other_text(stored: Stored, data: Any) -> None:
  """Says that the text is not the one that the run was trained on, where that is so."""
  was, now = stored.data.get("digest"), data.fingerprint()["digest"]
  if was and was != now:
    warn(
      f"the text has changed since the run was trained (digest {was}, now {now}): validation text "
      "may be what it was trained on, and other figures than the run's own are to be expected"
    )


def capacity_groups(run: RunConfig) -> int:
  """Number of parts of a batch; in each, every expert has its own capacity."""
  return run.dispatch.groups or run.mesh.token_shards


def with_changes(run: RunConfig, changed: Mapping[str, str]) -> RunConfig:
  """A stored run with other data or routing; `data.source` follows the path unless it is given.

  Raises:
    ConfigError: a field cannot be used, or has no effect.
  """
  if not changed:
    return run
  if any(name in DATA for name in changed):
    run = with_other_data(run)
  for name, text in changed.items():
    run = with_field(run, name, text)
  check_typed(run, changed)
  return run.resolve(num_devices=max(run.mesh.size, 1), vocab_size=run.model.vocab_size)


def table(figures: dict[str, Any]) -> str:
  """The table that is printed: one line per domain and one for all of them."""
  shown = {key: head for key, head in COLUMNS.items() if key in figures}
  rows = {**figures["domains"], "all": figures}
  width = max(len(name) for name in rows) + 2
  with_ = ", ".join(f"{name}={text}" for name, text in figures["changed"].items())
  title = f"{figures['workdir']} at step {figures['step']}"
  title += f" with {with_}" if with_ else ""
  title += ", average of the weights" if "weights" in figures else ""
  title += f", task {figures['task']}" if "task" in figures else ""
  title += f", {figures['batches']:,} batches" if "batches" in figures else ""
  lines = [f"validation of {title}"]
  lines.append(" " * width + "".join(f"{head:>18}" for head in shown.values()))
  for name, row in rows.items():
    cells = [f"{row[key]:,.0f}" if key in WHOLE else f"{row[key]:.4f}" for key in shown]
    lines.append(f"{name:{width}}" + "".join(f"{cell:>18}" for cell in cells))
  if figures["drop"]:
    lines.append(f"{figures['drop']:.2%} of the routed choices found no room" + _room(figures))
  return "\n".join(lines)


def _room(figures: dict[str, Any]) -> str:
  """The capacity behind a share of dropped choices, and whether training had the same."""
  if "capacity" not in figures:
    return ""
  capacity = figures["capacity"]
  parts = lambda n: f"{n} part{'s' if n > 1 else ''}"
  text = f" (capacity factor {capacity['capacity_factor']:g}, {parts(capacity['groups'])} a batch"
  if capacity["groups"] != capacity["groups_trained"]:
    text += f"; {parts(capacity['groups_trained'])} in training, which drops other tokens"
  return text + ")"


if __name__ == "__main__":
  run_main(main)
