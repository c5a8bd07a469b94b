"""From a configuration to a loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patchgen.runtime.data.cache import open_cache
from patchgen.runtime.data.config import DataConfig
from patchgen.runtime.data.documents import Documents
from patchgen.runtime.data.encoders import make_encoder
from patchgen.runtime.data.loader import Loader
from patchgen.runtime.data.planned import PlannedLoader
from patchgen.runtime.data.sources import open_source


def build_loader(
    config: DataConfig,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    position_function: Callable[..., Any] | None = None,
    batch_index: int,
    num_batches: int,
) -> Loader:
    """The micro-batches of one rank.

    Args:
        config: what to read and how to batch it.
        tokenizer: of transformers; `train_tokenizer` makes one from the data.
        processor: of transformers, for kind multimodal.
        position_function: of the generated model, for kind multimodal: picklable, gives positions `(3, n)`.
        batch_index, num_batches: those of `ParallelState`: the ranks of one sequence-parallel group share them.

    Raises:
        DataError: no data, or data that is refused; the message says where. The same on all ranks.
    """
    if not 0 <= batch_index < num_batches:
        raise ValueError(f"batch_index must be one of 0 to {num_batches - 1}, not {batch_index}.")
    sources = []
    for source in config.sources:
        encoder = make_encoder(config, source, tokenizer)
        cache = open_cache(config.cache_root, open_source(source), encoder, skip_bad=config.on_bad == "skip")
        sources.append(Documents(cache, limit=config.longest, on_long=config.on_long))
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return PlannedLoader(config, sources, pad_token_id=pad_token_id, batch_index=batch_index, num_batches=num_batches)
