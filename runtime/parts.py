"""Composite models: a head whose language model comes from another modeling file builds that file's generated class.

    self.language_model = ops.build_part(AutoModel, config.text_config, beside=__file__)

The class depends on the config (a Llava has a Llama, a Mistral, a Qwen3 MoE): one generated file of each serves every head that
builds it. It is searched next to the head's folder, then in the project's folder and the installation's.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from patchgen.runtime import project, registry

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

OPS, PLAN = "patchgen.runtime.ops", "get_parallel_plan"


class UnknownPartError(registry.UnknownModelError):
    """A model builds another one that has no generated file."""


def build_part(auto_class: Any, config: PreTrainedConfig, *, beside: str, **kwargs: object) -> PreTrainedModel:
    """The generated model that replaces `auto_class.from_config(config)`, with random weights.

    Args:
        auto_class: `AutoModel`, `AutoModelForCausalLM`, ...
        config: of the part.
        beside: `__file__` of the generated file that builds it.
        kwargs: for transformers' `_from_config`.

    Raises:
        UnknownPartError: no generated file has that class; the message says how to generate it.
    """
    from transformers.models.auto.auto_factory import _get_model_class

    if type(config) in auto_class._model_mapping:
        upstream = _get_model_class(config, auto_class._model_mapping)
        module, name = upstream.__module__, upstream.__name__
    elif reference := getattr(config, "auto_map", {}).get(
        auto_class.__name__
    ):  # "owner/repository--modeling_x.XModel"
        module, _, name = reference.rpartition("--")[2].rpartition(".")
        kwargs.pop("trust_remote_code", None)  # that code is not run
    else:
        return auto_class.from_config(config, **kwargs)  # raises transformers' own error: an unknown model
    file = module.rpartition(".")[2].removeprefix("modeling_")
    return _generated(name, file, config, Path(beside))._from_config(config, **kwargs)


def _generated(name: str, file: str, config: PreTrainedConfig, beside: Path) -> type[PreTrainedModel]:
    """The generated class of that name, in the folder of its file or of its model type."""
    folders = dict.fromkeys((beside.parent.parent, *project.generated_folders(), registry.installed_directory()))
    for folder in (parent / name for parent in folders for name in dict.fromkeys((file, config.model_type))):
        model = registry.read_model(folder) if (folder / "provenance.json").is_file() else None
        if model is not None and name in model.classes:
            return getattr(model.load(), name)
    is_upstreams = type(config).__module__.startswith("transformers.")
    command = f"patchgen generate {file}" if is_upstreams else f"patchgen generate --source modeling_{file}.py"
    raise UnknownPartError(
        f"{beside.name} builds a language model of type '{config.model_type}' ({name}), which has no "
        f"generated file in {', '.join(map(str, folders))}; upstream's class has no fused operations, no sequence parallelism "
        f"and no expert parallelism. Generate it: {command} --output {beside.parent.parent}"
    )


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, ModuleType]]:
    """The outermost models of other generated files inside `model`: path, module, and the file's own module."""
    from transformers import PreTrainedModel

    model_files, prefix = {cls.__module__ for cls in type(model).__mro__}, ""
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and path and not (prefix and path.startswith(prefix)):
            files = (sys.modules[cls.__module__] for cls in type(module).__mro__)  # FSDP2's own class comes first
            file = next((file for file in files if file.__name__ not in model_files and is_generated(file)), None)
            if file is not None:
                prefix = f"{path}."
                yield path, module, file


def is_generated(file: ModuleType) -> bool:
    """Whether a module is a generated modeling file: it imports the runtime's operations."""
    return getattr(vars(file).get("ops"), "__name__", "") == OPS and "modeling_" in file.__name__


def classes_with_plan(file: ModuleType) -> list[type]:
    """The classes of a generated file that report a parallel plan: its heads."""
    classes = [cls for cls in vars(file).values() if isinstance(cls, type) and cls.__module__ == file.__name__]
    return [cls for cls in classes if PLAN in vars(cls)]


def part_files(head: type[PreTrainedModel], config: PreTrainedConfig) -> list[Path]:
    """The generated files of the parts that a head builds for a config, on the meta device.

    Raises:
        UnknownPartError: a part has none.
    """
    if not registry.read_model(Path(inspect.getfile(head)).parent).parts:
        return []
    with torch.device("meta"):
        model = head._from_config(copy.deepcopy(config))
    return list(dict.fromkeys(Path(inspect.getfile(file)) for _, _, file in parts_of(model)))
