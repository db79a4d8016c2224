"""The command line of the entry points: typed flags, fields of the configuration, and help.

It does not use argparse, because the error for a wrong flag has to be one line that suggests the
right one, and because help is generated from the declared options.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import scmoe
import scmoe.base.errors
from scmoe.base.errors import ConfigError
from scmoe.base.extensions import FORM, check_allowed
from scmoe.base.paths import at_home
from scmoe.base.renamed import present_name
from scmoe.base.stored import StoredError, read_text
from scmoe.blocks.wiring import WIRINGS
from scmoe.run.config import RunConfig, from_json, imports_of
from scmoe.run.config_files import config_names, find_config, load_config
from scmoe.run.effects import check_typed
from scmoe.run.fields import WORDS, fields, parse_value, sections, with_field
from scmoe.run.suggestions import nearest

FIELD = "--config."
ABLATION = "ablation"  # name of the groups of fields that only ablations set
SCREEN = (24, 100)  # lines and columns of `--help`
_EXAMPLES = 3  # `--help` shows so many examples of a command's docstring


@dataclasses.dataclass(frozen=True)
class Flag:
  """One flag of an entry point.

  Attributes:
    name: name without the dashes.
    kind: bool (needs no value), int, float or str.
    default: value where the flag is not given.
    help: its meaning.
    repeat: whether it may be given several times; its value is then a list.
    required: whether it must be given.
    words: whether it collects the words that belong to no flag; its value is a list.
  """

  name: str
  kind: type
  default: Any
  help: str
  repeat: bool = False
  required: bool = False
  words: bool = False


HELP = Flag(
  "help",
  str,
  "",
  "print a short help; --help all prints everything, --help model one section; also -h",
)

VERSION = Flag("version", bool, False, "print the version, then stop; every command has it")

SIMULATE = Flag("simulate", int, 0, "devices to simulate on the CPU; 0: no simulation")
ALLOW_IMPORT = Flag(
  "allow_import",
  str,
  "",
  "package whose code a stored configuration may import (model.experts=PACKAGE:Name); see "
  "docs/extending.md",
  repeat=True,
)

TRAIN_FLAGS = (
  Flag("config", str, "quickstart", "Python config file, which is run, or a name"),
  Flag("config_json", str, "", "read the configuration from JSON (--print_config) instead"),
  Flag("smoke", bool, False, "use the config file's reduced form, which runs in seconds"),
  Flag(
    "workdir",
    str,
    "",
    "folder of the run; default: runs/NAME, or runs/NAME-smoke",
  ),
  Flag("dry_run", bool, False, "print sizes, memory, traffic and time for any mesh, then stop"),
  Flag("print_config", bool, False, "print the configuration as JSON, then stop"),
  SIMULATE,
  Flag("list_configs", bool, False, "print the configurations that come with scmoe, then stop"),
  Flag(
    "deterministic",
    bool,
    False,
    "same bits on the same hardware; on GPUs slower, with more memory",
  ),
  Flag("restarts", int, 0, "restart a run that dies, at most this many times"),
  Flag(
    "elastic",
    bool,
    False,
    "with --restarts, several processes: go on with those that are left, on a smaller mesh, and "
    "take lost ones back (docs/reliability.md)",
  ),
  Flag(
    "compile_ahead",
    bool,
    True,
    "with --elastic: compile, beside the training, the step that the next lost process would need",
  ),
  Flag("compile_only", bool, False, "compile the step into the run's folder, then stop"),
  Flag(
    "beside",
    str,
    "",
    "SEED=FOLDER: train the run with this seed too, in its folder, by the same compiled program",
    repeat=True,
  ),
  ALLOW_IMPORT,
  Flag("allow_config_change", bool, False, "resume even if the configuration was changed"),
  VERSION,
  HELP,
)


def parse(
  argv: Sequence[str],
  flags: Sequence[Flag],
  *,
  with_fields: bool = False,
  elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
  """Reads `--flag=value` and `--flag value`.

  Args:
    argv: arguments.
    flags: the command's flags.
    with_fields: whether to accept `--config.SECTION.FIELD=VALUE` too.
    elsewhere: what to do in place of a flag that only other commands have, by the flag (`--name`).

  Returns:
    The value of every flag, and (field, text) of the fields in the order given.

  Raises:
    ConfigError: an unknown flag, a missing or wrong value, or a word that belongs to no flag.
  """
  known = {flag.name: flag for flag in flags}
  values: dict[str, Any] = {f.name: [] if f.repeat or f.words else f.default for f in flags}
  words = next((f.name for f in flags if f.words), None)
  given: list[tuple[str, str]] = []
  rest, before = list(argv), ""
  while rest:
    word = rest.pop(0)
    if words is not None and not word.startswith("-"):
      values[words].append(word)
      continue
    if word == f"--{VERSION.name}":
      print(f"scmoe {scmoe.__version__}")
      raise SystemExit(0)
    if word in ("-h", "--help"):
      values["help"] = rest.pop(0) if rest and not rest[0].startswith("-") else "short"
      continue
    name, equals, value = word.partition("=")
    is_field = with_fields and name.startswith(FIELD)
    flag = None if is_field else known.get(name[2:]) if name.startswith("--") else None
    if flag is None and not is_field:
      if name in elsewhere:
        raise ConfigError(f"{name} is not a flag here; {elsewhere[name]}")
      raise ConfigError(_unknown(word, known, with_fields, before))
    before = name
    if flag is not None and flag.kind is bool and not equals:
      values[flag.name] = True
      continue
    if not equals:
      if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{name} has no value; write {name}=VALUE")
      value = rest.pop(0)
    if flag is None:
      given.append((name.removeprefix(FIELD), value))
    elif flag.repeat:
      values[flag.name].append(parse_value(value, flag.kind, name))
    else:
      values[flag.name] = parse_value(value, flag.kind, name)
  for flag in flags:
    if flag.required and not values[flag.name] and not values.get("help"):
      raise ConfigError(f"--{flag.name} is missing: {flag.help}")
  return values, given


def _unknown(word: str, known: dict[str, Flag], with_fields: bool, before: str) -> str:
  """The error for a word that is not a flag; `before` is the flag before it."""
  name = word.partition("=")[0]
  if name in config_names():
    return f"{name!r} belongs to no flag; did you mean --config={name}?"
  switch = known.get(before.removeprefix("--"))
  if switch is not None and switch.kind is bool and word.lower() in WORDS:
    return f"{word!r} belongs to no flag; write {before}={word}, or {before} alone for true"
  paths = [field.path for field in fields(RunConfig())] if with_fields else []
  near = nearest(name.lstrip("-").removeprefix("config."), [*known, *paths])
  near = None if near is None else f"--{near}" if near in known else f"{FIELD}{near}"
  if not word.startswith("--"):
    hint = f"did you mean {near}?" if near and "=" in word else "write --flag=value (see --help)"
    return f"{name!r} belongs to no flag; {hint}"
  return f"{name} is not a flag; " + (f"did you mean {near}?" if near else "see --help all")


def json_file(text: str) -> Path | None:
  """The file of `--json`, checked before a command works for minutes; None for an empty `text`.

  Raises:
    ConfigError: it is a folder, or its folder does not exist.
  """
  if not text:
    return None
  path = at_home(text)
  if path.is_dir():
    raise ConfigError(f"--json={text!r} is a folder; give a file")
  if not path.absolute().parent.is_dir():
    raise ConfigError(f"--json={text!r}: there is no folder {path.absolute().parent}")
  return path


def at_least(values: dict[str, Any], least: int, *names: str) -> None:
  """Checks that the numbers of some flags are large enough.

  Raises:
    ConfigError: one of these flags is below `least`.
  """
  for name in names:
    if values[name] < least:
      raise ConfigError(f"--{name}={values[name]} must be at least {least}")


_PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu", "METAL", "")
_CUDA = ("jax_cuda12_plugin", "jax_cuda13_plugin")


# The messages with which XLA ends a process when it cannot read the flags of its environment.
_XLA_REFUSES = re.compile(
  r"(?P<unknown>Unknown flags? in XLA_FLAGS: .*)|(?P<file>Could not open file \S+)|"
  r"(?P<value>Couldn't interpret value .*)"
)


def check_environment() -> None:
  """Checks JAX_PLATFORMS and XLA_FLAGS. Before any device is used.

  jax answers the first with a traceback, and XLA the second with the end of the process.

  Raises:
    ConfigError: one of the two cannot be used.
  """
  _check_platforms()
  if flags := os.environ.get("XLA_FLAGS", "").strip():
    _check_xla_flags(flags)


@functools.cache
def _check_xla_flags(flags: str) -> None:
  """Lets a process of its own read the flags: which there are, only XLA knows. Takes half a second,
  of those alone who set some."""
  code = """import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it leaves no file of its memory
