"""The stream of weights: what the export writes, without files, in less memory than two buckets."""

from __future__ import annotations

import cases_stream as cases
import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_checkpoints import upstream_checkpoint

from patchgen.runtime import registry
from patchgen.runtime.checkpoint import CheckpointError, export_pretrained, stream_weights
from patchgen.runtime.verify.small_config import small_config

LAYOUTS = ({"ep": 2}, {"sp": 2, "ep": 2}, {"dp_replicate": 2, "ep": 2})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_moe", {}),
        ("gpt_oss", {"dtype": torch.bfloat16}),  # experts interleaved and transposed
        pytest.param("mixtral", {"layout": "stacked"}, marks=pytest.mark.slow),
        pytest.param("qwen3_omni_moe", {}, marks=pytest.mark.slow),
    ],
)
def test_the_stream_is_the_export_in_two_buckets(name, options, tmp_path, four_ranks):
    """Four ranks, FSDP x EP and with SP and replicas: every name, dtype and bit, on every rank."""
    head, file = upstream_checkpoint(name, tmp_path / "original")
    folders = str(tmp_path / "original"), str(tmp_path / "export")
    for results in four_ranks.run(cases.stream_and_export, head, file, *folders, LAYOUTS, options):
        for peak, bucket, largest, total in results:
            assert largest <= peak < 2 * bucket < total


def test_an_unknown_layout_is_refused_before_anything_travels(tmp_path, two_ranks):
    head, file = upstream_checkpoint("qwen3_moe", tmp_path)
    for message in two_ranks.run(cases.refused, head, file, str(tmp_path), layout="per-layer"):
        assert "There is no layout 'per-layer'. Layouts: per-expert, stacked." in message


def test_one_process_without_ranks(tmp_path):
    """Upstream loads it; a bucket smaller than any tensor will do."""
    generated = registry.find_model("qwen3_moe")
    model = registry.build_model(small_config(getattr(generated.load(), generated.heads[0]).config_class).config)
    model.save_pretrained(tmp_path)
    expected = cases.read(tmp_path)
    streamed = dict(stream_weights(model, bucket_bytes=64))
    assert streamed.keys() == expected.keys()
    assert all(torch.equal(streamed[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match="bucket_bytes must be at least 64, not 63"):
        next(stream_weights(model, bucket_bytes=63))
    with pytest.raises(CheckpointError, match="There is no layout 'flat'"):
        next(stream_weights(model, layout="flat"))


def test_adapters_are_refused(tmp_path):
    """Export and stream would have names that nobody knows, and weights without the adapters."""
    generated = registry.find_model("qwen3")
    model = registry.build_model(small_config(getattr(generated.load(), generated.heads[0]).config_class).config)
    get_peft_model(model, LoraConfig(r=2, target_modules=["v_proj"]))
    with pytest.raises(CheckpointError, match=r"has adapters \(model.layers.0.self_attn.v_proj\)"):
        next(stream_weights(model))
    with pytest.raises(CheckpointError, match="merge them first"):
        export_pretrained(model, tmp_path)
