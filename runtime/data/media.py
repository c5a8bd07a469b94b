"""Reads images, sounds and videos from paths, bytes or arrays; raises MediaError.

A value is a path (relative to the folder of the data), bytes, a `data:` URL, a dict with `bytes` or `path` (as `datasets`
stores them), or already decoded: a PIL image, an array, for sounds a dict with `array` and `sampling_rate`.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAX_LEVEL = 4
"""The largest value of a sound, where 1 is full scale: what lossy files decode to exceeds 1 a little, other units by far."""
MAX_CHANNELS = 8
"""Of a sound as an array: more are taken for samples."""
FILTER_SAMPLES = 64
"""Of silence around a sound, in samples of the lower rate: more than the filter of the resampler takes."""
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
    """An RGB image of PIL, turned upright as its EXIF data say: the pixels of `transformers.image_utils.load_image`."""
    from PIL import Image, ImageOps

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
        return ImageOps.exif_transpose(value).convert("RGB")
    try:
        with Image.open(open_value(value, root)) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise MediaError(f"no readable image: {error}") from error


def load_audio(value: Any, root: Path, *, sampling_rate: int | None) -> np.ndarray:
    """A mono sound `(samples,)` float32, the mean of its channels, resampled to `sampling_rate`; None: not resampled.

    The samples are those of `transformers.audio_utils.load_audio` with its backend soundfile, 1 being full scale; resampled by
    FFmpeg instead of soxr.

    Raises:
        MediaError: there is no sound, or it has values that are no samples.
    """
    if isinstance(value, np.ndarray):
        value = {"array": value}
    if isinstance(value, dict) and value.get("array") is not None:
        if value.get("sampling_rate") is None:
            raise MediaError("a sound as an array without its rate, expected {array, sampling_rate}")
        samples, rate = _mean_of_channels(np.asarray(value["array"])), int(value["sampling_rate"])
    else:
        samples, rate = _decode_audio(value, root)
    if not samples.size:
        raise MediaError("a sound without samples")
    loudest = np.abs(samples).max()
    if not loudest <= MAX_LEVEL:
        found = f"values up to {loudest:.6g}" if np.isfinite(loudest) else "NaN or infinite values"
        raise MediaError(
            f"a sound with {found}, expected numbers in [-1, 1]; decoders may exceed them a little, up to {MAX_LEVEL} is read. To "
            "fix: scale it, or return it as an array of int16 from a data.sources[].transform"
        )
    return samples if sampling_rate in (None, rate) else _resample(samples, rate, sampling_rate)


def _decode_audio(value: Any, root: Path) -> tuple[np.ndarray, int]:
    """The mean of the channels of a file `(samples,)` float32, and its sampling rate."""
    import av
    from av.error import FFmpegError

    pieces, rates = [], set()
    try:
        with av.open(open_value(value, root), "r") as container:
            if not container.streams.audio:
                raise MediaError("no sound in the file")
            for frame in container.decode(audio=0):
                array = frame.to_ndarray()
                channels = array if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels).T
                pieces.append(_as_float(channels).mean(0))
                rates.add(frame.sample_rate)
    except (FFmpegError, OSError) as error:
        raise MediaError(f"no readable sound: {error}") from error
    if len(rates) > 1:
        raise MediaError(f"a sound of several sampling rates, {', '.join(map(str, sorted(rates)))}, expected one")
    return (np.concatenate(pieces), rates.pop()) if pieces else (np.zeros(0, dtype=np.float32), 1)


def _mean_of_channels(array: np.ndarray) -> np.ndarray:
    """The mean of the channels `(samples,)` float32 of an array `(samples,)`, `(channels, samples)` or `(samples, channels)`.

    Raises:
        MediaError: the array has another shape, or which of its dimensions is the channels cannot be told.
    """
    if array.ndim == 2 and array.size:
        is_told = min(array.shape) <= MAX_CHANNELS and (array.shape[0] != array.shape[1] or array.size == 1)
        if is_told:
            return _as_float(array).mean(int(np.argmin(array.shape)))
    if array.ndim != 1:
        raise MediaError(
            f"a sound as an array {array.shape}, expected (samples,), or (channels, samples) or (samples, channels) with up to "
            f"{MAX_CHANNELS} channels and more samples than channels"
        )
    return _as_float(array)


def _resample(samples: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """`(samples,)` float32 at another rate: silence before and after it, as in soxr, where FFmpeg would mirror the sound."""
    import av

    period, new_period = rate // math.gcd(rate, new_rate), new_rate // math.gcd(rate, new_rate)
    periods = -(-FILTER_SAMPLES * max(1, -(-rate // new_rate)) // period)
    silence = np.zeros(periods * period, dtype=np.float32)
    frame = av.AudioFrame.from_ndarray(np.concatenate([silence, samples, silence])[None], format="flt", layout="mono")
    frame.sample_rate = rate
    resampler = av.AudioResampler(format="flt", layout="mono", rate=new_rate)
    frames = [*resampler.resample(frame), *resampler.resample(None)]
    resampled = np.concatenate([piece.to_ndarray().reshape(-1) for piece in frames])
    return resampled[periods * new_period :][: -(-len(samples) * new_rate // rate)]


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
    """The frames with these indices, `(height, width, 3)` uint8, and the number of all frames; others are not kept.

    They are turned upright, as the file says (films of phones), in steps of 90 degrees.
    """
    import av

    wanted, frames, total = set(indices), [], 0
    with av.open(open_value(value, root), "r") as container:
        for frame in container.decode(video=0):
            if total in wanted:
                picture = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
                frames.append(np.ascontiguousarray(picture))
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
