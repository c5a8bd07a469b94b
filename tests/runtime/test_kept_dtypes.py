"""`model.dtype` beside `from_pretrained(dtype=...)` of upstream's class: the dtypes of all parameters, buffers, written tensors."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from patchgen.runtime import kept_dtypes, registry
from patchgen.runtime.checkpoint import export_pretrained, load_pretrained
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import from_dict
from patchgen.runtime.verify.committed_models import committed
from patchgen.runtime.verify.model_pair import perturb
from patchgen.runtime.verify.small_config import small_config

DTYPES = ["bfloat16", "float16"]


@functools.cache
def upstream_class(name: str):
    found = registry.find_model(name)
    return getattr(found.upstream(), found.heads[0])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name -> a folder with a small checkpoint of upstream's class, in fp32."""

    @functools.cache
    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        cls = upstream_class(name)
        torch.manual_seed(0)
        model = cls._from_config(small_config(cls.config_class).config, dtype=torch.float32)
        perturb(model)  # zeros would not show that they were rounded
        model.save_pretrained(folder)
        return folder

    return save


def dtypes_of(model) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def written(folder: Path) -> dict[str, str]:
    """Key -> dtype, of a folder's safetensors files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            keys = file.keys()
            found |= {key: file.get_slice(key).get_dtype() for key in keys}
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", committed())
@pytest.mark.sampled(4)
def test_every_dtype_is_upstreams(name: str, dtype: str, saved, tmp_path):
    folder = saved(name)
    upstream = upstream_class(name).from_pretrained(folder, dtype=getattr(torch, dtype))
    recipe = from_dict({"model": {"source": str(folder), "dtype": dtype}, "data": {}})
    model = models.build_on_meta(recipe)
    load_pretrained(model, folder)
    expected = dtypes_of(upstream)
    found = dtypes_of(model)
    assert {name: found[name] for name in expected} == expected
    export_pretrained(model, tmp_path / "ours", source=folder, dtype=getattr(torch, dtype))
    upstream.save_pretrained(tmp_path / "upstreams")
    assert written(tmp_path / "ours") == written(tmp_path / "upstreams")


@pytest.mark.parametrize("name", ["nemotron_h", "deepseek_v4", "deepseek_v3"])
def test_kept_values_are_not_rounded(name: str, saved):
    """Nor are they on the way: a model on the meta device in bf16, without a recipe."""
    folder = saved(name)
    cls = getattr(registry.find_model(name).load(), upstream_class(name).__name__)
    with torch.device("meta"):
        model = cls._from_config(small_config(cls.config_class).config, dtype=torch.bfloat16)
    load_pretrained(model, folder)
    expected = upstream_class(name).from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    is_kept = kept_dtypes.keeps_in_fp32(model, torch.bfloat16)
    kept = {key: tensor for key, tensor in model.state_dict().items() if is_kept(key)}
    assert kept and all(tensor.dtype == torch.float32 for tensor in kept.values())
    assert all(torch.equal(tensor, expected[key]) for key, tensor in kept.items())


def test_names_are_searched_as_upstream_searches():
    """Anywhere in the name, with `*` for any text; as the model says it for each dtype."""

    class Model(torch.nn.Module):
        _keep_in_fp32_modules_strict = ("gate.*bias", "norm")
        _keep_in_fp32_modules = ("head",)

    names = ["a.gate.b.bias", "a.q_norm.weight", "gate.weight", "lm_head.weight"]
    found = {
        dtype: [kept_dtypes.keeps_in_fp32(Model(), dtype)(name) for name in names]
        for dtype in (torch.bfloat16, torch.float16, torch.float32, None)
    }
    assert found[torch.bfloat16] == [True, True, False, False]
    assert found[torch.float16] == [True, True, False, True]
    assert found[torch.float32] == found[None] == [False] * 4
