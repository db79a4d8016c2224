"""python -m scmoe.inspect: draws a run's routers, over training and at a checkpoint.

  python -m scmoe.inspect --workdir runs/quickstart
  python -m scmoe.inspect --workdir runs/a --step 500 --out reports/a --batches 32

Writes inspect.html (one file), inspect.npz (every array that is drawn) and inspect.json (the small
ones, for `scmoe.report`) into --out. Reads metrics.jsonl, the checkpoint, and the validation data
again, on one device.
"""

from __future__ import annotations

import dataclasses
import io
import json
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from scmoe.base.errors import ConfigError, run_main
from scmoe.data import Tokenizer
from scmoe.inference.gradients import gradient_norms
from scmoe.inference.probe import Probe, probe
from scmoe.inference.reading import ReadImages, ReadText
from scmoe.reports import page, router
from scmoe.reports.records import Record, read_run
from scmoe.reports.tables import Table
from scmoe.run import build, placement
from scmoe.run.adapters import restore_weights
from scmoe.run.command_line import HELP, Flag, check_environment, help_text, parse
from scmoe.run.config import RunConfig
from scmoe.run.modality import modality_of
from scmoe.run.opened import open_run
from scmoe.run.programs import user_programs
from scmoe.training.restore import with_newest

FLAGS = (
  Flag("workdir", str, "", "folder of the run", required=True),
  Flag("step", int, -1, "step of the checkpoint; -1: the newest"),
  Flag("batches", int, 16, "batches of validation text to read; 0: all"),
  Flag("out", str, "", "folder to write to; WORKDIR/inspect if not given"),
  Flag("gradients", bool, False, "also the gradient's norms; takes the memory of a training step"),
  HELP,
)
# Figures of `Probe` that are computed from its fields.
DERIVED = ("overlap_G", "dead_G", "by_domain_G", "by_class_G")
CLASSES = ("lower case", "upper case", "digit", "space", "line end", "punctuation", "other", "end")


@user_programs()
def main(argv: list[str]) -> None:
  """Inspects a run, writes its page and prints the table."""
  values, _ = parse(argv, FLAGS)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"]))
  check_environment()
  if values["batches"] < 0:
    raise ConfigError(f"--batches={values['batches']} must be >= 0; 0 takes all")
  out = Path(values["out"] or Path(values["workdir"]) / "inspect")
  found = inspect_run(
    values["workdir"], values["step"], values["batches"], gradients=values["gradients"]
  )
  command = " ".join(["python -m scmoe.inspect", *argv])
  page.write(out / "inspect.html", found.page(command))
  page.write(out / "inspect.npz", found.npz())
  page.write(out / "inspect.json", json.dumps(found.as_json(command), indent=1) + "\n")
  files = f"page: {out / 'inspect.html'}, arrays: inspect.npz, figures: inspect.json"
  print("\n\n".join([found.table().text(), files]))


