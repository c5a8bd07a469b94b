"""What the trainer would hand to a model, and the same content as upstream takes it: document by document.

documents      rows of their own, upstream's arguments only: the reference
packed row     the same documents one after the other, as the collator makes it: positions, lengths
padded rows    an attention mask, zeros behind or before the tokens

B rows   S tokens per row   n tokens of a document
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.runtime.data.collate import collate
from patchgen.runtime.parallel.batch import IGNORED, slice_batch
from patchgen.runtime.verify import field_semantics as sizes
from patchgen.runtime.verify.inputs import drawable_ids
from patchgen.runtime.verify.media_samples import TYPES, SampleBuilder
from patchgen.runtime.verify.multimodal_inputs import takes_media

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Batch = dict[str, Any]

LENGTHS = (9, 15, 2, 12)
"""Of the documents of a packed row: longer and shorter than a window, none that a chunk or a row divides."""
NUM_PADDED = 7


@dataclass(frozen=True)
class Documents:
    """Documents as rows `(1, n)` of their own, with `labels` not yet shifted and what else upstream's forward takes."""

    rows: tuple[Batch, ...]
    together: Batch | None = None
    """The same as one padded batch, where upstream's own result of a document depends on what else is in the batch: towers
    that pad sounds to the longest."""

    def whole_batch(self) -> Batch:
        """All documents as one padded batch."""
        if self.together is None:
            raise ValueError("These documents are rows of their own: nothing was made of them together.")
        return self.together

    def reference(self) -> list[Batch]:
        """What upstream is handed."""
        return [self.together] if self.together is not None else list(self.rows)

    def packed(self, positions: Any = None) -> Batch:
        """One row of all documents as the data pipeline makes it.

        Args:
            positions: the model's position function (`get_position_id_func()`); None: positions count.
        """
        return collate([_sample(row, positions) for row in self.rows], pad_to=None, pad_token_id=0)

    def bounds(self) -> list[slice]:
        """The places of the documents in the packed row."""
        found, start = [], 0
        for row in self.rows:
            found.append(slice(start, start + row["input_ids"].shape[1]))
            start = found[-1].stop
        return found


def _sample(row: Mapping[str, Any], positions: Any) -> Batch:
    """A document as data workers hand it to the collator."""
    sample = {
        name: value for name, value in row.items() if isinstance(value, Tensor) and name not in ("attention_mask",)
    }
    for name in ("input_ids", "labels", *TYPES):
        if name in sample:
            sample[name] = sample[name][0]
    text = torch.arange(len(sample["input_ids"]))
    sample["position_ids"] = text
    if positions is not None:
        known = {name: value for name, value in row.items() if isinstance(value, Tensor) and name != "labels"}
        found = positions(**known)["position_ids"]
        sample["position_ids"] = torch.cat([text[None].to(found.dtype), found.reshape(3, -1)])
    return sample


class TextDraw:
    """Seeded ids that mean nothing special to a model, and labels of some of them."""

    def __init__(self, config: PreTrainedConfig, seed: int = 1) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.drawable = torch.tensor(drawable_ids(config))

    def ids(self, rows: int, length: int) -> Tensor:
        """Ids `(rows, length)` int64."""
        return self.drawable[torch.randint(len(self.drawable), (rows, length), generator=self.generator)]

    def others(self, ids: Tensor) -> Tensor:
        """Ids of the same shape, none of them the same."""
        step = 1 + int(torch.randint(len(self.drawable) - 1, (), generator=self.generator))
        return self.drawable[(torch.searchsorted(self.drawable, ids.contiguous()) + step) % len(self.drawable)]

    def labels(self, ids: Tensor) -> Tensor:
        """The ids, some of them ignored; never the second of a row, so that each document has a label."""
        ignored = torch.rand(ids.shape, generator=self.generator) < 0.2
        ignored[:, 1] = False
        return ids.masked_fill(ignored, IGNORED)


def plain_rows(draw: TextDraw) -> Batch:
    """Two rows of one document each, `(2, S)`."""
    ids = draw.ids(2, sizes.SEQUENCE)
    return {"input_ids": ids, "labels": draw.labels(ids)}


def text_documents(draw: TextDraw) -> Documents:
    """Documents of `LENGTHS` tokens."""
    rows = []
    for length in LENGTHS:
        ids = draw.ids(1, length)
        rows.append({"input_ids": ids, "labels": draw.labels(ids)})
    return Documents(tuple(rows))


def padded_rows(rows: Batch, *, left: bool) -> Batch:
    """The rows with the second shorter by `NUM_PADDED` tokens, which are padding behind it, or before."""
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


def changed(rows: Mapping[str, Any], place: slice, draw: TextDraw) -> Batch:
    """The rows with other tokens in one place."""
    ids = rows["input_ids"].clone()
    ids[:, place] = draw.others(ids[:, place])
    return {**rows, "input_ids": ids}


def without_labels(rows: Mapping[str, Any]) -> Batch:
    """What gives logits instead of a loss."""
    return {name: value for name, value in rows.items() if name not in ("labels", "shift_labels")}


def num_labels(rows: Mapping[str, Any]) -> int:
    """The labels that count, shifted: the first of a row is nobody's target."""
    return int((rows["labels"][:, 1:] != IGNORED).sum())


def media_documents(model: PreTrainedModel) -> dict[str, Documents]:
    """The media batches of a model sample by sample, by name; empty for models that take none.

    Args:
        model: upstream's head from the small config. What it refuses alone is left out: the eager proof has the reason.
    """
    if not takes_media(type(model)):
        return {}
    builder = SampleBuilder(model)
    found = {}
    for name, samples in builder.batches():
        if any(item.inside for sample in samples for item in sample.items):
            continue  # whether a video brings its audio is one flag for all of a batch
        samples = [sample for sample in samples if sample.items or builder.takes([sample])]
        rows = tuple(dict(builder.case(name, [sample]).batch) for sample in samples)
        if not all(builder.takes([sample]) for sample in samples):
            continue
        found[name] = Documents(rows, dict(builder.case(name, samples).batch))
    return found


def same_rows(documents: Sequence[Documents]) -> list[Batch]:
    """The rows of several sets of documents, one after the other."""
    return [row for one in documents for row in one.rows]


def handed(rows: Batch) -> Batch:
    """The rows as the trainer hands them to a model, on one rank."""
    return slice_batch(rows, sp=1, sp_rank=0)


def in_dtype_of(model: nn.Module, rows: Batch) -> Batch:
    """The rows with floating-point inputs in the dtype of a model."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in rows.items()
    }
