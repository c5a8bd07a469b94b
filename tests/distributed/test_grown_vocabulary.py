"""A vocabulary that grows: the same rows on any number of ranks, and a run with new tokens to its export and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cases_checkpoints
import cases_trainer as cases
import pytest
import torch
from rounding import require_equal_up_to_rounding
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from patchgen import cli

STORED, ROWS = 300, 320
NEW_TOKENS = ["<|new a|>", "<|new b|>", "<|new c|>"]


@pytest.mark.parametrize("new_rows", ["mean", "random"])
def test_new_rows_are_the_same_bit_for_bit_in_every_layout(new_rows, trainer_folder, tmp_path, one_rank, four_ranks):
    """The last of four ranks holds old and new rows; the two replicas of halves must not count a row twice."""
    source, exports = str(trainer_folder / "start"), []
    for ranks, name, layout in (
        (one_rank, "one", {}),
        (four_ranks, "four", {}),
        (four_ranks, "replicas", {"dp_replicate": 2, "ep": 2, "sp": 2}),
    ):
        options = (source, str(tmp_path / name), ROWS, new_rows, layout)
        figures = ranks.run(cases_checkpoints.grown_export, *options)
        exports.append(load_file(tmp_path / name / "model.safetensors"))
        for num_read, num_held in figures:
            assert num_read <= num_held, "a rank reads at most what it holds"
    stored = load_file(trainer_folder / "start" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert exports[0][name].shape[0] == ROWS and torch.equal(exports[0][name][:STORED], stored[name])
    for other in exports[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in exports[0].items())


@pytest.fixture(scope="module")
def grown_folder(trainer_folder, tmp_path_factory) -> Path:
    """The weights of `trainer_folder`, a tokenizer with three tokens more, and texts with them."""
    place = tmp_path_factory.mktemp("grown")
    shutil.copytree(trainer_folder / "start", place / "start")
    tokenizer = AutoTokenizer.from_pretrained(place / "start")
    tokenizer.add_tokens(NEW_TOKENS[:2])
    tokenizer.add_special_tokens({"pad_token": NEW_TOKENS[2]})
    tokenizer.save_pretrained(place / "start")
    lines = [json.loads(line)["text"] for line in (trainer_folder / "text.jsonl").read_text().splitlines()]
    rows = [{"text": f"<|new a|>{line}<|new b|>"} for line in lines]
    (place / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def values_of(folder: Path, run: Path, steps: int, **parallel) -> dict:
    return cases.recipe_of(
        folder,
        model={"source": str(folder / "start"), "resize_vocab": {"multiple_of": 16}},
        parallel=parallel,
        train={"steps": steps, "batches_per_step": 4},
        optim={"lr": 3e-3, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0},
        checkpoint={"export": True},
        log={"directory": str(run)},
    )


def test_a_run_with_new_tokens_is_the_same_on_two_ranks_resumes_and_exports(
    grown_folder, tmp_path, one_rank, two_ranks
):
    alone, printed = one_rank.run(cases.train_and_print, values_of(grown_folder, tmp_path / "one", 4))[0]
    assert "model.embed_tokens.weight from 300 to 304 rows" in printed and "lm_head.weight from 300 to 304" in printed
    both = two_ranks.run(cases.train, values_of(grown_folder, tmp_path / "two", 2))[0][0]
    both += two_ranks.run(cases.train, values_of(grown_folder, tmp_path / "two", 4))[0][0]  # resumed
    assert len(both) == 4
    require_equal_up_to_rounding(both, alone)

    export = tmp_path / "two" / "export"
    tokenizer, model = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)
    assert model.config.vocab_size == 304 and len(tokenizer) == 303
    ids = tokenizer("<|new a|>def<|new b|>")["input_ids"]
    assert {300, 301} <= set(ids) and tokenizer.pad_token_id == 302
    rows = model.get_input_embeddings().weight
    assert not torch.equal(rows[300], rows[301]), "the new rows were trained, each by its own token"
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits
    ours = one_rank.run(
        cases.logits_of, {**values_of(grown_folder, tmp_path / "three", 1), "model": {"source": str(export)}}, ids
    )
    assert logits.shape[-1] == 304
    require_equal_up_to_rounding(ours[0], logits)


def test_config_and_tokenizer_in_one_folder_and_weights_in_another(trainer_folder, grown_folder, tmp_path, one_rank):
    """The weights stay as they were downloaded, with their smaller tokenizer; both exports have that of the run."""
    (source := tmp_path / "source").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(grown_folder / "start" / name, source)
    values = values_of(grown_folder, tmp_path / "run", 1)
    shutil.copytree(trainer_folder / "start", weights := tmp_path / "weights")
    (weights / "special_tokens_map.json").write_text('{"pad_token": "old"}')
    values["model"] |= {"source": str(source), "weights": str(weights)}
    one_rank.run(cases.train, values)
    done = CliRunner().invoke(cli.app, ["export", str(tmp_path / "run"), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    for export in (tmp_path / "run" / "export", tmp_path / "out"):
        assert len(AutoTokenizer.from_pretrained(export)) == 303 and not (export / "special_tokens_map.json").exists()
        assert AutoModelForCausalLM.from_pretrained(export).config.vocab_size == 304


def test_ids_of_a_transform_beyond_the_vocabulary_end_all_ranks_with_the_ids(trainer_folder, tmp_path, two_ranks):
    (tmp_path / "ids.py").write_text(
        "def ids(row):\n    return {'input_ids': [5, 310, 7, 333], 'labels': [5, 310, 7, 333]}\n"
    )
    source = {"path": str(trainer_folder / "text.jsonl"), "transform": f"{tmp_path / 'ids.py'}:ids"}
    values = cases.recipe_of(trainer_folder, data={"sources": [source]}, log={"directory": str(tmp_path / "run")})
    told = two_ranks.run(cases.data_error, values)
    assert all("no embedding for, 310, 333: it has 300 rows" in text and "{to: 334}" in text for text, _ in told)


def test_another_vocabulary_is_not_resumed(grown_folder, tmp_path, one_rank):
    values = values_of(grown_folder, tmp_path / "run", 1)
    one_rank.run(cases.train, values)
    values["model"] |= {"resize_vocab": {"multiple_of": 64}}
    values["train"] |= {"steps": 2}
    told = one_rank.run(cases.refusal_of_a_run, values)[0]
    assert "different objective, optimizer, vocabulary" in told and "model.resize_vocab.multiple_of: 16 -> 64" in told


def test_adapters_leave_new_rows_as_they_are_so_they_must_differ(grown_folder, tmp_path, one_rank, two_ranks):
    """What is saved loads in plain PEFT on upstream's model, resized, and gives the run's logits; so does the merged export."""
    from peft import PeftModel

    values = values_of(grown_folder, tmp_path / "run", 2) | {"lora": {"rank": 4, "merge": True}}
    told = two_ranks.run(cases.refusal, values)
    assert all("new_rows = mean with the section lora" in text and "set new_rows: random" in text for text in told)
    values["model"]["resize_vocab"]["new_rows"] = "random"
    expected = two_ranks.run(cases.train_adapters, values)[0]["logits"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export").eval()
    assert len(merged.get_output_embeddings().weight[300:].unique(dim=0)) == 4
    base = AutoModelForCausalLM.from_pretrained(grown_folder / "start").eval()
    base.resize_token_embeddings(304)
    adapted = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run" / "adapter")) == 303
    for model in (merged, adapted):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([cases.PROBE])).logits
        assert logits.shape[-1] == 304
        require_equal_up_to_rounding(logits, expected)
