"""Deepstack features (of earlier tower layers, added in the language model) are reduced to those of this rank's tokens."""

from __future__ import annotations

import ast

from patchgen.anatomy import Anatomy, ClassInfo, Role
from patchgen.anatomy.classes import calls, is_compound
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import Editor
from patchgen.source import Block

FEATURES = "deepstack_features"


class DeepstackSP(SitePass):
    """All levels use the placeholder mask by which the features are scattered into the embeddings."""

    name = "deepstack_sp"
    purpose = "Each level of deepstack features keeps the rows of this rank's tokens."
    expects = "one hit per fusion model that reads deepstack features"
    EXAMPLES = (
        Example("""below the scatter of the same image's features
        class ExampleModel(PreTrainedModel):
            def forward(self, input_ids, pixel_values, inputs_embeds):
                levels = None
                if pixel_values is not None:
                    image = self.get_image_features(pixel_values)
                    levels = image.deepstack_features
                    mask = self.get_placeholder_mask(input_ids)
                    inputs_embeds = inputs_embeds.masked_scatter(mask, image.pooler_output)
      +             # patchgen: deepstack_sp
      +             levels = ops.local_levels(levels, mask)
                return self.language_model(inputs_embeds=inputs_embeds, levels=levels)
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        nodes = ast.walk(info.methods["forward"]) if Role.FUSION in info.roles else ()
        reads = any(isinstance(node, ast.Assign) and getattr(node.value, "attr", "") == FEATURES for node in nodes)
        return f"fusion model that reads .{FEATURES}" if reads else ""

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        editor = Editor(block, self.mark)
        reads = [node for node in ast.walk(block.node) if isinstance(node, ast.Assign) and _name_of_levels(node)]
        reduced: dict[ast.stmt, list[str]] = {}  # statement that scatters features -> what to insert below it
        for read in reads:
            siblings = editor.siblings(read)
            below = (s for s in siblings[siblings.index(read) :] if not is_compound(s))
            scatter = next(((s, call) for s in below for call in calls(s) if _is_scatter(call)), None)
            if scatter is not None:
                name, mask = _name_of_levels(read), editor.code(scatter[1].args[0])
                reduced.setdefault(scatter[0], []).append(f"{name} = ops.local_levels({name}, {mask})")
        if sum(map(len, reduced.values())) != len(reads) or not reads:
            expected = f"`name = ....{FEATURES}` in the block that scatters the features of the same mask"
            raise Missed(expected, editor.code(reads[0]) if reads else "")
        for statement, lines in reduced.items():
            editor.below(statement, "\n".join(lines))
        return Rewritten(editor.result, f"{len(reads)} kinds of features")


def _name_of_levels(node: ast.AST) -> str | None:
    """The name in a statement `name = <features>.deepstack_features`; None for another."""
    match node:
        case ast.Assign([ast.Name(name)], ast.Attribute(attr=attribute)) if attribute == FEATURES:
            return name
        case _:
            return None


def _is_scatter(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "masked_scatter"
