"""Attention that tests whether its mask is a tensor gets a dense mask."""

from __future__ import annotations

import ast

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import ClassInfo, FunctionNode, arguments, calls, parameter_names
from patchgen.anatomy.names import local_names
from patchgen.errors import Missed
from patchgen.passes.base import Example, Rewritten, Site, SitePass
from patchgen.rewrite import insert_first
from patchgen.source import Block


class DrawnMasks(SitePass):
    """Attention with extra keys appends their mask only to a tensor; with one of the runtime's mask structures these keys
    would stay unmasked. So the structure is converted to a dense mask."""

    name = "drawn_masks"
    purpose = "Attention that asks whether its mask is a tensor gets it drawn."
    expects = "any number of hits: one per attention that asks"
    EXAMPLES = (
        Example("""compressed keys beside those of the tokens
        class ExampleAttention(nn.Module):
            def forward(self, query, key, bias, attention_mask):
      +         # patchgen: drawn_masks
      +         attention_mask = ops.drawn_mask(attention_mask)
                attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
                if isinstance(attention_mask, torch.Tensor):
                    attention_mask = torch.cat([attention_mask, bias], dim=-1)
                return attend(self, query, key, key, attention_mask)[0]
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        tested, _ = _tested_mask(info, anatomy) if Role.ATTENTION in info.roles else ("", None)
        return f"asks whether {tested} is a tensor" if tested else ""

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        mask, unresolved_test = _tested_mask(anatomy.classes[site.block], anatomy)
        if unresolved_test is not None:
            raise Missed(f"isinstance({mask}, torch.Tensor), or a class whose name can be resolved", unresolved_test)
        return Rewritten(insert_first(block, "forward", f"{mask} = ops.drawn_mask({mask})", self.mark), "drawn")


def _tested_mask(info: ClassInfo, anatomy: Anatomy) -> tuple[str, ast.Call | None]:
    """The parameter that a forward tests for being a tensor, or ""; and the test, if a class in it cannot be resolved."""
    return _tested_mask_in(info.methods["forward"], info.name, anatomy) if "forward" in info.methods else ("", None)


def _tested_mask_in(
    function: FunctionNode, owner: str, anatomy: Anatomy, callers: tuple[FunctionNode, ...] = ()
) -> tuple[str, ast.Call | None]:
    """`_tested_mask` for a function, with the functions and methods of the file that it calls."""
    parameters, local = parameter_names(function), local_names(function)
    for call in calls(function):
        callee, tested, unresolved_test = anatomy.called(owner, call), next(iter(call.args), None), None
        if callee is not None and callee not in callers:
            name, unresolved_test = _tested_mask_in(callee, owner, anatomy, (*callers, function))
            tested = arguments(call, parameter_names(callee)).get(name)
        elif (meaning := anatomy.names.resolve(call.func, local)) == "builtins.isinstance":
            class_nodes = [n for n in ast.walk(call.args[1]) if isinstance(n, ast.Name | ast.Attribute)]
            class_names = {anatomy.names.resolve(node, local) for node in class_nodes}
            unresolved_test = call if None in class_names else None
            tested = tested if class_names & {"torch.Tensor", None} else None
        elif meaning != "torch.is_tensor":
            continue
        if isinstance(tested, ast.Name) and tested.id in parameters:
            return tested.id, unresolved_test
    return "", None
