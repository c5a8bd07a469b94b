"""Which backend serves the experts when the choice is left to us: by what was measured, not by taste."""

from __future__ import annotations

from torch import Tensor

from patchgen.kernels.moe_options import MoeOptions

MEASURED = """
placeholder
"""


def choose_backend(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    options: MoeOptions,
) -> str:
    """The name of the fastest backend that can serve this call.

    `triton` on compute capability 9.0, where the table was measured, for what its kernels have; `torch` elsewhere.
    """
    import torch

    if not hidden_states.is_cuda or torch.cuda.get_device_capability(hidden_states.device) != (9, 0):
        return "torch"
    from patchgen.kernels.moe_triton import unsupported

    return "torch" if unsupported(hidden_states, gate_up_proj, down_proj, options) else "triton"
