"""Sources: what is read, in which order, and what becomes of bad rows."""

import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from scmoe.base.errors import ConfigError, DataError
from scmoe.data import open_data
from scmoe.data import text as sources
from scmoe.data.config import DataConfig, SourcePart, parse_mixture
from scmoe.data.files import BadRows, find_files, read_lines


def read(kind, path, limit=0, **fields):
  config = DataConfig(source=kind, path=str(path), max_bad_rows=limit, **fields)
  bad = BadRows(limit)
  found = list(sources.read_documents(SourcePart(kind, str(path), 1.0), config, bad))
  return found, bad.count


def lines_of(rows):
  return "".join(json.dumps(row) + "\n" for row in rows).encode()


ROWS = [{"text": f"row {i} é\n", "kind": "ab"[i % 2]} for i in range(6)]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_jsonl_compressed_or_not(tmp_path, ending):
  pack = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}[ending]
  file = tmp_path / f"rows.{ending}"
  file.write_bytes(pack(lines_of(ROWS)))
  found, bad = read("jsonl", file)
  assert [d.text.decode() for d in found] == [row["text"] for row in ROWS]
  assert {d.domain for d in found} == {"rows"}
  assert bad == 0


def test_parquet_has_the_same_rows(tmp_path):
  pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=2)
  found, _ = read("parquet", tmp_path / "rows.parquet", domain_field="kind")
  assert [d.text.decode() for d in found] == [row["text"] for row in ROWS]
  assert [d.domain for d in found] == [row["kind"] for row in ROWS]


def test_split_names_of_files_are_kept_and_tests_left_out(tmp_path):
  for name in ("train-00000-of-00002", "train-00001-of-00002", "validation-00000", "test-00000"):
    (tmp_path / f"{name}.jsonl").write_bytes(lines_of([{"text": name}]))
  found, _ = read("jsonl", tmp_path)
  assert [d.split for d in found] == ["train", "train", "validation"]
  (tmp_path / "validation-00000.jsonl").unlink()
  found, _ = read("jsonl", tmp_path)
  assert [d.split for d in found] == [None, None]  # no validation file: split by hash


def test_split_folders_count_as_names(tmp_path):
  for name in ("train", "validation"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "0000.jsonl").write_bytes(lines_of([{"text": name}]))
  assert [f.split for f in find_files("jsonl", str(tmp_path))] == ["train", "validation"]


def test_files_come_sorted_and_globs_work(tmp_path):
  for name in ("b.txt", "a.txt", "c.md", "d.bin"):
    (tmp_path / name).write_text(name)
  assert [d.text for d in read("text", tmp_path)[0]] == [b"a.txt", b"b.txt", b"c.md"]
  assert [d.text for d in read("text", f"{tmp_path}/*.txt")[0]] == [b"a.txt", b"b.txt"]


def test_stdlib_has_code_and_prose_without_tests():
  found = list(sources.read_stdlib())
  assert {d.domain for d in found} == {"code", "prose"}
  code = [d for d in found if d.domain == "code"]
  assert sum(len(d.text) for d in code) > 5_000_000
  assert len(code) > 400
  assert [d.text for d in sources.read_stdlib()] == [d.text for d in found]


