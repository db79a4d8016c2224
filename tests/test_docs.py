"""The documents are true: what README.md and docs/ name exists, and what they list the code has.

A page is read for what stands in backticks and in code blocks. In a column of a table that is
headed by another project's name, or by "before", names are not this project's and left alone.
"""

import ast
import builtins
import collections
import dataclasses
import doctest
import functools
import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import pytest

import scmoe
from scmoe.base.extensions import is_import_path
from scmoe.base.renamed import RENAMED
from scmoe.blocks.options import OverlapConfig
from scmoe.blocks.schedule import dense_steps, make_schedule, slot_names
from scmoe.blocks.wiring import WIRINGS
from scmoe.moe.gates import GATES
from scmoe.parallel import collectives
from scmoe.run import config as run_config
from scmoe.run import fields as run_fields
from scmoe.run.command_line import TRAIN_FLAGS
from scmoe.training import schema

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FOLDERS = ("scmoe", "tests", "docs", "configs", "experiments", "notebooks")
SUFFIXES = (".py", ".md", ".sh", ".ipynb", ".toml", ".png")
FOREIGN = re.compile(r"Tutel|MegaBlocks|Megatron|MaxText|before|schema 1")
# Names of other projects that stand in prose; keep it short.
KNOWN = {"ConfigDict"}

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
DOTTED = re.compile(r"(?<![\w./-])scmoe(?:\.\w+)+")
FIELD = re.compile(r"--config\.([a-z][\w.]+)(?:=(\S+))?")
NO_OPTION = re.compile(r"\.(jsonl?|lock|npz|txt|gz|zst|pb|html)$")  # a file of a run, not an option
PROGRAM = re.compile(r"\bpython3? -m ([\w.]+)([^\n`|]*)")
SCRIPT = re.compile(r"\bpython3? ([\w./-]+\.py)")
TARGET = re.compile(r"\bmake ([a-z][\w-]*)")
OPTION = re.compile(r"(?<![\w./-])([a-z]\w*(?:\.[a-z]\w*)+)(?:=(\"[^\"]*\"|'[^']*'|[^\s,;)]+))?")
CLASS = re.compile(r"([A-Z]\w*[a-z]\w*)((?:\.\w+)*)(?:\(.*\))?", re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--(config(?=\.)|[a-z]\w*(?:\.[a-z]\w*)*)")


# -- what exists ----------------------------------------------------------------------------------


@functools.cache
def files() -> frozenset[str]:
  """Files and folders of the project, relative, with / between."""
  inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
  everything = [*ROOT.iterdir(), *inside]
  return frozenset(
    p.relative_to(ROOT).as_posix() for p in everything if "__pycache__" not in p.parts
  )


@functools.cache
def modules() -> dict[str, Path]:
  """Modules of the package by dotted name."""
  found = {}
  for path in (ROOT / "scmoe").rglob("*.py"):
    parts = path.relative_to(ROOT).with_suffix("").parts
    found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
  return found


@functools.cache
def words() -> frozenset[str]:
  """Every word of the project's programs."""
  texts = [p.read_text() for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")
           if p != Path(__file__)]  # fmt: skip
  return frozenset(word for text in [*texts, (ROOT / "Makefile").read_text()]
                   for word in re.findall(r"\w+", text))  # fmt: skip


@functools.cache
def classes() -> dict[str, list[ast.ClassDef]]:
  """Classes of the package, by name."""
  found = collections.defaultdict(list)
  for path in modules().values():
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ClassDef):
        found[node.name].append(node)
  return dict(found)


