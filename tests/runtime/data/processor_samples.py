"""Samples of images, videos and sounds through real processors against those processors called by hand.

    python tests/runtime/data/processor_samples.py      # prints what was compared, a line for each processor

A process of its own, because torchvision must be there before transformers is imported.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from small_processors import (
    gemma_processor,
    older_omni_processor,
    omni_processor,
    use_torchvision,
    vision_processor,
)

use_torchvision()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from patchgen.runtime.data import DataConfig, SourceConfig, build_loader  # noqa: E402
from patchgen.runtime.data.builtin_media import NOTES, clip, omni_sample, tone  # noqa: E402
from patchgen.runtime.data.collate import collate  # noqa: E402
from patchgen.runtime.data.formats import MEDIA_COLUMNS  # noqa: E402
from patchgen.runtime.data.multimodal import PrepareMultimodal  # noqa: E402
from patchgen.runtime.data.records import Record  # noqa: E402
from patchgen.runtime.train.recipe import load  # noqa: E402

CONFIG = DataConfig(sources=(SourceConfig("builtin:omni"),), kind="multimodal", tokens_per_batch=4096)
PROCESSORS = {
    "Qwen3OmniMoe": omni_processor,
    "Qwen2_5Omni": older_omni_processor,
    **{name: partial(vision_processor, name) for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v")},
    "Gemma3": gemma_processor,
}
FOLDER = Path(__file__).parents[3] / "recipes"
RECIPES = {"Qwen3OmniMoe": FOLDER / "qwen3_omni_30b.yaml", "Qwen3VL": FOLDER / "qwen3_vl_8b.yaml"}
MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "input_features")


def positions(input_ids: torch.Tensor, image_grid_thw: torch.Tensor | None = None) -> torch.Tensor:
    """Something that only the right arguments give."""
    images = 0 if image_grid_thw is None else int(image_grid_thw.prod(-1).sum())
    return torch.stack([input_ids + row + images for row in range(3)])


def video_options(videos: list[np.ndarray]) -> dict[str, Any]:
    """Two frames a second, all of them taken."""
    metadata = [
        {
            "total_num_frames": len(video),
            "fps": 2.0,
            "duration": len(video) / 2,
            "frames_indices": [*range(len(video))],
        }
        for video in videos
    ]
    return {"do_sample_frames": False, "fps": 2.0, "video_metadata": metadata}


def without(messages: list[dict[str, Any]], kinds: set[str]) -> list[dict[str, Any]]:
    """The messages without the parts that a processor does not take."""
    return [
        {**message, "content": [part for part in message["content"] if part["type"] not in kinds]}
        for message in messages
    ]


def by_hand(processor: Any, messages: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    parts = [part for message in messages for part in message["content"]]
    text = processor.apply_chat_template(messages, tokenize=False)
    given = {
        "images": [part["image"] for part in parts if part["type"] == "image"],
        "videos": [part["video"] for part in parts if part["type"] == "video"],
        "audio": [part["audio"]["array"] for part in parts if part["type"] == "audio"],
    }
    return processor(
        text=[text],
        **{name: items for name, items in given.items() if items},
        return_tensors="pt",
        **({"videos_kwargs": video_options(given["videos"])} if given["videos"] else {}),
    )


def check_videos_with_sound(processor: Any, prepare: PrepareMultimodal) -> None:
    """Two videos, one with sound, between two sounds of their own: placeholders and features in the same order."""
    draw = np.random.default_rng(0)
    sounds = [tone(draw, frequency) for frequency in NOTES.values()]
    clips = [clip(draw, (0, 1)) for _ in range(2)]
    content = [
        {"type": "audio", "audio": sounds[0]},
        {"type": "video", "video": clips[0]},
        {"type": "video", "video": clips[1], "audio": sounds[1]},
        {"type": "audio", "audio": sounds[2]},
    ]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
    ]
    (sample,) = prepare(0, Record("sound", {"messages": messages})).samples
    expected = processor.feature_extractor(
        [sound["array"] for sound in sounds[:3]],
        sampling_rate=16000,
        padding="max_length"
        if sample["input_features"].shape[2] == processor.feature_extractor.nb_max_frames
        else True,
        truncation=False,
        return_attention_mask=True,
        return_tensors="pt",
    )
    assert torch.equal(sample["input_features"], expected["input_features"])
    text = processor.tokenizer.decode(sample["input_ids"])
    runs = ["".join(sorted(set(run))) for run in re.findall(r"(?:<\|(?:audio|video)_pad\|>)+", text)]
    assert len(runs) == 4, text
    inner = re.findall(r"<\|vision_start\|>(.*?)<\|vision_end\|>", text)
    assert [run.startswith("<|audio_start|>") for run in inner] == [False, True]
    assert inner[0].count("<|audio_pad|>") == 0 < inner[1].count("<|audio_pad|>") < text.count("<|audio_pad|>")
    assert processor.tokenizer.decode(sample["input_ids"][sample["labels"] != -100]) == "yes<|im_end|>"


def check_odd_samples(processor: Any, prepare: PrepareMultimodal, kinds: set[str]) -> int:
    """What upstream's processors refuse is a bad sample, special tokens in texts are text, small clips are looked at."""

    def prepared(*content: dict[str, Any], answer: str = "yes") -> Any:
        turns = (("user", list(content)), ("assistant", [{"type": "text", "text": answer}]))
        messages = [{"role": role, "content": content} for role, content in turns]
        return prepare(0, Record("odd", {"messages": messages}))

    count = 0
    image = {"type": "image", "image": np.full((60, 60, 3), 90, dtype=np.uint8)}
    for token in (processor.image_token, processor.tokenizer.eos_token):
        (sample,) = prepared(image, {"type": "text", "text": f"What is {token}?"}, answer=f"It is {token}.").samples
        text = processor.tokenizer.decode(sample["input_ids"])
        assert text.count(f"What is {token}?") == text.count(f"It is {token}.") == 1, text
        (plain,) = prepared(image, {"type": "text", "text": "What is @?"}, answer="It is @.").samples
        for name, own in (("input_ids", processor.image_token_id), ("mm_token_type_ids", 1), ("token_type_ids", 1)):
            if name not in sample:
                continue
            assert len(sample[name]) - len(plain[name]) == 2 * (len(token) - 1)
            assert (sample[name] == own).sum() == (plain[name] == own).sum() > 0
        assert processor.tokenizer.decode(sample["input_ids"][sample["labels"] != -100]) == f"It is {token}.<|im_end|>"
        count += 1
    if "video" not in kinds:
        colour = np.array([200, 40, 90], dtype=np.uint8)
        ranges = set()
        for height, width in ((60, 60), (1, 1), (1, 9), (3, 3), (3, 20), (20, 3)):
            frames = np.broadcast_to(colour, (4, height, width, 3)).copy()
            (sample,) = prepared({"type": "video", "video": frames}).samples
            pixels = sample["pixel_values_videos"].view(len(sample["pixel_values_videos"]), 3, -1)
            ranges |= {(float(one.min()), float(one.max())) for one in pixels.transpose(0, 1)}
        assert len(ranges) == 3, ranges  # one colour, whatever the size of the clip
        count += 1
    refused = [{"type": "image", "image": np.zeros((3, 700, 3), dtype=np.uint8)}] if "video" not in kinds else []
    if "audio" not in kinds:
        sound = {"array": np.zeros(40, dtype=np.float32), "sampling_rate": 16000}
        refused.append({"type": "audio", "audio": sound})
    for part in refused:
        outcome, where, reason = prepared(part).problem
        assert (outcome, where) == ("bad", "odd"), reason
        own = (f"{type(processor).__name__} refuses the sample: ", "too small for a token")
        assert any(words in reason for words in own), reason
        count += 1
    return count


