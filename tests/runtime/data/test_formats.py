"""Rows in the formats that people have become the same messages, and what is learned of them is the answers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_processors import byte_tokenizer, template

from patchgen.runtime.data import DataConfig, DataError, SourceConfig, build_loader
from patchgen.runtime.data.formats import (
    COLUMNS,
    FORMATS,
    FORMATS_OF_KIND,
    WrongColumns,
    detect_row_format,
    missing_columns,
)
from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.rows import RowMapper
from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.train import model as models
from patchgen.runtime.train import optimizers
from patchgen.runtime.train.recipe import RecipeError, from_dict
from patchgen.runtime.train.recipe import load as load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
TOKENIZER = byte_tokenizer(template(), {})
ASK, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
REJECTED = {"role": "assistant", "content": "Go"}
TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
CHATS = {
    "messages": {"messages": [ASK, ANSWER]},
    "sharegpt": {"conversations": TURNS},
    "alpaca": {"instruction": "Hi", "input": "", "output": "Hello"},
    "prompt_completion": {"prompt": "Hi", "completion": "Hello"},
    "prompt_completion of messages": {"prompt": [ASK], "completion": [ANSWER]},
}
PAIRS = {
    "texts": {"prompt": "Hi", "chosen": "Hello", "rejected": "Go"},
    "messages": {"prompt": [ASK], "chosen": [ANSWER], "rejected": [REJECTED]},
    "whole": {"chosen": [ASK, ANSWER], "rejected": [ASK, REJECTED]},
    "whole, with the prompt beside": {"prompt": "Hi", "chosen": [ASK, ANSWER], "rejected": [ASK, REJECTED]},
    "turns": {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "Go"}},
    "instruction": {"instruction": "Hi", "chosen": "Hello", "rejected": "Go"},
}


def batches(
    folder: Path, kind: str, *rows: dict, tokenizer=TOKENIZER, source: dict | None = None, **changes
) -> list[dict]:
    """The batches of rows in a file, in their order."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"tokens_per_batch": 400, "epochs": 1, "shuffle": False, "cache_dir": str(folder / "cache"), **changes}
    config = DataConfig(sources=(SourceConfig(str(path), **source or {}),), kind=kind, **values)
    return list(build_loader(config, tokenizer=tokenizer, batch_index=0, num_batches=1, agree=int))


def told(batch: dict, tokenizer=TOKENIZER) -> list[tuple[str, str]]:
    """The text of each document of a batch, and what of it is learned."""
    bounds, ids, labels = batch["cu_seq_lens_q"].tolist(), batch["input_ids"][0], batch["labels"][0]
    found = []
    for start, end in itertools.pairwise(bounds):
        own = labels[start:end]
        assert batch["position_ids"][0, start:end].tolist() == list(range(end - start))
        assert torch.equal(own[own != IGNORED], ids[start:end][own != IGNORED])
        found.append((tokenizer.decode(ids[start:end]), tokenizer.decode(own[own != IGNORED])))
    return found


