"""The doctor finds each planted fault by what it is, says what to do, and passes the sound model."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import planted
import pytest
from small_processors import byte_tokenizer

from patchgen.runtime.doctor import CHECKS, examine
from patchgen.runtime.doctor.chat_template import ChatTemplate
from patchgen.runtime.doctor.finding import FAILED, NOT_CHECKED, PASSED, failed, not_checked, passed
from patchgen.runtime.doctor.labels import labelled_spans, shift_problem
from patchgen.runtime.doctor.patient import Patient
from patchgen.runtime.doctor.samples import ANY_TWO, MAX_LENGTH, Sample, fits_in_row_with
from patchgen.runtime.doctor.step_checks import run_ranks, single_step
from patchgen.runtime.train import first_loss
from patchgen.runtime.train import recipe as recipes
from patchgen.runtime.train.recipe import RecipeError, from_dict
from patchgen.runtime.train.setup import DataParts

HERE = Path(__file__).parent
SLOW = ("proof", "step", "layout")
"""Of the sound model alone: they compare what no planted fault is about."""


def test_a_sound_model_passes_every_check(toy):
    report = examine(from_dict(toy.values | {"parallel": {"ep": 2}}))
    assert report.exit_status == 0, report.text()
    assert [entry.check for entry in report.entries] == [check.name for check in CHECKS]
    assert {entry.finding.status for entry in report.entries} == {PASSED}, report.text()
    assert "[[In Dresden.<|im_end|>]]" in report.text()
    assert report.as_json()["failed"] == []
    assert 0 < first_loss.read_measured(from_dict(toy.values)) < 1  # a run of any layout is held to it
    assert "on 2 ranks (sp 1, ep 2)" in report["layout"].summary.lower()


def test_a_step_with_the_batches_of_several_ranks_is_no_captured_graph(toy):
    captured = from_dict(toy.values | {"train": {"steps": 2, "batches_per_step": 1, "cuda_graph": True}})
    step = single_step(captured, 2).train
    assert (step.batches_per_step, step.cuda_graph) == (2, False)  # a graph is of one micro-batch


@pytest.mark.parametrize("fault", planted.FAULTS)
@pytest.mark.sampled(3)
def test_a_planted_fault_is_found_by_what_it_is(toy, fault, tmp_path):
    report = examine(planted.planted(toy, fault, tmp_path / "planted"), skip=SLOW)
    assert planted.is_found(planted.finding(report, fault), fault), report.text()
    assert report.exit_status == 1


def test_a_cast_in_the_modeling_file_is_seen_against_plain_transformers(toy, tmp_path):
    report = examine(planted.planted(toy, "bf16 router", tmp_path / "planted"), skip=(*SLOW, "alternatives"))
    assert "model.layers.0.mlp.gate is the first" in report["plain transformers"].summary
    assert "a rounding error of bfloat16" in report["plain transformers"].summary
    assert "model.layers.0.mlp.gate is the first" in report["export"].summary


def test_new_tokens_are_named_with_the_setting_and_with_it_every_check_passes(toy, tmp_path):
    """A tokenizer with two tokens more than the weights have rows, both in the data: equal rows that are not taken for damage."""
    from transformers import AutoTokenizer

    (rows := tmp_path / "rows.jsonl").write_text(
        (toy.folder.parent / "rows.jsonl").read_text().replace("The ", "<new a><new b>")
    )
    shutil.copytree(toy.folder, tmp_path / "toy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "toy")
    tokenizer.add_tokens(["<new a>", "<new b>"])
    tokenizer.save_pretrained(tmp_path / "toy")
    values = toy.values | {"data": toy.values["data"] | {"sources": [{"path": str(rows)}]}}
    skip = (*SLOW, "alternatives")
    report = examine(from_dict(values | {"model": {"source": str(tmp_path / "toy")}}), skip=skip)
    assert "set model.resize_vocab: {}" in report["tokenizer"].summary and report["tokenizer"].status == FAILED
    stale = {"source": str(tmp_path / "toy"), "overrides": {"vocab_size": len(tokenizer)}}
    report = examine(from_dict(values | {"model": stale}), skip=skip)
    assert "set model.resize_vocab: {}" in report["weights"].advice and "tie_word" not in report["weights"].advice
    report = examine(from_dict(values | {"model": {"source": str(tmp_path / "toy"), "resize_vocab": {}}}), skip=skip)
    assert report.exit_status == 0, report.text()
    sizes = len(tokenizer) - 2, len(tokenizer)
    assert f"embed_tokens.weight grows from {sizes[0]} to {sizes[1]} rows" in report["weights"].summary
    assert {report[name].status for name in ("plain transformers", "export")} == {PASSED}, report.text()


def test_random_weights_are_judged_by_ln_v_alone(toy):
    values = json.loads(json.dumps(toy.values))
    values["model"]["weights"] = "random"
    report = examine(from_dict(values), skip=SLOW)
    assert report.exit_status == 0, report.text()
    assert "with random weights" in report["first loss"].summary
    assert report["alternatives"].status == report["plain transformers"].status == NOT_CHECKED
    assert report["export"].status == PASSED


def test_a_long_prompt_is_not_cut_before_its_answer(toy, tmp_path):
    values = json.loads(json.dumps(toy.values))
    long, short = ({"role": "user", "content": text} for text in ("river " * 100, "The Elbe?"))
    answer = {"role": "assistant", "content": "In Dresden. " * 50}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": [one, answer]}) + "\n" for one in (long, short)))
    values["data"] |= {"sources": [{"path": str(file)}], "tokens_per_batch": 4096}
    patient = Patient(from_dict(values))
    first, second = patient.samples
    patient.close()
    assert len(first.ids) > 600 + 600 and not first.is_cut
    assert shown(first, patient).endswith(f"[[{answer['content']}<|im_end|>]]\n")
    assert len(second.ids) == MAX_LENGTH and second.is_cut


def shown(sample, patient):
    """The sample as text, what is learned between double brackets."""
    (start, end), decode = next(labelled_spans(sample.labels)), patient.tokenizer.decode
    return f"{decode(sample.ids[:start])}[[{decode(sample.ids[start:end])}]]{decode(sample.ids[end:])}"


@pytest.mark.parametrize(
    ("others", "own", "incompatible", "fits"),
    [
        (["image", ""], "video", [("image", "video")], False),
        (["image", ""], "video", [("audio", "video")], True),
        (["image", ""], "video", ANY_TWO, False),
        (["image", ""], "image", ANY_TWO, True),
        (["image"], "", ANY_TWO, True),
        ([], "image video", ANY_TWO, True),
    ],
)
def test_a_row_contains_no_modalities_that_the_model_mixes_up(others, own, incompatible, fits):
    sample, *in_row = (Sample("here", {}, modalities=frozenset(names.split())) for names in (own, *others))
    assert fits_in_row_with(sample, in_row, incompatible) is fits


def test_a_rank_that_fails_ends_those_that_wait_for_it():
    script = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('of rank 1')\ntime.sleep(600)"
    ranks = [{**os.environ, "RANK": str(rank)} for rank in range(2)]
    with pytest.raises(
        RuntimeError, match=r"rank 1 was the first to end.*rank 1: ValueError: of rank 1 / rank 0: no error"
    ):
        run_ranks([sys.executable, "-S", "-c", script], ranks, 300)
    with pytest.raises(RuntimeError, match=r"some were still running after 0 s"):
        run_ranks([sys.executable, "-S", "-c", script], ranks[:1], 0.2)


IN_PARTS = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- for part in message.content -%}{{ part.text }}{%- endfor -%}{{ '<|im_end|>' + '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""As templates of vision models: content is a list, a string would be written as nothing."""
UNSEARCHABLE = (
    "{%- for message in messages -%}{%- if message.content[0] not in 'WB' -%}{{ raise_exception('unasked') }}{%- endif -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>model\n' }}{%- endif -%}"
)
"""Takes a question and its answer, but none in other letters, by which the texts of messages are traced."""
ENDS_EARLIER_TURNS = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- if not loop.last or add_generation_prompt -%}{{ '<|im_end|>' + '\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""It was said to end turns with the start of the next one."""


@pytest.mark.parametrize(
    ("kind", "template", "status", "words"),
    [
        ("multimodal", IN_PARTS, PASSED, "ends with '<|im_end|>'"),
        ("classification", None, NOT_CHECKED, "needs none for plain texts"),
        ("preference", None, FAILED, "no chat template"),
        ("chat", None, FAILED, "no chat template"),
        (
            "chat",
            UNSEARCHABLE,
            FAILED,
            "turn cannot be located in what the template writes: what the chat template writes cannot be traced",
        ),
        ("chat", ENDS_EARLIER_TURNS, FAILED, "but not of a conversation's last one"),
    ],
)
def test_a_chat_template_is_judged_by_what_its_data_are(toy, kind, template, status, words):
    values = json.loads(json.dumps(toy.values))
    values["data"]["kind"] = kind
    patient = Patient(from_dict(values))
    patient.built["parts"] = DataParts(byte_tokenizer(template, {}))
    found = ChatTemplate().run(patient)
    patient.close()
    assert found.status == status, found
    assert words in found.summary


NEXT_MARKER = (
    "{%- for message in messages -%}{{ '<|box|>' if message.role == 'user' else '<|im_start|>' }}{{ message.content }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>' }}{%- endif -%}"
)
"""Writes no token after a turn, as GLM's: generation stops at the marker of the user."""
OTHER_END = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|box|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


@pytest.mark.parametrize("template", [NEXT_MARKER, OTHER_END], ids=["next marker", "other end"])
@pytest.mark.parametrize("is_eos", [True, False])
def test_generation_has_to_stop_at_what_ends_the_turns_of_a_template(toy, template, is_eos):
    patient = Patient(from_dict(json.loads(json.dumps(toy.values))))
    tokenizer = byte_tokenizer(template, {"box_token": "<|box|>"})
    if is_eos:
        tokenizer.eos_token = "<|box|>"
    patient.built["parts"] = DataParts(tokenizer)
    found = ChatTemplate().run(patient)
    patient.close()
    if is_eos:
        assert found.status == PASSED, found
        assert "ends with '<|box|>'" in found.summary
    else:
        assert found.status == FAILED, found
        assert "ends turns with '<|box|>', and generation stops at '<|im_end|>'" in found.summary


def test_what_a_failed_part_leaves_unchecked_is_named(toy, tmp_path):
    report = examine(planted.planted(toy, "two heads", tmp_path / "planted"), skip=SLOW)
    assert report["packing"] == not_checked("it needs the model: see 'weights'.")
    assert "tie_word_embeddings = true" in report["weights"].advice


def test_a_model_that_does_not_fit_is_reported_with_both_sizes(toy, monkeypatch):
    monkeypatch.setattr("patchgen.runtime.checkpoint.host_memory.available", lambda: 1000.0)
    report = examine(from_dict(toy.values), skip=SLOW)
    assert report.exit_status == 0, report.text()
    assert report["weights"].status == report["kernels"].status == NOT_CHECKED
    found = report["weights"].summary
    assert "layer and the parameters outside the layers take 0.09 MiB, and 0.00 MiB are available" in found
    assert report["kernels"] == not_checked("it needs the model: see 'weights'.")
    assert report["labels"].status == PASSED


def test_a_check_that_does_not_exist_is_refused(toy):
    with pytest.raises(RecipeError, match="There is no check 'kernel'. Closest: kernels"):
        examine(from_dict(toy.values), skip=["kernel"])


def test_the_command_prints_json_and_exits_by_what_failed(toy, tmp_path, capsys):
    import yaml

    from patchgen.commands.doctor import doctor

    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(toy.values))
    asked = ["recipe", "tokenizer", "step"]
    skip = [check.name for check in CHECKS if check.name not in asked]
    assert doctor(file, [], skip=skip, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)  # and nothing of what the step prints as it begins
    assert [one["check"] for one in report["checks"] if one["status"] == PASSED] == asked
    assert doctor(file, ["model.freeze=[model.*]"], skip=skip, as_json=False) == 1
    assert "FAILED  model.freeze = ['model.*'] leaves nothing to train" in capsys.readouterr().out


def test_the_page_has_every_check_in_its_order_and_words():
    page = (HERE.parents[2] / "docs" / "doctor.md").read_text()
    checks = page.partition("## The checks")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[:2] for line in checks.splitlines() if line.startswith("| ") and "---" not in line]
    assert [[name.removeprefix("| "), asks] for name, asks in rows[1:]] == [
        [check.name, " ".join(check.__doc__.split())] for check in CHECKS
    ]
    table = page.partition("```\n")[2].partition("\n\n")[0].splitlines()
    shown = [line[:18].strip() for line in table if not line.startswith(" ")]
    assert shown == [check.name for check in CHECKS]


