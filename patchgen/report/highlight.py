"""Python source as HTML, one string per line, with few CSS classes: a page of 4,000 lines has to open at once."""

from __future__ import annotations

from typing import Protocol

from markupsafe import escape
from pygments.lexers import find_lexer_class_by_name
from pygments.token import Comment, Keyword, Name, Number, Operator, String


class Token(Protocol):
    """The kind of a piece of text, as pygments names it."""

    @property
    def parent(self) -> Token | None: ...
    def __hash__(self) -> int: ...


CSS_CLASSES: dict[Token, str] = {
    Keyword: "k",
    Operator.Word: "k",
    String: "s",
    Comment: "c",
    Number: "m",
    Name.Function: "f",
    Name.Class: "f",
    Name.Decorator: "d",
    Name.Builtin: "b",
}


def highlighted(text: str) -> list[str]:
    """The HTML of each line, as `lines.lines_of` splits them."""
    if not text:
        return []
    lines: list[list[str]] = [[]]
    lexer = find_lexer_class_by_name("python")(stripnl=False, ensurenl=False)
    for token, value in lexer.get_tokens(text.removesuffix("\n")):
        css_class = _css_class(token)
        for number, part in enumerate(value.split("\n")):
            if number:
                lines.append([])
            if part:
                html = str(escape(part))
                lines[-1].append(f'<i class="{css_class}">{html}</i>' if css_class and part.strip() else html)
    return ["".join(parts) for parts in lines]


def struck(line: str) -> str:
    """The HTML of a removed line, struck through except for its indentation; whole if it starts inside a string."""
    code = line.lstrip(" ")
    return f"{line[: len(line) - len(code)]}<s>{code}</s>" if code else line


def _css_class(token: Token | None) -> str:
    while token is not None:
        if token in CSS_CLASSES:
            return CSS_CLASSES[token]
        token = token.parent
    return ""
