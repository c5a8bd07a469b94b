"""Images, sounds and videos of every form against transformers' own loaders, and against what was written into the files."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path

import numpy as np
import pytest
from transformers import image_utils

from patchgen.runtime.data.media import MediaError, load_audio, load_image, load_video

Image = pytest.importorskip("PIL.Image")
av = pytest.importorskip("av")

HERE = Path()
EXIF_ORIENTATION = 0x0112
RATE = 16000


# ------------------------------------------------------------------------------------------------------------ images


def picture(mode: str, size: tuple[int, int] = (7, 5)):
    """Random pixels in a mode of PIL."""
    width, height = size
    rng = np.random.default_rng(0)
    if mode.startswith("I;16"):
        return Image.fromarray(rng.integers(0, 2**16, (height, width), dtype=np.uint16))
    colours = Image.fromarray(rng.integers(0, 256, (height, width, 4), dtype=np.uint8), mode="RGBA")
    return colours.convert("RGB").quantize(8) if mode == "P" else colours.convert(mode)


PICTURES = {
    **{f"{mode} as png": (mode, "png", {}) for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")},
    "transparent palette": ("P", "png", {"transparency": 0}),
    "CMYK as jpeg": ("CMYK", "jpeg", {}),
    "CMYK as tiff": ("CMYK", "tiff", {}),
    "palette as gif": ("P", "gif", {}),
    "RGB as bmp": ("RGB", "bmp", {}),
    "RGBA as webp": ("RGBA", "webp", {"lossless": True}),
    **{f"jpeg, orientation {number}": ("RGB", "jpeg", {"orientation": number}) for number in range(1, 9)},
    **{f"png, orientation {number}": ("RGB", "png", {"orientation": number}) for number in (1, 6)},
    "one pixel": ("RGB", "png", {"size": (1, 1)}),
    "one grey pixel": ("L", "png", {"size": (1, 1)}),
    "one row, turned": ("RGB", "png", {"size": (9, 1), "orientation": 8}),
}


@pytest.mark.parametrize("case", PICTURES)
def test_pictures_of_every_form_have_the_pixels_of_transformers(tmp_path, case):
    """Those of phones were left sideways."""
    mode, suffix, options = PICTURES[case]
    exif = Image.Exif()
    if "orientation" in options:
        exif[EXIF_ORIENTATION] = options["orientation"]
    saving = {name: value for name, value in options.items() if name not in ("orientation", "size")}
    file = tmp_path / f"x.{suffix}"
    original = picture(mode, options.get("size", (7, 5)))
    original.save(file, format=suffix, **saving, **({"exif": exif} if exif else {}))
    expected = np.asarray(image_utils.load_image(str(file)))
    if options.get("orientation", 1) >= 5:
        assert expected.shape[:2] == original.size  # turned by a quarter

    content = file.read_bytes()
    url = f"data:image/{suffix};base64,{base64.b64encode(content).decode()}"
    forms = {"name": file.name, "path": file, "bytes": content, "url": url, "struct": {"bytes": content, "path": None}}
    for form, value in forms.items():
        assert np.array_equal(np.asarray(load_image(value, tmp_path)), expected), form
    decoded = Image.open(io.BytesIO(content))
    assert np.array_equal(np.asarray(load_image(decoded, HERE)), expected)
    assert np.array_equal(np.asarray(load_image(image_utils.load_image(str(file)), HERE)), expected)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA"])
def test_pictures_as_arrays_have_the_pixels_of_transformers(mode):
    decoded = picture(mode)
    expected = np.asarray(image_utils.load_image(decoded))
    assert np.array_equal(np.asarray(load_image(np.asarray(decoded), HERE)), expected)


# ------------------------------------------------------------------------------------------------------------ sounds


def channels_of(count: int, samples: int = 4000, rate: int = RATE) -> np.ndarray:
    """`(count, samples)` float64 in [-1, 1]: channels of which the loud ones agree, so that their sum exceeds 1."""
    time = np.arange(samples) / rate
    common = 0.6 * np.sin(2 * np.pi * 440 * time)
    return np.stack([common + 0.3 * np.sin(2 * np.pi * (200 + 90 * number) * time) for number in range(count)])


def write_pcm(file: Path, channels: np.ndarray, num_bytes: int, rate: int = RATE) -> np.ndarray:
    """Writes integers of 1 to 4 bytes; returns the channels as they are stored, full scale being 1."""
    half = 2 ** (8 * num_bytes - 1)
    values = np.clip(np.round(channels * half), -half, half - 1).astype(np.int64)
    unsigned = (values + half if num_bytes == 1 else values).T.astype("<i4")
    content = unsigned.reshape(-1, 1).view(np.uint8).reshape(-1, 4)[:, :num_bytes]
    with wave.open(str(file), "wb") as out:
        out.setnchannels(len(channels))
        out.setsampwidth(num_bytes)
        out.setframerate(rate)
        out.writeframes(content.tobytes())
    return values / half


def write_float(file: Path, channels: np.ndarray, codec: str, rate: int = RATE) -> np.ndarray:
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(channels)]
    dtype, form = {"pcm_f32le": (np.float32, "flt"), "pcm_f64le": (np.float64, "dbl")}[codec]
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(channels.T.astype(dtype).reshape(1, -1), format=form, layout=layout)
        frame.sample_rate = rate
        container.mux([*stream.encode(frame), *stream.encode(None)])
    return channels.astype(dtype)


WRITERS = {
    **{f"{8 * n} bit": lambda file, channels, n=n, **rate: write_pcm(file, channels, n, **rate) for n in (1, 2, 3, 4)},
    **{
        codec: lambda file, channels, codec=codec: write_float(file, channels, codec)
        for codec in ("pcm_f32le", "pcm_f64le")
    },
}


@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("form", WRITERS)
def test_sounds_of_every_form_are_the_mean_of_their_channels(tmp_path, form, count):
    """As of transformers' loader. Stereo was louder by the square root of 2, 5.1 left [-1, 1]."""
    file = tmp_path / "x.wav"
    stored = WRITERS[form](file, channels_of(count))
    expected = stored.mean(0)
    content = file.read_bytes()
    url = f"data:audio/wav;base64,{base64.b64encode(content).decode()}"
    values = {"name": "x.wav", "path": file, "bytes": content, "url": url, "struct": {"bytes": content, "path": None}}
    for name, dtype in (("array", np.float32), ("double", np.float64)):
        values[name] = {"array": stored.astype(dtype), "sampling_rate": RATE}
        values[f"{name}, channels last"] = {"array": stored.T.astype(dtype), "sampling_rate": RATE}
    for rate in (RATE, None):
        for name, value in values.items():
            sound = load_audio(value, tmp_path, sampling_rate=rate)
            assert sound.dtype == np.float32 and sound.shape == expected.shape, name
            assert abs(sound - expected).max() < 1e-6, name


