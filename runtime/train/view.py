"""What a run prints: a live panel on a terminal, elsewhere a line every `log.every` steps.

step   120/1000   loss 3.2145   norm 0.870   lr 9.10e-05   tok/s/device 45,100   TFLOP/s 412   MFU 41.7%   peak 62.0 GiB   ...
"""

from __future__ import annotations

import statistics
import sys
import time
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from patchgen.runtime.data.problems import ALL_USED
from patchgen.runtime.train.records import Evaluation, Listener, RunStart, Sample, StepRecord, Summary
from patchgen.runtime.train.sources import SourceFigures

BARS = " ▁▂▃▄▅▆▇█"
ENDINGS = {
    "steps": "all steps taken",
    "data": "the data ended",
    "patience": "no lower evaluation loss for train.patience evaluations",
    "stop": "stopped on request; run the same command to continue",
}


class RemainingTime:
    """Estimates the remaining time from the median of the last 50 steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.seconds = steps, []

    def update(self, record: StepRecord) -> str:
        self.seconds = [*self.seconds[-49:], record.seconds]
        return str(timedelta(seconds=round(statistics.median(self.seconds) * (self.steps - record.step))))


class PlainView(Listener):
    """A line every `every` steps and for each skipped step: for logs, pipes and CI."""

    def __init__(self, every: int = 1) -> None:
        self.every = every

    def on_start(self, start: RunStart) -> None:
        self._remaining = RemainingTime(start.steps)
        print(headline(start) + "\n" + start.report, flush=True)

    def on_step(self, record: StepRecord) -> None:
        remaining = self._remaining.update(record)
        if record.step % self.every == 0 or record.skipped:
            print(
                "   ".join(f"{name} {value}" for name, value in cells(record, self._remaining.steps, remaining)),
                flush=True,
            )
            if record.sources:
                print(f"     {source_losses(record.sources)}", flush=True)
        if record.warning:
            print(f"WARNING, step {record.step}: {record.warning}", flush=True)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        print(
            f"step {evaluation.step}   evaluation loss {evaluation.loss:.4f}   {evaluation.labels} labels"
            + (f"\n     {source_losses(evaluation.sources)}" if evaluation.sources else ""),
            flush=True,
        )

    def on_samples(self, step: int, samples: list[Sample]) -> None:
        for sample in samples:
            print(f"step {step}   {shown(sample)}", flush=True)

    def on_end(self, summary: Summary) -> None:
        print(ending(summary), flush=True)


class LiveView(Listener):
    """A panel that is redrawn every `every` steps, with a sparkline of the loss."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self._losses: list[float] = []
        self._evaluation: Evaluation | None = None
        self._live: Live | None = None

    def on_start(self, start: RunStart) -> None:
        self._start, self._remaining = start, RemainingTime(start.steps)
        self._console = Console()
        self._console.print(headline(start), highlight=False)
        self._console.print(start.report, highlight=False, markup=False)
        self._progress = Progress(
            TextColumn("step"), BarColumn(bar_width=None), TextColumn("{task.completed}/{task.total}"), expand=True
        )
        self._task = self._progress.add_task("", total=start.steps, completed=start.first_step)
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()

    def on_step(self, record: StepRecord) -> None:
        remaining = self._remaining.update(record)
        self._losses.append(record.loss)
        if record.warning:
            self._console.print(
                f"WARNING, step {record.step}: {record.warning}", style="yellow", highlight=False, markup=False
            )
        if record.step % self.every:
            return
        self._progress.update(self._task, completed=record.step)
        table = Table.grid(expand=True, padding=(0, 2))
        figures = cells(record, self._start.steps, remaining)[1:]
        for row in (figures[:5], figures[5:]):
            table.add_row(*(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in row))
        width = max(20, self._console.width - 6)
        parts = [self._progress, table, Text(sparkline(self._losses, width), style="cyan")]
        if record.sources:
            parts.append(Text(source_losses(record.sources), style="dim"))
        if self._evaluation is not None:
            parts.append(Text(f"evaluation at step {self._evaluation.step}: loss {self._evaluation.loss:.4f}"))
        assert self._live is not None, "on_start creates it"
        self._live.update(Panel(Group(*parts), title=self._start.name), refresh=True)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation

    def on_samples(self, step: int, samples: list[Sample]) -> None:
        for sample in samples:
            self._console.print(f"step {step}   {shown(sample)}", highlight=False, markup=False)

    def on_end(self, summary: Summary) -> None:
        self.close()
        self._console.print(ending(summary), highlight=False)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()  # restores the cursor, also before an error message


