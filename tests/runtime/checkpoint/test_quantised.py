"""Quantised tensors are read as the numbers that they stand for, any region of them: against transformers, and one by one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import quantised_files as files
import small_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, GptOssConfig, Mxfp4Config, Qwen3MoeConfig

from patchgen.runtime import registry
from patchgen.runtime.checkpoint import load_pretrained, offline
from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.file_reader import FileReader
from patchgen.runtime.checkpoint.lazy_tensors import full_region
from patchgen.runtime.checkpoint.quantised import read_folder
from patchgen.runtime.checkpoint.quantised_tensors import QuantisedTensor

SHAPE = (200, 320)  # more than one block, the last smaller
NF4_STATE = b'{"shape": [2, 4], "blocksize": 64, "quant_type": "nf4"}'
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [files.BLOCK, files.BLOCK], "activation_scheme": "dynamic"}


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _fp8_in_blocks() -> tuple[dict, Tensor]:
    stored = files.fp8_blocks(_random(*SHAPE), "w")
    return stored, files.numbers_of_fp8(stored, "w")


def _fp8_in_blocks_of_experts() -> tuple[dict, Tensor]:
    stored = files.fp8_blocks(_random(2, *SHAPE), "w")
    return stored, files.numbers_of_fp8(stored, "w")


def _fp8_by_rows() -> tuple[dict, Tensor]:
    values, scales = _random(*SHAPE).to(torch.float8_e4m3fn), _random(SHAPE[0], 1).abs().bfloat16()
    return {"w": values, "w_scale": scales, "input_scale": torch.ones(1)}, values.float() * scales.float()


def _fp8_whole() -> tuple[dict, Tensor]:
    values, scale = _random(*SHAPE).to(torch.float8_e5m2), torch.tensor(0.37)
    return {"w": values, "w_scale": scale}, values.float() * scale


def _int8_by_rows() -> tuple[dict, Tensor]:
    values = (_random(*SHAPE) * 40).to(torch.int8)
    return {"w": values, "w_scale": torch.full((SHAPE[0],), 0.25)}, values.float() * 0.25


def _mxfp4() -> tuple[dict, Tensor]:
    packed, numbers = files.packed_fp4(SHAPE, torch.Generator().manual_seed(1))
    exponents = torch.randint(120, 130, (SHAPE[0], SHAPE[1] // 32), generator=torch.Generator().manual_seed(2))
    return {"w_packed": packed, "w_scale": exponents.to(torch.uint8)}, numbers * files.spread(
        torch.tensor(2.0) ** (exponents - 127), 32
    )


def _mxfp4_of_gpt_oss() -> tuple[dict, Tensor]:
    stored, numbers = _mxfp4()
    blocks = torch.stack([stored["w_packed"].view(SHAPE[0], -1, 16)] * 2)
    return {"w_blocks": blocks, "w_scales": torch.stack([stored["w_scale"]] * 2)}, torch.stack([numbers.T] * 2)


def _nvfp4_that_divides() -> tuple[dict, Tensor]:
    packed, numbers = files.packed_fp4(SHAPE, torch.Generator().manual_seed(3))
    scales = _random(SHAPE[0], SHAPE[1] // 16).abs().to(torch.float8_e4m3fn)
    stored = {"w_packed": packed, "w_scale": scales, "w_global_scale": torch.tensor([640.0])}
    return stored, numbers * files.spread(scales.float() / 640.0, 16)


def _nvfp4_that_multiplies() -> tuple[dict, Tensor]:
    packed, numbers = files.packed_fp4(SHAPE, torch.Generator().manual_seed(4))
    scales = _random(SHAPE[0], SHAPE[1] // 16).abs().to(torch.float8_e4m3fn)
    stored = {"w": packed, "w_scale": scales, "w_scale_2": torch.tensor(0.01), "k_scale": torch.ones(1)}
    return stored, numbers * files.spread(scales.float() * torch.tensor(0.01), 16)


def _int4_in_groups() -> tuple[dict, Tensor]:
    packed, numbers = files.packed_integers(SHAPE, 4, torch.Generator().manual_seed(5))
    scales = _random(SHAPE[0], SHAPE[1] // 32).abs().bfloat16()
    stored = {"w_packed": packed, "w_scale": scales, "w_shape": torch.tensor(SHAPE)}
    return stored, numbers * files.spread(scales.float(), 32)


def _nf4(is_nested: bool) -> tuple[dict, Tensor]:
    """In runs of 64 numbers, which cross rows, as bitsandbytes writes them; scales in runs of 256, if they are quantised."""
    generator = torch.Generator().manual_seed(6)
    shape = SHAPE
    codes = torch.randint(0, 16, (math.prod(shape),), generator=generator)
    table, state = torch.linspace(-1, 1, 16), {"shape": shape, "blocksize": 64, "quant_type": "nf4"}
    stored = {"w": (codes[0::2] * 16 + codes[1::2]).to(torch.uint8).view(-1, 1), "w.quant_map": table}
    scales = torch.rand(math.prod(shape) // 64, generator=generator)
    if is_nested:
        bytes_ = torch.randint(0, 256, scales.shape, generator=generator)
        outer_table, outer = torch.rand(256, generator=generator), torch.rand(4, generator=generator)
        scales = outer_table[bytes_] * outer.repeat_interleave(256)[: len(scales)] + 0.25
        stored |= {"w.nested_quant_map": outer_table, "w.nested_absmax": outer}
        state |= {"nested_blocksize": 256, "nested_offset": 0.25}
    stored["w.absmax"] = bytes_.to(torch.uint8) if is_nested else scales
    stored["w.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return stored, (table[codes] * scales.repeat_interleave(64)).view(shape)


FORMS = {
    "FP8 in blocks": _fp8_in_blocks,
    "FP8 in blocks, experts": _fp8_in_blocks_of_experts,
    "FP8 by rows": _fp8_by_rows,
    "FP8 whole": _fp8_whole,
    "INT8 by rows": _int8_by_rows,
    "MXFP4": _mxfp4,
    "MXFP4 of gpt-oss": _mxfp4_of_gpt_oss,
    "NVFP4 that divides": _nvfp4_that_divides,
    "NVFP4 that multiplies": _nvfp4_that_multiplies,
    "INT4 in groups": _int4_in_groups,
    "NF4": lambda: _nf4(is_nested=False),
    "NF4, quantised scales": lambda: _nf4(is_nested=True),
}


@pytest.fixture(scope="module", params=FORMS)
def form(request, tmp_path_factory) -> tuple[QuantisedTensor, Tensor]:
    """A tensor in a file, and its numbers."""
    stored, numbers = FORMS[request.param]()
    folder = tmp_path_factory.mktemp("form")
    save_file(stored | {"plain": torch.ones(3)}, folder / "model.safetensors")
    quantisation = FP8_CONFIG if "blocks" in request.param else {"quant_method": "compressed-tensors"}
    (folder / "config.json").write_text(json.dumps({"text_config": {"quantization_config": quantisation}}))
    found = read_folder(folder)
    assert {*found} == {"w", "plain"} and not isinstance(found["plain"], QuantisedTensor)
    return found["w"], numbers


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_region_of_a_tensor(form, data):
    """Edges inside of blocks, groups and bytes; in the dtype of the target."""
    stored, numbers = form
    assert stored.shape == tuple(numbers.shape)
    region = []
    for size in stored.shape:
        start = data.draw(st.integers(0, size - 1))
        region.append((start, data.draw(st.integers(start + 1, size))))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    expected = numbers[tuple(slice(*bounds) for bounds in region)].to(dtype)
    with FileReader() as reader:
        out = torch.empty(expected.shape, dtype=dtype)
        reader.read(stored, tuple(region), out)
        assert torch.equal(out, expected)


def test_bytes_that_a_rank_reads(form):
    """A tenth of the rows of one expert is about a tenth of its bytes: scales and whole blocks come on top."""
    stored, numbers = form
    outer = stored.shape[:-2]
    region = (*[(0, 1)] * len(outer), (0, stored.shape[-2] // 10), (0, stored.shape[-1]))
    with FileReader() as reader:
        reader.read(stored, region, torch.empty([stop - start for start, stop in region]))
        assert reader.bytes_read <= 0.2 * stored.num_bytes / math.prod(outer) or stored.form.is_transposed
    assert stored.num_bytes < numbers.numel() * 2


@pytest.mark.parametrize("end", ["_scale_inv", "_scale"])
def test_blocks_that_compressed_tensors_declares(end, tmp_path):
    """960 rows in blocks of 128 have 8 scales, as blocks of 120 would."""
    weight = _random(960, 192)
    save_file(files.fp8_blocks(weight, "w", end), tmp_path / "model.safetensors")
    declared = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "block_structure": [128, 128]}}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": declared}))
    assert read_folder(tmp_path)["w"].blocks == (128, 128)


def test_rows_that_do_not_fill_their_last_integer(tmp_path):
    packed, numbers = files.packed_integers((8, 104), 4, torch.Generator().manual_seed(7))
    stored = {"w_packed": packed, "w_scale": torch.full((8, 1), 0.5), "w_shape": torch.tensor([8, 100])}
    save_file(stored, tmp_path / "model.safetensors")
    tensor = read_folder(tmp_path)["w"]
    out = torch.empty(8, 100)
    with FileReader() as reader:
        reader.read(tensor, full_region(out.shape), out)
    assert torch.equal(out, numbers[:, :100] * 0.5)


def test_an_unquantised_checkpoint_is_read_as_it_is(tmp_path):
    """Whatever its tensors are called: with integers of its own, and names that quantised ones have."""
    stored = {
        "position_ids": torch.arange(4),
        "mlp.w_packed": torch.ones(4, 4),
        "x_blocks": torch.ones(4),
        "x_scales": torch.ones(4),
        "table": torch.ones(4, 4, dtype=torch.uint8),
        "table_scale": torch.ones(4, 4),
        "codes": torch.ones(4, 4, dtype=torch.int8),
        "codes_scale": torch.ones(4, 1),
        "number": torch.tensor(3, dtype=torch.int8),
        "number_scale": torch.ones(1),
        "altup.correct_output_scale": torch.ones(4),
        "attention.k_scale": torch.ones(1),
    }
    save_file(stored, tmp_path / "model.safetensors")
    found = read_folder(tmp_path)
    assert found.keys() == stored.keys() and not any(isinstance(one, QuantisedTensor) for one in found.values())


BROKEN = {
    "no scales": (
        lambda stored: stored.pop("w_scale_inv"),
        "w in model.safetensors is float8_e4m3fn and has no scales",
    ),
    "scales of another shape": (
        lambda stored: stored.update(w_scale_inv=torch.ones(3, 7)),
        r"w_scale_inv in model.safetensors has the shape \[3, 7\], which is no grid over w \[200, 320\]",
    ),
    "GPTQ": (
        lambda stored: stored.update({"v.qweight": torch.ones(4, 4, dtype=torch.int32)}),
        "v.qweight in model.safetensors is of GPTQ or AWQ",
    ),
    "zero points of bytes": (
        lambda stored: stored.update(w_zero_point=torch.zeros(200, 1, dtype=torch.int8)),
        "w_zero_point: weights with zero points",
    ),
    "a state that is no JSON": (
        lambda stored: stored.update(
            {"v.quant_state.bitsandbytes__nf4": torch.ones(3, dtype=torch.uint8), "v": torch.ones(2, 2)}
        ),
        "v.quant_state.bitsandbytes__nf4 in model.safetensors does not say how v is stored",
    ),
    "zero points": (
        lambda stored: stored.update(
            v_packed=torch.ones(4, 4, dtype=torch.int32), v_scale=torch.ones(4, 1), v_zero_point=torch.ones(4, 1)
        ),
        "v_zero_point: weights with zero points",
    ),
    "NF4 without scales": (
        lambda stored: stored.update(
            {
                "v": torch.zeros(4, 1, dtype=torch.uint8),
                "v.quant_state.bitsandbytes__nf4": torch.tensor(
                    list(b'{"shape": [2, 4], "blocksize": 64, "quant_type": "nf4"}'), dtype=torch.uint8
                ),
            }
        ),
        "v in model.safetensors lacks v.absmax, v.quant_map",
    ),
    "packed without scales": (
        lambda stored: stored.update(v_packed=torch.ones(4, 4, dtype=torch.int32)),
        "v_packed in model.safetensors has no scales: expected v_scale",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_refused_by_name(name, tmp_path):
    change, words = BROKEN[name]
    stored, _ = _fp8_in_blocks()
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8_CONFIG}))
    with pytest.raises(CheckpointError, match=words):
        read_folder(tmp_path)


def test_a_damaged_scale_is_told_with_its_tensor(tmp_path):
    stored, _ = _fp8_in_blocks()
    stored["w_scale_inv"][1, 2] = torch.nan
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8_CONFIG}))
    tensor = read_folder(tmp_path)["w"]
    with FileReader() as reader, pytest.raises(CheckpointError, match=r"w_scale_inv in .* holds NaN"):
        reader.read(tensor, full_region(SHAPE), torch.empty(SHAPE))


# ------------------------------------------------------------------------------------------- whole checkpoints


def _qwen3_moe_in_fp8(folder: Path) -> Path:
    """A small model's checkpoint with every projection and expert in FP8 by blocks, as Qwen publishes them."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "head_dim": 128}
    config = Qwen3MoeConfig(**small_models.SMALL | small_models.EXPERTS | sizes)
    model = small_models.build(AutoModelForCausalLM._model_mapping[Qwen3MoeConfig], config)
    plain = folder / "plain"
    model.bfloat16().save_pretrained(plain)

    def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            is_linear = name.endswith("proj.weight")
            changed |= files.fp8_blocks(tensor.float(), name) if is_linear else {name: tensor}
        return changed

    fp8 = small_models.rewrite(plain, folder / "fp8", quantise)
    small_models.change_config(fp8, quantization_config=FP8_CONFIG)
    return fp8


