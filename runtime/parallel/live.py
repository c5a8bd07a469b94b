"""What goes on in this process under one parallel state: the step that losses are shares of, and what layers leave each other.

Each state has its own (`ParallelState.running`), so that two models, or two tests, do not meet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import weakref

    import torch

    from patchgen.runtime.parallel.expert_peers import SentAhead
    from patchgen.runtime.parallel.loss import Step
    from patchgen.runtime.parallel.overlap import Beside
    from patchgen.runtime.parallel.router_loss import Group
    from patchgen.runtime.parallel.state import ParallelState


@dataclass
class Running:
    """What changes while a model computes.

    Attributes:
        step: what losses are shares of now; None: each micro-batch is a step of its own (`loss.py`).
        router_group: the tokens whose router loss is computed now (`router_loss.py`).
        announced: what may be computed beside the next exchange of tokens (`overlap.py`). Weak: the MoE block that announced
            a computation holds it, and one that an error left behind is gone with its frame.
        sends_ahead: whether tokens were ever to be sent to ranks whose experts are not known yet (`expert_peers.py`).
        sent_ahead: those on their way.
        dropped: rows that `expert_capacity` left out, by device (`expert_rows.py`).
        inside_whole: how many modules run now, one in another, that hold whole inputs (`media.py`).
    """

    step: Step | None = None
    router_group: Group | None = None
    announced: list[weakref.ref[Beside]] = field(default_factory=list)
    sends_ahead: bool = False
    sent_ahead: SentAhead | None = None
    dropped: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    inside_whole: int = 0


@dataclass
class Process:
    """What this process obeys.

    Attributes:
        state: the parallel state that is live; None: there is none.
        alone: what goes on without one.
    """

    state: ParallelState | None = None
    alone: Running = field(default_factory=Running)
