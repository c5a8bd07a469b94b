"""A rank's slice of a batch for sequence parallelism. Runs on the CPU, in data workers too.

B rows   S tokens per row   s = S / n of this rank
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from patchgen.runtime.compatibility import why_not_in_layout
from patchgen.runtime.parallel import token_types
from patchgen.runtime.parallel.batch_fields import IGNORED, RULES, rule_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GRIDS = ("image_grid_thw", "video_grid_thw")
TEXT_ROWS = 4  # rows of multimodal position ids that begin with the text's: text, time, height, width


def slice_batch(
    batch: dict[str, Any], *, sp: int, sp_rank: int, pad_token_id: int = 0, model: PreTrainedModel | None = None
) -> dict[str, Any]:
    """The inputs of one SP rank, from the full batch, which is the same on all ranks of its SP group.

    Labels are shifted before anything is sliced, so no rank needs its neighbour's first label. Document boundaries are found
    before slicing, too: explicit `cu_seq_lens_q`, else text position ids that restart: `(B, S)`, or the first of four rows
    `(4, B, S)`. Three rows (time, height, width) do not show where documents end; pass `cu_seq_lens_q` with them.

    Without `position_ids` a model computes its own from the full rows, of images for example, and from the padding: with
    `sp=1` they are left to it, with the mask that it may count by. A slice does not show it the full rows, so with `sp > 1`
    they are computed here: by the model, if it is given and has a way of its own, else 0, 1, 2 ... in each document.

    `batch_fields.py` has the table of what is padded and sliced. Images, videos and audio, with their grids and lengths, are
    not: `media.py` divides them. Nor are token types: masks for the gathered sequence are built from them.

    Args:
        batch: `input_ids` `(B, S)` or `inputs_embeds` `(B, S, H)`, and optionally unshifted `labels` `(B, S)`,
            `shift_labels` `(B, S)`, `position_ids` `(B, S)` or in upstream's layout `(rows, B or 1, S)`, or instead
            `stacked_position_ids` `(B, rows, S)`, `attention_mask` `(B, S)`, `cu_seq_lens_q` `(documents + 1,)` over the
            concatenated rows, `real_tokens` `(B, S)` bool, False where a token is padding. Other entries are passed through.
        sp, sp_rank: the number of ranks that share the batch, and the index of this one.
        pad_token_id: pads rows to a multiple of `sp`; the padding has no labels and is a document of its own, unless a mask
            marks it. It must not be a placeholder of an image, a video or a sound.
        model: the generated model that the slices are for, sharded or not: its positions, its placeholders.

    Returns:
        The same keys, sequences sliced to s, plus, with `sp > 1`, `position_ids` and, with labels, `shift_labels`. A batch of
        several documents gets `cu_seq_lens_q`, `cu_seq_lens_k` (int32, of the *full* sequence) and `max_length_q`,
        `max_length_k` (int). Where there are positions, an attention mask without zeros is dropped. `real_tokens` is included if
        any token of the full batch is padding, according to that argument, to the mask, or because it is added here.

    Masks of another form than `(B, S)`, four-dimensional or one per kind of layer, are passed through with `sp=1`.

    Raises:
        ValueError: there are no tokens, a slice of a batch with grids has no positions and no model to compute them, documents
            do not match the positions or the batch, token types do not match the tokens, a mask cannot be sliced, or by the proof
            of its file the model does not bear slices.
    """
    out = dict(batch)
    tokens = out.get("input_ids", out.get("inputs_embeds"))
    if tokens is None:
        raise ValueError(f"The batch has neither input_ids nor inputs_embeds, only {sorted(batch)}.")
    if model is not None and (reason := why_not_in_layout(type(model), ranks=sp, sp=sp)):
        raise ValueError(f"{type(model).__name__}: {reason}")
    B, S = tokens.shape[:2]
    padding = -S % sp
    built_mask = _pop_built_mask(out, B, S, is_sliced=sp > 1)
    token_types.require_agreement(out, model)

    lengths = out.pop("cu_seq_lens_q", None)
    positions = _positions(out, B, S, lengths, model, is_sliced=sp > 1)
    starts = document_starts(B, S, positions, lengths)
    for key in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
        out.pop(key, None)

    _set_padding(out, B, S, is_padded=padding > 0, keeps_mask=positions is None and lengths is None)
    if "attention_mask" not in out and lengths is None and positions is not None and text_positions(positions) is None:
        _require_one_document(positions)
    if out.get("labels") is not None and out.get("shift_labels") is None:
        out["shift_labels"] = _shifted(out["labels"], starts)

    # From here on the padding counts as a document of its own, unless a mask marks it.
    starts = F.pad(starts, (0, padding), value=False)
    if padding and "attention_mask" not in out:
        starts[:, S] = True
    if bool(starts[:, 1:].any()):
        out.update(document_lengths(starts))
    if positions is not None:
        out["position_ids"] = positions
    for name in RULES:
        if out.get(name) is not None:
            rule = rule_of(name, out)
            fill = pad_token_id if name == "input_ids" else rule.pad_value
            out[name] = rule.local_part(out[name], sp=sp, sp_rank=sp_rank, fill=fill)
    return out | built_mask


def _pop_built_mask(out: dict[str, Any], B: int, S: int, *, is_sliced: bool) -> dict[str, Any]:
    """The attention mask, removed from the batch, if it is one that a model would build from `(B, S)`: of queries by keys, or a
    dict of such by kind of layer. It does not say which tokens are padding, and cannot be sliced."""
    mask = out.get("attention_mask")
    if mask is None or (isinstance(mask, Tensor) and mask.shape == (B, S)):
        return {}
    if is_sliced:
        found = (
            f"one of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__} of masks"
        )
        raise ValueError(
            f"attention_mask must be ({B}, {S}), 0 where a token is padding, for a batch that is sliced by sequence parallelism; "
            f"found {found}. To fix: pass that, or positions that restart where documents begin (cu_seq_lens_q), or sp=1."
        )
    return {"attention_mask": out.pop("attention_mask")}


def _shifted(labels: Tensor, starts: Tensor) -> Tensor:
    """The label of each token's next one, none at the end of a document."""
    ends = F.pad(starts[:, 1:], (0, 1), value=True)
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:].masked_fill(ends, IGNORED)