def has_attribute(name: str, attribute: str) -> bool:
  """Whether a class of the package, or one that it inherits from, has a method or field."""
  for node in classes().get(name, []):
    own = {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
    for inner in ast.walk(node):
      if isinstance(inner, ast.AnnAssign | ast.Assign):
        targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
        every = [t for target in targets for t in getattr(target, "elts", [target])]
        own |= {t.attr for t in every if isinstance(t, ast.Attribute)}  # self.x = ...
        own |= {t.id for t in every if isinstance(t, ast.Name) and inner in node.body}
    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
    if attribute in own or any(has_attribute(base, attribute) for base in bases):
      return True
  return False


def exists(dotted: str) -> bool:
  """Whether scmoe.x.y is a module or in one."""
  parts = dotted.split(".")
  if dotted in modules():
    return True
  for end in range(len(parts), 0, -1):
    if ".".join(parts[:end]) in modules():
      found = importlib.import_module(".".join(parts[:end]))
      for index, part in enumerate(parts[end:], end):
        if not hasattr(found, part):
          return inspect.isclass(found) and index == len(parts) - 1 and (
            has_attribute(found.__name__, part))  # fmt: skip
        found = getattr(found, part)
      return True
  return False


def sections() -> set[str]:
  """Groups of options: model, router, router.compat, ..."""
  return {name for name, _ in run_fields.sections(run_config.RunConfig())}


def wrong_option(path: str, value: str | None) -> str | None:
  """The fault of an option and its value, or None."""
  field = {f.path: f for f in run_fields.fields(run_config.RunConfig())}.get(path)
  if field is None:
    return None if path in sections() else f"no option {path}"
  value = "" if value is None else value.strip("\"'`.,:")
  # One letter, N or what stands in angle brackets is a variable of the text.
  if len(value) < 2 or re.search(r"[<>…]|[A-Z]{2}|\.\.\.", value):
    return None
  choices = [str(choice) for choice in field.metadata.get("choices", ())]
  if field.metadata.get("importable") and is_import_path(value):
    return None
  if path == "overlap.schedule":
    slots = (
      slot_names([s.name for s in dense_steps(w, b)]) for w in WIRINGS.values() for b in (1, 2)
    )
    choices = ["auto", "off", *(name for slot in slots for name in slot)]
  if path == "overlap.schedule":  # a command may quote a name of several words
    choices = [value] if any(c.startswith(value) for c in choices) else choices
  if choices and value not in choices:
    return f"no choice of {path}: {value}"
  try:
    run_fields.parse_value(value, field.type, path)
  except run_config.ConfigError as error:
    return str(error)
  return None


def flags_of(module: str) -> set[str]:
  """Flags of a program."""
  found = importlib.import_module(module)
  declared = getattr(found, "FLAGS", TRAIN_FLAGS if module == "scmoe.train" else ())
  return {f.name for f in declared} | set(re.findall(r'"--(\w+)"', modules()[module].read_text()))


def programs() -> set[str]:
  """Modules of the package and the tests that can be run."""
  paths = {**modules(), **{f"tests.{p.stem}": p for p in (ROOT / "tests").glob("*.py")}}
  return {name for name, path in paths.items() if '__name__ == "__main__"' in path.read_text()}


# -- what a page says -----------------------------------------------------------------------------


def own_columns(text: str) -> str:
  """The text without the columns of its tables that are about something else."""
  lines, foreign = [], set()
  for line in text.splitlines():
    if not line.startswith("|"):
      foreign = set()
      lines.append(line)
      continue
    cells = line.strip().strip("|").split("|")
    if not lines or not lines[-1].startswith("|"):
      foreign = {i for i, cell in enumerate(cells) if FOREIGN.search(cell)}
    kept = [" " if i in foreign else cell for i, cell in enumerate(cells)]
    lines.append("|" + "|".join(kept) + "|")
  return "\n".join(lines)


def problems(text: str, folder: Path = ROOT) -> list[str]:
  """The things that a page names and that do not exist, one line each.

  Args:
    text: of the page.
    folder: in which it lies; its links are relative to it.
  """
  found = []
  for link in LINK.findall(text):
    if "://" not in link and not (folder / link).exists():
      found.append(f"no file {link}")
  blocks = [(kind, body) for kind, body in FENCE.findall(text)]
  text = own_columns(FENCE.sub("", text))
  for kind, body in blocks:
    found += in_commands(body.replace("\\\n", " "))
    if kind.startswith("python"):
      found += in_imports(body)
    for word in re.findall(r"[\w./-]+", body):
      if word.startswith(tuple(f"{f}/" for f in FOLDERS)) and word.endswith(SUFFIXES):
        found += in_path(word, folder)
  for span in SPAN.findall(text):
    span = " ".join(span.split())
    found += in_commands(span) or in_span(span, folder)
  return found


def in_commands(text: str) -> list[str]:
  """Commands, their flags and fields, and dotted names, anywhere in a piece of code."""
  found = []
  for path, value in FIELD.findall(text):
    found.append(wrong_option(path, value or None))
  for module, rest in PROGRAM.findall(text):
    if module.split(".")[0] not in ("scmoe", "tests"):
      continue
    if module not in programs():
      found.append(f"no program {module}")
    elif module.startswith("scmoe."):
      given = FLAG.findall(re.sub(r"\s#.*", "", rest))
      found += [
        f"no flag --{f} of {module}" for f in given if f not in flags_of(module) | {"config"}
      ]
  for script in SCRIPT.findall(text):
    found += [] if (ROOT / script).is_file() else [f"no program {script}"]
  targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
  found += [f"no target of make: {t}" for t in TARGET.findall(text) if t not in targets]
  found += [f"no name {name}" for name in DOTTED.findall(text) if not exists(name)]
  return [problem for problem in found if problem]


def in_imports(body: str) -> list[str]:
  """The names that a Python example imports from the package."""
  found = []
  for node in ast.walk(ast.parse(body)):
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scmoe"):
      names = [f"{node.module}.{alias.name}" for alias in node.names]
      found += [f"no name {name}" for name in names if not exists(name)]
  return found


def in_path(word: str, folder: Path) -> list[str]:
  """A file or folder of the project: as it is, beside the page, or the end of a path."""
  word = re.sub(r":\d+$", "", word).rstrip("/")
  if re.search(r"[<>{}~$]|^/|^my/", word):
    return []
  if "*" in word:
    return [] if any(ROOT.glob(word)) else [f"no file {word}"]
  near = word in files() or (folder / word).exists() or any(f.endswith(f"/{word}") for f in files())
  return [] if near else [f"no file {word}"]


def in_span(span: str, folder: Path) -> list[str]:
  """The problems between one pair of backticks that is no command."""
  if re.fullmatch(r"[\w./*<>~:-]+", span):
    head = span.split("/")[0]
    if span.endswith(SUFFIXES) or ("/" in span and head in FOLDERS):
      return in_path(span, folder)
    if "/" in span.rstrip("/"):
      return []
  if (match := CLASS.fullmatch(span)) and match[1] not in KNOWN:
    name, rest = match[1], match[2].strip(".")
    if name not in classes():
      return [] if hasattr(builtins, name) else [f"no class {name}"]
    missing = rest and not has_attribute(name, rest.split(".")[0])
    return [f"no name {name}.{rest}"] if missing else []
  found: list[str | None] = []
  for path, value in OPTION.findall(span):
    found.append(None if NO_OPTION.search(path) else in_dotted(path, value or None))
  if (match := re.fullmatch(r"--([a-z][\w.]*)(?:[ =].*)?", span)) and not match[1].startswith(
    "xla"
  ):
    known = set().union(*(flags_of(m) for m in programs() if m.startswith("scmoe.")))
    name = re.sub(r"^config\..*", "config", match[1])
    found += [] if name in known | {"config"} else [f"no flag --{match[1]}"]
  name = span.split("(")[0].split("=")[0]
  if re.fullmatch(r"[a-z]\w*_\w+", name) and name not in words():
    found.append(f"no name {name}")
  return [problem for problem in found if problem]


def in_dotted(path: str, value: str | None) -> str | None:
  """section.option, or module.name without the packages before it."""
  head, _, rest = path.partition(".")
  short = [name for name in modules() if name.split(".")[-1] == head]
  if head not in {s.split(".")[0] for s in sections()}:
    return f"no name {path}" if short and not any(exists(f"{n}.{rest}") for n in short) else None
  wrong = wrong_option(path, value)
  if wrong == f"no option {path}" and any(exists(f"{name}.{rest}") for name in short):
    return None  # e.g. `mesh.manual`
  return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_what_a_page_names_exists(page):
  assert problems(page.read_text("utf-8"), page.parent) == []


WRONG = """
[a page](docs/nowhere.md), `scmoe/moe/nothing.py`, `nothing.py`, `experiments/none/`,
`scmoe.moe.rout`, `scmoe.moe.layer.MoE.root`, `MoELayer`, `MoE.root`, `Routing.place_TK`,
`overlap.slot`, `router.order=choice`, `dispatch.transport=dense`, `overlap.schedule=later`,
`--dry_runs`, `timeline.best_slit`, `further_rounds(x)` and `mesh.expert=many`.

| here | Tutel |
|---|---|
| `router.jitter` | `moe_jitter_eps_of_theirs` |

```
make trane
python -m scmoe.trian --config quickstart
python -m scmoe.train --config.model.width_of=3 --workdirs x
python experiments/none/run.py && cat scmoe/gone.py
```
```python
from scmoe.moe.layer import MoE, MoELayerConfig
```
"""
MISSING = """no file docs/nowhere.md
no target of make: trane
no program scmoe.trian
no option model.width_of
no flag --workdirs of scmoe.train
no program experiments/none/run.py
no file scmoe/gone.py
no name scmoe.moe.layer.MoELayerConfig
no name scmoe.trian
no file experiments/none/run.py
no file scmoe/moe/nothing.py
no file nothing.py
no file experiments/none
no name scmoe.moe.rout
no name scmoe.moe.layer.MoE.root
no class MoELayer
no name MoE.root
no name Routing.place_TK
no option overlap.slot
no option router.order
no choice of dispatch.transport: dense
no choice of overlap.schedule: later
no flag --dry_runs
no name timeline.best_slit
no name further_rounds
mesh.expert='many' is not of type int; use a whole number such as 8
no option router.jitter"""
RIGHT = """
[a page](docs/data.md), `scmoe/moe/layer.py`, `layer.py`, `moe/`, `configs/*.py`, `WORKDIR/replay/`,
`scmoe.moe.layer.MoE.route`, `MoE`, `MoE(config, rngs=)`, `Routing.mask_T`, `ModelConfig.width`,
`True`, `overlap.schedule`, `overlap.schedule="attention 1: projections"`, `metrics.jsonl`,
`router.compat.order=token`, `--config.overlap.schedule="mlp 0"`,
`router.weights=p` is not an option, but `router.gate=<word>`, `train.steps=N`, `model.wiring` are;
`--dry_run`, `timeline.best_slot`, `x_TD`, `make_transport(config)`, `nnx.Module`.
"""


def test_a_page_that_names_what_is_not_there_fails():
  assert set(problems(WRONG)) == set(MISSING.splitlines())


def test_a_page_that_names_what_is_there_passes():
  assert problems(RIGHT) == ["no option router.weights"]
  assert len(KNOWN) <= 10


# -- what a page lists ----------------------------------------------------------------------------


def page(name: str) -> str:
  return (ROOT / name).read_text("utf-8")


def block(text: str, kind: str) -> list[str]:
  """Lines of the only code block of a kind."""
  (found,) = [body for label, body in FENCE.findall(text) if label == kind]
  return found.splitlines()


def rows(text: str, heading: str) -> list[list[str]]:
  """Cells of the table whose header line begins with this, without backticks."""
  (start,) = [i for i, line in enumerate(text.splitlines()) if line.startswith(heading)]
  found = []
  for line in text.splitlines()[start + 2 :]:
    if not line.startswith("|"):
      break
    found.append([cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")])
  return found


class Seen(Exception):
  """The frames are known; the rest of the run is not needed."""


def frames() -> list[tuple[str, str]]:
  """(file, function) of the project's frames that are being executed, the outermost first."""
  found, frame = [], sys._getframe(1)
  while frame is not None:
    path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname.split("<locals>.")[-1]
    if (ROOT / "scmoe") in path.parents and not name.startswith("<"):
      found.append((path.relative_to(ROOT).as_posix(), name))
    frame = frame.f_back
  return found[::-1]


@pytest.fixture(scope="module")
def travelled(tmp_path_factory):
  """Frames at the first all-to-all, and at the first product of experts, of a training run."""
  import jax

  from scmoe import train
  from scmoe.kernels.grouped_matmul import xla

  seen = {}

  def all_to_all(*args, **options):
    seen.setdefault("dispatch", frames())
    return exchange(*args, **options)

  def forward(*args, **options):
    seen["experts"] = [*frames(), ("scmoe/kernels/grouped_matmul/xla.py", "forward")]
    raise Seen

  exchange = jax.lax.all_to_all
  options = ["mesh.expert=4", "train.sample_tokens=0"]
  workdir = tmp_path_factory.mktemp("docs")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax.lax, "all_to_all", all_to_all)
    patch.setattr(xla, "forward", forward)
    with pytest.raises(Seen):
      train.main(["--config", "quickstart", "--smoke", "--workdir", str(workdir / "run"),
                  *(f"--config.{o}" for o in options)])  # fmt: skip
  return seen


@pytest.fixture(scope="module")
def travelled_on_hopper(tmp_path_factory):
  """Frames at the first `rows_product` of a training step traced for a GPU with the kernels."""
  from scmoe import train
  from scmoe.kernels import launch
  from scmoe.kernels.grouped_matmul import backend, mosaic_gpu

  seen = []

  def rows_product(*args, **options):
    path = "scmoe/kernels/grouped_matmul/rows_product.py"
    seen.extend([*frames(), (path, "rows_product")])
    raise Seen

  options = ["dtype=bfloat16", "width=128", "mlp_hidden=256", "num_heads=2", "ffn.impl=grouped"]
  workdir = tmp_path_factory.mktemp("hopper")
  with pytest.MonkeyPatch.context() as patch:
    for module in (launch, backend):
      patch.setattr(module, "has_kernels", lambda device: True)
    patch.setattr(mosaic_gpu, "rows_product", rows_product)
    with pytest.raises(Seen):
      train.main(["--config", "quickstart", "--smoke", "--workdir", str(workdir / "run"),
                  "--config.train.sample_tokens=0", "--config.dispatch.transport=dropless",
                  *(f"--config.model.{o}" for o in options)])  # fmt: skip
  return seen


def listed(kind: str) -> list[tuple[str, str]]:
  """Frames that the page lists."""
  lines = [line.split(None, 1) for line in block(page("docs/architecture.md"), f"frames {kind}")]
  return [(path, name.strip()) for path, names in lines for name in names.split("→")]


def test_the_frames_of_a_token(travelled):
  assert listed("dispatch") == travelled["dispatch"]
  experts = listed("experts")
  assert experts == travelled["experts"][-len(experts) :]
  (count,) = re.findall(r"in (\d+) frames", page("README.md"))
  assert int(count) == len(travelled["dispatch"])
  assert len(travelled["dispatch"]) <= 12


def test_the_reading_order_has_each_file_once_and_every_file_of_the_frames(travelled):
  lines = block(page("docs/architecture.md"), "reading order")
  numbers, paths = zip(*(line.split(None, 2)[:2] for line in lines))
  assert [int(number) for number in numbers] == list(range(1, len(lines) + 1))
  assert len(set(paths)) == len(paths)
  for path in paths:
    assert (ROOT / "scmoe" / path).is_file(), path
  # The frames enter their files in this order, too.
  entered = dict.fromkeys(path.removeprefix("scmoe/") for path, _ in travelled["experts"])
  assert [path for path in paths if path in entered] == list(entered)
  # A line names what the file defines or calls.
  for line in lines:
    _, path, clause = line.split(None, 2)
    text = (ROOT / "scmoe" / path).read_text("utf-8")
    for name in re.findall(r"`([^`]+)`", clause):
      assert name.rsplit(".", 1)[-1] in text, (path, name)


def test_the_frames_to_the_first_product_on_hopper(travelled_on_hopper):
  products = listed("rows_product")
  assert products == travelled_on_hopper[-len(products) :]
  assert len(travelled_on_hopper) <= 16
  (number,) = re.findall(r"first product is the (\d+)th frame", page("docs/architecture.md"))
  assert int(number) == len(travelled_on_hopper)


def test_the_layers_of_the_packages():
  tree = ast.parse(page("tests/test_architecture.py"))
  values = {n.targets[0].id: n.value for n in tree.body
            if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)}  # fmt: skip
  ranks = [set(names) for names in ast.literal_eval(values["RANKS"])]
  lines = [set(line.split(", ")) for line in block(page("docs/architecture.md"), "layers")]
  assert lines == ranks


def test_the_named_collectives():
  names = [row[0] for row in rows(page("docs/architecture.md"), "| name | what it is")]
  assert tuple(names) == collectives.NAMES


def test_the_schedule_of_pos2():
  schedule = make_schedule(
    WIRINGS["scmoe_pos2"], 2, OverlapConfig(schedule="attention 1: projections")
  )
  assert block(page("docs/architecture.md"), "schedule") == str(schedule).splitlines()
  automatic = make_schedule(WIRINGS["scmoe_pos2"], 2, OverlapConfig()).forward
  assert automatic[automatic.index("experts") - 1] == "shared expert"


def test_the_version_is_one():
  """The package's, that of the first entry of the changes, and that of the citation."""
  newest = re.search(r"^## ([\d.]+)", (ROOT / "docs" / "CHANGELOG.md").read_text(), re.M)
  cited = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.M)
  assert newest is not None
  assert cited is not None
  assert newest[1] == cited[1] == scmoe.__version__


