"""Reads documents from each kind of source, in a fixed order."""

from __future__ import annotations

import codecs
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scmoe.base.errors import DataError
from scmoe.base.extensions import is_import_path, load
from scmoe.data import exercises, procedural
from scmoe.data.config import HUB, DataConfig, SourcePart
from scmoe.data.conversations import NamedRow, read_conversations
from scmoe.data.document import Document
from scmoe.data.files import BadRows, InputFile, find_files, log, read_head, read_lines
from scmoe.data.packages import need
from scmoe.data.preferences import read_preferences
from scmoe.data.sniff import kind_of

_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


_LARGE = 16 << 20  # bytes; a larger text file is read in blocks
_BLOCK = 4 << 20  # bytes of such a block
_WRITTEN = {"chat": read_conversations, "preference": read_preferences}  # kinds of conversations
_LONGEST_NAME = 100  # characters of a domain's name, since tables and logs show it


def read_documents(part: SourcePart, config: DataConfig, bad: BadRows) -> Iterator[Document]:
  """Documents of one source, in a fixed order.

  Raises:
    DataError: files are missing or unreadable, or too many rows are bad.
  """
  if part.kind == "stdlib":
    return read_stdlib()
  if part.kind == "procedural":
    return read_procedural(part.path, config.limit_bytes)
  if is_import_path(part.kind):
    return read_own(part.kind, config)
  if part.kind in _WRITTEN and not part.path:
    make = exercises.conversations if part.kind == "chat" else exercises.preferences
    numbered = enumerate(make(), start=1)
    rows = ((f"exercises:{number}", None, "exercises", row) for number, row in numbered)
    return _WRITTEN[part.kind](rows, config, bad)
  files = find_files(part.kind, part.path)
  domain = Path(part.path.partition("@")[0].rstrip("/")).name if part.path.startswith(HUB) else ""
  domain = domain or Path(part.path.rstrip("/")).name
  domain = domain.split(".")[0].replace("*", "") or part.kind
  if part.kind == "text":
    return read_text(files, domain, config.document_bytes, bad)
  if part.kind == "jsonl" or part.kind in _WRITTEN:
    rows = _named(read_jsonl(files, config, bad), domain, config, bad)
  else:
    read = read_parquet if part.kind == "parquet" else read_arrow
    rows = _named(read(files, config), domain, config, bad)
  return _WRITTEN.get(part.kind, _row_documents)(rows, config, bad)


# --- the user's own function ----------------------------------------------------------------------


def read_own(path: str, config: DataConfig) -> Iterator[Document]:
  """Documents from the user's own function, which gets the `DataConfig` as its argument.

  The function yields texts or (text, domain) pairs. A text is a string or UTF-8 bytes. A text
  without a domain gets the function's name as its domain.

  Raises:
    ConfigError: the function cannot be imported.
    DataError: it fails, or yields something else.
  """
  domain = path.partition(":")[2]
  make = load(path, "data.source")
  try:
    for number, item in enumerate(make(config)):
      text, name = item if isinstance(item, tuple) and len(item) == 2 else (item, domain)
      text = text.encode() if isinstance(text, str) else text
      if not (isinstance(text, bytes) and isinstance(name, str) and _is_text(text)):
        raise DataError(
          f"data.source={path!r}: document {number} is a {type(item).__name__}; yield texts in "
          "UTF-8, or (text, domain) pairs"
        )
      yield Document(text, name)
  except DataError:
    raise
  except Exception as error:
    what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    raise DataError(f"data.source={path!r} failed: {what}") from None


# --- the standard library -------------------------------------------------------------------------


def read_stdlib() -> Iterator[Document]:
  """The interpreter's own .py files (domain "code") and language reference (domain "prose").

  If the library is zipped or missing, procedural text takes its place.
  """
  root = Path(sysconfig.get_path("stdlib"))
  found = False
  for path in _stdlib_files(root):
    text = path.read_bytes()
    if text and _is_text(text):
      found = True
      yield Document(text, "code")
  if not found:
    log.warning("no standard library source under %s; using data.source='procedural'", root)
    yield from read_procedural("", 0)
    return
  try:
    from pydoc_data.topics import topics
  except ImportError:
    log.warning("this Python has no pydoc_data.topics: no domain 'prose'")
    return
  for name in sorted(topics):
    if topics[name]:
      yield Document(topics[name].encode(), "prose")


def _stdlib_files(root: Path) -> list[Path]:
  def wanted(path: Path) -> bool:
    parts = path.relative_to(root).parts
    return not _SKIPPED_FOLDERS.intersection(parts) and parts[0] != "pydoc_data"

  return sorted((p for p in root.rglob("*.py") if wanted(p)), key=lambda p: p.as_posix())


def _is_text(text: bytes) -> bool:
  try:
    text.decode("utf-8")
  except UnicodeDecodeError:
    return False
  return b"\0" not in text


def read_procedural(names: str, limit_bytes: int) -> Iterator[Document]:
  """Generated documents of the domains in `names`, joined by '+'; an empty string means all."""
  for name in procedural.domain_names(names):
    for text in procedural.documents(name, limit_bytes or procedural.DEFAULT_BYTES):
      yield Document(text, name)


