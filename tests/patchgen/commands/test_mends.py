"""The table of what a file written for transformers 4 needs: its page, what it finds in files, and that its rows are true."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from invoked import invoke

from patchgen.commands import mends
from patchgen.commands.console import console

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "patchgen" / "data"
OLD = '''"""A docstring that says `from transformers.deepspeed import x` needs nothing."""
from transformers.utils import (
    logging,
    LossKwargs,  # gone
)
from transformers.utils.import_utils import is_torch_fx_available


class OldForCausalLM(OldPreTrainedModel):
    _tied_weights_keys = ["lm_head.weight"]

    def __init__(self, config):
        # self.init_weights()
        if config.rope_scaling is None:
            self.base = config.rope_theta

    def forward(self, cache):
        return cache.get_usable_length(3, self.layer)
'''
NEEDS = {
    2: "LossKwargs",
    6: "is_torch_fx_available",
    9: "class MyForCausalLM(MyPreTrainedModel) with prepare_inputs_for_generation",
    10: '_tied_weights_keys = ["lm_head.weight"]',
    14: "config.rope_scaling is None",
    15: "config.rope_theta of a configuration of transformers",
    18: "cache.get_usable_length(n, layer)",
}
GONE = (
    ("transformers.utils", "is_torch_fx_available"),
    ("transformers.pytorch_utils", "find_pruneable_heads_and_indices"),
    ("transformers.pytorch_utils", "prune_conv1d_layer"),
    ("transformers.modeling_utils", "apply_chunking_to_forward"),
    ("transformers.modeling_utils", "prune_linear_layer"),
    ("transformers.modeling_utils", "Conv1D"),
    ("transformers.modeling_utils", "SequenceSummary"),
    ("transformers.utils", "LossKwargs"),
    ("transformers.utils", "is_flash_attn_available"),
    ("transformers.utils.generic", "OutputRecorder"),
    ("transformers.utils", "cached_property"),
    ("transformers.utils", "is_tf_available"),
    ("transformers.cache_utils", "SinkCache"),
    ("transformers.cache_utils", "HybridCache"),
    ("transformers.generation", "BeamSearchScorer"),
    ("transformers", "top_k_top_p_filtering"),
    ("transformers", "AutoModelForVision2Seq"),
    ("transformers.models.llama.modeling_llama", "LlamaFlashAttention2"),
    ("transformers.models.llama.modeling_llama", "_make_causal_mask"),
)


def test_the_page_is_the_table():
    assert (ROOT / mends.PAGE).read_text(encoding="utf-8") == mends.page()


def test_the_page_of_measured_files_is_the_record():
    record = json.loads((ROOT / "records" / "outside_files.json").read_text(encoding="utf-8"))
    specification = importlib.util.spec_from_file_location("outside_folder", ROOT / "benchmarks" / "outside_folder.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    assert (ROOT / module.PAGE).read_text(encoding="utf-8") == module.page(record)


def test_a_file_is_told_what_it_needs_with_the_lines():
    """Names in comments and docstrings need nothing; an import over several lines counts where it begins."""
    assert {one.line: one.mend.name for one in mends.needed(OLD)} == NEEDS


@pytest.mark.parametrize("folder", ["list_moe", "lattice_moe"])
def test_a_file_of_transformers_5_needs_nothing(folder: str):
    (file,) = (DATA / folder).glob("modeling_*.py")
    assert mends.needed(file.read_text(encoding="utf-8")) == []


def test_inspect_names_them(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(console, "_width", 200)  # of a terminal, at the first use of the console
    source = (DATA / "list_moe" / "modeling_list_moe.py").read_text(encoding="utf-8")
    file = tmp_path / "modeling_list_moe.py"
    tied = 'GenerationMixin):\n    _tied_weights_keys = ["lm_head.weight"]\n\n    def'
    file.write_text(source.replace("GenerationMixin):\n    def", tied), encoding="utf-8")
    inspected = invoke("inspect", str(file)).output
    assert '_tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}' in " ".join(inspected.split())
    assert "from transformers 4" not in invoke("inspect", "llama").output


@pytest.mark.parametrize(("module", "name"), GONE, ids=lambda value: value)
def test_a_name_that_a_row_says_is_gone_is_gone_and_its_error_finds_the_row(module: str, name: str):
    assert not hasattr(importlib.import_module(module), name)
    with pytest.raises(ImportError) as told:
        exec(f"from {module} import {name}")
    mend = mends.explaining(told.value)
    found = [one.mend for one in mends.needed(f"from {module} import {name}\n")]
    assert mend is not None and mend in found


@pytest.mark.parametrize(
    "module", ["transformers.utils.model_parallel_utils", "transformers.deepspeed", "transformers.onnx"]
)
def test_a_module_that_a_row_says_is_gone_is_gone(module: str):
    with pytest.raises(ModuleNotFoundError) as told:
        importlib.import_module(module)
    assert mends.explaining(told.value) in [one.mend for one in mends.needed(f"import {module}\n")]


@pytest.mark.parametrize(
    "name", ["from_legacy_cache", "to_legacy_cache", "get_usable_length", "seen_tokens", "key_cache"]
)
def test_a_method_of_caches_that_a_row_says_is_gone_is_gone(name: str):
    from transformers import DynamicCache

    with pytest.raises(AttributeError) as told:
        getattr(DynamicCache(), name)
    assert mends.explaining(told.value) in [one.mend for one in mends.needed(f"past_key_values.{name}\n")]
