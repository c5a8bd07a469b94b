"""Batches without position ids, as trainers hand them in: `slice_batch` must not take the place of what upstream computes.

Each model with `get_rope_index`, on rows with images, padded right and left, beside upstream's forward on the same batch.
"""

from __future__ import annotations

import functools

import pytest
import torch
from rounding import require_equal_up_to_rounding

from patchgen.runtime import registry
from patchgen.runtime.media_sizes import AUDIO, IMAGE, VIDEO
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.verify.media_samples import SampleBuilder
from patchgen.runtime.verify.model_pair import build_pair
from patchgen.runtime.verify.small_config import small_config

MODELS = [
    "glm4v_moe", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_vl",
    "qwen3_vl_moe",
]  # fmt: skip
SP = 2


def test_the_list_is_complete():
    """Every committed model whose file computes positions from its inputs."""
    found = [one.name for one in registry.generated_models() if "def get_rope_index" in one.file.read_text()]
    assert sorted(found) == MODELS


@functools.cache
def pair_and_builder(name: str):
    found = registry.find_model(name)
    head = found.heads[0]
    upstream_class = getattr(found.upstream(), head)
    pair = build_pair(upstream_class, getattr(found.load(), head), small_config(upstream_class.config_class).config)
    assert not pair.problems
    return pair, SampleBuilder(pair.upstream.eval())


def batch_of(builder: SampleBuilder, side: str) -> dict:
    """Rows of several lengths with images, a video or a sound, padded on a side."""
    item = builder.maker.item
    kinds = [kind for kind in (IMAGE, VIDEO, AUDIO) if kind in builder.layouts]
    rows = [builder.sample([5, item(kind, 0), 3, item(IMAGE, 1), 2]) for kind in kinds]
    rows = rows if builder.takes(rows) else rows[:1]  # one batch of images and videos, if upstream takes that
    batch = dict(builder.case("rows", [*rows, builder.sample([9])]).batch)
    batch.pop("labels")
    if side == "left":
        moved = batch["attention_mask"].shape[1] - batch["attention_mask"].sum(1)
        for field in ("input_ids", "attention_mask", "mm_token_type_ids"):
            if field in batch:
                values = zip(batch[field], moved.tolist(), strict=True)
                batch[field] = torch.stack([row.roll(places) for row, places in values])
    return batch


def upstreams(builder: SampleBuilder, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of upstream's forward, and the positions that its language model gets."""
    seen = []
    decoder = builder.model.get_decoder()
    hook = decoder.register_forward_pre_hook(lambda *call: seen.append(call[2]["position_ids"]), with_kwargs=True)
    logits = builder.run_upstream(batch).logits
    hook.remove()
    return logits, seen[0]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_the_full_rows_are_upstreams(name: str, side: str):
    pair, builder = pair_and_builder(name)
    batch = batch_of(builder, side)
    expected, _ = upstreams(builder, batch)
    with torch.no_grad():
        found = pair.generated.eval()(**slice_batch(batch, sp=1, sp_rank=0), use_cache=False).logits
    real = batch["attention_mask"].bool()
    require_equal_up_to_rounding(found[real], expected[real])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_slices_have_the_positions_that_upstream_computes(name: str, side: str):
    pair, builder = pair_and_builder(name)
    batch = batch_of(builder, side)
    length = batch["input_ids"].shape[1]
    _, expected = upstreams(builder, batch)
    parts = [slice_batch(batch, sp=SP, sp_rank=rank, model=pair.generated) for rank in range(SP)]
    assert torch.equal(torch.cat([part["position_ids"] for part in parts], dim=-1)[..., :length], expected)
    without_mask = {key: value for key, value in batch.items() if key != "attention_mask"}
    if "mm_token_type_ids" in batch and side == "right":  # without a mask padding is text
        _, expected = upstreams(builder, without_mask)
        part = slice_batch(without_mask, sp=SP, sp_rank=0, model=pair.generated)
        assert torch.equal(part["position_ids"], expected[..., : part["input_ids"].shape[1]])


def test_what_upstream_refuses_is_refused():
    """Grids without token types: upstream cannot tell images from text, and neither do slices."""
    pair, builder = pair_and_builder("qwen2_vl")
    batch = batch_of(builder, "right")
    del batch["mm_token_type_ids"]
    for place in ({"sp": 1}, {"sp": SP}):
        with pytest.raises(ValueError, match="`mm_token_type_ids` is missing"):
            pair.generated(**slice_batch(batch, **place, sp_rank=0, model=pair.generated))


def test_text_of_such_a_model_counts():
    pair, _ = pair_and_builder("qwen2_vl")
    batch = {"input_ids": torch.arange(3, 11)[None]}
    assert slice_batch(batch, sp=SP, sp_rank=1, model=pair.generated)["position_ids"].tolist() == [[4, 5, 6, 7]]
    packed = batch | {"cu_seq_lens_q": torch.tensor([0, 3, 8])}
    assert slice_batch(packed, sp=SP, sp_rank=1, model=pair.generated)["position_ids"].tolist() == [[1, 2, 3, 4]]


def test_positions_that_count_by_the_mask_are_upstreams():
    """OPT's positions skip padding: rows padded left, given without position ids."""
    from transformers import OPTForCausalLM

    model = OPTForCausalLM(small_config("opt").config).eval()
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    batch = {"input_ids": torch.arange(3, 19).view(2, 8), "attention_mask": mask}
    with torch.no_grad():
        expected, found = (model(**one).logits for one in (batch, slice_batch(batch, sp=1, sp_rank=0)))
        counted = model(**batch, position_ids=torch.arange(8).expand(2, 8)).logits
    assert torch.equal(found[mask.bool()], expected[mask.bool()])
    assert not torch.allclose(counted[0, 3:], expected[0, 3:], atol=1e-4)
