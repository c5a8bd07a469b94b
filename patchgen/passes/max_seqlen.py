"""The longest packed sequence is computed once per forward."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast

from patchgen.anatomy import Anatomy
from patchgen.anatomy.classes import ClassInfo, FunctionNode, calls, loaded, parameter_names
from patchgen.passes.base import AlreadyDone, Example, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import Editor
from patchgen.source import Block

HELPERS = ("get_max_seqlen", "get_vision_attention_seqlens")
BOUNDS = ("cu_seqlens", "cu_window_seqlens", "cu_seq_lens")


class MaxSeqlen(SitePass):
    """The maximum is read from the device, which stalls the host once per layer if layers compute it."""

    name = "max_seqlen"
    purpose = "The longest packed sequence is computed once per forward, or taken from the collator."
    expects = "one hit per attention that computes it in each layer, or upstream's own computation above the layers"
    EXAMPLES = (
        Example("""in every layer
        class ExampleVisionAttention(nn.Module):
            def forward(self, x, cu_seqlens, **kwargs):
      -         max_seqlen = (cu_seqlens[1:] - cu_seqlens[:-1]).max()
      +         # patchgen: max_seqlen
      +         max_seqlen = ops.max_seqlen(cu_seqlens, kwargs)
                return self.attend(x, cu_seqlens, max_seqlen)
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        if "forward" not in info.methods:
            return ""
        computes = "computes the longest sequence from its bounds" if _longest(info, anatomy) else ""
        asks = _helpers(info.methods["forward"], anatomy)
        return computes or ("asks for the longest packed sequence" if asks else "")

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | AlreadyDone:
        info = anatomy.classes[site.block]
        forward = info.methods["forward"]
        if not (longest := _longest(info, anatomy)):
            if _helpers(ast.Module([node for node in ast.walk(forward) if isinstance(node, ast.For)], []), anatomy):
                raise Missed("the longest sequence above the layers", forward)
            names = _helpers(forward, anatomy)
            return AlreadyDone(f"{' and '.join(names)} outside of loops, with the value that is handed in")
        kwargs = f", {forward.args.kwarg.arg}" if forward.args.kwarg else ""
        editor, replaced = Editor(block, self.mark), 0
        forms = {f"({name}[1:] - {name}[:-1]).max()": name for name in BOUNDS}
        for node in ast.walk(editor.function("forward")):
            match node:
                case ast.Assign([ast.Name()], value) if name := forms.get(ast.unparse(value).removesuffix(".item()")):
                    editor.mark(node)
                    editor.instead(value, f"ops.max_seqlen({name}{kwargs})")
                    replaced += 1
        if replaced != len(longest):
            raise Missed("max_seqlen = (cu_seqlens[1:] - cu_seqlens[:-1]).max()", longest[0])
        return Rewritten(editor.result, "once per forward")


def _helpers(code: FunctionNode | ast.Module, anatomy: Anatomy) -> list[str]:
    """The functions of transformers in `HELPERS` that code calls."""
    return [name for name in sorted(HELPERS) if any(anatomy.names.is_upstream(call, name) for call in calls(code))]


def _longest(info: ClassInfo, anatomy: Anatomy) -> list[str]:
    """The calls in a forward that take a maximum of something computed from its parameters in `BOUNDS`, as source."""
    forward = info.methods["forward"]
    bounds = set(BOUNDS) & set(parameter_names(forward))
    return [
        ast.unparse(call)
        for call in calls(forward)
        if anatomy.names.operation(call) in ("max", "amax") and bounds.intersection(loaded(call))
    ]
