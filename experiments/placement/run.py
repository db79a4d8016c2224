"""Experts placed for devices, and pruned: rows, bytes and losses before and after.

  python experiments/placement/run.py --scale cpu --base FILE --tuned FILE
  python experiments/placement/run.py --scale cpu --base FILE --tuned FILE --part place

A model is trained on the first text (train) and then on the second (tune). place: figures of the
first model's choices under every placement, for 4 and for 8 devices, on batches that the placement
has not seen. order: the loss with the experts in another order. prune: the second model with fewer
experts, by each score, and its losses on the second text's validation part and on --other. Each
part takes minutes on a CPU and adds its figures to results/SCALE.json. A prune that was stopped
goes on with the figures of the same day, models and texts; a training that has ended is not
recorded again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
PARTS = ("train", "tune", "place", "order", "prune")
# Fields of each scale; --config quickstart has the others.
MODEL = {
  "model.wiring": "topk", "model.moe_every": "1", "model.top_k": "2", "model.num_experts": "16",
  "dispatch.transport": "dropless", "router.balance_loss": "0.01", "train.sample_tokens": "0",
  "data.source": "text", "data.packing": "concat",
}  # fmt: skip
SCALES = {
  "cpu": {
    "model.num_layers": "4", "model.width": "64", "model.expert_hidden": "64",
    "model.mlp_hidden": "128", "model.num_heads": "4", "data.seq_len": "128",
    "train.batch_size": "16", "train.steps": "800", "train.stop_after": "400",
  },
  "gpu": {
    "model.num_layers": "8", "model.width": "512", "model.expert_hidden": "512",
    "model.mlp_hidden": "1024", "model.num_heads": "8", "model.num_experts": "64",
    "model.top_k": "4", "model.context": "512", "data.seq_len": "512", "train.batch_size": "64",
    "train.steps": "3000", "model.dtype": "bfloat16",
  },
}  # fmt: skip
PAUSED = 75  # exit code of a training that train.stop_after ends
DEVICES, RANDOM = (4, 8), 5  # placements for so many devices; number of random placements
KEPT, SEEDS = (0.5, 0.25), (0, 1)  # shares of the experts; seeds of `random`


def main() -> None:
  """Runs one part, or all, and writes the figures."""
  flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  flags.add_argument("--scale", choices=SCALES, default="cpu")
  flags.add_argument("--base", type=Path, required=True, help="text of the first training")
  flags.add_argument("--tuned", type=Path, required=True, help="text of the second one")
  flags.add_argument("--other", type=Path, help="text on which the second model is judged too")
  flags.add_argument("--part", choices=(*PARTS, "all"), default="all")
  flags.add_argument("--runs", type=Path, default=Path("runs/placement"))
  flags.add_argument("--batches", type=int, default=32, help="batches of text to count and judge")
  given = flags.parse_args()
  out = HERE / "results" / f"{given.scale}.json"
  out.parent.mkdir(exist_ok=True)
  for part in PARTS if given.part == "all" else (given.part,):
    started = time.monotonic()
    figures = {"train": train, "tune": tune, "place": place, "order": order, "prune": prune}[part](
      given
    )
    import jax  # the parts that train start processes of their own

    device = jax.devices()[0]
    found = json.loads(out.read_text()) if out.is_file() else {}
    found[part] = {
      "date": time.strftime("%Y-%m-%d"),
      "hardware": f"{jax.device_count()} x {device.device_kind}",
      "versions": {"python": sys.version.split()[0], "jax": jax.__version__},
      "command": f"python experiments/placement/run.py --scale {given.scale} --base "
      f"{given.base.name} --tuned {given.tuned.name}"
      + f" --other {given.other.name}" * bool(given.other)
      + f" --batches {given.batches} --part {part}",
      "seconds": round(time.monotonic() - started, 1),
      **figures,
    }
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found[part], indent=1))


def train(given: argparse.Namespace) -> dict[str, Any]:
  """Trains the first model."""
  fields = SCALES[given.scale]
  until = int(fields.get("train.stop_after", fields["train.steps"]))
  return trained(given, given.base, given.runs / "base", until)


def tune(given: argparse.Namespace) -> dict[str, Any]:
  """Trains the second model, which begins as the first one."""
  more = [f"--config.train.init_from={given.runs / 'base'}"]
  steps = int(SCALES[given.scale]["train.steps"]) // 4
  more += [f"--config.train.steps={steps}", "--config.train.stop_after=0",
           "--config.optimizer.learning_rate=1e-3"]  # fmt: skip
  return trained(given, given.tuned, given.runs / "tuned", steps, more)


def trained(
  given: argparse.Namespace, text: Path, workdir: Path, until: int, more: list[str] | None = None
) -> dict[str, Any]:
  """Trains in a process of its own; returns the fields that were set and the last evaluation.

  Args:
    given: the command's flags.
    text: file of the text.
    workdir: the run's folder. A run that was stopped goes on.
    until: the last step.
    more: further options.

  Raises:
    SystemExit: the run has ended already, or the training fails.
  """
  fields = {**MODEL, **SCALES[given.scale], "data.path": str(text.resolve())}
  fields = {name: value for name, value in fields.items() if value}
  options = [f"--config.{name}={value}" for name, value in fields.items()] + (more or [])
  fields |= {"more": " ".join(word for word in more or [] if "init_from" not in word)}
  command = [sys.executable, "-m", "scmoe.train", "--config", "quickstart", *options]
  if (before := evaluations(workdir)) and before[-1]["step"] >= until:
    raise SystemExit(
      f"{workdir} has ended already, at step {before[-1]['step']}: its figures are not of today; "
      "give another --runs, or remove that folder"
    )
  code = subprocess.run([*command, "--workdir", str(workdir)], check=False, cwd=ROOT).returncode
  if code not in (0, PAUSED):
    raise SystemExit(code)
  last = evaluations(workdir)[-1]
  fields["data.path"] = text.name
  return {"fields": fields, "loss": last["loss"], "bits_per_byte": last["bits_per_byte"]}


def evaluations(workdir: Path) -> list[dict[str, Any]]:
  """The evaluations of a run so far; none if there is no run."""
  file = workdir / "metrics.jsonl"
  lines = map(json.loads, file.read_text().splitlines()) if file.is_file() else ()
  return [line for line in lines if line["kind"] == "eval"]


def place(given: argparse.Namespace) -> dict[str, Any]:
  """Figures of placements: the present one, random ones and every objective."""
  import numpy as np

  from scmoe.inference.placement.devices import OBJECTIVES
  from scmoe.inference.placement.devices import place as placed
  from scmoe.inference.placement.rows import rows_of
  from scmoe.run.opened import open_run
  from scmoe.run.rearranged import Source, choices_of

  source = Source(given.runs / "base")
  stored = open_run(str(source.folder), None)
  choices = choices_of(source, stored, given.batches)
  seen, new = choices.of_batches(slice(0, None, 2)), choices.of_batches(slice(1, None, 2))
  experts, slack, rng = choices.num_experts, stored.run.dispatch.slack, np.random.default_rng(0)
  rounded = lambda rows: {name: round(x, 4) for name, x in rows._asdict().items()}
  found: dict[str, Any] = {"slack": slack, "batches": len(new.expert_NGTK), "devices": {}}
  found |= {"tokens_per_batch": choices.expert_NGTK.shape[2], "top_k": choices.expert_NGTK.shape[3]}
  found |= {"width": stored.run.model.width, "bytes_per_number": 4}
  for devices in DEVICES:
    present = np.tile(np.arange(experts) * devices // experts, (choices.layers, 1))
    arms = {"present": rounded(rows_of(new, present, devices, slack=slack))}
    several = [rng.permuted(present, axis=1) for _ in range(RANDOM)]
    rows = [rows_of(new, at, devices, slack=slack) for at in several]
    arms["random"] = {
      name: round(float(np.mean([getattr(r, name) for r in rows])), 4) for name in rows[0]._fields
    }
    for objective in OBJECTIVES:
      at = placed(seen, devices, objective)
      arms[objective] = rounded(rows_of(new, at, devices, slack=slack))
      arms[objective]["on_seen_text"] = rounded(rows_of(seen, at, devices, slack=slack))
    found["devices"][devices] = arms
  return found


def order(given: argparse.Namespace) -> dict[str, Any]:
  """The first model's loss, and that of the same experts in another order."""
  from scmoe.evaluate import evaluate_run
  from scmoe.run.rearranged import Source, place_run

  to = fresh(given.runs / "placed")
  print(place_run(Source(given.runs / "base"), to, f"devices=4,batches={given.batches}"))
  folders = {"before": given.runs / "base", "after": to}
  return {
    name: evaluate_run(str(folder), max_batches=given.batches, mesh="data=1")["loss"]
    for name, folder in folders.items()
  }


