"""What is shown is what is trained: beside labels that transformers marks, and the page beside the batch."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from small_processors import byte_tokenizer, image_processor, template
from typer.testing import CliRunner

from patchgen.cli import app
from patchgen.runtime.data import DataConfig, SourceConfig, build_loader
from patchgen.runtime.data.decoder import REPLACEMENT_CHARACTER, Decoder
from patchgen.runtime.data.multimodal import PrepareMultimodal
from patchgen.runtime.data.preview import Preview, histogram, make_preview
from patchgen.runtime.data.preview_page import as_page
from patchgen.runtime.data.preview_text import CLOSE, LINE_END, OPEN, as_text
from patchgen.runtime.data.roles import TEMPLATE

MARKED, PLAIN = byte_tokenizer(template(), {}), byte_tokenizer(template(marked=False), {})
CHAT = [
    {"role": "system", "content": "Be <b>kind</b> & brief."},
    {"role": "user", "content": "Hi, 日本?\nTwo lines."},
    {"role": "assistant", "content": "Ja 🙂"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "No\nmore."},
]
SHAREGPT = {"user": "human", "assistant": "gpt", "system": "system"}
ROWS = {
    "messages": {"messages": CHAT},
    "sharegpt": {"conversations": [{"from": SHAREGPT[one["role"]], "value": one["content"]} for one in CHAT]},
    "alpaca": {
        "system": CHAT[0]["content"],
        "history": [[CHAT[1]["content"], CHAT[2]["content"]]],
        "instruction": "And?",
        "output": "No\nmore.",
    },
    "prompt_completion": {"prompt": CHAT[:2], "completion": CHAT[2:]},
}


def preview_of(folder: Path, kind: str, rows: list[dict], tokenizer=PLAIN, **changes) -> Preview:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"tokens_per_batch": 600, "epochs": 1, "shuffle": False, "cache_dir": str(folder / "cache"), **changes}
    streaming = values.pop("streaming", False)
    config = DataConfig(sources=(SourceConfig(str(folder / "rows.jsonl"), streaming=streaming),), kind=kind, **values)
    loader = build_loader(config, tokenizer=tokenizer, batch_index=0, num_batches=1, agree=int)
    return make_preview(loader, config, tokenizer, rows=9)


def told(document) -> tuple[str, str]:
    """All of a document, and what of it is learned."""
    units = [unit for run in document.role_runs for unit in run.units]
    return "".join(unit.text for unit in units), "".join(unit.text for unit in units if unit.learned)


def marked_by_transformers(messages: list[dict]) -> tuple[str, str]:
    """The same by transformers alone, of a template with marks: another tokenizer, another way."""
    found = MARKED.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = (np.array(found[name]) for name in ("input_ids", "assistant_masks"))
    return MARKED.decode(ids), MARKED.decode(ids[mask.astype(bool)])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_what_is_learned_is_what_transformers_marks(tmp_path, name, streaming):
    preview = preview_of(tmp_path, "chat", [ROWS[name]], streaming=streaming)
    ((document,),) = [row.documents for row in preview.rows]
    assert told(document) == marked_by_transformers(CHAT)
    assert document.where == f"{tmp_path / 'rows.jsonl'}:1"
    words = {role: [] for role in ("system", "user", "assistant", TEMPLATE)}
    for run in document.role_runs:
        words[run.role].append("".join(unit.text for unit in run.units))
    contents = {
        role: [one["content"] for one in CHAT if one["role"] == role] for role in ("system", "user", "assistant")
    }
    assert words["system"] == contents["system"]
    assert words["user"] == contents["user"]
    assert words["assistant"] == [f"{text}<|im_end|>" for text in contents["assistant"]]
    assert (
        preview.figures[0].learned == document.learned == sum(len(text.encode()) + 1 for text in contents["assistant"])
    )
    assert (preview.figures[0].tokens, preview.scope) == (
        document.tokens,
        "the 1 rows shown" if streaming else "all samples",
    )


def test_halves_of_pairs_and_labels_are_shown(tmp_path):
    pair = {"chosen": CHAT, "rejected": [*CHAT[:2], {"role": "assistant", "content": "Nein"}]}
    (row,) = preview_of(tmp_path, "preference", [pair], tokens_per_batch=900).rows
    assert [(one.half, one.where[-1]) for one in row.documents] == [("chosen", "1"), ("rejected", "1")]
    assert told(row.documents[0]) == marked_by_transformers(pair["chosen"])
    assert told(row.documents[1]) == marked_by_transformers(pair["rejected"])
    (row,) = preview_of(tmp_path, "classification", [{"text": "good", "label": 2}], pad_batches=True).rows
    assert [(one.label, one.source, one.tokens) for one in row.documents[1:]] == [(None, "", 595)]
    assert row.documents[0].label == 2
    assert "label 2" in as_text(preview_of(tmp_path, "classification", [{"text": "good", "label": 2}]), colour=False)


def test_texts_and_prompts_are_shown(tmp_path):
    rows = [{"text": "abc"}, {"text": "é"}]
    documents = preview_of(tmp_path, "text", rows).rows[0].documents
    assert [told(one) for one in documents] == [("abc<|im_end|>", "bc<|im_end|>"), ("é<|im_end|>", "é<|im_end|>")]
    (row,) = preview_of(tmp_path, "text", [{"prompt": "2 + 2 = ", "completion": "4"}]).rows
    assert told(row.documents[0]) == ("2 + 2 = 4<|im_end|>", "4<|im_end|>")


@pytest.mark.parametrize(
    ("kind", "on_long"),
    [("text", "split"), ("text", "truncate"), ("text", "skip"), ("chat", "truncate"), ("chat", "skip")],
)
def test_figures_of_all_samples_are_those_of_all_rows(tmp_path, kind, on_long):
    rows = [{"text": "a" * count} for count in (1, 70, 12, 31, 30, 64)]
    if kind == "chat":
        rows = [{"messages": [CHAT[1], {"role": "assistant", "content": row["text"]}]} for row in rows]
    preview = preview_of(
        tmp_path, kind, rows, tokens_per_batch=100, max_length=30 if kind == "text" else 90, on_long=on_long
    )
    documents = [document for row in preview.rows for document in row.documents]
    assert preview.figures[0].documents == len(documents)
    assert preview.figures[0].tokens == sum(document.tokens for document in documents)
    assert preview.figures[0].learned == sum(document.learned for document in documents)
    assert sum(count for _, _, count in preview.histogram) == len(documents)
    assert bool(preview.problems) == (on_long != "split")


class Page(HTMLParser):
    """The text of each document of a page, and what of it is marked as learned; whatever asks for another file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.documents, self.asked, self._classes = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.asked += [
            value for name, value in attributes.items() if name in ("src", "href") and not value.startswith("#")
        ]
        self._tag, classes = tag, (attributes.get("class") or "").split()
        if tag == "article":
            self.documents.append(["", ""])
        if tag not in ("meta", "br"):
            self._classes.append((tag, classes))

    def handle_endtag(self, tag):
        while self._classes and self._classes.pop()[0] != tag:
            pass

    def handle_data(self, data):
        unit = next((classes for tag, classes in reversed(self._classes) if tag == "i"), None)
        if unit is None or not self.documents:
            return
        self.documents[-1][0] += data.replace(LINE_END, "")
        self.documents[-1][1] += data.replace(LINE_END, "") if "l" in unit else ""


