"""Keeps special tokens that occur in the data's own texts as plain text.

A template writes `<|im_end|>` to end a turn; a question about `<|im_end|>` has the same characters. So special tokens in
the data are marked, and marked ones are encoded as the tokens of their characters. Of plain texts they are marked in the data; of
conversations in what the template writes, where it is known which characters come from messages (`provenance.py`):

    in the data           what does <|im_end|> mean?
    marked, rendered      <|user|>what does START<|im_end|>END mean?<|im_end|>
    to the tokenizer      <|user|>what does <|pad|> mean?<|im_end|>          another special token stands in
    tokens                <|user|> what does < | im _ end | > mean? <|im_end|>
"""

from __future__ import annotations

import difflib
import functools
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from patchgen.runtime.data.problems import BadSample, DataError

START, END = "\U000f0000", "\U000f0001"  # private-use characters, which transformers also uses to mark control tokens
MARKED = re.compile(f"{START}([^{START}{END}]*){END}|[{START}{END}]")

SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]{1,40}\|>|</?s>|<(?:start|end)_of_\w{1,30}>")
"""What special tokens look like in templates."""
TEMPLATE = -1
"""The source of characters that the data have not brought."""
Span = tuple[int, int]
Offsets = Sequence[Span] | np.ndarray
"""The characters of each token, `(n, 2)`."""


@dataclass(frozen=True)
class PlainText:
    """A text without marks, spans in it, and the literals: special tokens as text, each with the span of its stand-in."""

    text: str
    spans: list[Span]
    literals: list[tuple[Span, str]] = field(default_factory=list)


def added_tokens(tokenizer: Any) -> dict[int, Any] | None:
    """A tokenizer's added tokens by id; None: it does not list them, as transformers' MistralCommonBackend, where
    `added_tokens_decoder` is a method that raises."""
    tokens = tokenizer.added_tokens_decoder
    return tokens if isinstance(tokens, dict) else None


def not_for_training(tokenizer: Any) -> str:
    """Why a tokenizer without `added_tokens` encodes no training data, and what to do: the end of a message."""
    return (
        f"is a {type(tokenizer).__name__}, which neither lists its added tokens nor returns the characters of each token. "
        "To fix: uninstall the package mistral-common; transformers then loads the checkpoint's tokens without it."
    )


