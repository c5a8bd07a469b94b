"""Boxes read by us against tensors read by the safetensors library; files that are damaged."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from patchgen.runtime.checkpoint import CheckpointError, file_reader
from patchgen.runtime.checkpoint.file_reader import FileReader
from patchgen.runtime.checkpoint.finite import is_finite
from patchgen.runtime.checkpoint.quantised import read_folder
from patchgen.runtime.checkpoint.writing import Output, plan_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "three": torch.randn(7, 5, 6, generator=generator).bfloat16(),
        "two": torch.randn(9, 4, generator=generator),
        "one": torch.randn(11, generator=generator),
        "none": torch.tensor(3.5),
        "whole": torch.arange(12).view(3, 4),
        "flag": torch.tensor([True, False]),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@given(st.sampled_from(["three", "two", "one", "none", "whole", "flag"]), st.data())
@settings(max_examples=80)
def test_boxes(folder, name, data):
    stored = read_folder(folder)[name]
    whole = load_file(folder / "model.safetensors")[name]
    box = []
    for size in whole.shape:
        start = data.draw(st.integers(0, size - 1))
        box.append((start, data.draw(st.integers(start + 1, size))))
    expected = whole[tuple(slice(*bounds) for bounds in box)]
    dtype = data.draw(st.sampled_from([whole.dtype, torch.float64]))
    out = torch.zeros(expected.shape, dtype=dtype)
    if expected.ndim > 1 and data.draw(st.booleans()):
        out = torch.zeros(*expected.shape[::-1], dtype=dtype).permute(*range(expected.ndim)[::-1])
    # Small limits reach the paths that large tensors take.
    before = file_reader.STAGING_BYTES, file_reader.SHORT_RUN_BYTES
    file_reader.STAGING_BYTES, file_reader.SHORT_RUN_BYTES = data.draw(st.sampled_from([(1 << 20, 1 << 16), (64, 8)]))
    try:
        with FileReader() as reader:
            reader.read(stored, tuple(box), out)
    finally:
        file_reader.STAGING_BYTES, file_reader.SHORT_RUN_BYTES = before
    assert torch.equal(out, expected.to(dtype))


@given(st.data())
@settings(max_examples=80)
def test_stretches_of_a_file(folder, data):
    """Boxes of all tensors, some cast and some turned, read as one: beside the safetensors library's.

    With blocks that cut elements and tensors, buffers that hold few of them, and a system that reads less than asked;
    with or without a NaN, which is found wherever it lies.
    """
    loaded = load_file(folder / "model.safetensors")
    with_nan = data.draw(st.sampled_from([None, "three", "two", "one"]))
    if with_nan:
        flat = loaded[with_nan].view(-1)
        flat[data.draw(st.integers(0, flat.numel() - 1))] = float("nan")
    reads, expected = [], {}
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        save_file(loaded, Path(place) / "model.safetensors")
        for name, stored in sorted(read_folder(Path(place)).items(), key=lambda item: item[1].offset):
            box = [(0, size) for size in stored.shape]
            if box and data.draw(st.booleans()):
                start = data.draw(st.integers(0, box[0][1] - 1))
                box[0] = (start, data.draw(st.integers(start + 1, box[0][1])))
            wanted = loaded[name][tuple(slice(*bounds) for bounds in box)]
            out = torch.zeros(wanted.shape, dtype=data.draw(st.sampled_from([stored.dtype, torch.float64])))
            if out.ndim > 1 and data.draw(st.booleans()):
                out = torch.zeros(wanted.shape[::-1], dtype=out.dtype).permute(*range(out.ndim)[::-1])
            reads.append((stored, tuple(box), out))
            expected[name] = wanted.to(out.dtype)
        limits = {"BLOCK_BYTES": [5, 64, 1 << 20], "STAGING_BYTES": [512, 1 << 20], "MAX_BUFFERS": [1, 2, 1024]}
        for limit, choices in limits.items():
            patch.setattr(file_reader, limit, data.draw(st.sampled_from(choices)))
        most = data.draw(st.sampled_from([1, 7, 1 << 20]))
        patch.setattr(file_reader.os, "preadv", functools.partial(short_preadv, os.preadv, most))
        with FileReader(keeps_pages=data.draw(st.booleans())) as reader:
            problems = reader.read_in_order(reads)
    bad = [name for name, wanted in expected.items() if wanted.isnan().any()]
    assert list(problems) == bad and all(text.endswith("holds NaN.") for text in problems.values())
    for stored, _, out in reads:
        assert stored.name in bad or torch.equal(out, expected[stored.name])


def short_preadv(preadv, most, descriptor, buffers, offset, *flags):
    """Reads `most` bytes at most, as a system may."""
    cut, left = [], most
    for buffer in buffers:
        cut.append(memoryview(buffer)[:left])
        left -= len(cut[-1])
        if left == 0:
            break
    return preadv(descriptor, cut, offset, *flags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_problems_of_one_read_are_reported_by_key(dtype, tmp_path):
    """NaN in one tensor, and a file that ends in another after its header was read: the rest is whole."""
    tensors = {name: torch.full((100,), float(place)) for place, name in enumerate("abcde")}
    tensors["b"][99] = float("nan")
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    stored = read_folder(tmp_path)
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size - 404)
    outs = {name: torch.zeros(100, dtype=dtype) for name in "abcde"}
    with FileReader() as reader:
        problems = reader.read_in_order([(stored[name], ((0, 100),), outs[name]) for name in "abcde"])
    ends = f"the file ends at byte {size - 404}, before the tensor does"
    assert problems == {
        "b": f"b in {file} holds NaN.",
        "d": f"d cannot be read from {file}: {ends}",
        "e": f"e cannot be read from {file}: {ends}",
    }
    for name in "ac":
        assert torch.equal(outs[name], tensors[name].to(dtype))


def test_a_thread_keeps_few_files_open(tmp_path):
    """Fewer than there are, over and over; each read is of the right file, and all are closed in the end."""
    for number in range(3 * file_reader.MAX_OPEN_FILES):
        save_file({f"k{number:02}": torch.full((4,), float(number))}, tmp_path / f"{number:02}.safetensors")
    stored = read_folder(tmp_path)
    before = set(os.listdir("/proc/self/fd"))
    with FileReader() as reader:
        for _ in range(2):
            for number, tensor in enumerate(stored.values()):
                out = torch.empty(4)
                reader.read(tensor, ((0, 4),), out)
                assert torch.equal(out, torch.full((4,), float(number)))
                assert len(set(os.listdir("/proc/self/fd")) - before) <= file_reader.MAX_OPEN_FILES + 1
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # that of the listing itself


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (torch.tensor([1, 70000]), torch.float16),
        (torch.tensor([300, -1]), torch.uint8),
        (torch.tensor([70000]), torch.int16),
        (torch.tensor([0.5]), torch.int32),
    ],
)
def test_integers_that_the_dtype_cannot_represent(values, dtype, tmp_path):
    save_file({"a": values}, tmp_path / "model.safetensors")
    out = torch.zeros(values.shape, dtype=dtype)
    with (
        FileReader() as reader,
        pytest.raises(CheckpointError, match=f"a in .* holds .*, which {dtype} cannot represent"),
    ):
        reader.read(read_folder(tmp_path)["a"], ((0, len(values)),), out)
    assert not out.any()


def test_reads_that_bypass_the_page_cache_give_the_same(folder):
    """Where the system cannot read so, it is read as always: every tensor beside the safetensors library's."""
    for name, stored in read_folder(folder).items():
        out = torch.empty(stored.shape, dtype=stored.dtype)
        with FileReader(keeps_pages=False) as reader:
            reader.read(stored, tuple((0, size) for size in stored.shape), out)
        assert torch.equal(out, load_file(stored.file)[name])


