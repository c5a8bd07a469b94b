"""The dtypes of an export: tensor by tensor those of the checkpoint that was loaded, or the one that is chosen."""

from __future__ import annotations

import json
import re

import pytest
import small_models
import torch
from typer.testing import CliRunner

from patchgen.cli import app
from patchgen.runtime.checkpoint import Checkpointer, export_pretrained, export_run, load_pretrained, stream_weights

WIDE = re.compile(r"model\.norm|layers\.1\.input_layernorm|mlp\.gate\.")


def mostly_bf16(found: dict) -> dict:
    """The dtypes of the final norm, the routers and one of two equal norms stay."""
    return {name: tensor if WIDE.search(name) else tensor.bfloat16() for name, tensor in found.items()}


@pytest.fixture(params=["per-expert", "stacked", "transposed"])
def source(request, checkpoint, tmp_path):
    return small_models.rewrite(
        checkpoint, tmp_path / "source", lambda found: mostly_bf16(small_models.LAYOUTS[request.param](found))
    )


def trained_from(source, dtype=torch.float32):
    """A model of a run: in its own dtype, and changed by less than the source's dtype can hold."""
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM._from_config(small_models.moe_config(), attn_implementation="eager", dtype=dtype)
    load_pretrained(model, source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-4)
    return model


def dtypes(folder) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in small_models.tensors(folder).items()}


@pytest.mark.parametrize("trained_in", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["model", "stream", "run", "run whose source is gone"])
def test_each_tensor_has_the_dtype_that_the_source_has(way, trained_in, source, tmp_path):
    expected, model, out = dtypes(source), trained_from(source, trained_in), tmp_path / "out"
    assert set(expected.values()) == {torch.float32, torch.bfloat16}
    if way == "stream":
        assert {name: tensor.dtype for name, tensor in stream_weights(model)} == expected
        return
    if way == "model":
        export_pretrained(model, out)
    else:
        Checkpointer(tmp_path / "run").save(1, model=model, asynchronous=False)
        if "gone" in way:
            source.rename(tmp_path / "elsewhere")
        export_run(tmp_path / "run", out)
    assert dtypes(out) == expected
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    values = model.state_dict()["model.norm.weight"]
    assert torch.equal(small_models.tensors(out)["model.norm.weight"], values.float())


@pytest.mark.parametrize("source", ["per-expert"], indirect=True)
def test_another_layout_keeps_the_dtypes_of_what_it_is_built_from(source, tmp_path):
    export_pretrained(trained_from(source), tmp_path / "out", layout="stacked")
    found = dtypes(tmp_path / "out")
    assert found["model.layers.0.mlp.experts.gate_up_proj"] == torch.bfloat16
    assert {name for name, dtype in found.items() if dtype == torch.float32} == {
        name for name in found if WIDE.search(name)
    }


@pytest.mark.parametrize("source", ["per-expert"], indirect=True)
@pytest.mark.parametrize("chosen", ["float32", "bfloat16", "float16"])
def test_the_option_chooses_one_for_all(chosen, source, tmp_path):
    Checkpointer(tmp_path / "run").save(1, model=trained_from(source), asynchronous=False)
    command = ["export", str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--dtype", chosen]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert set(dtypes(tmp_path / "out").values()) == {getattr(torch, chosen)}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == chosen


@pytest.mark.parametrize("trained_in", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_source_they_are_those_of_the_weights(trained_in, original, tmp_path):
    model = type(original)._from_config(small_models.moe_config(), dtype=trained_in)
    export_pretrained(model, tmp_path / "out")
    assert set(dtypes(tmp_path / "out").values()) == {trained_in}
    assert f"torch.{json.loads((tmp_path / 'out' / 'config.json').read_text())['dtype']}" == str(trained_in)


@pytest.mark.parametrize("source", ["per-expert"], indirect=True)
def test_a_value_that_the_dtype_of_the_source_cannot_hold_is_refused_with_the_way_out(source, tmp_path):
    half = small_models.rewrite(source, tmp_path / "half", lambda found: {n: t.half() for n, t in found.items()})
    model = trained_from(half)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e6
    with pytest.raises(
        ValueError, match=r"(?s)lm_head.weight holds 1e\+06.*float16.*--dtype; in a recipe checkpoint.export_dtype"
    ):
        export_pretrained(model, tmp_path / "out")
    export_pretrained(model, tmp_path / "out", dtype=torch.bfloat16)
