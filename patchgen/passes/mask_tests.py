"""Attention that asks whether its mask is a tensor takes the runtime's masks for one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import libcst as cst
import libcst.matchers as m

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import ClassInfo, calls, parameter_names
from patchgen.passes.base import Example, Rewritten, Site, SitePass
from patchgen.rewrite import edit_body, marked, replace
from patchgen.source import Block


class MaskTests(SitePass):
    """Where upstream lays keys beside a mask, a mask that it did not know would leave them unmasked."""

    name = "mask_tests"
    purpose = "Attention that asks whether its mask is a tensor takes the runtime's masks for one."
    expects = "any number of hits: one per attention that asks"
    EXAMPLES = (
        Example("""compressed keys beside those of the tokens
        import torch
        from torch import nn
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


        class ExampleAttention(nn.Module):
            def forward(self, query, key, bias, attention_mask):
                attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
      -         if isinstance(attention_mask, torch.Tensor):
      +         # patchgen: mask_tests
      +         if ops.is_mask(attention_mask):
                    attention_mask = torch.cat([attention_mask, bias], dim=-1)
                return attend(self, query, key, key, attention_mask)[0]
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        asked = next(_tests(info, anatomy), None) if Role.ATTENTION in info.roles else None
        return f"`{ast.unparse(asked)}`" if asked else ""
