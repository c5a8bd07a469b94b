"""Which backend serves the experts when the choice is left to us: by what was measured, not by taste.

One H200, 2026-11-21, bf16, torch 2.11.0+cu130, triton 3.6.0, transformers 5.23.0, liger-kernel 0.8.5 with its own fixed
configurations (tuned for minutes, it takes some 25 to 30 % less), uniform random routing. Forward and backward in ms, all
of a row in one process, in short rounds on a cool GPU (`benchmarks/results.csv`, warm_up "one call"; what a busy GPU does
at T = 16384 is in README.md beside this):

    T      option         qwen3    gpt_oss    dsv3_slice    mixtral
    4096   transformers     4.2       6.7          20.1       17.0
           liger            5.8      11.3          35.0       32.7
           torch            2.9       5.5          16.2       17.1
           triton           2.5       4.8          15.6       14.9
    16384  transformers    12.7      21.3          73.5       63.4
           liger           18.5      39.6         134.6      126.3
           torch            9.1      19.3          61.4       58.4
           triton           6.3      16.9          56.8       55.1
    32768  transformers    24.2      44.4         146.3      126.5
           liger           35.0      79.4         269.8      256.6
           torch           17.3      36.7         126.8      119.0
           triton          13.3      33.8         112.1      108.0

`triton` is first on all 24 rows, Zipf routing included: 1.5 to 31 % less time than the next. Forward alone, `torch` is up to
2.5 % faster on two of Mixtral's.

sonic-moe 0.1.2.post1 is not in the table: it tunes itself on first use, for more than 100 s at the gpt_oss shape, in the
middle of a training step, and is not chosen unasked. In one process with an earlier `triton`, at qwen3 and T = 16384,
forward and backward took 6.99 ms where `triton` took 7.20; forward 2.14 and 2.39.
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