import jaxlib.xla_client
jaxlib.xla_client.make_cpu_client()"""
  try:
    ended = subprocess.run(
      [sys.executable, "-c", code], capture_output=True, text=True, errors="replace", timeout=60
    )
  except (OSError, subprocess.TimeoutExpired):
    return  # it could not be asked; XLA will say what it thinks of them
  found = _XLA_REFUSES.search(ended.stderr) if ended.returncode else None
  if found is None:
    return
  said = " ".join(found[0].split())[:200].rstrip(".")
  said += " to read flags from" if found["file"] else ""
  raise ConfigError(
    f"XLA_FLAGS={flags[:200]!r}: {said}; use flags of this jaxlib's XLA, or unset it"
  )


def _check_platforms() -> None:
  """Checks JAX_PLATFORMS, since a wrong value makes jax end in a traceback at the first device."""
  asked = os.environ.get("JAX_PLATFORMS", "")
  for word in asked.split(","):
    if word not in _PLATFORMS:
      raise ConfigError(f"JAX_PLATFORMS={asked!r} is unknown; use cpu, cuda or tpu, or unset it")
    if word == "cuda" and not any(map(importlib.util.find_spec, _CUDA)):
      raise ConfigError(
        f"JAX_PLATFORMS={asked!r}: this jax has no CUDA build; pip install 'jax[cuda13]', or unset "
        "it"
      )


def simulate(count: int) -> None:
  """Makes jax simulate `count` devices on the CPU; 0 changes nothing.

  Call it before jax uses a device.

  Raises:
    ConfigError: `count` is not 0 to 512, jax has devices already, or see `check_environment`.
  """
  check_environment()
  if not count:
    return
  if not 0 < count <= 512:
    raise ConfigError(f"--simulate={count} is not a number of devices; use 1 to 512")
  # XLA starts NPROC threads, one per core by default. In a collective each simulated device blocks
  # a thread until all devices have arrived: with too few threads they would wait for ever.
  os.environ["NPROC"] = str(max(16, 2 * count))
  import jax

  try:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
  except RuntimeError:
    raise ConfigError(f"--simulate={count} comes too late: jax has devices already") from None


def one_model(values: dict[str, Any]) -> None:
  """Checks that --model, which names one model, is not given with flags that choose a run.

  Raises:
    ConfigError: --workdir or --step is given too.
  """
  if values["model"] and (values["workdir"] or values["step"] >= 0):
    other = "workdir" if values["workdir"] else "step"
    raise ConfigError(f"--{other} and --model exclude each other: --model is one model's folder")


def compared(text: str, run: RunConfig) -> list[str]:
  """The wirings that `--compare` lists, separated by commas; the run's own if it lists none.

  Raises:
    ConfigError: one of them is unknown, empty, or named twice.
  """
  names = text.split(",") if text else [run.model.wiring]
  for name in names:
    if name not in WIRINGS:
      raise ConfigError(f"--compare={name!r} is no wiring; one of: {', '.join(WIRINGS)}")
  if len(set(names)) < len(names):
    raise ConfigError(f"--compare={text!r} names a wiring twice; name each once")
  return names


def run_config(values: dict[str, Any], given: Sequence[tuple[str, str]]) -> RunConfig:
  """The configuration that the values of `TRAIN_FLAGS` and the fields give; not resolved yet.

  Raises:
    ConfigError: a file or a field cannot be used.
  """
  if values["config_json"]:
    path = Path(values["config_json"])
    try:
      run = from_json(read_text(path), str(path))
    except (FileNotFoundError, StoredError) as error:
      raise ConfigError(f"--config_json: {error}") from None
    check_allowed(imports_of(run), values.get("allow_import", ()), str(path))
  else:
    path = find_config(values["config"])
    run = load_config(path, "smoke" if values["smoke"] else "get_config")
    if run.name == RunConfig.name:
      run = dataclasses.replace(run, name=path.stem)
  for name, text in given:
    run = with_field(run, name, text)
  check_typed(run, [name for name, _ in given])
  if values.get("deterministic"):
    run = with_field(run, "train.deterministic", "true")
  if values["allow_config_change"]:
    run = with_field(run, "checkpoint.allow_config_change", "true")
  return run


def default_workdir(values: dict[str, Any], run: RunConfig) -> str:
  """`--workdir`, or runs/NAME; a smoke run has a folder of its own, runs/NAME-smoke."""
  return values["workdir"] or f"runs/{run.name}" + ("-smoke" if values["smoke"] else "")


def list_configs() -> str:
  """One line per configuration: its name and the first line of its file."""
  lines = []
  for name in config_names():
    text = find_config(name).read_text("utf-8")
    about = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    lines.append(f"{name:20} {about}")
  return "\n".join(lines)


def help_text(
  usage: str, flags: Sequence[Flag], topic: str = "short", *, with_fields: bool = False
) -> str:
  """The text of `--help`.

  Args:
    usage: the command's docstring.
    flags: its flags.
    topic: `short`: at most 24 lines; `all`: every flag, field and exit code; otherwise the name of
      a flag, a section or a field.
    with_fields: whether the command takes the fields of the configuration.

  Raises:
    ConfigError: there is no such topic.
  """
  if topic == "short":
    return _short_help(usage, flags, with_fields)
  if topic != "all":
    return _help_on(topic.removeprefix("--").removeprefix("config."), flags, with_fields)
  lines = [usage.strip(), "", "Flags:"]
  for flag in flags:
    lines += _entry(_spelling(flag), _meaning(flag))
  if with_fields:
    lines += ["", f"Fields, written {FIELD}SECTION.FIELD=VALUE:"]
    lines += _field_lines()
  lines += ["", "Exit codes:", *_exit_codes()]
  return "\n".join(lines)


def _short_help(usage: str, flags: Sequence[Flag], with_fields: bool) -> str:
  """One screen: what the command does, examples, and as many flags as fit, each in one line."""
  rows = usage.strip().splitlines()
  examples = [row for row in rows[1:] if row.startswith("  ")][:_EXAMPLES]
  head = [rows[0], "", *(_cut(row) for row in examples), "", "Flags:"]
  flags = [flag for flag in flags if flag not in (HELP, VERSION)]
  tail = ["--help all: every flag and exit code; --help FLAG: one of them; --version"]
  if with_fields:
    parts = ", ".join(name for name, _ in sections(RunConfig()) if "." not in name)
    tail = _wrapped(f"Fields, written {FIELD}SECTION.FIELD=VALUE, of the sections {parts}.")
    tail += [
      "--help all: every flag, field and exit code; --help SECTION, FIELD or FLAG; --version"
    ]
  shown = len(flags)
  while True:
    more = [f"--{flag.name}" for flag in flags[shown:]]
    rest = _wrapped(f"  and {', '.join(more)}", "  ") if more else []
    entries = [
      _cut(_entry(_spelling(flag), _meaning(flag), wrap=False)[0]) for flag in flags[:shown]
    ]
    lines = [*head, *entries, *rest, "", *tail]
    if len(lines) <= SCREEN[0] or not shown:
      return "\n".join(lines)
    shown -= 1


def _cut(line: str) -> str:
  return line if len(line) <= SCREEN[1] else line[: SCREEN[1] - 4].rpartition(" ")[0] + " ..."


def _wrapped(text: str, indent: str = "") -> list[str]:
  return textwrap.wrap(
    text, SCREEN[1], subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
  )


def _spelling(flag: Flag) -> str:
  if flag.words:
    return flag.name
  return f"--{flag.name}" + ("" if flag.kind is bool else f" {flag.kind.__name__.upper()}")


def _meaning(flag: Flag) -> str:
  plain = flag.kind is bool or flag.default in (None, "")
  note = "" if plain else f" (default {flag.default})"
  return flag.help + note + (" (repeatable)" if flag.repeat else "")


def _help_on(topic: str, flags: Sequence[Flag], with_fields: bool) -> str:
  topic = present_name(topic)
  paths = [f.path for f in fields(RunConfig())] if with_fields else []
  parts = [name for name, _ in sections(RunConfig())] if with_fields else []
  if topic in parts:
    return "\n".join(_section_lines(topic, whole=False)).lstrip("\n")
  if groups := [name for name in parts if name.endswith(f".{topic}")]:
    return "\n".join(line for name in groups for line in _section_lines(name)).lstrip("\n")
  if inside := [p for p in paths if p == topic or p.endswith(f".{topic}")]:
    found = {p.rpartition(".")[0] for p in inside}
    lines = [
      line for name in ("", *parts) if name in found for line in _section_lines(name, inside)
    ]
    return "\n".join(lines).lstrip("\n")
  if found := [flag for flag in flags if flag.name == topic]:
    return "\n".join(_entry(f"--{topic}", found[0].help))
  near = difflib.get_close_matches(topic, [*parts, *paths, *(f.name for f in flags)], n=1)
  hint = f"did you mean {near[0]}?" if near else f"sections: {', '.join(parts)}"
  raise ConfigError(f"--help {topic}: no section, field or flag of that name; {hint}")


def _field_lines() -> list[str]:
  """Every field, section by section; what only ablations set comes last."""
  names = ["", *(name for name, _ in sections(RunConfig()))]
  ordered = sorted(names, key=lambda name: name.endswith(f".{ABLATION}"))
  return [line for name in ordered for line in _section_lines(name)]


def _section_lines(name: str, only: Sequence[str] = (), *, whole: bool = True) -> list[str]:
  """The fields of a section.

  Args:
    name: its dotted name; "": the run itself.
    only: paths to which the list is cut; empty: all.
    whole: the sections inside it are listed elsewhere; otherwise each has a line here.
  """
  default = RunConfig()
  about = dict(sections(default))
  lines = ["", f"  {name or 'name'}: {about.get(name, 'the run itself')}"]
  for field in fields(default):
    if field.path.rpartition(".")[0] == name and (not only or field.path in only):
      lines += _entry(field.path, f"{field.help} [{describe_type(field)}]", indent=4)
  if not whole:
    for other in (other for other in about if other.startswith(f"{name}.")):
      lines += _entry(f"{other}.*", f"{about[other]}: --help {other}", indent=4)
  return lines


def describe_type(field: Any) -> str:
  """Type, default, and choices or range of a field, e.g. `int, default 8, at least 1`."""
  words = [field.type.__name__, f"default {field.default!r}"]
  low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
  if field.metadata.get("choices"):
    words.append("one of " + " | ".join(repr(c) for c in field.metadata["choices"]))
  if field.metadata.get("importable"):
    words.append(f"or {FORM}")
  if low is not None:
    words.append(f"at least {low}")
  if high is not None:
    words.append(f"at most {high}")
  return ", ".join(words)


def _entry(name: str, text: str, indent: int = 2, *, wrap: bool = True) -> list[str]:
  pad, hang = " " * indent, " " * 32
  wrapped = (textwrap.wrap(text, SCREEN[1] - len(hang)) if wrap else [text]) or [""]
  first = f"{pad}{name}"
  if len(first) < len(hang) - 1:
    return [f"{first:{len(hang)}}{wrapped[0]}", *(hang + line for line in wrapped[1:])]
  return [first, *(hang + line for line in wrapped)]


def _exit_codes() -> list[str]:
  # The table in the documentation of `scmoe.base.errors` is the only place where they are written.
  rows = [r.strip() for r in (scmoe.base.errors.__doc__ or "").splitlines() if r.startswith("|")]
  cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
  return [f"  {code:4}{meaning}" for code, meaning in cells if code.isdigit()]
