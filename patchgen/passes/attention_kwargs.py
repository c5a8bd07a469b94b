"""The packing arguments of the language model never reach a tower."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Iterator

from patchgen.anatomy import Anatomy
from patchgen.anatomy.classes import ClassInfo, calls, own_attribute, plain_assignments, walk
from patchgen.anatomy.media import FEATURES, takes_media
from patchgen.passes.base import Example, Rewritten, Site, SitePass, Upstream
from patchgen.rewrite import Editor
from patchgen.source import Block

FILTER = "accepts_precomputed_kwargs"
FILTER_FILE = "utils/generic.py"
PACKING = "cu_seq_lens_q"


class AttentionKwargs(SitePass):
    """`cu_seq_lens_q` and its like say where documents end in the text; a tower that got them would cut its images there."""

    name = "attention_kwargs"
    purpose = "cu_seq_lens_q/k and max_length_q/k are withheld from towers; the language model still gets them."
    expects = "one hit per model that hands keyword arguments to a tower, or upstream's own filter"
    EXAMPLES = (
        Example("""withheld in the call, so that what follows still has them
        class ExampleModel(ExamplePreTrainedModel):
            def get_image_features(self, pixel_values, **kwargs):
                return self.visual(pixel_values, **kwargs)

            def forward(self, input_ids, pixel_values=None, **kwargs):
                embeds = self.embed_tokens(input_ids)
      +         # patchgen: attention_kwargs
                if pixel_values is not None:
      -             embeds = self.merge(embeds, self.get_image_features(pixel_values, **kwargs))
      +             embeds = self.merge(embeds, self.get_image_features(pixel_values, **ops.tower_kwargs(kwargs)))
                return self.language_model(embeds, **kwargs)
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        callees = _callees(anatomy, info.name)
        return f"calls {', '.join(callees)} on its media" if callees else ""

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | Upstream:
        callees = _callees(anatomy, site.block)
        open_callees = [name for name in callees if not _filters(anatomy, site.block, name)]
        if not open_callees:
            return Upstream(f"@{FILTER} drops them from {', '.join(callees)}")
        editor, served = Editor(block, self.mark), list[str]()
        for statement in editor.function("forward").body:
            for call in (call for call in calls(statement) if own_attribute(call.func) in open_callees):
                for given in (k.value for k in call.keywords if k.arg is None and isinstance(k.value, ast.Name)):
                    editor.mark(statement)
                    editor.instead(given, f"ops.tower_kwargs({given.id})")
                    served += [name for name in open_callees if name == own_attribute(call.func)]
        if not served:
            return Upstream(f"hands no keyword arguments to {', '.join(open_callees)}")
        return Rewritten(editor.result, f"withheld from {', '.join(dict.fromkeys(served))}")


def _callees(anatomy: Anatomy, name: str) -> list[str]:
    """What a model's forward calls with its media: methods and towers."""
    return list(dict.fromkeys(callee for callees in takes_media(anatomy, name).values() for callee in callees))


def _filters(anatomy: Anatomy, owner: str, method: str) -> bool:
    """Whether upstream's decorator of the method drops the packing arguments, which its release decides."""
    owner_and_method = anatomy.method(owner, method) if FEATURES.match(method) else None
    if owner_and_method is None or not any(
        anatomy.names.is_upstream(decorator, FILTER) for decorator in owner_and_method[1].decorator_list
    ):
        return False
    release = anatomy.upstream.release
    tree = ast.parse((release and release.read(FILTER_FILE)) or "")
    lists = {name for name, value in plain_assignments(tree.body).items() if _lists_packing(value)}
    decorators = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == FILTER]
    return any(_drops(decorator, lists) for decorator in decorators)


def _lists_packing(value: ast.AST) -> bool:
    """Whether a packing argument is in a collection that the source says."""
    names = value.elts if isinstance(value, ast.Tuple | ast.List | ast.Set) else []
    return any(isinstance(name, ast.Constant) and name.value == PACKING for name in names)


def _drops(decorator: ast.FunctionDef, lists: set[str]) -> bool:
    """Whether all keyword arguments that a decorator hands on are filtered; `lists`: collections of packing arguments."""
    handed = [keyword.value for call in calls(decorator) for keyword in call.keywords if keyword.arg is None]
    filtered = {name for node in walk(decorator) for name in _filtered(node, lists)}
    return bool(handed) and all(isinstance(value, ast.Name) and value.id in filtered for value in handed)


def _filtered(node: ast.AST, lists: set[str]) -> Iterator[str]:
    """The dicts that a loop fills with all but the packing arguments, a comprehension makes of these, or these leave."""
    match node:
        case ast.For(ast.Tuple([ast.Name(key), _])):
            asking = [n for n in walk(node) if isinstance(n, ast.If) and _asks(n.test, key, lists)]
            dropped_at = [one.lineno for one in asking if isinstance(one.body[0], ast.Continue)]
            subscripts = [n for n in walk(node) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
            filled = [n for n in subscripts if ast.unparse(n.slice) == key]  # other keys are of other arguments
            if dropped_at and all(n.lineno > dropped_at[0] for n in filled):
                yield from (ast.unparse(n.value) for n in filled)
        case ast.Assign([ast.Name(made)], ast.DictComp(ast.Name(key), _, [ast.comprehension(_, _, tests)])):
            for test in tests:
                match test:
                    case ast.Compare(ast.Name(name), [ast.NotIn()], [among]) if name == key and _among(among, lists):
                        yield made
        case ast.For(ast.Name(key), among, [ast.Expr(ast.Call(ast.Attribute(ast.Name(left), "pop"), [popped, _]))]):
            if _among(among, lists) and ast.unparse(popped) == key:
                yield left


def _among(collection: ast.expr, lists: set[str]) -> bool:
    return _lists_packing(collection) or (isinstance(collection, ast.Name) and collection.id in lists)


def _asks(test: ast.expr, key: str, lists: set[str]) -> bool:
    """Whether a condition is that a key is a packing argument, and perhaps no parameter of the method."""
    asked, *others = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    match asked:
        case ast.Compare(ast.Name(name), [ast.In()], [among]) if name == key and _among(among, lists):
            return all(ast.unparse(other).startswith(f"{key} not in ") for other in others)
        case _:
            return False
