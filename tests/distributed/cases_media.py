"""What each rank does in the tests of multimodal models; see test_media.py."""

from __future__ import annotations

import pytest
import torch
from transformers import LlavaConfig

from patchgen.runtime import attention, minimal_media, ops, parallel
from patchgen.runtime.parallel import gradients, media, sharding
from patchgen.runtime.verify import media_ranks
from patchgen.runtime.verify.media_ranks import RankResult
from patchgen.runtime.verify.reference_model import find_generated, reference_model, state_of


def agrees(model: str, name: str, *, sp: int, fsdp: bool = True, training: bool = True) -> None:
    """One batch: loss and every gradient within 1e-5 of upstream's class on one rank."""
    row = media_ranks.compare(model, find_generated(model).heads[0], name, sp=sp, fsdp=fsdp, training=training)
    assert not RankResult(**row).reason, row


def every_batch_agrees(model: str, **layout) -> None:
    """All batches that upstream takes."""
    for name in media_ranks.case_names(model, find_generated(model).heads[0]):
        try:
            agrees(model, name, **layout)
        except media_ranks.NotApplicable:
            continue


def steps_agree(model: str, *, sp: int, num_steps: int) -> None:
    """Each batch index its own modality: in every step loss and gradients are those of one rank with the whole batch."""
    for row in media_ranks.mixed_steps(model, find_generated(model).heads[0], sp=sp, num_steps=num_steps):
        assert not row.get("reason"), row


def steps_without_images(model: str) -> list[tuple[set[str], set[str]]]:
    """The parameters that an optimizer would be given gradients of, and those that have one upstream on one rank: after a step
    of text on all ranks, and after one in which one rank has an image."""
    reference, state = reference_model(model, find_generated(model).heads[0]), state_of(1)
    generated = sharding.shard_model(reference.generated(), state)
    maker, found = reference.builder, []
    for image in (False, True):
        samples = [maker.sample([3 + rank, 5]) for rank in range(2)]
        if image:
            samples[1] = media_ranks.one_modality_each(reference, 1, 0)[0]
        mine = dict(maker.case("mixed", [samples[state.batch_index]]).batch)
        mine["position_ids"] = reference.positions(mine)
        _, expected = reference.loss_and_gradients([dict(maker.case("mixed", [sample]).batch) for sample in samples])
        media_ranks.step_on_ranks(
            generated, mine, state, pad_token_id=reference.pad_token_id, fsdp=True, kernels=reference.seams
        )
        assert gradients.accept(generated, gradients.norm(generated.parameters()), on_nonfinite="stop")
        own = {name for name, parameter in generated.named_parameters() if parameter.grad is not None}
        found.append((own, {name for name, gradient in expected.items() if bool(gradient.any())}))
        generated.zero_grad(set_to_none=True)
    return found


def agrees_with(model: str, name: str, *, sp: int, undivided: bool = False, recomputed: bool = False) -> None:
    """As `agrees`, with towers computed whole as where heads are not divisible, or layers run again in the backward."""
    reference = reference_model(model, find_generated(model).heads[0])
    state = state_of(sp)
    full_batches, local_batch = media_ranks.case_inputs(reference, name, state)
    generated = reference.generated()
    towers = [module for module in generated.modules() if type(module).__name__ == "ModuleList"]
    if undivided:
        for layers in towers:
            media._DIVISIBLE_BY(layers)[sp] = False
    if recomputed:
        getattr(generated, "activation_checkpointing_enable", generated.gradient_checkpointing_enable)()
    actual = media_ranks.step_on_ranks(generated, local_batch, state, pad_token_id=reference.pad_token_id, fsdp=False)
    hows = set(media.describe(generated, sp).values())
    assert hows == {"whole on every rank: heads not divisible" if undivided else "each rank a slice of the rows"}
    row = media_ranks.compare_steps(reference.model, lambda _: reference.loss_and_gradients(full_batches), actual)
    assert not row.get("reason"), row


def features_that_are_not_the_tokens_are_refused() -> None:
    """Every rank counts the placeholders of all and says what it was given."""
    state = state_of(2)
    mask = torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="5 feature rows for 6 placeholder tokens in the full sequence of 2 ranks"):
        media.local_features(torch.zeros(5, 4), mask, state)


def masks_made_of_slices_are_refused() -> None:
    """Token types handed over as a slice would give a mask of the wrong tokens."""
    from transformers import Gemma3TextConfig
    from transformers.masking_utils import create_causal_mask

    attention.register()
    state = state_of(2)
    config = Gemma3TextConfig(num_hidden_layers=1)
    config._attn_implementation = "patchgen_eager"
    arguments = {
        "config": config,
        "inputs_embeds": torch.zeros(1, 4, 8),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": None,
    }
    with parallel.using(state):
        mask = create_causal_mask(**arguments, block_sequence_ids=torch.zeros(1, 8, dtype=torch.long))
        assert mask.dense(None).shape == (1, 1, 8, 8)
        sliced = create_causal_mask(**arguments, block_sequence_ids=torch.zeros(1, 4, dtype=torch.long))
        with pytest.raises(ValueError, match="looks up block_sequence_ids of 4 tokens, but the sequence has 8"):
            sliced.dense(None)


class _NeedsAnAnswer(torch.nn.Module):
    """A tower that takes nothing that a config tells."""

    config = LlavaConfig()

    def get_image_features(self, pixel_values, question):
        raise AssertionError("never reached without a question")


def a_tower_without_a_minimal_input_is_refused_on_all_ranks() -> None:
    """One rank holds an image and the other none: both raise, and neither waits. With an image on both, none does."""
    state = state_of(1)
    features, embeds = _NeedsAnAnswer().get_image_features, torch.zeros(1, 2, 4)
    with parallel.using(state):
        assert ops.absent_tower(embeds, torch.zeros(1), features) is embeds
        with pytest.raises(ValueError, match="No minimal image is known for _NeedsAnAnswer, so every rank needs one"):
            ops.absent_tower(embeds, None if state.batch_index else torch.zeros(1), features)


def minimal_inputs_of_a_sharded_model(model: str) -> None:
    """Ranks that search at different times find the same, and make no collective: one of them searches alone."""
    reference = reference_model(model, find_generated(model).heads[0])
    state = state_of(1)
    generated = reference.generated()
    sharding.shard_model(generated, state)
    if state.batch_index == 0:
        found = minimal_media.minimal_inputs(generated.model.get_image_features, sp=1, like=torch.zeros(1))
        assert found["pixel_values"].shape[0] == 1
