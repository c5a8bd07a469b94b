"""Runs the examples of a project's passes for `check`, as the package's tests run those of its passes."""

from __future__ import annotations

from patchgen import source
from patchgen.anatomy import study
from patchgen.commands.console import console, print_diff, text_diff
from patchgen.errors import PatchgenError
from patchgen.passes import PASSES, all_passes
from patchgen.passes.base import Example, Pass
from patchgen.upstream import Upstream


def report_broken() -> bool:
    """Prints each example that its pass does not reproduce or changes when it is run twice; whether there are any."""
    examples = [
        (pass_class, example)
        for pass_class in all_passes()
        if pass_class not in PASSES
        for example in pass_class.EXAMPLES
    ]
    found = False
    for pass_class, example in examples:
        if difference := _difference(pass_class, example):
            found = True
            console.print(
                f"[red]fails[/] {pass_class.name}: its example '{example.title}' does not hold", soft_wrap=True
            )
            print_diff(difference.splitlines()[2:])
    return found


def _difference(pass_class: type[Pass], example: Example) -> str:
    """The diff of the result from what the example shows, or of a second run from the first, or the error; else empty."""
    try:
        first = _outcome(pass_class, example.before)
        if not example.shows(first):
            return text_diff(first, example.after)
        again = _outcome(pass_class, first)
    except PatchgenError as error:
        return f"\n\n{error}"
    return "" if again == first else text_diff(again, first)


def _outcome(pass_class: type[Pass], text: str) -> str:
    path = "transformers/models/example/modeling_example.py"
    module = path.removesuffix(".py").replace("/", ".")
    origin = Upstream(model="example", text=text, origin="an example", version=None, module=module, path=path)
    parsed = source.parse(text, path)
    return pass_class().apply(parsed, study(parsed, origin)).module.text
