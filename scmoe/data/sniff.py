"""Recognises files that are not UTF-8 text by their first bytes, and how to convert them."""

from __future__ import annotations

HEAD = 512  # number of first bytes that `kind_of` needs

# (first bytes, kind of file, command or advice that makes text of it)
_KINDS = (
  (b"\xff\xfe\x00\x00", "text in UTF-32", "iconv -f UTF-32 -t UTF-8 FILE > NEW"),
  (b"\x00\x00\xfe\xff", "text in UTF-32", "iconv -f UTF-32 -t UTF-8 FILE > NEW"),
  (b"\xff\xfe", "text in UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > NEW"),
  (b"\xfe\xff", "text in UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > NEW"),
  (b"\x1f\x8b", "compressed by gzip", "gunzip FILE"),
  (b"\x28\xb5\x2f\xfd", "compressed by zstd", "unzstd FILE"),
  (b"BZh", "compressed by bzip2", "bunzip2 FILE"),
  (b"\xfd7zXZ\x00", "compressed by xz", "unxz FILE"),
  (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x FILE"),
  (b"PK\x03\x04", "a zip archive (or an office document, which is one)", "unzip FILE"),
  (b"\x89PNG", "a PNG image", "give text"),
  (b"\xff\xd8\xff", "a JPEG image", "give text"),
  (b"GIF8", "a GIF image", "give text"),
  (b"%PDF-", "a PDF document", "pdftotext FILE"),
  (b"\xd0\xcf\x11\xe0", "an office document", "save it as text"),
  (b"\x7fELF", "a program", "give text"),
  (b"SQLite format 3\x00", "an SQLite database", "export its rows as JSON Lines"),
  (b"PAR1", "a Parquet file", "name it .parquet, or set data.source=parquet"),
  (b"ARROW1", "an Arrow file", "name its folder, written by save_to_disk"),
  (b"\x93NUMPY", "a NumPy array", "give text: tokens are made here"),
  (b"\x89HDF", "an HDF5 file", "export its text as JSON Lines"),
)


def kind_of(head: bytes) -> str:
  """A message with a file's kind and the command that makes text of it; "" for an unknown kind.

  Args:
    head: the file's first `HEAD` bytes.
  """
  for start, what, cure in _KINDS:
    if head.startswith(start):
      return f"the file is {what}, not UTF-8 text: {cure}"
  if head[257:262] == b"ustar":
    return "the file is a tar archive, not UTF-8 text: tar xf FILE"
  if _is_utf16(head):
    return "the file looks like text in UTF-16, not UTF-8: iconv -f UTF-16LE -t UTF-8 FILE > NEW"
  return ""


def _is_utf16(head: bytes) -> bool:
  """True if about every second byte is zero, as in UTF-16 Latin text without a byte order mark."""
  pairs = len(head) // 2
  if pairs < 8:
    return False
  zeros = [head[start : 2 * pairs : 2].count(0) / pairs for start in (0, 1)]
  return max(zeros) > 0.9 and min(zeros) < 0.1
