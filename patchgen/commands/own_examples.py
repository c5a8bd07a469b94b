"""Whether the passes of a project do what their examples say: `check` asks, as the package's own tests do of its passes."""

from __future__ import annotations

from patchgen import emit, source
from patchgen.anatomy import study
from patchgen.commands.console import console, print_diff
from patchgen.errors import PatchgenError
from patchgen.passes import PASSES, all_passes
from patchgen.passes.base import Example, Pass
from patchgen.upstream import Upstream


def broken() -> bool:
    """Whether an example is not what its pass makes of it, or a pass changes its own outcome; prints the difference."""
    found = [
        (kind, example, wrong)
        for kind in all_passes()
        if kind not in PASSES
        for example in kind.EXAMPLES
        if (wrong := _difference(kind, example))
    ]
    for kind, example, wrong in found:
        console.print(f"[red]fails[/] {kind.name}: the example '{example.title}' is not what it does", soft_wrap=True)
        print_diff(wrong.splitlines()[2:])
    return bool(found)


def _difference(kind: type[Pass], example: Example) -> str:
    """What the pass makes of the example, against what it should, or against what it makes of that again."""
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
