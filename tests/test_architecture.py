"""The plan of the house: who may import whom, and what is not allowed anywhere."""

import ast
import contextlib
import functools
import importlib
import pathlib
import re
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Imports go from right to left only; parts of one rank do not know each other.
RANKS = [
  ("base.output",),
  (
    "base.errors",
    "base.compat",
    "base.batch",
    "base.arrays",
    "base.determinism",
    "base.moved",
    "base.renamed",
  ),
  ("base.stored", "base.paths", "base.sizes"),
  ("base.extensions",),
  ("base.options",),
  ("parallel", "kernels"),
  ("layers",),
  ("moe",),
  ("offload",),
  ("blocks",),
  ("models",),
  ("training", "inference"),
  ("run.bounds",),
  ("run.suggestions", "run.effects", "run.estimates", "run.names", "run.links"),
  ("run.fields",),
  ("run.config",),
  ("run.config_files", "run.modelled", "run.on_host"),
  ("run.text", "run.images"),
  ("run.multitask",),
  ("run.modality",),
  ("run.model",),
  ("run.build", "run.placement", "run.command_line", "run.programs", "run.start", "reports"),
  ("run.expert_copies",),
  ("run.sharing", "run.adapters", "run.host_memory", "run.elastic"),
  ("run.traffic",),
  ("run.prediction",),
  ("run.cluster",),
  ("run.dry_run", "run.controls"),
  ("run.nearest",),
  ("run.dry_run_text",),
  ("run.benchmark", "pretrained", "run.summary", "run.generation_flags"),
  ("run.opened", "run.successor"),
  (
    "run.tasks",
    "run.teacher",
    "run.base",
    "run.exported",
    "run.upcycled",
    "run.rearranged",
    "run.session",
  ),
  ("bench",),
  (
    "train",
    "evaluate",
    "generate",
    "profile",
    "compare",
    "sweep",
    "inspect",
    "convert",
    "replay",
    "report",
  ),
  ("serve", "run.scripts"),
]
BY_MODULE = ("base", "run")  # packages whose modules have ranks of their own
ALONE = ("data", "profiling")  # know nothing of the project but base
TOP = {name: rank for rank, names in enumerate(RANKS) for name in names}
REMOTE = ROOT / "scmoe" / "pretrained" / "remote"  # leaves with a model; runs beside transformers
# Old addresses of commands that users type; each only calls the command at its new address.
OLD_ADDRESSES = ("scmoe.kernels.bench", "scmoe.kernels.tune")


@functools.cache
def modules() -> dict[str, ast.Module]:
  """Every module of the package, by its dotted name."""
  out = {}
  for path in sorted((ROOT / "scmoe").rglob("*.py")):
    if path.parent == REMOTE:
      continue
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    out[name] = ast.parse(path.read_text(), str(path))
  return out


def imported(name: str, tree: ast.AST) -> set[str]:
  """Modules that one module imports, wherever in it; relative imports resolved."""
  out = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      out |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        package = name.split(".")
        is_package = any(other.startswith(name + ".") for other in modules())
        keep = len(package) - node.level + is_package
        base = ".".join([*package[:keep], *([node.module] if node.module else [])])
      for alias in node.names:  # `from scmoe.moe import route` imports a module
        inner = f"{base}.{alias.name}"
        out.add(inner if inner in modules() else base)
  return out


def inside(name: str) -> set[str]:
  """Modules of the package that `name` imports."""
  return {other for other in imported(name, modules()[name]) if other.split(".")[0] == "scmoe"}


def part(name: str) -> str:
  """scmoe.moe.route -> moe; scmoe.run.build -> run.build."""
  names = name.split(".")[1:]
  return ".".join(names[:2]) if names and names[0] in BY_MODULE else (names or [""])[0]


@pytest.mark.parametrize("name", [n for n in modules() if part(n) and part(n) not in BY_MODULE])
def test_imports_go_one_way(name):
  own = "serve" if name in OLD_ADDRESSES else part(name)
  assert own in TOP or own in ALONE, f"{name}: a part without a place in the plan"
  for other in inside(name):
    assert other not in OLD_ADDRESSES, f"{name} imports {other}"
    target = part(other)
    if target in ("", own, *BY_MODULE):
      continue
    if own in ALONE:
      assert target.startswith("base."), f"{name} imports {other}"
    elif target in ALONE:
      assert TOP[own] >= TOP["training"], f"{name} imports {other}"
    else:
      assert TOP[target] < TOP[own], f"{name} imports {other}"


def test_no_cycles():
  done, path = set(), []

  def visit(name):
    assert name not in path, " -> ".join([*path[path.index(name) :], name])
    if name in done:
      return
    path.append(name)
    for other in sorted(inside(name)):
      if other in modules() and other != name:
        visit(other)
    done.add(path.pop())

  for name in modules():
    visit(name)