def test_the_schema_of_checkpoints():
  (number,) = re.findall(r"present form is schema (\d+)", page("docs/architecture.md"))
  assert int(number) == schema.SCHEMA


def test_the_wirings():
  listed = [w for row in rows(page("README.md"), "| `model.wiring`") for w in row[0].split(", ")]
  assert listed == list(WIRINGS)


def test_the_ways_to_compute_experts():
  choices = {f.path: f.metadata for f in run_fields.fields(run_config.RunConfig())}[
    "model.ffn.impl"
  ]["choices"]
  listed = [row[0] for row in rows(page("docs/architecture.md"), "| `model.ffn.impl`")]
  assert set(listed) == set(choices)


def test_the_exit_codes():
  import scmoe.base.errors

  codes = re.findall(r"^\| (\d+) ", scmoe.base.errors.__doc__, re.MULTILINE)
  assert [row[0] for row in rows(page("docs/reliability.md"), "| code | meaning")] == codes
  sentence = page("README.md").partition("Exit codes:")[2].partition(".")[0]
  assert re.findall(r"\b(\d+) [a-z]", sentence) == codes


def test_the_sources_and_the_batch():
  from scmoe.base.batch import Batch
  from scmoe.data.config import SOURCES

  listed = [row[0].split()[0] for row in rows(page("docs/data.md"), "| `data.source`")]
  assert listed == list(SOURCES)
  (sentence,) = re.findall(r"A `Batch` \([^)]*\) holds (.*?)\.", page("docs/data.md"), re.DOTALL)
  names = re.findall(r"`([a-z_]+)`", sentence)
  assert sorted(names) == sorted(f.name for f in dataclasses.fields(Batch))


