"""Files that inherit from models of transformers: the parents are taken in, and passes rewrite them.

`data/forks` has a fork of a dense model, one with experts, one with images; `tests/distributed/test_forks.py` proves, trains and
loads them.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from patchgen import pipeline
from patchgen.errors import ConfigError
from patchgen.pipeline import Generated
from patchgen.upstream import load, open_release

FORKS = Path(__file__).parent / "data" / "forks"
HITS = {
    "gated_qwen2": {
        "fused_loss": ["Qwen2ForCausalLM.forward"],
        "language_sp": ["Qwen2Model.forward"],
        "parallel_plan": ["GatedQwen2ForCausalLM"],
    },
    "shared_moe": {
        "fused_experts": ["Qwen3MoeExperts.forward"],
        "fused_loss": ["Qwen3MoeForCausalLM.forward"],
        "parallel_plan": ["SharedMoeForCausalLM"],
    },
    "projected_vl": {
        "fused_loss": ["Qwen2_5_VLForConditionalGeneration.forward"],
        "fill_back": ["Qwen2_5_VLModel.forward"],
        "dummy_forward": ["Qwen2_5_VLModel.forward"],
        "parallel_plan": ["ProjectedVLForConditionalGeneration"],
    },
}
PREFIX = "from transformers.models."
SHORT = """
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM


class ShortForCausalLM(Qwen2ForCausalLM):
    pass
"""


def generated_from(text: str, folder: Path) -> Generated:
    (folder / "modeling_short.py").write_text(text)
    return pipeline.generate(load("short", source=folder))


def bases_of(text: str) -> dict[str, list[str]]:
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {node.name: list(map(ast.unparse, node.bases)) for node in classes}


@pytest.mark.parametrize("name", HITS)
def test_the_parents_of_a_fork_are_rewritten_in_its_file(name: str):
    generated = pipeline.generate(load(name, source=FORKS / name))
    hits = {step.name: [hit.site for hit in step.outcome.hits] for step in generated.steps}
    assert {step: hits[step] for step in HITS[name]} == HITS[name]
    assert "import modeling_" not in generated.text and ".modeling_qwen" not in generated.text.partition('"""')[2]
    facts = json.loads(generated.provenance)
    (head,) = facts["heads"]
    assert facts["roots"] == [head] and head in (FORKS / name / f"modeling_{name}.py").read_text()
    assert facts["model_types"] == [name], "not that of the parent, whose classes are in the file"
    (parent,) = facts["inherited"]
    assert parent["version"] == open_release().version and parent["path"] in generated.text
    assert generated.files[f"merged_{name}.py"].count("class ") > 10
    assert generated.diff.count(f"--- a/merged_{name}.py") == 1
    removed = [line for line in generated.diff.splitlines() if line.startswith("-class ")]
    assert removed == [], "the parents are unchanged on the left of the diff"


def test_a_name_that_the_file_binds_itself_stays_its_own():
    text = pipeline.generate(load("gated_qwen2", source=FORKS / "gated_qwen2")).text
    bases = bases_of(text)
    assert bases["Qwen2MLP"] == ["Qwen2MLPOfQwen2"], "from `modeling_qwen2.Qwen2MLP`"
    assert bases["GatedQwen2DecoderLayer"] == ["Qwen2DecoderLayer"], "from an alias"
    assert "self.mlp = Qwen2MLPOfQwen2(config)" in text and "self.mlp = Qwen2MLP(config)" in text
    assert "act_fn(gate) * up" in text, "a pass rewrites the parent under its new name"


