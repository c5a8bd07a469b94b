"""What the proof beside a generated file says of it: releases, layouts, documents; that of other bytes says nothing."""

import hashlib
import json

import pytest
import transformers
from recorded_facts import OF_LENGTH, OF_STATE, recorded
from recorded_facts import record as record_facts

from patchgen.runtime.compatibility import (
    ALLOW_VARIABLE,
    PROVEN_IN_ONE_PROCESS,
    proven_separation,
    require_transformers,
    why_not_in_layout,
)
from patchgen.runtime.verify import verdict
from patchgen.runtime.verify.observe.facts import STATE, VALUE, Fact

OTHER = "4.0.0"


@pytest.fixture
def generated(tmp_path):
    file = tmp_path / "example" / "modeling_example.py"
    file.parent.mkdir()
    file.write_text("# generated\n")
    return file


def record(file, releases, text=None):
    digest = hashlib.sha256((text or file.read_text()).encode()).hexdigest()
    (file.parent / "verify.json").write_text(json.dumps({"transformers": releases, "sha256": digest}))


def test_its_own_release_is_accepted(generated):
    require_transformers(str(generated), made_from=transformers.__version__)


def test_another_release_is_one_clear_error(generated):
    with pytest.raises(ImportError) as error:
        require_transformers(str(generated), made_from=OTHER)
    assert f"made from transformers {OTHER}" in str(error.value)
    assert f"`patchgen generate example --transformers {transformers.__version__}`" in str(error.value)
    assert f"`patchgen verify example --against {transformers.__version__}`" in str(error.value)
    assert "make " not in str(error.value)  # a user's own repository has no Makefile of ours


def test_a_release_that_this_file_was_proven_with_is_accepted(generated):
    record(generated, [OTHER, transformers.__version__])
    require_transformers(str(generated), made_from=OTHER)


def test_a_proof_of_an_earlier_version_of_the_file_counts_for_nothing(generated):
    record(generated, [transformers.__version__], text="# as it was before\n")
    with pytest.raises(ImportError):
        require_transformers(str(generated), made_from=OTHER)


def test_a_release_can_be_allowed_by_name(generated, monkeypatch):
    monkeypatch.setenv(ALLOW_VARIABLE, transformers.__version__)
    require_transformers(str(generated), made_from=OTHER)


# -------------------------------------------------------------------------------------------- observed in its steps


def test_what_a_step_keeps_leaves_one_rank_and_what_a_length_decides_leaves_whole_sequences(tmp_path):
    of_value = Fact(VALUE, 5, "if x.sum() > 0:", "a value is read", "other values run other modules")
    for number, fact in enumerate((of_value, OF_STATE)):
        model = recorded(tmp_path / f"one{number}", [fact])
        assert why_not_in_layout(model, ranks=1, sp=1) == ""
        assert why_not_in_layout(model, ranks=2, sp=1) == f"{fact.sentence} So it trains on one rank, not on 2."
    model = recorded(tmp_path / "whole", [OF_LENGTH])
    assert why_not_in_layout(model, ranks=8, sp=1) == ""
    assert why_not_in_layout(model, ranks=8, sp=4).endswith("it trains with sp=1, not with sp=4.")


def test_a_fact_without_an_effect_is_only_reported(tmp_path):
    model = recorded(tmp_path / "kept", [Fact(STATE, 9, "self.last = x.shape", "self.last is kept")])
    assert why_not_in_layout(model, ranks=8, sp=8) == ""


def test_a_proof_of_one_rank_still_says_what_was_observed(tmp_path):
    """The status is of the proof's comparisons; the layouts follow from the facts."""
    model = recorded(tmp_path / "one", [OF_STATE], status="proven, one rank only")
    assert "not on 2" in why_not_in_layout(model, ranks=2, sp=1)


def test_facts_of_other_bytes_rule_out_nothing(tmp_path):
    assert why_not_in_layout(recorded(tmp_path / "other", [OF_STATE], sha256="of others"), ranks=4, sp=2) == ""


def test_facts_of_a_file_with_another_language_model_rule_out_nothing(tmp_path):
    """The proof is of the head's file together with the generated language model that it builds."""

    def heads(name):
        folder, part = tmp_path / name / "head", tmp_path / name / "text" / "modeling_text.py"
        part.parent.mkdir(parents=True)
        part.write_text("# a language model\n")
        folder.mkdir()
        (folder / "provenance.json").write_text(json.dumps({"parts": [{"default": {"model": "text"}}]}))
        return recorded(folder, [OF_STATE]), part

    assert why_not_in_layout(heads("same")[0], ranks=2, sp=1)
    model, part = heads("changed")
    part.write_text("# another\n")
    assert why_not_in_layout(model, ranks=2, sp=1) == ""


def test_a_class_that_is_derived_from_a_generated_one_has_its_facts(tmp_path):
    """FSDP2 makes one, and so may a trainer."""
    derived = type("Sharded", (recorded(tmp_path / "base", [OF_STATE]),), {})
    assert "not on 2" in why_not_in_layout(derived, ranks=2, sp=1)


def test_a_class_without_a_proof_may_run_anywhere(tmp_path):
    model = recorded(tmp_path / "unproven", [OF_STATE])
    (tmp_path / "unproven" / "verify.json").unlink()
    assert why_not_in_layout(model, ranks=2, sp=2) == why_not_in_layout(dict, ranks=2, sp=2) == ""


def test_a_record_without_a_training_path_rules_out_nothing(tmp_path):
    model = recorded(tmp_path / "eager", [])
    file = tmp_path / "eager" / "modeling_eager.py"
    record_facts(file, [])
    proof = json.loads(file.with_name("verify.json").read_text())
    file.with_name("verify.json").write_text(json.dumps(proof | {"training": None}))
    assert why_not_in_layout(model, ranks=2, sp=2) == ""


# ----------------------------------------------------------------------------------------------------- its documents


@pytest.mark.parametrize("status", [verdict.PROVEN, *verdict.WITHOUT.values()])
def test_documents_are_separated_as_one_process_proved_it_whatever_two_ranks_said(tmp_path, status):
    model = recorded(tmp_path / "separates", [], status=status, separates_documents=True)
    assert status in PROVEN_IN_ONE_PROCESS and proven_separation(model) is True


@pytest.mark.parametrize("status", [verdict.EAGER_ONLY, verdict.GENERATED])
def test_a_path_that_was_not_proven_says_nothing_of_documents(tmp_path, status):
    model = recorded(tmp_path / "separates", [], status=status, separates_documents=True)
    assert status not in PROVEN_IN_ONE_PROCESS and proven_separation(model) is None