def figures(tree):
  """Every number of a results file, and every share of communication that was hidden."""
  if isinstance(tree, dict):
    if {"communication", "hidden"} <= set(tree) and tree["communication"]:
      yield tree["hidden"] / tree["communication"]
    tree = list(tree.values())
  if isinstance(tree, list):
    for part in tree:
      yield from figures(part)
  elif isinstance(tree, float):
    yield tree


@pytest.mark.parametrize(
  ("name", "head", "column"),
  [
    ("README.md", "| what | measured", 1),
    ("experiments/README.md", "| claim | command | paper", 3),
    ("experiments/README.md", "| claim | command | beside", 3),
  ],
)
def test_the_measured_figures_lie_in_their_files(name, head, column):
  """Milliseconds and percents of a row's own figures, in the JSON that its last column names."""
  stored, checked = [], 0
  for row in rows(page(name), head):
    what, measured, where = row[0], row[column], row[-1]
    if names := re.findall(r"[\w/.-]+\.json", where):
      paths = [ROOT / path if "experiments/" in path else None for path in names]
      folder = next((path.parent for path in paths if path), None)
      paths = [path or (folder / own if folder else None) for path, own in zip(paths, names)]
      files = [path for path in paths if path]
      stored = [f for path in files for f in figures(json.loads(path.read_text()))]
    if "LOG" in where or not ("experiments/" in where or "the same file" in where):
      continue  # a table or a page, for a reader
    measured = re.sub(r"\([^)]*\)|; (?:88\.0|but).*|116 ms then.*", "", measured)
    for number in re.findall(
      r"(?<![\w.–])(\d+(?:\.\d+)?)(?= ms| against| / [\d./ ]+ ms)", measured
    ):
      digits = len(number.partition(".")[2])
      assert any(abs(f - float(number)) <= 0.5001 * 10**-digits for f in stored), (what, number)
      checked += 1
    for number in re.findall(r"(\d+)(?= %| and \d+ %)", measured):
      assert any(abs(100 * f - float(number)) <= 0.5001 for f in stored), (what, number)
      checked += 1
  assert checked >= 4, "no figure of the table was compared"


