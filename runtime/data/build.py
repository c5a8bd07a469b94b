"""From a configuration to a loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from patchgen.runtime.data.agreement import max_over_ranks
from patchgen.runtime.data.cache import open_cache
from patchgen.runtime.data.cached_loader import PlannedLoader
from patchgen.runtime.data.config import DataConfig
from patchgen.runtime.data.documents import Documents
from patchgen.runtime.data.encoders import make_encoder
from patchgen.runtime.data.files import Files
from patchgen.runtime.data.loader import Loader
from patchgen.runtime.data.multimodal import PrepareMultimodal
from patchgen.runtime.data.prepare import Prepare, PrepareText
from patchgen.runtime.data.record_stream import MixedStream, Share
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.data.stream_loader import StreamedLoader
from patchgen.runtime.data.text import digest, tokenizer_fingerprint
from patchgen.runtime.data.transform import check_first_rows, mappers_of


def build_loader(
    config: DataConfig,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    position_function: Callable[..., Any] | None = None,
    batch_index: int,
    num_batches: int,
    agree: Callable[[int], int] = max_over_ranks,
) -> Loader:
    """The micro-batches of one rank.

    Args:
        config: what to read and how to batch it.
        tokenizer: of transformers; `train_tokenizer` trains one on the data.
        processor: of transformers, for kind multimodal.
        position_function: of the generated model, for kind multimodal: picklable, returns positions `(3, n)`.
        batch_index, num_batches: of `ParallelState`; equal on the ranks of a sequence-parallel group.
        agree: the maximum over ranks; called at every batch of a stream with a limited number of epochs.

    Raises:
        DataError: no data, or a bad sample; names its place. The same on all ranks if tokens are cached; otherwise on the
            rank that reads the sample (`agreement.raise_on_all_ranks`).
    """
    if not 0 <= batch_index < num_batches:
        raise ValueError(f"batch_index must be one of 0 to {num_batches - 1}, not {batch_index}.")
    sources = [open_source(source) for source in config.sources]
    check_first_rows(config, sources)
    streaming = any(source.streaming for source in config.sources)
    multimodal = config.kind == "multimodal"
    if multimodal:
        prepare: Prepare = PrepareMultimodal(config, processor, position_function)
        tokenizer = tokenizer or processor.tokenizer
        encodings: list[Any] = [tokenizer_fingerprint(tokenizer), repr(processor), prepare.template]
        encodings += [part for part in (config.media, config.special_tokens, config.learn) if part]
        encodings += [mapper.fingerprint() for mapper in prepare.mappers]
    else:
        encoders = [make_encoder(config, mapper, tokenizer) for mapper in mappers_of(config)]
        prepare = PrepareText(encoders, limit=config.longest, on_long=config.on_long)
        encodings = [encoder.fingerprint() for encoder in encoders]
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    if not streaming and not multimodal:
        documents = []
        for source, encoder in zip(sources, encoders, strict=True):
            cache = open_cache(config.cache_root, source, encoder, skip_bad=config.on_bad == "skip")
            documents.append(Documents(cache, limit=config.longest, on_long=config.on_long))
        return PlannedLoader(
            config, documents, pad_token_id=pad_token_id, batch_index=batch_index, num_batches=num_batches
        )

    stream = _stream(config, sources, Share(batch_index, num_batches))
    settings = _settings(config, sources, stream, encodings)
    return StreamedLoader(config, stream, prepare, settings=settings, pad_token_id=pad_token_id, agree=agree)


def _stream(config: DataConfig, sources: Sequence[Any], share: Share) -> MixedStream:
    weights = [source.weight for source in config.sources if source.weight is not None]  # all have one, or none has
    streaming = any(source.streaming for source in config.sources)
    return MixedStream(
        sources,
        weights or [1 if streaming else len(source) for source in sources],
        repeat=bool(weights),
        seed=config.seed,
        shuffled=[config.shuffle and not source.streaming for source in config.sources],
        epochs=config.epochs,
        share=share,
    )


def _settings(config: DataConfig, sources: Sequence[Any], stream: MixedStream, encodings: list[Any]) -> dict[str, Any]:
    """What determines the samples of a stream and their batches: it must not change when a run resumes."""
    fingerprints = [source.contents() if isinstance(source, Files) else source.fingerprint() for source in sources]
    settings = {
        "sources": [digest(fingerprint) for fingerprint in fingerprints],
        "encodings": digest(encodings),
        "weights": stream.weights,
        "shuffled": stream.shuffled,
        "seed": config.seed,
        "tokens_per_batch": config.tokens_per_batch,
        "packing": config.packing,
        "pool": config.pool_tokens,
        "longest": config.longest,
        "on_long": config.on_long,
    }
    if config.separate_modalities:
        settings["separate_modalities"] = [list(pair) for pair in config.separate_modalities]
    return settings
