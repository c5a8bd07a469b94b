"""Rows from Arrow against the same rows from JSON lines: the keys that their author wrote, and no others."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import make_corpus
from jinja2 import Environment

from patchgen.runtime.data import DataConfig, SourceConfig, build_loader
from patchgen.runtime.data.config import Kind
from patchgen.runtime.data.hub import HubStream
from patchgen.runtime.data.sources import open_source

datasets = pytest.importorskip("datasets")
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning_content %}(think {{ message.reasoning_content }}){% endif %}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content or [] %}{% if 'image' in part %}PICTURE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "<end>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tool(name: str, parameter: str) -> dict:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(name: str, parameter: str) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": {parameter: "1"}}}


CHATS = [
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "ok"}], "tool_calls": [call("f", "a")]},
            {"role": "tool", "name": "f", "content": [{"type": "text", "text": "one"}]},
            {"role": "assistant", "reasoning_content": "so", "content": [{"type": "text", "text": "Hello"}]},
        ],
        "tools": [tool("f", "a")],
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Hey"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "yes"}], "tool_calls": [call("g", "b")]},
        ],
        "tools": [tool("g", "b")],
    },
]
TURNS = [
    {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"a": None}})},
            {"from": "gpt", "value": "Hello", "weight": 1},
        ],
        "tools": [tool("f", "a")],
    },
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hey"}], "tools": [tool("g", "b")]},
]
PAIRS = [
    {
        "prompt": CHATS[number]["messages"][:1],
        "chosen": [{"role": "assistant", "content": "Yes", "tool_calls": [call(*names)]}],
        "rejected": [{"role": "assistant", "content": "No", "reasoning_content": "hm"}],
        "tools": [tool(*names)],
    }
    for number, names in enumerate([("f", "a"), ("g", "b")])
]
ROWS: dict[str, tuple[Kind, list[dict]]] = {
    "messages": ("chat", CHATS),
    "sharegpt": ("chat", TURNS),
    "preference": ("preference", PAIRS),
}


def without_images(value: Any) -> Any:
    """Rows without parts with an image, which only data.kind = multimodal reads."""
    if isinstance(value, dict):
        return {key: without_images(part) for key, part in value.items()}
    if isinstance(value, list):
        return [without_images(part) for part in value if not (isinstance(part, dict) and part.get("type") == "image")]
    return value


def write_forms(folder: Path, rows: list[dict]) -> dict[str, SourceConfig]:
    """The rows in each form that is read through Arrow, and as JSON lines."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(folder / "rows.parquet"))
    table.save_to_disk(str(folder / "saved"))
    (folder / "hub").mkdir()
    (folder / "hub" / "rows.jsonl").write_text((folder / "rows.jsonl").read_text())
    return {
        "jsonl": SourceConfig(str(folder / "rows.jsonl")),
        "parquet": SourceConfig(str(folder / "rows.parquet")),
        "parquet streamed": SourceConfig(str(folder / "rows.parquet"), format="parquet", streaming=True),
        "saved": SourceConfig(str(folder / "saved")),
        "saved streamed": SourceConfig(str(folder / "saved"), streaming=True),
        "json by datasets": SourceConfig(str(folder / "hub"), format="datasets"),
        "json by datasets, streamed": SourceConfig(str(folder / "hub"), format="datasets", streaming=True),
    }


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_all_forms_are_what_was_written(tmp_path, case):
    """Keys of other rows came back as null, at any depth."""
    rows = ROWS[case][1]
    for form, config in write_forms(tmp_path, rows).items():
        source = open_source(config)
        for opened in (source, pickle.loads(pickle.dumps(source))):
            assert [record.fields() for record, _ in opened.read()] == rows, form
        if hasattr(source, "__getitem__"):
            assert [source[number].fields() for number in range(len(rows))] == rows, form


