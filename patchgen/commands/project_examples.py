"""Runs the examples of a project's passes for `check`, as the package's tests run those of its passes."""

from __future__ import annotations

from patchgen import emit, source
from patchgen.anatomy import study
from patchgen.commands.console import console, print_diff
from patchgen.errors import PatchgenError
from patchgen.passes import PASSES, all_passes
from patchgen.passes.base import Example, Pass
from patchgen.upstream import Upstream


def report_broken() -> bool:
    """Prints each example that its pass does not reproduce or changes when it is run twice; whether there are any."""
    examples = [(kind, example) for kind in all_passes() if kind not in PASSES for example in kind.EXAMPLES]
    found = False
    for kind, example in examples:
        if difference := _difference(kind, example):
            found = True
            console.print(
                f"[red]fails[/] {kind.name}: the result of its example '{example.title}' differs", soft_wrap=True
            )
            print_diff(difference.splitlines()[2:])
    return found


def _difference(kind: type[Pass], example: Example) -> str:
    """The diff between the result and the example's, or between one run and two, or the refusal; empty if there is none."""
    try:
        first = _outcome(kind, example.before)
        if not example.shows(first):
            return emit.text_diff(first, example.after)
        again = _outcome(kind, first)
    except PatchgenError as error:
        return f"\n\n{error}"
    return "" if again == first else emit.text_diff(again, first)


def _outcome(kind: type[Pass], text: str) -> str:
    path = "transformers/models/example/modeling_example.py"
    module = path.removesuffix(".py").replace("/", ".")
    origin = Upstream(model="example", text=text, origin="an example", version=None, module=module, path=path)
    parsed = source.parse(text, path)
    return kind().apply(parsed, study(parsed, origin)).module.text
