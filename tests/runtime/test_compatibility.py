"""A generated file meets another transformers release than its own."""

import hashlib
import json

import pytest
import transformers

from patchgen.runtime.compatibility import ALLOW_VARIABLE, require_transformers

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
