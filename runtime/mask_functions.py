"""Upstream's mask functions taken apart and put together again: which conditions they join, and how documents change them.

    and_masks(packed_sequence_mask_function(document), remap_positions_for_packed_sequence(or_masks(...), positions))

A mask function says of a row, a head and two places whether the one may see the other. Upstream joins small ones; their
names and what they close over tell what they mean.

    B rows   S tokens per row   s = S / sp of this rank
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from patchgen.runtime.parallel.state import ParallelState

NO_BLOCK = -1
"""What upstream's masks say of a token that belongs to no image."""


def parts(mask_function: Callable) -> list[str]:
    """The names of the conditions that upstream joined into one mask function, packing remaps included."""
    outer, inner = _opened(mask_function)
    if outer == "and_masks":
        return [part for one in inner["mask_functions"] for part in parts(one)]
    if outer == "remap_positions_for_packed_sequence":
        return [outer, *parts(inner["mask_function"])]
    return [outer]


def of_whole_sequence(mask_function: Callable, s: int, state: ParallelState, padding: Tensor | None) -> Callable:
    """A mask function for the whole sequence, without the packing that upstream saw in a slice of the position ids.

    Args:
        s: the tokens of a slice.
        padding: `(B, S)` bool of the whole, True for tokens that count; None: all do. Chunks begin where the padding in
            front ends, which upstream counted in the slice.

    Raises:
        ValueError: it looks up a tensor that covers the slice only.
    """
    from transformers.masking_utils import and_masks, blockwise_overlay, chunked_overlay, or_masks

    outer, inner = _opened(mask_function)
    if outer in ("and_masks", "or_masks"):
        joined = [
            of_whole_sequence(part, s, state, padding)
            for part in inner["mask_functions"]
            if not part.__qualname__.startswith("packed_sequence_mask_function")
        ]
        return joined[0] if len(joined) == 1 else (and_masks if outer == "and_masks" else or_masks)(*joined)
    if outer == "remap_positions_for_packed_sequence":
        return of_whole_sequence(inner["mask_function"], s, state, padding)
    if outer == "chunked_overlay":
        in_front = inner["left_padding"] * 0 if padding is None else (padding.cumsum(-1) == 0).sum(-1)
        return chunked_overlay(inner["chunk_size"], in_front)
    for name, value in inner.items():
        if inspect.isfunction(value):
            of_whole_sequence(value, s, state, padding)
        elif isinstance(value, Tensor) and value.ndim > 1 and value.shape[-1] < s * state.sp:
            if outer == "blockwise_overlay" and bool((value == NO_BLOCK).all()):  # of a batch without types of tokens
                return blockwise_overlay(value.new_full((*value.shape[:-1], s * state.sp), NO_BLOCK))
            raise ValueError(
                f"The mask '{outer}' looks up {name} of {value.shape[-1]} tokens, and the sequence has "
                f"{s * state.sp} over {state.sp} ranks: what it is made from (token types, ...) must be handed over "
                "whole, not as a slice (runtime.parallel.batch.slice_batch leaves it whole)."
            )
    return mask_function


def packed(mask_function: Callable, document_BS: Tensor, position_BS: Tensor | None = None) -> Callable:
    """A mask function within documents, each of its parts with the coordinates that the part is written for.

    Upstream hands positions within a document to all parts alike. A part that looks up a tensor of the row (which image
    a token belongs to) must be asked by places in the row, or it reads the first document's; a part that reckons with
    positions (chunks) must not. And what upstream lays over the packed mask as a whole reaches across documents.

    Args:
        mask_function: upstream's, remaps included, or without them; then `position_BS` are each token's positions.
        document_BS: the number of each token's document.
    """
    from transformers.masking_utils import and_masks, packed_sequence_mask_function

    return and_masks(packed_sequence_mask_function(document_BS), _by_place(mask_function, position_BS))


