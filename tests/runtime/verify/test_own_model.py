"""A model of one's own against the file that it was made from: the sound one is proven, a fault in the generated one is not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from patchgen.commands import generation
from patchgen.runtime import registry
from patchgen.runtime.verify import code_sets, verdict
from patchgen.runtime.verify.model_pair import build_model, build_pair
from patchgen.runtime.verify.report import read_training, write_proof
from patchgen.runtime.verify.small_config import small_config
from patchgen.runtime.verify.verify_model import verify_model

CODE = Path(__file__).parents[2] / "patchgen" / "data" / "lattice_moe"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> registry.GeneratedModel:
    root = tmp_path_factory.mktemp("own")
    generation.generate(["lattice_moe"], False, None, CODE, root, dry_run=False, force=False)
    return with_source(root / "lattice_moe")


def with_source(folder: Path) -> registry.GeneratedModel:
    found = registry.read_model(folder)
    return replace(found, source=found.find_source(CODE))


def proof_of(model: registry.GeneratedModel):
    return verify_model(model, variants=("base",), implementations=())


def test_the_sound_model_is_proven_with_the_input_of_its_own(made):
    proof = proof_of(made)
    assert verdict.of(proof).status == verdict.PROVEN
    assert not proof.without_gradient, "its tower and what embeds its own input have gradients"
    assert "packed images" in {check.name for check in proof.training.checks}
    names = [
        name for name, _ in build_model(made.load().LatticeMoeForConditionalGeneration, small(made)).named_parameters()
    ]
    assert proof.cases[0].num_parameters == len(names), "each stack is compared, and no single expert"


def test_the_record_holds_for_the_files_that_were_compared(made, tmp_path):
    folder = tmp_path / "lattice_moe"
    shutil.copytree(made.directory, folder, ignore=shutil.ignore_patterns("__pycache__"))
    found, head = with_source(folder), made.heads[0]
    assert read_training(folder, found.file, head) is None
    releases = {"transformers": transformers.__version__, "torch": torch.__version__}
    write_proof(proof_of(found), folder, code_sets.made_with({"patchgen.runtime.ops:"}, releases))
    assert read_training(folder, found.file, head) is not None
    with (folder / "configuration_lattice_moe.py").open("a") as file:
        file.write("\n# other words\n")
    assert read_training(folder, found.file, head) is None, "a configuration of its own is part of what was compared"


def small(made: registry.GeneratedModel):
    return small_config(made.upstream().LatticeMoeForConditionalGeneration.config_class).config


KERNEL = "self.gate_up_proj,\n                self.down_proj,"
LABELS = "            labels,\n            loss_function"
FAULTS = {
    "gate and up swapped": ("gate, up = gate_up.chunk(2", "up, gate = gate_up.chunk(2", "'logits' differs"),
    "gate and up swapped on disk": ('("gate_proj", "up_proj",', '("up_proj", "gate_proj",', "'logits' differs"),
    "an expert too far": ("self.down_proj[expert_idx]", "self.down_proj[expert_idx - 1]", "'logits' differs"),
    "router scaled": ("routing.sum(dim=-1, keepdim=True))", "routing.sum(dim=-1, keepdim=True) * 1.001)", "differs"),
    "shared expert dropped": ("output + self.shared_expert(hidden_states)", "output", "'logits' differs"),
    "documents leak": (
        "None,\n            position_ids=position_ids",
        "None,\n            position_ids=None",
        "packed",
    ),
    "another loss": (LABELS, LABELS.replace("labels", "labels.roll(1, -1)", 1), "'loss' differs"),
    "own input not handed on": ("(pixel_values, pixel_spacing=pixel_spacing)\n", "(pixel_values)\n", "case images"),
    "a bias more": ("2, config.hidden_size, bias=False)", "2, config.hidden_size)", "spacing_embed.bias'"),
    "the kernel's experts turned": (KERNEL, KERNEL.replace(",", ".roll(1, 0),", 1), "rows of one document: logits"),
}
ONLY_IN_A_RUN = ("the kernel's experts turned",)
RETURN = "return CausalLMOutputWithPast(loss=loss, logits=logits"


def edited(made: registry.GeneratedModel, tmp_path: Path, old: str, new: str) -> registry.GeneratedModel:
    """The model with another text in one place of its file."""
    shutil.copytree(made.directory, tmp_path / "lattice_moe", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "lattice_moe" / made.file.name
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    return with_source(tmp_path / "lattice_moe")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(3)
def test_a_fault_in_the_generated_file_is_found(fault, made, tmp_path):
    old, new, told = FAULTS[fault]
    found = verdict.of(proof_of(edited(made, tmp_path, old, new)))
    assert found.status == (verdict.EAGER_ONLY if fault in ONLY_IN_A_RUN else verdict.GENERATED), found.words
    assert told in found.reason


@pytest.mark.parametrize(
    ("new", "output"),
    [
        pytest.param(f"{RETURN}.float()", "logits", id="another dtype"),
        pytest.param(
            f"{RETURN}, attentions=(logits,) if logits.dtype == torch.bfloat16 else None",
            "attentions.0",
            id="one more",
        ),
    ],
)
def test_an_output_of_another_form_in_bf16_is_found_though_experts_were_stacked(new, output, made, tmp_path):
    """Stacks round otherwise, so most differences in bf16 are compared with upstream's own error: that of a form is not."""
    (failure,) = proof_of(edited(made, tmp_path, RETURN, new)).failures
    assert failure.startswith(f"case bf16, variant base: output '{output}' differs: it exists on one side only")


