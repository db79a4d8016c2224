"""Prints the statistics of the routers in the studies' GPU runs, MoE by MoE: means over seeds.

  python experiments/quality/analyses/layers.py
  python experiments/quality/analyses/layers.py --only muon --out OUT

Each finished run's record keeps the statistics of its last training step, over all tokens of that
step, one number for each MoE layer (`scmoe.moe.losses.statistics`). This command reads the records
and trains nothing. It prints one row for each model and figure, and writes OUT/GROUP.json with the
mean and the sample deviation over seeds, every run's own numbers, and the line where it is filed.

The records have no earlier step; config.py trains small models whose log has them.
"""

from __future__ import annotations

import dataclasses
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from scmoe.base.errors import DataError, run_main  # noqa: E402
from scmoe.base.options import check_choice  # noqa: E402
from scmoe.base.stored import write_json  # noqa: E402
from scmoe.reports.records import number  # noqa: E402
from scmoe.reports.studies import Result, Study, read_study  # noqa: E402
from scmoe.reports.tables import Table  # noqa: E402
from scmoe.run.command_line import HELP, Flag, help_text, parse  # noqa: E402

STUDIES = ROOT / "experiments" / "quality"
# Name in a record -> what it is, as `scmoe.moe.losses.statistics` computes it.
FIGURES = {
  "confidence": "gate score: mean over tokens of the gate's largest probability",
  "entropy": "mean over tokens of the entropy of the gate's probabilities / ln E",
  "mutual_information": "H(mean probabilities) - mean entropy, of tokens and experts, nats",
  "shortcut_ratio": "norm of the routed experts' output / norm of the residual stream to which it "
  "is added, each over all tokens of the step",
}


@dataclasses.dataclass(frozen=True)
class Group:
  """Models of one size and optimizer whose figures stand side by side.

  Attributes:
    about: size, optimizer and number of steps.
    models: study -> names of its variants.
  """

  about: str
  models: dict[str, tuple[str, ...]]


POSITIONS = ("scmoe_pos1", "scmoe_pos2", "scmoe_pos3")
GROUPS = {
  "adamw-38m": Group(
    "38 million active parameters, AdamW, 1,600 steps of 16,384 tokens",
    {
      "table6_7": ("top2", "top1", "shared_cg1", *POSITIONS, "dgmoe", "dgmoe_repeat"),
      "table4": ("scmoe2",),
    },
  ),
  "adamw-38m-every-block": Group(
    "47 million active parameters, AdamW, 1,600 steps of 16,384 tokens, a MoE in every block",
    {
      "farskip": ("every_top2", "every_shared", "every_pos1", "every_pos3", "every_farskip"),
      "moe_every": ("every_pos2",),
    },
  ),
  "muon-38m": Group(
    "38 million active parameters, Muon, 1,600 steps of 16,384 tokens",
    {"muon": ("top2", "shared_cg1", *POSITIONS, "pos2_megatron")},
  ),
  "adamw-120m": Group(
    "120 million active parameters, AdamW, 1,600 steps of 65,536 tokens",
    {"table1_3_language": ("top2", "top1", "shared_expert", *POSITIONS)},
  ),
}

FLAGS = (
  Flag("only", str, "", f"one of: {', '.join(GROUPS)}; all if not given"),
  Flag("out", str, "", "folder for the JSON files; results/layers beside this file if not given"),
  HELP,
)


def by_layer(result: Result, figure: str) -> list[float]:
  """A figure of a run, one number for each MoE layer.

  Raises:
    DataError: the record lacks it.
  """
  values = [number(x) for x in result.get("layers", {}).get(figure, [])]
  found = [x for x in values if x is not None]
  if not found or len(found) < len(values):
    raise DataError(f"{result['file']}:{result['line']} has no {figure} of each layer")
  return found


def over_seeds(runs: Sequence[Sequence[float]]) -> dict[str, Any]:
  """The runs' numbers with their mean and, from two runs on, sample deviation in each layer."""
  layers = list(zip(*runs, strict=True))
  several = len(runs) > 1
  return {
    "mean": [round(statistics.fmean(layer), 5) for layer in layers],
    "std": [round(statistics.stdev(layer), 5) for layer in layers] if several else None,
    "runs": [list(run) for run in runs],
  }


def model_figures(study: Study, variant: str) -> dict[str, Any]:
  """All figures of a variant's finished runs, and where these are filed.

  Raises:
    DataError: there is no such run, or a record lacks a figure.
  """
  results = [result for (name, _), result in study.done.items() if name == variant]
  if not results:
    raise DataError(f"{study.plan.study} has no finished run of {variant}")
  return {
    "study": study.plan.study,
    "variant": variant,
    "fields": study.plan.variants[variant],
    "seeds": [result["seed"] for result in results],
    "records": [f"{result['file']}:{result['line']}" for result in results],
    "dates": sorted({str(result["date"])[:10] for result in results}),
    "commits": sorted({str(result["git"].get("commit", "")) for result in results}),
    "hardware": sorted({result["hardware"] for result in results}),
    "jax": sorted({str((result.get("versions") or {}).get("jax", "")) for result in results}),
    "figures": {
      name: over_seeds([by_layer(result, name) for result in results]) for name in FIGURES
    },
  }


def table(group: Group, models: Sequence[dict[str, Any]], figure: str) -> Table:
  """One row a model: mean ± deviation over seeds in each MoE layer."""
  depth = max(len(model["figures"][figure]["mean"]) for model in models)
  rows = []
  for model in models:
    found = model["figures"][figure]
    spread = found["std"] or [None] * depth
    cells = [
      f"{mean:.3f}" if std is None else f"{mean:.3f} ± {std:.3f}"
      for mean, std in zip(found["mean"], spread)
    ]
    cells += ["–"] * (depth - len(cells))
    rows.append((model["variant"], str(len(model["seeds"])), *cells))
  heads = ("model", "seeds", *(f"MoE {i + 1}" for i in range(depth)))
  return Table(f"{figure}; {group.about}", heads, tuple(rows))


def main(argv: list[str]) -> None:
  """Reads the records, prints the tables and writes the files.

  Raises:
    ConfigError: there is no such group.
    DataError: a record or a plan cannot be used.
  """
  values, _ = parse(argv, FLAGS)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"]))
  if values["only"]:
    check_choice("--only", values["only"], GROUPS)
  out = Path(values["out"] or Path(__file__).resolve().parent / "results" / "layers")
  out.mkdir(parents=True, exist_ok=True)
  command = "python experiments/quality/analyses/layers.py"
  names = [values["only"]] if values["only"] else list(GROUPS)
  for name in names:
    group = GROUPS[name]
    models = []
    for study, variants in group.models.items():
      found = read_study(STUDIES / study, "gpu")
      models += [model_figures(found, variant) for variant in variants]
    said = shlex.join([*command.split(), f"--only={name}"])
    write_json(
      out / f"{name}.json",
      {"about": group.about, "command": said, "figures": FIGURES, "models": models},
    )
    print("\n\n".join(table(group, models, figure).text(170) for figure in FIGURES) + "\n")
  print(f"written to {out.name}/: {', '.join(f'{name}.json' for name in names)}")


if __name__ == "__main__":
  run_main(main)
