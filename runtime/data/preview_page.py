"""A preview as one self-contained HTML page."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from patchgen.runtime.data.preview import Preview

HUES = (215, 32, 285, 190, 325, 52, 250, 12)
"""The hues of sources, repeated if there are more; none is near the green of tokens with a loss."""


def as_page(preview: Preview, *, title: str) -> str:
    """The page, with the browser's light or dark theme."""
    environment = Environment(
        loader=PackageLoader("patchgen", "templates"), undefined=StrictUndefined, autoescape=True, trim_blocks=True
    )
    environment.filters["line_ends"] = _line_ends
    hues = {name: HUES[number % len(HUES)] for number, name in enumerate(preview.sources)}
    most = max((count for _, _, count in preview.histogram), default=1)
    return environment.get_template("data_page.jinja").render(title=title, preview=preview, hues=hues, most=most)


def _line_ends(text: str) -> Markup:
    """A text with visible line ends."""
    return escape(text).replace("\n", Markup('<span class="end">⏎</span>\n'))