def without_marks(value: Any) -> Any:
    """A text, or a list or dict of texts, without the characters that mark tokens."""
    if isinstance(value, str):
        return value.replace(START, "").replace(END, "") if START in value or END in value else value
    if isinstance(value, dict):
        return {key: without_marks(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [without_marks(element) for element in value]
    return value


def strings_of(value: Any) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for element in value.values():
            yield from strings_of(element)
    elif isinstance(value, list | tuple):
        for element in value:
            yield from strings_of(element)


class Literals:
    """Marks special tokens of a tokenizer in data, and encodes marked ones as plain text.

    Args:
        kept: special tokens that the data may contain as such.
        placeholders: of media; never used as a stand-in.

    Raises:
        DataError: the tokenizer does not list its added tokens, or a token of `kept` is none of its special tokens.
    """

    def __init__(self, tokenizer: Any, *, kept: Sequence[str] = (), placeholders: Collection[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.kept = tuple(kept)
        added = added_tokens(tokenizer)
        if added is None:
            raise DataError(f"The tokenizer {not_for_training(tokenizer)}")
        special = {token.content: token for token in added.values() if token.special}
        for name in self.kept:
            if name not in special:
                near = difflib.get_close_matches(name, special, n=3, cutoff=0.5) or sorted(special)[:8]
                raise DataError(
                    f"data.special_tokens names {name!r}, which is not a special token of the tokenizer. Its special tokens "
                    f"are, for example, {', '.join(near)}."
                )
        longest_first = sorted(special.keys() - set(self.kept), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.added_tokens = tuple(tokenizer.get_added_vocab())
        self._warned: set[str] = set()
        candidates = (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token)
        self._stand_in = next(
            (
                name
                for name in candidates
                if name in special
                and name not in placeholders
                and not (special[name].lstrip or special[name].rstrip or special[name].single_word)
            ),
            None,
        )

    def mark(self, value: Any) -> Any:
        """A text, or a list or dict of texts (messages, tools), with special tokens marked."""
        if isinstance(value, str):
            return self.pattern.sub(self._mark, without_marks(value))
        if isinstance(value, dict):
            return {key: self.mark(element) for key, element in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(element) for element in value]
        return value

    def unknown_tokens(self, text: str, sources: np.ndarray | None = None) -> list[str]:
        """What a template writes as special tokens, and is none of the tokenizer's, as where it is the template of another model.

        Args:
            text: rendered.
            sources: as of `mark_rendered`; what the data have brought does not count.
        """
        found = [
            match.group()
            for match in SPECIAL_TOKEN.finditer(text)
            if sources is None or (sources[match.start() : match.end()] == TEMPLATE).all()
        ]
        return [token for token in dict.fromkeys(found) if token not in self._vocabulary]

    @functools.cached_property
    def _vocabulary(self) -> frozenset[str]:
        return frozenset(self.tokenizer.get_vocab())

    def warn_of_unknown_tokens(self, text: str, sources: np.ndarray | None) -> None:
        """Warns of each of `unknown_tokens` once."""
        for token in self.unknown_tokens(text, sources):
            if token not in self._warned:
                self._warned.add(token)
                warnings.warn(
                    f"The chat template writes {token!r}, for which the tokenizer has no token: it is the template of another "
                    "model, or the tokens were not added. Models do not stop generation at text. `patchgen doctor` says more.",
                    stacklevel=2,
                )

    def mark_rendered(
        self, where: str, text: str, sources: np.ndarray | None, spans: Sequence[Span], data: Any
    ) -> tuple[str, list[Span]]:
        """A rendered text with those special tokens marked that come from the data, and `spans` shifted accordingly.

        Args:
            sources: `(len(text),)` where each character comes from, -1: from the template; None: unknown.
            data: the messages and tools.

        Raises:
            BadSample: the data have special tokens, and it is unknown which those are in the text.
        """
        if sources is None:
            token = next(
                (match.group() for string in strings_of(data) if (match := self.pattern.search(string))), None
            )
            if token is not None:
                raise BadSample(
                    where,
                    f"{token!r} in a text, which cannot be told from what the chat template writes (if it should be the special "
                    "token, add it to data.special_tokens)",
                )
            return text, list(spans)
        pieces, starts, last = [], [], 0
        for match in self.pattern.finditer(text):
            if (sources[match.start() : match.end()] != TEMPLATE).any():
                pieces += [text[last : match.start()], self._mark(match)]
                starts += [match.start(), match.end() - 1]
                last = match.end()
        shift = lambda position: position + int(np.searchsorted(starts, position, side="left"))  # noqa: E731
        return "".join([*pieces, text[last:]]), [(shift(start), shift(end)) for start, end in spans]

    def _mark(self, match: re.Match) -> str:
        token = match.group()
        if token not in self._warned:
            self._warned.add(token)
            warnings.warn(
                f"{token!r} in the data is encoded as plain text. If it should be the special token, add it to "
                "data.special_tokens.",
                stacklevel=2,
            )
        return f"{START}{token}{END}"

    def unmark(self, where: str, text: str, spans: Sequence[Span] = ()) -> PlainText:
        """A rendered text with a stand-in for each marked token, and `spans` shifted accordingly.

        Raises:
            BadSample: the tokenizer has no token to stand in.
        """
        if START not in text and END not in text:
            return PlainText(text, list(spans))
        pieces, literals, shifts, length, last = [], [], [(0, 0)], 0, 0
        for match in MARKED.finditer(text):
            token = match.group(1)  # None: the template split a marked token, and this is a single mark
            if not token:
                piece = ""
            elif self._stand_in is None:
                raise BadSample(where, f"{token!r} in a text, and the tokenizer has no token to stand in for it")
            else:
                piece = self._stand_in
            pieces += [text[last : match.start()], piece]
            length += match.start() - last
            if token:
                literals.append(((length, length + len(piece)), token))
            length += len(piece)
            last = match.end()
            shifts.append((last, length - last))
        ends = np.array([end for end, _ in shifts])

        def shifted(character: int) -> int:
            return character + shifts[int(np.searchsorted(ends, character, side="right")) - 1][1]

        pieces.append(text[last:])
        return PlainText("".join(pieces), [(shifted(start), shifted(end)) for start, end in spans], literals)

    def ids_as_text(self, where: str, token: str) -> list[int]:
        """The ids of a special token's characters, encoded as plain text.

        Raises:
            BadSample: the tokenizer ignores `split_special_tokens`.
        """
        token_ids = self.tokenizer(token, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if self.tokenizer.convert_tokens_to_ids(token) in token_ids:
            raise BadSample(where, f"{token!r} in a text, which the tokenizer always encodes as the special token")
        return list(token_ids)

    def encode(
        self, where: str, text: str, spans: Sequence[Span] = (), *, add_special_tokens: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids `(n,)` int64 of a rendered text, and which of them overlap `spans` `(n,)` bool."""
        ids, span_numbers = self.encode_with_span_numbers(where, text, spans, add_special_tokens=add_special_tokens)
        return ids, span_numbers > 0

    def encode_with_span_numbers(
        self, where: str, text: str, spans: Sequence[Span] = (), *, add_special_tokens: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """`encode`, with the number of the first span that each token overlaps, from 1, `(n,)` int64; 0: none."""
        plain = self.unmark(where, text, spans)
        encoded = self.tokenizer(
            plain.text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False
        )
        ids, offsets = np.array(encoded["input_ids"], dtype=np.int64), encoded["offset_mapping"]
        span_numbers = numbers_of_spans(offsets, plain.spans)
        if not plain.literals:
            return ids, span_numbers
        ids, repeats = self.restore_literals(where, ids, offsets, plain.literals)
        return ids, np.repeat(span_numbers, repeats)

    def restore_literals(
        self, where: str, ids: np.ndarray, offsets: Offsets, literals: Sequence[tuple[Span, str]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids with each stand-in replaced by those of its literal, and how many ids replace each of `ids` `(n,)`."""
        repeats = np.ones(len(ids), dtype=np.int64)
        replacements: dict[int, list[int]] = {}
        for span, token in literals:
            positions = np.flatnonzero(mask_of_spans(offsets, [span]))
            if len(positions) != 1:
                raise BadSample(where, f"{token!r} in a text, whose stand-in is not a single token")
            replacements[int(positions[0])] = literal_ids = self.ids_as_text(where, token)
            repeats[positions[0]] = len(literal_ids)
        parts = [replacements.get(position, [token_id]) for position, token_id in enumerate(ids.tolist())]
        return np.array([token_id for part in parts for token_id in part], dtype=np.int64), repeats


def mask_of_spans(offsets: Offsets, spans: Sequence[Span]) -> np.ndarray:
    """`(n,)` bool: whether each token, with the characters `offsets`, overlaps a span."""
    return numbers_of_spans(offsets, spans) > 0


def numbers_of_spans(offsets: Offsets, spans: Sequence[Span]) -> np.ndarray:
    """`(n,)` int64: the number of the first span, from 1, that each token, with the characters `offsets`, overlaps; 0: none."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    numbers = np.zeros(len(starts), dtype=np.int64)
    for number, (start, end) in enumerate(spans, 1):
        numbers[(numbers == 0) & (ends > start) & (starts < end)] = number
    return numbers
