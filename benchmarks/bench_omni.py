"""The thinker of Qwen3-Omni at its real width, two layers per tower: one forward and backward with images and audio.

    python benchmarks/bench_omni.py                            # one GPU
    python benchmarks/bench_omni.py --device cpu --tiny        # that it runs

One packed row: images of 64 x 64 patches (1,024 tokens each), sounds of 30 s (390 tokens each) and text between them.
Upstream's class in fp32 is the reference; upstream's and the generated class in bf16 follow with the same weights. Every
gradient of ours may be 1.5 times as far from the reference as upstream's own bf16.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from pathlib import Path

import result_rows
import torch
from torch import Tensor, nn

from patchgen.generated_models.qwen3_omni_moe import modeling_qwen3_omni_moe as generated
from patchgen.runtime import attention, seams

RESULTS = Path(__file__).with_name("results_omni.csv")
COLUMNS: tuple[str, ...] = ("date", "versions", "gpu", "who", "attention", "tokens", "patches", "audio frames", "loss")
COLUMNS += ("gradient error", "ms", "peak GiB")
TEXT = {"vocab_size": 152_064, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4}
TEXT |= {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
VISION = {"hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "out_hidden_size": 2048}
AUDIO = {"d_model": 1280, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "output_dim": 2048}
TINY_TEXT = TEXT | {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "moe_intermediate_size": 16}
TINY_TEXT |= {"num_experts": 4, "num_experts_per_tok": 2}
TINY_VISION = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
TINY_AUDIO = {"d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "output_dim": 64}
MARKS = {"vision_start_token_id": 151_652, "vision_end_token_id": 151_653, "audio_start_token_id": 151_669}
MARKS |= {"audio_end_token_id": 151_670, "position_id_per_seconds": 13}
SIDE, FRAMES, TEXT_BETWEEN = 64, 3000, 256


def config_of(tiny: bool):
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

    sections = {"sections": [4, 2, 2] if tiny else [24, 20, 20]}
    rope = {"rope_type": "default", "rope_theta": 1e6, "interleaved": True, "mrope_section": sections["sections"]}
    text = (TINY_TEXT if tiny else TEXT) | {"num_hidden_layers": 2, "use_cache": False, "rope_parameters": rope}
    vision = (TINY_VISION if tiny else VISION) | {"depth": 2, "deepstack_visual_indexes": [0, 1]}
    audio = (TINY_AUDIO if tiny else AUDIO) | {"encoder_layers": 2}
    config = Qwen3OmniMoeThinkerConfig(text_config=text, vision_config=vision, audio_config=audio)
    for key, value in MARKS.items():
        setattr(config, key, value)
    return config


def batch_of(config, num_images: int, num_sounds: int, device: str, side: int = SIDE, frames: int = FRAMES) -> dict:
    """One row: text, an image, text, ..., a sound, text, ..."""
    generator = torch.Generator().manual_seed(0)
    vision = config.vision_config
    merged = side * side // vision.spatial_merge_size**2
    heard = int(generated._get_feat_extract_output_lengths(torch.tensor(frames)))

    def text() -> Tensor:
        return torch.randint(1, 1000, (TEXT_BETWEEN,), generator=generator)

    def between(kind: str, count: int, token: int) -> tuple[Tensor, Tensor, Tensor]:
        start, end = (torch.tensor([MARKS[f"{kind}_{side}_token_id"]]) for side in ("start", "end"))
        return start, torch.full((count,), token), end

    parts = [text()]
    for _ in range(num_images):
        parts += [*between("vision", merged, config.image_token_id), text()]
    for _ in range(num_sounds):
        parts += [*between("audio", heard, config.audio_token_id), text()]
    ids = torch.cat(parts)[None]
    labels = ids.masked_fill((ids == config.image_token_id) | (ids == config.audio_token_id), -100)
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    inputs = {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(num_images * side * side, pixels, generator=generator),
        "image_grid_thw": torch.tensor([[1, side, side]] * num_images),
        "input_features": torch.randn(num_sounds, config.audio_config.num_mel_bins, frames, generator=generator),
        "feature_attention_mask": torch.ones(num_sounds, frames, dtype=torch.long),
    }
    return {key: value.to(device) for key, value in inputs.items()}


def build(model_class: type, config, attention_name: str, weights: dict | None, dtype: torch.dtype, device: str):
    with torch.device(device):
        model = model_class._from_config(
            copy.deepcopy(config), attn_implementation=attention_name, dtype=dtype
        ).train()
    if weights is None:
        with torch.no_grad():
            generator = torch.Generator(device).manual_seed(0)
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.02, generator=generator)
    else:
        model.load_state_dict(weights)
    return model


def step(model: nn.Module, inputs: dict, dtype: torch.dtype) -> float:
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    loss = model(**cast, use_cache=False).loss
    loss.backward()
    return float(loss.detach())


def measure(model: nn.Module, inputs: dict, dtype: torch.dtype, device: str) -> tuple[float, dict, dict]:
    """Loss and gradients (on the host) of one step, then time and peak memory of the next ones."""
    value = step(model, inputs, dtype)
    gradients = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    times = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        step(model, inputs, dtype)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 1) if device == "cuda" else ""
    return value, gradients, {"loss": round(value, 5), "ms": round(sorted(times)[1], 1), "peak GiB": peak}


def main() -> None:
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as upstream

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--sounds", type=int, default=4)
    parser.add_argument("--attention", default="patchgen_flash_varlen")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run")
    arguments = parser.parse_args()
    device, tiny = arguments.device, arguments.tiny
    attention.register()
    config = config_of(tiny)
    sizes = {"side": 8, "frames": 400} if tiny else {}
    inputs = batch_of(config, arguments.images, arguments.sounds, device, **sizes)
    name = "Qwen3OmniMoeThinkerForConditionalGeneration"
    upstream_class, generated_class = getattr(upstream, name), getattr(generated, name)
    own_attention = arguments.attention if device == "cuda" else "patchgen_sdpa"
    kernels = {"fused_moe": "auto", "causal_lm_loss": "auto", "rms_norm": "compiled", "swiglu": "compiled"}
    if device == "cpu":
        kernels = {"fused_moe": "torch", "causal_lm_loss": "chunked"}

    cases = (
        ("upstream, fp32", upstream_class, "sdpa", torch.float32, {}),
        ("upstream", upstream_class, "sdpa", torch.bfloat16, {}),
        ("generated", generated_class, own_attention, torch.bfloat16, kernels),
    )
    weights, reference, bar, rows, wrong = None, None, {}, [], []
    for who, model_class, attention_name, dtype, choices in cases:
        model = build(model_class, config, attention_name, weights, dtype, device)
        weights = weights or {key: value.cpu() for key, value in model.state_dict().items()}
        with seams.using(**choices):
            _, computed, row = measure(model, inputs, dtype, device)
        reference = reference or computed
        floor = 1e-4 * max(float(g.norm()) for g in reference.values())  # gradients that cancel are rounding only
        errors = {k: float((computed[k] - g).norm() / g.norm().clamp(min=floor)) for k, g in reference.items()}
        if who == "upstream":
            bar = errors
        if who == "generated":
            wrong = too_far(errors, bar)
        row |= {"who": who, "attention": attention_name, "gradient error": f"{max(errors.values()):.1e}"}
        row |= {"tokens": inputs["input_ids"].shape[1], "patches": inputs["pixel_values"].shape[0]}
        row |= {"audio frames": inputs["feature_attention_mask"].numel()}
        rows.append(row)
        print(" | ".join(f"{row[column]}" for column in COLUMNS[3:]), flush=True)
        del model, computed
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    write(rows)
    print("\n".join(wrong) or "every gradient is at most 1.5 times as far from fp32 as upstream's bf16")
    raise SystemExit(1 if wrong else 0)


def too_far(errors: dict[str, float], bar: dict[str, float]) -> list[str]:
    """The gradients further from fp32 than 1.5 times upstream's, or not a number."""
    return [f"{k}: {e:.2e}, upstream {bar[k]:.2e}" for k, e in errors.items() if not e <= 1.5 * max(bar[k], 1e-3)]


def write(rows: list[dict]) -> None:
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    stamp = {"gpu": gpu}
    stamp |= {"versions": f"torch {torch.__version__}, transformers {transformers.__version__}"}
    result_rows.append(RESULTS, COLUMNS, rows, **stamp)


if __name__ == "__main__":
    main()
