"""Upstream's checkpoint conversions for generated classes.

transformers converts checkpoints on load (per-expert weights to stacked ones, renamed modules, ...) by the model's
class name or model type. A class that does not live in `transformers.*` counts as custom code there and is skipped
unless its mapping was registered: without this call a generated Mixtral loads with its experts left at random
initialisation, and only a log line says so.
"""

from __future__ import annotations

from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping


def register_checkpoint_mapping(*names: str) -> None:
    """Registers upstream's own conversions for these model types and class names, where upstream has any.

    Args:
        names: model types ("mixtral") and class names ("MixtralForCausalLM") of a generated file. Names for which
            upstream has no conversion load and save their weights as they are.
    """
    for name in names:
        mapping = get_checkpoint_conversion_mapping(name)
        if mapping is not None:
            register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
