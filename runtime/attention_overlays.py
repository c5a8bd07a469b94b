"""Overlays that models pass to their attention besides a mask: keys selected by an indexer, relative position biases.

They become a mask tensor combined with the structure of the call, the same under every backend.

    B rows   S queries   K keys   N heads
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from patchgen.runtime.attention_calls import Attention, dense_mask
from patchgen.runtime.attention_masks import MaskStructure, UnsupportedError
from patchgen.runtime.mask_functions import document_of

SELECTED, BLOCKS, BIAS = "indices", "block_indices", "position_bias"
OVERLAYS = (SELECTED, BLOCKS, BIAS)
BLOCK_MASK_METHOD = "build_block_mask"


def overlay_arguments(arguments: Mapping[str, Any]) -> Collection[str]:
    """The arguments of an attention call that are overlays on its mask."""
    return [name for name in OVERLAYS if arguments.get(name) is not None]


def overlay_mask(
    request: Attention, q: Tensor, k: Tensor, overlays: Mapping[str, Any], mask: Any, module: nn.Module
) -> Tensor:
    """The mask of a call combined with its overlays: bool or additive, always additive with a bias.

    Args:
        request: the call, with its `overlay` already a tensor.
        q, k: `(B, S, N, D)`, `(B, K, N_k, D)`.
        overlays: `indices` `(B, S, chosen)`, the keys that a query sees, -1 for none; `block_indices` as the module's own
            indexer returns them; `position_bias` `(B or 1, N or 1, S, K)`, added to the scores.
        mask: the mask that the module passed.

    Raises:
        UnsupportedError: the module has no indexer that expands its blocks.
    """
    B, S = q.shape[:2]
    if isinstance(mask, MaskStructure) and request.documents is None:
        combined = mask.tensor(q.dtype)  # with padded queries as upstream has them: an indexer reads their outputs
    else:
        combined = dense_mask(request, B, S, q.device)
    if combined is None:
        combined = torch.ones(1, 1, S, k.shape[1], dtype=torch.bool, device=q.device)
    if SELECTED in overlays:
        selected = overlays[SELECTED].long()
        visible = torch.zeros(B, S, k.shape[1] + 1, dtype=torch.bool, device=q.device)
        visible.scatter_(-1, selected.where(selected >= 0, k.shape[1]), True)
        combined = _restricted(combined, visible[:, None, :, :-1])
    if BLOCKS in overlays:
        combined = _restricted(combined, _expand_blocks(overlays[BLOCKS], q, k, combined, module))
    if BIAS in overlays:
        lowest = torch.finfo(q.dtype).min
        if combined.dtype == torch.bool:
            combined = torch.zeros_like(combined, dtype=q.dtype).masked_fill(~combined, lowest)
        combined = combined + overlays[BIAS].to(q.dtype)
    return combined


def _restricted(mask: Tensor, visible: Tensor) -> Tensor:
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, torch.finfo(mask.dtype).min)


def _expand_blocks(blocks: Tensor, q: Tensor, k: Tensor, mask: Tensor, module: nn.Module) -> Tensor:
    """Bool: the keys that a query sees by its selected blocks, expanded by the module's own indexer."""
    build_block_mask = next(
        (getattr(child, BLOCK_MASK_METHOD) for child in module.children() if hasattr(child, BLOCK_MASK_METHOD)), None
    )
    if build_block_mask is None:
        raise UnsupportedError(
            f"{type(module).__name__} passes {BLOCKS} to its attention, but no submodule has a method {BLOCK_MASK_METHOD} that "
            "says which keys a block contains. To fix: train it with an attention implementation of transformers, e.g. 'eager'."
        )
    S = q.shape[1]
    arguments = {
        BLOCKS: blocks,
        "attention_mask": mask,
        "key_length": k.shape[1],
        "dtype": q.dtype,
        "device": q.device,
        "position_ids": torch.arange(S, device=q.device).expand(q.shape[0], S),
    }
    return build_block_mask(**{name: arguments[name] for name in inspect.signature(build_block_mask).parameters}) == 0


_RESTRICTED_MASKS = WeakIdKeyDictionary()  # mask -> (bounds, the mask within these documents): shared by all layers


def within_documents(mask: Any, bounds: Tensor, B: int, where: str) -> Tensor:
    """A model's mask tensor `(B or 1, N or 1, S, S)`, bool or additive, restricted to documents."""
    if not isinstance(mask, Tensor):
        raise UnsupportedError(
            f"{where} got cu_seq_lens_q and a {type(mask).__name__} that this runtime did not create."
        )
    if mask in _RESTRICTED_MASKS and _RESTRICTED_MASKS[mask][0] is bounds:
        return _RESTRICTED_MASKS[mask][1]
    document_BS = document_of(bounds, B, mask.shape[-1])
    same = (document_BS[:, :, None] == document_BS[:, None, :])[:, None]
    restricted = _restricted(mask, same)
    _RESTRICTED_MASKS[mask] = (bounds, restricted)
    return restricted
