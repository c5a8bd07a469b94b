"""One short file per model that needs more than the default pipeline. Most models need none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from patchgen import project_code
from patchgen.errors import ConfigError
from patchgen.passes.hand_edits import Edit


@dataclass(frozen=True)
class Expect:
    """How many hits a pass must have, where the default expectation does not hold."""

    hits: int
    reason: str

    def __post_init__(self) -> None:
        if self.hits < 0 or not self.reason.strip():
            raise ConfigError("Expect(hits, reason=...) wants a number of hits and the reason for it.")


@dataclass(frozen=True)
class ModelConfig:
    """What is particular to a model.

    Attributes:
        model: the model type; also the name of the folder in `generated_models/`.
        roots: the classes that the file is for; what they do not reach is pruned. Empty: upstream's heads.
        heads: the classes to train or to use, in place of the heads that upstream's auto maps name; they are roots, too.
        expect: hits per pass. A number pins what was reviewed; `Expect(0, reason)` states that a pass has
            nothing to do: it still runs, its misses are tolerated, and a hit is an error.
        edits: hand edits, each with its reason.
        allow_sync: `Class.forward`, which the generated file has, -> reason, for host syncs that stay. `forward` alone is
            that method of every class: releases move methods from class to class.
        strict_sync: whether a host sync that is not allowed is an error.
    """

    model: str
    roots: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    expect: Mapping[str, int | Expect] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    allow_sync: Mapping[str, str] = field(default_factory=dict)
    strict_sync: bool = False

    @property
    def kept(self) -> tuple[str, ...]:
        """All that the file is for; empty: upstream's heads."""
        return tuple(dict.fromkeys((*self.heads, *self.roots)))

    def for_heads(self, heads: Sequence[str]) -> ModelConfig:
        """The config of a file with these heads instead; hits that were counted with other heads do not bind there."""
        if not heads:
            return self
        expect = {name: one for name, one in self.expect.items() if isinstance(one, Expect) and not one.hits}
        return replace(self, roots=(), heads=tuple(dict.fromkeys(heads)), expect=expect)


def config_for(model: str, file: Path | None = None) -> ModelConfig:
    """The config of a model; the default one where there is no file. An error inside a config file is not hidden.

    Args:
        file: where it stands, for a model outside of transformers.
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
    """Where new configs go: the folder that the project names, else this package."""
    project = project_code.current_project()
    return project.path(project.configs) if project is not None and project.configs else Path(__file__).parent


def file_of(model: str) -> Path:
    """The config file of a model: the project's, else that of this package; whether there is one or not."""
    file = folder() / f"{model}.py"
    return file if file.is_file() else Path(__file__).parent / file.name


def shown_file(model: str, file: Path | None = None) -> str:
    """Where the config of a model stands, or would stand if it had one, as the user finds it."""
    if file is not None and file.parent != Path(__file__).parent:
        return str(file)
    file = file_of(model) if file_of(model).is_file() else folder() / f"{model}.py"
    return f"patchgen/model_configs/{model}.py" if file.parent == Path(__file__).parent else str(file)
