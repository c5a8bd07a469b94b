"""A checkpoint larger than memory is examined layer by layer: the same verdicts and faults, and the memory limit is kept."""

from __future__ import annotations

from collections.abc import Iterator

import planted
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from patchgen.runtime.doctor import examine
from patchgen.runtime.doctor.calls import GradientSummary
from patchgen.runtime.doctor.finding import FAILED, NOT_CHECKED
from patchgen.runtime.doctor.patient import Patient
from patchgen.runtime.train.recipe import from_dict

SLOW = ("proof", "step", "layout")
LIMIT = 130_000
"""Bytes: the toy has 158 thousand, 62 thousand of them in each of its two layers."""


@pytest.fixture
def peak_bytes() -> Iterator[list[int]]:
    """The most bytes that all parameters of a model occupied when one of its modules returned."""
    most, running = [0], []

    def begin(module: nn.Module, args: tuple) -> None:
        running[:] = [module] if hasattr(module, "lm_head") else running

    def look(module: nn.Module, args: tuple, output: object) -> None:
        for model in running:
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
            most[0] = max(most[0], sum(storages.values()))

    hooks = nn.modules.module
    handles = [hooks.register_module_forward_pre_hook(begin), hooks.register_module_forward_hook(look)]
    yield most
    for handle in handles:
        handle.remove()


def test_the_verdicts_are_those_of_the_full_model_within_the_limit(toy, peak_bytes):
    whole = examine(from_dict(toy.values), skip=SLOW)
    assert peak_bytes[0] > LIMIT
    peak_bytes[0] = 0
    parts = examine(from_dict(toy.values), skip=SLOW, memory=LIMIT)
    assert 90_000 < peak_bytes[0] <= LIMIT
    assert {one.check: one.finding.status for one in parts.entries} == {
        one.check: one.finding.status for one in whole.entries
    }, parts.text()
    for name in ("first loss", "alternatives"):
        assert parts[name] == whole[name]
    assert "one after another" in parts["weights"].summary
    assert "it was not written" in parts["export"].summary
    assert "loaded one layer after another" in parts["plain transformers"].summary


@pytest.mark.parametrize("fault", planted.PROMISED)
@pytest.mark.sampled(5)
def test_a_planted_fault_is_found_layer_by_layer(toy, fault, tmp_path):
    report = examine(planted.planted(toy, fault, tmp_path / "planted"), skip=SLOW, memory=LIMIT)
    assert planted.is_found(planted.finding(report, fault), fault), report.text()


def test_a_file_that_computes_otherwise_is_seen_against_upstreams_layers(toy, tmp_path):
    recipe = planted.planted(toy, "bf16 router", tmp_path / "planted")
    report = examine(recipe, skip=(*SLOW, "alternatives"), memory=LIMIT)
    assert "model.layers.0.mlp.gate is the first" in report["plain transformers"].summary


def test_what_the_gradients_say_is_that_of_the_whole_model(toy):
    found: list[dict[str, GradientSummary]] = []
    for memory in (None, LIMIT):
        patient = Patient(from_dict(toy.values), memory=memory)
        found.append(patient.gradient_summaries)
        patient.close()
    whole, parts = found
    assert whole.keys() == parts.keys() == set(dict(patient.blueprint.named_parameters()))
    for name, summary in whole.items():
        assert parts[name].is_zero == summary.is_zero
        assert parts[name].norm == pytest.approx(summary.norm, rel=1e-5)
        assert parts[name].transposition_gains == pytest.approx(summary.transposition_gains, rel=1e-3, abs=1e-6)


def test_a_layer_that_is_not_loaded_reads_as_nan(toy):
    patient = Patient(from_dict(toy.values), memory=LIMIT)
    model = patient.model
    layers = model.get_decoder().layers
    before = layers[0].self_attn.q_proj.weight
    assert before.isnan().all() and before.shape == (32, 32)
    _ = patient.loss
    assert not layers[1].self_attn.q_proj.weight.isnan().any() and layers[0].self_attn.q_proj.weight.isnan().all()
    assert layers[0].self_attn.q_proj.weight is before
    patient.close()


def test_one_layer_must_fit(toy):
    report = examine(from_dict(toy.values), skip=SLOW, memory=90_000)
    assert report["weights"].status == report["kernels"].status == NOT_CHECKED
    assert "take 0.09 MiB, and --memory allows 0.09 MiB" in report["weights"].summary


def test_weights_that_cannot_be_read_are_reported_with_their_key(toy, tmp_path):
    recipe = planted.planted(toy, "frozen by mistake", tmp_path / "planted")
    file = tmp_path / "planted" / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    report = examine(recipe, skip=SLOW, memory=LIMIT)
    assert report["weights"].status == FAILED
    assert "model.layers.1.self_attn.k_proj.weight" in report["weights"].summary


def test_a_conversion_that_does_not_come_back_is_seen_without_an_export(toy, monkeypatch):
    from patchgen.runtime.checkpoint import incremental_load

    real = incremental_load.outputs_and_files

    def turned(model, tensors, *args, **options):
        made, files = real(model, tensors, *args, **options)
        gate = next(one for one in made if one.name.endswith("layers.0.mlp.experts.0.gate_proj.weight"))
        up = next(one for one in made if one.name.endswith("layers.0.mlp.experts.0.up_proj.weight"))
        others = [one for one in made if one not in (gate, up)]
        return [*others, type(gate)(gate.name, up.tensor, gate.dtype), type(up)(up.name, gate.tensor, up.dtype)], files

    monkeypatch.setattr(incremental_load, "outputs_and_files", turned)
    report = examine(from_dict(toy.values), skip=(*SLOW, "alternatives"), memory=LIMIT)
    assert "experts.0.gate_proj.weight has other values in the export." in report["export"].summary