def test_the_page_and_the_text_show_the_same_and_need_nothing_else(tmp_path):
    preview = preview_of(tmp_path, "chat", [ROWS["messages"], ROWS["sharegpt"]], pad_batches=True)
    html = as_page(preview, title="my <run>")
    page = Page(html)
    expected = list(marked_by_transformers(CHAT))
    assert page.documents == [expected, expected, ["", ""]]
    assert page.asked == []
    assert not re.search(r"https?://|@import|url\(", html)
    assert "<title>my &lt;run&gt;: tokens with loss</title>" in html
    text = as_text(preview, colour=False)
    learned = "".join(re.findall(f"{OPEN}(.*?){CLOSE}", re.sub(r"\n +│ ", "", text), re.DOTALL)).replace(
        LINE_END, "\n"
    )
    assert learned == expected[1] * 2
    coloured = as_text(preview, colour=True)
    assert "\x1b[32m" in coloured
    assert OPEN not in coloured


def test_images_are_one_unit_with_their_number_of_tokens(tmp_path):
    Image.new("RGB", (30, 30)).save(tmp_path / "x.png")
    row = {
        "messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}],
        "image": "x.png",
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = DataConfig(
        sources=(SourceConfig(str(tmp_path / "rows.jsonl")),), kind="multimodal", tokens_per_batch=400, epochs=1
    )
    processor = image_processor()
    loader = build_loader(config, processor=processor, batch_index=0, num_batches=1, agree=int)
    preparer = PrepareMultimodal(config, processor, None)
    preview = make_preview(loader, config, processor.tokenizer, rows=1, processor=processor, preparer=preparer)
    (document,) = preview.rows[0].documents
    items = [(unit.item, len(unit.ids)) for run in document.role_runs for unit in run.units if unit.item]
    assert items == [("image", 4)]
    assert told(document)[1] == "A cat.<|im_end|>"
    assert [run.role for run in document.role_runs if run.role != TEMPLATE] == ["user", "assistant"]
    assert preview.rows[0].fields["pixel_values"][0] == 1
    assert "[image: 4 tokens]" in as_text(preview, colour=False)
    assert "image × 4" in as_page(preview, title="x")


@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_the_units_of_a_text_are_its_characters(text):
    ids = MARKED(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    decoder = Decoder(MARKED)
    units = [unit for run in decoder.role_runs(ids, [False] * len(ids), [None] * len(ids), None) for unit in run.units]
    assert [one for unit in units for one in unit.ids] == ids
    assert "".join(unit.text for unit in units) == text


@given(st.lists(st.integers(1, 5000), max_size=50))
def test_each_length_is_counted_in_its_bin(lengths):
    found = histogram(np.array(lengths, dtype=np.int32))
    assert sum(count for _, _, count in found) == len(lengths)
    for first, last, count in found:
        assert count == sum(first <= length <= last for length in lengths)
    assert not found or (found[0][2] and found[-1][2])


def test_the_command_shows_the_rows_of_a_run(tmp_path):
    folder = tmp_path / "model"
    PLAIN.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "vocab_size": 300}))
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS["messages"]) + "\n")
    recipe = tmp_path / "mine.yaml"
    data = {"kind": "chat", "sources": [{"path": str(tmp_path / "rows.jsonl")}], "cache_dir": str(tmp_path / "cache")}
    recipe.write_text(json.dumps({"model": {"source": str(folder)}, "data": {**data, "tokens_per_batch": 600}}))
    found = CliRunner().invoke(app, ["data", str(recipe), "--rows", "2"], catch_exceptions=False).output
    assert "row 2 of 2   " in found
    assert " tokens of at most 600   " in found
    assert f"{OPEN}No{LINE_END}\n" in found
    CliRunner().invoke(app, ["data", str(recipe), "--html", str(tmp_path / "page.html")], catch_exceptions=False)
    assert list(marked_by_transformers(CHAT)) in Page((tmp_path / "page.html").read_text()).documents


def test_a_character_of_the_most_tokens_is_one_unit():
    class Tokenizer:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": [0]}

        def decode(self, ids, **options):
            return "a" + ("" if len(ids) == 1 else "x" if len(ids) == 9 else REPLACEMENT_CHARACTER)

    (run,) = Decoder(Tokenizer()).role_runs([1] * 8, [True] * 8, [None] * 8, None)
    assert [unit.text for unit in run.units] == ["x"]
