"""Packs samples into a batch of one row of concatenated documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from patchgen.runtime.parallel.batch import IGNORED
from patchgen.runtime.parallel.batch_fields import FieldRule, pack, rule_of


def text_sample(ids: Tensor, targets: Tensor | None) -> dict[str, Tensor]:
    """A sample `input_ids` `(n,)`, `labels` `(n,)`, `position_ids` `(n,)` from its ids and targets (`text.Tokens`)."""
    if targets is None or targets.dtype == torch.bool:
        labels = ids if targets is None else ids.masked_fill(~targets, IGNORED)
    else:
        labels = (targets.long() - 1).masked_fill(targets == 0, IGNORED)
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(len(ids))}


def collate(samples: Sequence[dict[str, Any]], *, pad_to: int | None, pad_token_id: int) -> dict[str, Any]:
    """One micro-batch.

    Args:
        samples: as of `text_sample`, possibly with media fields; without samples the batch is only padding.
        pad_to: the row is filled up to this many tokens with a last document without labels.

    Returns:
        `input_ids`, `labels` (not shifted, IGNORED where there is no loss), `position_ids`, all `(1, S)` int64 for S tokens;
        positions of multimodal samples are `(4, 1, S)`: text, time, height, width, in the dtype of the position function;
        `cu_seq_lens_q`, `cu_seq_lens_k` `(documents + 1,)` int32; `max_length_q`, `max_length_k` int; the media of all
        samples, packed by the rules of `parallel/batch_fields.py`; with padding, `real_tokens` `(1, S)` bool.
    """
    lengths = [sample["input_ids"].shape[-1] for sample in samples]
    padding = max((pad_to or 0) - sum(lengths), 0 if samples else 1)
    if padding:
        filler = text_sample(torch.full((padding,), pad_token_id), torch.zeros(padding, dtype=torch.bool))
        samples = [*samples, filler]
        lengths.append(padding)
    names = dict.fromkeys(name for sample in samples for name in sample)
    batch: dict[str, Any] = {}
    for name in names:
        rule = rule_of(name, names)
        if rule.pack_dim == -1:
            batch[name] = pack(name, _token_field(name, rule, samples, lengths)).unsqueeze(-2)
        elif rule.is_per_token:  # a sample without media has tokens as well
            batch[name] = pack(name, _token_field(name, rule, samples, lengths), batch_fields=names)
        else:
            batch[name] = pack(name, [sample[name] for sample in samples if name in sample], batch_fields=names)
    if padding:
        batch["real_tokens"] = torch.arange(sum(lengths))[None] < sum(lengths) - padding
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return batch | {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def _token_field(
    name: str, rule: FieldRule, samples: Sequence[dict[str, Any]], lengths: Sequence[int]
) -> list[Tensor]:
    """The values `(..., n)` of a per-token field, one for each sample: padding where it is missing, as text has no token types;
    text positions are repeated for each multimodal dimension."""
    like = max((sample[name] for sample in samples if name in sample), key=lambda value: value.ndim)
    values = [
        sample[name] if name in sample else rule.padding(like, length)
        for sample, length in zip(samples, lengths, strict=True)
    ]
    return [value if value.ndim == like.ndim else value.expand(len(like), -1) for value in values]
