"""The documents of packed rows, each in a row of its own: for models that cannot be told where documents end.

    packed    a a a b b b b b c c        (B, S)
    apart     a a a . .                  (D, L): as many rows as documents, as long as the longest
              b b b b b
              c c . . .

A recurrence without packing arguments, positions counted along the row, blocks of keys: whatever it is, a document in its
own row is computed as it is alone. Padding stands behind the tokens, where nothing that is causal looks; or before them
(`LEFT`), with a mask that says so, for models that look ahead. It costs the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from patchgen.runtime.parallel import batch_fields
from patchgen.runtime.parallel.batch_fields import COUNTING

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
BY_TOKEN = ("logits", "last_hidden_state")
"""The outputs with a row of numbers for each token."""
LEFT: Literal["left"] = "left"
"""Padding before the tokens, told by an attention mask."""
Separated = bool | Literal["left"]
"""Whether a model's documents are computed in rows of their own, and where the padding stands if not behind them."""


@dataclass(frozen=True)
class DocumentRows:
    """Where the tokens of packed rows go.

    Attributes:
        place: `(D, L)`, which token of the rows one after the other; any for padding.
        is_token: `(D, L)` bool.
        shape: `(B, S)` of the packed rows.
    """

    place: Tensor
    is_token: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, bounds: Tensor, B: int, S: int, *, is_left: bool = False) -> DocumentRows:
        """From `cu_seq_lens` over the rows one after the other. One host sync."""
        lengths = bounds.diff()
        starts = bounds[:-1][lengths > 0].long()
        lengths = lengths[lengths > 0]
        longest = int(lengths.max())
        along = torch.arange(longest, device=bounds.device)[None] - (longest - lengths[:, None]) * is_left
        is_token = (along >= 0) & (along < lengths[:, None])
        return cls(torch.where(is_token, starts[:, None] + along, 0), is_token, (B, S))

    def apart(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a forward with their tokens in rows by document; images and sounds are in that order already.

        What counts each token (a router loss) reads in `real_tokens` `(D, L)` which are none.
        """
        done = {name: self._take(name, value) for name, value in arguments.items() if name not in PACKING}
        if "real_tokens" not in done and not bool(self.is_token.all()):
            done["real_tokens"] = self.is_token
        return done

    def _take(self, name: str, value: Any) -> Any:
        rule = batch_fields.RULES.get(name)
        if rule is None or rule.pad_scale != 1 or not isinstance(value, Tensor):
            return value
        dim = rule.pack_dim % value.ndim
        value = value.expand(*value.shape[: dim - 1], *self.shape, *value.shape[dim + 1 :])
        taken = value.flatten(dim - 1, dim).index_select(dim - 1, self.place.view(-1))
        taken = taken.unflatten(dim - 1, self.place.shape)
        more = (1,) * (value.ndim - dim - 1)
        if rule.pad_value == COUNTING:
            fill: Tensor | int = torch.arange(self.place.shape[1], device=value.device).view(-1, *more)
        else:
            fill = rule.constant_fill
        return torch.where(self.is_token.view(*self.is_token.shape, *more), taken, fill)

    def together(self, output: Any) -> Any:
        """The output of the forward with what it has for each token in packed rows again."""
        for name in BY_TOKEN:
            value = getattr(output, name, None)
            if isinstance(value, Tensor) and value.shape[:2] == self.is_token.shape:
                output[name] = self.packed(value)
        return output

    def packed(self, value: Tensor) -> Tensor:
        """Numbers of each token `(D, L, ...)` in packed rows again, `(B, S, ...)`."""
        return value[self.is_token].unflatten(0, self.shape)
