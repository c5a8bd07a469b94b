"""Each verb of the hand edits: what it does, and that a target which is not there is an error naming the nearest."""

from __future__ import annotations

import ast
import json

import pytest
from generation_cases import applied, edited, load, written

from patchgen import pipeline
from patchgen.errors import ConfigError, EmissionError, PassMismatch
from patchgen.model_configs import ModelConfig
from patchgen.passes.hand_edits import (
    AddImport,
    AddMethod,
    Drop,
    EditMethod,
    HandEdits,
    MendUpstream,
    OverrideMethod,
    ReplaceClass,
    ReplaceFunction,
)

SOURCE = '''# A licence.

import torch


def scale(x):
    return x * 2


class Layer(torch.nn.Module):
    """A layer."""

    def __init__(self, size):
        self.size = size

    # keeps gradients off
    @torch.no_grad()
    @staticmethod
    def helper(x):
        return x

    @property
    def width(self):
        return self.size

    @width.setter
    def width(self, value):
        self.size = value

    def forward(self, x):
        x = scale(x)
        if x is None:
            return x
        for _ in range(2):
            x = x + 1
        x = x + 1
        return x
'''


def edit(*edits) -> str:
    return applied(HandEdits(tuple(edits)), SOURCE).module.text


def test_a_class_is_replaced_and_its_neighbours_keep_their_bytes():
    text = edit(ReplaceClass("Layer", "class Layer:\n    '''new'''\n", reason="why"))
    assert text == SOURCE[: SOURCE.index("class Layer")] + '# patchgen: hand_edits\nclass Layer:\n    """new"""\n'


def test_a_function_is_replaced():
    text = edit(ReplaceFunction("scale", "def scale(x):\n    return x * 3\n", reason="why"))
    assert text == SOURCE.replace(
        "def scale(x):\n    return x * 2", "# patchgen: hand_edits\ndef scale(x):\n    return x * 3"
    )


def test_an_overridden_method_brings_its_own_decorators():
    text = edit(OverrideMethod("Layer.helper", "@staticmethod\ndef helper(x):\n    return -x\n", reason="why"))
    assert text.count("@staticmethod") == 1
    assert "@torch.no_grad()" not in text
    assert (
        "    # keeps gradients off\n    # patchgen: hand_edits\n    @staticmethod\n    def helper(x):\n        return -x\n"
        in text
    )


def test_a_method_is_added_at_the_end():
    text = edit(AddMethod("Layer.extra", "def extra(self):\n    return 1\n", reason="why"))
    assert text == SOURCE + "\n    # patchgen: hand_edits\n    def extra(self):\n        return 1\n"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("before", "        # patchgen: hand_edits\n        print(x)\n        x = scale(x)\n        if x"),
        ("after", "        x = scale(x)\n        # patchgen: hand_edits\n        print(x)\n        if x"),
        ("instead", "    def forward(self, x):\n        # patchgen: hand_edits\n        print(x)\n        if x"),
    ],
)
def test_a_statement_is_edited(where, expected):
    assert expected in edit(EditMethod("Layer.forward", "x = scale(__)", "print(x)", reason="why", where=where))


def test_a_compound_statement_is_matched_as_a_whole():
    text = edit(EditMethod("Layer.forward", "if x is None:\n    return x", "x = x", reason="why", where="instead"))
    assert "if x is None" not in text and "# patchgen: hand_edits\n        x = x\n        for _" in text


@pytest.mark.parametrize(("match", "count"), [("x = x + 1", 2), ("x = scale(y)", 0), ("y = scale(x)", 0)])
def test_a_statement_that_is_not_there_exactly_once_is_an_error(match, count):
    with pytest.raises(PassMismatch, match=rf"once and was found {count} times. Nearest: .*x = "):
        edit(EditMethod("Layer.forward", match, "pass", reason="why"))


def test_what_is_mended_upstream_is_replaced_and_recorded_with_the_statement_that_the_proof_replaces():
    """`provenance.json` has upstream's statement as it stands there, where `match` has a wildcard."""
    mend = MendUpstream("Qwen3MoeMLP.forward", "return __", "return down_proj", reason="a test")
    generated = pipeline.generate(load("qwen3_moe"), ModelConfig("qwen3_moe", edits=(mend,)))
    assert "# edit Qwen3MoeMLP.forward: mend_upstream: a test\n" in generated.text
    (record,) = json.loads(generated.provenance)["edits"]
    assert record["mend"] == {"statement": "return down_proj", "code": "return down_proj"}
    with pytest.raises(ConfigError, match="`where` must be left out"):
        MendUpstream("Layer.forward", "x = 1", "x = 2", reason="why", where="after")


