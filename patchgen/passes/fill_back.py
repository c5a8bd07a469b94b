"""Each rank scatters the modality features of its own placeholder tokens, although it has only a slice of the tokens."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import (
    ClassInfo,
    FunctionNode,
    arguments,
    base_name,
    calls,
    dotted,
    own_attribute,
    parameter_names,
)
from patchgen.anatomy.flow import Sources
from patchgen.anatomy.names import local_names
from patchgen.anatomy.positions import POSITIONS
from patchgen.anatomy.roles import AUDIO_INPUTS, PIXELS, TOKENS, own_methods
from patchgen.anatomy.towers import towers_held_whole
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import Editor, insert_first
from patchgen.source import Block

LOCAL_FEATURES = "ops.local_features"
SCATTER = ".masked_scatter"
MASKS = "transformers.masking_utils."


class FillBack(SitePass):
    """The features of a tower are the same on every rank; each rank selects those of its own tokens, so no embeddings are
    exchanged. Upstream's scatter is then correct on the slice, in training and in evaluation."""

    name = "fill_back"
    purpose = "Features are scattered into the embeddings of this rank's tokens."
    expects = "one hit per fusion model"
    role = Role.FUSION
    EXAMPLES = (
        Example("""features of a tower that is computed whole
        class ExampleModel(PreTrainedModel):
            def __init__(self, config):
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

            def get_video_mask(self, input_ids):
      -         began = (input_ids == self.config.video_start_id).cumsum(-1)
      +         # patchgen: fill_back
      +         began = ops.counted_from_the_start((input_ids == self.config.video_start_id).cumsum(-1))
                return (input_ids == self.config.video_token_id) & (began > 0)

            def forward(self, input_ids, pixel_values, inputs_embeds):
                image_features = self.vision_tower(pixel_values).pooler_output
                mask = self.get_placeholder_mask(input_ids, inputs_embeds, image_features)
      -         inputs_embeds = inputs_embeds.masked_scatter(mask, image_features)
      +         # patchgen: fill_back
      +         inputs_embeds = inputs_embeds.masked_scatter(mask, ops.local_features(image_features, mask))
                return self.language_model(inputs_embeds=inputs_embeds)
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        return super().why(info, anatomy) or _fills(anatomy, info)

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        info = anatomy.classes[site.block]
        language = language_parts(anatomy, info)
        replicated = towers_held_whole(anatomy, info, language)
        editor, embeddings = Editor(block, self.mark), _embeddings(anatomy, info, language)
        methods = {node.name: node for node in block.members if isinstance(node, FunctionNode)}
        scatters = [
            (name, call)
            for name in embeddings
            for call in calls(methods[name])
            if isinstance(call.func, ast.Attribute) and f".{call.func.attr}" == SCATTER
        ]
        odd = [c for name, c in scatters if len(c.args) != 2 or base_name(c.func) not in embeddings[name]]
        unread = not scatters and self.role not in info.roles
        if odd or unread or not language:
            other_merge = "features put into the embeddings by other means than masked_scatter"
            no_model = "a language model that takes no inputs_embeds"
            what = other_merge if unread else f"`{editor.code(odd[0])}`" if odd else no_model
            code = 'ops.require_whole_sequence("the inputs of this model")'
            return Rewritten(insert_first(block, "forward", code, self.mark), f"refuses slices: {what}")
        if not scatters:
            raise Missed("`embeddings.masked_scatter(mask, features)`", ast.unparse(info.methods["forward"])[-400:])
        held = f"; whole on every rank: {', '.join(replicated)}" if replicated else ""
        for _, call in scatters:
            editor.mark(call)
            editor.around(call.args[1], f"{LOCAL_FEATURES}(", f", {editor.code(call.args[0])})")
        for method in methods.values():
            _let_slices_pass(editor, anatomy, site.block, method)
        _mark_replicated(editor, methods.get("__init__"), replicated)
        for statement in ast.walk(methods["forward"]):  # default positions, computed from the whole sequence
            if isinstance(statement, ast.If) and ast.unparse(statement.test) == f"{POSITIONS} is None":
                editor.above(statement.body[0], f'ops.require_whole_sequence("{POSITIONS}")')
        return Rewritten(editor.result, f"{len(scatters)} kinds of features{held}")


def _mark_replicated(editor: Editor, init: FunctionNode | None, replicated: Sequence[str]) -> None:
    """Inserts a mark below each construction of a tower that every rank computes whole; raises Missed if one is not assigned in
    `__init__`."""
    marked: set[str | None] = set()
    for node in ast.walk(init) if init is not None else ():
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Constant):  # `self.tower = None`
            for name in filter(replicated.__contains__, map(own_attribute, node.targets)):
                editor.below(node, f"ops.mark_replicated(self.{name})")
                marked.add(name)
    if missing := set(replicated) - marked:
        raise Missed(f"`self.{min(missing)} = ...` in the __init__ of the model", init or "")


def language_parts(anatomy: Anatomy, info: ClassInfo) -> set[str]:
    """The attributes of a fusion model that are called with `inputs_embeds`; for a decoder also what it loops over."""
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
    """Method -> the names of the token embeddings in it, for the forward and the methods that compute them for it."""
    forward = info.methods["forward"]
    names = embedding_names(anatomy, forward, language)
    assigned = [n for n in ast.walk(forward) if isinstance(n, ast.Assign) and dotted(n.targets[0]) in names]
    made_by = {dotted(node.value.func) for node in assigned if isinstance(node.value, ast.Call)}
    found = {"forward": names}
    for name, method in own_methods(info, forward).items():
        if f"self.{name}" in made_by:
            returned = {base_name(node.value) for node in ast.walk(method) if isinstance(node, ast.Return)}
            found[name] = _scattered(method, returned)
    return found


def _fills(anatomy: Anatomy, info: ClassInfo) -> str:
    """Why a class is a fusion model: `inputs_embeds` that its forward passes on depend on its media; else empty."""
    forward = info.methods.get("forward")
    parameters = {*parameter_names(forward)} if forward is not None else set[str]()
    media = parameters & {*PIXELS, *AUDIO_INPUTS}
    if forward is None or not media or not parameters & TOKENS:
        return ""
    handed = {base_name(k.value) for call in calls(forward) for k in call.keywords if k.arg == "inputs_embeds"}
    filled = handed & embedding_names(anatomy, forward, language_parts(anatomy, info))
    filled &= Sources(anatomy, info.name).names(forward.body, media)
    return f"hands on {', '.join(sorted(filled))}, computed from its media, as inputs_embeds" if filled else ""


def embedding_names(anatomy: Anatomy, forward: FunctionNode, language: set[str]) -> set[str]:
    """The names that a forward passes as `inputs_embeds`, by keyword to its language model or to a mask function, or in a
    dict; and the names that features are scattered into before, or that these are assigned to."""
    nodes, local = list(ast.walk(forward)), local_names(forward)
    takers = tuple(f"self.{name}." for name in language)
    named: list[tuple[object, ast.expr]] = []
    for call in calls(forward):
        is_mask = (anatomy.names.resolve(call.func, local) or "").startswith(MASKS)
        if is_mask or f"{dotted(call.func)}.".startswith(takers):
            named += [(keyword.arg, keyword.value) for keyword in call.keywords]
    for node in nodes:
        if isinstance(node, ast.Dict):
            named += [(getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True)]
    names = {base_name(value) for name, value in named if name == "inputs_embeds"} & (local - {"self"})
    names = _scattered(forward, names)
    copies = [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Name) and n.value.id in names]
    return (names | {dotted(target) for node in copies for target in node.targets}) - {""}


def _scattered(method: FunctionNode, names: set[str]) -> set[str]:
    """The names of embeddings, and those that features are scattered into to get them: `filled = rows.masked_scatter(...)`."""
    for node in reversed(list(ast.walk(method))):
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) in names and dotted(node.value).endswith(SCATTER):
            names.add(base_name(node.value))
    return names - {"", "self"}


def _let_slices_pass(editor: Editor, anatomy: Anatomy, owner: str, method: FunctionNode) -> None:
    """Disables checks of the number of placeholders against features on a slice of the tokens, where they would fail; counts along
    the tokens (which span began and has not ended) become those of the full sequence."""
    tokens = Sources(anatomy, owner).names(method.body, TOKENS & {*parameter_names(method)})
    for node in ast.walk(method):
        match node:
            case ast.Call(ast.Attribute(counted, "cumsum"), [ast.UnaryOp()]) if method.name != "forward":
                if tokens & {name.id for name in ast.walk(counted) if isinstance(name, ast.Name)}:
                    editor.around(node, "ops.counted_from_the_start(", ")")
                    editor.mark(node)
            case ast.Call() if anatomy.names.is_upstream(node, "torch_compilable_check", local_names(method)):
                test = arguments(node, ["cond"]).get("cond")
                if test is not None and _compares_features(tokens, method, test):
                    editor.around(test, "ops.is_sliced() or ")
                    editor.mark(node)
            case ast.If(test, body) if any(isinstance(n, ast.Raise) for s in body for n in ast.walk(s)):
                if _compares_features(tokens, method, test):
                    editor.around(test, "not ops.is_sliced() and (", ")")
                    editor.mark(node)


def _compares_features(tokens: set[str], method: FunctionNode, test: ast.expr) -> bool:
    """Whether a check reads placeholders and features: names computed from the tokens, and names that are not."""
    compared = (node for node in ast.walk(test) if isinstance(node, ast.Compare))
    unset = {part for node in compared if isinstance(node.ops[0], ast.Is | ast.IsNot) for part in ast.walk(node)}
    read = {node.id for node in ast.walk(test) if isinstance(node, ast.Name) and node not in unset}
    read &= local_names(method) - {"self"}
    return bool(read & tokens) and bool(read - tokens)
