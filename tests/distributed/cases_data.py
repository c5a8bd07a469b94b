"""What each rank does in `test_data.py`."""

from __future__ import annotations

import torch.distributed as dist

from patchgen.runtime.data import DataConfig, SourceConfig, build_loader, train_tokenizer
from patchgen.runtime.data.agreement import counters_of_all_ranks


def batches_of(path: str, cache: str, **changes) -> list[tuple[int, int]]:
    """`(tokens, documents with labels)` of each batch of this rank, all ranks asking each other where they must."""
    loader = loader_of(path, cache, **changes)
    return [(batch["input_ids"].shape[1], int((batch["labels"] != -100).sum())) for batch in loader]


def counted(path: str, cache: str, *, shared: bool) -> tuple[dict, dict]:
    """This rank's counters and those of all ranks; `shared`: both ranks are of one batch group."""
    loader = loader_of(path, cache, streaming=True, on_bad="skip")
    assert loader.is_sharded
    list(loader)
    total = counters_of_all_ranks(loader.counters, batch_index=0 if shared else dist.get_rank())
    return loader.counters.as_dict(), total.as_dict()


def loader_of(path: str, cache: str, **changes):
    config = DataConfig(
        sources=(SourceConfig(path, streaming=changes.pop("streaming")),),
        cache_dir=cache,
        tokens_per_batch=32,
        pool=1,
        **{"epochs": 1, "on_long": "split", **changes},
    )
    tokenizer = train_tokenizer(config, vocab_size=258)  # bytes and marks: a token a character
    return build_loader(config, tokenizer=tokenizer, batch_index=dist.get_rank(), num_batches=dist.get_world_size())
