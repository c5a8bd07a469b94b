"""The position function of a generated model against upstream's `get_rope_index`, on random multimodal samples."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import random
import shutil

import pytest
import torch

from patchgen.runtime import registry
from patchgen.runtime.media_sizes import AUDIO, IMAGE, VIDEO
from patchgen.runtime.positions import PLACEHOLDER_IDS, TOKEN_TYPES, PositionIds
from patchgen.runtime.verify.media import VIDEO_WITH_AUDIO, join_video_and_audio
from patchgen.runtime.verify.media_samples import Sample, SampleBuilder
from patchgen.runtime.verify.model_pair import build_model
from patchgen.runtime.verify.small_config import small_config

MODELS = (
    "glm4v_moe", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_vl",
    "qwen3_vl_moe",
)  # fmt: skip
OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
NUM_SAMPLES = 200
NUM_MIXED = 12


@functools.cache
def upstream_and_function(model: str):
    """Upstream's model with a builder of samples, and the generated model's position function through a pickle."""
    generated = registry.find_model(model)
    head = generated.heads[0]
    upstream_class = getattr(generated.upstream(), head)
    config = small_config(upstream_class.config_class).config
    builder = SampleBuilder(build_model(upstream_class, config))
    function = build_model(getattr(generated.load(), head), config).get_position_id_func()
    return builder, pickle.loads(pickle.dumps(function))


def random_parts(builder: SampleBuilder, draw: random.Random, *, sound: bool, videos: bool = True) -> list:
    """Text and items of random sizes, text first and last; videos all with their audio or all without."""
    parts: list = [draw.randint(1, 6)]
    kinds = [kind for kind in builder.layouts if videos or kind != VIDEO]
    for _ in range(draw.randint(0, 4)):
        kind = draw.choice(kinds)
        height, width = draw.randint(1, 4), draw.randint(1, 4)
        if kind == IMAGE:
            item = builder.maker.patches(IMAGE, (1, height, width))
        elif kind == VIDEO:
            item = builder.maker.patches(VIDEO, (draw.randint(1, 3), height, width))
            item = builder.maker.with_seconds(item, draw.choice([0.5, 1.0, 2.0]))
            item = join_video_and_audio(item, builder.maker.spectrogram(draw.randint(20, 240))) if sound else item
        else:
            item = builder.maker.spectrogram(draw.randint(20, 240))
        parts += [item, draw.randint(1, 6)]
    return parts


def media_of(builder: SampleBuilder, sample: Sample) -> dict:
    batch = builder.case("sample", [sample]).batch
    return {name: value for name, value in batch.items() if name not in ("labels", "attention_mask")}


def upstream_positions(builder: SampleBuilder, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """What upstream computes for a batch of one, with everything said explicitly."""
    batch = media_of(builder, sample)
    source = next(m for m in (builder.model, *builder.model.children()) if hasattr(m, "get_rope_index"))
    common = {name: batch.get(name) for name in ("input_ids", "image_grid_thw", "video_grid_thw")}
    common["attention_mask"] = torch.ones_like(batch["input_ids"])
    if "use_audio_in_video" in builder.forward_parameters:
        mask = batch.get("feature_attention_mask")
        positions, deltas = source.get_rope_index(
            **common,
            use_audio_in_video=batch.get("use_audio_in_video", False),
            audio_seqlens=None if mask is None else mask.sum(-1),
            second_per_grids=batch.get("video_second_per_grid"),
        )
    else:
        if "second_per_grid_ts" in batch:
            common["second_per_grid_ts"] = batch["second_per_grid_ts"]
        positions, deltas = source.get_rope_index(**common, mm_token_type_ids=batch["mm_token_type_ids"])
    return positions, deltas


def with_pipeline_ids(sample: Sample) -> torch.Tensor:
    """The ids as the data pipeline has them: one placeholder per modality for every model."""
    of_type = {number: PLACEHOLDER_IDS[kind] for kind, number in TOKEN_TYPES.items()}
    return torch.tensor([of_type.get(kind, token) for token, kind in zip(sample.ids, sample.types, strict=True)])


def check(model: str, number: int) -> None:
    builder, function = upstream_and_function(model)
    draw = random.Random(f"{model} {number}")
    sample = builder.sample(random_parts(builder, draw, sound=builder.takes_sound and number % 3 == 0))
    expected, deltas = upstream_positions(builder, sample)
    media = {name: value for name, value in media_of(builder, sample).items() if name != "input_ids"}
    media.pop("use_audio_in_video", None)
    if number % 2:
        ids = with_pipeline_ids(sample)
        media.pop("mm_token_type_ids", None)  # follow from the ids
    else:
        ids = torch.tensor([sample.ids])
    found = function(ids, **media)
    assert torch.equal(found["position_ids"], expected[:, 0]), f"{model}, sample {number}"
    assert torch.equal(found["rope_deltas"].float(), deltas[0].float()), f"{model}, sample {number}"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sampled(3)
def test_upstreams_values_on_random_samples(model: str) -> None:
    for number in range(NUM_SAMPLES):
        check(model, number)


@pytest.mark.parametrize("model", OMNI)
def test_videos_with_and_without_their_audio_in_one_sample(model: str) -> None:
    """Upstream's flag holds for a whole sample: the expected positions are those of two samples, one after the other."""
    builder, function = upstream_and_function(model)
    for number in range(NUM_MIXED):
        draw = random.Random(number)
        halves = []
        for sound in (number % 2 == 0, number % 2 == 1):
            video = builder.maker.with_seconds(builder.maker.patches(VIDEO, (2, 2, draw.randint(1, 3))), 1.0)
            video = join_video_and_audio(video, builder.maker.spectrogram(draw.randint(20, 240))) if sound else video
            halves.append(builder.sample([video, *random_parts(builder, draw, sound=False, videos=False)]))
        first, second = (upstream_positions(builder, half)[0] for half in halves)
        expected = torch.cat([first, second + first.max() + 1], dim=2)[:, 0]
        whole = Sample(
            *(getattr(halves[0], name) + getattr(halves[1], name) for name in ("ids", "types", "labels", "items"))
        )
        media = {name: value for name, value in media_of(builder, whole).items() if name != "input_ids"}
        found = function(torch.tensor(whole.ids), **media)["position_ids"]
        assert torch.equal(found, expected), f"sample {number}: {VIDEO_WITH_AUDIO} first: {number % 2 == 0}"


