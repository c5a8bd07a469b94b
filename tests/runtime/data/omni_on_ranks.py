"""Batches of the built-in omni samples: loss and gradients of a small qwen3_omni_moe on two ranks that share each sequence,
against those of one rank alone.

    python tests/runtime/data/omni_on_ranks.py      # prints one JSON object per batch

Its own processes, because torchvision must be there before transformers is imported.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

from small_processors import omni_processor, use_torchvision

MODEL, HEAD = "qwen3_omni_moe", "Qwen3OmniMoeThinkerForConditionalGeneration"
NUM_BATCHES = 3
TOKENS = 300  # the first batch has media of all kinds, the second is text only
FLOOR = 1e-6
"""A gradient below this share of the whole one is compared as if it were of this size."""


def small_model() -> tuple[Any, Any]:
    """The generated model, small, and a processor that fits it."""
    import torch

    from patchgen.runtime import attention, registry
    from patchgen.runtime.verify.small_config import small_config

    attention.register()
    generated_class = getattr(registry.find_model(MODEL).load(), HEAD)
    config = small_config(generated_class.config_class).config
    audio, vision = config.audio_config, config.vision_config
    processor = omni_processor(mel_bins=audio.num_mel_bins, patch_size=vision.patch_size, n_window=audio.n_window)
    tokenizer = processor.tokenizer
    for name in ("image", "video", "audio"):
        setattr(config, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))
    config.vision_start_token_id = tokenizer.vision_bos_token_id
    config.vision_end_token_id = tokenizer.vision_eos_token_id
    config.audio_start_token_id = tokenizer.audio_bos_token_id
    config.audio_end_token_id = tokenizer.audio_eos_token_id
    config.text_config.vocab_size = len(tokenizer)
    config.text_config.pad_token_id = tokenizer.pad_token_id
    torch.manual_seed(0)
    model = generated_class._from_config(config, attn_implementation="patchgen_eager", dtype=torch.float32)
    return model.train(), processor


def gradients_of(model: Any, loss: Any) -> dict[str, Any]:
    """The gradient of each parameter that has one."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to, such as `audio_tower`."""
    return name.removeprefix("model.").split(".")[0]


def parts_without(model: Any, gradients: dict[str, Any]) -> list[str]:
    """The parts with a parameter that got no gradient."""
    return sorted({part_of(name) for name, _ in model.named_parameters() if name not in gradients})


def gradient_errors(model: Any, gradients: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Per part, the largest error of a parameter's gradient, summed over the ranks, relative to the expected one (collective).

    That of the bias of an attention's keys is zero in exact arithmetic; hence FLOOR.
    """
    import torch
    import torch.distributed as dist

    floor = FLOOR * torch.stack([one.norm() for one in expected.values()]).norm()
    errors: dict[str, list[Any]] = {}
    for name, parameter in model.named_parameters():
        zeros = torch.zeros_like(parameter)
        found, wanted = gradients.get(name, zeros).clone(), expected.get(name, zeros)
        dist.all_reduce(found)
        errors.setdefault(part_of(name), []).append((found - wanted).norm() / torch.maximum(wanted.norm(), floor))
    return {part: float(torch.stack(of_part).max()) for part, of_part in errors.items()}


def on_rank(rank: int, world: int, store_file: str) -> None:
    use_torchvision()
    import torch
    import torch.distributed as dist

    from patchgen.runtime import parallel
    from patchgen.runtime.data import DataConfig, SourceConfig, build_loader
    from patchgen.runtime.parallel import ParallelConfig, batch, gloo_groups, loss
    from patchgen.runtime.parallel.state import ParallelState
    from patchgen.runtime.process_exit import end_process

    torch.set_num_threads(1)
    gloo_groups.use_one_worker()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store_file, world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )
    state = ParallelState.create(ParallelConfig.for_world(world, sp=world), "cpu")
    model, processor = small_model()
    config = DataConfig(
        sources=(SourceConfig("builtin:omni"),), kind="multimodal", tokens_per_batch=TOKENS, pool=1, on_long="error"
    )
    loader = build_loader(
        config,
        processor=processor,
        position_function=model.get_position_id_func(),
        batch_index=state.batch_index,
        num_batches=state.config.num_batches,
    )
    for _ in range(NUM_BATCHES):
        whole = next(loader)
        with parallel.using(None):
            alone = model(**batch.slice_batch(whole, sp=1, sp_rank=0)).loss
            alone_gradients = gradients_of(model, alone)
        mine = batch.slice_batch(whole, sp=world, sp_rank=rank, pad_token_id=processor.tokenizer.pad_token_id)
        with parallel.using(state), loss.step(loss.count_items([mine], "cpu")):
            share = model(**mine).loss
            gradients = gradients_of(model, share)
        together = share.detach().clone()
        dist.all_reduce(together)
        errors = gradient_errors(model, gradients, alone_gradients)
        without_gradients: list[Any] = [None] * world
        dist.all_gather_object(without_gradients, parts_without(model, gradients))
        if rank == 0:
            row = {
                "one_rank": float(alone.detach()),
                "ranks": float(together),
                "gradient_errors": errors,
                "documents": len(whole["cu_seq_lens_q"]) - 1,
                "tokens": whole["input_ids"].shape[1],
                "media": sorted(
                    name for name in whole if name in ("pixel_values", "pixel_values_videos", "input_features")
                ),
                "without_gradients": [parts_without(model, alone_gradients), *without_gradients],
            }
            print(json.dumps(row), flush=True)
    dist.barrier()
    end_process(0)


def main() -> int:
    context = multiprocessing.get_context("spawn")
    store_file = str(Path(tempfile.mkdtemp()) / "store")
    ranks = [context.Process(target=on_rank, args=(rank, 2, store_file)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