@dataclasses.dataclass(frozen=True)
class Inspection:
  """A run's routers over training and at a checkpoint; `inspect_run` makes one.

  Attributes:
    record: the run's metrics.
    step: step of the checkpoint.
    probe: what the checkpoint's routers did on validation data.
    domains: names of the domains, in the order of axis D of `probe.domain_load_GDE`.
    classes: names of the classes, in the order of axis C of `probe.class_load_GCE`.
    gradients: part -> norm of the gradient in each layer, of one batch (`gradient_norms`); empty if
      it was not asked for.
  """

  record: Record
  step: int
  probe: Probe
  domains: tuple[str, ...]
  classes: tuple[str, ...] = CLASSES
  gradients: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

  def table(self) -> Table:
    """The table that is printed: one row per gating, a place where a router chooses experts."""
    p, number = self.probe, lambda x: "–" if np.isnan(x) else f"{x:.3f}"
    per_pair = len(p.gatings) // len(p.drop_P)
    busiest = p.load_GE.shape[1] * p.load_GE.max(-1)
    rows = []
    for g, name in enumerate(p.gatings):
      overlap = p.overlap_G[g] if g < len(p.overlap_G) else np.nan
      of_pair = p.drop_P[g // per_pair], p.shortcut_ratio_P[g // per_pair]
      figures = [busiest[g], p.dead_G[g], p.entropy_G[g], p.confidence_G[g], *of_pair,
                 p.by_domain_G[g], p.by_class_G[g], overlap, p.repeated_G[g],
                 p.as_current_G[g]]  # fmt: skip
      rows.append((name, *map(number, figures)))
    heads = ("router", "imbalance", "dead", "entropy", "confidence", "drop", "shortcut ratio",
             "by domain", "by class", "tells of the next", "repeated", "as on current")  # fmt: skip
    title = f"{self.record.name} at step {self.step}, {p.tokens:,} tokens of validation data"
    return Table(title, heads, tuple(rows))

  def arrays(self) -> dict[str, np.ndarray]:
    """Every array that the page draws, by name."""
    found = {f.name: getattr(self.probe, f.name) for f in dataclasses.fields(Probe)}
    found |= {name: getattr(self.probe, name) for name in DERIVED}
    found |= {f"gradient_{part.replace(' ', '_')}": v for part, v in self.gradients.items()}
    found |= {"domains": np.array(self.domains), "classes": np.array(self.classes)}
    steps, loads = router.loads_over_training(self.record)
    found |= {"training_load_steps": steps, "training_load": loads}
    for name, _ in router.OVER_TRAINING:
      steps, values = router.layers_over_training(self.record, name)
      found |= {"training_steps": steps, f"training_{name}": values} if len(steps) else {}
    return {name: np.asarray(value) for name, value in found.items()}

  def npz(self) -> bytes:
    """The arrays as the content of an .npz file."""
    out = io.BytesIO()
    np.savez_compressed(out, **self.arrays())  # pyright: ignore[reportArgumentType]
    return out.getvalue()

  def as_json(self, command: str = "") -> dict[str, Any]:
    """The figures of `scmoe.reports.analyses`: names, and one list of numbers per curve.

    Args:
      command: the command that made them, which is noted.
    """
    p, card = self.probe, self.record.card
    curves = {
      "similarity": p.similarity_V,
      "alignment": p.alignment_V,
      "shortcut_ratio": p.shortcut_ratio_P,
      "drop": p.drop_P,
      "entropy": p.entropy_G,
      "confidence": p.confidence_G,
      "repeated": p.repeated_G,
      "as_current": p.as_current_G,
      "by_domain": p.by_domain_G,
      "by_class": p.by_class_G,
      "entropy_by_part": np.nanmean(p.entropy_GQ, 0),
      "confidence_by_part": np.nanmean(p.confidence_GQ, 0),
    }
    curves |= {f"gradient of {part}": values for part, values in self.gradients.items()}
    steps, ratios = router.layers_over_training(self.record, "shortcut_ratio")
    if len(steps):
      curves |= {"steps": steps, "shortcut_ratio_by_step": ratios.mean(1)}
      curves |= {f"shortcut_ratio_by_step of MoE {i + 1}": x for i, x in enumerate(ratios.T)}
    finite = lambda values: [None if not np.isfinite(x) else round(float(x), 6) for x in values]
    return {
      "run": self.record.name,
      "wiring": str(self.record.config.get("model.wiring", "")),
      "step": self.step,
      "tokens": p.tokens,
      "command": command,
      "date": str(card.get("time", "")),
      "commit": str(card.get("git", {}).get("commit", "")),
      "hardware": self.record.devices,
      "versions": card.get("versions", {}),
      "gatings": list(p.gatings),
      "points": list(p.points),
      "curves": {name: finite(values) for name, values in curves.items()},
    }

  def page(self, command: str = "") -> str:
    """The self-contained HTML page."""
    p = self.probe
    parts: list[str | Table] = [self.table()]

    def add(title: str, png: bytes | None, about: str) -> None:
      if png is not None:
        parts.append(f"<h2>{title}</h2><p>{about}</p>{page.picture(png, title)}")

    add("Load at the end", router.draw_heat(p.load_GE, p.gatings, "percent of the choices"),
        "Percent of a router's choices that go to each expert; white: none, dark: twice an equal "
        "share.")  # fmt: skip
    if len(self.domains) > 1:
      heat = router.draw_by(p.domain_load_GDE, p.gatings, self.domains, "experts by domain")
      add("Experts by domain", heat, "Where the rows differ, experts have specialised.")
    used = [i for i in range(len(self.classes)) if np.isfinite(p.class_load_GCE[:, i]).any()]
    heat = router.draw_by(p.class_load_GCE[:, used], p.gatings, [self.classes[i] for i in used],
                          "experts by class of what is read")  # fmt: skip
    about = "The class of a token of text is that of its first character; of an image, its label."
    add("Experts by class", heat, about)
    if len(p.overlap_G):
      pairs = [f"{a} → {b}" for a, b in zip(p.gatings, p.gatings[1:])]
      about = "How far one router's first choice predicts the next router's: 0 not at all, 1 fully."
      add("Neighbouring routers", router.draw_bars(p.overlap_G, pairs, "I(e; f) / H(f)"), about)
    steps = [f"{a} → {b}" for a, b in zip(p.points, p.points[1:])]
    add("Representations", router.draw_bars(p.similarity_V, steps, "mean cosine"),
        "How similar each value on the main path is to the next one. Near 1, a shortcut that reads "
        "the older value loses little.")  # fmt: skip
    add("Alignment", router.draw_bars(p.alignment_V, steps, "linear CKA"),
        "The same by centred kernel alignment: 1 if tokens lie to each other as before."
    )  # fmt: skip
    parts_of_row = [f"part {i + 1}" for i in range(p.entropy_GQ.shape[1])]
    add("Entropy over the row", router.draw_lines(p.entropy_GQ, parts_of_row, p.gatings, "entropy"),
        "Entropy of a token's probabilities over ln E, in eight equal parts of a row.")  # fmt: skip
    add("Gate score over the row",
        router.draw_lines(p.confidence_GQ, parts_of_row, p.gatings, "largest probability"),
        "Mean of a token's largest probability, in the same parts.")  # fmt: skip
    if self.gradients:
      norms = np.stack(list(self.gradients.values()))
      layers = [str(i) for i in range(norms.shape[1])]
      add("Gradients", router.draw_lines(norms, layers, list(self.gradients), "norm"),
          "Norm of the loss's gradient by part of each layer, of one batch.")  # fmt: skip
    add("Routers over training", router.draw_training(self.record),
        "From metrics.jsonl, one curve per layer.")  # fmt: skip
    add("Load over training", router.draw_loads(self.record), "The same colours as above.")
    return page.page(f"routers of {self.record.name}", parts, command)


def inspect_run(
  workdir: str, step: int = -1, batches: int = 16, *, gradients: bool = False
) -> Inspection:
  """Reads a run's record and probes its checkpoint on validation text.

  Args:
    workdir: folder of the run.
    step: step of the checkpoint; -1: the newest.
    batches: batches of validation text; 0: all.
    gradients: whether to compute `Inspection.gradients` too, without noise, of the first batch.

  Raises:
    CheckpointError: there is no such checkpoint.
    ConfigError: the wiring has no routed experts, or `gradients` is true and the loss of the run's
      training reads a second model.
    DataError: there is no validation text.
  """
  named = None if step < 0 else step

  def opened_step() -> tuple[int, build.Built, dict[str, Any]]:
    stored = open_run(workdir, named)
    if gradients:
      _check_loss(stored.run)
    built = build.build(placement.single_device(stored.run))
    wanted = {"params": built.shapes, "router": built.router_shapes}
    return stored.step, built, restore_weights(workdir, stored.run, wanted, stored.step)

  at, built, state = with_newest(opened_step, named)
  run = built.run
  data = modality_of(run).open_data(run)
  if run.model.reads_images:
    classes, reading = data.images.names, ReadImages(state["router"])
  else:
    of_tokens = token_classes(data.tokenizer, run.model.vocab_size)
    classes, reading = CLASSES, ReadText(of_tokens, state["router"])
  found = probe(
    built.model(state["params"]),
    data.validation(max_batches=batches or None),
    num_domains=len(data.domains),
    num_classes=len(classes),
    reading=reading,
  )
  norms: dict[str, np.ndarray] = {}
  if gradients:
    batch = next(iter(data.validation(max_batches=1)))
    norms = gradient_norms(_gradients(built, state, batch), run.model)
  return Inspection(read_run(workdir), at, found, data.domains, tuple(classes), norms)


def _check_loss(run: RunConfig) -> None:
  """Checks that the loss of a run's training reads no second model, which is not loaded here."""
  train = run.train
  if train.teacher:
    second = f"train.teacher={train.teacher!r}"
  elif run.data.reads_preferences and not train.reference_free:
    second = "train.reference_free=False, with the base of the adapters as the reference"
  else:
    return
  raise ConfigError(
    f"--gradients=True needs a loss of one model, got {second}; leave --gradients out"
  )


def _gradients(built: build.Built, state: dict[str, Any], batch: Any) -> Any:
  """Gradients of a batch's loss, in a tree like the parameters."""

  def loss(params: Any) -> Any:
    return built.objective.loss(params, state["router"], batch, None)[0]

  return jax.jit(jax.grad(loss))(state["params"])


def token_classes(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
  """int32 [V]: index into `CLASSES` of each token, by its first character that is not a space."""
  known = min(tokenizer.vocab_size, vocab_size)
  classes = np.full(vocab_size, CLASSES.index("other"), np.int32)
  for i in range(known):
    classes[i] = CLASSES.index("end" if i == tokenizer.eos_id else _class(tokenizer.decode([i])))
  return classes


def _class(text: str) -> str:
  if not text.strip():
    return "line end" if "\n" in text else "space"
  first = text.strip()[0]
  if first == "\ufffd":
    return "other"
  kinds: Sequence[tuple[str, bool]] = (
    ("lower case", first.islower()),
    ("upper case", first.isupper()),
    ("digit", first.isdigit()),
    ("punctuation", unicodedata.category(first)[0] in "PS"),
  )
  return next((name for name, holds in kinds if holds), "other")


if __name__ == "__main__":
  run_main(main)
