"""Describes a folder that does not hold the expected kind of checkpoint, for error messages."""

from __future__ import annotations

from pathlib import Path

from patchgen.runtime.checkpoint.manifest import MANIFEST

OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")


def is_training_checkpoint(folder: Path) -> bool:
    """Whether it is a checkpoint that a training run saved."""
    return (folder / MANIFEST).is_file()


def describe(path: Path) -> str:
    """One or two sentences: what the folder holds, and which command reads that."""
    if not path.exists():
        return f"{path} does not exist."
    if not path.is_dir():
        return f"{path} is a file: give its folder."
    if is_training_checkpoint(path) or any(
        is_training_checkpoint(step) for parent in (path, path / "checkpoints") for step in parent.glob("step-*")
    ):
        return f"{path} holds training checkpoints: `patchgen export {path} --output DIR` writes their weights."
    if any(path.glob("*.safetensors")):
        return f"{path} is a Hugging Face checkpoint: load it, or rewrite it with `patchgen convert {path} DIR`."
    others = sorted(file.name for pattern in OTHER_WEIGHTS for file in path.glob(pattern))
    if others:
        return (
            f"{path} holds weights in another format, {', '.join(others[:5])}: load them with transformers, and write "
            "them with save_pretrained, which writes safetensors."
        )
    file_names = sorted(file.name for file in path.iterdir())
    return f"{path} holds {', '.join(file_names[:5]) if file_names else 'nothing'}{', ...' if file_names[5:] else ''}."