# --- text files -----------------------------------------------------------------------------------


def read_text(
  files: list[InputFile], domain: str, document_bytes: int, bad: BadRows
) -> Iterator[Document]:
  """Documents of text files; cuts long files into documents of about `document_bytes`.

  A file that is not UTF-8 text counts as a bad row.
  """
  for file in files:
    try:
      large = file.path.stat().st_size > _LARGE and document_bytes > 0
      text = b"" if large else file.path.read_bytes()
      bad_place = _bad_place(file.path) if large else None
    except OSError as error:
      raise DataError(f"{file.path}: cannot be read: {error}") from None
    if large and bad_place is None:
      yield from (
        Document(piece, domain, file.split) for piece in split_file(file.path, document_bytes)
      )
      continue
    line, why = bad_place or (0, _bad_text(text))
    if why:
      line = line or 1 + text.count(b"\n", 0, _first_bad_byte(text))
      bad.skip(f"{file.path}:{line}", kind_of(read_head(file.path)) or why)
      continue
    for piece in split_text(text, document_bytes):
      yield Document(piece, domain, file.split)


def split_file(path: Path, document_bytes: int) -> Iterator[bytes]:
  """Yields the pieces that `split_text` would, but reads the file a few megabytes at a time.

  Raises:
    DataError: the file cannot be read.
  """
  rest = b""
  try:
    with open(path, "rb") as file:
      while block := file.read(_BLOCK):
        rest += block
        start, enough = 0, 2 * document_bytes + 4  # bytes that `_cut` may look at
        while len(rest) - start > enough:
          end = _cut(rest, start + document_bytes, start + 2 * document_bytes)
          yield rest[start:end]
          start = end
        rest = rest[start:]
  except OSError as error:
    raise DataError(f"{path}: cannot be read: {error}") from None
  yield from split_text(rest, document_bytes)


def _bad_place(path: Path) -> tuple[int, str] | None:
  """(line, reason) of the first place where a large file is not UTF-8 text; None if it all is."""
  decoder, line, blank = codecs.getincrementaldecoder("utf-8")(), 1, True
  with open(path, "rb") as file:
    while block := file.read(_BLOCK):
      if b"\0" in block:
        return line + block.count(b"\n", 0, block.index(b"\0")), "NUL byte in the text"
      try:
        decoder.decode(block)
      except UnicodeDecodeError as error:
        return line + block.count(b"\n", 0, error.start), f"invalid UTF-8 ({error.reason})"
      line, blank = line + block.count(b"\n"), blank and not block.strip()
  try:
    decoder.decode(b"", final=True)
  except UnicodeDecodeError as error:
    return line, f"invalid UTF-8 ({error.reason})"
  return (1, "empty text") if blank else None


def split_text(text: bytes, document_bytes: int) -> Iterator[bytes]:
  """Cuts valid UTF-8 into pieces of about `document_bytes`, whose concatenation is `text`.

  A piece ends at the first blank line after `document_bytes`. If there is none up to twice that
  length, it ends at the first line end, or else at the first character end. Appending text changes
  only the last piece, because cuts are made from the front.
  """
  start = 0
  while document_bytes and len(text) - start > document_bytes:
    end = _cut(text, start + document_bytes, start + 2 * document_bytes)
    yield text[start:end]
    start = end
  if start < len(text):
    yield text[start:]


def _cut(text: bytes, low: int, high: int) -> int:
  for mark in (b"\n\n", b"\n"):
    at = text.find(mark, low, high)
    if at >= 0:
      return at + len(mark)
  while low < len(text) and text[low] & 0xC0 == 0x80:  # a cut must not split a UTF-8 character
    low += 1
  return low


def _bad_text(text: bytes) -> str | None:
  if not text.strip():
    return "empty text"
  if b"\0" in text:
    return "NUL byte in the text"
  try:
    text.decode("utf-8")
  except UnicodeDecodeError as error:
    return f"invalid UTF-8 ({error.reason} 0x{text[error.start]:02x})"
  return None


def _first_bad_byte(text: bytes) -> int:
  try:
    text.decode("utf-8")
  except UnicodeDecodeError as error:
    return error.start
  return max(text.find(b"\0"), 0)


# --- rows of jsonl and parquet --------------------------------------------------------------------

Row = tuple[str, str | None, dict[str, Any]]  # file:line, split, columns


def read_jsonl(files: list[InputFile], config: DataConfig, bad: BadRows) -> Iterator[Row]:
  """Rows of .jsonl, .jsonl.gz and .jsonl.zst files; a line that is not a JSON object is a bad row.

  Raises:
    DataError: a file cannot be read or is of another kind, or too many rows are bad.
  """
  for file in files:
    is_plain = not file.path.name.endswith((".gz", ".zst"))
    if is_plain and (kind := kind_of(read_head(file.path))):
      raise DataError(f"{file.path}: {kind}")
    for number, line in read_lines(file.path):
      where = f"{file.path}:{number}"
      if line is None:
        bad.skip(where, "line of more than 10 MB")
        continue
      if not line.strip():
        continue  # a blank line, e.g. at the end, is not counted as bad
      try:
        row = json.loads(line)
      except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError too
        reason = "invalid UTF-8" if isinstance(error, UnicodeDecodeError) else "invalid JSON"
        bad.skip(where, f"{reason} ({str(error)[:80]})")
        continue
      if not isinstance(row, dict):
        bad.skip(where, f"expected a JSON object, got {type(row).__name__}")
        continue
      yield where, file.split, row


