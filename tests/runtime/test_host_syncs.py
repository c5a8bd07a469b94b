"""With everything handed in that a collator computes, a generated forward reads nothing back from its tensors."""

from __future__ import annotations

import sys

import pytest
import torch

from patchgen.runtime import registry
from patchgen.runtime.verify.model_pair import build_model
from patchgen.runtime.verify.multimodal_inputs import media_cases
from patchgen.runtime.verify.small_config import small_config

ALLOWED = "Attention.forward"  # calls eager attention image by image; varlen attention takes the bounds as they are


def reads_of(model, batch, monkeypatch) -> set[str]:
    """The functions of generated modeling files, and of transformers' helpers for grids, that call item or tolist."""
    found = set()

    def spy(method):
        def read(tensor, *args):
            frame = sys._getframe(1)
            code = frame.f_code
            if "generated_models" in code.co_filename or code.co_filename.endswith("vision_utils.py"):
                found.add(code.co_qualname)
            return method(tensor, *args)

        return read

    with monkeypatch.context() as patch:
        for name in ("item", "tolist"):
            patch.setattr(torch.Tensor, name, spy(getattr(torch.Tensor, name)))
        model(**batch, use_cache=False).loss.backward()
    return found


@pytest.mark.parametrize("name", ["glm4v_moe", "qwen2_vl", "qwen3_5", "qwen3_omni_moe", "qwen3_vl_moe"])
def test_nothing_is_read_back(name: str, monkeypatch) -> None:
    generated = registry.find_model(name)
    head = generated.heads[0]
    upstream_class = getattr(generated.upstream(), head)
    config = small_config(upstream_class.config_class).config
    cases = {case.name: dict(case.batch) for case in media_cases(build_model(upstream_class, config)).cases}
    model = build_model(getattr(generated.load(), head), config)
    batch = {key: value for key, value in cases["handed in"].items() if "feature" not in key}  # images and videos
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == getattr(config, "audio_token_id", -1), 1)
    rows, length = batch["input_ids"].shape
    batch["position_ids"] = torch.arange(length).expand(3, rows, length)

    without = {key: value for key, value in batch.items() if not key.endswith(("_seqlens", "_seqlen", "_sizes"))}
    without = {key: value for key, value in without.items() if key not in ("image_position_ids", "video_position_ids")}
    computed = {read for read in reads_of(model, without, monkeypatch) if ALLOWED not in read}
    assert any(read.endswith("_features") for read in computed), "the spy sees upstream's expression"

    assert {read for read in reads_of(model, batch, monkeypatch) if ALLOWED not in read} == set()
