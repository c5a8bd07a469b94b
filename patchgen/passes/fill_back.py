"""Modality features land on their placeholder tokens although each rank holds a slice of the tokens."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Mapping

import libcst as cst
import libcst.matchers as m

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import ClassInfo, FunctionNode, base_name, calls, dotted
from patchgen.anatomy.names import local_names
from patchgen.anatomy.roles import own_methods
from patchgen.anatomy.towers import towers_held_whole
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import MarkStatements, code_of, insert_first, marked, statements, transform
from patchgen.source import Block

OWN = "ops.local_features"
COUNTED = re.compile(r"\.numel\(\)|\bn(um)?_\w*(tokens|features|placeholders)\b|features\.(shape|size)\b")
POSITIONS = "position_ids"
SCATTER = ".masked_scatter"
MASKS = "transformers.masking_utils."


class FillBack(SitePass):
    """The features of a tower are the same on every rank; each takes those of its own tokens, and no rank exchanges
    embeddings. Upstream's scatter below is then right on the slice, in training and in evaluation."""

    name = "fill_back"
    purpose = "Features are scattered into the embeddings of this rank's tokens."
    expects = "one hit per fusion model"
    role = Role.FUSION
    EXAMPLES = (
        Example("""features of a tower that is computed whole
        class ExampleModel(PreTrainedModel):
            def __init__(self, config):
                super().__init__(config)
                self.vision_tower = AutoModel.from_config(config.vision_config)
      +         # patchgen: fill_back
      +         ops.mark_replicated(self.vision_tower)
                self.language_model = AutoModel.from_config(config.text_config)

            def get_placeholder_mask(self, input_ids, inputs_embeds, image_features):
                mask = (input_ids == self.config.image_token_id).unsqueeze(-1)
      -         torch_compilable_check(mask.sum() == image_features.shape[0], 'no match')
      +         # patchgen: fill_back
      +         torch_compilable_check(ops.is_sliced() or mask.sum() == image_features.shape[0], 'no match')
                return mask

            def forward(self, input_ids, pixel_values, inputs_embeds):
                image_features = self.vision_tower(pixel_values).pooler_output
                mask = self.get_placeholder_mask(input_ids, inputs_embeds, image_features)
      -         inputs_embeds = inputs_embeds.masked_scatter(mask, image_features)
      +         # patchgen: fill_back
      +         inputs_embeds = inputs_embeds.masked_scatter(mask, ops.local_features(image_features, mask))
                return self.language_model(inputs_embeds=inputs_embeds)
        """),
    )

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        info = anatomy.classes[site.block]
        language = language_parts(anatomy, info)
        whole = towers_held_whole(anatomy, info, language)
        rewriter = _FillBack(whole, _embeddings(anatomy, info, language), self.mark)
        edited = transform(block, rewriter)
        if rewriter.odd or not language:
            what = f"`{rewriter.odd[0]}`" if rewriter.odd else "a language model that takes no inputs_embeds"
            code = 'ops.require_whole_sequence("the inputs of this model")'
            return Rewritten(insert_first(block, "forward", code, self.mark), f"refuses slices: {what}")
        if not rewriter.scattered:
            raise Missed("`embeddings.masked_scatter(mask, features)`", ast.unparse(info.methods["forward"])[-400:])
        held = f"; whole on every rank: {', '.join(whole)}" if whole else ""
        return Rewritten(edited, f"{len(rewriter.scattered)} kinds of features{held}")


def language_parts(anatomy: Anatomy, info: ClassInfo) -> set[str]:
    """The attributes of a fusion model that run on the embeddings: what is called with them, and a decoder's layers."""
    forward = info.methods["forward"]
    called = {
        dotted(call.func).removeprefix("self.").partition(".")[0]
        for call in calls(forward)
        if dotted(call.func).startswith("self.") and any(keyword.arg == "inputs_embeds" for keyword in call.keywords)
    }
    built = {build.attribute for build in (*anatomy.builds(info.name), *anatomy.auto_builds(info.name))}
    if Role.DECODER in info.roles:
        loops = [node.iter for node in ast.walk(forward) if isinstance(node, ast.For)]
        called |= {node.attr for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Attribute)}
    return called & (built | set(info.attributes))


def _embeddings(anatomy: Anatomy, info: ClassInfo, language: set[str]) -> dict[str, set[str]]:
    """The names of the token embeddings in a forward, and in the methods from which it takes them."""
    forward = info.methods["forward"]
    names = embedding_names(anatomy, forward, language)
    made = [
        node.value for node in ast.walk(forward) if isinstance(node, ast.Assign) and dotted(node.targets[0]) in names
    ]
    methods = {name: own for name, own in own_methods(info, forward).items() if f"self.{name}" in map(_called, made)}
    returned = {name: [n.value for n in ast.walk(own) if isinstance(n, ast.Return)] for name, own in methods.items()}
    inside = {name: _scattered(own, set(map(base_name, returned[name]))) for name, own in methods.items()}
    return {"forward": names, **inside}


