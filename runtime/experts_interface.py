"""Who serves the experts of a generated class: what transformers' `experts_implementation` names, or the seam.

    experts_implementation          the seam fused_moe is eager    the seam is configured
    not set, or "grouped_mm"        transformers' grouped_mm       the seam
    "eager"                         upstream's loop                the seam
    another ("batched_mm", ...)     that one                       that one

    model.set_experts_implementation("batched_mm")    # this model, from its next forward on
    seams.configure(fused_moe="torch")                # every model of the process that names no other

transformers writes "grouped_mm" where nothing was asked for and keeps no record of it, so the two are one case. With
expert parallelism, and for experts with adapters, the seam serves in every case: transformers' implementations want all
experts on one rank, and know no adapters.
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
    """What `use_experts_implementation` asks: transformers' register, in which the seam takes part."""

    def get_interface(self, experts_implementation: str | None, default: Callable) -> Callable:
        """The forward that serves now; `default` is the generated one, which holds the seam and upstream's loop."""
        left_to_seam = experts_implementation in LEFT_TO_SEAM and seams.selected()[SEAM] != seams.EAGER
        if left_to_seam or needs_seam():
            return default
        name: Any = experts_implementation  # transformers says str and takes None, too
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # here, for it loads Triton

        return ALL_EXPERTS_FUNCTIONS.get_interface(name, default)


experts_interface = SeamExpertsInterface()


def divided_over_ranks() -> ParallelState | None:
    """The live state of which this rank holds a part of the experts, None without expert parallelism."""
    state = parallel.current()
    return state if state is not None and state.ep > 1 else None


def needs_seam() -> bool:
    """Whether nothing but the seam can serve the experts that run now, an eager one included: only some of them are on
    this rank, or they have adapters."""
    return divided_over_ranks() is not None or expert_adapters.are_adding()


def experts_kernel() -> Callable:
    """The selected kernel of the experts; where the seam is eager and needed nonetheless, the one of torch."""
    if seams.selected()[SEAM] == seams.EAGER and needs_seam():
        from patchgen.kernels.fused_moe import fused_moe as torch_experts

        return torch_experts
    return seams.implementation(SEAM)


def named_instead_of_seam(module: nn.Module) -> str | None:
    """The implementation that this module's config names and that serves it in the place of the seam, if any."""
    named = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return None if named in LEFT_TO_SEAM or divided_over_ranks() is not None else named