def progress_view(every: int) -> Listener:
    """The live view on a terminal, the plain one elsewhere."""
    return LiveView(every) if sys.stdout.isatty() else PlainView(every)


def headline(start: RunStart) -> str:
    """One line that describes the run."""
    return (
        f"{start.name}: {start.parameters / 1e6:,.1f} M parameters, {start.active_parameters / 1e6:,.1f} M of them "
        f"active per token, on {start.devices} x {start.device}; in {start.directory}"
        + (f", continued after step {start.first_step}" if start.first_step else "")
        + time.strftime(", %Y-%m-%d %H:%M:%S")
    )


def cells(record: StepRecord, steps: int, remaining: str) -> list[tuple[str, str]]:
    """The figures of a step as (name, text)."""
    figures = [
        ("step", f"{record.step:>5}/{steps}"),
        ("loss", f"{record.loss:.4f}"),
        ("norm", f"{record.grad_norm:.3f}" + (" SKIPPED" if record.skipped else "")),
        ("lr", f"{record.lr:.2e}"),
        ("tok/s/device", f"{record.tokens_per_second_per_device:,.0f}"),
        ("TFLOP/s", f"{record.tflops:.3g}"),
    ]
    if record.mfu is not None:
        figures.append(("MFU", f"{record.mfu:.1%}"))
    if record.peak_memory_gib is not None:
        figures.append(("peak", f"{record.peak_memory_gib:.1f} GiB"))
    if record.expert_load is not None:
        figures.append(("busiest expert", f"{record.expert_load:.1f}x"))
    figures.append(("left", remaining))
    return figures


def source_losses(sources: dict[str, SourceFigures]) -> str:
    """The loss and the tokens of each source in one line."""
    losses = {name: "-" if source.loss is None else f"{source.loss:.4f}" for name, source in sources.items()}
    return "   ".join(f"{name} {losses[name]} ({source.tokens:,} tokens)" for name, source in sources.items())


def shown(sample: Sample) -> str:
    """A prompt and its continuation in one line."""
    return f"{sample.prompt!r} -> {sample.text!r}"


def ending(summary: Summary) -> str:
    """How the run ended, and its folders; lines for steps that were skipped, samples that were dropped or truncated, and what of
    the run was replayed."""
    where = f"   export: {summary.export}" if summary.export else ""
    left_out = f"\nsamples: {summary.data}" if summary.data not in ("", ALL_USED) else ""
    skipped = (
        f"\nskipped: {summary.skipped} of {summary.steps} steps changed no weight (gradients that are not finite)"
    )
    graph = f"\ngraph: {summary.graph}" if summary.graph else ""
    best = f"   best: step {summary.best_step}, evaluation loss {summary.best_loss:.4f}" if summary.best_step else ""
    return (
        f"step {summary.steps}: {ENDINGS[summary.reason]}{best}   run: {summary.directory}{where}"
        f"{skipped if summary.skipped else ''}{left_out}{graph}"
    )


def sparkline(values: list[float], width: int) -> str:
    """The finite values as bars in one line, the latest on the right; each bar is the mean of one or more values."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    per_bar = -(-len(finite) // width)
    means = [sum(part) / len(part) for part in (finite[i : i + per_bar] for i in range(0, len(finite), per_bar))]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in means)
