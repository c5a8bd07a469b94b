"""The plots of a run's page, as inline SVG."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 240, 64, 28
LOADS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Where one shade of `heat_map` ends and the next begins, as multiples of the even share."""
ROW_HEIGHTS = (8, 24)
"""Pixels of a layer: few layers are drawn high, many low."""


def curve(points: list[tuple[int, float]], name: str) -> str:
    """A line plot, labelled with the extreme values."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high, first, last = min(ys), max(ys), min(xs), max(xs)

    def to_pixels(x: float, y: float) -> str:
        right = LEFT + (x - first) / max(1, last - first) * (WIDTH - LEFT - 12)
        down = 12 + (high - y) / ((high - low) or 1) * (HEIGHT - BOTTOM - 24)
        return f"{right:.1f},{down:.1f}"

    line = " ".join(to_pixels(x, y) for x, y in points)
    base = HEIGHT - BOTTOM
    return (
        f'<figure><figcaption>{html.escape(name)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f'<path d="M{LEFT} 8V{base}H{WIDTH - 8}" class="axis"/><polyline points="{line}"/>'
        f'<text x="{LEFT - 6}" y="18" text-anchor="end">{high:.4g}</text>'
        f'<text x="{LEFT - 6}" y="{base - 4}" text-anchor="end">{low:.4g}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 8}">{first}</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 8}" text-anchor="end">step {last}</text></svg></figure>'
    )


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
