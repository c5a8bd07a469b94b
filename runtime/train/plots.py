"""The plots of a run's page, as inline SVG. With the data of its curves, which `templates/run_page_script.jinja` draws anew."""

from __future__ import annotations

import html
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

Points: TypeAlias = Sequence[tuple[int, float | None]]
"""(step, value), by step; None: a value that is not finite."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 220, 56, 12, 10, 26
"""Pixels of a curve, and of the margins around the plot. Without JavaScript it is as wide as `WIDTH`, and scaled."""
COLUMNS = 10_000
"""A figure has the lowest and highest value of each of so many stretches of points, which its lines share."""
COLOURS = 8
LOADS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Where one shade of `heat_map` ends and the next begins, as multiples of the even share."""
ROW_HEIGHTS = (8, 24)
"""Pixels of a layer: few layers are drawn high, many low."""


def curve(lines: Mapping[str, Points], name: str, steps: tuple[int, int]) -> str:
    """A plot of one or several lines with their data.

    Args:
        lines: name -> points, with a finite value in each. The name of a figure's only line may be empty.
        name: of the figure. One that has "loss" in it is also shown on a logarithmic scale if asked to.
        steps: the first and the last one of the axis.
    """
    columns = max(1000, COLUMNS // len(lines))
    kept = {line: thinned(points, columns) for line, points in lines.items()}
    scaled = "".join(
        f'<path class="line colour{index % COLOURS}" d="{d}"/>' for index, d in enumerate(_paths(kept.values(), steps))
    )
    values = [value for points in kept.values() for _, value in points if value is not None]
    base, kind, title = HEIGHT - BOTTOM, "curve loss" if "loss" in name else "curve", html.escape(name)
    return (
        f'<figure class="{kind}"><figcaption>{title}{_note(lines, columns)}</figcaption>{_legend(lines)}'
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">'
        f'<path d="M{LEFT} {TOP}V{base}H{WIDTH - RIGHT}" class="axis"/>{scaled}'
        f'<text x="{LEFT - 6}" y="{TOP + 8}" text-anchor="end">{max(values):.4g}</text>'
        f'<text x="{LEFT - 6}" y="{base}" text-anchor="end">{min(values):.4g}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 8}">{steps[0]}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">step {steps[1]}</text></svg></div>'
        f'<script type="application/json">[{",".join(map(_data, kept.values()))}]</script></figure>'
    )


def thinned(points: Points, columns: int) -> Points:
    """The first and last point and, of each of `columns` stretches of as many points, the lowest, the highest and the first
    without a value; all points if there are at most two for each.

    Every n-th point instead would lose the spikes that a reader looks for.
    """
    if len(points) <= 2 * columns:
        return points
    kept = {points[0], points[-1]}
    length = math.ceil(len(points) / columns)
    for start in range(0, len(points), length):
        column = points[start : start + length]
        finite = [(value, step) for step, value in column if value is not None]
        kept |= {(step, value) for value, step in (min(finite), max(finite))} if finite else set()
        if len(finite) < len(column):
            kept.add(next(point for point in column if point[1] is None))
    return sorted(kept, key=operator.itemgetter(0))


def _paths(lines: Iterable[Points], steps: tuple[int, int]) -> list[str]:
    """The path of each line, interrupted where a value is not finite."""
    lines = [thinned(points, WIDTH) for points in lines]
    values = [value for points in lines for _, value in points if value is not None]
    (first, last), low, high = steps, min(values), max(values)

    def path(points: Points) -> str:
        parts, pen = [], "M"
        for step, value in points:
            if value is None:
                pen = "M"
                continue
            x = LEFT + (step - first) / max(1, last - first) * (WIDTH - LEFT - RIGHT)
            y = TOP + (high - value) / ((high - low) or 1) * (HEIGHT - BOTTOM - TOP)
            parts.append(f"{pen}{x:.1f},{y:.1f}{'h0' if pen == 'M' else ''}")  # h0: a value between two gaps is a dot
            pen = "L"
        return "".join(parts)

    return [path(points) for points in lines]


def _note(lines: Mapping[str, Points], columns: int) -> str:
    """Which points are shown, if not all are."""
    longest = max(map(len, lines.values()))
    if longest <= 2 * columns:
        return ""
    return f" <small>min and max of every {math.ceil(longest / columns)} points</small>"


def _legend(lines: Mapping[str, Points]) -> str:
    if list(lines) == [""]:
        return ""
    names = (
        f'<span><i class="colour{index % COLOURS}"></i>{html.escape(name)}</span>' for index, name in enumerate(lines)
    )
    return f'<p class="legend">{"".join(names)}</p>'


def _data(points: Points) -> str:
    """JSON of a line. Of the steps after the first the distance to the one before, which has fewer digits."""
    steps = [step for step, _ in points]
    distances = [steps[0], *(step - before for before, step in itertools.pairwise(steps))]
    values = ("null" if value is None else f"{value:.6g}" for _, value in points)
    return f'{{"steps":[{",".join(map(str, distances))}],"values":[{",".join(values)}]}}'


def heat_map(counts: Mapping[str, Sequence[int]], name: str) -> str:
    """A row for each layer and a cell for each of its experts, the darker the more slots it got, with the shades explained below.

    Equal neighbours are one rectangle, so that hundreds of experts in dozens of layers stay a small page.
    """
    shades: list[list[str]] = [[] for _ in range(len(LOADS) + 1)]
    width = max(len(layer) for layer in counts.values())
    for row, layer in enumerate(counts.values()):
        even, cell = sum(layer) / len(layer), width / len(layer)
        shade_of = [sum(count >= edge * even for edge in LOADS) for count in layer]
        start = 0
        for end in range(1, len(layer) + 1):
            if end == len(layer) or shade_of[end] != shade_of[start]:
                left, right = start * cell, end * cell
                shades[shade_of[start]].append(f"M{left:g} {row}H{right:g}v1H{left:g}z")
                start = end
    height = min(ROW_HEIGHTS[1], max(ROW_HEIGHTS[0], 400 // len(counts))) * len(counts)
    paths = "".join(f'<path class="shade{at}" d="{"".join(parts)}"/>' for at, parts in enumerate(shades) if parts)
    edges = [f"under {LOADS[0]:g}x", *(f"from {edge:g}x" for edge in LOADS)]
    legend = "".join(f'<span><i class="shade{at}"></i>{edge}</span>' for at, edge in enumerate(edges))
    first, last = next(iter(counts)), list(counts)[-1]
    return (
        f'<figure class="experts"><figcaption>{html.escape(name)}</figcaption>'
        f'<svg viewBox="0 0 {width} {len(counts)}" preserveAspectRatio="none" style="height: {height}px" role="img">{paths}</svg>'
        f'<p class="legend">{legend}</p><p class="legend">Experts 0 to {width - 1} from left to right, layers from top to bottom: '
        f"{html.escape(first)} to {html.escape(last)}. 1x is the even share.</p></figure>"
    )