# Modules that parse JSON which is not a stored file of this project: what a process sends to itself
# or to another one, rows of training text, requests, and the profiler's traces.
PARSING_ITSELF = {
  "scmoe.training.loop", "scmoe.training.description", "scmoe.training.distributed",
  "scmoe.run.tasks", "scmoe.data.chat", "scmoe.data.render_chat", "scmoe.data.text",
  "scmoe.serve", "scmoe.profiling.perfetto",
}  # fmt: skip


def test_stored_json_has_one_reader():
  """`scmoe.base.stored` limits size and depth, and refuses a key that is given twice."""
  calls = {"json.load", "json.loads"}
  found = {
    name
    for name, tree in modules().items()
    for node in ast.walk(tree)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in calls
  }
  assert found == {"scmoe.base.stored", *PARSING_ITSELF}


def sources():
  """Python files of the product: the package, the configs, the experiments."""
  folders = ("scmoe", "configs", "experiments")
  return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


FORBIDDEN_CALLS = {"eval", "exec", "yaml.load", "pickle.load", "pickle.loads"}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_what_is_not_allowed_anywhere(path):
  assert path.stem != "utils", "a drawer is no name"
  for node in ast.walk(ast.parse(path.read_text())):
    line = f"{path.name}:{getattr(node, 'lineno', 0)}"
    if isinstance(node, ast.Call):
      assert ast.unparse(node.func) not in FORBIDDEN_CALLS, line
    if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
      assert ast.unparse(node.value) == "False", line
    if isinstance(node, ast.ExceptHandler):
      assert node.type is not None, f"{line}: except without a type"
    if isinstance(node, ast.Import | ast.ImportFrom):
      names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
      assert not {name.split(".")[0] for name in names} & FORBIDDEN_MODULES, line


def test_nothing_imports_experiments_or_configs():
  for name, tree in modules().items():
    roots = {other.split(".")[0] for other in imported(name, tree)}
    assert not roots & {"experiments", "configs", "tests"}, name


def test_every_command_says_its_errors_in_one_line():
  """`render_chat.py` is no command: it starts alone, without any module of scmoe."""
  for name, tree in modules().items():
    ends = [n for n in tree.body if isinstance(n, ast.If) and "__main__" in ast.unparse(n.test)]
    if name != "scmoe.data.render_chat":
      assert [ast.unparse(line) for node in ends for line in node.body] in ([], ["run_main(main)"])


SCRIPTS = [
  path
  for path in sorted((ROOT / "experiments").rglob("*.py"))
  if 'if __name__ == "__main__"' in path.read_text()
]
WHERE = re.compile(r"\bsys\.path\b|\b(__file__|HERE|ROOT)\b")


def follow(path, searched):
  """Follows a script's imports, and those of the scripts beside it, before anything else runs.

  Args:
    path: of the script.
    searched: `sys.path`, to which the script adds folders.

  Raises:
    AssertionError: the script imports `scmoe` while the checkout is not in `sys.path`.
  """
  sys = types.SimpleNamespace(path=searched)
  scope = {"__file__": str(path), "Path": Path, "pathlib": pathlib, "sys": sys}
  for node in ast.parse(path.read_text()).body:
    if isinstance(node, ast.Assign | ast.Expr) and WHERE.search(ast.unparse(node)):
      with contextlib.suppress(NameError):  # more than a folder
        exec(ast.unparse(node), scope)
    if isinstance(node, ast.Import | ast.ImportFrom):
      within = node.module if isinstance(node, ast.ImportFrom) else None
      names = [within] if within else [alias.name for alias in node.names]
      reached = str(ROOT) in searched or "scmoe" not in {name.split(".")[0] for name in names}
      assert reached, f"{path} imports scmoe, which need not be installed"
      for beside in [Path(folder, f"{name}.py") for folder in searched for name in names]:
        if beside.exists():
          follow(beside, searched)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_script_finds_the_package_of_its_checkout(path):
  follow(path, [str(path.parent)])


@pytest.mark.parametrize(
  "name", [*modules(), *(f"configs.{p.stem}" for p in sorted((ROOT / "configs").glob("*.py")))]
)
def test_everything_imports(name):
  importlib.import_module(name)


def test_code_that_leaves_needs_torch_and_transformers_alone():
  (path,) = REMOTE.glob("*.py")
  found = imported("remote", ast.parse(path.read_text()))
  assert {name.split(".")[0] for name in found} == {"math", "types", "torch", "transformers"}


def test_no_two_test_files_have_one_name():
  """pytest imports test files by their names alone, and refuses the second of two."""
  names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
  assert sorted(set(names)) == sorted(names)
