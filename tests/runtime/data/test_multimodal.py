"""Images and sounds from files through real processors, and what happens to those that cannot be read."""

from __future__ import annotations

import base64
import json
import wave
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small_processors import audio_processor, image_processor

from patchgen.runtime.data import DataConfig, DataError, SourceConfig, build_loader, media
from patchgen.runtime.data.loader import SETTINGS_ADDED_LATER
from patchgen.runtime.data.media import MediaError, load_audio, load_image, load_video
from patchgen.runtime.data.processors import ProcessorAdapter
from patchgen.runtime.parallel.batch import IGNORED


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve images, their conversations in one file."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "pictures").mkdir()
    lines = []
    for number in range(12):
        pixels = np.full((20 + number, 30, 3), number * 20, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{number}.png")
        lines.append(sample(f"pictures/{number}.png", answer=f"shade {number}"))
    (folder / "data.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def sample(*images: str, places: int = 1, answer: str = "yes", **more: Any) -> str:
    content = [*({"type": "image"} for _ in range(places)), {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages, "images": list(images), **more})


def loader_of(path, *, index: int = 0, count: int = 1, processor: Any = None, **changes: Any):
    config = DataConfig(
        sources=(SourceConfig(str(path)),), kind="multimodal", **{"tokens_per_batch": 200, "epochs": 1, **changes}
    )
    return build_loader(config, processor=processor or PROCESSOR, batch_index=index, num_batches=count, agree=int)


PROCESSOR = image_processor()


def answers(batch) -> list[str]:
    labels = batch["labels"][0]
    text = PROCESSOR.tokenizer.decode(labels[labels != IGNORED])
    return text.split("<|im_end|>")[:-1]


def test_batches_hold_what_the_processor_makes(folder):
    batches = list(loader_of(folder / "data.jsonl", shuffle=False))
    assert sorted(answer for batch in batches for answer in answers(batch)) == sorted(f"shade {n}" for n in range(12))
    for batch in batches:
        shades = [int(answer.split()[1]) for answer in answers(batch)]
        expected = PROCESSOR.image_processor(
            [Image.open(folder / "pictures" / f"{shade}.png") for shade in shades], return_tensors="pt"
        )
        assert torch.equal(batch["pixel_values"], expected["pixel_values"])
        assert int((batch["input_ids"] == PROCESSOR.image_token_id).sum()) == 4 * len(shades)
        assert not (batch["labels"] == PROCESSOR.image_token_id).any()


@settings(max_examples=10)
@given(count=st.integers(1, 3), stop=st.integers(0, 3), pool=st.integers(1, 3))
def test_each_image_once_wherever_a_run_is_resumed(folder, count, stop, pool):
    seen: Counter[str] = Counter()
    for index in range(count):
        before = loader_of(folder / "data.jsonl", index=index, count=count, pool=pool)
        for _, batch in zip(range(stop), before, strict=False):
            seen.update(answers(batch))
        after = loader_of(folder / "data.jsonl", index=index, count=count, pool=pool)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        for batch in after:
            seen.update(answers(batch))
    assert seen == Counter({f"shade {number}": 1 for number in range(12)})


BROKEN = {
    "a broken line": ('{"messages": [', "not readable"),
    "no object": ("[1, 2]", "expected one JSON object, found list"),
    "a missing field": ('{"images": []}', "the columns images .* Nearest: messages lacks messages"),
    "an unreadable image": (sample("bad.png"), "image 0: no readable image"),
    "no such image": (sample("gone.png"), "image 0: no file .*gone.png"),
    "an image too few": (sample(), "a part for image 0 in the messages, but no image for it"),
    "an image too many": (sample("data:,", "x.png", places=0), "2 images in 'images', but 0 parts"),
    "a sound for a processor of images": (
        json.dumps({"messages": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]}),
        "audio 0: LlavaProcessor takes no audios",
    ),
    "no assistant": ('{"messages": [{"role": "user", "content": "Hi"}]}', "no assistant turn to learn from"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_bad_sample_is_skipped_and_counted_or_refused_with_file_and_line(tmp_path, kind):
    line, reason = BROKEN[kind]
    Image.fromarray(np.zeros((20, 20, 3), dtype=np.uint8)).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes((tmp_path / "good.png").read_bytes()[:40])
    (tmp_path / "data.jsonl").write_text("\n".join([sample("good.png"), line, sample("good.png")]) + "\n")

    loader = loader_of(tmp_path / "data.jsonl", on_bad="skip")
    assert [answer for batch in loader for answer in answers(batch)] == ["yes", "yes"]
    assert loader.counters.counts == {"bad": 1}
    ((outcome, where, found),) = loader.counters.places
    assert (outcome, where) == ("bad", f"{tmp_path}/data.jsonl:2")
    with pytest.raises(DataError, match=f"data.jsonl:2: {reason}.*on_bad"):
        list(loader_of(tmp_path / "data.jsonl", on_bad="error"))
    assert found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_refusal_in_a_worker_reaches_the_trainer(tmp_path, workers):
    (tmp_path / "data.jsonl").write_text(sample(places=0, answer="long " * 100) + "\n")
    with pytest.raises(
        DataError, match=r"data.jsonl:1: 5\d\d tokens, more than the limit of 200.*skip or truncate, or raise"
    ):
        next(loader_of(tmp_path / "data.jsonl", on_long="error", num_workers=workers))


def test_a_long_sample_is_cut_unless_media_would_be(tmp_path, folder):
    image = str(folder / "pictures" / "0.png")
    late = json.dumps(
        {
            "messages": [
                {"role": "assistant", "content": "word " * 60},
                {"role": "user", "content": [{"type": "image", "image": image}]},
            ]
        }
    )
    (tmp_path / "data.jsonl").write_text(sample(image, answer="word " * 60) + "\n" + late + "\n")
    loader = loader_of(tmp_path / "data.jsonl", on_long="truncate")
    (batch,) = loader
    assert batch["input_ids"].shape == (1, 200)
    assert loader.counters.counts == {"truncated": 1, "skipped": 1}
    assert "and media are in the part to cut off" in loader.counters.summary()


def test_images_of_parquet_and_saved_datasets(tmp_path, folder):
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    for row in rows:  # columns have one type: all content is a list of parts
        row["images"] = [str(folder / row["images"][0])]
        row["messages"][1]["content"] = [{"type": "text", "text": row["messages"][1]["content"]}]
    found = datasets.Dataset.from_list(rows)
    images = found.cast_column("images", datasets.List(datasets.Image()))
    images.save_to_disk(str(tmp_path / "saved"))
    images.to_parquet(str(tmp_path / "rows.parquet"))
    expected = sorted(f"shade {number}" for number in range(12))
    for path in ("saved", "rows.parquet"):
        loader = loader_of(tmp_path / path)
        assert sorted(answer for batch in loader for answer in answers(batch)) == expected


def test_sounds_of_files_are_mixed_down_and_resampled(tmp_path):
    processor = audio_processor()
    tone = np.sin(2 * np.pi * 440 * np.arange(4000) / 8000)
    stereo = np.stack([tone, tone], axis=1)
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes((stereo * 32000).astype("<i2").tobytes())
    sound = load_audio("tone.wav", tmp_path, sampling_rate=16000)
    assert sound.dtype == np.float32
    assert abs(len(sound) - 8000) < 64
    assert np.argmax(abs(np.fft.rfft(sound))) == pytest.approx(440 * len(sound) / 16000, abs=1)

    messages = [
        {"role": "user", "content": [{"type": "audio", "audio": "tone.wav"}]},
        {"role": "assistant", "content": "A"},
    ]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (batch,) = loader_of(tmp_path / "data.jsonl", processor=processor)
    assert batch["input_features"].shape[:2] == (1, 16)
    assert int((batch["input_ids"] == processor.audio_token_id).sum()) > 1


def write_clip(av, file):
    """Thirty frames, each 8 brighter than the one before."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for number in range(30):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), number * 8, dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def test_videos_are_sampled_by_time(tmp_path):
    write_clip(pytest.importorskip("av"), tmp_path / "clip.mp4")
    frames, metadata = load_video("clip.mp4", tmp_path, fps=2.0, max_frames=64)
    assert frames.shape == (6, 32, 32, 3)
    assert metadata["total_num_frames"] == 30
    assert metadata["fps"] == pytest.approx(10)
    shades = frames.mean((1, 2, 3)) / 8
    assert shades == pytest.approx(metadata["frames_indices"], abs=1.5)
    assert len(load_video("clip.mp4", tmp_path, fps=2.0, max_frames=4)[0]) == 4
    content = (tmp_path / "clip.mp4").read_bytes()
    assert np.array_equal(load_video(content, tmp_path, fps=2.0, max_frames=64)[0], frames)


@pytest.mark.parametrize("packets", [None, 25, 40])
def test_only_sampled_frames_of_a_video_are_kept(tmp_path, monkeypatch, packets):
    """Also if its packets are not as many as its frames."""
    av = pytest.importorskip("av")
    write_clip(av, tmp_path / "clip.mp4")
    decode, converted = media._decode, []

    def counted(value, root, indices):
        frames, total = decode(value, root, indices)
        converted.append(len(frames))
        return frames, total

    monkeypatch.setattr(media, "_decode", counted)
    if packets:
        monkeypatch.setattr(media, "_count_packets", lambda value, root: (packets, 10.0))
    frames, metadata = load_video("clip.mp4", tmp_path, fps=2.0, max_frames=3)
    assert metadata["total_num_frames"] == 30 and metadata["frames_indices"] == [0, 14, 29]
    assert frames.mean((1, 2, 3)) / 8 == pytest.approx([0, 14, 29], abs=1.5)
    assert converted[-1] == 3 and len(converted) == (2 if packets else 1) and max(converted) <= 3


def test_the_limit_of_frames_holds_for_arrays_too(tmp_path):
    clip = np.arange(10, dtype=np.uint8)[:, None, None, None] * np.ones((4, 5, 3), dtype=np.uint8)
    frames, metadata = load_video(clip, tmp_path, fps=2.0, max_frames=4)
    assert frames[:, 0, 0, 0].tolist() == metadata["frames_indices"] == [0, 3, 6, 9]
    assert (metadata["total_num_frames"], metadata["duration"]) == (10, 5)
    assert np.array_equal(load_video(clip, tmp_path, fps=2.0, max_frames=10)[0], clip)
    with pytest.raises(MediaError, match="without frames"):
        load_video(clip[:0], tmp_path, fps=2.0, max_frames=4)


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "*.jsonl", "[d]ata.jsonl", "data.jsonl", ""])
def test_media_beside_a_glob_are_found(folder, pattern):
    """Relative to the last folder before its wildcards."""
    batches = list(loader_of(folder / pattern))
    assert sum(len(answers(batch)) for batch in batches) == 12


def test_settings_of_media_must_not_change_when_a_run_resumes_unless_it_did_not_save_them(folder):
    def loader(root=None, **changes):
        sources = (SourceConfig(str(folder / "data.jsonl"), media_root=root),)
        config = DataConfig(sources=sources, kind="multimodal", tokens_per_batch=200, epochs=1, **changes)
        return build_loader(config, processor=PROCESSOR, batch_index=0, num_batches=1, agree=int)

    first = loader(str(folder))
    next(first)
    state = first.state_dict()
    loader(f"{folder}/pictures/..").load_state_dict(state)
    for other, told in (
        (loader(str(folder), video_fps=4.0), "video_fps: saved 2.0, now 4.0"),
        (loader(str(folder), max_frames=9), "max_frames: saved 64, now 9"),
        (loader(str(folder / "pictures")), "media_root: saved .*, now .*pictures"),
    ):
        with pytest.raises(DataError, match=told):
            other.load_state_dict(state)
        older = {name: state["settings"][name] for name in state["settings"] if name not in SETTINGS_ADDED_LATER}
        other.load_state_dict({**state, "settings": older})


def test_media_values_of_all_forms(tmp_path):
    Image.fromarray(np.full((4, 5, 3), 7, dtype=np.uint8)).save(tmp_path / "x.png")
    content = (tmp_path / "x.png").read_bytes()
    address = "data:image/png;base64," + base64.b64encode(content).decode()
    for value in (
        "x.png",
        str(tmp_path / "x.png"),
        content,
        address,
        {"bytes": content},
        {"path": "x.png", "bytes": None},
    ):
        assert np.asarray(load_image(value, tmp_path)).tolist() == np.full((4, 5, 3), 7).tolist()
    for value in (7, {}, "data:image/png;base64,!", b"no image"):
        with pytest.raises(MediaError):
            load_image(value, tmp_path)
    with pytest.raises(MediaError):
        load_audio(b"no sound", tmp_path, sampling_rate=16000)
    with pytest.raises(MediaError):
        load_video(b"no video", tmp_path, fps=2.0, max_frames=4)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8"])
def test_integer_samples_of_a_sound_are_scaled_to_one(tmp_path, dtype):
    """They reached the model unscaled, up to 32767."""
    limits, middle = np.iinfo(dtype), 128 if dtype == "uint8" else 0
    array = np.array([limits.min, middle, limits.max], dtype=dtype)
    sound = load_audio({"array": array, "sampling_rate": 16000}, tmp_path, sampling_rate=16000)
    assert sound.dtype == np.float32
    assert sound.tolist() == pytest.approx([-1, 0, 1], abs=0.01)
    stereo = load_audio({"array": np.stack([array] * 2), "sampling_rate": 16000}, tmp_path, sampling_rate=16000)
    assert stereo.tolist() == pytest.approx(sound.tolist(), abs=1e-4)


def test_samples_of_a_list_are_taken_as_they_are_unless_their_range_is_unknown(tmp_path):
    for array in ([0, 1, -1], [0.5, -0.5, 0]):
        found = load_audio({"array": array, "sampling_rate": 16000}, tmp_path, sampling_rate=16000)
        assert found.tolist() == array
    with pytest.raises(
        MediaError,
        match=r"integers up to 900 of unknown range, expected numbers in \[-1, 1\] or .* To fix: return np.asarray",
    ):
        load_audio({"array": [0, 900], "sampling_rate": 16000}, tmp_path, sampling_rate=16000)


def test_pictures_and_videos_as_arrays_of_other_types_are_refused(tmp_path):
    """PIL cuts the values of other arrays off, so a picture of floats in [0, 1] became a black one."""
    with pytest.raises(MediaError, match="an image as an array of float32, expected uint8"):
        load_image(np.full((4, 5), 0.5, dtype=np.float32), tmp_path)
    for shape in ((3, 4, 5), (5,), (4, 5, 1), (1, 4, 5, 3)):
        with pytest.raises(MediaError, match=r"an image as an array \(.*, expected \(height, width\) or .* To fix: "):
            load_image(np.zeros(shape, dtype=np.uint8), tmp_path)
    assert load_image(np.zeros((4, 5, 4), dtype=np.uint8), tmp_path).size == (5, 4)
    for shape in ((4, 5), (4, 5, 2), (4, 5, 3), (4, 5, 4)):  # PIL has no pictures of several bools a pixel
        assert (np.asarray(load_image(np.ones(shape, dtype=np.bool_), tmp_path)) == 255).all()
    wrong = [np.zeros((3, 4, 5, 3), dtype=np.float32)]
    for frames in [*wrong, *(np.zeros(shape, dtype=np.uint8) for shape in ((3, 4, 5), (3, 4, 5, 6), (3, 4, 5, 3, 1)))]:
        with pytest.raises(
            MediaError, match=r"a video as an array \(3, 4, 5.*, expected \(frames, height, width, 3\)"
        ):
            load_video(frames, tmp_path, fps=2.0, max_frames=4)


def test_absent_inputs_and_the_names_of_sounds():
    adapter = ProcessorAdapter(audio_processor())
    assert adapter.modalities == ("audios",)
    found = adapter("no sound here", images=[], videos=[], audios=[])
    assert set(found) == {"input_ids", "attention_mask"}
    sound = np.zeros(8000, dtype=np.float32)
    assert "input_features" in adapter("<|AUDIO|>", audios=[sound])
    with pytest.raises(DataError, match="takes audios; the data has images"):
        adapter("<image>", images=[1])

    class Older(type(audio_processor())):
        def __call__(self, text=None, audios=None, **options):
            return super().__call__(text=text, audio=audios, **options)

    older = Older.__new__(Older)
    older.__dict__ = adapter.processor.__dict__
    assert "input_features" in ProcessorAdapter(older)("<|AUDIO|>", audios=[sound])
