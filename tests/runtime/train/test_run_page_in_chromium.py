"""The page of a run in a headless Chromium: hover, zoom, keys, scale of losses, reload; light, dark, narrow, and 100,000 steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest

from patchgen.runtime.train import page, plots, run_log
from patchgen.runtime.train.recipe import from_dict, to_dict
from patchgen.runtime.train.records import Evaluation, RunStart, StepRecord
from patchgen.runtime.train.sources import SourceFigures

STEPS, LOST = 60, 41
START = RunStart(
    name="mine", directory="runs/mine", steps=STEPS, first_step=0, devices=2, device="cpu", parameters=3_000_000,
    active_parameters=1_000_000, report="Qwen3 <on> ranks",
    recipe=to_dict(from_dict({"model": {"source": "qwen3"}, "data": {}, "train": {"steps": STEPS}})),
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    chromium.program() is None,
    reason=f"none of {', '.join(chromium.NAMES)} is on this machine (apt-get install chromium)",
)


def loss(step: int) -> float:
    """Halved every ten steps, from 16 to 0.25; not finite at one."""
    return math.nan if step == LOST else 16.0 * 0.5 ** (step / 10)


def number(value: float) -> str:
    return f"{value:.6g}"


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """The page of a run with two sources and an evaluation every 20 steps."""
    directory = tmp_path_factory.mktemp("run")
    log = run_log.RunLog(directory)
    log.on_start(START)
    for step in range(1, STEPS + 1):
        sources = {name: SourceFigures(640, 600, loss(step) * factor) for name, factor in (("a", 1.0), ("b <", 0.5))}
        log.on_step(
            StepRecord(
                step=step, loss=loss(step), grad_norm=0.5 + step / 1000, lr=1e-5 * step, tokens=1280, labels=1200,
                seconds=0.5, tokens_per_second_per_device=45_000.0 + step, tflops=0.25, sources=sources,
            )
        )  # fmt: skip
        if step % 20 == 0:
            log.on_evaluation(Evaluation(step=step, loss=loss(step) + 0.125, labels=10, seconds=0.1))
    log.close()
    (directory / page.PAGE).write_text(page.page(START, "running", "", run_log.read(directory)), encoding="utf-8")
    return directory / page.PAGE


@pytest.fixture
def shown(browser, file) -> Iterator[chromium.Page]:
    browser.size(1500, 900)
    browser.prefer("light")
    browser.open(file)
    browser.settle()
    yield browser
    assert browser.errors == []


def place(shown: chromium.Page, step: float, steps: tuple[float, float], height: float = 0.5) -> tuple[float, float]:
    """Where the plot of the losses has this step if its axis has these; `height` from 0, the top."""
    left, top, width = shown.ask(
        "(() => { const box = document.querySelector('.plot svg').getBoundingClientRect();"
        "return [box.left, box.top, box.width] })()"
    )
    inside = width - plots.LEFT - plots.RIGHT
    return left + plots.LEFT + inside * (step - steps[0]) / (steps[1] - steps[0]), top + plots.HEIGHT * height


def labels(shown: chromium.Page) -> dict[str, list[str]]:
    """Title of a figure -> the lines of its label."""
    return shown.ask(
        "Object.fromEntries([...document.querySelectorAll('.curve')].filter((one) => !one.querySelector('.label').hidden)"
        ".map((one) => [one.querySelector('svg').ariaLabel, one.querySelector('.label').innerText.split('\\n')]))"
    )


def axis(shown: chromium.Page) -> str:
    return shown.ask("document.getElementById('steps').textContent")


def test_a_hover_shows_step_and_value_in_all_curves(shown):
    assert labels(shown) == {}
    shown.point(*place(shown, 23.2, (1, STEPS)))
    assert labels(shown) == {
        "loss": ["step 23", f"training {number(loss(23))}", f"evaluation {number(loss(20) + 0.125)} at 20"],
        "loss by source": ["step 23", f"a {number(loss(23))}", f"b < {number(loss(23) / 2)}"],
        "tokens/s per device": ["step 23", "45,023"],
        "gradient norm": ["step 23", "0.523"],
        "learning rate": ["step 23", "2.3e-4"],
    }
    shown.point(*place(shown, LOST, (1, STEPS)))
    assert labels(shown)["loss"][:2] == [f"step {LOST}", "training not finite"]
    shown.point(5, 5)
    assert labels(shown) == {}


def test_a_drag_shows_these_steps_in_all_curves_until_a_double_click(shown):
    assert axis(shown) == f"steps 1 to {STEPS}"
    shown.drag(place(shown, 32.1, (1, STEPS)), place(shown, 11.9, (1, STEPS)))
    assert axis(shown) == f"steps 12 to 32 of {STEPS}"
    drawn = shown.ask(
        "[...document.querySelectorAll('.plot > svg')].map((one) => [...one.children].filter((node) => node.tagName === 'text')"
        ".map((node) => Number(node.textContent)).filter((step) => step >= 12).at(-1))"
    )
    assert len(drawn) == 5 and all(12 < step <= 32 for step in drawn), "the last number on each axis"
    shown.point(*place(shown, 12, (12, 32)))
    assert labels(shown)["loss"][:2] == ["step 12", f"training {number(loss(12))}"]
    shown.point(*place(shown, 32, (12, 32)))
    assert labels(shown)["gradient norm"] == ["step 32", "0.532"]
    shown.double_click(*place(shown, 20, (12, 32)))
    assert axis(shown) == f"steps 1 to {STEPS}"


def test_keys_go_from_step_to_step_and_magnify(shown):
    shown.ask("document.querySelector('.plot svg').focus()")
    for key, step in (("Home", 1), ("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", STEPS)):
        shown.press(key)
        assert labels(shown)["learning rate"][0] == f"step {step}"
    shown.press("+")
    assert axis(shown) == f"steps 31 to {STEPS} of {STEPS}"
    shown.press("Escape")
    assert axis(shown) == f"steps 1 to {STEPS}"


def test_on_a_logarithmic_scale_equal_ratios_are_equal_distances(shown):
    def heights() -> list[float]:
        found = []
        for step in (10, 20, 30):
            shown.point(*place(shown, step, (1, STEPS)))
            found.append(shown.ask("Number(document.querySelector('.plot circle').getAttribute('cy'))"))
        return found

    first, second, third = heights()
    assert second - first == pytest.approx(2 * (third - second))
    shown.ask("document.getElementById('log').click()")
    first, second, third = heights()
    assert second - first == pytest.approx(third - second)


def test_what_is_shown_outlasts_the_reload_of_a_page_whose_run_goes_on(shown, file, tmp_path):
    text = page.page(START, "running", "", run_log.read(file.parent), reload=3600)
    (tmp_path / "running.html").write_text(text, encoding="utf-8")
    shown.open(tmp_path / "running.html", "#scale=log")
    shown.drag(place(shown, 20, (1, STEPS)), place(shown, 30, (1, STEPS)))
    shown.ask("document.getElementById('recipe').open = true")
    shown.ask("window.before = true; lastUse = 0; reload()")  # as if the hand had been away for seconds
    deadline = time.monotonic() + 30
    while shown.ask("window.before ?? document.readyState !== 'complete'"):
        assert time.monotonic() < deadline, "it is not read again"
        time.sleep(0.02)
    assert axis(shown) == f"steps 20 to 30 of {STEPS}"
    assert shown.ask("[document.getElementById('log').checked, document.getElementById('recipe').open]") == [
        True,
        True,
    ]


def test_a_page_of_100000_steps_is_small_and_shows_a_spike(shown, tmp_path):
    entries = [
        {"step": step, "loss": 9.75 if step == 66_667 else 2.0, "tokens": 1, "skipped": False}
        for step in range(1, 100_001)
    ]
    text = page.page(START, "all steps taken", "", entries)
    assert len(text) < 300_000
    (tmp_path / "long.html").write_text(text, encoding="utf-8")
    shown.open(tmp_path / "long.html")
    shown.point(*place(shown, 66_667, (1, 100_000), height=0.1))
    assert labels(shown)["loss"] == ["step 66,667", "9.75"]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1500), ("dark", 420)])
def test_nothing_sticks_out_in_light_or_dark(shown, scheme, width):
    shown.prefer(scheme)
    shown.size(width, 900)
    shown.settle()
    shown.point(*place(shown, 10, (1, STEPS)))
    assert labels(shown)["loss"][0] == "step 10"
    assert shown.ask("document.documentElement.scrollWidth") <= width
    colours = shown.ask(
        "[document.body, document.querySelector('.label')].map((one) => getComputedStyle(one).color)"
        ".concat(getComputedStyle(document.body).backgroundColor)"
    )
    *text, back = [sum(map(float, colour[4:-1].split(","))) / 3 for colour in colours]
    assert all(abs(one - back) > 150 for one in text) and (back > 200) == (scheme == "light")
