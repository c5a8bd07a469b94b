"""One attention call: which tokens see which, the features it needs, and its dense mask.

B rows   S tokens per row   N_q query heads
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchgen.runtime.mask_functions import document_of
from patchgen.runtime.tensor_cache import TensorCache

_CALL_FEATURES = (
    "sliding window",
    "soft cap",
    "sinks",
    "dropout",
    "padding",
    "overlays",
    "two sequences",
    "sinks of each token",
)
FLOAT32 = "float32"
FEATURES = (*_CALL_FEATURES, FLOAT32)
"""Features that a backend may lack: those of calls, and dtypes of more than 16 bits (`dtype_features`)."""


def dtype_features(dtype: torch.dtype | None) -> tuple[str, ...]:
    """The features needed to compute in a dtype; none if the dtype is unknown (None)."""
    return (FLOAT32,) if dtype is not None and dtype.itemsize > 2 else ()


@dataclass(frozen=True)
class Documents:
    """The documents of packed rows: `bounds` `(documents + 1,)` int32 over the B * S tokens, and the longest length."""

    bounds: Tensor
    longest: int


@dataclass(frozen=True)
class Attention:
    """Which tokens see which, and how scores become weights.

    Attributes:
        causal: no token sees a later one.
        scaling: the factor of the scores.
        window: None, or the number of tokens a token sees, itself included (on both sides if not causal).
        softcap: None, or c of `c * tanh(score / c)`.
        sinks: None, or `(N_q,)`: a logit per head that takes part in the softmax and has no value; or one of each token,
            `(B, N_q, S, 1)`.
        dropout: of the weights.
        documents: None, or the documents that do not see each other.
        padding: None, or `(B, S)` bool, False for padding.
        overlay: None, or upstream's own mask (4-D tensor or BlockMask), which replaces order, window, documents and padding.
        is_cross: queries and keys belong to different sequences.
        queries: None, or the tokens of each row that q has, the first and the one after the last; k and v have all S.
    """

    causal: bool
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    documents: Documents | None = None
    padding: Tensor | None = None
    overlay: Any = None
    is_cross: bool = False
    queries: tuple[int, int] | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """The features (of FEATURES) that a backend needs for it, apart from those of the dtype."""
        by_token = self.sinks is not None and self.sinks.ndim > 1
        values = (
            self.window,
            self.softcap,
            self.sinks,
            self.dropout or None,
            self.padding,
            self.overlay,
            self.is_cross or None,
            by_token or None,
        )
        return tuple(feature for feature, value in zip(_CALL_FEATURES, values, strict=True) if value is not None)

    @property
    def is_plain(self) -> bool:
        """Whether there is no window, documents, padding or overlay."""
        return self.window is None and self.documents is None and self.padding is None and self.overlay is None

    def keys_seen(self, S: int) -> int:
        """How many of the first keys of S its queries may see."""
        return self.queries[1] if self.queries is not None and self.causal and self.overlay is None else S


# bounds -> {(kind, rows, length, causal, window): mask}: shared by all layers
masks: TensorCache[dict] = TensorCache(lambda _bounds: {})


def dense_mask(attention: Attention, B: int, S: int, device: torch.device) -> Tensor | None:
    """`(B or 1, 1, S, S)` bool, True where a query (third) sees a key (fourth); None where all see all. Of a call with some
    queries their rows, and the keys that they may see.

    An overlay is returned with its rows unchanged: it may be additive, and have a mask per head.
    A padded query sees itself, so that no row of the softmax is empty; nothing reads its output.
    """
    first, end = attention.queries or (0, S)
    if attention.overlay is not None:
        whole = attention.queries is None or attention.overlay.shape[-2] == 1
        return attention.overlay if whole else attention.overlay[..., first:end, :]
    if attention.is_plain and not attention.causal:
        return None
    key = ("dense", B, S, attention.causal, attention.window, attention.queries)
    cache = masks(attention.documents.bounds) if attention.documents is not None else {}
    if key not in cache:
        cache[key] = visible(attention, B, S, device)
    mask = cache[key]
    if attention.padding is not None:
        keys = attention.keys_seen(S)
        itself = torch.eye(S, dtype=torch.bool, device=device)[first:end, :keys]
        mask = (mask & attention.padding[:, None, None, :keys]) | itself
    return mask


def visible(attention: Attention, B: int, S: int, device: torch.device) -> Tensor:
    """The mask from order, window and documents, `(B or 1, 1, S, S)` bool, or its rows and keys of some queries."""
    first, end = attention.queries or (0, S)
    keys = attention.keys_seen(S)
    index = torch.arange(S, device=device)
    distance = index[first:end, None] - index[None, :keys]
    mask = torch.ones_like(distance, dtype=torch.bool)
    if attention.causal:
        mask &= distance >= 0
    if attention.window is not None:
        mask &= distance.abs() < attention.window
    if attention.documents is None:
        return mask[None, None]
    document = document_of(attention.documents.bounds, B, S)
    return (mask & (document[:, first:end, None] == document[:, None, :keys]))[:, None]


def rows_as_documents(B: int, S: int, device: torch.device) -> Documents:
    """Rows that are not packed, as documents of the same length."""
    return Documents(torch.arange(0, (B + 1) * S, S, dtype=torch.int32, device=device), S)


def parts_of_documents(documents: Documents, S: int, attention: Attention) -> tuple[Documents, Documents]:
    """What a call's queries and keys have of each document, for kernels that align the last query of a document with its last key.

        documents of a row        [ 0 ][   1   ][    2    ][ 3 ]
        queries                            [          )
        of documents: queries          [ 1 ][     2   )          none of 0 and 3
        causal: keys              [ 0 ][   1   ][  2  )          up to the last query; of 0 no query sees them

    Computed on the device, for any number of documents: those without a query stay, with a length of 0.

    Args:
        documents: of rows of S tokens; each row begins with one.
    """
    first, end = attention.queries or (0, S)
    keys = attention.keys_seen(S)
    rows, within = documents.bounds.div(S, rounding_mode="floor"), documents.bounds.remainder(S)
    query_bounds = rows * (end - first) + within.clamp(first, end) - first
    key_bounds = rows * keys + within.clamp(max=keys)
    longest = documents.longest
    return Documents(query_bounds, min(longest, end - first)), Documents(key_bounds, min(longest, keys))