def prune(given: argparse.Namespace) -> dict[str, Any]:
  """Losses and sizes of the second model with fewer experts, by each score."""
  from scmoe.evaluate import evaluate_run
  from scmoe.run.rearranged import Source, prune_run

  source, start = Source(given.runs / "tuned"), str(given.runs / "base")
  texts: dict[str, dict[str, str]] = {"tuned": {}}
  if given.other:
    texts["other"] = {"data.path": str(given.other.resolve())}

  def judged(folder: Path) -> dict[str, Any]:
    size = sum(f.stat().st_size for f in folder.glob("checkpoints/*/params/**/*") if f.is_file())
    losses = {
      name: round(evaluate_run(str(folder), max_batches=given.batches, changed=changed,
                               mesh="data=1")["loss"], 4)
      for name, changed in texts.items()
    }  # fmt: skip
    return {"losses": losses, "bytes_on_disk": size}

  arms = [
    f"keep={share},{arm}"
    for share in KEPT
    for arm in ("by=router_norm", "by=use", *(f"by=random,seed={seed}" for seed in SEEDS))
  ]
  kept = given.runs / "pruned.json"
  of = identity(given)
  found = going_on(kept, of)
  if "whole" not in found:
    found["whole"] = judged(given.runs / "tuned")
  for arm in arms:
    if arm in found:
      continue
    to = fresh(given.runs / "pruned")
    said = prune_run(source, to, arm, start if "norm" in arm else "")
    found[arm] = {**judged(to), "said": said.splitlines()[1]}
    kept.write_text(json.dumps({"of": of, "arms": found}))
  kept.unlink(missing_ok=True)  # the part is whole: when it is called again, it measures again
  return found


