"""Token types of a batch must be those of its tokens: rows padded on the other side than their types give images other positions,
without an error anywhere.

    input_ids           pad pad  A  img img  B
    mm_token_type_ids    0   1   1   0   0   0      refused: a padding token and A are typed as an image
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from patchgen.runtime.media_sizes import AUDIO, IMAGE, VIDEO

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OF_MEDIA = "mm_token_type_ids"
"""The type of each token, 0 for text."""
FIELDS = (OF_MEDIA, "token_type_ids")


def require_agreement(batch: Mapping[str, Any], model: PreTrainedModel | None = None) -> None:
    """Raises if a token of text, or padding, has the type of an image, a video or a sound.

    Processors derive `mm_token_type_ids` from token ids: a placeholder's id has a type, an id of text has none. A placeholder
    without a type is no error in itself, since a model may sample its id outside an image. `token_type_ids` may have other
    meanings (segments): they are compared if a placeholder of the model has a type in them. Padding is not compared.

    Args:
        batch: full rows on one device; nothing is compared without both `input_ids` and types, `(B, S)`. Padding is where
            `attention_mask` or `real_tokens` `(B, S)` are 0; masks of other shapes do not say where.
        model: whose config names the ids of media. Without it, they are those that have a type more often than not.

    Raises:
        ValueError: naming the first such token, its row and its types.
    """
    ids_BS = batch.get("input_ids")
    if not isinstance(ids_BS, Tensor):
        return
    real_BS = _real_tokens(batch, ids_BS)
    for field in FIELDS:
        types_BS = batch.get(field)
        if not isinstance(types_BS, Tensor):
            continue
        if types_BS.shape != ids_BS.shape:
            raise ValueError(
                f"{field} of shape {tuple(types_BS.shape)} do not belong to input_ids of shape {tuple(ids_BS.shape)}. To fix: "
                "pass the type of each token of the full rows."
            )
        typed_BS = types_BS != 0
        if field == OF_MEDIA:
            _raise_at_first(typed_BS & ~real_BS, ids_BS, types_BS, field, "a mask marks it as padding")
        elif not bool((is_one_of(ids_BS, _ids_named(model, _PLACEHOLDER)) & typed_BS).any()):
            continue
        typed_BS, text_BS = typed_BS & real_BS, ~typed_BS & real_BS
        media_BS = is_one_of(ids_BS, _ids_named(model, _OF_MEDIA) or _mostly_in(ids_BS, typed_BS, text_BS))
        wrong_BS = typed_BS & ~media_BS
        elsewhere_BS = wrong_BS & torch.isin(ids_BS, ids_BS[text_BS])
        _raise_at_first(elsewhere_BS, ids_BS, types_BS, field, "is text elsewhere")
        rows_B1 = (text_BS & media_BS).any(dim=1, keepdim=True)
        _raise_at_first(
            wrong_BS & rows_B1, ids_BS, types_BS, field, "is text, while placeholders of its row have type 0"
        )


def is_one_of(ids: Tensor, numbers: Collection[int]) -> Tensor:
    """Which ids are among these numbers; on the device of the ids."""
    return torch.isin(ids, torch.tensor(sorted(numbers), dtype=ids.dtype, device=ids.device))


def _real_tokens(batch: Mapping[str, Any], ids_BS: Tensor) -> Tensor:
    """The tokens that no mask of their shape marks as padding."""
    real_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    for name in ("attention_mask", "real_tokens"):
        mask = batch.get(name)
        if isinstance(mask, Tensor) and mask.shape == ids_BS.shape:
            real_BS = real_BS & (mask != 0)
    return real_BS


def _mostly_in(ids_BS: Tensor, typed_BS: Tensor, text_BS: Tensor) -> set[int]:
    """The ids that are in the first of two masks more often than in the second."""
    typed, text = Counter(ids_BS[typed_BS].tolist()), Counter(ids_BS[text_BS].tolist())
    return {token_id for token_id, count in typed.items() if count > text[token_id]}


def _raise_at_first(wrong_BS: Tensor, ids_BS: Tensor, types_BS: Tensor, field: str, why: str) -> None:
    if bool(wrong_BS.any()):
        row, token = wrong_BS.nonzero()[0].tolist()
        raise ValueError(
            f"{field} disagree with input_ids: token {token} of row {row} (id {int(ids_BS[row, token])}) has type "
            f"{int(types_BS[row, token])}, and {why}. Images would be computed as text, at other positions. To fix: pad "
            f"{field} on the side on which input_ids are padded, with 0."
        )


_PLACEHOLDER = re.compile(f"({'|'.join((IMAGE, VIDEO, AUDIO))})_token_(id|index)")
_OF_MEDIA = re.compile(r"\w*(image|video|audio|vision|frame|boi|eoi|boa|eoa)\w*_(id|index)")
"""Ids beside placeholders that a processor may give a type: the first and last token of an image, of a row of its patches."""


def _ids_named(model: PreTrainedModel | None, pattern: re.Pattern[str]) -> set[int]:
    """The ids in the model's config under such names."""
    if model is None:
        return set()
    return {value for name, value in vars(model.config).items() if type(value) is int and pattern.fullmatch(name)}
