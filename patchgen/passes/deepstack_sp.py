"""Features of earlier tower layers, added in the language model, are those of this rank's tokens."""

from __future__ import annotations

import ast

import libcst as cst
import libcst.matchers as m

from patchgen.anatomy import Anatomy, ClassInfo, Role
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import code_of, replace, statements
from patchgen.source import Block

FEATURES = "deepstack_features"
_SCATTER = m.Call(func=m.Attribute(attr=m.Name("masked_scatter")))


class DeepstackSP(SitePass):
    """All levels use the mask of the embeddings, so the placeholders are counted once."""

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
        served: list[str] = []
        edited = replace(block, m.IndentedBlock(), lambda body: self._with_own_levels(body, served))
        reads = list(m.findall(block.cst, _READ))
        if len(served) != len(reads) or not reads:
            raise Missed(
                f"`name = ....{FEATURES}` in the block that scatters the features of the same mask",
                code_of(reads[0]) if reads else "",
            )
        return Rewritten(edited, f"{len(served)} kinds of features")

    def _with_own_levels(self, block: cst.IndentedBlock, served: list[str]) -> cst.IndentedBlock:
        names: list[str] = []
        body: list[cst.BaseStatement] = []
        for statement in block.body:
            body.append(statement)
            if m.matches(statement, _READ):
                names.append(statement.body[0].targets[0].target.value)
            scatters = m.findall(statement, _SCATTER) if isinstance(statement, cst.SimpleStatementLine) else []
            if scatters and names:
                mask = code_of(scatters[0].args[0].value)
                for name in names:
                    body += statements(f"{name} = ops.local_levels({name}, {mask})", depth=3, comment=self.mark)
                served += names
                names = []
        return block.with_changes(body=body)


_READ = m.SimpleStatementLine(
    body=[m.Assign(targets=[m.AssignTarget(target=m.Name())], value=m.Attribute(attr=m.Name(FEATURES)))]
)
