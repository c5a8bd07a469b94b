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
    """Registers upstream's conversions for models, by class name and model type.

    Args:
        bases: classes; their subclasses in the same file are registered as well. Models without an upstream conversion load
            and save their weights unchanged.
    """
    models = [model for base in bases for model in _with_subclasses(base)]
    types = (str(getattr(model.config_class, "model_type", "")) for model in models)
    for name in dict.fromkeys((*types, *(model.__name__ for model in models))):
        mapping = get_checkpoint_conversion_mapping(name)
        if mapping is not None:
            register_checkpoint_conversion_mapping(name, mapping, overwrite=True)


def _with_subclasses(base: type[PreTrainedModel]) -> list[type[PreTrainedModel]]:
    """The class and its subclasses in the file that defines it."""
    derived = (cls for cls in base.__subclasses__() if cls.__module__ == base.__module__)
    return [base, *(subclass for cls in derived for subclass in _with_subclasses(cls))]


_GENERATED_MODULES: set[str] = set()
"""Modules whose model classes are rewritten upstream code."""


def initialize_as_upstream(*classes: type[PreTrainedModel]) -> None:
    """Makes transformers initialise these classes, and all modules inside them, like its own.

    For custom code, which it decides by the outermost model alone, transformers does not call `_init_weights` for modules
    whose own parameters are all initialised, or that have none. If such a module initialises its children (an MoE block its
    experts, an MLP its projections), these would keep uninitialised memory or another initialisation. A generated class is not
    custom code: its `_init_weights` is upstream's. A class derived from it in another file is.

    Args:
        classes: the models of a generated file that are derived from no other model of it.
    """
    for cls in classes:
        _GENERATED_MODULES.add(cls.__module__)
        setattr(cls, "is_custom_code", classmethod(_is_custom_code))  # noqa: B010  # not declared on the type


def _is_custom_code(cls: type[PreTrainedModel]) -> bool:
    from transformers import PreTrainedModel

    return cls.__module__ not in _GENERATED_MODULES and PreTrainedModel.is_custom_code.__func__(cls)


def register_stacked_experts(*class_names: str, experts: Mapping[str, tuple[str, str, str]]) -> None:
    """Registers the checkpoint layout of a generated file's experts: one by one, as a ModuleList saves them.

        mlp.experts.0.gate_proj.weight [I, H]  \\
        mlp.experts.0.up_proj.weight   [I, H]   >  mlp.experts.gate_up_proj [E, 2I, H]
        ...                                    /
        mlp.experts.0.down_proj.weight [H, I]  ->  mlp.experts.down_proj [E, H, I]

        E experts   H hidden size   I expert intermediate size

    Biases likewise, to `gate_up_proj_bias` and `down_proj_bias`. transformers applies this on load and undoes it on
    save, looking conversions up by class name, whichever module defines the class. Another class of that name with a
    ModuleList (the source of the generated file) is unaffected: keys that a model has are not converted. A class of
    transformers whose conversion also renames modules would be affected, hence the warning.

    Args:
        class_names: the model classes of the generated file.
        experts: attribute of the list -> its experts' (gate, up, down) projections.
    """
    for name in class_names:
        displaced = [entry for entry in _native_conversion(name) if isinstance(entry, WeightRenaming)]
        if displaced:
            renamed = ", ".join(pattern for entry in displaced for pattern in entry.source_patterns)
            warnings.warn(
                f"From now on, transformers' own {name} does not rename {renamed} when it loads a checkpoint: this "
                f"process has a generated class of that name, from another file, whose checkpoints need no renaming. Use "
                f"transformers' {name} in another process.",
                stacklevel=3,
            )
        register_checkpoint_conversion_mapping(name, stacked_experts_conversion(experts), overwrite=True)


def _native_conversion(class_name: str) -> list[WeightTransform]:
    """The conversion of transformers' own class of that name; empty if there is none."""
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
