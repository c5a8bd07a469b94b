"""Bad samples are found alike by `--dry-run`, the doctor, `patchgen data` and the run; rows of all forms train alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from patchgen.commands import training
from patchgen.errors import PatchgenError
from patchgen.runtime import launch
from patchgen.runtime.data import DataConfig, DataError, SourceConfig, build_loader, train_tokenizer
from patchgen.runtime.doctor.samples import first_samples
from patchgen.runtime.train import data_check, data_view, preflight, run_log, setup
from patchgen.runtime.train.data_check import describe_first_samples, encode_first_samples
from patchgen.runtime.train.recipe import RecipeError, from_dict
from patchgen.runtime.train.trainer import Trainer

SMALL = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{% if message.role not in ['user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no role ' + message.role) }}{% endif %}"
    "[{{ message.role }}]{% if message.reasoning_content %}(think {{ message.reasoning_content }}){% endif %}"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "<end>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A checkpoint folder without weights: a config, and a tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{n} and {n}."}) + "\n" for n in range(40)))
    source = SourceConfig(str(folder / "text.jsonl"))
    tokenizer = train_tokenizer(DataConfig((source,), cache_dir=str(folder)), vocab_size=300)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **SMALL}))
    return folder


def recipe_of(start: Path, place: Path, data: dict[str, Any], **sections: Any):
    defaults = {"tokens_per_batch": 2048, "cache_dir": str(place / "cache")}
    return from_dict(
        {
            "model": {"source": str(start)},
            "data": defaults | data,
            "log": {"directory": str(place / "run"), "every": 1},
        }
        | sections
    )


def chat_rows() -> list[dict[str, Any]]:
    """Conversations with thinking and calls, each with a tool and an argument of its own."""
    rows = []
    for number in range(6):
        name, parameter = f"tool{number}", f"argument{number}"
        properties = {parameter: {"type": "string", **({"enum": ["1"]} if number % 2 else {})}}
        call = {"type": "function", "function": {"name": name, "arguments": {parameter: str(number)}}}
        messages = [
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "reasoning_content": "I look.", "tool_calls": [call]},
            {"role": "tool", "name": name, "content": "one"},
            {"role": "assistant", "content": f"It is {number}."},
        ]
        tool = {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
        rows.append({"messages": messages, "tools": [tool]})
    return rows


def test_chats_with_tools_and_thinking_have_equal_losses_from_all_forms(start, tmp_path):
    """Those of Parquet and of saved datasets had the tools and arguments of all rows, as null."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows()))
    table = datasets.Dataset.from_list(chat_rows())
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "rows.saved"))
    losses = {}
    for form in ("jsonl", "parquet", "saved"):
        source = {"path": str(tmp_path / f"rows.{form}"), "name": "rows"}
        recipe = recipe_of(
            start,
            tmp_path / form,
            {"kind": "chat", "sources": [source]},
            train={"steps": 3},
            checkpoint={"export": False},
        )
        with launch.process_group() as device:
            Trainer(recipe, device, setup.listeners(recipe)).run()
        losses[form] = [entry["loss"] for entry in run_log.read(recipe.directory) if "loss" in entry]
    assert len(losses["jsonl"]) == 3
    assert losses["jsonl"] == losses["parquet"] == losses["saved"]


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
BAD = {
    "equal halves": (
        "preference",
        {"prompt": "Hi", "chosen": "Yes", "rejected": "Yes"},
        "chosen and rejected are equal: a pair needs an answer that is better",
    ),
    "halves that are rendered alike": (
        "preference",
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "name": "b"}]},
        "chosen and rejected are equal once the chat template has rendered them",
    ),
    "a role that the template refuses": (
        "chat",
        {"messages": [{"role": "judge", "content": "Hi"}, ANSWER]},
        "no role judge",
    ),
    "no answer": ("chat", {"messages": [USER]}, "no assistant turn to learn from"),
    "a lone surrogate": ("text", {"text": "\ud83d"}, "is not a valid character"),
    "no object": ("text", [1], "expected one JSON object, found list"),
}
GOOD = {
    "preference": {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
    "chat": {"messages": [USER, ANSWER]},
    "text": {"text": "yes"},
}


@pytest.mark.parametrize("case", BAD)
def test_all_commands_agree_on_a_bad_sample(start, tmp_path, case):
    kind, row, reason = BAD[case]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (GOOD[kind], row)))
    recipe = recipe_of(start, tmp_path, {"kind": kind, "sources": [{"path": str(file)}]})
    parts = setup.data_parts(recipe)

    def load(config, **options):
        return next(
            build_loader(config, tokenizer=parts.tokenizer, batch_index=0, num_batches=1, agree=int, **options)
        )

    streamed = recipe_of(
        start, tmp_path, {"kind": kind, "sources": [{"path": str(file), "streaming": True}], "epochs": 1}
    )
    looks = {
        "dry run": lambda: describe_first_samples(recipe),
        "doctor": lambda: first_samples(recipe.data, parts),
        "data": lambda: data_view.preview_of_recipe(recipe, rows=1),
        "train": lambda: load(recipe.data),
        "train, streamed": lambda: load(streamed.data),
    }
    told = {}
    for name, look in looks.items():
        with pytest.raises(DataError) as error:
            look()
        told[name] = str(error.value)
    assert told["train"].startswith(f"{file}:2: ") and reason in told["train"]
    assert set(told.values()) == {told["train"]}


