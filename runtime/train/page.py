"""The page of a run: `index.html`, one file with everything in it, and `report.png` where matplotlib is installed."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from patchgen.runtime.train import plots, run_log
from patchgen.runtime.train.recipe import changed
from patchgen.runtime.train.records import Listener, RunStart, StepRecord, Summary
from patchgen.runtime.train.view import ENDINGS, headline

PAGE = "index.html"
UPDATE_SECONDS = 30.0  # between updates of the page while the run goes on
WRITE_SECONDS = 0.3  # a page that takes longer to write is updated less often in proportion: 1 % of the run's time
PLOTS = {  # key of the log -> title of a plot with one line
    "tokens_per_second_per_device": "tokens/s per device",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "expert_load": "busiest expert (multiple of the even share)",
}


class RunPage(Listener):
    """Writes the page at the start, every `seconds`, and at the end; until then the browser reloads it."""

    def __init__(self, directory: Path, *, on_failed: str = "stop", seconds: float = UPDATE_SECONDS) -> None:
        self.directory, self.on_failed, self.seconds = directory, on_failed, seconds
        self._written, self._took = float("-inf"), 0.0

    def on_start(self, start: RunStart) -> None:
        self._start = start
        self._write(f"step {start.first_step} of {start.steps}: running", reload=True)

    def on_step(self, record: StepRecord) -> None:
        if time.monotonic() - self._written >= self._interval:
            self._write(f"step {record.step} of {self._start.steps}: running", reload=True)

    @property
    def _interval(self) -> float:
        """Seconds between updates."""
        return self.seconds * max(1.0, self._took / WRITE_SECONDS)

    def on_end(self, summary: Summary) -> None:
        self._write(f"step {summary.steps} of {self._start.steps}: {ENDINGS[summary.reason]}", summary.data)
        with run_log.writing(self.directory / "report.png", self.on_failed) as path:
            write_png(run_log.read(self.directory), path)

    def _write(self, state: str, data: str = "", *, reload: bool = False) -> None:
        """Replaces the page atomically, so that no reader sees half a page, even if the run is killed meanwhile."""
        started = time.monotonic()
        entries, experts = run_log.read(self.directory), run_log.read_experts(self.directory)
        text = page(self._start, state, data, entries, experts, reload=self._interval if reload else None)
        with run_log.writing(self.directory / PAGE, self.on_failed) as path:
            path.with_suffix(".new").write_text(text, encoding="utf-8")
            path.with_suffix(".new").replace(path)
        self._written = time.monotonic()
        self._took = self._written - started


def page(
    start: RunStart,
    state: str,
    data: str,
    entries: list[dict[str, Any]],
    experts: dict[str, Any] | None = None,
    *,
    reload: float | None = None,
) -> str:
    """The HTML of a run.

    Args:
        state: how far the run is, or how it ended.
        data: the loader's summary of used and dropped samples.
        entries: of the log.
        experts: as `run_log.read_experts` gives it.
        reload: seconds after which a browser reloads the page; None: never.
    """
    environment = Environment(
        loader=PackageLoader("patchgen", "templates"), undefined=StrictUndefined, autoescape=True
    )
    return environment.get_template("run_page.jinja").render(
        title=start.name,
        headline=headline(start),
        ending=state + (time.strftime(", %Y-%m-%d %H:%M:%S") if reload is not None else ""),
        reload=None if reload is None else max(1, round(reload)),
        plots=plots,
        figures=figures(entries),
        warnings=[(entry["step"], entry["warning"]) for entry in entries if entry.get("warning")],
        curves=curves(entries),
        experts=plots.heat_map(experts["counts"], f"load of each expert at step {experts['step']}") if experts else "",
        samples=next((entry for entry in reversed(entries) if "samples" in entry), None),
        sources=totals_by_source(entries),
        data=data,
        report=start.report,
        changed=[(key, _as_yaml(value)) for key, value in changed(start.recipe).items()],
        recipe=yaml.safe_dump(start.recipe, sort_keys=False),
    )


def _as_yaml(value: Any) -> str:
    """A value of a recipe in one line, as `--set` takes it."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def figures(entries: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(name, text) of the figures at the top of the page: steps, losses, median speeds, peak memory, tokens."""
    steps = [entry for entry in entries if "loss" in entry]
    if not steps:
        return []
    rows = [("steps", str(steps[-1]["step"])), ("first loss", f"{steps[0]['loss']:.4f}")]
    rows.append(("last loss", f"{steps[-1]['loss']:.4f}"))
    for key, name, number_format in (
        ("tokens_per_second_per_device", "tokens/s per device (median)", "{:,.0f}"),
        ("tflops", "TFLOP/s per device (median)", "{:.3g}"),
        ("mfu", "MFU (median)", "{:.1%}"),
        ("peak_memory_gib", "peak memory, GiB", "{:.1f}"),
    ):
        values = [value for _, value in series(entries, key) if value is not None]
        if values:
            value = max(values) if key == "peak_memory_gib" else statistics.median(values)
            rows.append((name, number_format.format(value)))
    rows.append(("tokens", f"{sum(entry['tokens'] for entry in steps):,}"))
    skipped = sum(entry["skipped"] for entry in steps)
    return [*rows, ("skipped steps", str(skipped))] if skipped else rows


