"""Whole runs as `patchgen train` starts them, in bf16 on one and two GPUs, against one CPU rank in fp32.

    python -m pytest tests/runtime/train/test_runs_on_gpu.py -m gpu      # on the GPUs of this machine
    python -m pytest tests/runtime/train/test_runs_on_gpu.py             # and the same runs on CPU ranks

Needs no network: the model is random, the text made up, the tokenizer trained on it. Each run is a process of its own, as
a user's is: process groups and kernels are not those of the tests.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

STEPS, HALF = 12, 6
# Launches a recipe on so many ranks, as the command does.
CHILD = """
import json, sys
from patchgen.runtime.launch import launch
from patchgen.runtime.train.recipe import from_dict

sys.exit(launch(from_dict(json.loads(sys.argv[1])), processes=int(sys.argv[2])))
"""
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
on_each_device = pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), GPU])


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A thousand lines of sentences that a small model can learn: each word decides which three may follow."""
    place = tmp_path_factory.mktemp("text") / "text.jsonl"
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 7))) for _ in range(40)]
    following = {word: draw.sample(words, 3) for word in words}
    lines = []
    for _ in range(1000):
        sentence = [draw.choice(words)]
        while len(sentence) < draw.randint(5, 60):
            sentence.append(draw.choice(following[sentence[-1]]))
        lines.append(json.dumps({"text": " ".join(sentence)}))
    place.write_text("\n".join(lines))
    return place


@pytest.fixture(scope="module")
def expected(text, tmp_path_factory) -> list[float]:
    """The losses of one CPU rank in fp32."""
    place = tmp_path_factory.mktemp("expected")
    run("cpu", recipe(text, place, parallel={"param_dtype": "float32"}))
    return losses(place)


def recipe(text: Path, place: Path, **changes: dict) -> dict:
    values = {
        "model": {
            "source": "qwen3_moe",
            "overrides": {
                "vocab_size": 384,
                "hidden_size": 128,
                "intermediate_size": 128,
                "moe_intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
                "max_position_embeddings": 512,
            },
        },
        "data": {"sources": [{"path": str(text)}], "tokens_per_batch": 512, "cache_dir": str(text.parent / "cache")},
        "parallel": {"param_dtype": "bfloat16"},
        "kernels": {"fused_moe": "auto"},
        # Constant after the warmup: half of the steps, and then the others, are the steps of a whole run.
        "optim": {"lr": 3e-3, "warmup_steps": 2, "schedule": "constant"},
        "train": {"steps": STEPS, "batches_per_step": 4},
        "log": {"directory": str(place / "run")},
    }
    for section, fields in changes.items():
        values[section] = {**values.get(section, {}), **fields}
    return values


def run(device: str, values: dict, ranks: int = 1) -> str:
    """Starts a run on this device; returns what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(values), str(ranks)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        told, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks as well
        pytest.fail(f"the run did not end:\n{process.communicate()[0]}")
    assert process.returncode == 0, told
    return told


def steps(place: Path) -> list[dict]:
    lines = [json.loads(line) for line in (place / "run" / "steps.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def losses(place: Path) -> list[float]:
    return [entry["loss"] for entry in steps(place)]


def require_two(device: str) -> None:
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < 2:
            pytest.skip("it needs two GPUs")


def check(place: Path, device: str, expected: list[float], bar: float) -> None:
    """Every step was taken once, its loss is finite, falls, and is within `bar` (relative) of the expected one."""
    found = steps(place)
    assert [entry["step"] for entry in found] == list(range(1, STEPS + 1))
    got = [entry["loss"] for entry in found]
    furthest = max(abs(a - b) / b for a, b in zip(got, expected, strict=True))
    print(f"{device}: loss {got[0]:.4f} to {got[-1]:.4f}, furthest from fp32 on the CPU {furthest:.1e} (relative)")
    assert all(map(math.isfinite, got)) and all(math.isfinite(entry["grad_norm"]) for entry in found)
    assert got[-1] < 0.8 * got[0]
    assert furthest < bar, (got, expected)
    if device == "cuda":
        assert all(entry["peak_memory_gib"] > 0 for entry in found)


def check_export(place: Path, text: Path, below: float) -> None:
    """Plain transformers loads the export whole, and its loss on the text is that of a trained model."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeForCausalLM

    folder = place / "run" / "export"
    model, report = Qwen3MoeForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert type(model).__module__.startswith("transformers.")
    assert not any(report.values()), report
    tokenizer = AutoTokenizer.from_pretrained(folder)
    line = json.loads(text.read_text().splitlines()[0])["text"]
    ids = tokenizer(line + " " + line, return_tensors="pt").input_ids
    with torch.no_grad():
        assert float(model(input_ids=ids, labels=ids).loss) < below


