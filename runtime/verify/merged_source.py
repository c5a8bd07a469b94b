"""The merged source of a file that inherits from models of transformers: `patchgen generate` writes it beside the generated one."""

from __future__ import annotations

from dataclasses import replace

from patchgen.runtime.registry import GeneratedModel, digest


def for_ranks(model: GeneratedModel) -> GeneratedModel:
    """The model with its merged source, if it has one, as what it is compared with on ranks.

    There upstream's router loss is replaced, in the module of upstream's class, by one that is computed for each row
    (`reference_loss`); a class that inherits its forward calls that of its parent's module. In one process the generated
    class is compared with the user's own.
    """
    file = model.directory / f"merged_{model.name}.py"
    return replace(model, source=file, upstream_sha256=digest(file)) if file.is_file() else model
