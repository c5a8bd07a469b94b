"""Models inside models: a head whose language model is of another modeling file builds that file's generated class.

    self.language_model = ops.build_part(AutoModel, config.text_config, beside=__file__)

Which class it is depends on the config (a Llava has a Llama, a Mistral, a Qwen3 MoE): one generated file for each of these
serves every head that builds it. It is looked for beside the head's own folder, in the project's, and in the installation's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen.runtime import project, registry

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

PLAN = "get_parallel_plan"


def build_part(auto_class: Any, config: PreTrainedConfig, *, beside: str, **kwargs: object) -> PreTrainedModel:
    """The generated model that stands for what `auto_class.from_config(config)` would build, with random weights.

    Args:
        auto_class: `AutoModel`, `AutoModelForCausalLM`, ...
        config: of the part.
        beside: `__file__` of the generated file that builds it.
        kwargs: for transformers' `_from_config`.

    Raises:
        registry.UnknownModelError: no generated file has that class; the message says how to make it.
    """
    from transformers.models.auto.auto_factory import _get_model_class

    if type(config) not in auto_class._model_mapping:
        return auto_class.from_config(config, **kwargs)  # transformers' refusal, or the code that a checkpoint brings
    theirs = _get_model_class(config, auto_class._model_mapping)
    return _generated(theirs, config, Path(beside))._from_config(config, **kwargs)


def _generated(theirs: type, config: PreTrainedConfig, beside: Path) -> type[PreTrainedModel]:
    """The generated class of that name and config."""
    file = theirs.__module__.rpartition(".")[2].removeprefix("modeling_")
    roots = dict.fromkeys((beside.parent.parent, *project.generated_folders(), registry.installed_directory()))
    for folder in (root / name for root in roots for name in dict.fromkeys((file, config.model_type))):
        model = registry.read_model(folder) if (folder / "provenance.json").is_file() else None
        if model is not None and theirs.__name__ in model.classes:
            return getattr(model.load(), theirs.__name__)
    raise registry.UnknownModelError(
        f"{beside.name} builds a language model of type '{config.model_type}' ({theirs.__name__}), of which there is no "
        f"generated file in {', '.join(map(str, roots))}; upstream's class has no fused operations, no slices of the sequence "
        f"and no expert parallelism. Generate it: patchgen generate {file} --output {beside.parent.parent}"
    )


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[type]]]:
    """The outermost models of other generated files inside `model`: path, module, and the heads of that file."""
    from transformers import PreTrainedModel

    own, found = {kind.__module__ for kind in type(model).__mro__}, ""
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and path and not (found and path.startswith(found)):
            kinds = (kind for kind in type(module).__mro__ if kind.__module__ not in own)  # FSDP2 puts its own first
            heads = next(filter(None, map(_heads_beside, kinds)), [])
            if heads:
                found = f"{path}."
                yield path, module, heads


def _heads_beside(kind: type) -> list[type]:
    """The classes of the same file that report a parallel plan."""
    classes = [one for one in vars(sys.modules[kind.__module__]).values() if isinstance(one, type)]
    return [one for one in classes if one.__module__ == kind.__module__ and PLAN in vars(one)]
