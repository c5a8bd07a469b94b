"""Attention that asks whether its mask is a tensor gets it drawn."""

from __future__ import annotations

import ast

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import ClassInfo, calls, parameter_names
from patchgen.passes.base import Example, Rewritten, Site, SitePass
from patchgen.rewrite import insert_first
from patchgen.source import Block


class DrawnMasks(SitePass):
    """What it lays beside a tensor (keys of its own with their mask) it would leave out beside the runtime's structures."""

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
        asked = _asked(info, anatomy) if Role.ATTENTION in info.roles else ""
        return f"asks whether {asked} is a tensor" if asked else ""

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        mask = _asked(anatomy.classes[site.block], anatomy)
        return Rewritten(insert_first(block, "forward", f"{mask} = ops.drawn_mask({mask})", self.mark), "drawn")


def _asked(info: ClassInfo, anatomy: Anatomy) -> str:
    """The parameter of a forward of which it asks whether it is a tensor; empty if there is none."""
    forward = info.methods.get("forward", ast.Module([], []))
    for call in calls(forward):
        match call:
            case ast.Call(asking, [ast.Name(name), kind]) if name in parameter_names(forward):
                meant = [anatomy.names.resolve(node) for node in (asking, kind)]
                if meant == ["builtins.isinstance", "torch.Tensor"]:
                    return name
    return ""
