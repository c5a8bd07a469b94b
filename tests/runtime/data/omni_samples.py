"""Samples of images, videos and sounds through the real omni processor against that processor called by hand.

    python tests/runtime/data/omni_samples.py      # prints the number of samples compared, of each kind

A process of its own, because torchvision must be there before transformers is imported.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from small_processors import omni_processor, use_torchvision

use_torchvision()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from patchgen.runtime.data import DataConfig, SourceConfig  # noqa: E402
from patchgen.runtime.data.builtin_media import omni_sample  # noqa: E402
from patchgen.runtime.data.collate import collate  # noqa: E402
from patchgen.runtime.data.multimodal import PrepareMultimodal  # noqa: E402
from patchgen.runtime.data.records import Record  # noqa: E402

CONFIG = DataConfig(sources=(SourceConfig("builtin:omni"),), kind="multimodal", tokens_per_batch=4096)
MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "input_features")


def positions(input_ids: torch.Tensor, image_grid_thw: torch.Tensor | None = None) -> torch.Tensor:
    """Something that only the right arguments give."""
    images = 0 if image_grid_thw is None else int(image_grid_thw.prod(-1).sum())
    return torch.stack([input_ids + row + images for row in range(3)])


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
        videos_kwargs={"do_sample_frames": False, "fps": CONFIG.video_fps},
        return_tensors="pt",
    )


def main() -> None:
    marked, unmarked = omni_processor(), omni_processor(marked=False)
    prepare, prepare_unmarked = (PrepareMultimodal(CONFIG, one, positions) for one in (marked, unmarked))
    compared: Counter[str] = Counter()
    samples = []
    for number in range(10):
        fields = omni_sample(number)
        record = Record(f"sample {number}", fields)
        (sample,) = prepare(0, record).samples
        (other,) = prepare_unmarked(0, record).samples
        expected = by_hand(marked, fields["messages"])
        ids = sample["input_ids"]
        assert torch.equal(ids, expected["input_ids"][0])
        for name in MEDIA:
            assert (name in sample) == (name in expected), name
            if name in expected:
                assert torch.equal(sample[name], expected[name]), name
                compared[name] += 1
        answers = [message["content"][0]["text"] for message in fields["messages"] if message["role"] == "assistant"]
        learned = marked.tokenizer.decode(ids[sample["labels"] != -100])
        assert learned == "".join(f"{answer}<|im_end|>" for answer in answers), learned
        assert torch.equal(sample["labels"], other["labels"])
        assert torch.equal(sample["position_ids"][0], torch.arange(len(ids)))
        grids = {"image_grid_thw": expected["image_grid_thw"]} if "image_grid_thw" in expected else {}
        assert torch.equal(sample["position_ids"][1:, None], positions(expected["input_ids"], **grids))
        samples.append(sample)
        compared["samples"] += 1

    batch = collate(samples, pad_to=4096, pad_token_id=0)
    assert batch["position_ids"].shape == (4, 1, 4096)
    assert batch["image_grid_thw"].shape[0] == sum(len(sample.get("image_grid_thw", ())) for sample in samples)
    longest = max(sample["input_features"].shape[2] for sample in samples if "input_features" in sample)
    assert batch["input_features"].shape[2] == longest
    frames = sum(int(sample["feature_attention_mask"].sum()) for sample in samples if "input_features" in sample)
    assert int(batch["feature_attention_mask"].sum()) == frames
    assert np.isfinite(batch["input_features"].numpy()).all()
    print(json.dumps(compared))


if __name__ == "__main__":
    main()
