"""The Triton kernels of the experts: on the CPU in Triton's interpreter at small sizes, on a GPU as they are.

Numbers are compared with the expert-by-expert reference on the same inputs, bits with the kernels themselves.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from moe_cases import CASES, Case, run
from rounding import UNITS, require_as_exact, require_equal_up_to_rounding
from torch import nn

from patchgen.kernels.fused_moe import fused_moe
from patchgen.kernels.moe import combine, early_gradients, grouped_gemm, grouped_gemm_weights
from patchgen.kernels.moe import gate_backward as moe_gate_backward
from patchgen.kernels.moe import gate_up as moe_gate_up
from patchgen.kernels.moe import plan as moe_plan
from patchgen.kernels.moe import schedule as moe_schedule
from patchgen.kernels.moe import triton_backend as moe_triton
from patchgen.kernels.moe.pad_rows import pad_rows

on_gpu = torch.cuda.is_available()
SMALL = {"num_tokens": 9, "num_experts": 3, "hidden_size": 24, "intermediate_size": 16}
INTERPRETED = [
    Case("plain", **SMALL),
    Case(
        "gelu_no_gate_transposed_bias", activation="gelu", is_gated=False, is_transposed=True, has_bias=True, **SMALL
    ),
    Case("gelu_tanh_left_out", activation="gelu_tanh", routing="left_out", **SMALL),
    Case("relu_squared", activation="relu2", is_gated=False, **SMALL),
    Case("gpt_oss", activation=None, is_transposed=True, is_interleaved=True, has_bias=True, **SMALL),
    Case("clamped_left_out_bias", activation=None, has_bias=True, routing="left_out", **SMALL),
    Case("transposed", is_transposed=True, **SMALL),
    Case("interleaved", is_interleaved=True, **SMALL),
    Case("one_token", **(SMALL | {"num_tokens": 1})),
    Case("one_expert", top_k=1, **(SMALL | {"num_experts": 1})),
    Case("all_to_one", routing="one_expert", top_k=1, **SMALL),
    Case("all_left_out", routing="all_left_out", **SMALL),
    Case("several_tiles", num_tokens=150, num_experts=2, hidden_size=72, intermediate_size=136),
]


@pytest.mark.skipif(on_gpu, reason="the kernels take fp32 in the interpreter only")
@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)
@pytest.mark.sampled(3)
def test_kernels_equal_the_reference_in_the_interpreter(case: Case):
    tensors = case.tensors(torch.float32)
    expected, found = run(case, tensors, "reference"), run(case, tensors, "triton")
    for name in expected:
        require_equal_up_to_rounding(found[name], expected[name], what=name)


@pytest.mark.skipif(on_gpu, reason="the kernels take fp32 in the interpreter only")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.sampled(2)
def test_weight_gradients_from_copied_rows_equal_the_reference(is_transposed: bool, monkeypatch):
    monkeypatch.setattr(moe_triton, "copy_pays_off", lambda *sizes: True)
    case = Case("copied", routing="left_out", is_transposed=is_transposed, **(SMALL | {"num_tokens": 140}))
    tensors = case.tensors(torch.float32)
    expected, found = run(case, tensors, "reference"), run(case, tensors, "triton")
    for name in expected:
        require_equal_up_to_rounding(found[name], expected[name], what=name)


def test_a_gradient_that_is_put_off_has_the_same_bits():
    """Where those of tokens are awaited and its weight takes one late; it comes once, by no other way."""
    case = Case("put_off", num_tokens=40, num_experts=3, hidden_size=64, intermediate_size=32)
    tensors = case.tensors(torch.bfloat16 if on_gpu else torch.float32, "cuda" if on_gpu else "cpu")
    expected = run(case, tensors, "triton")
    leaves = {name: one.clone().requires_grad_(one.is_floating_point()) for name, one in tensors.items()}
    taken: list[torch.Tensor] = []
    setattr(leaves["down_proj"], early_gradients.DEFERRED_GRADIENT_SINK, taken.append)
    out = fused_moe(**leaves, **case.options(), backend="triton")
    out.register_hook(lambda _: early_gradients.await_gradients(lambda *_: None))  # of this backward
    with torch.autograd.set_multithreading_enabled(False):  # what is awaited is of a thread
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out))
    assert not taken and leaves["down_proj"].grad is None
    early_gradients.compute_deferred()
    early_gradients.compute_deferred()
    found = {f"d_{name}": one.grad for name, one in leaves.items()} | {"d_down_proj": taken.pop()}
    assert not taken
    for name in expected.keys() - {"out"}:
        assert torch.equal(found[name], expected[name]), name


def test_what_a_failed_backward_awaited_is_handed_nothing_in_another_one():
    def fail(_gradient: torch.Tensor) -> None:
        early_gradients.await_gradients(lambda *_: pytest.fail("handed to a backward that failed"))
        assert early_gradients.is_awaited()
        raise ValueError("in the backward")

    def hand_over(gradient: torch.Tensor) -> None:
        assert not early_gradients.is_awaited()
        early_gradients.hand_over(gradient, gradient)

    with torch.autograd.set_multithreading_enabled(False):  # both in this thread
        for hook in (fail, hand_over):
            leaf = torch.ones(1, requires_grad=True)
            leaf.register_hook(hook)
            with pytest.raises(ValueError, match="in the backward") if hook is fail else contextlib.nullcontext():
                leaf.sum().backward()


@pytest.mark.slow
def test_the_order_of_tiles_changes_no_bit(monkeypatch):
    """Groups of two row tiles, the last one of one, against groups of one; several column tiles in each kernel."""
    sizes = {"num_tokens": 60, "num_experts": 3, "hidden_size": 264, "intermediate_size": 264}
    case = Case("groups", top_k=2, **sizes)
    dtype, device = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    tensors = case.tensors(dtype, device)
    found, used = [], []

    def record(blocks, num_n):
        assert num_n >= 2
        used.append(blocks.group)
        return blocks.group

    up, up_blocks = moe_gate_up, "GATE_UP"
    if moe_schedule.is_specialized_here(tensors["hidden_states"]):
        from patchgen.kernels.moe import gate_up_specialized as up  # needs Gluon

        up_blocks = "GATE_UP_SPECIALIZED"
    for group in (1, 2):
        for module, name in ((up, up_blocks), (moe_gate_backward, "GATE_BACKWARD"), (grouped_gemm, "ROWS")):
            monkeypatch.setattr(module, name, getattr(module, name)._replace(group=group))
        for module in (up, moe_gate_backward):
            monkeypatch.setattr(module, "row_tiles_per_group", record)
        found.append(run(case, tensors, "triton"))
    assert used == [1, 1, 2, 2]  # of the two kernels that ask
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), name


def test_few_column_tiles_run_all_at_once():
    assert moe_schedule.row_tiles_per_group(moe_schedule.GATE_UP, 7) == 1
    assert moe_schedule.row_tiles_per_group(moe_schedule.GATE_UP, 8) == moe_schedule.GATE_UP.group > 1


@pytest.mark.parametrize("routing", ["random", "left_out", "one_expert", "all_left_out"])
def test_the_plan_holds_every_slot_once(routing: str):
    """Against a plain sort: rows by expert in token order, tiles that cover each expert, padding that repeats."""
    case = Case("plan", num_tokens=170, num_experts=5, top_k=1 if routing == "one_expert" else 2, routing=routing)
    device = "cuda" if on_gpu else "cpu"
    index = case.tensors(torch.float32)["top_k_index"]
    plan = moe_plan.make_plan(index.to(device), case.num_experts)
    flat = index.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    counts = torch.bincount(flat, minlength=case.num_experts + 1)[: case.num_experts]
    assert torch.equal(plan.row_start.cpu().diff().long(), counts)
    tiles = -(-counts // moe_plan.BLOCK_M)
    assert torch.equal(plan.tile_start.cpu().diff().long(), tiles)
    expert, first, end = plan.tiles.cpu().long()[:, : int(tiles.sum())]
    assert torch.equal(expert, torch.repeat_interleave(torch.arange(case.num_experts), tiles))
    for tile in range(int(tiles.sum())):
        rows = torch.arange(int(first[tile]), int(first[tile]) + moe_plan.BLOCK_M).clamp(max=int(end[tile]) - 1)
        padded = plan.slot_of_padded.cpu()[tile * moe_plan.BLOCK_M : (tile + 1) * moe_plan.BLOCK_M]
        assert torch.equal(padded.long(), order[rows])
    for slot, padded_row in enumerate(plan.padded_of_slot.tolist()):
        if flat[slot] == case.num_experts:
            assert padded_row == -1
        else:
            assert int(plan.slot_of_padded[padded_row]) == slot
    assert len(set(plan.padded_of_slot.tolist()) - {-1}) == int(counts.sum())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_the_rows_of_a_tokens_slots_are_summed(index_dtype: torch.dtype):
    """Against an index and a sum; one token has no row at all, another one lacks one of three."""
    device = "cuda" if on_gpu else "cpu"
    rows_PH = torch.randn(20, 96, device=device)
    row_of_slot_TK = torch.randint(20, (7, 3), device=device).to(index_dtype)
    row_of_slot_TK[2] = -1
    row_of_slot_TK[4, 1] = -1
    expected = torch.where(row_of_slot_TK[..., None] < 0, 0, rows_PH[row_of_slot_TK.clamp(min=0)]).sum(1)
    require_equal_up_to_rounding(combine.sum_slots(rows_PH, None, row_of_slot_TK, 3), expected, units=4)


def test_no_more_tiles_than_planned_for():
    for num_rows, num_experts in ((1, 8), (300, 3), (4096, 60)):
        worst = sum(-(-rows // moe_plan.BLOCK_M) for rows in _spread(num_rows, num_experts))
        assert worst <= moe_plan.max_tiles(num_rows, num_experts)


def _spread(num_rows: int, num_experts: int) -> list[int]:
    """One row to each expert and the rest to the last: the most partial tiles."""
    used = min(num_rows, num_experts)
    return [1] * (used - 1) + [num_rows - used + 1]


def test_operators_pass_torchs_own_checks():
    """Schema, fake kernel, autograd registration and tracing with sizes that vary."""
    case = Case("opcheck", **(SMALL | {"num_tokens": 5}))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    tensors = case.tensors(dtype, "cuda" if on_gpu else "cpu")
    inputs = [
        tensor.requires_grad_() if tensor.is_floating_point() else tensor
        for tensor in (
            tensors[name] for name in ("hidden_states", "top_k_index", "top_k_weights", "gate_up_proj", "down_proj")
        )
    ]
    arguments = (*inputs, None, None, False, False, "silu", 1.0, float("inf"), 0.0, False, True, 10, True)

    torch.library.opcheck(
        torch.ops.patchgen.moe_forward.default,
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_torch_compile_of_a_layer_has_no_graph_break_and_its_gradients():
    case = Case("compile", **SMALL)
    dtype, device = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    tensors = case.tensors(dtype, device)
    index = tensors.pop("top_k_index")

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.act_fn = nn.SiLU()

        def forward(self, tensors):
            options = {"num_experts": case.num_experts, "activation": self.act_fn, "backend": "triton"}
            return fused_moe(**tensors, top_k_index=index, **options) * 2

    results = []
    for layer in (Layer(), torch.compile(Layer(), fullgraph=True, backend="aot_eager")):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        out = layer(leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_frozen_experts_get_no_gradient_and_the_input_does():
    case = Case("frozen", **SMALL)
    dtype, device = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    tensors = case.tensors(dtype, device)
    tensors["hidden_states"].requires_grad_()
    out = fused_moe(**tensors, **case.options(), backend="triton")
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out))  # as `run` does
    expected = run(case, case.tensors(dtype, device), "triton")
    assert tensors["gate_up_proj"].grad is None and tensors["top_k_weights"].grad is None
    assert torch.equal(tensors["hidden_states"].grad, expected["d_hidden_states"])


def test_without_gradients_the_projection_is_not_kept(monkeypatch):
    case = Case("inference", **SMALL)
    dtype, device = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    tensors = case.tensors(dtype, device)
    gate_up, kept_sizes = moe_triton.gate_up, []

    def recorded(*arguments):
        found = gate_up(*arguments)
        kept_sizes.append(found[0].numel())
        return found

    monkeypatch.setattr(moe_triton, "gate_up", recorded)
    with torch.no_grad():
        out = fused_moe(**tensors, **case.options(), backend="triton")
    run(case, tensors, "triton")
    assert kept_sizes[0] == 0 < kept_sizes[1]
    require_equal_up_to_rounding(out, run(case, tensors, "reference")["out"], units=4 if on_gpu else UNITS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"post_expert_norm": nn.Identity()}, "post_expert_norm"),
        ({"activation": nn.Mish()}, "Mish"),
    ],
)
def test_what_the_kernels_do_not_have_is_refused_by_name(change: dict, named: str):
    case = Case("refused", **SMALL)
    dtype, device = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    with pytest.raises(ValueError, match=named):
        fused_moe(**case.tensors(dtype, device), **(case.options() | change), backend="triton")


def test_sizes_that_do_not_fit_the_copies_are_refused():
    case = Case("refused", **(SMALL | {"hidden_size": 20}))
    dtype, device = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    with pytest.raises(ValueError, match="hidden size 20 is not a multiple of 8"):
        fused_moe(**case.tensors(dtype, device), **case.options(), backend="triton")


# --------------------------------------------------------------------------------------------------- GPU

LARGE = [
    *CASES,
    Case("t1", num_tokens=1, num_experts=128, hidden_size=256, intermediate_size=192, top_k=8),
    Case("t5k_e60_k8", num_tokens=5000, num_experts=60, hidden_size=520, intermediate_size=328, top_k=8),
    Case("t32k_e256_k8", num_tokens=32768, num_experts=256, hidden_size=256, intermediate_size=136, top_k=8),
    Case(
        "t4k_one_expert", num_tokens=4096, num_experts=8, hidden_size=512, intermediate_size=384, routing="one_expert"
    ),
    Case("copied_rows", num_tokens=8192, num_experts=2, hidden_size=384, intermediate_size=2048, routing="left_out"),
    Case(
        "gpt_oss_sizes",
        2048,
        32,
        2880,
        2880,
        4,
        activation=None,
        is_transposed=True,
        is_interleaved=True,
        has_bias=True,
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_bf16_errs_no_more_than_the_eager_loop_times_one_and_a_half(case: Case, backend: str):
    tensors = case.tensors(torch.bfloat16, "cuda")
    wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    yardstick = run(case, wide, "reference")
    eager, found = run(case, tensors, "reference"), run(case, tensors, backend)
    for name in yardstick:
        require_as_exact(found[name], eager[name], yardstick[name], factor=1.5, what=name)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("copied", [False, True])
def test_twenty_runs_give_the_same_bits_whatever_memory_held(backend: str, copied: bool, monkeypatch):
    """Between the runs the allocator's memory is filled with NaN: nothing may read what it did not write."""
    monkeypatch.setattr(moe_triton, "copy_pays_off", lambda *sizes: copied)
    case = Case("repeat", 1000, 16, 512, 384, 4, routing="left_out", has_bias=True)
    tensors = case.tensors(torch.bfloat16, "cuda")
    first = run(case, tensors, backend)
    for _ in range(20):
        poison = [torch.full((2**22,), float("nan"), device="cuda") for _ in range(16)]
        del poison
        again = run(case, tensors, backend)
        for name in first:
            assert torch.equal(again[name], first[name]), name