def _positions(
    out: dict[str, Any], B: int, S: int, lengths: Tensor | None, model: PreTrainedModel | None, *, is_sliced: bool
) -> Tensor | None:
    """The position ids of a full batch, in upstream's layout; None: the model computes them. Stacked ones, and a None, are removed
    from the batch."""
    positions, stacked = out.pop("position_ids", None), out.pop("stacked_position_ids", None)
    if stacked is not None or (positions is not None and positions.ndim == 3):
        positions = rows_first(positions, stacked, B)
    if positions is not None:
        return positions
    if is_sliced:
        positions = _positions_of_model(out, model)
    elif lengths is None or _has_items(out):
        return None
    if positions is None and lengths is not None:
        starts = document_starts(B, S, None, lengths).view(-1)
        index = torch.arange(B * S)
        return (index - torch.where(starts, index, 0).cummax(0).values).view(B, S)
    return torch.arange(S).expand(B, S) if positions is None else positions


def _positions_of_model(out: Mapping[str, Any], model: PreTrainedModel | None) -> Tensor | None:
    """The positions that the model's forward computes of the full batch; None: it counts."""
    find_positions = getattr(model, "get_position_id_func", None)
    if find_positions is not None:
        return find_positions().of_batch(out)
    if any(out.get(key) is not None for key in GRIDS):
        raise ValueError(
            "This batch has image or video grids and no position_ids. Models that take grids use three-dimensional positions "
            "over the full sequence. To fix: compute them, (3, B, S), before the batch is sliced, or pass the generated model "
            "to slice_batch(..., model=model), which computes them as upstream does."
        )
    return None


def _has_items(out: Mapping[str, Any]) -> bool:
    """Whether the batch has images, videos or sounds."""
    return any(out.get(name) is not None and not rule.is_per_token for name, rule in RULES.items())


def _set_padding(out: dict[str, Any], B: int, S: int, *, is_padded: bool, keeps_mask: bool) -> None:
    """Sets `real_tokens` if any token is padding, or will be; drops an attention mask without zeros unless it is to be kept."""
    mask = out.pop("attention_mask", None)
    real = _real_tokens(out.pop("real_tokens", None), mask, B, S)
    if is_padded or not bool(real.all()):
        out["real_tokens"] = real
    if mask is not None and (keeps_mask or not bool(mask.all())):
        out["attention_mask"] = mask