def test_a_missing_stdlib_falls_back_to_procedural(tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(sources.sysconfig, "get_path", lambda _: str(tmp_path))
  assert {d.domain for d in sources.read_stdlib()} == {"markov", "recall", "arithmetic"}
  assert len(caplog.records) == 1
  assert "no standard library source" in caplog.text


BAD_LINES = {
  b"{not json": "invalid JSON",
  b'{"text": "\xff"}': "invalid UTF-8",
  b'{"body": "x"}': "no field data.field='text'; it has: body",
  b'{"text": null}': "no field data.field='text'",
  b'{"text": 3}': "holds int, not text",
  b'{"text": "  "}': "empty text",
  b'{"text": "a\\u0000b"}': "NUL byte",
  b'{"text": "\\ud800"}': "invalid UTF-8",
  b"[1, 2]": "expected a JSON object, got list",
  b"[" * 100_000: "invalid JSON",
  b'{"text": "' + b"x" * 10_000_001 + b'"}': "line of more than 10 MB",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=list(BAD_LINES.values()))
def test_bad_rows_are_skipped_up_to_the_limit(tmp_path, line):
  file = tmp_path / "rows.jsonl"
  file.write_bytes(b'{"text": "one"}\n' + line + b'\n\n{"text": "two"}\n')
  found, bad = read("jsonl", file, limit=1)
  assert [d.text for d in found] == [b"one", b"two"]
  assert bad == 1
  with pytest.raises(DataError) as error:
    read("jsonl", file, limit=0)
  message = str(error.value)
  assert message.startswith(f"{file}:2: ")
  assert BAD_LINES[line] in message
  assert "bad row 1 and data.max_bad_rows=0: mend the data or raise the limit" in message
  assert "\n" not in message


def test_parquet_rows_that_are_no_utf8_are_bad_rows(tmp_path):
  raw = pa.array([b"good", b"\xff\xfe", b"more"], pa.binary())
  text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
  pq.write_table(pa.table({"text": text}), tmp_path / "x.parquet")
  found, bad = read("parquet", tmp_path / "x.parquet", limit=1)
  assert [d.text for d in found] == [b"good", b"more"]
  assert bad == 1
  with pytest.raises(DataError, match=r"x\.parquet:2: invalid UTF-8"):
    read("parquet", tmp_path / "x.parquet")


def test_a_text_file_that_is_no_utf8_names_its_line(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"fine\nbroken \xff\n")
  with pytest.raises(DataError, match=r"a\.txt:2: invalid UTF-8 \(invalid start byte 0xff\)"):
    read("text", tmp_path)


OTHER_FILES = {
  "utf16": ("Some text.\n".encode("utf-16"), r"text in UTF-16, not UTF-8 text: iconv -f UTF-16"),
  "utf16be": ("\ufeffSome".encode("utf-16-be"), r"text in UTF-16"),
  "utf16 unmarked": ("Some text.\n".encode("utf-16-le"), r"looks like text in UTF-16, not UTF-8"),
  "utf32": ("Some text.\n".encode("utf-32"), r"text in UTF-32"),
  "gzip": (gzip.compress(b"Some text."), r"compressed by gzip, not UTF-8 text: gunzip"),
  "zstd": (zstandard.compress(b"Some text."), r"compressed by zstd"),
  "bzip2": (bz2.compress(b"Some text."), r"compressed by bzip2"),
  "xz": (lzma.compress(b"Some text."), r"compressed by xz"),
  "png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", r"a PNG image"),
  "jpeg": (b"\xff\xd8\xff\xe0\0\x10JFIF\0", r"a JPEG image"),
  "pdf": (b"%PDF-1.7\n\xb5\xed\xae\xfb\n", r"a PDF document"),
  "zip": (b"PK\x03\x04\x14\0\0\0", r"a zip archive"),
  "parquet": (b"PAR1\x15\x04\0\xff", r"a Parquet file, .*name it .parquet"),
  "tar": (b"a.txt" + b"\0" * 252 + b"ustar  \0" + b"\0" * 200, r"a tar archive"),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_file_that_is_no_text_is_called_what_it_is(tmp_path, name):
  """All of these were a "NUL byte in the text" or "invalid UTF-8"."""
  content, message = OTHER_FILES[name]
  for kind, file in (("text", "a.txt"), ("jsonl", "a.jsonl")):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=message) as refused:
      read(kind, tmp_path / file)
    assert file in str(refused.value)
    assert "\n" not in str(refused.value)


def test_nothing_but_bad_files_says_what_the_first_one_is(tmp_path):
  (tmp_path / "a.txt").write_bytes(gzip.compress(b"Some text."))
  config = DataConfig(path=str(tmp_path / "a.txt"), seq_len=8)
  with pytest.raises(DataError, match=r"\(1 bad row\); the first is .*a.txt:1: .* by gzip"):
    open_data(config, batch_size=1, seed=0)


