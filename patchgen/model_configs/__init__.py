"""A short file per model that needs more than the default pipeline. Most models need none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from patchgen import project_code
from patchgen.errors import ConfigError
from patchgen.passes.hand_edits import Edit


@dataclass(frozen=True)
class Expect:
    """How many hits a pass must have, instead of its default expectation."""

    hits: int
    reason: str

    def __post_init__(self) -> None:
        if self.hits < 0 or not self.reason.strip():
            raise ConfigError("Expect(hits, reason=...) needs a number of hits and the reason for it.")


@dataclass(frozen=True)
class ModelConfig:
    """The settings of one model.

    Attributes:
        model: the model type; also the name of the folder in `generated_models/`.
        roots: the classes to generate for; code that they do not reach is pruned. Empty: upstream's heads.
        heads: the classes to train or to use, instead of the heads that upstream's auto maps name; they are roots, too.
        expect: hits per pass. A number pins the reviewed hits; `Expect(0, reason)` states that a pass has nothing to do: it
            still runs, its misses are tolerated, and a hit is an error.
        edits: hand edits, each with its reason.
        allow_sync: `Class.forward` of the generated file -> reason, for host syncs that stay. `forward` alone is that method
            of every class: releases move methods from class to class.
        strict_sync: whether a host sync that is not allowed is an error instead of a note. True for multimodal models that
            have no such sync, whose media code is where syncs are common: a release must not add one unnoticed.
    """

    model: str
    roots: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    expect: Mapping[str, int | Expect] = field(default_factory=dict[str, int | Expect])
    edits: tuple[Edit, ...] = ()
    allow_sync: Mapping[str, str] = field(default_factory=dict[str, str])
    strict_sync: bool = False

    @property
    def kept(self) -> tuple[str, ...]:
        """All classes to generate for; empty: upstream's heads."""
        return tuple(dict.fromkeys((*self.heads, *self.roots)))

    def for_heads(self, heads: Sequence[str]) -> ModelConfig:
        """The config for these heads instead; pinned hits, which were counted with other heads, are dropped."""
        if not heads:
            return self
        expect = {name: one for name, one in self.expect.items() if isinstance(one, Expect) and not one.hits}
        return replace(self, roots=(), heads=tuple(dict.fromkeys(heads)), expect=expect)


def config_for(model: str, file: Path | None = None) -> ModelConfig:
    """The config of a model; the default one without a file. An error inside a config file is raised.

    Args:
        file: its path, for a model outside transformers.
    """
    if file is not None and not file.is_file():
        raise ConfigError(f"There is no file {file} (given as --config).")
    file = file or file_of(model)
    if not model.isidentifier() or not file.is_file():
        return ModelConfig(model=model)
    config = getattr(project_code.load(file), "CONFIG", None)
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"{shown_file(model, file)} must define CONFIG = ModelConfig(...).")
    if config.model != model:
        raise ConfigError(f"{shown_file(model, file)} is for '{model}', but its CONFIG says '{config.model}'.")
    return config


def folder() -> Path:
    """The folder for new configs: the project's, or else this package."""
    project = project_code.current_project()
    return project.path(project.configs) if project is not None and project.configs else Path(__file__).parent


def file_of(model: str) -> Path:
    """The path of a model's config, which may not exist: the project's, or else this package's."""
    file = folder() / f"{model}.py"
    return file if file.is_file() else Path(__file__).parent / file.name


def shown_file(model: str, file: Path | None = None) -> str:
    """The path of a model's config, which may not exist, as messages show it."""
    if file is not None and file.parent != Path(__file__).parent:
        return str(file)
    file = file_of(model) if file_of(model).is_file() else folder() / f"{model}.py"
    return f"patchgen/model_configs/{model}.py" if file.parent == Path(__file__).parent else str(file)