def check_modalities_apart(processor: Any) -> None:
    """Rows of images and rows of clips, where both at once are not to be; a sample with both is bad."""
    sources = tuple(SourceConfig(f"builtin:{name}", weight=1) for name in ("vision", "video"))
    for apart in (None, (("video", "image"),)):
        config = DataConfig(
            sources=sources, kind="multimodal", tokens_per_batch=512, pool=1, separate_modalities=apart
        )
        loader = build_loader(config, processor=processor, batch_index=0, num_batches=1)
        batches = [next(loader) for _ in range(6)]
        held = [tuple(name in batch for name in ("pixel_values", "pixel_values_videos")) for batch in batches]
        assert any(len(batch["cu_seq_lens_q"]) > 2 for batch in batches)
        assert set(held) == ({(True, False), (False, True)} if apart else {(True, True)}), held
    outcome, _, reason = PrepareMultimodal(config, processor, None)(
        0, Record("both", {"messages": without(omni_sample(0)["messages"], {"audio"})})
    ).problem
    assert (outcome, reason[:31]) == ("bad", "image and video in one sample, "[:31]), reason


def check_media_options(processor: Any, kinds: set[str]) -> None:
    """Options of the recipe reach upstream's processors: sizes of images and clips, each its own, and frames a second."""

    def sample(media: dict[str, Any]) -> dict[str, torch.Tensor]:
        config = DataConfig(sources=CONFIG.sources, kind="multimodal", tokens_per_batch=4096, media=media)
        prepare = PrepareMultimodal(config, processor, None)
        prepare.options.require_accepted()
        (found,) = prepare(0, Record("sample", {"messages": without(omni_sample(0)["messages"], kinds)})).samples
        return found

    plain, side = sample({}), processor.image_processor.patch_size * 2
    small = sample({"max_pixels": side**2, "min_pixels": side**2})
    clips = sample({"videos": {"max_pixels": side**2, "min_pixels": side**2}})
    for name, found in (("image_grid_thw", small), ("video_grid_thw", small), ("video_grid_thw", clips)):
        assert found[name].prod(-1).sum() < plain[name].prod(-1).sum(), name
    assert torch.equal(clips["pixel_values"], plain["pixel_values"])
    if "video_second_per_grid" in plain:
        assert sample({"fps": 4.0})["video_second_per_grid"] == plain["video_second_per_grid"] / 2