@given(
    st.sampled_from([(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4), (torch.float64, 8)]),
    st.lists(st.binary(min_size=8, max_size=8), max_size=6),
    st.lists(st.sampled_from([0.0, -0.0, 1e-30, -3.0, float("inf"), float("-inf")]), max_size=6),
)
@settings(max_examples=300)
def test_what_is_not_finite_is_found_in_any_bits(kind, patterns, plain):
    """Beside torch.isfinite: of bits that are drawn, NaN and infinities of both signs with it."""
    dtype, width = kind
    drawn = torch.tensor([list(bits[:width]) for bits in patterns], dtype=torch.uint8).view(-1).view(dtype)
    others = [torch.tensor([value]).to(dtype) for value in (float("nan"), -float("nan"), float("inf"), -float("inf"))]
    values = torch.cat([drawn, torch.tensor(plain).to(dtype)])
    assert is_finite(values) == bool(values.isfinite().all())
    for other in others:
        assert not is_finite(torch.cat([values, other])) and not bool(other.isfinite())


def test_only_the_bytes_of_the_box_are_read(folder):
    stored = read_folder(folder)["three"]
    with FileReader() as reader:
        reader.read(stored, ((2, 4), (0, 5), (0, 6)), torch.empty(2, 5, 6, dtype=torch.bfloat16))
        assert reader.bytes_read == 2 * 5 * 6 * 2


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": torch.ones(4, 4)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(4, 4), "c": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors"}
    weight_map |= dict.fromkeys(("b", "c"), "model-00002-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_a_sharded_folder(sharded):
    assert sorted(read_folder(sharded)) == ["a", "b", "c"]


def test_parts_without_their_index_are_refused(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="model-00001-of-00002.safetensors is one of several files, and"):
        read_folder(sharded)


def entry(start, stop):
    return {"dtype": "F32", "shape": [1], "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ([], "h.safetensors has a header that is not a JSON object"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "a in h.safetensors has no valid dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, "a in h.safetensors has no valid dtype"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, "a in h.safetensors has no valid dtype"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, "b in h.safetensors overlaps a"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, "b in h.safetensors comes after 4 bytes that belong to no tensor"),
    ],
)
def test_headers_that_make_no_sense(header, told, tmp_path):
    text = json.dumps(header).encode()
    (tmp_path / "h.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    with pytest.raises(CheckpointError, match=told):
        read_folder(tmp_path)


@pytest.mark.parametrize("shape", [(6,), (3, 5), (4, 3, 5)])
def test_values_that_the_dtype_has_no_room_for(shape, tmp_path):
    """Whole and in short rows; infinities of the file itself stay what they are, where they may be."""
    values = torch.ones(shape)
    values.view(-1)[0] = float("inf")
    save_file(
        {"fits": values, "large": values.clone().index_fill_(0, torch.tensor([1]), 1e6)}, tmp_path / "h.safetensors"
    )
    stored = read_folder(tmp_path)
    box = tuple((0, size) for size in shape)
    box = (*box[:-1], (0, shape[-1] - 1)) if len(shape) > 1 else box
    out = torch.empty([stop for _, stop in box], dtype=torch.float16)
    with (
        FileReader() as reader,
        pytest.raises(CheckpointError, match="fits in .*h.safetensors holds an infinite value"),
    ):
        reader.read(stored["fits"], box, out)
    with FileReader(may_be_infinite={"fits", "large"}) as reader:
        reader.read(stored["fits"], box, out)
        assert torch.equal(out, values[tuple(slice(*bounds) for bounds in box)].half())
        with pytest.raises(
            CheckpointError, match=r"large in .*h.safetensors holds 1e\+06, which torch.float16 cannot represent"
        ):
            reader.read(stored["large"], box, out)
        reader.read(stored["large"], box, out.bfloat16())


@pytest.mark.parametrize("astray", ["../other.safetensors", "/etc/passwd", "a/../../b.safetensors", 7, None])
def test_an_index_leads_to_its_own_folder(astray, sharded):
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"] | {"c": astray}}))
    with pytest.raises(CheckpointError, match=f"index.json points outside of its folder:\n  c in {astray!r}"):
        read_folder(sharded)


def test_every_damage_is_listed_with_file_and_key(sharded):
    (sharded / "model-00001-of-00002.safetensors").unlink()
    second = sharded / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-20])
    with pytest.raises(CheckpointError) as caught:
        read_folder(sharded)
    text = str(caught.value)
    assert "model-00001-of-00002.safetensors is missing" in text
    assert "1 keys are lost: a" in text
    assert "b in model-00002-of-00002.safetensors ends at byte" in text


