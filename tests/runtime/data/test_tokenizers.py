"""Tokenizers that are trained on the data: their size, their file in the cache, and their chat template."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from patchgen.runtime.data import DataConfig, DataError, SourceConfig, train_tokenizer
from patchgen.runtime.data.chat import ChatEncoder
from patchgen.runtime.data.problems import BadSample

ASKED = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


def chats(folder: Path, *conversations: list[Any]) -> DataConfig:
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations))
    return DataConfig((SourceConfig(str(folder / "chats.jsonl")),), kind="chat", cache_dir=str(folder / "cache"))


def test_a_vocabulary_smaller_than_the_bytes_is_an_error_of_the_recipe(tmp_path):
    with pytest.raises(DataError, match="alone take 258. To fix: set vocab_size in model.overrides to 258 or more"):
        train_tokenizer(chats(tmp_path, [ASKED, ANSWER]), vocab_size=257)
    assert len(train_tokenizer(chats(tmp_path, [ASKED, ANSWER]), vocab_size=258)) == 258


@pytest.mark.parametrize("method", ["write_text", "replace"])
@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "No space left on device. To fix: free space there, or name"),
        (errno.EFBIG, "File too large. To fix: raise the limit .*, or name"),
        (errno.EACCES, "Permission denied. To fix: name"),
    ],
)
def test_a_tokenizer_that_cannot_be_written_is_an_error_of_the_data_and_leaves_no_file(
    number, advice, method, tmp_path, monkeypatch
):
    config, real = chats(tmp_path, [ASKED, ANSWER]), getattr(Path, method)

    def full(self, *args, **options):
        if self.suffix == ".tmp":
            real(self, *args, **options) if method == "write_text" else None
            raise OSError(number, os.strerror(number))
        return real(self, *args, **options)

    monkeypatch.setattr(Path, method, full)
    with pytest.raises(
        DataError, match=f"cannot be written to the cache folder .*cache: {advice} another data.cache_dir"
    ):
        train_tokenizer(config, vocab_size=258)
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("content", "rendered"),
    [("Hi", "Hi"), ("", ""), ([], ""), ([{"type": "text", "text": "H"}, {"type": "text", "text": "i"}], "Hi")],
)
def test_the_template_renders_texts_parts_of_text_and_no_content(content, rendered, tmp_path):
    messages = [{"role": "user", "content": content}, ANSWER]
    tokenizer = train_tokenizer(chats(tmp_path, messages), vocab_size=258)
    encoded = ChatEncoder(tokenizer).tokens("here", {"messages": messages})
    assert tokenizer.decode(encoded.ids) == f"user: {rendered}\nassistant: Hello<|endoftext|>\n"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": [{"type": "image", "image": "a.png"}]}, "only data.kind = multimodal reads"),
        ({"role": "user", "content": [{"type": "file", "file": "a.pdf"}]}, "only parts with a text"),
        ({"role": "user", "content": None}, "has no content"),
        *(
            (
                {"role": "assistant", "content": content, "tool_calls": [{"name": "now", "arguments": {}}]},
                "no tool calls",
            )
            for content in (None, "", "Wait.", [{"type": "text", "text": "Wait."}])
        ),
    ],
)
def test_the_template_refuses_what_it_would_leave_out(message, reason, tmp_path):
    messages = [ASKED, message, ANSWER]
    tokenizer = train_tokenizer(chats(tmp_path, messages), vocab_size=258)
    with pytest.raises(BadSample, match=reason):
        ChatEncoder(tokenizer).tokens("here", {"messages": messages})


def test_texts_in_parts_are_trained_on(tmp_path):
    parts = [{"type": "text", "text": "quartz " * 50}, {"type": "image", "image": "a.png"}, "a bare string"]
    messages = [{"role": "user", "content": parts}, ANSWER]
    assert len(train_tokenizer(chats(tmp_path, messages), vocab_size=262).tokenize(" quartz")) < len(" quartz")
