"""Unpacks rows into one document per row: for models that take no document bounds.

    packed    a a a b b b b b c c        (B, S)
    unpacked  a a a . .                  (D, L): one row per document, as long as the longest
              b b b b b
              c c . . .

In its own row every document is computed as if alone, whatever the model does: recurrences without packing arguments, positions
counted along the row, blocks of keys. Padding follows the tokens, where causal layers do not see it, or precedes them (`LEFT`)
with an attention mask, for models that are not causal. The price is the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from patchgen.runtime.parallel import batch_fields
from patchgen.runtime.parallel.batch_fields import COUNTING, FieldRule

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
TOKEN_OUTPUTS = ("logits", "last_hidden_state")
"""The outputs with a vector for each token."""
LEFT: Literal["left"] = "left"
"""Padding on the left, with an attention mask."""
DocumentSeparation = bool | Literal["left"]
"""Whether a model computes one document per row; "left": with padding on the left."""


@dataclass(frozen=True)
class DocumentRows:
    """The mapping from packed to unpacked rows.

    Attributes:
        source_index: `(D, L)`, the index of the token in the flattened packed rows; arbitrary for padding.
        is_token: `(D, L)` bool.
        row_index: `(B * S,)`, the index of each token in the flattened unpacked rows.
        shape: `(B, S)` of the packed rows.
    """

    source_index: Tensor
    is_token: Tensor
    row_index: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, bounds: Tensor, B: int, S: int, *, pads_left: bool = False) -> DocumentRows:
        """From `cu_seq_lens` over the flattened rows. Two host syncs."""
        lengths = bounds.diff()
        starts = bounds[:-1][lengths > 0].long()
        lengths = lengths[lengths > 0]
        longest = int(lengths.max())
        position = torch.arange(longest, device=bounds.device)[None] - (longest - lengths[:, None]) * pads_left
        is_token = (position >= 0) & (position < lengths[:, None])
        source_index = torch.where(is_token, starts[:, None] + position, 0)
        return cls(source_index, is_token, is_token.view(-1).nonzero()[:, 0], (B, S))

    def unpack(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a forward with one document per row; images and sounds are in document order already.

        `real_tokens` `(D, L)` marks padding for whatever counts tokens (a router loss).
        """
        unpacked = {
            name: self._unpack(batch_fields.rule_of(name, arguments), value) if name in batch_fields.RULES else value
            for name, value in arguments.items()
            if name not in PACKING
        }
        if "real_tokens" not in unpacked and not bool(self.is_token.all()):
            unpacked["real_tokens"] = self.is_token
        return unpacked

    def unpack_field(self, name: str, value: Tensor) -> Tensor:
        """A field of a batch `(B or 1, S)` or `(..., B or 1, S)` with one document per row."""
        return self._unpack(batch_fields.rule_of(name, {name: value}), value)

    def unpack_states(self, states: Tensor) -> Tensor:
        """`(B or 1, S, ...)` with one document per row, `(D, L, ...)`; padding repeats the first token."""
        states = states.expand(*self.shape, *states.shape[2:])
        return states.flatten(0, 1).index_select(0, self.source_index.view(-1)).unflatten(0, self.source_index.shape)

    def _unpack(self, rule: FieldRule, value: Any) -> Any:
        if rule.pad_scale != 1 or not isinstance(value, Tensor):
            return value
        dim = rule.pack_dim % value.ndim
        value = value.expand(*value.shape[: dim - 1], *self.shape, *value.shape[dim + 1 :])
        values = value.flatten(dim - 1, dim).index_select(dim - 1, self.source_index.view(-1))
        values = values.unflatten(dim - 1, self.source_index.shape)
        trailing = (1,) * (value.ndim - dim - 1)
        if rule.pad_value == COUNTING:
            fill: Tensor | int = torch.arange(self.source_index.shape[1], device=value.device).view(-1, *trailing)
        else:
            fill = rule.constant_fill
        return torch.where(self.is_token.view(*self.is_token.shape, *trailing), values, fill)

    def repack(self, output: Any) -> Any:
        """The output of the forward with its token outputs in packed rows again."""
        for name in TOKEN_OUTPUTS:
            value = getattr(output, name, None)
            if isinstance(value, Tensor) and value.shape[:2] == self.is_token.shape:
                output[name] = self.packed(value)
        return output

    def packed(self, value: Tensor) -> Tensor:
        """Values of each token, from unpacked rows `(D, L, ...)` to packed rows `(B, S, ...)`."""
        return value.flatten(0, 1).index_select(0, self.row_index).unflatten(0, self.shape)
