"""Processors that do not say where they put the items: their own call, and labels by comparing tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small_processors import byte_tokenizer, image_processor, template
from test_multimodal import loader_of, sample
from transformers import BatchFeature

from patchgen.runtime.data import DataError
from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.token_alignment import alignment_by_matching
from patchgen.runtime.parallel.batch import IGNORED

TEXT = template("<image>", marked=False)


def idefics2():
    """Upstream's own call: it writes the places of an image into the text, with other marks around them."""
    from transformers import Idefics2ImageProcessorPil, Idefics2Processor

    marks = {name: f"<{name}>" for name in ("image", "fake_token_around_image", "end_of_utterance")}
    images = Idefics2ImageProcessorPil(size={"shortest_edge": 28, "longest_edge": 56}, do_image_splitting=False)
    return Idefics2Processor(images, byte_tokenizer(TEXT, marks), image_seq_len=6, chat_template=TEXT)


class NoneOfTransformers:
    """A processor of one's own: its call takes what it names and nothing else."""

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer(TEXT, {"image_token": "<image>"})
        self.image_processor = image_processor().image_processor
        self.chat_template = TEXT

    def __call__(self, text, images=None, return_tensors=None):
        expanded = [one.replace("<image>", "<<image><image>>") for one in text]
        pixels = self.image_processor(images, return_tensors="np") if images else {}
        return BatchFeature({**self.tokenizer(expanded), **pixels}, tensor_type=return_tensors)


PROCESSORS = {"idefics2": (idefics2, 6), "own": (NoneOfTransformers, 2)}


@pytest.mark.parametrize("name", PROCESSORS)
def test_labels_lie_on_the_answers(tmp_path, name):
    make, per_image = PROCESSORS[name]
    processor = make()
    Image.fromarray(np.full((40, 30, 3), 90, dtype=np.uint8)).save(tmp_path / "x.png")
    lines = [
        sample("x.png", answer="What? A <image>"),
        sample(places=0, answer="b"),
        sample("x.png", "x.png", places=2),
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    batches = list(loader_of(tmp_path / "data.jsonl", processor=processor, shuffle=False, packing=False))
    ids, labels = (torch.cat([batch[name][0] for batch in batches]) for name in ("input_ids", "labels"))
    token = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert int((ids == token).sum()) == 3 * per_image
    assert processor.tokenizer.decode(labels[labels != IGNORED]) == "What? A <image><|im_end|>b<|im_end|>yes<|im_end|>"
    assert not (labels == token).any()
    assert sum(batch["pixel_values"].shape[0] for batch in batches if "pixel_values" in batch)


def test_a_text_that_the_processor_changes_is_bad(tmp_path):
    class Shouting(NoneOfTransformers):
        def __call__(self, text, images=None, return_tensors=None):
            return super().__call__([one.upper() for one in text], images, return_tensors)

    (tmp_path / "data.jsonl").write_text(sample(places=0, answer="yes") + "\n")
    with pytest.raises(DataError, match="data.jsonl:1: the processor returns other tokens than the text has around '"):
        list(loader_of(tmp_path / "data.jsonl", processor=Shouting()))


TOKENIZER = byte_tokenizer(TEXT, {"image_token": "<image>"})
segments = st.lists(st.text("ab \n", max_size=8), min_size=2, max_size=4)


@settings(max_examples=80)
@given(
    texts=segments,
    expansions=st.lists(st.text("ab \n", max_size=6), min_size=3, max_size=3),
    answer=st.text("ab", min_size=1),
)
def test_what_is_found_is_the_answer_or_nothing_is_learned(texts, expansions, answer):
    """Whatever a processor writes for an item; where an answer could be in two places, the sample is refused."""
    text, ids = f"{texts[0]}", f"{texts[0]}"
    for segment, expansion in zip(texts[1:], expansions, strict=False):
        text, ids = f"{text}<image>{segment}", f"{ids}{expansion}<image>{expansion}{segment}"
    text, ids = f"{text}<|im_start|>{answer}<|im_end|>", f"{ids}<|im_start|>{answer}<|im_end|>"
    span = (text.rindex("<|im_start|>") + len("<|im_start|>"), len(text))
    made = TOKENIZER(ids)["input_ids"]
    try:
        found = alignment_by_matching("x", made, text, TOKENIZER, [span])
    except BadSample as error:
        assert "is unknown" in error.reason
        return
    mask = found.overlapping([span])
    assert np.flatnonzero(mask).tolist() == [*range(len(made) - len(answer) - 1, len(made))]


def test_a_field_without_a_rule_is_an_error_with_the_sample(tmp_path):
    class Extra(NoneOfTransformers):
        def __call__(self, text, images=None, return_tensors=None):
            return super().__call__(text, images, return_tensors) | {"pixel_colours": torch.ones(1)}

    (tmp_path / "data.jsonl").write_text(json.dumps(json.loads(sample(places=0))) + "\n")
    with pytest.raises(DataError, match="data.jsonl:1: Extra returns the field 'pixel_colours'. No rule says how"):
        list(loader_of(tmp_path / "data.jsonl", processor=Extra(), on_bad="skip"))
