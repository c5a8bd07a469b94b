"""A page in a headless Chromium: it opens at once, keys and search work, and it is whole in light, dark and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest

from patchgen.report import model

MODEL = "qwen3_omni_moe"  # over 4,000 lines upstream
SECONDS = 3.0

pytestmark = pytest.mark.skipif(
    chromium.program() is None,
    reason=f"none of {', '.join(chromium.NAMES)} is on this machine (apt-get install chromium)",
)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pages") / f"{MODEL}.html"
    path.write_text(model.page(MODEL), encoding="utf-8")
    return path


@pytest.fixture
def page(browser, file) -> Iterator[chromium.Page]:
    browser.size(1500, 900)
    browser.prefer("light")
    browser.open(file)
    browser.settle()
    browser.ask("localStorage.clear(); delete document.documentElement.dataset.theme")
    yield browser
    assert browser.errors == []


def in_view(page: chromium.Page, selector: str) -> bool:
    box = page.ask(
        f"(() => {{ const box = document.querySelector('{selector}').getBoundingClientRect();"
        "return [box.top, box.bottom, box.height, innerHeight] })()"
    )
    top, bottom, height, seen = box
    return height > 0 and top < seen and bottom > 0


def test_it_opens_in_time(page, file):
    assert file.read_text(encoding="utf-8").count('<div class="r') > 4000
    loads = []
    for _ in range(3):
        page.open(file)
        page.settle()
        loads.append(page.ask("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000)
    assert 0 < min(loads) < SECONDS


def test_most_of_a_long_page_is_not_laid_out_before_it_is_seen(page):
    """`content-visibility` skips it: this is what keeps scrolling smooth, and no clock is needed to see it."""
    sections = "[...document.querySelectorAll('.code > section, .code > .site > section')]"
    seen = "one.firstChild.checkVisibility({contentVisibilityAuto: true})"
    shown = page.ask(f"{sections}.map((one) => {seen})")
    assert 0 < sum(shown) < 0.4 * len(shown)


def test_n_and_p_go_from_site_to_site(page):
    count = page.ask("document.querySelectorAll('[data-site]').length")
    assert count > 20
    for number in (1, 2, 3):
        page.press("n")
        assert page.ask("document.getElementById('where').textContent") == f"{number} / {count}"
        assert in_view(page, ".site.now")
    page.press("p")
    assert page.ask("document.querySelector('.site.now').id") == "s1"
    page.press("p")
    page.press("p")
    assert page.ask("document.getElementById('where').textContent") == f"{count} / {count}"
    assert in_view(page, ".site.now")


def test_a_link_of_the_sidebar_leads_to_its_place(page):
    page.ask(
        "[...document.querySelectorAll('nav a')].find((one) => one.textContent.includes('load_balancing')).click()"
    )
    page.settle()
    assert "load_balancing_loss_func" in page.ask("document.querySelector('.now').dataset.site")
    assert in_view(page, ".now")


def test_slash_searches_all_lines_dropped_ones_too(page):
    page.press("/")
    assert page.ask("document.activeElement.id") == "search"
    page.call("Input.insertText", text="class Qwen3OmniMoeTalkerModel(")
    page.press("Enter")
    assert page.ask("document.getElementById('found').textContent") == "1 / 1"
    assert page.ask("document.querySelector('.r.now').closest('details').open") is True
    assert in_view(page, ".r.now")
    page.press("n")  # a letter of the search, not a key of the page
    assert page.ask("document.getElementById('search').value").endswith("(n")
    page.press("Escape")
    assert page.ask("[document.activeElement.id, document.querySelectorAll('.hit').length]") == ["", 0]


def test_question_mark_shows_the_keys(page):
    page.press("?")
    assert page.ask("document.getElementById('help').open") is True
    page.press("n")
    assert page.ask("document.querySelector('.site.now')") is None
    page.press("Escape")
    assert page.ask("document.getElementById('help').open") is False


def lightness(page: chromium.Page) -> float:
    colour = page.ask("getComputedStyle(document.body).backgroundColor")
    return sum(float(part) for part in colour[4:-1].split(",")) / 3


def test_light_and_dark_follow_the_system_until_one_is_chosen(page):
    assert lightness(page) > 200
    page.prefer("dark")
    assert lightness(page) < 60
    page.press("t")
    assert lightness(page) > 200
    page.prefer("light")
    page.press("t")
    assert lightness(page) < 60


@pytest.mark.parametrize("width", [480, 1100, 1900])
def test_nothing_sticks_out_at_any_width(page, width):
    page.size(width, 900)
    page.settle()
    page.press("n")
    assert page.ask("document.documentElement.scrollWidth") <= width
    assert in_view(page, ".site.now")
