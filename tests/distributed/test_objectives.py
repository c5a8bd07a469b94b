"""Objectives on one rank and on several: the same curve, whatever they need besides the model that is trained.

The rows are made here; those of the data's own kinds come through `patchgen train` in test_objective_recipes.py.
"""

from __future__ import annotations

import json

import cases_objectives as cases
import pytest
import torch
from rounding import UNITS, require_equal_up_to_rounding

from patchgen.runtime.train import resume_changes
from patchgen.runtime.train.recipe import RecipeError, from_dict

OBJECTIVES = {
    "dpo": ({"name": "dpo"}, 2),
    "reward": ({"name": "reward", "options": {"center": 0.01}}, 2),
    "classification": ({"name": "classification", "options": {"num_labels": 3}}, 1),
    "distillation": ({"name": "distillation", "options": {"top_k": 16, "next_token": 0.25}}, 1),
    "own": ({"name": "cases_objectives:Unlikely", "options": {"strength": 0.5}}, 1),
}
TEACHER = {"source": "", "weights": "random", "overrides": {"num_hidden_layers": 1}}
FOUR = {
    "FSDP": {},
    "SP2": {"sp": 2},
    "EP2 x SP2": {"ep": 2, "sp": 2},
    "SP4": {"sp": 4},
    "replicas": {"dp_replicate": 2, "ep": 2},
}


def recipe_of(name: str, folder, run, *, steps: int, **changes) -> dict:
    values = cases.recipe_of(folder, run, OBJECTIVES[name][0], **changes)
    values["train"] = {"steps": steps, "batches_per_step": 4}
    if name == "distillation":
        values["teacher"] = {**TEACHER, "source": str(folder / "start")}
    return values


def curve(name: str, pool, folder, run, *, steps: int, **changes) -> list[float]:
    values = recipe_of(name, folder, run, steps=steps, **changes)
    return pool.run(cases.curve, values, OBJECTIVES[name][1], timeout=900)[0]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("dpo", "sp"),
        ("dpo", "fsdp"),
        ("reward", "sp"),
        ("classification", "ep"),
        ("distillation", "sp"),
        ("own", "sp"),
    ],
)
def test_two_ranks_learn_as_one_does(name, layout, trainer_folder, tmp_path, one_rank, two_ranks):
    parallel = {layout: 2} if layout != "fsdp" else {}
    alone = curve(name, one_rank, trainer_folder, tmp_path / "one", steps=3)
    both = curve(name, two_ranks, trainer_folder, tmp_path / "two", steps=3, parallel=parallel)
    require_equal_up_to_rounding(both, alone)
    assert len(set(alone)) == 3, "the numbers must differ, or equality says little"


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_twenty_steps_on_one_two_and_four_ranks(name, trainer_folder, tmp_path, one_rank, two_ranks, four_ranks):
    steps = 20
    alone = curve(name, one_rank, trainer_folder, tmp_path / "one", steps=steps)
    found = {"2, FSDP": curve(name, two_ranks, trainer_folder, tmp_path / "two", steps=steps)}
    for layout, parallel in FOUR.items():
        place = tmp_path / layout
        found[f"4, {layout}"] = curve(name, four_ranks, trainer_folder, place, steps=steps, parallel=parallel)
    print(f"{name} alone: {alone[0]:.6f} to {alone[-1]:.6f}")
    for layout, losses in found.items():
        print(
            f"{name} on {layout}: largest difference {max(abs(a - b) for a, b in zip(losses, alone, strict=True)):.1e}"
        )
    for layout, losses in found.items():
        require_equal_up_to_rounding(losses, alone, units=UNITS * steps**0.5, what=layout)


def test_maxima_of_documents_have_gradients_on_slices(two_ranks):
    two_ranks.run(cases.document_maxima_are_differentiated_over_slices)


@pytest.mark.parametrize("name", ["dpo", "reward"])
def test_documents_in_rows_of_their_own_give_the_same(name, trainer_folder, tmp_path, one_rank):
    packed = curve(name, one_rank, trainer_folder, tmp_path / "packed", steps=2)
    apart = curve(name, one_rank, trainer_folder, tmp_path / "apart", steps=2, model={"separate_documents": True})
    require_equal_up_to_rounding(apart, packed)


def test_the_loss_of_routers_is_added_on_one_rank_and_on_slices(trainer_folder, tmp_path, one_rank, two_ranks):
    model = {"overrides": {"output_router_logits": True, "router_aux_loss_coef": 0.5}}
    plain = curve("dpo", one_rank, trainer_folder, tmp_path / "plain", steps=2)
    alone = curve("dpo", one_rank, trainer_folder, tmp_path / "one", steps=2, model=model)
    both = curve("dpo", two_ranks, trainer_folder, tmp_path / "two", steps=2, model=model, parallel={"sp": 2})
    require_equal_up_to_rounding(both, alone)
    assert alone[0] > plain[0] + 0.1


