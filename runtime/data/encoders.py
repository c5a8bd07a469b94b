"""The encoder of a source, by the kind of data."""

from __future__ import annotations

from typing import Any

from patchgen.runtime.data.chat import ChatEncoder
from patchgen.runtime.data.config import DataConfig
from patchgen.runtime.data.feedback import LabelledEncoder, PairEncoder
from patchgen.runtime.data.problems import DataError
from patchgen.runtime.data.task_encoders import TASK_ENCODERS
from patchgen.runtime.data.text import Encoder, TextEncoder
from patchgen.runtime.data.transform import MappedEncoder, Mapper


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
