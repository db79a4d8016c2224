"""Writes the text of a language study: the Python sources of this machine's installed packages.

  python experiments/quality/packages_text.py --to runs/packages_text --megabytes 200

Every machine has such text, and one with GPUs has hundreds of megabytes of it. What is written to
the folder:

  train-00000.jsonl, ...       {"text": source, "package": name} a line
  validation-00000.jsonl       the same, from packages of which no file is trained on
  manifest.json                bytes and version of every package, digest of all the text

A file is left out if its text, apart from white space, is that of an earlier one, if it is not
UTF-8, shorter than 200 or longer than 500,000 bytes, or if its lines have over 100 bytes on
average: tables and generated code. The same packages give the same folder.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib.metadata
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SHORTEST, LONGEST, WIDEST = 200, 500_000, 100  # bytes of a file; mean bytes of its lines
HELD_OUT = 0.04  # share of the bytes that validation has at least
LARGEST = 0.05  # a package with a larger share of the bytes is never held out
FILE_BYTES = 64 << 20


def sources(root: Path) -> Iterator[tuple[str, str]]:
  """(package, text) of every usable file below a folder of packages, by path, each text once."""
  seen = set()
  for path in sorted(root.rglob("*.py")):
    package = path.relative_to(root).parts[0].removesuffix(".py")
    data = path.read_bytes() if path.is_file() else b""
    if not SHORTEST <= len(data) <= LONGEST or len(data) > WIDEST * (data.count(b"\n") + 1):
      continue
    digest = hashlib.blake2b(b"".join(data.split()), digest_size=16).digest()
    if digest in seen:
      continue
    seen.add(digest)
    try:
      yield package, data.decode()
    except UnicodeDecodeError:
      continue


def held_out(sizes: dict[str, int]) -> set[str]:
  """The packages for validation: small ones in an order that only their names decide."""
  total, found, held = sum(sizes.values()), set(), 0
  for name in sorted(sizes, key=lambda name: hashlib.blake2b(name.encode()).digest()):
    if held >= HELD_OUT * total:
      break
    if sizes[name] <= LARGEST * total:
      found.add(name)
      held += sizes[name]
  return found


def write(texts: dict[str, list[str]], names: list[str], folder: Path, split: str) -> None:
  """Writes the packages' texts as JSON lines, a new file after `FILE_BYTES`."""
  number, file, written = 0, None, 0
  for name in names:
    for text in texts[name]:
      if file is None or written > FILE_BYTES:
        if file is not None:
          file.close()
        file, written = (folder / f"{split}-{number:05d}.jsonl").open("w"), 0
        number += 1
      written += file.write(json.dumps({"text": text, "package": name}) + "\n")
  if file is not None:
    file.close()


def shortened(texts: dict[str, list[str]], most: int) -> dict[str, list[str]]:
  """The same share of every package, its first files, so that at most so many bytes are left."""
  total = sum(len(text.encode()) for own in texts.values() for text in own)
  share = min(1.0, most / max(total, 1))
  kept = {}
  for name, own in texts.items():
    room, chosen = share * sum(len(text.encode()) for text in own), []
    for text in own:
      room -= len(text.encode())
      if room < 0:
        break
      chosen.append(text)
    kept[name] = chosen
  return {name: own for name, own in kept.items() if own}


def main() -> None:
  """The command."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--to", required=True, help="folder to write")
  parser.add_argument("--megabytes", type=float, default=200.0, help="text to keep at most")
  parser.add_argument("--packages", default=sysconfig.get_path("purelib"), help="their folder")
  asked = parser.parse_args()
  texts: dict[str, list[str]] = collections.defaultdict(list)
  for package, text in sources(Path(asked.packages)):
    texts[package].append(text)
  if not texts:
    sys.exit(f"--packages={asked.packages} has no Python sources; name a folder of packages")
  texts = shortened(texts, int(asked.megabytes * 2**20))
  sizes = {name: sum(len(text.encode()) for text in own) for name, own in texts.items()}
  validation = held_out(sizes)
  # The order is by name: training shuffles.
  folder = Path(asked.to)
  folder.mkdir(parents=True, exist_ok=True)
  for old in folder.glob("*.jsonl"):
    old.unlink()
  for split, names in (("train", set(sizes) - validation), ("validation", validation)):
    write(texts, sorted(names), folder, split)
  digest = hashlib.blake2b(digest_size=16)
  for file in sorted(folder.glob("*.jsonl")):
    digest.update(file.read_bytes())
  versions = {d.name: d.version for d in importlib.metadata.distributions()}
  manifest = {
    "digest": digest.hexdigest(),
    "bytes": {
      "train": sum(size for name, size in sizes.items() if name not in validation),
      "validation": sum(sizes[name] for name in validation),
    },
    "validation": sorted(validation),
    "packages": {
      name: {"bytes": size, "version": versions.get(name, "")} for name, size in sizes.items()
    },
  }
  (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True))
  split = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in manifest["bytes"].items())
  print(f"{folder}: {len(sizes)} packages, {split}, digest {manifest['digest'][:12]}")


if __name__ == "__main__":
  main()
