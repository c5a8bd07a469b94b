"""Rows of an encoder-decoder: prompt and answer of each document, and what would be lost is refused."""

from __future__ import annotations

import json

import pytest
import torch

from patchgen.runtime.data.problems import DataError
from patchgen.runtime.objectives.encoder_decoder import (
    accept_packed_rows,
    prompts_and_answers,
    require_one_answer,
    row_check,
)
from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.train.data_check import require_data
from patchgen.runtime.train.recipe import RecipeError, from_dict

IDS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 0, 0]])
REAL = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
NONE = IGNORED


def test_the_encoder_reads_up_to_the_answer_and_the_decoder_the_answer():
    targets = torch.tensor([[NONE, 3, 4, NONE, NONE, NONE], [8, 9, NONE, NONE, NONE, NONE]])
    inputs = prompts_and_answers(IDS, targets, REAL)
    assert inputs["input_ids"].tolist() == [[1, 2], [7, 8]]
    assert inputs["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert inputs["labels"].tolist() == [[3, 4], [8, 9]]


def test_a_document_with_several_answers_is_refused_where_tokens_between_them_would_be_lost():
    """Before the step, for every rank: in the forward only one of them would fail. A first token's label is no target."""
    bounds = torch.tensor([0, 6, 9, 12], dtype=torch.int32)
    one = [[NONE, NONE, 3, 4, NONE, NONE, 7, 8, 9, NONE, NONE, NONE]]
    require_one_answer({"labels": torch.tensor(one), "cu_seq_lens_q": bounds})
    several = [[NONE, 2, 3, NONE, 5, 6, 7, NONE, 9, 1, NONE, 3]]
    with pytest.raises(DataError, match="^1 of the 3 documents of a row have several answers.*data.learn: last"):
        require_one_answer({"labels": torch.tensor(several), "cu_seq_lens_q": bounds})


def test_rows_are_checked_for_heads_that_take_packed_rows_only():
    head = accept_packed_rows(type("Head", (torch.nn.Module,), {"forward": lambda self: None}))
    assert row_check(head()) is require_one_answer
    assert row_check(torch.nn.Module()) is None


def test_a_conversation_with_several_answers_is_refused_before_ranks_start(tmp_path):
    turn = [{"role": "user", "content": "The Elbe?"}, {"role": "assistant", "content": "In Dresden."}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": turn * count}) + "\n" for count in (1, 2)))

    def require(source: str, **data: str) -> None:
        sources = [{"path": str(file)}]
        require_data(from_dict({"model": {"source": source}, "data": {"kind": "chat", "sources": sources, **data}}))

    with pytest.raises(RecipeError, match=r"rows.jsonl:2: the conversation has 2 answers.*data.learn: last"):
        require("t5")
    require("t5", learn="last")
    require("qwen3_moe")
