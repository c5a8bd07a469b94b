"""Trains a tokenizer on the data, for a model type without a checkpoint."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patchgen.runtime.data.cache import cache_lock, write_error
from patchgen.runtime.data.config import DataConfig
from patchgen.runtime.data.problems import BadSample, DataError
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.data.text import digest
from patchgen.runtime.data.transform import ModelInputs, mappers_of

END = "<|endoftext|>"
PADDING = "<|padding|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['tool_calls'] %}"
    "{{ raise_exception('the chat template of a trained tokenizer has no tool calls') }}"
    "{% elif message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}"
    "{{ part['text'] if part['text'] is string else"
    " raise_exception('the chat template of a trained tokenizer has only parts with a text') }}"
    "{% endfor %}{% endif %}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\n' }}{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt else '' }}"
)
MAX_CHARACTERS = 4_000_000  # from the start of each source: enough for a small vocabulary


def train_tokenizer(config: DataConfig, *, vocab_size: int) -> Any:
    """A byte-level BPE tokenizer trained on `config`'s sources, as a transformers tokenizer.

    It is cached under the fingerprints of the sources (of files: path, size and modification time), so all ranks that share
    `data.cache_dir` have the same one. Id 0 is padding, 1 the end of a text. For kinds other than text it has a chat template:
    `role: content`, one line per message; no content is empty, and of a list of parts the texts are joined.

    Raises:
        DataError: `vocab_size` is smaller than the number of bytes and special tokens, a source cannot be opened, or the cache
            folder cannot be written.
    """
    from transformers import PreTrainedTokenizerFast

    sources = [open_source(source) for source in config.sources]
    key_parts = [vocab_size, MAX_CHARACTERS, [source.fingerprint() for source in sources]]
    key_parts += [mapper.fingerprint() for mapper in mappers_of(config)]
    path = config.cache_root / f"tokenizer-{digest(key_parts)}.json"
    if not path.exists():
        with cache_lock(path.with_suffix(".lock")):
            if not path.exists():
                _train(path, _texts(config, sources), vocab_size)
    template = {} if config.kind == "text" else {"chat_template": CHAT_TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=END, pad_token=PADDING, **template)


def _train(path: Path, texts: Iterator[str], vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special_tokens = [PADDING, END]
    smallest = len(alphabet) + len(special_tokens)
    if vocab_size < smallest:
        raise DataError(
            f"vocab_size = {vocab_size} is too small for a tokenizer trained on the data: bytes and special tokens alone take "
            f"{smallest}. To fix: set vocab_size in model.overrides to {smallest} or more."
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        unfinished.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise write_error(
            f"The trained tokenizer cannot be written to the cache folder {path.parent}", error
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _texts(config: DataConfig, sources: list[Any]) -> Iterator[str]:
    for source, mapper in zip(sources, mappers_of(config), strict=True):
        characters = 0
        for record, _ in source.read():
            try:
                fields = mapper(record.where, record.fields())
            except BadSample:
                continue  # counted or raised when samples are prepared
            if isinstance(fields, ModelInputs):
                continue  # already tokens, of another tokenizer
            for text in _texts_of(fields):
                characters += len(text)
                yield text
            if characters > MAX_CHARACTERS:
                break


def _texts_of(fields: dict[str, Any]) -> Iterator[str]:
    """The texts of a sample, those of its messages included."""
    for name in ("text", "prompt", "completion", "question", "context", "anchor", "positive"):
        if isinstance(fields.get(name), str):
            yield fields[name]
    if isinstance(words := fields.get("tokens"), list):
        yield " ".join(word for word in words if isinstance(word, str))
    for name in ("messages", "chosen", "rejected"):
        messages = fields.get(name)
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            parts = (
                [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else ()
            )
            yield from (text for text in (content, *parts) if isinstance(text, str))
