"""Tables as text: columns that a screen has no room for follow below."""

from scmoe.reports.tables import Table


def test_a_wide_table_goes_on_below_with_its_first_column():
  heads = ("router", *(f"figure {i}" for i in range(10)))
  rows = tuple((f"layer {n}", *(f"{n + i / 10:.3f}" for i in range(10))) for n in (1, 3))
  lines = Table("a run", heads, rows).text(60).splitlines()
  assert lines[0] == "a run"
  assert max(map(len, lines)) <= 60
  parts = "\n".join(lines[1:]).split("\n\n")
  assert len(parts) == 2
  for part in parts:
    assert [line[:7].strip() for line in part.splitlines()] == ["router", "layer 1", "layer 3"]
  text = "\n".join(lines)
  for row in (heads, *rows):
    for cell in row:
      assert cell in text


def test_columns_that_name_a_row_begin_every_part():
  heads = ("wiring", "link", "throughput", "effective")
  rows = (("pos2", "slow", "1.33", "1.24"), ("pos2", "fast", "1.01", "0.94"))
  lines = Table("t", heads, rows, keys=2).text(24).splitlines()
  assert lines[1:] == [
    "wiring  link  throughput",
    "pos2    slow        1.33",
    "pos2    fast        1.01",
    "",
    "wiring  link  effective",
    "pos2    slow       1.24",
    "pos2    fast       0.94",
  ]


def test_a_narrow_table_is_one_part():
  assert Table("t", ("a", "b"), (("x", "1.5"),)).text() == "t\na    b\nx  1.5"


def test_a_column_wider_than_the_screen_stands_alone():
  lines = Table("t", ("a", "b" * 90, "c" * 90), (("x", "1", "2"),)).text(80).splitlines()
  assert [line.split()[0] for line in lines[1:] if line] == ["a", "x", "a", "x"]
