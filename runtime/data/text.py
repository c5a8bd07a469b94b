"""Plain text to tokens, and what all encoders share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from patchgen.runtime.data.problems import BadSample


@dataclass(frozen=True)
class Tokens:
    """One document: `ids` `(n,)` integers; `targets` `(n,)` bool, the tokens that are learned, None: all."""

    ids: np.ndarray
    targets: np.ndarray | None


class Encoder(Protocol):
    """Turns the fields of samples into tokens."""

    def encode(self, samples: Sequence[tuple[str, dict[str, Any]]]) -> list[Tokens | BadSample]:
        """One answer per sample `(where, fields)`."""

    def fingerprint(self) -> Any:
        """What changes when the tokens do; JSON types."""


class TextEncoder:
    """Plain text: all tokens are learned, each document ends with the end-of-sequence token where there is one."""

    def __init__(self, tokenizer: Any, *, field: str, append_eos: bool) -> None:
        self.tokenizer = tokenizer
        self.field = field
        self.eos = [tokenizer.eos_token_id] if append_eos and tokenizer.eos_token_id is not None else []

    def encode(self, samples: Sequence[tuple[str, dict[str, Any]]]) -> list[Tokens | BadSample]:
        texts = [required(where, fields, self.field, str) for where, fields in samples]
        good = [text for text in texts if isinstance(text, str)]
        # `verbose` would warn of documents longer than the model's context; packing sees to those.
        found = iter(self.tokenizer(good, add_special_tokens=True, verbose=False)["input_ids"] if good else [])
        out: list[Tokens | BadSample] = []
        for (where, _), text in zip(samples, texts, strict=True):
            if isinstance(text, BadSample):
                out.append(text)
                continue
            ids = next(found)
            if not text or not ids:  # without a text there may still be a token that opens each
                out.append(BadSample(where, "no tokens in the text"))
                continue
            ids = ids if self.eos and ids[-1:] == self.eos else [*ids, *self.eos]
            out.append(Tokens(np.array(ids, dtype=np.int64), None))
        return out

    def fingerprint(self) -> list[Any]:
        return ["text", self.field, self.eos, tokenizer_fingerprint(self.tokenizer)]


def required(where: str, fields: dict[str, Any], name: str, type_: type) -> Any:
    """The field `name`, or the BadSample that says what is there instead."""
    if name not in fields:
        return BadSample(where, f"no field {name!r}, only {', '.join(sorted(map(str, fields))) or 'none'}")
    if not isinstance(fields[name], type_):
        return BadSample(where, f"field {name!r} is {type(fields[name]).__name__}, expected {type_.__name__}")
    return fields[name]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Names everything that decides which tokens a text gives."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        type(tokenizer).__name__,
        backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()),
        tokenizer.special_tokens_map,
        getattr(tokenizer, "chat_template", None),
    ]
    return digest(parts)


def digest(meaning: Any) -> str:
    """A short name for a value of JSON types, the same in every process."""
    return hashlib.sha256(json.dumps(meaning, default=str, sort_keys=True).encode()).hexdigest()[:32]
