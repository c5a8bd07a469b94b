"""`AutoModel.from_config(...)` becomes the class of this file that it would build."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from patchgen.anatomy import Anatomy, Build
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass, method_site
from patchgen.rewrite import code_of, transform
from patchgen.source import Block, Module


class LocalClasses(SitePass):
    """Without this pass the generated file instantiates upstream's towers: no pass acts in them, the loss still matches."""

    name = "local_classes"
    purpose = "Auto classes become the classes of this file that they would build."
    expects = "every Auto.from_config whose class is in this file"
    EXAMPLES = (
        Example(
            "a language model found through the one class that is written for its config",
            before=(
                "class ExampleTextModel(ExamplePreTrainedModel):\n"
                "    def __init__(self, config: ExampleTextConfig):\n"
                "        super().__init__(config)\n"
                "\n\n"
                "class ExampleModel(ExamplePreTrainedModel):\n"
                "    def __init__(self, config: ExampleConfig):\n"
                "        super().__init__(config)\n"
                "        self.language_model = AutoModel.from_config(config.text_config)\n"
            ),
            after=(
                "class ExampleTextModel(ExamplePreTrainedModel):\n"
                "    def __init__(self, config: ExampleTextConfig):\n"
                "        super().__init__(config)\n"
                "\n\n"
                "class ExampleModel(ExamplePreTrainedModel):\n"
                "    def __init__(self, config: ExampleConfig):\n"
                "        super().__init__(config)\n"
                "        # patchgen: local_classes\n"
                "        self.language_model = ExampleTextModel._from_config(config.text_config)\n"
            ),
        ),
    )

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        sites = []
        for owner in anatomy.classes:
            if module.has(owner):
                for build in _auto_builds(anatomy, owner):
                    target = anatomy.target_of(build)
                    if target in anatomy.classes:
                        site = method_site(anatomy, owner, "__init__", f"{build.auto_class} builds {target}")
                        if site not in sites:
                            sites.append(site)
        return sites

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | Missed:
        wanted = {}
        for build in _auto_builds(anatomy, site.block):
            target = anatomy.target_of(build)
            if target in anatomy.classes:
                wanted[build.auto_class, build.config] = target
        rewriter = _UseLocalClass(wanted, self.mark)
        rewritten = transform(block, rewriter)
        if rewriter.hits < len(wanted):
            return Missed(f"{' and '.join(f'{a}.from_config({c})' for a, c in wanted)}", ast.unparse(block.node))
        return Rewritten(rewritten, f"builds {', '.join(wanted.values())}")

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        notes = []
        for owner in anatomy.classes:
            for build in _auto_builds(anatomy, owner) if module.has(owner) else ():
                target = anatomy.target_of(build)
                if target not in anatomy.classes:
                    notes.append(
                        f"{owner}.{build.attribute or '?'}: {build.auto_class}.from_config({build.config}) builds "
                        f"{target or 'a class that the source does not name'}, which is not in this file"
                    )
        return notes


def _auto_builds(anatomy: Anatomy, owner: str) -> list[Build]:
    return [build for build in anatomy.classes[owner].builds if build.auto_class is not None]


class _UseLocalClass(cst.CSTTransformer):
    """Replaces `Auto.from_config(config...)` in statements, each marked with a comment."""

    def __init__(self, wanted: dict[tuple[str, str], str], mark: str) -> None:
        self._wanted, self._mark = wanted, mark
        self.hits = 0
        self._changed = False

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        pattern = m.Call(func=m.Attribute(value=m.Name(), attr=m.Name("from_config") | m.Name("_from_config")))
        if not m.matches(original_node, pattern) or not original_node.args:
            return updated_node
        auto_class = original_node.func.value.value
        config = code_of(original_node.args[0].value)
        target = self._wanted.get((auto_class, config))
        if target is None:
            return updated_node
        self.hits += 1
        self._changed = True
        func = cst.Attribute(value=cst.Name(target), attr=cst.Name("_from_config"))
        return updated_node.with_changes(func=func)

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        self._changed = False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        if not self._changed:
            return updated_node
        self._changed = False
        comment = cst.EmptyLine(comment=cst.Comment(f"# {self._mark}"))
        return updated_node.with_changes(leading_lines=[*updated_node.leading_lines, comment])