@pytest.mark.parametrize("name", ["a.csv", "a.TSV", "a.json"])
def test_a_table_is_no_text_unless_it_is_said_to_be(tmp_path, name):
  """It trained on quotes and commas, and nothing showed it."""
  (tmp_path / name).write_text("text,label\n" + "".join(f'"row {i}",{i}\n' for i in range(99)))
  path = str(tmp_path / name)
  with pytest.raises(ConfigError, match=r"is a table \(\.\w+\), not plain text; .*source=text"):
    open_data(DataConfig(path=path, seq_len=8), batch_size=1, seed=0)
  with pytest.raises(ConfigError, match=r"data\.mixture: file=.* is a table"):
    parse_mixture(f"auto:{path}:1")
  asked = DataConfig(source="text", path=path, seq_len=8, document_bytes=100)
  assert open_data(asked, batch_size=1, seed=0).corpus.documents > 5


def test_damaged_compressed_files_name_their_line(tmp_path):
  packed = gzip.compress(lines_of(ROWS))
  (tmp_path / "a.jsonl.gz").write_bytes(packed[:-12])
  with pytest.raises(DataError, match=r"a\.jsonl\.gz:\d+: cannot be"):
    list(read_lines(tmp_path / "a.jsonl.gz"))
  (tmp_path / "b.jsonl.zst").write_bytes(b"this is not zstandard")
  with pytest.raises(DataError, match=r"b\.jsonl\.zst:1: cannot be decompressed"):
    list(read_lines(tmp_path / "b.jsonl.zst"))


def test_missing_inputs_are_named(tmp_path):
  with pytest.raises(DataError, match="does not exist; give a file, a folder or"):
    read("text", tmp_path / "nowhere")
  with pytest.raises(DataError, match=r"has no jsonl file; a file ending in .jsonl"):
    read("jsonl", tmp_path)
  with pytest.raises(DataError, match="a file matching it was expected"):
    read("text", f"{tmp_path}/*.txt")
  (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
  with pytest.raises(DataError, match=r"a\.parquet: not a readable parquet file"):
    read("parquet", tmp_path)
  pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
  with pytest.raises(DataError, match=r"no column data.field='text'; it has: body"):
    read("parquet", tmp_path)


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=200), st.integers(1, 40))
def test_pieces_of_a_text_join_to_it_and_stay_utf8(text, size):
  encoded = text.encode()
  pieces = list(sources.split_text(encoded, size))
  assert b"".join(pieces) == encoded
  for piece in pieces:
    piece.decode()
    assert len(piece) <= 2 * size + 4


def test_appending_to_a_text_keeps_its_earlier_pieces():
  text = b"".join(b"paragraph %d\n\n" % i for i in range(100))
  pieces = list(sources.split_text(text, 64))
  longer = list(sources.split_text(text + text, 64))
  assert len(pieces) > 10
  assert longer[: len(pieces) - 1] == pieces[:-1]
  assert all(piece.endswith(b"\n\n") for piece in pieces)


def test_a_mixture_is_one_string():
  assert parse_mixture("stdlib:0.7, jsonl:/data/a:b.jsonl:0.3") == [
    SourcePart("stdlib", "", 0.7),
    SourcePart("jsonl", "/data/a:b.jsonl", 0.3),
  ]


@pytest.mark.parametrize(
  ("mixture", "words"),
  [
    ("", "data.mixture='' is empty; write kind[:path]:weight"),
    ("stdlib", "'stdlib' has no weight; write kind[:path]:weight"),
    ("stdlib:x", "'stdlib:x' has no weight"),
    ("stdlib:0", "weight 0 of 'stdlib' must be above 0"),
    ("stdlib:-1", "weight -1 of 'stdlib' must be above 0"),
    ("stdlib:inf", "weight inf of 'stdlib' must be above 0"),
    ("books:1", "unknown source 'books'; one of: stdlib, text, jsonl, parquet, arrow, chat,"),
    ("mixture:1", "unknown source 'mixture'"),
    ("jsonl:1", "names no file; write jsonl:PATH:1"),
  ],
)
def test_mixture_errors(mixture, words):
  with pytest.raises(ConfigError) as error:
    DataConfig(source="mixture", mixture=mixture).check()
  assert words in str(error.value)
