"""Token types of a batch must be those of its tokens: rows padded on the other side than their types give images other positions,
without an error anywhere.

    input_ids           pad pad  A  img img  B
    mm_token_type_ids    0   1   1   0   0   0      refused: a padding token and A are of an image, the image is text
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """Raises if a token has types that it cannot have both: text in one place and an image in another, or an image in padding.

    Processors derive `mm_token_type_ids` from token ids, so each id is always text or always not. `token_type_ids` may have
    other meanings (segments): only the placeholders of the model are compared in them.

    Args:
        batch: full rows on the host; nothing is compared without both `input_ids` and types, `(B, S)`.
        model: whose config names placeholder ids.

    Raises:
        ValueError: naming the first such token, its row and its types.
    """
    ids_BS = batch.get("input_ids")
    if not isinstance(ids_BS, Tensor):
        return
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
        if field == OF_MEDIA and (mask_BS := batch.get("attention_mask")) is not None:
            _raise_at_first(typed_BS & (mask_BS == 0), ids_BS, types_BS, field, "attention_mask marks it as padding")
        compared_BS = torch.ones_like(typed_BS)
        if field != OF_MEDIA:
            compared_BS = torch.isin(ids_BS, torch.tensor(sorted(_placeholders(model)), dtype=ids_BS.dtype))
        both = ids_BS[compared_BS & typed_BS].unique()
        both = both[torch.isin(both, ids_BS[compared_BS & ~typed_BS])]
        _raise_at_first(
            compared_BS & ~typed_BS & torch.isin(ids_BS, both),
            ids_BS,
            types_BS,
            field,
            "it has another type elsewhere",
        )


def _raise_at_first(wrong_BS: Tensor, ids_BS: Tensor, types_BS: Tensor, field: str, why: str) -> None:
    if bool(wrong_BS.any()):
        row, token = wrong_BS.nonzero()[0].tolist()
        raise ValueError(
            f"{field} disagree with input_ids: token {token} of row {row} (id {int(ids_BS[row, token])}) has type "
            f"{int(types_BS[row, token])}, and {why}. Images would be computed as text, at other positions. To fix: pad "
            f"{field} on the side on which input_ids are padded, with 0."
        )


def _placeholders(model: PreTrainedModel | None) -> Iterator[int]:
    """The ids that stand for images, videos and sounds, by the model's config."""
    config = getattr(model, "config", None)
    for kind in (IMAGE, VIDEO, AUDIO):
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            if type(token_id := getattr(config, name, None)) is int:
                yield token_id
