"""Heads that inherit a generic class of transformers get its code, with the base model of this file."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from patchgen.anatomy import Anatomy, Build
from patchgen.anatomy.classes import CONSTRUCTORS, ClassInfo, auto_class, calls, dotted, plain_assignments
from patchgen.anatomy.graph import references
from patchgen.anatomy.imported import library_module, library_names
from patchgen.passes.base import Example, Missed, Outcome, Rewritten, Site, SitePass
from patchgen.rewrite import Editor, format_code
from patchgen.source import Block, Module, bound_names

if TYPE_CHECKING:
    from patchgen.model_configs import ModelConfig

PREFIX = "base_model_prefix"
OF_SELF = f"(self, self.{PREFIX}"


class GenericHeads(SitePass):
    """The generic class builds its base model by an Auto class, which chooses upstream's class: no pass rewrites that."""

    name = "generic_heads"
    purpose = "A head that inherits transformers' generic class has its code, around the base model of this file."
    expects = "one hit per head asked for whose class of transformers builds its model by an Auto class"
    member = ""
    EXAMPLES = (
        Example("""a token classifier
        from transformers import PreTrainedModel
        from transformers.modeling_layers import GenericForTokenClassification
      + import torch
      + from torch import nn
      + ...
      + from transformers.utils import can_return_tuple
      + ...


        class ExampleModel(PreTrainedModel):
            config: ExampleConfig


      - class ExampleForTokenClassification(GenericForTokenClassification, PreTrainedModel):
      + class ExampleForTokenClassification(PreTrainedModel):
            config: ExampleConfig
      +     # patchgen: generic_heads
      +     base_model_prefix = "model"
      +
      +     def __init__(self, config):
      +         super().__init__(config)
      +         self.num_labels = config.num_labels
      +         self.model = ExampleModel._from_config(config)
      +         ...
      +     @can_return_tuple
      +     @auto_docstring
      +     def forward(
      +         ...
      +     ) -> TokenClassifierOutput:
      +         outputs: BaseModelOutputWithPast = self.model(
      +         ...
      +         )
        """),
    )

    def __init__(self, heads: Sequence[str] | None = None) -> None:
        self.heads = heads  # None: every class

    @classmethod
    def of_config(cls, config: ModelConfig) -> Self:
        return cls(config.kept)

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        is_asked = self.heads is None or info.name in self.heads
        generic = generic_base(anatomy, info.name) if is_asked else None
        return f"{generic} builds its model by an Auto class" if generic else ""

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        generic, node = generic_base(anatomy, site.block) or "", anatomy.classes[site.block].node
        package, _, name = generic.rpartition(".")
        origin = library_module(anatomy, package)
        written = origin.block(name)
        named, builds = plain_assignments((*written.members, *node.body)), _auto_builds(origin, generic)
        if len(builds) != 1 or PREFIX not in named:
            raise Missed(f"a generic class that builds its model once, with `{PREFIX}`", node)
        defined = anatomy.functions.keys() | anatomy.classes.keys()
        if clashes := sorted(filter(origin.has, references(written.node) & defined)):
            raise Missed(f"{clashes[0]} of {package}, for which this file has another", node)
        if above := next((member for member in node.body if "super()" in ast.unparse(member)), None):
            raise Missed(f"no member that calls {written.name}'s by super()", above)
        build = builds[0]
        auto, config = dotted(build.func).rpartition(".")[0], ast.unparse(build.args[0])
        target = anatomy.target_of(Build(site.block, None, None, auto_class=auto, config=config))
        if target not in anatomy.classes:
            raise Missed(f"{ast.unparse(build)} to build a class of this file", f"it builds {target}")
        attribute = ast.literal_eval(named[PREFIX])
        local = Editor(_local(written, f"self.{attribute}", ast.unparse(build), target))
        bound, editor = {name for member in node.body for name in bound_names(member)}, Editor(block)
        first, *others = (member for member in _members(local.block) if bound.isdisjoint(bound_names(member)))
        bases = getattr(block.node, "bases", ())
        editor.set_bases([editor.code(base) for base in bases if anatomy.names.resolve(base) != generic])
        own = [editor.code(member, whole=True) for member in _members(block)]
        inherited = [f"# {self.mark}\n{local.code(first)}", *(local.code(member, whole=True) for member in others)]
        editor.fill("\n".join([*own, *inherited]))
        return Rewritten(editor.result, f"{written.name}'s code around {target}")

    def apply(self, module: Module, anatomy: Anatomy) -> Outcome:
        outcome = super().apply(module, anatomy)
        heads = [hit.site for hit in outcome.hits]
        lines: dict[str, None] = {}
        for head in heads:
            origin = (generic_base(anatomy, head) or "").rpartition(".")[0]
            lines |= dict.fromkeys(_missing(references(outcome.module.block(head).node), module, anatomy, origin))
        if lines:
            blocks = list(outcome.module)
            place = max((i for i, block in enumerate(blocks) if block.is_import), default=-1) + 1
            blocks.insert(place, Block(text=format_code("\n".join(lines))))
            outcome = replace(outcome, module=outcome.module.with_blocks(blocks))
        return replace(outcome, added=tuple(heads))