@on_each_device
def test_one_device_trains_saves_continues_and_exports(device, text, expected, tmp_path):
    parallel = {"activation_checkpointing": "full"}
    whole = recipe(text, tmp_path, parallel=parallel, eval_data={**recipe(text, tmp_path)["data"], "seed": 1})
    whole["train"] |= {"eval_every": HALF, "eval_batches": 2}
    half = {**whole, "train": {**whole["train"], "steps": HALF}}
    told = run(device, half)
    assert "evaluation loss" in told
    told = run(device, whole)
    assert f"continued after step {HALF}" in told
    assert "evaluation loss" in told
    check(tmp_path, device, expected, 0.02)
    check_export(tmp_path, text, 0.8 * expected[0])


def wide(text: Path, place: Path, **train: object) -> dict:
    """A recipe of a width that is several steps of the FP8 kernels' depth, where that of the experts is one."""
    values = recipe(text, place, kernels={"fused_moe": None}, train=train)
    values["model"]["overrides"]["hidden_size"] = 256
    return values


@on_each_device
def test_a_run_in_fp8_continues_and_exports(device, text, tmp_path):
    """On a CPU by the reference, and experts by theirs; what is exported is not in FP8."""
    run("cpu", wide(text, tmp_path / "exact") | {"parallel": {"param_dtype": "float32"}})
    expected, place = losses(tmp_path / "exact"), tmp_path / "fp8"
    told = run(device, wide(text, place, precision="fp8", steps=HALF))
    assert "fp8: 2 q_proj, 2 k_proj, 2 v_proj, 2 o_proj" in told
    assert f"continued after step {HALF}" in run(device, wide(text, place, precision="fp8"))
    check(place, device, expected, 0.05)
    check_export(place, text, 0.8 * expected[0])


@pytest.mark.gpu
@pytest.mark.parametrize("weight_gradients", ["bfloat16", "fp8"])
def test_two_runs_in_fp8_have_the_same_bits(weight_gradients, text, tmp_path):
    """Losses, norms of gradients and every exported byte; with the attention whose backward adds in one order."""
    found = []
    for name in ("first", "second"):
        place = tmp_path / name
        fp8 = {"precision": "fp8", "fp8": {"weight_gradients": weight_gradients}}
        values = wide(text, place, **fp8, deterministic=True)
        values["model"]["attention"] = "patchgen_eager"
        run("cuda", values)
        weights = {path.name: path.read_bytes() for path in (place / "run" / "export").glob("*.safetensors")}
        found.append(([(entry["loss"], entry["grad_norm"]) for entry in steps(place)], weights))
    assert len(found[0][0]) == STEPS and found[0][1], "a whole run and its weights"
    assert found[0] == found[1]


@on_each_device
def test_two_devices_share_experts_and_one_continues(device, text, expected, tmp_path):
    """Half of the steps with EP 2, the others on one device, from the same checkpoint."""
    require_two(device)
    parallel = {"ep": 2, "activation_checkpointing": "selective"}
    half = recipe(text, tmp_path, parallel=parallel, train={"steps": HALF})
    run(device, half, ranks=2)
    told = run(device, recipe(text, tmp_path))
    assert f"continued after step {HALF}" in told
    check(tmp_path, device, expected, 0.02)
    check_export(tmp_path, text, 0.8 * expected[0])


@on_each_device
def test_two_devices_share_sequences_under_muon(device, text, tmp_path_factory):
    """Muon's own iteration is in bf16 everywhere: the bar is wider, and the fp32 run is one of Muon."""
    require_two(device)
    muon = {"name": "muon", "muon_lr": 1e-2}
    alone, both = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("both")
    run("cpu", recipe(text, alone, optim=muon, parallel={"param_dtype": "float32"}))
    run(device, recipe(text, both, optim=muon, parallel={"sp": 2, "activation_checkpointing": "full"}), ranks=2)
    check(both, device, losses(alone), 0.05)


@on_each_device
def test_adapters_train_on_one_device(device, text, expected, tmp_path):
    """LoRA on random weights learns little; its first loss is that of the model without adapters."""
    pytest.importorskip("peft")
    run(device, recipe(text, tmp_path, lora={"rank": 4}, optim={"lr": 3e-2}))
    got = losses(tmp_path)
    assert all(map(math.isfinite, got)) and got[-1] < got[0]
    assert abs(got[0] - expected[0]) < 0.02 * expected[0]
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.gpu
@pytest.mark.parametrize("ep", [1, 2])
def test_replayed_steps_have_the_losses_of_those_without_a_graph(text, tmp_path, ep):
    """On two GPUs, rows of other documents in each step, an evaluation in between.

    Two minutes on a fresh machine, nearly all of it importing and compiling FlashAttention 4 in each of four processes.
    """
    require_two("cuda")
    found = {}
    for replays in (False, True):
        place = tmp_path / str(replays)
        values = recipe(
            text,
            place,
            data={"pad_batches": True},
            eval_data={"sources": [{"path": str(text)}], "tokens_per_batch": 512},
            parallel={"param_dtype": "bfloat16", "ep": ep},
            train={"steps": STEPS, "batches_per_step": 2, "cuda_graph": replays, "eval_every": 5, "eval_batches": 2},
        )
        told = run("cuda", values, ranks=2)
        assert ("Steps are replayed as a CUDA graph from step 2 on." in told) == replays
        found[replays] = losses(place)
    assert found[True] == pytest.approx(found[False], rel=3e-3)
