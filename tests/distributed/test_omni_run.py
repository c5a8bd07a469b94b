"""A whole omni checkpoint through a recipe: its thinker trains on two ranks, the export is the whole again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cases_trainer
import omni_models
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import Qwen3OmniMoeForConditionalGeneration

sys.path.append(str(Path(__file__).parents[1] / "runtime" / "data"))
from small_processors import MARKS, byte_tokenizer, template

FROZEN = ("visual", "audio_tower")
RECIPE = """
model: {{source: {source}, freeze: ["*.visual.*", "*.audio_tower.*"]}}
data: {{kind: chat, sources: [{{path: {rows}}}], tokens_per_batch: 128, cache_dir: {place}/cache}}
train: {{steps: 2, batches_per_step: 2}}
optim: {{lr: 1.0e-2}}
parallel: {{ep: 2}}
log: {{directory: {place}/run}}
"""


@pytest.fixture
def whole(tmp_path):
    """A checkpoint of all parts in upstream's layout, with a tokenizer whose marks its config names."""
    tokenizer = byte_tokenizer(template(marked=False), MARKS)
    config = omni_models.qwen3_omni()
    thinker = config.thinker_config
    thinker.text_config.vocab_size = len(tokenizer)
    for kind, token in (("image", "image"), ("video", "video"), ("audio", "audio")):
        setattr(thinker, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(MARKS[f"{token}_token"]))
    for kind, token in (("vision", "vision"), ("audio", "audio")):
        for end, mark in (("start", "bos"), ("end", "eos")):
            setattr(thinker, f"{kind}_{end}_token_id", tokenizer.convert_tokens_to_ids(MARKS[f"{token}_{mark}_token"]))
    omni_models.save_whole(config, tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    return tmp_path / "source", config


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def test_a_whole_checkpoint_trains_on_ranks_and_comes_out_whole(whole, tmp_path, two_ranks):
    source, config = whole
    rows = tmp_path / "rows.jsonl"
    said = [{"role": "user", "content": "The Elbe?"}, {"role": "assistant", "content": "In Dresden, behind the hill."}]
    rows.write_text((json.dumps({"messages": said}) + "\n") * 40)
    recipe = yaml.safe_load(RECIPE.format(source=source, rows=rows, place=tmp_path))
    two_ranks.run(cases_trainer.train, recipe)

    before, after = tensors(source), tensors(tmp_path / "run" / "export")
    assert after.keys() == before.keys()
    changed = {name for name, one in before.items() if not torch.equal(after[name], one)}
    assert all(after[name].dtype == one.dtype for name, one in before.items())
    assert all(name.startswith("thinker.") and not set(FROZEN) & {*name.split(".")} for name in changed), changed
    for expert in range(config.thinker_config.text_config.num_experts):  # those of either rank
        assert any(f"mlp.experts.{expert}." in name for name in changed)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "run" / "export")]
    assert configs[0] == configs[1]

    loaded = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tmp_path / "run" / "export")
    by_hand = Qwen3OmniMoeForConditionalGeneration.from_pretrained(source)
    untrained = omni_models.spoken(by_hand, config)
    by_hand.thinker.load_state_dict(loaded.thinker.state_dict())
    expected = omni_models.spoken(by_hand, config)
    omni_models.require_same_speech(omni_models.spoken(loaded, config), expected)
    changed = [
        one.shape != other.shape or not torch.equal(one, other) for one, other in zip(untrained, expected, strict=True)
    ]
    assert any(changed)