CHAT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", CHATS)
def test_every_format_of_a_conversation_gives_the_same_tokens(tmp_path, name, streaming):
    (batch,) = batches(tmp_path, "chat", CHATS[name] | {"id": 3, "source": "x"}, source={"streaming": streaming})
    assert told(batch) == [(CHAT, "Hello<|im_end|>")]
    assert batch["document_sources"].tolist() == [0]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_every_format_of_a_pair_gives_the_same_two_documents(tmp_path, name, streaming):
    rows = [PAIRS[name], {**PAIRS["whole"], "chosen": [ASK, {**ANSWER, "content": "Hey"}]}]
    (batch,) = batches(tmp_path, "preference", *rows, source={"streaming": streaming}, pad_batches=True)
    rejected = (CHAT.replace("Hello", "Go"), "Go<|im_end|>")
    first, second = (CHAT, "Hello<|im_end|>"), (CHAT.replace("Hello", "Hey"), "Hey<|im_end|>")
    assert sorted([tuple(told(batch)[:2]), tuple(told(batch)[2:4])]) == sorted([(first, rejected), (second, rejected)])
    assert batch["document_sources"].tolist() == [0, 0, 0, 0, -1]
    assert batch["input_ids"].shape == (1, 400)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_halves_of_a_pair_are_cut_alone_and_share_a_row(tmp_path, streaming):
    rows = [{"prompt": "Hi", "chosen": "a" * (20 + n), "rejected": "b"} for n in range(6)]
    short = len(TOKENIZER(CHAT.replace("Hello", "b"))["input_ids"])
    limit = short + 10
    changes = {"source": {"streaming": streaming}, "tokens_per_batch": 2 * limit + 3, "max_length": limit}
    found = batches(tmp_path, "preference", *rows, **changes)
    for batch in found:
        lengths = batch["cu_seq_lens_q"].diff().tolist()
        assert lengths == [limit, short] * (len(lengths) // 2)
    assert sum(len(batch["document_sources"]) for batch in found) == 12
    assert not batches(
        tmp_path, "preference", *rows[:1], {"prompt": "Hi", "chosen": "c", "rejected": "b"}, on_long="skip", **changes
    )[1:]
    with pytest.raises(DataError, match="rows.jsonl:1: its longer text has .* tokens, .* skip or truncate, or raise"):
        batches(tmp_path, "preference", *rows, on_long="error", **changes)
    with pytest.raises(ValueError, match="both halves of a pair share a batch"):
        DataConfig(kind="preference", tokens_per_batch=64, max_length=40)
    for length in (None, 1):
        with pytest.raises(ValueError, match="tokens_per_batch = 1 is less than one token for each half of a pair"):
            DataConfig(kind="preference", tokens_per_batch=1, max_length=length)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["chat", "preference"])