def check_recipe(path: Path, processor: Any) -> None:
    """What a recipe for a real checkpoint wants of its processor is there."""
    config = load(path).data
    prepare = PrepareMultimodal(replace(config, special_tokens=()), processor, None)
    prepare.options.require_accepted()
    assert prepare.options.fps == 1


def compare(name: str) -> dict[str, Any]:
    """Ten samples of one processor, and the batch of them."""
    marked, unmarked = PROCESSORS[name](), PROCESSORS[name](marked=False)
    prepare, prepare_unmarked = (PrepareMultimodal(CONFIG, one, positions) for one in (marked, unmarked))
    kinds = {kind for kind, plural in MEDIA_COLUMNS.items() if plural not in prepare.processor.modalities}
    compared: Counter[str] = Counter()
    samples = []
    for number in range(10):
        messages = without(omni_sample(number)["messages"], kinds)
        record = Record(f"sample {number}", {"messages": messages})
        (sample,) = prepare(0, record).samples
        (other,) = prepare_unmarked(0, record).samples
        expected = by_hand(marked, messages)
        ids = sample["input_ids"]
        assert torch.equal(ids, expected["input_ids"][0]), (name, number)
        for field in MEDIA:
            assert (field in sample) == (field in expected), field
            if field in expected:
                assert torch.equal(sample[field], expected[field]), field
                compared[field] += 1
        answers = [message["content"][0]["text"] for message in messages if message["role"] == "assistant"]
        learned = marked.tokenizer.decode(ids[sample["labels"] != -100])
        assert learned == "".join(f"{answer}<|im_end|>" for answer in answers), learned
        assert torch.equal(sample["labels"], other["labels"])
        assert torch.equal(sample["position_ids"][0], torch.arange(len(ids)))
        grids = {"image_grid_thw": expected["image_grid_thw"]} if "image_grid_thw" in expected else {}
        assert torch.equal(sample["position_ids"][1:, None], positions(expected["input_ids"], **grids))
        samples.append(sample)
        compared["samples"] += 1
    if "audios" in prepare.processor.modalities:
        check_videos_with_sound(marked, prepare)
    check_batch(samples)
    if name in RECIPES:
        check_recipe(RECIPES[name], marked)
    if name in ("Qwen3OmniMoe", "Qwen2_5_VL"):
        check_media_options(marked, kinds)
    if name == "Glm4v":
        check_modalities_apart(marked)
    compared["odd"] = check_odd_samples(marked, PrepareMultimodal(CONFIG, marked, None), kinds)
    return {"processor": name, **compared}


def check_batch(samples: list[dict[str, torch.Tensor]]) -> None:
    """Every field has a rule, and nothing is lost where samples are put together."""
    batch = collate(samples, pad_to=8192, pad_token_id=0)
    assert batch["position_ids"].shape == (4, 1, 8192)
    for field in ("image_grid_thw", "video_grid_thw", "pixel_values", "pixel_values_videos"):
        assert len(batch.get(field, ())) == sum(len(sample.get(field, ())) for sample in samples)
    if "input_features" in batch:
        longest = max(sample["input_features"].shape[2] for sample in samples if "input_features" in sample)
        assert batch["input_features"].shape[2] == longest
        frames = sum(int(sample["feature_attention_mask"].sum()) for sample in samples if "input_features" in sample)
        assert int(batch["feature_attention_mask"].sum()) == frames
        assert np.isfinite(batch["input_features"].numpy()).all()


def main() -> None:
    for name in sys.argv[1:] or PROCESSORS:
        print(json.dumps(compare(name)), flush=True)


if __name__ == "__main__":
    main()
