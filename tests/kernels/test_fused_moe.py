"""The backends of the fused experts against the expert-by-expert reference in fp64."""

from __future__ import annotations

import pytest
import torch
from moe_cases import CASES, Case, run
from rounding import require_as_exact, require_equal_up_to_rounding
from torch import Tensor, nn

from patchgen.kernels.fused_moe import fused_moe
from patchgen.kernels.moe.adapters import ExpertAdapters, LowRank

NAMED = [pytest.param(case, id=case.name) for case in [*CASES, Case("post_norm", has_post_norm=True)]]


def doubled(tensors: dict) -> dict:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("case", NAMED)
def test_torch_backend_equals_the_reference_in_fp64(case: Case):
    tensors = case.tensors(torch.float64)
    expected, found = run(case, tensors, "reference"), run(case, tensors, "torch")
    for name in expected:
        require_equal_up_to_rounding(found[name], expected[name], what=name)


@pytest.mark.parametrize("case", NAMED)
@pytest.mark.sampled(3)
def test_torch_backend_in_bf16_errs_no_more_than_the_eager_loop_times_one_and_a_half(case: Case):
    tensors = case.at(hidden_size=128, intermediate_size=64, num_tokens=case.num_tokens * 2).tensors(torch.bfloat16)
    yardstick = run(case, doubled(tensors), "reference")
    eager, found = run(case, tensors, "reference"), run(case, tensors, "torch")
    for name in yardstick:
        require_as_exact(found[name], eager[name], yardstick[name], factor=1.5, what=name)


