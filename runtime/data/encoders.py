"""Which encoder makes tokens of a source."""

from __future__ import annotations

from typing import Any

from patchgen.runtime.data.chat import ChatEncoder
from patchgen.runtime.data.config import DataConfig, SourceConfig
from patchgen.runtime.data.problems import DataError
from patchgen.runtime.data.text import Encoder, TextEncoder
from patchgen.runtime.data.transform import Transform, TransformedEncoder


def make_encoder(config: DataConfig, source: SourceConfig, tokenizer: Any) -> Encoder:
    """The encoder of a source's samples. Raises DataError where something that the kind needs is missing."""
    if tokenizer is None:
        raise DataError(
            f"data.kind = {config.kind} needs a tokenizer: pass build_loader(tokenizer=...), "
            "or train one on the data with patchgen.runtime.data.train_tokenizer(config, vocab_size=...)."
        )
    encoder = _of_kind(config, source, tokenizer)
    return (
        TransformedEncoder(Transform(source.transform, source, config.kind), encoder) if source.transform else encoder
    )


def _of_kind(config: DataConfig, source: SourceConfig, tokenizer: Any) -> Encoder:
    if config.kind == "chat":
        fields = {"messages_field": source.messages_field, "tools_field": source.tools_field}
        return ChatEncoder(tokenizer, **fields, special_tokens=config.special_tokens)
    return TextEncoder(
        tokenizer, field=source.text_field, append_eos=config.append_eos, special_tokens=config.special_tokens
    )