def _by_place(mask_function: Callable, position_BS: Tensor | None) -> Callable:
    """The function of places in the row: parts that reckon with positions are remapped, parts that look up are not."""
    from transformers.masking_utils import and_masks, or_masks

    outer, inner = _opened(mask_function)
    if outer in ("and_masks", "or_masks"):
        joined = [_by_place(part, position_BS) for part in inner["mask_functions"]]
        return (and_masks if outer == "and_masks" else or_masks)(*joined)
    if outer == "remap_positions_for_packed_sequence":
        return _by_place(inner["mask_function"], inner["position_ids"])
    if position_BS is None or outer == "packed_sequence_mask_function" or _looks_up(mask_function):
        return mask_function
    return remap_positions_for_packed_sequence(mask_function, position_BS)


def remap_positions_for_packed_sequence(mask_function: Callable, position_ids: Tensor) -> Callable:
    """The mask function asked by positions `[B, S]` instead of places: upstream's of 5.23, which older releases lack.

    Its names are upstream's, for functions are known by them here.
    """

    def inner_mask(batch_idx: Tensor, head_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_function(batch_idx, head_idx, position_ids[batch_idx, q_idx], position_ids[batch_idx, kv_idx])

    return inner_mask


def _looks_up(mask_function: Callable) -> bool:
    """Whether a mask function looks up a tensor with a value for each token."""
    return any(
        _looks_up(value) if inspect.isfunction(value) else isinstance(value, Tensor) and value.ndim > 1
        for value in _opened(mask_function)[1].values()
    )


def _opened(mask_function: Callable) -> tuple[str, dict[str, Any]]:
    """The name of the function that made a mask function, and what it closes over."""
    cells = zip(mask_function.__code__.co_freevars, mask_function.__closure__ or (), strict=True)
    return mask_function.__qualname__.partition(".")[0], {name: cell.cell_contents for name, cell in cells}


def document_numbers(mask_function: Callable) -> Tensor:
    """The `(B, S)` document numbers that upstream found in the position ids."""
    found = find_packing(mask_function)
    if found is None:
        raise ValueError(
            "transformers built a packed mask in a way this version of patchgen does not know. Hand cu_seq_lens_q to "
            "the model (runtime.parallel.batch.slice_batch makes them)."
        )
    return found


def find_packing(mask_function: Callable) -> Tensor | None:
    """The document numbers that a mask function compares; None where it compares none."""
    outer, inner = _opened(mask_function)
    if outer == "packed_sequence_mask_function":
        return inner["packed_sequence_mask"]
    if outer not in ("and_masks", "or_masks"):
        return None
    return next((found for one in inner["mask_functions"] if (found := find_packing(one)) is not None), None)


def positions_within(document_BS: Tensor) -> Tensor:
    """Each token's place in its document, `(B, S)`."""
    place_S = torch.arange(document_BS.shape[1], device=document_BS.device)
    starts_BS = F.pad(document_BS[:, 1:] != document_BS[:, :-1], (1, 0), value=True)
    return place_S - torch.where(starts_BS, place_S, 0).cummax(dim=1).values


def document_of(bounds: Tensor, B: int, S: int) -> Tensor:
    """`(B, S)`: the number of each token's document, from `cu_seq_lens` over the rows one after the other."""
    tokens = torch.arange(B * S, device=bounds.device, dtype=bounds.dtype)
    return torch.searchsorted(bounds[1:].contiguous(), tokens, right=True).view(B, S)


def bounds_of(document_BS: Tensor) -> Tensor:
    """`cu_seq_lens` over the rows one after the other, from each token's document."""
    starts = torch.ones_like(document_BS, dtype=torch.bool)
    starts[:, 1:] = document_BS[:, 1:] != document_BS[:, :-1]
    first = torch.nonzero(starts.view(-1)).view(-1).to(torch.int32)
    return torch.cat([first, first.new_tensor([document_BS.numel()])])
