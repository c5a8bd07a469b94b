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
            if not module.has(owner):
                continue
            builds = [build for build in _auto_builds(anatomy, owner) if not _is_elsewhere(anatomy, build)]
            if builds:
                what = ", ".join(f"{b.auto_class}.from_config({b.config})" for b in builds)
                sites.append(method_site(anatomy, owner, "__init__", f"builds by {what}"))
        return sites

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | Missed:
        builds = [build for build in _auto_builds(anatomy, site.block) if not _is_elsewhere(anatomy, build)]
        untold = [build for build in builds if anatomy.target_of(build) is None]
        if untold:
            return Missed(
                f"a config class of upstream's configuration file behind {untold[0].config}",
                f"self.{untold[0].attribute} = {untold[0].auto_class}.from_config({untold[0].config})",
            )
        wanted = {(build.auto_class, build.config): anatomy.target_of(build) for build in builds}
        rewriter = _UseLocalClass(wanted, self.mark)
        rewritten = transform(block, rewriter)
        if rewriter.hits < len(wanted):
            return Missed(f"{' and '.join(f'{a}.from_config({c})' for a, c in wanted)}", ast.unparse(block.node))
        return Rewritten(rewritten, f"builds {', '.join(wanted.values())}")

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        return [
            f"{owner}.{build.attribute or '?'}: {build.auto_class}.from_config({build.config}) builds "
            f"{_elsewhere(anatomy.target_of(build))}"
            for owner in anatomy.classes
            for build in (_auto_builds(anatomy, owner) if module.has(owner) else ())
            if _is_elsewhere(anatomy, build)
        ]


def _is_elsewhere(anatomy: Anatomy, build: Build) -> bool:
    """Whether the class is known to be of another file, or left to the checkpoint's config."""
    target = anatomy.target_of(build)
    return target is not None and target not in anatomy.classes


def _elsewhere(target: str | None) -> str:
    return "what the checkpoint's config says" if target == "AutoConfig" else f"{target}, which is not in this file"


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
