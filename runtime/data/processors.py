"""One interface for the processors of transformers.

Processors differ in the name of the argument for sounds (`audio`, `audios`), and many fail on empty lists. Here names
are always `images`, `videos`, `audios`, and empty lists are left out. A processor that is not a
`ProcessorMixin` gets only the options that its call names.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from transformers import ProcessorMixin

from patchgen.runtime.data.problems import DataError

AUDIO_NAMES = ("audio", "audios")
SUB_PROCESSORS = {
    "images": ("image_processor",),
    "videos": ("video_processor",),
    "audios": ("feature_extractor", "audio_processor"),
}
KWARGS_NAMES = {"images": "images_kwargs", "videos": "videos_kwargs", "audios": "audio_kwargs"}
"""The argument of transformers' processors that holds the options of each modality."""
PLACEHOLDERS = ("image_token", "video_token", "audio_token", "boi_token", "boa_token")


class ProcessorAdapter:
    """A processor of transformers with one set of argument names.

    Args:
        processor: a `ProcessorMixin`, or a callable with the same arguments, a `tokenizer` and the image, video or audio
            processors of its modalities as attributes.

    Attributes:
        modalities: which of images, videos, audios the processor takes.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.name = type(processor).__name__
        self.tokenizer = processor.tokenizer
        self._parameters = frozenset(inspect.signature(processor.__call__).parameters)
        audio = next((name for name in AUDIO_NAMES if name in self._parameters), AUDIO_NAMES[0])
        self._names = {"images": "images", "videos": "videos", "audios": audio}
        self.modalities = tuple(name for name in SUB_PROCESSORS if self.sub_processor(name) is not None)

    def sub_processor(self, modality: str) -> Any:
        """The image, video or audio processor, or None."""
        sub_processors = (getattr(self.processor, name, None) for name in SUB_PROCESSORS[modality])
        return next((sub_processor for sub_processor in sub_processors if sub_processor is not None), None)

    @property
    def sampling_rate(self) -> int | None:
        """The sampling rate that the processor expects; None: it takes no sounds."""
        return getattr(self.sub_processor("audios"), "sampling_rate", None)

    @property
    def placeholders(self) -> frozenset[str]:
        """The tokens that stand for media in a text."""
        tokens = (getattr(self.processor, name, None) for name in PLACEHOLDERS)
        return frozenset(token for token in tokens if token is not None)

    def option_types(self, modality: str) -> list[Any]:
        """The typed dicts of the options of a modality: the sub-processor's, then the processor's."""
        of_processor = getattr(getattr(self.processor, "valid_processor_kwargs", None), "__annotations__", {})
        types = (getattr(self.sub_processor(modality), "valid_kwargs", None), of_processor.get(KWARGS_NAMES[modality]))
        return [option_type for option_type in types if hasattr(option_type, "__annotations__")]

    def option_names(self, modality: str) -> frozenset[str]:
        """The options that the processor takes for a modality: typed ones, and arguments of the sub-processor."""
        sub_processor = self.sub_processor(modality)
        names = {name for option_type in self.option_types(modality) for name in option_type.__annotations__}
        for call in (type(sub_processor).__call__, getattr(sub_processor, "preprocess", None)):
            if call is not None:
                parameters = inspect.signature(call).parameters.values()
                names |= {
                    parameter.name
                    for parameter in parameters
                    if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
                }
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
        """The fields of one sample; those per token have a batch dimension of 1.

        Args:
            text: with a placeholder for each item, as the chat template renders it.
            options: passed to the processor.

        Raises:
            DataError: the processor takes no media of that kind.
        """
        media = {"images": images, "videos": videos, "audios": audios}
        for name, items in media.items():
            if len(items) and name not in self.modalities:
                raise DataError(f"{self.name} takes {', '.join(self.modalities) or 'no media'}; the data has {name}.")
        present = {self._names[name]: list(items) for name, items in media.items() if len(items)}
        if not isinstance(self.processor, ProcessorMixin):
            options = {name: value for name, value in options.items() if name in self._parameters}
        arguments: dict[str, Any] = {"text": [text], **present, "return_tensors": "pt", **options}
        return dict(self.processor(**arguments))
