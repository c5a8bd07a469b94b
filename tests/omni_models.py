"""Small models that think and speak, whole, as upstream builds and saves them."""

from __future__ import annotations

from pathlib import Path

import torch
from rounding import require_equal_up_to_rounding

from patchgen.runtime.verify.small_config import small_config

CODES = {
    "codec_eos_token_id": 1190, "codec_nothink_id": 1191, "codec_think_bos_id": 1192, "codec_think_eos_id": 1193,
    "codec_pad_id": 1194, "codec_bos_id": 1195,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}


def qwen3_omni():
    """The config of a thinker with experts, a talker that uses three codebooks, and what makes waves of codes."""
    from transformers import Qwen3OmniMoeConfig

    fields = small_config("qwen3_omni_moe").overrides
    talker = fields["talker_config"] | CODES
    talker |= {"spatial_merge_size": 2, "num_code_groups": 3, "accept_hidden_layer": 2, "speaker_id": {"ethan": 1}}
    talker["text_config"] |= {"vocab_size": 1200, "shared_expert_intermediate_size": 32, "num_hidden_layers": 2}
    talker["code_predictor_config"] |= {"vocab_size": 160, "num_code_groups": 3, **ROPE}
    voice = fields["code2wav_config"] | {"codebook_size": 1200, "num_quantizers": 3, **ROPE}
    voice |= {"upsample_rates": [2, 2], "upsampling_ratios": [2]}
    return Qwen3OmniMoeConfig(**fields | {"talker_config": talker, "code2wav_config": voice})


def qwen2_5_omni():
    """The config of a thinker, a talker, and what makes waves of codes in the voice of a speaker."""
    from transformers import Qwen2_5OmniConfig

    fields = small_config("qwen2_5_omni").overrides
    fields["token2wav_config"]["bigvgan_config"] |= {"upsample_initial_channel": 64}
    voice = {"num_embeds": 128, "enc_channels": [32, 32, 32, 32, 96]}  # what the last gets are three of those before
    fields["token2wav_config"]["dit_config"] |= voice
    return Qwen2_5OmniConfig(**fields)


def save_whole(config, folder: Path, *, seed: int = 0, dtype: torch.dtype | None = None):
    """Upstream's whole class with random weights, saved with the files that loading it asks for; returns it."""
    import transformers

    name = {"qwen3_omni_moe": "Qwen3OmniMoe", "qwen2_5_omni": "Qwen2_5Omni"}[config.model_type]
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForConditionalGeneration")._from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.talker.named_parameters():
            if ".experts." in name and parameter.ndim == 3:
                parameter.normal_(0, 0.1)  # upstream leaves them as the memory was
        for parameter in model.parameters():  # of the size that makes what is said depend on every layer
            if parameter.ndim == 2:
                parameter.mul_(8)
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(folder)
    if config.model_type == "qwen2_5_omni":
        dit = config.token2wav_config.dit_config
        speaker = {"bos_token": 5, "cond": torch.randn(1, dit.enc_emb_dim), "ref_mel": torch.randn(1, 20, dit.mel_dim)}
        torch.save({"Chelsie": speaker}, folder / "spk_dict.pt")
    return model


def spoken(whole, config) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model says, text and sound, from one seed."""
    torch.manual_seed(11)
    if config.model_type == "qwen2_5_omni":
        ids, more = [3, 4, 5, 6], {"speaker": "Chelsie", "token2wav_num_steps": 2, "talker_eos_token_id": [127]}
    else:
        ids = [config.im_start_token_id, config.user_token_id, 3, 4, 5, config.im_end_token_id]
        ids += [config.im_start_token_id, config.assistant_token_id, 6]
        more = {"thinker_eos_token_id": 127}
    asked = {"thinker_max_new_tokens": 5, "talker_max_new_tokens": 6, "attention_mask": torch.ones(1, len(ids)).long()}
    words, wave = whole.generate(torch.tensor([ids]), **asked, **more)
    return words, wave


def require_same_speech(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The same words, and their sound within rounding: where weights lie in memory decides the order of a sum."""
    assert torch.equal(found[0], expected[0])
    require_equal_up_to_rounding(found[1], expected[1], what="sound")
