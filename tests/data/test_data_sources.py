"""Sources: what is read, in which order, and what becomes of bad rows."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from scmoe.base.errors import ConfigError, DataError
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
    ("books:1", "unknown source 'books'; one of: stdlib, text, jsonl, parquet, arrow, procedural"),
    ("mixture:1", "unknown source 'mixture'"),
    ("jsonl:1", "names no file; write jsonl:PATH:1"),
  ],
)
def test_mixture_errors(mixture, words):
  with pytest.raises(ConfigError) as error:
    DataConfig(source="mixture", mixture=mixture).check()
  assert words in str(error.value)