def test_a_key_that_is_not_where_the_index_says(sharded):
    index = sharded / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"] |= {"d": "model-00001-of-00002.safetensors"}
    del fields["weight_map"]["c"]
    index.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError) as caught:
        read_folder(sharded)
    assert "says that d is in model-00001-of-00002.safetensors; it is not" in str(caught.value)
    assert "model-00002-of-00002.safetensors holds c, which" in str(caught.value)


@pytest.mark.parametrize("length", [0, 4, 30])
def test_a_file_that_is_cut_in_its_header(sharded, length):
    first = sharded / "model-00001-of-00002.safetensors"
    first.write_bytes(first.read_bytes()[:length])
    with pytest.raises(CheckpointError, match="model-00001-of-00002.safetensors is truncated in its header"):
        read_folder(sharded)


def test_other_formats_are_named(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither .* holds weights in another format, pytorch_model.bin"):
        read_folder(tmp_path)
    with pytest.raises(CheckpointError, match="is a folder with safetensors files. .* does not exist"):
        read_folder(tmp_path / "nowhere")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 400))
@settings(max_examples=50)
def test_planned_files_have_every_tensor_once_and_respect_the_limit(sizes, limit):
    from patchgen.runtime.checkpoint.lazy_tensors import leaf

    outputs = [
        Output(f"layers.{place}.w", leaf("w", (size,), torch.float32, None), torch.float32)
        for place, size in enumerate(sizes)
    ]
    files = plan_files(outputs, max_file=limit)
    assert [output.name for file in files for output in file.outputs] == [output.name for output in outputs]
    for file in files:
        assert len(file.outputs) == 1 or sum(output.num_bytes for output in file.outputs) <= limit