def in_a_worker(function, connection) -> None:
    connection.send(function(torch.tensor([1, 2, 3]))["position_ids"].tolist())


@pytest.mark.slow
def test_runs_in_a_process_that_never_built_the_model() -> None:
    _, function = upstream_and_function("qwen3_vl")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=in_a_worker, args=(function, theirs))
    process.start()
    assert ours.poll(120)
    assert ours.recv() == [[0, 1, 2]] * 3
    process.join()


def test_a_model_outside_the_installation_unpickles_in_another_process(tmp_path) -> None:
    """A process that never read the folder: it is found by the file that the pickle names."""
    generated = registry.find_model("qwen2_vl")
    folder = tmp_path / "qwen2_vl"
    shutil.copytree(generated.directory, folder)
    local = registry.read_model(folder)
    module = local.load()
    _, function = upstream_and_function("qwen2_vl")
    function = PositionIds(getattr(module, function.model_class.__name__), function.config, function.attributes)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=in_a_worker, args=(function, theirs))
    process.start()
    assert ours.poll(120)
    assert ours.recv() == [[0, 1, 2]] * 3
    process.join()


def test_holds_no_weights() -> None:
    _, function = upstream_and_function("qwen3_omni_moe")
    assert len(pickle.dumps(function)) < 20_000
    assert AUDIO in PLACEHOLDER_IDS
