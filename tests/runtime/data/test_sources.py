"""Every kind of source: all records, in order, and on from any position."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from patchgen.runtime.data import DataError, SourceConfig, builtin
from patchgen.runtime.data.builtin import NAMES, open_builtin
from patchgen.runtime.data.records import BadSample, Record
from patchgen.runtime.data.rows import RowMapper
from patchgen.runtime.data.sources import detect_format, open_source

ROWS = [{"text": f"row {number}"} for number in range(700)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same rows in every format, in two files where a format has files."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("sources")
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(folder / "saved"))
    datasets.DatasetDict({"train": table, "test": table.select(range(3))}).save_to_disk(str(folder / "splits"))
    for name, rows in (("one", ROWS[:300]), ("two", ROWS[300:])):
        (folder / "lines").mkdir(exist_ok=True)
        (folder / "lines" / f"{name}.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows))
        (folder / "parquet").mkdir(exist_ok=True)
        part = table.select(range(300)) if name == "one" else table.select(range(300, 700))
        part.to_parquet(str(folder / "parquet" / f"{name}.parquet"), batch_size=70)
    (folder / "texts").mkdir()
    for number, row in enumerate(ROWS):
        (folder / "texts" / f"{number:03}.txt").write_text(row["text"])
    return folder


CASES = {
    "lines": {},
    "lines/*.jsonl": {},
    "parquet": {},
    "texts": {},
    "saved": {},
    "splits": {},
    "saved streamed": {"streaming": True},
    "parquet as a streamed dataset": {"streaming": True, "format": "datasets"},
}


@pytest.mark.parametrize("case", CASES)
def test_all_rows_in_order_and_on_from_any_position(folder, case):
    source = open_source(SourceConfig(str(folder / case.split()[0]), **CASES[case]))
    found = [(record, json.loads(json.dumps(position))) for record, position in source.read()]
    assert [record.fields() for record, _ in found] == ROWS
    assert len({record.where for record, _ in found}) == len(ROWS)
    for number in (0, 1, 255, 256, 299, 300, 350, 600, 698):
        again = open_source(SourceConfig(str(folder / case.split()[0]), **CASES[case]))
        record, _ = next(again.read(found[number][1]))
        assert record == found[number + 1][0]
    assert list(source.read(found[-1][1])) == []
    assert json.loads(json.dumps(source.fingerprint())) == source.fingerprint()
    if not CASES[case]:
        assert len(source) == len(ROWS)
        assert [source[number].fields() for number in (0, 350, 699)] == [ROWS[0], ROWS[350], ROWS[699]]


def test_places_name_file_and_line(folder):
    source = open_source(SourceConfig(str(folder / "lines")))
    assert [source[number].where for number in (0, 1, 300)] == [
        f"{folder}/lines/one.jsonl:1",
        f"{folder}/lines/one.jsonl:3",  # every second line is empty
        f"{folder}/lines/two.jsonl:1",
    ]
    rows = [record.where for record, _ in open_source(SourceConfig(str(folder / "parquet"))).read()]
    assert rows[299:301] == [f"{folder}/parquet/one.parquet, row 300", f"{folder}/parquet/two.parquet, row 1"]


def test_formats_are_found_by_suffix(folder):
    assert [detect_format(str(folder / name)) for name in ("lines", "parquet", "texts", "saved", "splits")] == [
        "jsonl",
        "parquet",
        "text",
        "datasets",
        "datasets",
    ]
    assert detect_format("owner/name") == "datasets"
    with pytest.raises(DataError, match="has the splits train, test, not validation"):
        open_source(SourceConfig(str(folder / "splits"), split="validation"))


@pytest.mark.parametrize("pattern", ["*.csv", "*", "**/part?", "part[0-9]"])
def test_a_glob_without_a_known_suffix_is_not_looked_up_on_the_hub(folder, pattern):
    path = str(folder / "lines" / pattern)
    with pytest.raises(DataError, match=r"has no known suffix \(.jsonl.*To fix: set the source's format"):
        open_source(SourceConfig(path))
    if pattern == "*":
        assert len(open_source(SourceConfig(path, format="jsonl"))) == len(ROWS)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("asked", [{"split": "validation"}, {"subset": "en"}])
def test_a_split_or_subset_that_a_dataset_lacks_is_refused_with_the_source(folder, tmp_path, asked, streaming):
    """`datasets` raises a ValueError that does not name the source."""
    path = tmp_path / "data"
    path.mkdir()
    (path / "README.md").write_text("---\nconfigs:\n- config_name: de\n  data_files: one.jsonl\n---\n")
    (path / "one.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    source = {"subset": "de", "format": "datasets", "streaming": streaming}
    assert len(list(open_source(SourceConfig(str(path), **source)).read())) == 1
    told = "validation" if "split" in asked else "en"
    with pytest.raises(
        DataError, match=rf"{path} cannot be loaded with split = .*{told}[\s\S]*To fix: set data.sources"
    ):
        open_source(SourceConfig(str(path), **{**source, **asked}))


@pytest.mark.parametrize("name", ["saved", "splits"])
def test_a_subset_of_a_saved_dataset_is_refused(folder, name):
    """It was ignored."""
    with pytest.raises(DataError, match="has no subsets, and the source has subset = en"):
        open_source(SourceConfig(str(folder / name), subset="en"))


@pytest.mark.parametrize("asked", [{"split": "validation"}, {"subset": "en"}])
@pytest.mark.parametrize("name", ["lines", "parquet", "texts"])
def test_a_split_of_files_that_have_none_is_refused(folder, name, asked):
    with pytest.raises(DataError, match="have no splits or subsets.*(split = validation|subset = en)"):
        open_source(SourceConfig(str(folder / name), **asked))


def test_a_split_of_one_saved_dataset_is_refused(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    assert len(open_source(SourceConfig(str(tmp_path / "saved")))) == 1
    with pytest.raises(DataError, match="has no splits, and the source has split = test"):
        open_source(SourceConfig(str(tmp_path / "saved"), split="test"))


@pytest.mark.parametrize(
    "value", [b'{"text": "\\ud83d"}', b'{"list": [{"text": "a\xed\xa0\xbd"}]}', {"text": "\ud83d", "image": b"\xff"}]
)
def test_a_lone_surrogate_is_a_bad_sample_with_its_place(value):
    with pytest.raises(BadSample, match=r"a.jsonl:3: not readable: '\\ud83d' in a text"):
        Record("a.jsonl:3", value).fields()


def test_a_cut_line_is_named_by_what_is_missing():
    with pytest.raises(BadSample, match="a.jsonl:3: not readable: Unterminated string"):
        Record("a.jsonl:3", b'{"text": "abc\n').fields()


def test_values_that_are_no_text_pass():
    fields = {"text": "\U0001f600", "image": b"\xff", "when": Path("a"), 3: None}
    assert Record("a, row 1", fields).fields() is fields


def test_text_that_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(BadSample, match="a.txt: not readable"):
        Record("a.txt", tmp_path / "a.txt").fields()


@pytest.mark.parametrize("name", NAMES)
def test_made_up_sets_are_there_in_every_installation(name):
    train, validation = open_builtin(name, "train"), open_builtin(name, "validation")
    assert len(train) > 15 * len(validation) > 0
    first = train[0].fields()
    if name == "stdlib":
        assert not set(train.files) & set(validation.files)
        assert any("json" in Path(file).parts for file in train.files)
        return
    assert not set(train.numbers) & set(validation.numbers)
    of_texts = {"prompts": "text", "labels": "classification", "tags": "token_classes", "answers": "answers"}
    of_texts["similar"] = "similar"
    kind = (of_texts | {"chat": "chat", "pairs": "preference"}).get(name, "multimodal")
    fields = RowMapper(SourceConfig(f"builtin:{name}"), kind)("x", first)
    if kind not in of_texts.values():
        assert fields["chosen" if kind == "preference" else "messages"][-1]["role"] == "assistant"
    assert repr(train[5].fields()) == repr(open_builtin(name, "train")[5].fields())


def test_made_up_texts_are_named_by_what_they_are_made_of(monkeypatch):
    """Documented functions are those of the Python at hand: tokens of another one's must not be taken for theirs."""
    here = open_builtin("pairs", "train").fingerprint()
    changed = [(signature, f"{docs}!") for signature, docs in builtin.documented_functions()]
    monkeypatch.setattr(builtin, "documented_functions", lambda: changed)
    assert open_builtin("pairs", "train").fingerprint() != here


