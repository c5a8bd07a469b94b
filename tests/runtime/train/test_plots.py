"""The curves of a run's page: which points it has, and how they are drawn without JavaScript."""

from __future__ import annotations

import json
import math
import random
import re

from patchgen.runtime.train import page, plots


def data(figure: str) -> list[dict]:
    found = re.search(r'<script type="application/json">(.*)</script>', figure)
    assert found
    return json.loads(found[1])


def paths(figure: str) -> list[list[tuple[float, float]]]:
    """Of each stretch without a gap the points in pixels."""
    (drawn,) = re.findall(r'<path class="line [^"]*" d="([^"]*)"', figure)
    points = re.compile(r"([\d.]+),([\d.]+)")
    return [[(float(x), float(y)) for x, y in points.findall(part)] for part in drawn.split("M")[1:]]


def test_of_many_points_those_that_stand_out_are_kept():
    draw = random.Random(0)
    points = [(step, draw.gauss(2.0, 0.1)) for step in range(1, 100_001)]
    points[66_665], points[12_344] = (66_666, 9.5), (12_345, 0.25)
    lost = [(step, None if step in (50_001, 50_002) else value) for step, value in points]
    kept = plots.thinned(lost, 1000)
    assert len(kept) <= 2 * 1000 + 3
    assert {points[0], points[-1], (66_666, 9.5), (12_345, 0.25), (50_001, None)} <= set(kept) <= set(lost)
    assert kept == sorted(kept, key=lambda point: point[0])
    assert plots.thinned(points[:2000], 1000) == points[:2000], "few enough for all"
    figure = plots.curve({"": points}, "loss", (1, 100_000))
    assert len(figure) < 250_000
    assert "min and max of every 10 points" in figure


def test_the_data_are_the_points_to_six_digits():
    points = [(3, 2.3456789), (4, 1e-5), (7, None), (20, -40_000.0)]
    (line,) = data(plots.curve({"": points}, "lr", (1, 20)))
    assert line == {"steps": [3, 1, 3, 13], "values": [2.34568, 1e-5, None, -40_000]}


def test_a_line_is_interrupted_where_a_value_is_not_finite():
    values = [1.0, 3.0, math.nan, 2.0, math.inf, 1.0, 2.0]
    entries = [{"step": step, "loss": value} for step, value in enumerate(values, 1)]
    (figure,) = page.curves(entries)
    left, right = plots.LEFT, plots.WIDTH - plots.RIGHT
    top, bottom = plots.TOP, plots.HEIGHT - plots.BOTTOM
    first, alone, last = paths(figure)
    assert first == [(left, bottom), (round(left + (right - left) / 6, 1), top)]
    assert alone == [((left + right) / 2, (top + bottom) / 2)]
    assert last[-1] == (right, (top + bottom) / 2)
    assert data(figure)[0]["values"] == [1, 3, None, 2, None, 1, 2]


def test_curves_share_their_steps_and_what_has_one_value_has_none():
    entries = [
        {"step": 5, "loss": 3.0, "lr": 0.1, "sources": {"a": {"loss": 3.0}, "b": {"loss": None}}},
        {"step": 6, "loss": 2.0, "grad_norm": math.nan, "sources": {"b": {"loss": 4.0}, "a": {"loss": 2.0}}},
        {"step": 9, "eval_loss": 2.5, "eval_sources": {"a": {"loss": 1.0}}},
        {"step": 12, "eval_loss": 2.25, "eval_sources": {"a": {"loss": 0.5}}},
    ]
    figures = page.curves(entries)
    titles = [re.search("<figcaption>(.*?)</figcaption>", figure)[1] for figure in figures]
    assert titles == ["loss", "loss by source", "evaluation loss by source"]
    assert all(">5</text>" in figure and ">step 12</text>" in figure for figure in figures)
    names = [re.findall("</i>(.*?)</span>", figure) for figure in figures]
    assert names == [["training", "evaluation"], ["a", "b"], ["a"]]
    assert data(figures[1])[1] == {"steps": [6], "values": [4]}