def test_weights_and_gradients_of_a_list_become_those_of_the_stack(made):
    upstream, ours = (module.LatticeMoeForConditionalGeneration for module in (made.upstream(), made.load()))
    pair = build_pair(upstream, ours, small(made))
    assert not pair.problems and not pair.correspondence.is_identity
    theirs, stacks = dict(pair.upstream.named_parameters()), dict(pair.generated.named_parameters())
    prefix = "model.language_model.layers.0.mlp.experts"
    num_experts, both, _ = stacks[f"{prefix}.gate_up_proj"].shape
    for expert in range(num_experts):
        gate, up = stacks[f"{prefix}.gate_up_proj"][expert].split(both // 2)
        assert torch.equal(gate, theirs[f"{prefix}.{expert}.gate_proj.weight"])
        assert torch.equal(up, theirs[f"{prefix}.{expert}.up_proj.weight"])
        assert torch.equal(stacks[f"{prefix}.down_proj"][expert], theirs[f"{prefix}.{expert}.down_proj.weight"])
    again = pair.correspondence.to_upstream(pair.generated, pair.generated.state_dict())
    assert again.keys() == pair.upstream.state_dict().keys()
    assert all(torch.equal(again[name], one) for name, one in pair.upstream.state_dict().items())
    gradients = {name: torch.ones_like(one) for name, one in theirs.items()}
    gradients[f"{prefix}.1.gate_proj.weight"] = None
    found = pair.correspondence.to_generated(gradients)[f"{prefix}.gate_up_proj"]
    assert not found[1, : both // 2].any() and found.sum() == found.numel() - found[1, : both // 2].numel()
    nothing = pair.correspondence.to_generated(dict.fromkeys(theirs))
    assert nothing[f"{prefix}.down_proj"] is None


def test_a_source_that_is_not_the_one_is_refused_in_words(made, tmp_path):
    with pytest.raises(
        registry.NoUpstreamError, match=r"modeling_lattice_moe\.py that belongs to no installed .*--code FOLDER"
    ):
        verify_model(registry.read_model(made.directory))
    shutil.copytree(CODE, tmp_path / "code", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "code" / "modeling_lattice_moe.py"
    changed.write_text(changed.read_text() + "CHANGED = 1\n")
    assert made.find_source(tmp_path / "code") is None
    with pytest.raises(
        registry.NoUpstreamError, match=r"is not the file that .*Generate it again with `patchgen generate"
    ):
        verify_model(replace(made, source=changed))


def test_an_input_of_its_own_without_an_example_is_named(made, tmp_path):
    code = tmp_path / "code"
    shutil.copytree(CODE, code, ignore=shutil.ignore_patterns("__pycache__"))
    file = code / "modeling_lattice_moe.py"
    file.write_text(file.read_text().replace(', "example": {"of": "image", "shape": [2]}', ""))
    generation.generate(["lattice_moe"], False, None, code, tmp_path / "out", dry_run=False, force=False)
    found = registry.read_model(tmp_path / "out" / "lattice_moe")
    proof = proof_of(replace(found, source=found.find_source(code)))
    assert "input_rules" in proof.not_compared["pixel_spacing"]
    assert verdict.of(proof).status != verdict.PROVEN
