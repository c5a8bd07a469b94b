"""Data workers that start as processes of their own: they know the user's classes, and the rules of their inputs."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from small_processors import byte_tokenizer, template

from patchgen.commands import generation
from patchgen.runtime.data import DataConfig, SourceConfig, build_loader
from patchgen.runtime.train import architecture, setup
from patchgen.runtime.train.recipe import ModelConfig

CODE = Path(__file__).parents[2] / "patchgen" / "data" / "lattice_moe"


@pytest.fixture
def processor(tmp_path):
    """The user's own, as a recipe that names its code finds it."""
    shutil.copytree(CODE, tmp_path / "code", ignore=shutil.ignore_patterns("__pycache__"))
    generation.generate(["lattice_moe"], False, None, tmp_path / "code", tmp_path / "out", dry_run=False, force=False)
    names = {"code": str(tmp_path / "code"), "generated": str(tmp_path / "out")}
    architecture.register(ModelConfig(source="", **names))
    text = template("<image>")
    (tmp_path / "start").mkdir()
    byte_tokenizer(text, {"image_token": "<image>"}).save_pretrained(tmp_path / "start")
    config = {"processor_class": "LatticeMoeProcessor", "patch_size": 8}
    config["image_processor"] = {"image_processor_type": "LatticeMoeImageProcessor", "size": 16}
    (tmp_path / "start" / "processor_config.json").write_text(json.dumps(config))
    (tmp_path / "start" / "config.json").write_text(json.dumps({"model_type": "lattice_moe"}))
    return setup.load_processor(str(tmp_path / "start"))


def test_spawned_workers_prepare_what_this_process_prepares(processor, tmp_path, monkeypatch):
    Image.new("RGB", (20, 40)).save(tmp_path / "x.png")
    question = [{"type": "image", "image": "x.png"}, {"type": "text", "text": "How high?"}]
    row = [{"role": "user", "content": question}, {"role": "assistant", "content": "40"}]
    (tmp_path / "data.jsonl").write_text(3 * (json.dumps({"messages": row}) + "\n"))

    def batches(workers: int) -> list[dict]:
        source = SourceConfig(str(tmp_path / "data.jsonl"))
        config = DataConfig(
            kind="multimodal", sources=(source,), tokens_per_batch=128, num_workers=workers, shuffle=False, epochs=1
        )
        return list(build_loader(config, processor=processor, batch_index=0, num_batches=1))

    expected = batches(0)
    assert type(processor).__module__.startswith("patchgen_generated_"), "no folder of sys.path has it"
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        found = batches(1)
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys() and "pixel_spacing" in one
        assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in other)
    assert expected[0]["pixel_spacing"].tolist() == 3 * [[2.5, 1.25]]
