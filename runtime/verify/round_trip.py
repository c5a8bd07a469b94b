"""Checkpoints in both directions: saved by one of the two classes, loaded by the other, nothing lost or invented."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from patchgen.runtime.verify.model_pair import ModelPair


def round_trip_problems(pair: ModelPair) -> list[str]:
    """What goes wrong between the two: empty if both directions keep every key and every value.

    The models of `pair` hold the same weights; what each saves is loaded by the other's class and compared with them.
    """
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = Path(directory) / "generated", Path(directory) / "upstream"
        pair.generated.save_pretrained(ours)
        pair.upstream.save_pretrained(theirs)
        problems = _key_problems(_saved_keys(ours), _saved_keys(theirs))
        problems += _load_problems(type(pair.upstream), ours, pair.generated, "saved by generated, loaded by upstream")
        problems += _load_problems(type(pair.generated), theirs, pair.upstream, "saved by upstream, loaded by generated")
    return problems


def _saved_keys(directory: Path) -> set[str]:
    keys: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            keys |= set(tensors.keys())
    return keys


def _key_problems(ours: set[str], theirs: set[str]) -> list[str]:
    problems = [f"The generated model does not save '{key}', upstream does." for key in sorted(theirs - ours)]
    return problems + [f"The generated model saves '{key}', upstream does not." for key in sorted(ours - theirs)]


def _load_problems(
    model_class: type[PreTrainedModel], directory: Path, saved: PreTrainedModel, direction: str
) -> list[str]:
    loaded, info = model_class.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    problems = [
        f"{direction}: {kind.replace('_', ' ')} {sorted(map(str, info[kind]))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if info.get(kind)
    ]
    actual = loaded.state_dict()
    for name, tensor in saved.state_dict().items():
        if name not in actual or not torch.equal(tensor, actual[name]):
            problems.append(f"{direction}: '{name}' comes back with other values.")
    return problems
