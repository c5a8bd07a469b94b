"""The events of a run, and the listener that receives them."""

from __future__ import annotations

from dataclasses import dataclass

from patchgen.runtime.train.router_loads import ExpertLoads
from patchgen.runtime.train.sources import SourceFigures


class TrainingStopped(RuntimeError):
    """The run cannot continue: its first loss is implausible, its gradients are not finite, its disk is full, or its log is
    broken."""


@dataclass(frozen=True)
class RunStart:
    """Sent once, before the first step.

    Attributes:
        report: the layout of ranks and what implements each seam, as text.
        first_step: steps taken by earlier starts of the same run.
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
        loss: mean over all items (labels, documents or pairs) of the step, before its update; with the router loss, if any.
        grad_norm: over all parameters, before clipping.
        lr: of the first parameter group.
        tokens, labels: of all ranks; padding counts as tokens, not as labels.
        seconds: from the end of the step before to that of this one, so that they add up to the time of the run; what comes between
            steps (evaluations, checkpoints) is left out.
        tflops: model TFLOP/s per device (flops.py); mfu: as a share of the device's peak, None if that is not known.
        peak_memory_gib: peak allocation on this device so far.
        expert_load: load of the busiest expert of any layer, as a multiple of the even share; counted since the last reading.
        experts: what each expert of each layer got since then.
        warning: what is wrong with the run and what to do; said once.
        skipped: a gradient was not finite and the step was not taken.
        sources: data source -> its figures; None: there is only one source.
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
    experts: ExpertLoads | None = None
    warning: str | None = None
    skipped: bool = False
    sources: dict[str, SourceFigures] | None = None


@dataclass(frozen=True)
class Evaluation:
    """One evaluation after `step` steps: the mean loss per item (label, document or pair) and, if there are several sources,
    per label of each."""

    step: int
    loss: float
    labels: int
    seconds: float
    sources: dict[str, SourceFigures] | None = None


@dataclass(frozen=True)
class Sample:
    """One of the recipe's prompts, and how the model continued it."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Summary:
    """How a run ended.

    Attributes:
        reason: "steps": all steps taken; "data": the data ended; "patience": no lower evaluation loss for `train.patience`
            evaluations; "stop": requested by Ctrl-C or SIGTERM.
        export: the folder with the trained model, or None.
        data: the loader's summary of used and dropped samples.
        skipped: how many steps changed no weight, because a gradient was not finite; on rank 0 those before a resume, too.
        best_step, best_loss: of the evaluation with the lowest loss; None: no evaluation gave a finite loss.
        exported_step: the step whose weights are in `export`; None: nothing was exported.
        graph: with `train.cuda_graph`, how many steps of this start were replayed and why the others were not.
    """

    steps: int
    reason: str
    directory: str
    export: str | None
    data: str = ""
    skipped: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    exported_step: int | None = None
    graph: str | None = None


class Listener:
    """Receives training events (rank 0), between steps. Override what you need."""

    def on_start(self, start: RunStart) -> None:
        """Before the first step."""

    def on_step(self, record: StepRecord) -> None:
        """After each step."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """After each evaluation."""

    def on_samples(self, step: int, samples: list[Sample]) -> None:
        """After an evaluation at this step, in a run with `train.prompts`."""

    def on_end(self, summary: Summary) -> None:
        """At the end, unless an error ended the run."""

    def close(self) -> None:
        """After everything else, errors included."""
