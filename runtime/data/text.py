"""Plain text to tokens, and what all encoders share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.problems import BadSample


@dataclass(frozen=True)
class Tokens:
    """One sample: `ids` `(n,)` integers; `targets` `(n,)` bool, the tokens that are learned, None: all.

    Targets may be int32 instead: 0, or one more than the class that is learned in the place of the token. What is said of a
    token stands one further, where what it predicts stands.

    Attributes:
        split: of a pair, the tokens of its first half; None: it is one document.
        label: the number that belongs to it, where there is one.
    """

    ids: np.ndarray
    targets: np.ndarray | None
    split: int | None = None
    label: float | None = None


class Encoder(Protocol):
    """Turns the fields of samples into tokens."""

    def encode(self, samples: Sequence[tuple[str, dict[str, Any]]]) -> list[Tokens | BadSample]:
        """One answer per sample `(where, fields)`."""
        ...

    def fingerprint(self) -> Any:
        """What changes when the tokens do; JSON types."""


class TextEncoder:
    """Plain text: all tokens are learned, each document ends with the end-of-sequence token where there is one.

    Of a `prompt` with a `completion`, which are one text, the completion is learned, and the token that ends it.

    Args:
        special_tokens: those that a text may write and mean; any other in it is text.
    """

    def __init__(self, tokenizer: Any, *, append_eos: bool, special_tokens: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.eos = [tokenizer.eos_token_id] if append_eos and tokenizer.eos_token_id is not None else []
        self.literals = Literals(tokenizer, kept=special_tokens)

    def encode(self, samples: Sequence[tuple[str, dict[str, Any]]]) -> list[Tokens | BadSample]:
        whole = iter(self._encode_texts([one for one in samples if "completion" not in one[1]]))
        return [
            self._completion(where, fields) if "completion" in fields else next(whole) for where, fields in samples
        ]

    def _completion(self, where: str, fields: dict[str, Any]) -> Tokens | BadSample:
        prompt, completion = self.literals.marked(fields["prompt"]), self.literals.marked(fields["completion"])
        text, span = prompt + completion, (len(prompt), len(prompt) + len(completion))
        try:
            ids, learned = self.literals.encode(where, text, [span], add_special_tokens=True)
        except BadSample as error:
            return error
        if not learned.any():
            return BadSample(where, "no tokens in the completion")
        return Tokens(*self.ended(ids, learned, True))

    def ended(self, ids: np.ndarray, targets: np.ndarray, target: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a document with the one that ends it, whose target is this."""
        if not self.eos or ids[-1] == self.eos[0]:
            return ids, targets
        return np.append(ids, self.eos), np.append(targets, np.array([target], dtype=targets.dtype))

    def _encode_texts(self, samples: Sequence[tuple[str, dict[str, Any]]]) -> list[Tokens | BadSample]:
        texts = [required(where, fields, "text", str) for where, fields in samples]
        marked = ["" if isinstance(text, BadSample) else self.literals.marked(text) for text in texts]
        plain = [text for text, other in zip(texts, marked, strict=True) if isinstance(text, str) and text == other]
        # `verbose` would warn of documents longer than the model's context; packing sees to those.
        found = iter(self.tokenizer(plain, add_special_tokens=True, verbose=False)["input_ids"] if plain else [])
        return [
            text
            if isinstance(text, BadSample)
            else self._document(where, text, next(found) if text == other else self._with_literals(where, other))
            for (where, _), text, other in zip(samples, texts, marked, strict=True)
        ]

    def _with_literals(self, where: str, marked: str) -> list[int] | BadSample:
        try:
            return self.literals.encode(where, marked, add_special_tokens=True)[0].tolist()
        except BadSample as error:
            return error

    def _document(self, where: str, text: str, ids: list[int] | BadSample) -> Tokens | BadSample:
        if isinstance(ids, BadSample):
            return ids
        if not text or not ids:  # without a text there may still be a token that opens each
            return BadSample(where, "no tokens in the text")
        ids = ids if self.eos and ids[-1:] == self.eos else [*ids, *self.eos]
        return Tokens(np.array(ids, dtype=np.int64), None)

    def fingerprint(self) -> list[Any]:
        return ["text", self.eos, self.literals.kept, tokenizer_fingerprint(self.tokenizer)]


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
