"""Reads images, sounds and videos from paths, bytes or arrays; raises MediaError.

A value is a path (relative to the folder of the data), bytes, a `data:` URL, a dict with `bytes` or `path` (as `datasets`
stores them), or already decoded: a PIL image, an array, for sounds a dict with `array` and `sampling_rate`.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAX_BYTES_OF_SAMPLE = 4
"""Of sounds as integers: 8, 16 or 32 bits."""
COLOURS = ((), (2,), (3,), (4,))
"""The shape of a pixel: grey, grey and alpha, RGB, RGBA."""


class MediaError(Exception):
    """An image, a sound or a video cannot be read."""


def open_value(value: Any, root: Path) -> io.BytesIO | str:
    """A media value as a stream of bytes, or the path of its file."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | bytearray):
        return io.BytesIO(value)
    if isinstance(value, str) and value.startswith("data:"):
        try:
            return io.BytesIO(base64.b64decode(value.partition(",")[2], validate=True))
        except binascii.Error as error:
            raise MediaError(f"a data: URL that is not base64: {error}") from error
    if isinstance(value, str | Path):
        path = Path(value).expanduser()
        path = path if path.is_absolute() else root / path
        if not path.is_file():
            raise MediaError(f"no file {path}")
        return str(path)
    raise MediaError(f"expected a path, bytes or a dict with one of them, found {type(value).__name__}")


def load_image(value: Any, root: Path) -> Any:
    """An RGB image of PIL."""
    from PIL import Image

    if isinstance(value, np.ndarray):
        if value.dtype not in (np.uint8, np.bool_):  # PIL would cut other values off at 0 and 255
            raise MediaError(f"an image as an array of {value.dtype}, expected uint8")
        if not value.shape[1:] or value.shape[2:] not in COLOURS:
            raise MediaError(
                f"an image as an array {value.shape}, expected (height, width) or (height, width, 3). To fix: return it so from a "
                "data.sources[].transform"
            )
        value = Image.fromarray(value.astype(np.uint8) * 255 if value.dtype == np.bool_ else value)
    if isinstance(value, Image.Image):
        return value.convert("RGB")
    try:
        with Image.open(open_value(value, root)) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise MediaError(f"no readable image: {error}") from error


def load_audio(value: Any, root: Path, *, sampling_rate: int | None) -> np.ndarray:
    """A mono sound `(samples,)` float32 in [-1, 1], resampled to `sampling_rate`; None: not resampled."""
    import av
    from av.error import FFmpegError

    resampler = av.AudioResampler(format="flt", layout="mono", rate=sampling_rate)
    if isinstance(value, dict) and "array" in value:
        array = _as_float(np.asarray(value["array"]))
        if not array.size:
            raise MediaError("a sound without samples")
        if value["sampling_rate"] == sampling_rate and array.ndim == 1:
            return array
        frame = av.AudioFrame.from_ndarray(np.atleast_2d(array).mean(0, keepdims=True), format="flt", layout="mono")
        frame.sample_rate = value["sampling_rate"]
        frames = [*resampler.resample(frame), *resampler.resample(None)]
    else:
        try:
            with av.open(open_value(value, root), "r") as container:
                if not container.streams.audio:
                    raise MediaError("no sound in the file")
                frames = [out for frame in container.decode(audio=0) for out in resampler.resample(frame)]
                frames += resampler.resample(None)
        except (FFmpegError, OSError) as error:
            raise MediaError(f"no readable sound: {error}") from error
    if not sum(frame.samples for frame in frames):
        raise MediaError("a sound without samples")
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames]).astype(np.float32, copy=False)


def _as_float(array: np.ndarray) -> np.ndarray:
    """The samples of a sound as float32; integers are scaled from the full range of their type to [-1, 1]."""
    if array.dtype.kind not in "iu" or not array.size:
        return array.astype(np.float32, copy=False)
    if array.dtype.itemsize > MAX_BYTES_OF_SAMPLE:  # a list of numbers, of which the type is lost
        if np.abs(array).max() > 1:
            raise MediaError(
                f"a sound with integers up to {np.abs(array).max()} of unknown range, expected numbers in [-1, 1] or an array of "
                "int16. To fix: return np.asarray(samples, dtype=np.int16) from a data.sources[].transform"
            )
        return array.astype(np.float32)
    half = 2 ** (array.dtype.itemsize * 8 - 1)
    return ((array.astype(np.float64) - (half if array.dtype.kind == "u" else 0)) / half).astype(np.float32)


def load_video(value: Any, root: Path, *, fps: float, max_frames: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Frames of a video.

    Args:
        value: as in the module's docstring; an array `(frames, height, width, 3)` uint8 has `fps` frames per second.
        fps: frames per second to sample, evenly; fewer if they would exceed `max_frames`.

    Returns:
        `(frames, height, width, 3)` uint8, and the metadata that processors need: number of frames, frames per second and
        duration of the original video, and the indices of the sampled frames.
    """
    from av.error import FFmpegError

    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.shape[3:] != (3,):
            raise MediaError(
                f"a video as an array {value.shape} of {value.dtype}, expected (frames, height, width, 3) of uint8. To fix: "
                "return it so from a data.sources[].transform"
            )
        indices = _sample_indices(len(value), fps, fps=fps, max_frames=max_frames)
        return value[indices], _metadata(len(value), fps, indices, value.shape[1:3])
    try:
        total, rate = _count_packets(value, root)
        rate = rate or fps
        indices = _sample_indices(total, rate, fps=fps, max_frames=max_frames)
        frames, decoded = _decode(value, root, indices)
        if decoded != total:  # packets without a frame, or with several: now the number is known
            indices = _sample_indices(decoded, rate, fps=fps, max_frames=max_frames)
            frames, _ = _decode(value, root, indices)
    except (FFmpegError, OSError) as error:
        raise MediaError(f"no readable video: {error}") from error
    return np.stack(frames), _metadata(decoded, rate, indices, frames[0].shape[:2])


def _count_packets(value: Any, root: Path) -> tuple[int, float]:
    """The number of packets of a video, usually that of its frames, without decoding; frames per second, 0: not known."""
    import av

    with av.open(open_value(value, root), "r") as container:
        if not container.streams.video:
            raise MediaError("no video in the file")
        packets = sum(packet.size > 0 for packet in container.demux(video=0))  # the last one, empty, ends the stream
        return packets, float(container.streams.video[0].average_rate or 0)


def _decode(value: Any, root: Path, indices: Sequence[int]) -> tuple[list[np.ndarray], int]:
    """The frames with these indices, `(height, width, 3)` uint8, and the number of all frames; others are not kept."""
    import av

    wanted, frames, total = set(indices), [], 0
    with av.open(open_value(value, root), "r") as container:
        for frame in container.decode(video=0):
            if total in wanted:
                frames.append(frame.to_ndarray(format="rgb24"))
            total += 1
    return frames, total


def _sample_indices(total: int, rate: float, *, fps: float, max_frames: int) -> list[int]:
    """The indices of frames to use of a video of `total` frames, `rate` per second."""
    if not total:
        raise MediaError("a video without frames")
    count = max(1, min(max_frames, round(total / rate * fps), total))
    return np.linspace(0, total - 1, count).round().astype(int).tolist()


def _metadata(total: int, fps: float, frame_indices: Any, size: tuple[int, int]) -> dict[str, Any]:
    return {
        "total_num_frames": total,
        "fps": fps,
        "duration": total / fps,
        "frames_indices": list(frame_indices),
        "height": size[0],
        "width": size[1],
    }
