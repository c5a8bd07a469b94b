"""Samples of text and media for one model, made from its config or, where that is silent, by trying upstream's class.

Shapes: B samples, S tokens of the longest sample, P patches, F frames.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from patchgen.runtime import media_sizes
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.verify import head_kinds
from patchgen.runtime.verify.inputs import IGNORED, Case, drawable_ids
from patchgen.runtime.verify.media import (
    AUDIO,
    IMAGE,
    INPUTS,
    REFUSALS,
    VIDEO,
    VIDEO_WITH_AUDIO,
    Item,
    MediaMaker,
    collate_items,
)
from patchgen.runtime.verify.model_pair import perturb

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

MODALITY_IDS = {IMAGE: 1, VIDEO: 2, AUDIO: 3}
"""The modality of a token in `mm_token_type_ids`; 0 is text."""
IMAGE_POSITION_MASK = "image_embeds_position_mask"
"""The argument that marks the positions of images, whatever their tokens are."""
MODALITY_FIELDS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids", IMAGE_POSITION_MASK)
"""The arguments with the modality of each token."""
MAX_TOKENS = 64
"""The most tokens tried for an item whose features no method computes."""


@dataclass(frozen=True)
class PlaceholderLayout:
    """How an item is written in the text."""

    placeholder: int
    start: int | None
    end: int | None
    per_frame: bool = False
    count: int | None = None
    """The tokens of each item, if no method of the model computes its features; 0: text cross-attends to it."""


@dataclass(frozen=True)
class Sample:
    """One row before padding: token ids, the modality of each, labels, and the items in order."""

    ids: list[int]
    types: list[int]
    labels: list[int]
    items: tuple[Item, ...]


class SampleBuilder:
    """Makes samples and batches for one model.

    Args:
        kind: the kind of head whose labels the batches get (`head_kinds`); None: a label per token, as of a language model.

    Attributes:
        layouts: how each modality that upstream takes is written in the text.
        refused: why upstream does not take the others.
        not_implemented: the modalities for which upstream raises NotImplementedError.
    """

    def __init__(self, model: PreTrainedModel, *, seed: int = 0, kind: str | None = None) -> None:
        self.model, self.kind = model, kind
        self.config = model.config
        self.forward_parameters = set(inspect.signature(type(model).forward).parameters)
        self.generator = torch.Generator().manual_seed(seed)
        self.maker = MediaMaker(model, self.generator)
        self.drawable = torch.tensor(drawable_ids(model.config))
        self.layouts: dict[str, PlaceholderLayout] = {}
        self.refused: dict[str, str] = {}
        self.not_implemented: list[str] = []
        for kind in MediaMaker.modalities_of(type(model)):
            try:
                self.layouts[kind] = self._layout(kind)
            except REFUSALS as refusal:
                reraise_machine_failure(refusal)
                self.refused[kind] = one_line_refusal(refusal)
                if isinstance(refusal, NotImplementedError):
                    self.not_implemented.append(kind)

    def batches(self) -> Iterator[tuple[str, tuple[Sample, ...]]]:
        """The batches by name, each with different samples."""
        item = self.maker.item
        if IMAGE in self.layouts:
            yield "images", self._images()
        if VIDEO in self.layouts:
            yield "video", (self.sample([4, item(VIDEO, 0), 5]), self.sample([2, item(VIDEO, 1), 3]))
        if AUDIO in self.layouts:
            yield (
                "audio",
                (
                    self.sample([3, item(AUDIO, 0), 2, item(AUDIO, 1), 4]),
                    self.sample([5, item(AUDIO, 2), 3]),
                ),
            )
        if self.takes_sound:
            yield (
                "sound",
                (
                    self.sample([3, self.maker.video_with_audio(0), 4]),
                    self.sample([2, item(IMAGE, 0), 1, self.maker.video_with_audio(1), 3]),
                ),
            )
        if len(self.layouts) > 1:
            all_kinds: list = [4, *itertools.chain.from_iterable((item(kind, 1), 3) for kind in self.layouts)]
            single_kind = [self.sample([3, item(kind, 0), 4]) for kind in self.layouts]
            yield "mixed", (self.sample(all_kinds), *single_kind, self.sample([10]))

    def _images(self) -> tuple[Sample, ...]:
        """Several images, one, and none if upstream takes that."""
        item = self.maker.item
        if self.layouts[IMAGE].count == 0:  # cross-attention: one for each row
            return self.sample([5, item(IMAGE, 0), 3]), self.sample([2, item(IMAGE, 1), 9])
        several = (
            self.sample([5, item(IMAGE, 0), 3, item(IMAGE, 1), 4]),
            self.sample([item(IMAGE, 2), 6]),
            self.sample([12]),
        )
        return several if self.takes(several) or not self.takes(several[:2]) else several[:2]

    def takes(self, samples: Sequence[Sample]) -> bool:
        """Whether upstream takes a batch of these."""
        try:
            self.run_upstream(self.case("", samples).batch)
        except REFUSALS as error:
            reraise_machine_failure(error)
            return False
        return True

    @property
    def takes_sound(self) -> bool:
        """Whether the model takes videos with their audio."""
        return {IMAGE, VIDEO, AUDIO} <= self.layouts.keys() and "use_audio_in_video" in self.forward_parameters

    # ------------------------------------------------------------------------------------------- one sample

    def sample(self, parts: Sequence[int | Item], layouts: Mapping[str, PlaceholderLayout] | None = None) -> Sample:
        """A row of text (numbers of random tokens) and items, in order; placeholders have no label."""
        layouts = layouts or self.layouts
        ids: list[int] = []
        types: list[int] = []
        items: list[Item] = []
        for part in parts:
            if isinstance(part, int):
                indices = torch.randint(len(self.drawable), (part,), generator=self.generator)
                tokens = self.drawable[indices].tolist()
                ids, types = ids + tokens, types + [0] * part
                continue
            for token, kind in self._item_tokens(part, layouts):
                ids.append(token)
                types.append(kind)
            items += part.parts or [part]
        labels = [
            token if kind == 0 and position > 1 else IGNORED
            for position, (token, kind) in enumerate(zip(ids, types, strict=True))
        ]
        return Sample(ids, types, labels, tuple(items))

    def _item_tokens(self, item: Item, layouts: Mapping[str, PlaceholderLayout]) -> Iterator[tuple[int, int]]:
        """The tokens of an item with the modality of each."""
        if item.kind == VIDEO_WITH_AUDIO:
            yield from self._interleaved(item, layouts)
            return
        layout = layouts[item.kind]
        runs = item.frames if layout.per_frame else 1
        count = self.maker.count(item) // runs if layout.count is None else layout.count
        for frame in range(runs):
            if frame:  # upstream's processors write a time stamp between frames
                yield int(self.drawable[0]), 0
            if count:
                yield self._or_default(layout.start), 0
            yield from ((layout.placeholder, MODALITY_IDS[item.kind]) for _ in range(count))
            if count:
                yield self._or_default(layout.end), 0

    def _or_default(self, token: int | None) -> int:
        return int(self.drawable[1]) if token is None else token

    def _interleaved(self, item: Item, layouts: Mapping[str, PlaceholderLayout]) -> Iterator[tuple[int, int]]:
        """`<vision><audio> ... </audio></vision>` with the placeholders of both; no model reads how they alternate."""
        video, audio = item.parts
        outer, inner = layouts[VIDEO], layouts[AUDIO]
        counts = {VIDEO: self.maker.count(video), AUDIO: self.maker.count(audio)}
        yield self._or_default(outer.start), 0
        yield self._or_default(inner.start), 0
        yield from ((outer.placeholder, MODALITY_IDS[VIDEO]) for _ in range(counts[VIDEO] // 2))
        yield from ((inner.placeholder, MODALITY_IDS[AUDIO]) for _ in range(counts[AUDIO]))
        yield from ((outer.placeholder, MODALITY_IDS[VIDEO]) for _ in range(counts[VIDEO] - counts[VIDEO] // 2))
        yield self._or_default(inner.end), 0
        yield self._or_default(outer.end), 0

    # -------------------------------------------------------------------------------------------- one batch

    def case(self, name: str, samples: Sequence[Sample]) -> Case:
        """Rows padded to the longest, with everything that the forward takes."""
        length = max(len(sample.ids) for sample in samples)
        pad = int(self.drawable[0])

        def padded(rows: Iterable[list[int]], filler: int) -> Tensor:
            return torch.tensor([row + [filler] * (length - len(row)) for row in rows])

        types = padded((sample.types for sample in samples), 0)
        batch: dict[str, Any] = {
            "input_ids": padded((sample.ids for sample in samples), pad),
            "labels": padded((sample.labels for sample in samples), IGNORED),
            "attention_mask": padded(([1] * len(sample.ids) for sample in samples), 0),
            **dict.fromkeys(MODALITY_FIELDS, types),
            **collate_items(item for sample in samples for item in sample.items),
        }
        if "aspect_ratio_mask" in batch:  # each token sees all tiles of the images of its row
            tiles = batch["aspect_ratio_mask"].shape[1:]
            batch["cross_attention_mask"] = torch.ones(*batch["input_ids"].shape, *tiles, dtype=torch.long)
        if "image_attention_mask" in self.forward_parameters and "pixel_values" in batch:
            mask_shape = *batch["input_ids"].shape, batch["pixel_values"].shape[1]
            batch["image_attention_mask"] = torch.ones(mask_shape, dtype=torch.long)
        if any(item.is_part for sample in samples for item in sample.items):
            batch["use_audio_in_video"] = True
        if self.kind is not None:
            batch = head_kinds.head_batch(self.kind, self.config, self.forward_parameters, batch)
        return Case(name, {key: value for key, value in batch.items() if key in self.forward_parameters})

    def packed(self, batch: Mapping[str, Any], samples: Sequence[Sample]) -> Case | None:
        """The samples of a batch in one row; None without multimodal positions, without a label per token, or with videos
        and their audio."""
        source: Any = next(
            (m for m in (self.model, *self.model.children()) if hasattr(m, "compute_3d_position_ids")), None
        )
        has_token_labels = "labels" in batch and batch["labels"].shape == batch["input_ids"].shape
        if source is None or not has_token_labels or batch.get("use_audio_in_video"):
            return None
        embeds = self.model.get_input_embeddings()(batch["input_ids"])
        arguments = {"audio_feature_lengths": _lengths(batch), **batch, "inputs_embeds": embeds}
        parameters = inspect.signature(source.compute_3d_position_ids).parameters
        positions = source.compute_3d_position_ids(**{name: arguments.get(name) for name in parameters})
        source.rope_deltas = None
        if positions is None:
            return None
        mask = batch["attention_mask"].bool()
        rows = torch.cat([torch.arange(len(sample.ids)) for sample in samples])
        packed_positions = torch.cat([rows[None].to(positions), positions[:, mask]])[:, None]
        return self.in_one_row(batch, packed_positions)

    def in_one_row(self, batch: Mapping[str, Any], positions: Tensor) -> Case:
        """The samples of a padded batch in one row, with these position ids `(..., 1, S)`."""
        mask = batch["attention_mask"].bool()
        labels = batch["labels"].clone()
        labels[:, 0] = IGNORED  # the first token of a document has no context
        out = {name: value for name, value in batch.items() if name not in ("attention_mask", "labels")}
        for name in ("input_ids", *MODALITY_FIELDS):
            if name in out:
                out[name] = out[name][mask][None]
        return Case("packed media", {**out, "labels": labels[mask][None], "position_ids": positions})

    def with_host_values(self, batch: Mapping[str, Any]) -> Case | None:
        """A batch with the values that a collator computes on the host: bounds, patch positions and sizes of images and videos.

        None for models without packed patches, for grids that count tokens, and without `transformers.vision_utils`.
        """
        grids = {kind: batch[name] for kind in (IMAGE, VIDEO) if (name := f"{kind}_grid_thw") in batch}
        if not grids or importlib.util.find_spec("transformers.vision_utils") is None:
            return None
        from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

        out = dict(batch)
        for kind, grid in grids.items():
            tower = media_sizes.tower_config(self.config, kind)
            if batch[INPUTS[kind]].shape[1:] == media_sizes.token_shape(tower):
                return None  # grids count tokens: the tower finds the patches itself
            merge = media_sizes.merge_size(tower)
            bounds = get_vision_cu_seqlens(grid)
            out[f"{kind}_cu_seqlens"] = bounds
            out[f"{kind}_max_seqlen"] = int(bounds.diff().max())
            out[f"{kind}_position_ids"] = get_vision_position_ids(grid, merge)
            out[f"{kind}_split_sizes"] = (grid.prod(-1) // merge**2).tolist()
        return Case("handed in", out)

    # --------------------------------------------------------------------------------------- trying upstream

    def run_upstream(self, batch: Mapping[str, Any]) -> Any:
        """The output of upstream's forward, in evaluation mode and without gradients; raises what upstream raises."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self.model(**batch, use_cache=False)
        finally:
            self.model.train(training)

    def _layout(self, kind: str) -> PlaceholderLayout:
        """The first layout that the config allows and upstream takes."""
        item, refusal = self.maker.item(kind, 0), None
        candidates = list(self._candidates(kind)) if self.maker.has_features(kind) else []
        for candidate in candidates:
            sample = self.sample([3, item, 3], {kind: candidate})
            try:
                self.run_upstream(self.case(kind, [sample]).batch)
            except REFUSALS as error:
                reraise_machine_failure(error)
                refusal = error
                continue
            return candidate
        if refusal is not None:
            raise refusal
        return self._search_layout(kind, item)

    def _search_layout(self, kind: str, item: Item) -> PlaceholderLayout:
        """The layout of a modality whose features no method computes, with a number of tokens that upstream takes and uses."""
        accepted, refusal, is_taken = None, ValueError("no number of tokens was tried"), False
        layout = next(self._candidates(kind), PlaceholderLayout(int(self.drawable[2]), None, None))
        for count in range(MAX_TOKENS + 1):
            candidate = replace(layout, count=count)
            batch = self.case(kind, [self.sample([3, item, 3], {kind: candidate})]).batch
            try:
                self.run_upstream(batch)
            except REFUSALS as error:
                reraise_machine_failure(error)
                refusal = error
                if accepted is not None:
                    return accepted
                continue
            is_taken = True
            accepted = candidate if self._affects_logits(kind, batch) else None
            if accepted is not None and not count:  # cross-attention
                return accepted
        if accepted is None:
            raise ValueError(f"upstream's logits are the same whatever the {kind} is") if is_taken else refusal
        return accepted

    def _affects_logits(self, kind: str, batch: Mapping[str, Any]) -> bool:
        """Whether another item changes upstream's logits."""
        original, self.model = self.model, copy.deepcopy(self.model)
        perturb(self.model)  # gates that are initialised to zero block everything
        other_arguments = self.maker.item(kind, 0).arguments
        try:
            logits = [self.run_upstream({**batch, **arguments}).logits for arguments in ({}, other_arguments)]
        finally:
            self.model = original
        return not torch.equal(*logits)

    def _candidates(self, kind: str) -> Iterator[PlaceholderLayout]:
        names = [kind, IMAGE] if kind == VIDEO else [kind]  # some models write video frames with the image placeholder
        for name in names:
            placeholder = self._id(f"{name}_token_id", f"{name}_token_index")
            if placeholder is None:
                continue
            prefixes = [
                f"{kind}_",
                "audio_" if kind == AUDIO else "vision_",
                {IMAGE: "boi", AUDIO: "boa"}.get(kind, ""),
            ]
            start = self._id(*(f"{p}start_token_id" for p in prefixes), "boi_token_index")
            end = self._id(*(f"{p}end_token_id" for p in prefixes), "eoi_token_index")
            for per_frame in (False, True) if kind == VIDEO else (False,):
                yield PlaceholderLayout(placeholder, start, end, per_frame)

    def _id(self, *names: str) -> int | None:
        parts = [getattr(self.config, key, None) for key in self.config.sub_configs]
        for owner in (self.config, *parts):
            token_id = next(
                (candidate for name in names if type(candidate := getattr(owner, name, None)) is int), None
            )
            if token_id is not None:
                return token_id
        return None


def _lengths(batch: Mapping[str, Any]) -> Tensor | None:
    mask = batch.get("feature_attention_mask")
    return None if mask is None else mask.sum(-1)


def one_line_refusal(refusal: Exception) -> str:
    """Upstream's error, for a report."""
    return " ".join(f"{type(refusal).__name__}: {refusal}".split())[:200]
