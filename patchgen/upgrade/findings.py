"""The findings of a comparison of two releases, as plain data: for the terminal, for `--json`, for a page."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

SAME, REVIEW, PERSON = 0, 10, 20
"""Verdicts, also the exit codes of `patchgen upgrade`: at most comments changed; regenerates, to review; needs a person."""
VERDICT_NAMES = {SAME: "same", REVIEW: "regenerates, review", PERSON: "needs a person"}


@dataclass(frozen=True)
class Site:
    """One symbol of upstream that changed, or one place where generation does something else.

    Attributes:
        place: "model", "config" or "helper": the modeling file, a configuration, or what the file imports.
        kind: "changed", "added", "gone"; "hand edit" (its target changed), "refused" (a pass, or the generator, refuses
            the new source), "hits" (a pass has other hits), "census" (a symbol has another reason).
        file: upstream's path, "transformers/models/llama/modeling_llama.py".
        symbol: "LlamaMLP.forward", "LlamaConfig.hidden_act", "create_causal_mask"; empty for the whole file.
        passes: those that have or had a site there; without any, upstream's code is copied.
        reason: why it is listed, or why generation refuses.
        old_upstream, new_upstream, generated_now, generated_then: the source of the symbol in upstream's old and new file, and
            in the generated file before and after the move; empty if it is not there.
        edit: the code of a hand edit; otherwise empty.
        old_line, new_line: where it starts in upstream's old and new file, from 1; 0 if it is not there.
        is_run: for a helper, whether training can run the change and no other site reports it; otherwise True.
    """

    place: str
    kind: str
    file: str
    symbol: str
    passes: tuple[str, ...]
    verdict: int
    reason: str
    old_upstream: str = ""
    new_upstream: str = ""
    generated_now: str = ""
    generated_then: str = ""
    edit: str = ""
    old_line: int = 0
    new_line: int = 0
    is_run: bool = True


@dataclass(frozen=True)
class ModelUpgrade:
    """A committed model between two releases; the full generated texts are not part of `--json`."""

    model: str
    old: str
    new: str
    verdict: int
    reason: str
    sites: tuple[Site, ...] = ()
    generated_now: str = dataclasses.field(default="", repr=False)
    generated_then: str = dataclasses.field(default="", repr=False)

    def to_json(self) -> dict[str, object]:
        """As `--json` prints it."""
        texts = ("generated_now", "generated_then")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in texts}


@dataclass(frozen=True)
class Upgrade:
    """All models that were compared."""

    old: str
    new: str
    models: tuple[ModelUpgrade, ...]

    @property
    def verdict(self) -> int:
        """The worst verdict of the models; the exit code."""
        return max((model.verdict for model in self.models), default=SAME)

    def to_json(self) -> dict[str, object]:
        return {
            "old": self.old,
            "new": self.new,
            "verdict": self.verdict,
            "models": [model.to_json() for model in self.models],
        }
