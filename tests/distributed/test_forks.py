"""Files that inherit from models of transformers, by one command each: proven on ranks, trained on two, exported, loaded by the
user's own class."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rounding import require_equal_up_to_rounding
from typer.testing import CliRunner

from patchgen.cli import app
from patchgen.runtime.train import run_log

FORKS = Path(__file__).parents[1] / "patchgen" / "data" / "forks"
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
# fork -> its head, its configuration, its options at small sizes, the ranks that share experts, layouts of the proof
RUNS = {
    "gated_qwen2": ("GatedQwen2ForCausalLM", "GatedQwen2Config", TEXT, 1, {"fsdp2", "sp2"}),
    "shared_moe": ("SharedMoeForCausalLM", "SharedMoeConfig", TEXT | EXPERTS, 2, {"fsdp2", "ep2", "sp2"}),
    "projected_vl": (
        "ProjectedVLForConditionalGeneration",
        "ProjectedVLConfig",
        {"text_config": TEXT | {"rope_parameters": MROPE}, "vision_config": VISION},
        1,
        {"fsdp2", "sp2"},
    ),
}
RECIPE = """
model: {{source: checkpoint, code: {name}, generated: generated}}
data: {{kind: text, sources: [{{path: texts.jsonl}}], tokens_per_batch: 128}}
parallel: {{ep: {ep}}}
train: {{steps: 3, batches_per_step: 2, first_loss_limit: 100}}
optim: {{lr: 1.0e-3}}
log: {{directory: run}}
"""


def checkpoint(name: str, head: str, config: str, options: dict):
    """The user's model with random weights, saved with a tokenizer."""
    from small_processors import MARKS, byte_tokenizer, template

    tokenizer = byte_tokenizer(template(), MARKS)
    tokenizer.save_pretrained("checkpoint")
    sizes = {"vocab_size": len(tokenizer)}
    options = (
        {key: value | (sizes if key == "text_config" else {}) for key, value in options.items()}
        if "text_config" in options
        else options | sizes
    )
    torch.manual_seed(0)
    modeling = importlib.import_module(f"{name}.modeling_{name}")
    made = getattr(modeling, config)(**options)
    model = getattr(modeling, head)(made)
    model.save_pretrained("checkpoint")
    return model


@pytest.mark.slow  # each proves its fork on two ranks, starts a run of two, and proves the run's config before it
@pytest.mark.parametrize("name", RUNS)
def test_a_fork_is_proven_trained_exported_and_loaded(name: str, tmp_path, monkeypatch):
    head, config, options, ep, layouts = RUNS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "runtime" / "data"))
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(FORKS / name, name, ignore=shutil.ignore_patterns("__pycache__"))
    draw = random.Random(0)
    lines = [json.dumps({"text": "".join(draw.choices("abcdef ", k=draw.randrange(20, 90)))}) for _ in range(100)]
    Path("texts.jsonl").write_text("\n".join(lines))
    Path("recipe.yaml").write_text(RECIPE.format(name=name, ep=ep))
    before = checkpoint(name, head, config, options)

    for words in (
        ["generate", name, "--source", name, "--output", "generated"],
        ["verify", "--code", name, "--generated", "generated"],
    ):
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    proof = json.loads(Path(f"generated/{name}/verify.json").read_text())
    assert (proof["status"], proof["not_compared"]) == ("proven", {})
    compared = proof["two_ranks"]["layouts"]
    assert {layout for layout, row in compared.items() if row["applies"] and not row["reason"]} == layouts

    words = [sys.executable, "-m", "patchgen.cli", "train", "recipe.yaml", "--nproc", "2"]
    started = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert started.returncode == 0, started.stdout + started.stderr
    assert len(run_log.read(Path("run"))) == 3
    words = ["export", "run", "--output", "exported", "--code", name, "--generated", "generated"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output

    after, again = (type(before).from_pretrained(folder) for folder in ("run/export", "exported"))
    trained = [n for n, one in after.named_parameters() if not torch.equal(one, before.get_parameter(n))]
    untrained = {n for n, _ in before.named_parameters()} - {*trained}
    assert all("visual" in n or "projector" in n for n in untrained), "what only images use has no gradient of text"
    ids = torch.arange(24)[None]
    require_equal_up_to_rounding(again(input_ids=ids).logits, after(input_ids=ids).logits)
