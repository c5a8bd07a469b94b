"""Runs with `train.precision: fp8` on the CPU, where a reference in torch rounds as the kernels do: on one rank and on two."""

from __future__ import annotations

import cases_trainer as cases
import pytest
import torch
from rounding import error, require_equal_up_to_rounding
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import Qwen3MoeForCausalLM

LAYOUT_BOUND = 1e-3
"""Of losses between layouts: their sums differ by rounding, and a value on the border of two of e4m3 may fall to the other side."""


@pytest.mark.parametrize("weight_gradients", ["bfloat16", "fp8"])
def test_two_ranks_train_as_one_in_fp8_and_store_and_export_as_without(
    weight_gradients: str, trainer_folder, tmp_path, one_rank, two_ranks
):
    """Losses of FP8 are not those of fp32 and close to them; checkpoints and exports have the same tensors."""
    fp8 = {"precision": "fp8", "fp8": {"weight_gradients": weight_gradients}}
    found = {}
    for name, pool, train, layout in (
        ("plain", two_ranks, {}, {}),
        ("one", one_rank, fp8, {}),
        ("FSDP", two_ranks, fp8, {}),
        ("EP2, computed again", two_ranks, fp8, {"ep": 2, "activation_checkpointing": "full"}),
    ):
        values = cases.recipe_of(
            trainer_folder,
            train={"steps": 4, "batches_per_step": 2, **train},
            parallel=layout,
            checkpoint={"export": True},
            log={"directory": str(tmp_path / name)},
        )
        found[name] = pool.run(cases.train, values)[0][0]
    again = {**values, "log": {"directory": str(tmp_path / "again")}}
    require_equal_up_to_rounding(two_ranks.run(cases.train, again)[0][0], found["EP2, computed again"], units=0)
    for name in ("FSDP", "EP2, computed again"):
        assert error(found[name], found["one"]) < LAYOUT_BOUND, name
    assert 1e-5 < error(found["one"], found["plain"]) < 2e-2

    def checkpointed(name: str) -> dict[str, object]:
        (folder,) = (tmp_path / name / "checkpoints").iterdir()
        (metadata,) = folder.rglob(".metadata")
        return {
            key: (tensor.properties.dtype, tensor.size)
            for key, tensor in FileSystemReader(metadata.parent).read_metadata().state_dict_metadata.items()
            if hasattr(tensor, "size")
        }

    def exported(name: str) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / name / "export" / "model.safetensors")

    stored, written = checkpointed("plain"), exported("plain")
    for name in found:
        assert checkpointed(name) == stored, name
        assert {k: (t.shape, t.dtype) for k, t in exported(name).items()} == {
            k: (t.shape, t.dtype) for k, t in written.items()
        }
    assert {dtype for dtype, _ in stored.values()} == {torch.float32}
    assert sum("exp_avg" in key for key in stored) >= 2, "moments are compared, too"
    upstream, report = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "FSDP" / "export", output_loading_info=True)
    assert not any(report.values())
    weight = exported("FSDP")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(upstream.model.layers[0].self_attn.q_proj.weight, weight)
