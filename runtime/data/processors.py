"""One way to call the processors of transformers, whatever they call their arguments.

Processors differ in the name of the sounds (`audio`, `audios`), and many take an empty list for an input that is there
with nothing in it, and fail. Here absent inputs are empty lists and names are always `images`, `videos`, `audios`. A
processor that is none of transformers' gets those of the options that its call names.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from transformers import ProcessorMixin

from patchgen.runtime.data.problems import DataError

AUDIO_NAMES = ("audio", "audios")
PARTS = {
    "images": ("image_processor",),
    "videos": ("video_processor",),
    "audios": ("feature_extractor", "audio_processor"),
}
SECTIONS = {"images": "images_kwargs", "videos": "videos_kwargs", "audios": "audio_kwargs"}
"""What transformers calls the options of each."""
PLACEHOLDERS = ("image_token", "video_token", "audio_token", "boi_token", "boa_token")


class ProcessorAdapter:
    """A processor of transformers under one set of names.

    Args:
        processor: a `ProcessorMixin`, or anything that is called as one.

    Attributes:
        modalities: those of images, videos, audios that the processor takes.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.name = type(processor).__name__
        self.tokenizer = processor.tokenizer
        self._parameters = frozenset(inspect.signature(processor.__call__).parameters)  # workers are sent it
        audio = next((name for name in AUDIO_NAMES if name in self._parameters), AUDIO_NAMES[0])
        self._names = {"images": "images", "videos": "videos", "audios": audio}
        self.modalities = tuple(name for name in PARTS if self.part(name) is not None)

    def part(self, modality: str) -> Any:
        """The processor's own processor of a modality, or None."""
        found = (getattr(self.processor, name, None) for name in PARTS[modality])
        return next((part for part in found if part is not None), None)

    @property
    def sampling_rate(self) -> int | None:
        """The samples a second that the processor wants of sounds; None: it takes none."""
        return getattr(self.part("audios"), "sampling_rate", None)

    @property
    def placeholders(self) -> frozenset[str]:
        """The tokens that stand for an item in a text."""
        found = (getattr(self.processor, name, None) for name in PLACEHOLDERS)
        return frozenset(token for token in found if token is not None)

    def option_names(self, modality: str) -> frozenset[str]:
        """The options that the processor takes for a modality: its typed ones, and the arguments that its part names."""
        part = self.part(modality)
        whole = getattr(getattr(self.processor, "valid_processor_kwargs", None), "__annotations__", {})
        typed = (getattr(part, "valid_kwargs", None), whole.get(SECTIONS[modality]))
        names = {name for one in typed for name in getattr(one, "__annotations__", {})}
        for call in (type(part).__call__, getattr(part, "preprocess", None)):
            if call is not None:
                parameters = inspect.signature(call).parameters.values()
                names |= {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
        return frozenset(names - {"self"})

    def __call__(
        self,
        text: str,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        **options: Any,
    ) -> dict[str, Any]:
        """The fields of one sample as tensors with a first dimension of one text.

        Args:
            text: with a placeholder for each item, as the chat template makes it.
            images, videos, audios: the items; empty: none.
            options: handed on.

        Raises:
            DataError: the processor takes no items of that kind.
        """
        given = {"images": images, "videos": videos, "audios": audios}
        for name, items in given.items():
            if len(items) and name not in self.modalities:
                raise DataError(f"{self.name} takes {', '.join(self.modalities) or 'no media'}; the data has {name}.")
        present = {self._names[name]: list(items) for name, items in given.items() if len(items)}
        if not isinstance(self.processor, ProcessorMixin):
            options = {name: value for name, value in options.items() if name in self._parameters}
        call: dict[str, Any] = {"text": [text], **present, "return_tensors": "pt", **options}
        return dict(self.processor(**call))
