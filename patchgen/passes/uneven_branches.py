"""Modules that run only where this rank's tokens ask for them run on all ranks or on none, or are refused on several."""

from __future__ import annotations

import ast

from patchgen.anatomy import Anatomy
from patchgen.anatomy.classes import ClassInfo, FunctionNode, calls, loaded, own_attribute, parameter_names
from patchgen.passes.base import Example, Rewritten, Site, SitePass
from patchgen.rewrite import Editor, insert_first
from patchgen.source import Block


class UnevenBranches(SitePass):
    """A rank whose tokens take the other branch would leave the rest waiting: for its tokens, and for its gradients."""

    name = "uneven_branches"
    purpose = (
        "A module that runs where this rank's tokens ask for it runs where any rank's do, or is refused on several."
    )
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
        Example("""a test of nothing but which tokens there are, which ranks can agree on: no token is left out, or all are
        class ExampleMoeBlock(nn.Module):
            def __init__(self, config):
                super().__init__()
                self.text_moe = ExampleSparseMoe(config)
                self.vision_moe = ExampleSparseMoe(config)

            def forward(self, hidden_states, is_vision=None):
      -         if is_vision is not None and is_vision.any():
      +         # patchgen: uneven_branches
      +         if (is_vision := ops.tokens_of_any_rank(is_vision, hidden_states)) is not None:
                    out = torch.zeros_like(hidden_states)
                    out[is_vision] = self.vision_moe(hidden_states[is_vision])
                    out[~is_vision] = self.text_moe(hidden_states[~is_vision])
                else:
                    out = self.text_moe(hidden_states)
                return out
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        return f"`{ast.unparse(found.test)}` decides what runs" if (found := _branch_of_tokens(info)) else ""

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        info = anatomy.classes[site.block]
        branch = _branch_of_tokens(info)
        assert branch is not None, "`why` found it"
        if name := _agreed_on(info.methods["forward"], branch):
            states = parameter_names(info.methods["forward"])[0]
            editor = Editor(block, self.mark)
            found = next(
                one for one in ast.walk(block.node) if isinstance(one, ast.If) and _same(one.test, branch.test)
            )
            editor.instead(found.test, f"({name} := ops.tokens_of_any_rank({name}, {states})) is not None")
            editor.mark(found)
            return Rewritten(editor.result, "taken where any rank has such tokens")
        code = f"ops.refuse_uneven_ranks({site.block!r}, {ast.unparse(_reads(branch)[0])!r})"
        return Rewritten(insert_first(block, "forward", code, self.mark), "refused on several ranks")


def _branch_of_tokens(info: ClassInfo) -> ast.If | None:
    """The branch by which a class decides from its tokens which of its modules run."""
    forward = info.methods.get("forward")
    for node in ast.walk(forward) if forward is not None else ():
        if isinstance(node, ast.If):
            body, other = (_modules(ast.Module(part, []), info) for part in (node.body, node.orelse))
            if _reads(node) and body ^ other:
                return node
    return None


def _same(one: ast.AST, other: ast.AST) -> bool:
    return ast.dump(one) == ast.dump(other)


def _reads(branch: ast.If) -> list[ast.Call]:
    return [call for call in calls(branch.test) if getattr(call.func, "attr", "") in ("any", "all")]


def _agreed_on(forward: FunctionNode, branch: ast.If) -> str:
    """The parameter that a test asks for nothing but whether any token is in it, and that is read in its branch alone."""
    for name in parameter_names(forward):
        if ast.unparse(branch.test) == f"{name} is not None and {name}.any()":
            inside = sum(loaded(node).count(name) for node in (branch.test, *branch.body))
            return name if inside == loaded(forward).count(name) else ""
    return ""


def _modules(code: ast.AST, info: ClassInfo) -> set[str]:
    """The attributes that `__init__` builds and code calls."""
    return {name for call in calls(code) if (name := own_attribute(call.func)) in info.attributes}
