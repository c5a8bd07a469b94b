"""One short file per model that needs more than the default pipeline. Most models need none."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

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
        expect: hits per pass. A number pins what was reviewed; `Expect(0, reason)` states that a pass has
            nothing to do: it still runs, its misses are tolerated, and a hit is an error.
        edits: hand edits, each with its reason.
        allow_sync: `Class.forward`, which the generated file has, -> reason, for host syncs that stay.
        strict_sync: whether a host sync that is not allowed is an error.
    """

    model: str
    roots: tuple[str, ...] = ()
    expect: Mapping[str, int | Expect] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    allow_sync: Mapping[str, str] = field(default_factory=dict)
    strict_sync: bool = False


def config_for(model: str) -> ModelConfig:
    """The config of a model; the default one where there is no file. An error inside a config file is not hidden."""
    module_name = f"{__name__}.{model}"
    if not model.isidentifier() or importlib.util.find_spec(module_name) is None:
        return ModelConfig(model=model)
    config = getattr(importlib.import_module(module_name), "CONFIG", None)
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"{module_name.replace('.', '/')}.py must define CONFIG = ModelConfig(...).")
    if config.model != model:
        raise ConfigError(
            f"{module_name.replace('.', '/')}.py is for '{model}', but its CONFIG says '{config.model}'."
        )
    return config
