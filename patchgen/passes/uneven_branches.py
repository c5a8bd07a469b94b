"""Modules that run only where this rank's tokens ask for them are refused on several ranks."""

from __future__ import annotations

import ast

from patchgen.anatomy import Anatomy
from patchgen.anatomy.classes import ClassInfo, calls, own_attribute
from patchgen.passes.base import Example, Rewritten, Site, SitePass
from patchgen.rewrite import insert_first
from patchgen.source import Block


class UnevenBranches(SitePass):
    """A rank whose tokens take the other branch would leave the rest waiting: for its tokens, and for its gradients."""

    name = "uneven_branches"
    purpose = "A module that runs only where this rank's tokens ask for it is refused on several ranks."
    expects = "any number of hits: one per class with such a branch"
    EXAMPLES = (
        Example("""experts of one modality
        class ExampleMoeBlock(nn.Module):
            def __init__(self, config):
                self.text_moe = ExampleSparseMoe(config)
                self.vision_moe = ExampleSparseMoe(config)

            def forward(self, hidden_states, is_vision):
      +         # patchgen: uneven_branches
      +         ops.refuse_uneven_ranks("ExampleMoeBlock", "is_vision.any()")
                if is_vision.any():
                    hidden_states[is_vision] = self.vision_moe(hidden_states[is_vision])
                return self.text_moe(hidden_states)
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        return f"`{found}` decides what runs" if (found := _test_of_tokens(info)) else ""

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        test = _test_of_tokens(anatomy.classes[site.block])
        code = f"ops.refuse_uneven_ranks({site.block!r}, {test!r})"
        return Rewritten(insert_first(block, "forward", code, self.mark), "refused on several ranks")


def _test_of_tokens(info: ClassInfo) -> str:
    """What a class reads of its tokens to decide which of its modules run, as source; empty if there is no such branch."""
    forward = info.methods.get("forward")
    for node in ast.walk(forward) if forward is not None else ():
        if isinstance(node, ast.If):
            read = [call for call in calls(node.test) if getattr(call.func, "attr", "") in ("any", "all")]
            body, other = (_modules(ast.Module(part, []), info) for part in (node.body, node.orelse))
            if read and body ^ other:
                return ast.unparse(read[0])
    return ""


def _modules(code: ast.AST, info: ClassInfo) -> set[str]:
    """The attributes that `__init__` builds and code calls."""
    return {name for call in calls(code) if (name := own_attribute(call.func)) in info.attributes}
