"""Sizes that the host needs are taken from the collator if it passes them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Sequence

import libcst as cst

from patchgen.anatomy import Anatomy
from patchgen.anatomy.classes import ClassInfo, FunctionNode, all_arguments, calls, dotted, mentions
from patchgen.anatomy.media import handed_sizes
from patchgen.anatomy.names import local_names
from patchgen.anatomy.sizes import listed_sizes, modality_of, of_another_formula
from patchgen.passes.attention_kwargs import FILTER
from patchgen.passes.base import AlreadyDone, Example, LeftAlone, Rewritten, Site, SitePass, site_of
from patchgen.rewrite import Editor
from patchgen.source import Block, Module


class HostValues(SitePass):
    """The number of features of each image follows from its grid, which the collator has on the host."""

    name = "host_values"
    purpose = (
        "Sizes that get_<modality>_features reads back from the device are taken from the collator if it has them."
    )
    expects = "one hit per get_<modality>_features with a `.tolist()`, or none where upstream has no such line"
    EXAMPLES = (
        Example("""handed in as `image_split_sizes`, else computed as upstream does
        class ExampleModel(ExamplePreTrainedModel):
            @accepts_precomputed_kwargs(modality="image")
      -     def get_image_features(self, pixel_values, image_grid_thw, **kwargs):
      +     def get_image_features(self, pixel_values, image_grid_thw, split_sizes: list[int] | None = None, **kwargs):
                features = self.visual(pixel_values, image_grid_thw, **kwargs)
      -         split_sizes = image_grid_thw.prod(-1).tolist()
      +         # patchgen: host_values
      +         split_sizes = split_sizes or image_grid_thw.prod(-1).tolist()
                return torch.split(features, split_sizes)
        """),
    )

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        return [
            site_of(info, "encodes media, and reads sizes off the device", name)
            for info in anatomy.still_in(module)
            for name, method in info.methods.items()
            if modality_of(name) and (listed_sizes(method) or handed_sizes(method))
        ]

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | AlreadyDone:
        name = site.name.rpartition(".")[2]
        method = anatomy.classes[site.block].methods[name]
        listed = [variable for variable, _, _ in listed_sizes(method)]
        if not listed:
            return AlreadyDone("takes the sizes as arguments")
        if method.args.kwarg is None:
            return AlreadyDone("takes no keyword arguments: nothing can be handed in")
        modality, prefix = modality_of(name), _prefix(anatomy, method)
        if prefix not in (None, modality):
            why = f"upstream's decorator hands it what belongs to {prefix}; it reads sizes itself"
            raise LeftAlone(f"{site.name}: {why}")
        if other := of_another_formula(anatomy, site.block, method):
            raise LeftAlone(f"{site.name}: {other}")
        if user := _of_several(anatomy, name):
            raise LeftAlone(f"{site.name}: {user} calls it for several media; it reads the sizes of each itself")
        keys = {variable: variable if prefix else f"{modality}_{variable}" for variable in listed}
        if occupied := ", ".join(key for variable, key in keys.items() if not _is_free(method, variable, key)):
            raise LeftAlone(f"{site.name}: {occupied} has another meaning in it; it reads sizes itself")

        editor = Editor(block, self.mark)
        function = editor.function(name)
        for key in keys.values():
            editor.add_parameter(function, f"{key}: list[int] | None = None")
        _document(editor, anatomy, function, keys.values())
        for variable, statement, _ in listed_sizes(function):
            editor.around(statement.value, f"{keys[variable]} or ")
            editor.mark(statement)
        # A caller of another modality renames its sizes to those of this method.
        for other, kwargs in _callers(anatomy, anatomy.classes[site.block], name).items():
            theirs = modality_of(other)
            pairs = [f'{kwargs}["{modality}_{one}"] = {kwargs}.pop("{theirs}_{one}", None)' for one in listed]
            editor.at_start(editor.function(other), "\n".join(pairs))
        handed = ", ".join(f"{modality}_{variable}" for variable in keys)
        return Rewritten(editor.result, f"taken from {handed} where handed in")


def _document(editor: Editor, anatomy: Anatomy, function: FunctionNode, names: Iterable[str]) -> None:
    """Adds parameters to the docstring: upstream's `auto_docstring` warns of those without a description."""
    if not any(anatomy.names.is_upstream(decorator, "auto_docstring") for decorator in function.decorator_list):
        return
    lines = [f"{name} (`list[int]`, *optional*): Features of each item, if known on the host." for name in names]
    first = function.body[0]
    docstring = ast.get_docstring(function, clean=False)
    if docstring is None or not isinstance(first, ast.Expr):
        text = "\n".join(lines)
        editor.above(first, f'"""{text}"""', at_top=True, marked=False)
        return
    text, indent = editor.code(first.value), f"\n{' ' * first.col_offset}"
    literal = cst.parse_expression(f"({text})")
    if not (isinstance(literal, cst.SimpleString) and len(literal.quote) == 3):  # not triple-quoted: make it so
        text = docstring.replace("\\", r"\\").replace('"', r"\"")
        text = f'"""{text}"""'
    editor.instead(first.value, "".join([text[:-3].rstrip(), *(indent + line for line in lines), indent, text[-3:]]))


def _callers(anatomy: Anatomy, info: ClassInfo, name: str) -> dict[str, str]:
    """Method of another modality that calls `name` with its `**kwargs`, and that upstream's prefix decorator does not wrap ->
    the name of these."""
    handing = {other: method for other, method in info.methods.items() if _times_handed_on(method, name)}
    others = {other: method for other, method in handing.items() if other != name and modality_of(other)}
    return {other: m.args.kwarg.arg for other, m in others.items() if m.args.kwarg and not _prefix(anatomy, m)}


def _times_handed_on(method: FunctionNode, name: str) -> int:
    """How often a method calls the method `name` with its own `**kwargs`."""
    called = [call for call in calls(method) if getattr(call.func, "attr", "") == name]
    starred = [dotted(keyword.value) for call in called for keyword in call.keywords if keyword.arg is None]
    return starred.count(method.args.kwarg.arg) if method.args.kwarg else 0


def _prefix(anatomy: Anatomy, method: FunctionNode) -> str | None:
    """The modality whose prefix upstream's decorator removes from the keywords of a method; None without the decorator."""
    for call in (d for d in method.decorator_list if isinstance(d, ast.Call)):
        if not anatomy.names.is_upstream(call, FILTER):
            continue
        given = all_arguments(call)
        return next((text for one in given if isinstance(text := getattr(one, "value", None), str)), "")
    return None


def _is_free(method: FunctionNode, variable: str, key: str) -> bool:
    """Whether a parameter `key` can be added: one statement computes `variable`, and nothing else uses the name `key`."""
    other_code = copy.copy(method)
    statements = [statement for name, statement, _ in listed_sizes(method) if name == variable]
    other_code.body = [node for node in method.body if node not in statements]
    is_read = key != variable and mentions(method, key)
    return len(statements) == 1 and not is_read and key not in local_names(other_code)


def _of_several(anatomy: Anatomy, name: str) -> str:
    """A method that calls `name` more than once with its `**kwargs`, which have the sizes of one medium only; or ""."""
    methods = [(info.name, method) for info in anatomy.classes.values() for method in info.methods.values()]
    return next((f"{owner}.{method.name}" for owner, method in methods if _times_handed_on(method, name) > 1), "")
