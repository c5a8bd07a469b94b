"""What a comparison of two releases finds, as plain data: for the terminal, for `--json`, for a page."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

SAME, REVIEW, PERSON = 0, 10, 20
"""Verdicts, and the exit codes of `patchgen upgrade`: nothing but comments, regenerates but review it, needs a person."""
WORDS = {SAME: "same", REVIEW: "regenerates, review", PERSON: "needs a person"}


@dataclass(frozen=True)
class Site:
    """One symbol of upstream that is not what it was, or one place where generation does something else.

    Attributes:
        place: "model", "config" or "helper": the modeling file, a configuration, or what the file imports.
        kind: "changed", "added", "gone"; "hand edit" (the target of one is not what it was), "refused" (a pass, or the
            generator, refuses the new source), "hits" (the hits of a pass moved), "census" (a reason moved).
        file: upstream's path, "transformers/models/llama/modeling_llama.py".
        symbol: "LlamaMLP.forward", "LlamaConfig.hidden_act", "create_causal_mask"; empty for the whole file.
        passes: those that have or had a site there; none: the code is copied as upstream wrote it.
        reason: why it is listed, or why generation refuses.
        old_upstream, new_upstream, generated_now, generated_then: the source of the symbol; empty where there is none.
        edit: for a hand edit its code, the third side.
        old_line, new_line: in upstream's files, 1-based; 0 where there is none.
        is_run: of a helper, whether training can run what changed, and no other site tells of it.
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
    """A committed model between two releases; the whole texts are not part of `--json`."""

    model: str
    old: str
    new: str
    verdict: int
    reason: str
    sites: tuple[Site, ...] = ()
    upstream_now: str = dataclasses.field(default="", repr=False)
    upstream_then: str = dataclasses.field(default="", repr=False)
    generated_now: str = dataclasses.field(default="", repr=False)
    generated_then: str = dataclasses.field(default="", repr=False)

    def to_json(self) -> dict:
        """As `--json` prints it."""
        wholes = ("upstream_now", "upstream_then", "generated_now", "generated_then")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in wholes}


@dataclass(frozen=True)
class Upgrade:
    """All models that were asked about."""

    old: str
    new: str
    models: tuple[ModelUpgrade, ...]

    @property
    def verdict(self) -> int:
        """The worst of the models; the exit code."""
        return max((model.verdict for model in self.models), default=SAME)

    def to_json(self) -> dict:
        return {
            "old": self.old,
            "new": self.new,
            "verdict": self.verdict,
            "models": [model.to_json() for model in self.models],
        }
