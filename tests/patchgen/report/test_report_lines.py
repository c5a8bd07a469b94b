"""Which line came from where: held to the marks that passes leave, and to the two files."""

from __future__ import annotations

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchgen import pipeline, upstream
from patchgen.report import lines
from patchgen.report.highlight import highlighted
from patchgen.report.sections import PLUMBING, side_by_side, symbols
from patchgen.report.upgrade import align

TEXT = st.lists(st.sampled_from("abcd"), max_size=12)


@pytest.fixture(scope="module", params=["qwen3_moe", "gemma3"])
def generated(request):
    return pipeline.generate(upstream.load(request.param))


def test_every_line_of_both_files_is_in_one_row_in_order(generated):
    rows = lines.trace(generated)
    left, right = lines.lines_of(generated.upstream.text), lines.lines_of(generated.text)
    assert [row.left for row in rows if row.left] == list(range(1, len(left) + 1))
    assert [row.right for row in rows if row.right] == list(range(1, len(right) + 1))
    both = [row for row in rows if row.left and row.right]
    assert len(both) > 0.6 * len(right) and all(left[r.left - 1] == right[r.right - 1] and not r.by for r in both)
    assert all(row.by for row in rows if not (row.left and row.right))


def test_a_line_that_a_pass_marked_is_that_pass_s(generated):
    right = lines.lines_of(generated.text)
    by = {row.right: row.by for row in lines.trace(generated) if row.right}
    marked = {i: found[1] for i, line in enumerate(right, 1) if (found := re.search(r"^\s*# patchgen: (\w+)", line))}
    assert len(marked) > 5
    assert {i: by[i] for i in marked} == marked


def test_what_was_dropped_is_dropped_by_prune(generated):
    removed = [row for row in lines.trace(generated) if row.left and not row.right]
    names = {name: (start, end) for start, end, name in symbols(generated.upstream.text)}
    for hit in next(step for step in generated.steps if step.name == "prune").outcome.hits:
        start, end = names[hit.site]
        assert {row.by for row in removed if start <= row.left <= end} == {"prune"}


def test_each_hit_of_a_pass_that_rewrites_has_a_place(generated):
    hues = {step.name: 1 for step in generated.steps}
    code = side_by_side(lines.trace(generated), generated.upstream.text, generated.text, hues)
    seen = {name for site in code.sites for name in site.passes}
    hit = {step.name for step in generated.steps if step.outcome.hits and step.changed_lines}
    assert seen == hit - {*PLUMBING}
    assert [f'id="{site.key}"' in code.html for site in code.sites] == [True] * len(code.sites)


def test_highlighting_keeps_each_line_as_it_was(generated):
    found = highlighted(generated.text)
    assert [html.unescape(re.sub(r"</?i[^>]*>", "", line)) for line in found] == lines.lines_of(generated.text)


@pytest.mark.parametrize(
    "text", ["", "\n", "a\n\n", 'x = """\n</pre><script>\n"""\n', "a = 1  # \x0c & <b>\n", "\tif\n"]
)
def test_highlighting_of_odd_text(text):
    found = highlighted(text)
    assert [html.unescape(re.sub(r"</?i[^>]*>", "", line)) for line in found] == lines.lines_of(text)
    assert not any(tag in line for line in found for tag in ("<script", "</pre", "<b>"))


@given(TEXT, TEXT)
def test_diff_blocks_cover_both_texts_and_equal_ones_are_equal(before, after):
    found = lines.diff_blocks(before, after)
    assert [line for _, left, _ in found for line in before[left]] == before
    assert [line for _, _, right in found for line in after[right]] == after
    assert all(before[left] == after[right] for kind, left, right in found if kind == "equal")


@given(TEXT, TEXT, TEXT)
def test_three_texts_are_aligned_whole_and_in_order(old, new, then):
    rows = align(old, new, then)
    for column, text in enumerate((old, new, then)):
        assert [row[column] for row in rows if row[column] is not None] == list(range(len(text)))
    if old == new == then:
        assert rows == [(i, i, i) for i in range(len(old))]
