"""Upstream's checkpoint conversions for generated classes.

transformers converts checkpoints on load (per-expert weights to stacked ones, renamed modules, ...) by the model's
class name or model type. A class that does not live in `transformers.*` counts as custom code there and is skipped
unless its mapping was registered: without this call a generated Mixtral loads with its experts left at random
initialisation, and only a log line says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)
from transformers.models.auto import modeling_auto

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def register_checkpoint_mapping(*bases: type[PreTrainedModel]) -> None:
    """Registers upstream's own conversions for models by their names and by the types of their configs.

    Args:
        bases: each stands for the models of its file that are derived from it, and for itself. Models of a name and type
            for which upstream has no conversion load and save their weights as they are.
    """
    models = [one for base in bases for one in _of_its_file(base)]
    types = (str(getattr(one.config_class, "model_type", "")) for one in models)
    for name in dict.fromkeys((*types, *(one.__name__ for one in models))):
        mapping = get_checkpoint_conversion_mapping(name)
        if mapping is not None:
            register_checkpoint_conversion_mapping(name, mapping, overwrite=True)


def _of_its_file(base: type[PreTrainedModel]) -> list[type[PreTrainedModel]]:
    """The class, and those derived from it in the file that defines it."""
    derived = (one for one in base.__subclasses__() if one.__module__ == base.__module__)
    return [base, *(found for one in derived for found in _of_its_file(one))]


_UPSTREAMS_CODE: set[str] = set()
"""Modules whose model classes are upstream's code, rewritten."""


def initialize_as_upstream(*classes: type[PreTrainedModel]) -> None:
    """Makes transformers initialise these classes, and all modules inside them, as it does its own.

    transformers asks the outermost model alone whether it is custom code, and then does not call `_init_weights` for
    any module below it whose own parameters are all initialised, which modules without any are. Where such a module
    initialises its children's (a mixture of experts its experts', an MLP of a vision tower its two projections), they
    would keep what was in memory, or what their parts get by themselves. A generated class is not custom code: its
    `_init_weights` is upstream's. A class that someone derives from it in another file is.

    Args:
        classes: the models of a generated file that no other model of it is above.
    """
    for one in classes:
        _UPSTREAMS_CODE.add(one.__module__)
        setattr(one, "is_custom_code", classmethod(_is_custom_code))  # noqa: B010  # of a type that does not declare it


def _is_custom_code(cls: type[PreTrainedModel]) -> bool:
    from transformers import PreTrainedModel

    return cls.__module__ not in _UPSTREAMS_CODE and PreTrainedModel.is_custom_code.__func__(cls)


def register_stacked_experts(*class_names: str, experts: Mapping[str, tuple[str, str, str]]) -> None:
    """Registers how the experts of a generated file lie on disk: one by one, as lists of modules are written.

        mlp.experts.0.gate_proj.weight [I, H]  \\
        mlp.experts.0.up_proj.weight   [I, H]   >  mlp.experts.gate_up_proj [E, 2I, H]
        ...                                    /
        mlp.experts.0.down_proj.weight [H, I]  ->  mlp.experts.down_proj [E, H, I]

    Biases likewise, to `gate_up_proj_bias` and `down_proj_bias`. transformers applies this on load and undoes it on
    save. transformers looks conversions up by class name, whoever defines the class. Another class of that name that
    holds lists (the source of the generated file) is not disturbed: keys that a model has are left as they are. One of
    transformers' own whose conversion also renames modules would be; that is warned of.

    Args:
        class_names: the model classes of the generated file.
        experts: attribute of the list -> its experts' (gate, up, down) projections.
    """
    for name in class_names:
        displaced = [entry for entry in _native_conversion(name) if isinstance(entry, WeightRenaming)]
        if displaced:
            renamed = ", ".join(pattern for entry in displaced for pattern in entry.source_patterns)
            warnings.warn(
                f"From here on, transformers' own {name} does not rename {renamed} when it loads a checkpoint: this "
                f"process has a generated class of that name, made from another file, whose checkpoints need no "
                f"renaming. Use transformers' {name} in another process.",
                stacklevel=3,
            )
        register_checkpoint_conversion_mapping(name, stacked_experts_conversion(experts), overwrite=True)


def _native_conversion(class_name: str) -> list[WeightTransform]:
    """What transformers applies to its own class of that name; empty if it has none or converts nothing."""
    mappings = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES)
    types = [kind for mapping in mappings for kind, served in mapping.items() if served == class_name]
    if not types:
        return []
    found = (get_checkpoint_conversion_mapping(name) for name in (class_name, *types))
    return next((mapping for mapping in found if mapping is not None), [])


def stacked_experts_conversion(
    experts: Mapping[str, tuple[str, str, str]],
) -> list[WeightConverter | WeightRenaming]:
    """The converters of `register_stacked_experts`."""
    converters = []
    for attribute, (gate, up, down) in experts.items():
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            converters += [
                WeightConverter(
                    source_patterns=[rf"\.{attribute}.*.{gate}.{kind}", rf"\.{attribute}.*.{up}.{kind}"],
                    target_patterns=rf"\.{attribute}.gate_up_proj{suffix}",
                    operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
                ),
                WeightConverter(
                    source_patterns=rf"\.{attribute}.*.{down}.{kind}",
                    target_patterns=rf"\.{attribute}.down_proj{suffix}",
                    operations=[MergeModulelist(dim=0)],
                ),
            ]
    return converters
