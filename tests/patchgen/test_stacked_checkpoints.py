"""A published model file with a list of experts against the file generated from it: numbers, gradients, checkpoints.

The source is `data/list_moe`, generated into a folder outside of the package, with the copy of its configuration file.
"""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from rounding import require_equal_up_to_rounding
from safetensors import safe_open
from safetensors.torch import load_file

from patchgen.commands import generation
from patchgen.runtime import ops, registry, seams
from patchgen.runtime.checkpoint_mapping import stacked_experts_conversion

DATA = Path(__file__).parent / "data"
SEAMS = {"eager": {}, "torch": {"fused_moe": "torch"}}


@pytest.fixture(scope="module")
def original():
    """The source's module."""
    sys.path.insert(0, str(DATA))
    try:
        yield importlib.import_module("list_moe.modeling_list_moe")
    finally:
        sys.path.remove(str(DATA))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where the generated model lies."""
    root = tmp_path_factory.mktemp("generated")
    generation.generate(["list_moe"], False, None, DATA / "list_moe", root, dry_run=False, force=False)
    return root / "list_moe"


@pytest.fixture(scope="module")
def generated(directory):
    """The generated module."""
    return registry.read_model(directory).load()


@pytest.fixture(scope="module")
def checkpoint(original, generated, tmp_path_factory):
    """A checkpoint of the source, a key per expert and projection; saved with the generated file's conversion registered."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    original.ListMoeForCausalLM(original.ListMoeConfig()).save_pretrained(folder)
    return folder


def load(model_class, folder: Path):
    model, info = model_class.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.train()


def keys(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def step(model, ids_BS):
    """Loss, logits, and the gradient of every parameter: of each expert, or of stacks."""
    outputs = model(ids_BS, labels=ids_BS)
    outputs.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return outputs.loss.detach(), outputs.logits.detach(), gradients


def stacked(gradients: dict[str, torch.Tensor | None], num_experts: int) -> dict[str, torch.Tensor]:
    """Gradients of lists of experts as gradients of stacks; an expert without tokens has none, which is zero."""
    found = {name: gradient for name, gradient in gradients.items() if ".experts." not in name}
    for prefix in sorted({name.split(".experts.")[0] + ".experts" for name in gradients if ".experts." in name}):
        known = next(
            g for name, g in gradients.items() if name.startswith(prefix) and ".wo." in name and g is not None
        )

        def of(expert, part, prefix=prefix, known=known):
            gradient = gradients[f"{prefix}.{expert}.{part}.weight"]
            return torch.zeros_like(known if part == "wo" else known.T) if gradient is None else gradient

        found[f"{prefix}.gate_up_proj"] = torch.stack(
            [torch.cat([of(e, "wi"), of(e, "wu")]) for e in range(num_experts)]
        )
        found[f"{prefix}.down_proj"] = torch.stack([of(e, "wo") for e in range(num_experts)])
    return found


@pytest.mark.parametrize("choice", SEAMS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 9), (3, 33)], ids=str)
@pytest.mark.sampled(3)
def test_same_numbers_as_the_source(original, generated, checkpoint, choice, shape):
    theirs, ours = load(original.ListMoeForCausalLM, checkpoint), load(generated.ListMoeForCausalLM, checkpoint)
    ids_BS = torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(1))
    if shape == (1, 1):  # nothing to predict: the logits alone
        with seams.using(**SEAMS[choice]), torch.no_grad():
            require_equal_up_to_rounding(ours(ids_BS).logits, theirs(ids_BS).logits)
        return
    loss, logits, gradients = step(theirs, ids_BS)
    expected = stacked(gradients, num_experts=6)
    with seams.using(**SEAMS[choice]):
        our_loss, our_logits, our_gradients = step(ours, ids_BS)
    require_equal_up_to_rounding(our_loss, loss)
    require_equal_up_to_rounding(our_logits, logits)
    assert our_gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        require_equal_up_to_rounding(our_gradients[name], gradient, what=name)


def test_checkpoints_go_both_ways(original, generated, checkpoint, tmp_path):
    ours = load(generated.ListMoeForCausalLM, checkpoint)
    ours.save_pretrained(tmp_path)
    before, after = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.moe.experts.5.wu.weight" in after
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    load(original.ListMoeForCausalLM, tmp_path)


