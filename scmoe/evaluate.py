"""python -m scmoe.evaluate: validation loss, perplexity and bits per byte of a trained model.

  python -m scmoe.evaluate --workdir runs/quickstart
  python -m scmoe.evaluate --workdir runs/a --step 500 --json result.json

Reads the configuration stored in the checkpoint, and the same data again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scmoe import build
from scmoe.command_line import ALLOW_IMPORT, HELP, SIMULATE, Flag, help_text, parse, simulate
from scmoe.data import BitsPerByte, bigram_bits_per_byte, check_vocab, open_data
from scmoe.errors import ConfigError, StorageError, run_main
from scmoe.inference.evaluation import evaluate
from scmoe.programs import Programs
from scmoe.summary import open_run
from scmoe.training.checkpoint import restore_part
from scmoe.training.workdir import write_json

FLAGS = (
  Flag("workdir", str, "", "folder of the run", required=True),
  Flag("step", int, -1, "step of the checkpoint; -1: the newest"),
  Flag("max_batches", int, 0, "batches to evaluate; 0: all validation text"),
  Flag("mesh", str, "", "axes such as data=2,expert=2; training's, or one device, if not given"),
  SIMULATE,
  Flag("json", str, "", "also write the figures to this file"),
  ALLOW_IMPORT,
  HELP,
)


def main(argv: list[str]) -> None:
  """Evaluates a checkpoint and prints a table."""
  values, _ = parse(argv, FLAGS)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"]))
  simulate(values["simulate"])
  if values["max_batches"] < 0:
    raise ConfigError(f"--max_batches={values['max_batches']} must be >= 0; 0 takes all")
  out = Path(values["json"]) if values["json"] else None
  if out is not None and not out.absolute().parent.is_dir():
    raise ConfigError(f"--json={values['json']!r}: there is no folder {out.absolute().parent}")
  given = (values[name] for name in ("workdir", "step", "max_batches", "mesh", "allow_import"))
  figures = evaluate_run(*given)
  print(table(figures))
  if out is not None:
    try:
      write_json(out, figures)
    except OSError as error:
      raise StorageError(f"--json={values['json']!r} cannot be written: {error}") from None


def evaluate_run(
  workdir: str,
  step: int = -1,
  max_batches: int = 0,
  mesh: str = "",
  allow_import: Sequence[str] = (),
) -> dict[str, Any]:
  """Figures of `scmoe.inference.evaluation.evaluate`, with `step` and the bigram model's beside.

  Args:
    workdir: folder of the run.
    step: of the checkpoint; -1 for the newest.
    max_batches: batches to evaluate; 0: all.
    mesh: see `scmoe.build.on_mesh`.
    allow_import: see `scmoe.extensions.check_allowed`.
  """
  stored = open_run(workdir, None if step < 0 else step, allow_import)
  run = build.on_mesh(stored.run, mesh)
  run.train.check_mesh(run.mesh.batch_shards)
  built = build.build(run)
  wanted = {"params": built.shapes, "router": built.router_shapes}
  state = restore_part(workdir, wanted, stored.step)
  data = open_data(run.data, batch_size=run.train.batch_size, seed=run.train.seed)
  check_vocab(data, run.model.vocab_size)
  options = {
    "mesh": built.mesh,
    "router": state["router"],
    "max_batches": max_batches or None,
    "prepare": Programs(built.overlap, Path(workdir)),
  }
  figures = evaluate(built.model(state["params"]), data, **options)
  assert figures is not None  # nothing asks it to stop
  bigram: BitsPerByte = bigram_bits_per_byte(data)
  figures["bigram_bits_per_byte"] = bigram.total
  for name, of_domain in figures["domains"].items():
    of_domain["bigram_bits_per_byte"] = bigram.domains[name]
  return {"workdir": str(workdir), "step": stored.step, **figures}


def table(figures: dict[str, Any]) -> str:
  """One line per domain and one for all of them."""
  names = ("loss", "perplexity", "bits_per_byte", "bigram_bits_per_byte", "accuracy", "tokens")
  heads = ("loss", "perplexity", "bits/byte", "bigram bits/byte", "accuracy", "tokens")
  rows = {**figures["domains"], "all": figures}
  width = max(len(name) for name in rows) + 2
  lines = [f"validation of {figures['workdir']} at step {figures['step']}"]
  lines.append(" " * width + "".join(f"{head:>18}" for head in heads))
  for name, row in rows.items():
    cells = [f"{row[key]:,.0f}" if key == "tokens" else f"{row[key]:.4f}" for key in names]
    lines.append(f"{name:{width}}" + "".join(f"{cell:>18}" for cell in cells))
  if figures["drop"]:
    lines.append(f"{figures['drop']:.2%} of the choices of experts found no room")
  return "\n".join(lines)


if __name__ == "__main__":
  run_main(main)