def test_findings_have_a_status_of_their_own():
    assert [one.status for one in (passed("a"), failed("a", "b"), not_checked("a"))] == [PASSED, FAILED, NOT_CHECKED]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([5, 6, 7, 8], None),
        ([-100, 6, 7, -100], None),
        ([6, 7, 8, -100], "shifted to the left"),
        ([-100, 5, 6, 7], "shifted to the right"),
        ([5, 9, 7, 8], "the label of token 1 is 9, and the token is 6"),
    ],
)
def test_labels_are_the_ids_of_their_own_places(labels, expected):
    import torch

    found = shift_problem(Sample("here", {"input_ids": torch.tensor([5, 6, 7, 8]), "labels": torch.tensor(labels)}))
    assert found is None if expected is None else expected in found


def test_a_processor_whose_mark_in_the_text_is_another_token_than_its_places_is_sound(home, tmp_path):
    """That of gemma3: `image_token` is where an image begins."""
    folder = tmp_path / "toy"
    runpy.run_path(str(HERE.parents[2] / "examples" / "toy_vision_model.py"))["main"](str(folder))
    recipe = recipes.load(HERE.parents[2] / "recipes" / "vision_toy.yaml", {"model.source": str(folder)})
    skip = [check.name for check in CHECKS if check.name not in ("recipe", "tokenizer", "labels")]
    report = examine(recipe, skip=skip)
    assert report.exit_status == 0, report.text()
    assert "<image_soft_token> (x 4)" in report["labels"].details and "\n\n" in report["labels"].details


def test_runs_of_tokens_with_a_loss():
    assert list(labelled_spans([-100, 1, 2, -100, 3])) == [(1, 3), (4, 5)]
    assert list(labelled_spans([-100])) == []