def test_a_release_without_the_faulty_statement_generates_and_says_that_it_needs_no_mend():
    """Compared with the file generated without edits: the header's line is all that differs."""
    mend = MendUpstream("Qwen3MoeMLP.forward", "return down_proj.missing", "return down_proj", reason="a test")
    told = "Qwen3MoeMLP.forward: mend_upstream, not needed in this release: a test"
    generated = pipeline.generate(load("qwen3_moe"), ModelConfig("qwen3_moe", edits=(mend,)))
    plain = pipeline.generate(load("qwen3_moe"), ModelConfig("qwen3_moe"))
    assert generated.text.replace(f"# edit {told}\n", "") == plain.text != generated.text
    facts = json.loads(generated.provenance)
    assert "mend" not in facts["edits"][0]
    (ran,) = (step for step in facts["passes"] if step["name"] == "hand_edits")
    assert not ran["hits"] and f"{ran['upstream'][0]['site']}: {ran['upstream'][0]['what']}" == told


@pytest.mark.parametrize(
    ("target", "match", "message"),
    [
        ("Layr.forward", "return x", "wants the class 'Layr'"),
        ("Layer.forwards", "return x", "wants Layer.forwards, which upstream does not have"),
        ("Layer.forward", "x = x + 1", "once and was found 2 times"),
    ],
)
def test_a_mend_without_its_method_or_with_two_such_statements_is_an_error(target, match, message):
    with pytest.raises(PassMismatch, match=message):
        edit(MendUpstream(target, match, "return 2 * x", reason="why"))


def test_one_statement_is_matched_and_not_two():
    with pytest.raises(ConfigError, match="one statement"):
        edit(EditMethod("Layer.forward", "x = 1\ny = 2", "pass", reason="why"))


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        (ReplaceClass("Layr", "class Layr: ...", reason="why"), "Layer"),
        (ReplaceFunction("scales", "def scales(): ...", reason="why"), "scale"),
        (ReplaceClass("scale", "class scale: ...", reason="why"), "Layer"),
        (ReplaceFunction("Layer", "def Layer(): ...", reason="why"), "scale"),
        (Drop("Layr", reason="why"), "none|Layer|scale"),
        (OverrideMethod("Layer.forwards", "def forwards(self): ...", reason="why"), "forward"),
        (OverrideMethod("Layr.forward", "def forward(self): ...", reason="why"), "Layer"),
        (AddMethod("Layr.extra", "def extra(self): ...", reason="why"), "Layer"),
        (EditMethod("Layer.forwad", "pass", "pass", reason="why"), "forward"),
    ],
)
def test_a_target_that_is_not_there_is_an_error_with_the_nearest(wrong, nearest):
    with pytest.raises(PassMismatch, match=f"(Nearest|near it): .*({nearest})"):
        edit(wrong)


def test_what_is_not_there_is_named_as_what_was_wanted():
    with pytest.raises(PassMismatch, match="wants the class 'scale'"):
        edit(ReplaceClass("scale", "class scale: ...", reason="why"))
    with pytest.raises(PassMismatch, match="wants the function 'Layer'"):
        edit(ReplaceFunction("Layer", "def Layer(): ...", reason="why"))


def test_adding_a_method_that_exists_and_overriding_one_of_several_are_errors():
    with pytest.raises(PassMismatch, match="exists upstream; use override_method"):
        edit(AddMethod("Layer.forward", "def forward(self): ...", reason="why"))
    with pytest.raises(PassMismatch, match="defines 'width' 2 times"):
        edit(OverrideMethod("Layer.width", "def width(self): ...", reason="why"))


@pytest.mark.parametrize(
    "wrong",
    [
        OverrideMethod("Layer.forward", "def forwards(self): ...", reason="why"),
        OverrideMethod("Layer.forward", "x = 1", reason="why"),
        OverrideMethod("Layer.forward", "def forward(self): ...\ndef more(self): ...", reason="why"),
        ReplaceClass("Layer", "class Other: ...", reason="why"),
        ReplaceFunction("scale", "def other(): ...", reason="why"),
    ],
)
def test_code_that_is_not_the_target_is_an_error(wrong):
    with pytest.raises(ConfigError):
        edit(wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (OverrideMethod("Layer.forward", "def forward(self:", reason="why"), "`code` is not Python, line 1"),
        (EditMethod("Layer.forward", "x = = 1", "pass", reason="why"), "`match` is not Python"),
        (EditMethod("Layer.forward", "x = x + 1", "", reason="why"), "`code` is empty"),
        (ReplaceClass("Layer", "class Layer(:", reason="why"), "`code` is not Python"),
        (AddImport("import", reason="why"), "`code` is not Python"),
        (AddImport("x = 1", reason="why"), "import statements and nothing else"),
    ],
)
def test_code_that_is_not_python_is_an_error_of_the_config(wrong, message):
    with pytest.raises(ConfigError, match=message):
        edit(wrong)


