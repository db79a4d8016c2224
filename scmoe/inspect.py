"""python -m scmoe.inspect: draws a run's routers, over training and at a checkpoint.

  python -m scmoe.inspect --workdir runs/quickstart
  python -m scmoe.inspect --workdir runs/a --step 500 --out reports/a --batches 32

Writes inspect.html (one file) and inspect.npz (every array that is drawn) into --out. Reads
metrics.jsonl, the checkpoint, and the validation data again, on one device.
"""

from __future__ import annotations

import dataclasses
import io
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scmoe.base.errors import ConfigError, run_main
from scmoe.data import Tokenizer
from scmoe.inference.probe import Probe, ReadImages, ReadText, probe
from scmoe.reports import page, router
from scmoe.reports.records import Record, read_run
from scmoe.reports.tables import Table
from scmoe.run import build
from scmoe.run.command_line import HELP, Flag, check_environment, help_text, parse
from scmoe.run.modality import modality_of
from scmoe.run.opened import open_run
from scmoe.run.programs import user_programs
from scmoe.training.restore import restore_part, with_newest

FLAGS = (
  Flag("workdir", str, "", "folder of the run", required=True),
  Flag("step", int, -1, "step of the checkpoint; -1: the newest"),
  Flag("batches", int, 16, "batches of validation text to read; 0: all"),
  Flag("out", str, "", "folder to write to; WORKDIR/inspect if not given"),
  HELP,
)
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
  found = inspect_run(values["workdir"], values["step"], values["batches"])
  page.write(out / "inspect.html", found.page(" ".join(["python -m scmoe.inspect", *argv])))
  page.write(out / "inspect.npz", found.npz())
  print("\n\n".join([found.table().text(), f"page: {out / 'inspect.html'}, arrays: inspect.npz"]))


@dataclasses.dataclass(frozen=True)
class Inspection:
  """A run's routers over training and at a checkpoint; `inspect_run` makes one.

  Attributes:
    record: the run's metrics.
    step: step of the checkpoint.
    probe: what the checkpoint's routers did on validation data.
    domains: names of the domains, in the order of axis D of `probe.domain_load_GDE`.
    classes: names of the classes, in the order of axis C of `probe.class_load_GCE`.
  """

  record: Record
  step: int
  probe: Probe
  domains: tuple[str, ...]
  classes: tuple[str, ...] = CLASSES

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
                 overlap, p.repeated_G[g], p.as_current_G[g]]  # fmt: skip
      rows.append((name, *map(number, figures)))
    heads = ("router", "imbalance", "dead", "entropy", "confidence", "drop", "shortcut ratio",
             "tells of the next", "repeated", "as on current")  # fmt: skip
    title = f"{self.record.name} at step {self.step}, {p.tokens:,} tokens of validation data"
    return Table(title, heads, tuple(rows))

  def arrays(self) -> dict[str, np.ndarray]:
    """Every array that the page draws, by name."""
    found = {f.name: getattr(self.probe, f.name) for f in dataclasses.fields(Probe)}
    found |= {"overlap_G": self.probe.overlap_G, "dead_G": self.probe.dead_G}
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
    add("Routers over training", router.draw_training(self.record),
        "From metrics.jsonl, one curve per layer.")  # fmt: skip
    add("Load over training", router.draw_loads(self.record), "The same colours as above.")
    return page.page(f"routers of {self.record.name}", parts, command)


def inspect_run(workdir: str, step: int = -1, batches: int = 16) -> Inspection:
  """Reads a run's record and probes its checkpoint on validation text.

  Args:
    workdir: folder of the run.
    step: step of the checkpoint; -1: the newest.
    batches: batches of validation text; 0: all.

  Raises:
    CheckpointError: there is no such checkpoint.
    ConfigError: the wiring has no routed experts.
    DataError: there is no validation text.
  """
  named = None if step < 0 else step

  def opened_step() -> tuple[int, build.Built, dict[str, Any]]:
    stored = open_run(workdir, named)
    built = build.build(build.single_device(stored.run))
    wanted = {"params": built.shapes, "router": built.router_shapes}
    return stored.step, built, restore_part(workdir, wanted, stored.step)

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
  return Inspection(read_run(workdir), at, found, data.domains, tuple(classes))


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
