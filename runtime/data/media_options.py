"""`data.media`: options that the processor takes, checked against its signature.

media: {min_pixels: 3136, max_pixels: 401408, fps: 1}     of every modality that has an option of that name
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
from patchgen.runtime.data.items import ItemReader, Items
from patchgen.runtime.data.problems import DataError
from patchgen.runtime.data.processors import PARTS, SECTIONS, ProcessorAdapter

SET_HERE = {
    "do_sample_frames": "data.media.fps and data.max_frames say which frames are taken",
    "num_frames": "data.max_frames says how many frames are taken",
    "video_metadata": "it is read from each video",
    "return_metadata": "batches have no place for it",
    "return_tensors": "batches are torch's",
    "input_data_format": "images, frames and sounds are read to one form",
    "device": "samples are prepared on the host",
    "load_audio_backend": "sounds are read by PyAV",
    **dict.fromkeys(("images", "videos", "raw_speech", "audio", "audios"), "it is the data"),
}
"""Options with values that follow from elsewhere."""


class MediaOptions:
    """The options of `data.media` for one processor.

    Raises:
        DataError: it takes no option of such a name, or not such a value.
    """

    def __init__(self, config: DataConfig, processor: ProcessorAdapter) -> None:
        self.processor = processor
        self.of: dict[str, dict[str, Any]] = {modality: {} for modality in processor.modalities}
        names = {modality: processor.option_names(modality) - SET_HERE.keys() for modality in processor.modalities}
        for key, value in config.media.items():
            if key not in PARTS:
                for modality in self._takers(key, names):
                    self.of[modality].setdefault(key, value)
                continue
            if key not in processor.modalities or not isinstance(value, Mapping):
                taken = ", ".join(processor.modalities)
                raise DataError(
                    f"data.media.{key} = {value!r}: {processor.name} takes {taken}; each is a mapping of its options."
                )
            for name, one in value.items():
                self._takers(name, {key: names[key]}, prefix=f"{key}.")
                self.of[key][name] = one
        for modality, options in self.of.items():
            self._require_types(modality, options)
        self.fps = self.of.get("videos", {}).pop("fps", None) or config.video_fps
        self.sampling_rate = self.of.get("audios", {}).pop("sampling_rate", None) or processor.sampling_rate
        self.reader = ItemReader(
            processor, fps=self.fps, max_frames=config.max_frames, sampling_rate=self.sampling_rate
        )

    def _takers(self, key: str, names: Mapping[str, frozenset[str]], prefix: str = "") -> list[str]:
        """The modalities that have the option."""
        takers = [modality for modality, known in names.items() if key in known]
        if takers:
            return takers
        if key in SET_HERE:
            raise DataError(f"data.media.{prefix}{key} cannot be set: {SET_HERE[key]}.")
        known = sorted(set().union(*names.values()) | (PARTS.keys() if not prefix else set()))
        near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
        found = f"Near: {', '.join(near)}" if near else f"There are: {', '.join(known)}"
        raise DataError(
            f"data.media.{prefix}{key}: {self.processor.name} has no such option for {' or '.join(names) or 'any media'}. "
            f"{found}."
        )

    def _require_types(self, modality: str, options: dict[str, Any]) -> None:
        typed = getattr(self.processor.part(modality), "valid_kwargs", None)
        whole = getattr(getattr(self.processor.processor, "valid_processor_kwargs", None), "__annotations__", {})
        typed = typed or whole.get(SECTIONS[modality])
        if typed is None or not options:
            return
        try:
            validate_typed_dict(typed, {name: one for name, one in options.items() if name in typed.__annotations__})
        except StrictDataclassError as error:
            raise DataError(
                f"data.media = {options!r} for {modality}: {' '.join(str(error.__cause__ or error).split())}"
            ) from error

    def for_call(self, items: Items) -> dict[str, Any]:
        """The keyword arguments of the processor's call for a sample with these items."""
        options: dict[str, Any] = {"text_kwargs": {"return_offsets_mapping": True, "add_special_tokens": False}}
        if items.images and self.of["images"]:
            options["images_kwargs"] = dict(self.of["images"])
        if items.videos:
            options["videos_kwargs"] = self._of_videos([metadata for _, metadata in items.videos])
        if items.audios:
            options["audio_kwargs"] = self._of_audios()
        if any(video is not None for video in items.of_videos):
            options |= {"load_audio_from_video": True, "audio_from_video_indices": items.of_videos}
        return options

    def _of_videos(self, metadata: list[dict[str, Any]]) -> dict[str, Any]:
        # A clip that is one or three pixels high would be taken for one with its channels in front.
        given = {"video_metadata": metadata, "do_sample_frames": False, "fps": self.fps}
        return {**given, "input_data_format": "channels_last", **self.of["videos"]}

    def _of_audios(self) -> dict[str, Any]:
        return {"sampling_rate": self.sampling_rate, **self.of["audios"]}

    def require_accepted(self) -> None:
        """Tries the options on an image, a clip and a sound.

        Raises:
            DataError: the processor refuses them, in its own words.
        """
        picture = np.linspace(0, 255, 224 * 224 * 3).astype(np.uint8).reshape(224, 224, 3)
        silence = np.zeros(() if self.sampling_rate is None else self.sampling_rate, dtype=np.float32)
        metadata = {"total_num_frames": 8, "fps": self.fps, "duration": 8 / self.fps, "frames_indices": [*range(8)]}
        trials = {
            "images": lambda part: part(images=[picture], return_tensors="pt", **self.of["images"]),
            "videos": lambda part: part(
                videos=[np.stack([picture] * 8)], return_tensors="pt", **self._of_videos([metadata])
            ),
            "audios": lambda part: part([silence], return_tensors="pt", **self._of_audios()),
        }
        for modality in self.processor.modalities:
            try:
                trials[modality](self.processor.part(modality))
            except Exception as error:  # it is upstream's code: what it raises is not known
                given = self.of[modality] | ({"sampling_rate": self.sampling_rate} if modality == "audios" else {})
                raise DataError(
                    f"data.media = {given!r} for {modality}: {type(self.processor.part(modality)).__name__} refuses it: "
                    f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                ) from error
