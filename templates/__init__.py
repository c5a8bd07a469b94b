"""Jinja2 templates: the header of generated files, the draft of a model config, the head of a diff."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path

import jinja2


@functools.cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=lambda name: (
            name is not None and name.startswith("report_")
        ),  # pages; the others are code and Markdown
    )


def render(template: str, **values: object) -> str:
    """A template of this folder, rendered; a value that it needs and does not get is an error."""
    return _environment().get_template(template).render(**values)


def table(name: str) -> dict[str, str]:
    """A table of this folder, name -> text."""
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
