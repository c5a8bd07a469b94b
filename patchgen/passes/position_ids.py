"""Stacked multimodal position ids `(batch, rows, L)`, of three or four rows, become `(rows, batch, L)`."""

from __future__ import annotations

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import ClassInfo, parameter_names
from patchgen.anatomy.names import uses_name
from patchgen.anatomy.positions import POSITIONS
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import Editor
from patchgen.source import Block

BATCH = "inputs_embeds"
# A separate argument, since the shape is ambiguous: three samples with three rows look the same in both layouts.
STACKED = "stacked_position_ids"


class PositionIds(SitePass):
    """A collator stacks samples along the first dimension; upstream's multimodal models take the batch as the second."""

    name = "position_ids"
    purpose = "Multimodal position ids as a collator stacks them, (batch, 3, L), have a name and become (3, batch, L)."
    expects = "one hit per fusion model that computes multimodal positions"
    EXAMPLES = (
        Example("""before the model would compute them itself
        class ExampleModel(ExamplePreTrainedModel):
            def get_rope_index(self, input_ids):
                return input_ids

            def forward(self, input_ids, pixel_values=None, position_ids=None, **kwargs):
                inputs_embeds = self.embed(input_ids).masked_scatter(self.mask, self.visual(pixel_values))
      +         # patchgen: position_ids
      +         position_ids = ops.mrope_position_ids(position_ids, inputs_embeds, kwargs.pop("stacked_position_ids", None))
                if position_ids is None:
                    position_ids = self.get_rope_index(input_ids)
                return self.language_model(inputs_embeds, position_ids)
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        if Role.FUSION not in info.roles or not anatomy.method(info.name, "get_rope_index"):
            return ""
        takes = POSITIONS in parameter_names(info.methods["forward"])
        return f"fusion model with get_rope_index: {info.roles[Role.FUSION]}" if takes else ""

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        editor = Editor(block, self.mark)
        forward = editor.function("forward")
        anchor = next((i for i, node in enumerate(forward.body) if uses_name(node, POSITIONS)), None)
        if anchor is None or not any(uses_name(node, BATCH) for node in forward.body[:anchor]):
            closest = editor.code(forward.body[-1 if anchor is None else anchor])
            raise Missed(f"a statement that reads {POSITIONS}, below the one that makes {BATCH}", closest)
        if forward.args.kwarg is None:
            raise Missed("a forward that takes keyword arguments", forward.args)
        stacked = f'{forward.args.kwarg.arg}.pop("{STACKED}", None)'
        code = f"{POSITIONS} = ops.mrope_position_ids({POSITIONS}, {BATCH}, {stacked})"
        editor.above(forward.body[anchor], code)
        return Rewritten(editor.result, "(batch, 3, L) becomes (3, batch, L)")
