"""What a run does at its evaluations: prompts continued, the best step kept and exported, the end after some without progress."""

from __future__ import annotations

import json

import cases_trainer as cases
import torch
import transformers
from rounding import require_equal_up_to_rounding

from patchgen.runtime.checkpoint import export_run
from patchgen.runtime.checkpoint.saved_steps import SavedSteps
from patchgen.runtime.train import run_log

FOUR = {"ep": 2, "sp": 2}
PROMPTS = ["def area(x, y):", "import"]
NEW = 7


def evaluated(trainer_folder, directory, *, train: dict, **sections) -> dict:
    values = cases.recipe_of(trainer_folder, train={"batches_per_step": 4, **train}, log={"directory": str(directory)})
    return {**values, "eval_data": {**values["data"], "seed": 7}, **sections}


def test_prompts_are_continued_as_transformers_generates_on_any_ranks(trainer_folder, tmp_path, one_rank, four_ranks):
    """The last evaluation's, of the model that is then exported; the run's losses are those of one without prompts."""
    train = {"steps": 4, "eval_every": 2, "eval_batches": 4}
    plain = one_rank.run(cases.train, evaluated(trainer_folder, tmp_path / "plain", train=train))[0][0]
    train |= {"prompts": PROMPTS, "prompt_tokens": NEW}
    found = {}
    for name, pool, layout in (("one", one_rank, {}), ("four", four_ranks, FOUR)):
        values = evaluated(trainer_folder, tmp_path / name, train=train, parallel=layout, checkpoint={"export": True})
        losses, samples, summary = pool.run(cases.train_with_samples, values)[0]
        require_equal_up_to_rounding(losses, plain)
        assert [step for step, _ in samples] == [2, 4]
        tokenizer = transformers.AutoTokenizer.from_pretrained(summary.export)
        model = transformers.AutoModelForCausalLM.from_pretrained(summary.export, dtype=torch.float32).eval()
        for sample in samples[-1][1]:
            ids = tokenizer(sample.prompt, return_tensors="pt").input_ids
            made = model.generate(ids, do_sample=False, max_new_tokens=NEW)[0, ids.shape[1] :]
            assert sample.text == tokenizer.decode(made, skip_special_tokens=True)
        found[name] = [[sample.text for sample in one] for _, one in samples]
        logged = [entry for entry in run_log.read(tmp_path / name) if "samples" in entry]
        assert [[one["text"] for one in entry["samples"]] for entry in logged] == found[name]
    assert found["one"] == found["four"]
    page = (tmp_path / "one" / "index.html").read_text()
    assert "Prompts, continued at step 4" in page and "def area(x, y):" in page


def test_the_best_step_is_kept_and_exported_and_the_run_ends_after_some_without_progress(
    trainer_folder, tmp_path, two_ranks
):
    """A learning rate that is far too large after the first step: every later loss is higher. Started again, nothing trains."""
    values = evaluated(
        trainer_folder,
        tmp_path / "run",
        train={"steps": 9, "eval_every": 1, "eval_batches": 4, "patience": 3},
        checkpoint={"keep": 1, "keep_best": True, "export": "best"},
        optim={"lr": 0.3, "schedule": "constant", "max_grad_norm": 100.0},
    )
    losses, summary = two_ranks.run(cases.train_and_log, values)[0]
    logged = {e["step"]: e["eval_loss"] for e in run_log.read(tmp_path / "run") if "eval_loss" in e}
    best = min(logged, key=logged.__getitem__)
    assert (summary.reason, summary.steps, len(losses)) == ("patience", best + 3, best + 3)
    assert (summary.best_step, summary.best_loss) == (best, logged[best])
    assert set(SavedSteps(tmp_path / "run" / "checkpoints").complete_steps()) == {best, best + 3}
    export_run(tmp_path / "run", tmp_path / "by_hand", step=best)
    load = transformers.AutoModelForCausalLM.from_pretrained
    exported, expected = load(summary.export).state_dict(), load(tmp_path / "by_hand").state_dict()
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)

    again, ended = two_ranks.run(cases.train_and_log, values)[0]
    assert (again, ended.reason, ended.steps, ended.best_step) == ([], "patience", best + 3, best)
    longer = {**values, "train": {**values["train"], "steps": best + 5, "patience": 0}}
    more, ended = two_ranks.run(cases.train_and_log, longer)[0]
    logged = {e["step"]: e["eval_loss"] for e in run_log.read(tmp_path / "run") if "eval_loss" in e}
    now_best = min(logged, key=logged.__getitem__)
    assert (len(more), ended.reason, ended.best_step) == (2, "steps", now_best)
    assert set(SavedSteps(tmp_path / "run" / "checkpoints").complete_steps()) == {now_best, best + 5}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best_step"] == now_best


def test_an_export_of_another_step_is_not_taken_for_the_best(trainer_folder, tmp_path, one_rank):
    """A run that exported its last step, started again with the best: its weights replace those; the other way round as well."""
    values = evaluated(
        trainer_folder,
        tmp_path / "run",
        train={"steps": 5, "eval_every": 1, "eval_batches": 4},
        checkpoint={"keep": 1, "keep_best": True, "export": True},
        optim={"lr": 0.3, "schedule": "constant", "max_grad_norm": 100.0},
    )
    _, last = one_rank.run(cases.train_and_log, values)[0]
    best = {**values, "checkpoint": {**values["checkpoint"], "export": "best"}}
    _, again = one_rank.run(cases.train_and_log, best)[0]
    assert last.exported_step == 5 and again.exported_step == last.best_step != 5
    _, back = one_rank.run(cases.train_and_log, values)[0]
    assert (back.exported_step, back.best_step) == (5, last.best_step)
    export_run(tmp_path / "run", tmp_path / "by_hand", step=5)
    load = transformers.AutoModelForCausalLM.from_pretrained
    exported, expected = load(back.export).state_dict(), load(tmp_path / "by_hand").state_dict()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


def test_a_best_step_without_a_checkpoint_is_told(trainer_folder, tmp_path, one_rank):
    """A finished run that kept no best step, asked for it: the last one is exported, and that is said."""
    values = evaluated(
        trainer_folder,
        tmp_path / "run",
        train={"steps": 5, "eval_every": 1, "eval_batches": 4},
        checkpoint={"keep": 1, "export": False},
        optim={"lr": 0.3, "schedule": "constant", "max_grad_norm": 100.0},
    )
    one_rank.run(cases.train_and_log, values)
    asked = {**values, "checkpoint": {"keep": 1, "keep_best": True, "export": "best"}}
    losses, told = one_rank.run(cases.train_and_print, asked)[0]
    assert losses == [] and "has no checkpoint: the best from here on is kept" in told
    assert "WARNING: no best step is kept: what is exported is the model of step 5" in told


def test_prompts_that_a_model_cannot_continue_are_refused(trainer_folder, tmp_path, one_rank):
    train = {"steps": 5, "eval_every": 1, "prompts": PROMPTS, "prompt_tokens": 100_000}
    told = one_rank.run(cases.refusal, evaluated(trainer_folder, tmp_path / "run", train=train))[0]
    assert "positions. To fix: shorten the prompt, or lower train.prompt_tokens" in told
