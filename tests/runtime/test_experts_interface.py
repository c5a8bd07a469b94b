"""`experts_implementation` of a generated model: what it names serves, and the seam serves what is left to it."""

from __future__ import annotations

import copy

import chosen_models
import pytest
import torch

from patchgen.kernels.fused_moe import fused_moe
from patchgen.runtime import registry, seams
from patchgen.runtime.experts_interface import experts_interface
from patchgen.runtime.parallel import report
from patchgen.runtime.verify.model_pair import perturb
from patchgen.runtime.verify.small_config import small_config

WITH_EXPERTS = (
    chosen_models.models(  # llama4's experts are one product of stacked matrices, which nothing else computes
        name
        for name in chosen_models.with_hits("fused_experts")
        if "@use_experts_implementation(" in registry.find_model(name).file.read_text()
    )
)
NAMES = ("eager", "grouped_mm", "batched_mm")
IDS = torch.randint(3, 50, (2, 13), generator=torch.Generator().manual_seed(0))


def pair(name: str, **options):
    """Upstream's model and the generated one, with the same weights, as `from_config` builds them."""
    generated = registry.find_model(name)
    ours = getattr(generated.load(), generated.heads[0])
    theirs = getattr(generated.upstream(), generated.heads[0])
    config = small_config(ours.config_class).config
    models = [one._from_config(copy.deepcopy(config), dtype=torch.float32, **options).eval() for one in (theirs, ours)]
    perturb(models[0])
    models[1].load_state_dict(models[0].state_dict())
    return models


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.fixture
def counted():
    """An implementation of the seam that counts its calls."""
    calls = []

    def counting(*args, **kwargs):
        calls.append(1)
        return fused_moe(*args, **kwargs, backend="torch")

    with seams.registered({"fused_moe": counting}, "counted"), seams.using(fused_moe=seams.EAGER):
        yield calls


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_every_implementation_computes_what_it_does_upstream(name):
    """Bit for bit: as built, then switched live, for the whole model and by sub-config."""
    upstream, generated = pair(name)
    assert generated.get_experts_implementation() == upstream.get_experts_implementation()
    assert torch.equal(logits(generated), logits(upstream))
    by_name = {}
    for choice in NAMES:
        for model in (upstream, generated):
            model.set_experts_implementation(choice)
        assert generated.get_experts_implementation() == upstream.get_experts_implementation()
        assert choice in generated.get_experts_implementation().values()
        by_name[choice] = logits(generated)
        assert torch.equal(by_name[choice], logits(upstream)), choice
    for choice in NAMES[1:]:
        torch.testing.assert_close(by_name[choice], by_name["eager"], rtol=1e-4, atol=1e-5)
    snapshot = generated.get_experts_implementation()
    generated.set_experts_implementation(dict.fromkeys(snapshot, "eager"))
    assert torch.equal(logits(generated), by_name["eager"])
    with pytest.raises(ValueError, match="is not supported"):
        generated.set_experts_implementation("no_such_kernel")


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_config_that_upstream_has_used_builds_the_generated_class(name):
    """And the other way round: upstream writes the implementation into the config object that it is built from."""
    generated = registry.find_model(name)
    ours = getattr(generated.load(), generated.heads[0])
    theirs = getattr(generated.upstream(), generated.heads[0])
    for first, second in ((theirs, ours), (ours, theirs)):
        config = small_config(ours.config_class).config
        with torch.device("meta"):
            built = first._from_config(config)
            assert built.get_experts_implementation() == second._from_config(config).get_experts_implementation()
        assert config.get_text_config()._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("choice", NAMES)
def test_an_implementation_can_be_asked_for_when_a_model_is_built(choice):
    upstream, generated = pair("qwen3_moe", experts_implementation=choice)
    assert generated.config._experts_implementation == choice
    assert torch.equal(logits(generated), logits(upstream))


def test_the_seam_serves_what_is_left_to_it(counted):
    """A model that names another implementation keeps it, beside one that does not."""
    plain, named = pair("qwen3_moe")[1], pair("qwen3_moe", experts_implementation="batched_mm")[1]
    layers = plain.config.num_hidden_layers - len(plain.config.mlp_only_layers)
    expected = logits(plain)
    with seams.using(fused_moe="counted"):
        for choice, served in (("grouped_mm", True), ("eager", True), ("batched_mm", False), ("grouped_mm", True)):
            plain.set_experts_implementation(choice)
            torch.testing.assert_close(logits(plain), expected, rtol=1e-4, atol=1e-5)
            assert len(counted) == (layers if served else 0), choice
            counted.clear()
        logits(named)
        assert counted == []
        assert "fused_moe" in report.seam_users(plain)
        assert "fused_moe" not in report.seam_users(named)
        with pytest.raises(ValueError, match="experts_implementation is neither"):
            report.require_seams(report.seam_users(named), {"fused_moe": "counted"})


def test_a_name_that_is_unknown_is_refused_at_the_call():
    with pytest.raises(KeyError, match="not a valid experts implementation"):
        experts_interface.get_interface("no_such_kernel", logits)


def test_a_model_without_experts_is_refused_as_upstream_refuses_it():
    for model in pair("qwen3"):
        with pytest.raises(ValueError, match="does not support setting experts implementation"):
            model.set_experts_implementation("grouped_mm")
