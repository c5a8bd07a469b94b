"""Checkpoints in both directions: saved by one class and loaded by the other, with the same keys and values."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from patchgen.runtime.verify.model_pair import ModelPair


NUM_NAMED = 3
"""How many problems of a kind are named; the others are counted."""


def round_trip_problems(pair: ModelPair) -> list[str]:
    """The problems in either direction; both models of `pair` have the same weights."""
    with tempfile.TemporaryDirectory() as directory, _no_progress_bars():
        generated, upstream = Path(directory) / "generated", Path(directory) / "upstream"
        pair.generated.save_pretrained(generated)
        pair.upstream.save_pretrained(upstream)
        problems = _key_problems(_saved_keys(generated), _saved_keys(upstream))
        problems += _load_problems(
            type(pair.upstream), generated, pair.upstream, "saved by generated, loaded by upstream"
        )
        problems += _load_problems(
            type(pair.generated), upstream, pair.generated, "saved by upstream, loaded by generated"
        )
    return problems


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _saved_keys(directory: Path) -> set[str]:
    keys: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            keys |= set(tensors.keys())
    return keys


def _key_problems(generated: set[str], upstream: set[str]) -> list[str]:
    problems = []
    if upstream - generated:
        problems.append(f"The generated model does not save {_some(upstream - generated)}; upstream does.")
    if generated - upstream:
        problems.append(f"The generated model saves {_some(generated - upstream)}; upstream does not.")
    return problems


def _some(names: Iterable[object]) -> str:
    """The first names and the number of the others."""
    listed = sorted(map(str, names))
    more = f" and {len(listed) - NUM_NAMED} more" if len(listed) > NUM_NAMED else ""
    return ", ".join(listed[:NUM_NAMED]) + more


def _load_problems(
    model_class: type[PreTrainedModel], directory: Path, expected: PreTrainedModel, direction: str
) -> list[str]:
    loaded_with_info: Any = model_class.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    loaded, info = loaded_with_info
    problems = [
        f"{direction}: {kind.replace('_', ' ')} {_some(info[kind])}."
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if info.get(kind)
    ]
    actual = loaded.state_dict()
    differing = [
        name
        for name, tensor in expected.state_dict().items()
        if name not in actual or not torch.equal(tensor, actual[name])
    ]
    if differing:
        problems.append(f"{direction}: other values in {_some(differing)}.")
    return problems
