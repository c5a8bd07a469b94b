"""The step of Muon on layers of Qwen3-30B-A3B's width beside AdamW's, and how exact its iteration in bf16 is.

    python benchmarks/bench_muon.py --commit ID        # on a GPU of 80 GB

Parameters, gradients and states are fp32, as a run keeps them; with FSDP or EP over n ranks a rank steps an n-th of them. In turns,
on a busy device: AdamW's one pass (`runtime/train/adamw.py`), Muon on everything, Muon on the matrices of attention with AdamW on
experts (`optim.muon_experts: false`), and torch.optim.Muon on attention alone. Before: how far an orthogonalised gate is from the
same polynomial of its singular values in fp64, relative to its norm. Appends to results_muon.csv.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from bench_moe import Timed, versions
from bench_moe_fp8 import in_turns
from result_rows import append
from torch import nn

from patchgen.runtime.train import optimizers
from patchgen.runtime.train.muon import COEFFICIENTS, STEPS, Muon, Parts, orthogonalised

RESULTS = Path(__file__).with_name("results_muon.csv")
COLUMNS = (
    "date",
    "versions",
    "commit",
    "layers",
    "experts",
    "width",
    "parameters",
    "what",
    "ms",
    "state_gib",
    "peak_gib",
    "error",
)
DEVICE = "cuda"
GATES = Parts(2)


def parameters_of(
    layers: int, experts: int, width: int
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Stacks of gate and up, stacks of down, and matrices of attention, with gradients."""
    inner, heads = 3 * width // 8, 2 * width
    shapes = (
        [(experts, 2 * inner, width)],
        [(experts, width, inner)],
        [(heads, width), (width // 4, width), (width // 4, width), (width, heads)],
    )
    found: list[list[nn.Parameter]] = []
    for kind in shapes:
        members = [nn.Parameter(torch.randn(shape, device=DEVICE) * 0.02) for shape in kind * layers]
        for one in members:
            one.grad = torch.randn_like(one)
        found.append(members)
    return found[0], found[1], found[2]


def relative_error(stack: nn.Parameter) -> float:
    """Of one expert's gate, in bf16, from the polynomial of its singular values."""
    assert stack.grad is not None
    gate = GATES.split(stack.grad[:1])[:1]
    u, values, vt = torch.linalg.svd(gate.double() / gate.double().norm(), full_matrices=False)
    first, third, fifth = COEFFICIENTS
    for _ in range(STEPS):
        values = first * values + third * values**3 + fifth * values**5
    exact = u * values.unsqueeze(1) @ vt
    return float((orthogonalised(gate.bfloat16()).double() - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True, help="of the code that runs")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--milliseconds", type=int, default=2000, help="of each measurement")
    options = parser.parse_args()
    torch.manual_seed(0)
    gate_up, down, attention = parameters_of(options.layers, options.experts, options.width)
    everything = [*gate_up, *down, *attention]
    settings: Any = {"lr": 1e-4, "weight_decay": 0.1}
    halves = dict.fromkeys(gate_up, GATES)
    adamw = optimizers.adamw_for(attention[0])
    error = relative_error(gate_up[0])
    assert error < 8 * STEPS * 2**-8, error
    cases = {
        "AdamW": adamw(everything, betas=(0.9, 0.95), eps=1e-8, **settings),
        "Muon": Muon([{"params": everything}], momentum=0.95, parts=halves, **settings),
        "Muon, experts by AdamW": optimizers.CombinedOptimizer(
            [
                Muon([{"params": attention}], momentum=0.95, **settings),
                adamw([*gate_up, *down], betas=(0.9, 0.95), eps=1e-8, **settings),
            ]
        ),
        "torch.optim.Muon, attention alone": torch.optim.Muon(attention, adjust_lr_fn="match_rms_adamw", **settings),
        "Muon, attention alone": Muon([{"params": attention}], momentum=0.95, **settings),
    }
    count = sum(one.numel() for one in everything)
    rows, timed = [], {}
    for what, optimizer in cases.items():
        before = memory(reset=True)
        optimizer.step()
        states = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim)
        rows.append({"what": what, "state_gib": round(states / 2**30, 2), "peak_gib": round(memory() - before, 2)})
        timed[what] = Timed(optimizer.step, options.milliseconds)
    in_turns(list(timed.values()))
    for row in rows:
        row |= {"ms": round(timed[row["what"]].median, 2), "error": f"{error:.1e}", "parameters": count}
        row |= {"layers": options.layers, "experts": options.experts, "width": options.width}
        print(row, flush=True)
    append(RESULTS, COLUMNS, rows, versions=versions(), commit=options.commit)


def memory(*, reset: bool = False) -> float:
    """GiB: the peak so far, or, to begin anew, what is allocated."""
    if reset:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**30
    return torch.cuda.max_memory_allocated() / 2**30


if __name__ == "__main__":
    main()
