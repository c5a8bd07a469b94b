"""Special tokens in the data's own texts are text, in every kind of data, unless the recipe says that they are meant."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small_processors import audio_processor, byte_tokenizer, image_processor, template
from small_tokenizers import of_mistral
from test_multimodal import loader_of, sample

from patchgen.runtime.data import DataConfig, DataError, SourceConfig
from patchgen.runtime.data.chat import ChatEncoder
from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.multimodal import PrepareMultimodal
from patchgen.runtime.data.problems import BadSample
from patchgen.runtime.data.records import Record
from patchgen.runtime.data.text import TextEncoder

TOKENS = ["<|im_start|>", "<|im_end|>", "<|pad|>", "<|box|>"]
TOKENIZER = byte_tokenizer(template(), {"box_token": "<|box|>"})
TEMPLATES = [template(), template(marked=False)]
pieces = st.lists(st.sampled_from([*TOKENS, "a", " ", "é", "\n", "<|", "\U000f0000"]), max_size=6).map("".join)

pytestmark = pytest.mark.filterwarnings("ignore:.*in the data is encoded as plain text")


def special_ids(ids) -> list[str]:
    return [token for token in TOKENIZER.convert_ids_to_tokens(list(ids)) if token in TOKENS]


@settings(max_examples=60)
@given(question=pieces, answer=pieces, number=st.integers(0, 1))
def test_a_conversation_has_the_special_tokens_of_its_template_only(question, answer, number):
    tokenizer = byte_tokenizer(TEMPLATES[number], {"box_token": "<|box|>"})
    encoder = ChatEncoder(tokenizer)
    messages = [{"role": "user", "content": f"q{question}q"}, {"role": "assistant", "content": f"b{answer}b"}]
    (found,) = encoder.encode([("x", {"messages": messages})])
    bare = answer.replace("\U000f0000", "")
    assert special_ids(found.ids) == ["<|im_start|>", "<|im_end|>"] * 2
    assert tokenizer.decode(found.ids[found.targets]) == f"b{bare}b<|im_end|>"
    assert f"q{question}q".replace("\U000f0000", "") in tokenizer.decode(found.ids)


@settings(max_examples=60)
@given(text=pieces)
def test_a_document_has_none_but_its_end(text):
    encoder = TextEncoder(TOKENIZER, append_eos=True)
    found = encoder.encode([("one", {"text": "plain"}), ("two", {"text": f"d{text}"}), ("three", {"text": "more"})])
    assert special_ids(found[1].ids) == ["<|im_end|>"]
    assert [TOKENIZER.decode(one.ids[:-1]) for one in found] == ["plain", f"d{text}".replace("\U000f0000", ""), "more"]


def test_those_that_the_recipe_names_are_meant():
    text = "see <|box|>(1,2)<|box|> and <|im_start|>"
    encoder = TextEncoder(TOKENIZER, append_eos=False, special_tokens=("<|box|>",))
    (found,) = encoder.encode([("x", {"text": text})])
    assert special_ids(found.ids) == ["<|box|>", "<|box|>"]
    assert TOKENIZER.decode(found.ids) == text
    assert encoder.fingerprint() != TextEncoder(TOKENIZER, append_eos=False).fingerprint()
    with pytest.raises(DataError, match=r"'<\|boxx\|>', which is not a special token.*are, for example, <\|box\|>"):
        TextEncoder(TOKENIZER, append_eos=False, special_tokens=("<|boxx|>",))


def test_a_tokenizer_that_does_not_list_its_special_tokens_is_refused():
    with pytest.raises(DataError, match="is a MistralCommonBackend.* To fix: uninstall the package mistral-common"):
        Literals(of_mistral("<s>", "one"))


def test_the_warning_comes_once_per_token():
    literals = Literals(TOKENIZER)
    with pytest.warns(UserWarning, match=r"'<\|box\|>' in the data is encoded as plain text") as told:
        literals.mark([{"content": "<|box|> <|box|>"}, {"content": "<|box|>"}])
    assert len(told) == 1


def test_a_tokenizer_without_a_token_to_stand_in_makes_a_bad_sample():
    bare = byte_tokenizer(template(), {"box_token": "<|box|>"})
    bare.pad_token = bare.eos_token = None
    with pytest.raises(BadSample, match=r"a.jsonl:1: '<\|box\|>' in a text, and the tokenizer has no token"):
        Literals(bare).encode("a.jsonl:1", Literals(bare).mark("a <|box|>"))


def test_a_placeholder_in_a_text_is_text_also_with_media(tmp_path):
    """`<image>` in a text ended a run: the processor counted it as a place for an image."""
    processor = image_processor()
    for text, images in (("What is <image>?", 0), ("What is <image>?", 1)):
        line = json.loads(sample(places=0, answer="a mark: <image>"))
        line["messages"][0]["content"] = [*[{"type": "image"}] * images, {"type": "text", "text": text}]
        line["images"] = ["x.png"] * images
        Image.new("RGB", (30, 30)).save(tmp_path / "x.png")
        (tmp_path / "data.jsonl").write_text(json.dumps(line) + "\n")
        (batch,) = loader_of(tmp_path / "data.jsonl", processor=processor)
        assert int((batch["input_ids"] == processor.image_token_id).sum()) == 4 * images
        labels = batch["labels"][0]
        assert processor.tokenizer.decode(labels[labels >= 0]) == "a mark: <image><|im_end|>"


def test_media_without_a_placeholder_in_the_tokenizer_are_bad_samples(tmp_path):
    processor = image_processor(marks={})
    Image.new("RGB", (30, 30)).save(tmp_path / "x.png")
    (tmp_path / "data.jsonl").write_text("\n".join([sample(places=0), sample("x.png")]) + "\n")
    with pytest.raises(
        DataError, match=r"data.jsonl:2: LlavaProcessor uses the placeholder .<image>., and the tok.*on_bad"
    ):
        list(loader_of(tmp_path / "data.jsonl", processor=processor))
    loader = loader_of(tmp_path / "data.jsonl", processor=processor, on_bad="skip")
    assert len(list(loader)) == 1
    assert loader.counters.counts == {"bad": 1}


@pytest.mark.parametrize("samples", [0, 40])
def test_a_sound_without_a_token_is_bad(tmp_path, samples):
    sound = {"type": "audio", "audio": {"array": [0.0] * samples, "sampling_rate": 16000}}
    messages = [{"role": "user", "content": [sound]}, {"role": "assistant", "content": "A"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(DataError, match=r"data.jsonl:1: .*(too small for a token|without samples).*on_bad"):
        list(loader_of(tmp_path / "data.jsonl", processor=audio_processor()))


def counting_from_none(input_ids):
    """As a position function ends that has fewer grids than items."""
    return next(None)


def test_what_a_position_function_refuses_is_bad(tmp_path):
    config = DataConfig(sources=(SourceConfig(str(tmp_path)),), kind="multimodal")
    prepare = PrepareMultimodal(config, image_processor(), counting_from_none)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    outcome, where, reason = prepare(0, Record("a.jsonl:7", {"messages": messages})).problem
    assert (outcome, where) == ("bad", "a.jsonl:7")
    assert (
        reason == "the model's position function refuses the sample: TypeError: 'NoneType' object is not an iterator"
    )


def test_a_missing_package_is_no_sample_s_fault(tmp_path):
    class Needy(type(image_processor())):
        def __call__(self, **options):
            raise ImportError("torchvision is not installed")

    needy = Needy.__new__(Needy)
    needy.__dict__ = image_processor().__dict__
    (tmp_path / "data.jsonl").write_text(sample(places=0) + "\n")
    with pytest.raises(DataError, match="data.jsonl:1: Needy cannot be used here: ImportError: torchvision"):
        list(loader_of(tmp_path / "data.jsonl", processor=needy, on_bad="skip"))
