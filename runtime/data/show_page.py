"""What is learned, as one HTML page that needs nothing but itself."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from patchgen.runtime.data.shown import Shown

HUES = (215, 32, 285, 190, 325, 52, 250, 12)
"""Of sources, which then begin again; none near the green of what is learned."""


def as_page(shown: Shown, *, title: str) -> str:
    """The page, light or dark as the browser asks."""
    environment = Environment(
        loader=PackageLoader("patchgen", "templates"), undefined=StrictUndefined, autoescape=True, trim_blocks=True
    )
    environment.filters["line_ends"] = _line_ends
    hues = {name: HUES[number % len(HUES)] for number, name in enumerate(shown.sources)}
    most = max((count for _, _, count in shown.histogram), default=1)
    return environment.get_template("data_page.jinja").render(title=title, shown=shown, hues=hues, most=most)


def _line_ends(text: str) -> Markup:
    """A text with its ends of lines to be seen."""
    return escape(text).replace("\n", Markup('<span class="end">⏎</span>\n'))
