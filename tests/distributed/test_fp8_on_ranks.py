"""Runs with `train.precision: fp8` on the CPU, where a reference in torch rounds as the kernels do: on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import cases_fp8
import cases_trainer as cases
import pytest
import torch
from cases_fp8 import EXPERTS, INNER, INPUTS, OUTPUTS, tokens
from rounding import UNITS, error, require_equal_up_to_rounding
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from transformers import Qwen3MoeForCausalLM

from patchgen.kernels.linear import fp8_reference

SHARE = 1 / 32
"""Of what FP8 changes in losses and weights, the most that another layout changes in them.

Sums in another order move a value by a share d of itself, `UNITS` of eps. Its neighbour in e4m3 is a share s of 1/16 to 1/8
away, and the value falls there with probability d / s: an error of sqrt(d s) in the 2-norm, at most sqrt(d / 8), 7e-4, where
that of rounding itself is 2.5e-2. In bf16, whose d is 2^-9, or where many layers follow each other, layouts may differ by as
much as FP8 does from what it rounds.
"""
LOST = 2.0**-10
"""Half of the smallest number of e4m3: what folding the scales into a factor of a weight gradient costs a value at most."""


def exported(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "export" / "model.safetensors")


def moved(directory: Path, start: dict[str, Tensor]) -> Tensor:
    """All weights, minus those that the run began with."""
    weights = exported(directory)
    return torch.cat([(weights[name].float() - start[name].float()).flatten() for name in sorted(start)])


@pytest.mark.parametrize("weight_gradients", ["bfloat16", "fp8"])
def test_two_ranks_train_as_one_in_fp8_and_store_and_export_as_without(
    weight_gradients: str, trainer_folder, tmp_path, one_rank, two_ranks
):
    """Losses of FP8 are not those of fp32 and close to them; checkpoints and exports have the same tensors; a run that is
    repeated has the same bits."""
    fp8 = {"precision": "fp8", "fp8": {"weight_gradients": weight_gradients}}
    found = {}
    for name, pool, train, layout in (
        ("plain", two_ranks, {}, {}),
        ("one", one_rank, fp8, {}),
        ("FSDP", two_ranks, fp8, {}),
        ("SP2", two_ranks, fp8, {"sp": 2}),
        ("EP2, computed again", two_ranks, fp8, {"ep": 2, "activation_checkpointing": "full"}),
    ):
        values = cases.recipe_of(
            trainer_folder,
            train={"steps": 4, "batches_per_step": 2, **train},
            parallel=layout,
            checkpoint={"export": True},
            log={"directory": str(tmp_path / name)},
        )
        found[name] = pool.run(cases.train, values)[0][:2]
    again = {**values, "log": {"directory": str(tmp_path / "again")}}
    assert two_ranks.run(cases.train, again)[0][:2] == found["EP2, computed again"]
    repeated, first = exported(tmp_path / "again"), exported(tmp_path / "EP2, computed again")
    assert all(torch.equal(repeated[name], first[name]) for name in first)
    require_layouts_agree(found, tmp_path, load_file(trainer_folder / "start" / "model.safetensors"))
    assert 1e-5 < error(found["one"][0], found["plain"][0]) < 2e-2

    def checkpointed(name: str) -> dict[str, object]:
        (folder,) = (tmp_path / name / "checkpoints").iterdir()
        (metadata,) = folder.rglob(".metadata")
        return {
            key: (tensor.properties.dtype, tensor.size)
            for key, tensor in FileSystemReader(metadata.parent).read_metadata().state_dict_metadata.items()
            if hasattr(tensor, "size")
        }

    stored, written = checkpointed("plain"), exported(tmp_path / "plain")
    for name in found:
        assert checkpointed(name) == stored, name
        assert {k: (t.shape, t.dtype) for k, t in exported(tmp_path / name).items()} == {
            k: (t.shape, t.dtype) for k, t in written.items()
        }
    assert {dtype for dtype, _ in stored.values()} == {torch.float32}
    assert sum("exp_avg" in key for key in stored) >= 2, "moments are compared, too"
    upstream, report = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "FSDP" / "export", output_loading_info=True)
    assert not any(report.values())
    weight = exported(tmp_path / "FSDP")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(upstream.model.layers[0].self_attn.q_proj.weight, weight)


def require_layouts_agree(found: dict[str, tuple], place: Path, start: dict[str, Tensor]) -> None:
    """Losses, norms of gradients and the way that weights went, against those of one rank: within `SHARE`."""
    ways = {name: moved(place / name, start) for name in found}
    of_fp8 = error(found["plain"][0], found["one"][0]), error(ways["plain"], ways["one"])
    for name in found.keys() - {"plain", "one"}:
        assert error(found[name][0], found["one"][0]) < SHARE * of_fp8[0], name
        assert error(found[name][1], found["one"][1]) < SHARE * error(found["plain"][1], found["one"][1]), name
        assert error(ways[name], ways["one"]) < SHARE * of_fp8[1], name


@pytest.mark.slow
def test_whole_runs_with_experts_in_fp8_have_the_same_bits_and_layouts_agree(
    trainer_folder, tmp_path, one_rank, two_ranks
):
    """Their kernels in Triton's interpreter: a minute for each run."""
    pytest.importorskip("triton")
    found = {}
    for name, pool, kernel, layout in (
        ("plain", one_rank, "torch", {}),
        ("one", one_rank, "fp8", {}),
        ("again", one_rank, "fp8", {}),
        ("EP2", two_ranks, "fp8", {"ep": 2}),
    ):
        values = cases.recipe_of(
            trainer_folder,
            train={"steps": 2, "batches_per_step": 2},
            kernels={"fused_moe": kernel},
            optim={"warmup_steps": 1},
            parallel=layout,
            checkpoint={"export": True},
            log={"directory": str(tmp_path / name)},
        )
        found[name] = pool.run(cases_fp8.train_with_kernels, values, timeout=600)[0][:2]
    assert found.pop("again") == found["one"]
    repeated, first = exported(tmp_path / "again"), exported(tmp_path / "one")
    assert all(torch.equal(repeated[name], first[name]) for name in first)
    require_layouts_agree(found, tmp_path, load_file(trainer_folder / "start" / "model.safetensors"))