# A value that a stored configuration may have had, of every name that is not today's.
STORED = {
  "router.order": "token",
  "router.weights": "before",
  "router.weight_norm": 2.0,
  "router.jitter": 0.5,
  "router.uniform": True,
  "router.round_to": 8,
  "dispatch.further": "retry",
  "overlap.slot": 1.5,
  "overlap.sequential": True,
  "overlap.backward_slot": -2.0,
  "overlap.barriers": True,
  "overlap.gradients": "step",
}


def test_the_table_of_names_is_what_old_configurations_become():
  table = {row[0]: row[1] for row in rows(page("docs/configuration.md"), "| before")}
  assert set(table) == set(STORED)
  for old, value in STORED.items():
    part, name = old.split(".")
    stored = {"model": {"wiring": "scmoe_pos2"}, part: {name: value}}
    run = run_config.from_dict(schema.upgraded_config(stored))
    usual = run_fields.fields(run_config.RunConfig())
    changed = {f.path for f, default in zip(run_fields.fields(run), usual)
               if f.default != default.default}  # fmt: skip
    new = re.findall(r"\w+(?:\.\w+)+", table[old])[:1]
    assert changed == (set() if table[old].startswith("gone") else set(new)), old


def test_the_table_of_renamed_options_is_the_list():
  table = dict(rows(page("docs/configuration.md"), "| name before"))
  assert table == RENAMED


