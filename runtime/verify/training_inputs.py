"""Batches as the trainer passes them to a model, and the same content as upstream takes it: document by document.

documents      one row each, upstream's arguments only: the reference
packed row     the same documents concatenated by the collator: positions, lengths
padded rows    an attention mask, padding right or left of the tokens

B rows   S tokens per row   n tokens of a document
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.runtime.config_positions import num_positions
from patchgen.runtime.data.collate import collate
from patchgen.runtime.parallel.batch import IGNORED, slice_batch
from patchgen.runtime.verify import field_semantics as sizes
from patchgen.runtime.verify.inputs import drawable_ids
from patchgen.runtime.verify.media_samples import MODALITY_FIELDS, SampleBuilder
from patchgen.runtime.verify.multimodal_inputs import takes_media

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Batch = dict[str, Any]

LENGTHS = (9, 131, 2, 12)
"""Of the documents in a packed row: longer and shorter than a window, none ends where a chunk of them all does; one of three
chunks of upstream's delta rules (64 tokens): the first starts without a state, and the third with one of both before it."""
NUM_PADDED = 7


@dataclass(frozen=True)
class Documents:
    """Documents as rows `(1, n)`, with unshifted `labels` and the other arguments of upstream's forward."""

    rows: tuple[Batch, ...]
    padded: Batch | None = None
    """All as one padded batch, if upstream's result for a document depends on the others in its batch: towers that pad
    sounds to the longest."""

    def require_padded(self) -> Batch:
        if self.padded is None:
            raise ValueError("These documents have no padded batch: expected media documents, found text.")
        return self.padded

    def reference(self) -> list[Batch]:
        """The batches that upstream gets."""
        return [self.padded] if self.padded is not None else list(self.rows)

    def packed(self, positions: Any = None) -> Batch:
        """All documents in one row, as the data pipeline packs them.

        Args:
            positions: the model's position function (`get_position_id_func()`); None: 0, 1, 2, ... in each document.
        """
        return collate([_sample(row, positions) for row in self.rows], pad_to=None, pad_token_id=0)

    def bounds(self) -> list[slice]:
        """The positions of the documents in the packed row."""
        places, start = [], 0
        for row in self.rows:
            places.append(slice(start, start + row["input_ids"].shape[1]))
            start = places[-1].stop
        return places


def _sample(row: Mapping[str, Any], positions: Any) -> Batch:
    """A document as data workers pass it to the collator."""
    sample = {name: value for name, value in row.items() if isinstance(value, Tensor) and name != "attention_mask"}
    for name in ("input_ids", "labels", *MODALITY_FIELDS):
        if name in sample:
            sample[name] = sample[name][0]
    text = torch.arange(len(sample["input_ids"]))
    sample["position_ids"] = text
    if positions is not None:
        arguments = {name: value for name, value in row.items() if isinstance(value, Tensor) and name != "labels"}
        position_ids = positions(**arguments)["position_ids"]
        sample["position_ids"] = torch.cat([text[None].to(position_ids.dtype), position_ids.reshape(3, -1)])
    return sample


class TokenSampler:
    """Seeded token ids without special ones, and labels for some of them."""

    def __init__(self, config: PreTrainedConfig, seed: int = 1) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.drawable = torch.tensor(drawable_ids(config))
        self.num_positions = num_positions(config)

    def ids(self, rows: int, length: int) -> Tensor:
        """Ids `(rows, length)` int64."""
        return self.drawable[torch.randint(len(self.drawable), (rows, length), generator=self.generator)]

    def others(self, ids: Tensor) -> Tensor:
        """Ids of the same shape that differ everywhere."""
        step = 1 + int(torch.randint(len(self.drawable) - 1, (), generator=self.generator))
        return self.drawable[(torch.searchsorted(self.drawable, ids.contiguous()) + step) % len(self.drawable)]

    def labels(self, ids: Tensor) -> Tensor:
        """The ids, some of them ignored; never the second of a row, so that each document has a label."""
        ignored = torch.rand(ids.shape, generator=self.generator) < 0.2
        ignored[:, 1] = False
        return ids.masked_fill(ignored, IGNORED)


def plain_rows(tokens: TokenSampler) -> Batch:
    """Two rows of one document each, `(2, S)`."""
    return rows_of(tokens, sizes.SEQUENCE)


def rows_of(tokens: TokenSampler, length: int) -> Batch:
    """Two rows of one document of `length` tokens each, `(2, length)`."""
    ids = tokens.ids(2, length)
    return {"input_ids": ids, "labels": tokens.labels(ids)}


def text_documents(tokens: TokenSampler) -> Documents:
    """Documents of `LENGTHS` tokens, or as many as the model has positions."""
    rows = []
    for length in LENGTHS:
        ids = tokens.ids(1, min(length, tokens.num_positions or length))
        rows.append({"input_ids": ids, "labels": tokens.labels(ids)})
    return Documents(tuple(rows))


def padded_rows(rows: Batch, *, left: bool) -> Batch:
    """The rows, with the first (`left`) or last `NUM_PADDED` positions of the second one padding."""
    out = {name: tensor.clone() for name, tensor in rows.items()}
    mask = torch.ones_like(out["input_ids"])
    mask[1, slice(None, NUM_PADDED) if left else slice(-NUM_PADDED, None)] = 0
    if left:
        for name in out:
            out[name][1] = out[name][1].roll(NUM_PADDED)
    out["labels"] = out["labels"].masked_fill(mask == 0, IGNORED)
    if left:
        out["labels"][1, NUM_PADDED] = IGNORED  # predicted by padding
    return {**out, "attention_mask": mask}


def changed(rows: Mapping[str, Any], place: slice, tokens: TokenSampler) -> Batch:
    """The rows with other tokens at `place`."""
    ids = rows["input_ids"].clone()
    ids[:, place] = tokens.others(ids[:, place])
    return {**rows, "input_ids": ids}


def without_labels(rows: Mapping[str, Any]) -> Batch:
    """The batch for which a model returns logits instead of a loss."""
    return {name: value for name, value in rows.items() if name not in ("labels", "shift_labels")}


def num_labels(rows: Mapping[str, Any]) -> int:
    """The number of labels that are targets; the first of a row is none."""
    return int((rows["labels"][:, 1:] != IGNORED).sum())


def media_documents(model: PreTrainedModel) -> dict[str, Documents]:
    """The media batches of a model as documents, by batch name; empty for models that take none.

    Args:
        model: upstream's head from the small config. A batch is left out if it refuses a sample of it alone; the eager
            proof reports why.
    """
    if not takes_media(type(model)):
        return {}
    builder = SampleBuilder(model)
    documents = {}
    for name, samples in builder.batches():
        if any(item.is_part for sample in samples for item in sample.items):
            continue  # use_audio_in_video is one flag for a whole batch
        samples = [sample for sample in samples if sample.items or builder.takes([sample])]
        rows = tuple(dict(builder.case(name, [sample]).batch) for sample in samples)
        if not all(builder.takes([sample]) for sample in samples):
            continue
        documents[name] = Documents(rows, dict(builder.case(name, samples).batch))
    return documents


def trainer_inputs(rows: Batch) -> Batch:
    """The rows as the trainer passes them to a model on one rank."""
    return slice_batch(rows, sp=1, sp_rank=0)


def in_dtype_of(model: nn.Module, rows: Batch) -> Batch:
    """The rows with floating-point inputs in the dtype of a model."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in rows.items()
    }
