"""Builds the loader that a configuration describes; the kind of data determines the encoder of each source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from patchgen.runtime.data.agreement import max_over_ranks
from patchgen.runtime.data.cache import open_cache
from patchgen.runtime.data.cached_loader import PlannedLoader
from patchgen.runtime.data.chat import ChatEncoder
from patchgen.runtime.data.config import DataConfig
from patchgen.runtime.data.documents import Documents
from patchgen.runtime.data.feedback import LabelledEncoder, PairEncoder
from patchgen.runtime.data.files import Files
from patchgen.runtime.data.loader import Loader
from patchgen.runtime.data.multimodal import PrepareMultimodal
from patchgen.runtime.data.prepare import PrepareText
from patchgen.runtime.data.problems import DataError
from patchgen.runtime.data.record_stream import MixedStream, Share
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.data.stream_loader import StreamedLoader
from patchgen.runtime.data.task_encoders import TASK_ENCODERS
from patchgen.runtime.data.text import Encoder, TextEncoder, digest, tokenizer_fingerprint
from patchgen.runtime.data.transform import MappedEncoder, Mapper, check_first_rows, mappers_of


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
        position_function: of the generated model, for kind multimodal: picklable, as in `PrepareMultimodal`.
        batch_index: of `ParallelState`; equal on the ranks of a sequence-parallel group.
        num_batches: of `ParallelConfig`: the number of batch groups, which read different batches; equal on all ranks.
        agree: the maximum over ranks; called at every batch of streamed or multimodal data with a limited number of epochs.

    Raises:
        DataError: no data, a bad sample, or a transform that does not fit, with its place; no tokenizer, processor or template that
            the kind needs. The same on all ranks if tokens are cached; otherwise the loader
            raises it, on the rank that reads the sample (`agreement.raise_on_all_ranks`).
        ValueError: `batch_index` is not below `num_batches`.
    """
    if not 0 <= batch_index < num_batches:
        raise ValueError(f"batch_index must be from 0 to {num_batches - 1}, not {batch_index}.")
    sources = [open_source(source) for source in config.sources]
    check_first_rows(config, sources)
    any_streamed = any(source.streaming for source in config.sources)
    preparer = make_preparer(config, tokenizer, processor, position_function)
    if isinstance(preparer, PrepareMultimodal):
        tokenizer = tokenizer or processor.tokenizer
        encoding_parts: list[Any] = [tokenizer_fingerprint(tokenizer), repr(processor), preparer.template]
        encoding_parts += [part for part in (config.media, config.special_tokens, config.learn) if part]
        encoding_parts += [mapper.fingerprint() for mapper in preparer.mappers]
        media_settings = _media_settings(config, preparer)
    else:
        encoding_parts = [encoder.fingerprint() for encoder in preparer.encoders]
        media_settings = {}
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    if not any_streamed and isinstance(preparer, PrepareText):
        documents = _cached_documents(config, sources, preparer)
        return PlannedLoader(
            config, documents, pad_token_id=pad_token_id, batch_index=batch_index, num_batches=num_batches
        )

    stream = _stream(config, sources, Share(batch_index, num_batches))
    settings = _resume_settings(config, sources, stream, encoding_parts) | media_settings
    return StreamedLoader(config, stream, preparer, settings=settings, pad_token_id=pad_token_id, agree=agree)


def _cached_documents(config: DataConfig, sources: Sequence[Any], preparer: PrepareText) -> list[Documents]:
    """The documents of each source, from its cache of tokens."""
    documents = []
    for source, encoder in zip(sources, preparer.encoders, strict=True):
        cache = open_cache(config.cache_root, source, encoder, skip_bad=config.on_bad == "skip")
        documents.append(
            Documents(
                cache,
                limit=config.length_limit,
                on_long=config.on_long,
                skip_cut_targets=preparer.skip_cut_targets,
            )
        )
    return documents