def test_a_sample_of_which_nothing_that_is_learned_is_left_is_skipped_and_counted(tmp_path, kind, streaming):
    rows = [
        {"prompt": "Hi" * many, "completion": "Hello" * 9, "chosen": "Hello" * 9, "rejected": "Go"} for many in (1, 60)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(str(tmp_path / "rows.jsonl"), streaming=streaming)
    config = DataConfig((source,), kind=kind, tokens_per_batch=120, max_length=60, epochs=1, cache_dir=str(tmp_path))
    loader = build_loader(config, tokenizer=TOKENIZER, batch_index=0, num_batches=1, agree=int)
    (batch,) = list(loader)
    assert len(told(batch)) == (2 if kind == "preference" else 1)
    assert told(batch)[0][1].startswith("Hello")
    assert loader.counters.counts == {"truncated": 1, "skipped": 1}
    reasons = {outcome: (where[-2:], reason) for outcome, where, reason in loader.counters.places}
    assert reasons["truncated"][0] == ":1"
    assert reasons["skipped"][0] == ":2"
    assert reasons["skipped"][1].endswith("and none of the first 60 has a loss")


def test_a_pair_learns_what_follows_the_messages_that_both_have(tmp_path):
    before = [ASK, {"role": "assistant", "content": "before"}, {"role": "user", "content": "and?"}]
    (batch,) = batches(tmp_path, "preference", {"chosen": [*before, ANSWER], "rejected": [*before, REJECTED]})
    assert [learned for _, learned in told(batch)] == ["Hello<|im_end|>", "Go<|im_end|>"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_prompt_is_not_learned_without_a_template_either(tmp_path, streaming):
    rows = [{"prompt": "2 + 2 = ", "completion": "4"}, {"prompt": "", "completion": "all"}]
    found = [one for batch in batches(tmp_path, "text", *rows, source={"streaming": streaming}) for one in told(batch)]
    assert sorted(found) == [("2 + 2 = 4<|im_end|>", "4<|im_end|>"), ("all<|im_end|>", "all<|im_end|>")]


@pytest.mark.parametrize("streaming", [False, True])
def test_numbers_stay_with_their_documents(tmp_path, streaming):
    rows = [{"text": "a" * n, "label": n / 2} for n in range(1, 30)] + [{"messages": [ASK], "label": 7}]
    found = batches(
        tmp_path, "classification", *rows, source={"streaming": streaming}, shuffle=not streaming, pad_batches=True
    )
    for batch in found:
        for (text, _), label in zip(told(batch), batch["document_labels"].tolist(), strict=True):
            expected = 7 if "im_start" in text else text.count("a") / 2
            assert label == expected or (text.startswith("<|pad|>") and label != label)
    assert sum(int((batch["document_sources"] == 0).sum()) for batch in found) == 30
    with pytest.raises(DataError, match="rows.jsonl:1: data.kind = classification needs label as a number"):
        batches(tmp_path, "classification", {"text": "a", "label": "good"})


LONG = [ASK, ANSWER, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "Bye"}]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    ("flags", "learn", "learned"),
    [
        ({}, "all", "Hello<|im_end|>Bye<|im_end|>"),
        ({}, "last", "Bye<|im_end|>"),
        ({1: {"train": False}}, "all", "Bye<|im_end|>"),
        ({3: {"weight": 0}}, "all", "Hello<|im_end|>"),
        ({1: {"weight": 1}}, "last", "Hello<|im_end|>Bye<|im_end|>"),
        ({1: {"train": None}, 0: {"train": False}}, "all", "Hello<|im_end|>Bye<|im_end|>"),
    ],
)
def test_messages_say_whether_they_are_learned(tmp_path, flags, learn, learned, marked):
    tokenizer = byte_tokenizer(template(marked=marked), {})
    messages = [{**message, **flags.get(number, {})} for number, message in enumerate(LONG)]
    turns = [
        {"from": "gpt" if one["role"] == "assistant" else "human", "value": one["content"], **flags.get(number, {})}
        for number, one in enumerate(LONG)
    ]
    for row in ({"messages": messages}, {"conversations": turns}):
        (batch,) = batches(tmp_path, "chat", row, tokenizer=tokenizer, learn=learn)
        assert told(batch, tokenizer)[0][1] == learned


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({**ANSWER, "weight": 0.5}, "message 1 has weight = 0.5; expected false, true, 0 or 1"),
        ({**ANSWER, "weight": 0, "train": True}, "message 1 has both train = True and weight = 0"),
        ({**ANSWER, "train": False}, "no assistant turn to learn from"),
        ({**ASK, "train": True}, "message 1 of 'user' is flagged to have a loss"),
    ],
)
def test_what_a_message_cannot_say_is_refused(tmp_path, message, reason):
    with pytest.raises(DataError, match=f"rows.jsonl:1: {reason}"):
        batches(tmp_path, "chat", {"messages": [ASK, message]})


def test_columns_that_are_called_otherwise_are_named(tmp_path):
    row = {"question": "Hi", "answer": "Hello"}
    (batch,) = batches(tmp_path, "chat", row, source={"columns": {"prompt": "question", "completion": "answer"}})
    assert told(batch)[0][1] == "Hello<|im_end|>"
    with pytest.raises(
        DataError, match=r"columns maps prompt: q, but the row has only question \(text\), answer \(text\)\. All of"
    ):
        batches(tmp_path, "chat", row, source={"columns": {"prompt": "q", "completion": "answer"}})
    with pytest.raises(ValueError, match=r"name promt, which no row format has; expected[\s\S]*prompt"):
        SourceConfig("x", columns={"promt": "question"})
    with pytest.raises(
        ValueError, match="has row_format = alpaca, which data.kind = text does not read; it reads text"
    ):
        DataConfig(sources=(SourceConfig("x", row_format="alpaca"),))