def identity(given: argparse.Namespace) -> dict[str, Any]:
  """The day, both models, the texts and their number: figures of pruned models depend on these."""
  import jax

  from scmoe.training.restore import read_meta

  leaves = lambda name: read_meta(given.runs / name)["leaves"]
  prints = lambda name: {leaf: x["fingerprint"] for leaf, x in leaves(name).items()}
  text = lambda path: hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
  models = json.dumps([prints("base"), prints("tuned")], sort_keys=True)
  return {
    "date": time.strftime("%Y-%m-%d"),
    "models": hashlib.blake2b(models.encode(), digest_size=16).hexdigest(),
    "texts": [text(path) for path in (given.tuned, given.other) if path],
    "batches": given.batches,
    "jax": jax.__version__,
  }


def going_on(file: Path, of: dict[str, Any]) -> dict[str, Any]:
  """The figures that a stopped part has left, if they are of the same `identity`; else none.

  A file that was cut short while it was written counts as none.
  """
  try:
    left = json.loads(file.read_text())
  except (FileNotFoundError, json.JSONDecodeError):
    return {}
  return left["arms"] if left.get("of") == of else {}


def fresh(folder: Path) -> Path:
  """The folder of a run that this script may write again; what it held is removed."""
  import shutil

  shutil.rmtree(folder, ignore_errors=True)
  return folder


if __name__ == "__main__":
  main()