def curves(entries: list[dict[str, Any]]) -> list[str]:
    """The plots of a log, with one axis of steps for all. What has fewer than two has no plot."""
    by_title: dict[str, dict[str, plots.Points]] = {"loss": {"": series(entries, "loss")}}
    if evaluation := series(entries, "eval_loss"):
        by_title["loss"] = {"training": by_title["loss"][""], "evaluation": evaluation}
    by_title["loss by source"] = losses_by_source(entries, "sources")
    by_title["evaluation loss by source"] = losses_by_source(entries, "eval_sources")
    by_title |= {name: {"": series(entries, key)} for key, name in PLOTS.items()}
    shown: dict[str, dict[str, plots.Points]] = {}
    for title, lines in by_title.items():
        drawn = {name: points for name, points in lines.items() if any(value is not None for _, value in points)}
        if max(map(len, drawn.values()), default=0) > 1:
            shown[title] = drawn
    steps = [step for lines in shown.values() for points in lines.values() for step, _ in points]
    return [plots.curve(lines, title, (min(steps), max(steps))) for title, lines in shown.items()]


def series(entries: list[dict[str, Any]], key: str) -> list[tuple[int, float | None]]:
    """(step, value) of the entries with a number for this key; None for one that is not finite."""
    return _points((entry["step"], entry.get(key)) for entry in entries)


def losses_by_source(entries: list[dict[str, Any]], key: str) -> dict[str, plots.Points]:
    """Source -> (step, loss) of each entry that has a loss of this source under this key."""
    lines = [(entry["step"], entry[key]) for entry in entries if entry.get(key)]
    names = dict.fromkeys(name for _, figures in lines for name in figures)
    return {
        name: _points((step, figures[name]["loss"]) for step, figures in lines if name in figures) for name in names
    }


def _points(values: Iterable[tuple[int, Any]]) -> list[tuple[int, float | None]]:
    return [
        (step, value if math.isfinite(value) else None) for step, value in values if isinstance(value, int | float)
    ]


def totals_by_source(entries: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(source, tokens, labels), summed over the log."""
    totals: dict[str, Counter] = {}
    for entry in entries:
        for name, figures in (entry.get("sources") or {}).items():
            totals.setdefault(name, Counter()).update(tokens=figures["tokens"], labels=figures["labels"])
    return [(name, f"{total['tokens']:,}", f"{total['labels']:,}") for name, total in totals.items()]


def write_png(entries: list[dict[str, Any]], path: Path) -> None:
    """Draws loss and throughput, or prints that matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print(
            f"{path.name} is left out: matplotlib is not installed (`pip install matplotlib`). index.html has the plots."
        )
        return
    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    # matplotlib interrupts a line at None
    figure, axes = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, layout="constrained")
    for axis, key in zip(axes, ("loss", "tokens_per_second_per_device"), strict=True):
        axis.plot(*zip(*series(entries, key), strict=True))
        axis.set_ylabel(PLOTS.get(key, key))
        axis.grid(alpha=0.3)
    evaluations = series(entries, "eval_loss")
    if evaluations:
        axes[0].plot(*zip(*evaluations, strict=True), "o-", label="evaluation")
        axes[0].legend()
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