@pytest.mark.parametrize("layout", ["sp", "ep"])
def test_with_adapters_the_reference_is_the_model_without_them(layout, trainer_folder, tmp_path, one_rank, two_ranks):
    lora = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    changes = {"lora": lora, "optim": {"lr": 1e-2}}
    alone = curve("dpo", one_rank, trainer_folder, tmp_path / "one", steps=3, **changes)
    values = recipe_of("dpo", trainer_folder, tmp_path / "two", steps=3, parallel={layout: 2}, **changes)
    both, found = two_ranks.run(cases.curve_and_log_probs, values)[0]
    require_equal_up_to_rounding(both, alone)
    assert alone[2] < alone[0] - 1e-3
    assert torch.equal(found["reference before"], found["model before"]), "an adapter begins with nothing"
    assert torch.equal(found["reference after"], found["reference before"])
    assert (found["model after"] - found["model before"]).abs().max() > 0.1, "the adapters must have done something"
    assert not (tmp_path / "two" / "reference.json").exists()


def test_a_run_that_goes_on_has_the_reference_of_its_start(trainer_folder, tmp_path, one_rank):
    whole = curve("dpo", one_rank, trainer_folder, tmp_path / "whole", steps=4)
    values = recipe_of("dpo", trainer_folder, tmp_path / "parts", steps=4)
    assert one_rank.run(cases.stopped_and_resumed, values, 2)[0] == whole
    kept = [json.loads((tmp_path / run / "reference.json").read_text()) for run in ("whole", "parts")]
    assert kept[0]["log_probs"] == kept[1]["log_probs"] and kept[0]["log_probs"]
    with pytest.raises(RecipeError, match=r"(?s)different objective.*objective.name: 'dpo' -> 'reward'"):
        resume_changes.require_resumable(from_dict(values | {"objective": {"name": "reward"}}))


def test_a_request_to_stop_is_heard_while_the_reference_is_computed(trainer_folder, tmp_path, one_rank):
    values = recipe_of("dpo", trainer_folder, tmp_path / "run", steps=2)
    values["train"]["batches_per_step"] = 2
    assert one_rank.run(cases.stopped_while_referring, values)[0] == ("stop", [])
    kept = json.loads((tmp_path / "run" / "reference.json").read_text())["log_probs"]
    losses = one_rank.run(cases.curve, values)[0]
    whole = json.loads((tmp_path / "run" / "reference.json").read_text())["log_probs"]
    assert len(losses) == 2 and 0 < len(kept) < len(whole)
    assert all(whole[key] == value for key, value in kept.items()), "what was computed is not computed again"


def test_computing_the_reference_leaves_the_random_generators_as_they_were(trainer_folder, tmp_path, one_rank):
    values = recipe_of("dpo", trainer_folder, tmp_path / "run", steps=2)
    assert one_rank.run(cases.draws_around_the_reference, values)[0]


@pytest.mark.parametrize(
    "content", ['{"model": "this mod', '{"log_probs": {}}', '{"model": "this model", "log_probs": [1.0]}', "[]"]
)
def test_a_damaged_reference_is_an_error_on_all_ranks(content, tmp_path, two_ranks):
    """Only rank 0 reads it; the other would wait for its values."""
    (tmp_path / "reference.json").write_text(content)
    errors = [loaded for loaded, _ in two_ranks.run(cases.errors_of_a_reference, str(tmp_path))]
    assert all("reference.json cannot be read: " in error and "To fix: delete it" in error for error in errors), errors


def test_a_reference_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path, two_ranks):
    errors = [saved for _, saved in two_ranks.run(cases.errors_of_a_reference, str(tmp_path / "gone"))]
    assert all("reference.json cannot be written: " in error and "To fix: " in error for error in errors), errors
    assert two_ranks.run(cases.errors_of_a_reference, str(tmp_path)) == [["", ""]] * 2
    assert json.loads((tmp_path / "reference.json").read_text()) == {"model": "this model", "log_probs": {}}


def test_a_teacher_is_sharded_after_it_was_asked(trainer_folder, tmp_path, one_rank):
    values = recipe_of("distillation", trainer_folder, tmp_path / "run", steps=1)
    assert all(one_rank.run(cases.teacher_after_a_row, values)[0])


def test_an_evaluation_is_the_loss_of_the_same_rows(trainer_folder, tmp_path, two_ranks):
    values = recipe_of("dpo", trainer_folder, tmp_path / "dpo", steps=1, parallel={"sp": 2})
    evaluated, first = two_ranks.run(cases.evaluated, values, 2)[0]
    require_equal_up_to_rounding(evaluated, first)


def test_a_reward_model_loads_in_plain_transformers(trainer_folder, tmp_path, two_ranks):
    from transformers import AutoModelForSequenceClassification

    values = recipe_of(
        "reward", trainer_folder, tmp_path / "run", steps=2, parallel={"ep": 2}, checkpoint={"export": True}
    )
    documents, found = two_ranks.run(cases.trained_scores, values)[0]
    plain, told = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "run" / "export", output_loading_info=True
    )
    assert type(plain).__module__.startswith("transformers.") and not any(told.values()), told
    longest = max(map(len, documents))
    padding = plain.config.pad_token_id
    ids = torch.tensor([one + [padding] * (longest - len(one)) for one in documents])
    with torch.no_grad():
        scores = plain.eval()(input_ids=ids, attention_mask=(ids != padding).long()).logits[:, 0]
    require_equal_up_to_rounding(found, scores)
    before = AutoModelForSequenceClassification.from_pretrained(trainer_folder / "start", num_labels=1)
    assert not torch.equal(before.model.norm.weight, plain.model.norm.weight), "it must have been trained"
