"""The doctor looks at pairs, classes and teachers: each planted fault is found, the sound data pass."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import RIVERS, Toy
from transformers import AutoTokenizer

from patchgen.runtime.doctor import CHECKS, Report, examine
from patchgen.runtime.doctor.finding import FAILED, NOT_CHECKED, PASSED
from patchgen.runtime.train.recipe import from_dict

SLOW = ("proof", "step", "layout", "kernels", "router", "export", "plain transformers", "alternatives")
WRONG = "xylophone quartz"
"""No city, and nothing that the toy has learned."""


def pair(question: str, chosen: str, rejected: str, other_question: str | None = None) -> dict[str, Any]:
    """A row of preferences."""
    asked = (question, other_question or question)
    return {
        name: [{"role": "user", "content": f"The {one}?"}, {"role": "assistant", "content": answer}]
        for name, one, answer in zip(("chosen", "rejected"), asked, (chosen, rejected), strict=True)
    }


def pairs() -> list[dict[str, Any]]:
    return [pair(river, f"In {city}.", f"In {WRONG}.") for river, city in RIVERS]


def swapped(row: dict[str, Any]) -> dict[str, Any]:
    return {"chosen": row["rejected"], "rejected": row["chosen"]}


def examined(
    toy: Toy, place: Path, rows: list[dict[str, Any]], objective: str, skip: tuple[str, ...] = SLOW, **changed: Any
) -> Report:
    """What the doctor finds when the toy is trained on these rows."""
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = json.loads(json.dumps(toy.values))
    kind = {"classification": "classification", "distillation": "chat"}.get(objective, "preference")
    data = {"kind": kind, "sources": [{"path": str(place / "rows.jsonl")}], "tokens_per_batch": 1024}
    values["data"] |= {**data, "cache_dir": str(place / "cache"), **changed.pop("data", {})}
    values["objective"] = {"name": objective, "options": changed.pop("options", {})}
    return examine(from_dict(values | changed), skip=skip)


def test_sound_pairs_pass_and_both_halves_are_shown(toy, tmp_path):
    report = examined(toy, tmp_path, pairs(), "dpo")
    assert report.exit_status == 0, report.text()
    assert "8 pairs, each with one prompt" in report["labels"].summary
    assert "chosen: <|im_start|>user\nThe Elbe?" in report["labels"].details
    assert (
        "[[In Dresden.<|im_end|>]]" in report["labels"].details
        and f"[[In {WRONG}.<|im_end|>]]" in report["labels"].details
    )
    assert re.search(
        r"in 8 of 8 pairs; on average chosen minus rejected is \+\d+\.\d\d nats per token", report["objective"].summary
    )
    assert report["first loss"].status == report["packing"].status == PASSED
    assert "0.0" in report["first loss"].summary  # of the chosen halves, which the toy knows by heart


@pytest.mark.slow
def test_a_step_on_pairs_has_its_reference_on_one_rank_and_on_several(toy, tmp_path):
    checks = {check.name for check in CHECKS} - {"step", "layout"}
    report = examined(toy, tmp_path, pairs(), "dpo", skip=tuple(checks))
    assert report["step"].status == report["layout"].status == PASSED, report.text()
    assert "the loss is 0.69315" in report["layout"].summary  # ln 2: before training the model is its own reference


def test_a_reward_model_is_asked_nothing_that_its_head_does_not_say(toy, tmp_path):
    report = examined(toy, tmp_path, pairs(), "reward")
    assert report.exit_status == 0, report.text()
    assert report["labels"].status == report["weights"].status == PASSED
    for name in ("first loss", "packing", "objective"):
        assert report[name].status == NOT_CHECKED
        assert "objective.name = reward puts another on the model" in report[name].summary


LONG = "In Dresden, " + "behind the hill and " * 6 + "the river."


@pytest.mark.parametrize(
    ("spoil", "data", "check", "words"),
    [
        (swapped, {}, "objective", "in 0 of 8 pairs.*probably swapped"),
        (
            lambda row: row | {"rejected": pair("Rhine", "", f"In {WRONG}.")["rejected"]},
            {},
            "labels",
            "do not answer the same prompt: .*The Elbe.*The Rhine",
        ),
        (
            lambda row: row | {"rejected": [row["rejected"][0], {"role": "assistant", "content": ""}]},
            {},
            "labels",
            r"rows.jsonl:1, rejected: the answer is empty: the tokens with a loss are '<\|im_end\|>'",
        ),
        (lambda row: row | {"chosen": row["chosen"][:1]}, {}, "data", "chosen has no assistant turn"),
        (
            lambda row: row | {"chosen": [row["chosen"][0], {"role": "assistant", "content": LONG}]},
            {"max_length": 96, "on_long": "truncate"},
            "labels",
            "A run truncates 6 of the first 12 answers.*data.max_length = 96",
        ),
    ],
    ids=["swapped", "prompts that differ", "empty", "no answer", "truncated"],
)
def test_a_fault_planted_in_pairs_is_found(toy, tmp_path, spoil: Callable, data, check, words):
    report = examined(toy, tmp_path, [spoil(row) for row in pairs()], "dpo", data=data)
    assert report[check].status == FAILED, report.text()
    assert re.search(words, report[check].summary), report[check].summary
    assert report[check].advice


CLASSES = [{"text": f"The {river} is a river.", "label": number % 2} for number, (river, _) in enumerate(RIVERS)]


def test_sound_classes_pass_and_are_counted(toy, tmp_path):
    report = examined(toy, tmp_path, CLASSES, "classification", options={"num_labels": 2})
    assert report.exit_status == 0, report.text()
    assert "8 samples have the labels 0 (4 x), 1 (4 x)." in report["labels"].summary
    assert "rows.jsonl:2, label 1: The Elbe is a river." in report["labels"].details


@pytest.mark.parametrize("label", [2, -1, 0.5])
def test_a_class_that_does_not_exist_is_found(toy, tmp_path, label):
    rows = [*CLASSES[:3], {"text": "The Rhine is a river.", "label": label}]
    report = examined(toy, tmp_path, rows, "classification", options={"num_labels": 2})
    assert report["labels"].status == FAILED, report.text()
    assert f"rows.jsonl:4: A document has the label {label:g}" in report["labels"].summary


def chats() -> list[dict[str, Any]]:
    return [{"messages": row["chosen"]} for row in pairs()]


def teacher(toy: Toy, place: Path) -> Path:
    """A copy of the toy."""
    return Path(shutil.copytree(toy.folder, place / "teacher"))


def test_a_teacher_with_the_same_tokens_passes(toy, tmp_path):
    folder = teacher(toy, tmp_path)
    report = examined(toy, tmp_path, chats(), "distillation", teacher={"source": str(folder)})
    assert report.exit_status == 0, report.text()
    assert "the same tokens" in report["objective"].summary


def test_a_teacher_without_a_tokenizer_is_not_checked(toy, tmp_path):
    folder = teacher(toy, tmp_path)
    for file in folder.glob("tokenizer*.json"):
        file.unlink()
    report = examined(toy, tmp_path, chats(), "distillation", teacher={"source": str(folder)})
    assert report["objective"].status == NOT_CHECKED, report.text()
    assert "a vocabulary of the same size; whether its tokens are the same is unknown: " in report["objective"].summary


def test_a_teacher_whose_tokens_mean_something_else_is_found(toy, tmp_path):
    folder = teacher(toy, tmp_path)
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    vocabulary = values["model"]["vocab"]
    one, other = [token for token, number in vocabulary.items() if number in (40, 41)]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(values))
    report = examined(toy, tmp_path, chats(), "distillation", teacher={"source": str(folder)})
    assert report["objective"].status == FAILED, report.text()
    assert "2 of the student's 259 ids mean another token in it (40 = " in report["objective"].summary


def test_a_teacher_whose_special_token_has_another_name_passes_as_it_does_in_training(toy, tmp_path):
    folder = teacher(toy, tmp_path)
    special = next(one["content"] for one in json.loads((folder / "tokenizer.json").read_text())["added_tokens"])
    for file in folder.glob("tokenizer*.json"):
        file.write_text(file.read_text().replace(json.dumps(special), '"<renamed>"'))
    own, other = (AutoTokenizer.from_pretrained(place).get_vocab() for place in (toy.folder, folder))
    assert own[special] == other["<renamed>"] and special not in other
    report = examined(toy, tmp_path, chats(), "distillation", teacher={"source": str(folder)})
    assert report["objective"].status == PASSED, report.text()


def test_a_teacher_of_another_size_is_found(toy, tmp_path):
    folder = teacher(toy, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    report = examined(toy, tmp_path, chats(), "distillation", teacher={"source": str(folder)})
    assert report["objective"].status == FAILED, report.text()
    assert "its vocab_size is 300 and that of the model 259" in report["objective"].summary
