"""JSON as people ship it: lines, arrays, an object with an array; compressed, in UTF-16; all give the same rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from patchgen.runtime.data import DataError, SourceConfig
from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.sources import detect_format, open_source

ROWS = [{"text": f"Zeile {number}\nä", "data": None if number % 2 else [{"a": None}]} for number in range(300)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS[1:])
ARRAY = json.dumps(ROWS[1:], ensure_ascii=False)
PRETTY = json.dumps(ROWS[1:], ensure_ascii=False, indent=2)
WRAPPED = json.dumps({"version": "1", "data": ROWS[1:]}, ensure_ascii=False)
FILES = {
    "lines.jsonl": LINES.encode(),
    "lines.json": LINES.encode(),
    "lines, blank ones first.jsonl": b"\n \n" + LINES.encode(),
    "lines, mark.jsonl": LINES.encode("utf-8-sig"),
    "array.json": ARRAY.encode(),
    "array.jsonl": ARRAY.encode(),
    "array, mark.json": ARRAY.encode("utf-8-sig"),
    "pretty array.json": b"\n\n" + PRETTY.encode(),
    "wrapped.json": WRAPPED.encode(),
    "pretty wrapped.json": json.dumps({"data": ROWS[1:]}, indent=1).encode(),
    "lines in utf-16.jsonl": LINES.encode("utf-16"),
    "lines in utf-16 without mark.jsonl": LINES.encode("utf-16-be"),
    "lines in utf-32.jsonl": LINES.encode("utf-32"),
    "array in utf-16.json": PRETTY.encode("utf-16"),
    "lines.jsonl.gz": gzip.compress(LINES.encode()),
    "lines in utf-16.jsonl.gz": gzip.compress(LINES.encode("utf-16")),
    "array.json.gz": gzip.compress(PRETTY.encode()),
    "compressed, without saying so.jsonl": gzip.compress(LINES.encode()),
}


@pytest.mark.parametrize("name", FILES)
def test_rows_of_every_form_in_order_at_random_and_from_any_position(tmp_path, name):
    """All but the first two were bad samples, or no known files."""
    (tmp_path / name).write_bytes(FILES[name])
    source = open_source(SourceConfig(str(tmp_path / name)))
    assert_rows(source, ROWS[1:])


def assert_rows(source, rows):
    found = [(record, json.loads(json.dumps(position))) for record, position in source.read()]
    assert [record.fields() for record, _ in found] == rows
    assert len({record.where for record, _ in found}) == len(source) == len(rows)
    assert [source[number] for number in (0, 7, len(rows) - 1)] == [
        found[number][0] for number in (0, 7, len(rows) - 1)
    ]
    for number in (0, 7, len(rows) - 2):
        assert next(source.read(found[number][1]))[0] == found[number + 1][0]
    assert list(source.read(found[-1][1])) == []


def test_files_of_all_forms_in_one_folder_are_one_source(tmp_path):
    for number, (name, content) in enumerate(FILES.items()):
        (tmp_path / f"{number:02} {name}").write_bytes(content)
    assert detect_format(str(tmp_path)) == "jsonl"
    assert_rows(open_source(SourceConfig(str(tmp_path))), ROWS[1:] * len(FILES))
    assert len(open_source(SourceConfig(str(tmp_path / "*.json.gz"))).files) == 1


def test_places_of_an_array_name_file_and_row(tmp_path):
    (tmp_path / "rows.json").write_text('[{"text": "a"}, 5]')
    (first, _), (second, _) = open_source(SourceConfig(str(tmp_path / "rows.json"))).read()
    assert first.where == f"{tmp_path}/rows.json, row 1"
    with pytest.raises(BadSample, match=r"rows.json, row 2: expected one JSON object, found int"):
        second.fields()


def test_an_object_with_data_in_lines_is_a_sample(tmp_path):
    """Only a file that is named .json may be one object with all rows."""
    row = {"data": [{"text": "a"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert [record.fields() for record, _ in open_source(SourceConfig(str(tmp_path / "rows.jsonl"))).read()] == [row]
    (tmp_path / "rows.json").write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    assert [record.fields() for record, _ in open_source(SourceConfig(str(tmp_path / "rows.json"))).read()] == [
        row
    ] * 2


@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_in_data_is_a_field_unless_it_has_objects(tmp_path, indent):
    """`1` was taken for the row, and the messages beside it were lost."""
    row = {"data": [1], "messages": [{"role": "user", "content": "Hi"}]}
    (tmp_path / "rows.json").write_text(json.dumps(row, indent=indent))
    source = open_source(SourceConfig(str(tmp_path / "rows.json")))
    if indent is None:
        assert [record.fields() for record, _ in source.read()] == [row]
    else:
        with pytest.raises(DataError, match="holds one JSON object over several lines, with data, messages"):
            list(source.read())


def test_broken_lines_are_bad_samples_also_the_first(tmp_path):
    for name, first in (("a.jsonl", '{"text": '), ("b.json", '{"text": '), ("c.jsonl", "[1, 2]")):
        (tmp_path / name).write_text(f'{first}\n{{"text": "b"}}\n')
        (broken, _), (right, _) = open_source(SourceConfig(str(tmp_path / name))).read()
        assert right.fields() == {"text": "b"}
        with pytest.raises(BadSample, match=f"{name}:1: (not readable|expected one JSON object)"):
            broken.fields()


BROKEN = {
    "array.json": (
        b'[{"text": "a"},\n{"text": "b"}\n{"text": "c"}]',
        r"array.json:3: not a valid JSON array: .*To fix: ",
    ),
    "object.json": (
        b'{\n "text": "a"\n}',
        "one JSON object over several lines, with text; expected a list of objects",
    ),
    "cut.jsonl.gz": (gzip.compress(LINES.encode())[:-20], "cut.jsonl.gz is compressed and damaged: .*To fix: "),
    "damaged.jsonl.gz": (b"\x1f\x8b" + b"\x08" * 50, "damaged.jsonl.gz is compressed and damaged"),
    "half.jsonl": (LINES.encode("utf-16")[:-1], "half.jsonl begins as utf-16, but .*truncated data. To fix: "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_cannot_be_read_are_refused_with_their_name(tmp_path, name):
    content, reason = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    source = open_source(SourceConfig(str(tmp_path / name)))
    with pytest.raises(DataError, match=reason):
        list(source.read())
    with pytest.raises(DataError, match=reason):
        len(source)


@pytest.mark.parametrize("form", ["lines", "array", "text"])
def test_files_of_zstd_are_read_or_named(tmp_path, form):
    """Read with the package zstandard; without it, the error names it."""
    suffix, content = {"lines": ("jsonl", LINES), "array": ("json", ARRAY), "text": ("txt", "ä")}[form]
    file = tmp_path / f"rows.{suffix}.zst"
    try:
        import zstandard
    except ImportError:
        file.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(9))
        with pytest.raises(
            DataError, match=r"rows.*zst is compressed by zstd, .* pip install zstandard, or decompress"
        ):
            [record.fields() for record, _ in open_source(SourceConfig(str(file))).read()]
        return
    half = len(content) // 2
    file.write_bytes(b"".join(zstandard.compress(part.encode()) for part in (content[:half], content[half:])))
    records = [record.fields() for record, _ in open_source(SourceConfig(str(file))).read()]
    assert records == ([{"text": "ä"}] if form == "text" else ROWS[1:])
    file.write_bytes(file.read_bytes()[:-3])
    if form != "text":
        with pytest.raises(DataError, match="is compressed and damaged"):
            list(open_source(SourceConfig(str(file))).read())


def test_texts_of_every_encoding_are_read(tmp_path):
    """A byte order mark was a character of the text, UTF-16 a bad sample."""
    contents = {
        "a.txt": "ä".encode(),
        "b.txt": "ä".encode("utf-8-sig"),
        "c.txt": "ä b".encode("utf-16"),
        "d.txt.gz": gzip.compress("ä".encode()),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress(b"a")[:-9])
    *records, damaged = (record for record, _ in open_source(SourceConfig(str(tmp_path))).read())
    assert [record.fields()["text"] for record in records] == ["ä", "ä", "ä b", "ä"]
    with pytest.raises(BadSample, match=r"e.txt.gz: not readable: .* compressed and damaged"):
        damaged.fields()


def test_compressed_parquet_is_no_known_format(tmp_path):
    Path(tmp_path / "rows.parquet.gz").write_bytes(b"x")
    with pytest.raises(DataError, match=r"has no known suffix .*text also with .gz or .zst after it.*decompress"):
        open_source(SourceConfig(str(tmp_path / "rows.parquet.gz")))
