"""`data.media`: options of the processor, checked against its signature.

media: {min_pixels: 3136, max_pixels: 401408, fps: 1}     for every modality that has an option of that name
media: {images: {max_pixels: 401408}, videos: {max_pixels: 50176}, audios: {sampling_rate: 16000}}
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np
from huggingface_hub.dataclasses import validate_typed_dict
from huggingface_hub.errors import StrictDataclassError

from patchgen.runtime.data.config import DataConfig
from patchgen.runtime.data.media_items import MediaItems, MediaReader
from patchgen.runtime.data.problems import DataError
from patchgen.runtime.data.processors import SUB_PROCESSORS, ProcessorAdapter

FIXED_OPTIONS = {
    "do_sample_frames": "data.media.fps or data.video_fps, and data.max_frames, determine which frames are sampled",
    "num_frames": "data.max_frames limits the number of frames",
    "video_metadata": "it is read from each video",
    "return_metadata": "batches have no field for it",
    "return_tensors": "batches are torch tensors",
    "input_data_format": "images, frames and sounds are always read in one format",
    "device": "samples are prepared on the CPU",
    "load_audio_backend": "sounds are read by PyAV",
    **dict.fromkeys(("images", "videos", "raw_speech", "audio", "audios"), "it is the data"),
}
"""Options that cannot be set, because their values follow from other settings."""


class MediaOptions:
    """The options of `data.media` for one processor.

    Raises:
        DataError: the processor has no option of such a name, or one of another type.
    """

    def __init__(self, config: DataConfig, processor: ProcessorAdapter) -> None:
        self.processor = processor
        self.options_of: dict[str, dict[str, Any]] = {modality: {} for modality in processor.modalities}
        names = {
            modality: processor.option_names(modality) - FIXED_OPTIONS.keys() for modality in processor.modalities
        }
        for key, value in config.media.items():
            if key not in SUB_PROCESSORS:
                for modality in self._modalities_with(key, names):
                    self.options_of[modality].setdefault(key, value)
                continue
            if key not in processor.modalities or not isinstance(value, Mapping):
                modalities = ", ".join(processor.modalities)
                raise DataError(
                    f"data.media.{key} = {value!r}: {processor.name} takes {modalities}; each is a mapping of its options."
                )
            for name, option_value in value.items():
                self._modalities_with(name, {key: names[key]}, prefix=f"{key}.")
                self.options_of[key][name] = option_value
        for modality, options in self.options_of.items():
            self._require_types(modality, options)
        self.fps = self.options_of.get("videos", {}).pop("fps", None) or config.video_fps
        self.sampling_rate = self.options_of.get("audios", {}).pop("sampling_rate", None) or processor.sampling_rate
        self.media_reader = MediaReader(
            processor, fps=self.fps, max_frames=config.max_frames, sampling_rate=self.sampling_rate
        )

    def _modalities_with(self, key: str, names: Mapping[str, frozenset[str]], prefix: str = "") -> list[str]:
        """The modalities that have the option `key`."""
        matching = [modality for modality, known in names.items() if key in known]
        if matching:
            return matching
        if key in FIXED_OPTIONS:
            raise DataError(f"data.media.{prefix}{key} cannot be set: {FIXED_OPTIONS[key]}.")
        known = sorted(set().union(*names.values()) | (SUB_PROCESSORS.keys() if not prefix else set()))
        near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
        suggestion = f"Near: {', '.join(near)}" if near else f"There are: {', '.join(known)}"
        raise DataError(
            f"data.media.{prefix}{key}: {self.processor.name} has no such option for {' or '.join(names) or 'any media'}. "
            f"{suggestion}."
        )

    def _require_types(self, modality: str, options: dict[str, Any]) -> None:
        typed_dict = next(iter(self.processor.option_types(modality)), None)
        if typed_dict is None or not options:
            return
        try:
            validate_typed_dict(
                typed_dict,
                {name: value for name, value in options.items() if name in typed_dict.__annotations__},
            )
        except StrictDataclassError as error:
            raise DataError(
                f"data.media = {options!r} for {modality}: {' '.join(str(error.__cause__ or error).split())}"
            ) from error

    def for_call(self, items: MediaItems) -> dict[str, Any]:
        """The keyword arguments of the processor's call for a sample with these items."""
        options: dict[str, Any] = {"text_kwargs": {"return_offsets_mapping": True, "add_special_tokens": False}}
        if items.images and self.options_of["images"]:
            options["images_kwargs"] = dict(self.options_of["images"])
        if items.videos:
            options["videos_kwargs"] = self._of_videos([metadata for _, metadata in items.videos])
        if items.audios:
            options["audio_kwargs"] = self._of_audios()
        if any(video is not None for video in items.video_of_audio):
            options |= {"load_audio_from_video": True, "audio_from_video_indices": items.video_of_audio}
        return options

    def _of_videos(self, metadata: list[dict[str, Any]]) -> dict[str, Any]:
        # Without the format, a clip that is one or three pixels high would be read as channels first.
        fixed = {"video_metadata": metadata, "do_sample_frames": False, "fps": self.fps}
        return {**fixed, "input_data_format": "channels_last", **self.options_of["videos"]}

    def _of_audios(self) -> dict[str, Any]:
        return {"sampling_rate": self.sampling_rate, **self.options_of["audios"]}

    def require_accepted(self) -> None:
        """Tries the options on an image, a clip and a sound.

        Raises:
            DataError: the processor refuses them, with its message.
        """
        picture = np.linspace(0, 255, 224 * 224 * 3).astype(np.uint8).reshape(224, 224, 3)
        silence = np.zeros(() if self.sampling_rate is None else self.sampling_rate, dtype=np.float32)
        metadata = {"total_num_frames": 8, "fps": self.fps, "duration": 8 / self.fps, "frames_indices": [*range(8)]}
        trials = {
            "images": lambda process: process(images=[picture], return_tensors="pt", **self.options_of["images"]),
            "videos": lambda process: process(
                videos=[np.stack([picture] * 8)], return_tensors="pt", **self._of_videos([metadata])
            ),
            "audios": lambda process: process([silence], return_tensors="pt", **self._of_audios()),
        }
        for modality in self.processor.modalities:
            try:
                trials[modality](self.processor.sub_processor(modality))
            except Exception as error:  # upstream's code may raise anything
                options = self.options_of[modality] | (
                    {"sampling_rate": self.sampling_rate} if modality == "audios" else {}
                )
                raise DataError(
                    f"data.media = {options!r} for {modality}: {type(self.processor.sub_processor(modality)).__name__} refuses it: "
                    f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                ) from error
