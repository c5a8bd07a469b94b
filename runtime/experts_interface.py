"""Which implementation serves the experts of a generated class: transformers' `experts_implementation`, or the seam.

    experts_implementation          the seam fused_moe is eager    the seam is configured
    not set, or "grouped_mm"        transformers' grouped_mm       the seam
    "eager"                         upstream's loop                the seam
    another ("batched_mm", ...)     that one                       that one

    model.set_experts_implementation("batched_mm")    # this model, from its next forward on
    seams.configure(fused_moe="torch")                # every model of the process that names no other

transformers sets "grouped_mm" by default and keeps no record of it, so the two are one case. With expert parallelism, and for
experts with adapters, the seam always serves: transformers' implementations need all experts on one rank, and support no
adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from patchgen.runtime import expert_adapters, parallel, seams

if TYPE_CHECKING:
    from patchgen.runtime.parallel.state import ParallelState

SEAM = "fused_moe"
LEFT_TO_SEAM = (None, "eager", "grouped_mm")


class SeamExpertsInterface:
    """The registry that `use_experts_implementation` queries: transformers' own, with the seam added."""

    def get_interface(self, experts_implementation: str | None, default: Callable) -> Callable:
        """The forward to run; `default` is the generated one, with the seam and upstream's loop."""
        left_to_seam = experts_implementation in LEFT_TO_SEAM and seams.selected()[SEAM] != seams.EAGER
        if left_to_seam or needs_seam():
            return default
        name: Any = experts_implementation  # annotated as str, but None works
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # imports Triton

        return ALL_EXPERTS_FUNCTIONS.get_interface(name, default)


experts_interface = SeamExpertsInterface()


def expert_parallel_state() -> ParallelState | None:
    """The active parallel state, if experts are sharded over ranks; None without expert parallelism."""
    state = parallel.current()
    return state if state is not None and state.ep > 1 else None


def needs_seam() -> bool:
    """Whether only the seam can serve the running experts, even if it is eager: they are sharded or have adapters."""
    return expert_parallel_state() is not None or expert_adapters.any_active()


def experts_kernel() -> Callable:
    """The selected kernel of the experts; torch's if the seam is eager but needed."""
    if seams.selected()[SEAM] == seams.EAGER and needs_seam():
        from patchgen.kernels.fused_moe import fused_moe as torch_experts

        return torch_experts
    return seams.implementation(SEAM)


def named_instead_of_seam(module: nn.Module) -> str | None:
    """The implementation in this module's config that serves it instead of the seam, if any."""
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return None if implementation in LEFT_TO_SEAM or expert_parallel_state() is not None else implementation