# Columns of the gathered side, in tiles of 128, and of the padded side, in tiles of 256: none left over, at most half a
# tile, more; in several combinations, the last with many tiles for each multiprocessor.
COLUMNS = [(256, 512), (40, 72), (192, 384), (200, 392), (320, 136), (64, 648), (1160, 1352)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("copied", "tokens_first", "dtype"),
    [
        (False, False, torch.bfloat16),
        (False, True, torch.float16),
        (True, False, torch.float16),
        (True, True, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("columns", COLUMNS, ids=str)
def test_specialized_weight_gradients_are_those_of_triton_bit_for_bit(
    columns, tokens_first, copied, dtype, monkeypatch
):
    """Several routings, with experts without rows among them; whatever the output's memory held before."""
    if not grouped_gemm_weights.is_specialized_here(torch.empty(0, device="cuda")):
        pytest.skip("the kernel serves compute capability 9.0 and some releases of Triton")
    for case in (
        Case("few_experts", num_tokens=1500, num_experts=20, routing="few_experts", top_k=3),
        Case("left_out", num_tokens=333, num_experts=9, routing="left_out"),
        Case("one_expert", num_tokens=1000, num_experts=3, routing="one_expert", top_k=1),
    ):
        plan = moe_plan.make_plan(case.tensors(dtype, "cuda")["top_k_index"], case.num_experts)
        tokens, other = (torch.randn(case.num_tokens, size, device="cuda").to(dtype) for size in columns)
        rows = pad_rows(tokens, case.top_k, plan) if copied else None
        arguments = (tokens, rows, pad_rows(other, case.top_k, plan), plan, case.top_k, tokens_first)
        with monkeypatch.context() as patch:
            patch.setattr(grouped_gemm_weights, "is_specialized_here", lambda tensor: False)
            expected = grouped_gemm_weights.grouped_gemm_weights(*arguments)
        for _ in range(3):
            poison = torch.full_like(expected, float("nan"))
            del poison
            found = grouped_gemm_weights.grouped_gemm_weights(*arguments)
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), case.name


# Every option, at two hidden sizes of more than one step, in both dtypes; and steps enough to finish a tile between them.
SPECIALIZED = [
    (case.at(name=f"{case.name}_{size}", hidden_size=size), dtype)
    for number, case in enumerate(CASES)
    for size, dtype in [((72, torch.bfloat16), (320, torch.float16))[number % 2]]
] + [
    (case, torch.bfloat16)
    for case in (
        *(case for case in LARGE if case.name in ("t5k_e60_k8", "gpt_oss_sizes", "copied_rows")),
        Case(
            "many_tiles", 3000, 12, 1000, 696, 4, activation="relu2", is_gated=False, has_bias=True, routing="left_out"
        ),
        Case("deep", num_tokens=300, hidden_size=4104, intermediate_size=136, has_bias=True, is_interleaved=True),
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), SPECIALIZED, ids=lambda value: getattr(value, "name", None))
def test_specialized_kernels_give_the_bits_of_the_triton_kernels(case: Case, dtype: torch.dtype, monkeypatch):
    """Whole layers, with every option that both have: the output, with and without keeping, and every gradient."""
    if not moe_schedule.is_specialized_here(torch.empty(0, device="cuda")):
        pytest.skip("the kernels serve one compute capability and one release of Triton")
    tensors = case.tensors(dtype, "cuda")
    asked = []

    def specialized(tensor):
        asked.append(tensor)
        return True

    for module in (moe_gate_up, grouped_gemm_weights):
        monkeypatch.setattr(module, "is_specialized_here", specialized)
    found = run(case, tensors, "triton")
    assert len(asked) == 3
    with torch.no_grad():
        out = fused_moe(**tensors, **case.options(), backend="triton")
    for module in (moe_gate_up, grouped_gemm_weights):
        monkeypatch.setattr(module, "is_specialized_here", lambda tensor: False)
    expected = run(case, tensors, "triton")
    assert torch.equal(out, expected["out"])
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.gpu
def test_tokens_at_an_odd_address_are_read_by_the_triton_kernels():
    case = Case("plain", hidden_size=128)
    tensors = case.tensors(torch.bfloat16, "cuda")
    expected = run(case, tensors, "triton")["out"]
    held = torch.empty(tensors["hidden_states"].numel() + 1, dtype=torch.bfloat16, device="cuda")[1:]
    odd = held.view(tensors["hidden_states"].shape).copy_(tensors["hidden_states"])
    with torch.no_grad():
        out = fused_moe(**(tensors | {"hidden_states": odd}), **case.options(), backend="triton")
    assert torch.equal(out, expected)


@pytest.mark.skipif(on_gpu, reason="the kernels take fp32 in the interpreter only")
def test_biases_need_not_be_contiguous():
    case = Case("bias", has_bias=True, **SMALL)
    tensors = case.tensors(torch.float32)
    expected = run(case, tensors, "triton")["out"]
    for name in ("gate_up_bias", "down_bias"):
        tensors[name] = torch.cat([tensors[name], torch.randn_like(tensors[name])], 1)[:, : tensors[name].shape[1]]
        assert not tensors[name].is_contiguous()
    with torch.no_grad():
        assert torch.equal(fused_moe(**tensors, **case.options(), backend="triton"), expected)
