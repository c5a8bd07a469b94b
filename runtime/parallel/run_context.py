"""What changes while a model runs under one parallel state: the current step, and what layers leave for each other.

Each state has its own (`ParallelState.context`), so that two models, or two tests, do not share it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import weakref

    import torch

    from patchgen.runtime.parallel.expert_peers import PrefetchedTokens
    from patchgen.runtime.parallel.loss import Step
    from patchgen.runtime.parallel.overlap import Deferred
    from patchgen.runtime.parallel.router_loss import TokenGroup


@dataclass
class RunContext:
    """The mutable state of a running model.

    Attributes:
        step: the optimizer step that losses are shares of; None: each micro-batch is a step (`loss.py`).
        router_group: the tokens whose router loss is being computed (`router_loss.py`).
        announced: computations that may overlap with the next token exchange (`overlap.py`). Weak references: the MoE block
            that announced one owns it, and one left behind by an error is gone with its frame.
        prefetches_tokens: whether tokens were ever sent before their experts were known (`expert_peers.py`).
        prefetched_tokens: those in flight.
        dropped_rows: number of rows over `expert_capacity`, by device (`expert_rows.py`).
        replicated_depth: how many nested modules with replicated inputs are running (`media.py`).
    """

    step: Step | None = None
    router_group: TokenGroup | None = None
    announced: list[weakref.ref[Deferred]] = field(default_factory=list)
    prefetches_tokens: bool = False
    prefetched_tokens: PrefetchedTokens | None = None
    dropped_rows: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    replicated_depth: int = 0
