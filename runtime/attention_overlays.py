"""What models hand to their attention beside a mask: keys that an indexer selected, biases of relative positions.

It means the same under every backend: a mask of its own, laid over the structure of the call.

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
DRAW_BLOCKS = "build_block_mask"


def added(arguments: Mapping[str, Any]) -> Collection[str]:
    """Those of an attention's arguments that lay something over its mask."""
    return [name for name in (SELECTED, BLOCKS, BIAS) if arguments.get(name) is not None]


def cuts(request: Attention, q: Tensor, k: Tensor, more: Mapping[str, Any], mask: Any, module: nn.Module) -> Tensor:
    """The mask of a call with what its arguments lay over it: bool, or to be added if there is a bias.

    Args:
        request: the rest of the call; its overlay is drawn.
        q, k: `(B, S, N, D)`, `(B, K, N_k, D)`.
        more: `indices` `(B, S, chosen)`, the keys that a query sees, -1 for none; `block_indices` in the form that the
            module's own indexer gives them; `position_bias` `(B or 1, N or 1, S, K)`, added to the scores.
        mask: what the module handed over as its mask.

    Raises:
        UnsupportedError: blocks that no indexer of the module can lay out.
    """
    B, S = q.shape[:2]
    if isinstance(mask, MaskStructure) and request.documents is None:
        found = mask.tensor(q.dtype)  # padded queries too as upstream has them: an indexer reads what they become
    else:
        found = dense_mask(request, B, S, q.device)
    if found is None:
        found = torch.ones(1, 1, S, k.shape[1], dtype=torch.bool, device=q.device)
    if SELECTED in more:
        chosen = more[SELECTED].long()
        seen = torch.zeros(B, S, k.shape[1] + 1, dtype=torch.bool, device=q.device)
        seen.scatter_(-1, chosen.where(chosen >= 0, k.shape[1]), True)
        found = _restricted(found, seen[:, None, :, :-1])
    if BLOCKS in more:
        found = _restricted(found, _laid_out(more[BLOCKS], q, k, found, module))
    if BIAS in more:
        lowest = torch.finfo(q.dtype).min
        found = (
            torch.zeros_like(found, dtype=q.dtype).masked_fill(~found, lowest) if found.dtype == torch.bool else found
        )
        found = found + more[BIAS].to(q.dtype)
    return found


def _restricted(mask: Tensor, seen: Tensor) -> Tensor:
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def _laid_out(blocks: Tensor, q: Tensor, k: Tensor, mask: Tensor, module: nn.Module) -> Tensor:
    """Who sees whom by selected blocks of keys, as the module's own indexer lays them out."""
    draw = next((getattr(child, DRAW_BLOCKS) for child in module.children() if hasattr(child, DRAW_BLOCKS)), None)
    if draw is None:
        raise UnsupportedError(
            f"{type(module).__name__} hands {BLOCKS} to its attention, and nothing in it says which keys a block holds "
            f"(a method {DRAW_BLOCKS}). Train it with upstream's names."
        )
    S = q.shape[1]
    given = {
        BLOCKS: blocks,
        "attention_mask": mask,
        "key_length": k.shape[1],
        "dtype": q.dtype,
        "device": q.device,
        "position_ids": torch.arange(S, device=q.device).expand(q.shape[0], S),
    }
    return draw(**{name: given[name] for name in inspect.signature(draw).parameters}) == 0


_WITHIN = WeakIdKeyDictionary()  # mask -> (lengths, the mask within these documents): one for all layers


def within_documents(mask: Any, bounds: Tensor, B: int, where: str) -> Tensor:
    """A mask tensor `(B or 1, N or 1, S, S)` (bool, or added to scores) that a model made or was handed, within documents."""
    if not isinstance(mask, Tensor):
        raise UnsupportedError(
            f"{where} got cu_seq_lens_q and a {type(mask).__name__} that this runtime did not draw."
        )
    if mask in _WITHIN and _WITHIN[mask][0] is bounds:
        return _WITHIN[mask][1]
    document_BS = document_of(bounds, B, mask.shape[-1])
    same = (document_BS[:, :, None] == document_BS[:, None, :])[:, None]
    within = _restricted(mask, same)
    _WITHIN[mask] = (bounds, within)
    return within
