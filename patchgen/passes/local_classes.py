"""`AutoModel.from_config(...)` becomes the generated class that it would build, of this file or of another."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.anatomy import Anatomy, Build
from patchgen.anatomy.classes import CONSTRUCTORS, ClassInfo, auto_class, calls
from patchgen.anatomy.imported import auto_classes_in, definition, imported_code
from patchgen.anatomy.names import Names
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass, site_of
from patchgen.rewrite import Editor
from patchgen.source import Block, Module, bound_names


class LocalClasses(SitePass):
    """Without this pass the generated file builds upstream's towers and language models: the loss matches, but no pass has
    rewritten them. A language model of another file depends on the config and is chosen when the model is built."""

    name = "local_classes"
    purpose = "Auto classes become the generated classes that they would build."
    expects = "every Auto.from_config of a class in this file, and of a language model of another"
    EXAMPLES = (
        Example("""a language model found through the one class that is written for its config
        class ExampleTextModel(ExamplePreTrainedModel):
            def __init__(self, config: ExampleTextConfig):
                super().__init__(config)


        class ExampleModel(ExamplePreTrainedModel):
            def __init__(self, config: ExampleConfig):
      -         self.language_model = AutoModel.from_config(config.text_config)
      +         # patchgen: local_classes
      +         self.language_model = ExampleTextModel._from_config(config.text_config)
        """),
        Example("""a language model that the checkpoint's config chooses
        class ExampleModel(PreTrainedModel):
            def __init__(self, config: ExampleConfig):
      -         self.language_model = AutoModel.from_config(config.any_config)
      +         # patchgen: local_classes
      +         self.language_model = ops.build_part(AutoModel, config.any_config, beside=__file__)

            def forward(self, inputs_embeds):
                return self.language_model(inputs_embeds=inputs_embeds)
        """),
    )

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        built = [(info, builds) for info in anatomy.still_in(module) if (builds := _local_builds(anatomy, info.name))]
        known = [
            site_of(info, f"builds by {', '.join(b.code for b in builds)}", builds[0].method) for info, builds in built
        ]
        others = [(info, code) for info in anatomy.still_in(module) for code in _foreign(anatomy, info)[:1]]
        return known + [site_of(info, f"builds by {code}", "__init__") for info, code in others]

    def evidence(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        """Uses of Auto classes other than to build from a config, to load a whole checkpoint, or to register a class."""
        parts = [(part, auto) for part in imported_code(anatomy, module) for auto in sorted(auto_classes_in(part))]
        signs = [f"{part.use}, which uses {auto}" for part, auto in parts]
        if "Auto" not in module.text:
            return signs
        names = Names(module.statements, anatomy.upstream.base_of)
        for block in module:
            known = {"from_pretrained", "register", *(CONSTRUCTORS if isinstance(block.node, ast.ClassDef) else ())}
            called = [call.func for call in calls(*block.statements) if isinstance(call.func, ast.Attribute)]
            handled = {function.value for function in called if function.attr in known}
            read = [node for node in block.nodes if isinstance(node, ast.Name | ast.Attribute) and node not in handled]
            signs += [f"{block.where} uses {ast.unparse(node)}" for node in read if auto_class(names.resolve(node))]
        return signs

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        for code in _foreign(anatomy, anatomy.classes[site.block]):
            raise Missed("transformers' own auto class, or a class of this file", code)
        wanted: dict[str, str] = {}
        for build in _local_builds(anatomy, site.block):
            target = anatomy.target_of(build)
            if target is None:
                config = f"the config {build.config}" if build.config else "a config that is known"
                raise Missed(f"one class of this file that is written for {config}", build.code)
            wanted[build.code] = target if target in anatomy.classes else PART
        editor = Editor(block, self.mark)
        call_codes = [(call, code) for call in calls(block.node) if (code := ast.unparse(call)) in wanted]
        if missing := set(wanted) - {code for _, code in call_codes}:
            raise Missed(" and ".join(sorted(missing)), block.node)
        for call, code in call_codes:
            editor.mark(call)
            if wanted[code] == PART and isinstance(call.func, ast.Attribute):
                editor.instead(call.func, "ops.build_part")
                editor.add_arguments(call, editor.code(call.func.value), "beside=__file__")
            else:
                editor.instead(call.func, f"{wanted[code]}._from_config")
        return Rewritten(editor.result, f"builds {', '.join(wanted.values())}")

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        return [
            f"{info.name}.{build.attribute or build.method}: {build.auto_class}.from_config({build.config}) builds "
            f"{_elsewhere(anatomy.target_of(build) or '')}"
            for info in anatomy.still_in(module)
            for build in info.auto_builds
            if _is_elsewhere(anatomy, build)
        ]


PART = "the part that the config names"


def _local_builds(anatomy: Anatomy, owner: str) -> list[Build]:
    """The constructions by Auto classes that the pass must rewrite: of classes of this file, of language models of other
    files, and those whose class is unknown (an error)."""
    return [build for build in anatomy.classes[owner].auto_builds if not _is_elsewhere(anatomy, build)]


def _is_elsewhere(anatomy: Anatomy, build: Build) -> bool:
    """Whether the class is of another file, or chosen by the checkpoint's config, and is no language model."""
    target = anatomy.target_of(build)
    return target is not None and target not in anatomy.classes and not anatomy.is_part(build)


def _foreign(anatomy: Anatomy, info: ClassInfo) -> list[str]:
    """Constructions from a config by something that is neither an Auto class nor a known class (`_is_class`)."""
    called = [call for method in info.methods.values() for call in calls(method)]
    owners = [(c, c.func.value) for c in called if isinstance(c.func, ast.Attribute) and c.func.attr in CONSTRUCTORS]
    built = [(call, anatomy.names.resolve(owner) or "") for call, owner in owners]
    return [ast.unparse(call) for call, meaning in built if not (auto_class(meaning) or _is_class(anatomy, meaning))]


def _is_class(anatomy: Anatomy, meaning: str) -> bool:
    """Whether a full name is that of a model class, of this file or another readable one, that does not override the
    constructors from a config; or that of something of transformers outside `models/`."""
    part = definition(anatomy, meaning)
    if part is None:
        return meaning.startswith("transformers.") and not meaning.startswith("transformers.models.")
    other = part.anatomy
    if other is None or part.name not in other.classes or not other.is_model(part.name):
        return False
    members = {name for info in other.lineage(part.name) for member in info.node.body for name in bound_names(member)}
    return members.isdisjoint(CONSTRUCTORS)


def _elsewhere(target: str) -> str:
    if target.endswith("Config") and target != "AutoConfig":
        return f"the model of {target}, which is not in this file"
    return "what the checkpoint's config says" if target == "AutoConfig" else f"{target}, which is not in this file"
