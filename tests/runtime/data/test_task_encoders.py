"""Targets of completions, tags and answers: which tokens have one, and samples that cannot have theirs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from small_processors import byte_tokenizer, template
from tokenizers.processors import TemplateProcessing

from patchgen.runtime.data import DataConfig, DataError, SourceConfig, build_loader
from patchgen.runtime.data.rows import RowMapper
from patchgen.runtime.data.task_encoders import AnswerEncoder, TaggedEncoder
from patchgen.runtime.data.text import TextEncoder
from patchgen.runtime.parallel.batch import IGNORED


@pytest.mark.parametrize("append_eos", [True, False])
def test_an_end_that_the_tokenizer_appends_has_a_loss_too(append_eos):
    tokenizer = byte_tokenizer(template(), {})
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    tokens = TextEncoder(tokenizer, append_eos=append_eos).tokens("x", {"prompt": "ab", "completion": "cd"})
    assert tokens.ids[-1] == tokenizer.eos_token_id and len(tokens.ids) == 5
    assert tokens.targets is not None and tokens.targets.tolist() == [False, False, True, True, True]


def batches_of(folder, rows, **changes):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    streaming = changes.pop("streaming", False)
    config = DataConfig(
        sources=(SourceConfig(str(folder / "rows.jsonl"), streaming=streaming),),
        epochs=1,
        shuffle=False,
        cache_dir=str(folder / "cache"),
        **changes,
    )
    loader = build_loader(config, tokenizer=byte_tokenizer(template(), {}), batch_index=0, num_batches=1, agree=int)
    return loader, list(loader)


@pytest.mark.parametrize("row", [{"tokens": ["a", None], "tags": [0, 1]}, {"tokens": ["a", "b"], "tags": [0, None]}])
def test_every_word_and_tag_is_checked(tmp_path, row):
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*list of (text|int) and None"):
        batches_of(tmp_path, [row], kind="token_classes")
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*list of int and float, expected list of int"):
        batches_of(tmp_path, [{"tokens": ["a", "b"], "tags": [0, 1.5]}], kind="token_classes")


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"text": "wrote", "answer_start": 4}, "answers holds text as text, expected list of text"),
        ({"text": "A", "answer_start": [0]}, "answers holds text as text, expected list of text"),
        ({"text": ["wrote"], "answer_start": 4}, "answers holds answer_start as int, expected list of int"),
        (
            {"text": ["wrote"], "answer_start": ["4"]},
            "answers holds answer_start as list of text, expected list of int",
        ),
        ({"text": [3], "answer_start": [4]}, "answers holds text as list of int, expected list of text"),
        ({"text": [3, "wrote"], "answer_start": [0, 4]}, "answers holds text as list of int, expected list of text"),
        (
            {"text": ["wrote"], "answer_start": [True]},
            "answers holds answer_start as list of bool, expected list of int",
        ),
        ({"text": ["wrote"], "answer_start": [-6]}, "the answer 'wrote' is not in the context at -6"),
        ({"text": [], "answer_start": []}, "answers without a text or an answer_start"),
    ],
)
def test_answers_of_other_types_are_bad_samples(tmp_path, answers, reason):
    """A text instead of a list was read as a list of its letters, or ended the run with a TypeError."""
    row = {"question": "Who?", "context": "Ada wrote.", "answers": answers}
    with pytest.raises(DataError, match=f"rows.jsonl:1: {reason}"):
        batches_of(tmp_path, [row], kind="answers")


def test_only_the_first_answer_is_checked_and_used():
    """A row was refused for a further answer, which nothing reads."""
    answers = {"text": ["b", None, 3], "answer_start": [1, None, "x"]}
    text = TextEncoder(byte_tokenizer(template(), {}), append_eos=False)
    tokens = AnswerEncoder(text).tokens("x", {"question": "?", "context": "ab", "answers": answers})
    assert tokens.targets is not None and tokens.ids[tokens.targets].tolist() == [
        byte_tokenizer(template(), {}).encode("b")[0]
    ]


def test_numbers_of_numpy_are_numbers():
    """A transform may return them: tags of them were refused."""
    text = TextEncoder(byte_tokenizer(template(), {}), append_eos=True)
    row = {"question": "?", "context": "ab", "answers": {"text": ["b"], "answer_start": [np.int64(1)]}}
    targets = AnswerEncoder(text).tokens("x", RowMapper(SourceConfig("x"), "answers")("x", row)).targets
    assert targets is not None and targets.sum() == 1
    tags = {"tokens": ["a", "b"], "tags": [np.int64(1), np.int64(0)]}
    targets = TaggedEncoder(text).tokens("x", RowMapper(SourceConfig("x"), "token_classes")("x", tags)).targets
    assert targets is not None and sorted(set(targets.tolist())) == [0, 1, 2]


@pytest.mark.parametrize("words", [["", "b"], ["a", ""], ["a", "", "b"]])
def test_a_word_without_a_token_is_a_bad_sample_and_its_tag_is_not_lost(tmp_path, words):
    row = {"tokens": words, "tags": [1] * len(words)}
    with pytest.raises(DataError, match=rf"rows.jsonl:1: token {words.index('')} is '', of which .* no token"):
        batches_of(tmp_path, [row], kind="token_classes")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_document_whose_answer_would_be_cut_is_skipped(tmp_path, streaming):
    """The last token with a target is the end of the answer, so half an answer teaches a wrong end."""
    row = {"question": "?", "context": "abcdefghij", "answers": {"text": ["cdef"], "answer_start": [2]}}
    long = {**row, "context": "abcdef" + "z" * 20}
    for limit, answers in ((8, 1), (7, 0)):
        whole = {"question": "?", "context": "cdef", "answers": {"text": ["cdef"], "answer_start": [0]}}
        loader, batches = batches_of(
            tmp_path, [long, whole], kind="answers", max_length=limit, on_long="truncate", streaming=streaming
        )
        labels = [label for batch in batches for label in batch["labels"][0].tolist() if label != IGNORED]
        assert len(labels) == 4 * (answers + 1)
        assert loader.counters.counts == {"truncated" if answers else "skipped": 1}
        if not answers:
            assert "not all tokens with a loss are among the first" in loader.counters.summary()
