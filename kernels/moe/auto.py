"""The backend of the experts that "auto" takes, `torch` or `triton`, by measurement.

One H200, 2026-11-21, bf16, torch 2.11.0+cu130, triton 3.6.0, transformers 5.23.0, liger-kernel 0.8.5 with its own fixed
configurations (tuned for minutes, it takes some 25 to 30 % less), uniform random routing. Forward and backward in ms, all
of a case (shape, T, routing) in one process, on a busy GPU (`make bench-moe`; `benchmarks/results.csv`, warm_up "100 ms"):

    T      implementation qwen3    gpt_oss    dsv3_slice    mixtral
    4096   transformers     4.0       6.6          19.0       16.9
           liger            5.6      10.9          34.8       32.9
           torch            3.0       5.5          18.3       16.1
           triton           2.5       5.3          15.2       14.9
    16384  transformers    12.3      21.6          73.9       63.0
           liger           18.4      39.6         134.8      127.0
           torch            9.1      19.1          63.8       58.4
           triton           7.1      17.8          56.5       54.4
    32768  transformers    23.6      44.2         148.1      126.1
           liger           35.0      78.9         270.2      256.5
           torch           17.3      36.6         128.9      119.0
           triton          13.2      35.3         111.1      107.0

`triton` is first in all 23 cases, of random and of Zipf routing: 3.5 to 28 % less time than the next, 3.4 to 33 % forward
alone.
(The 24th, mixtral at 32768 with Zipf routing, was cut off; an earlier `triton` was first there.)

sonic-moe 0.1.2.post1 is not in the table: it tunes itself on first use, for more than 100 s at the gpt_oss shape, in the
middle of a training step, so "auto" never takes it. In one process with an earlier `triton`, at qwen3 and T = 16384,
forward and backward took 6.99 ms where `triton` took 7.19; forward 2.14 and 2.39.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchgen.kernels.moe.options import MoeOptions
from patchgen.kernels.packages import failed_import

_MEASURED_CAPABILITY = (9, 0)


def choose_backend(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    options: MoeOptions,
    biases: tuple[Tensor | None, ...] = (),
) -> str:
    """The name of the backend for this call.

    `triton` on compute capability 9.0, where the table was measured, for supported calls; `torch` elsewhere,
    and where Triton cannot be imported.
    """
    if not hidden_states.is_cuda or torch.cuda.get_device_capability(hidden_states.device) != _MEASURED_CAPABILITY:
        return "torch"
    if failed_import("triton") is not None:
        return "torch"
    from patchgen.kernels.moe.triton_backend import unsupported  # loads Triton

    return "torch" if unsupported(hidden_states, gate_up_proj, down_proj, options, biases) else "triton"