def test_weight_gradients_in_fp8_depend_on_the_layout_by_what_is_below_the_largest_token(one_rank, two_ranks):
    """A factor of a token over the largest of the rank is a power of two: exact but for values that fall below 2^-6, which are
    rounded to multiples of 2^-9. Each token errs by `LOST` of the largest scale times the other factor, in both layouts.

    Here the first rank has a large token: the others' are rounded beside it, and by themselves lose nothing.
    """
    whole, parted = (pool.run(cases_fp8.linear_gradient, True)[0] for pool in (one_rank, two_ranks))
    (values, scales), (_, grad_scales) = (
        fp8_reference.rows(tokens(columns, seed)) for columns, seed in ((INPUTS, 1), (OUTPUTS, 2))
    )
    bound = 2 * LOST * (scales * grad_scales).amax() * values.float().abs().sum(0)
    assert_within(whole, parted, bound)
    wide = [pool.run(cases_fp8.linear_gradient, False)[0] for pool in (one_rank, two_ranks)]
    require_equal_up_to_rounding(*wide)
    assert error(whole, wide[0]) < 2.0**-4, "small tokens are not lost for large ones"


def test_weight_gradients_of_experts_depend_on_the_layout_by_no_more(one_rank, two_ranks):
    """As those of linear layers, over the largest scale of an expert's rows."""
    ((*whole, largest),) = one_rank.run(cases_fp8.expert_gradients)
    (*parted, _), _ = two_ranks.run(cases_fp8.expert_gradients)
    for found, expected, scale, columns, seed, is_first in (
        (parted[0], whole[0], largest[0], INPUTS, 1, True),
        (parted[1], whole[1], largest[1], INPUTS, 2, False),
    ):
        values = fp8_reference.rows(tokens(columns, seed))[0].float().abs().sum(0)
        bound = 2 * LOST * scale * values
        assert found.shape == ((EXPERTS, 2 * INNER, INPUTS) if is_first else (EXPERTS, INPUTS, INNER))
        assert_within(expected, found, bound if is_first else bound[:, None])


def assert_within(whole: Tensor, parted: Tensor, bound: Tensor) -> None:
    """Elements within the bound, but for the rounding of sums in fp32, and not all the same: layouts do differ."""
    apart = (whole - parted).abs()
    rounding = UNITS * torch.finfo(torch.float32).eps * whole.abs().max()
    assert bool((apart <= bound + rounding).all()), float((apart / (bound + rounding)).max())
    assert bool((apart > rounding).any()), "nothing fell below the smallest number: the bound was not tested"
