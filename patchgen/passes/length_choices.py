"""Code that chooses by the length of the sequence refuses slices of one."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.anatomy import Anatomy
from patchgen.anatomy.classes import FunctionNode, walk
from patchgen.anatomy.length_choices import ChosenByLength
from patchgen.anatomy.sequence_operations import functions_below, language_model_classes, sequence_operations
from patchgen.anatomy.training_path import reachable_functions
from patchgen.passes.base import Example, Rewritten, Site, SitePass
from patchgen.rewrite import Editor
from patchgen.source import Block, Module


class LengthChoices(SitePass):
    """A slice is shorter than its sequence, so it would choose otherwise; rows compared at start-up are too short to show it."""

    name = "length_choices"
    purpose = "What the language model chooses by the length of a sequence is refused on a slice of one."
    expects = "any number of hits: one per function that tests or bounds a size, or reads the largest position"
    EXAMPLES = (
        Example("""full attention for short rows
        class ExampleAttention(nn.Module):
            def forward(self, hidden_states):
      +         # patchgen: length_choices
      +         ops.refuse_length_choice("ExampleAttention", "hidden_states.shape[1] > self.window")
                if hidden_states.shape[1] > self.window:
                    hidden_states = self.local(hidden_states)
                return self.out(hidden_states)
        """),
    )

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        language = language_model_classes(anatomy)
        code = [anatomy.classes[name].node for name in sorted(language)]
        # `ops` run the operations of `sequence_operations` on the whole sequence.
        below = functions_below(anatomy, *code, without=sequence_operations(anatomy))
        found: list[Site] = []
        for where, function, excuse in reachable_functions(module):
            owner = where.rpartition(".")[0]
            if excuse or not (owner in language if owner else where in below):
                continue
            if choice := next(ChosenByLength(anatomy, function).found, None):
                found.append(Site(where, owner or where, function.lineno, f"`{ast.unparse(choice)}`"))
        return found

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        editor = Editor(block, self.mark)
        function = editor.function(site.name.rpartition(".")[2])
        places: dict[ast.stmt, ast.expr] = {}
        for choice in ChosenByLength(anatomy, function).found:
            places.setdefault(_line_of_its_own(function, editor.statement_of(choice)), choice)
        for statement, choice in places.items():
            editor.above(statement, f"ops.refuse_length_choice({site.block!r}, {ast.unparse(choice)!r})")
        return Rewritten(editor.result, "refuses slices: chooses by the length of the sequence")


def _line_of_its_own(function: FunctionNode, statement: ast.stmt) -> ast.stmt:
    """The `if` of which a statement is an `elif`; any other statement itself."""
    for outer in walk(function):
        if isinstance(outer, ast.If) and outer.orelse == [statement] and outer.col_offset == statement.col_offset:
            return _line_of_its_own(function, outer)
    return statement
