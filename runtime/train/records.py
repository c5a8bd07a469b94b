"""What a run tells those who look at it."""

from __future__ import annotations

from dataclasses import dataclass

from patchgen.runtime.train.sources import SourceFigures


class TrainingStopped(RuntimeError):
    """The run cannot go on: its gradients are not finite, or its disk takes no more."""


@dataclass(frozen=True)
class RunStart:
    """Once, before the first step.

    Attributes:
        report: what runs where, as text.
        first_step: steps taken before, by an earlier start of the same run.
    """

    name: str
    directory: str
    steps: int
    first_step: int
    devices: int
    device: str
    parameters: int
    active_parameters: int
    report: str
    recipe: dict


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: 1 is the first.
        loss: mean over all labels of the step, before its update; with the router loss where the model adds it.
        grad_norm: over all parameters, before clipping.
        lr: of the first parameter group.
        tokens, labels: of all ranks; padding counts as tokens, not as labels.
        seconds: from the start of the step to the end of the next one's preparation.
        tflops: model TFLOP/s per device (flops.py); mfu: as a share of the device's peak, None if that is not known.
        peak_memory_gib: the most that was allocated on this device so far.
        expert_load: slots of the busiest expert of any layer, as a multiple of the even share; since the last reading.
        skipped: a gradient was not finite and the step was not taken.
        sources: the figures of each source of the data by its name; None: there is one.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    labels: int
    seconds: float
    tokens_per_second_per_device: float
    tflops: float
    mfu: float | None = None
    peak_memory_gib: float | None = None
    expert_load: float | None = None
    skipped: bool = False
    sources: dict[str, SourceFigures] | None = None


@dataclass(frozen=True)
class Evaluation:
    """One evaluation after `step` steps: the mean loss per label, and of each source where there are several."""

    step: int
    loss: float
    labels: int
    seconds: float
    sources: dict[str, SourceFigures] | None = None


@dataclass(frozen=True)
class Summary:
    """How a run ended.

    Attributes:
        reason: "steps": all were taken; "data": there were no more; "stop": somebody asked (Ctrl-C, SIGTERM).
        export: the folder with the trained model, or None.
        data: what the loader made of its samples, in one line.
    """

    steps: int
    reason: str
    directory: str
    export: str | None
    data: str = ""


class Listener:
    """Receives training events (rank 0). Override what you need; all of it is called between steps."""

    def on_start(self, start: RunStart) -> None:
        """Before the first step."""

    def on_step(self, record: StepRecord) -> None:
        """After each step."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """After each evaluation."""

    def on_end(self, summary: Summary) -> None:
        """At the end, however it came, except by an error."""

    def close(self) -> None:
        """After everything else, errors included."""
