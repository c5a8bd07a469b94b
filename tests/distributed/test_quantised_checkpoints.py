"""A checkpoint in FP8 on 1, 2 and 4 ranks: each reads its part, and all have the weights that one process has."""

from __future__ import annotations

import json

import cases_checkpoints as cases
import quantised_files as files
import torch
from safetensors.torch import load_file, save_file
from test_checkpoints import upstream_checkpoint

from patchgen.runtime.checkpoint import fingerprint, offline

BLOCK = 16
"""Smaller than the tensors of a small model, and no divisor of its slices."""


def test_fp8_over_ranks(tmp_path, one_rank, two_ranks, four_ranks):
    """FSDP and EP 2 cut through blocks; each export is what a conversion in one process writes."""
    source = tmp_path / "original"
    head, file = upstream_checkpoint("qwen3_moe", source)
    weight_map: dict[str, str] = {}
    for weights in sorted(source.glob("*.safetensors")):
        stored: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(weights).items():
            stored |= files.fp8_blocks(tensor, name, block=BLOCK) if name.endswith("proj.weight") else {name: tensor}
        save_file(stored, weights)
        weight_map |= dict.fromkeys(stored, weights.name)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (source / "config.json").write_text(json.dumps(config))
    offline.convert(source, tmp_path / "converted")
    expected = fingerprint(tmp_path / "converted")
    for pool, ep in ((one_rank, 1), (two_ranks, 2), (four_ranks, 2)):
        target = tmp_path / f"export-{pool.world}-{ep}"
        reads = pool.run(cases.round_trip, head, file, str(source), str(target), ep)
        assert all(read < 0.6 * own for read, own in reads), "a byte for each number of four, and scales"
        assert "quantization_config" not in json.loads((target / "config.json").read_text())
        assert fingerprint(target) == expected