PLACES = {  # files with weights in a folder -> the value that transformers loads; "named" is the field transformers_weights
    "single, index": 1.0,
    "single, bin": 1.0,
    "index, bin": 2.0,
    "single, index, bin, bin index": 1.0,
    "single, index, bin, named.safetensors": 3.0,
    "single, named.safetensors.index.json": 4.0,
}


def write_weights(folder: Path, places: str) -> None:
    """A model in every place, its values telling which."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 8}
    config = LlamaConfig(vocab_size=4, hidden_size=4, intermediate_size=4, **sizes)
    model = LlamaForCausalLM(config)
    for place in places.split(", "):
        value = {"single": 1.0, "index": 2.0, "named.safetensors": 3.0, "named.safetensors.index.json": 4.0}.get(
            place, 5.0
        )
        state = {name: torch.full_like(tensor, value) for name, tensor in model.state_dict().items()}
        index = {"metadata": {}, "weight_map": dict.fromkeys(state, f"part {value}.safetensors")}
        if place.startswith("named"):
            config.transformers_weights = place
        if place in ("single", "named.safetensors"):
            save_file(state, folder / ("model.safetensors" if place == "single" else place))
        elif place in ("index", "named.safetensors.index.json"):
            save_file(state, folder / f"part {value}.safetensors")
            name = "model.safetensors.index.json" if place == "index" else place
            (folder / name).write_text(json.dumps(index))
        elif place == "bin":
            torch.save(state, folder / "pytorch_model.bin")
        else:
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    config.architectures = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(config.to_json_string())


@pytest.mark.parametrize("places", PLACES)
def test_of_several_weights_in_a_folder_everything_reads_those_that_transformers_reads(places, tmp_path):
    """Loading, its report, `convert`, `fingerprint` and an export, beside `from_pretrained`."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    from patchgen.runtime.checkpoint import convert, export_pretrained, fingerprint, load_pretrained

    (source := tmp_path / "in").mkdir()
    write_weights(source, places)
    plain = AutoModelForCausalLM.from_pretrained(source)
    assert plain.model.norm.weight[0].item() == PLACES[places]
    config = plain.config
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config)
    report = load_pretrained(model, source)
    convert(source, tmp_path / "converted")
    export_pretrained(model, tmp_path / "exported", source=source)
    for folder in (tmp_path / "converted", tmp_path / "exported"):
        again = AutoModelForCausalLM.from_pretrained(folder)
        assert again.model.norm.weight[0].item() == PLACES[places]
        assert fingerprint(folder) == fingerprint(source)
    assert model.model.norm.weight[0].item() == PLACES[places]
    names = {"single": "model.safetensors", "index": "model.safetensors.index.json", "bin": "pytorch_model.bin"}
    beside = [names[place] for place in places.split(", ")[1:] if place in names and PLACES[places] != 3.0]
    assert all(name in str(report).partition("not read, as in transformers")[2] for name in beside)


def test_a_pickle_that_transformers_would_read_is_named_instead_of_files_beside_it(tmp_path):
    write_weights(tmp_path, "bin")
    save_file({"other": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"from pytorch_model\.bin and not from adapter_model.*a pickle.*save_pretrained"
    ):
        read_folder(tmp_path)


@pytest.mark.parametrize("named", ["../model.safetensors", "weights.bin", "gone.safetensors"])
def test_a_file_named_in_the_config_must_be_in_the_folder(named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": named}))
    save_file({"one": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"transformers_weights = '{named}'"):
        read_folder(tmp_path)