def test_first_samples_are_counted_by_source(start, tmp_path):
    (tmp_path / "good.jsonl").write_text((json.dumps(GOOD["text"]) + "\n") * 20)
    (tmp_path / "mixed.jsonl").write_text('{"text": "a"}\n{"text": ""}\n{"text": "b and b and b"}\n')
    sources = [{"path": str(tmp_path / name)} for name in ("good.jsonl", "mixed.jsonl")]
    data = {"sources": sources, "on_bad": "skip", "max_length": 5, "on_long": "skip"}
    recipe = recipe_of(start, tmp_path, data, eval_data={"sources": sources[:1]}, train={"eval_every": 1})
    good, mixed, evaluation = describe_first_samples(recipe).splitlines()
    assert good == f"data         {tmp_path}/good.jsonl: the first 8 samples encoded, all samples used"
    assert "mixed.jsonl: the first 3 samples encoded, 1 bad (first: " in mixed and "mixed.jsonl:2: no tokens" in mixed
    assert "1 skipped (first: " in mixed
    assert evaluation.startswith(f"eval_data    {tmp_path}/good.jsonl: the first 8")
    (tmp_path / "empty.jsonl").write_text("\n")
    empty = DataConfig((SourceConfig(str(tmp_path / "empty.jsonl")),))
    with pytest.raises(DataError, match="No samples in .*empty.jsonl"):
        encode_first_samples(empty, setup.data_parts(recipe))


def test_a_dry_run_encodes_samples_or_says_that_it_did_not(start, tmp_path, monkeypatch, capsys):
    """It ended well with data of which no sample could be used."""
    monkeypatch.setattr(preflight, "decide_trainable", lambda recipe, _world: recipe)  # tested elsewhere
    options = {"nodes": "1", "rdzv_endpoint": "", "fresh": False, "dry_run": True, "verbose": False}
    options |= {"processes": 1, "print_config": False, "script": None}
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD["chat"]) + "\n")

    def dry_run(source: str, **overrides) -> str:
        data = {"kind": "chat", "sources": [{"path": str(tmp_path / "rows.jsonl")}], "tokens_per_batch": 64}
        values = {"model": {"source": source, **overrides}, "data": data, "log": {"directory": str(tmp_path / "run")}}
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
        assert training.train(tmp_path / "mine.yaml", [], **options) == 0
        return capsys.readouterr().out

    weights = str(tmp_path / "weights")
    save_weights(start, weights)
    assert "rows.jsonl: the first 1 samples encoded, all samples used" in dry_run(str(start), weights=weights)
    told = dry_run("qwen3", overrides=SMALL)
    assert "data         no sample was encoded: the tokenizer of 'qwen3' is trained when the run starts" in told
    (tmp_path / "rows.jsonl").write_text(json.dumps(BAD["a role that the template refuses"][1]) + "\n")
    with pytest.raises(PatchgenError, match=r"rows.jsonl:1: .*no role judge"):
        dry_run(str(start), weights=weights)


def save_weights(start: Path, folder: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(start)).save_pretrained(folder)


def test_batches_shorter_than_any_sample_are_refused_before_ranks(start, tmp_path):
    (tmp_path / "long.jsonl").write_text((json.dumps({"text": "a and b " * 40}) + "\n") * 3)
    data = {"sources": [{"path": str(tmp_path / "long.jsonl")}], "tokens_per_batch": 16, "on_long": "skip"}
    recipe = recipe_of(start, tmp_path, data)
    parts = setup.data_parts(recipe)
    with pytest.raises(
        RecipeError, match=r"data: no sample fits a batch: .*long.jsonl:1: \d+ tokens, more than the limit of 16"
    ):
        data_check.require_lengths(recipe, parts)
    with pytest.raises(DataError, match=r"long.jsonl:1: .*set data.on_long to"):
        data_check.require_lengths(recipe_of(start, tmp_path, data | {"on_long": "error"}), parts)
    for change in ({"on_long": "truncate"}, {"tokens_per_batch": 4096}):
        data_check.require_lengths(recipe_of(start, tmp_path, data | change), parts)
    with (tmp_path / "long.jsonl").open("a") as file:
        file.write('{"text": "a"}\n')
    data_check.require_lengths(recipe, parts)
