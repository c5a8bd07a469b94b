"""The files next to the weights (config, generation config, tokenizer), and the model that a config describes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from patchgen.runtime import project, registry
from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.layout import class_name
from patchgen.runtime.checkpoint.quantised import forget_quantisation
from patchgen.runtime.checkpoint.safetensor_files import CONFIG, WEIGHTS

GENERATION_CONFIG = "generation_config.json"
# Files of a checkpoint folder, besides weights and config.json, that are copied along.
SIDE_FILES = (
    "tokenizer*", "vocab*", "merges*", "special_tokens_map*", "added_tokens*", "chat_template*", "*.jinja",
    "*processor_config*", "*.model", "*.tiktoken", "generation_config.json", "*.py", "LICENSE*",
)  # fmt: skip


def config_files(model: PreTrainedModel, dtype: torch.dtype | None = None) -> dict[str, str]:
    """The config files of a model as `save_pretrained` writes them: name -> text."""
    config = copy.deepcopy(model.config)
    config.architectures = [class_name(model)]
    stored = dtype or common_dtype(model)
    if stored is not None:
        config.dtype = str(stored).removeprefix("torch.")
    files = {CONFIG: config.to_json_string(use_diff=True)}
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        files[GENERATION_CONFIG] = generation.to_json_string(use_diff=True)
    return files


def common_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of most elements of floating-point parameters; None without any."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


def side_files(source: Path) -> dict[str, Path]:
    """All files of a checkpoint that are copied along with the weights: name -> file.

    Raises:
        CheckpointError: the folder does not exist.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source}, whose tokenizer and generation config are to be copied, is not a folder.")
    found_files = {
        path.name: path for pattern in SIDE_FILES for path in sorted(source.glob(pattern)) if path.is_file()
    }
    return found_files | {name: source / name for name in files_opened_by_upstream(source)}


def files_opened_by_upstream(source: Path) -> list[str]:
    """Files beside the weights whose names occur as string constants in upstream's `from_pretrained`, such as speaker embeddings
    (spk_dict.pt)."""
    import transformers

    names = read_config(source).get("architectures") or () if (source / CONFIG).is_file() else ()
    classes = [getattr(transformers, name, None) for name in names if isinstance(name, str)]
    upstream_classes = {base for cls in classes if isinstance(cls, type) for base in cls.__mro__} - {
        *PreTrainedModel.__mro__
    }
    methods = [vars(base)["from_pretrained"].__func__ for base in upstream_classes if "from_pretrained" in vars(base)]
    constants = {value for method in methods for value in method.__code__.co_consts if isinstance(value, str)}
    files = {path.name for path in source.iterdir() if path.is_file() and not WEIGHTS.fullmatch(path.name)}
    return sorted(constants & files - {CONFIG})


def read_config(directory: Path) -> dict:
    """`config.json` of a folder.

    Raises:
        CheckpointError: there is none, or it is not JSON.
    """
    file = directory / CONFIG
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {CONFIG}, which describes the model.") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}.") from error


def candidate_models_on_meta(directory: Path) -> Iterator[PreTrainedModel]:
    """The models that a folder's config may describe, on the meta device.

    In this order: transformers' classes, those registered by the user's code, generated ones, whose experts may be stacked
    differently; if `architectures` names no known class, what `AutoModel` builds.

    Raises:
        CheckpointError: the config cannot be read, or transformers does not know its model.
    """
    from transformers import AutoConfig, AutoModel

    fields = read_config(directory)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"transformers does not know the model of {directory / CONFIG}; name your own code with --code FOLDER: {error}"
        ) from error
    forget_quantisation(config)
    named = [name for name in fields.get("architectures") or () if isinstance(name, str)]
    is_known = False
    for cls in _candidate_classes(named):
        is_known = True
        # The folder may name attention kernels of the Hub, which are code; names and shapes do not depend on attention.
        yield on_meta(lambda cls=cls: cls._from_config(copy.deepcopy(config), attn_implementation="eager"))
    if not is_known:
        try:
            yield on_meta(lambda: AutoModel.from_config(config, attn_implementation="eager", trust_remote_code=False))
        except ValueError as error:
            raise CheckpointError(f"No class is known for {named} of {directory / CONFIG}: {error}") from error


def _candidate_classes(names: list[str]) -> Iterator[type[PreTrainedModel]]:
    """Classes of these names: of transformers, registered in this process (the user's code), then generated ones, which are
    imported only if the others do not match."""
    import transformers

    for name in names:
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
            yield cls
    registered = transformers.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.values()
    yield from dict.fromkeys(cls for cls in registered if cls.__name__ in names)
    for folder in generated_folders():
        for model in registry.generated_models(folder):
            for name in set(names) & set(model.classes):
                yield getattr(model.load(), name)


def generated_folders() -> list[Path]:
    """Folders with generated models: the project's, then those of the installation.

    Raises:
        CheckpointError: the project's file cannot be read, or names a folder that does not exist.
    """
    try:
        project_folders = project.generated_folders()
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    missing = next((folder for folder in project_folders if not folder.is_dir()), None)
    if missing is not None:
        raise CheckpointError(f"{missing}, the project's folder of generated models, does not exist.")
    return [*project_folders, registry.installed_directory()]


def on_meta(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """The model that `build` returns, built on the meta device."""
    with torch.device("meta"):
        return build()