def test_errors_of_columns_name_missing_ones_and_the_nearest_format(tmp_path):
    with pytest.raises(DataError) as error:
        batches(tmp_path, "chat", {"instruction": "Hi", "response": "Hello"}, on_bad="skip")
    assert "rows.jsonl:1: the columns instruction (text), response (text) match no row format" in str(error.value)
    assert "Nearest: alpaca lacks output (text); messages lacks messages (list of {role, content});" in str(
        error.value
    )
    assert str(error.value).count(" lacks ") == 3
    with pytest.raises(DataError, match="Nearest: preference lacks nothing, and is read by data.kind = preference; "):
        batches(tmp_path, "chat", PAIRS["texts"])
    with pytest.raises(DataError, match="row_format = sharegpt needs conversations .*; the row has instruction"):
        batches(tmp_path, "chat", CHATS["alpaca"], source={"row_format": "sharegpt"})


def test_columns_of_several_formats_are_refused_with_the_key(tmp_path):
    row = CHATS["messages"] | CHATS["alpaca"]
    with pytest.raises(DataError, match="match messages and alpaca: set data.sources.*row_format"):
        batches(tmp_path, "chat", row, on_bad="skip")
    (batch,) = batches(tmp_path, "chat", row, source={"row_format": "alpaca"})
    assert told(batch)[0][1] == "Hello<|im_end|>"


OF_OTHER_TYPES = {
    "alpaca": ({"input": 3}, {"system": ["a"]}, {"history": 3}, {"history": [["Hi", 3]]}),
    "messages": ({"system": 3},),
    "sharegpt": ({"system": {"a": 1}},),
}


@pytest.mark.parametrize(("name", "column"), [(name, more) for name, many in OF_OTHER_TYPES.items() for more in many])
def test_an_optional_column_of_another_type_is_a_bad_sample(name, column):
    (found,) = column
    with pytest.raises(BadSample, match=rf"x: column '{found}' holds .*, expected .* \(row format {name}\)"):
        RowMapper(SourceConfig("x"), "chat")("x", CHATS[name] | column)


@pytest.mark.parametrize("column", [{"prompt": 3}, {"conversations": 3}, {"instruction": 3}])
def test_a_prompt_of_another_type_is_a_bad_sample(column):
    with pytest.raises(BadSample, match="x: column '.*' holds int, expected "):
        RowMapper(SourceConfig("x"), "preference")("x", PAIRS["whole"] | column)


def test_optional_columns_without_a_value_are_no_columns():
    row = CHATS["alpaca"] | {"input": None, "system": None, "history": []}
    assert RowMapper(SourceConfig("x"), "chat")("x", row)["messages"] == [ASK, ANSWER]
    assert RowMapper(SourceConfig("x"), "preference")("x", PAIRS["whole"] | {"prompt": []})["chosen"] == [ASK, ANSWER]


def test_a_turn_from_a_list_is_a_bad_sample():
    row = {"conversations": [TURNS[0], {"from": ["gpt"], "value": "Hello"}]}
    with pytest.raises(BadSample, match=r"a turn from \['gpt'\]; expected one of human"):
        RowMapper(SourceConfig("x"), "chat")("x", row)


@pytest.mark.parametrize("chosen", ["prompt", "instruction"])
def test_of_two_prompts_the_one_that_columns_names_is_used(tmp_path, chosen):
    """As the error advises: the other column stayed in the row, so the same error came again."""
    row = {"prompt": "prompt?", "instruction": "instruction?", "chosen": "Hello", "rejected": "Go"}
    with pytest.raises(DataError, match=r"prompt and instruction could each be the prompt.*\{prompt: prompt\}"):
        batches(tmp_path, "preference", row, on_bad="skip")
    for columns in ({chosen: chosen}, {"prompt": chosen}):
        (batch,) = batches(tmp_path, "preference", row, source={"columns": columns})
        assert f"user\n{chosen}?<|im_end|>" in told(batch)[0][0]


def test_a_row_format_under_the_key_format_is_an_error_with_the_right_key():
    values = {"model": {"source": "qwen3"}, "data": {"sources": [{"path": "x", "format": "sharegpt"}]}}
    with pytest.raises(
        RecipeError, match=r"data.sources.0.format: .*not 'sharegpt'. data.sources.0.row_format takes it"
    ):
        from_dict(values)