def generic_base(anatomy: Anatomy, name: str) -> str | None:
    """The full name of the base of a class that is defined in transformers outside `models/` and builds by an Auto class."""
    for base in anatomy.classes[name].node.bases:
        package, _, base_name = (anatomy.names.resolve(base) or "").rpartition(".")
        if package.startswith("transformers.") and not package.startswith("transformers.models."):
            origin = library_module(anatomy, package)
            if origin.has(base_name) and _auto_builds(origin, f"{package}.{base_name}"):
                return f"{package}.{base_name}"
    return None


def _auto_builds(origin: Module, generic: str) -> list[ast.Call]:
    """The calls in a class of transformers, by its full name, that build by an Auto class; `origin` is its module."""
    package, _, name = generic.rpartition(".")
    names, code = library_names(origin, package), calls(origin.block(name).node)
    built = [(c, c.func.value) for c in code if isinstance(c.func, ast.Attribute) and c.func.attr in CONSTRUCTORS]
    return [call for call, owner in built if auto_class(names.resolve(owner))]


def _members(block: Block) -> list[ast.stmt]:
    """The statements of a class's body without `pass` and `...`."""
    return [member for member in block.members if ast.unparse(member) not in ("pass", "...")]


def _missing(used: frozenset[str], module: Module, anatomy: Anatomy, origin: str) -> Iterator[str]:
    """Statements that bind the `used` names that the file does not: absolute imports, and definitions copied from `origin`."""
    written = library_module(anatomy, origin)
    names = library_names(written, origin)
    known = {name for block in module for name in block.binds}
    for block in written:
        wanted = (used - known) & set(block.binds)
        if block.is_import:
            for name, meaning in ((name, names.imported().get(name, "")) for name in sorted(wanted)):
                package, _, imported = meaning.rpartition(".")
                alias = f" as {name}" if name != imported else ""
                yield f"from {package} import {imported}{alias}" if package else f"import {imported}{alias}"
        elif wanted:
            yield from _missing(references(block.node) - wanted, module, anatomy, origin)
            yield block.text.strip()


def _local(written: Block, attribute: str, build: str, target: str) -> Block:
    """The generic class with its base model as `attribute`, built as the class `target` of the file."""
    editor = Editor(written)
    for call in calls(written.node):
        if ast.unparse(call) == build:
            editor.instead(call.func, f"{target}._from_config")
        elif ast.unparse(call) == f"getattr{OF_SELF})":
            editor.instead(call, attribute)
    editor = Editor(editor.result)
    for statement in ast.walk(editor.block.node):
        match statement:
            case ast.Expr(ast.Call(_, [_, _, assigned])) if ast.unparse(statement).startswith(f"setattr{OF_SELF}, "):
                editor.drop(statement)  # with the comment above it, which is about the Auto class
                editor.below(statement, f"{attribute} = {editor.code(assigned)}", marked=False)
    return editor.result