def test_rows_that_are_left_out_are_read_nowhere():
    """With `nan` as the routing weight of every left-out slot, the result is that of any other weight there."""
    case = Case("left_out", routing="left_out", hidden_size=64, intermediate_size=32)
    tensors = case.tensors(torch.float32)
    expected = run(case, tensors, "torch")
    left_out = tensors["top_k_index"] == case.num_experts
    tensors["top_k_weights"] = tensors["top_k_weights"].masked_fill(left_out, float("nan"))
    found = run(case, tensors, "torch")
    assert left_out.any()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    assert not found["d_top_k_weights"][left_out].any()


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch):
    """What torch allocates holds NaN until it is written, as in `make test-poisoned`."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class LearnedGate(nn.Module):
    def __init__(self, inner: int):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, inner))

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate * self.scale) * up


class DirectionGate(LearnedGate):
    """Without a derivative at 0."""

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.scale * gate / gate.norm(dim=-1, keepdim=True) * up


class Deviation(nn.LayerNorm):
    """Without a derivative where all elements are equal."""

    def forward(self, rows: Tensor) -> Tensor:
        return self.weight * rows / rows.std(-1, keepdim=True)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("routing", ["left_out", "all_left_out"])
@pytest.mark.parametrize("learned", ["norm", "deviation", "gate", "direction", "activation", "bias", "adapters"])
def test_what_is_learned_gets_no_gradient_from_slots_that_are_left_out(learned: str, routing: str):
    """Their rows hold whatever was in memory, in the forward and in the backward; the reference never makes them."""
    case = Case(learned, routing=routing, has_bias=learned == "bias", hidden_size=64, intermediate_size=32)
    E, H, inner = case.num_experts, case.hidden_size, case.intermediate_size
    tensors, options = case.tensors(torch.float32), case.options()
    module = {
        "norm": nn.RMSNorm(H), "deviation": Deviation(H, bias=False), "gate": LearnedGate(inner),
        "direction": DirectionGate(inner), "activation": nn.PReLU(inner),
    }.get(learned, nn.Module())  # fmt: skip
    if learned in ("norm", "deviation"):
        options["post_expert_norm"] = module
    elif learned != "bias":
        options |= {"activation": module} if learned == "activation" else {"apply_gate": module}
    if learned == "adapters":
        options["apply_gate"] = None
        factors = [(E, 2 * inner, 4), (E, 4, H), (E, H, 4), (E, 4, inner)]
        for number, shape in enumerate(factors):
            module.register_parameter(str(number), nn.Parameter(torch.randn(shape) * 0.3))
        a, b, c, d = module.parameters()
        options["adapters"] = ExpertAdapters(LowRank(a, b, 0.5), LowRank(c, d, 0.5))
    results = []
    for backend in ("reference", "torch"):
        leaves = {n: t.clone().requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}
        out = fused_moe(**leaves, **options, backend=backend)
        wanted = [*(leaf for leaf in leaves.values() if leaf.requires_grad), *module.parameters()]
        gradients = torch.autograd.grad(out.sin().sum(), wanted, materialize_grads=True)
        results.append((out, *gradients))
    for expected, found in zip(*results, strict=True):
        require_equal_up_to_rounding(found, expected)


def test_reference_gradients_by_finite_differences():
    case = Case("gradcheck", num_tokens=5, num_experts=3, hidden_size=4, intermediate_size=3, has_bias=True)
    tensors = case.tensors(torch.float64)
    index = tensors.pop("top_k_index")
    names, leaves = list(tensors), [tensor.requires_grad_() for tensor in tensors.values()]

    def function(*arguments):
        named = dict(zip(names, arguments, strict=True))
        return fused_moe(**named, top_k_index=index, **case.options(), backend="reference")

    assert torch.autograd.gradcheck(function, leaves)


def test_no_tokens_give_no_rows_and_zero_gradients():
    case = Case("empty", num_tokens=0)
    found = run(case, case.tensors(torch.float32), "torch")
    assert found["out"].shape == (0, case.hidden_size)
    assert not found["d_gate_up_proj"].any() and not found["d_down_proj"].any()


def test_no_tokens_give_a_norm_behind_the_experts_a_zero_gradient():
    """Its weights are gathered, and their gradients summed, on all ranks or on none."""
    norm = nn.RMSNorm(8)
    rows, index, weights = torch.zeros(0, 8), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)
    out = fused_moe(
        rows, index, weights, torch.ones(4, 6, 8), torch.ones(4, 8, 3), num_experts=4,
        activation=nn.SiLU(), post_expert_norm=norm, backend="torch",
    )  # fmt: skip
    out.sum().backward()
    assert out.shape == (0, 8) and norm.weight.grad is not None and not norm.weight.grad.any()


@pytest.mark.parametrize("routing", ["random", "left_out"])
def test_torch_compile_of_a_layer_around_it_has_no_graph_break(routing: str):
    case = Case("compile", hidden_size=64, intermediate_size=32, routing=routing)
    tensors = case.tensors(torch.bfloat16)
    expected = fused_moe(**tensors, **case.options(), backend="torch")

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.act_fn = nn.SiLU()

        def forward(self, **tensors):
            return fused_moe(**tensors, num_experts=case.num_experts, activation=self.act_fn, backend="torch") * 2

    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    require_equal_up_to_rounding(compiled(**tensors), expected * 2, units=4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"down_proj": torch.zeros(8, 47, 24)}, "down_proj"),
        ({"gate_up_proj": torch.zeros(8, 24, 48)}, "gate_up_proj"),
        ({"hidden_states": torch.zeros(37, 48, dtype=torch.float64)}, "hidden_states"),
        ({"top_k_weights": torch.zeros(37, 3)}, "top_k_weights"),
        ({"top_k_index": torch.full((37, 2), 9)}, "top_k_index"),
        ({"num_experts": 7}, "num_experts"),
        ({"activation": None}, "activation"),
        ({"backend": "cutlass"}, "cutlass"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict, named: str):
    case = Case("plain")
    arguments = {**case.tensors(torch.float32), **case.options(), "backend": "torch"} | change
    with pytest.raises(ValueError, match=named):
        fused_moe(**arguments)
