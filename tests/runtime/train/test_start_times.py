"""A start is accounted for, from the command to the second step; what was compiled is kept, and does not run out of room."""

from __future__ import annotations

import json
import os
import time

import torch
from small_recipe import SMALL

from patchgen.runtime import launch
from patchgen.runtime.data import DataConfig, SourceConfig, train_tokenizer
from patchgen.runtime.train import compiled_kernels, start_times
from patchgen.runtime.train.recipe import from_dict


def test_the_parts_of_a_start_add_up(monkeypatch):
    now = time.time()
    monkeypatch.setenv(start_times.STARTED, str(now - 100))
    monkeypatch.setenv(start_times.LAUNCHED, str(now - 97))
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setattr(start_times, "process_started", lambda: now - 96)
    start_times.begin()
    start_times.mark("weights")
    line = start_times.summary("step 2")
    assert line.startswith("start     100.") and "to the end of step 2: command 3.0, launch 1.0, imports 96." in line
    assert "weights" not in line, "it took no time"
    assert start_times.summary("step 2") == "", "it is told once"


def test_ranks_that_were_started_again_count_from_their_own_start(monkeypatch):
    monkeypatch.setenv(start_times.STARTED, str(time.time() - 10_000))
    monkeypatch.setenv(start_times.LAUNCHED, str(time.time() - 9_999))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    start_times.begin()
    line = start_times.summary("step 12")
    assert float(line.split()[1]) < 5_000 and "launch" not in line


def test_this_process_started_before_now():
    assert 0 < time.time() - start_times.process_started() < 100_000


def test_compiled_kernels_are_kept_where_the_user_says_or_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(compiled_kernels.CACHE, raising=False)
    compiled_kernels.keep()
    assert os.environ[compiled_kernels.CACHE] == str(tmp_path / ".cache" / "patchgen" / "compiled")
    monkeypatch.setenv(compiled_kernels.CACHE, "/named")
    compiled_kernels.keep()
    assert os.environ[compiled_kernels.CACHE] == "/named"


def test_the_check_of_small_rows_compiles_nothing(tmp_path):
    """The routers of a model from random weights are compared on a few small rows, for which norms would be compiled."""
    from torch._dynamo.utils import counters

    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"{n} and {n}."}) + "\n" for n in range(40)))
    source = SourceConfig(str(tmp_path / "text.jsonl"))
    train_tokenizer(DataConfig((source,), cache_dir=str(tmp_path)), vocab_size=300).save_pretrained(tmp_path / "start")
    (tmp_path / "start" / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **SMALL}))
    values = {
        "model": {"source": str(tmp_path / "start")},
        "data": {"sources": [{"path": source.path}], "tokens_per_batch": 128, "cache_dir": str(tmp_path)},
        "kernels": {"rms_norm": "compiled", "rotary": "compiled"},
        "train": {"router_balance": "loss"},
        "log": {"directory": str(tmp_path / "run")},
    }
    from patchgen.runtime.train.trainer import Trainer

    counters.clear()
    with launch.process_group() as device:
        trainer = Trainer(from_dict(values), device)
        assert trainer.seams["rms_norm"] == "compiled"
        assert not counters["frames"], "nothing was traced"
        with torch.no_grad():
            trainer.model(input_ids=torch.zeros(1, 8, dtype=torch.long, device=device))
        assert counters["frames"], "a step compiles"


def test_a_function_has_room_for_the_shapes_of_a_run(monkeypatch):
    from torch._dynamo import config

    monkeypatch.setattr(config, "recompile_limit", 8)
    compiled_kernels.allow_many_shapes()
    assert config.recompile_limit == compiled_kernels.RECOMPILATIONS
    monkeypatch.setattr(config, "recompile_limit", 1000)
    compiled_kernels.allow_many_shapes()
    assert config.recompile_limit == 1000, "a user's own is kept"


def test_nothing_is_told_of_a_run_that_no_command_began():
    start_times._marks.clear()
    start_times.mark("data")
    assert start_times.summary("step 2") == ""
