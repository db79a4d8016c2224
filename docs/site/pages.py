"""Which files of the repository become which pages, and where their links lead then.

README.md is the first page; docs/ lies at the top; what else is linked keeps its place. A link to a
file that is no page (a notebook, a table) leads to a copy of it.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("README.md", "SECURITY.md", "experiments/README.md", "experiments/LOG.md")
OUTSIDE += tuple(
  path.relative_to(ROOT).as_posix()
  for path in sorted(ROOT.glob("experiments/**/README.md"))
  if path.parent.name != "experiments"
)
LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def site_path(path: str) -> str:
  """Repository -> site."""
  return "index.md" if path == "README.md" else path.removeprefix("docs/")


def repository_path(page: str) -> str:
  """Site -> repository."""
  if page == "index.md":
    return "README.md"
  return page if page in OUTSIDE else f"docs/{page}"


def linked(path: str, text: str) -> list[str]:
  """Files of the repository that a page names in links."""
  targets = [m[1] for part in FENCE.split(text)[::2] for m in LINK.findall(part)]
  return [os.path.normpath(f"{Path(path).parent}/{t}") for t in targets if "://" not in t]


def moved(path: str, text: str) -> str:
  """A page's text, as it reads on the site."""
  start = os.path.dirname(site_path(path)) or "."

  def link(match: re.Match[str]) -> str:
    before, target, after = match.groups()
    if "://" in target:
      return match[0]
    target = site_path(os.path.normpath(f"{Path(path).parent}/{target}"))
    return before + os.path.relpath(target, start) + after

  parts = FENCE.split(text)
  parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
  # What stands behind a fence's language names a file, or a list that a test reads.
  parts[1::2] = [_fence(part) for part in parts[1::2]]
  return "".join(parts)


def _fence(block: str) -> str:
  head, _, body = block.partition("\n")
  language, _, name = head.removeprefix("```").partition(" ")
  if language == "python" and name:
    return f'```python title="{name}"\n{body}'
  return f"```{language if language in ('python', 'bash', 'json') else 'text'}\n{body}"


def modules() -> dict[str, str]:
  """Every public module that says what it is -> the first line of its docstring."""
  found = {}
  for path in sorted((ROOT / "scmoe").rglob("*.py")):
    if not (path.parent / "__init__.py").exists():
      continue  # code that leaves with a model (pretrained/remote) is no module of the package
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    about = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    if about and not any(part.startswith("_") for part in parts):
      found[".".join(parts)] = about.partition("\n")[0]
  return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
  """Adds to the navigation what it does not name: other pages, and the API, by package."""
  packages: dict[str, list[Any]] = {}
  for name in modules():
    packages.setdefault(".".join(name.split(".")[:2]), []).append({name: f"api/{name}.md"})
  entries: list[Any] = ["api/index.md"]
  for package, pages in packages.items():
    entries += pages if len(pages) == 1 else [{package: pages}]
  nav: list[Any] = list(config.nav or [])
  named = set(re.findall(r"[\w/]+\.md", str(nav)))
  others = sorted(p.name for p in (ROOT / "docs").glob("*.md") if p.name not in named)
  more: list[Any] = [{"More": others}] if others else []
  config.nav = [*nav, *more, {"API": entries}]
  return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Adds the pages from outside of docs/, one per module, and copies of what pages link."""
  files.append(File.generated(config, "pages.css", abs_src_path=str(ROOT / "docs/site/pages.css")))
  texts = {path: (ROOT / path).read_text("utf-8") for path in OUTSIDE}
  for path, text in texts.items():
    files.append(File.generated(config, site_path(path), content=text))
  texts |= {f"docs/{f.src_uri}": f.content_string for f in files.documentation_pages()
            if f.src_uri not in {site_path(path) for path in OUTSIDE}}  # fmt: skip
  known = modules()
  for name in known:
    files.append(File.generated(config, f"api/{name}.md", content=f"# {name}\n\n::: {name}\n"))
  rows = [f"| [{name}]({name}.md) | {about} |" for name, about in known.items()]
  index = "# API\n\nEvery public module.\n\n| module | what it is |\n|---|---|\n" + "\n".join(rows)
  files.append(File.generated(config, "api/index.md", content=index))
  here = {f.src_uri for f in files}
  for path in {target for page, text in texts.items() for target in linked(page, text)}:
    if site_path(path) not in here and (ROOT / path).is_file():
      files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
  return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
  """Leads links to where their files are on the site."""
  uri = page.file.src_uri
  return markdown if uri.startswith("api/") else moved(repository_path(uri), markdown)
