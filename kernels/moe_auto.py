"""Which backend serves the experts when the choice is left to us: by what was measured, not by taste.

One H200, 2026-11-21, bf16, torch 2.11.0+cu130, triton 3.6.0, uniform random routing. Forward and backward in ms, each
shape's options in one process (benchmarks/bench_moe.py; every row is in benchmarks/results.csv):

    T      option         qwen3    gpt_oss    dsv3_slice    mixtral
    4096   transformers    5.2       7.8         22.8         19.6
           torch           3.0       5.4         19.2         17.4
           triton          2.6       5.6         16.2         15.6
    16384  transformers   17.2      27.0         86.8         70.2
           torch           9.2      18.1         61.9         58.2
           triton          7.5      17.6         56.6         54.9
    32768  transformers   33.3      55.4        179.5        145.3
           torch          23.7      41.0        145.2        127.9
           triton         13.9      34.7        110.1        108.8

The figures of torch at 4096 for qwen3 and gpt_oss are of a later process, in which torch.compile no longer reached its
limit of recompilations; its other figures at 4096 and 32768 suffer from that limit and are up to a third too high.
At T = 4096 the gpt_oss row is a tie (5.40 and 5.43 in that process).

The kernels of later that day, T = 16384, triton against torch in one process: qwen3 7.2 and 9.3, gpt_oss 17.1 and 18.5,
dsv3_slice 55.8 and 63.3, mixtral 55.1 and 58.6; T = 4096, triton alone: qwen3 2.4, gpt_oss 5.1.

Zipf routing kept the order on every row of the table. sonic-moe 0.1.2.post1, in one process with the earlier triton at qwen3
and T = 16384, took 7.0 (79.1 % of cuBLAS) where triton took 7.2 (76.9 %; 79.0 to 79.8 % since, in other processes): it is not
chosen unasked, because it tunes itself on first use, for more than 100 s at
the gpt_oss shape, in the middle of a training step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchgen.kernels.moe_options import MoeOptions

_MEASURED_CAPABILITY = (9, 0)


def choose_backend(hidden_states: Tensor, gate_up_proj: Tensor, down_proj: Tensor, options: MoeOptions) -> str:
    """The name of the backend for this call.

    `triton` on compute capability 9.0, where the table was measured, for what its kernels have; `torch` elsewhere.
    """
    if not hidden_states.is_cuda or torch.cuda.get_device_capability(hidden_states.device) != _MEASURED_CAPABILITY:
        return "torch"
    from patchgen.kernels.moe_triton import unsupported  # loads Triton

    return "torch" if unsupported(hidden_states, gate_up_proj, down_proj, options) else "triton"
