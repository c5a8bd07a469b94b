"""Where the weights of a model come from: a folder, the Hub, or nowhere, which means random ones."""

from __future__ import annotations

from pathlib import Path

from patchgen.runtime.train.recipe import ModelConfig, RecipeError

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
# Weights in formats that are not read here. Shorter patterns would match a Trainer's training_args.bin and optimizer.pt.
OTHER_WEIGHT_FILES = ("pytorch_model*.bin", "consolidated*.pt*", "tf_model*.h5", "flax_model*.msgpack", "*.gguf")


def is_model_type(source: str) -> bool:
    """Whether `model.source` is a bare model type; a folder of that name in the working directory takes precedence, unless it has
    the code of an architecture (`model.code`) and nothing of a checkpoint."""
    from transformers import CONFIG_MAPPING

    folder = Path(source)
    has_code = any(folder.glob("modeling_*.py"))
    is_code = has_code and not any(
        any(folder.glob(pattern)) for pattern in ("*.json", *WEIGHT_FILES, *OTHER_WEIGHT_FILES)
    )
    return source in CONFIG_MAPPING and (is_code or not folder.is_dir())


def find_weights(model: ModelConfig) -> Path | str | None:
    """Where weights come from: a folder, or a model name on the Hub; None: random weights. Downloads nothing.

    Raises:
        RecipeError: no such folder, or its weights are in another format than safetensors.
    """
    if model.weights == "random":
        return None
    folder = Path(model.source if model.weights == "auto" else model.weights)
    if folder.is_dir():
        if any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
            return folder
        others = sorted(file.name for pattern in OTHER_WEIGHT_FILES for file in folder.glob(pattern))
        if others:  # also with `auto`, which would train from random weights without a word
            raise RecipeError(
                f"model.{'source' if model.weights == 'auto' else 'weights'} = '{folder}' has weights in another format than "
                f"safetensors: {', '.join(others[:3])}. To fix: load them with transformers and write them with "
                "save_pretrained, which writes safetensors; or set model.weights: random to train from random weights."
            )
        if model.weights != "auto":
            raise RecipeError(f"model.weights = '{folder}' contains no *.safetensors files.")
        return None
    if model.weights != "auto":
        raise RecipeError(
            f"model.weights must be 'auto', 'random' or a folder, and '{model.weights}' is not a folder."
        )
    return None if is_model_type(model.source) else model.source


def weights_folder(model: ModelConfig) -> Path | None:
    """The folder to load weights from, downloaded if they are on the Hub; None: random weights."""
    weights = find_weights(model)
    if not isinstance(weights, str):
        return weights
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(weights, allow_patterns=["*.safetensors", "*.json"]))