def test_a_media_folder_that_is_missing_is_named(tmp_path):
    source = SourceConfig("builtin:vision", media_root=str(tmp_path / "images"))
    with pytest.raises(
        DataError, match=r"media_root of builtin:vision, .*images, is not a folder. To fix: name the folder"
    ):
        open_source(source)


def test_media_of_parquet_are_not_decoded_and_rows_are_named_by_their_file(tmp_path):
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    for name, texts in (("a", ["1", "2"]), ("b", ["3"])):
        rows = {"text": texts, "image": [{"bytes": b"no image", "path": None}] * len(texts)}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{name}.parquet")
    source = open_source(SourceConfig(str(tmp_path)))
    records = [source[number] for number in range(len(source))]
    assert [record.where for record in records] == [record.where for record, _ in source.read()]
    assert records[2].where == f"{tmp_path}/b.parquet, row 1"
    assert [record.fields()["text"] for record in records] == ["1", "2", "3"]
    assert records[2].fields()["image"]["bytes"] == b"no image"


@pytest.mark.parametrize("streaming", [False, True])
def test_media_inside_lists_and_mappings_are_not_decoded_either(tmp_path, streaming):
    """One that cannot be read ended the iteration."""
    import datasets

    image = {"bytes": b"no image", "path": None}
    nested = {"parts": datasets.List({"type": datasets.Value("string"), "image": datasets.Image(mode="RGB")})}
    features = datasets.Features(
        {"text": datasets.Value("string"), "nested": nested, "lists": datasets.List(datasets.List(datasets.Image()))}
    )
    rows = {"text": ["1"], "nested": [{"parts": [{"type": "image", "image": image}]}], "lists": [[[image], []]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    source = open_source(SourceConfig(str(tmp_path / "saved"), streaming=streaming))
    ((record, _),) = source.read()
    assert record.fields()["nested"]["parts"][0]["image"]["bytes"] == b"no image"
    assert record.fields()["lists"][0][0]["bytes"] == b"no image"


def test_the_validation_split_has_all_cases():
    def messages(name):
        source = open_builtin(name, "validation")
        return [source[number].fields()["messages"] for number in range(len(source))]

    labels = open_builtin("labels", "validation")
    found = [labels[number].fields() for number in range(len(labels))]
    assert {fields["label"] for fields in found} == {0, 1}
    assert all(fields["label"] == (fields["text"] == fields["text"].upper()) for fields in found)
    for name, kind in (("vision", "image"), ("audio", "audio")):
        counts = {sum(part["type"] == kind for part in sample[0]["content"]) for sample in messages(name)}
        assert counts == {1, 2}
    kinds = {
        frozenset(part["type"] for message in sample for part in message["content"]) for sample in messages("omni")
    }
    assert len(kinds) == 5
    train = open_builtin("omni", "train")
    assert train.numbers == [number for number in range(2000) if number % 20]


def test_files_that_datasets_cannot_read_are_told_as_such(tmp_path):
    """The advice was to set a split and a subset."""
    pytest.importorskip("datasets")
    path = tmp_path / "data"
    path.mkdir()
    (path / "one.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(
        DataError, match=rf"The files of {path} cannot be read by datasets: .*To fix: repair or remove"
    ):
        open_source(SourceConfig(str(path), format="datasets"))


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "free space there"), (errno.EFBIG, r"raise the limit on the size of files \(.*\)")],
)
def test_a_full_disk_under_the_cache_of_datasets_is_told_as_such(number, advice, tmp_path, monkeypatch):
    """datasets wraps it into the error of files that it cannot read, so the advice was to repair them."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def full(self, *args, **options):
        raise OSError(number, "Error writing bytes to file")  # as pyarrow does

    monkeypatch.setattr(datasets.arrow_writer.ArrowWriter, "write_table", full)
    path = tmp_path / "data"
    path.mkdir()
    (path / "one.jsonl").write_text('{"text": "a"}\n' * 2)
    with pytest.raises(
        DataError,
        match=rf"^{path} does not fit into the cache of datasets, {tmp_path / 'cache'}: {os.strerror(number)}. "
        rf"To fix: {advice}, or set HF_HOME",
    ):
        open_source(SourceConfig(str(path), format="datasets"))
