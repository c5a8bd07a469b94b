"""What happens around the steps of a run: evaluation, resuming elsewhere, the end of the data, Muon, divergence."""

from __future__ import annotations

import json
import re
import shutil
import socket

import cases_trainer as cases
import pytest
import torch
import transformers
from rounding import require_equal_up_to_rounding

from patchgen.runtime import launch
from patchgen.runtime.train import recipe as recipes
from patchgen.runtime.train import resume_changes

FOUR = {"ep": 2, "sp": 2}


def test_evaluation_is_the_same_on_any_ranks_and_changes_nothing(trainer_folder, tmp_path, one_rank, four_ranks):
    """A set that fills one batch is read once, where four batches are allowed."""
    values = cases.recipe_of(trainer_folder, train={"steps": 4, "batches_per_step": 4}, log={"directory": "."})
    plain = {**values, "log": {"directory": str(tmp_path / "plain")}}
    expected = one_rank.run(cases.train, plain)[0][0]
    texts = ["def area(x, y):\n    return x * y", "import ast"]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = transformers.AutoTokenizer.from_pretrained(trainer_folder / "start")
    num_labels = sum(len(tokenizer(text)["input_ids"]) for text in texts)  # with the end of each, less its first token
    evaluated = {
        **values,
        "eval_data": {**values["data"], "sources": [{"path": str(tmp_path / "few.jsonl")}], "seed": 7},
    }
    evaluated["train"] = {**values["train"], "eval_every": 2, "eval_batches": 4}
    found = {}
    for name, pool, layout in (("one", one_rank, {}), ("four", four_ranks, FOUR)):
        run = {**evaluated, "parallel": layout, "log": {"directory": str(tmp_path / name)}}
        losses, evaluations = pool.run(cases.train_and_evaluate, run)[0]
        require_equal_up_to_rounding(losses, expected)
        assert [one.step for one in evaluations] == [2, 4]
        assert evaluations[1].loss < evaluations[0].loss
        found[name] = evaluations
    require_equal_up_to_rounding([one.loss for one in found["four"]], [one.loss for one in found["one"]])
    assert {one.labels for evaluations in found.values() for one in evaluations} == {num_labels}


