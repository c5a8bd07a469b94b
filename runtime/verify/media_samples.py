"""Samples of text and media for one model: what its config says, and what upstream answers where it does not.

Shapes: B samples, S tokens of the longest sample, P patches, F frames.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from patchgen.runtime import media_sizes as layout
from patchgen.runtime.verify.inputs import IGNORED, Case, drawable_ids
from patchgen.runtime.verify.media import AUDIO, IMAGE, INPUTS, REFUSALS, SOUND, VIDEO, Item, MediaMaker, collate_items
from patchgen.runtime.verify.model_pair import perturb

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

TYPE_OF = {IMAGE: 1, VIDEO: 2, AUDIO: 3}
"""The modality of a token in `mm_token_type_ids`; 0 is text."""
PLACES = "image_embeds_position_mask"
"""The argument that says where images stand in the text, whatever their tokens are."""
TYPES = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids", PLACES)
"""The arguments that say the modality of each token."""
MOST_TOKENS = 64
"""Of an item that no method computes features of."""


@dataclass(frozen=True)
class Layout:
    """How an item stands in the text."""

    placeholder: int
    start: int | None
    end: int | None
    per_frame: bool = False
    count: int | None = None
    """The tokens of each item, where no method of the model computes its features; 0: text attends to it from beside."""


@dataclass(frozen=True)
class Sample:
    """One row before padding: token ids, the modality of each, labels, and the items in order."""

    ids: list[int]
    types: list[int]
    labels: list[int]
    items: tuple[Item, ...]


class SampleBuilder:
    """Samples for one model: what its config says, and what upstream answers where it does not.

    Attributes:
        layouts: how each modality that upstream takes stands in the text.
        refused: why upstream takes no other.
        not_implemented: the modalities of which upstream itself says that it does not serve them.
    """

    def __init__(self, model: PreTrainedModel, *, seed: int = 0) -> None:
        self.model = model
        self.config = model.config
        self.known = set(inspect.signature(type(model).forward).parameters)
        self.generator = torch.Generator().manual_seed(seed)
        self.maker = MediaMaker(model, self.generator)
        self.drawable = torch.tensor(drawable_ids(model.config))
        self.layouts: dict[str, Layout] = {}
        self.refused: dict[str, str] = {}
        self.not_implemented: list[str] = []
        for kind in MediaMaker.modalities_of(type(model)):
            try:
                self.layouts[kind] = self._layout(kind)
            except REFUSALS as refusal:
                self.refused[kind] = refusal_in_a_line(refusal)
                if isinstance(refusal, NotImplementedError):
                    self.not_implemented.append(kind)

    def batches(self) -> Iterator[tuple[str, tuple[Sample, ...]]]:
        """The batches by name, each of samples that differ."""
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
                    self.sample([3, self.maker.sound(0), 4]),
                    self.sample([2, item(IMAGE, 0), 1, self.maker.sound(1), 3]),
                ),
            )
        if len(self.layouts) > 1:
            together = [item(kind, 1) for kind in self.layouts]
            alone = [self.sample([3, item(kind, 0), 4]) for kind in self.layouts]
            row: list = [4]
            for one in together:
                row += [one, 3]
            yield "mixed", (self.sample(row), *alone, self.sample([10]))

    def _images(self) -> tuple[Sample, ...]:
        """Several images, one, and none where upstream takes that."""
        item = self.maker.item
        if self.layouts[IMAGE].count == 0:  # beside the text: one for each row
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
            self.ask(self.case("", samples).batch)
        except REFUSALS:
            return False
        return True

    @property
    def takes_sound(self) -> bool:
        """Whether the model knows videos that bring their audio."""
        return {IMAGE, VIDEO, AUDIO} <= self.layouts.keys() and "use_audio_in_video" in self.known

    # ------------------------------------------------------------------------------------------- one sample

    def sample(self, parts: Sequence[int | Item], layouts: Mapping[str, Layout] | None = None) -> Sample:
        """A row of text (a number of tokens) and items, in order; placeholders carry no label."""
        layouts = layouts or self.layouts
        ids: list[int] = []
        types: list[int] = []
        items: list[Item] = []
        for part in parts:
            if isinstance(part, int):
                drawn = torch.randint(len(self.drawable), (part,), generator=self.generator)
                tokens = self.drawable[drawn].tolist()
                ids, types = ids + tokens, types + [0] * part
                continue
            for token, kind in self._run(part, layouts):
                ids.append(token)
                types.append(kind)
            items += part.parts or [part]
        labels = [
            token if kind == 0 and position > 1 else IGNORED
            for position, (token, kind) in enumerate(zip(ids, types, strict=True))
        ]
        return Sample(ids, types, labels, tuple(items))

    def _run(self, item: Item, layouts: Mapping[str, Layout]) -> Iterator[tuple[int, int]]:
        """The tokens of an item with the modality of each."""
        if item.kind == SOUND:
            yield from self._interleaved(item, layouts)
            return
        layout = layouts[item.kind]
        runs = item.frames if layout.per_frame else 1
        count = self.maker.count(item) // runs if layout.count is None else layout.count
        for frame in range(runs):
            if frame:  # upstream's processors write a time stamp between frames
                yield int(self.drawable[0]), 0
            if count:
                yield self._mark(layout.start), 0
            yield from ((layout.placeholder, TYPE_OF[item.kind]) for _ in range(count))
            if count:
                yield self._mark(layout.end), 0

    def _mark(self, token: int | None) -> int:
        return int(self.drawable[1]) if token is None else token

    def _interleaved(self, item: Item, layouts: Mapping[str, Layout]) -> Iterator[tuple[int, int]]:
        """`<vision><audio> ... </audio></vision>`: the placeholders of both, in turn; no model reads their order here."""
        video, audio = item.parts
        outer, inner = layouts[VIDEO], layouts[AUDIO]
        counts = {VIDEO: self.maker.count(video), AUDIO: self.maker.count(audio)}
        yield self._mark(outer.start), 0
        yield self._mark(inner.start), 0
        yield from ((outer.placeholder, TYPE_OF[VIDEO]) for _ in range(counts[VIDEO] // 2))
        yield from ((inner.placeholder, TYPE_OF[AUDIO]) for _ in range(counts[AUDIO]))
        yield from ((outer.placeholder, TYPE_OF[VIDEO]) for _ in range(counts[VIDEO] - counts[VIDEO] // 2))
        yield self._mark(inner.end), 0
        yield self._mark(outer.end), 0

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
            **dict.fromkeys(TYPES, types),
            **collate_items(item for sample in samples for item in sample.items),
        }
        if "aspect_ratio_mask" in batch:  # each token sees all tiles of the images of its row
            tiles = batch["aspect_ratio_mask"].shape[1:]
            batch["cross_attention_mask"] = torch.ones(*batch["input_ids"].shape, *tiles, dtype=torch.long)
        if "image_attention_mask" in self.known and "pixel_values" in batch:
            seen = *batch["input_ids"].shape, batch["pixel_values"].shape[1]
            batch["image_attention_mask"] = torch.ones(seen, dtype=torch.long)
        if any(item.inside for sample in samples for item in sample.items):
            batch["use_audio_in_video"] = True
        return Case(name, {key: value for key, value in batch.items() if key in self.known})

    def packed(self, batch: Mapping[str, Any], samples: Sequence[Sample]) -> Case | None:
        """The samples of a batch in one row; None for models without multimodal positions."""
        source: Any = next(
            (m for m in (self.model, *self.model.children()) if hasattr(m, "compute_3d_position_ids")), None
        )
        if source is None or batch.get("use_audio_in_video"):
            return None
        wanted = set(inspect.signature(source.compute_3d_position_ids).parameters)
        embeds = self.model.get_input_embeddings()(batch["input_ids"])
        known = {"audio_feature_lengths": _lengths(batch), **batch, "inputs_embeds": embeds}
        positions = source.compute_3d_position_ids(**{name: known.get(name) for name in wanted})
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
        for name in ("input_ids", *TYPES):
            if name in out:
                out[name] = out[name][mask][None]
        return Case("packed media", {**out, "labels": labels[mask][None], "position_ids": positions})

    def handed_in(self, batch: Mapping[str, Any]) -> Case | None:
        """A batch with what a collator computes on the host: bounds, patch positions and sizes of each image and video.

        None for models without packed patches.
        """
        grids = {kind: batch[name] for kind in (IMAGE, VIDEO) if (name := f"{kind}_grid_thw") in batch}
        if not grids or importlib.util.find_spec("transformers.vision_utils") is None:
            return None
        from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

        out = dict(batch)
        for kind, grid in grids.items():
            tower = layout.tower_config(self.config, kind)
            if batch[INPUTS[kind]].shape[1:] == layout.token_shape(tower):
                return None  # grids count tokens: the tower finds the patches itself
            merge = layout.merge_size(tower)
            bounds = get_vision_cu_seqlens(grid)
            out[f"{kind}_cu_seqlens"] = bounds
            out[f"{kind}_max_seqlen"] = int(bounds.diff().max())
            out[f"{kind}_position_ids"] = get_vision_position_ids(grid, merge)
            out[f"{kind}_split_sizes"] = (grid.prod(-1) // merge**2).tolist()
        return Case("handed in", out)

    # --------------------------------------------------------------------------------------- asking upstream

    def ask(self, batch: Mapping[str, Any]) -> Any:
        """What upstream's forward returns for a batch; raises what upstream raises."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self.model(**batch, use_cache=False)
        finally:
            self.model.train(training)

    def _layout(self, kind: str) -> Layout:
        """The first of the layouts that the config allows which upstream takes."""
        item = self.maker.item(kind, 0)
        if not self.maker.has_features(kind):
            return self._found_layout(kind, item)
        self.maker.count(item)
        refusal: Exception = ValueError(f"the config names no placeholder token for {kind}")
        for candidate in self._candidates(kind):
            sample = self.sample([3, item, 3], {kind: candidate})
            try:
                self.ask(self.case(kind, [sample]).batch)
            except REFUSALS as error:
                refusal = error
                continue
            return candidate
        raise refusal

    def _found_layout(self, kind: str, item: Item) -> Layout:
        """The layout of a modality that no method computes features of: so many tokens as upstream takes, and reads."""
        found, refusal, is_taken = None, ValueError("no number of tokens was tried"), False
        known = next(self._candidates(kind), Layout(int(self.drawable[2]), None, None))
        for count in range(MOST_TOKENS + 1):
            candidate = replace(known, count=count)
            batch = self.case(kind, [self.sample([3, item, 3], {kind: candidate})]).batch
            try:
                self.ask(batch)
            except REFUSALS as error:
                refusal = error
                if found is not None:
                    return found
                continue
            is_taken = True
            found = candidate if self._is_read(kind, batch) else None
            if found is not None and not count:  # it stands beside the text
                return found
        if found is None:
            raise ValueError(f"upstream's logits are the same whatever the {kind} is") if is_taken else refusal
        return found

    def _is_read(self, kind: str, batch: Mapping[str, Any]) -> bool:
        """Whether upstream's logits tell an item from another."""
        fresh, self.model = self.model, copy.deepcopy(self.model)
        perturb(self.model)  # gates that begin at zero let nothing through
        try:
            found = [self.ask({**batch, **more}).logits for more in ({}, self.maker.item(kind, 0).arguments)]
        finally:
            self.model = fresh
        return not torch.equal(*found)

    def _candidates(self, kind: str) -> Iterator[Layout]:
        names = [kind, IMAGE] if kind == VIDEO else [kind]  # some write video frames with the images' placeholder
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
                yield Layout(placeholder, start, end, per_frame)

    def _id(self, *names: str) -> int | None:
        parts = [getattr(self.config, key, None) for key in self.config.sub_configs]
        for owner in (self.config, *parts):
            found = next((one for name in names if type(one := getattr(owner, name, None)) is int), None)
            if found is not None:
                return found
        return None


def _lengths(batch: Mapping[str, Any]) -> Tensor | None:
    mask = batch.get("feature_attention_mask")
    return None if mask is None else mask.sum(-1)


def refusal_in_a_line(refusal: Exception) -> str:
    """What upstream said, for a report."""
    return " ".join(f"{type(refusal).__name__}: {refusal}".split())[:200]