@pytest.mark.parametrize("reason", ["", "   "])
def test_a_reason_is_wanted(reason):
    with pytest.raises(ConfigError, match="no reason"):
        edit(Drop("scale", reason=reason))


def test_an_import_is_added_below_the_imports():
    assert "import torch\n# patchgen: hand_edits\nfrom math import pi\n" in edit(
        AddImport("from math import pi", reason="why")
    )


def test_dropping_what_is_still_referred_to_is_an_error():
    config = ModelConfig("example", edits=(Drop("scale", reason="why"),))
    with pytest.raises(EmissionError, match="scale in Layer"):
        pipeline.generate(written(SOURCE), config)


def test_edits_reach_the_header_with_their_reasons_and_the_anatomy_sees_them():
    edits = (
        AddImport("from math import pi", reason="the constant"),
        EditMethod("Qwen3MoeMLP.forward", "return __", "down_proj = down_proj * pi", reason="a test"),
        Drop("Qwen3MoeForTokenClassification", reason="not trained"),
    )
    generated = pipeline.generate(load("qwen3_moe"), ModelConfig("qwen3_moe", edits=edits))
    assert "# edit from math import pi: add_import: the constant\n" in generated.text
    assert "# edit Qwen3MoeMLP.forward: edit_method: a test\n" in generated.text
    assert "from math import pi\n" in generated.text and "down_proj = down_proj * pi\n" in generated.text


def test_an_experts_class_that_an_edit_replaces_is_what_the_passes_see():
    code = "class Qwen3MoeExperts(nn.Module):\n    def forward(self, x, index, weights):\n        return x\n"
    config = ModelConfig("qwen3_moe", edits=(ReplaceClass("Qwen3MoeExperts", code, reason="a test"),))
    assert 'left_alone={"Qwen3MoeSparseMoeBlock": ' in pipeline.generate(load("qwen3_moe"), config).text


def test_an_edit_of_what_prune_drops_is_an_error_and_not_a_claim_in_the_header():
    edits = (AddMethod("Qwen3MoeForTokenClassification.extra", "def extra(self): ...", reason="a test"),)
    with pytest.raises(ConfigError, match="edits Qwen3MoeForTokenClassification.extra, which the roots do not reach"):
        pipeline.generate(load("qwen3_moe"), ModelConfig("qwen3_moe", edits=edits))


def test_an_import_for_its_effect_stays():
    edits = (AddImport("import readline", reason="for its effect"),)
    assert (
        "# patchgen: hand_edits\nimport readline\n"
        in pipeline.generate(load("llama"), ModelConfig("llama", edits=edits)).text
    )
    marked = edited(
        load("llama"), ("import torch\n", "import torch\nimport this_one  # noqa: F401\nimport not_this\n")
    )
    text = pipeline.generate(marked).text
    assert "import this_one  # noqa: F401\n" in text and "not_this" not in text


def test_a_reason_of_several_lines_is_one_line_of_the_header():
    edits = (AddImport("from math import (\n    pi,\n)", reason="first\nsecond = = third"),)
    text = pipeline.generate(load("llama"), ModelConfig("llama", edits=edits)).text
    assert ": add_import: first second = = third\n" in text
    ast.parse(text)


def test_a_host_sync_that_is_allowed_must_exist():
    config = ModelConfig("llama", allow_sync={"LlamaModel.forwards": "a test"})
    with pytest.raises(ConfigError, match=r"names LlamaModel.forwards[\s\S]*Nearest: LlamaModel.forward"):
        pipeline.generate(load("llama"), config)


def test_a_host_sync_is_allowed_in_the_method_of_whatever_class_has_it():
    """Releases move methods between classes; another method's sync stays an error."""
    source = edited(
        load("llama"),
        (
            "        outputs: BaseModelOutputWithPast",
            "        input_ids.tolist()\n        outputs: BaseModelOutputWithPast",
        ),
    )
    text = pipeline.generate(source, ModelConfig("llama", allow_sync={"forward": "a test"}, strict_sync=True)).text
    assert "input_ids.tolist()" in text
    with pytest.raises(PassMismatch, match=r"LlamaForCausalLM.forward: `input_ids.tolist\(\)`"):
        pipeline.generate(source, ModelConfig("llama", allow_sync={"extra_repr": "a test"}, strict_sync=True))
    with pytest.raises(ConfigError, match="names forwards"):
        pipeline.generate(source, ModelConfig("llama", allow_sync={"forwards": "a test"}, strict_sync=False))
