"""The packing arguments of the language model never reach a tower."""

from __future__ import annotations

import ast

from patchgen.anatomy import Anatomy
from patchgen.anatomy.bodies import form_of, normal_form
from patchgen.anatomy.classes import ClassInfo, FunctionNode, calls, own_attribute, plain_assignments
from patchgen.anatomy.media import FEATURE_METHODS, takes_media
from patchgen.passes.base import AlreadyDone, Example, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import Editor
from patchgen.source import Block

FILTER = "accepts_precomputed_kwargs"
FILTER_FILE = "utils/generic.py"
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
FILTER_FORM = form_of("""
def accepts_precomputed_kwargs(modality):
    prefix = f"{modality}_"
    other_prefixes = tuple(f"{m}_" for m in _KNOWN_MODALITIES if m != modality)
    def decorator(func):
        existing_params = set(inspect.signature(func).parameters)
        @wraps(func)
        def wrapper(*args, **kwargs):
            translated = {}
            for k, v in kwargs.items():
                if k.startswith(other_prefixes):
                    continue
                if k.startswith(prefix) and k not in existing_params:
                    translated[k.removeprefix(prefix)] = v
                elif k in _FLASH_VARLEN_KWARGS and k not in existing_params:
                    continue
                else:
                    translated[k] = v
            return func(*args, **translated)
        return wrapper
    return decorator
""")


class AttentionKwargs(SitePass):
    """`cu_seq_lens_q` and its like describe the packed documents of the text; a tower would split its images by them."""

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
        callees = _media_callees(anatomy, info.name)
        return f"calls {', '.join(callees)} on its media" if callees else ""

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | AlreadyDone:
        callees = _media_callees(anatomy, site.block)
        unfiltered = [name for name in callees if not _is_filtered(anatomy, site.block, name)]
        if not unfiltered:
            return AlreadyDone(f"@{FILTER} drops them from {', '.join(callees)}")
        editor, withheld_from = Editor(block, self.mark), list[str]()
        for statement in editor.function("forward").body:
            for call in (call for call in calls(statement) if own_attribute(call.func) in unfiltered):
                if any(keyword.arg in PACKING for keyword in call.keywords):
                    expected = "a tower call without cu_seq_lens_q/k and max_length_q/k as explicit arguments"
                    raise Missed(expected, editor.code(call))
                for starred in (keyword.value for keyword in call.keywords if keyword.arg is None):
                    editor.mark(statement)
                    editor.instead(starred, f"ops.tower_kwargs({editor.code(starred)})")
                    withheld_from += [name for name in unfiltered if name == own_attribute(call.func)]
        if not withheld_from:
            return AlreadyDone(f"hands no keyword arguments to {', '.join(unfiltered)}")
        return Rewritten(editor.result, f"withheld from {', '.join(dict.fromkeys(withheld_from))}")


def _media_callees(anatomy: Anatomy, name: str) -> list[str]:
    """The methods and towers that a model's forward calls with its media."""
    return list(dict.fromkeys(callee for callees in takes_media(anatomy, name).values() for callee in callees))


def _is_filtered(anatomy: Anatomy, owner: str, method: str) -> bool:
    """Whether upstream's decorator on the method drops the packing arguments, by the decorator's source in the release.

    False for a decorator of another form: withholding them twice is harmless.
    """
    owner_and_method = anatomy.method(owner, method) if FEATURE_METHODS.match(method) else None
    if owner_and_method is None or not any(
        anatomy.names.is_upstream(decorator, FILTER) for decorator in owner_and_method[1].decorator_list
    ):
        return False
    release = anatomy.upstream.release
    tree = ast.parse((release and release.read(FILTER_FILE)) or "")
    dropped = plain_assignments(tree.body).get("_FLASH_VARLEN_KWARGS")
    forms = [normal_form(node).text for node in tree.body if isinstance(node, FunctionNode) and node.name == FILTER]
    return forms == [FILTER_FORM] and dropped is not None and ast.unparse(dropped) == str(PACKING)