def test_every_option_of_the_overlap_stands_in_the_page():
  for field in dataclasses.fields(OverlapConfig):
    assert f"`overlap.{field.name}" in page("docs/configuration.md"), field.name


@pytest.mark.parametrize(
  "name", ["README.md", "docs/configuration.md", "docs/routing.md", "docs/inference.md"]
)
def test_examples_run(name):
  bodies = [body for kind, body in FENCE.findall(page(name)) if kind == "python"]
  assert bodies, "a page without an example"
  known = dict(GATES)
  try:
    for body in bodies:
      exec(compile(body, name, "exec"), {"__name__": "example"})
  finally:
    GATES.clear()
    GATES.update(known)


def docstrings(text: str):
  """(line, docstring) of a Python file's module, classes and functions."""
  kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, kinds) and (found := ast.get_docstring(node)):
      yield getattr(node, "lineno", 1), found


def without_subject(text: str) -> list[int]:
  """Lines with a docstring that begins with a phrase or clause that has no subject."""
  begins = re.compile(r"\W*(of|what|as|who|where|why)\b", re.IGNORECASE)
  return [line for line, found in docstrings(text) if begins.match(found)]


@pytest.mark.parametrize("folder", ["scmoe", "configs", "experiments", "tests"])
def test_no_docstring_begins_with_of_or_a_relative_clause(folder):
  found = {p.relative_to(ROOT).as_posix(): without_subject(p.read_text("utf-8"))
           for p in sorted((ROOT / folder).rglob("*.py"))}  # fmt: skip
  assert found, "no file was read"
  assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_docstring_that_begins_with_of_is_found():
  text = '"""Of one step."""\ndef f():\n  """`of` each."""\nx = """Of no matter."""\n'
  assert without_subject(text) == [1, 2]
  assert without_subject('"""Offsets of rows."""') == []
  assert without_subject('"""Where a row goes."""') == [1]


def test_the_small_examples_of_docstrings():
  """Those that are written as a session."""
  for name, path in modules().items():
    if ">>>" in path.read_text():
      failed, _ = doctest.testmod(importlib.import_module(name))
      assert not failed, name
