"""Analyses upstream's composed mask functions and rebuilds them for full sequences and packed documents.

    and_masks(packed_sequence_mask_function(document), remap_positions_for_packed_sequence(or_masks(...), positions))

A mask function maps (row, head, query index, key index) to whether the query sees the key. Upstream composes small ones; the
name of the factory and its closure say what each means.

    B rows   S tokens per row   s = S / sp of this rank
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NO_BLOCK = -1
"""Upstream's block index of a token that belongs to no image."""


def condition_names(mask_function: Callable) -> list[str]:
    """The names of the conditions composed into a mask function, including remapped positions."""
    outer, inner = _factory(mask_function)
    if outer == "and_masks":
        return [name for part in inner["mask_functions"] for name in condition_names(part)]
    if outer == "remap_positions_for_packed_sequence":
        return [outer, *condition_names(inner["mask_function"])]
    return [outer]


def for_full_sequence(mask_function: Callable, s: int, sp: int, padding: Tensor | None) -> Callable:
    """A mask function for the full sequence, without the packing that upstream found in a slice of the position ids.

    Args:
        s: the tokens of a slice, of which `sp` are a sequence.
        padding: `(B, S)` bool of the full sequence, False for padding; None: no padding. Chunks begin after the padding on
            the left, which upstream counted in the slice.

    Raises:
        ValueError: it indexes a tensor that covers the slice only.
    """
    from transformers.masking_utils import and_masks, blockwise_overlay, chunked_overlay, or_masks

    outer, inner = _factory(mask_function)
    if outer in ("and_masks", "or_masks"):
        joined = [
            for_full_sequence(part, s, sp, padding)
            for part in inner["mask_functions"]
            if not part.__qualname__.startswith("packed_sequence_mask_function")
        ]
        return joined[0] if len(joined) == 1 else (and_masks if outer == "and_masks" else or_masks)(*joined)
    if outer == "remap_positions_for_packed_sequence":
        return for_full_sequence(inner["mask_function"], s, sp, padding)
    if outer == "chunked_overlay":
        left_padding = inner["left_padding"] * 0 if padding is None else (padding.cumsum(-1) == 0).sum(-1)
        return chunked_overlay(inner["chunk_size"], left_padding)
    for name, value in inner.items():
        if inspect.isfunction(value):
            for_full_sequence(value, s, sp, padding)
        elif isinstance(value, Tensor) and value.ndim > 1 and value.shape[-1] < s * sp:
            if outer == "blockwise_overlay" and bool((value == NO_BLOCK).all()):  # a batch without token types
                return blockwise_overlay(value.new_full((*value.shape[:-1], s * sp), NO_BLOCK))
            raise ValueError(
                f"The mask '{outer}' looks up {name} of {value.shape[-1]} tokens, but the sequence has "
                f"{s * sp} over {sp} ranks: its input (token types, ...) must cover the full sequence, not a "
                "slice (runtime.parallel.batch.slice_batch does not slice it)."
            )
    return mask_function


def within_documents(mask_function: Callable, document_BS: Tensor, position_BS: Tensor | None = None) -> Callable:
    """A mask function restricted to documents, with the right coordinates for each of its parts.

    Upstream passes positions within a document to all parts. A part that indexes a tensor of the row (which image a token
    belongs to) needs row indices instead, or it reads the first document's values; a part that computes with positions
    (chunks) does not. And conditions that upstream adds on top of the packed mask cross documents.

    Args:
        mask_function: upstream's, with remapped positions, or without; then `position_BS` are each token's positions.
        document_BS: the index of each token's document.
    """
    from transformers.masking_utils import and_masks, packed_sequence_mask_function

    return and_masks(packed_sequence_mask_function(document_BS), _by_row_index(mask_function, position_BS))


def _by_row_index(mask_function: Callable, position_BS: Tensor | None) -> Callable:
    """The function of row indices: parts that compute with positions are remapped, parts that index tensors are not."""
    from transformers.masking_utils import and_masks, or_masks

    outer, inner = _factory(mask_function)
    if outer in ("and_masks", "or_masks"):
        joined = [_by_row_index(part, position_BS) for part in inner["mask_functions"]]
        return (and_masks if outer == "and_masks" else or_masks)(*joined)
    if outer == "remap_positions_for_packed_sequence":
        return _by_row_index(inner["mask_function"], inner["position_ids"])
    if position_BS is None or outer == "packed_sequence_mask_function" or looks_up(mask_function):
        return mask_function
    return remap_positions_for_packed_sequence(mask_function, position_BS)


def remap_positions_for_packed_sequence(mask_function: Callable, position_ids: Tensor) -> Callable:
    """The mask function of positions `[B, S]` instead of row indices, as in upstream's 5.23, for older releases.

    It has upstream's names, because this module recognises functions by them.
    """

    def inner_mask(batch_idx: Tensor, head_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_function(batch_idx, head_idx, position_ids[batch_idx, q_idx], position_ids[batch_idx, kv_idx])

    return inner_mask


def looks_up(mask_function: Callable) -> bool:
    """Whether a mask function indexes a tensor with a value for each token."""
    return any(
        looks_up(value) if inspect.isfunction(value) else isinstance(value, Tensor) and value.ndim > 1
        for value in _factory(mask_function)[1].values()
    )


def _factory(mask_function: Callable) -> tuple[str, dict[str, Any]]:
    """The name of the function that created a mask function, and its closure."""
    cells = zip(mask_function.__code__.co_freevars, mask_function.__closure__ or (), strict=True)
    return mask_function.__qualname__.partition(".")[0], {name: cell.cell_contents for name, cell in cells}


def document_numbers(mask_function: Callable) -> Tensor:
    """The `(B, S)` document indices that upstream found in the position ids."""
    numbers = find_packing(mask_function)
    if numbers is None:
        raise ValueError(
            "transformers built a packed mask in a way this version of patchgen does not know. Pass cu_seq_lens_q to "
            "the model (runtime.parallel.batch.slice_batch computes them)."
        )
    return numbers


def find_packing(mask_function: Callable) -> Tensor | None:
    """The document indices that a mask function compares; None if it compares none."""
    outer, inner = _factory(mask_function)
    if outer == "packed_sequence_mask_function":
        return inner["packed_sequence_mask"]
    if outer not in ("and_masks", "or_masks"):
        return None
    return next((numbers for part in inner["mask_functions"] if (numbers := find_packing(part)) is not None), None)


def positions_within(document_BS: Tensor) -> Tensor:
    """Each token's position in its document, `(B, S)`."""
    index_S = torch.arange(document_BS.shape[1], device=document_BS.device)
    starts_BS = F.pad(document_BS[:, 1:] != document_BS[:, :-1], (1, 0), value=True)
    return index_S - torch.where(starts_BS, index_S, 0).cummax(dim=1).values


def document_of(bounds: Tensor, B: int, S: int) -> Tensor:
    """`(B, S)`: the index of each token's document, from `cu_seq_lens` over the flattened rows."""
    tokens = torch.arange(B * S, device=bounds.device, dtype=bounds.dtype)
    return torch.searchsorted(bounds[1:].contiguous(), tokens, right=True).view(B, S)


def bounds_of(document_BS: Tensor) -> Tensor:
    """`cu_seq_lens` over the flattened rows, from each token's document."""
    starts = torch.ones_like(document_BS, dtype=torch.bool)
    starts[:, 1:] = document_BS[:, 1:] != document_BS[:, :-1]
    first = torch.nonzero(starts.view(-1)).view(-1).to(torch.int32)
    return torch.cat([first, first.new_tensor([document_BS.numel()])])