def make_preparer(
    config: DataConfig, tokenizer: Any, processor: Any, position_function: Callable[..., Any] | None
) -> PrepareText | PrepareMultimodal:
    """Makes the object that turns records into samples; arguments as of `build_loader`."""
    if config.kind == "multimodal":
        return PrepareMultimodal(config, processor, position_function)
    encoders = [make_encoder(config, mapper, tokenizer) for mapper in mappers_of(config)]
    return PrepareText(
        encoders, limit=config.length_limit, on_long=config.on_long, skip_cut_targets=skips_cut_targets(config)
    )


def skips_cut_targets(config: DataConfig) -> bool:
    """Whether a sample is skipped if truncation would cut off a target: an answer without its last tokens is a wrong one."""
    return config.kind == "answers"


def make_encoder(config: DataConfig, mapper: Mapper, tokenizer: Any) -> Encoder:
    """The encoder of a source's samples. Raises DataError without a tokenizer, or a chat template that the kind needs."""
    if tokenizer is None:
        raise DataError(
            f"data.kind = {config.kind} needs a tokenizer: pass build_loader(tokenizer=...), "
            "or train one on the data with patchgen.runtime.data.train_tokenizer(config, vocab_size=...)."
        )
    return MappedEncoder(mapper, _encoder_of_kind(config, tokenizer))


def _encoder_of_kind(config: DataConfig, tokenizer: Any) -> Encoder:
    text = TextEncoder(tokenizer, append_eos=config.append_eos, special_tokens=config.special_tokens)
    if config.kind == "text":
        return text
    if config.kind in TASK_ENCODERS:
        return TASK_ENCODERS[config.kind](text)
    if config.kind == "classification" and tokenizer.chat_template is None:
        return LabelledEncoder(text, None)
    chat = ChatEncoder(tokenizer, kind=config.kind, learn=config.learn, special_tokens=config.special_tokens)
    if config.kind == "preference":
        return PairEncoder(chat)
    return LabelledEncoder(text, chat) if config.kind == "classification" else chat


def _stream(config: DataConfig, sources: Sequence[Any], share: Share) -> MixedStream:
    weights = [source.weight for source in config.sources if source.weight is not None]  # all have one, or none has
    any_streamed = any(source.streaming for source in config.sources)
    return MixedStream(
        sources,
        weights or [1 if any_streamed else len(source) for source in sources],
        repeat=bool(weights),
        seed=config.seed,
        shuffled=[config.shuffle and not source.streaming for source in config.sources],
        epochs=config.epochs,
        share=share,
    )


def _resume_settings(
    config: DataConfig, sources: Sequence[Any], stream: MixedStream, encoding_parts: list[Any]
) -> dict[str, Any]:
    """What determines the samples of a stream and their batches: it must not change when a run resumes."""
    fingerprints = [source.contents() if isinstance(source, Files) else source.fingerprint() for source in sources]
    settings = {
        "sources": [digest(fingerprint) for fingerprint in fingerprints],
        "encodings": digest(encoding_parts),
        "weights": stream.weights,
        "shuffled": stream.shuffled,
        "seed": config.seed if any(stream.shuffled) else None,
        "tokens_per_batch": config.tokens_per_batch,
        "packing": config.packing,
        "pool": config.pool_tokens,
        "longest": config.length_limit,
        "on_long": config.on_long,
    }
    if config.separate_modalities:
        settings["separate_modalities"] = [list(pair) for pair in config.separate_modalities]
    return settings


def _media_settings(config: DataConfig, preparer: PrepareMultimodal) -> dict[str, Any]:
    """What determines the media of samples. Of folders only the name: like data files, they may be moved."""
    roots = [source.media_root for source in config.sources]
    return {
        "video_fps": preparer.options.fps,
        "max_frames": config.max_frames,
        "media_root": [None if root is None else Path(root).expanduser().resolve().name for root in roots],
    }