def _called(value: ast.expr) -> str:
    return dotted(value.func) if isinstance(value, ast.Call) else ""


def embedding_names(anatomy: Anatomy, forward: FunctionNode, language: set[str]) -> set[str]:
    """The names that a forward hands to its language model, or to the functions that make its mask, as `inputs_embeds`, by
    keyword or in a dict, and those that hold them too."""
    nodes, local = list(ast.walk(forward)), local_names(forward)
    takers = {f"self.{name}" for name in language}
    handed = [
        keyword
        for call in calls(forward)
        if any(f"{dotted(call.func)}.".startswith(f"{taker}.") for taker in takers)
        or (anatomy.names.resolve(call.func, local) or "").startswith(MASKS)
        for keyword in call.keywords
    ]
    named = [(keyword.arg, keyword.value) for keyword in handed]
    for node in nodes:
        if isinstance(node, ast.Dict):
            named += [(getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True)]
    names = {base_name(value) for name, value in named if name == "inputs_embeds"} & (local - {"self"})
    names = _scattered(forward, names)
    copies = [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Name) and n.value.id in names]
    return (names | {dotted(target) for node in copies for target in node.targets}) - {""}


def _scattered(method: FunctionNode, names: set[str]) -> set[str]:
    """Names of embeddings, and of those that features are scattered into: `filled = rows.masked_scatter(...)`."""
    for node in reversed(list(ast.walk(method))):
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) in names and dotted(node.value).endswith(SCATTER):
            names.add(base_name(node.value))
    return names - {"", "self"}


class _FillBack(MarkStatements):
    """Edits a fusion model: the sources of its scatters, its counts of placeholders, and the towers it builds."""

    def __init__(self, whole: Container[str], embeddings: Mapping[str, set[str]], mark: str) -> None:
        super().__init__(mark)
        self._whole, self._embeddings = whole, embeddings
        self._function: list[str] = []
        self.scattered: list[str] = []
        self.odd: list[str] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._function.append(node.name.value)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        self._function.pop()
        return updated_node

    def _counts(self, test: str) -> bool:
        """Whether a check is of placeholders against features; transformers' own method makes no others."""
        return self._function[-1:] == ["get_placeholder_mask"] or bool(COUNTED.search(test))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        name = original_node.func
        if m.matches(name, m.Attribute(attr=m.Name("masked_scatter"))) and self._function[-1] in self._embeddings:
            return self._own(original_node, updated_node)
        if m.matches(name, m.Name("torch_compilable_check")) and self._counts(code_of(original_node.args[0])):
            self.changed = True
            condition = updated_node.args[0]
            wanted = cst.BooleanOperation(cst.parse_expression("ops.is_sliced()"), cst.Or(), condition.value)
            return updated_node.with_changes(args=[condition.with_changes(value=wanted), *updated_node.args[1:]])
        return updated_node

    def _own(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        receiver = ast.parse(code_of(original.func.value), mode="eval").body
        if len(original.args) != 2 or base_name(receiver) not in self._embeddings[self._function[-1]]:
            self.odd.append(code_of(original))
            return updated
        mask, features = (argument.value for argument in updated.args)
        self.changed = True
        self.scattered.append(code_of(features))
        owned = cst.Call(func=cst.parse_expression(OWN), args=[cst.Arg(features), cst.Arg(mask)])
        return updated.with_changes(args=[updated.args[0], updated.args[1].with_changes(value=owned)])

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If:
        """Counts that raise, and positions that upstream computes from the whole sequence."""
        test = code_of(original_node.test)
        if m.findall(original_node.body, m.Raise()) and self._counts(test):
            old = code_of(updated_node.test)
            wanted = f"not ops.is_sliced() and {old if updated_node.test.lpar else f'({old})'}"
            return marked(updated_node.with_changes(test=cst.parse_expression(wanted)), self.mark)
        if self._function[-1:] == ["forward"] and test == f"{POSITIONS} is None":
            guard = statements(f'ops.require_whole_sequence("{POSITIONS}")', depth=3, comment=self.mark)
            body = updated_node.body.with_changes(body=[*guard, *updated_node.body.body])
            return updated_node.with_changes(body=body)
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel:
        if m.matches(original_node, _ATTRIBUTE_SET) and self._function[-1:] == ["__init__"] and not self.changed:
            name = original_node.body[0].targets[0].target.attr.value
            if name in self._whole:
                told = statements(f"ops.mark_replicated(self.{name})", depth=2, comment=self.mark)
                return cst.FlattenSentinel([updated_node, *told])
        return super().leave_SimpleStatementLine(original_node, updated_node)


_ATTRIBUTE_SET = m.SimpleStatementLine(
    body=[m.Assign(targets=[m.AssignTarget(target=m.Attribute(value=m.Name("self")))])]
)