def test_a_new_model_saves_the_keys_of_the_source(original, generated, checkpoint, tmp_path):
    torch.manual_seed(2)
    generated.ListMoeForCausalLM(generated.ListMoeConfig()).save_pretrained(tmp_path)
    assert keys(tmp_path) == keys(checkpoint)
    load(original.ListMoeForCausalLM, tmp_path)


def test_the_base_model_loads_experts_from_the_checkpoint_of_a_head(generated, checkpoint):
    head = load(generated.ListMoeForCausalLM, checkpoint)
    base, info = generated.ListMoeModel.from_pretrained(checkpoint, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(base.layers[1].moe.experts.gate_up_proj, head.model.layers[1].moe.experts.gate_up_proj)


def test_stacks_start_like_linear_layers(generated):
    torch.manual_seed(3)
    config = generated.ListMoeConfig(hidden_size=128, moe_intermediate_size=96, initializer_range=0.013)
    experts = generated.ListMoeForCausalLM(config).model.layers[0].moe.experts
    for weight in (experts.gate_up_proj, experts.down_proj):
        assert abs(weight.mean().item()) < 4 * 0.013 / math.sqrt(weight.numel())
        assert weight.std().item() == pytest.approx(0.013, rel=0.02)
    assert experts.gate_up_proj.shape == (6, 192, 128) and experts.down_proj.shape == (6, 128, 96)


def test_plan_lists_the_stacks(generated):
    plan = generated.ListMoeForCausalLM(generated.ListMoeConfig(num_hidden_layers=1)).get_parallel_plan()
    prefix = "model.layers.0.moe.experts"
    assert plan == ops.ParallelPlan((f"{prefix}.gate_up_proj", f"{prefix}.down_proj"))


def test_a_model_in_bf16_has_experts_and_logits_in_bf16(generated):
    model = generated.ListMoeForCausalLM._from_config(generated.ListMoeConfig(), dtype=torch.bfloat16)
    assert model.model.layers[0].moe.experts.down_proj.dtype == torch.bfloat16
    assert model(torch.zeros(1, 4, dtype=torch.long)).logits.dtype == torch.bfloat16


def test_a_process_that_knows_only_the_output_folder_builds_the_model(directory):
    """The configuration is the copy beside the generated file."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from list_moe.modeling_list_moe import ListMoeConfig, ListMoeForCausalLM\n"
        "print(ListMoeConfig.__module__, ListMoeForCausalLM(ListMoeConfig()).config_class.__module__)\n"
    )
    command = [sys.executable, "-c", script, str(directory.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["list_moe.configuration_list_moe"] * 2


def test_the_record_lists_no_class_that_a_pass_added(directory, generated):
    added = generated.ListMoeBlockStackedExperts.__name__
    symbols = json.loads((directory / "provenance.json").read_text())["symbols"]
    assert "ListMoeBlock" in symbols and added not in symbols


def test_a_registration_that_costs_transformers_own_class_its_renamings_warns():
    from transformers import conversion_mapping

    before = conversion_mapping.get_checkpoint_conversion_mapping("MixtralForCausalLM")
    assert before is None
    try:
        with pytest.warns(UserWarning, match="own MixtralForCausalLM does not rename .*block_sparse_moe"):
            ops.register_stacked_experts("MixtralForCausalLM", experts={"experts": ("w1", "w3", "w2")})
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # its own conversion renames no modules
            ops.register_stacked_experts(
                "OlmoeForCausalLM", experts={"experts": ("gate_proj", "up_proj", "down_proj")}
            )
    finally:
        for name in ("MixtralForCausalLM", "OlmoeForCausalLM"):
            del conversion_mapping._checkpoint_conversion_mapping_cache[name]
            conversion_mapping.USER_REGISTERED_MAPPINGS.discard(name)


@pytest.mark.parametrize("attribute", ["experts", "local_experts"])
def test_conversion_leaves_shared_experts_alone(attribute):
    for converter in stacked_experts_conversion({attribute: ("gate_proj", "up_proj", "down_proj")}):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            for kind in ("weight", "bias"):
                shared = f"model.layers.0.mlp.shared_experts.{projection}.{kind}"
                numbered = f"model.layers.0.mlp.shared_experts.3.{projection}.{kind}"
                assert converter.rename_source_key(shared) == (shared, None)
                assert converter.rename_source_key(numbered) == (numbered, None)