def test_parents_of_two_files_keep_their_own_functions(tmp_path: Path):
    """`rotate_half` and `repeat_kv` of both files have the same names."""
    llama = f"{PREFIX}llama.modeling_llama import LlamaAttention\n"
    use = "    def __init__(self, config):\n        super().__init__(config)\n        self.other = LlamaAttention(config, 0)\n"
    text = generated_from(llama + SHORT.replace("    pass\n", use), tmp_path).text
    functions = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert {"rotate_half", "rotate_half_of_llama", "repeat_kv", "repeat_kv_of_llama"} <= functions
    code = {node.name: ast.unparse(node) for node in ast.parse(text).body if hasattr(node, "name")}
    assert "repeat_kv_of_llama(" in code["eager_attention_forward_of_llama"]
    assert "eager_attention_forward_of_llama" in code["LlamaAttention"]
    assert "_of_llama" not in code["Qwen2Attention"]


def test_an_import_of_the_same_name_from_elsewhere_stays_the_files(tmp_path: Path):
    """The parent logs by transformers' `logging`, the file by Python's."""
    own = "import logging\n\nprint(logging.getLogger)\n"
    text = generated_from(
        f"{own}{PREFIX}qwen2_moe.modeling_qwen2_moe import Qwen2MoeForCausalLM\n"
        + SHORT.replace("(Qwen2For", "(Qwen2MoeFor"),
        tmp_path,
    ).text
    assert "import logging\n" in text
    assert "from transformers.utils import logging\n" not in text


def test_what_is_exported_by_transformers_is_found_in_its_file(tmp_path: Path):
    texts = [
        generated_from(SHORT.replace("transformers.models.qwen2.modeling_qwen2", package), tmp_path).text
        for package in ("transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen2", "transformers")
    ]
    without_headers = {text.partition("\n\n")[2] for text in texts}
    assert len(without_headers) == 1 and "class Qwen2Attention" in texts[0]


def test_a_fork_without_a_configuration_of_its_own_serves_its_parents(tmp_path: Path):
    facts = json.loads(generated_from(SHORT, tmp_path).provenance)
    assert (facts["heads"], facts["model_types"]) == (["ShortForCausalLM"], ["qwen2"])
    assert "ShortForCausalLM" in facts["classes"] and "Qwen2ForCausalLM" not in facts["classes"]


def test_experts_that_only_the_fork_builds_are_in_its_plan(tmp_path: Path):
    """The parent's head does not reach them."""
    own = """
from transformers.models.mixtral.modeling_mixtral import MixtralExperts


class ShortForCausalLM(Qwen2ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = MixtralExperts(config)
"""
    text = generated_from(SHORT.partition("class Short")[0] + own, tmp_path).text
    assert text.count('ops.parallel_plan(self, experts={"MixtralExperts": ("gate_up_proj", "down_proj")})') == 1


def test_a_file_that_names_no_model_of_transformers_has_nothing_taken_in(tmp_path: Path):
    source = Path(__file__).parent / "data" / "list_moe"
    generated = pipeline.generate(load("list_moe", source=source))
    assert [*generated.files] == [
        "modeling_list_moe.py",
        "modeling_list_moe.diff",
        "configuration_list_moe.py",
        "provenance.json",
    ]
    assert "inherited" not in json.loads(generated.provenance)


def test_an_attribute_of_a_class_keeps_the_name_of_a_parent(tmp_path: Path):
    """`Norm = Norm` binds an attribute of the class, by the value that the module calls so."""
    text = SHORT.replace("import Qwen2ForCausalLM", "import Qwen2ForCausalLM, Qwen2RMSNorm as Norm")
    text = generated_from(text.replace("    pass\n", "    Norm = Norm\n"), tmp_path).files["merged_short.py"]
    assert "    Norm = Qwen2RMSNorm\n" in text


def test_a_parent_over_two_lines_says_what_to_write(tmp_path: Path):
    text = """
from transformers.models.qwen2 import modeling_qwen2


class ShortForCausalLM(
    modeling_qwen2
    .Qwen2ForCausalLM
):
    pass
"""
    with pytest.raises(
        ConfigError, match=r"modeling_qwen2\.Qwen2ForCausalLM` goes over two lines. To fix: write it in one"
    ):
        generated_from(text, tmp_path)
