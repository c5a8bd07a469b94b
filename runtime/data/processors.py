"""One way to call the processors of transformers, whatever they call their arguments.

Processors differ in the name of the sounds (`audio`, `audios`), and many take an empty list for an input that is there
with nothing in it, and fail. Here absent inputs are empty lists and names are always `images`, `videos`, `audios`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from patchgen.runtime.data.problems import DataError

AUDIO_NAMES = ("audio", "audios")
PARTS = {
    "images": ("image_processor",),
    "videos": ("video_processor",),
    "audios": ("feature_extractor", "audio_processor"),
}


class ProcessorAdapter:
    """A processor of transformers under one set of names.

    Args:
        processor: a `ProcessorMixin`.

    Attributes:
        modalities: those of images, videos, audios that the processor takes.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        parameters = inspect.signature(processor.__call__).parameters
        audio = next((name for name in AUDIO_NAMES if name in parameters), AUDIO_NAMES[0])
        self._names = {"images": "images", "videos": "videos", "audios": audio}
        self.modalities = tuple(name for name, parts in PARTS.items() if self._part(parts) is not None)

    def _part(self, names: Sequence[str]) -> Any:
        """The first of these parts that the processor has, or None."""
        found = (getattr(self.processor, name, None) for name in names)
        return next((part for part in found if part is not None), None)

    @property
    def sampling_rate(self) -> int:
        """The samples a second that the processor wants of sounds."""
        return self._part(PARTS["audios"]).sampling_rate

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
                raise DataError(
                    f"{type(self.processor).__name__} takes {', '.join(self.modalities) or 'no media'}; the data has {name}."
                )
        present = {self._names[name]: list(items) for name, items in given.items() if len(items)}
        return dict(self.processor(text=[text], **present, return_tensors="pt", **options))