@pytest.mark.parametrize("case", ROWS)
def test_labels_of_all_forms_are_equal(tmp_path, case):
    """The call of the other row's argument was learned: {"a": "1", "b": null}."""
    tokenizer = make_corpus(tmp_path)[1]
    tokenizer.chat_template = TEMPLATE
    kind, rows = ROWS[case]
    rows = without_images(rows)
    encoded = {}
    for form, source in write_forms(tmp_path, rows).items():
        config = DataConfig(
            sources=(source,), kind=kind, epochs=1, shuffle=False, packing=False, cache_dir=str(tmp_path / "cache")
        )
        loader = build_loader(config, tokenizer=tokenizer, batch_index=0, num_batches=1, agree=int)
        batches = list(loader)
        encoded[form] = {name: torch.cat([batch[name] for batch in batches], -1) for name in ("input_ids", "labels")}
    for form, fields in encoded.items():
        for name, expected in encoded["jsonl"].items():
            assert torch.equal(fields[name], expected), f"{name} of {form}: {tokenizer.decode(fields['input_ids'][0])}"
    text = tokenizer.decode(encoded["jsonl"]["input_ids"][0])
    # What the author of a JSON text wrote as null stays null.
    assert text.count("null") == (1 if case == "sharegpt" else 0)


def test_nulls_that_are_no_padding_stay(tmp_path):
    """In JSON lines all of them; from Arrow those of columns, of lists, and of values that are stored as JSON."""
    schema = {"type": "string", "default": None, "enum": ["a", None]}
    rows = [{"messages": None, "tools": [{"name": "f", "parameters": schema}], "other": [None, {"a": 1}]}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    record, _ = next(open_source(SourceConfig(str(tmp_path / "rows.jsonl"))).read())
    assert record.fields() == rows[0]
    features = datasets.Features(
        {
            "messages": datasets.List({"role": datasets.Value("string")}),
            "tools": datasets.List({"name": datasets.Value("string"), "parameters": datasets.Json()}),
            "other": datasets.List({"a": datasets.Value("int64"), "b": datasets.Value("int64")}),
        }
    )
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    for path in ("rows.parquet", "saved"):
        source = open_source(SourceConfig(str(tmp_path / path)))
        assert next(source.read())[0].fields() == source[0].fields() == rows[0], path


def test_a_stream_of_unknown_columns_loses_its_padding():
    """`datasets` does not know the columns of every stream."""
    padded = [{"messages": [{"role": "user", "content": "Hi", "name": None}], "system": None}]
    stream = datasets.Dataset.from_list(padded).to_iterable_dataset()
    stream.info.features = None
    assert stream.features is None
    record, _ = next(HubStream(stream, "stream").read())
    assert record.fields() == {"messages": [{"role": "user", "content": "Hi"}], "system": None}


def test_a_transform_sees_the_keys_that_were_written(tmp_path):
    (tmp_path / "own.py").write_text("def keys(row):\n    return ' '.join(sorted(row['meta']))\n")
    rows = [{"meta": {"a": "1"}}, {"meta": {"b": "2"}}]
    tokenizer = make_corpus(tmp_path)[1]
    sources = write_forms(tmp_path, rows)
    texts = []
    for form in ("jsonl", "parquet", "saved"):
        config = DataConfig(
            sources=(replace(sources[form], transform=f"{tmp_path / 'own.py'}:keys"),),
            epochs=1,
            shuffle=False,
            packing=False,
            append_eos=False,
            cache_dir=str(tmp_path / "cache"),
        )
        batches = list(build_loader(config, tokenizer=tokenizer, batch_index=0, num_batches=1, agree=int))
        texts.append([tokenizer.decode(batch["input_ids"][0]) for batch in batches])
    assert texts == [["ab"]] * 3


def test_the_template_of_these_tests_counts_pictures_by_their_key():
    render = Environment().from_string(TEMPLATE).render
    assert "PICTURE" in render(messages=[{"role": "user", "content": [{"type": "text", "text": "a", "image": None}]}])
