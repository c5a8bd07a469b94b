"""Models inside models: a head whose language model is of another modeling file builds that file's generated class.

    self.language_model = ops.build_part(AutoModel, config.text_config, beside=__file__)

Which class it is depends on the config (a Llava has a Llama, a Mistral, a Qwen3 MoE): one generated file for each of these
serves every head that builds it. It is looked for beside the head's own folder, in the project's, and in the installation's.
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
    """A model builds another one that no generated file serves."""


def build_part(auto_class: Any, config: PreTrainedConfig, *, beside: str, **kwargs: object) -> PreTrainedModel:
    """The generated model that stands for what `auto_class.from_config(config)` would build, with random weights.

    Args:
        auto_class: `AutoModel`, `AutoModelForCausalLM`, ...
        config: of the part.
        beside: `__file__` of the generated file that builds it.
        kwargs: for transformers' `_from_config`.

    Raises:
        UnknownPartError: no generated file has that class; the message says how to make it.
    """
    from transformers.models.auto.auto_factory import _get_model_class

    if type(config) in auto_class._model_mapping:
        theirs = _get_model_class(config, auto_class._model_mapping)
        module, name = theirs.__module__, theirs.__name__
    elif brought := getattr(config, "auto_map", {}).get(auto_class.__name__):  # "owner/repository--modeling_x.XModel"
        module, _, name = brought.rpartition("--")[2].rpartition(".")
        kwargs.pop("trust_remote_code", None)  # that code is not run
    else:
        return auto_class.from_config(config, **kwargs)  # transformers' own refusal: it knows no such model
    file = module.rpartition(".")[2].removeprefix("modeling_")
    return _generated(name, file, config, Path(beside))._from_config(config, **kwargs)


def _generated(name: str, file: str, config: PreTrainedConfig, beside: Path) -> type[PreTrainedModel]:
    """The generated class of that name, in the folder of its file or of its model type."""
    roots = dict.fromkeys((beside.parent.parent, *project.generated_folders(), registry.installed_directory()))
    for folder in (root / name for root in roots for name in dict.fromkeys((file, config.model_type))):
        model = registry.read_model(folder) if (folder / "provenance.json").is_file() else None
        if model is not None and name in model.classes:
            return getattr(model.load(), name)
    known = type(config).__module__.startswith("transformers.")
    command = f"patchgen generate {file}" if known else f"patchgen generate --source modeling_{file}.py"
    raise UnknownPartError(
        f"{beside.name} builds a language model of type '{config.model_type}' ({name}), of which there is no "
        f"generated file in {', '.join(map(str, roots))}; upstream's class has no fused operations, no slices of the sequence "
        f"and no expert parallelism. Generate it: {command} --output {beside.parent.parent}"
    )


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, ModuleType]]:
    """The outermost models of other generated files inside `model`: path, module, and the file's own module."""
    from transformers import PreTrainedModel

    own, above = {kind.__module__ for kind in type(model).__mro__}, ""
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and path and not (above and path.startswith(above)):
            files = (sys.modules[kind.__module__] for kind in type(module).__mro__)  # FSDP2 puts its own class first
            file = next((one for one in files if one.__name__ not in own and is_generated(one)), None)
            if file is not None:
                above = f"{path}."
                yield path, module, file


def is_generated(file: ModuleType) -> bool:
    """Whether a module is a generated modeling file: one with a model in it that calls the runtime's operations."""
    return getattr(vars(file).get("ops"), "__name__", "") == OPS and "modeling_" in file.__name__


def planned(file: ModuleType) -> list[type]:
    """The classes of a generated file that report a parallel plan: its heads."""
    classes = [one for one in vars(file).values() if isinstance(one, type) and one.__module__ == file.__name__]
    return [one for one in classes if PLAN in vars(one)]


def part_files(head: type[PreTrainedModel], config: PreTrainedConfig) -> list[Path]:
    """The generated files of the parts that a head builds for a config; it is built without memory.

    Raises:
        UnknownPartError: a part has none.
    """
    if not registry.read_model(Path(inspect.getfile(head)).parent).parts:
        return []
    with torch.device("meta"):
        model = head._from_config(copy.deepcopy(config))
    return list(dict.fromkeys(Path(inspect.getfile(file)) for _, _, file in parts_of(model)))