def _real_tokens(real_tokens: Tensor | None, attention_mask: Tensor | None, B: int, S: int) -> Tensor:
    """`(B, S)` bool: the tokens that neither mask marks as padding."""
    real = torch.ones(B, S, dtype=torch.bool)
    for mask in (real_tokens, attention_mask):
        if mask is not None:
            real = real.to(mask.device) & mask.bool()
    return real


def document_starts(B: int, S: int, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> Tensor:
    """`(B, S)` bool: the tokens at which a document starts. The first token of a row always does."""
    starts = torch.zeros(B, S, dtype=torch.bool)
    starts[:, 0] = True
    if cu_seq_lens is not None:
        if int(cu_seq_lens[-1]) != B * S:
            raise ValueError(
                f"cu_seq_lens_q ends at {int(cu_seq_lens[-1])}, but the batch has {B} rows of {S} = {B * S} tokens. "
                "To fix: pass the lengths of the full batch, not of a slice."
            )
        inner = cu_seq_lens[1:-1].long()
        inner = inner[inner < B * S]  # a last document without tokens
        starts.view(-1)[inner] = True
        return starts
    text = text_positions(position_ids) if position_ids is not None else None
    if text is not None:
        restarts = text[:, 1:] != text[:, :-1] + 1
        starts[:, 1:] = restarts.expand(B, S - 1)
    return starts


def _require_one_document(position_ids: Tensor) -> None:
    """Raises if positions of time, height and width restart: all are 0 after a token where some were not."""
    largest = position_ids.amax(dim=0)
    restarts = (largest[:, 1:] == 0) & (largest[:, :-1] > 0)
    if bool(restarts.any()):
        row, token = (restarts.nonzero()[0] + torch.tensor([0, 1])).tolist()
        raise ValueError(
            f"Position ids of three rows (time, height, width) restart at token {token} of row {row}, and nothing marks where "
            "documents end: attention and labels would cross documents. To fix: pass cu_seq_lens_q with them, or four rows "
            "(4, B, S) whose first counts the text of each document."
        )


def rows_first(position_ids: Tensor | None, stacked: Tensor | None, B: int) -> Tensor | None:
    """Multimodal position ids in upstream's layout `(rows, B or 1, S)`.

    Args:
        position_ids: in that layout.
        stacked: `(B, rows, S)` instead: positions of single samples, stacked by a collator.

    Raises:
        ValueError: both are given, or the shape is not what the name says.
    """
    if stacked is None:
        if position_ids is None:
            return None
        rows, samples = position_ids.shape[:2]
        if rows in (1, TEXT_ROWS - 1, TEXT_ROWS) and samples in (1, B):
            return position_ids
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} do not belong to a batch of {B}: expected (rows, {B}, "
            "length) with 3 rows (time, height, width) or 4 (text first), upstream's layout. To fix: pass what a collator stacks, "
            f"({B}, rows, length), as stacked_position_ids."
        )
    if position_ids is not None:
        raise ValueError("The batch has both position_ids and stacked_position_ids. To fix: pass only one of them.")
    if stacked.ndim != 3 or stacked.shape[0] != B or stacked.shape[1] not in (TEXT_ROWS - 1, TEXT_ROWS):
        raise ValueError(
            f"stacked_position_ids of shape {tuple(stacked.shape)} do not belong to a batch of {B}: expected ({B}, 3 or "
            "4, length)."
        )
    return stacked.transpose(0, 1).contiguous()


def text_positions(position_ids: Tensor) -> Tensor | None:
    """The text positions `(B or 1, S)` in upstream's layout; None if there are only time, height and width."""
    if position_ids.ndim == 2:
        return position_ids
    return None if position_ids.shape[0] == TEXT_ROWS - 1 else position_ids[0]


def document_lengths(starts: Tensor) -> dict[str, Any]:
    """The packing arguments of attention, from the first tokens of documents, `(B, S)` bool."""
    first = torch.nonzero(starts.view(-1)).view(-1)
    bounds = F.pad(first, (0, 1), value=starts.numel()).to(torch.int32)
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
