"""What each rank does in `test_data.py`."""

from __future__ import annotations

import torch.distributed as dist

from patchgen.runtime.data import DataConfig, SourceConfig, build_loader, train_tokenizer


def batches_of(path: str, cache: str, **changes) -> list[tuple[int, int]]:
    """`(tokens, documents with labels)` of each batch of this rank, all ranks asking each other where they must."""
    config = DataConfig(
        sources=(SourceConfig(path, streaming=changes.pop("streaming")),),
        cache_dir=cache,
        tokens_per_batch=32,
        pool=1,
        **{"epochs": 1, "on_long": "split", **changes},
    )
    tokenizer = train_tokenizer(config, vocab_size=258)  # bytes and marks: a token a character
    loader = build_loader(config, tokenizer=tokenizer, batch_index=dist.get_rank(), num_batches=dist.get_world_size())
    return [(batch["input_ids"].shape[1], int((batch["labels"] != -100).sum())) for batch in loader]
