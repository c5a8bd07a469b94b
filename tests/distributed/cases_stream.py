"""What each rank does in the tests of the stream of weights; see test_stream.py."""

from __future__ import annotations

import weakref
from pathlib import Path

import cases_sequence
import torch
from cases_checkpoints import meta_model
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from patchgen.runtime.checkpoint import CheckpointError, export_pretrained, load_pretrained, stream_weights
from patchgen.runtime.parallel import sharding


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that were made in the block and are still there, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if is_here(tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(is_here, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live and storage._cdata not in before:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def is_here(value: object) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type != "meta"


def sharded(head: str, file: str, source: str, layout: dict[str, int]):
    model = meta_model(head, file)
    sharding.shard_model(model, cases_sequence.state_of(**layout))
    load_pretrained(model, source)
    return model


def read(folder: str | Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def stream_and_export(
    head: str, file: str, source: str, target: str, layouts: tuple[dict[str, int], ...], options: dict
) -> list[tuple[int, int, int, int]]:
    """Compares the stream with the export, bit by bit, on this rank.

    Returns:
        For each layout the most memory of the stream and the caller, the size of a bucket, that of the largest tensor, and
        that of all.
    """
    results = []
    for layout in layouts:
        model = sharded(head, file, source, layout)
        export_pretrained(model, target, source=source, max_file=100_000, **options)
        expected = read(target)
        sizes = [tensor.numel() * tensor.element_size() for tensor in expected.values()]
        bucket = -(-max(sizes) * 8 // 7)
        streamed, live = set(), LiveBytes()
        with live:
            for name, tensor in stream_weights(model, bucket_bytes=bucket, **options):
                with _disable_current_modes():  # what is compared is not the stream's
                    assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
                streamed.add(name)
        assert streamed == expected.keys()
        results.append((live.peak, bucket, max(sizes), sum(sizes)))
    return results


def refused(head: str, file: str, source: str, **options) -> str:
    """The message that this rank gets."""
    try:
        next(stream_weights(sharded(head, file, source, {}), **options))
    except CheckpointError as error:
        return str(error)
    return ""
