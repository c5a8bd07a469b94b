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
        asked, _ = _asked(info, anatomy) if Role.ATTENTION in info.roles else ("", None)
        return f"asks whether {asked} is a tensor" if asked else ""

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        mask, unread = _asked(anatomy.classes[site.block], anatomy)
        if unread is not None:
            raise Missed(f"isinstance({mask}, torch.Tensor), or another class that names tell", unread)
        return Rewritten(insert_first(block, "forward", f"{mask} = ops.drawn_mask({mask})", self.mark), "drawn")


def _asked(info: ClassInfo, anatomy: Anatomy) -> tuple[str, ast.Call | None]:
    """The parameter that a forward tests for being a tensor, or ""; and the test, if the classes in it are unknown."""
    return _asked_in(info.methods["forward"], info.name, anatomy) if "forward" in info.methods else ("", None)


def _asked_in(
    function: FunctionNode, owner: str, anatomy: Anatomy, around: tuple[FunctionNode, ...] = ()
) -> tuple[str, ast.Call | None]:
    """`_asked` for a function, with the functions and methods of the file that it calls; `around` are its callers."""
    names, local = parameter_names(function), local_names(function)
    for call in calls(function):
        inner, asked, unread = anatomy.called(owner, call), next(iter(call.args), None), None
        if inner is not None and inner not in around:
            name, unread = _asked_in(inner, owner, anatomy, (*around, function))
            asked = arguments(call, parameter_names(inner)).get(name)
        elif (meaning := anatomy.names.resolve(call.func, local)) == "builtins.isinstance":
            kinds = [n for n in ast.walk(call.args[1]) if isinstance(n, ast.Name | ast.Attribute)]
            meant = {anatomy.names.resolve(kind, local) for kind in kinds}
            unread = call if None in meant else None
            asked = asked if meant & {"torch.Tensor", None} else None
        elif meaning != "torch.is_tensor":
            continue
        if isinstance(asked, ast.Name) and asked.id in names:
            return asked.id, unread
    return "", None
