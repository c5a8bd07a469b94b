"""export, merge, convert and fingerprint: checkpoints from disk to disk."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from patchgen.runtime.train.architecture import Architecture

DTYPES = ("bfloat16", "float16", "float32")


def export(
    run: Path,
    output: Path,
    *,
    step: int | None,
    layout: str | None,
    dtype: str | None,
    source: Path | None,
    trained_only: bool,
    code: str | None,
    generated: str | None,
) -> None:
    """Writes the weights of a run's checkpoint for transformers and vLLM."""
    with _user_errors():
        from patchgen.runtime import checkpoint

        register(code, generated)
        source = source or _tokenizer_folder(run, step)
        folder = checkpoint.export_run(
            run, output, step=step, layout=layout, dtype=_dtype(dtype), source=source, trained_only=trained_only
        )
    print(f"{folder} -> {output}")


def _tokenizer_folder(run: Path, step: int | None) -> Path | None:
    """The `model.source` of a run whose weights came from another folder (`model.weights`), which may have another tokenizer;
    None: they came from the same, or it is gone."""
    from patchgen.runtime.checkpoint import offline
    from patchgen.runtime.train import resume_changes

    recipe = resume_changes.read_saved(offline.find_checkpoint(run, step) / resume_changes.RECIPE_FILE) or {}
    source = Path(str(recipe.get("model.source")))
    return source if recipe.get("model.weights", "auto") != "auto" and source.is_dir() else None


def merge(
    adapter: Path,
    output: Path,
    *,
    source: Path | None,
    layout: str | None,
    dtype: str | None,
    code: str | None,
    generated: str | None,
) -> None:
    """Writes a checkpoint with an adapter merged into it."""
    with _user_errors():
        from patchgen.runtime import checkpoint

        register(code, generated)
        source = source or _base_model_folder(adapter)
        count = checkpoint.merge_adapter(adapter, source, output, layout=layout, dtype=_dtype(dtype))
    print(f"{source} + {adapter} -> {output}: {count} parameters changed")


def _base_model_folder(adapter: Path) -> Path:
    """The base model's folder, as the adapter's config names it."""
    file = adapter / "adapter_config.json"
    try:
        base = json.loads(file.read_text()).get("base_model_name_or_path")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{adapter} is not a folder with a PEFT adapter: {error}") from error
    if not base or not Path(base).is_dir():
        raise ConfigError(
            f"{file} names {base!r} as its base model, which is not a folder here. To fix: give the folder with --source."
        )
    return Path(base)


def convert(
    source: Path, output: Path, *, layout: str | None, dtype: str | None, code: str | None, generated: str | None
) -> None:
    """Writes a checkpoint in another layout."""
    with _user_errors():
        from patchgen.runtime import checkpoint

        register(code, generated)
        written = checkpoint.convert(source, output, layout=layout, dtype=_dtype(dtype))
    size = sum(tensor.num_bytes for tensor in written.outputs + written.unchanged)
    print(f"{source} -> {output}: {len(written.outputs) + len(written.unchanged)} tensors, {size / 1e9:.2f} GB")
    for tensor in written.unchanged:
        print(f"  unchanged: {tensor.name} is not part of upstream's class")


def fingerprint(directory: Path, *, code: str | None, generated: str | None) -> None:
    """Prints a hash and a name per tensor, then the hash of all."""
    with _user_errors():
        from patchgen.runtime.checkpoint import offline

        register(code, generated)
        hashes = offline.fingerprint(directory)
    for name, value in hashes.items():
        print(f"{value}  {name}")
    print(f"{offline.combined_hash(hashes)}  all {len(hashes)} tensors")


def register(code: str | None, generated: str | None) -> Architecture | None:
    """Registers the architecture that the command or the project names. Never one that a run or a checkpoint names: those
    may come from someone else, and registered code is executed. None if neither names one."""
    from patchgen.runtime import project
    from patchgen.runtime.train import architecture
    from patchgen.runtime.train.recipe import ModelConfig, RecipeError

    values, prefix = {"code": code, "generated": generated}, "--"
    try:
        if not code and not generated and (found_project := project.find()) is not None:
            values, prefix = project.model_settings(), f"{found_project.file.name}: "
        config = ModelConfig(source="", code=values.get("code"), generated=values.get("generated"))
        found = architecture.register(config)
        return found if isinstance(found, architecture.Architecture) else None
    except (RecipeError, ValueError) as error:
        message = str(error).replace("model.code", f"{prefix}code").replace("model.generated", f"{prefix}generated")
        raise ConfigError(message) from error


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, not '{name}'.")
    import torch

    return getattr(torch, name)


@contextmanager
def _user_errors() -> Generator[None, None, None]:
    """Reports errors of checkpoints without a traceback, as those of generation are."""
    from patchgen.runtime.checkpoint.errors import CheckpointError
    from patchgen.runtime.compatibility import ReleaseMismatch

    try:
        yield
    except (CheckpointError, ReleaseMismatch) as error:
        raise ConfigError(str(error)) from error
