"""The few models of the dear tests have every kind of site; asked of the records themselves."""

from __future__ import annotations

import chosen_models

from patchgen.runtime.verify.committed_models import CommittedModel, committed


def test_every_pass_that_rewrites_a_committed_model_rewrites_one_of_the_few():
    def passes(names):
        steps = [step for name in names for step in CommittedModel(name).record["passes"]]
        return {step["name"] for step in steps if step["hits"]} - {*chosen_models.OF_ONE_FILE}

    few = chosen_models.few(committed())
    assert passes(few) == passes(committed())
    assert any(CommittedModel(name).record.get("parts") for name in few)
    assert len(few) <= len(committed()) / 3


def test_what_one_model_alone_has_brings_that_model_and_what_all_have_the_shortest():
    kinds = {"long": "ab", "short": "a", "other": "ac", "same": "bc"}
    assert sorted(chosen_models.cover(kinds, {"long": 9, "short": 1, "other": 4, "same": 3})) == ["same", "short"]
    assert "long" in chosen_models.cover(kinds | {"long": "abx"}, {"long": 9, "short": 1, "other": 4, "same": 3})


def test_names_of_a_files_own_classes_make_no_kind():
    assert chosen_models.kinds("qwen3") == chosen_models.kinds("qwen2")
    assert chosen_models.kinds("qwen3") < chosen_models.kinds("qwen3_moe") | {"parallel_plan no experts"}