def test_sources_with_the_same_name_get_unique_names():
    sources = (SourceConfig("a"), SourceConfig("b", name="chats"), SourceConfig("a", split="validation"))
    assert DataConfig(sources=sources).source_names == ["a (1)", "chats", "a (2)"]


VALUES = {
    "text": st.text(max_size=3),
    "list of {role, content}": st.lists(st.just(ASK), min_size=1, max_size=2),
    "list of {from, value}": st.lists(st.just(TURNS[0]), min_size=1, max_size=2),
    "{from, value}": st.just(TURNS[1]),
    "other": st.one_of(st.none(), st.integers(), st.just([]), st.just(["a"]), st.just({"a": 1})),
}


@given(
    row=st.dictionaries(st.sampled_from(sorted(COLUMNS)), st.one_of(*VALUES.values())),
    kind=st.sampled_from(sorted(FORMATS_OF_KIND)),
)
def test_a_format_is_found_where_its_columns_are_and_never_guessed(row, kind):
    """By the table alone: every required column there, of one of its types, and no other format of the kind so."""
    fits = [name for name in FORMATS_OF_KIND[kind] if not missing_columns(name, row)]
    assert all(row.get(column) is not None for name in fits for column in FORMATS[name].required)
    try:
        assert [detect_row_format("x", row, kind)] == fits
    except BadSample as error:
        assert len(fits) != 1
        assert ("row_format" in error.reason) == (len(fits) > 1)


# ------------------------------------------------------------------------------------------------- tools and media


