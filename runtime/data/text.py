"""Encodes plain text, and what all encoders share."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.problems import BadSample


@dataclass(frozen=True)
class Tokens:
    """One sample: `ids` `(n,)` integers; `targets` `(n,)` bool, whether each token has a loss, None: all have one.

    Targets may be int32 classes instead: 0 for none, or the class plus 1. Like the labels of a language model they are
    shifted by one: the class of a token is at the next position.

    Attributes:
        split: of a pair, the number of tokens of its first document; None: not a pair.
        label: of the sample, if it has one.
    """

    ids: np.ndarray
    targets: np.ndarray | None
    split: int | None = None
    label: float | None = None


class Encoder(Protocol):
    """Encodes the fields of samples as tokens."""

    def encode(self, samples: Sequence[tuple[str, dict[str, Any]]]) -> list[Tokens | BadSample]:
        """One result per sample `(where, fields)`."""
        ...

    def fingerprint(self) -> Any:
        """A value of JSON types that changes when the tokens do."""


class SampleEncoder(ABC):
    """Encodes samples one at a time."""

    def encode(self, samples: Sequence[tuple[str, dict[str, Any]]], **options: Any) -> list[Tokens | BadSample]:
        """One result per sample `(where, fields)`; `options` are passed to `tokens`."""
        results: list[Tokens | BadSample] = []
        for where, fields in samples:
            try:
                results.append(self.tokens(where, fields, **options))
            except BadSample as error:
                results.append(error)
        return results

    @abstractmethod
    def tokens(self, where: str, fields: dict[str, Any]) -> Tokens:
        """The tokens of one sample. Raises BadSample."""


class TextEncoder(SampleEncoder):
    """Plain text: all tokens have a loss, and with `append_eos` each document ends with the end-of-sequence
    token, if there is one.

    Of a `prompt` and its `completion`, only the completion and its end-of-sequence token have a loss.

    Args:
        special_tokens: those that texts may contain as such; all others in texts are plain text.
    """

    def __init__(self, tokenizer: Any, *, append_eos: bool, special_tokens: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.eos = [tokenizer.eos_token_id] if append_eos and tokenizer.eos_token_id is not None else []
        self.literals = Literals(tokenizer, kept=special_tokens)

    def encode(self, samples: Sequence[tuple[str, dict[str, Any]]]) -> list[Tokens | BadSample]:
        """One result per sample; texts without special tokens are tokenized in one call."""
        texts = [text for _, fields in samples if isinstance(text := fields.get("text"), str)]
        plain = [text for text in texts if self.literals.mark(text) == text]
        # `verbose` would warn about documents longer than the model's context, which packing handles.
        ids = self.tokenizer(plain, add_special_tokens=True, verbose=False)["input_ids"] if plain else []
        return super().encode(samples, encoded=dict(zip(plain, ids, strict=True)))

    def tokens(self, where: str, fields: dict[str, Any], *, encoded: Mapping[str, list[int]] | None = None) -> Tokens:
        if "completion" in fields:
            return self._completion(where, fields["prompt"], fields["completion"])
        text = required_field(where, fields, "text", str)
        ids = (encoded or {}).get(text)
        if ids is None and self.literals.mark(text) == text:  # without offsets, which some tokenizers do not return
            ids = self.tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
        if ids is None:
            ids = self.literals.encode(where, self.literals.mark(text), add_special_tokens=True)[0].tolist()
        if not text or not ids:  # an empty text may still have a begin-of-sequence token
            raise BadSample(where, "no tokens in the text")
        ids = ids if self.eos and ids[-1:] == self.eos else [*ids, *self.eos]
        return Tokens(np.array(ids, dtype=np.int64), None)

    def _completion(self, where: str, prompt: str, completion: str) -> Tokens:
        prompt, completion = self.literals.mark(prompt), self.literals.mark(completion)
        span = (len(prompt), len(prompt) + len(completion))
        ids, learned = self.literals.encode(where, prompt + completion, [span], add_special_tokens=True)
        if not learned.any():
            raise BadSample(where, "no tokens in the completion")
        if ids[-1] == self.tokenizer.eos_token_id:
            learned[-1] = True  # the tokenizer's own end has no characters, so it overlaps no span
        return Tokens(*self.with_end_token(ids, learned, True))

    def with_end_token(self, ids: np.ndarray, targets: np.ndarray, target: int) -> tuple[np.ndarray, np.ndarray]:
        """Appends the end-of-sequence token, with this target, unless the document already ends with it."""
        if not self.eos or ids[-1] == self.eos[0]:
            return ids, targets
        return np.append(ids, self.eos), np.append(targets, np.array([target], dtype=targets.dtype))

    def fingerprint(self) -> list[Any]:
        return ["text", self.eos, self.literals.kept, tokenizer_fingerprint(self.tokenizer)]


def required_field(where: str, fields: dict[str, Any], name: str, type_: type) -> Any:
    """The field `name`. Raises BadSample if it is missing or of another type."""
    if name not in fields:
        raise BadSample(where, f"no field {name!r}, only {', '.join(sorted(map(str, fields))) or 'none'}")
    if not isinstance(fields[name], type_):
        raise BadSample(where, f"field {name!r} is {type(fields[name]).__name__}, expected {type_.__name__}")
    return fields[name]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of everything that determines the tokens of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        type(tokenizer).__name__,
        backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()),
        tokenizer.special_tokens_map,
        getattr(tokenizer, "chat_template", None),
    ]
    return digest(parts)


def digest(value: Any) -> str:
    """A hash of a value of JSON types, the same in every process."""
    return hashlib.sha256(json.dumps(value, default=str, sort_keys=True).encode()).hexdigest()[:32]