@pytest.mark.parametrize("form", [*WRITERS])
def test_sounds_of_files_are_those_of_transformers(tmp_path, form):
    """With its backend soundfile, which is not installed everywhere; the test above has the same bar."""
    pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    from transformers.audio_utils import load_audio as upstream

    for count in (1, 2, 6):
        WRITERS[form](tmp_path / "x.wav", channels_of(count))
        expected = upstream(str(tmp_path / "x.wav"), RATE, backend="soundfile")
        assert abs(load_audio("x.wav", tmp_path, sampling_rate=RATE) - expected).max() < 1e-6


@pytest.mark.parametrize(
    "rates", [(44100, 16000), (8000, 16000), (48000, 16000), (16000, 24000), (11025, 48000), (44101, 16000)]
)
def test_resampled_sounds_keep_their_length_time_and_level(tmp_path, rates):
    """Against the same tones sampled at the new rate; the ends, where a filter sees the silence around them, are apart."""
    old, new = rates
    write_pcm(tmp_path / "x.wav", channels_of(2, samples=old // 4, rate=old), 4, rate=old)
    sound = load_audio("x.wav", tmp_path, sampling_rate=new)
    num_samples = -(-(old // 4) * new // old)
    assert len(sound) == num_samples
    expected = channels_of(2, samples=num_samples, rate=new).mean(0)
    middle = slice(new // 40, -new // 40)
    assert abs(sound - expected)[middle].max() < 2e-4
    assert abs(sound).max() < 1
    array = {"array": channels_of(2, samples=old // 4, rate=old), "sampling_rate": old}
    assert abs(load_audio(array, HERE, sampling_rate=new) - sound).max() < 1e-6


@pytest.mark.parametrize("samples", [1, 2, 50])
def test_short_sounds_are_resampled(samples):
    for old, new in ((44100, 16000), (8000, 16000)):
        sound = load_audio({"array": np.full(samples, 0.5), "sampling_rate": old}, HERE, sampling_rate=new)
        assert len(sound) == -(-samples * new // old) and abs(sound).max() > 0.1


REFUSED = {
    "floats in the range of int16": (np.array([0.0, 12000.0, -3.0]), "values up to 12000, expected numbers in"),
    "NaN": (np.array([0.0, np.nan]), "NaN or infinite values"),
    "infinite": (np.array([0.0, np.inf], dtype=np.float32), "NaN or infinite values"),
    "a square": (np.zeros((2, 2)), r"an array \(2, 2\), expected \(samples,\)"),
    "many channels": (np.zeros((20, 30)), r"an array \(20, 30\), expected"),
    "three dimensions": (np.zeros((1, 2, 9)), r"an array \(1, 2, 9\), expected"),
    "no channels": (np.zeros((0, 5)), r"an array \(0, 5\), expected"),
    "no samples": (np.zeros(0), "a sound without samples"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("rate", [RATE, 8000, None])
def test_arrays_that_are_no_sound_are_refused(case, rate):
    array, reason = REFUSED[case]
    with pytest.raises(MediaError, match=reason):
        load_audio({"array": array, "sampling_rate": RATE}, HERE, sampling_rate=rate)


def test_files_with_values_that_are_no_sound_are_refused(tmp_path):
    for value, reason in ((np.nan, "NaN"), (20000.0, "up to 20000")):
        write_float(tmp_path / "x.wav", np.array([[0.0, value, 0.1]]), "pcm_f32le")
        with pytest.raises(MediaError, match=reason):
            load_audio("x.wav", tmp_path, sampling_rate=RATE)


def test_values_a_little_above_full_scale_are_kept_as_in_transformers():
    array = np.array([0.0, 1.2, -1.3], dtype=np.float32)
    assert np.array_equal(load_audio({"array": array, "sampling_rate": RATE}, HERE, sampling_rate=RATE), array)


def test_an_array_without_a_rate_is_refused():
    for value in ({"array": np.zeros(9)}, np.zeros(9)):
        with pytest.raises(MediaError, match="without its rate, expected {array, sampling_rate}"):
            load_audio(value, HERE, sampling_rate=RATE)


# ------------------------------------------------------------------------------------------------------------ videos


@pytest.mark.parametrize("degrees", [0, 90, 180, -90])
def test_films_of_phones_are_turned_upright(tmp_path, degrees):
    """As by torchcodec, transformers' loader for films; they were left sideways."""
    frames = np.zeros((3, 32, 64, 3), dtype=np.uint8)
    frames[:, :16, :32] = 250  # a corner
    with av.open(str(tmp_path / "x.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width, stream.height = 64, 32
        if not hasattr(stream, "set_display_rotation"):
            pytest.skip("this PyAV writes no rotation")
        if degrees:
            stream.set_display_rotation(degrees)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    with av.open(str(tmp_path / "x.mp4")) as container:
        assert next(container.decode(video=0)).rotation % 360 == degrees % 360  # counterclockwise
    found, metadata = load_video("x.mp4", tmp_path, fps=2.0, max_frames=4)
    expected = np.rot90(frames, degrees // 90, axes=(1, 2))
    assert found.shape == expected.shape
    assert abs(found.astype(int) - expected).mean() < 4
    assert (metadata["height"], metadata["width"]) == expected.shape[1:3]