def test_conversations_of_messages_are_messages():
    """As many data sets of the hub name the column; they were refused."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "train": True}]
    for kind in ("chat", "multimodal"):
        fields = RowMapper(SourceConfig("x"), kind)("x", {"conversations": messages, "system": "Be kind."})
        assert fields["messages"] == [{"role": "system", "content": "Be kind."}, *messages]
    pair = {
        "conversations": messages[:1],
        "chosen": messages[1:],
        "rejected": [{"role": "assistant", "content": "Go"}],
    }
    fields = RowMapper(SourceConfig("x"), "preference")("x", pair)
    assert fields["chosen"] == messages


def test_calls_and_tools_of_sharegpt_are_those_of_templates():
    tools = [{"type": "function", "function": {"name": "add"}}]
    turns = [
        {"from": "human", "value": "1 + 1?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "It is 2."},
    ]
    row = {"conversations": turns, "tools": json.dumps(tools), "system": "Be kind."}
    found = RowMapper(SourceConfig("x"), "chat")("x", row)
    assert found["tools"] == tools
    assert found["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    with pytest.raises(BadSample, match="a function_call is not valid JSON"):
        RowMapper(SourceConfig("x"), "chat")("x", {"conversations": [{"from": "function_call", "value": "add(1)"}]})
    with pytest.raises(BadSample, match="a turn from 'cat'; expected one of human"):
        RowMapper(SourceConfig("x"), "chat")("x", {"conversations": [{"from": "cat", "value": "Miau"}]})


PARTS = [{"type": "image"}, {"type": "text", "text": "\nWhat? "}, {"type": "audio"}]
MARKED = {
    "sharegpt": {
        "conversations": [{"from": "human", "value": "<image>\nWhat? <audio>"}, TURNS[1]],
        "image": "a.png",
        "audios": ["a.wav"],
    },
    "messages": {
        "messages": [{"role": "user", "content": "<image>\nWhat? <audio>"}, ANSWER],
        "images": ["a.png"],
        "audio": "a.wav",
    },
    "alpaca": {"instruction": "<image>\nWhat? <audio>", "output": "Hello", "images": ["a.png"], "audio": "a.wav"},
}


@pytest.mark.parametrize("name", MARKED)
def test_marks_are_placeholders_of_items(name):
    found = RowMapper(SourceConfig("x"), "multimodal")("x", {**MARKED[name], "id": 3})
    assert found["messages"] == [{"role": "user", "content": PARTS}, ANSWER]
    assert (found["images"], found["audios"], found["id"]) == (["a.png"], ["a.wav"], 3)


def test_a_mark_without_an_item_is_text():
    content = "What does <video> do, and <image>?"
    row = {"messages": [{"role": "user", "content": content}, ANSWER], "images": ["a.png"]}
    parts = RowMapper(SourceConfig("x"), "multimodal")("x", row)["messages"][0]["content"]
    assert parts == [
        {"type": "text", "text": "What does <video> do, and "},
        {"type": "image"},
        {"type": "text", "text": "?"},
    ]


def test_parts_of_openai_bring_their_items():
    content = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "input_audio", "input_audio": {"data": "BB", "format": "wav"}},
        {"type": "text", "text": "What is <image>?"},
    ]
    found = RowMapper(SourceConfig("x"), "multimodal")(
        "x", {"messages": [{"role": "user", "content": content}, ANSWER]}
    )
    assert found["messages"][0]["content"] == [
        {"type": "image", "image": "data:image/png;base64,AA"},
        {"type": "audio", "audio": "data:audio/wav;base64,BB"},
        {"type": "text", "text": "What is <image>?"},
    ]
    assert found["messages"][1] == ANSWER


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url"}, "a part image_url .* without its item, expected .*url"),
        ({"type": "image_url", "image_url": {"detail": "low"}}, "a part image_url .* without its item"),
        ({"type": "video_url", "video_url": None}, "a part video_url .* without its item"),
        ({"type": "input_audio", "input_audio": {"data": "BB"}}, "a part input_audio .* without its item, .*format"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "a part input_audio .* without its item"),
        ({"type": "input_audio", "input_audio": "BB"}, "a part input_audio .* without its item"),
        ({"type": ["image"]}, "a part of the type .* in the messages, expected a text"),
    ],
)
def test_a_part_without_its_item_is_a_bad_sample(part, reason):
    """It is skipped or refused with file and line as `on_bad` says; a KeyError ended the run without either."""
    row = {"messages": [{"role": "user", "content": [part]}, ANSWER]}
    with pytest.raises(BadSample, match=f"a.jsonl:3: {reason}"):
        RowMapper(SourceConfig("x"), "multimodal")("a.jsonl:3", row)


@pytest.mark.parametrize(("one", "many"), [("image", "images"), ("video", "videos"), ("audio", "audios")])
def test_a_row_with_media_in_two_columns_of_a_kind_is_refused_and_none_is_dropped(one, many):
    row = {"messages": [ASK, ANSWER], one: "a", many: ["b"]}
    with pytest.raises(WrongColumns, match=f"both {one} and {many} have media.*To fix: .*{{{many}: {one}}}"):
        RowMapper(SourceConfig("x"), "multimodal")("x", row)
    assert RowMapper(SourceConfig("x", columns={many: one}), "multimodal")("x", row)[many] == ["a"]
    assert RowMapper(SourceConfig("x"), "multimodal")("x", {**row, many: []})[many] == ["a"]
    assert RowMapper(SourceConfig("x"), "multimodal")("x", {**row, one: None})[many] == ["b"]


@pytest.mark.parametrize(("recipe", "model_type"), [("qwen3_vl_8b", "qwen3_vl"), ("qwen3_omni_30b", "qwen3_omni_moe")])
def test_what_recipes_of_real_checkpoints_freeze_is_there(recipe, model_type):
    found = load_recipe(RECIPES / f"{recipe}.yaml", {"model.source": model_type})
    head, config = models.find_head_and_config(models.read_config(found.model))
    with torch.device("meta"):
        model = head._from_config(config)
    optimizers.freeze(model, found.model.freeze)
    frozen = {name.split(".layers.")[0] for name, one in model.named_parameters() if not one.requires_grad}
    assert frozen
    assert not any("language_model" in name or "lm_head" in name for name in frozen)