@pytest.fixture(scope="module")
def fp8_checkpoint(tmp_path_factory) -> Path:
    return _qwen3_moe_in_fp8(tmp_path_factory.mktemp("qwen3_moe"))


def _loaded(folder: Path, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a generated model, loaded from a folder."""
    fields = json.loads((folder / "config.json").read_text())
    module = registry.find_model(name).load()
    head = getattr(module, fields["architectures"][0])
    config = head.config_class.from_dict({key: value for key, value in fields.items() if key != "quantization_config"})
    model = small_models.build(head, config, device="meta").to(dtype)
    report = load_pretrained(model, folder)
    assert "dequantised as they were read" in str(report)
    return model.state_dict()


def test_fp8_as_transformers_dequantises_it(fp8_checkpoint):
    upstream = AutoModelForCausalLM.from_pretrained(
        fp8_checkpoint, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    expected, found = upstream.state_dict(), _loaded(fp8_checkpoint, "qwen3_moe", torch.bfloat16)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_mxfp4_as_transformers_dequantises_it(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "layer_types": ["full_attention"] * 2}
    config = GptOssConfig(**small_models.SMALL | sizes)
    model = small_models.build(AutoModelForCausalLM._model_mapping[GptOssConfig], config)
    model.bfloat16().save_pretrained(tmp_path / "plain")

    def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed, generator = dict(tensors), torch.Generator().manual_seed(0)
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, columns, rows = changed.pop(name).shape
            packed, _ = files.packed_fp4((experts, rows, columns), generator)
            changed[f"{name}_blocks"] = packed.view(experts, rows, columns // 32, 16)
            scales = torch.randint(115, 125, (experts, rows, columns // 32), generator=generator)
            changed[f"{name}_scales"] = scales.to(torch.uint8)
        return changed

    folder = small_models.rewrite(tmp_path / "plain", tmp_path / "mxfp4", quantise)
    small_models.change_config(folder, quantization_config={"quant_method": "mxfp4"})
    upstream = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    expected, found = upstream.state_dict(), _loaded(folder, "gpt_oss", torch.bfloat16)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_what_the_model_does_not_use_is_copied_as_numbers(tmp_path):
    """A further prediction layer, which upstream ignores."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 31,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(
        **sizes, **heads, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, v_head_dim=4, qk_nope_head_dim=4
    )
    small_models.build(DeepseekV3ForCausalLM, config).bfloat16().save_pretrained(tmp_path / "plain")
    extra = files.fp8_blocks(_random(*SHAPE), "model.layers.61.mlp.up_proj.weight")
    folder = small_models.rewrite(tmp_path / "plain", tmp_path / "fp8", lambda tensors: tensors | extra)
    small_models.change_config(folder, quantization_config=FP8_CONFIG)
    offline.convert(folder, tmp_path / "bf16")
    name = "model.layers.61.mlp.up_proj.weight"
    assert torch.equal(small_models.tensors(tmp_path / "bf16")[name], files.numbers_of_fp8(extra, name).bfloat16())


def test_convert_writes_what_it_is_now(fp8_checkpoint, tmp_path):
    """An unquantised checkpoint, with a config that says so: plain transformers loads it."""
    offline.convert(fp8_checkpoint, tmp_path / "bf16", layout="per-expert", dtype=torch.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16).state_dict()
    expected = _loaded(fp8_checkpoint, "qwen3_moe", torch.bfloat16)
    assert [name for name in expected if not torch.equal(expected[name], again[name])] == []