def test_sources_are_told_apart_on_any_ranks_as_plain_transformers_has_them(
    trainer_folder, tmp_path, one_rank, four_ranks
):
    """The first step is plain transformers'; both, and the evaluation at the end, which no `eval_every` asks for, are the same
    with other kernels, rows and ranks."""
    lines = (trainer_folder / "text.jsonl").read_text().splitlines(keepends=True)
    sources = []
    for name, part in (("a", lines[: len(lines) // 3]), ("b", lines[len(lines) // 3 :])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
        sources.append({"path": str(tmp_path / f"{name}.jsonl"), "name": name, "weight": 1})
    values = cases.recipe_of(
        trainer_folder,
        data={"sources": sources},
        optim={"warmup_steps": 0},
        train={"steps": 2, "batches_per_step": 4, "eval_batches": 4},
    )
    values["eval_data"] = {**values["data"], "seed": 7}
    documents = [one for row in one_rank.run(cases.losses_by_document, values, 4)[0] for one in row]
    assert {source for source, _, _ in documents} == {0, 1}
    found = {}
    for name, pool, layout, kernel in (
        ("auto", one_rank, {}, "auto"),
        ("eager", one_rank, {}, "eager"),
        ("apart", one_rank, {}, "auto"),
        ("four", four_ranks, FOUR, "chunked"),
    ):
        run = {
            **values,
            "parallel": layout,
            "kernels": {"causal_lm_loss": kernel},
            "log": {"directory": str(tmp_path / name)},
        }
        run["model"] = {**values["model"], "separate_documents": name == "apart"}
        found[name] = pool.run(cases.figures_of_sources, run)[0]
        assert len(found[name]) == 3
        for loss, labels, figures in found[name]:
            assert sum(one.labels for one in figures.values()) == labels
            require_equal_up_to_rounding(sum(one.loss * one.labels for one in figures.values()) / labels, loss)
        for number, figures in enumerate(found[name][0][2].values()):
            own = [(labels, loss) for source, labels, loss in documents if source == number]
            assert figures.labels == sum(labels for labels, _ in own)
            require_equal_up_to_rounding(figures.loss, sum(loss for _, loss in own) / figures.labels)
    for name in ("eager", "apart", "four"):
        for mine, first in zip(found[name], found["auto"], strict=True):
            for key, figures in mine[2].items():
                assert (figures.tokens, figures.labels) == (first[2][key].tokens, first[2][key].labels)
                require_equal_up_to_rounding(figures.loss, first[2][key].loss)


def test_a_run_of_four_ranks_continues_on_one(trainer_folder, tmp_path, one_rank, four_ranks):
    values = cases.recipe_of(
        trainer_folder,
        parallel=FOUR,
        train={"steps": 6, "batches_per_step": 4},
        checkpoint={"every": 3, "export": False},
        log={"directory": str(tmp_path / "run")},
    )
    losses, _, summary = four_ranks.run(cases.train, values)[0]
    assert (summary.steps, summary.reason) == (6, "steps")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    rest, _, summary = one_rank.run(cases.train, {**values, "parallel": {}})[0]
    assert summary.steps == 6
    require_equal_up_to_rounding(rest, losses[3:])


def test_a_second_run_in_a_directory_is_refused_and_names_the_first(trainer_folder, tmp_path, one_rank):
    values = cases.recipe_of(trainer_folder, train={"steps": 3}, log={"directory": str(tmp_path / "run")})
    told = one_rank.run(cases.second_start, values)[0]
    assert len(told) == 3 and (tmp_path / "run" / "checkpoints").is_dir() and not (tmp_path / "run.1").exists()
    for text in told:
        assert re.search(rf"run is in use: process \d+ on {socket.gethostname()}, since 20.* trains there", text), text
    assert not (tmp_path / "run" / "running.json").exists()


def test_a_run_that_is_done_writes_only_an_export_that_is_gone(trainer_folder, tmp_path, one_rank):
    values = cases.recipe_of(
        trainer_folder, train={"steps": 3}, checkpoint={"export": True}, log={"directory": str(tmp_path / "run")}
    )
    weights = tmp_path / "run" / "export" / "model.safetensors"
    assert len(one_rank.run(cases.train_and_log, values)[0][0]) == 3
    written = weights.stat().st_mtime_ns
    losses, summary = one_rank.run(cases.train_and_log, values)[0]
    assert losses == [] and summary.export == str(weights.parent)
    assert weights.stat().st_mtime_ns == written
    weights.unlink()
    losses, _ = one_rank.run(cases.train_and_log, values)[0]
    assert losses == [] and weights.is_file()


def test_what_changed_is_told_and_another_optimizer_refused(trainer_folder, tmp_path, one_rank):
    """By the recipe of the newest checkpoint; one whose bytes changed on the disk is passed over."""
    values = cases.recipe_of(
        trainer_folder, train={"steps": 6}, checkpoint={"every": 4}, log={"directory": str(tmp_path / "run")}
    )
    one_rank.run(cases.train, values)
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [recipes.load(folder / "recipe.yaml").train.steps for folder in folders] == [6, 6]
    data = next(folders[-1].glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-2] + b"xx")
    other = recipes.from_dict({**values, "optim": {**values["optim"], "name": "muon"}})
    for refused in (lambda: one_rank.run(cases.train, recipes.to_dict(other)), lambda: launch.launch(other)):
        with pytest.raises(Exception, match=r"(?s)cannot be resumed .* optim.name: 'adamw' -> 'muon'.*--fresh"):
            refused()
    changed = {**values, "train": {**values["train"], "steps": 8}}
    told = resume_changes.since(recipes.from_dict(changed)).description
    assert told == "Resumed with a recipe that differs from step-00000006's:\n  train.steps: 6 -> 8"
    losses, told = one_rank.run(cases.train_and_print, changed)[0]
    assert len(losses) == 4, "from step 4: step 6 is damaged"
    more = {**values, "train": {**values["train"], "steps": 9}}
    assert one_rank.run(cases.recipes_read, more)[0] == 1, "each checkpoint is compared once"
    assert "differs from step-00000004's:\n  train.steps: 6 -> 8" in told and "step-00000006's" not in told


def test_an_evaluation_changes_no_random_number_of_training(trainer_folder, tmp_path, one_rank):
    """Workers of a stream draw their seed, transforms and models may draw too."""
    values = cases.recipe_of(trainer_folder, train={"steps": 3}, log={"directory": str(tmp_path / "plain")})
    plain = one_rank.run(cases.draws, values)[0]
    source = {"path": str(trainer_folder / "text.jsonl"), "streaming": True}
    values["eval_data"] = {**values["data"], "sources": [source]}
    values |= {"train": {**values["train"], "eval_every": 1}, "log": {"directory": str(tmp_path / "evaluated")}}
    assert one_rank.run(cases.draws, values)[0] == plain


def test_an_evaluation_without_a_batch_says_what_was_read(trainer_folder, tmp_path, one_rank):
    (tmp_path / "bad.jsonl").write_text('{"text": ""}\n' * 3)
    values = cases.recipe_of(trainer_folder, log={"directory": str(tmp_path / "run")})
    source = {"path": str(tmp_path / "bad.jsonl"), "streaming": True}
    values["eval_data"] = {**values["data"], "sources": [source], "on_bad": "skip"}
    told = one_rank.run(cases.evaluation_of_nothing, values)[0]
    assert re.search("eval_data: no sample can be used.* What was read: 3 bad.* To fix: correct the samples", told)


def test_an_error_of_one_rank_in_a_resume_ends_all(trainer_folder, tmp_path, two_ranks):
    values = cases.recipe_of(trainer_folder, train={"steps": 3}, log={"directory": str(tmp_path / "run")})
    two_ranks.run(cases.train, values)
    told = two_ranks.run(cases.errors_of_one_rank_in_a_resume, values, timeout=60)
    assert told == [["rank 0: OSError: the disk is gone", "rank 1: other data"]] * 2


@pytest.mark.parametrize("section", ["data", "eval_data"])
def test_data_of_which_nothing_can_be_used_are_counted_over_all_ranks(section, trainer_folder, tmp_path, two_ranks):
    (tmp_path / "bad.jsonl").write_text('{"text": ""}\n' * 5)
    values = cases.recipe_of(trainer_folder, log={"directory": str(tmp_path / "run")})
    source = {"path": str(tmp_path / "bad.jsonl"), "streaming": True}
    values[section] = {**values["data"], "sources": [source], "on_bad": "skip", "epochs": 1}
    told = two_ranks.run(cases.data_error, values, timeout=60)
    assert told[0] == told[1] and "What was read: 5 bad" in told[0][0], told


def test_evaluation_data_of_which_nothing_can_be_used_end_the_run_before_its_first_step(
    trainer_folder, tmp_path, one_rank
):
    (tmp_path / "bad.jsonl").write_text('{"text": ""}\n' * 3)
    values = cases.recipe_of(trainer_folder, log={"directory": str(tmp_path / "run")})
    source = {"path": str(tmp_path / "bad.jsonl"), "streaming": True}  # others are refused when they are tokenized
    values["eval_data"] = {**values["data"], "sources": [source], "on_bad": "skip"}
    told, steps = one_rank.run(cases.data_error, values)[0]
    assert re.search("eval_data: no sample can be used.* What was read: .*3 bad.* To fix: correct the samples", told)
    assert steps == 0


def test_a_save_that_fails_ends_the_run_or_not_as_the_recipe_says(trainer_folder, tmp_path, one_rank):
    for on_failed in ("stop", "continue"):
        values = cases.recipe_of(
            trainer_folder,
            train={"steps": 7},
            checkpoint={"every": 2, "export": False, "asynchronous": False, "on_failed": on_failed},
            log={"directory": str(tmp_path / on_failed)},
        )
        steps, error = one_rank.run(cases.train_with_a_disk_that_fails, values, 3, 5)[0]
        if on_failed == "stop":
            assert steps == 4 and re.search(r"Step 4 could not be saved in .*checkpoints \(.* GB free there\)", error)
        else:
            saved = sorted(path.name for path in (tmp_path / on_failed / "checkpoints").glob("step-*"))
            assert (steps, error) == (7, "") and saved == ["step-00000002", "step-00000006", "step-00000007"]


def test_a_changed_learning_rate_counts_when_a_run_continues(trainer_folder, tmp_path, one_rank):
    values = cases.recipe_of(
        trainer_folder, optim={"warmup_steps": 0}, train={"steps": 2}, log={"directory": str(tmp_path / "run")}
    )
    one_rank.run(cases.train, values)
    changed = {**values, "train": {**values["train"], "steps": 3}, "optim": {"lr": 0.5, "schedule": "constant"}}
    assert one_rank.run(cases.learning_rates, changed)[0] == [0.5]


def test_all_ranks_end_with_the_data(trainer_folder, tmp_path, four_ranks):
    values = cases.recipe_of(
        trainer_folder,
        data={"epochs": 1, "tokens_per_batch": 512},
        train={"steps": 1000, "batches_per_step": 4},
        log={"directory": str(tmp_path / "run")},
    )
    summaries = [summary for _, _, summary in four_ranks.run(cases.train, values)]
    assert {summary.reason for summary in summaries} == {"data"}
    assert len({summary.steps for summary in summaries}) == 1 and 0 < summaries[0].steps < 1000


@pytest.mark.parametrize("epochs", [None, 1], ids=["endless", "one epoch"])
def test_a_sample_that_one_rank_refuses_ends_all_with_the_same_words(epochs, trainer_folder, tmp_path, two_ranks):
    """The second of two ranks meets the broken line, steps after the first: no rank waits for it."""
    lines = (trainer_folder / "text.jsonl").read_text().splitlines()
    (tmp_path / "broken.jsonl").write_text("\n".join([*lines[:81], '{"text": ', *lines[81:]]))
    values = cases.recipe_of(
        trainer_folder,
        data={"sources": [{"path": str(tmp_path / "broken.jsonl"), "streaming": True}], "pool": 1, "epochs": epochs},
        train={"steps": 1000, "batches_per_step": 2},
        log={"directory": str(tmp_path / "run")},
    )
    told = two_ranks.run(cases.data_error, values, timeout=60)

    assert told[0] == told[1] and told[0][1] > 0
    assert f"rank 1: {tmp_path / 'broken.jsonl'}:82: not readable" in told[0][0]
    assert "data.on_bad" in told[0][0]


def test_a_source_that_only_one_rank_cannot_open_ends_all(trainer_folder, tmp_path, two_ranks):
    source = {"path": "text.jsonl", "streaming": True}
    values = cases.recipe_of(trainer_folder, data={"sources": [source]}, log={"directory": str(tmp_path / "run")})
    told = two_ranks.run(cases.data_error_where_one_sees_nothing, values, str(tmp_path), timeout=60)
    assert told[0] == told[1] and told[0].startswith("rank 1: No data at ")


def test_evaluation_data_that_one_rank_cannot_open_are_named(trainer_folder, tmp_path, two_ranks):
    values = cases.recipe_of(trainer_folder, log={"directory": str(tmp_path / "run")})
    values["eval_data"] = {**values["data"], "sources": [{"path": "text.jsonl", "streaming": True}]}
    told = two_ranks.run(cases.data_error_where_one_sees_nothing, values, str(tmp_path), timeout=60)
    assert told[0] == told[1] and told[0].startswith("rank 1: eval_data: No data at ")


def test_machines_with_different_recipes_are_refused(trainer_folder, tmp_path, two_ranks):
    values = cases.recipe_of(trainer_folder, log={"directory": str(tmp_path / "run")})
    for told in two_ranks.run(cases.refusal_of_another_recipe, values, timeout=60):
        assert "different recipes" in told and "optim.lr: 0.001 on rank 0, 0.002 on rank 1" in told
        assert "parallel.ep: 1 on rank 0, 2 on rank 1" in told


def test_machines_that_do_not_share_the_run_directory_are_refused(tmp_path, two_ranks):
    for told in two_ranks.run(cases.refusal_of_a_disk_of_its_own, str(tmp_path), timeout=60):
        assert "must be shared by all machines: ranks 1 (" in told
        assert "Set log.directory to a shared disk" in told
    assert not list((tmp_path / "0").iterdir())


@pytest.mark.slow
def test_a_streamed_run_goes_on_with_other_ranks_and_each_document_comes_once(
    trainer_folder, tmp_path, one_rank, two_ranks, four_ranks
):
    """Four ranks, then one, then two; each stops at a step, the last at the end of the data."""
    lines = (trainer_folder / "text.jsonl").read_text().splitlines()
    (tmp_path / "text.jsonl").write_text("\n".join(lines[:30]))
    changes = {
        "data": {
            "sources": [{"path": str(tmp_path / "text.jsonl"), "streaming": True}],
            "epochs": 1,
            "on_long": "split",
        },
        "checkpoint": {"export": False},
        "log": {"directory": str(tmp_path / "run")},
    }
    seen = []
    for pool, layout, steps in ((four_ranks, {"ep": 2}, 3), (one_rank, {}, 5), (two_ranks, {}, 1000)):
        values = cases.recipe_of(
            trainer_folder, parallel=layout, train={"steps": steps, "batches_per_step": 4}, **changes
        )
        found = pool.run(cases.documents, values)
        seen += [document for documents, _ in found for document in documents]
    assert {summary.reason for _, summary in found} == {"data"}
    whole = cases.recipe_of(trainer_folder, **{**changes, "log": {"directory": str(tmp_path / "whole")}})
    expected = one_rank.run(cases.documents, {**whole, "train": {"steps": 1000, "batches_per_step": 4}})[0][0]
    assert sorted(seen) == sorted(expected)


def test_muon_has_the_same_curve_on_four_ranks(trainer_folder, tmp_path, one_rank, four_ranks):
    """Its Newton-Schulz iteration computes in bfloat16, so curves part earlier than those of AdamW."""
    optim = {"name": "muon", "lr": 3e-3, "muon_lr": 1e-2}
    found = {}
    for name, pool, layout in (("one", one_rank, {}), ("four", four_ranks, FOUR)):
        values = cases.recipe_of(
            trainer_folder, optim=optim, parallel=layout, train={"steps": 4}, log={"directory": str(tmp_path / name)}
        )
        found[name] = pool.run(cases.train, values)[0][0]
    assert found["one"][-1] < found["one"][0] - 0.1
    require_equal_up_to_rounding(found["four"], found["one"], units=0.05, dtype=torch.bfloat16)


def test_a_run_that_diverges_is_stopped_by_name(trainer_folder, tmp_path, two_ranks):
    values = cases.recipe_of(
        trainer_folder,
        optim={"lr": 1e30, "warmup_steps": 0, "max_skipped": 3},
        train={"steps": 20, "batches_per_step": 2},
        log={"directory": str(tmp_path / "run")},
    )
    for text in two_ranks.run(cases.divergence, values):
        assert "3 steps in a row had gradients that are not finite, the last of them step 4" in text


def test_the_profiler_writes_its_window(trainer_folder, tmp_path, one_rank):
    values = cases.recipe_of(
        trainer_folder,
        train={"steps": 5, "profile_start": 3, "profile_steps": 1},
        log={"directory": str(tmp_path / "run")},
    )
    one_rank.run(cases.train, values)
    traces = list((tmp_path / "run" / "profile").glob("*.json"))
    assert len(traces) == 1
    text = traces[0].read_text()
    assert "aten::" in text and set(re.findall(r"ProfilerStep#(\d+)", text)) == {"2"}, "the third step, counted from 0"


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_no_loss(mode, trainer_folder, tmp_path, two_ranks):
    found = []
    for name in ("none", mode):
        values = cases.recipe_of(
            trainer_folder,
            parallel={"ep": 2, "activation_checkpointing": name},
            train={"steps": 3},
            log={"directory": str(tmp_path / name)},
        )
        found.append(two_ranks.run(cases.train, values)[0][0])
    require_equal_up_to_rounding(found[1], found[0], units=2)


@pytest.mark.parametrize(
    "options",
    [{"ep": 2, "offload_inputs": True}, {"sp": 2, "offload_inputs": True, "offload_attention": True}],
    ids=["inputs", "inputs and attention"],
)
def test_inputs_in_host_memory_change_no_number(options, trainer_folder, tmp_path, two_ranks):
    """Losses and norms of a run with shards, several micro-batches and evaluations, to the bit."""
    found = []
    layout = {name: size for name, size in options.items() if not name.startswith("offload")}
    for name, parallel in (("device", layout), ("host", options)):
        values = cases.recipe_of(
            trainer_folder,
            model={"attention": "patchgen_sdpa"},
            parallel={**parallel, "activation_checkpointing": "full"},
            train={"steps": 3, "eval_every": 2, "eval_batches": 2},
            log={"directory": str(tmp_path / name)},
        )
        values["eval_data"] = {**values["data"], "seed": 7}
        found.append(two_ranks.run(cases.train, values)[0][:2])
    assert found[0] == found[1]
