"""Attention that tests whether its mask is a tensor gets a dense mask."""

from __future__ import annotations

import ast

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import ClassInfo, FunctionNode, arguments, calls, parameter_names
from patchgen.anatomy.names import local_names
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
        tested = _tested_mask(info.methods.get("forward"), info.name, anatomy) if Role.ATTENTION in info.roles else ""
        return f"asks whether {tested} is a tensor" if tested else ""

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        info = anatomy.classes[site.block]
        mask = _tested_mask(info.methods["forward"], info.name, anatomy)
        return Rewritten(insert_first(block, "forward", f"{mask} = ops.drawn_mask({mask})", self.mark), "drawn")


def _tested_mask(
    function: FunctionNode | None, owner: str, anatomy: Anatomy, callers: tuple[FunctionNode, ...] = ()
) -> str:
    """The parameter that a function, or one of the file that it calls, tests for being a tensor; "" if there is none."""
    if function is None:
        return ""
    parameters, local = parameter_names(function), local_names(function)
    for call in calls(function):
        callee, tested = anatomy.called(owner, call), next(iter(call.args), None)
        if callee is not None and callee not in callers:
            name = _tested_mask(callee, owner, anatomy, (*callers, function))
            tested = arguments(call, parameter_names(callee)).get(name)
        elif (meaning := anatomy.names.resolve(call.func, local)) == "builtins.isinstance":
            kinds = {anatomy.names.resolve(node, local) for node in ast.walk(call.args[1])}
            tested = tested if "torch.Tensor" in kinds else None
        elif meaning != "torch.is_tensor":
            continue
        if isinstance(tested, ast.Name) and tested.id in parameters:
            return tested.id
    return ""