def read_parquet(files: list[InputFile], config: DataConfig) -> Iterator[Row]:
  """Rows of parquet files, with the needed columns only: `data.field` and `data.domain_field`.

  Raises:
    DataError: a file is not a parquet file, or lacks a column.
  """
  parquet = need("pyarrow.parquet", "data.source='parquet'")
  for file in files:
    try:
      table = parquet.ParquetFile(file.path)
      names = table.schema_arrow.names
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
      why = " ".join(str(error).split())[:300]
      raise DataError(f"{file.path}: not a readable parquet file: {why}") from None
    yield from _parquet_rows(table, file, _wanted(names, file, config))


def _parquet_rows(table: Any, file: InputFile, wanted: list[str]) -> Iterator[Row]:
  types = need("pyarrow", "data.source='parquet'")
  number = 0
  try:
    for batch in table.iter_batches(batch_size=1024, columns=wanted):
      columns = [_as_plain(batch.column(name), types) for name in wanted]
      for values in zip(*columns):
        number += 1
        yield f"{file.path}:{number}", file.split, dict(zip(wanted, values))
  except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
    why = " ".join(str(error).split())[:300]
    raise DataError(f"{file.path}:{number + 1}: cannot be read: {why}") from None


def read_arrow(files: list[InputFile], config: DataConfig) -> Iterator[Row]:
  """Rows of Arrow files that `datasets.Dataset.save_to_disk` wrote, with the needed columns only.

  Raises:
    DataError: a file is not an Arrow stream, or lacks a column.
  """
  arrow = need("pyarrow", "data.source='arrow'")
  for file in files:
    number = 0
    try:
      with arrow.memory_map(str(file.path)) as source:
        reader = arrow.ipc.open_stream(source)
        names = _wanted(reader.schema.names, file, config)
        for batch in reader:
          columns = [_as_plain(batch.column(name), arrow) for name in names]
          for values in zip(*columns):
            number += 1
            yield f"{file.path}:{number}", file.split, dict(zip(names, values))
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
      why = " ".join(str(error).split())[:300]
      raise DataError(f"{file.path}: not a readable Arrow file: {why}") from None


def _wanted(names: list[str], file: InputFile, config: DataConfig) -> list[str]:
  wanted = [c for c in (config.field, config.domain_field) if c]
  for name in wanted:
    if name not in names:
      option = "data.field" if name == config.field else "data.domain_field"
      raise DataError(f"{file.path}: no column {option}={name!r}; it has: {', '.join(names)}")
  return wanted


def _as_plain(column: Any, arrow: Any) -> list[Any]:
  # Reads strings as bytes, because pyarrow would raise an error for the whole column if one row is
  # not UTF-8. Here only that row is bad.
  if arrow.types.is_string(column.type):
    column = column.view(arrow.binary())
  elif arrow.types.is_large_string(column.type):
    column = column.view(arrow.large_binary())
  # Without this check pyarrow follows a damaged file's offsets into foreign memory, and the process
  # ends with a segmentation fault.
  column.validate(full=True)
  return column.to_pylist()


def _named(
  rows: Iterator[Row], domain: str, config: DataConfig, bad: BadRows
) -> Iterator[NamedRow]:
  """Yields each row with the name of its domain."""
  for where, split, row in rows:
    named = row.get(config.domain_field) if config.domain_field else domain
    if named is None or named in ("", b""):
      bad.skip(where, f"no domain in data.domain_field={config.domain_field!r}")
      continue
    name = named.decode("utf-8", errors="replace") if isinstance(named, bytes) else str(named)
    if len(name) > _LONGEST_NAME or not name.isprintable():
      bad.skip(where, f"data.domain_field={config.domain_field!r} holds {name[:40]!r}, not a name")
      continue
    yield where, split, name, row


def _row_documents(
  rows: Iterator[NamedRow], config: DataConfig, bad: BadRows
) -> Iterator[Document]:
  for where, split, domain, row in rows:
    text = row.get(config.field)
    if config.field not in row or text is None:
      bad.skip(where, f"no field data.field={config.field!r}; it has: {', '.join(map(str, row))}")
      continue
    if not isinstance(text, str | bytes):
      bad.skip(where, f"data.field={config.field!r} holds {type(text).__name__}, not text")
      continue
    encoded = _as_bytes(text)
    if why := _bad_text(encoded):
      bad.skip(where, why)
      continue
    yield Document(encoded, domain, split)


def _as_bytes(text: str | bytes) -> bytes:
  # JSON can spell half of a surrogate pair. It becomes invalid UTF-8 here, and so a bad row.
  return text if isinstance(text, bytes) else text.encode("utf-8", errors="surrogatepass")
